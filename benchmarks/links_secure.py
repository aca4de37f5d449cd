"""What protection costs: plain links, with checksums, authenticated and encrypted, and Python's ssl, in one run.

Throughput and CPU: two processes on this machine, one loopback TCP connection per case, frames of 64 KiB, 1 MiB and
4 MiB through this engine's own links (frames, loop, buffers), so that "plain" is what a link does without any
protection. A blocking socket, and the same under Python's ssl, are measured beside them. The order of the cases changes
from round to round; each figure is the median over the rounds, each ratio the median of the rounds' own ratios.

Steps: the workload of `benchmarks.steady`, worlds of 2 and 3, 50 MiB of parameters and Adam, over sockets alone. Each
process is a member of four jobs, one for each kind of link, and runs blocks of steps in turn.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from benchmarks.common import MIB, Result, median, parser, run
from benchmarks.links_secure_members import LINKS, SOCKETS, Case, carry, make_certificate, schedulers, train
from benchmarks.workers import Worker, context, free_port

SIZES = (64 << 10, 1 << 20, 4 << 20)
BOUND_SLOWER = 1 / 0.7
"""Authenticated links carry at least 0.7 of what plain ones do, with frames of 1 MiB: at most so much more time."""


def carried(cases: list[Case], certificate: str) -> list[tuple[float, float]]:
    """Seconds, and CPU seconds of both ends, of each case in this order."""
    ctx = context("benchmarks.links_secure_members")
    taker = Worker(ctx, carry, 0, cases, certificate)
    workers = [taker]
    try:
        workers.append(Worker(ctx, carry, taker.receive(), cases, certificate))
        mine, its = (worker.receive(600) for worker in workers)
        return [(max(a[0], b[0]), a[1] + b[1]) for a, b in zip(mine, its, strict=True)]
    finally:
        for worker in workers:
            worker.process.join(5)
            worker.kill()


def throughput(result: Result, rounds: int, total_mib: int) -> None:
    """Figures by kind of connection and size of frames."""
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


def steps(result: Result, world: int, state_mib: float, pairs: int, count: int) -> None:
    """Step times of jobs that differ in their links alone."""
    ctx = context("benchmarks.links_secure_members")
    with schedulers(world) as endpoints:
        port = free_port()
        workers = [Worker(ctx, train, r, world, port, endpoints, (state_mib, pairs, count)) for r in range(world)]
        try:
            reports = [w.receive(600) for w in workers]
        finally:
            for w in workers:
                w.process.join(5)
                w.kill()
    case = f"world {world}, {state_mib:g} MiB"
    times = {kind: [max(t[kind][i] for t, _ in reports) for i in range(pairs)] for kind in LINKS}
    for kind in LINKS:
        result.add(f"{kind} step, {case}", median(times[kind]) * 1000, "ms")
        cpu = median([sum(c[kind][i] for _, c in reports) for i in range(pairs)])
        result.add(f"{kind} CPU of all members, {case}", cpu * 1000, "ms per step")
    for kind in LINKS[1:]:
        ratios = [a / b for a, b in zip(times[kind], times["plain"], strict=True)]
        result.add(f"step {kind} / plain, {case}", median(ratios), "ratio")
        result.details[f"ratios of steps {kind} / plain, {case}"] = ratios


def main() -> int:
    p = parser(__doc__ or "")
    p.add_argument("--rounds", type=int, default=0, help="rounds of the throughput cases; 0: 7, or 2 with --quick")
    p.add_argument("--total-mib", type=int, default=0, help="MiB per case; 0: 1024, or 256 with --quick")
    p.add_argument("--worlds", type=int, nargs="*", default=[2, 3], help="of the steps; none: leave them out")
    p.add_argument("--state-mib", type=float, default=50)
    p.add_argument("--pairs", type=int, default=0, help="blocks of steps per kind; 0: 12, or 3 with --quick")
    args = p.parse_args()
    result = Result("links_secure")
    throughput(result, args.rounds or (2 if args.quick else 7), args.total_mib or (256 if args.quick else 1024))
    for world in args.worlds[:1] if args.quick else args.worlds:
        steps(result, world, args.state_mib, args.pairs or (3 if args.quick else 12), 10)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
