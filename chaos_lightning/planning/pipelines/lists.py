"""Writes instruction lists for pipelines that share micro-batches, by an event-driven greedy scheduler over all their
devices.

Theory of operation. A device that is free takes a unit of what has arrived: a backward unit before a forward unit, or
the other way round; among forward units that of the micro-batch which is the oldest at home, guests a little later, or
earlier. Rules are cheap, so several are tried and the best run is kept. A forward unit begins only if the device then
keeps the activations of no more micro-batches than 1F1B would (p - k at stage k of p), plus a given number, and if they
fit into its memory. Several such numbers are tried, too: rerouted work needs more than 1F1B's to fill bubbles, which
formulas of the paper overlook. A unit may be offered to several owners; the first that is free and has room takes it,
until it has as much to do as the others (`rerouting` searches so).

Where backward passes are split, the weights' half waits until nothing else can run (ReCycle, arXiv 2405.14009, section
4.2; ZB-H1, arXiv 2401.10241, section 2.2). The caps are those of ZB-H1: p - k forward passes whose input's half is not
done, p whose weights' half is not done.

It ends. Where devices come in an order in which all routes pass them, the last one's micro-batches always go back, so
room appears at the one before, and so on. Pipelines that are cut differently may lack such an order. There a run can
stand still; it is done again with micro-batches that enter only when every device of their route has room for them,
and that are never held up on their way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from chaos_lightning.planning.pipelines.job import MemoryUse, TrainingJob, stage_memory
from chaos_lightning.planning.pipelines.plan import VACANT, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.schedules import Instruction, one_f_one_b
from chaos_lightning.planning.pipelines.timing import ScheduleRun, Span

CAPS = (0, 1, 2, 4, 8, 16)
"""Numbers of micro-batches in flight beyond those of 1F1B that are tried where memory allows."""

QUICK_CAPS = ((250, (1, 4)), (math.inf, (4,)))
"""Numbers in flight beyond 1F1B's that quick runs try, by the number of units up to which these are tried. Steps are
0.8% and 1.1% longer than the best of all runs.
"""

FEW = 12_000
"""Number of units, over all runs, up to which every rule is tried with every cap."""

SAME_S = 1e-9
"""Relative difference of two times below which events count as simultaneous: sums of the same times in another
order.
"""


class Unit(NamedTuple):
    """Unit of work: forward and backward pass of a micro-batch through the layers up to `end` on one worker."""

    worker: int
    end: int
    forward_s: float
    backward_s: float
    input_s: float
    """Seconds of the part of the backward pass that the stage before waits for where the pass is split."""
    nbytes: int = 0
    """Bytes of activations."""
    kept_nbytes: int = 0
    """Bytes of boundary tensors, from the assignment to the end of the step."""

    @property
    def work_s(self) -> float:
        return self.forward_s + self.backward_s


class Capacity(NamedTuple):
    """Limits on the micro-batches in flight at a device, in number and bytes."""

    cap: int
    """Most forward passes without their backward pass, or without its input's half: those of 1F1B."""
    stages: int
    """Most forward passes without the weights' half, where backward passes are split."""
    room_nbytes: float = math.inf
    """Bytes for activations and boundary tensors."""


Way = Mapping[int, Sequence[Unit]]
"""Units that may begin at each layer, for one micro-batch; the first unit begins at 0."""


class Rule(NamedTuple):
    """Rule by which a free device chooses among the passes that have arrived."""

    later: float
    """Number that is added to a guest's turn; forward units take turns by their number at home."""
    forward_first: bool = False
    """Whether a forward unit comes before a backward unit where the cap has room for it."""


RULES = (Rule(0.5, forward_first=True), Rule(0.5), Rule(0.0), Rule(2.5), Rule(-math.inf, forward_first=True))
"""Rules that are tried. Over many losses these reach what a dozen do; the first one alone comes within 1%."""


