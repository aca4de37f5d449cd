"""The other contenders of the steady benchmark, in the same run: torchft, and Lightning with "ddp" and with "chaos".

torchft reports its committed steps as in peers_torchft.py, here undisturbed. The Lightning pair runs the same model in
`Trainer.fit` without loggers, bars and checkpoints; a callback takes the times between two batches' ends.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import peers_torchft
from benchmarks.common import Result, compute_alone, state_model
from benchmarks.victims import BATCH
from benchmarks.workers import Worker, context, scheduler
from chaos_lightning.machine.listener import free_port

WARM_UP = 5


def torchft(result: Result, world: int, state_mib: float, steps: int) -> float | None:
    """Median seconds per step of torchft with this many members; None (with a note) where it cannot run."""
    missing = peers_torchft.available()
    if missing:
        result.notes.append(missing)
        return None
    ctx = context("benchmarks.victims", "torch._dynamo", "chaos_lightning.replication.access")
    with peers_torchft.lighthouse(peers_torchft.TUNED) as address:
        timeout_s = peers_torchft.TUNED_TIMEOUT_S
        members = [Worker(ctx, peers_torchft.member, address, f"m{i}", state_mib, timeout_s) for i in range(world)]
        try:
            times = _stamps(members[0], world, steps + WARM_UP)
        except (TimeoutError, RuntimeError, EOFError) as error:
            result.notes.append(f"torchft, world {world}, {state_mib:g} MiB: {error!r}")
            print(f"  torchft gave no time, world {world}, {state_mib:g} MiB: {error!r}", flush=True)
            return None
        finally:
            for member in members:
                member.kill()
    gaps = [b - a for a, b in pairwise(times[WARM_UP:])]
    return statistics.median(gaps) / 1e9


def _stamps(member: Worker, world: int, count: int) -> list[int]:
    """CLOCK_MONOTONIC of this member's commits in which all took part."""
    found: list[int] = []
    while len(found) <= count:
        kind, stamp, *more = member.receive(120)
        if kind == "step" and more[3] == world:
            found.append(stamp)
    return found


def lightning(world: int, state_mib: float, steps: int, kind: str) -> float:
    """Median seconds per batch of Lightning with strategy `kind` ("ddp" or "chaos")."""
    ctx = context("benchmarks.steady_peers", "lightning.pytorch", "chaos_lightning.strategies")
    with scheduler(world) as endpoint:
        port = free_port()
        members = [Worker(ctx, _fit, r, world, port, endpoint, state_mib, steps, kind) for r in range(world)]
        try:
            reports = [m.receive(300) for m in members]
        finally:
            for member in members:
                member.process.join(10)
                member.kill()
    return max(statistics.median(r) for r in reports)


def _fit(
    pipe: Connection, rank: int, world: int, port: int, endpoint: str, state_mib: float, steps: int, kind: str
) -> None:
    import logging
    import warnings

    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    compute_alone()
    torch.manual_seed(0)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank)
    )

    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = state_model(state_mib)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-4, fused=True)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())

    try:
        module, clock = Plain(), Clock()
        width = int(next(module.parameters()).shape[1])
        data = TensorDataset(torch.randn(BATCH * world * (steps + WARM_UP), width))
        strategy: Any = kind
        if kind == "chaos":
            from chaos_lightning.strategies import ChaosStrategy

            strategy = ChaosStrategy(endpoint=endpoint, name=f"w{rank}")
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1 if kind == "chaos" else world,
            max_epochs=1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(data, BATCH))
        ends = clock.ends[WARM_UP:]
        pipe.send([b - a for a, b in pairwise(ends)])
    except BaseException as error:
        pipe.send(RuntimeError(f"{kind} worker {rank}: {error!r}"))
        raise


def measure(result: Result, world: int, state_mib: float, steps: int, rng: random.Random, rounds: int) -> None:
    """Adds the peers' figures for one case: `rounds` runs of each, in an order that is drawn anew each time."""
    case = f"world {world}, {state_mib:g} MiB"
    kinds = ["ddp", "chaos", "torchft"]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        rng.shuffle(kinds)
        for kind in kinds:
            if kind == "torchft":
                seconds = torchft(result, world, state_mib, steps)
            else:
                seconds = lightning(world, state_mib, steps, kind)
            if seconds is not None:
                times[kind].append(seconds)
    for kind in ("ddp", "chaos", "torchft"):
        if times[kind]:
            name = "torchft" if kind == "torchft" else f'Lightning "{kind}"'
            result.add(f"{name} step, {case}", statistics.median(times[kind]) * 1000, "ms")
    ratios = [c / d for c, d in zip(times["chaos"], times["ddp"], strict=True)]
    result.add(f'Lightning "chaos" / "ddp", {case}', statistics.median(ratios), "ratio")
