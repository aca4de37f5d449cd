"""Starts and watches the processes of a soak, and hits them with faults.

`Crew` starts members, hears what they tell, wakes the frozen. `Driver` draws joins, leaves, SIGKILLs and SIGSTOPs by
`FaultPlan.random`, a dozen at a time, and carries out those that the world allows; links are hurt in links.py. So
that nothing undeclared has to happen, neither leaves fewer than two members steady (they train, and told so since they
were last hurt), nor takes away a member between others whose own links are cut.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks.soak.checks import Freeze
from benchmarks.soak.links import DECK, Links
from benchmarks.soak.member import member
from benchmarks.soak.schedulers import Control
from benchmarks.soak.ways import Ways
from benchmarks.workers import Worker, context
from chaos_lightning.testing.edge.relay import Way

MOST, FOUNDERS, KEPT = 7, 5, 2
DOZEN = 12
CALM_S = 4.0
"""Seconds after a fault from which its victim counts as steady, or when it says that it is back."""
PATIENCE_S = 3.0
"""A fault that the world does not allow is tried again for so long."""


@dataclass
class Process:
    """A member's process, as the parent sees it."""

    name: str
    worker: Worker
    inside: bool = False
    thaw_ns: int = 0
    """When to continue it; 0: it is not frozen."""
    froze_ns: int = 0
    may_die: bool = False
    step: int = 0
    """The last one that it told of."""
    shaken: float = 0.0
    """When it was last thawed, or parted from others no more (CLOCK_MONOTONIC, s)."""
    word: str = ""
    """Its last one: done, left or refused."""

    @property
    def pid(self) -> int:
        assert self.worker.process.pid is not None
        return self.worker.process.pid


@dataclass
class Crew:
    """All member processes of one job. With a relay, their links pass through it, and each has its own way to the
    scheduler.
    """

    endpoint: str
    folder: Path
    seed: int
    epochs: int
    pace_s: float
    relay: str = ""
    """HOST:PORT."""
    step: int = 0
    control: Control | None = None
    """Gives each member its way to the scheduler; None: all dial `endpoint`."""
    ways: dict[str, Way | Ways] = field(default_factory=dict)
    alive: dict[str, Process] = field(default_factory=dict)
    freezes: list[Freeze] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    undeclared: list[str] = field(default_factory=list)
    over: bool = False
    ending: bool = False
    """Whether faults must end, since who is cut off or frozen could not be back before the job is finished."""

    founders, most, kept, deck = FOUNDERS, MOST, KEPT, DECK
    polite = (0,)
    """Exit codes of those that end as they should."""
    work = staticmethod(member)
    """Runs a member in its process."""

    def spares(self, name: str) -> bool:
        """Returns whether the job could go on without this member."""
        return True

    def start(self, name: str) -> None:
        ctx = context("benchmarks.soak.member", "chaos_lightning.trainer", "sklearn.datasets")
        endpoint = self.endpoint
        if self.relay and self.control is not None:
            self.ways[name] = self.control.way(name)
            endpoint = self.ways[name].endpoint
        args = (endpoint, name, str(self.folder), self.seed, self.epochs, self.pace_s, self.relay)
        self.alive[name] = Process(name, Worker(ctx, self.work, *args))
        if self.control is not None:
            self.control.know({process.pid: other for other, process in self.alive.items()})

    def able(self) -> list[Process]:
        """Returns the processes that train right now."""
        return [p for p in self.alive.values() if p.inside and not p.thaw_ns and not p.may_die]

    def steady(self, away: Collection[str] = ()) -> list[Process]:
        """Returns the processes that surely train in the present view, without those whose links were cut off."""
        calm = time.monotonic() - CALM_S
        known = (p for p in self.able() if p.name not in away)
        return [p for p in known if p.step >= self.step - 2 and p.shaken < calm]

    def turn(self, seconds: float = 0.05) -> None:
        """Takes in the members' messages, wakes frozen processes, and notices dead ones."""
        pipes: dict[Any, Process] = {p.worker.pipe: p for p in self.alive.values()}
        for pipe in wait([*pipes, *(p.worker.process.sentinel for p in self.alive.values())], seconds):
            if pipe in pipes:
                self._hear(pipes[pipe])
        now = time.monotonic_ns()
        for process in self.alive.values():
            if process.thaw_ns and process.thaw_ns <= now:
                self.wake(process)
        for name, process in list(self.alive.items()):
            code = process.worker.process.exitcode
            if code is None:
                continue
            self._hear(process)
            if code not in self.polite:
                self.killed.add(f"{name}-{process.pid}")
                if not process.may_die:
                    self.undeclared.append(f"{name} ended with exit code {code}")
                    print(f"    {self.undeclared[-1]} at step {self.step}", flush=True)
            del self.alive[name]
            if name in self.ways:
                self.ways.pop(name).close()

    def _hear(self, process: Process) -> None:
        try:
            while process.worker.pipe.poll():
                message = process.worker.pipe.recv()
                if isinstance(message, Exception):
                    print(f"    {process.name}: {message}", flush=True)
                    continue
                word, step = message
                self.step, process.step = max(self.step, step), max(process.step, step)
                process.shaken = 0.0 if word == "back" else process.shaken
                process.inside = process.inside or word == "in"
                if word in ("done", "left", "refused"):
                    process.word, process.inside = word, False
                self.over = self.over or word == "done"
        except (EOFError, ConnectionResetError):
            pass

    def freeze(self, process: Process, seconds: float) -> None:
        process.froze_ns = time.monotonic_ns()
        process.thaw_ns = process.froze_ns + int(seconds * 1e9)
        os.kill(process.pid, signal.SIGSTOP)

    def wake(self, process: Process) -> None:
        self.freezes.append(Freeze(process.name, process.pid, process.froze_ns, time.monotonic_ns()))
        process.thaw_ns, process.shaken = 0, time.monotonic()
        os.kill(process.pid, signal.SIGCONT)

    def close(self) -> None:
        for process in self.alive.values():
            process.worker.kill()
        for way in self.ways.values():
            way.close()


