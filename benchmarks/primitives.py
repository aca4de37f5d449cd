"""Scale-in, connect-link, disconnect-link: how much later is training for them? (The paper: less than 1 ms.)

Members train in real processes, over real sockets, under a real scheduler, and stamp every commit with CLOCK_MONOTONIC.
At a random moment of a step
  connect-link     an operator asks for a link between two random members that have none;
  disconnect-link  an operator asks that a random link goes;
  scale-in         one member, each in its turn, asks to leave, and leaves on the ordinary way. (Afterwards it comes in
                   again by a pause, which is shown and not counted.)

What is charged. The step under way at the request and all that follow, until the change is over: past the step whose
header carries the new view there are always two more (the first over new trees, and the next one, in which links are
given up), and always one more than that in which the last trace of the change was seen (a link that has not closed,
sockets of the one who left). A new link must stand for a second before a view uses it; what lies in between is not
charged, as nothing happens then. From the duration of each of these steps the usual one is taken off: the median of
the 15 undisturbed steps just before for steps up to the header (they ran in the old view), of the 15 just after for the
others (they ran in the new one, with other trees or fewer members, and may be faster or slower for good). The exposed
delay is the sum of what is left: how much later training is than if the new view had ruled without any change.
Steps that are shorter count against longer ones only in so far as training made up for them.
  "longest step"   is the largest single difference instead, against which nothing counts.
  "against ..."    takes off one median throughout: that before, that after, or the slower of both.
Always the worst value over the members.

Control. Each event has one: the same computation, on as many steps in a row, at a random place of the undisturbed
stretch before or after it (in turn), as if something had happened there. Bounded is the median of the
differences event - control; its 95 % interval is given, and with it what this machine can tell at all. In the same way
the CPU seconds are given that the members spent beyond the usual ones, which a busy machine changes less.

The machine. All members share its processors with scheduler and operator, which in a real job have their own. If
members computed all the time, every microsecond of work anywhere would make somebody's step longer. So in each step a
member's thread sleeps for --device-ms, like one that waits for an accelerator, and computes for the rest; how busy the
processors were is one of the figures. What happens during that sleep does not show, as it would not with an
accelerator: that is the paper's claim. With --full-processors there is no sleep, so all work shows; no bounds then.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.common import Result, median, parser, run
from benchmarks.primitives_crew import Change, Crew, Entry, crew
from benchmarks.primitives_member import Work
from benchmarks.primitives_samples import (
    Exposure,
    Series,
    block_of,
    control_of,
    exposed,
    median_interval,
    percentile,
)

BOUND_S = 0.001
KINDS = ("connect-link", "disconnect-link", "scale-in")
WIDTH = 15
"""Undisturbed steps of which a median is taken."""
FOREIGN = 0.1
"""Part of the processors' time; a machine on which other work takes more is not idle."""
SLACK = 6
"""Undisturbed steps beyond those that a control needs, so that its place is random."""


@dataclass(frozen=True)
class Sample:
    """One event and its control."""

    event: Exposure
    control: Exposure
    waited_s: float
    """From the request to the commit of the header that carried the change."""
    event_cpu: float = 0.0
    """CPU seconds of all members together beyond the usual ones, in the charged steps."""
    control_cpu: float = 0.0

    @property
    def beyond(self) -> float:
        """Exposed delay beyond the control's, s."""
        return self.event.total - self.control.total


@dataclass
class Outcome:
    """All events of one kind."""

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
        """ "event", "control" or "beyond"; or "event.FIELD", "control.FIELD" of Exposure."""
        name, _, part = what.partition(".")
        values = [getattr(s, name) for s in self.samples]
        return [getattr(v, part or "total") if isinstance(v, Exposure) else v for v in values]


