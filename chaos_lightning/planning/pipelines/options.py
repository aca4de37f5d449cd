"""Offers the ways in which a job can go on after a loss, as plans of its own devices; `policies` choose among them.

Theory of operation. The plan in force has lost devices. `keep` reroutes, and moves nothing. `fill` seats idle devices
of the same kind in the vacant places. `move` takes the best plan for those that are left, with its devices put where
the fewest bytes move. `restart` takes the same plan from a checkpoint: nothing else helps where a layer has no owner
any more. `avoid` takes slow devices for lost. Each is estimated in full. Other kinds of plans than the best are for
devices of one kind. Redundant stages are not planned for, so `shadow` is not possible here: fleets of equal devices
(`formation`) have them.

After a loss the open step is run again from its start, whatever is chosen. While layers move, their old owners keep
them until the first step of the new plan is committed, so a device needs memory for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from chaos_lightning.planning.pipelines.choice import (
    FILL,
    KEEP,
    MOVE,
    RESTART,
    THRESHOLD,
    Outlook,
    PlanCandidate,
    restart_worth,
)
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.formation import Pauses
from chaos_lightning.planning.pipelines.history import fatal_risk
from chaos_lightning.planning.pipelines.job import Device, TrainingJob
from chaos_lightning.planning.pipelines.linked import Links, missing_link, seated_by_links
from chaos_lightning.planning.pipelines.moves import Held, Moves, assign, move_list
from chaos_lightning.planning.pipelines.paper import algorithm1
from chaos_lightning.planning.pipelines.plan import VACANT, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import NoPlanError, PlannedPipelines, Planner
from chaos_lightning.planning.pipelines.rerouting import FatalLossError, reroute
from chaos_lightning.planning.pipelines.templates import FAULTS, oobleck, symmetric


@dataclass(kw_only=True)
class PlanOptions:
    """Ways in which a job can go on after a loss.

    Attributes:
        planner: Planner of the job with its whole fleet.
        before: Plan in force, which still has the lost devices.
        lost: Devices that are gone.
        slow: Devices that compute more slowly than the job says, with their measured speeds.
        pauses: Seconds that changes of the plan cost; a move takes at least as long as its bytes need.
        size_shares: Probability that a loss takes so many loss units, by that number.
        first: Take first answers instead of the best: of the planner, and an even spread of rerouted micro-batches.
        held: Layers that each device holds and serves; None: devices that are left hold what they own in `before`.
        serving: Devices in `lost` that are about to leave: they hold layers until others have them.
        running_s: Seconds of a step of the plan in force; None: as estimated.
        live: Function that finds the plan for the devices that are left; only in a running job. Such a job has no way
            back to a checkpoint, and no time for plans of templates.
        links: Pairs of devices that have a link; None: all.
        shared: Layers that use a parameter together, by its name.
    """

    planner: Planner
    before: PipelinePlan
    lost: tuple[str, ...] = ()
    slow: Mapping[str, float] = field(default_factory=dict)
    pauses: Pauses = field(default_factory=Pauses)
    size_shares: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    first: bool = False
    held: Held | None = None
    serving: tuple[Device, ...] = ()
    running_s: float | None = None
    live: Callable[[], PlannedPipelines] | None = None
    links: Links | None = None
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    _costs: dict[PipelinePlan, StepEstimate] = field(default_factory=dict, repr=False)

    @cached_property
    def job(self) -> TrainingJob:
        """Job on its whole fleet, with the measured speeds of slow devices."""
        job, slow = self.planner.job, self.slow
        devices = [replace(d, speed=slow.get(d.name, d.speed)) for d in job.devices]
        return job.with_devices(devices) if slow else job

    @cached_property
    def left(self) -> TrainingJob:
        """Job on the devices that were not lost."""
        known = self.job.by_name
        gone = [name for name in self.lost if name in known]
        return self.job.without(gone) if gone else self.job

    @cached_property
    def _holding(self) -> TrainingJob:
        """Job on the devices that were not lost and those that are leaving but still hold layers."""
        there = self.left.by_name
        more = [d for d in self.serving if d.name not in there]
        return self.left.with_devices([*self.left.devices, *more]) if more else self.left

    @cached_property
    def healthy(self) -> list[str]:
        """Devices that are neither lost nor slow; if all are slow, all that were not lost."""
        names = [d.name for d in self.left.devices]
        return [name for name in names if name not in self.slow] or names

    @property
    def whole(self) -> bool:
        """Whether the plan has lost no device."""
        return not self.before.vacant and not set(self.lost) & set(self.before.stages)

    @cached_property
    def planned(self) -> PlannedPipelines:
        """New plan for the devices that are left, before they are assigned to places."""
        if self.live is not None:
            return self.live()
        return self.planner.first(self.healthy) if self.first else self.planner.exact(self.healthy)

    @cached_property
    def lost_layers(self) -> tuple[int, ...]:
        """Layers that no device holds any more, by number."""
        held = set[int]().union(*(self._held.values()))
        return tuple(x for x in range(self.before.layer_count) if x not in held)

    @property
    def fatal(self) -> str:
        """Text that names the layers no device holds any more; "" if there are none."""
        return str(FatalLossError(self.lost_layers)) if self.lost_layers else ""

    @cached_property
    def _held(self) -> Held:
        if self.held is not None:
            return self.held
        there = self.left.by_name
        return {
            name: [x for s in stages for x in s.layers] for name, stages in self.before.stages.items() if name in there
        }

    def moves(self, plan: PipelinePlan) -> Moves:
        """Returns the transfers that a plan needs before it can run.

        Raises:
            FatalLossError: Some layer is held by no device that is left.
        """
        return move_list(self._holding, self.before, plan, self.held)

    def outlook(self, rate: float, returns: float = 0.0) -> Outlook:
        """Returns the rules of comparison: without a loss, a change of plan must be better by a threshold.

        Args:
            rate: Losses per second of all devices that are left.
            returns: Devices per second that come back.
        """
        p = self.pauses
        worth = restart_worth(rate, p.checkpoint_s / 2 + p.reload_s + p.move_s)
        return Outlook(rate=rate, returns=returns, restart_worth=worth, threshold=0.0 if self.lost else THRESHOLD)

    def cost(self, plan: PipelinePlan) -> StepEstimate:
        """Returns the estimate of a plan's step; each plan is estimated once."""
        if plan not in self._costs:
            self._costs[plan] = estimate(self.left, plan, quick=self.first)
        return self._costs[plan]

    # ------------------------------------------------------------------------------------------------ the ways

    def keep(self) -> PlanCandidate | None:
        """Returns the candidate that goes on without moves: owners of the same layers take the lost devices'
        micro-batches.
        """
        plan = self.before
        try:
            if self.lost or self.slow:
                plan = reroute(self.left, plan, self.lost, search=not self.first)
            moves_s = 0.0 if self.held is None else self.moves(plan).seconds
        except FatalLossError:
            return None
        broken = not self.before.stages.keys().isdisjoint(self.lost)
        return self._candidate(plan, KEEP, max(self.pauses.reroute_s if broken else 0.0, moves_s))

    def fill(self) -> PlanCandidate | None:
        """Returns the candidate that gives all vacant places to idle devices."""
        seated = None if self.fatal or self.whole else self._seated()
        if seated is None:
            return None
        return self._candidate(seated, FILL, max(self.pauses.fill_s, self.moves(seated).seconds))

    def avoid(self) -> PlanCandidate | None:
        """Returns the candidate that treats slow devices as lost: idle devices take their places, or other owners their
        micro-batches.
        """
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
        return self._candidate(plan, FILL, max(self.pauses.fill_s, self.moves(plan).seconds))

    def move(self, kind: str = "best") -> PlanCandidate | None:
        """Returns the candidate that moves layers to a new plan of the given kind for the devices that are left."""
        found = None if self.fatal else self._plan(kind)
        if found is None:
            return None
        try:
            plan = assign(self._holding, self.before, found, self.held)
        except FatalLossError:
            return None
        if self.links is not None:
            plan = seated_by_links(plan, {d.name: d.kind for d in self.left.devices}, self.links, self.shared)
        return self._candidate(plan, MOVE, max(self.pauses.move_s, self.moves(plan).seconds))

    def shadow(self) -> None:
        """Returns None, since a real job's plans have no redundant stages."""

    def restart(self, kind: str = "best") -> PlanCandidate | None:
        """Returns the candidate that restarts from the newest checkpoint with a plan of the given kind; half a
        checkpoint interval of training is lost.
        """
        plan, p = None if self.live is not None else self._plan(kind), self.pauses
        if plan is None:
            return None
        found = self._candidate(plan, RESTART, p.move_s + p.reload_s)
        return replace(found, void_samples=self._samples * p.checkpoint_s / 2 / self.before_s)

    # ------------------------------------------------------------------------------------------------ parts

    @property
    def _samples(self) -> int:
        return self.left.micro_batches * self.left.samples

    @cached_property
    def before_s(self) -> float:
        """Seconds of a step of the plan before the loss."""
        return estimate(self.job, self.before).step_s if self.running_s is None else self.running_s

    @property
    def _redo_s(self) -> float:
        """Mean seconds of work on the open step that a loss makes run again; 0 without a loss."""
        return self.before_s / 2 if self.lost else 0.0

    def _plan(self, kind: str) -> PipelinePlan | None:
        if kind == "best":
            try:
                return self._with_all(self.planned.plan)
            except NoPlanError:
                return None
        if self.live is not None or not self.planner.job.alike:
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
        """Returns the plan with all other devices that are left added as idle ones; slow ones among them still hold
        layers for others.
        """
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
                    kind = by_name[s.device].kind if s.device in by_name else None
                    fits = (x for x in idle if kind is None or by_name[x].kind == kind)
                    name = next(fits, None)
                    if name is None:
                        return None
                    idle.remove(name)
                    stages.append(PlanStage(name, s.first, s.end))
                else:
                    stages.append(s)
            pipelines.append(replace(p, stages=tuple(stages)))
        return replace(self.before, pipelines=tuple(pipelines), detours=(), idle=tuple(idle))

    def _lacking(self, plan: PipelinePlan, kind: str) -> dict[str, int]:
        """Returns the bytes that each device lacks for a plan, counting the layers that it still keeps until others
        have them.
        """
        c, use = self.left.costs, {name: x.nbytes for name, x in self.cost(plan).memory.items()}
        for name, layers in self._held.items() if kind != RESTART else ():
            if name in self.left.by_name:
                kept = set(layers).difference(*(s.layers for s in plan.stages.get(name, ())))
                use[name] = use.get(name, 0) + sum(c.state(x, x + 1) for x in kept)
        by_name = self.left.by_name
        return {name: x - by_name[name].memory_nbytes for name, x in use.items() if x > by_name[name].memory_nbytes}

    def _lacks(self, plan: PipelinePlan, kind: str) -> str:
        """Returns in words which device lacks memory for a plan, or which link is missing; "" if the plan can run."""
        if over := self._lacking(plan, kind):
            worst = max(over, key=lambda name: over[name])
            return f"{worst} lacks {over[worst]} bytes of memory"
        return "" if self.links is None else missing_link(plan, self.links, self.shared)

    def _candidate(self, plan: PipelinePlan, kind: str, transition_s: float) -> PlanCandidate:
        cost = self.cost(plan)
        return PlanCandidate(
            policy="",
            kind=kind,
            step_s=cost.step_s,
            samples=self._samples,
            transition_s=transition_s,
            redo_s=self._redo_s,
            risk=self._risk(plan),
            devices=len(plan.stages),
            lacks=self._lacks(plan, kind),
            about=f"{len(plan.pipelines)} pipelines of {sum(len(p.stages) for p in plan.pipelines)} stages",
            plan=plan,
        )

    def _risk(self, plan: PipelinePlan) -> float:
        """Returns the probability that the next loss takes the last owner of a layer; devices that die together count
        as one owner.
        """
        by_name = self.left.by_name
        owners = {frozenset(by_name[name].dies_with for name in group) for group in plan.owners}
        units = len({d.dies_with for d in self.left.devices})
        return fatal_risk([len(group) for group in owners], units, self.size_shares)
