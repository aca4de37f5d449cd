"""A node joins: how soon does it contribute, and what do those feel who train meanwhile?

Two hosts train in real processes. A third one has built everything and waits; told to go, it joins by replay or by
pause, trains with the others, and leaves politely. All processes stamp their commits with CLOCK_MONOTONIC. Per run:
  to its first contribution   from the guest's call of `join` (it has no connection to anybody yet) to the commit of the
                              first step with its gradient in it;
  longest step beyond usual   the hosts' longest time from commit to commit, from that call to the second joint step,
                              minus the median of their steps with as many members (before it, or well after);
  first joint step            the same for the first step of three alone;
  hosts' CPU                  what both spent between these moments beyond their usual share per step: serving costs;
  control                     the longest step of the hosts while an unrelated process burns as many CPU seconds as the
                              guest spent until it contributed: on few cores that is what any third process costs.
Each join is followed by its control, so both meet the same machine; figures are medians over runs. After each join a
SHA-256 of parameters and Adam state of all three, at one header, must be equal.

torchft in the same run, tuned as in benchmarks/kill.py, with the same clock and definitions; its guest has built its
`Manager` too when it is told to go, and is killed afterwards, since there is no way to leave.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import Result, median, parser, run
from benchmarks.join_members import burner, member
from benchmarks.survival import Seen, Step, World
from benchmarks.workers import Worker, context, scheduler

BOUND_CONTROL = 1.25
BOUND_LONGEST_S = {50: 0.060, 200: 0.150}
BOUND_READY_S = {50: 0.5, 200: 1.0}
BOUND_JOINT_S = {50: 0.060, 200: 0.100}
CALM = 30
"""Steps whose median is the usual one."""
AFTERMATH = 2
"""Joint steps that still count as the join."""
SETTLED = 3
"""Joint steps that count neither for the usual one."""


@dataclass
class Visit:
    """One join and its control; seconds."""

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
    """All joins of one kind."""

    kept: list[Visit] = field(default_factory=list)

    def of(self, name: str) -> list[float]:
        return [v for visit in self.kept if (v := getattr(visit, name)) is not None]


class House(World):
    """Two hosts, and now and then a guest."""

    def __init__(self, spawn: Callable[[str, bool], Worker], rng: random.Random, patience_s: float = 180.0) -> None:
        super().__init__(lambda name: spawn(name, False), rng, patience_s)
        self._guest = lambda name: spawn(name, True)
        self.notes: dict[str, dict[str, tuple[Any, ...]]] = {}
        self.hosts: list[str] = []
        self.cpu: dict[str, dict[int, float]] = {}
        """CPU seconds of each member by the step that it had just committed."""

    def open(self) -> None:
        self.hosts = [self.start() for _ in range(2)]
        self.calm(2)

    def invite(self) -> str:
        """A guest at the door, ready."""
        name = f"g{len(self.past) + len(self.members)}-{self.rng.randrange(1 << 30)}"
        self.members[name] = Seen(self._guest(name))
        self.notes[name] = {}
        self.pump(lambda: "ready" in self.notes[name], f"{name} to be ready")
        return name

    def _hear(self, seen: Seen, message: tuple[Any, ...]) -> None:
        word, *values = message
        name = next((n for n, s in self.members.items() if s is seen), "")
        if word in ("ready", "going", "contributed") and name in self.notes:
            self.notes[name][word] = tuple(values)
        elif word == "cpu":
            self.cpu.setdefault(name, {})[values[0]] = values[1]
        else:
            super()._hear(seen, message)

    def calm(self, size: int, count: int = CALM) -> None:
        """Until the hosts have taken so many steps in a row with `size` members."""
        marks = {h: len(self.members[h].steps) for h in self.hosts}

        def passed(name: str) -> bool:
            steps = self.members[name].steps[marks[name] :]
            return len(steps) > count and all(s.contributors == size for s in steps[-count:])

        self.pump(lambda: all(passed(h) for h in self.hosts), f"{count} steps of {size} members")

    def usual(self, size: int) -> float:
        """Median of the hosts' last steps, all with `size` members, s."""
        found = []
        for host in self.hosts:
            steps = [s for s in self.members[host].steps[-CALM:] if s.contributors == size]
            found += [t for _, t in _intervals(steps)]
        return median(found)

    def intervals(self, since_ns: int, until_ns: int) -> list[list[tuple[Step, float]]]:
        """Per host: its steps that ended within, with the seconds since the one before."""
        return [
            [(step, t) for step, t in _intervals(self.members[h].steps) if since_ns < step.ns <= until_ns]
            for h in self.hosts
        ]

    def spent(self, first: Step, last: Step, host: str) -> float:
        """CPU seconds of a host between two of its steps."""
        return self.cpu[host][last.step] - self.cpu[host][first.step]

    def beyond(self, called_ns: int, host: str) -> float:
        """CPU seconds that a join cost this host: from the call to the last step that counts, less the usual."""
        steps = self.members[host].steps
        at = max(i for i, s in enumerate(steps) if s.ns <= called_ns)
        joint = next(i for i, s in enumerate(steps) if s.ns > called_ns and s.contributors == 3)
        end = joint + AFTERMATH - 1
        alone = self.spent(steps[at - CALM], steps[at], host) / CALM
        together = self.spent(steps[end + SETTLED], steps[end + SETTLED + CALM - AFTERMATH], host) / (CALM - AFTERMATH)
        return self.spent(steps[at], steps[end], host) - (joint - 1 - at) * alone - AFTERMATH * together


def _intervals(steps: list[Step]) -> list[tuple[Step, float]]:
    return [(b, (b.ns - a.ns) / 1e9) for a, b in itertools.pairwise(steps)]