@dataclass(frozen=True)
class SharedStep:
    """Passes of one step that are to be scheduled, with the limits of the workers.

    Micro-batches are numbered from 0; `ranks` are their numbers at home, by which they take turns.
    """

    layers: int
    workers: Sequence[Capacity]
    ways: Sequence[Way]
    ranks: Sequence[int]
    guests: Sequence[bool]
    """Whether some layers of each micro-batch run elsewhere than at home."""
    hop_s: Callable[[int, int, int], float]
    """Function of sending worker, receiving worker and layer: seconds of a tensor's hop."""

    @cached_property
    def fixed_s(self) -> list[float]:
        """Seconds of work of each worker that no other worker may take."""
        found = [0.0] * len(self.workers)
        for way in self.ways:
            for units in way.values():
                if len(units) == 1:
                    found[units[0].worker] += units[0].work_s
        return found

    @cached_property
    def levels_s(self) -> dict[int, float]:
        """Most seconds of work that a worker may have when it takes a pass that several may run, by the pass's first
        layer.
        """
        load = list(self.fixed_s)
        asked: dict[int, set[int]] = defaultdict(set)
        for way in self.ways:
            for first, units in way.items():
                if len(units) > 1:
                    one = min(units, key=lambda u: load[u.worker] + u.work_s)
                    load[one.worker] += one.work_s
                    asked[first].update(u.worker for u in units)
        return {first: max(load[w] for w in workers) for first, workers in asked.items()}


@dataclass(frozen=True, slots=True)
class Ran:
    """Simulated run of all passes of a step: start, end and worker of each."""

    rows: Sequence[Sequence[tuple[int, str, int, float, float]]]
    """Instructions of each worker: stage, kind and micro-batch, start and end in seconds."""
    routes: Sequence[Sequence[Unit]]
    """Units that each micro-batch went through."""
    peaks: Sequence[int]
    """Most bytes of activations at once, by worker."""
    held: Sequence[int]
    """Most micro-batches whose activations are there at once, by worker."""

    @property
    def timeline(self) -> ScheduleRun:
        return ScheduleRun(tuple(tuple(Span(Instruction(k, x, j), a, b) for k, x, j, a, b in row) for row in self.rows))

    @property
    def lists(self) -> list[list[Instruction]]:
        return [[Instruction(k, x, j) for k, x, j, _, _ in row] for row in self.rows]

    @property
    def ends_s(self) -> list[float]:
        """Second at which each worker's last unit ends."""
        return [row[-1][-1] if row else 0.0 for row in self.rows]

    @property
    def end_s(self) -> float:
        return max(self.ends_s, default=0.0)


def least_s(problem: SharedStep, *, split: bool = False) -> float:
    """Returns a lower bound of the seconds of a run: for each worker, its work and the way of a micro-batch to it (and
    back, unless backward passes are split).
    """
    work, before, behind = ([0.0] * len(problem.workers) for _ in range(3))
    for way in problem.ways:
        if any(len(units) > 1 for units in way.values()):
            continue
        head = tail = 0.0
        last: Unit | None = None
        for _, (unit,) in sorted(way.items()):
            w = unit.worker
            if last is not None:
                hop = problem.hop_s(last.worker, w, last.end)
                head, tail = head + hop, tail + hop
            before[w], behind[w] = (min(head, before[w]), min(tail, behind[w])) if work[w] else (head, tail)
            work[w] += unit.work_s
            head, tail, last = head + unit.forward_s, tail + unit.backward_s, unit
    return max((a + b + (0.0 if split else c) for a, b, c in zip(before, work, behind, strict=True)), default=0.0)


def best(
    problem: SharedStep, rules: Sequence[Rule] = RULES, caps: Sequence[int] = CAPS, *, split: bool = False
) -> Ran | None:
    """Returns the shortest run among those with the given rules and caps on micro-batches in flight; for large problems
    only some combinations are tried.

    Args:
        problem: Step to be run.
        rules: Rules to try; of equally short runs the first one's is kept.
        caps: Numbers of micro-batches in flight beyond 1F1B's, rising.
        split: Whether backward passes are split.

    Returns:
        None if all runs stood still, because no order of devices fits the ways that are offered.
    """
    found: tuple[float, int, Ran] | None = None
    least = least_s(problem, split=split) * (1 + SAME_S)
    few = len(rules) * len(caps) * sum(map(len, problem.ways)) <= FEW
    for at, rule in enumerate(rules):
        # The first rule finds the cap, the others are tried with that one: with the least where all stood still.
        for cap in caps if few or not at else (found[1] if found else caps[0],):
            ran = run_greedily(problem, rule, cap, split=split)
            if ran is None:
                continue
            if found is None or ran.end_s < found[0] * (1 - SAME_S):
                found = (ran.end_s, cap, ran)
            if found[0] <= least:
                return found[2]
            if all(h < w.cap + cap for h, w in zip(ran.held, problem.workers, strict=True)):
                break  # no device was held up by its cap
    return None if found is None else found[2]