class Processors:
    """What the machine's processors do from here on, as parts of their time, 0 to 1.

    Args:
        pids: The benchmark's processes; they must live until `read` is called.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._before = self._ticks()

    def _ticks(self) -> tuple[int, int, int]:
        """(idle, all, used by the benchmark) so far."""
        ticks = [int(t) for t in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        own = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own += int(fields[11]) + int(fields[12])
        return ticks[3] + ticks[4], sum(ticks), own

    def read(self) -> tuple[float, float]:
        """(busy, busy with other work than the benchmark's)."""
        idle, total, own = (now - then for now, then in zip(self._ticks(), self._before, strict=True))
        if not total:
            return 0.0, 0.0
        busy = 1.0 - idle / total
        return busy, max(0.0, busy - own / total)


class Log:
    """The course of one run: changes, and the undisturbed stretches between them."""

    def __init__(self, made: Crew) -> None:
        self._crew = made
        self._since = made.last() + 1
        self._needs = 0
        self.changes: list[tuple[str, Change, tuple[int, int]]] = []
        """(kind, change, stretch before it)."""
        self.entries: list[Entry] = []

    def rest(self) -> None:
        """An undisturbed stretch, long enough for a control."""
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
        """All events with their controls, by kind, from the members' durations and CPU seconds by step."""
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
    """So many links that come, and as many that go, in turn."""
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
    """So many departures, members in turn, each followed by a return."""
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
    """A line of progress, now and then."""
    if (index + 1) % 10 == 0 or index + 1 == events:
        print(f"[{time.strftime('%H:%M:%S')}] {what}: {index + 1} of {events}", file=sys.stderr, flush=True)


def report(result: Result, title: str, outcome: Outcome, *, bounded: bool) -> None:
    """Adds the figures of one kind of event."""
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
    print(f"    ({note})", flush=True)
    result.notes.append(note)
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


def case(size: int, work: Work, events: dict[str, int], seed: int) -> dict[str, Outcome]:
    """All events of the kinds that are asked for; connect-link and disconnect-link take turns, as many of either."""
    found: dict[str, Outcome] = {}
    rng = random.Random(seed)
    changes = max(events.get("connect-link", 0), events.get("disconnect-link", 0))
    if changes:
        found |= {k: o for k, o in links(size, work, changes, rng).items() if events.get(k)}
    if events.get("scale-in"):
        found |= leaves(size, work, events["scale-in"], rng)
    return found


def measure(args: argparse.Namespace) -> Result:
    result = Result("primitives")
    count = args.events or (12 if args.quick else 40)
    cases = [("", args.device_ms, count, True)]
    if args.full_processors or not args.quick:
        cases.append(("no sleep, ", 0.0, max(6, count // 5), False))
    for words, device_ms, events, bounded in cases:
        work = Work(grad_mib=args.grad_mib, device_s=device_ms / 1e3, by_reference=args.by_reference)
        print(
            f" {words}{args.members} members, {args.grad_mib:g} MiB of gradients, {device_ms:g} ms of sleep in a step, "
            f"{events} events of each kind, seed {args.seed}",
            flush=True,
        )
        for kind, outcome in case(args.members, work, dict.fromkeys(args.kinds, events), args.seed).items():
            report(result, f"{words}{kind}", outcome, bounded=bounded)
    return result


def main() -> int:
    p = parser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="default: all")
    p.add_argument("--events", type=int, default=0, help="of each kind; default 40, or 12 with --quick")
    p.add_argument("--members", type=int, default=4, help="processes that train, at least 3; default 4")
    p.add_argument("--grad-mib", type=float, default=0.5, help="size of the gradients, MiB; default 0.5")
    p.add_argument("--device-ms", type=float, default=20.0, help="sleep in each step, ms; default 20")
    p.add_argument(
        "--full-processors", action="store_true", help="with --quick: also without sleep, as the full form always does"
    )
    p.add_argument(
        "--by-reference", action="store_true", help="members read each other's memory in place of using sockets"
    )
    p.add_argument("--seed", type=int, default=1, help="of moments, links and controls' places; default 1")
    args = p.parse_args()
    if args.members < 3 or args.events < 0:
        p.error(
            f"--members {args.members} --events {args.events}: expected at least 3 members, and no fewer than 0 events"
        )
    return measure(args).finish(args)


if __name__ == "__main__":
    run(main)
