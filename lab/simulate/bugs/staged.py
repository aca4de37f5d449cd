"""Planted bugs in jobs with pipelines: parts of the state, attempts, moves of parts, and leaves (P1 to P17).

Theory of operation. Coverage masks some of them: a sum that lacks a micro-batch is refused by the root before it does
harm, which is a finding, too, since members of one attempt have one plan. These are planted with that check off, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.judging import Deaths
from chaos_lightning.membership.keeping import Keeper
from chaos_lightning.membership.member import MemberMachine, MemberPhase
from chaos_lightning.membership.member_parts import MemberParts
from chaos_lightning.membership.parts import Division, common, division, numbers
from chaos_lightning.membership.peers import Peer
from chaos_lightning.membership.pipelining import Lineup, Pipelining
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.scene import Scene
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.planning.pipelines.units import BACKWARD
from chaos_lightning.protocol.spans import subtract, union
from chaos_lightning.protocol.types import Contribution, Header, Kept, Kind, Report, Span, View, ViewId
from lab.simulate.bugs.frame import Bug, planted, with_parts
from lab.simulate.node import Node
from lab.simulate.part_plane import PartPlane
from lab.simulate.plan import Plan
from lab.simulate.plans.staged import (
    announced_plan,
    crowded_plan,
    drifting_plan,
    early_plan,
    founding_plan,
    frozen_plan,
    leaving_plan,
    let_go_plan,
    moved_plan,
    parting_plan,
    rerun_plan,
    rounds_plan,
    sides_plan,
    tied_plan,
    torn_plan,
)
from lab.simulate.staged import Border, Run, StagedNode
from lab.simulate.staged_hooks import StagedHooks
from lab.simulate.staged_training import Parts, RawSum, clipping, norms, weight
from lab.simulate.training import Attempt
from lab.simulate.world import Hooks


def hooks(
    *,
    node: type[StagedNode] = StagedNode,
    machine: type[MemberMachine] = MemberMachine,
    scheduler: type[SchedulerMachine] = SchedulerMachine,
) -> type[Hooks]:
    """Returns a class of hooks in which the given classes replace the right ones."""
    node_with: type[Node] = type(node.__name__, (node,), {"machine_class": machine})
    return type("BugHooks", (StagedHooks,), {"node_class": node_with, "scheduler_class": scheduler})


class UncheckedMachine(MemberMachine):
    """Planted bug: the commit root does not check which micro-batches, or units of a batch, the sums cover."""

    def _make_header(self, view: View, box: Mapping[str, Contribution]) -> Header:
        return super()._make_header(replace(view, pipelines="", batch=""), box)


# ------------------------------------------------------------------ P1: the entered view alone


class ForeseeingNode(StagedNode):
    """Planted bug: a process runs units by an announced view before it has entered that view."""

    def _new_run(self, attempt: Attempt, view: View) -> Run:
        return super()._new_run(attempt, self.machine.waiting_view or view)


# ------------------------------------------------------------------ P2, P3: all micro-batches, once


class ShrinkingNode(StagedNode):
    """Planted bug: a process leaves out a micro-batch after a recovery, as if it was lost with the dead member."""

    def _new_run(self, attempt: Attempt, view: View) -> Run:
        run = super()._new_run(attempt, view)
        if self.header.next_view == view.id or self.header.seq == 0:
            return run
        last = max((j for j, spans in enumerate(run.batch.positions) if spans), default=-1)
        units = tuple(u for u in run.all_units if u.micro_batch != last)
        return self.with_units(run, units)


# ------------------------------------------------------------------ P4: reduced first


class HastyParts(MemberParts):
    """Planted bug: a member contributes to a step before the sums of its parts are reduced."""

    def may_contribute(self, view: View, contribution: Contribution, complete: tuple[ViewId, int] | None) -> bool:
        return not self.missing


class KeepingParts(MemberParts):
    """Planted bug: sums that were reduced in an earlier view count in the present one."""

    def may_contribute(self, view: View, contribution: Contribution, complete: tuple[ViewId, int] | None) -> bool:
        return not self.missing and (contribution.reduced or super().may_contribute(view, contribution, complete))


class KeepingMachine(MemberMachine):
    """Planted bug: a member sends the contribution of an earlier view again in the next one (with `KeepingParts`)."""

    def _rerun(self, view: View) -> None:
        return


class UncheckedKeepingMachine(KeepingMachine, UncheckedMachine):
    """Planted bug: as `KeepingMachine` and, besides, the commit root does not check which micro-batches the sums
    cover.
    """


class LaxParts(MemberParts):
    """Planted bug: a member checks that it holds its parts of the state only before steps, not before other slots."""

    def may_contribute(self, view: View, contribution: Contribution, complete: tuple[ViewId, int] | None) -> bool:
        return contribution.kind is not Kind.STEP or super().may_contribute(view, contribution, complete)


class BareParts(MemberParts):
    """Planted bug: a member contributes to steps without checking that it holds its parts of the state."""

    def may_contribute(self, view: View, contribution: Contribution, complete: tuple[ViewId, int] | None) -> bool:
        return contribution.kind is not Kind.STEP or complete == (view.id, contribution.seq)


class BareNode(StagedNode):
    """Planted bug: a process runs units although it lacks parts of the state."""

    def lacks(self, view: View) -> bool:
        return False

    def weight(self, layer: int) -> int:
        return weight(self.world.program, defaultdict(int, self.values), layer)


class RestlessParts(MemberParts):
    """Planted bug: a member starts work without the one part of the state that all members own."""

    @property
    def missing(self) -> tuple[Span, ...]:
        rest = self.owned[-1][1] - 1 if self.owned else 0
        return subtract(super().missing, ((rest, rest + 1),))


# ------------------------------------------------------------------ P5: who holds what


class ForgetfulScheduler(SchedulerMachine):
    """Planted bug: a recovery ignores parts that members would hold after a step is handed on to them."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        return super().rule({m: replace(r, owns=()) for m, r in reports.items()})


