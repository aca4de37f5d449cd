"""Rebuilds a lost chain, or its lost end, from what members report, when an operator asks for that (14a).

Theory of operation. What a store lacks, members know (identity.py). A scheduler that was told to rebuild
(`Chain.rebuild`), and whose store is empty or turns out to be an older copy, takes such *reporters* in, founds nothing,
and asks them what they know (`Recall`), again when they come again or have moved. The last view that any of them stands
in, or was told of, is the one to go on from: of its members more than half must be here; where all of them are, or
`reconnect_grace_s` after the first came, it takes a term above all that they have heard of, and the rest is a recovery
like any other: a number above all promised ones, promises, reports, ruling (8, 9). The view that comes of it follows
what the store holds, under the id of the chain that the reporters are of, so that terms and views go on comparing.
Those that did not report count as if they lived until then, and are out from then on (14b).
"""

from __future__ import annotations

from dataclasses import replace

from chaos_lightning.errors import PlanError
from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.effects import Chain, Close, TakeTerm
from chaos_lightning.membership.parts import division
from chaos_lightning.membership.past import LAST_VIEWS, REBUILT, Past
from chaos_lightning.membership.peers import JobTerms, Peer, Standing, difference, first_incarnation, listed, short
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.roster import Roster, member_of
from chaos_lightning.membership.terms import Terms
from chaos_lightning.membership.topology import Topology, links_of
from chaos_lightning.protocol.types import NO_VIEW, Hello, Member, RebuildReport, Recall, View, ViewId


