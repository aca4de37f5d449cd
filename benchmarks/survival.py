"""Blows and their measurement: three members, one is hurt, and how long until the others have committed without it.

The members are processes that report each committed step over a pipe, stamped with CLOCK_MONOTONIC (victims.py is ours,
peers_torchft.py the peer's); the parent hurts one, waits for the survivors, has the third place filled again and lets
all three compare their states. Whatever trains, the measurement is the same code.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.common import Result, median
from benchmarks.victims import WAYS
from benchmarks.workers import Worker

BOUND_SPREAD = 2.0
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Step:
    """One member's report of a committed step. Times are CLOCK_MONOTONIC, ns."""

    ns: int
    seq: int
    step: int
    head: str
    contributors: int
    rank: int
    thrown: int
    """Gradients computed so far that went into no committed step."""


@dataclass
class Seen:
    """What one member has said."""

    worker: Worker
    steps: list[Step] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    fenced: list[int] = field(default_factory=list)
    hashes: dict[int, tuple[str, str]] = field(default_factory=dict)
    trapped: tuple[int, int, int, str] | None = None
    """(ns, seq, step, header hash) of its end in a trap."""
    held: list[int] = field(default_factory=list)
    """When it began to hold the interpreter's lock, ns."""
    memory: tuple[int, int] | None = None
    """Bytes before and after what it was told to gather."""
    bye: bool = False


@dataclass
class Case:
    """The outcome of all blows of one kind."""

    seconds: list[float] = field(default_factory=list)
    """From the blow to a step without the victim, committed on all survivors."""
    usual: list[float] = field(default_factory=list)
    """Median step before each blow, s."""
    thrown: int = 0
    lost: int = 0
    fenced: int = 0
    unequal: int = 0
    back: list[float] = field(default_factory=list)
    """From thaw, or start of the new process, to the first step of three, s."""
    ranks: list[int] = field(default_factory=list)
    handed: int = 0


class World:
    """Three members and their pipes.

    Args:
        spawn: Starts the member of this name.
        rng: When the blows fall.
        patience_s: How long to wait for anything.
    """

    def __init__(self, spawn: Callable[[str], Worker], rng: random.Random, patience_s: float = PATIENCE_S) -> None:
        self._spawn, self.rng, self._patience_s = spawn, rng, patience_s
        self.members: dict[str, Seen] = {}
        self.past: list[Seen] = []
        self.doomed: set[str] = set()
        """Who may die."""
        self._count = 0

    def start(self) -> str:
        """A fresh process."""
        name = f"w{self._count}"
        self._count += 1
        self.members[name] = Seen(self._spawn(name))
        return name

    def bury(self, name: str) -> None:
        seen = self.members.pop(name)
        seen.worker.kill()
        self.past.append(seen)

    def pump(self, ready: Callable[[], bool], what: str) -> None:
        """Takes reports in until `ready()`.

        Raises:
            TimeoutError: Not within `patience_s`.
            RuntimeError: A member died that nobody had hurt.
        """
        end = time.monotonic() + self._patience_s
        while not ready():
            if time.monotonic() > end:
                last = {n: (s.steps[-1] if s.steps else "no step yet") for n, s in self.members.items()}
                raise TimeoutError(f"waited {self._patience_s:g} s in vain for {what}; last reports: {last}")
            pipes: dict[Any, Seen] = {s.worker.pipe: s for s in self.members.values() if not s.worker.pipe.closed}
            for pipe in wait(list(pipes), 0.1):
                self._read(pipe, pipes[pipe])
            for name, seen in self.members.items():
                if seen.worker.process.exitcode not in (None, 0) and name not in self.doomed:
                    raise RuntimeError(f"{name} died of itself (exit code {seen.worker.process.exitcode})")

    def _read(self, pipe: Connection, seen: Seen) -> None:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            pipe.close()
            return
        self._hear(seen, message)

    def _hear(self, seen: Seen, message: tuple[Any, ...]) -> None:
        """Takes in what a member said."""
        word, *values = message
        if word == "step":
            ns, seq, step, head, contributors, rank, backwards = values
            seen.steps.append(Step(ns, seq, step, head, contributors, rank, backwards - _own(seen.steps, seen) - 1))
        elif word == "in":
            seen.entries.append(values[0])
        elif word == "fenced":
            seen.fenced.append(values[0])
        elif word == "hash":
            seen.hashes[values[0]] = (values[1], values[2])
        elif word == "trap":
            seen.trapped = tuple(values)
        elif word == "held":
            seen.held.append(values[0])
        elif word == "memory":
            seen.memory = (values[0], values[1])
        elif word == "bye":
            seen.bye = True

    def settle(self, size: int = 3) -> None:
        """Until everybody has reported three steps of `size` members in a row."""

        def calm(seen: Seen) -> bool:
            return len(seen.steps) >= 3 and all(s.contributors == size for s in seen.steps[-3:])

        self.pump(lambda: all(calm(s) for s in self.members.values()), f"three steps of {size} members")

    def usual(self) -> float:
        """Median step time of late, s."""
        steps = next(iter(self.members.values())).steps[-12:]
        return median([(b.ns - a.ns) / 1e9 for a, b in itertools.pairwise(steps) if b.step == a.step + 1])

    def by_rank(self, rank: int) -> str:
        ranked = sorted(self.members, key=lambda n: self.members[n].steps[-1].rank)
        return ranked[rank % len(ranked)]

    def recovered(self, victim: str, struck_ns: int) -> float:
        """Seconds until all survivors have committed a step without the victim."""
        survivors = {n: s for n, s in self.members.items() if n != victim}
        size = len(survivors)

        def first(seen: Seen) -> int:
            found = (s.ns for s in reversed(seen.steps) if s.ns > struck_ns and s.contributors == size)
            return min(found, default=0)

        what = f"a step of {', '.join(survivors)} without {victim}"
        self.pump(lambda: all(first(s) for s in survivors.values()), what)
        return (max(first(s) for s in survivors.values()) - struck_ns) / 1e9

    def hashes(self) -> set[tuple[str, str]]:
        """(header, hash of the state) of all members at one step: one element if they agree."""
        for margin in (5, 50, 500):
            at = max(s.steps[-1].step for s in self.members.values()) + margin
            for seen in self.members.values():
                seen.worker.pipe.send(("hash", at))
            self.pump(lambda at=at: all(s.steps[-1].step > at for s in self.members.values()), f"step {at}")
            if all(at in s.hashes for s in self.members.values()):
                return {s.hashes[at] for s in self.members.values()}
        raise TimeoutError("members ran past every step that was named for comparing hashes")

    def end(self) -> None:
        """Everybody finishes at one step, together."""
        at = max(s.steps[-1].step for s in self.members.values()) + 50
        for seen in self.members.values():
            seen.worker.pipe.send(("end", at))
        self.pump(lambda: all(s.bye for s in self.members.values()), "the end of all members")

    def close(self) -> None:
        for seen in self.members.values():
            seen.worker.kill()