def run_greedily(problem: SharedStep, rule: Rule, extra: int, *, split: bool = False) -> Ran | None:
    """Returns one greedy run of the step; None if it deadlocks in a step in which several workers may run the same
    pass.
    """
    for booked in (False, True):
        run = _Run(problem, rule, extra, split=split, booked=booked)
        if run.run():
            return run.ran()
        if any(len(units) > 1 for way in problem.ways for units in way.values()):
            return None
    raise AssertionError("a micro-batch that enters with room on all its way is never held up")


class _Run:
    """State of a greedy run under way.

    Args:
        problem: Step that is run.
        rule: One of `RULES`.
        extra: Micro-batches in flight beyond 1F1B's.
        split: Whether backward passes are split.
        booked: Whether a micro-batch enters only with room on all its way.
    """

    def __init__(self, problem: SharedStep, rule: Rule, extra: int, *, split: bool, booked: bool) -> None:
        self.problem, self.split, self.booked = problem, split, booked
        workers, ways = problem.workers, problem.ways
        among = zip(problem.guests, problem.ranks, strict=True)
        self.turns = [(rank + rule.later if guest else rank, j) for j, (guest, rank) in enumerate(among)]
        self.forward_first = rule.forward_first
        self.caps = [w.cap + extra for w in workers]
        self.most = [(w.stages if split else w.cap) + extra for w in workers]
        self.room = [w.room_nbytes for w in workers]
        self.load_s = list(problem.fixed_s)
        self.routes: list[list[Unit]] = [[] for _ in ways]
        self.done = 0
        # Units that have arrived and wait, by worker.
        self.back: list[list[tuple[int, int, int]]] = [[] for _ in workers]
        self.forward: list[list[tuple[int, float, int, int, Unit, bool]]] = [[] for _ in workers]
        self.weights: list[list[tuple[int, int, int]]] = [[] for _ in workers]
        # Units and bytes in flight now, and the most that ever were, by worker.
        self.busy = [False] * len(workers)
        self.open, self.held, self.nbytes = ([0] * len(workers) for _ in range(3))
        self.most_held, self.peaks = ([0] * len(workers) for _ in range(2))
        self.rows: list[list[tuple[int, str, int, float, float]]] = [[] for _ in workers]
        self.touched: set[int] = set()
        self.events: list[tuple[float, int, int, str, int, int, Unit | None, bool]] = []
        self.number = 0
        for way in ways:
            for units in way.values():
                if len(units) == 1:
                    self.room[units[0].worker] -= units[0].kept_nbytes

    def ran(self) -> Ran:
        return Ran(self.rows, self.routes, self.peaks, self.most_held)

    def run(self) -> bool:
        """Runs all events; returns whether every micro-batch got through (no deadlock)."""
        for j in range(len(self.problem.ways)):
            self._offer(j, 0.0)
        now, events, touched = 0.0, self.events, self.touched
        while events or touched:
            until = (events[0][0] if events and not touched else now) * (1 + SAME_S)
            while events and events[0][0] <= until:
                now, _, worker, what, j, k, unit, offered = heappop(events)
                if unit is not None:
                    self._arrive(j, k, unit, offered)
                elif what == "back":
                    self._arrive_back(worker, j, k)
                else:
                    touched.add(worker)
                    self._end(now, worker, what, j, k)
            free = sorted(range(len(self.busy)) if self.booked else touched, key=self._turn)
            touched.clear()
            for worker in free:
                if not self.busy[worker]:
                    self._next(now, worker)
        return self.done == len(self.problem.ways)

    def _arrive(self, j: int, k: int, unit: Unit, offered: bool) -> None:
        self.touched.add(unit.worker)
        # A micro-batch that has booked its way is not held up by one that has not.
        heappush(self.forward[unit.worker], (-k if self.booked else 0, *self.turns[j], k, unit, offered))

    def _arrive_back(self, worker: int, j: int, k: int) -> None:
        self.touched.add(worker)
        heappush(self.back[worker], (self.problem.ranks[j], j, k))

    def _turn(self, worker: int) -> tuple[float, int]:
        return (self.load_s[worker], worker)

    def _at(self, time_s: float, worker: int, what: str, j: int, k: int, unit: Unit | None, offered: bool) -> None:
        self.number += 1
        heappush(self.events, (time_s, self.number, worker, what, j, k, unit, offered))

    def _offer(self, j: int, now: float) -> None:
        """Offers the next forward pass of a micro-batch to all workers that may run it."""
        route = self.routes[j]
        units = self.problem.ways[j][route[-1].end if route else 0]
        for unit in units:
            hop = self.problem.hop_s(route[-1].worker, unit.worker, route[-1].end) if route else 0.0
            if hop:
                self._at(now + hop, unit.worker, "", j, len(route), unit, len(units) > 1)
            else:
                self._arrive(j, len(route), unit, len(units) > 1)

    def _next(self, now: float, worker: int) -> None:
        """Starts the next pass at a free worker, if one can start."""
        if self.forward_first and self._next_forward(now, worker):
            return
        if self.back[worker]:
            _, j, k = heappop(self.back[worker])
            unit = self.routes[j][k]
            self._start(now, worker, "I" if self.split else "B", j, k, unit.input_s if self.split else unit.backward_s)
        elif not self._next_forward(now, worker) and self.weights[worker]:
            _, j, k = heappop(self.weights[worker])
            unit = self.routes[j][k]
            self._start(now, worker, "W", j, k, unit.backward_s - unit.input_s)

    def _next_forward(self, now: float, worker: int) -> bool:
        """Starts the first forward pass that has arrived, if the worker has room for it; returns whether it started."""
        waiting = self.forward[worker]
        while waiting:
            _, _, j, k, unit, offered = waiting[0]
            if len(self.routes[j]) > k or (offered and self._is_full(j, unit)):
                heappop(waiting)  # another worker has taken the unit, or this one has its share
                continue
            if not self._fits(j, k, unit, offered):
                return False
            heappop(waiting)
            self._begin(now, j, k, unit, offered)
            return True
        return False

    def _fits(self, j: int, k: int, unit: Unit, offered: bool) -> bool:
        if self.booked:
            way = self.problem.ways[j]
            return k > 0 or all(self._has_room(units[0], False) for units in way.values())
        return self._has_room(unit, offered)

    def _is_full(self, j: int, unit: Unit) -> bool:
        route = self.routes[j]
        level = self.problem.levels_s[route[-1].end if route else 0]
        return self.load_s[unit.worker] + unit.work_s > level * (1 + SAME_S)

    def _has_room(self, unit: Unit, offered: bool) -> bool:
        w = unit.worker
        if not self.held[w] and not offered:
            return True  # a unit that does not fit alone never will, so it runs; the peak shows what it lacks
        need = self.nbytes[w] + unit.nbytes + (unit.kept_nbytes if offered else 0)
        return self.open[w] < self.caps[w] and self.held[w] < self.most[w] and need <= self.room[w]

    def _begin(self, now: float, j: int, k: int, unit: Unit, offered: bool) -> None:
        if offered:
            self.load_s[unit.worker] += unit.work_s
            self.room[unit.worker] -= unit.kept_nbytes
        for x in [unit] if not self.booked else [u[0] for u in self.problem.ways[j].values()] if k == 0 else []:
            w = x.worker
            self.open[w] += 1
            self.held[w] += 1
            self.nbytes[w] += x.nbytes
            self.peaks[w] = max(self.peaks[w], self.nbytes[w])
            self.most_held[w] = max(self.most_held[w], self.held[w])
        self.routes[j].append(unit)
        self._start(now, unit.worker, "F", j, k, unit.forward_s)

    def _start(self, now: float, worker: int, kind: str, j: int, k: int, time_s: float) -> None:
        self.busy[worker] = True
        self.rows[worker].append((k, kind, j, now, now + time_s))
        self._at(now + time_s, worker, kind, j, k, None, False)

    def _end(self, now: float, worker: int, kind: str, j: int, k: int) -> None:
        self.busy[worker] = False
        route = self.routes[j]
        if kind == "F":
            if route[k].end == self.problem.layers:
                self._arrive_back(worker, j, k)
            else:
                self._offer(j, now)
            return
        if kind in "BI":
            self.open[worker] -= 1
            if k:
                before = route[k - 1]
                hop = self.problem.hop_s(before.worker, worker, before.end)
                if hop:
                    self._at(now + hop, before.worker, "back", j, k - 1, None, False)
                else:
                    self._arrive_back(before.worker, j, k - 1)
            else:
                self.done += 1
        if kind == "I":
            heappush(self.weights[worker], (self.problem.ranks[j], j, k))
        else:
            self.held[worker] -= 1
            self.nbytes[worker] -= route[k].nbytes


