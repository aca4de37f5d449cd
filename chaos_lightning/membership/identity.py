"""Compares the scheduler's store with what members know: whether it is the store of their job, and up to date (7, 14a).

Theory of operation. A chain has an id, drawn with its first record; each copy of a store keeps it, and an empty store
draws another. Members tell the id of the chain that they are of, the view that they stand in, the highest number that
they were told of or have promised, and the highest term; all of these were in the job's store before any member heard
of them. So a scheduler tells three cases apart, whenever a member says hello, enters a view or sends a heartbeat:

- *The same chain, and nothing that the store lacks.* The member is judged by the chain.
- *The same chain, and a number or a term that the store lacks*: the store is an older copy, or another scheduler has
  taken the chain. The scheduler is STALE from then on: it decides nothing, puts out and releases nobody, sends all
  members away, which train on, and says what it lacks and which member told it. With the operator's word
  (`Chain.rebuild`) it goes on to REBUILDING instead (rebuilding.py).
- *Another chain*: its numbers mean nothing here. A member that stands in a view of that chain is sent away with both
  ids, and trains on. No job is founded while such members knock. Where the store holds no view at all, its chain is
  lost, which has the same consequences.

A scheduler that has just started knows nobody. For `Chain.hears_s`, the time that members may take to find it, it
decides nothing and holds all hellos back, unless its chain is empty: then it welcomes newcomers meanwhile. A newcomer
that another scheduler has welcomed may be named by a view that a header is about to carry; it is welcomed anew, under
another id, only where no member knocks.
"""

from __future__ import annotations

from dataclasses import replace

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.effects import Chain, Close, Send
from chaos_lightning.membership.peers import Peer, Process, Standing, listed, process_of, same_process, short
from chaos_lightning.membership.rebuilding import Rebuild
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.roster import Roster
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Entered,
    Heartbeat,
    Hello,
    Member,
    Refused,
    Released,
    ViewId,
)

KNOCKS_S = 3.0
"""Seconds within which a member that is sent away comes back, as long as it lives."""


