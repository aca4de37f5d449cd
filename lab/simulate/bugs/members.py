"""Planted bugs about members: what they commit, hold, promise, use and vote (1 to 4a, 8 to 11, 15, 19, 25, 28)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.identity import Identity
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.peers import Peer
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.slots import carriable, close_slot
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Contribution,
    Differs,
    Header,
    Hello,
    Kind,
    Prepare,
    Report,
    Source,
    Span,
    View,
    ViewId,
)
from lab.simulate.bugs.frame import Bug, HastyBook, TrustingNode, hooks_of, with_parts
from lab.simulate.dataplane import DataPlane, Down, Result, Up
from lab.simulate.node import Node
from lab.simulate.plans.members import (
    DEATHS,
    KINDS,
    forgetful_plan,
    half_sent_plan,
    last_holder_plan,
    late_plans,
    lost_range_plan,
    parting_plan,
    plans_of,
    scattered_plan,
    stale_plan,
    swallowed_plan,
)
from lab.simulate.store import Store
from lab.simulate.training import State
from lab.simulate.world import Hooks

# ------------------------------------------------------------------ 1: one attempt, one set of contributors


class SubsetMachine(MemberMachine):
    """Member that, as the root, commits as soon as all but one have contributed."""

    def _all_in(self, view: View, box: Mapping[str, Contribution]) -> bool:
        return len(box) >= max(1, len(view.members) - 1)

    def _differing_in(self, view: View, box: Mapping[str, Contribution]) -> tuple[Differs, ...]:
        return ()

    def _make_header(self, view: View, box: Mapping[str, Contribution]) -> Header:
        part = replace(view, members=tuple(m for m in view.members if m.id in box))
        return close_slot(view=part, prev=self.header, contributions=box, waiting=carriable(self.waiting_view, view))


class MixedPlane(DataPlane):
    """Data plane whose ranges carry the step only: bytes of an older view get into the sums of a newer one."""

    def take(self, message: Up | Down) -> None:
        attempt = self.attempt
        if attempt is not None and message.seq == attempt.seq and message.view < attempt.view.id:
            message = replace(message, view=attempt.view.id)
        super().take(message)

    def drop(self, view: ViewId) -> None:
        if self.attempt is not None and self.attempt.view.id <= view:
            self.attempt.finished = True


# ------------------------------------------------------------------ 2: all ranges, one root


class EagerMachine(MemberMachine):
    """Member that commits on the header alone, as a root, too."""

    def _has_bytes(self, header: Header) -> bool:
        return True


class EagerFollower(MemberMachine):
    """Member that commits on the header alone, unless it is the root."""

    def _has_bytes(self, header: Header) -> bool:
        return super()._has_bytes(header) or not self.is_root


class UncountedMachine(MemberMachine):
    """Member that counts a slot as committed only once all members below it in the header's tree have the header; until
    then it reports the slot before.
    """

    _before = GENESIS

    def _commit(self, header: Header) -> None:
        self._before = self.header
        super()._commit(header)

    def _on_prepare(self, message: Prepare, held: tuple[Span, ...]) -> None:
        super()._on_prepare(message, held)
        before = self._before
        below = self._spreading.below(self.view, self.member_id) if self.view is not None else ()
        if below and before.hash == self.header.prev_hash:
            for i, effect in enumerate(self._out):
                if isinstance(effect, fx.ToScheduler) and isinstance(effect.message, Report):
                    open_slot = replace(effect.message, seq=before.seq, head=before.hash, last=before, pending=None)
                    self._out[i] = fx.ToScheduler(open_slot)


# ------------------------------------------------------------------ 3: raw bytes stay until the next header


class OneBufferPlane(DataPlane):
    """Data plane whose next attempt writes over the committed slot's raw bytes."""

    BUFFERS = 1

    def serve(self, seq: int, head: str, view: ViewId) -> dict[int, Result]:
        return dict(self.buffer(seq).done)


# ------------------------------------------------------------------ 6b: who differs is put out


class CarelessRoot(MemberMachine):
    """Member that, as the root, commits whatever is contributed."""

    def _differing_in(self, view: View, box: Mapping[str, Contribution]) -> tuple[Differs, ...]:
        return ()


# ------------------------------------------------------------------ 4: only stable steps leave the job


class HastyNode(Node):
    """Process that writes its checkpoint when a step commits here."""

    def externalise(self, before: Header, header: Header) -> None:
        self.world.oracle.externalised(self.machine.member_id, self.lineage, header)


# ------------------------------------------------------------------ 4a: who does not stand on that header


class BlindMachine(MemberMachine):
    """Member that stamps its own header's hash on whatever the training thread brings, instead of carrying the
    thread's.
    """

    def _on_own(self, contribution: Contribution) -> None:
        super()._on_own(replace(contribution, prev_hash=self.header.hash))


# ------------------------------------------------------------------ 7, 14a: the chain


class MemoryStore(Store):
    """Store that dies with the scheduler's process."""

    def open(self, above: int = 0, chain: str = "") -> fx.Chain:
        self.forget()
        return super().open(above, chain)


