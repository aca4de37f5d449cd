"""Planted bugs about jobs with pipelines: parts, attempts, moves and leaves (P1 to P14).

Theory of operation. Coverage masks some of them: a sum that lacks a micro-batch is refused by the root before it does
harm, which is a finding, too, since members of one attempt have one plan. These are planted with that check off, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chaos_lightning.lab.simulate.bugs.frame import Bug, planted, with_parts
from chaos_lightning.lab.simulate.node import Node
from chaos_lightning.lab.simulate.plans.staged import (
    announced_plan,
    crowded_plan,
    early_plan,
    founding_plan,
    leaving_plan,
    moved_plan,
    rerun_plan,
    torn_plan,
)
from chaos_lightning.lab.simulate.staged import Border, Run, StagedNode
from chaos_lightning.lab.simulate.staged_hooks import StagedHooks
from chaos_lightning.lab.simulate.staged_training import Attempt
from chaos_lightning.lab.simulate.world import Hooks
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine, MemberPhase
from chaos_lightning.membership.member_parts import MemberParts
from chaos_lightning.membership.parts import common, division
from chaos_lightning.membership.pipelining import Lineup, Pipelining
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.spans import subtract
from chaos_lightning.protocol.types import Contribution, Header, Kind, Report, View, ViewId


def hooks(
    *,
    node: type[StagedNode] = StagedNode,
    machine: type[MemberMachine] = MemberMachine,
    scheduler: type[SchedulerMachine] = SchedulerMachine,
) -> type[Hooks]:
    """Hooks with some classes replaced."""
    node_with: type[Node] = type(node.__name__, (node,), {"machine_class": machine})
    return type("BugHooks", (StagedHooks,), {"node_class": node_with, "scheduler_class": scheduler})


class UncheckedMachine(MemberMachine):
    """The root does not look at what sums cover."""

    def _make_header(self, view: View, box: Mapping[str, Contribution]) -> Header:
        return super()._make_header(replace(view, pipelines=""), box)


# ------------------------------------------------------------------ P1: the entered view alone


class ForeseeingNode(StagedNode):
    """Runs the units of a view as soon as it is announced."""

    def _new_run(self, attempt: Attempt, view: View) -> Run:
        return super()._new_run(attempt, self.machine.waiting_view or view)


# ------------------------------------------------------------------ P2, P3: all micro-batches, once


class ShrinkingNode(StagedNode):
    """Leaves out a micro-batch after a recovery, as if the dead had taken it along."""

    def _new_run(self, attempt: Attempt, view: View) -> Run:
        run = super()._new_run(attempt, view)
        if self.header.next_view == view.id or self.header.seq == 0:
            return run
        last = max((j for j, spans in enumerate(run.batch.positions) if spans), default=-1)
        units = tuple(u for u in run.all_units if u.micro_batch != last)
        return self.with_units(run, units)


# ------------------------------------------------------------------ P4: reduced first


class HastyParts(MemberParts):
    """Contributes to a step before its parts are reduced."""

    def may_contribute(self, view: View, contribution: Contribution, complete: tuple[ViewId, int] | None) -> bool:
        return not self.missing


class KeepingParts(MemberParts):
    """Contributes again what was reduced in an earlier view."""

    def may_contribute(self, view: View, contribution: Contribution, complete: tuple[ViewId, int] | None) -> bool:
        return not self.missing and (contribution.reduced or super().may_contribute(view, contribution, complete))


class KeepingMachine(MemberMachine):
    """Sends a step's contribution again in the next view, with `KeepingParts`."""

    def _rerun(self, view: View) -> None:
        return


class UncheckedKeepingMachine(KeepingMachine, UncheckedMachine):
    """Nor does the root look at what sums cover."""


class LaxParts(MemberParts):
    """Asks for its parts before it contributes to steps alone."""

    def may_contribute(self, view: View, contribution: Contribution, complete: tuple[ViewId, int] | None) -> bool:
        return contribution.kind is not Kind.STEP or super().may_contribute(view, contribution, complete)


# ------------------------------------------------------------------ P5: who holds what


