"""What protection costs: plain links, with checksums, authenticated and encrypted, and Python's ssl, in one run.

Throughput and CPU: two processes on this machine, one loopback TCP connection per case, frames of 64 KiB, 1 MiB and
4 MiB through this engine's own links (frames, loop, buffers), so that "plain" is what a link does without any
protection. A blocking socket, and the same under Python's ssl, are measured beside them. All cases send from one buffer
and receive into another one, of a frame's size, and the same number of bytes; the receiver's clock runs from the end of
a warm-up on the same connection to the last frame. The order of the cases changes from round to round; each figure is
the median over the rounds, each ratio the median of the rounds' own ratios.

What a frame costs: the sender's and the receiver's share of one frame of 1 MiB, by kind of link, and what of it is the
library's (`benchmarks.links_secure_cost`). From these comes the reason for the ratio, which is printed with it.

Steps: the workload of `benchmarks.steady`, worlds of 2 and 3, 50 MiB of parameters and Adam, over sockets alone. Each
process is a member of four jobs, one for each kind of link, and runs blocks of steps in turn.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from benchmarks.common import MIB, Result, median, parser, run
from benchmarks.links_secure_cost import FRAME_NBYTES, best_ratio, frame_costs, library_costs
from benchmarks.links_secure_members import LINKS, SOCKETS, Case, carry, make_certificate, schedulers, train
from benchmarks.workers import Worker, context
from chaos_lightning.machine.listener import free_port

SIZES = (64 << 10, 1 << 20, 4 << 20)
BOUND_SLOWER = 1 / 0.7
"""Authenticated links carry at least 0.7 of what plain ones do, with frames of 1 MiB: at most so much more time."""


def carried(cases: list[Case], certificate: str) -> list[tuple[float, float]]:
    """Seconds at the receiver, and CPU seconds of both ends, of each case in this order."""
    ctx = context("benchmarks.links_secure_members")
    taker = Worker(ctx, carry, 0, cases, certificate)
    workers = [taker]
    try:
        workers.append(Worker(ctx, carry, taker.receive(), cases, certificate))
        taking, sending = (worker.receive(600) for worker in workers)
        return [(a[0], a[1] + b[1]) for a, b in zip(taking, sending, strict=True)]
    finally:
        for worker in workers:
            worker.process.join(5)
            worker.kill()


def throughput(result: Result, rounds: int, total_mib: int) -> tuple[float, float]:
    """Figures by kind of connection and size of frames.

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


def costs(result: Result, plain_us: float, ratio: float) -> None:
    """What protection adds to one frame at either end, and the reason for the ratio in words."""
    of, library = frame_costs(), library_costs()
    case = f"a frame of {FRAME_NBYTES >> 10} KiB"
    plain = of["plain"]
    for kind in LINKS:
        for end, us in zip(("sender", "receiver"), of[kind], strict=True):
            result.add(f"{kind}, {end}'s part of {case}", us, "us")
    for kind, us in library.items():
        result.add(f"{kind}, the library's part of it at either end", us, "us")
        for end, both, without in zip(("sender", "receiver"), of[kind], plain, strict=True):
            result.add(f"{kind}, calls, Python and cold bytes at the {end}", both - without - us, "us")
    tag = library["authenticated"]
    best = best_ratio(plain_us, tag)
    result.add("throughput of authenticated / plain, if each end only made the tag besides", best, "ratio")
    sending, taking = (both - without for both, without in zip(of["authenticated"], plain, strict=True))
    reason = (
        f"authenticated / plain is {ratio:.2f} with frames of {FRAME_NBYTES >> 10} KiB: plain links, which keep a core "
        f"busy at either end, carry one in {plain_us:.0f} us; authentication adds {sending:.0f} us at the sender and "
        f"{taking:.0f} us at the receiver, of which the tag alone takes one core {tag:.0f} us. If each end only made "
        f"the tag besides, the ratio would be {best:.2f}"
    )
    if best < 1 / BOUND_SLOWER:
        reason += f", which is below {1 / BOUND_SLOWER:.2f}: no code around the tag reaches the bound on this machine"
    result.notes.append(reason)
    print(f"  {reason}.", flush=True)


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
    p.add_argument("--rounds", type=int, default=0, help="rounds of the throughput cases; 0: 7, or 5 with --quick")
    p.add_argument("--total-mib", type=int, default=0, help="MiB per case; 0: 1024, or 256 with --quick")
    p.add_argument("--worlds", type=int, nargs="*", default=[2, 3], help="of the steps; none: leave them out")
    p.add_argument("--state-mib", type=float, default=50)
    p.add_argument("--pairs", type=int, default=0, help="blocks of steps per kind; 0: 12, or 3 with --quick")
    args = p.parse_args()
    result = Result("links_secure")
    rounds = args.rounds or (5 if args.quick else 7)
    costs(result, *throughput(result, rounds, args.total_mib or (256 if args.quick else 1024)))
    for world in args.worlds[:1] if args.quick else args.worlds:
        steps(result, world, args.state_mib, args.pairs or (3 if args.quick else 12), 10)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
