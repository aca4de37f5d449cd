"""Changes a job's links and members one by one, each followed by a control; definitions are in __main__.py."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.common import Result, median, percentile
from benchmarks.primitives.crew import Change, Crew, Entry, crew
from benchmarks.primitives.member import Work
from benchmarks.primitives.samples import (
    Exposure,
    Series,
    block_of,
    control_of,
    exposed,
    median_interval,
)

BOUND_S = 0.001
WIDTH = 15
"""Undisturbed steps of which a median is taken."""
FOREIGN = 0.1
"""Part of the processors' time; a machine on which other work takes more is not idle."""
SLACK = 6
"""Undisturbed steps beyond those that a control needs, so that its place is random."""


@dataclass(frozen=True)
class Sample:
    """Measurements of one change of links or members, and of its control."""

    event: Exposure
    control: Exposure
    waited_s: float
    """Seconds from the request to the commit of the header that carried the change."""
    event_cpu: float = 0.0
    """CPU seconds of all members together beyond the usual ones, in the charged steps."""
    control_cpu: float = 0.0

    @property
    def beyond(self) -> float:
        """Exposed delay in excess of the control's, s."""
        return self.event.total - self.control.total


@dataclass
class Outcome:
    """Measurements of all changes of one kind, and the load of the machine during them."""

    samples: list[Sample] = field(default_factory=list)
    size: int = 0
    busy: float = 0.0
    """Part of the machine's processor time that was used meanwhile, 0 to 1."""
    foreign: float = 0.0
    """Part that was used by other work than the benchmark's."""
    unequal: int = 0
    """1 if the members' states differed in the end."""
    entries: list[tuple[float, float]] = field(default_factory=list)
    """For scale-in: of each return, seconds to the first contribution, and what that cost the others (s)."""

    def of(self, what: str) -> list[float]:
        """Returns the values of "event", "control" or "beyond" of all samples, or of a field of an Exposure
        ("event.FIELD").
        """
        name, _, part = what.partition(".")
        values = [getattr(s, name) for s in self.samples]
        return [getattr(v, part or "total") if isinstance(v, Exposure) else v for v in values]


class Processors:
    """Meter of the processors' load from its creation on, as shares of their time, 0 to 1.

    Args:
        pids: The benchmark's processes; they must live until `read` is called.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._before = self._ticks()

    def _ticks(self) -> tuple[int, int, int]:
        """Returns the processor ticks so far: idle, all, and used by the benchmark."""
        ticks = [int(t) for t in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        own = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own += int(fields[11]) + int(fields[12])
        return ticks[3] + ticks[4], sum(ticks), own

    def read(self) -> tuple[float, float]:
        """Returns the shares of processor time that were busy, and busy with work other than the benchmark's."""
        idle, total, own = (now - then for now, then in zip(self._ticks(), self._before, strict=True))
        if not total:
            return 0.0, 0.0
        busy = 1.0 - idle / total
        return busy, max(0.0, busy - own / total)