class StrictScheduler(SchedulerMachine):
    """Planted bug: a recovery tries only the last header as its base, never an earlier one."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        ruling = super().rule(reports)
        best = max(reports.values(), key=lambda r: (r.entered, r.seq))
        if ruling.base is None or best.last is None or ruling.base.seq >= best.seq:
            return ruling
        assert self.book.latest is not None
        return replace(ruling, base=None, lost=division(self.book.latest).everything)


class BelievingScheduler(SchedulerMachine):
    """Planted bug: a recovery assumes that members hold all parts that they own, whatever they report."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        assert self.book.latest is not None
        parts = division(self.book.latest)
        return super().rule({m: replace(r, parts=parts.owned(m)) if r.parts else r for m, r in reports.items()})


# ------------------------------------------------------------------ P6: last holders


class EagerDetector(Detector):
    """Planted bug: a member that alone holds some part counts as a last holder only if no other member holds any
    part.
    """

    def _is_last_holder(self, member: str, scene: Scene, answered: tuple[Span, ...]) -> bool:
        return not answered and super()._is_last_holder(member, scene, answered)


class EagerDeaths(Deaths):
    """Planted bug: unproven deaths stand although parts of the state are lost with them."""

    def take_back(self, lost: tuple[Span, ...] | None = None) -> bool:
        return lost is None and super().take_back()


class OneSidedScheduler(SchedulerMachine):
    """Planted bug: the members on one side of a broken link go on as if they held the parts of the other side."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        ruling = super().rule({p.id: p.report for p in self.roster.party() if p.report is not None})
        return replace(
            ruling,
            members=tuple(m for m in ruling.members if m in reports),
            leaving=tuple(m for m in ruling.leaving if m in reports),
            bound=tuple(m for m in ruling.bound if m in reports),
        )


# ------------------------------------------------------------------ P7: attempts


class RetentiveNode(StagedNode):
    """Planted bug: a process keeps its raw sums when a step begins anew."""

    def _new_run(self, attempt: Attempt, view: View) -> Run:
        before, run = self.last_run, super()._new_run(attempt, view)
        if before is not None and before.attempt.base == attempt.base:
            for layer in run.grads:
                run.grads[layer] += before.grads.get(layer, [])
        return run


class HurriedNode(StagedNode):
    """Planted bug: a process begins a step anew in the middle of a unit, whose gradient then enters the new sums."""

    def _unit_over(self, run: Run) -> None:
        new, unit = self.run, next(iter(run.units), None)
        again = new is not None and new is not run and new.attempt.base == run.attempt.base
        if again and new is not None and unit is not None and unit.kind == BACKWARD:
            grads = {part: new.grads.get(part, []) for part in range(self.world.program.rest)}
            self._backward(replace(run, grads=grads), unit)
        super()._unit_over(run)


class NumberingNode(StagedNode):
    """Planted bug: tensors of different attempts at the same slot are mixed up, since only the slot number is
    compared.
    """

    def takes(self, run: Run, tensor: Border) -> bool:
        return tensor.attempt.seq == run.attempt.seq


# ------------------------------------------------------------------ P8: moves


class TidyParts(MemberParts):
    """Planted bug: a former owner drops its parts at once when a header brings a view in which it does not own them."""

    def pull(self, header: Header, view: View) -> list[fx.MemberEffect]:
        gone = _dropped(self) if header.next_view == view.id else []
        return [*gone, *super().pull(header, view)]


class TidyAtDecideParts(MemberParts):
    """Planted bug: a former owner drops its parts at once when a recovery's decision gives them to others."""

    def pull(self, header: Header, view: View) -> list[fx.MemberEffect]:
        gone = _dropped(self) if header.next_view != view.id else []
        return [*gone, *super().pull(header, view)]


