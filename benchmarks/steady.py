"""Step time without any failure: this engine against plain DDP on gloo, in alternating blocks of the same processes.

For worlds of 2, 3 and 4 and states (parameters + Adam) of 50 and 200 MiB, each process holds one model per
contender and runs blocks of steps in turn; a pair of neighbouring blocks gives one ratio, the median over all pairs
is the figure.
DDP runs as it comes and with gradient_as_bucket_view; this engine as it comes (members of one machine read gradients
out of each other's memory) and over sockets alone, as between machines. torchft and Lightning's own "ddp" strategy
follow in the same run.

All contenders step with the same Adam. Torch's fused one takes a tenth of a step of 50 MiB; its default loop takes
half of it and hides what is compared here (--optimizer loop).
"""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import steady_peers
from benchmarks.common import Result, median, parser, run, state_model
from benchmarks.workers import Worker, context, free_port, scheduler

BOUND_DDP = 0.90
BOUND_VIEW = 1.00
BATCH = 32


CHAOS = {"chaos": True, "chaos_sockets": False}
"""Whether chunks travel by reference."""


def _contender(kind: str, state_mib: float, rank: int, endpoint: str, fused: bool) -> Any:
    """Returns step(batch) for one contender; each has its own model and optimizer."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = state_model(state_mib)
    if kind in CHAOS:
        from chaos_lightning.collectives.layout import Section
        from chaos_lightning.replication.access import ModuleState
        from chaos_lightning.runtime.config import EngineConfig
        from chaos_lightning.runtime.engine import Engine

        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=fused)
        engine = Engine(
            EngineConfig(endpoint=endpoint, name=f"w{rank}", host_scheduler=False, by_reference=CHAOS[kind])
        )
        engine.prepare(sections=[Section("all", list(model.named_parameters()))])
        engine.join(fingerprint={}, quota=BATCH, accumulate=1, state=ModuleState(model, optimizer))

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad(set_to_none=True)
            engine.arm(coefficient=1.0)
            model(batch).square().mean().backward()
            engine.step(weight=1.0, coefficient=1.0)
            optimizer.step()

        step.close = lambda: (engine.finish(), engine.close())  # type: ignore[attr-defined]
        return step
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=kind == "ddp_view")
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-4, fused=fused)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        ddp(batch).square().mean().backward()
        optimizer.step()

    step.close = lambda: None  # type: ignore[attr-defined]
    return step


def work(
    pipe: Connection,
    rank: int,
    world: int,
    port: int,
    endpoints: dict[str, str],
    case: tuple[float, int, int],
    fused: bool,
) -> None:
    """One member: alternating blocks; sends {kind: [median step seconds per block]}."""
    import torch
    import torch.distributed as dist

    state_mib, pairs, steps = case
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        kinds = ["chaos", "ddp", "ddp_view", "chaos_sockets"]
        contenders = {k: _contender(k, state_mib, rank, endpoints.get(k, ""), fused) for k in kinds}
        width = int(next(state_model(state_mib).parameters()).shape[1])
        batch = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(rank))
        times: dict[str, list[float]] = {k: [] for k in kinds}
        cpu: dict[str, list[float]] = {k: [] for k in kinds}
        for pair in range(pairs + 1):
            order = kinds if pair % 2 else kinds[::-1]
            for kind in order:
                dist.barrier()
                block = []
                cpu_started = time.process_time()
                for _ in range(steps):
                    started = time.perf_counter()
                    contenders[kind](batch)
                    block.append(time.perf_counter() - started)
                if pair:  # the first round warms up
                    times[kind].append(median(block))
                    cpu[kind].append((time.process_time() - cpu_started) / steps)
        for kind in kinds:
            contenders[kind].close()
        dist.barrier()
        dist.destroy_process_group()
        pipe.send((times, cpu))
    except BaseException as error:
        pipe.send(RuntimeError(f"worker {rank}: {error!r}"))
        raise


def measure(
    world: int, state_mib: float, pairs: int, steps: int, fused: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Per contender: step seconds of the slowest member, and CPU seconds of all members per step, block by block."""
    ctx = context("benchmarks.steady")
    with scheduler(world) as one, scheduler(world) as other:
        port, endpoints, case = free_port(), dict(zip(CHAOS, (one, other), strict=True)), (state_mib, pairs, steps)
        workers = [Worker(ctx, work, r, world, port, endpoints, case, fused) for r in range(world)]
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
    p.add_argument("--pairs", type=int, default=0, help="block pairs per case; 0: 8, or 3 with --quick")
    p.add_argument("--optimizer", choices=["fused", "loop"], default="fused", help="which of torch's Adams")
    p.add_argument("--no-peers", action="store_true", help="leave torchft and Lightning's strategies out")
    p.add_argument("--rounds", type=int, default=0, help="runs of each peer per case; 0: 3, or 1 with --quick")
    args = p.parse_args()
    result = Result("steady")
    worlds = args.worlds[:1] if args.quick else args.worlds
    states = args.states_mib[:1] if args.quick else args.states_mib
    pairs = args.pairs or (3 if args.quick else 8)
    rng = random.Random(0)
    for state_mib in states:
        for world in worlds:
            times, cpu = measure(
                world, state_mib, pairs, steps=10 if state_mib < 100 else 6, fused=args.optimizer == "fused"
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
            if not args.no_peers:
                rounds = args.rounds or (1 if args.quick else 3)
                steady_peers.measure(result, world, state_mib, 10 if args.quick else 30, rng, rounds)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
