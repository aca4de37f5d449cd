"""Measures how long planning the pipelines of the next view takes: at a founding, after a loss, a leave and a join; for
6 to 256 members.

The model is a decoder of 26 layers on cards of 32 GiB with four micro-batches for each, eight cards on a host. Fleets
are of one kind, or every third card has 0.8 of the speed. Times are of the processor, the least of some; the first
answer of a process is told by itself, as it fills tables that later ones use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.common import Options, Result, run
from chaos_lightning.planning.pipelines.job import Device, Layer, LinkRate, Overheads, TrainingJob
from chaos_lightning.planning.pipelines.pipeliner import PipelineAnswer, Pipeliner
from chaos_lightning.planning.pipelines.units import ViewPipelines

BOUNDS_MS = {(6, "reroute"): 5.0}
"""Most milliseconds of the answer after a loss, by members and policy."""
TIMES = 5
MIB, GIB = 1 << 20, 1 << 30


def profile(members: int, *, alike: bool) -> TrainingJob:
    """Returns the job of a decoder on `members` cards."""
    layers = tuple(
        Layer(
            name=f"block{i}",
            forward_s=0.01,
            backward_s=0.02,
            parameter_nbytes=100 * MIB,
            gradient_nbytes=200 * MIB,
            optimizer_nbytes=600 * MIB,
            activation_nbytes=285 * MIB,
            workspace_nbytes=640 * MIB,
            output_nbytes=34 * MIB,
        )
        for i in range(26)
    )
    devices = tuple(
        Device(
            name=f"m{i:03}~1",
            memory_nbytes=32 * GIB,
            host=f"h{i // 8}",
            speed=1.0 if alike or i % 3 else 0.8,
        )
        for i in range(members)
    )
    return TrainingJob(
        layers=layers,
        devices=devices,
        micro_batches=4 * members,
        within_host=LinkRate(rate_bps=2e11, latency_s=5e-6),
        between_hosts=LinkRate(rate_bps=2.5e10, latency_s=5e-5),
        overheads=Overheads(hop_s=5e-5, unit_s=3e-5, commit_s=2e-3),
    )


def least_ms(call: Callable[[], PipelineAnswer], times: int = TIMES) -> float:
    """Returns the least processor time of several calls, in milliseconds."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return 1e3 * min(taken)


def fleet(result: Result, members: int, *, alike: bool) -> None:
    """Measures the planner's answers to all questions of a fleet of this size."""
    job = profile(members, alike=alike)
    everybody = list(job.devices)
    what = f"{members} members{'' if alike else ' of two speeds'}"
    founding = partial(Pipeliner(job).first, everybody)
    result.add(f"{what}: founding, first answer", least_ms(founding, 1), "ms")
    result.add(f"{what}: founding", least_ms(founding), "ms")
    text = str(founding().text)
    lost = ViewPipelines.from_json(text).plan.pipelines[0].stages[0].device
    left, gone = [d for d in everybody if d.name != lost], [d for d in everybody if d.name == lost]
    for policy in ("reroute", "adaptive"):
        pipeliner = Pipeliner(job, policy)
        after = str(pipeliner.after(text, left).text)
        taken = least_ms(partial(pipeliner.after, text, left))
        result.add(f"{what}: {policy}, after a loss", taken, "ms", BOUNDS_MS.get((members, policy)))
        result.add(f"{what}: {policy}, text after a loss", len(after), "bytes")
    result.add(f"{what}: adaptive, a leave", least_ms(partial(pipeliner.after, text, left, gone)), "ms")
    more = [*left, replace(gone[0], name="new~1")]
    result.add(f"{what}: adaptive, a join", least_ms(partial(pipeliner.after, after, more)), "ms")


def main() -> int:
    options = Options(__doc__)
    args = options.parse_args()
    result = Result("pipeliner")
    for members in (6, 64) if args.quick else (6, 64, 256):
        for alike in (True, False):
            fleet(result, members, alike=alike)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