def _dropped(parts: MemberParts) -> list[fx.MemberEffect]:
    """Drops the parts that the member does not own; returns the effects that the process must carry out."""
    gone = subtract(parts.held, parts.owned)
    parts.held = common(parts.held, parts.owned)
    return [fx.DropParts(gone)] if gone else []


# ------------------------------------------------------------------ P9: leaves


class SelfishNode(StagedNode):
    """Planted bug: a process that is let go serves its parts to nobody."""

    def serve_part(self, header: Header, view: View, part: int) -> int | None:
        return None if self.machine.phase is MemberPhase.LEAVING else super().serve_part(header, view, part)


class LingeringMachine(MemberMachine):
    """Planted bug: a leaver goes after a fixed time, even if members still need its parts."""

    def _on_tick(self) -> None:
        self.parts.serves = False
        super()._on_tick()


class ReleasingRoster(Roster):
    """Planted bug: the scheduler releases leavers once all members have entered the view, even if some still lack
    parts.
    """

    @property
    def settled(self) -> bool:
        latest, members = self._book.latest, self.members()
        here = latest is not None and len(members) == len(latest.members)
        return here and latest is not None and all(p.alive and p.entered == latest.id for p in members)


class UnaskingRoster(Roster):
    """Planted bug: a recovery does not ask leavers which parts they hold."""

    def party(self) -> list[Peer]:
        return self.living()


class ForgettingPipelining(Pipelining):
    """Planted bug: a recovery's view leaves out the leavers that the previous view named."""

    def lineup(self, latest: View, ruling: Ruling) -> Lineup | str:
        found = super().lineup(latest, ruling)
        if isinstance(found, str) or not found.members:
            return found
        return replace(found, leaving=tuple(m for m in found.leaving if m not in latest.leaving))


# ------------------------------------------------------------------ P10: newcomers where no plan fits


class WaitingPipelining(Pipelining):
    """Planted bug: newcomers wait for a boundary even if no plan is possible without them."""

    def lineup(self, latest: View, ruling: Ruling) -> Lineup | str:
        found = super().lineup(latest, ruling)
        known = {m.id for m in (*latest.members, *latest.leaving)}
        if isinstance(found, Lineup) and any(m.id not in known for m in found.members):
            return "newcomers come in at a boundary"
        return found


# ------------------------------------------------------------------ P11, P12: norms and hashes


class OwnNormNode(StagedNode):
    """Planted bug: a process clips gradients by the norm of its own parts only."""

    def clipped(self, header: Header, results: Mapping[int, RawSum]) -> str:
        return clipping([norms(results)])


class FiniteNode(StagedNode):
    """Planted bug: a process ends when a gradient norm is NaN."""

    def _commit(self, header: Header, contributors: tuple[str, ...]) -> None:
        super()._commit(header, contributors)
        if any(b"NaN" in said for said in header.answers) and self.alive:
            self.outcome = f"disagreement: the norm of slot {header.seq} is no number"
            self.quit()


class SternMachine(MemberMachine):
    """Planted bug: a member leaves and joins again when one of its parts has drifted, as would be right without
    pipelines.
    """

    def _commit(self, header: Header) -> None:
        super()._commit(header)
        if any(drifted.member == self.member_id for drifted in header.drifted):
            self._eject("its state is not the job's", rejoin=True)


# ------------------------------------------------------------------ P13: all leave


class OwnHeaderNode(StagedNode):
    """Planted bug: a process that is to leave writes its parts to a file at once, at whatever header it is."""

    def leave(self, reason: str) -> None:
        super().leave(reason)
        self._write_down()

    def _part(self, view: View | None) -> None:
        return


class ExitingNode(StagedNode):
    """Planted bug: a process writes its parts to a file and exits without telling the scheduler."""

    def _keep(self, file: tuple[Kept, Parts, str]) -> None:
        self.file, self.outcome = file, "left: it has written its parts down"
        self.quit()


