"""A member of the benchmark of scaling primitives: trains, notes every commit, leaves and comes again when told.

One process, one training loop on the engine. Commits are stamped with CLOCK_MONOTONIC and sent a few at a time, so that
the reports themselves disturb little. Orders come over the pipe and are heard by a thread of their own, since a wish to
leave comes at any moment: ("leave",), ("again",) to those who have left, ("hash", step), ("end", step).

Who leaves does so on the ordinary way: `Engine.leave`, further steps until a header lets it go, its release, and the
engine's close. The process stays, idle, and "again" has it join anew with a fresh engine.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import compute_alone, state_model
from benchmarks.victims import BATCH, fingerprint

REPORT_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Work:
    """What members train, and how.

    Attributes:
        grad_mib: Size of the gradients, in MiB.
        layers: Linear layers that they are spread over.
        device_s: Seconds in each step in which the member's thread sleeps, as one that waits for an accelerator.
        by_reference: Whether members may read each other's memory (they are on one machine) in place of using sockets.
        join_by: How who has left comes back: "pause" or "replay".
    """

    grad_mib: float = 1.0
    layers: int = 4
    device_s: float = 0.0
    by_reference: bool = False
    join_by: str = "pause"


class Orders:
    """Hears the parent in a thread of its own."""

    def __init__(self, pipe: Connection) -> None:
        self.wanted: set[int] = set()
        self.last = 0
        """The job's last step; 0: not known yet."""
        self.again = threading.Event()
        self.engine: Any = None
        self._pipe = pipe
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                order, *values = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone
            if order == "leave":
                self.engine.leave("the benchmark asks")
            elif order == "again":
                self.again.set()
            elif order == "hash":
                self.wanted.add(values[0])
            elif order == "end":
                self.last = values[0]
                self.again.set()


def member(pipe: Connection, endpoint: str, name: str, neighbours: str, work: Work) -> None:
    """One training process; `neighbours` are names, separated by commas ("": everybody)."""
    import torch

    from chaos_lightning.collectives.layout import Section
    from chaos_lightning.lab.processes import die_with_parent
    from chaos_lightning.member.engine import Engine
    from chaos_lightning.member.training import switch_quickly
    from chaos_lightning.replication.access import ModuleState
    from chaos_lightning.replication.replay import ModuleReplay
    from chaos_lightning.settings import EngineConfig

    die_with_parent()
    compute_alone()
    torch.manual_seed(0)
    model = state_model(3 * work.grad_mib, work.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    state = ModuleState(model, optimizer)
    config = EngineConfig(
        endpoint=endpoint,
        name=name,
        neighbours=neighbours,
        host_scheduler=False,
        by_reference=work.by_reference,
        join_by=work.join_by,
        join_timeout_s=60,
        step_timeout_s=60,
    )
    orders = Orders(pipe)
    while True:
        engine = orders.engine = Engine(config)
        switch_quickly()
        engine.prepare(sections=[Section("all", list(model.named_parameters()))])
        pipe.send(("going", time.monotonic_ns()))
        engine.join(fingerprint={}, quota=BATCH, accumulate=1, state=state, replay=ModuleReplay(state))
        pipe.send(("in", time.monotonic_ns(), engine.member_id))
        _train(pipe, orders, engine, model, optimizer, state, work.device_s)
        if engine.out:
            engine.wait_released()
        else:
            engine.finish()
        engine.close()
        if not engine.out:
            break
        pipe.send(("gone", time.monotonic_ns()))
        orders.again.wait()
        orders.again.clear()
        if orders.last:
            break
    pipe.send(("bye",))


def _train(
    pipe: Connection, orders: Orders, engine: Any, model: Any, optimizer: Any, state: Any, device_s: float
) -> None:
    import torch

    from chaos_lightning.errors import DepartedError

    draw = torch.Generator().manual_seed(os.getpid())
    width = int(next(model.parameters()).shape[1])
    notes: list[tuple[Any, ...]] = []
    while not engine.out and not (orders.last and engine.header.step >= orders.last):
        optimizer.zero_grad(set_to_none=True)
        engine.arm(coefficient=1.0)
        if device_s:
            time.sleep(device_s)
        # A target that nothing can learn: gradients never vanish, so no step is faster for tiny numbers.
        inputs, targets = torch.randn(2, BATCH, width, generator=draw)
        (model(inputs) - targets).square().mean().backward()
        try:
            header = engine.step(weight=1.0, coefficient=1.0)
        except DepartedError:
            break
        now = time.monotonic_ns()
        optimizer.step()
        change = header.view_change
        view = None if change is None else (change.id.number, change.ids(), [(k.a, k.b) for k in change.links])
        place = (header.seq, header.step, header.hash, len(header.contributors), engine.rank)
        notes.append((now, *place, view, tuple(engine._shell.near()), time.process_time()))
        if len(notes) >= REPORT_EVERY or engine.out:
            pipe.send(("steps", notes))
            notes = []
        if header.step in orders.wanted:
            pipe.send(("hash", header.step, header.hash, fingerprint(model, optimizer)))
        engine.serve(state)
        if header.boundary and not engine.out:
            engine.boundary(state)
    if notes:
        pipe.send(("steps", notes))
