"""Measures a join and its control from the reports of hosts and newcomer; definitions are in __main__.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.common import Result, median
from benchmarks.workers import Worker
from benchmarks.world import AFTERMATH, CALM, SETTLED, Hosts, Step, intervals

BOUND_CONTROL = 1.25
BOUND_LONGEST_S = {50: 0.060, 200: 0.150}
BOUND_READY_S = {50: 0.5, 200: 1.0}
BOUND_JOINT_S = {50: 0.060, 200: 0.100}


@dataclass
class Visit:
    """Measurements of one join and its control, in seconds."""

    to_contribution: float
    longest: float
    """Hosts' longest step beyond the usual one."""
    joint: float
    """First joint step beyond the usual one."""
    calm: float
    """Hosts' longest step beyond the usual one over as many steps just before."""
    usual: float
    usual_joint: float
    steps: int
    """Hosts' steps between the call and the first joint one."""
    cpu: float
    """The guest's, until it contributed."""
    hosts_cpu: float
    """Both hosts', beyond what as many usual steps cost."""
    equal: bool = False
    control: float | None = None


@dataclass
class Visits:
    """Measurements of all joins of one kind."""

    kept: list[Visit] = field(default_factory=list)

    def of(self, name: str) -> list[float]:
        return [v for visit in self.kept if (v := getattr(visit, name)) is not None]


class House(Hosts):
    """Two members that train, and at times a newcomer; all report their CPU seconds after each step.

    Args:
        spawn: Function that starts a member, from its name and whether it is a newcomer.
        rng: Draws newcomers' names.
        patience_s: Longest wait for anything, in seconds.
    """

    def __init__(self, spawn: Callable[[str, bool], Worker], rng: random.Random, patience_s: float = 180.0) -> None:
        super().__init__(lambda name: spawn(name, name not in ("w0", "w1")), rng, patience_s)
        self.cpu: dict[str, dict[int, float]] = {}

    def _hear(self, name: str, word: str, *values: Any) -> None:
        if word == "cpu":
            self.cpu.setdefault(name, {})[values[0]] = values[1]
        else:
            super()._hear(name, word, *values)

    def joint(self, host: str, since_ns: int) -> list[Step]:
        """Returns the steps with three contributors that a host committed after an instant (ns)."""
        return [s for s in self.members[host].steps if s.contributors == 3 and s.ns > since_ns]

    def within(self, since_ns: int, until_ns: int) -> list[list[tuple[Step, float]]]:
        """Returns for each host its steps that ended in an interval, each with the seconds since the step before."""
        return [
            [(step, t) for step, t in intervals(self.members[h].steps) if since_ns < step.ns <= until_ns]
            for h in self.hosts
        ]

    def spent(self, first: Step, last: Step, host: str) -> float:
        """Returns the CPU seconds that a host used between two of its steps."""
        return self.cpu[host][last.step] - self.cpu[host][first.step]

    def beyond(self, called_ns: int, host: str) -> float:
        """Returns the CPU seconds beyond the usual that this host used from the newcomer's call to the last step that a
        join may affect.
        """
        steps = self.members[host].steps
        at = max(i for i, s in enumerate(steps) if s.ns <= called_ns)
        joint = next(i for i, s in enumerate(steps) if s.ns > called_ns and s.contributors == 3)
        end = joint + AFTERMATH - 1
        alone = self.spent(steps[at - CALM], steps[at], host) / CALM
        together = self.spent(steps[end + SETTLED], steps[end + SETTLED + CALM - AFTERMATH], host) / (CALM - AFTERMATH)
        return self.spent(steps[at], steps[end], host) - (joint - 1 - at) * alone - AFTERMATH * together


def _longest(intervals: list[list[tuple[Step, float]]], usual: dict[int, float]) -> float:
    return max(t - usual[step.contributors] for steps in intervals for step, t in steps)


