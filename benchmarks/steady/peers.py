"""Runs the other trainings of the steady benchmark, in the same run: torchft, and Lightning with "ddp" and with
"chaos".

torchft reports its committed steps as in peers/torchft.py, here undisturbed. Lightning's contenders run the same model
in `Trainer.fit` without loggers, bars and checkpoints; a callback takes the times between two batches' ends. Lightning
alone is as many processes at the same time, each with a trainer of its own and without communication.
"""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import Result, median
from benchmarks.members import BATCH, compute_alone, state_model, width_of
from benchmarks.peers import torchft
from benchmarks.steady.blocks import Shape
from benchmarks.workers import Worker, context, scheduler, several
from chaos_lightning.machine.listener import free_port

WARM_UP = 5
DDP, CHAOS, ALONE = 'Lightning "ddp"', 'Lightning "chaos"', "Lightning alone"
STRATEGIES = {DDP: "ddp", CHAOS: "chaos", ALONE: "auto"}


def torchft_s(result: Result, shape: Shape, steps: int) -> list[float]:
    """Returns torchft's median seconds per step; empty, with a note, if it cannot run on this machine."""
    if missing := torchft.available():
        result.notes.append(missing)
        return []
    with torchft.Lighthouse(torchft.TUNED) as house:
        spawn = torchft.spawning(house, shape.state_mib)
        members = [spawn(f"m{i}") for i in range(shape.world)]
        try:
            times = _stamps(members[0], shape.world, steps + WARM_UP)
        except (TimeoutError, RuntimeError, EOFError) as error:
            result.remark(f"torchft gave no time, {shape.words}: {error!r}")
            return []
        finally:
            for member in members:
                member.kill()
    return [median([b - a for a, b in pairwise(times[WARM_UP:])]) / 1e9]


def _stamps(member: Worker, world: int, count: int) -> list[int]:
    """Returns the CLOCK_MONOTONIC times of this member's commits that had all members as contributors."""
    found: list[int] = []
    while len(found) <= count:
        kind, stamp, *more = member.receive(120)
        if kind == "step" and more[3] == world:
            found.append(stamp)
    return found


def lightning_s(shape: Shape, steps: int, strategy: str) -> float:
    """Returns Lightning's median seconds per batch with this strategy."""
    ctx = context("benchmarks.steady.peers", "lightning.pytorch", "chaos_lightning.strategies")
    with scheduler(shape.world) as endpoint:
        port = free_port()
        ranks = [(rank, shape.world, port, endpoint, shape.state_mib, steps, strategy) for rank in range(shape.world)]
        with several(ctx, _fit, ranks) as members:
            return max(median(member.receive(300)) for member in members)


def _fit(
    pipe: Connection, rank: int, world: int, port: int, endpoint: str, state_mib: float, steps: int, strategy: str
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

    module, clock = Plain(), Clock()
    data = TensorDataset(torch.randn(BATCH * world * (steps + WARM_UP), width_of(module)))
    chosen: Any = strategy
    if strategy == "chaos":
        from chaos_lightning.strategies import ChaosStrategy

        chosen = ChaosStrategy(endpoint=endpoint, name=f"w{rank}")
    trainer = pl.Trainer(
        strategy=chosen,
        accelerator="cpu",
        devices=world if strategy == "ddp" else 1,
        max_epochs=1,
        limit_train_batches=steps + WARM_UP,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, BATCH))
    pipe.send([b - a for a, b in pairwise(clock.ends[WARM_UP:])])


def measure(result: Result, shape: Shape, steps: int, rng: random.Random, rounds: int) -> dict[str, list[float]]:
    """Adds the figures of torchft and Lightning for one case: `rounds` runs of each, in a random order each time.

    Returns:
        Seconds per step of each run, by contender.
    """
    kinds = [*STRATEGIES, "torchft"]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in rng.sample(kinds, len(kinds)):
            if kind == "torchft":
                times[kind] += torchft_s(result, shape, steps)
            else:
                times[kind].append(lightning_s(shape, steps, STRATEGIES[kind]))
    for kind, values in times.items():
        if values:
            result.add(f"{kind} step, {shape.words}", median(values) * 1000, "ms")
    result.ratio(f'Lightning "chaos" / "ddp", {shape.words}', times[CHAOS], times[DDP])
    return times
