"""Runs a member for the benchmark of scaling primitives: trains, reports every commit, and leaves or returns on order.

Commits are sent a few at a time, so that the reports themselves disturb little. Orders are heard by a thread of their
own, since a wish to leave comes at any moment; besides those of members.py there is ("again",) to those who have left.

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

from benchmarks.members import Trainee, config_of, model_and_adam

REPORT_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Work:
    """Training work of the members in the benchmark of scaling primitives.

    Attributes:
        grad_mib: Size of the gradients, in MiB.
        layers: Number of linear layers over which the gradients are spread.
        device_s: Seconds in each step in which the member's thread sleeps, as one that waits for an accelerator.
        by_reference: Whether members may read each other's memory (they are on one machine) in place of using sockets.
        join_by: Way in which a member that has left joins again: "pause" or "replay".
    """

    grad_mib: float = 1.0
    layers: int = 4
    device_s: float = 0.0
    by_reference: bool = False
    join_by: str = "pause"


class Orders:
    """Listener for the parent's orders, in a thread of its own."""

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
    """Runs one training process; `neighbours` are names, separated by commas (empty: all members)."""
    from chaos_lightning.machine import fits
    from chaos_lightning.testing.processes import die_with_parent

    die_with_parent()
    model, optimizer = model_and_adam(3 * work.grad_mib, layers=work.layers)
    config = config_of(
        endpoint=endpoint, name=name, neighbours=neighbours, by_reference=work.by_reference, join_by=work.join_by
    )
    orders = Orders(pipe)
    while True:
        trainee = Trainee(pipe, config, model, optimizer, replay=True, noise=True)
        trainee.wanted, orders.engine = orders.wanted, trainee.engine
        trainee.say("going", time.monotonic_ns())
        trainee.join()
        _train(trainee, orders, work.device_s)
        trainee.end()
        if not trainee.engine.out:
            break
        trainee.say("gone", time.monotonic_ns())
        orders.again.wait()
        orders.again.clear()
        fits._over.clear()  # it comes again to the very fit that it left, as a script that is started anew does
        if orders.last:
            break
    trainee.say("bye")


def _train(trainee: Trainee, orders: Orders, device_s: float) -> None:
    notes: list[tuple[Any, ...]] = []
    engine = trainee.engine
    while not engine.out and not (orders.last and engine.header.step >= orders.last):
        header = trainee.step(before_s=device_s)
        if header is None:
            break
        change = header.view_change
        view = None if change is None else (change.id.number, change.ids(), [(k.a, k.b) for k in change.links])
        place = (header.seq, header.step, header.hash, header.contributors, engine.rank)
        notes.append((trainee.committed_ns, *place, view, tuple(engine._links.near()), time.process_time()))
        if len(notes) >= REPORT_EVERY or engine.out:
            trainee.say("steps", notes)
            notes = []
        trainee.report_state(header)
        trainee.between(header)
    if notes:
        trainee.say("steps", notes)