class ForgetfulScheduler(SchedulerMachine):
    """Does not count those to whom a step can be handed on."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        return super().rule({m: replace(r, owns=()) for m, r in reports.items()})


class StrictScheduler(SchedulerMachine):
    """Tries no header but the last."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        ruling = super().rule(reports)
        best = max(reports.values(), key=lambda r: (r.entered, r.seq))
        if ruling.base is None or best.last is None or ruling.base.seq >= best.seq:
            return ruling
        assert self.book.latest is not None
        return replace(ruling, base=None, lost=division(self.book.latest).everything)


class BelievingScheduler(SchedulerMachine):
    """Believes that members hold what the view says that they own."""

    def rule(self, reports: Mapping[str, Report]) -> Ruling:
        assert self.book.latest is not None
        parts = division(self.book.latest)
        return super().rule({m: replace(r, parts=parts.owned(m)) if r.parts else r for m, r in reports.items()})


# ------------------------------------------------------------------ P7: attempts


class RetentiveNode(StagedNode):
    """Keeps its raw sums when the step begins anew."""

    def _new_run(self, attempt: Attempt, view: View) -> Run:
        before, run = self.last_run, super()._new_run(attempt, view)
        if before is not None and before.attempt.base == attempt.base:
            for layer in run.grads:
                run.grads[layer] += before.grads.get(layer, [])
        return run


class NumberingNode(StagedNode):
    """Knows tensors by the slot alone."""

    def takes(self, run: Run, tensor: Border) -> bool:
        return tensor.attempt.seq == run.attempt.seq


# ------------------------------------------------------------------ P8: moves


class TidyParts(MemberParts):
    """An old owner drops a part when it enters a view in which it does not own that, by a header."""

    def pull(self, header: Header, view: View) -> list[fx.MemberEffect]:
        gone = _dropped(self) if header.next_view == view.id else []
        return [*gone, *super().pull(header, view)]


class TidyAtDecideParts(MemberParts):
    """The same with the decision of a recovery."""

    def pull(self, header: Header, view: View) -> list[fx.MemberEffect]:
        gone = _dropped(self) if header.next_view != view.id else []
        return [*gone, *super().pull(header, view)]


def _dropped(parts: MemberParts) -> list[fx.MemberEffect]:
    """Drops what the member does not own; returns what the shell must do."""
    gone = subtract(parts.held, parts.owned)
    parts.held = common(parts.held, parts.owned)
    return [fx.DropParts(gone)] if gone else []


# ------------------------------------------------------------------ P9: leaves


class SelfishNode(StagedNode):
    """Serves nothing once it is let go."""

    def serve_part(self, header: Header, view: View, part: int) -> int | None:
        return None if self.machine.phase is MemberPhase.LEAVING else super().serve_part(header, view, part)


class LingeringMachine(MemberMachine):
    """Goes when it has lingered for long enough, whoever still needs its parts."""

    def _on_tick(self) -> None:
        self.parts.serves = False
        super()._on_tick()


class ReleasingRoster(Roster):
    """Releases leavers when all have entered the view."""

    @property
    def settled(self) -> bool:
        latest, members = self._book.latest, self.members()
        here = latest is not None and len(members) == len(latest.members)
        return here and latest is not None and all(p.alive and p.entered == latest.id for p in members)


# ------------------------------------------------------------------ P10: newcomers where no plan fits


class WaitingPipelining(Pipelining):
    """Newcomers wait for a boundary, whatever members lack."""

    def lineup(self, latest: View, ruling: Ruling) -> Lineup | str:
        found = super().lineup(latest, ruling)
        known = {m.id for m in (*latest.members, *latest.leaving)}
        if isinstance(found, Lineup) and any(m.id not in known for m in found.members):
            return "newcomers come in at a boundary"
        return found


# ------------------------------------------------------------------ P14: GENESIS


class GenerousNode(StagedNode):
    """Serves at GENESIS whatever it has, in whichever view that was made."""

    def serve_part(self, header: Header, view: View, part: int) -> int | None:
        if header.seq > 0:
            return super().serve_part(header, view, part)
        return None if self.outcome or self.header.seq else self.values.get(part, self.older.get(part))

    def _viewed(self, view: View) -> None:
        self.older = {**getattr(self, "older", {}), **self.values}
        super()._viewed(view)

    older: dict[int, int] = {}  # noqa: RUF012  # set by `_viewed` before it is read


