"""A plan for devices or links that are not alike: a search from several starts, with its gap to a lower bound.

Theory of operation. Who shares a pipeline with whom, in which order, is a set of rows of devices; for given rows the
cuts (`cuts.DeviceRow`) and the split of the micro-batches (`split`) follow. The problem is NP-hard (it holds number
partitioning), so rows are searched. Starts are the lengths of the best plan for as many devices of the mean speed, and
all others where devices are few. Devices are sorted by speed and put into rows next to their like, so that stages are
even, or dealt out in turn, so that rows are; of each row the better order is taken. Then, as long as that helps and the
budget of looks lasts: two devices change places, one moves to another row or becomes idle, or a row is cut in two,
those of the row that the step waits for first. Looks take cuts that are found at once; what is chosen in the end gets
the best ones.

No plan takes less than all work over all speeds, than one micro-batch on the fastest device, and than the work of the
largest layer over the speeds of as many devices as can own it at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from chaos_lightning.planning.pipelines.cuts import Cutter, DeviceRow, Tables
from chaos_lightning.planning.pipelines.equal import Shapes
from chaos_lightning.planning.pipelines.job import Device, LinkRate, TrainingJob, stage_memory
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.split import Filling, Splitter

SMALL = 10
"""Devices: for no more than so many, all lengths of pipelines are starts."""
LOOKS = 600
"""Plans that are looked at while one start is improved, where devices are few."""
LOOKS_MANY = 30
"""The same where they are many."""
STARTS = 4
"""Starts that are improved, where devices are few; one where they are many."""
LEVELS = 4
"""Sizes of memory, the largest ones: starts leave out devices that have less."""
EVEN = 1.05
"""Rows whose speeds differ by no more than this ratio are in order as they are."""
ROWS = 40
"""Pipelines: for no more than so many the best cuts are searched in the end."""

Names = tuple[str, ...]
"""A row: devices in order."""


class Mixed:
    """Searches a plan for a job whose devices or links are not alike.

    Args:
        job: The job, on all devices that are there.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job, self.tables = job, Tables(job)
        self.order = sorted(job.devices, key=lambda d: (-d.speed, -d.memory_nbytes, d.place, d.name))
        self.speeds = sum(d.speed for d in job.devices)
        self.reduce = _slowest(job)
        self._rows: dict[tuple[tuple[float, float], ...], DeviceRow] = {}
        self._named: dict[Names, DeviceRow] = {}
        self._lines: dict[int, tuple[int, float, float]] = {}
        self._quick: dict[tuple[int, int, int], float] = {}

    # ------------------------------------------------------------------------------------------------ rows

    def row(self, names: Names) -> DeviceRow:
        """The row of these devices; those of one kind share it."""
        found = self._named.get(names)
        if found is None:
            devices = [self.job.by_name[n] for n in names]
            hops = [self.job.link(a, b) for a, b in pairwise(names)]
            key = (*(d.kind for d in devices), (0.0, 0.0), *(h.kind for h in hops))
            found = self._rows.get(key)
            if found is None:
                found = self._rows[key] = DeviceRow(self.tables, devices, hops, self.reduce)
            self._named[names] = found
        return found

    def time_s(self, names: Names, m: int, pipelines: int) -> float:
        """With the best cut."""
        cut = self.row(names).best(m, pipelines)
        return math.inf if cut is None else cut.charged_s

    def quick_s(self, names: Names, m: int, pipelines: int) -> float:
        """With a cut that is found at once."""
        row = self.row(names)
        key = (id(row), m, pipelines)
        if key not in self._quick:
            at = row.quick(m)
            self._quick[key] = row.charge(at, m, pipelines).charged_s if at else math.inf
        return self._quick[key]

    def line_s(self, names: Names, m: int, pipelines: int) -> float:
        """About `quick_s`: as linear in m, by two numbers around the row's share."""
        row = self.row(names)
        line = self._lines.get(id(row))
        if line is None:
            share = self._share(names)
            few, many = max(1, int(0.8 * share)), max(2, math.ceil(1.2 * share))
            slow = self.quick_s(names, few, pipelines)
            line = self._lines[id(row)] = (few, slow, (self.quick_s(names, many, pipelines) - slow) / (many - few))
        few, slow, slope = line
        found = slow + slope * (m - few)
        return found if math.isfinite(found) else self.quick_s(names, m, pipelines)

    def _share(self, names: Names) -> float:
        """Micro-batches in proportion to speed."""
        by_name = self.job.by_name
        return self.job.micro_batches * sum(by_name[n].speed for n in names) / self.speeds

    # ------------------------------------------------------------------------------------------------ answers

    def search(self, *, improve: bool = True) -> tuple[PipelinePlan, float, float] | None:
        """The best plan that was found.

        Args:
            improve: Move devices about; False: take the best start.

        Returns:
            The plan, what it is charged in seconds, and a lower bound of any plan; None where none was found that fits.
        """
        looked: list[tuple[float, tuple[Names, ...]]] = []
        for rows in dict.fromkeys(self._starts()):
            found = self._value(rows)
            if found is not None:
                looked.append((found.time_s, rows))
        looked.sort()
        best: tuple[float, tuple[Names, ...]] | None = None
        many = len(self.order) > SMALL
        for _, rows in looked[: STARTS if improve and not many else 1]:
            improved = self._improve(rows) if improve else (looked[0][0], rows)
            best = improved if best is None else min(best, improved)
        if best is None:
            return None
        # The best cuts cost a search for each row and number of micro-batches.
        filling = self._splitter(self.quick_s if len(best[1]) > ROWS else self.time_s).over(best[1], best[0])
        assert filling is not None
        return self._plan(filling), filling.time_s, self.bound_s()

    def bound_s(self) -> float:
        """No plan takes less."""
        job = self.job
        both = self.tables.at_speed(1.0).both
        least = min(stage_memory(job, i, i + 1, 1, 1).nbytes for i in range(job.costs.count))
        # A device that has no room for any layer adds nothing.
        speeds = sorted((d.speed for d in job.devices if d.memory_nbytes >= least), reverse=True)
        largest = max(b - a for a, b in pairwise(both))
        owners = len(speeds) // self._shortest()
        work = job.micro_batches * both[-1] / sum(speeds)
        return max(work, both[-1] / speeds[0], job.micro_batches * largest / sum(speeds[: max(1, owners)]))

    def _shortest(self) -> int:
        """Stages of the shortest pipeline that memory allows, of the devices with most memory."""
        most = max(self.job.devices, key=lambda d: d.memory_nbytes)
        cutter = Cutter(self.job, most, LinkRate(), LinkRate())
        top = min(len(self.job.devices), self.job.costs.count)
        return next((p for p in range(1, top + 1) if math.isfinite(cutter.row(p).bound_s(1, 1))), top)

    def _plan(self, filling: Filling[Names]) -> PipelinePlan:
        pipelines, count = [], len(filling.pairs)
        for names, m in sorted(filling.pairs, key=lambda x: (-len(x[0]), x[0])):
            row = self.row(names)
            best = row.best(m, count) if count <= ROWS else None
            at = best.at if best else row.quick(m)
            assert at is not None
            stages = tuple(PlanStage(n, x, y) for n, (x, y) in zip(names, pairwise(at), strict=True))
            pipelines.append(Pipeline(stages, m))
        used = {n for names, _ in filling.pairs for n in names}
        idle = tuple(sorted(d.name for d in self.job.devices if d.name not in used))
        extra = self.job.memory.in_flight_extra
        return PipelinePlan(self.job.costs.count, tuple(pipelines), idle=idle, in_flight_extra=extra)

    def _value(self, rows: Sequence[Names]) -> Filling[Names] | None:
        time_s = self.quick_s if len(self.order) <= SMALL else self.line_s
        return self._splitter(time_s).over(rows) if rows else None

    def _splitter(self, time_s: Callable[[Names, int, int], float]) -> Splitter[Names]:
        return Splitter(time_s, self.job.micro_batches, lambda names, _: round(self._share(names)))

    # ------------------------------------------------------------------------------------------------ starts

    def _starts(self) -> Iterator[tuple[Names, ...]]:
        few = len(self.order) <= SMALL
        for devices, lengths in self._lengths():
            chosen = devices[: sum(lengths)]
            yield self._ordered(_next_to_like(chosen, lengths))
            if few:
                yield self._ordered(_next_to_like(chosen, lengths[::-1]))
                yield self._ordered(_dealt(chosen, lengths))

    def _lengths(self) -> Iterator[tuple[list[Device], tuple[int, ...]]]:
        """Devices, fast ones first, and lengths of pipelines of the first of them."""
        job, count = self.job, len(self.order)
        if count <= SMALL:
            top = min(count, job.costs.count)
            for used in range(count, 0, -1):
                for lengths in partitions(used, top, job.micro_batches):
                    yield self.order, lengths
            return
        # All devices as if each had the mean memory; and those with much memory, as if each had their least.
        levels = sorted({d.memory_nbytes for d in self.order})[-LEVELS:]
        mean = sum(d.memory_nbytes for d in self.order) // count
        for devices, memory in [
            (self.order, mean),
            *(([d for d in self.order if d.memory_nbytes >= x], x) for x in levels),
        ]:
            speed = sum(d.speed for d in devices) / len(devices)
            device = Device(name="mean", speed=speed, memory_nbytes=memory)
            shapes = Shapes(Cutter(job, device, job.within_host, self.reduce), job.micro_batches)
            shape = shapes.first(len(devices))
            if shape is not None:
                yield devices, tuple(p for p, _ in shape.pairs)

    def _ordered(self, rows: Sequence[Sequence[Device]]) -> tuple[Names, ...]:
        """Each row in the better order: fast devices first or last, or those with most memory first."""
        found = []
        for row in rows:
            names = tuple(d.name for d in row)
            m = max(1, round(self._share(names)))
            roomy = tuple(d.name for d in sorted(row, key=lambda d: -d.memory_nbytes))
            even = row[0].speed <= EVEN * row[-1].speed
            orders = dict.fromkeys((names,) if even and names == roomy else (names, names[::-1], roomy))
            found.append(min(orders, key=lambda x: self.quick_s(x, m, len(rows))) if len(orders) > 1 else names)
        return tuple(sorted(found, key=lambda x: (-len(x), x)))

    # ------------------------------------------------------------------------------------------------ moves

    def _improve(self, rows: tuple[Names, ...]) -> tuple[float, tuple[Names, ...]]:
        """Takes the first move that helps, again and again."""
        filling = self._value(rows)
        assert filling is not None
        best, left = (filling.time_s, rows), LOOKS if len(self.order) <= SMALL else LOOKS_MANY
        tried = {rows}
        while True:
            for other in self._neighbours(best[1], filling):
                if other in tried:
                    continue
                if left == 0:
                    return best
                left -= 1
                tried.add(other)
                found = self._value(other)
                if found is not None and found.time_s < best[0] * (1 - 1e-9):
                    best, filling = (found.time_s, other), found
                    break
            else:
                return best

    def _neighbours(self, rows: tuple[Names, ...], filling: Filling[Names]) -> Iterator[tuple[Names, ...]]:
        """Rows after one move; those moves first that change the row that the step waits for."""
        count = len(filling.pairs)
        late = {names: self.line_s(names, m, count) for names, m in filling.pairs}
        first = sorted(rows, key=lambda x: (-late.get(x, 0.0), x))
        used = {n for names in rows for n in names}
        idle = [d.name for d in self.order if d.name not in used]
        by_name = self.job.by_name

        def changed(old: Sequence[Names], new: Sequence[Names]) -> tuple[Names, ...]:
            left = list(rows)
            for x in old:
                left.remove(x)
            return tuple(sorted([*left, *(x for x in new if x)], key=lambda x: (-len(x), x)))

        for i, a in enumerate(first):
            for k, name in enumerate(a):
                for other in idle:
                    if by_name[other].kind != by_name[name].kind:
                        yield changed([a], [(*a[:k], other, *a[k + 1 :])])
                yield changed([a], [(*a[:k], *a[k + 1 :])])
                if k:
                    yield changed([a], [(*a[: k - 1], name, a[k - 1], *a[k + 1 :])])
                    yield changed([a], [a[:k], a[k:]])
            for other in idle[:3]:
                for k in range(len(a) + 1):
                    yield changed([a], [(*a[:k], other, *a[k:])])
            for b in first[i + 1 :]:
                yield from (changed([a, b], pair) for pair in _exchanges(a, b, by_name))
        for other in idle[:3]:
            yield changed([], [(other,)])


