"""Copies of layers on devices that do not compute them, so that fewer layers are lost with one device.

Theory of operation. A *keeper* is an owner without units (rule 44): it takes part in its layers' all-reduce with an
empty input, steps their optimizer, and serves their state. So it needs memory for weights, gradients, optimizer and
flat buffers, and costs an all-reduce with one more owner. Layers whose owners all die together get one, the largest run
of layers first, on the device that would have stepped them soonest, its own all-reduces and those of the owners
included. It dies with none of the owners, and is on another host than they as long as one there has memory left; a run
that fits nowhere as a whole is halved. Memory is that of the estimate. This is a greedy search; what it adds to a step
is then estimated in full. No command and no policy adds keepers: they are for processes that follow plans, which can
pay for them or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chaos_lightning.planning.pipelines.cuts import reduce_s
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate, slowest_link
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.lists import kept_nbytes
from chaos_lightning.planning.pipelines.plan import PipelinePlan, PlanStage


class KeptPlan(NamedTuple):
    """A plan with keepers, and what they cost."""

    plan: PipelinePlan
    added_s: float
    """Seconds of each step."""
    uncovered: tuple[int, ...]
    """Layers that are still lost with one device, or with devices that die together."""


def add_keepers(job: TrainingJob, plan: PipelinePlan) -> KeptPlan:
    """Adds keepers of the layers whose owners all die together, as far as memory allows.

    Args:
        job: It has all devices of the plan.
        plan: Keepers that it has stay.
    """
    before = estimate(job, plan)
    search = _Search(job, plan, before)
    alone = [
        (group, owners)
        for group, owners in zip(plan.groups, plan.owners, strict=True)
        if len({job.by_name[x].dies_with for x in owners}) == 1
    ]
    for group, owners in sorted(alone, key=lambda x: (-_nbytes(job, x[0]), x[0].start)):
        search.keep(group, owners)
    if not search.found:
        return KeptPlan(plan, 0.0, tuple(sorted(search.uncovered)))
    kept = PipelinePlan(
        plan.layer_count,
        plan.pipelines,
        plan.detours,
        (*plan.keepers, *_joined(search.found)),
        tuple(x for x in plan.idle if x not in {k.device for k in search.found}),
        plan.in_flight_extra,
    )
    return KeptPlan(kept, estimate(job, kept).step_s - before.step_s, tuple(sorted(search.uncovered)))


def _nbytes(job: TrainingJob, layers: range) -> int:
    return kept_nbytes(job, PlanStage("", layers.start, layers.stop))


def _joined(keepers: Sequence[PlanStage]) -> list[PlanStage]:
    """Neighbouring layers of one device are one run."""
    found: list[PlanStage] = []
    for k in sorted(keepers):
        if found and found[-1].device == k.device and found[-1].end == k.first:
            found[-1] = found[-1]._replace(end=k.end)
        else:
            found.append(k)
    return found


class _Search:
    def __init__(self, job: TrainingJob, plan: PipelinePlan, before: StepEstimate) -> None:
        self.job = job
        self.found: list[PlanStage] = []
        self.uncovered: list[int] = []
        used = {name: use.nbytes for name, use in before.memory.items()}
        self.free = {name: job.by_name[name].memory_nbytes - used.get(name, 0) for name in plan.devices}
        self.through_s = {name: before.ends_s.get(name, 0.0) for name in plan.devices}
        """By device: when it has sent all that it owns and keeps."""
        owners = {group.start: who for group, who in zip(plan.groups, plan.owners, strict=True)}
        for r in before.reduces:
            for name in owners[r.first]:
                self.through_s[name] = max(self.through_s[name], r.end_s)

    def keep(self, layers: range, owners: Sequence[str]) -> None:
        """Finds a keeper of a run of layers, or several."""
        job = self.job
        hosts = {job.by_name[x].place for x in owners}
        units = {job.by_name[x].dies_with for x in owners}
        strangers = [x for x in self.free if job.by_name[x].dies_with not in units]
        elsewhere = [x for x in strangers if job.by_name[x].place not in hosts]
        least = min(_nbytes(job, range(x, x + 1)) for x in layers)
        name = self._soonest(layers, owners, elsewhere)
        if name is None and (len(layers) == 1 or all(self.free[x] < least for x in elsewhere)):
            name = self._soonest(layers, owners, strangers)
        if name is not None:
            self.found.append(PlanStage(name, layers.start, layers.stop))
            self.free[name] -= _nbytes(job, layers)
            through = self._through_s(layers, owners, name)
            self.through_s |= dict.fromkeys((name, *owners), through)
        elif len(layers) > 1:
            half = len(layers) // 2
            self.keep(layers[:half], owners)
            self.keep(layers[half:], owners)
        else:
            self.uncovered.append(layers.start)

    def _soonest(self, layers: range, owners: Sequence[str], devices: Sequence[str]) -> str | None:
        """Of those that have the memory, the one that would have stepped these layers first."""
        c = self.job.costs
        nbytes = _nbytes(self.job, layers)
        work = c.optimizer_s[layers.stop] - c.optimizer_s[layers.start]

        def stepped(name: str) -> tuple[float, int, str]:
            after = self._through_s(layers, owners, name) + work / self.job.by_name[name].speed
            return after, -self.free[name], name

        return min((x for x in devices if self.free[x] >= nbytes), key=stepped, default=None)

    def _through_s(self, layers: range, owners: Sequence[str], keeper: str) -> float:
        """When the all-reduce of these layers would end."""
        c, everybody = self.job.costs, [*owners, keeper]
        return max(self.through_s[x] for x in everybody) + reduce_s(
            c.gradients[layers.stop] - c.gradients[layers.start],
            len(everybody),
            slowest_link(self.job, everybody),
            self.job.overheads.hop_s,
        )