class Driver:
    """Draws faults, a dozen at a time, and carries them out."""

    def __init__(self, crew: Crew, log: Any, links: Links, seed: int, every_s: float) -> None:
        self.crew, self.links, self._log, self._every_s = crew, links, log, every_s
        self._rng = random.Random(seed)
        self._seed = seed
        self._spares = (f"n{i}" for i in itertools.count(crew.founders))
        self._due: list[Any] = []
        self._began = (time.monotonic(), crew.step)
        self._tried = 0.0
        """Time of the first attempt at the next fault, by the monotonic clock (s); 0.0: not attempted yet."""
        self.done: list[tuple[int, str, str]] = []
        """(ns, action, node)."""
        self.schedulers: Control = crew.control or Control(crew.endpoint)
        self.skipped: Counter[str] = Counter()
        self.plans: list[str] = []

    def turn(self) -> None:
        steady = [p.name for p in self.crew.steady(self.links.parted())]
        present = [p.name for p in self.crew.alive.values() if not p.may_die and not p.word]
        self.links.turn(steady, present, strike=not self.schedulers.stale)
        if not self._due:
            self._draw()
        while self._due and self._due[0].step <= self.crew.step:
            self._tried = self._tried or time.monotonic()
            struck = self._strike(self._due[0])
            if not struck and time.monotonic() < self._tried + PATIENCE_S:
                return  # a link or a member may be whole again in a moment
            self.skipped[str(self._due.pop(0).action)] += not struck
            self._tried = 0.0

    def _draw(self) -> None:
        from chaos_lightning.testing.faults import FaultPlan

        seconds, steps = time.monotonic() - self._began[0], self.crew.step - self._began[1]
        pace = steps / seconds if steps else 0.7 / (self.crew.pace_s + 0.02)
        self._began = (time.monotonic(), self.crew.step)
        living = [p.name for p in self.crew.able()]
        self._rng.shuffle(living)
        self._seed += 1
        plan = FaultPlan.random(
            self._seed,
            nodes=living,
            spares=[next(self._spares) for _ in range(DOZEN)],
            steps=max(DOZEN, int(DOZEN * self._every_s * pace)),
            count=DOZEN,
            keep=self.crew.kept,
        )
        self._due = [replace(f, step=(f.step or 0) + self.crew.step) for f in plan]
        self.plans += [str(f) for f in self._due]

    def _strike(self, fault: Any) -> bool:
        """Carries a fault out if enough steady, connected members would remain."""
        from chaos_lightning.testing.faults import Action

        crew, name = self.crew, fault.node
        process = crew.alive.get(name)
        if fault.action is Action.JOIN:
            if process is not None or len(crew.alive) >= crew.most or not self._stay(name):
                return False
            self.links.came(name)
            crew.start(name)
        elif process is None or process not in crew.able() or name in self.links.parted() or not self._stay(name):
            return False
        elif fault.action is Action.SIGKILL:
            process.may_die = True
            if fault.phase is not None:
                process.worker.pipe.send(("die", str(fault.phase)))
            else:
                self._log.emit("fault_injected", kind="sigkill", node=name)
                os.kill(process.pid, signal.SIGKILL)
        elif fault.action is Action.SIGSTOP:
            self._log.emit("fault_injected", kind="sigstop", node=name, seconds=fault.seconds)
            crew.freeze(process, fault.seconds)
        else:
            self._log.emit("fault_injected", kind="sigint", node=name)
            process.may_die, process.inside = False, False
            os.kill(process.pid, signal.SIGINT)
        self.done.append((time.monotonic_ns(), str(fault.action), name))
        return True

    def _stay(self, name: str) -> bool:
        """Returns whether the others could go on without this member, and unbroken links would still connect them and
        it.
        """
        steady = [p.name for p in self.crew.steady(self.links.parted()) if p.name != name]
        present = {p.name for p in self.crew.alive.values() if not p.may_die and not p.word}
        return self.crew.spares(name) and self.links.holds(steady, present | {name})
