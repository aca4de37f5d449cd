"""Compares links without protection, with checksums, authenticated and encrypted, and Python's ssl, in one run.

Throughput and CPU: two processes on this machine, one loopback TCP connection per case, frames of 64 KiB, 1 MiB and
4 MiB through this engine's own links (frames, loop, buffers), so that "plain" is what a link does without any
protection. A blocking socket, and the same under Python's ssl, are measured beside them. All cases send from one buffer
and receive into another one, of a frame's size, and the same number of bytes; the receiver's clock runs from the end of
a warm-up on the same connection to the last frame. The order of the cases changes from round to round; each figure is
the median over the rounds, each ratio the median of the rounds' own ratios.

What a frame costs: the sender's and the receiver's share of one frame of 1 MiB, by kind of link, and what of it is the
library's (`benchmarks/links_secure/cost.py`). From these comes the reason for the ratio, which is printed with it.

Steps: the workload of `benchmarks.steady`, worlds of 2 and 3, 50 MiB of parameters and Adam, over sockets alone. Each
process is a member of four jobs, one for each kind of link, and runs blocks of steps in turn.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.common import MIB, Options, Result, median, run
from benchmarks.links_secure.cost import BOUND_SLOWER, FRAME_NBYTES, costs
from benchmarks.links_secure.ends import LINKS, SOCKETS, Case, carry, make_certificate, sums_everywhere
from benchmarks.steady.blocks import Shape, measure
from benchmarks.workers import Worker, context, scheduler

SIZES = (64 << 10, 1 << 20, 4 << 20)


def carried(cases: list[Case], certificate: str) -> list[tuple[float, float]]:
    """Returns for each case of a connection, in the given order, the receiver's seconds and the CPU seconds of both
    ends.
    """
    ctx = context("benchmarks.links_secure.ends")
    taker = Worker(ctx, carry, 0, cases, certificate)
    workers = [taker]
    try:
        workers.append(Worker(ctx, carry, taker.receive(), cases, certificate))
        taking, sending = (worker.receive(600) for worker in workers)
        return [(a[0], a[1] + b[1]) for a, b in zip(taking, sending, strict=True)]
    finally:
        for worker in workers:
            worker.kill(5.0)


def throughput(result: Result, rounds: int, total_mib: int) -> tuple[float, float]:
    """Adds throughput and CPU by kind of connection and size of frames.

    Returns:
        Microseconds for FRAME_NBYTES over plain links, and the ratio of authenticated to plain throughput there.
    """
    rng = random.Random(0)
    kinds = (*LINKS, *SOCKETS)
    cases: list[Case] = [(kind, nbytes, total_mib * MIB // nbytes) for nbytes in SIZES for kind in kinds]
    taken: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        certificate = make_certificate(Path(folder))
        for turn in range(rounds + 1):
            order = rng.sample(cases, len(cases))
            for case, measured in zip(order, carried(order, certificate), strict=True):
                if turn:  # the first round warms up
                    taken[case].append(measured)
    gigabytes = total_mib * MIB / 1e9
    plain_us = ratio = 0.0
    for nbytes in SIZES:
        frames = f"frames of {nbytes >> 10} KiB"
        of = {kind: taken[kind, nbytes, total_mib * MIB // nbytes] for kind in kinds}
        for kind in kinds:
            result.add(f"{kind}, {frames}", gigabytes / median([s for s, _ in of[kind]]), "GB/s")
            result.add(f"{kind} CPU of both ends, {frames}", median([c for _, c in of[kind]]) / gigabytes, "s per GB")
            result.details[f"seconds, {kind}, {frames}"] = [s for s, _ in of[kind]]
        for kind, base in (
            ("checksum", "plain"),
            ("authenticated", "plain"),
            ("encrypted", "plain"),
            ("ssl", "socket"),
        ):
            slower = median([s / b for (s, _), (b, _) in zip(of[kind], of[base], strict=True)])
            bound = BOUND_SLOWER if kind == "authenticated" and nbytes == MIB else None
            result.add(f"time of {kind} / {base}, {frames}", slower, "ratio", bound)
            result.add(f"throughput of {kind} / {base}, {frames}", 1 / slower, "ratio")
            if bound is not None:
                plain_us = median([b for b, _ in of[base]]) / total_mib * FRAME_NBYTES / MIB * 1e6
                ratio = 1 / slower
    return plain_us, ratio


def steps(result: Result, shape: Shape) -> None:
    """Adds the step times of jobs that differ only in the protection of their links."""
    with ExitStack() as stack:
        ours = {}
        for kind in LINKS:
            endpoint = stack.enter_context(scheduler(shape.world, links="checksum" if kind == "plain" else kind))
            ours[kind] = {"endpoint": endpoint, "by_reference": False}
        found = measure(shape, list(LINKS), ours, sums_everywhere)
    for kind in LINKS:
        result.add(f"{kind} step, {shape.words}", median(found.step_s[kind]) * 1000, "ms")
        result.add(f"{kind} CPU of all members, {shape.words}", median(found.cpu_s[kind]) * 1000, "ms per step")
    for kind in LINKS[1:]:
        result.ratio(f"step {kind} / plain, {shape.words}", found.step_s[kind], found.step_s["plain"])


def main() -> int:
    p = Options(__doc__)
    p.add_count("--rounds", 7, 5, "rounds of the throughput cases")
    p.add_count("--total-mib", 1024, 256, "MiB per case")
    p.add_series("--worlds", [2, 3], "members that train; none: leave the steps out")
    p.add_argument("--state-mib", type=float, default=50)
    p.add_count("--pairs", 12, 3, "blocks of steps per kind")
    args = p.parse_args()
    result = Result("links_secure")
    costs(result, *throughput(result, args.rounds, args.total_mib))
    for world in args.worlds:
        steps(result, Shape(world, args.state_mib, args.pairs, 10))
    return result.finish(args)


if __name__ == "__main__":
    run(main)
