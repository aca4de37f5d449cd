"""Step time without any failure: this engine against plain DDP on gloo, in alternating blocks of the same processes.

For worlds of 2, 3 and 4 and states (parameters + Adam) of 50 and 200 MiB, each process holds one model per
contender and runs blocks of steps in turn; a pair of neighbouring blocks gives one ratio, the median over all pairs
is the figure.
DDP runs as it comes and with gradient_as_bucket_view; this engine as it comes (members of one machine read gradients
out of each other's memory) and over sockets alone, as between machines. torchft and Lightning's own "ddp" strategy
follow in the same run.

All contenders step with the same Adam. Torch's fused one takes a tenth of a step of 50 MiB; its default loop takes
half of it and hides what is compared here (--optimizer loop).

With --device cuda all members share one device; DDP reduces by gloo there too, since NCCL refuses two ranks on one
device, and Lightning and torchft, whose loops are the host's, are left out.
"""

from __future__ import annotations

import random

from benchmarks import steady_peers
from benchmarks.common import Result, median, parser, run
from benchmarks.steady_members import CHAOS, work
from benchmarks.workers import Worker, context, scheduler
from chaos_lightning.machine.listener import free_port

BOUND_DDP = 0.90
BOUND_VIEW = 1.00


def measure(
    world: int, state_mib: float, pairs: int, steps: int, fused: bool, device: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Per contender: step seconds of the slowest member, and CPU seconds of all members per step, block by block."""
    ctx = context("benchmarks.steady_members")
    with scheduler(world) as one, scheduler(world) as other:
        port, endpoints, case = free_port(), dict(zip(CHAOS, (one, other), strict=True)), (state_mib, pairs, steps)
        workers = [Worker(ctx, work, r, world, port, endpoints, case, fused, device) for r in range(world)]
        try:
            reports = [w.receive(600) for w in workers]
        finally:
            for w in workers:
                w.process.join(5)
                w.kill()
    times = {kind: [max(t[kind][i] for t, _ in reports) for i in range(pairs)] for kind in reports[0][0]}
    cpu = {kind: [sum(c[kind][i] for _, c in reports) for i in range(pairs)] for kind in reports[0][1]}
    return times, cpu


def main() -> int:
    p = parser(__doc__ or "")
    p.add_argument("--worlds", type=int, nargs="*", default=[2, 3, 4])
    p.add_argument("--states-mib", type=float, nargs="*", default=[50, 200])
    p.add_argument("--pairs", type=int, default=0, help="block pairs per case; 0: 12, or 3 with --quick")
    p.add_argument("--optimizer", choices=["fused", "loop"], default="fused", help="which of torch's Adams")
    p.add_argument("--device", default="cpu", help="where all members compute, as torch names it")
    p.add_argument("--no-peers", action="store_true", help="leave torchft and Lightning's strategies out")
    p.add_argument("--rounds", type=int, default=0, help="runs of each peer per case; 0: 3, or 1 with --quick")
    args = p.parse_args()
    result = Result("steady")
    worlds = args.worlds[:1] if args.quick else args.worlds
    states = args.states_mib[:1] if args.quick else args.states_mib
    pairs = args.pairs or (3 if args.quick else 12)
    rng = random.Random(0)
    for state_mib in states:
        for world in worlds:
            times, cpu = measure(
                world,
                state_mib,
                pairs,
                steps=10 if state_mib < 100 else 6,
                fused=args.optimizer == "fused",
                device=args.device,
            )
            case = f"world {world}, {state_mib:g} MiB"
            for kind, values in times.items():
                result.add(f"{kind} step, {case}", median(values) * 1000, "ms")
                result.add(f"{kind} CPU of all members, {case}", median(cpu[kind]) * 1000, "ms per step")
            for kind, bound in (("ddp", BOUND_DDP), ("ddp_view", BOUND_VIEW)):
                for ours, limit in (("chaos", bound), ("chaos_sockets", None)):
                    ratios = [c / d for c, d in zip(times[ours], times[kind], strict=True)]
                    result.add(f"{ours} / {kind}, {case}", median(ratios), "ratio", limit)
                    result.details[f"ratios {ours} / {kind}, {case}"] = ratios
            if not args.no_peers and args.device == "cpu":
                rounds = args.rounds or (1 if args.quick else 3)
                steady_peers.measure(result, world, state_mib, 10 if args.quick else 30, rng, rounds)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