def _longest(intervals: list[list[tuple[Step, float]]], usual: dict[int, float]) -> float:
    return max(t - usual[step.contributors] for steps in intervals for step, t in steps)


def visit(house: House, leave: bool = True) -> Visit:
    """One join, its measurement, the comparison of states, and the guest's departure."""
    guest = house.invite()
    house.calm(2)
    usual = {2: house.usual(2)}
    seen = house.members[guest]
    seen.worker.pipe.send(("go",))
    house.pump(lambda: "contributed" in house.notes[guest], f"the first contribution of {guest}")
    called_ns, cpu_before = house.notes[guest]["going"]
    first_ns, cpu_after = house.notes[guest]["contributed"]
    house.calm(3, CALM + SETTLED)
    usual[3] = house.usual(3)
    joint = [_joint(house.members[h], called_ns)[0] for h in house.hosts]
    last_ns = max(s.ns for h in house.hosts for s in _joint(house.members[h], called_ns)[:AFTERMATH])
    during = house.intervals(called_ns, last_ns)
    count = max(len(d) for d in during)
    before = [
        [(s, t) for s, t in _intervals(house.members[h].steps) if s.ns <= called_ns][-count:] for h in house.hosts
    ]
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
        seen.worker.pipe.send(("leave",))
        house.pump(lambda: seen.bye, f"the departure of {guest}")
    else:
        house.doomed.add(guest)
    house.bury(guest)
    return found


def _joint(seen: Seen, since_ns: int) -> list[Step]:
    return [s for s in seen.steps if s.contributors == 3 and s.ns > since_ns]


def control(house: House, stranger: Worker, cpu_s: float) -> float:
    """The hosts' longest step beyond the usual one while `stranger` burns so much CPU, s."""
    house.calm(2)
    usual = {2: house.usual(2)}
    stranger.pipe.send(cpu_s)
    house.pump(stranger.pipe.poll, "the stranger")
    began_ns, ended_ns = stranger.pipe.recv()
    house.calm(2, 3)
    return _longest(house.intervals(began_ns, ended_ns + int(2e9 * usual[2])), usual)


@contextlib.contextmanager
def our_house(state_mib: float, way: str, rng: random.Random, logs: str) -> Iterator[House]:
    """Two hosts of ours under a scheduler with its defaults; guests join by `way`."""
    ctx = context("benchmarks.join_members", "torch._dynamo", "chaos_lightning.replication.replay")
    with scheduler(2, log_dir=logs) as endpoint:
        house = House(
            lambda name, guest: Worker(ctx, member, endpoint, name, state_mib, way if guest else "", logs), rng
        )
        try:
            house.open()
            yield house
        finally:
            house.close()


def say(title: str, one: Visit) -> None:
    """A line of progress."""
    against = "" if one.control is None else f", control {one.control * 1e3:+.0f}"
    print(
        f"    {title}: contributes after {one.to_contribution * 1e3:.0f} ms, longest {one.longest * 1e3:+.0f}, "
        f"joint {one.joint * 1e3:+.0f}{against} (CPU {one.cpu:.2f} s, hosts {one.hosts_cpu:+.2f})",
        flush=True,
    )


def ours(state_mib: float, way: str, runs: int, rng: random.Random, keep: str = "") -> Visits:
    """So many joins of one kind, each followed by its control."""
    visits = Visits()
    logs = str(Path(keep) / f"join-{way}-{state_mib:g}") if keep else ""
    stranger = Worker(context(), burner)
    try:
        with our_house(state_mib, way, rng, logs) as house:
            assert stranger.receive()[0] == "ready"
            visit(house)  # warms up: the first snapshot and log allocate their memory
            for _ in range(runs):
                one = visit(house)
                one.control = control(house, stranger, one.cpu)
                visits.kept.append(one)
                say(way, one)
    finally:
        stranger.kill()
    return visits


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
    """One line per kind of join; medians in ms."""
    heads = (
        "",
        "to contribution",
        "longest",
        "control",
        "joint",
        "usual",
        "usual joint",
        "steps",
        "CPU s",
        "hosts' CPU s",
    )
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


def measure(args: argparse.Namespace) -> Result:
    result = Result("join")
    rows: dict[str, Visits] = {}
    for state_mib in args.states_mib[:1] if args.quick else args.states_mib:
        runs = args.runs or (3 if args.quick else 10)
        rng = random.Random(args.seed)
        for way in args.ways:
            title = f"{way}, {state_mib:g} MiB"
            print(f" {title}: {runs} joins, seed {args.seed}", flush=True)
            rows[title] = ours(state_mib, way, runs, rng, args.keep_logs)
            report(result, title, rows[title], state_mib, bounded=way == "replay")
        if args.torchft:
            from benchmarks import join_torchft

            title = f"torchft, {state_mib:g} MiB"
            rows[title] = join_torchft.joins(result, title, state_mib, min(runs, 5) if args.quick else runs, rng)
            report(result, title, rows[title], state_mib, bounded=False)
    lines = table(rows)
    result.details["table"] = lines
    print("\n".join(lines), flush=True)
    return result


def main() -> int:
    p = parser(__doc__ or "")
    p.add_argument("--states-mib", type=float, nargs="*", default=[50, 200])
    p.add_argument("--runs", type=int, default=0, help="joins of each kind and state size; 0: 10, or 3 with --quick")
    p.add_argument("--ways", nargs="*", default=["replay", "pause"], choices=["replay", "pause"])
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--keep-logs", default="", help="folder that keeps our members' event logs")
    p.add_argument("--torchft", action=argparse.BooleanOptionalAction, default=True, help="the peer in the same run")
    args = p.parse_args()
    return measure(args).finish(args)


if __name__ == "__main__":
    run(main)
