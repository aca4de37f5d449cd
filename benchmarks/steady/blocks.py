"""Runs several trainings in turn: one model each in the same processes, in blocks of steps, in reversed order each
round.

A round has one block of each contender; what is measured of two of them in one round makes one ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benchmarks.common import median
from benchmarks.members import BATCH, Trainee, compute_alone, config_of, model_and_adam, state_model, width_of
from benchmarks.workers import context, several
from chaos_lightning.machine.listener import free_port


@dataclass(frozen=True)
class Shape:
    """Sizes of one comparison: the model, the members, the blocks and the steps.

    Attributes:
        world: Number of members.
        state_mib: MiB of parameters and Adam state.
        rounds: Number of blocks of each contender that count.
        steps: Number of steps in a block.
        fused: Whether torch's fused Adam runs; otherwise its default loop.
        device: Device on which all members compute, as torch names it.
    """

    world: int
    state_mib: float
    rounds: int
    steps: int
    fused: bool = True
    device: str = "cpu"

    @property
    def words(self) -> str:
        return f"world {self.world}, {self.state_mib:g} MiB"


@dataclass(frozen=True)
class Measured:
    """Seconds and CPU seconds of a step in each round, by training."""

    step_s: dict[str, list[float]]
    """Median step of the slowest member."""
    cpu_s: dict[str, list[float]]
    """CPU seconds of all members per step."""


class Contender(Protocol):
    """Interface to a compared training, which makes one step at a time."""

    def step(self, batch: Any) -> Any: ...

    def end(self) -> None: ...


class Plain:
    """Training by torch's own means: DDP, or each member by itself.

    Args:
        model: Model that runs forward and backward.
        optimizer: Optimizer of the model's parameters.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer

    def step(self, batch: Any) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._model(batch).square().mean().backward()
        self._optimizer.step()

    def end(self) -> None:
        pass


def contender(kind: str, shape: Shape, name: str, ours: Mapping[str, dict[str, Any]]) -> Contender:
    """Returns one compared training with its own model: "alone" (no communication), "ddp", "ddp_view", or one of
    `ours`.
    """
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = model_and_adam(shape.state_mib, fused=shape.fused, device=shape.device)
    if kind in ours:
        trainee = Trainee(None, config_of(name=name, **ours[kind]), model, optimizer)
        trainee.join()
        return trainee
    if kind == "alone":
        return Plain(model, optimizer)
    return Plain(DistributedDataParallel(model, gradient_as_bucket_view=kind == "ddp_view"), optimizer)


def work(
    pipe: Connection,
    rank: int,
    port: int,
    shape: Shape,
    kinds: list[str],
    ours: Mapping[str, dict[str, Any]],
    prepare: Callable[[dict[str, Contender]], None] | None,
) -> None:
    """Runs one member of all trainings; sends ({kind: [median step of each block, s]}, {kind: [CPU s per step]})."""
    import torch
    import torch.distributed as dist

    compute_alone()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=shape.world)
    contenders = {kind: contender(kind, shape, f"w{rank}", ours) for kind in kinds}
    if prepare is not None:
        prepare(contenders)
    width = width_of(state_model(shape.state_mib))
    batch = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(rank)).to(shape.device)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(shape.rounds + 1):
        for kind in kinds if number % 2 else kinds[::-1]:
            dist.barrier()
            block, cpu_started = [], time.process_time()
            for _ in range(shape.steps):
                started = time.perf_counter()
                contenders[kind].step(batch)
                if shape.device != "cpu":
                    torch.accelerator.synchronize()
                block.append(time.perf_counter() - started)
            if number:  # the first round warms up
                times[kind].append(median(block))
                cpu[kind].append((time.process_time() - cpu_started) / shape.steps)
    for one in contenders.values():
        one.end()
    dist.barrier()
    dist.destroy_process_group()
    pipe.send((times, cpu))


def measure(
    shape: Shape,
    kinds: list[str],
    ours: Mapping[str, dict[str, Any]],
    prepare: Callable[[dict[str, Contender]], None] | None = None,
) -> Measured:
    """Runs all trainings in turn; returns their measurements.

    Args:
        shape: Sizes of the trainings.
        kinds: Kinds of the compared trainings, as `contender` takes them.
        ours: Settings of the trainings by this engine, by kind.
        prepare: Function of a module, called in each member's process before the trainings begin.
    """
    port = free_port()
    arguments = [(rank, port, shape, kinds, dict(ours), prepare) for rank in range(shape.world)]
    with several(context("benchmarks.steady.blocks"), work, arguments) as workers:
        reports = [worker.receive(600) for worker in workers]
    rounds = range(shape.rounds)
    return Measured(
        {kind: [max(t[kind][i] for t, _ in reports) for i in rounds] for kind in kinds},
        {kind: [sum(c[kind][i] for _, c in reports) for i in rounds] for kind in kinds},
    )


def exposed(steps_s: Mapping[str, list[float]], alone: str) -> dict[str, float]:
    """Returns by training the seconds of communication in a step: the median over rounds of its step less that of
    `alone`.
    """
    return {
        kind: median([step - base for step, base in zip(values, steps_s[alone], strict=True)])
        for kind, values in steps_s.items()
        if kind != alone
    }
