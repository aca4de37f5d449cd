"""Runs the scheduler's side of the protocol, as a pure state machine.

Theory of operation. `on(now, *events)` takes a batch of events in, judges who is alive, and then turns until nothing is
left to do (`_turn`): one decision at a time, each persisted before anybody hears of it (protocol.md 7). While a
`Persist` is out nothing else is decided; events meanwhile only change the facts on which the next turn acts. In a large
job most events do no more than that, either: to judge and turn takes a look at every member, and what these events
change can wait for the next tick (`_can_wait`). Phases:

- FOUNDING: nobody holds the state. As soon as min_nodes newcomers are ready, the first view is decided.
- RUNNING: the latest view rules or is about to (a `NextView` that a header will carry). Once all its members have
  entered it, it is settled, and leaves and joins make the next one. A death, a remade link (bytes were lost on it) or
  a member that lags after a scheduler's restart starts a recovery.
- PREPARING: a number is reserved and promised; reports are collected (8, 9). A change among the living starts over.
- HOLDING: below min_nodes; all have promised and wait until enough newcomers are ready (14). The survivors then go on
  in a view of their own and the newcomers come in at the next boundary, as only there the state is at rest.
- STALE: members know what the store lacks; nothing is decided here (identity.py).
- FINISHED, DEPOSED: the end; the latter because the store refused a write: another scheduler rules.

After a restart on its store the scheduler knows the chain and nothing else. The last view's members come back by
Hello(resume) and tell where they stand; if any of them is not in the last view, a recovery puts all of them there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from chaos_lightning.membership import stimuli
from chaos_lightning.membership.admission import Admission
from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.effects import (
    Answer,
    Chain,
    ChangeLink,
    Close,
    Closed,
    Drain,
    Gone,
    Look,
    MessageIn,
    Opened,
    Persist,
    PipelinesFound,
    PlanDrawn,
    Reset,
    SchedulerDone,
    SchedulerEffect,
    SchedulerEvent,
    SchedulerTick,
    Stored,
    TermTaken,
)
from chaos_lightning.membership.ending import JobEnd
from chaos_lightning.membership.founders import Founders
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.hearing import Hearing
from chaos_lightning.membership.identity import Identity
from chaos_lightning.membership.judging import Deaths
from chaos_lightning.membership.keeping import Keeper
from chaos_lightning.membership.learners import Learners
from chaos_lightning.membership.links import LinkRegistry
from chaos_lightning.membership.peers import NEWCOMER, Peer, Standing, is_named, listed, placed, process_of
from chaos_lightning.membership.pipelining import (
    LEAVES_TOGETHER_S,
    Lineup,
    PipelinerFactory,
    Pipelining,
    ViewPipeliner,
)
from chaos_lightning.membership.rebuilding import Rebuild
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.recovery import Ruling, rule
from chaos_lightning.membership.redrawing import Redrawing
from chaos_lightning.membership.rewiring import Rewiring
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.searching import PipelineSearch
from chaos_lightning.membership.sharing import Sharing
from chaos_lightning.membership.showing import Showing
from chaos_lightning.membership.stimuli import MessageDigest
from chaos_lightning.membership.terms import Terms
from chaos_lightning.membership.topology import CUT_PATIENCE_S, Net, Topology, components, connected, in_words
from chaos_lightning.membership.views import (
    Change,
    changed_view,
    founding_view,
    in_pipelines,
    intended_change,
    recovered_view,
)
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.protocol import nodes
from chaos_lightning.protocol.limits import bounded
from chaos_lightning.protocol.types import (
    NO_VIEW,
    SMALL_JOB,
    Decide,
    Differs,
    Fence,
    Header,
    Kept,
    LinkEvent,
    LinkRequest,
    NextView,
    Released,
    Report,
    Settings,
    ToMember,
    Verdict,
    View,
)

_PRESSING = (Verdict, Differs, Kept, LinkRequest)
"""Messages of members that are handled at once, however many members there are."""


def planned(requests: Mapping[str, PipelineRequest]) -> ViewPipeliner:
    """Returns a maker of pipelines that uses the planner, which is imported only when a job first asks for
    pipelines.
    """
    from chaos_lightning.membership.planned import PlannedPipeliner

    return PlannedPipeliner(requests)


class SchedulerMachine:
    """State machine of the scheduler. Its process feeds a SchedulerTick every `tick_interval_s` or more often.

    Args:
        settings: The job's rules.
        chain: Chain as the store holds it.
        pipeliner_for: Makes the maker of the views' pipelines, if members ask for some.
    """

    def __init__(self, settings: Settings, chain: Chain, pipeliner_for: PipelinerFactory = planned) -> None:
        self.stimulus_log: deque[tuple[float, SchedulerEvent | MessageDigest]] = deque(maxlen=512)
        self.tick_interval_s = settings.heartbeat_interval_s / 2
        self._bridges_since: float | None = None
        """Time since which members that would part the others by leaving have been kept for that."""
        self._leaves_since: float | None = None
        """Time since which a leave that moves parts of the training state has waited for the leaves of others."""
        self.settings = settings
        self.desk = desk = Desk(settings)
        desk.phase = (
            SchedulerPhase.FINISHED
            if chain.finished
            else SchedulerPhase.RUNNING
            if chain.views
            else SchedulerPhase.FOUNDING
        )
        self.detector = detector = Detector(settings, desk.pacing)
        self.topology = topology = Topology(chain.wishes, settings.link_degree)
        self.book = book = Book(desk, chain)
        self.roster = roster = Roster(desk, book, detector, topology, chain)
        self.recovery = recovery = Recovery(desk, book, roster)
        self.graph = graph = Graph(desk, book, roster, topology)
        self.pipelining = Pipelining(desk, book, roster, graph, topology, pipeliner_for)
        self.links = LinkRegistry(desk, book, roster, recovery, graph, topology, detector)
        self.showing = Showing(desk, book, roster, graph, topology)
        self.rewiring = Rewiring(desk, book, roster, recovery, graph, topology, detector)
        self.redrawing = Redrawing(desk, graph, topology)
        self.search = PipelineSearch(desk, self.pipelining)
        self.sharing = Sharing(book, roster)
        self.deaths = Deaths(desk, book, roster, recovery, graph, detector)
        self.learners = Learners(desk, book, roster, graph)
        self.keeper = Keeper(desk, book, roster, graph)
        self.terms = Terms(desk, roster, detector)
        self.rebuild = Rebuild(desk, book, roster, recovery, self.terms, topology, chain)
        self.identity = Identity(desk, book, roster, recovery, self.rebuild, detector, chain)
        self.hearing = Hearing(
            desk, book, recovery, detector, self.deaths, self.links, self.learners, self.keeper, self.rebuild
        )
        self.founders = Founders(desk)
        self.end = JobEnd(desk, book, roster, chain)
        self.admission = Admission(
            desk,
            book,
            roster,
            recovery,
            self.deaths,
            self.terms,
            self.rebuild,
            self.identity,
            detector,
            self.hearing,
            self.end,
        )

    @property
    def _deposed(self) -> bool:
        return self.desk.phase is SchedulerPhase.DEPOSED

    def _depose(self, why: str) -> None:
        """Makes this scheduler stop deciding and sending, as another one rules; members connect to that one."""
        self.desk.phase = SchedulerPhase.DEPOSED
        self.desk.note("error", text=f"deposed: {why}; another scheduler rules")
        for conn in self.roster.conns:
            self.desk.out.append(Close(conn, "this scheduler is deposed; connect again"))
        self.desk.out.append(SchedulerDone(f"deposed: {why}", deposed=True))

    def _shut_out(self, view: View, fits: int, detail: str) -> None:
        """Handles a view that is too large for the store: later views have fewer links or newcomers, or are not made at
        all.

        The job goes on in the view before. Where it cannot, as its members have promised to leave that, all are told.
        """
        self.desk.note("error", text=detail)
        if self.graph.thin(view):
            self.desk.note("notice", text="views have fewer links from now on, as no record has room for all")
            return
        late = [p for m in view.members[fits:] if (p := self.roster.peers.get(m.id)) and p.standing in NEWCOMER]
        for peer in late:
            self.roster.send(peer, Fence(f"the job is full: {detail}", rejoin=False))
            self.roster.drop(peer)
        if late:
            return
        self.book.refuse(view)
        if self.desk.phase is not SchedulerPhase.RUNNING:
            self.roster.tell(f"the job waits: {detail}", [*self.roster.living(), *self.graph.ready()])

    def _write(
        self, view: View, then: Callable[[], None], base: Header | None = None, *, hand_on: bool = False
    ) -> bool:
        """Asks the store to write a view; returns False if it is known that no store accepts it."""
        if self.book.refuses(view):
            return False
        self.book.persist(Persist(0, "view", view.id, view, base, hand_on), then)
        return True

    def snapshot(self, page: int = 0) -> dict[str, object]:
        """Returns plain values for `chaos-lightning status`; of a large job only one page, or what is abnormal
        (`Showing.facts`).
        """
        latest = self.book.latest
        usual = self.recovery.why if self.desk.reserving else latest.reason if latest is not None else ""
        return {
            "job": self.settings.job,
            "term": self.book.term,
            "chain": self.book.chain_id,
            "phase": self.desk.shown_phase,
            "tells": self.end.tells,
            "view": str(latest.id) if latest is not None else "",
            "settled": self.roster.settled,
            "reason": self.identity.lost_words()
            or self.desk.waits
            or self.identity.hearing_words()
            or self.desk.lost
            or self.recovery.pause_words()
            or usual,
            "plan": self.rewiring.plan_facts(),
            **self.pipelining.facts(),
            **self.showing.facts(page),
        }

    def validate_state(self) -> None:
        """Asserts the invariants of the scheduler's state between two events."""
        latest = self.book.latest
        for before, view in pairwise(self.book.views):
            assert view.predecessor == before.id, (view.predecessor, before.id)
            assert view.id > before.id, (view.id, before.id)
        assert latest is None or self.book.highest >= latest.id, (self.book.highest, latest)
        self.topology.validate()
        for conn, member in self.roster.conns.items():
            assert not member or self.roster.peers[member].conn == conn, (conn, member)
        ids = latest.ids() if latest is not None else ()
        leaving = frozenset(m.id for m in latest.leaving) if latest is not None else frozenset()
        assert self.book.past.inside == frozenset(ids), sorted(self.book.past.inside ^ frozenset(ids))
        assert self.book.past.leaving == leaving, sorted(self.book.past.leaving ^ leaving)
        for peer in self.roster.peers.values():
            assert peer.conn is None or self.roster.conns.get(peer.conn) == peer.id, peer.id
            assert peer.standing is not Standing.MEMBER or peer.id in ids, f"{peer.id} is in no view"
            named = peer.id in leaving and peer.standing is Standing.MEMBER
            assert not named, f"{peer.id} is a member, and the last view lets it go"
            lost = self.desk.phase is SchedulerPhase.FOUNDING  # members that held nothing are newcomers again
            assert lost or peer.standing is Standing.MEMBER or peer.id not in ids, f"{peer.id} is in the last view"
        if self.desk.reserving:
            assert latest is not None
            assert self.recovery.number.number > latest.id.number, (self.recovery.number, latest.id)
            assert self.recovery.number <= self.book.highest, (self.recovery.number, self.book.highest)
        if self.desk.phase is SchedulerPhase.FOUNDING and self.book.persisting is None:
            assert not self.roster.living(), "somebody holds the state"

    def _change_view(
        self, latest: View, change: Change, net: Net, found: tuple[str | None, str] | None = None, split: str = ""
    ) -> bool:
        """Asks the store to write a view with this change; `found`: the pipelines to use and the reason for them,
        `split`: another split for the same members.
        """
        going = tuple(m for m in latest.members if m not in change.members)
        pipelines, why = found or self.pipelining.of(change.members, net.pairs, going)
        if pipelines is None and change.members:
            self.pipelining.lack(why)
            self.roster.tell(f"{change.reason}: this waits, as no pipelines fit then: {why}", self.roster.members())
            return False
        number = self.roster.next_number()
        split = split or self.sharing.of(change.members, latest)
        view = changed_view(latest, number, change, self.settings.plan, net, pipelines or latest.pipelines, why, split)
        return self._write(view, lambda: self._announce(view))

    @property
    def phase(self) -> SchedulerPhase:
        return self.desk.phase

    def on(self, now: float, *events: SchedulerEvent) -> list[SchedulerEffect]:
        """Handles events in their order; returns the effects in the order in which they must happen."""
        for event in events:
            self.stimulus_log.append((now, stimuli.of_scheduler(event)))
        self.desk.out = []
        if self._deposed:
            return []
        self._forgive(now)
        pressing, missing, again = False, bool(self.recovery.missing), self.recovery.again
        for event in events:
            can_wait = self._can_wait(event)
            self._take(event)
            if self._deposed:
                return self.desk.out
            pressing = pressing or not can_wait
        self.roster.keep_pace()
        # The last report of all that are due, and a link that was made anew, are what the turn waits for.
        if pressing or (missing and not self.recovery.missing) or again != self.recovery.again:
            self._judge_and_turn()
        return self.desk.out

    def _can_wait(self, event: SchedulerEvent) -> bool:
        """Returns whether all decisions about this event can wait for the next tick, in a large job.

        Nothing waits that tells of a death, that somebody waits for, or that a decision has been written down.
        """
        if len(self.roster.peers) <= SMALL_JOB:
            return False
        match event:
            case Opened():
                return True
            case MessageIn(_, LinkEvent(_, up, evidence)):
                return up or not evidence.startswith("closed")
            case MessageIn(_, message):
                return not isinstance(message, _PRESSING)
            case Closed(conn):
                return self.desk.phase is SchedulerPhase.FINISHED or not self.roster.inside(
                    self.roster.conns.get(conn, "")
                )
            case _:
                return False

    def _take(self, event: SchedulerEvent) -> None:
        """Records what an event says; decides nothing."""
        match event:
            case MessageIn(conn, message):
                self.admission.on_message(conn, message)
            case Opened(conn):
                self.roster.conns[conn] = ""
            case Closed(conn, abrupt):
                self.admission.on_closed(conn, abrupt)
            case Stored(token, ok, detail, fits):
                view = self.book.writing
                accepted = self.book.stored(token, ok)
                if not accepted and fits and view is not None:
                    self._shut_out(view, fits, detail)
                elif not accepted:
                    self._depose(f"the store refused a write ({detail})")
            case Drain(name):
                self.admission.on_drain(name)
            case ChangeLink(token, a, b, add):
                self.links.on_change_link(token, (a, b), add)
            case Reset(token, force):
                self._on_reset(token, force)
            case Gone():
                self.deaths.on_gone(event)
            case PlanDrawn():
                self.redrawing.on_drawn(event)
            case PipelinesFound():
                self.search.on_found(event)
            case TermTaken(term):
                self.rebuild.on_term(term)
            case SchedulerTick():
                pass

    def _judge_and_turn(self) -> None:
        self.deaths.judge()
        for _ in range(64):
            if not self._turn():
                break
        else:
            raise AssertionError(f"the scheduler turns without end in {self.desk.phase}: {self.snapshot()}")
        self.links.tell_whom_to_dial()
        self.rewiring.seen()
        self.learners.tell()

    def _forgive(self, now: float) -> None:
        """Moves all deadlines by a gap in this process's own clock, which was nobody's silence (protocol.md 12)."""
        first, before = self.desk.clock is None, self.desk.clock if self.desk.clock is not None else now
        self.desk.clock = now
        gap = now - before
        if first:
            self.identity.begin()
            if self.book.latest is not None and self.desk.phase is SchedulerPhase.RUNNING:
                self.pipelining.followed(None, self.book.latest)
            self.roster.keep_pace()
            self.detector.grace_until = now + self.settings.reconnect_grace_s if self.recovery.returning else now
            for peer in self.roster.peers.values():
                peer.heard = peer.closed_at = now
                self.desk.out.append(Look(peer.member))
        elif gap > min(3 * self.desk.pacing.interval_s, self.desk.pacing.timeout_s):
            self.desk.note("notice", text=f"this scheduler was frozen for {gap:.2f} s; nobody is judged by that time")
            self.detector.shift(now, gap)
            self.rewiring.shift(gap)
            self.rebuild.shift(gap)
            self.keeper.shift(gap)
            self.recovery.shift(gap)
            if self._bridges_since is not None:
                self._bridges_since += gap
            if self._leaves_since is not None:
                self._leaves_since += gap
            self.identity.shift(gap)
            if self.book.entered_at is not None:
                self.book.entered_at += gap
            self.founders.shift(gap)
            for peer in self.roster.peers.values():
                peer.heard += gap
                peer.closed_at += gap
                peer.observes_since += gap

    def _turn(self) -> bool:
        """Makes at most one decision; returns True if something changed that may allow another one."""
        if self.book.persisting is not None or self.identity.hearing:
            return False
        if held := self.identity.let_go():
            for conn, hello in held:
                if self.roster.conns.get(conn) == "":
                    self.admission.on_hello(conn, hello)
            return True
        if self.desk.phase is SchedulerPhase.STALE:
            return False
        if self.links.turn_wishes():
            return True
        if self.desk.phase in (SchedulerPhase.DEPOSED, SchedulerPhase.FINISHED):
            return False
        if self.terms.turn_terms() or self._promote():
            return True
        if self.desk.phase is SchedulerPhase.FOUNDING:
            return self._turn_founding()
        if self.desk.phase is SchedulerPhase.REBUILDING:
            return self.rebuild.turn_rebuilding()
        if self.rebuild.turn_again():
            return True
        if self._turn_finish():
            return True
        if not self.roster.party():
            if not self.deaths.take_back():
                self._lose("all members of the last view are gone")
            return True
        if self.desk.phase is SchedulerPhase.RUNNING:
            return self._turn_running()
        return self._turn_recovering()

    def _promote(self) -> bool:
        """Gives places that became free to the oldest standbys, except those whose name a member has that may live."""
        standby = [p for p in self.roster.peers.values() if p.standing is Standing.STANDBY and not p.differs]
        taken = {p.member.name for p in self.roster.living()} if standby else ()
        waiting = {p.id: p for p in standby if p.conn is not None and p.member.name not in taken}
        fitting = [p.member for p in waiting.values()]
        fitting = nodes.within(fitting, placed(self.roster.peers.values()), self.settings.max_nodes) if fitting else []
        for peer in (waiting[m.id] for m in fitting):
            peer.standing = Standing.LINKING
            role = "founder" if self.desk.phase is SchedulerPhase.FOUNDING else "joiner"
            self.roster.greet(peer, role, "promoted from standby: a place is free")
        return bool(fitting)

    def _turn_founding(self) -> bool:
        if self.roster.living():
            self.desk.phase = SchedulerPhase.RUNNING
            return True
        if self.keeper.finished():  # no scheduler was there to note it
            self._persist_end()
            return True
        self.keeper.refuse_foreign()
        why_not = self.identity.why_not_found() or self.keeper.wait_for_kept()
        if why_not is not None:
            if why_not:
                self.roster.tell(why_not, [p for p in self.roster.peers.values() if p.standing in NEWCOMER])
            return False
        fitting = nodes.within(
            [p.member for p in self.keeper.first_by_state(self.graph.ready())], (), self.settings.max_nodes
        )
        ready = self.graph.together([self.roster.peers[m.id] for m in fitting])
        if waits := self.founders.waits(ready):
            self.roster.tell(waits, ready)
            return False
        if nodes.count(p.member for p in ready) < max(1, self.settings.min_nodes):
            here = [
                p for p in self.roster.peers.values() if p.standing in NEWCOMER and p.conn is not None and not p.leaving
            ]
            if (number := nodes.count(p.member for p in here)) < self.settings.min_nodes:
                verb = "is" if number == 1 else "are"
                words = str(number) if number == len(here) else nodes.in_words([p.member for p in here])
                self.roster.tell(f"the job waits for min_nodes={self.settings.min_nodes}: {words} {verb} here", here)
            elif all(p.standing is Standing.READY for p in here):
                self.links.tell_apart(here)
            return False
        assert self.roster.reference is not None
        if self.recovery.paced(f"{len(ready)} newcomers are ready to found the job"):
            return False
        ready = self.keeper.first_by_state(ready)
        base, state = self.keeper.founding_base(ready, divided=self.pipelining.wanted)
        members, net = [p.member for p in ready], self.graph.net([p.id for p in ready])
        pipelines, why = self.pipelining.of(members, net.pairs, anew=True)
        if pipelines is None:
            self.pipelining.lack(why)
            self.roster.tell(f"the job waits, as no pipelines fit those that are ready: {why}", ready)
            return False
        view = founding_view(
            self.roster.next_number(),
            members,
            plan=self.settings.plan,
            accumulate=self.roster.reference.accumulate,
            chain=self.book.views,
            net=net,
            chain_id=self.book.chain_id,
            state=state,
        )
        view = replace(view, batch=self.sharing.of(members))
        view = in_pipelines(view, pipelines, self.keeper.holders(ready, base))
        ruling = Ruling(base=base, members=view.ids(), joiners=view.joiners, reason=view.reason)
        if written := self._write(view, lambda: self._decided(view, ruling), base):
            self.recovery.attempt()
        return written

    def _turn_finish(self) -> bool:
        """Ends the job once every living member that holds the state has committed the closing header, even if a view
        lets all of them go with that header.
        """
        latest = self.book.latest
        gone = latest is not None and not latest.members
        here = [p for p in self.roster.needed_leavers() if p.alive] if gone else self.roster.living()
        holders = [p for p in here if not p.known or (p.entered != NO_VIEW and p.loaded)]
        if not holders or not all(p.finished for p in holders):
            return False
        self._persist_end()
        return True

    def _persist_end(self) -> None:
        finish = Persist(0, "finish", self.roster.next_number(), ending=self.end.decided())
        self.book.persist(finish, self.end.finished)

    def _turn_running(self) -> bool:
        latest = self.book.latest
        assert latest is not None
        if not latest.members and self.book.persisting is None:
            return self._turn_parting(latest)
        # A leaver is still needed for the slot whose header will let it go, and as long as it may have to serve a part.
        leavers = self.roster.leavers() if self.book.announced is not None else self.roster.needed_leavers()
        needed = (*self.roster.members(), *leavers)
        dead = [p for p in needed if not p.alive]
        settled = self.roster.settled
        if settled:
            for peer in self.roster.leavers():
                self.roster.release(peer, f"view {latest.id} rules without it")
        elif dead or len(self.roster.members()) < len(latest.members):
            words = [f"{p.id}: {p.condemned or p.dead}" for p in dead]
            words += [f"{m}: gone before it was in" for m in latest.ids() if m not in self.roster.peers]
            return self.recovery.begin(listed(words, "; "), urgent=bool(dead))
        if self.recovery.again:
            return self.recovery.begin(self.recovery.again)
        if self.recovery.returning:
            return self._turn_returning(latest)
        if self.rewiring.turn_failed():
            return True
        self._time_joiners(latest)
        if not settled or any(p.finished for p in self.roster.members()):
            return False
        ready = self.graph.ready()
        if nodes.count(latest.members) < self.settings.min_nodes:
            coming = (p.member for p in self.graph.reachable(latest.ids()))
            if nodes.count([*latest.members, *coming]) < self.settings.min_nodes:
                here = nodes.in_words(latest.members)
                return self.recovery.begin(f"fewer than min_nodes={self.settings.min_nodes} are here: {here}")
        if self.learners.turn_observe(latest, ready) or self._turn_change(
            latest, self.learners.admissible(latest, ready)
        ):
            return True
        change = self.rewiring.turn_links(latest) or self.redrawing.turn(latest)
        return self._change_view(latest, *change) if change is not None else self._turn_better(latest)

    def _turn_better(self, latest: View) -> bool:
        """Makes a view of the same members with better pipelines (P8) or a better split of the batch (B4), for the next
        header, unless a member is about to leave.
        """
        if any(p.leaving for p in self.roster.members()):
            return False
        if (split := self.sharing.turn(latest)) is not None:
            change = Change(members=latest.members, joiners=(), reason=split[1], plan=latest.plan)
            return self._change_view(latest, change, Net(self.graph.of_view(latest)), split=split[0])
        found = self.search.turn(latest)
        if found is None:
            return False
        reason = "better pipelines were found for the same members"
        change = Change(members=latest.members, joiners=(), reason=reason, plan=latest.plan)
        return self._change_view(latest, change, Net(self.graph.of_view(latest)), found)

    def _turn_parting(self, latest: View) -> bool:
        """Releases all members together, after one header has let all of them go and all living ones have written their
        parts of the state to files (P13).

        A leaver's death before it has reported its file starts a recovery, in which what others have reported still
        counts.
        """
        leavers = self.roster.needed_leavers()
        if dead := [p for p in leavers if not p.alive and not self.keeper.has_told(p)]:
            return self.recovery.begin(listed((f"{p.id}: {p.condemned or p.dead}" for p in dead), "; "), urgent=True)
        if self.recovery.again:
            return self.recovery.begin(self.recovery.again)
        if self.recovery.returning:
            return self._turn_returning(latest)
        if not self.keeper.all_told(leavers):
            return False
        for peer in leavers:
            self.roster.release(peer, "all leave, and what they hold of the training state is in files")
        return True

    def _turn_returning(self, latest: View) -> bool:
        members = self.roster.party()
        if not all(p.known and p.conn is not None for p in members):
            return False
        self.recovery.returning = False
        if self.recovery.promised or any(p.entered != latest.id for p in members if p.standing is Standing.MEMBER):
            return self.recovery.begin("the scheduler was restarted and not all members may move in the last view")
        self.rebuild.may_rebuild = False  # all are here and lack nothing: whoever knows more later is of another part
        self.desk.note("notice", text=f"all members of view {latest.id} are back")
        return True

    def _time_joiners(self, latest: View) -> None:
        """Excludes a joiner that does not get its state in time, as it holds everybody up."""
        if self.book.entered_at is not None and self.deaths.waited_for:
            self.book.entered_at = self.desk.now  # its donors are silent
        if self.book.entered_at is None:
            return
        joiners, limit, spreads = frozenset(latest.joiners), self.settings.join_timeout_s, self.book.spreads
        holds = self.roster.holds_its_own(latest)
        lacking = [p for p in self.roster.members() if p.id in joiners and not holds(p) and p.alive]
        why = self.founders.late(lacking, latest.ids(), spreads=spreads)
        if self.desk.now - self.book.entered_at > limit:
            why = f"it did not load the state within join_timeout_s={limit:g}"
        elif why and not self._can_do_without(latest, lacking):
            return
        for peer in lacking if why else ():
            self.roster.condemn(peer, why)
            self.recovery.again = self.recovery.again or f"{peer.id} is put out"
            if spreads:
                self.roster.left_behind.add(process_of(peer.member))

    def _can_do_without(self, latest: View, late: Sequence[Peer]) -> bool:
        """Returns whether enough members can go on without these; if not, all members are told that they wait."""
        names = {p.id for p in late}
        staying = [m for m in latest.members if m.id not in names]
        ids, enough = [m.id for m in staying], self.settings.min_nodes
        here = [m for m in staying if not self.roster.peers[m.id].leaving]
        here += [p.member for p in self.graph.reachable(ids)]
        if nodes.count(here) >= enough and connected(ids, self.graph.pairs(ids)):
            return True
        text = (
            f"the job waits for members that get the state slowly: without them fewer than min_nodes={enough} are here"
        )
        self.roster.tell(text, self.roster.members())
        return False

    def _turn_change(self, latest: View, ready: list[Peer]) -> bool:
        leaving = self.graph.loose(latest.ids(), [p.id for p in self.roster.members() if p.leaving])
        fitting = self._near(ready, latest, leaving)
        if latest.pipelines and not fitting and all(p.leaving for p in self.roster.members()):
            return self._part(latest)
        out = set(leaving)
        staying = [m for m in latest.members if m.id not in out]
        places = nodes.within([p.member for p in fitting], staying, self.settings.max_nodes)
        fitting = [self.roster.peers[m.id] for m in places]
        change = intended_change(
            latest,
            leavers=leaving,
            newcomers=[p.member for p in fitting],
            min_nodes=self.settings.min_nodes,
        )
        if change is None:
            for peer in self.roster.members() if leaving else []:
                self.keeper.let_keep(peer, "all members leave; the last one keeps the training state in a file")
            return bool(leaving)
        net = self.graph.net([m.id for m in change.members])
        if leaving and self._waits_for_leaves(latest, change, net):
            return False
        rest = [m.id for m in staying]
        if leaving and fitting and not connected(rest, self.graph.pairs(rest)):
            # The leaver is a bridge for which newcomers may make up: they come in first, as they hold nothing yet.
            coming = tuple(p.member for p in fitting)
            ids = tuple(m.id for m in coming)
            reason = f"{', '.join(ids)} join, before {', '.join(leaving)} leave, without whom no link leads between all"
            change = Change(members=(*latest.members, *coming), joiners=ids, reason=reason)
            net = self.graph.net([m.id for m in change.members])
        if not connected([m.id for m in change.members], net.pairs):
            return self._let_go(latest, leaving)
        self._bridges_since = self._leaves_since = None
        return self._change_view(latest, change, net)

    def _waits_for_leaves(self, latest: View, change: Change, net: Net) -> bool:
        """Returns whether these leaves wait a moment for more leaves, since parts of the training state have to move
        each time (P13).
        """
        going = tuple(m for m in latest.members if m not in change.members)
        text, _ = self.pipelining.of(change.members, net.pairs, going)
        if not text or not self.pipelining.moves(latest, text, change.members):
            return False
        if self._leaves_since is None:
            self._leaves_since = self.desk.now
        return self.desk.now - self._leaves_since < LEAVES_TOGETHER_S

    def _part(self, latest: View) -> bool:
        """Lets all members, each of which leaves with some parts of the state, go by one header (P13)."""
        self._leaves_since = None
        reason = f"{listed(latest.ids())} leave: all part at one header, and each keeps its parts in a file"
        change = Change(members=(), joiners=(), reason=reason, plan=latest.plan)
        return self._change_view(latest, change, self.graph.net([]))

    def _near(self, ready: list[Peer], latest: View, leaving: list[str]) -> list[Peer]:
        """Returns newcomers with a link to a member that stays; all of them if nobody stays."""
        staying = set(latest.ids()).difference(leaving)
        return self.graph.led(ready, staying) if staying else ready

    def _let_go(self, latest: View, leaving: list[str]) -> bool:
        """Lets members go whose links alone connect others: waits a while for links between these, then lets one side
        go on.
        """
        out = set(leaving)
        ids = [m for m in latest.ids() if m not in out]
        if not leaving or not connected(latest.ids(), self.graph.pairs(latest.ids())):
            return False  # a link is down at the moment
        sides = in_words(components(ids, self.graph.pairs(ids)))
        why = f"{', '.join(leaving)} leave, and without them no link leads between {sides}"
        if self._bridges_since is None:
            self._bridges_since = self.desk.now
            text = f"{why}: they stay until there is one, {CUT_PATIENCE_S:g} s at most; then one side goes on alone"
            self.desk.note("notice", text=text)
            self.roster.tell(text, self.roster.members())
        if latest.pipelines or self.desk.now - self._bridges_since < CUT_PATIENCE_S:
            return False  # with pipelines no side may hold the whole state
        self._bridges_since = None
        for member in leaving:
            peer = self.roster.peers[member]
            peer.condemned = peer.leaving
            self.roster.release(peer, why)
        return self.recovery.begin(why, urgent=True)

    def _turn_recovering(self) -> bool:
        if self.desk.phase is SchedulerPhase.HOLDING and not self.pipelining.wanted:
            for peer in self.roster.leavers():
                self.roster.release(peer, "the others wait for members, and go on without it")
            for peer in [p for p in self.roster.living() if p.leaving]:
                self.keeper.let_keep(peer, "the job waits for members; nobody needs this one meanwhile")
        living = frozenset(p.id for p in self.roster.party())
        if living != self.recovery.expected or self.recovery.again:
            gone = listed(sorted(self.recovery.expected - living)) or "nobody"
            why = self.recovery.again or f"{self.recovery.why}; gone since: {gone}"
            return self.recovery.begin(why, urgent=not living >= self.recovery.expected)
        if any(p.report is None for p in self.roster.party()):
            return False
        reports = self.recovery.with_headers(self.roster.party())
        if reports is None:
            return False
        side = self.rewiring.side(reports, self.rule)
        if side is None:
            return False
        ruling = self.rule(side)
        if ruling.base is None:
            if self.deaths.take_back(ruling.lost):
                return True
            if self.rebuild.before is not None:
                return self.rebuild.turn_short(ruling)  # who holds the state may be among those that did not report
            if self.pipelining.wanted and any(r.loaded for r in side.values()):
                return self._go_without(ruling)
            self._lose(ruling.reason, ruling)
            return True
        return self._turn_decide(ruling, ruling.base)

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        """Decides how a recovery goes on: from which header, by handing it on or by redoing the slot, and with whom
        (protocol.md 9).
        """
        assert self.book.latest is not None
        return rule(self.book.latest, self.book.past, reports, self.keeper.told_reports())

    def _turn_decide(self, ruling: Ruling, base: Header) -> bool:
        if self.rebuild.before is not None and not self.rebuild.enough(len(ruling.members), self.rebuild.before):
            return self.rebuild.turn_short(ruling)
        latest = self.book.latest
        assert latest is not None
        lineup = self.pipelining.lineup(latest, ruling)
        if isinstance(lineup, Lineup) and lineup.ends:
            return self._end(f"{lineup.ends}; {self.book.saved_words}")
        parts = isinstance(lineup, Lineup) and not lineup.members
        if isinstance(lineup, str) or not (parts or self.rewiring.will_do(ruling)):
            rejoin = ruling.rejoin or self._bridged(ruling)
            for member, reason in rejoin:
                # It would wait here in vain; as a newcomer it counts.
                self.roster.peers[member].condemned = reason
                self.roster.send(self.roster.peers[member], Fence(f"{member} is out of the job: {reason}"))
            if rejoin:
                return True
            text = f"training waits: {self.rewiring.able(ruling)} of min_nodes={self.settings.min_nodes} nodes are here"
            if isinstance(lineup, str):
                self.pipelining.lack(lineup)
                text = f"training waits, as no pipelines fit those that are here: {lineup}"
            text += "".join(f"; {m}: {words}" for m, words in self.rewiring.cut.items())
            return self._hold(text)
        out = (f"{m} is put out: {words}, who go on" for m, words in self.rewiring.cut.items())
        why = listed([self.recovery.why, *out], "; ")
        net = self.graph.net([m.id for m in lineup.members])
        split = self.sharing.of(lineup.members, latest)
        view = recovered_view(latest, self.recovery.number, ruling, self.settings.plan, why, net, lineup, split)
        view = self.rebuild.begin_chain(view)
        return self._write(view, lambda: self._decided(view, ruling), base, hand_on=ruling.hand_on)

    def _hold(self, text: str) -> bool:
        """Makes all connected members and ready newcomers wait, and tells them why; returns True if the waiting begins
        now.
        """
        self.roster.tell(text, [*self.roster.party(), *self.graph.ready()])
        if self.desk.phase is SchedulerPhase.HOLDING:
            return False
        self.desk.phase = SchedulerPhase.HOLDING
        self.desk.note("notice", text=text)
        return True

    def _bridged(self, ruling: Ruling) -> tuple[tuple[str, str], ...]:
        """Returns cut-off members, with reasons, that can come back over newcomers' links; none if all together are too
        few.

        As long as they are members they are cut off, and no newcomer comes in while too few are here; as newcomers
        they count, and come in after those that link them.
        """
        count = (*ruling.members, *ruling.waiting, *(p.id for p in self.roster.willing()), *self.rewiring.cut)
        together = next((g for g in components(count, self.graph.pairs(count)) if set(ruling.members) & set(g)), ())
        if (
            nodes.count([p.member for m in together if not (p := self.roster.peers[m]).leaving])
            < self.settings.min_nodes
        ):
            return ()
        return tuple(
            (m, f"{words}; newcomers link it to them") for m, words in self.rewiring.cut.items() if m in together
        )

    def _decided(self, view: View, ruling: Ruling) -> None:
        """Sends a founding or recovered view, now in the chain, to its members; all other members of the old view are
        out.
        """
        assert ruling.base is not None
        old = [*self.roster.members(), *self.roster.needed_leavers()]
        self.roster.vouched = True  # who is in this view says what the job is
        self._append(view)
        self.rebuild.chain_begun()
        if self.desk.phase is SchedulerPhase.FOUNDING:
            self.keeper.founded()
            self.desk.lost = ""
            self.book.reached = ruling.base.step
            self.recovery.backoff.founded(ruling.base.seq)
        self.desk.phase, self.recovery.returning, self.book.announced = SchedulerPhase.RUNNING, False, None
        self.book.decision = Decide(view, ruling.base, ruling.hand_on, ruling.sources, view.reason)
        self.desk.note(
            "decide", id=str(view.id), members=view.ids(), base=ruling.base.hash, hand_on=ruling.hand_on,
            reason=view.reason,
        )  # fmt: skip
        self._sort_out(old, view, ruling)
        for peer in self.roster.members_of(view):
            peer.standing = Standing.MEMBER
            peer.report = None
            self.roster.send(peer, self.book.decision)
        for peer in (self.roster.peers[m.id] for m in view.leaving):
            peer.standing, peer.report = Standing.LEAVER, None
            self.roster.send(peer, self.book.decision)

    def _sort_out(self, old: Iterable[Peer], view: View | None, ruling: Ruling) -> None:
        reasons = dict(ruling.rejoin)
        for peer in old:
            if (view is not None and is_named(view, peer.id)) or (view is None and peer in self.keeper.writing()):
                continue
            if peer.id in ruling.waiting and peer.alive and peer.conn is not None:
                peer.standing, peer.report, peer.entered = Standing.READY, None, NO_VIEW
                if peer.caught_up:
                    peer.standing, peer.observes_since = Standing.OBSERVING, self.desk.now
            elif peer.standing is Standing.LEAVER and (peer.alive or not self.pipelining.wanted):
                self.roster.release(peer, "nobody is left who needs it")
            elif view is not None and peer.leaving and not peer.dead:
                self.roster.release(
                    peer, self.rewiring.cut.get(peer.id) or reasons.get(peer.id) or "the others go on without it"
                )
            elif view is None and not peer.condemned and peer.id not in reasons:
                continue  # dead without proof beyond time: if it comes back before others found the job, it goes on
            else:
                cut = f"{self.rewiring.cut[peer.id]}, who go on" if peer.id in self.rewiring.cut else ""
                self.roster.fence(
                    peer, reasons.get(peer.id) or peer.condemned or cut or peer.dead or "a view excluded it"
                )

    def _append(self, view: View, *, carried: bool = False) -> None:
        before = self.book.latest
        self.links.follow(before, view)
        self.book.append(view, carried=carried)
        self.pipelining.followed(before, view)

    def _announce(self, view: View) -> None:
        """Sends a decided view to its members, before a header carries it."""
        self._append(view, carried=True)
        self.book.decision, self.book.announced = None, NextView(view)
        for peer in self.roster.members_of(view):
            peer.standing = Standing.MEMBER
        for peer in self.roster.peers.values():
            if peer.standing is Standing.MEMBER and view.find(peer.id) is None:
                peer.standing = Standing.LEAVER
            if peer.standing in (Standing.MEMBER, Standing.LEAVER):
                self.roster.send(peer, self.book.announced)

    def _on_reset(self, token: int, force: bool) -> None:
        """Ends the job at an operator's request; not while members train on, unless the request says so."""
        lives = [p.id for p in self.roster.living() if p.conn is not None and p.id not in self.detector.suspicions]
        lost = self.identity.lost_words()
        awaited = [
            p.id
            for p in self.roster.living()
            if p.conn is None and not p.known and self.desk.now < self.detector.grace_until
        ]
        why = ""
        if self.book.persisting is not None:
            why = "a decision is being written at this moment; ask again"
        elif self.desk.phase is SchedulerPhase.FINISHED and not self.end.tells:
            why = "the job is finished already; the next one by its name begins when this scheduler ends, in a moment"
        elif self.desk.phase is SchedulerPhase.FINISHED:
            text = "the job was finished; nobody is told of it any more, and the next members begin it anew"
            self.desk.out += [Answer(token, True, text), SchedulerDone(text, again=True)]
            return
        elif lost and not force:
            why = f"{lost}. To begin another job all the same: --force" if self.book.views else lost
        elif not self.book.views:
            why = "there is nothing to end: no view of this job was decided yet"
        elif lives and not force:
            why = (
                f"{', '.join(lives)} {'is' if len(lives) == 1 else 'are'} in the job and alive. Ask them to leave "
                "(`chaos-lightning drain NODE`, or Ctrl+C there); or end the job under them: --force"
            )
        elif awaited and not force:
            left = self.detector.grace_until - self.desk.now
            why = (
                f"this scheduler has just begun, and {', '.join(awaited)} may be on the way back to it: ask again in "
                f"{left:.0f} s, or --force"
            )
        if why:
            self.desk.out.append(Answer(token, False, why))
            return
        self.book.persist(Persist(0, "finish", self.roster.next_number(), again=True), lambda: self._reset(token))

    def _reset(self, token: int) -> None:
        """Releases all members of the job, whatever they do; newcomers are told to come again, and found the next
        job.
        """
        reason = "an operator has ended the job"
        who = self._over_for_good(Released(reason, asked=True))
        self.desk.note("reset", members=who, view=str(self.book.views[-1].id))
        self.desk.out.append(
            Answer(token, True, f"the job is ended; its last view had {', '.join(who) or 'nobody'} in it")
        )
        self.desk.out.append(SchedulerDone(reason, again=True))

    def _over_for_good(self, words: ToMember) -> list[str]:
        """Ends the job unfinished: tells all members, and returns the ids of those of the latest view."""
        who = [p.id for p in self.roster.members()]
        self.desk.phase = SchedulerPhase.FINISHED
        for peer in self.roster.peers.values():
            if peer.standing in (Standing.MEMBER, Standing.LEAVER):
                self.roster.send(peer, words)
        return who

    def _end(self, reason: str) -> bool:
        """Ends the job, as it cannot go on and is not to wait; members that are started again found it anew."""
        self.book.persist(Persist(0, "finish", self.roster.next_number(), again=True), lambda: self._ended(reason))
        return True

    def _ended(self, reason: str) -> None:
        who = self._over_for_good(Fence(bounded(reason), rejoin=False, over=True))
        self.desk.note("ended", members=who, view=str(self.book.views[-1].id), reason=reason)
        self.desk.out.append(SchedulerDone(reason, again=True))

    def _go_without(self, ruling: Ruling) -> bool:
        """Decides what to do if parts of the training state are lost and only others are left (P14).

        The job ends, or all wait until an operator ends it, or brings a machine back: as members ask. Whoever is to
        leave goes at once, since it can serve nobody.
        """
        step, lost = max((p.step for p in self.roster.party()), default=0), self.pipelining.names(ruling.lost)
        text = f"{lost} of the training state (step {step} or later) are at no member that lives"
        if self.pipelining.ends_without_parts:
            return self._end(f"{text}, so the job ends; {self.book.saved_words}")
        if leaving := [p for p in self.roster.party() if p.leaving]:
            for peer in leaving:
                self.keeper.let_keep(peer, f"{text}, so nobody needs this one meanwhile")
            return True
        advice = (
            "end the job under those who wait (`chaos-lightning reset --force`), or have them leave (Ctrl+C), and "
            "begin it from a checkpoint"
        )
        return self._hold(f"training waits: {text}: {advice}; {self.book.saved_words}")

    def _lose(self, reason: str, ruling: Ruling | None = None) -> None:
        """Notes that no member holds the training state any more: the next newcomers found the job anew."""
        self.desk.lost = f"{reason}; the next members found the job again from their own state"
        self.desk.note("notice", text=self.desk.lost)
        ruling = ruling or Ruling(base=None)
        self.book.decision, self.book.announced, self.recovery.returning = None, None, False
        self.recovery.again = ""
        self.recovery.expected = frozenset()
        for peer in self.roster.peers.values():
            if peer.standing is Standing.OBSERVING:
                peer.standing = Standing.READY
            peer.way, peer.caught_up = "", False
        self._sort_out([*self.roster.members(), *self.roster.leavers()], None, ruling)
        self.desk.phase = (
            SchedulerPhase.FOUNDING
        )  # not before all are sorted: those that are newcomers again say what the job is
        # One of them that comes back before others found the job holds its state, and says what it is.
        self.roster.vouched = False
        self.roster.forget_terms()
