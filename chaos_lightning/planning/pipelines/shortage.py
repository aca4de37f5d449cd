"""Finds the pipeline that comes closest to fitting into memory, and says what would be needed for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from chaos_lightning.planning.pipelines.job import Device, TrainingJob, stage_memory
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage

GIB, MIB = 1 << 30, 1 << 20


def nearest(job: TrainingJob) -> str:
    """Returns in words why no plan fits into memory: the layer too large for any device, or the closest plan and what
    it lacks.
    """
    roomy = max(job.devices, key=lambda d: d.memory_nbytes)
    for i, layer in enumerate(job.layers):
        use = stage_memory(job, i, i + 1, 1, 1).nbytes
        if use > roomy.memory_nbytes:
            return (
                f"layer {i} ({layer.name!r}) fits on no device: alone with one micro-batch it needs "
                f"{use / GIB:.2f} GiB, {use - roomy.memory_nbytes} bytes more than {roomy.name!r} has, which has most; "
                "give devices more memory, or cut the layer in two"
            )
    devices, at, short = _tightest(job)
    k = max(range(len(devices)), key=lambda i: short[i])
    takes = f"{(devices[k].memory_nbytes + short[k]) / MIB:.2f} MiB"
    return (
        f"no plan fits {len(job.devices)} devices and {job.micro_batches} micro-batches of {job.costs.count} layers; "
        f"the closest is one pipeline of {len(devices)} stages, whose stage {k} (layers {at[k]} to {at[k + 1]}, on "
        f"{devices[k].name!r}) lacks {short[k]} bytes of the {takes} that it takes; give devices more memory, add "
        "devices, or make micro-batches smaller"
    )


def tightest(job: TrainingJob) -> PipelinePlan | None:
    """Returns a plan of a single pipeline on the devices with most memory, with the cut that fits best; None if it does
    not fit.
    """
    devices, at, short = _tightest(job)
    if max(short) > 0:
        return None
    stages = tuple(PlanStage(d.name, x, y) for d, (x, y) in zip(devices, pairwise(at), strict=True))
    idle = tuple(sorted({d.name for d in job.devices} - {d.name for d in devices}))
    row = Pipeline(stages, job.micro_batches)
    return PipelinePlan(job.costs.count, (row,), idle=idle, in_flight_extra=job.memory.in_flight_extra)


def least_devices(job: TrainingJob, device: Device) -> int | None:
    """Returns the smallest number of devices equal to this one on which some plan fits into memory; None if no number
    suffices.

    Args:
        job: The job; its own devices do not matter.
        device: Device that all are like.
    """
    layers, least = job.costs.count, None
    for pipelines in range(1, job.micro_batches + 1):
        m = -(-job.micro_batches // pipelines)
        # More pipelines help only where they have fewer micro-batches in flight.
        if least is not None and (pipelines >= least or m >= layers + job.memory.in_flight_extra):
            continue
        stages = next((p for p in range(1, layers + 1) if _holds(job, device, p, m)), None)
        if stages is not None and (least is None or pipelines * stages < least):
            least = pipelines * stages
    return least


def _holds(job: TrainingJob, device: Device, stages: int, m: int) -> bool:
    """Returns whether a pipeline of this many equal devices fits into memory, with each stage as long as fits."""
    first, count = 0, job.costs.count
    for k in range(stages):
        flight = min(stages - k + job.memory.in_flight_extra, m)
        end = first
        while end < count - (stages - 1 - k) and (
            stage_memory(job, first, end + 1, flight, m).nbytes <= device.memory_nbytes
        ):
            end += 1
        if end == first:
            return False
        first = end
    return first == count


def _tightest(job: TrainingJob) -> tuple[Sequence[Device], list[int], list[int]]:
    """Returns the single pipeline whose worst stage lacks the least memory: devices, cut, and bytes that each stage
    lacks.
    """
    devices = sorted(job.devices, key=lambda d: (-d.memory_nbytes, d.name))[: job.costs.count]
    count, stages, m = job.costs.count, len(devices), job.micro_batches
    extra = job.memory.in_flight_extra

    def lack(k: int, first: int, end: int) -> int:
        flight = min(stages - k + extra, m)
        return stage_memory(job, first, end, flight, m).nbytes - devices[k].memory_nbytes

    # best[end]: (the most that any stage so far lacks, where the last one begins)
    best: list[dict[int, tuple[int, int]]] = [{0: (-(1 << 62), 0)}]
    for k in range(stages):
        row: dict[int, tuple[int, int]] = {}
        for end in range(k + 1, count - (stages - 1 - k) + 1):
            row[end] = min(
                (max(worst, lack(k, first, end)), first) for first, (worst, _) in best[-1].items() if first < end
            )
        best.append(row)
    at = [count]
    for k in range(stages, 0, -1):
        at.insert(0, best[k][at[0]][1])
    return devices, at, [lack(k, at[k], at[k + 1]) for k in range(stages)]
