"""Runs members that leave and return and whose links come and go, and finds the steps that each change may affect.

`Crew` runs members of benchmarks/primitives/member.py under a scheduler, follows the job's graph of links as the
headers tell it, and carries out one change at a time. Each returns a `Change`: when it was asked for, which header
carried it, and which steps are charged with it. Arithmetic on step times is in benchmarks/primitives/samples.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.primitives.member import Work, member
from benchmarks.primitives.samples import charged
from benchmarks.workers import Worker, context, scheduler
from benchmarks.world import Step, World
from chaos_lightning.membership.topology import connected

Pair = frozenset[str]


@dataclass(frozen=True)
class Mark(Step):
    """One member's report of a committed step, with the views and links that it saw."""

    view: int = 0
    """Number of the view that this step's header carried; 0: none."""
    members: tuple[str, ...] = ()
    """Members of that view, by name."""
    links: frozenset[Pair] = frozenset()
    """Links of that view, by names."""
    near: frozenset[str] = frozenset()
    """Members to which a link stood at that moment, by name."""
    cpu_s: float = 0.0
    """CPU seconds of its process until then."""


@dataclass(frozen=True)
class Change:
    """One change of links or members: when it was requested, and the steps that it may affect.

    Attributes:
        requested: Number of the step under way when the change was asked for.
        ruled: Number of the step whose header carried the change.
        steps: Numbers of the steps that are charged with it.
        members: Members that trained throughout.
        waited_s: Seconds from the request to the commit of that header on all of these members.
    """

    requested: int
    ruled: int
    steps: tuple[int, ...]
    members: tuple[str, ...]
    waited_s: float


@dataclass(frozen=True)
class Entry:
    """Return of a member to the job: the steps that it may affect, the members, and the seconds until its first
    contribution.
    """

    steps: tuple[int, ...]
    ruled: int
    members: tuple[str, ...]
    contributed_s: float


class Operator:
    """Operator that asks for links as `chaos-lightning link` does, over one connection."""

    def __init__(self, endpoint: str) -> None:
        from chaos_lightning.control.service_pb2_grpc import SchedulerStub
        from chaos_lightning.protocol.chaos_pb2 import LinkChangeRequest, StatusRequest
        from chaos_lightning.service.channel import CLIENT_OPTIONS, grpc  # type: ignore[attr-defined]

        self._request = LinkChangeRequest
        self._channel = grpc.insecure_channel(endpoint, options=CLIENT_OPTIONS)
        self._stub = SchedulerStub(self._channel)
        # The connection is made before anything is measured.
        status = json.loads(self._stub.Status(StatusRequest(), timeout=10.0).json)
        self.scheduler_pid = int(status["pid"])

    def link(self, pair: Pair, *, add: bool) -> None:
        """Asks the scheduler to add or remove a link.

        Raises:
            RuntimeError: The scheduler refused; with its words.
        """
        a, b = sorted(pair)
        reply = self._stub.ChangeLink(self._request(a=a, b=b, add=add), timeout=5.0)
        if not reply.accepted:
            raise RuntimeError(f"link {'add' if add else 'remove'} {a} {b} was refused: {reply.text}")

    def close(self) -> None:
        self._channel.close()


def ring(size: int) -> frozenset[Pair]:
    """Returns the links with which a job of `size` members begins: a ring, or a line if a ring would connect every
    pair.
    """
    names = [f"w{i}" for i in range(size)]
    around = [frozenset((a, b)) for a, b in zip(names, names[1:] + names[:1], strict=True)]
    return frozenset(around if size > 3 else around[: size - 1])


