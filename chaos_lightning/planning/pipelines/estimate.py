"""Estimates the time of a plan's step and the memory of each device, by a run of the step in virtual time.

Theory of operation. Each pipeline runs its instruction lists (`timing`), with hops over the links between its own
devices; pipelines that share micro-batches, for these make detours, run together (`lists`). While the last backward
unit of a stage runs, its gradients become ready layer by layer, the last layer first. The all-reduce of a layer begins
when it is ready at all its owners; layers with the same owners, a group, follow each other, so that their latency
counts once. Groups share links, so each owner's own takes its groups in the order in which they became ready, and a
group ends with the last of its owners; that one owner waits for another is not charged to the groups behind it, whose
bytes flow meanwhile. A step is committed when the last all-reduce has ended, a contribution has gone
to the root and the record has come back; then each device runs its optimizer. Pipelines that are alike are run once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

from chaos_lightning.planning.pipelines.cuts import reduce_s
from chaos_lightning.planning.pipelines.job import LinkRate, MemoryUse, TrainingJob, stage_memory
from chaos_lightning.planning.pipelines.lists import CAPS, Fleet, Ran, coupled, run_coupled
from chaos_lightning.planning.pipelines.plan import VACANT, Pipeline, PipelinePlan
from chaos_lightning.planning.pipelines.schedules import Instruction, in_flight, one_f_one_b
from chaos_lightning.planning.pipelines.timing import OneFOneB, PipelineTimes, ScheduleRun, pipeline_timeline


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Estimated times and memory of a step of a plan."""

    step_s: float
    compute_s: float
    """Second at which the last backward unit ends."""
    reduced_s: float
    """Second at which the last all-reduce ends."""
    commit_s: float
    """Seconds from there until all devices have the record."""
    optimizer_s: float
    """Seconds of the optimizer at the slowest device."""
    memory: dict[str, MemoryUse]
    """Peak memory by device."""
    reduces: tuple[Reduce, ...] = ()
    """All-reduce of each group."""
    ends_s: Mapping[str, float] = field(default_factory=dict)
    """Second at which each device ends its last backward unit."""
    run: tuple[Fleet, Ran] | None = field(default=None, repr=False, compare=False)
    """Run of the pipelines that share micro-batches; `plan_lists` writes its lists."""

    def over(self, job: TrainingJob) -> dict[str, int]:
        """Returns how many bytes of memory each device lacks; devices with enough are absent."""
        return {
            name: short
            for name, use in self.memory.items()
            if (short := use.nbytes - job.by_name[name].memory_nbytes) > 0
        }


@dataclass(frozen=True, slots=True)
class Reduce:
    """Estimated all-reduce of a group of layers that have the same owners."""

    first: int
    end: int
    owners: int
    ready_s: float
    """Second at which the last owner has all of the group's gradients."""
    start_s: float
    """Second at which the first layer begins at the owner that ends last."""
    end_s: float
    alone_s: float
    """Seconds that the all-reduce takes on its links, once all gradients are ready."""


def pipeline_times(job: TrainingJob, pipeline: Pipeline) -> PipelineTimes:
    """Returns the times of passes and hops of a pipeline without vacant places."""
    c, o = job.costs, job.overheads
    stages = pipeline.stages
    speeds = [job.by_name[s.device].speed for s in stages]
    rows = list(zip(stages, speeds, strict=True))
    hops = tuple(o.hop_s + job.link(a.device, b.device).time_s(c.boundary_out(a.end)) for a, b in pairwise(stages))
    return PipelineTimes(
        tuple((c.forward[s.end] - c.forward[s.first]) / v + o.unit_s for s, v in rows),
        tuple((c.backward[s.end] - c.backward[s.first]) / v + o.unit_s for s, v in rows),
        hops,
        tuple((c.backward_input[s.end] - c.backward_input[s.first]) / v + o.unit_s / 2 for s, v in rows),
    )


@lru_cache(maxsize=4096)
def _ends(times: PipelineTimes, micro_batches: int, extra: int) -> tuple[float, ...]:
    return tuple(OneFOneB(times, micro_batches, extra).ends_s)


def estimate(job: TrainingJob, plan: PipelinePlan, *, caps: Sequence[int] = CAPS, quick: bool = False) -> StepEstimate:
    """Returns the estimated costs of one step of a plan.

    Args:
        job: The job; it has all devices of the plan.
        plan: Plan that was checked. Detours are followed.
        caps: Numbers of micro-batches in flight beyond 1F1B's that are tried, as memory allows; used for detours only.
        quick: Whether few orders of units are tried, as in a running job that waits for an answer; used for detours
            only.
    """
    ends: dict[str, float] = {}
    memory: dict[str, MemoryUse] = {}
    together = coupled(plan)
    run = run_coupled(job, plan, together, caps=caps, quick=quick) if together else None
    if run is not None:
        fleet, ran = run
        ends.update(zip(fleet.names, ran.ends_s, strict=True))
        memory.update(fleet.memory(ran))
    shared = set(together)
    for p in (p for q, p in enumerate(plan.pipelines) if q not in shared):
        m = p.micro_batches
        done = _ends(pipeline_times(job, p), m, plan.in_flight_extra) if m else [0.0] * len(p.stages)
        for k, (s, end) in enumerate(zip(p.stages, done, strict=True)):
            ends[s.device] = end
            flight = in_flight(len(p.stages), k, m, plan.in_flight_extra)
            memory[s.device] = stage_memory(job, s.first, s.end, flight, m)
    return replace(finish(job, plan, ends, memory), run=run)