class Log:
    """Course of one run: its changes, and the steps without a change between them."""

    def __init__(self, made: Crew) -> None:
        self._crew = made
        self._since = made.last_step() + 1
        self._needs = 0
        self.changes: list[tuple[str, Change, tuple[int, int]]] = []
        """(kind, change, stretch before it)."""
        self.entries: list[Entry] = []

    def rest(self) -> None:
        """Waits until enough steps without a change have passed for a control."""
        self._crew.reach(self._since + 2 * WIDTH + self._needs + SLACK)

    def changed(self, kind: str, change: Change) -> None:
        self.changes.append((kind, change, (self._since, change.steps[0] - 1)))
        self._begin(change.steps)

    def entered(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._begin(entry.steps)

    def _begin(self, steps: tuple[int, ...]) -> None:
        self._since = steps[-1] + 1
        self._needs = max(self._needs, len(steps))
        self.rest()

    def outcomes(self, series: Series, cpu: Series, rng: random.Random) -> dict[str, Outcome]:
        """Returns the measurements of all changes with their controls by kind, from the members' durations and CPU
        seconds by step.
        """
        found: dict[str, Outcome] = {}
        for number, (kind, change, stretch) in enumerate(self.changes):
            event = block_of(change.steps, change.ruled, WIDTH)
            after = (change.steps[-1] + 1, change.steps[-1] + 2 * WIDTH + len(change.steps) + SLACK)
            # By number // 2, as with two kinds in turn each is to have both.
            long_enough = stretch[1] - stretch[0] + 1 >= 2 * WIDTH + len(change.steps)
            control = control_of(event, stretch if number // 2 % 2 and long_enough else after, WIDTH, rng)
            costs, cpus = (
                [exposed(series, change.members, block) for block in (event, control)],
                [sum(exposed(cpu, [m], block).total for m in change.members) for block in (event, control)],
            )
            sample = Sample(costs[0], costs[1], change.waited_s, cpus[0], cpus[1])
            found.setdefault(kind, Outcome()).samples.append(sample)
        for entry in self.entries:
            cost = exposed(series, entry.members, block_of(entry.steps, entry.ruled, WIDTH))
            found["scale-in"].entries.append((entry.contributed_s, cost.total))
        return found


def links(size: int, work: Work, events: int, rng: random.Random) -> dict[str, Outcome]:
    """Measures `changes` new links, and as many removed ones, in turn."""
    with crew(size, meshed=False, work=work, rng=rng) as made:
        for add in (True, False):  # what is done for the first time costs more
            made.change_link(made.absent() if add else made.spare(), add=add)
        made.settle(size)
        log, processors = Log(made), Processors(made.pids())
        log.rest()
        for index in range(events):
            log.changed("connect-link", made.change_link(made.absent(), add=True))
            log.changed("disconnect-link", made.change_link(made.spare(), add=False))
            say(f"links, {size} members", index, events)
        return _closed(made, log, processors, rng)


def leaves(size: int, work: Work, events: int, rng: random.Random) -> dict[str, Outcome]:
    """Measures departures of members in turn, each followed by the member's return."""
    with crew(size, meshed=True, work=work, rng=rng) as made:
        names = sorted(made.members)
        made.leave(names[0])
        made.come_again(names[0])
        made.settle(size)
        log, processors = Log(made), Processors(made.pids())
        log.rest()
        for index in range(events):
            name = names[(index + 1) % size]
            log.changed("scale-in", made.leave(name))
            log.entered(made.come_again(name))
            say(f"scale-in, {size} members", index, events)
        return _closed(made, log, processors, rng)


def _closed(made: Crew, log: Log, processors: Processors, rng: random.Random) -> dict[str, Outcome]:
    busy, foreign = processors.read()
    unequal = int(len(made.hashes()) != 1)
    made.end()
    outcomes = log.outcomes(made.durations(), made.cpu(), rng)
    for outcome in outcomes.values():
        outcome.busy, outcome.foreign, outcome.unequal, outcome.size = busy, foreign, unequal, made.size
    return outcomes


def say(what: str, index: int, events: int) -> None:
    """Prints a line of progress after every tenth event."""
    if (index + 1) % 10 == 0 or index + 1 == events:
        print(f"[{time.strftime('%H:%M:%S')}] {what}: {index + 1} of {events}", file=sys.stderr, flush=True)


def report(result: Result, title: str, outcome: Outcome, *, bounded: bool) -> None:
    """Adds the figures of all changes of one kind."""
    count = len(outcome.samples)
    beyond = outcome.of("beyond")
    low, high = median_interval(beyond)
    result.add(
        f"{title}: exposed delay beyond its control, p50 of {count}",
        median(beyond),
        "s",
        BOUND_S if bounded else None,
    )
    note = f"{title}: 95 % interval of that median {low * 1e3:.3f} to {high * 1e3:.3f} ms"
    if high - low > 2 * BOUND_S:
        note += ", too wide to tell 1 ms"
    if outcome.foreign > FOREIGN:
        note += f"; other work took {outcome.foreign:.0%} of the processors, so nothing here counts"
    result.remark(note)
    result.add(f"{title}: exposed delay beyond its control, p99", percentile(beyond, 99), "s")
    for what, words in (
        ("event", "exposed delay"),
        ("control", "control"),
        ("event.middle", "exposed delay of the median member"),
        ("event.longest", "longest step beyond usual"),
        ("control.longest", "control, longest step beyond usual"),
    ):
        values = outcome.of(what)
        result.add(f"{title}: {words}, p50", percentile(values, 50), "s")
        result.add(f"{title}: {words}, p99", percentile(values, 99), "s")
    for what, words in (
        ("event_cpu", "members' CPU beyond usual"),
        ("control_cpu", "control, members' CPU beyond usual"),
    ):
        result.add(f"{title}: {words}, all together, p50", median([getattr(s, what) for s in outcome.samples]), "s")
    for what in ("before", "after", "slower"):
        result.add(f"{title}: against the median {what}, p50", median(outcome.of(f"event.against_{what}")), "s")
    result.add(f"{title}: usual step before", median(outcome.of("event.usual_before")), "s")
    result.add(f"{title}: usual step after", median(outcome.of("event.usual_after")), "s")
    result.add(f"{title}: steps charged, median", median(outcome.of("event.steps")), "count")
    result.add(f"{title}: request to its header, p50", median([s.waited_s for s in outcome.samples]), "s")
    result.add(f"{title}: processors busy", outcome.busy, "ratio")
    result.add(f"{title}: processors busy with other work", outcome.foreign, "ratio")
    result.add(f"{title}: runs after which states differ", outcome.unequal, "count", 0)
    if outcome.entries:
        ready, cost = zip(*outcome.entries, strict=True)
        result.add(f"{title}: return by a pause (not counted), call to first contribution, p50", median(ready), "s")
        result.add(f"{title}: return by a pause (not counted), exposed delay, p50", median(cost), "s")
    result.details[title] = {
        "interval_of_the_median_s": (low, high),
        "samples": [{**asdict(s), "beyond": s.beyond} for s in outcome.samples],
        "returns": outcome.entries,
    }