class Rebuild:
    """Rebuilding of a lost chain. Arguments are scheduler components, and the store's content at the start."""

    def __init__(
        self,
        desk: Desk,
        book: Book,
        roster: Roster,
        recovery: Recovery,
        terms: Terms,
        topology: Topology,
        chain: Chain,
    ) -> None:
        self._desk = desk
        self._settings = desk.settings
        self._book = book
        self._roster = roster
        self._recovery = recovery
        self._job_terms = terms
        self._topology = topology
        if chain.rebuild and desk.phase is SchedulerPhase.FOUNDING:
            desk.phase = SchedulerPhase.REBUILDING
        self.may_rebuild = chain.rebuild
        """Whether the operator allows a rebuilding: the word is used up as soon as the job goes on by the chain, as
        it is or rebuilt.
        """
        self._prefix: tuple[Past, list[View]] | None = None
        """Past and last views of an older copy; the rebuilt view follows them."""
        self._recalled: dict[str, RebuildReport] = {}
        self._recalled_at: dict[str, float] = {}
        """Times (s) since which members owe an answer to `Recall`, on whichever stream."""
        self._terms = 0
        """Highest term that a reporter has heard of."""
        self._asked_term = 0
        self._asked_chain = ""
        """Id of the chain that is rebuilt, which goes on under it, so that terms and views go on comparing."""
        self._first_at: float | None = None
        self.before: View | None = None
        """View that the chain is being rebuilt from."""

    @property
    def rebuilds(self) -> bool:
        return self.before is not None or self._desk.phase is SchedulerPhase.REBUILDING

    @property
    def holds_views(self) -> bool:
        return self._prefix is not None or (bool(self._book.views) and self.before is None)

    def stored_in_vain(self, view: View | None) -> None:
        if view is not None and self._prefix is not None:
            past, views = self._prefix
            past.add(view)
            views.append(view)

    def begin_to_rebuild(self) -> bool:
        if self.may_rebuild:
            self._prefix = (self._book.past, self._book.views)
            self._book.restart(Past(), [])
            self._desk.phase = SchedulerPhase.REBUILDING
        return self.may_rebuild

    def take_in(self, conn: int, hello: Hello) -> None:
        newcomer = hello.view == NO_VIEW
        reason = self._is_of_another(hello)
        if reason:
            self._roster.refuse(conn, hello, reason, retry=not newcomer)
            return
        old = self._roster.peers.get(hello.resume)
        if old is not None and old.conn is not None:
            self._roster.conns.pop(old.conn, None)
        peer = Peer(member_of(hello, hello.resume), Standing.REPORTER, conn=conn, heard=self._desk.now)
        peer.neighbours, peer.no_replay, peer.entered = hello.neighbours, hello.replay, hello.view
        peer.chain = hello.chain
        self._roster.hears(peer.id, hello)
        peer.said = JobTerms.of(hello) if newcomer else None
        self._roster.peers[peer.id], self._roster.conns[conn] = peer, peer.id
        self._terms, self._topology.news = max(self._terms, hello.term), True
        if not newcomer:
            self._roster.reference = JobTerms.of(hello)
            self._job_terms.turn_away_strangers()
        self._roster.greet(peer, "joiner", "the chain is being rebuilt from what its members report")
        self.greeted(peer)

    def _is_of_another(self, hello: Hello) -> str:
        """Returns words if this process runs another program than the members that are connected; newcomers do not
        count as such.
        """
        inside = (Standing.REPORTER, Standing.MEMBER)
        here = [
            p for p in self._roster.peers.values() if p.standing in inside and p.conn is not None and p.said is None
        ]
        return difference(hello, self._roster.reference) if any(p.id != hello.resume for p in here) else ""

    def greeted(self, peer: Peer) -> None:
        """Asks a peer that has been welcomed (perhaps once more) what it knows of the lost chain."""
        if self.rebuilds and peer.standing in (Standing.REPORTER, Standing.MEMBER):
            self._ask(peer)

    def _ask(self, peer: Peer) -> None:
        self._recalled.pop(peer.id, None)
        self._recalled_at.setdefault(peer.id, self._desk.now)
        self._roster.send(peer, Recall())

    def on_moved(self, peer: Peer) -> None:
        """Asks a member again for its report, as a header has carried it into a later view than it reported."""
        told = self._recalled.get(peer.id)
        if self.rebuilds and told is not None and peer.entered > (told.view.id if told.view is not None else NO_VIEW):
            self._ask(peer)

    def on_report(self, peer: Peer, message: RebuildReport) -> None:
        if not self.rebuilds:
            return  # the chain is begun: what was before counts no more
        if wrong := _unreadable(message):
            put_out = self._roster.condemn if peer.standing is Standing.MEMBER else self._roster.fence
            put_out(peer, f"it reported {wrong}")
            return
        self._recalled[peer.id] = message
        self._recalled_at.pop(peer.id, None)
        if self._first_at is None and (message.view is not None or message.waiting is not None):
            self._first_at = self._desk.now

    def _owing(self) -> list[Peer]:
        """Returns the peers that have not answered yet what they know of the chain: nothing is decided before they do.

        Heartbeats come from another thread than the answer. A peer that lets `report_timeout_s` pass counts as silent
        until it answers, also on its next streams.
        """
        settings = self._settings
        return [
            p
            for p in self._roster.peers.values()
            if p.standing in (Standing.REPORTER, Standing.MEMBER)
            and p.conn is not None
            and p.alive
            and p.id not in self._recalled
            and self._desk.now - p.heard <= self._desk.pacing.timeout_s
            and self._desk.now - self._recalled_at.get(p.id, float("-inf")) <= settings.report_timeout_s
        ]

    def shift(self, gap: float) -> None:
        """Moves the deadlines of reports by the `gap` seconds for which this process was frozen."""
        self._recalled_at = {m: at + gap for m, at in self._recalled_at.items()}
        if self._first_at is not None:
            self._first_at += gap

    def _reporters(self) -> list[Peer]:
        """Returns the peers that have reported what they know of the chain, and are still alive."""
        return [
            p
            for p in self._roster.peers.values()
            if p.standing is Standing.REPORTER and p.alive and p.id in self._recalled
        ]

    def _last_known(self) -> View | None:
        """Returns the last view that any connected member is in or was told of.

        One that a header was to carry counts for nothing while all members of the view before are here, and none of
        them stands in it: then nobody does, since its header took a contribution of each (1).
        """
        told = {
            p.id: self._recalled[p.id]
            for p in self._roster.peers.values()
            if p.id in self._recalled and p.conn is not None
        }
        entered = max((r.view for r in told.values() if r.view is not None), key=lambda v: v.id, default=None)
        waiting = max((r.waiting for r in told.values() if r.waiting is not None), key=lambda v: v.id, default=None)
        if waiting is None or entered is None or waiting.id < entered.id:
            return entered
        return entered if all(m in told for m in entered.ids()) else waiting

    def enough(self, here: int, view: View) -> bool:
        """Returns whether more than half of this view's members are connected: two such groups always share a member
        (14a).
        """
        return 2 * here > len(view.members)

    def turn_rebuilding(self) -> bool:
        owing = self._owing()
        if owing:
            self._desk.waits = (
                f"to rebuild the chain, {', '.join(p.id for p in owing)} must tell what they know: they were asked, "
                f"and are waited for, for {self._settings.report_timeout_s:g} s"
            )
            return False
        reporters = self._reporters()
        chains = sorted({p.chain for p in reporters if p.chain and p.entered != NO_VIEW})
        if len(chains) > 1:
            who = "; ".join(f"{listed(p.id for p in reporters if p.chain == c)} of {short(c)}" for c in chains)
            self._desk.waits = f"members of several chains report ({who}): end those that are not to go on"
            return False
        latest = self._last_known()
        if latest is None:
            self._desk.waits = "to rebuild the chain, members that stand in a view must report; none is here yet"
            return False
        here = [p for p in reporters if latest.find(p.id) is not None]
        missing = [m for m in latest.members if m.id not in {p.id for p in here}]
        assert self._first_at is not None
        waiting = self._desk.now - self._first_at < self._settings.reconnect_grace_s
        if not self.enough(len(here), latest) or (missing and waiting):
            self._say_missing(latest, here, [self._absence(m) for m in missing])
            return False
        if self._terms >= self._book.term or latest.chain not in ("", self._book.chain_id):
            if self._asked_term <= self._terms:
                self._asked_term = self._terms + 1
                self._asked_chain = latest.chain or self._book.chain_id
                self._desk.out.append(TakeTerm(self._terms, self._asked_chain))
            return False
        self._adopt(latest, here)
        names = listed(p.id for p in here)
        why = f"{REBUILT} from the reports of {names}: the chain was lost after view {latest.id}"
        return self._recovery.begin(why, urgent=True)

    def _absence(self, member: Member) -> str:
        peer = self._roster.peers.get(member.id)
        mute = peer is not None and peer.conn is not None
        return f"{member.id} at {member.address}{' (it is connected, but does not answer)' if mute else ''}"

    def _say_missing(self, view: View, here: list[Peer], missing: list[str]) -> None:
        enough = self.enough(len(here), view)
        need = len(view.members) // 2 + 1
        text = (
            f"to rebuild the chain, {need} of the {len(view.members)} members of view {view.id} must report; "
            f"{len(here)} did ({', '.join(p.id for p in here) or 'nobody'}). Missing: {', '.join(missing)}"
        )
        if enough:
            text += f"; they are waited for, for {self._settings.reconnect_grace_s:g} s since the first came"
        self._desk.waits = text
        self._roster.tell(text, self._reporters())

    def on_term(self, term: int) -> None:
        """Adopts the higher term that the store has given to this scheduler."""
        self._book.term, self._asked_term = term, 0
        self._book.chain_id = self._asked_chain
        self._roster.incarnation = max(self._roster.incarnation, first_incarnation(term, self._book.past.incarnation))

    def _adopt(self, latest: View, here: list[Peer]) -> None:
        """Takes the last known view as the chain's end, until the next view is decided."""
        told = [self._recalled[p.id] for p in self._reporters()]
        numbers = [r.promised.number for r in told]
        numbers += [v.id.number for r in told for v in (r.view, r.waiting) if v is not None]
        self._book.highest = ViewId(self._book.term, max([self._book.highest.number, *numbers]))
        self._book.restart(Past.of([latest]), [latest])
        self.before, self._desk.waits = latest, ""
        present = {p.id for p in here}
        for member in latest.members:
            if member.id not in present:
                silent = self._roster.peers.get(member.id)
                if silent is not None and silent.conn is not None:
                    self._roster.conns.pop(silent.conn, None)
                    self._desk.out.append(Close(silent.conn, "it did not tell what it knows; connect again"))
                absent = Peer(member, Standing.MEMBER, heard=self._desk.now, closed_at=self._desk.now)
                absent.dead, absent.proven = "it did not report when the chain was rebuilt", True
                self._roster.peers[member.id] = absent
            else:
                self._roster.peers[member.id].standing = Standing.MEMBER
        for member in latest.leaving:
            if (leaver := self._roster.peers.get(member.id)) is not None and leaver.id in self._recalled:
                leaver.standing = Standing.LEAVER
        self._topology.partners.seed([self._roster.peers[m] for m in latest.ids()], links_of(latest))
        self._desk.note("rebuild", view=str(latest.id), reporters=sorted(present), term=self._book.term)

    def turn_again(self) -> bool:
        """Starts to collect reports anew if a peer may know a later view, or too few members are left."""
        before = self.before
        if before is None:
            return False
        last, living = self._last_known(), self._roster.living()
        known = (last is None or last.id <= before.id) and not self._owing()
        if known and self.enough(len(living), before):
            return False
        for peer in list(self._roster.peers.values()):
            if peer.standing in (Standing.MEMBER, Standing.LEAVER):
                peer.standing = Standing.REPORTER
                if peer.conn is None or peer.condemned:  # the latter was told that it is out
                    self._roster.drop(peer)
        self._book.restart(Past(), [])
        self.before, self._desk.phase, self._recovery.again = None, SchedulerPhase.REBUILDING, ""
        return True

    def turn_short(self, ruling: Ruling) -> bool:
        """Tells the reporting members that the chain cannot be rebuilt: too few of them can go on from the recovery's
        base.
        """
        assert self.before is not None
        text = (
            f"the chain cannot be rebuilt: of the {len(self.before.members)} members of view {self.before.id} only "
            f"{', '.join(ruling.members) or 'nobody'} can go on ({ruling.reason}); more than half must"
        )
        self._desk.waits = text
        self._roster.tell(text, self._roster.living())
        return False

    def begin_chain(self, view: View) -> View:
        """Returns this view marked as the first of the rebuilt chain; unchanged if no chain is being rebuilt."""
        if self.before is None:
            return view
        return replace(view, predecessor=self._prefix[1][-1].id if self._prefix is not None else NO_VIEW)

    def chain_begun(self) -> None:
        """Ends the rebuilding if the view that was just stored is the first of a rebuilt chain."""
        self.may_rebuild = False
        if self.before is None:
            return
        self._desk.waits = ""
        (past, views), view = self._prefix or (Past(), []), self._book.views[-1]
        past.add(view)
        self._book.restart(past, [*views, view][-LAST_VIEWS:])
        self.before, self._first_at, self._prefix = None, None, None
        for peer in [p for p in self._roster.peers.values() if p.standing is Standing.REPORTER]:
            late = "before it told what it knows" if peer.id not in self._recalled else "from a later view than its own"
            self._roster.fence(peer, f"the chain was rebuilt {late}, in view {view.id}")
        self._recalled.clear()
        self._recalled_at.clear()


def _unreadable(message: RebuildReport) -> str:
    """Returns in words which view in this report has pipelines that cannot be read; "" if none."""
    for view in (message.view, message.waiting):
        if view is not None and view.pipelines:
            try:
                division(view)
            except PlanError as error:
                return f"view {view.id}: {error}"
    return ""
