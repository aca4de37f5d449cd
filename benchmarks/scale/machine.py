"""Measures the scheduler's state machine with 8 to 2,048 members: heartbeats, a founding, joins, leaves and deaths.

One core drives `SchedulerMachine` (standins.py answers for the members, in virtual time) and counts processor time:
of a heartbeat; of a founding, until all stand in the first view; of a join and a leave, until all stand in the view
that follows; of a death, from its first sign until the last Decide is encoded, and until all stand. Each is the median
of several, of members at random; garbage is collected between cases only. An answer of the planner is taken once,
until the view that carries it is announced. In a job of its own half of all leave at once. Exponents are fitted from 32
members on. In the same way `MemberMachine`s go through steps (steps.py). The peer is the graph in which every pair has
a link, up to 128 members.

What takes longer than `--limit-s` of CPU is told as "over N s" and counts as missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchmarks.common import Options, Result, median, run
from benchmarks.scale import steps
from benchmarks.scale.fake import StandIn
from benchmarks.scale.figures import TooLongError, at_most, exponent
from benchmarks.scale.standins import BEATS, OTHER, REPLY_S, Stage, in_batches
from chaos_lightning.membership import effects as fx
from chaos_lightning.planning.plans import DEFAULT_PLAN, read_plan
from chaos_lightning.protocol.types import Settings

SIZES = (8, 32, 128, 512, 1024, 2048)
TOLD = 2048
"""Sizes from here on have no bounds."""
FULL_UP_TO = 128
FIT_FROM, FIT_TO = 32, 1024
GRAPHS = {"default": Settings().link_degree, "full": 0}
"""Values of the setting `link_degree`."""
BEAT_BATCHES = (1, 16)
"""Heartbeats that wait when the scheduler's process looks. The larger number counts."""
TICKS = 20
HEARTBEAT_US, EXPONENT, RECORD_KB = 60.0, 1.3, 10.0
FOUNDING_S, DEATH_S, HALF_S, ANSWER_S = 20.0, 1.0, 1.0, 0.5
BOUNDED_AT = 1024
MINUTES, MINUTES_QUICK = 2.0, 0.5
HALF = "leave of half at once"
KINDS = ("founding", "join", "leave", "death", HALF)
Costs = dict[str, dict[int, float]]
"""CPU seconds by kind of event and number of members."""


def rules(size: int, degree: int, least: int = 0) -> Settings:
    """Returns the settings of a job that begins with most members and survives a few deaths; with fewer than `least` it
    waits.
    """
    return replace(
        Settings(plan=read_plan(DEFAULT_PLAN)),
        min_nodes=least or size - size // 8,
        max_nodes=size + size // 8,
        link_degree=degree,
    )


