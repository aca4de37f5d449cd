"""Planted bugs in what members commit, hold, promise, use and vote (1 to 4a, 8 to 11, 15, 19, 25, 28)."""

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
    """Planted bug: the commit root commits as soon as all members but one have contributed."""

    def _all_in(self, view: View, box: Mapping[str, Contribution]) -> bool:
        return len(box) >= max(1, len(view.members) - 1)

    def _differing_in(self, view: View, box: Mapping[str, Contribution]) -> tuple[Differs, ...]:
        return ()

    def _make_header(self, view: View, box: Mapping[str, Contribution]) -> Header:
        part = replace(view, members=tuple(m for m in view.members if m.id in box))
        return close_slot(view=part, prev=self.header, contributions=box, waiting=carriable(self.waiting_view, view))


class MixedPlane(DataPlane):
    """Planted bug: messages with gradients carry the step but not the view, so that bytes of an older view enter a
    newer view's sums.
    """

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
    """Planted bug: every member, the commit root too, commits on a header without the reduced bytes."""

    def _has_bytes(self, header: Header) -> bool:
        return True


class EagerFollower(MemberMachine):
    """Planted bug: members other than the commit root commit on a header without the reduced bytes."""

    def _has_bytes(self, header: Header) -> bool:
        return super()._has_bytes(header) or not self.is_root


class UncountedMachine(MemberMachine):
    """Planted bug: a member that forwards headers reports a committed slot as uncommitted while members below it in the
    header's tree lack the header.
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
    """Planted bug: the next slot's reduction overwrites the raw bytes of the last committed slot."""

    BUFFERS = 1

    def serve(self, seq: int, head: str, view: ViewId) -> dict[int, Result]:
        return dict(self.buffer(seq).done)


# ------------------------------------------------------------------ 6b: who differs is put out


class CarelessRoot(MemberMachine):
    """Planted bug: the commit root does not check that the contributions agree."""

    def _differing_in(self, view: View, box: Mapping[str, Contribution]) -> tuple[Differs, ...]:
        return ()


# ------------------------------------------------------------------ 4: only stable steps leave the job


class HastyNode(Node):
    """Planted bug: a process writes its checkpoint when it commits a step, before the step is known to be stable."""

    def externalise(self, before: Header, header: Header) -> None:
        self.world.oracle.externalised(self.machine.member_id, self.lineage, header)


# ------------------------------------------------------------------ 4a: who does not stand on that header


class BlindMachine(MemberMachine):
    """Planted bug: a member marks contributions as based on its newest header, whatever header the training thread
    computed them on.
    """

    def _on_own(self, contribution: Contribution) -> None:
        super()._on_own(replace(contribution, prev_hash=self.header.hash))


# ------------------------------------------------------------------ 7, 14a: the chain


class MemoryStore(Store):
    """Planted bug: the store's content is lost when the scheduler's process ends."""

    def open(self, above: int = 0, chain: str = "") -> fx.Chain:
        self.forget()
        return super().open(above, chain)


class CarefreeIdentity(Identity):
    """Planted bug: members whose view the store lacks are taken for newcomers, and a second job is founded beside
    theirs.
    """

    def _is_foreign(self, hello: Hello) -> bool:
        return False


CarefreeScheduler = with_parts(identity=CarefreeIdentity)


# ------------------------------------------------------------------ 8: promises


class FickleMachine(MemberMachine):
    """Planted bug: a member promises to leave its view, but goes on committing in it."""

    def _outdated(self, view: ViewId) -> bool:
        return view < self._entered_id

    @property
    def prepared(self) -> bool:
        return False


# ------------------------------------------------------------------ 9: base and hand-on


class LowBaseScheduler(SchedulerMachine):
    """Planted bug: a recovery takes the lowest reported header as its base, and always redoes the slot."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        ruling = super().rule(reports)
        loaded = [r for m, r in reports.items() if r.loaded and m in ruling.members]
        if ruling.base is None or not loaded:
            return ruling
        base = min(loaded, key=lambda r: (r.entered, r.seq)).last
        return replace(ruling, base=base, hand_on=False, sources=())


class CarelessScheduler(SchedulerMachine):
    """Planted bug: a recovery hands on a header although no member holds some of its bytes."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        ruling = super().rule(reports)
        pending = next((r.pending for r in reports.values() if r.pending is not None), None)
        if pending is None or ruling.base is None or ruling.hand_on or pending.prev_hash != ruling.base.hash:
            return ruling
        sources = tuple(Source(m, r.held) for m, r in reports.items())
        return replace(ruling, base=pending, hand_on=True, sources=sources)


class BriefRecovery(Recovery):
    """Recovery that takes only hashes, not headers, in the reports of all members but the youngest, as in a large job
    (control of `UnaskedRecovery`).
    """

    def _tellers(self, living: Sequence[Peer]) -> set[str]:
        return {p.id for p in living[-1:]}


class UnaskedRecovery(BriefRecovery):
    """Planted bug: a recovery never asks for the pending header whose hash alone a report contains."""

    def _needs(self, report: Report) -> tuple[str, ...]:
        return (report.head,)


# ------------------------------------------------------------------ 10: a view change reassigns nothing


class ReassigningNode(Node):
    """Planted bug: a process assigns samples anew whenever the view changes."""

    def samples(self) -> tuple[int, tuple[Span, ...]]:
        return self.world.program.share(self.machine.view, self.machine.member_id, self.header.ledger)

    def _viewed(self, view: View) -> None:
        super()._viewed(view)
        if self.training and self.machine.contribution is None and self.machine.seq == self.header.seq:
            self.life += 1
            self._beat(self.life)
            self._begin()


class FirstOnlyNode(Node):
    """Planted bug: a process gets samples for its first step only if the view has no predecessor, so that a job that is
    founded again begins with an empty step.
    """

    def samples(self) -> tuple[int, tuple[Span, ...]]:
        epoch, spans = super().samples()
        again = self.header.seq == 0 and self.assigning is not None and self.assigning.predecessor != NO_VIEW
        return epoch, () if again else spans


# ------------------------------------------------------------------ 11: the excluded throw their state away


class StubbornNode(TrustingNode):
    """Planted bug: a process that was put out keeps its training state, and takes it for the job's when it joins
    again.
    """

    def forget(self) -> None:
        return

    def kept_ranges(self, header: Header) -> dict[int, int]:
        return dict(enumerate(self.state)) if self.training or self.life else {}


# ------------------------------------------------------------------ 15, 19: what a joiner gets


class LiveNode(TrustingNode):
    """Planted bug: a process serves its present memory to joiners instead of the snapshot at the header."""

    def serve_state(self, header: Header) -> State | None:
        return None if super().serve_state(header) is None else self.live


# ------------------------------------------------------------------ 25: spent means committed


class DrawingNode(Node):
    """Planted bug: samples count as used once they are assigned to a member, even if they are never committed."""

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
    """Planted bug: the commit root counts votes of earlier attempts besides those of the present one."""

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
