"""Assigns the devices of a job to the stages of pipelines whose shape is given, with an eye on hosts.

Theory of operation. Pipelines, longest first, are put on the host on which they leave least room; those that no host
has room for take what is left, host by host. So most hops stay within a host. Then each layer whose owners would all be
lost with one host is given an owner elsewhere, by exchanging two devices, where that makes no step longer; where it
would, a `SharedFate` says what the cheapest exchange costs. Where links within hosts are faster, all-reduces may weigh
more than hops: then pipelines on as few hosts as will do, or all owners of a layer on one host, may be faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal

from chaos_lightning.planning.pipelines.equal import PlanShape, Shapes
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.moves import renamed
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage

Seating = Literal["hosts", "packed", "stages"]
"""Ways to seat: pipelines on hosts, so that no host is left with room for a pipeline; on few hosts; the owners of a
stage on one host.
"""
OTHERS: tuple[Seating, ...] = ("packed", "stages")
SAME = 1e-9
"""Relative difference of two steps below which they count as equally long."""
EXCHANGES = 200
"""Most exchanges of two devices that are tried so that owners are on several hosts."""


@dataclass(frozen=True, slots=True)
class SharedFate:
    """Layers whose owners would all be lost if one host were lost."""

    first: int
    end: int
    host: str
    cost_s: float
    """Seconds by which a step gets longer if the cheapest exchange of two devices mends that, and harms no other
    layers, or if all devices get other places; infinity: neither mends it.
    """


def seated(
    job: TrainingJob, shapes: Shapes, shape: PlanShape, *, hosts_matter: bool, on_two: bool = False
) -> tuple[PipelinePlan, StepEstimate, tuple[SharedFate, ...]]:
    """Returns the best plan of a given shape on the devices of a job, its estimate, and the layers that the loss of one
    host would take.

    Args:
        job: The job; its devices get places.
        shapes: Shapes by which the shape was found; they cut the layers.
        shape: Shape of the plan.
        hosts_matter: Whether links within hosts are unlike those between them.
        on_two: Whether owners of each layer must be on two hosts, if exchanges of devices can do that, whatever it
            costs.

    Returns:
        The plan with the shortest step, what it costs, and which of its layers would be lost with one host.
    """
    plan, cost, fates = spread(job, place(job, shapes, shape, "hosts"), pay=on_two)
    if not hosts_matter or on_two:
        return plan, cost, fates
    apart, apart_s = fates, cost.step_s
    for seating in OTHERS:
        other = place(job, shapes, shape, seating)
        new = estimate(job, other)
        if new.step_s < cost.step_s * (1 - SAME):
            plan, cost = other, new
            fates = tuple(
                SharedFate(g.start, g.stop, host, math.inf if any(_meet(g, x) for x in apart) else apart_s - new.step_s)
                for g, host in on_one_host(job, plan)
            )
    return plan, cost, fates if len(plan.pipelines) > 1 else ()


def _meet(group: range, fate: SharedFate) -> bool:
    return group.start < fate.end and fate.first < group.stop


def place(job: TrainingJob, shapes: Shapes, shape: PlanShape, seating: Seating) -> PipelinePlan:
    """Returns a plan of a given shape with a device of the job at each stage."""
    free: dict[str, list[str]] = defaultdict(list)
    for d in sorted(job.devices, key=lambda d: (d.place, d.name)):
        free[d.place].append(d.name)
    if seating != "hosts":
        free = dict(sorted(free.items(), key=lambda x: (-len(x[1]), x[0])))
    pairs = shape.pairs
    if seating == "stages":
        order = (n for names in free.values() for n in names)
        by_stage = {(q, k): next(order) for k in range(pairs[0][0]) for q, (p, _) in enumerate(pairs) if k < p}
        rows = [[by_stage[q, k] for k in range(p)] for q, (p, _) in enumerate(pairs)]
    else:
        rows = [_take(free, p, packed=seating == "packed") for p, _ in pairs]
    pipelines = []
    for names, (p, m) in zip(rows, pairs, strict=True):
        cut = shapes.cutter.best(p, m, shape.pipelines)
        assert cut is not None
        stages = tuple(PlanStage(n, x, y) for n, (x, y) in zip(names, pairwise(cut.at), strict=True))
        pipelines.append(Pipeline(stages, m))
    used = {n for names in rows for n in names}
    idle = tuple(sorted(d.name for d in job.devices if d.name not in used))
    return PipelinePlan(job.costs.count, tuple(pipelines), idle=idle, in_flight_extra=job.memory.in_flight_extra)


def _take(free: dict[str, list[str]], count: int, *, packed: bool) -> list[str]:
    """Takes free devices for one pipeline: from the host with the least room that still suffices, else from the hosts
    with most free devices.

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


def spread(
    job: TrainingJob, plan: PipelinePlan, *, pay: bool = False
) -> tuple[PipelinePlan, StepEstimate, tuple[SharedFate, ...]]:
    """Exchanges devices so that layers whose owners are all on one host get an owner elsewhere, where no step gets
    longer by it.

    Args:
        job: The job.
        plan: The plan.
        pay: Take the cheapest exchange also where a step gets longer by it.

    Returns:
        The plan, what it costs, and what could not be mended for nothing. Plans of one pipeline have one owner for
        each layer anyhow.
    """
    cost, tries, fates = estimate(job, plan), EXCHANGES, list[SharedFate]()
    if len(plan.pipelines) < 2 or len({d.place for d in job.devices}) < 2:
        return plan, cost, ()
    for group, host in on_one_host(job, plan):
        cheapest, now = math.inf, [g for g, _ in on_one_host(job, plan)]
        paid: tuple[PipelinePlan, StepEstimate] | None = None
        if group not in now:
            continue  # An exchange for an earlier group mended it.
        owners = plan.owners[plan.groups.index(group)]
        for other in islice(_exchanged(job, plan, owners, host), max(0, tries)):
            tries -= 1
            then = [g for g, _ in on_one_host(job, other)]
            if group in then or len(then) >= len(now):
                continue
            new = estimate(job, other)
            if new.step_s - cost.step_s < cheapest:
                cheapest, paid = new.step_s - cost.step_s, (other, new)
            if new.step_s <= cost.step_s * (1 + SAME):
                plan, cost = other, new
                break
        else:
            if pay and paid is not None:
                plan, cost = paid
            else:
                fates.append(SharedFate(group.start, group.stop, host, cheapest))
    return plan, cost, tuple(fates)


def on_one_host(job: TrainingJob, plan: PipelinePlan) -> list[tuple[range, str]]:
    """Returns the groups of layers whose owners are all on one host, with that host."""
    found = []
    for group, owners in zip(plan.groups, plan.owners, strict=True):
        hosts = {job.by_name[n].place for n in owners}
        if len(hosts) == 1:
            found.append((group, next(iter(hosts))))
    return found


def _exchanged(job: TrainingJob, plan: PipelinePlan, owners: Sequence[str], host: str) -> Iterator[PipelinePlan]:
    """Yields plans in which one of the owners has changed places with a device of the same kind on another host."""
    others = [n for n in (*plan.idle, *plan.stages) if job.by_name[n].place != host]
    names = {n: n for n in plan.devices}
    for a in owners:
        for b in others:
            if job.by_name[a].kind == job.by_name[b].kind:
                yield renamed(plan, names | {a: b, b: a})