class Case:
    """A job of one size, and its measurements.

    Args:
        size: Number of members.
        degree: Number of partners that a newcomer is given; 0: all.
        seed: Seed by which the members that leave and die are drawn.
    """

    def __init__(self, size: int, degree: int, seed: int) -> None:
        self.size = size
        self.stage = Stage(rules(size, degree))
        self._rng = random.Random(seed)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.record_nbytes: list[int] = []
        """Records of views after deaths."""
        self.standing_s: list[float] = []
        """CPU of each death until all stand in its view."""

    def found(self) -> None:
        """Starts all members together, and measures the founding of the job."""
        self.stage.start(self.size)
        self._time("founding", lambda: self.stage.settled(self.size))

    def change(self) -> None:
        """Measures a join and a leave, then a join and a death."""
        for kind in ("leave", "death"):
            self._join()
            one = self._somebody()
            if kind == "leave":
                self.stage.leave(one)
                self._time(kind, lambda one=one: self.stage.settled(self.size) and not one.here)  # type: ignore[misc]
            else:
                self._die(one)

    def halve(self) -> None:
        """Measures the simultaneous leaves of half of the members of another job."""
        stage = Stage(rules(self.size, self.stage.settings.link_degree, self.size // 2))
        stage.start(self.size)
        stage.wait(lambda: stage.settled(self.size), f"a founding of {self.size} members")
        out = [stage.members[m] for m in self._rng.sample(stage.view.ids(), self.size // 2)]
        before = stage.meter.cpu_s[OTHER]
        for one in out:
            stage.leave(one)
        stays = self.size - len(out)
        stage.wait(lambda: stage.settled(stays) and not any(p.here for p in out), f"a view of {stays} members")
        self.seconds[HALF].append(stage.meter.cpu_s[OTHER] - before)

    def _join(self) -> None:
        self.stage.start(1)
        self._time("join", lambda: self.stage.settled(self.size + 1))

    def _die(self, one: StandIn) -> None:
        stage = self.stage
        records, view, since = len(stage.meter.records), stage.view.id, stage.meter.cpu_s[OTHER]
        stage.kill(one)
        self._time("death", lambda: stage.view.id > view)
        stage.wait(lambda: stage.settled(self.size), "all members in the view after a death")
        self.standing_s.append(stage.meter.cpu_s[OTHER] - since)
        self.record_nbytes += [nbytes for kind, nbytes in stage.meter.records[records:] if kind == "view"]

    def redraw(self) -> float:
        """Gives the present view a better plan; returns the scheduler's CPU seconds for taking it in."""
        stage, meter = self.stage, self.stage.meter
        stage.wait(lambda: meter.wish is not None and meter.wish.members == stage.view.members, "a request for a plan")
        assert meter.wish is not None
        plan, before = replace(stage.view.plan, trees=stage.view.plan.trees[::-1]), meter.cpu_s[OTHER]
        stage.feed([fx.PlanDrawn(meter.wish.token, plan, "drawn")], OTHER)
        seconds = meter.cpu_s[OTHER] - before
        stage.wait(lambda: stage.view.plan == plan and stage.settled(self.size), "all members in the view with a plan")
        return seconds

    def _somebody(self) -> StandIn:
        """Returns a random member."""
        return self.stage.members[self._rng.choice(self.stage.view.ids())]

    def _time(self, kind: str, ready: Callable[[], bool]) -> None:
        before = self.stage.meter.cpu_s[OTHER]
        self.stage.wait(ready, f"a {kind} of {self.size} members")
        self.seconds[kind].append(self.stage.meter.cpu_s[OTHER] - before)

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats, as the scheduler told the members."""
        return min(self.stage.members[m].interval_s for m in self.stage.view.ids())

    def heartbeat_us(self, batch: int) -> float:
        """Returns the CPU microseconds of one heartbeat if the scheduler gets them in batches of this size."""
        members = [self.stage.members[m] for m in self.stage.view.ids()]
        rounds = max(1, 256 // self.size)
        spent_s = 0.0
        for _ in range(rounds):
            spent_s += self._fed_s([fx.MessageIn(p.number, p.heartbeat()) for p in members], batch)
        return 1e6 * spent_s / (rounds * len(members))

    def tick_us(self) -> float:
        """Returns the scheduler's CPU microseconds for one periodic check of all members."""
        return 1e6 * median([self._fed_s([fx.SchedulerTick()], 1) for _ in range(TICKS)])

    def _fed_s(self, events: Sequence[fx.SchedulerEvent], batch: int) -> float:
        """Returns the scheduler's CPU seconds for these events, fed in batches of this size."""
        stage = self.stage
        before = stage.meter.cpu_s[BEATS]
        for part in in_batches(events, batch):
            stage.clock.now += REPLY_S / 10
            stage.feed(part, BEATS)
        return stage.meter.cpu_s[BEATS] - before


def parts_of(
    case: Case, result: Result, title: str, args: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the names and functions of the measurements at one size, in order."""
    size, bounded = case.size, case.size < TOLD

    def founding() -> None:
        case.found()
        bound = FOUNDING_S if size == BOUNDED_AT else None
        result.add(f"founding, {title}", case.seconds["founding"][0], "s of CPU", bound)

    def beats() -> None:
        stage, tick = case.stage, case.tick_us()
        for batch in BEAT_BATCHES:
            beat = case.heartbeat_us(batch)
            result.add(f"heartbeat, {batch} at a time, {title}", beat, "us of CPU")
        result.add(f"tick, {title}", tick, "us of CPU")
        shared = beat + tick * case.interval_s / stage.machine.tick_interval_s / size
        result.add(
            f"heartbeat with its part of the ticks, {title}", shared, "us of CPU", HEARTBEAT_US if bounded else None
        )
        result.add(
            f"heartbeats and ticks, every {case.interval_s:g} s, {title}",
            1e-6 * size * shared / case.interval_s,
            "cores",
        )

    def changes() -> None:
        for _ in range(args.rounds):
            case.change()
        for kind in ("join", "leave", "death"):
            bound = DEATH_S if kind == "death" and size == BOUNDED_AT else None
            result.add(f"{kind}, {title}", median(case.seconds[kind]), "s of CPU", bound)
        result.add(f"death until all stand, {title}", median(case.standing_s), "s of CPU")
        bound = RECORD_KB if size == BOUNDED_AT else None
        largest = max(case.record_nbytes) / 1e3
        result.add(f"record of a death's view, largest of {args.rounds}, {title}", largest, "kB", bound)
        whole = max(nbytes for _, nbytes in case.stage.meter.records)
        result.add(f"record of a whole view, {title}", whole / 1e3, "kB")

    def better() -> None:
        if case.stage.view.plan.trees:  # else every pair has a link, and nothing is asked for
            bound = ANSWER_S if size == BOUNDED_AT else None
            result.add(f"answer of the planner, until its view is announced, {title}", case.redraw(), "s of CPU", bound)

    def status() -> None:
        began = time.thread_time()
        nbytes = len(json.dumps(case.stage.machine.snapshot(), default=str))
        result.add(f"status, {title}", time.thread_time() - began, "s of CPU")
        result.add(f"size of a status, {title}", nbytes / 1e3, "kB")

    def control() -> None:
        steps.measure(result, case.stage.view, title, bounded=size == BOUNDED_AT)

    def half() -> None:
        case.halve()
        bound = HALF_S if size == BOUNDED_AT else None
        result.add(f"{HALF}, {title}", case.seconds[HALF][0], "s of CPU", bound)

    yield "founding", founding
    yield "heartbeats", beats
    yield "a join, a leave and a death", changes
    yield "a better plan", better
    yield "status", status
    yield "control of a step", control
    yield HALF, half


def measure_size(result: Result, size: int, graph: str, args: argparse.Namespace) -> dict[str, float]:
    """Measures one job, from its founding to its steps; returns CPU seconds by kind of event."""
    title = f"{size} members, {graph} graph"
    case = Case(size, GRAPHS[graph], args.seed)
    gc.collect()
    gc.disable()
    try:
        for what, measure in parts_of(case, result, title, args):
            try:
                with at_most(args.limit_s):
                    measure()
            except TooLongError as error:
                untold = result.remark if size >= TOLD or graph != "default" else None
                words = f"{what}, {title}"
                untold(f"{words}: {error}") if untold else result.leave_out(words, str(error))
                break  # what follows needs it
    finally:
        gc.enable()
    result.details[f"messages, {title}"] = dict(case.stage.meter.said)
    result.details[f"bytes of different messages, {title}"] = case.stage.meter.sent_nbytes
    return {kind: median(found) for kind, found in case.seconds.items()}


def fit(result: Result, costs: Costs) -> None:
    """Adds the exponents by which costs grow with the number of members, where they are known."""
    for kind in KINDS:
        known = {n: c for n, c in costs.get(kind, {}).items() if FIT_FROM <= n <= FIT_TO and c > 0}
        if len(known) > 1:
            title = f"exponent of a {kind}, {min(known)} to {max(known)} members"
            result.add(title, exponent(known), "power", EXPONENT)


def measure(result: Result, args: argparse.Namespace) -> None:
    """Measures jobs of all sizes, each with every graph of links."""
    for graph in GRAPHS:
        costs: Costs = defaultdict(dict)
        for size in sizes(args):
            if graph == "full" and size > FULL_UP_TO:
                continue
            print(f" {size} members, {graph} graph", flush=True)
            for kind, seconds in measure_size(result, size, graph, args).items():
                costs[kind][size] = seconds
        if graph == "default":
            fit(result, costs)
        result.details[f"CPU seconds, {graph} graph"] = dict(costs)


def minutes(args: argparse.Namespace) -> float:
    """Returns the minutes that this part of the benchmark should take."""
    return MINUTES_QUICK if args.quick else MINUTES


def options(p: Options) -> None:
    """Adds the command-line options of this part of the benchmark."""
    p.add_argument("--sizes", type=int, nargs="*", default=[], help="of jobs; none: 8 to 2048, or to 128 with --quick")
    p.add_count("--rounds", 3, 1, "joins, leaves and deaths at each size")
    p.add_argument("--limit-s", type=float, default=90.0, help="most CPU for one kind of event at one size")


def sizes(args: argparse.Namespace) -> list[int]:
    """Returns the sizes that were given, or as many as the time allows."""
    return args.sizes or [n for n in SIZES if not args.quick or n <= FULL_UP_TO]


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_seed("of who joins, leaves and dies")
    options(p)
    args = p.parse_args()
    result = Result("scale, machine")
    measure(result, args)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
