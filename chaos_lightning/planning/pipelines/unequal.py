"""Searches for a plan on unequal devices or links, from several starts, and gives its gap to a lower bound.

Theory of operation. A set of rows of devices says which devices share a pipeline, in which order; for given rows the
cuts (`cuts.DeviceRow`) and the split of the micro-batches (`split`) follow, with all-reduces over the slowest link
between the hosts that the rows are on. The problem is NP-hard (it holds number partitioning), so rows are searched.
Starts are made of all devices, of those on one host or on the fastest few, and of those that are fast or have much
memory, for no more devices help where links are slow. Their pipelines are as long as those of the best plan for as many
devices of the mean speed; if devices are few, all other lengths are tried, too. Devices are sorted by speed and put
into rows next to their like, so that stages are even, or dealt out in turn, so that rows are even. For some tens of
devices further starts have rows that hold all kinds of devices in equal shares, or some kinds each (`_mixes`): memory
may ask for rows longer than one kind has devices. Of each row the better order is taken. Then, as long as that helps
and the budget of looks lasts, two devices change places, one moves to another row or becomes idle, or a row is cut in
two; devices of the row that the step waits for come first. A look takes cuts that are found at once; the plans that are
chosen in the end get the best cuts. The cost by which plans are compared knows the slowest link alone, so the search
returns the best few, to be simulated.

No plan takes less than all work over all speeds, than one micro-batch on the fastest device, and than the work of the
largest layer over the speeds of as many devices as can own it at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product

from chaos_lightning.planning.pipelines.cuts import Cutter, DeviceRow, Tables
from chaos_lightning.planning.pipelines.equal import Shapes
from chaos_lightning.planning.pipelines.estimate import estimate, slowest_link
from chaos_lightning.planning.pipelines.job import Device, LinkRate, TrainingJob, stage_memory
from chaos_lightning.planning.pipelines.places import on_one_host
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.split import Filling, Splitter

SMALL = 10
"""Number of devices up to which all lengths of pipelines are starts."""
EFFORT = ((SMALL, 4, 600), (32, 4, 60), (64, 2, 60))
"""Effort of the search, as (most devices; starts that are improved, of those that are charged least and of those whose
simulated step is shortest; plans that are looked at while one start is improved).
"""
LEAST = (1, 30)
"""Effort of the search for more devices, without the number of devices."""
SIMULATED = 40
"""Most starts that are simulated, those first that are charged least."""
LEVELS = 4
"""Number of memory sizes, the largest ones, for each of which a start leaves out devices with less."""
PLACES = 8
"""Number of hosts up to which starts are made of each host's devices alone, and of those of the fastest few hosts."""
SPEEDS = (0.5, 0.25)
"""Fractions of the fastest device's speed; starts leave out devices that are slower."""
EVEN = 1.05
"""Ratio of speeds in a row up to which the row's order is kept."""
CLASSES = 3
"""Classes that devices are sorted into, by speed and memory, for rows that mix them."""
COUNTS = 40
"""Most numbers of rows of one mix that are tried."""
BEST = 3
"""Numbers of rows that are kept of each mix, where rows of several mixes stand side by side."""
ROWS = 40
"""Number of pipelines up to which the best cuts are searched in the end."""
MANY = 128
"""Number of devices up to which starts are simulated, and made of rows that mix kinds."""

Names = tuple[str, ...]
"""Row of devices, by their names in order."""


