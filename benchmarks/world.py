"""Follows a job's members for a benchmark: takes in their reports over pipes, and waits for events.

Members are processes that report each committed step, stamped with CLOCK_MONOTONIC (members.py is ours,
peers/torchft.py the peer's). Whatever trains, the parent's code is the same.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.common import median
from benchmarks.workers import Worker

PATIENCE_S = 60.0
CALM = 30
"""Steps whose median is the usual one."""
AFTERMATH = 2
"""Joint steps that still count as a join."""
SETTLED = 3
"""Joint steps that count neither for the usual one."""


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
    """Reports that one member has sent."""

    worker: Worker
    steps: list[Step] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    fenced: list[int] = field(default_factory=list)
    hashes: dict[int, tuple[str, str]] = field(default_factory=dict)
    words: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    """All else, by its first word, as often as it was said."""

    def said(self, word: str) -> tuple[Any, ...] | None:
        """Returns the last message that began with this word, without the word; None if there was none."""
        return self.words[word][-1] if word in self.words else None


class World:
    """Members and their pipes; a context manager that ends them.

    Args:
        spawn: Function that starts a member, from its name.
        rng: Random numbers that choose when blows fall.
        patience_s: Longest wait for anything, in seconds.
    """

    def __init__(self, spawn: Callable[[str], Worker], rng: random.Random, patience_s: float = PATIENCE_S) -> None:
        self._spawn, self.rng, self._patience_s = spawn, rng, patience_s
        self.members: dict[str, Seen] = {}
        self.past: list[Seen] = []
        self.doomed: set[str] = set()
        """Members that may die."""
        self._count = 0

    def start(self, name: str = "") -> str:
        """Starts a new member's process; returns the member's name."""
        name = name or f"w{self._count}"
        self._count += 1
        self.members[name] = Seen(self._spawn(name))
        return name

    def open(self, size: int = 3) -> None:
        """Starts `size` processes."""
        for _ in range(size):
            self.start()

    def bury(self, name: str) -> None:
        seen = self.members.pop(name)
        seen.worker.kill()
        self.past.append(seen)

    def pump(self, ready: Callable[[], Any], what: str, patience_s: float = 0.0) -> None:
        """Takes in the members' reports until a condition holds.

        Raises:
            TimeoutError: Not within `patience_s` (0: the world's).
            RuntimeError: A member failed, or died though nobody had hurt it.
        """
        patience_s = patience_s or self._patience_s
        end = time.monotonic() + patience_s
        while not ready():
            if time.monotonic() > end:
                last = {n: (s.steps[-1] if s.steps else "no step yet") for n, s in self.members.items()}
                raise TimeoutError(f"waited {patience_s:g} s in vain for {what}; last reports: {last}")
            pipes: dict[Any, str] = {s.worker.pipe: n for n, s in self.members.items() if not s.worker.pipe.closed}
            for pipe in wait(list(pipes), 0.1):
                self._read(pipe, pipes[pipe])
            for name, seen in self.members.items():
                if seen.worker.process.exitcode not in (None, 0) and name not in self.doomed:
                    raise RuntimeError(f"{name} died of itself (exit code {seen.worker.process.exitcode})")

    def _read(self, pipe: Connection, name: str) -> None:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            pipe.close()
            return
        if not isinstance(message, Exception):
            self._hear(name, *message)
        elif name not in self.doomed:
            raise message

    def _hear(self, name: str, word: str, *values: Any) -> None:
        """Takes in a message of a member."""
        seen = self.members[name]
        if word == "step":
            ns, seq, step, head, contributors, rank, backwards = values
            entered = seen.entries[-1] if seen.entries else 0
            own = sum(s.ns > entered for s in seen.steps)
            seen.steps.append(Step(ns, seq, step, head, contributors, rank, backwards - own - 1))
        elif word == "in":
            seen.entries.append(values[0])
        elif word == "fenced":
            seen.fenced.append(values[0])
        elif word == "hash":
            seen.hashes[values[0]] = (values[1], values[2])
        else:
            seen.words.setdefault(word, []).append(values)

    # ------------------------------------------------------------------ waiting

    def settle(self, size: int = 3) -> None:
        """Waits until all members have reported three steps in a row with `size` contributors."""

        def calm(seen: Seen) -> bool:
            return len(seen.steps) >= 3 and all(s.contributors == size for s in seen.steps[-3:])

        self.pump(lambda: all(calm(s) for s in self.members.values()), f"three steps of {size} members")

    def last_step(self) -> int:
        """Returns the last step that any member has reported."""
        return max(s.steps[-1].step for s in self.members.values())

    def recovered(self, victim: str, struck_ns: int) -> float:
        """Returns the seconds from a member's death or freeze until all survivors have committed a step without it."""
        survivors = {n: s for n, s in self.members.items() if n != victim}

        def first(seen: Seen) -> int:
            found = (s.ns for s in reversed(seen.steps) if s.ns > struck_ns and s.contributors == len(survivors))
            return min(found, default=0)

        what = f"a step of {', '.join(survivors)} without {victim}"
        self.pump(lambda: all(first(s) for s in survivors.values()), what)
        return (max(first(s) for s in survivors.values()) - struck_ns) / 1e9

    def hashes(self) -> set[tuple[str, str]]:
        """Returns (header, hash of the state) of all members at one step: one element if they agree."""
        for margin in (5, 50, 500):
            at = self.last_step() + margin
            for seen in self.members.values():
                seen.worker.pipe.send(("hash", at))
            self.pump(lambda at=at: all(s.steps[-1].step > at for s in self.members.values()), f"step {at}")
            if all(at in s.hashes for s in self.members.values()):
                return {s.hashes[at] for s in self.members.values()}
        raise TimeoutError("members ran past every step that was named for comparing hashes")

    def end(self, margin: int = 50) -> None:
        """Makes all members finish the job at the same step."""
        at = self.last_step() + margin
        for seen in self.members.values():
            seen.worker.pipe.send(("end", at))
        self.pump(lambda: all("bye" in s.words for s in self.members.values()), "the end of all members")

    # ------------------------------------------------------------------ looking

    def usual(self, count: int = 12) -> float:
        """Returns the median of the members' recent steps, in seconds."""
        steps = next(iter(self.members.values())).steps[-count:]
        return median([(b.ns - a.ns) / 1e9 for a, b in itertools.pairwise(steps) if b.step == a.step + 1])

    def by_rank(self, rank: int) -> str:
        ranked = sorted(self.members, key=lambda n: self.members[n].steps[-1].rank)
        return ranked[rank % len(ranked)]

    def close(self) -> None:
        for seen in self.members.values():
            seen.worker.kill()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lost_or_repeated(steps: Sequence[Step]) -> int:
    """Returns how often a reported step is not followed by the next one."""
    return sum(b.step != a.step + 1 for a, b in itertools.pairwise(steps))


def intervals(steps: Sequence[Step]) -> list[tuple[Step, float]]:
    """Returns each step with the seconds since the step before it."""
    return [(b, (b.ns - a.ns) / 1e9) for a, b in itertools.pairwise(steps)]


class Hosts(World):
    """Members that train throughout, and at times a newcomer that has built everything and waits for its start."""

    def __init__(self, spawn: Callable[[str], Worker], rng: random.Random, patience_s: float = PATIENCE_S) -> None:
        super().__init__(spawn, rng, patience_s)
        self.hosts: list[str] = []

    def admit_hosts(self, names: Sequence[str]) -> None:
        """Starts the members that train before any newcomer comes."""
        self.hosts = [self.start(name) for name in names]
        self.calm(len(self.hosts))

    def invite(self, name: str) -> Seen:
        """Starts a newcomer, and waits until it is ready to join; returns its reports."""
        self.start(name)
        seen = self.members[name]
        self.pump(lambda: seen.said("ready"), f"{name} to be ready")
        return seen

    def let_in(self, name: str) -> tuple[tuple[int, float], tuple[int, float]]:
        """Lets a newcomer join; returns (ns, its CPU seconds) at its call, and at the commit of its first
        contribution.
        """
        seen = self.members[name]
        seen.worker.pipe.send(("go",))
        self.pump(lambda: seen.said("contributed"), f"the first contribution of {name}")
        return seen.words["going"][-1], seen.words["contributed"][-1]  # type: ignore[return-value]

    def see_off(self, name: str) -> None:
        """Makes a member leave politely."""
        seen = self.members[name]
        seen.worker.pipe.send(("leave",))
        self.pump(lambda: "bye" in seen.words, f"the departure of {name}")

    def calm(self, size: int, count: int = CALM) -> None:
        """Waits until the hosts have committed several steps in a row with `size` contributors."""
        marks = {h: len(self.members[h].steps) for h in self.hosts}

        def passed(name: str) -> bool:
            steps = self.members[name].steps[marks[name] :]
            return len(steps) > count and all(s.contributors == size for s in steps[-count:])

        self.pump(lambda: all(passed(h) for h in self.hosts), f"{count} steps of {size} members")

    def usual_of(self, size: int, count: int = CALM) -> float:
        """Returns the median of the hosts' last steps, all with `size` contributors, s."""
        recent = {h: [s for s in self.members[h].steps[-count:] if s.contributors == size] for h in self.hosts}
        return median([t for steps in recent.values() for _, t in intervals(steps)])
