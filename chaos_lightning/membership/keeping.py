"""Handles, in the scheduler, the training states that the last members of a job keep in files (protocol.md 14c).

Theory of operation. Who goes as the last one that holds the training state writes it down before it closes its control
stream, and says so (`Kept`); who comes says in its Hello which state lies on its machine. While a member that was let
go still has its stream, nobody founds the job: it is writing. Then the newest state of this chain that any founder
has is what the job goes on from: that founder is the first of the view, and the others get the state from it. If
the scheduler knows of a newer one than any founder has, it is waited for, and whoever waits is told where it lies.
Where a job is founded again and there is none, the view's reason says what is lost: its members show it.

Where members hold parts of the state (P13), all of them part at one header. Each tells which parts it has written down,
and none is released before all that live have told. Then the job is founded from the newest header at which the files
of ready founders hold every part; while a newer one is known, whoever has its other parts is waited for, as above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.parts import division
from chaos_lightning.membership.peers import NEWCOMER, Peer, Process, listed, process_of
from chaos_lightning.membership.roster import Roster
from chaos_lightning.protocol.spans import subtract, union
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Header,
    Kept,
    Kind,
    Notice,
    Released,
    Report,
    Span,
    ViewId,
)


class Keeper:
    """Knowledge of the training states that members keep in files. Arguments are scheduler components that it uses."""

    def __init__(self, desk: Desk, book: Book, roster: Roster, graph: Graph) -> None:
        self._desk = desk
        self._settings = desk.settings
        self._book = book
        self._roster = roster
        self._graph = graph
        self._told: tuple[Kept, str, float] | None = None
        """Newest state that a member said it kept, on which machine, and when."""
        self._said_anew: set[Process] = set()
        """Processes of the newest state's machine that said hello anew since it was kept: machine, pid and start."""
        self._unready: dict[Process, float | None] = {}
        """Time (s) since which each such process with a kept state has not been ready; None: it was sent away for
        that.
        """
        self._without = ""
        """Words on processes of that machine that do not go on from the newest state."""
        self._parted: dict[str, Kept] = {}
        """Parts that each member wrote down when all parted, as it told; no parts if it wrote nothing."""
        self._parting_since: float | None = None
        """Time (s) since which all have been parting."""
        self._parts_since: dict[str, float] = {}
        """Times (s) since which parts of the state at each header have been waited for, by the header's hash."""

    def founded(self) -> None:
        """Forgets the kept states that the founding waited for: the job goes on from what its founders have."""
        self._told, self._without = None, ""
        self._unready.clear()
        self._parted.clear()
        self._parting_since = None
        self._parts_since.clear()

    def shift(self, gap: float) -> None:
        """Prolongs the waits for kept states by the `gap` seconds for which the scheduler was frozen."""
        self._unready = {p: since if since is None else since + gap for p, since in self._unready.items()}
        self._parts_since = {head: since + gap for head, since in self._parts_since.items()}

    def let_keep(self, peer: Peer, reason: str) -> None:
        """Lets a member go that may be the last one with the state, and watches it until its stream closes, as it may
        still write a file.
        """
        if peer.condemned:
            return
        peer.condemned, peer.keeps_since = peer.leaving, self._desk.now
        self._desk.note("left", member=peer.id, reason=f"{peer.leaving}; {reason}")
        self._roster.say_goodbye(peer, Released(reason, asked=True, keep=True))

    def on_kept(self, peer: Peer, kept: Kept) -> None:
        if peer.keeps_since is None and not peer.leaving:
            return  # the state is the job's, and its members go on
        self._desk.note("kept", member=peer.id, step=kept.header.step, view=str(kept.header.view))
        if self._is_divided():
            self._parted[peer.id] = kept
        elif self._told is None or _age(kept) > _age(self._told[0]):
            self._told = (kept, peer.member.host, self._desk.now)
            self._said_anew.clear()

    # ------------------------------------------------------------------ parts of the state

    def _is_divided(self) -> bool:
        """Returns whether the training state is divided into parts, of which each member holds only some."""
        return self._book.latest is not None and bool(self._book.latest.pipelines)

    def has_told(self, peer: Peer) -> bool:
        """Returns whether this member has reported that its parts of the state are written to a file, as all members
        leave together.
        """
        return peer.id in self._parted

    def all_told(self, leavers: Sequence[Peer]) -> bool:
        """Returns whether all living leavers have written their parts of the state to files, or were waited for long
        enough.
        """
        if self._parting_since is None:
            self._parting_since = self._desk.now
        over = self._desk.now - self._parting_since > self._settings.last_holder_timeout_s
        return over or all(self.has_told(p) for p in leavers if p.alive)

    def told_reports(self) -> list[Report]:
        """Returns reports of the members that have written their parts of the state to files, as if they answered a
        recovery (P13).
        """
        return [
            Report(NO_VIEW, k.header.view, k.header.seq - 1, k.header.prev_hash, parts=k.parts, raw=False, owns=k.parts)
            for k in self._parted.values()
            if k.parts
        ]

    def holders(self, founders: Sequence[Peer], base: Header) -> tuple[str, ...]:
        """Returns the founders that have parts of the state at this header in files; the other founders load the state
        from them.
        """
        at = base.prev_hash
        return tuple(p.id for p in founders if at and p.kept is not None and p.kept.header.prev_hash == at)

    def _missing(self, header: Header, offers: Iterable[tuple[Peer, Kept]]) -> tuple[Span, ...]:
        """Returns the parts of the state at the previous header that none of these founders has in a file."""
        assert self._book.latest is not None
        held = (k.parts for _, k in offers if k.header.prev_hash == header.prev_hash)
        return subtract(division(self._book.latest).everything, union(span for parts in held for span in parts))

    def _wait_for_parts(self, newcomers: Sequence[Peer]) -> str | None:
        """Returns why newcomers wait, as `wait_for_kept` does, for a state whose parts may be spread over several
        founders' files.
        """
        told = [k for k in self._parted.values() if k.parts and self._is_of_this_chain(k)]
        offers, ready = self._offers(newcomers), self._graph.ready()
        newest = max([*told, *(k for _, k in offers)], key=_age, default=None)
        if newest is None or self._book.latest is None:
            return None
        missing = self._missing(newest.header, [(p, k) for p, k in offers if p in ready])
        limit_s = self._settings.last_holder_timeout_s
        since = self._parts_since.setdefault(newest.header.prev_hash, self._desk.now)
        if not missing or self._desk.now - since > limit_s:
            return None
        who = listed(k.member for k in told if subtract(missing, k.parts) != missing)
        what = f"{division(self._book.latest).words(missing)} of the training state at step {newest.header.step}"
        return (
            f"the job waits for members that have {what} in files{f' (kept by {who})' if who else ''}: start them; "
            f"{limit_s:g} s after the first came the job begins without"
        )

    def writing(self) -> list[Peer]:
        """Returns members that were let go and may still be writing the training state to a file."""
        limit = self._settings.last_holder_timeout_s
        return [
            p
            for p in self._roster.peers.values()
            if p.keeps_since is not None and p.conn is not None and self._desk.now - p.keeps_since <= limit
        ]

    def wait_for_kept(self) -> str | None:
        """Returns in words why newcomers may not found the job yet: "" if only for a moment, None if they may."""
        if writing := self.writing():
            return f"the job waits for {', '.join(p.id for p in writing)}, which may be writing its training state down"
        newcomers = [p for p in self._roster.peers.values() if p.standing in NEWCOMER]
        if self._is_divided():
            return self._wait_for_parts(newcomers)
        if (awaited := self._wait_for_offer(newcomers)) is not None:
            return awaited
        if self._told is None:
            return None
        kept, host, since = self._told
        if not self._is_of_this_chain(kept) or any(_age(k) >= _age(kept) for _, k in self._offers(newcomers)):
            return None
        if self._without_it(newcomers, kept, host):
            return None
        limit_s = self._settings.last_holder_timeout_s
        if self._desk.now - since > limit_s:
            return None
        return (
            f"the job waits for a member on the machine of {kept.member}, where the training state at step "
            f"{kept.header.step} was kept: start one there; {limit_s:g} s after that the job begins anew without it"
        )

    def _wait_for_offer(self, newcomers: Sequence[Peer]) -> str | None:
        """Makes founders wait until the newcomer with the newest kept state is ready, but only for a time: it may be
        stopped or cut off.

        All hear of it once that takes longer than the way into a job does. In the end it is sent away, once, so that it
        holds no place among the founders.
        """
        ready, limit_s = self._graph.ready(), self._settings.last_holder_timeout_s
        for peer in ready:
            self._unready.pop(process_of(peer.member), None)
        for peer, kept in self._offers(newcomers):
            if peer in ready:
                return None
            since = self._unready.setdefault(process_of(peer.member), self._desk.now)
            if since is None:
                continue
            what = f"the training state that {kept.member} kept at step {kept.header.step}"
            if self._desk.now - since <= limit_s:
                text = f"the job waits for {peer.id}, which has {what}, to get ready: {limit_s:g} s at most; then it "
                return f"{text}begins without it" if self._desk.now - since > self._desk.pacing.timeout_s else ""
            self._unready[process_of(peer.member)] = None
            self._roster.fence(peer, f"it has {what}, and did not get ready within {limit_s:g} s: it says hello anew")
        return None

    def _without_it(self, newcomers: Sequence[Peer], kept: Kept, host: str) -> bool:
        """Returns whether a newcomer on the kept state's machine does not go on from that state.

        A hello may be older than the file, so each process there is asked to say it anew, once. Then it is believed:
        its script was edited or has loaded a checkpoint, or the file is gone, and its own terminal says so.
        """
        there = [p for p in newcomers if p.member.host == host]
        for peer in [p for p in there if process_of(p.member) not in self._said_anew]:
            self._said_anew.add(process_of(peer.member))
            self._roster.fence(peer, "a training state was kept on its machine: it says hello anew")
            there.remove(peer)
        self._without = "".join(
            f"; {kept.member} kept one at step {kept.header.step}, and {p.id} on that machine does not go on from it"
            for p in there[:1]
        )
        return bool(there)

    def _offers(self, peers: Sequence[Peer]) -> list[tuple[Peer, Kept]]:
        """Returns newcomers that have a kept state of this chain on their machine, the newest state first."""
        found = [(p, p.kept) for p in peers if p.kept is not None and self._is_of_this_chain(p.kept)]
        return sorted(found, key=lambda offer: _age(offer[1]), reverse=True)

    def _is_of_this_chain(self, kept: Kept) -> bool:
        """Returns whether the member that kept this state was in one of this chain's views when it wrote the file."""
        return kept.chain == self._book.chain_id and self._book.past.stood_in(kept.member, kept.header.view)

    def first_by_state(self, ready: Sequence[Peer]) -> list[Peer]:
        """Returns these newcomers, the one with the newest kept state first: the job goes on from the first member's
        state.
        """
        offers = self._offers(ready)
        if self._is_divided():
            at = self._whole_at(ready)
            return sorted(ready, key=lambda p: at is None or p.id not in self.holders(ready, at))
        first = offers[0][0] if offers else None
        return sorted(ready, key=lambda p: p is not first)

    def _whole_at(self, founders: Sequence[Peer]) -> Header | None:
        """Returns the newest header at which the files of these newcomers together hold every part of the state; None
        if there is none.
        """
        offers = self._offers(founders)
        return next((k.header for _, k in offers if not self._missing(k.header, offers)), None)

    def founding_base(self, founders: Sequence[Peer], *, divided: bool) -> tuple[Header, str]:
        """Returns the header on which the job is founded, and in words what becomes of the state that the job had.

        Args:
            founders: Founders of the job, in the order of `first_by_state`.
            divided: Whether each of them is to hold parts of the state.
        """
        lost = f"the state that it had{self._reached_words()} is lost{self._without}" if self._book.views else ""
        kept = founders[0].kept
        if self._is_divided() is not divided or (divided and self._whole_at(founders) is None):
            return GENESIS, lost
        if kept is None or not self._is_of_this_chain(kept):
            return GENESIS, lost
        words = f"from the state that {kept.member} kept at step {kept.header.step}"
        latest = self._book.views[-1].id
        if kept.header.view < latest:
            words += f"; the job went on after that, up to view {latest}{self._reached_words()}, which is lost"
        return kept.header, words

    def _reached_words(self) -> str:
        return f" (at step {self._book.reached} or later)" if self._book.reached else ""

    def finished(self) -> bool:
        """Returns whether a founder has kept the state at this chain's closing header, which means that the job was
        finished.
        """
        return any(
            peer.kept is not None and peer.kept.header.kind is Kind.CLOSING and self._is_of_this_chain(peer.kept)
            for peer in self._roster.peers.values()
        )

    def refuse_foreign(self) -> None:
        """Tells newcomers that have a kept state of another chain that it will not be used."""
        for peer in self._roster.peers.values():
            kept = peer.kept
            if kept is not None and not peer.told_of_kept and not self._is_of_this_chain(kept):
                peer.told_of_kept = True
                text = f"the training state that {kept.member} kept at step {kept.header.step} on this machine is of "
                self._desk.note("notice", text=f"{peer.id}: {text}another run, and is not used")
                self._roster.send(peer, Notice(f"{text}another run of this job, and is not used", waiting=True))


def _age(kept: Kept) -> tuple[ViewId, int]:
    """Returns a sort key for kept states: later ones are greater."""
    return (kept.header.view, kept.header.seq)
