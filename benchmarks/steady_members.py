"""A member of the steady benchmark: one model per contender, blocks of steps in turn."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import compute_alone, median, state_model

BATCH = 32

CHAOS = {"chaos": True, "chaos_sockets": False}
"""Whether chunks travel by reference."""


def _contender(kind: str, state_mib: float, rank: int, endpoint: str, fused: bool, device: str) -> Any:
    """Returns step(batch) for one contender; each has its own model and optimizer."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = state_model(state_mib).to(device)
    if kind in CHAOS:
        return chaos_contender(model, fused, endpoint=endpoint, name=f"w{rank}", by_reference=CHAOS[kind])
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=kind == "ddp_view")
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-4, fused=fused)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        ddp(batch).square().mean().backward()
        optimizer.step()

    step.close = lambda: None  # type: ignore[attr-defined]
    return step


def chaos_contender(model: Any, fused: bool, **settings: Any) -> Any:
    """step(batch) of this engine; `step.close()` ends it, `step.engine` is it."""
    import torch

    from chaos_lightning.collectives.layout import Section
    from chaos_lightning.member.engine import Engine
    from chaos_lightning.member.training import switch_quickly
    from chaos_lightning.replication.access import ModuleState
    from chaos_lightning.settings import EngineConfig

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=fused)
    engine = Engine(EngineConfig(host_scheduler=False, **settings))
    switch_quickly()
    engine.prepare(sections=[Section("all", list(model.named_parameters()))])
    engine.join(fingerprint={}, quota=BATCH, accumulate=1, state=ModuleState(model, optimizer))

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        engine.arm(coefficient=1.0)
        model(batch).square().mean().backward()
        engine.step(weight=1.0, coefficient=1.0)
        optimizer.step()

    step.close = lambda: (engine.finish(), engine.close())  # type: ignore[attr-defined]
    step.engine = engine  # type: ignore[attr-defined]
    return step


def work(
    pipe: Connection,
    rank: int,
    world: int,
    port: int,
    endpoints: dict[str, str],
    case: tuple[float, int, int],
    fused: bool,
    device: str,
) -> None:
    """One member: alternating blocks; sends {kind: [median step seconds per block]}."""
    import torch
    import torch.distributed as dist

    state_mib, pairs, steps = case
    compute_alone()
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        kinds = ["chaos", "ddp", "ddp_view", "chaos_sockets"]
        contenders = {k: _contender(k, state_mib, rank, endpoints.get(k, ""), fused, device) for k in kinds}
        width = int(next(state_model(state_mib).parameters()).shape[1])
        batch = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(rank)).to(device)
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
                    if device != "cpu":
                        torch.accelerator.synchronize()
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