def _own(steps: list[Step], seen: Seen) -> int:
    """Steps committed since the member's last entry."""
    entered = seen.entries[-1] if seen.entries else 0
    return sum(1 for s in steps if s.ns > entered)


def blow(world: World, case: Case, rank: int, kind: str, log: Any = None, chosen: int = 0) -> None:
    """One death or freeze, its measurement, and the way back to three members that agree.

    Args:
        world: Three members.
        case: Takes the outcome.
        rank: The victim's.
        kind: "kill", "freeze", or one of WAYS.
        log: The parent's event log, if the members write any.
        chosen: For WAYS: which survivor gets the header.
    """
    world.settle()
    usual = world.usual()
    victim = world.by_rank(rank)
    seen = world.members[victim]
    if kind != "freeze":
        world.doomed.add(victim)
    survivors = {n: s for n, s in world.members.items() if n != victim}
    before = {n: (len(s.steps), s.steps[-1].thrown, len(s.fenced)) for n, s in survivors.items()}
    if kind in WAYS:
        seen.worker.pipe.send(("trap", kind, chosen))
        world.pump(lambda: seen.trapped is not None, f"the trap in {victim}")
        assert seen.trapped is not None
        struck = seen.trapped[0]
    else:
        time.sleep(world.rng.uniform(0.0, 1.5) * usual)
        if log is not None:
            log.emit("fault_injected", kind="sigkill" if kind == "kill" else "sigstop", node=victim)
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        pid = seen.worker.process.pid
        assert pid is not None
        struck = time.monotonic_ns()
        os.kill(pid, number)
    case.seconds.append(world.recovered(victim, struck))
    case.usual.append(usual)
    case.ranks.append(rank)
    resumed = time.monotonic_ns()
    if kind == "freeze":
        if log is not None:
            log.emit("fault_injected", kind="sigcont", node=victim)
        os.kill(pid, signal.SIGCONT)
        world.pump(lambda: bool(seen.fenced) and seen.entries[-1] > seen.fenced[-1] > struck, f"{victim}'s way back")
        back = victim
    else:
        world.bury(victim)
        back = world.start()
    world.pump(
        lambda: any(s.contributors == 3 and s.ns > resumed for s in world.members[back].steps),
        f"the first step of {back}",
    )
    first = next(s for s in world.members[back].steps if s.contributors == 3 and s.ns > resumed)
    case.back.append((first.ns - resumed) / 1e9)
    case.unequal += len(world.hashes()) != 1
    for name, (count, thrown, fenced) in before.items():
        later = survivors[name].steps[count - 1 :]
        case.lost += sum(b.step != a.step + 1 for a, b in itertools.pairwise(later))
        case.thrown += later[-1].thrown - thrown
        case.fenced += len(survivors[name].fenced) - fenced
    if kind in WAYS:
        assert seen.trapped is not None
        _, seq, _, head = seen.trapped
        slots = [next((s for s in m.steps if s.seq == seq), None) for m in survivors.values()]
        # Verbatim: the dead member's own header, and so its gradient, stands in the survivors' chain.
        case.handed += all(s is not None and s.head == head and s.contributors == 3 for s in slots)


def report(result: Result, title: str, case: Case, *, bound_s: float | None = None, strict: bool = False) -> None:
    """Adds the figures of one case."""
    if not case.seconds:
        return
    middle = median(case.seconds)
    n = len(case.seconds)
    result.add(f"{title}: to the survivors' next step, median of {n}", middle, "s", bound_s)
    if strict:
        result.add(f"{title}: slowest / median", max(case.seconds) / middle, "ratio", BOUND_SPREAD if n > 2 else None)
    zero = 0 if strict else None
    result.add(f"{title}: survivors' gradients thrown away", case.thrown, "count", zero)
    if strict:
        result.add(f"{title}: steps lost or repeated", case.lost, "count", 0)
        result.add(f"{title}: living members fenced", case.fenced, "count", 0)
        result.add(f"{title}: runs after which states differ", case.unequal, "count", 0)
    result.add(f"{title}: newcomer's start or thaw to its first step, median", median(case.back), "s")
    result.details[title] = {
        "seconds": case.seconds, "usual_step_s": case.usual, "rank": case.ranks, "back_s": case.back,
    }  # fmt: skip