class CarefreeIdentity(Identity):
    """Identity check that takes members of unknown views for newcomers, whom the real one sends away, and founds a job
    beside them.
    """

    def _is_foreign(self, hello: Hello) -> bool:
        return False


CarefreeScheduler = with_parts(identity=CarefreeIdentity)


# ------------------------------------------------------------------ 8: promises


class FickleMachine(MemberMachine):
    """Member that reports, and goes on with the old view all the same."""

    def _outdated(self, view: ViewId) -> bool:
        return view < self._entered_id

    @property
    def prepared(self) -> bool:
        return False


# ------------------------------------------------------------------ 9: base and hand-on


class LowBaseScheduler(SchedulerMachine):
    """Scheduler that takes the lowest report as the base and always redoes."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        ruling = super().rule(reports)
        loaded = [r for m, r in reports.items() if r.loaded and m in ruling.members]
        if ruling.base is None or not loaded:
            return ruling
        base = min(loaded, key=lambda r: (r.entered, r.seq)).last
        return replace(ruling, base=base, hand_on=False, sources=())


class CarelessScheduler(SchedulerMachine):
    """Scheduler that hands on a header although some of its bytes are nowhere."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        ruling = super().rule(reports)
        pending = next((r.pending for r in reports.values() if r.pending is not None), None)
        if pending is None or ruling.base is None or ruling.hand_on or pending.prev_hash != ruling.base.hash:
            return ruling
        sources = tuple(Source(m, r.held) for m, r in reports.items())
        return replace(ruling, base=pending, hand_on=True, sources=sources)


class BriefRecovery(Recovery):
    """Recovery that is content with brief reports of all members but the youngest, as of the younger ones of a large
    job.
    """

    def _tellers(self, living: Sequence[Peer]) -> set[str]:
        return {p.id for p in living[-1:]}


class UnaskedRecovery(BriefRecovery):
    """Recovery that asks no member for a pending header that reports only name."""

    def _needs(self, report: Report) -> tuple[str, ...]:
        return (report.head,)


# ------------------------------------------------------------------ 10: a view change reassigns nothing


class ReassigningNode(Node):
    """Process that assigns anew whenever the view changes."""

    def samples(self) -> tuple[int, tuple[Span, ...]]:
        return self.world.program.share(self.machine.view, self.machine.member_id, self.header.ledger)

    def _viewed(self, view: View) -> None:
        super()._viewed(view)
        if self.training and self.machine.contribution is None and self.machine.seq == self.header.seq:
            self.life += 1
            self._beat(self.life)
            self._begin()


class FirstOnlyNode(Node):
    """Process that assigns its first step by a view without predecessor only, so that a job founded again begins with
    an empty one.
    """

    def samples(self) -> tuple[int, tuple[Span, ...]]:
        epoch, spans = super().samples()
        again = self.header.seq == 0 and self.assigning is not None and self.assigning.predecessor != NO_VIEW
        return epoch, () if again else spans


# ------------------------------------------------------------------ 11: the excluded throw their state away


class StubbornNode(TrustingNode):
    """Process that, thrown out, keeps its training state for the next join, and takes it for the job's."""

    def forget(self) -> None:
        return

    def kept_ranges(self, header: Header) -> dict[int, int]:
        return dict(enumerate(self.state)) if self.training or self.life else {}


# ------------------------------------------------------------------ 15, 19: what a joiner gets


class LiveNode(TrustingNode):
    """Process that serves its memory as it is, not the snapshot at the header."""

    def serve_state(self, header: Header) -> State | None:
        return None if super().serve_state(header) is None else self.live


# ------------------------------------------------------------------ 25: spent means committed


class DrawingNode(Node):
    """Process that takes all samples for spent that were assigned to any member."""

    _drawn: tuple[int, set[int]] = (0, set())

    def _unspent(self) -> tuple[int, list[int]]:
        program = self.world.program
        epoch = program.epoch(self.header.ledger)
        if self._drawn[0] != epoch:
            self._drawn = (epoch, set())
        left = [p for start, stop in program.unspent(self.header.ledger, epoch) for p in range(start, stop)]
        return epoch, [p for p in left if p not in self._drawn[1]]

    def samples(self) -> tuple[int, tuple[Span, ...]]:
        epoch, left = self._unspent()
        mine: tuple[Span, ...] = ()
        for member in self.assigning.members if self.assigning is not None else ():
            share, left = left[: member.quota], left[member.quota :]
            self._drawn[1].update(share)
            if member.id == self.machine.member_id:
                mine = tuple((p, p + 1) for p in share)
        return epoch, mine

    def next_kind(self) -> Kind:
        kind = super().next_kind()
        epoch, left = self._unspent()
        return Kind.CLOSING if kind is Kind.STEP and epoch < self.world.program.epochs and not left else kind


# ------------------------------------------------------------------ 28: votes