class Identity:
    """Check of the store against what members report. Arguments are scheduler components, and the store's content at
    the start.
    """

    def __init__(
        self,
        desk: Desk,
        book: Book,
        roster: Roster,
        recovery: Recovery,
        rebuild: Rebuild,
        detector: Detector,
        chain: Chain,
    ) -> None:
        self._desk = desk
        self._settings = desk.settings
        self._book = book
        self._roster = roster
        self._recovery = recovery
        self._rebuild = rebuild
        self._detector = detector
        self._hears_s = chain.hears_s
        self._hears_until: float | None = None
        self._knocked: dict[str, tuple[float, ViewId, str]] = {}
        """Members of other chains, each with the time (s) of its last word, the view that it stands in, and its
        chain.
        """
        self._greeted: set[Process] = set()
        """Processes that have said hello to this very scheduler: host, pid and start."""
        self._own: dict[str, Member] = {}
        """Newcomers that this very scheduler has welcomed: no view of a lost chain names them."""
        self._patient_until = float("-inf")
        """Time (s) until which members may knock, as a newcomer knows a scheduler that the store does not."""
        self._held: list[tuple[int, Hello]] = []
        """Hellos that wait until all who may know more were heard."""
        self._stale = ""
        """Facts that the store lacks and what can be done, in words; "" if it lacks nothing."""

    def begin(self) -> None:
        """Starts the period in which a newly started scheduler only listens."""
        self._hears_until = self._desk.now + self._hears_s

    def shift(self, gap: float) -> None:
        """Prolongs the listening period by the `gap` seconds for which the scheduler was frozen."""
        self._hears_until = self._hears_until + gap if self._hears_until is not None else None

    @property
    def hearing(self) -> bool:
        """Whether the scheduler started so recently that it only listens: members that know more may be about to
        connect.
        """
        return self._desk.clock is not None and self._hears_until is not None and self._desk.clock < self._hears_until

    def hearing_words(self) -> str:
        if not self.hearing:
            return ""
        assert self._hears_until is not None
        left_s = self._hears_until - self._desk.now
        return f"it has just started, and listens for {left_s:.1f} s more whether members know more than its store"

    def _is_another(self, chain: str) -> bool:
        """Returns whether this is the id of another chain. False for "", which members send whose version has no chain
        ids.
        """
        return bool(chain and self._book.chain_id and chain != self._book.chain_id)

    def _lacking(self, message: Hello | Entered | Heartbeat) -> str:
        """Returns in words what a member of this chain knows but the store lacks; "" if nothing."""
        known = None if isinstance(message, Entered) else message.known
        for number in (message.view, known):
            if self._book.lacks(number):
                return f"view {number}"
        if not isinstance(message, Hello):
            return ""
        # Each term is taken once: who knows this one before it was greeted here has it from another store.
        unheard = process_of(message) not in self._greeted
        if message.term > self._book.term or (message.term == self._book.term and self._book.chain_id and unheard):
            return f"a scheduler with term {message.term}"
        return ""

    def at_odds(self, peer: Peer, message: Entered | Heartbeat) -> bool:
        """Returns whether a member's message contradicts the store, so that it must be ignored; refuses or releases
        such a member.
        """
        if message.view == NO_VIEW and (message.chain in self._book.ended or self._is_another(message.chain)):
            return False  # a newcomer that has not read its welcome yet
        if message.chain in self._book.ended and peer.conn is not None:
            self._turn_home(peer.conn, message.chain)
            self._roster.drop(peer)
            return True
        if self._rebuild.rebuilds or not self._book.views:
            return False
        if self._is_another(message.chain):  # it was let in by a view of the chain that it knew before
            assert peer.conn is not None
            self._knock(peer.id, message.view, message.chain)
            self._desk.out.append(Send(peer.conn, Refused(self.lost_words(), retry=True)))
            self._desk.out.append(Close(peer.conn, f"{peer.id} is of chain {short(message.chain)}"))
            self._roster.drop(peer)
            return True
        lacking = self._lacking(message)
        if lacking:
            self._go_stale(peer.id, lacking)
        return bool(lacking)

    def judge(self, conn: int, hello: Hello) -> Hello | None:
        """Returns the hello if it is to be admitted as usual; None if it was answered here, or has to wait."""
        if hello.job == self._settings.job:
            if hello.chain in self._book.ended and hello.view != NO_VIEW:
                self._turn_home(conn, hello.chain)
                return None
            if self._desk.phase is SchedulerPhase.STALE:
                self._desk.out.append(Send(conn, Refused(self._stale, retry=True)))
                return None
            if self._is_another(hello.chain) and self._rebuild.holds_views:
                return self._of_another(conn, hello)
            if self._book.views and not self._rebuild.rebuilds:
                lacking = self._lacking(hello)
                if lacking:
                    self._go_stale(hello.resume or hello.name, lacking)
                    return None
                if self.hearing:
                    self._held.append((conn, hello))
                    return None
        return self._heard(conn, hello)

    def _turn_home(self, conn: int, chain: str) -> None:
        """Releases a member that had no control stream when its job ended."""
        words = f"the job that it was in is ended, by an operator or as it could not go on, chain {short(chain)}"
        self._desk.out.append(Send(conn, Released(words, asked=True)))
        self._desk.out.append(Close(conn, words))

    def _heard(self, conn: int, hello: Hello) -> Hello | None:
        """Handles a hello that shows no other chain than the store's; refuses a member whose view the store lacks."""
        process = process_of(hello)
        same = bool(hello.chain) and hello.chain == self._book.chain_id
        if not self._book.views and not same and hello.term > 0 and process not in self._greeted:
            self._patient_until = self._desk.now + KNOCKS_S
        self._greeted.add(process)
        peer = self._roster.peers.get(hello.resume)
        outside = peer is None or peer.standing is Standing.REPORTER
        if hello.resume and hello.job == self._settings.job and outside and self._is_foreign(hello):
            self._on_foreign(conn, hello)
            return None
        return hello

    def let_go(self) -> list[tuple[int, Hello]]:
        """Returns the hellos that were held back during the listening period, in their order, and forgets them."""
        held, self._held = self._held, []
        return held

    def _is_foreign(self, hello: Hello) -> bool:
        """Returns whether this process is in a view that the store lacks, or may be named by one that a header will
        carry.
        """
        if hello.view == NO_VIEW:
            lost = self._rebuild.rebuilds or (not self._book.views and bool(self.why_not_found()))
            return lost and not self._welcomed_here(hello)
        if hello.view in self._book.past.views:
            return False
        return self._rebuild.rebuilds or not self._book.views

    def _welcomed_here(self, hello: Hello) -> bool:
        own = self._own.get(hello.resume)
        return own is not None and same_process(own, hello)

    def _on_foreign(self, conn: int, hello: Hello) -> None:
        if self._rebuild.rebuilds:
            self._rebuild.take_in(conn, hello)
        elif hello.view == NO_VIEW:
            self._desk.out.append(Send(conn, Refused(self.why_not_found(), retry=True)))
        else:
            self.knock(hello)
            self._desk.out.append(Send(conn, Refused(self.lost_words(), retry=True)))

    def _of_another(self, conn: int, hello: Hello) -> Hello | None:
        """Handles the hello of a process whose chain is not the store's."""
        if hello.view != NO_VIEW:
            self.knock(hello)
            self._desk.out.append(Send(conn, Refused(self.lost_words(), retry=True)))
            return None
        process = process_of(hello)
        if process not in self._greeted:
            self._patient_until = self._desk.now + KNOCKS_S
        self._greeted.add(process)
        why_not = self.why_not_found()
        if why_not:
            self._desk.out.append(Send(conn, Refused(why_not, retry=True)))
        elif self.hearing:
            self._held.append((conn, hello))
        else:  # it holds nothing, and nobody of its chain is about
            return replace(hello, resume="")
        return None

    def welcomed(self, conn: int) -> None:
        """Remembers the newcomer, if any, that was welcomed on this stream."""
        if welcomed := self._roster.conns.get(conn):
            self._own[welcomed] = self._roster.peers[welcomed].member

    def knock(self, hello: Hello) -> None:
        """Notes the hello of a member whose view this store does not know."""
        self._knock(hello.resume, hello.view, hello.chain)

    def _knock(self, who: str, view: ViewId, chain: str) -> None:
        before, *_ = self._knocked.get(who, (float("-inf"),))
        self._knocked[who] = (self._desk.now, view, chain)
        if self._desk.now - before > KNOCKS_S:
            name = "chain_foreign" if self._rebuild.holds_views else "chain_lost"
            self._desk.note(
                name, member=who, view=str(view), chain=chain, here=self._book.chain_id, text=self.lost_words()
            )

    def lost_words(self) -> str:
        """Returns in words what is wrong if the store is stale or members of another chain are connecting; ""
        otherwise.
        """
        if self._stale:
            return self._stale
        here = {m: (v, c) for m, (at, v, c) in self._knocked.items() if self._desk.now - at <= KNOCKS_S}
        if not here:
            return ""
        who = listed(f"{m} in view {v}{f' of chain {short(c)}' if c else ''}" for m, (v, c) in sorted(here.items()))
        if not self._rebuild.holds_views:
            return (
                f"the chain of job {self._settings.job} is lost: {who}, which this scheduler's store does not know; it "
                "is empty. Training goes on without a scheduler. Start one on the store that holds the chain; if that "
                "is gone for good, start one on an empty store by `chaos-lightning scheduler --rebuild`"
            )
        return (
            f"this scheduler's store holds another chain of job {self._settings.job}, {short(self._book.chain_id)}, "
            f"and these are here: {who}. They train on without a scheduler. Start one on the store that holds their "
            "chain; if that is gone for good, start one on an empty store by `chaos-lightning scheduler --rebuild`"
        )

    def why_not_found(self) -> str:
        """Returns in words why no job may be founded now; "" if one may be."""
        lost = self.lost_words()
        if lost:
            return f"no job is founded: {lost}"
        if self._desk.now < self._patient_until:
            return "the job waits a moment for members: newcomers know a scheduler of it that this store does not"
        return ""

    def _go_stale(self, who: str, lacking: str) -> None:
        """Makes this scheduler decide nothing any more: its store is out of date, as the job went on without it."""
        ends = self._book.views[-1].id
        self._stale = (
            f"this scheduler's store is an older copy, or another scheduler leads: {who} knows of {lacking} of chain "
            f"{short(self._book.chain_id)}, and what is here ends with view {ends} (a backup, a restored snapshot?). "
            "Nothing is decided by it; training goes on without a scheduler. Start one on the store that holds the "
            "rest; if that is gone for good, start one on this store by `chaos-lightning scheduler --rebuild`: it goes "
            "on from what more than half of the members of their last view report, and whoever knows of a later one "
            f"and does not report is put out. If what {who} knows is to be forgotten, end it, and start this scheduler "
            "again"
        )
        self._desk.note(
            "chain_stale", member=who, lacks=lacking, ends=str(ends), chain=self._book.chain_id, text=self._stale
        )
        self._book.void_write(self._rebuild.stored_in_vain)
        self._held.clear()
        self._book.decision = self._book.announced = None
        self._recovery.again, self._desk.waits, self._recovery.returning, self._recovery.expected = (
            "",
            "",
            False,
            frozenset(),
        )
        self._roster.forget_all()
        if self._rebuild.begin_to_rebuild():
            self._stale = ""
            for conn in self._roster.conns:
                self._desk.out.append(Close(conn, "this scheduler rebuilds its chain; connect again"))
        else:
            self._desk.phase = SchedulerPhase.STALE
            for conn in self._roster.conns:
                self._desk.out.append(Send(conn, Refused(self._stale, retry=True)))
        self._roster.conns = dict.fromkeys(self._roster.conns, "")