def _with(parts: type[MemberParts], base: type[MemberMachine] = MemberMachine) -> type[Hooks]:
    """Hooks with members that know their parts otherwise."""
    return hooks(machine=planted(base, parts=parts))


_UNCHECKED = hooks(machine=UncheckedMachine)

_BUGS: dict[str, Bug] = {
    "P1-foreseen": Bug(
        rule="P1", what="an announced view routes", hooks=hooks(node=ForeseeingNode), plan=announced_plan
    ),
    "P2-left-out": Bug(
        rule="P2", what="a micro-batch dies with its member", hooks=hooks(node=ShrinkingNode), plan=rerun_plan
    ),
    "P3-unchecked": Bug(
        rule="P3",
        what="nobody checks what sums cover, and a micro-batch is left out",
        hooks=hooks(node=ShrinkingNode, machine=UncheckedMachine),
        plan=rerun_plan,
        control=_UNCHECKED,
    ),
    "P4-hasty": Bug(rule="P4", what="a contribution before the reduction", hooks=_with(HastyParts), plan=rerun_plan),
    "P4-kept": Bug(
        rule="P4",
        what="a step's contribution is sent again",
        hooks=_with(KeepingParts, KeepingMachine),
        plan=rerun_plan,
    ),
    "P4-kept-unchecked": Bug(
        rule="P4",
        what="a step's contribution is sent again, unchecked",
        hooks=_with(KeepingParts, UncheckedKeepingMachine),
        plan=rerun_plan,
        control=_UNCHECKED,
    ),
    "P4-steps-only": Bug(rule="P4", what="only steps wait for the parts", hooks=_with(LaxParts), plan=leaving_plan),
    "P5-not-handed-on": Bug(
        rule="P5",
        what="to whom a step can be handed on does not count",
        hooks=hooks(scheduler=ForgetfulScheduler),
        plan=torn_plan,
    ),
    "P5-strict": Bug(
        rule="P5", what="the lower header is not tried", hooks=hooks(scheduler=StrictScheduler), plan=moved_plan
    ),
    "P5-believing": Bug(
        rule="P5", what="the plan says who holds what", hooks=hooks(scheduler=BelievingScheduler), plan=leaving_plan
    ),
    "P7-retentive": Bug(rule="P7", what="raw sums survive a rerun", hooks=hooks(node=RetentiveNode), plan=rerun_plan),
    "P7-numbers": Bug(
        rule="P7", what="tensors are known by their slot", hooks=hooks(node=NumberingNode), plan=early_plan
    ),
    "P8-tidy": Bug(
        rule="P8",
        what="an old owner drops with the header that carries the view",
        hooks=_with(TidyParts),
        plan=leaving_plan,
    ),
    "P8-tidy-decide": Bug(
        rule="P8", what="an old owner drops at the Decide", hooks=_with(TidyAtDecideParts), plan=rerun_plan
    ),
    "P9-selfish": Bug(rule="P9", what="who is let go serves nothing", hooks=hooks(node=SelfishNode), plan=leaving_plan),
    "P9-lingering": Bug(
        rule="P9", what="who is let go lingers out", hooks=hooks(machine=LingeringMachine), plan=leaving_plan
    ),
    "P9-released": Bug(
        rule="P9",
        what="leavers go when all have entered",
        hooks=hooks(scheduler=with_parts(roster=ReleasingRoster)),
        plan=leaving_plan,
    ),
    "P10-waiting": Bug(
        rule="P10",
        what="newcomers wait for a boundary that cannot come",
        hooks=hooks(scheduler=with_parts(pipelining=WaitingPipelining)),
        plan=crowded_plan,
    ),
    "P14-generous": Bug(
        rule="P14", what="anybody serves parts at GENESIS", hooks=hooks(node=GenerousNode), plan=founding_plan
    ),
}
STAGED_BUGS = {name: replace(bug, control=bug.control or StagedHooks) for name, bug in _BUGS.items()}
"""By name; without the bug these jobs need the behaviour of jobs with pipelines, too."""