class DoubleVoteMachine(MemberMachine):
    """Member that keeps the votes of earlier attempts and counts them, too."""

    _heard: dict[int, list[Contribution]]

    def _on_contribution(self, contribution: Contribution) -> None:
        if not hasattr(self, "_heard"):
            self._heard = {}
        if contribution.kind is Kind.GATHER:
            self._heard.setdefault(contribution.seq, []).append(contribution)
        super()._on_contribution(contribution)

    def _make_header(self, view: View, box: Mapping[str, Contribution]) -> Header:
        header = super()._make_header(view, box)
        if header.kind is not Kind.GATHER:
            return header
        return replace(header, answers=tuple(c.payload for c in self._heard[header.seq]))


# ------------------------------------------------------------------ the list


MEMBER_BUGS: dict[str, Bug] = {
    "1-subset": Bug(
        rule="1",
        what="the root commits without one member",
        hooks=hooks_of(machine=SubsetMachine),
        plan=plans_of(*KINDS),
    ),
    "1-mixed": Bug(
        rule="1",
        what="ranges of different views are mixed",
        hooks=hooks_of(plane=MixedPlane),
        plan=late_plans("contribution"),
    ),
    "2-early-header": Bug(
        rule="2",
        what="header and commit without all ranges",
        hooks=hooks_of(machine=EagerMachine),
        plan=plans_of(*KINDS),
    ),
    "2-no-ranges": Bug(
        rule="2", what="commit on the header alone", hooks=hooks_of(machine=EagerFollower), plan=plans_of(*KINDS)
    ),
    "2-swallowed": Bug(
        rule="2",
        what="a commit is not counted before those below have its header",
        hooks=hooks_of(machine=UncountedMachine),
        plan=swallowed_plan,
    ),
    "3-one-buffer": Bug(
        rule="3", what="raw bytes are overwritten at once", hooks=hooks_of(plane=OneBufferPlane), plan=half_sent_plan
    ),
    "4-hasty": Bug(rule="4", what="unstable slots leave the job", hooks=hooks_of(node=HastyNode), plan=half_sent_plan),
    "4a-blind": Bug(
        rule="4a", what="nobody compares predecessors", hooks=hooks_of(machine=BlindMachine), plan=stale_plan
    ),
    "6b-careless": Bug(
        rule="6b", what="nobody compares contributions", hooks=hooks_of(machine=CarelessRoot), plan=parting_plan
    ),
    "7-hasty": Bug(
        rule="7",
        what="views are announced before they are stored",
        hooks=hooks_of(scheduler=with_parts(book=HastyBook)),
        plan=forgetful_plan,
        control=Hooks,
    ),
    "8-fickle": Bug(
        rule="8", what="reports promise nothing", hooks=hooks_of(machine=FickleMachine), plan=late_plans("committed")
    ),
    "9-low-base": Bug(
        rule="9", what="the lowest report is the base", hooks=hooks_of(scheduler=LowBaseScheduler), plan=half_sent_plan
    ),
    "9-careless": Bug(
        rule="9", what="hand-on with bytes missing", hooks=hooks_of(scheduler=CarelessScheduler), plan=lost_range_plan
    ),
    "9-unasked": Bug(
        rule="9",
        what="a header that reports only name is lost",
        hooks=hooks_of(scheduler=with_parts(recovery=UnaskedRecovery)),
        plan=scattered_plan,
        control=hooks_of(scheduler=with_parts(recovery=BriefRecovery)),
    ),
    "10-redeal": Bug(
        rule="10", what="a view change assigns anew", hooks=hooks_of(node=ReassigningNode), plan=half_sent_plan
    ),
    "10-first-only": Bug(
        rule="10",
        what="nobody assigns the first step of a job that is founded again",
        hooks=hooks_of(node=FirstOnlyNode),
        plan=last_holder_plan,
    ),
    "11-stubborn": Bug(
        rule="11",
        what="the excluded keep their state",
        hooks=hooks_of(node=StubbornNode),
        plan=plans_of("freeze", "freeze-trap"),
        control=hooks_of(node=TrustingNode),
    ),
    "14a-memory": Bug(
        rule="14a",
        what="the chain dies with the scheduler",
        hooks=hooks_of(store=MemoryStore, scheduler=CarefreeScheduler),
        plan=plans_of("sched-crash"),
        control=hooks_of(scheduler=CarefreeScheduler),
    ),
    "15-live": Bug(
        rule="15",
        what="donors serve live memory",
        hooks=hooks_of(node=LiveNode),
        plan=plans_of("join", "two-joins"),
        control=hooks_of(node=TrustingNode),
    ),
    "19-trusting": Bug(
        rule="19",
        what="joiners are promoted unchecked",
        hooks=hooks_of(node=TrustingNode),
        plan=plans_of("join", "two-joins", damage=0.05),
    ),
    "25-drawn": Bug(
        rule="25", what="spent means drawn", hooks=hooks_of(node=DrawingNode), plan=plans_of("kill", "kill-trap")
    ),
    "28-double-vote": Bug(
        rule="28",
        what="votes of earlier attempts count, too",
        hooks=hooks_of(machine=DoubleVoteMachine),
        plan=plans_of(*DEATHS, "link"),
    ),
}
"""Planted bugs about members, by name."""
