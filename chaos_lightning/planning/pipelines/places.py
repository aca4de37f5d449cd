"""Which device gets which place of a shape.

Theory of operation. Pipelines, longest first, are put on the host on which they leave least room; those that no host
has room for take what is left, host by host. So most hops stay within a host. Then each layer whose owners would all be
lost with one host is given an owner elsewhere, by exchanging two devices, where that makes no step longer; where it
would, a `SharedFate` says what the cheapest exchange costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from chaos_lightning.planning.pipelines.equal import PlanShape, Shapes
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.moves import renamed
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage

EXCHANGES = 200
"""Exchanges of two devices that are tried for the sake of owners on several hosts."""


@dataclass(frozen=True, slots=True)
class SharedFate:
    """Layers whose owners would all be lost with one host."""

    first: int
    end: int
    host: str
    cost_s: float
    """By which the cheapest exchange of two devices that mends it, and does so to no other layers, makes a step longer;
    infinite: none does."""


def place(job: TrainingJob, shapes: Shapes, shape: PlanShape, *, packed: bool = False) -> PipelinePlan:
    """Gives each place of a shape a device of the job.

    Args:
        job: The job; its devices get places.
        shapes: What the shape was found by; it cuts the layers.
        shape: How many pipelines of which length.
        packed: On few hosts, rather than so that no host is left with room for no pipeline.
    """
    free: dict[str, list[str]] = defaultdict(list)
    for d in sorted(job.devices, key=lambda d: (d.place, d.name)):
        free[d.place].append(d.name)
    if packed:
        free = dict(sorted(free.items(), key=lambda x: (-len(x[1]), x[0])))
    pipelines = []
    for row in shape.rows:
        cut = shapes.cutter.best(row.stages, row.micro_batches, shape.pipelines)
        assert cut is not None
        for _ in range(row.times):
            names = _take(free, row.stages, packed)
            stages = tuple(PlanStage(n, x, y) for n, x, y in zip(names, cut.at, cut.at[1:], strict=False))
            pipelines.append(Pipeline(stages, row.micro_batches))
    idle = tuple(sorted(n for names in free.values() for n in names))
    extra = job.memory.in_flight_extra
    return PipelinePlan(job.costs.count, tuple(pipelines), idle=idle, in_flight_extra=extra)


def _take(free: dict[str, list[str]], count: int, packed: bool) -> list[str]:
    """Devices for one pipeline: of the host on which it leaves least room, or else of the emptiest hosts.

    If `packed`, of the first one in order that has room.
    """
    roomy = [host for host, names in free.items() if len(names) >= count]
    roomy = roomy[:1] if packed else roomy
    taken: list[str] = []
    while len(taken) < count:
        host = min(roomy, key=lambda h: (len(free[h]), h)) if roomy else max(free, key=lambda h: (len(free[h]), h))
        need = count - len(taken)
        taken += free[host][:need]
        free[host] = free[host][need:]
        if not free[host]:
            del free[host]
    return taken


def spread(job: TrainingJob, plan: PipelinePlan) -> tuple[PipelinePlan, tuple[SharedFate, ...]]:
    """Gives layers whose owners are all on one host an owner elsewhere, where no step gets longer by it.

    Returns:
        The plan, and what could not be mended for nothing. Plans of one pipeline have one owner for each layer anyhow.
    """
    if len(plan.pipelines) < 2 or len({d.place for d in job.devices}) < 2:
        return plan, ()
    step_s, tries, fates = estimate(job, plan).step_s, EXCHANGES, []
    for group, host in on_one_host(job, plan):
        cheapest, now = math.inf, [g for g, _ in on_one_host(job, plan)]
        if group not in now:
            continue  # An exchange for an earlier group mended it.
        owners = plan.owners[plan.groups.index(group)]
        for other in islice(_exchanged(job, plan, owners, host), max(0, tries)):
            tries -= 1
            then = [g for g, _ in on_one_host(job, other)]
            if group in then or len(then) >= len(now):
                continue
            cost = estimate(job, other).step_s - step_s
            cheapest = min(cheapest, cost)
            if cost <= 1e-9 * step_s:
                plan = other
                break
        else:
            fates.append(SharedFate(group.start, group.stop, host, cheapest))
    return plan, tuple(fates)


def on_one_host(job: TrainingJob, plan: PipelinePlan) -> list[tuple[range, str]]:
    """Groups of layers with owners on one host alone, and that host."""
    found = []
    for group, owners in zip(plan.groups, plan.owners, strict=True):
        hosts = {job.by_name[n].place for n in owners}
        if len(hosts) == 1:
            found.append((group, next(iter(hosts))))
    return found


def _exchanged(job: TrainingJob, plan: PipelinePlan, owners: Sequence[str], host: str) -> Iterator[PipelinePlan]:
    """Plans in which one of these owners changes places with a device of another host."""
    others = [n for n in (*plan.idle, *plan.stages) if job.by_name[n].place != host]
    names = {n: n for n in plan.devices}
    for a in owners:
        for b in others:
            if job.by_name[a].kind == job.by_name[b].kind:
                yield renamed(plan, names | {a: b, b: a})