def _exchanges(a: Names, b: Names, by_name: dict[str, Device]) -> Iterator[tuple[Names, Names]]:
    """Two rows after one device of each changed places, or one of either went to the other."""
    for (k, x), (j, y) in ((p, q) for p in enumerate(a) for q in enumerate(b)):
        if by_name[x].kind != by_name[y].kind:
            yield (*a[:k], y, *a[k + 1 :]), (*b[:j], x, *b[j + 1 :])
    for one, two in ((a, b), (b, a)):
        for k, x in enumerate(one):
            for j in range(len(two) + 1):
                yield (*one[:k], *one[k + 1 :]), (*two[:j], x, *two[j:])


def _next_to_like(devices: Sequence[Device], lengths: Sequence[int]) -> list[list[Device]]:
    found, at = [], 0
    for p in lengths:
        found.append(list(devices[at : at + p]))
        at += p
    return found


def _dealt(devices: Sequence[Device], lengths: Sequence[int]) -> list[list[Device]]:
    """To the row that has least speed per place so far."""
    rows: list[list[Device]] = [[] for _ in lengths]
    for d in devices:
        free = [i for i, p in enumerate(lengths) if len(rows[i]) < p]
        rows[min(free, key=lambda i: (sum(x.speed for x in rows[i]) / lengths[i], i))].append(d)
    return rows


def partitions(total: int, largest: int, most: int) -> Iterator[tuple[int, ...]]:
    """Whole numbers that add up to `total`, at most `most` of them, longest first."""
    if total == 0:
        yield ()
    elif most:
        for p in range(min(total, largest), 0, -1):
            for rest in partitions(total - p, p, most - 1):
                yield (p, *rest)


def _slowest(job: TrainingJob) -> LinkRate:
    """The slowest link that the owners of a layer may have between them."""
    hosts = {d.place for d in job.devices}
    usual = job.between_hosts if len(hosts) > 1 else job.within_host
    return min([usual, *(x.link() for x in job.links)], key=lambda x: (x.rate_bps, -x.latency_s))