def finish(job: TrainingJob, plan: PipelinePlan, ends: dict[str, float], memory: dict[str, MemoryUse]) -> StepEstimate:
    """Returns the estimate of a step from the ends of the last backward passes: adds all-reduces, commit and optimizer.

    Args:
        job: The job.
        plan: The plan.
        ends: Second at which each device ends its last backward unit.
        memory: Memory use by device.
    """
    reduces = all_reduces(job, plan, ends)
    compute = max(ends.values(), default=0.0)
    reduced = max([compute, *(r.end_s for r in reduces), _tied_s(job, plan, reduces)])
    devices = plan.stages
    slowest = max((link.latency_s for link in _links(job, sorted(devices))), default=0.0)
    commit = (2 * (slowest + job.overheads.hop_s) if len(devices) > 1 else 0.0) + job.overheads.commit_s
    c = job.costs
    optimizer = max(
        sum(c.optimizer_s[s.end] - c.optimizer_s[s.first] for s in owned) / job.by_name[name].speed
        for name, owned in devices.items()
    )
    return StepEstimate(reduced + commit + optimizer, compute, reduced, commit, optimizer, memory, tuple(reduces), ends)


def _tied_s(job: TrainingJob, plan: PipelinePlan, reduces: Sequence[Reduce]) -> float:
    """Returns the second at which all owners of the first and the last layer have the gradient of the weights that
    these layers share.

    Each layer's owners reduce it among themselves first, as Megatron-LM does (Narayanan et al., arXiv 2104.04473).
    """
    owners = sorted({*plan.owners[0], *plan.owners[-1]})
    if not job.tied_nbytes or len(owners) < 2 or len(plan.pipelines[0].stages) == 1:
        return 0.0
    ready_s = max(r.end_s for r in reduces if r.first == 0 or r.end == plan.layer_count)
    return ready_s + reduce_s(job.tied_nbytes, len(owners), slowest_link(job, owners), job.overheads.hop_s)


def all_reduces(
    job: TrainingJob,
    plan: PipelinePlan,
    ends: Mapping[str, float],
    groups: Iterable[tuple[range, Sequence[str]]] | None = None,
) -> list[Reduce]:
    """Returns the estimated all-reduce of each group of layers, in the order in which they are sent.

    Args:
        job: The job.
        plan: The plan.
        ends: Second at which each device ends its last backward unit.
        groups: Layers and their owners, if they are not to be the plan's groups.
    """
    stage_of = {s.device: s for p in plan.pipelines for s in p.stages if s.device != VACANT}
    waiting = []
    for group, owners in zip(plan.groups, plan.owners, strict=True) if groups is None else groups:
        # Second at which the last owner of each speed would be through, if its layers went down to 0.
        through: dict[float, float] = {}
        for name in owners:
            speed = job.by_name[name].speed
            done = ends.get(name, 0.0) + job.costs.backward[stage_of[name].first] / speed
            through[speed] = max(through.get(speed, 0.0), done)
        backward = job.costs.backward
        ready = [max([0.0, *(done - backward[x] / speed for speed, done in through.items())]) for x in group]
        waiting.append((ready[0], -group.start, group, owners, ready))
    free: dict[str, float] = {}
    found = []
    for ready_s, _, group, owners, ready in sorted(waiting, key=lambda x: x[:2]):
        sent_s, alone_s = _sent_s(job, group, owners, ready)
        ends_of = {name: max(free.get(name, 0.0) + alone_s, sent_s) for name in owners}
        last = max(owners, key=lambda name: ends_of[name])
        start_s = max(ready[-1], free.get(last, 0.0))
        free |= ends_of
        found.append(Reduce(group.start, group.stop, len(owners), ready_s, start_s, ends_of[last], alone_s))
    return found


def _sent_s(job: TrainingJob, group: range, owners: Sequence[str], ready_s: Sequence[float]) -> tuple[float, float]:
    """Returns the second at which the all-reduce of a group ends if links are free, and its seconds once all gradients
    are ready.

    Args:
        job: The job.
        group: Layers of the group.
        owners: Owners of these layers.
        ready_s: Second at which all owners have the gradients, by layer of the group.
    """
    gradients, link = job.costs.gradients, slowest_link(job, owners)
    sizes = (gradients[x + 1] - gradients[group.start] for x in group)
    alone_s = [reduce_s(nbytes, len(owners), link, job.overheads.hop_s) for nbytes in sizes]
    return max(r + s for r, s in zip(ready_s, alone_s, strict=True)), alone_s[-1]


def slowest_link(job: TrainingJob, owners: Sequence[str]) -> LinkRate:
    """Returns the slowest link that an all-reduce among these devices must use: that of a chain which keeps the devices
    of a host together.
    """
    if len(owners) < 2:
        return LinkRate()
    return min(
        _links(job, sorted(owners, key=lambda x: (job.by_name[x].place, x))), key=lambda x: (x.rate_bps, -x.latency_s)
    )


def _links(job: TrainingJob, chain: Sequence[str]) -> list[LinkRate]:
    """Returns the links along a chain of devices."""
    if not job.links:
        places = {job.by_name[x].place for x in chain}
        return [job.between_hosts] * (len(places) > 1) + [job.within_host] * (len(chain) > len(places))
    return [job.link(a, b) for a, b in pairwise(chain)]


def timelines(job: TrainingJob, plan: PipelinePlan) -> list[ScheduleRun]:
    """Returns the timeline of each pipeline, for drawings: when each stage runs each pass. Plans with detours are not
    supported.
    """
    found = []
    for p in plan.pipelines:
        lists: Sequence[Sequence[Instruction]] = one_f_one_b(len(p.stages), p.micro_batches, plan.in_flight_extra)
        found.append(pipeline_timeline(lists, pipeline_times(job, p), p.micro_batches))
    return found
