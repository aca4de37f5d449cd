"""Process of a member in benchmarks: its model, the plain training loop that all benchmarks time, and its reports.

A member reports each committed step over its pipe, stamped with CLOCK_MONOTONIC, and hears orders between steps:
("hash", step) sends a SHA-256 of parameters and optimizer state at that step, ("end", step) finishes the job there,
("leave",) has it go politely. Further ones are its benchmark's own.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import MIB
from chaos_lightning.settings import EngineConfig

BATCH = 32


def compute_alone() -> None:
    """Makes this process compute in one thread, and treat denormal numbers as zero.

    Networks that learn nothing lose neurons; Adam's averages of these decay for some hundred steps, and then are
    denormal: a step of 50 MiB takes 60 ms instead of 7, whatever is being compared.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def state_model(state_mib: float, layers: int = 8) -> Any:
    """Returns an MLP whose parameters and Adam state together take `state_mib` MiB (its parameters take a third of
    it).
    """
    from torch import nn

    numel = state_mib * MIB / 3 / 4
    width = int((numel / layers) ** 0.5)
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*blocks)


def model_and_adam(
    state_mib: float, seed: int = 0, *, layers: int = 8, fused: bool = True, device: str = "cpu"
) -> tuple[Any, Any]:
    """Returns the model and optimizer that most benchmarks train, in a process that computes alone."""
    import torch

    compute_alone()
    torch.manual_seed(seed)
    model = state_model(state_mib, layers).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4, fused=fused)


def width_of(model: Any) -> int:
    """Returns the number of a model's input features."""
    return int(next(model.parameters()).shape[1])