def visit(house: House, leave: bool = True) -> Visit:
    """Measures one join, compares the members' states, and makes the newcomer leave."""
    guest = f"g{len(house.past) + len(house.members)}-{house.rng.randrange(1 << 30)}"
    house.invite(guest)
    house.calm(2)
    usual = {2: house.usual_of(2)}
    (called_ns, cpu_before), (first_ns, cpu_after) = house.let_in(guest)
    house.calm(3, CALM + SETTLED)
    usual[3] = house.usual_of(3)
    joint = [house.joint(h, called_ns)[0] for h in house.hosts]
    last_ns = max(s.ns for h in house.hosts for s in house.joint(h, called_ns)[:AFTERMATH])
    during = house.within(called_ns, last_ns)
    count = max(len(d) for d in during)
    before = [[(s, t) for s, t in intervals(house.members[h].steps) if s.ns <= called_ns][-count:] for h in house.hosts]
    found = Visit(
        to_contribution=(first_ns - called_ns) / 1e9,
        longest=_longest(during, usual),
        joint=max(t for steps in during for s, t in steps if s in joint) - usual[3],
        calm=_longest(before, usual),
        usual=usual[2],
        usual_joint=usual[3],
        steps=max(sum(s.contributors == 2 for s, _ in d) for d in during),
        cpu=cpu_after - cpu_before,
        hosts_cpu=sum(house.beyond(called_ns, h) for h in house.hosts),
    )
    found.equal = len(house.hashes()) == 1
    if leave:
        house.see_off(guest)
    else:
        house.doomed.add(guest)
    house.bury(guest)
    return found


def control(house: House, stranger: Worker, cpu_s: float) -> float:
    """Returns the seconds by which the hosts' longest step exceeds the usual one while `stranger` uses CPU."""
    house.calm(2)
    usual = {2: house.usual_of(2)}
    stranger.pipe.send(cpu_s)
    house.pump(stranger.pipe.poll, "the stranger")
    began_ns, ended_ns = stranger.pipe.recv()
    house.calm(2, 3)
    return _longest(house.within(began_ns, ended_ns + int(2e9 * usual[2])), usual)


def say(title: str, one: Visit) -> None:
    """Prints a line of progress about one join."""
    against = "" if one.control is None else f", control {one.control * 1e3:+.0f}"
    print(
        f"    {title}: contributes after {one.to_contribution * 1e3:.0f} ms, longest {one.longest * 1e3:+.0f}, "
        f"joint {one.joint * 1e3:+.0f}{against} (CPU {one.cpu:.2f} s, hosts {one.hosts_cpu:+.2f})",
        flush=True,
    )


def report(result: Result, title: str, visits: Visits, state_mib: float, *, bounded: bool) -> None:
    """Adds the figures of one kind of join."""
    if not visits.kept:
        return
    size = int(state_mib)
    n = len(visits.kept)

    def bound(table: dict[int, float]) -> float | None:
        return table.get(size) if bounded else None

    longest = median(visits.of("longest"))
    result.add(
        f"{title}: to its first contribution, median of {n}",
        median(visits.of("to_contribution")),
        "s",
        bound(BOUND_READY_S),
    )
    result.add(f"{title}: hosts' longest step beyond usual, median", longest, "s", bound(BOUND_LONGEST_S))
    result.add(f"{title}: hosts' longest step beyond usual, worst", max(visits.of("longest")), "s")
    result.add(f"{title}: the same over as many steps before, median", median(visits.of("calm")), "s")
    if controls := visits.of("control"):
        burnt = median(controls)
        result.add(f"{title}: control, median", burnt, "s")
        result.add(f"{title}: longest / control", longest / burnt, "ratio", BOUND_CONTROL if bounded else None)
    result.add(f"{title}: first joint step beyond usual, median", median(visits.of("joint")), "s", bound(BOUND_JOINT_S))
    result.add(f"{title}: hosts' CPU for the join, both, median", median(visits.of("hosts_cpu")), "s")
    unequal = sum(not v.equal for v in visits.kept)
    result.add(f"{title}: joins after which states differ", unequal, "count", 0 if bounded else None)
    result.details[title] = [asdict(v) for v in visits.kept]


def table(rows: dict[str, Visits]) -> list[str]:
    """Returns a table with one line per kind of join; medians in ms."""
    columns = ("to contribution", "longest", "control", "joint", "usual", "usual joint", "steps", "CPU s")
    heads = ("", *columns, "hosts' CPU s")
    lines = [heads]
    for title, visits in rows.items():
        if not visits.kept:
            continue
        names = ("to_contribution", "longest", "control", "joint", "usual", "usual_joint")
        cells = [f"{median(v) * 1e3:.0f} ms" if (v := visits.of(n)) else "-" for n in names]
        rest = (f"{median(visits.of('steps')):.0f}", *(f"{median(visits.of(n)):.2f}" for n in ("cpu", "hosts_cpu")))
        lines.append((title, *cells, *rest))
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