# ------------------------------------------------------------------------------------------------ of plans


class Fleet:
    """Devices of some of a plan's pipelines, as workers of the scheduler.

    Args:
        job: The job; it has all devices of the plan.
        plan: Plan that was checked; vacant places are allowed where `problem` is told which devices may stand in.
        pipelines: Numbers of the pipelines. Detours lead to their devices.
    """

    def __init__(self, job: TrainingJob, plan: PipelinePlan, pipelines: Sequence[int]) -> None:
        self.job, self.plan = job, plan
        rows = [plan.pipelines[q].stages for q in pipelines]
        self.places = {s.device: (k, len(row)) for row in rows for k, s in enumerate(row) if s.device != VACANT}
        self.names = tuple(self.places)
        self.numbers = {name: i for i, name in enumerate(self.names)}
        self.starts = [0]
        for p in plan.pipelines:
            self.starts.append(self.starts[-1] + p.micro_batches)
        at_home = [(j, j - self.starts[q]) for q in pipelines for j in range(self.starts[q], self.starts[q + 1])]
        self.micro_batches, self.ranks = [j for j, _ in at_home], [rank for _, rank in at_home]
        self._units: dict[tuple[str, int, int], Unit] = {}
        self._hops: dict[tuple[int, int, int], float] = {}

    def problem(self, owners: Mapping[int, Sequence[str]] | None = None) -> SharedStep:
        """Returns the scheduling problem of one step of these pipelines.

        Args:
            owners: Devices that may run a group of layers where a place is vacant, by the group's first layer.
        """
        ways: dict[tuple[PlanStage, ...], Way] = {}
        rows, guests = [], []
        away = {d.micro_batch for d in self.plan.detours}
        for j in self.micro_batches:
            route = self.plan.route(j)
            if route not in ways:
                ways[route] = self._way(route, owners or {})
            rows.append(ways[route])
            guests.append(j in away or any(s.device == VACANT for s in route))
        workers = [self._capacity(name) for name in self.names]
        return SharedStep(self.plan.layer_count, workers, rows, self.ranks, guests, self._hop_s)

    def _way(self, route: Sequence[PlanStage], owners: Mapping[int, Sequence[str]]) -> Way:
        way: dict[int, Sequence[Unit]] = {}
        for s in route:
            if s.device != VACANT:
                way[s.first] = (self.unit(*s),)
                continue
            starts = {s.first}
            for first in self.plan.borders:
                if first in starts:
                    ends = {name: self._until(name, first, s.end, owners) for name in owners[first]}
                    way[first] = [self.unit(name, first, end) for name, end in ends.items()]
                    starts.update(end for end in ends.values() if end < s.end)
        return way

    def _until(self, name: str, first: int, end: int, owners: Mapping[int, Sequence[str]]) -> int:
        """Returns the layer at which a run of consecutive layers that the device owns, starting with `first`, ends."""
        return next((b for b in self.plan.borders if first < b < end and name not in owners[b]), end)

    def unit(self, name: str, first: int, end: int) -> Unit:
        key = (name, first, end)
        if key not in self._units:
            c, o, v = self.job.costs, self.job.overheads, self.job.by_name[name].speed
            use = stage_memory(self.job, first, end, 1, 1)
            self._units[key] = Unit(
                self.numbers[name],
                end,
                (c.forward[end] - c.forward[first]) / v + o.unit_s,
                (c.backward[end] - c.backward[first]) / v + o.unit_s,
                (c.backward_input[end] - c.backward_input[first]) / v + o.unit_s / 2,
                use.activations,
                use.boundaries,
            )
        return self._units[key]

    def _hop_s(self, a: int, b: int, layer: int) -> float:
        key = (a, b, layer)
        if key not in self._hops:
            link = self.job.link(self.names[a], self.names[b])
            nbytes = self.job.costs.boundary_out(layer)
            self._hops[key] = 0.0 if a == b else self.job.overheads.hop_s + link.time_s(nbytes)
        return self._hops[key]

    def _capacity(self, name: str) -> Capacity:
        (k, stages), extra = self.places[name], self.plan.in_flight_extra
        room = self.job.by_name[name].memory_nbytes - self._fixed(name).nbytes
        return Capacity(stages - k + extra, stages + extra, room)

    def _fixed(self, name: str) -> MemoryUse:
        """Returns the memory that a device needs beside activations and boundary tensors."""
        (stage,) = self.plan.stages[name]
        return stage_memory(self.job, stage.first, stage.end, 0, 0)

    def memory(self, ran: Ran) -> dict[str, MemoryUse]:
        """Returns the peak memory of each device in a run."""
        boundaries = [0] * len(self.names)
        for unit in (u for route in ran.routes for u in route):
            boundaries[unit.worker] += unit.kept_nbytes
        return {
            name: replace(self._fixed(name), activations=ran.peaks[i], boundaries=boundaries[i])
            for i, name in enumerate(self.names)
        }