class HastyKeeper(Keeper):
    """Planted bug: all leavers are released once one of them has reported its file."""

    def all_told(self, leavers: Sequence[Peer]) -> bool:
        return super().all_told(leavers) or any(self.has_told(p) for p in leavers)


class ForgetfulKeeper(Keeper):
    """Planted bug: the scheduler ignores what leavers reported about their files."""

    def told_reports(self) -> list[Report]:
        return []


# ------------------------------------------------------------------ P14: GENESIS


class CopyingParts(MemberParts):
    """Planted bug: before slot 1, parts that a member pulled in the previous view count as held."""

    def stand_in(self, me: str, view: View, seq: int) -> None:
        before = self.held
        super().stand_in(me, view, seq)
        if view.pipelines and seq == 0:
            self.held = union((*self.held, *common(before, self.owned)))


class CopyingNode(StagedNode):
    """Planted bug: before slot 1, a process keeps the values of parts that it pulled in the previous view (with
    `CopyingParts`).
    """

    def _viewed(self, view: View) -> None:
        before = self.values
        super()._viewed(view)
        if self.machine.seq == 0:
            self.values = {p: self.values.get(p, before.get(p, 0)) for p in numbers(self.machine.parts.held)}


class GenerousNode(StagedNode):
    """Planted bug: before slot 1, a process serves any part that it has, even one that was made in another view."""

    def serve_part(self, header: Header, view: View, part: int) -> int | None:
        if header.seq > 0:
            return super().serve_part(header, view, part)
        return None if self.outcome or self.header.seq else self.values.get(part, self.older.get(part))

    def _viewed(self, view: View) -> None:
        self.older = {**getattr(self, "older", {}), **self.values}
        super()._viewed(view)

    older: dict[int, int] = {}  # noqa: RUF012  # set by `_viewed` before it is read


# ------------------------------------------------------------------ P15, P17: shared parameters, rounds


class SplitPlane(PartPlane):
    """Planted bug: a shared parameter's gradients are summed in two separate groups of its owners: those of layer 0 and
    the others.
    """

    def owners(self, parts: Division, part: int) -> tuple[str, ...]:
        if parts.layer_count <= part < len(parts.names) - 1:
            mine = self.me in parts.owners[0]
            return tuple(m for m in parts.owners[part] if (m in parts.owners[0]) is mine)
        return super().owners(parts, part)


class SplittingNode(StagedNode):
    part_plane_class = SplitPlane


class CountingNode(StagedNode):
    """Planted bug: a round of evaluation that begins anew keeps the metric counts of the attempt before."""

    def _new_run(self, attempt: Attempt, view: View) -> Run:
        before, run = self.last_run, super()._new_run(attempt, view)
        if before is not None and before.attempt.base == attempt.base and run.kind is Kind.GATHER:
            run.counts += before.counts
            run.all_units = (*(u for u in before.all_units if u not in before.units), *run.all_units)
        return run


def _parts(
    kind: type[MemberParts], base: type[MemberMachine] = MemberMachine, node: type[StagedNode] = StagedNode
) -> type[Hooks]:
    """Returns hooks of a simulated job whose members keep track of their parts of the state by a given class."""
    return hooks(node=node, machine=planted(base, parts=kind))


def _scheduler(**parts: type[object]) -> type[Hooks]:
    """Returns hooks of a simulated job whose scheduler has components of given classes."""
    return hooks(scheduler=with_parts(**parts))


_UNCHECKED = hooks(machine=UncheckedMachine)
_CONTROLS = {
    **dict.fromkeys(("P3-unchecked", "P4-kept-unchecked", "P17-counting-unchecked"), _UNCHECKED),
    "P6-eager": _scheduler(deaths=EagerDeaths),
}
"""Hooks with the masking guard off alone, by name of the bug."""

