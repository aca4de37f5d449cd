"""Finds a pipeline plan within milliseconds for unequal devices or links: tries a few arrangements of devices, with
layers and micro-batches divided in proportion to speed.

Theory of operation. A start is a number of rows of devices, from as many as memory allows down to one, with rows of
like devices or rows that share all kinds. A row is cut so that its slowest stage is as fast as memory allows; the
longest stages that keep to a time tell whether any cut does. Pipelines of p stages whose slowest one takes t seconds a
micro-batch take about (m + p - 1) t for m, so micro-batches are shared out until these are even. Each plan is then
simulated, and what does not fit is dropped. `unequal` searches longer and finds better plans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.job import Device, TrainingJob, stage_memory
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Numbers of rows that are tried, as fractions of the number that memory allows."""
NEAR = 1e-3
"""Fraction of its time by which the slowest stage may be longer than necessary."""


def plan_at_once(job: TrainingJob, copies: int = 1) -> tuple[StepEstimate, PipelinePlan] | None:
    """Returns the tried plan with the shortest step, and its estimate; None if no plan fits into memory.

    Args:
        job: The job, on all devices that are there.
        copies: Pipelines at least: each layer has so many owners.
    """
    found = []
    for rows in _starts(job, copies):
        plan = _plan(job, rows, copies)
        if plan is not None and not (cost := estimate(job, plan)).over(job):
            found.append((cost, plan))
    return min(found, key=lambda x: x[0].step_s, default=None)


def _starts(job: TrainingJob, copies: int) -> Iterator[list[list[Device]]]:
    """Yields arrangements of the devices in rows, one row per pipeline, without devices that cannot hold any layer."""
    layers = job.costs.count
    least = min(stage_memory(job, i, i + 1, 1, 1).nbytes for i in range(layers))
    usable = [d for d in job.devices if d.memory_nbytes >= least]
    usable.sort(key=lambda d: (-d.speed, -d.memory_nbytes, d.place, d.name))
    need = stage_memory(job, 0, layers, 1, 1).nbytes - job.costs.workspace(0, layers)
    most = min(len(usable), job.micro_batches, sum(d.memory_nbytes for d in usable) // max(1, need))
    for count in dict.fromkeys(max(copies, int(most * share)) for share in SHARES):
        if count <= most:
            there = usable[: count * layers]
            size, more = divmod(len(there), count)
            at = [i * size + min(i, more) for i in range(count + 1)]
            yield [there[a:b] for a, b in pairwise(at)]
            if count > 1 and len({d.kind for d in there}) > 1:
                yield [there[i::count] for i in range(count)]


def _plan(job: TrainingJob, rows: Sequence[Sequence[Device]], copies: int) -> PipelinePlan | None:
    speeds = sum(d.speed for row in rows for d in row)
    cuts: dict[tuple[tuple[float, float], ...], tuple[tuple[int, ...], float] | None] = {}
    found: list[tuple[list[Device], tuple[int, ...], float]] = []
    for row in rows:
        # Early stages keep most micro-batches in flight.
        devices = sorted(row, key=lambda d: -d.memory_nbytes)
        kinds = tuple(d.kind for d in devices)
        if kinds not in cuts:
            share = max(1, round(job.micro_batches * sum(d.speed for d in row) / speeds))
            cuts[kinds] = _cut(job, devices, share)
        if (cut := cuts[kinds]) is not None:
            found.append((devices, *cut))
    if len(found) < copies:
        return None
    counts = _split(job.micro_batches, [(len(at) - 1, slowest_s) for _, at, slowest_s in found])
    pipelines = [
        Pipeline(tuple(PlanStage(d.name, a, b) for d, (a, b) in zip(devices, pairwise(at), strict=True)), m)
        for (devices, at, _), m in zip(found, counts, strict=True) if m
    ]  # fmt: skip
    if len(pipelines) < copies:
        return None
    pipelines.sort(key=lambda p: (-len(p.stages), p.stages))
    used = {s.device for p in pipelines for s in p.stages}
    idle = tuple(sorted(d.name for d in job.devices if d.name not in used))
    return PipelinePlan(job.costs.count, tuple(pipelines), idle=idle, in_flight_extra=job.memory.in_flight_extra)


def _cut(job: TrainingJob, devices: Sequence[Device], m: int) -> tuple[tuple[int, ...], float] | None:
    """Returns the division of layers into stages whose slowest stage is fastest, and that stage's seconds for a
    micro-batch; None if none fits into memory.
    """
    both = [f + b for f, b in zip(job.costs.forward, job.costs.backward, strict=True)]
    speeds = [d.speed for d in devices]
    low, high, best = both[-1] / sum(speeds), both[-1] / min(speeds), None
    while best is None or high - low > NEAR * high:
        middle = (low + high) / 2 if best else high
        at = _longest(job, devices, m, both, middle)
        if at is None and best is None:
            return None
        low, high, best = (low, middle, at) if at else (middle, high, best)
    return best, max((both[b] - both[a]) / v for (a, b), v in zip(pairwise(best), speeds, strict=True))


def _longest(
    job: TrainingJob, devices: Sequence[Device], m: int, both: Sequence[float], time_s: float
) -> tuple[int, ...] | None:
    """Returns the greedy division of layers into stages: each stage, from the first on, takes as many layers as time
    limit and memory allow; None if layers are left over.
    """
    count, stages = job.costs.count, len(devices)
    at = [0]
    for k, d in enumerate(devices):
        first, flight = at[-1], min(stages - k + job.memory.in_flight_extra, m)
        last = count - (stages - 1 - k)
        end = min(last, bisect_right(both, (both[first] + time_s * d.speed) * (1 + 1e-12)) - 1)
        low = first
        while low < end:  # the longest run that fits
            middle = (low + end + 1) // 2
            fits = stage_memory(job, first, middle, flight, m).nbytes <= d.memory_nbytes
            low, end = (middle, end) if fits else (low, middle - 1)
        if end <= first:
            return None
        at.append(end)
    return tuple(at) if at[-1] == count else None


def _split(total: int, pipelines: Sequence[tuple[int, float]]) -> list[int]:
    """Returns the number of micro-batches for each pipeline, given as (stages, seconds of the slowest stage); each
    micro-batch goes where it ends first.
    """
    counts = [0] * len(pipelines)
    heap = [(stages * slowest_s, i) for i, (stages, slowest_s) in enumerate(pipelines)]
    heapify(heap)
    for _ in range(total):
        end_s, i = heap[0]
        counts[i] += 1
        heapreplace(heap, (end_s + pipelines[i][1], i))
    return counts