class Mixed:
    """Search for a plan of a job whose devices or links differ.

    Args:
        job: The job, on all devices that are there.
        copies: Least number of pipelines: each layer has so many owners.
        hosts: Whether plans are preferred in which the owners of each layer are on two hosts.
    """

    def __init__(self, job: TrainingJob, *, copies: int = 1, hosts: bool = False) -> None:
        self.job, self.tables, self.copies, self.hosts = job, Tables(job), copies, hosts
        self.order = sorted(job.devices, key=lambda d: (-d.speed, -d.memory_nbytes, d.place, d.name))
        self.speeds = sum(d.speed for d in job.devices)
        self._reduces: dict[tuple[frozenset[str], bool], LinkRate] = {}
        self._rows: dict[tuple[tuple[float, float], ...], DeviceRow] = {}
        self._rows_by_names: dict[tuple[Names, tuple[float, float]], DeviceRow] = {}
        self._lines: dict[tuple[int, bool], tuple[int, float, float]] = {}
        self._quick: dict[tuple[int, int, int], float] = {}

    def _effort(self) -> tuple[int, int]:
        """Returns the effort of the search: number of starts of each kind to improve, and of plans to look at
        for each.
        """
        return next(((starts, looks) for most, starts, looks in EFFORT if len(self.order) <= most), LEAST)

    # ------------------------------------------------------------------------------------------------ rows

    def reduce(self, rows: Sequence[Names]) -> LinkRate:
        """Returns the slowest link that an all-reduce among the devices of these pipelines must use."""
        by_name = self.job.by_name
        used = [n for names in rows for n in names]
        places = frozenset(used if self.job.links else (by_name[n].place for n in used))
        key = (places, len(used) > len(places))
        found = self._reduces.get(key)
        if found is None:
            found = self._reduces[key] = slowest_link(self.job, used)
        return found

    def row(self, names: Names, reduce: LinkRate) -> DeviceRow:
        """Returns the search for cuts of a pipeline of these devices; pipelines with the same kinds of devices and
        links share one.
        """
        found = self._rows_by_names.get((names, reduce.kind))
        if found is None:
            devices = [self.job.by_name[n] for n in names]
            hops = [self.job.link(a, b) for a, b in pairwise(names)]
            key = (*(d.kind for d in devices), (0.0, 0.0), *(h.kind for h in hops), reduce.kind)
            found = self._rows.get(key)
            if found is None:
                found = self._rows[key] = DeviceRow(self.tables, devices, hops, reduce)
            self._rows_by_names[names, reduce.kind] = found
        return found

    def time_s(self, names: Names, m: int, pipelines: int, reduce: LinkRate) -> float:
        """Returns the seconds of a pipeline with its best cut."""
        cut = self.row(names, reduce).best(m, pipelines)
        return math.inf if cut is None else cut.charged_s

    def quick_s(self, names: Names, m: int, pipelines: int, reduce: LinkRate) -> float:
        """Returns the seconds of a pipeline with a cut found without search."""
        row = self.row(names, reduce)
        key = (id(row), m, pipelines)
        if key not in self._quick:
            at = row.quick(m)
            self._quick[key] = row.charge(at, m, pipelines).charged_s if at else math.inf
        return self._quick[key]

    def line_s(self, names: Names, m: int, pipelines: int, reduce: LinkRate) -> float:
        """Returns an approximation of `quick_s` that is linear in the number of micro-batches."""
        key = (id(self.row(names, reduce)), pipelines > 1)
        line = self._lines.get(key)
        if line is None:
            share = self._share(names)
            few, many = max(1, int(0.8 * share)), max(2, math.ceil(1.2 * share))
            slow, slower = (self.quick_s(names, x, pipelines, reduce) for x in (few, many))
            line = self._lines[key] = (few, slow, (slower - slow) / (many - few))
        few, slow, slope = line
        found = slow + slope * (m - few)
        return found if math.isfinite(found) else self.quick_s(names, m, pipelines, reduce)

    def _share(self, names: Names) -> float:
        """Returns the number of micro-batches for a pipeline in proportion to its speed."""
        by_name = self.job.by_name
        return self.job.micro_batches * sum(by_name[n].speed for n in names) / self.speeds

    # ------------------------------------------------------------------------------------------------ answers

    def search(self, *, improve: bool = True) -> list[tuple[float, PipelinePlan]]:
        """Returns the few best plans found.

        Args:
            improve: Whether devices are moved about; else the best starts are taken.

        Returns:
            Seconds that a plan is charged, and the plan; the one that is charged least first. Empty if no plan was
            found that fits.
        """
        looked: dict[tuple[Names, ...], float] = {}
        for rows in dict.fromkeys(rows for start in self._starts() for rows in self._turned(start)):
            if len(rows) < self.copies:
                continue
            value = self._value(rows)
            if value is not None:
                looked[rows] = value.time_s
        starts = sorted(looked, key=lambda rows: (looked[rows], rows))
        few, many = len(self.order) <= SMALL, len(self.order) > MANY
        # The charged costs know one link for all owners, so not all starts are chosen by them.
        steps_s = {} if many else {rows: self._simulated_s(rows) for rows in starts[:SIMULATED]}
        count = self._effort()[0]
        chosen = [*starts[:count], *sorted(steps_s, key=lambda rows: (steps_s[rows], rows))[:count]]
        near_s = {rows: looked[rows] for rows in chosen}
        if improve:
            near_s |= {rows: time_s for time_s, rows in map(self._improve, dict.fromkeys(chosen))}
        found = []
        for rows, near in near_s.items():
            # The best cuts cost a search for each row and number of micro-batches.
            filling = self._splitter(self.time_s if few else self.quick_s, rows).over(rows, near)
            if filling is not None and len(filling.pairs) >= self.copies:
                found.append((filling.time_s, self._plan(filling, self.reduce(rows))))
        for rows in starts if not found else ():
            filling = self._splitter(self.quick_s, rows).over(rows)
            if filling is not None and len(filling.pairs) >= self.copies:
                return [(filling.time_s, self._plan(filling, self.reduce(rows), quick=True))]
        return sorted(found, key=lambda x: x[0])

    def _simulated_s(self, rows: Sequence[Names]) -> float:
        """Returns the simulated seconds of a step of these pipelines, with cuts found without search."""
        reduce = self.reduce(rows)
        filling = self._value(rows)
        # `line_s` knows no memory that micro-batches need.
        if filling is None or any(self.row(names, reduce).quick(m) is None for names, m in filling.pairs):
            filling = self._splitter(self.quick_s, rows).over(rows)
        if filling is None or len(filling.pairs) < self.copies:
            return math.inf
        plan = self._plan(filling, reduce, quick=True)
        if self.hosts and on_one_host(self.job, plan):
            return math.inf
        return estimate(self.job, plan).step_s

    def _turned(self, rows: tuple[Names, ...]) -> Iterator[tuple[Names, ...]]:
        """Yields the pipelines as given; if owners must be on two hosts, also with the devices of every second pipeline
        reversed.

        Where one kind of devices is all on one host, pipelines of one order would have the same layers there.
        """
        yield rows
        if self.hosts and len(rows) > 1:
            turned = (names[::-1] if i % 2 else names for i, names in enumerate(rows))
            yield tuple(sorted(turned, key=lambda x: (-len(x), x)))

    def bound_s(self) -> float:
        """Returns a lower bound of the step's seconds for any plan."""
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
        """Returns the least number of stages with which a pipeline of devices with the most memory fits."""
        most = max(self.job.devices, key=lambda d: d.memory_nbytes)
        cutter = Cutter(self.job, most, LinkRate(), LinkRate())
        top = min(len(self.job.devices), self.job.costs.count)
        return next((p for p in range(1, top + 1) if math.isfinite(cutter.row(p).bound_s(1, 1))), top)

    def _plan(self, filling: Filling[Names], reduce: LinkRate, *, quick: bool = False) -> PipelinePlan:
        pipelines, count = [], len(filling.pairs)
        for names, m in sorted(filling.pairs, key=lambda x: (-len(x[0]), x[0])):
            row = self.row(names, reduce)
            best = row.best(m, count) if count <= ROWS and not quick else None
            at = best.at if best else row.quick(m)
            assert at is not None
            stages = tuple(PlanStage(n, x, y) for n, (x, y) in zip(names, pairwise(at), strict=True))
            pipelines.append(Pipeline(stages, m))
        used = {n for names, _ in filling.pairs for n in names}
        idle = tuple(sorted(d.name for d in self.job.devices if d.name not in used))
        extra = self.job.memory.in_flight_extra
        return PipelinePlan(self.job.costs.count, tuple(pipelines), idle=idle, in_flight_extra=extra)

    def _value(self, rows: Sequence[Names]) -> Filling[Names] | None:
        if len(rows) < self.copies:
            return None
        time_s = self.quick_s if len(self.order) <= SMALL else self.line_s
        return self._splitter(time_s, rows).over(rows)

    def _splitter(self, time_s: Callable[[Names, int, int, LinkRate], float], rows: Sequence[Names]) -> Splitter[Names]:
        reduce = self.reduce(rows)

        def charged(names: Names, m: int, pipelines: int) -> float:
            return time_s(names, m, pipelines, reduce)

        return Splitter(charged, self.job.micro_batches, lambda names, _: round(self._share(names)))

    # ------------------------------------------------------------------------------------------------ starts

    def _starts(self) -> Iterator[tuple[Names, ...]]:
        few = len(self.order) <= SMALL
        for devices, lengths in self._lengths():
            chosen = devices[: sum(lengths)]
            yield self._ordered(_next_to_like(chosen, lengths))
            if few:
                yield self._ordered(_next_to_like(chosen, lengths[::-1]))
                yield self._ordered(_dealt(chosen, lengths))
        if SMALL < len(self.order) <= MANY:
            yield from self._mixes()

    def _mixes(self) -> Iterator[tuple[Names, ...]]:
        """Yields starts for unequal devices: sets of pipelines that mix all classes of devices in equal shares, or only
        some classes each.

        A class may stay idle, have rows of its own, or share rows with others: all set partitions of all subsets. Where
        memory is scarce, rows of slow devices alone are too long, and those of fast ones alone leave the others idle.
        """
        classes = self._classes()
        sides: dict[tuple[int, ...], list[list[list[Device]]]] = {}
        for parts in _set_partitions(tuple(range(len(classes)))):
            for part in parts:
                if part not in sides:
                    sides[part] = self._mixed([classes[i] for i in part])
            best = [sides[part] if len(parts) == 1 else sides[part][:BEST] for part in parts]
            for chosen in product(*best):
                yield self._ordered([row for rows in chosen for row in rows])

    def _mixed(self, classes: Sequence[Sequence[Device]]) -> list[list[list[Device]]]:
        """Returns ways to divide the devices of these classes into 1, 2, 3, ... pipelines with equal shares of each
        class, the most promising first.

        The promise of a number of rows is the step of its rows alone, at their share of the micro-batches.
        """
        total = sum(map(len, classes))
        found: list[tuple[float, list[list[Device]]]] = []
        for count in _counts(min(total, self.job.micro_batches)):
            for deal in (_blocks, _in_turn):
                rows = [[*x] for x in deal(classes, count) if x]
                if max(map(len, rows)) > self.job.costs.count:
                    continue
                reduce = self.reduce([tuple(d.name for d in row) for row in rows])
                kinds = {tuple(d.kind for d in row): tuple(d.name for d in row) for row in rows}
                time_s = max(
                    min(self.quick_s(x, max(1, round(self._share(x))), len(rows), reduce) for x in (names, names[::-1]))
                    for names in kinds.values()
                )
                if math.isfinite(time_s):
                    found.append((time_s, rows))
        return [rows for _, rows in sorted(found, key=lambda x: x[0])]

    def _classes(self) -> list[list[Device]]:
        """Returns the devices by class, one class for each kind; kinds of similar speed are joined while there are too
        many.
        """
        by_kind = defaultdict[tuple[float, float], list[Device]](list)
        for d in self.order:
            by_kind[d.kind].append(d)
        found = list(by_kind.values())
        while len(found) > CLASSES:
            ratios = [a[0].speed / b[-1].speed for a, b in pairwise(found)]
            i = ratios.index(min(ratios))
            found[i : i + 2] = [found[i] + found[i + 1]]
        return [sorted(x, key=lambda d: (d.place, d.name)) for x in found]

    def _lengths(self) -> Iterator[tuple[list[Device], tuple[int, ...]]]:
        """Yields starts: devices, fast ones first, and the lengths of pipelines made of them in that order."""
        job = self.job
        for devices in self._parts():
            count = len(devices)
            if len(self.order) <= SMALL:
                for used in range(count, 0, -1):
                    for lengths in partitions(used, min(count, job.costs.count), job.micro_batches):
                        yield devices, lengths
                continue
            # As if each had the mean memory, and as if each had the least.
            memories = {sum(d.memory_nbytes for d in devices) // count, min(d.memory_nbytes for d in devices)}
            speed = sum(d.speed for d in devices) / count
            reduce = self.reduce([tuple(d.name for d in devices)])
            for memory in sorted(memories):
                device = Device(name="mean", speed=speed, memory_nbytes=memory)
                shape = Shapes(Cutter(job, device, job.within_host, reduce), job.micro_batches).first(count)
                if shape is not None:
                    yield devices, tuple(p for p, _ in shape.pairs)

    def _parts(self) -> Iterator[list[Device]]:
        """Yields sets of devices to start from, fast ones first: all, those of some hosts, fast ones, those with much
        memory.
        """
        order, by_place = self.order, defaultdict[str, list[Device]](list)
        for d in order:
            by_place[d.place].append(d)
        places = sorted(by_place, key=lambda x: (-sum(d.speed for d in by_place[x]), x))
        few = [places[:k] for k in range(2, len(places))] + [[x] for x in places] if len(places) <= PLACES else []
        found = [order, *([d for d in order if d.place in chosen] for chosen in few)]
        if len(order) <= SMALL or len({d.kind for d in order}) > CLASSES:  # `_mixes` leave out kinds, too
            fastest = order[0].speed
            levels = sorted({d.memory_nbytes for d in order})[-LEVELS:]
            found += [[d for d in order if d.speed >= share * fastest] for share in SPEEDS]
            found += [[d for d in order if d.memory_nbytes >= x] for x in levels]
        seen = set[Names]()
        for devices in found:
            names = tuple(d.name for d in devices)
            if names not in seen:
                seen.add(names)
                yield devices

    def _ordered(self, rows: Sequence[Sequence[Device]]) -> tuple[Names, ...]:
        """Returns each pipeline's devices in the best of three orders: fast ones first, fast ones last, or those with
        most memory first.
        """
        found = []
        reduce = self.reduce([tuple(d.name for d in row) for row in rows])
        for row in rows:
            names = tuple(d.name for d in row)
            m = max(1, round(self._share(names)))
            roomy = tuple(d.name for d in sorted(row, key=lambda d: -d.memory_nbytes))
            even = row[0].speed <= EVEN * row[-1].speed
            orders = list(dict.fromkeys((names,) if even and names == roomy else (names, names[::-1], roomy)))
            if len(orders) > 1:
                orders.sort(key=lambda x: self.quick_s(x, m, len(rows), reduce))
            found.append(orders[0])
        return tuple(sorted(found, key=lambda x: (-len(x), x)))

    # ------------------------------------------------------------------------------------------------ moves

    def _improve(self, rows: tuple[Names, ...]) -> tuple[float, tuple[Names, ...]]:
        """Improves pipelines by local search: applies the first change that helps, again and again; returns their
        seconds and devices.
        """
        filling = self._value(rows)
        assert filling is not None
        best, left = (filling.time_s, rows), self._effort()[1]
        tried = {self._like(rows)}
        while True:
            for other in self._neighbours(best[1], filling):
                like = self._like(other)
                if like in tried:
                    continue
                if left == 0:
                    return best
                left -= 1
                tried.add(like)
                found = self._value(other)
                if found is not None and found.time_s < best[0] * (1 - 1e-9):
                    best, filling = (found.time_s, other), found
                    break
            else:
                return best

    def _like(self, rows: Sequence[Names]) -> tuple[int, ...]:
        """Returns a key that is equal for pipelines with the same kinds of devices and links, whatever the devices'
        names.
        """
        reduce = self.reduce(rows)
        return tuple(sorted(id(self.row(names, reduce)) for names in rows))

    def _neighbours(self, rows: tuple[Names, ...], filling: Filling[Names]) -> Iterator[tuple[Names, ...]]:
        """Yields the pipelines after one change; changes to the slowest pipeline come first."""
        count = len(filling.pairs)
        reduce = self.reduce(rows)
        late = {names: self.line_s(names, m, count, reduce) for names, m in filling.pairs}
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
    """Yields both pipelines after an exchange of two devices between them, or after one device has moved from one to
    the other.
    """
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
    """Returns pipelines of the given lengths: each device goes to the one with the least speed per stage so far."""
    rows: list[list[Device]] = [[] for _ in lengths]
    for d in devices:
        free = [i for i, p in enumerate(lengths) if len(rows[i]) < p]
        rows[min(free, key=lambda i: (sum(x.speed for x in rows[i]) / lengths[i], i))].append(d)
    return rows


def _blocks(classes: Sequence[Sequence[Device]], count: int) -> list[list[Device]]:
    """Divides devices over pipelines in blocks: each pipeline gets neighbouring devices of each class, with remainders
    in turn.
    """
    rows: list[list[Device]] = [[] for _ in range(count)]
    turn = 0
    for devices in classes:
        share, more = divmod(len(devices), count)
        extra = {(turn + i) % count for i in range(more)}
        turn, at = turn + more, 0
        for i, row in enumerate(rows):
            row += devices[at : at + share + (i in extra)]
            at += share + (i in extra)
    return rows


def _in_turn(classes: Sequence[Sequence[Device]], count: int) -> list[list[Device]]:
    """Divides devices over pipelines in turn, so that neighbouring devices (mostly of one host) own the same stage of
    several pipelines.
    """
    rows: list[list[Device]] = [[] for _ in range(count)]
    turn = 0
    for devices in classes:
        for i, device in enumerate(devices):
            rows[(turn + i) % count].append(device)
        turn += len(devices)
    return rows


def _counts(most: int) -> list[int]:
    """Returns the numbers of pipelines to try, from 1 to `most`: all, or some at equal ratios if there are many."""
    if most <= COUNTS:
        return list(range(1, most + 1))
    return sorted({round(most ** (i / (COUNTS - 1))) for i in range(COUNTS)})


def _set_partitions(items: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields the set partitions of all non-empty subsets."""

    def of(rest: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if not rest:
            yield ()
            return
        for parts in of(rest[1:]):
            yield parts
            yield ((rest[0],), *parts)
            for i, part in enumerate(parts):
                yield (*parts[:i], (rest[0], *part), *parts[i + 1 :])

    yield from (parts for parts in of(items) if parts)


def partitions(total: int, largest: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yields the partitions of `total` into at most `most` whole numbers up to `largest`, each with its largest number
    first.
    """
    if total == 0:
        yield ()
    elif most:
        for p in range(min(total, largest), 0, -1):
            for rest in partitions(total - p, p, most - 1):
                yield (p, *rest)