_BUGS: dict[str, tuple[str, Callable[[int], Plan], type[Hooks]]] = {
    "P1-foreseen": ("an announced view routes", announced_plan, hooks(node=ForeseeingNode)),
    "P2-left-out": ("a micro-batch dies with its member", rerun_plan, hooks(node=ShrinkingNode)),
    "P3-unchecked": (
        "nobody checks what sums cover, and a micro-batch is left out", rerun_plan,
        hooks(node=ShrinkingNode, machine=UncheckedMachine),
    ),
    "P4-hasty": ("a contribution before the reduction", rerun_plan, _parts(HastyParts)),
    "P4-kept": ("a step's contribution is sent again", rerun_plan, _parts(KeepingParts, KeepingMachine)),
    "P4-kept-unchecked": (
        "a step's contribution is sent again, unchecked", rerun_plan, _parts(KeepingParts, UncheckedKeepingMachine)
    ),
    "P4-steps-only": ("only steps wait for the parts", leaving_plan, _parts(LaxParts)),
    "P4-bare": ("a step's contribution without its parts", leaving_plan, _parts(BareParts, node=BareNode)),
    "P4-restless": ("newcomers do without the rest", crowded_plan, _parts(RestlessParts, node=BareNode)),
    "P5-not-handed-on": (
        "to whom a step can be handed on does not count", torn_plan, hooks(scheduler=ForgetfulScheduler)
    ),
    "P5-strict": ("the lower header is not tried", moved_plan, hooks(scheduler=StrictScheduler)),
    "P5-believing": ("the plan says who holds what", leaving_plan, hooks(scheduler=BelievingScheduler)),
    "P6-eager": (
        "a frozen only holder is taken for dead", frozen_plan, _scheduler(detector=EagerDetector, deaths=EagerDeaths)
    ),
    "P6-one-sided": ("a side of a graph passes for all", sides_plan, hooks(scheduler=OneSidedScheduler)),
    "P7-retentive": ("raw sums survive a rerun", rerun_plan, hooks(node=RetentiveNode)),
    "P7-hurried": ("a step begins anew within a unit", rerun_plan, hooks(node=HurriedNode)),
    "P7-numbers": ("tensors are known by their slot", early_plan, hooks(node=NumberingNode)),
    "P8-tidy": ("an old owner drops with the header that carries the view", leaving_plan, _parts(TidyParts)),
    "P8-tidy-decide": ("an old owner drops at the Decide", rerun_plan, _parts(TidyAtDecideParts)),
    "P9-selfish": ("who is let go serves nothing", leaving_plan, hooks(node=SelfishNode)),
    "P9-lingering": ("who is let go lingers out", leaving_plan, hooks(machine=LingeringMachine)),
    "P9-released": ("leavers go when all have entered", leaving_plan, _scheduler(roster=ReleasingRoster)),
    "P9-unasked": ("who is let go is not asked", let_go_plan, _scheduler(roster=UnaskingRoster)),
    "P9-forgotten": (
        "a second decision forgets who is let go", let_go_plan, _scheduler(pipelining=ForgettingPipelining)
    ),
    "P10-waiting": (
        "newcomers wait for a boundary that cannot come", crowded_plan, _scheduler(pipelining=WaitingPipelining)
    ),
    "P11-own": ("members clip by the norm of what they own", rerun_plan, hooks(node=OwnNormNode)),
    "P11-finite": ("a NaN ends the job", rerun_plan, hooks(node=FiniteNode)),
    "P12-stern": ("a part that drifts puts its member out", drifting_plan, hooks(machine=SternMachine)),
    "P13-own-header": ("each writes at its own header", parting_plan, hooks(node=OwnHeaderNode)),
    "P13-exits": ("one exits at once, and is forgotten", parting_plan, hooks(node=ExitingNode)),
    "P13-hasty": ("all are let go once one has told", parting_plan, _scheduler(keeper=HastyKeeper)),
    "P13-forgetful": ("what was told counts no more", parting_plan, _scheduler(keeper=ForgetfulKeeper)),
    "P14-copies": ("a pulled copy counts at GENESIS", founding_plan, _parts(CopyingParts, node=CopyingNode)),
    "P14-generous": ("anybody serves parts at GENESIS", founding_plan, hooks(node=GenerousNode)),
    "P15-split": ("a shared parameter is of one layer's owners", tied_plan, hooks(node=SplittingNode)),
    "P17-counting": ("a round's counts survive a rerun", rounds_plan, hooks(node=CountingNode)),
    "P17-counting-unchecked": (
        "a round's counts survive a rerun, unchecked", rounds_plan,
        hooks(node=CountingNode, machine=UncheckedMachine),
    ),
}  # fmt: skip
"""Bugs by name, which begins with the rule: in words, the runs in which it must show, and the broken behaviour."""

STAGED_BUGS = {
    name: Bug(rule=name.partition("-")[0], what=what, hooks=made, plan=plan, control=_CONTROLS.get(name, StagedHooks))
    for name, (what, plan, made) in _BUGS.items()
}
"""Planted bugs about pipelines, by name; without the bug these jobs need the behaviour of jobs with pipelines, too."""