def warm_up(model: Any, optimizer: Any) -> None:
    """Trains one step on zeros, so that all memory of a step is allocated before a newcomer joins."""
    import torch

    model(torch.zeros(BATCH, width_of(model))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def fingerprint(model: Any, optimizer: Any) -> str:
    """Returns the SHA-256 of parameters and optimizer state, computed by torch and hashlib alone."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()))
    state = optimizer.state_dict()["state"]
    for index in sorted(state):
        for key, value in sorted(state[index].items()):
            flat = torch.as_tensor(value).contiguous().flatten().view(torch.uint8)
            digest.update(f"{index}.{key}".encode() + memoryview(flat.numpy()))
    return digest.hexdigest()


def config_of(**settings: Any) -> EngineConfig:
    """Returns the configuration of a member of the benchmark's scheduler."""
    return EngineConfig(
        **{"log_dir": "none", "host_scheduler": False, "join_timeout_s": 60, "step_timeout_s": 60, **settings}
    )


def wait_at_the_door(pipe: Connection) -> None:
    """Reports that a newcomer has built everything, waits for "go", and reports time and CPU seconds as it starts."""
    pipe.send(("ready", time.monotonic_ns()))
    assert pipe.recv()[0] == "go"
    pipe.send(("going", time.monotonic_ns(), time.process_time()))


class Trainee:
    """A member, its model and optimizer, and the parts of its training loop.

    Args:
        pipe: Connection to the benchmark; None: nothing is reported.
        config: Settings of the engine.
        model: Model whose parameters that require gradients are trained.
        optimizer: Optimizer of these parameters.
        replay: Whether the member may join by replay.
        batch: Samples per step.
        noise: Whether targets are noise, which nothing can learn, in place of zeros: gradients never vanish.
    """

    def __init__(
        self,
        pipe: Connection | None,
        config: EngineConfig,
        model: Any,
        optimizer: Any,
        *,
        replay: bool = False,
        batch: int = BATCH,
        noise: bool = False,
    ) -> None:
        import torch

        from chaos_lightning.collectives.layout import Section
        from chaos_lightning.member.engine import Engine
        from chaos_lightning.member.training import switch_quickly
        from chaos_lightning.replication.access import ModuleState

        switch_quickly()
        self.model, self.optimizer, self.state = model, optimizer, ModuleState(model, optimizer)
        self.engine = Engine(config)
        self.engine.prepare(sections=[Section("all", [(n, p) for n, p in model.named_parameters() if p.requires_grad])])
        self.wanted: set[int] = set()
        """Steps whose state is to be told."""
        self.last = 0
        """The job's last step; 0: not known yet."""
        self.backwards = 0
        """Gradients computed since it came in."""
        self.committed_ns = 0
        """When its last step was committed."""
        self._pipe, self._replay, self._batch, self._noise = pipe, replay, batch, noise
        self._width = width_of(model)
        self._draw = torch.Generator().manual_seed(os.getpid())

    def join(self) -> None:
        from chaos_lightning.replication.replay import ModuleReplay

        replay = ModuleReplay(self.state) if self._replay else None
        self.engine.join(fingerprint={}, quota=self._batch, accumulate=1, state=self.state, replay=replay)
        self.say("in", time.monotonic_ns(), self.engine.member_id)

    def rejoin(self) -> None:
        """Joins the job again after this member was removed from it, and reports the removal and the return."""
        self.say("fenced", time.monotonic_ns())
        self.engine.rejoin(self.state)
        self.backwards = 0
        self.say("in", time.monotonic_ns(), self.engine.member_id)

    def say(self, *words: Any) -> None:
        if self._pipe is not None:
            self._pipe.send(words)

    @property
    def over(self) -> bool:
        """Whether this member is out of the job, or the job's last step is done."""
        return bool(self.engine.out or (self.last and self.engine.header.step >= self.last))

    def orders(self) -> Iterator[tuple[Any, ...]]:
        """Carries out the orders that all benchmarks share; yields the others."""
        assert self._pipe is not None
        while self._pipe.poll():
            order = self._pipe.recv()
            if order[0] == "hash":
                self.wanted.add(order[1])
            elif order[0] == "end":
                self.last = order[1]
            elif order[0] == "leave":
                self.engine.leave("the benchmark asks")
            else:
                yield order

    def step(self, batch: Any = None, *, before_s: float = 0.0, after_s: float = 0.0) -> Any:
        """Trains one optimizer step of the job.

        Args:
            batch: Inputs; None: drawn.
            before_s: Pause before the forward pass, as of one who waits for an accelerator.
            after_s: Pause after the backward pass, for heavier computing that leaves the processors to others.

        Returns:
            The header that committed it; None: it was leaving, and a recovery let it go in mid-step.
        """
        from chaos_lightning.errors import DepartedError

        self.optimizer.zero_grad(set_to_none=True)
        self.engine.arm(coefficient=1.0)
        if before_s:
            time.sleep(before_s)
        self._loss(batch).backward()
        self.backwards += 1
        if after_s:
            time.sleep(after_s)
        try:
            header = self.engine.step(weight=1.0, coefficient=1.0)
        except DepartedError:
            return None
        self.committed_ns = time.monotonic_ns()
        self.optimizer.step()
        return header

    def _loss(self, batch: Any) -> Any:
        import torch

        if batch is not None:
            return self.model(batch).square().mean()
        if self._noise:
            inputs, targets = torch.randn(2, self._batch, self._width, generator=self._draw)
            return (self.model(inputs) - targets).square().mean()
        return self.model(torch.randn(self._batch, self._width, generator=self._draw)).square().mean()

    def report(self, header: Any, *more: Any) -> None:
        """Reports a committed step, and a hash of the state if the benchmark asked for it."""
        place = (header.seq, header.step, header.hash, header.contributors, self.engine.rank)
        self.say("step", self.committed_ns, *place, self.backwards, *more)
        self.report_state(header)

    def report_state(self, header: Any) -> None:
        """Reports a hash of the state, also to the event log, if the benchmark asked for it at this step."""
        from chaos_lightning.replication.table import state_hash

        if header.step in self.wanted:
            value = state_hash(self.state.tensors())
            self.engine.events.emit("state_hash", seq=header.seq, step=header.step, head=header.hash, hash=value)
            self.say("hash", header.step, header.hash, fingerprint(self.model, self.optimizer))

    def between(self, header: Any) -> None:
        """Serves the state to members that catch up, and lets newcomers in after a step that ended at a boundary."""
        self.engine.serve(self.state)
        if header.boundary and not self.engine.out:
            self.engine.boundary(self.state)

    def end(self) -> None:
        """Finishes the job (or waits for the release, if this member has left it), and closes the engine."""
        if self.engine.out:
            self.engine.wait_released()
        else:
            self.engine.finish()
        self.engine.close()


def train(pipe: Connection, trainee: Trainee, *, newcomer: bool, device_s: float = 0.0) -> None:
    """Joins the job and trains until this member is released or the job ends; reports its CPU seconds after each step.

    Args:
        pipe: Connection to the benchmark.
        trainee: Member for which all that a step needs is built.
        newcomer: Whether the member first waits for the benchmark's "go", and reports when its first contribution was
            committed.
        device_s: Pause in each step, in seconds, as of a member that waits for an accelerator.
    """
    if newcomer:
        wait_at_the_door(pipe)
    trainee.join()
    fresh = newcomer
    while not trainee.over:
        for order in trainee.orders():
            raise ValueError(f"a member obeys no order {order[0]!r}")
        header = trainee.step(before_s=device_s)
        if header is None:
            break
        if fresh:
            fresh = False
            trainee.say("contributed", trainee.committed_ns, time.process_time())
        trainee.say("cpu", header.step, time.process_time())
        trainee.report(header)
        trainee.between(header)
    trainee.end()
    trainee.say("bye")