def coupled(plan: PipelinePlan) -> list[int]:
    """Returns the pipelines that share micro-batches: their devices run passes for others, or others run passes for
    them.
    """
    hosts = {d.device for d in plan.detours}
    left = {plan.homes[d.micro_batch] for d in plan.detours}
    return [
        q
        for q, p in enumerate(plan.pipelines)
        if q in left or any(s.device == VACANT or s.device in hosts for s in p.stages)
    ]


@dataclass(frozen=True, slots=True)
class PlanLists:
    """Instruction lists of all devices of a plan for one step."""

    workers: tuple[str, ...]
    lists: tuple[tuple[Instruction, ...], ...]
    """Instruction list of each worker. A stage is an index into the micro-batch's own route."""
    routes: tuple[tuple[int, ...], ...]
    """Workers of each micro-batch."""


def plan_lists(plan: PipelinePlan, fleet: Fleet, ran: Ran) -> PlanLists:
    """Returns the instruction lists of a plan: those of `ran` for pipelines that share micro-batches, and 1F1B for all
    others.

    Args:
        plan: Plan that was checked.
        fleet: The devices of the pipelines that share micro-batches.
        ran: Run of these devices.
    """
    together = coupled(plan)
    names = list(fleet.names)
    lists = [[x._replace(micro_batch=fleet.micro_batches[x.micro_batch]) for x in row] for row in ran.lists]
    routes = {j: tuple(u.worker for u in route) for j, route in zip(fleet.micro_batches, ran.routes, strict=True)}
    for q in sorted(set(range(len(plan.pipelines))) - set(together)):
        p, start = plan.pipelines[q], fleet.starts[q]
        mine = tuple(range(len(names), len(names) + len(p.stages)))
        names += [s.device for s in p.stages]
        for row in one_f_one_b(len(p.stages), p.micro_batches, plan.in_flight_extra):
            lists.append([x._replace(micro_batch=start + x.micro_batch) for x in row])
        routes |= dict.fromkeys(range(start, start + p.micro_batches), mine)
    return PlanLists(tuple(names), tuple(map(tuple, lists)), tuple(routes[j] for j in range(plan.micro_batches)))


def run_coupled(
    job: TrainingJob,
    plan: PipelinePlan,
    pipelines: Sequence[int],
    *,
    split: bool = False,
    caps: Sequence[int] = CAPS,
    quick: bool = False,
) -> tuple[Fleet, Ran]:
    """Returns the shortest run found for pipelines that share micro-batches, with each pass on the device that the plan
    names.

    Args:
        job: The job; it has all devices of the plan.
        plan: Plan that was checked.
        pipelines: Numbers of the pipelines.
        split: Whether backward passes are split.
        caps: Numbers of micro-batches in flight beyond 1F1B's that are tried, as memory allows.
        quick: Whether the best rule alone is tried, and few caps instead of `caps`.
    """
    fleet = Fleet(job, plan, pipelines)
    problem = fleet.problem()
    rules: Sequence[Rule] = RULES
    if quick:
        units = sum(map(len, problem.ways))
        rules, caps = RULES[:1], next(found for most, found in QUICK_CAPS if units <= most)
    ran = best(problem, rules, caps, split=split)
    assert ran is not None, "where every unit has one owner, room can be booked ahead"
    return fleet, ran
