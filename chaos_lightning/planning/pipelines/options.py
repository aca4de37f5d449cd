"""The ways that a job has to go on after a loss, as plans of its own devices; `policies` choose among them.

Theory of operation. The plan in force has lost devices. `keep` reroutes, and moves nothing. `fill` seats idle devices
of the same kind in the vacant places. `move` takes the best plan for those that are left, with its devices put where
the fewest bytes move. `restart` takes the same plan from a checkpoint: nothing else helps where a layer has no owner
any more. `avoid` takes slow devices for lost. Each is estimated in full. Other kinds of plans than the best are for
devices of one kind. Redundant stages are not planned for, so `shadow` is not possible here: fleets of equal devices
(`formation`) have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from chaos_lightning.planning.pipelines.choice import FILL, KEEP, MOVE, RESTART, PlanCandidate, repaired_s
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.formation import Pauses
from chaos_lightning.planning.pipelines.history import fatal_risk
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.moves import Moves, assign, move_list
from chaos_lightning.planning.pipelines.paper import algorithm1
from chaos_lightning.planning.pipelines.plan import VACANT, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import NoPlanError, PlannedPipelines, Planner
from chaos_lightning.planning.pipelines.rerouting import FatalLossError, reroute, without
from chaos_lightning.planning.pipelines.templates import oobleck, symmetric

FAULTS = 1
"""Losses that templates prepare for."""


@dataclass(kw_only=True)
class PlanOptions:
    """What a job can do about a loss.

    Attributes:
        planner: Of the job with its whole fleet.
        before: The plan in force; it has the lost devices still.
        lost: Devices that are gone.
        slow: Devices that compute more slowly than the job says, with their measured speeds.
        pauses: What changes cost; a move takes at least as long as its bytes.
        size_shares: By loss units that one loss takes: its probability.
        first: Take first answers instead of the best: of the planner, and an even spread of rerouted micro-batches.
    """

    planner: Planner
    before: PipelinePlan
    lost: tuple[str, ...] = ()
    slow: Mapping[str, float] = field(default_factory=dict)
    pauses: Pauses = field(default_factory=Pauses)
    size_shares: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    first: bool = False
    _costs: dict[PipelinePlan, StepEstimate] = field(default_factory=dict, repr=False)

    @cached_property
    def job(self) -> TrainingJob:
        """The job on its whole fleet, at measured speeds."""
        job, slow = self.planner.job, self.slow
        devices = [replace(d, speed=slow.get(d.name, d.speed)) for d in job.devices]
        return job.with_devices(devices) if slow else job

    @cached_property
    def left(self) -> TrainingJob:
        """The job on the devices that are left."""
        return self.job.without(self.lost) if self.lost else self.job

    @cached_property
    def healthy(self) -> list[str]:
        """Devices for other plans: those left that are not slow, if there are any."""
        names = [d.name for d in self.left.devices]
        return [name for name in names if name not in self.slow] or names

    @property
    def whole(self) -> bool:
        """Nobody of the plan is lost."""
        return not self.before.vacant and not set(self.lost) & set(self.before.stages)

    @cached_property
    def planned(self) -> PlannedPipelines:
        """The plan for those that are left, its devices in any places."""
        return self.planner.first(self.healthy) if self.first else self.planner.exact(self.healthy)

    @cached_property
    def fatal(self) -> str:
        """Which layers have no owner left, in words; "": none."""
        try:
            reroute(self.left, self.before, self.lost, search=False)
        except FatalLossError as error:
            return str(error)
        return ""

    def moves(self, plan: PipelinePlan) -> Moves:
        """What has to move before a plan can run.

        Raises:
            FatalLossError: Nobody who is left holds some layer.
        """
        return move_list(self.left, self.before, plan)

    def cost(self, plan: PipelinePlan) -> StepEstimate:
        """Of a step; a plan is estimated once."""
        if plan not in self._costs:
            self._costs[plan] = estimate(self.left, plan)
        return self._costs[plan]

    # ------------------------------------------------------------------------------------------------ the ways

    def keep(self) -> PlanCandidate | None:
        """The micro-batches of the lost go to the owners of the same layers."""
        if self.fatal:
            return None
        plan = reroute(self.left, self.before, self.lost, search=not self.first)
        return self._candidate(plan, KEEP, 0.0 if self.whole else self.pauses.reroute_s, self._repaired_s(plan))

    def fill(self) -> PlanCandidate | None:
        """Seats idle devices in all vacant places."""
        seated = None if self.fatal or self.whole else self._seated()
        if seated is None:
            return None
        pause_s = max(self.pauses.fill_s, self.moves(seated).seconds)
        return self._candidate(seated, FILL, pause_s, self._repaired_s(seated))

    def avoid(self) -> PlanCandidate | None:
        """Takes slow devices for lost: idle ones take their places, or else peers their micro-batches."""
        if self.fatal or not set(self.slow) & set(self.before.stages):
            return None
        around = replace(self, lost=(*self.lost, *self.slow), slow={}, _costs={})
        plan = around._seated()
        if plan is None:
            kept = around.keep()
            if kept is None:
                return None
            plan = kept.plan
        plan = self._with_all(plan)
        pause_s = max(self.pauses.fill_s, self.moves(plan).seconds)
        return self._candidate(plan, FILL, pause_s, self._repaired_s(plan))

    def move(self, kind: str = "best") -> PlanCandidate | None:
        """Moves layers to the plan of this kind for those that are left."""
        found = None if self.fatal else self._plan(kind)
        if found is None:
            return None
        try:
            plan = assign(self.left, self.before, found)
        except FatalLossError:
            return None
        pause_s = max(self.pauses.move_s, self.moves(plan).seconds)
        return self._candidate(plan, MOVE, pause_s, self._redo_s)

    def shadow(self) -> None:
        """No stage is redundant."""

    def restart(self, kind: str = "best") -> PlanCandidate | None:
        """The plan of this kind, from the newest checkpoint: half of what lies between two is lost."""
        plan, p = self._plan(kind), self.pauses
        if plan is None:
            return None
        found = self._candidate(plan, RESTART, p.move_s + p.reload_s, self._redo_s)
        return replace(found, void_samples=self._samples * p.checkpoint_s / 2 / self.before_s)

    # ------------------------------------------------------------------------------------------------ parts

    @property
    def _samples(self) -> int:
        return self.left.micro_batches * self.left.samples

    @cached_property
    def before_s(self) -> float:
        """A step of the plan in force, before the loss."""
        return estimate(self.job, self.before).step_s

    @property
    def _redo_s(self) -> float:
        """Of the open step, which is run again: the mean over the moment of the loss."""
        return 0.0 if self.whole else self.before_s / 2

    def _repaired_s(self, plan: PipelinePlan) -> float:
        """Of the open step, which peers of the lost do again; the pipeline counts that has most to do again."""
        gone = set(self.lost)
        hit = [p for p in self.before.pipelines if any(s.device in gone for s in p.stages)]
        peers = min(map(len, without(self.before, self.lost).owners))
        step_s = self.cost(plan).step_s
        return max((repaired_s(step_s, p.micro_batches, len(p.stages), peers) for p in hit), default=0.0)

    def _plan(self, kind: str) -> PipelinePlan | None:
        if kind == "best":
            try:
                return self._with_all(self.planned.plan)
            except NoPlanError:
                return None
        if not self.planner.job.alike:
            return None
        shapes, count = self.planner.shapes, len(self.healthy)
        if kind == "oobleck":
            shape = oobleck(shapes, count, FAULTS)
        elif kind == "algorithm1":
            shape = algorithm1(shapes, count, shapes.exact(len(self.before.devices)))
        else:
            shape = symmetric(shapes, count) if kind == "symmetric" else None
        return None if shape is None else self._with_all(self.planner.seated(shape, self.healthy).plan)

    def _with_all(self, plan: PipelinePlan) -> PipelinePlan:
        """With every device that is left: slow ones are idle, and still hold what others need."""
        return replace(plan, idle=tuple(sorted(set(self.left.by_name) - set(plan.stages))))

    def _seated(self) -> PipelinePlan | None:
        by_name = self.job.by_name
        gone = set(self.lost)
        idle = [name for name in self.before.idle if name not in gone]
        pipelines = []
        for p in self.before.pipelines:
            stages = []
            for s in p.stages:
                if s.device in gone or s.device == VACANT:
                    kind = by_name[s.device].kind if s.device else None
                    fits = (x for x in idle if kind is None or by_name[x].kind == kind)
                    name = next(fits, None)
                    if name is None:
                        return None
                    idle.remove(name)
                    stages.append(PlanStage(name, s.first, s.end))
                else:
                    stages.append(s)
            pipelines.append(replace(p, stages=tuple(stages)))
        keepers = tuple(k for k in self.before.keepers if k.device not in gone)
        return replace(self.before, pipelines=tuple(pipelines), detours=(), keepers=keepers, idle=tuple(idle))

    def _candidate(self, plan: PipelinePlan, kind: str, transition_s: float, redo_s: float) -> PlanCandidate:
        cost = self.cost(plan)
        over = cost.over(self.left)
        worst = max(over, key=lambda name: over[name], default="")
        return PlanCandidate(
            policy="",
            kind=kind,
            step_s=cost.step_s,
            samples=self._samples,
            transition_s=transition_s,
            redo_s=redo_s,
            risk=self._risk(plan),
            devices=len(plan.stages),
            lacks=f"{worst} lacks {over[worst]} bytes of memory" if over else "",
            about=f"{len(plan.pipelines)} pipelines of {sum(len(p.stages) for p in plan.pipelines)} stages",
            plan=plan,
        )

    def _risk(self, plan: PipelinePlan) -> float:
        """That the next loss is fatal; devices that die together count as one owner."""
        by_name = self.left.by_name
        owners = {frozenset(by_name[name].dies_with for name in group) for group in plan.owners}
        units = len({d.dies_with for d in self.left.devices})
        return fatal_risk([len(group) for group in owners], units, self.size_shares)
