"""Measures step times without failures: this engine and plain DDP on gloo, in alternating blocks of the same processes.

For worlds of 2, 3 and 4 and states (parameters + Adam) of 50 and 200 MiB, each process holds one model per
contender and runs blocks of steps in turn; a pair of neighbouring blocks gives one ratio, the median over all pairs
is the figure.
DDP runs as it comes and with gradient_as_bucket_view; this engine as it comes (members of one machine read gradients
out of each other's memory) and over sockets alone, as between machines. torchft and Lightning's own "ddp" strategy
follow in the same run.

Exposed communication of a contender is its step less the same step alone, without any communication, by all members at
the same time, in the same run; it is told as a ratio to DDP's. Lightning's is beside Lightning alone.

All contenders step with the same Adam. Torch's fused one takes a tenth of a step of 50 MiB; its default loop takes
half of it and hides what is compared here (--optimizer loop).

With --device cuda all members share one device; DDP reduces by gloo there too, since NCCL refuses two ranks on one
device, and Lightning and torchft, whose loops are the host's, are left out.
"""

from __future__ import annotations

import argparse
import random
from contextlib import ExitStack

from benchmarks.common import Options, Result, median, run
from benchmarks.steady import peers
from benchmarks.steady.blocks import Measured, Shape, exposed, measure
from benchmarks.workers import scheduler

BOUNDS = {"ddp": 0.90, "ddp_view": 1.00}
"""Bounds of this engine, as it comes, over these peers."""
CHAOS = {"chaos": True, "chaos_sockets": False}
"""Whether chunks travel by reference."""
KINDS = ["chaos", "ddp", "ddp_view", "chaos_sockets", "alone"]


def contest(shape: Shape) -> Measured:
    """Measures all compared trainings in the same processes; each of ours is in a job of its own."""
    with ExitStack() as stack:
        ours = {
            kind: {"endpoint": stack.enter_context(scheduler(shape.world)), "by_reference": by_reference}
            for kind, by_reference in CHAOS.items()
        }
        return measure(shape, KINDS, ours)


def report(result: Result, shape: Shape, found: Measured) -> None:
    """Adds the figures of one case."""
    case = shape.words
    for kind, values in found.step_s.items():
        result.add(f"{kind} step, {case}", median(values) * 1000, "ms")
        result.add(f"{kind} CPU of all members, {case}", median(found.cpu_s[kind]) * 1000, "ms per step")
    for kind, bound in BOUNDS.items():
        for ours in CHAOS:
            limit = bound if ours == "chaos" else None
            result.ratio(f"{ours} / {kind}, {case}", found.step_s[ours], found.step_s[kind], limit)


def report_exposed(result: Result, case: str, seconds: dict[str, float], base: str) -> None:
    """Adds the communication that each training cannot hide, and its ratio to that of `base`."""
    for kind, value in seconds.items():
        result.add(f"{kind} exposed communication, {case}", value * 1000, "ms")
    if seconds[base] <= 0:
        result.remark(f"{case}: {base} exposes no communication, so nothing is told as a ratio to it")
        return
    words = []
    for kind in [k for k in seconds if k != base]:
        ratio = seconds[kind] / seconds[base]
        result.add(f"exposed communication, {kind} / {base}, {case}", ratio, "ratio")
        words.append(f"{kind} {ratio:.2f}")
    result.headline.append(f"exposed / that of {base}, {case}: {', '.join(words)}")


def measure_case(result: Result, shape: Shape, args: argparse.Namespace, rng: random.Random) -> None:
    """Measures all trainings of one case, then those whose loops cannot be run in alternating blocks."""
    found = contest(shape)
    report(result, shape, found)
    seconds = exposed(found.step_s, "alone")
    if args.no_peers or args.device != "cpu":
        report_exposed(result, shape.words, seconds, "ddp")
        return
    theirs = peers.measure(result, shape, 10 if args.quick else 30, rng, args.rounds)
    if times := theirs.pop("torchft"):
        seconds["torchft"] = median(times) - median(found.step_s["alone"])
    report_exposed(result, shape.words, seconds, "ddp")
    report_exposed(result, shape.words, exposed(theirs, peers.ALONE), peers.DDP)


def main() -> int:
    p = Options(__doc__)
    p.add_series("--worlds", [2, 3, 4], "members")
    p.add_series("--states-mib", [50.0, 200.0], "parameters and Adam state")
    p.add_count("--pairs", 12, 3, "blocks of each contender per case")
    p.add_argument("--optimizer", choices=["fused", "loop"], default="fused", help="which of torch's Adams")
    p.add_argument("--device", default="cpu", help="where all members compute, as torch names it")
    p.add_argument("--no-peers", action="store_true", help="leave torchft and Lightning's strategies out")
    p.add_count("--rounds", 3, 1, "runs of each peer per case")
    args = p.parse_args()
    result = Result("steady")
    rng = random.Random(0)
    for state_mib in args.states_mib:
        for world in args.worlds:
            steps = 10 if state_mib < 100 else 6
            shape = Shape(world, state_mib, args.pairs, steps, args.optimizer == "fused", args.device)
            measure_case(result, shape, args, rng)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