class Crew(World):
    """Members that train, and the changes of their links and membership.

    Args:
        endpoint: Endpoint of the scheduler.
        size: Number of members.
        meshed: Whether every pair has a link; else they begin as a `ring`.
        work: Training work of the members.
        rng: Random numbers that choose moments and links.
    """

    def __init__(self, endpoint: str, size: int, *, meshed: bool, work: Work, rng: random.Random) -> None:
        ctx = context("benchmarks.primitives.member", "chaos_lightning.replication.replay")
        base = frozenset() if meshed else ring(size)

        def spawn(name: str) -> Worker:
            near = sorted(next(iter(p - {name})) for p in base if name in p)
            return Worker(ctx, member, endpoint, name, ",".join(near), work)

        super().__init__(spawn, rng, patience_s=120.0)
        self.size = size
        self.marks: dict[str, dict[int, Mark]] = {}
        self.views: dict[int, int] = {}
        """Number of the step whose header carried a view, by number of the view."""
        self.links = base
        self._gone: dict[str, int] = {}
        self._going: dict[str, int] = {}
        self._operator = Operator(endpoint)

    def close(self) -> None:
        super().close()
        self._operator.close()

    # ------------------------------------------------------------------ what members say

    def _hear(self, name: str, word: str, *values: Any) -> None:
        if word == "steps":
            for note in values[0]:
                self._note(name, *note)
        elif word == "gone":
            self._gone[name] = values[0]
        elif word == "going":
            self._going[name] = values[0]
        else:
            super()._hear(name, word, *values)

    def _note(
        self, name: str, ns: int, seq: int, step: int, head: str, contributors: int, rank: int,
        view: tuple[int, list[str], list[tuple[str, str]]] | None, near: tuple[str, ...], cpu_s: float,
    ) -> None:  # fmt: skip
        number, ids, links = view or (0, [], [])
        named = frozenset(frozenset((_name(a), _name(b))) for a, b in links)
        mark = Mark(
            ns=ns, seq=seq, step=step, head=head, contributors=contributors, rank=rank, thrown=0,
            view=number, members=tuple(map(_name, ids)), links=named, near=frozenset(map(_name, near)), cpu_s=cpu_s,
        )  # fmt: skip
        self.members[name].steps.append(mark)
        self.marks.setdefault(name, {})[step] = mark
        if number:
            self.views[number] = step

    def pids(self) -> list[int]:
        """Returns all process ids of the benchmark: members, scheduler, and this process."""
        members = [s.worker.process.pid for s in self.members.values()]
        return [os.getpid(), self._operator.scheduler_pid, *(p for p in members if p is not None)]

    def inside(self) -> list[str]:
        """Returns the names of the members that are in the job."""
        return [n for n in self.members if n not in self._gone]

    def durations(self) -> dict[str, dict[int, float]]:
        """Returns the seconds from commit to commit, by member and step."""
        return {
            name: {s: (m.ns - marks[s - 1].ns) / 1e9 for s, m in marks.items() if s - 1 in marks}
            for name, marks in self.marks.items()
        }

    def cpu(self) -> dict[str, dict[int, float]]:
        """Returns the CPU seconds from commit to commit, by member and step."""
        return {
            name: {s: m.cpu_s - marks[s - 1].cpu_s for s, m in marks.items() if s - 1 in marks}
            for name, marks in self.marks.items()
        }

    def reach(self, step: int) -> None:
        """Waits until all members of the job have reported this step."""
        self.pump(lambda: all(self.members[n].steps[-1].step >= step for n in self.inside()), f"step {step} of all")

    # ------------------------------------------------------------------ changes

    def _moment(self) -> int:
        """Waits for a random duration of up to 1.5 steps; returns the time (CLOCK_MONOTONIC, ns)."""
        recent = [m.ns for m in next(iter(self.marks.values())).values()][-12:]
        usual = (recent[-1] - recent[0]) / 1e9 / (len(recent) - 1)
        time.sleep(self.rng.uniform(0.0, 1.5 * usual))
        return time.monotonic_ns()

    def _carried(self, known: set[int], names: list[str], what: str) -> tuple[int, Mark]:
        """Waits for a new view; returns the step whose header carried it, and a member's report of that step."""

        def found() -> int:
            return min((n for n in self.views if n not in known), default=0)

        def told() -> bool:
            step = self.views.get(found())
            return step is not None and all(step in self.marks[n] for n in names)

        self.pump(told, what)
        step = self.views[found()]
        return step, self.marks[names[0]][step]

    def _under_way(self, names: list[str], ns: int) -> int:
        """Returns the step that was under way at a time (ns) at the slowest of these members."""

        def later(name: str) -> int | None:
            return next((s for s, m in sorted(self.marks[name].items()) if m.ns > ns), None)

        self.pump(lambda: all(later(n) is not None for n in names), "the step that was under way")
        return min(s for n in names if (s := later(n)) is not None)

    def change_link(self, pair: Pair, *, add: bool) -> Change:
        """Adds or removes a link between two members; returns when the last effect of the change is over.

        Raises:
            RuntimeError: The scheduler refused, or the next view was another one than was asked for.
        """
        names, known = self.inside(), set(self.views)
        ends = sorted(pair)
        what = f"link {'add' if add else 'remove'} {' '.join(ends)}"
        ns = self._moment()
        self._operator.link(pair, add=add)
        ruled, mark = self._carried(known, names, what)
        expected = self.links | {pair} if add else self.links - {pair}
        every = len(names) * (len(names) - 1) // 2
        if mark.links != (frozenset() if len(expected) == every else expected):
            raise RuntimeError(f"{what}: the next view has the links {_words(mark.links)}, not {_words(expected)}")
        self.links = expected
        requested = self._under_way(names, ns)
        settled = max(self._trace(one, other, requested, up=add) for one, other in itertools.permutations(ends))
        steps = charged(requested, ruled, settled=0 if add else settled, stood=settled if add else -1)
        self.reach(steps[-1])
        return Change(requested, ruled, steps, tuple(names), self._seconds(ns, ruled, names))

    def _trace(self, one: str, other: str, since: int, *, up: bool) -> int:
        """Returns the first step from `since` on at whose end the member `one` had a link to `other` (or had none)."""

        def found() -> int | None:
            return next((s for s, m in sorted(self.marks[one].items()) if s >= since and (other in m.near) is up), None)

        self.pump(lambda: found() is not None, f"the link of {one} to {other} to {'stand' if up else 'go'}")
        step = found()
        assert step is not None
        return step

    def leave(self, name: str) -> Change:
        """Makes a member leave politely (scale-in); returns when its sockets are closed and the effects of the change
        are over.
        """
        staying, known = [n for n in self.inside() if n != name], set(self.views)
        ns = self._moment()
        self.members[name].worker.pipe.send(("leave",))
        self.pump(lambda: name in self._gone, f"{name} to be gone")
        ruled, mark = self._carried(known, staying, f"the view without {name}")
        if name in mark.members:
            raise RuntimeError(f"{name} was asked to leave; the next view is {mark.members}")
        requested, closed = self._under_way(staying, ns), self._under_way(staying, self._gone[name])
        steps = charged(requested, ruled, settled=closed)
        self.reach(steps[-1])
        return Change(requested, ruled, steps, tuple(staying), self._seconds(ns, ruled, staying))

    def come_again(self, name: str) -> Entry:
        """Makes a member that has left join again (scale-out); returns when it trains with the others."""
        hosts = self.inside()
        del self._gone[name], self._going[name]
        entered = len(self.members[name].entries)
        self.members[name].worker.pipe.send(("again",))
        seen = self.members[name]
        self.pump(lambda: len(seen.entries) > entered, f"{name} to come in again")
        since = self._going[name]
        first = self._under_way([name], since)
        # The slot that lets it in is no step, so its time is within the first joint step.
        steps = tuple(range(self._under_way(hosts, since), first + 2))
        self.reach(steps[-1])
        return Entry(steps, first - 1, tuple(hosts), (self.marks[name][first].ns - since) / 1e9)

    def _seconds(self, ns: int, step: int, names: list[str]) -> float:
        return (max(self.marks[n][step].ns for n in names) - ns) / 1e9

    # ------------------------------------------------------------------ choosing

    def absent(self) -> Pair:
        """Returns a random pair of members without a link."""
        pairs = [frozenset(p) for p in itertools.combinations(sorted(self.inside()), 2)]
        return self.rng.choice([p for p in pairs if p not in self.links])

    def spare(self) -> Pair:
        """Returns a random link whose removal leaves all members connected."""
        names = self.inside()
        found = [p for p in self.links if connected(names, self.links - {p})]
        return self.rng.choice(sorted(found, key=sorted))


def _name(member_id: str) -> str:
    return member_id.rpartition("~")[0]


def _words(links: frozenset[Pair]) -> str:
    return ", ".join("-".join(sorted(p)) for p in sorted(links, key=sorted)) or "of every pair"


@contextlib.contextmanager
def crew(size: int, *, meshed: bool, work: Work, rng: random.Random) -> Iterator[Crew]:
    """Yields `size` members that train, under a scheduler with its defaults."""
    with (
        scheduler(size - 1 if meshed else size) as endpoint,  # who leaves may not be needed
        Crew(endpoint, size, meshed=meshed, work=work, rng=rng) as made,
    ):
        made.open(size)
        made.settle(size)
        yield made
