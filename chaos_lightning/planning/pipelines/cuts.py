"""Cuts the layers of one pipeline into stages, and computes how long a step of it takes; finds the best cut, or a good
one and its gap to the bound.

Theory of operation. A *row* is the devices of one pipeline in order. What a cut of the layers costs on it is the time
of 1F1B (`timing.OneFOneB`), to which each stage adds the all-reduce of its gradients and its optimizer (`charged`). No
cut is shorter than three bounds, each of which looks at one stage k of p with m micro-batches, F_k and B_k seconds for
one, and w_k = min(p - k + extra, m) of them in flight:

    through      the way to stage k, m (F_k + B_k), the way back
    after first  sum over all of (F + B + hops), (m - 1) B_k + (m - w_k) F_k: the first backward unit comes back to k
                 only when it has been to the last stage, and no more than w_k forward units are done by then
    in turns     every w_k micro-batches go from k to the last stage and back

The second says that early stages may have more layers than late ones. Each bound of stage k is a function of its first
and last layer alone, if ways are counted at the fastest device's speed, and does not fall if the stage takes one layer
more and its successors one less. So for a given time the longest stages that keep to it, from the first on, tell
whether any cut keeps to it, and the least such time is a lower bound over all cuts. Memory limits a stage in the same
way.

The cut that comes with that bound, and the one whose longest stage is shortest, are simulated. If neither meets the
bound, all cuts that could be better are tried where there are few. Else single layers are moved while that helps. A
critical path is a sum over the borders of the cut, and no other cut takes less than the same units in its own stages:
so each simulation rules out most moves, and few have to be simulated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

from chaos_lightning.planning.pipelines.job import Device, LinkRate, TrainingJob
from chaos_lightning.planning.pipelines.schedules import in_flight
from chaos_lightning.planning.pipelines.timing import OneFOneB, PipelineTimes

FEW = 1000
"""Number of cuts up to which all of them are tried."""
FEW_SMALL = 6000
"""Number of cuts up to which all are tried for models of at most `SMALL` layers."""
SMALL = 40
FEW_UNITS = 2_000_000
"""Most units that trying all cuts simulates."""
PATHS = 12
"""Number of critical paths that are kept while the search moves on."""
UNITS = 6_000
"""Most units that one search simulates where there are too many cuts to try all."""
RUNS = 20_000
"""Number of simulations that are kept."""
CLOSE = 1e-12
"""Relative difference below which times count as equal: sums in another order differ by that much."""
GRID = 1.6
"""Ratio of the numbers of micro-batches for which cuts are searched."""


def _usual(pipelines: int) -> int:
    """Returns the number of pipelines to search cuts for: 16 stands for all above 2, since the all-reduce's share, 2 (P
    - 1) / P, changes little.
    """
    return pipelines if pipelines < 3 else 16


def evenest_s(sums: Sequence[float], stages: int) -> float:
    """Returns a lower bound of the longest stage's sum if layers are cut as evenly as possible.

    Args:
        sums: Sums over the first layers, from 0 on.
        stages: Most stages.
    """
    low, high = sums[-1] / stages, sums[-1]
    while low < high * (1 - 4 * CLOSE):
        middle = (low + high) / 2
        first, longest, more = 0, 0.0, math.inf
        for _ in range(stages):
            end = bisect_right(sums, (sums[first] + middle) * (1 + CLOSE)) - 1
            longest = max(longest, sums[end] - sums[first])
            if end == len(sums) - 1:
                high = min(middle, longest)
                break
            more = min(more, sums[end + 1] - sums[first])
            first = end
        else:
            low = max(middle, more)  # Nothing changes below.
    return high * (1 - 4 * CLOSE)


def reduce_s(nbytes: float, owners: int, link: LinkRate, hop_s: float = 0.0) -> float:
    """Returns the seconds of an all-reduce among `owners` over trees whose slowest link is `link`."""
    if owners < 2 or not nbytes:
        return 0.0
    return reduce_latency_s(link, hop_s) + byte_s(owners, link) * nbytes


def reduce_latency_s(link: LinkRate, hop_s: float) -> float:
    """Returns the latency of an all-reduce (s): once up the tree and once down."""
    return 2 * (link.latency_s + hop_s)


def byte_s(owners: int, link: LinkRate) -> float:
    """Returns the seconds that an all-reduce takes per byte."""
    return 2 * (owners - 1) / owners * 8.0 / link.rate_bps


@dataclass(frozen=True, slots=True)
class LayerCut:
    """Division of one pipeline's layers into stages, with the times of its stages."""

    at: tuple[int, ...]
    """First layer of each stage, and the number of layers."""
    ends_s: tuple[float, ...]
    """Second at which each stage ends its last backward unit."""
    charged_s: float
    """Latest of the stages' ends (s), with their all-reduce and optimizer."""
    bound_s: float
    """Lower bound of `charged_s` over all cuts."""

    @property
    def exact(self) -> bool:
        return self.charged_s <= self.bound_s * (1 + CLOSE)


def _charged(cut: LayerCut) -> float:
    return cut.charged_s


class _Scaled(NamedTuple):
    """Prefix sums of the layers' seconds on a device of some speed."""

    forward: list[float]
    backward: list[float]
    both: list[float]
    optimizer: list[float]


class Tables:
    """Prefix sums over the layers of a job, shared by the searches for all its pipelines."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        c, buffers = job.costs, 1 + job.memory.flat_buffers
        still = [p + o + buffers * g for p, o, g in zip(c.parameters, c.optimizer, c.gradients, strict=True)]
        self._kept = [still]
        self.least_gradient_nbytes = min(x.gradient_nbytes for x in job.layers)
        self._reduced = list(range(job.costs.count + 1))
        """First layer with gradients from each layer on, or the number of layers."""
        for i in reversed(range(job.costs.count)):
            if not job.layers[i].gradient_nbytes:
                self._reduced[i] = self._reduced[i + 1]
        self._speeds: dict[float, _Scaled] = {}
        self._peaks: dict[tuple[float, float, int], list[float]] = {}
        self._hops: dict[tuple[float, float], list[float]] = {}

    def at_speed(self, speed: float) -> _Scaled:
        found = self._speeds.get(speed)
        if found is None:
            c = self.job.costs
            forward, backward = [x / speed for x in c.forward], [x / speed for x in c.backward]
            both = [a + b for a, b in zip(forward, backward, strict=True)]
            found = self._speeds[speed] = _Scaled(forward, backward, both, [x / speed for x in c.optimizer_s])
        return found

    def hops(self, link: LinkRate) -> list[float]:
        """Returns the seconds of sending the tensor behind each layer over a link."""
        found = self._hops.get(link.kind)
        if found is None:
            job = self.job
            found = self._hops[link.kind] = [job.overheads.hop_s + link.time_s(x) for x in job.costs.outputs]
        return found

    def exposed_s(self, speed: float, byte_s: float, latency_s: float, first: int, end: int) -> float:
        """Returns the seconds from the end of the backward pass of layers [first, end) to the end of the gradients'
        all-reduce.

        The layers up to any one become ready at that one's end or later, and leave one after the other. So it is the
        most, over layers, of the seconds of the bytes up to there less the backward time of the layers before.

        Args:
            speed: Speed of the device.
            byte_s: Seconds that the all-reduce of one byte takes.
            latency_s: Latency of each all-reduce, in seconds; layers without gradients have none.
            first: First layer.
            end: One behind the last layer.
        """
        gradients, backward = self.job.costs.gradients, self.at_speed(speed).backward
        hidden = backward[first]
        first = self._reduced[first]
        if first >= end:
            return 0.0
        row = self._peaks.get((speed, byte_s, first))
        if row is None:
            late = (byte_s * gradients[i + 1] - backward[i] for i in range(first, self.job.costs.count))
            row = self._peaks[speed, byte_s, first] = list(accumulate(late, max))
        return max(0.0, latency_s + row[end - first - 1] - byte_s * gradients[first] + hidden)

    def kept(self, flight: int) -> list[int]:
        """Returns prefix sums, over the layers, of the bytes that a stage keeps with `flight` micro-batches in flight,
        without workspace and boundary tensors.
        """
        while len(self._kept) <= flight:
            last = self._kept[-1]
            self._kept.append([x + y for x, y in zip(last, self.job.costs.activations, strict=True)])
        return self._kept[flight]


class DeviceRow:
    """Search for the best cut of the layers for the devices of one pipeline.

    Args:
        tables: Tables of the job.
        devices: Devices in order; only speed and memory count.
        hops: Links between neighbouring devices.
        reduce: Link between the owners of a layer.
    """

    def __init__(self, tables: Tables, devices: Sequence[Device], hops: Sequence[LinkRate], reduce: LinkRate) -> None:
        self.tables, self.job, self.reduce = tables, tables.job, reduce
        self.stages = len(devices)
        self.count = self.job.costs.count
        self.unit_s = self.job.overheads.unit_s
        self.latency_s = reduce_latency_s(reduce, self.job.overheads.hop_s)
        self.extra = self.job.memory.in_flight_extra
        self.rooms = tuple(d.memory_nbytes for d in devices)
        self.speeds = tuple(d.speed for d in devices)
        self.scaled = tuple(map(tables.at_speed, self.speeds))
        self.fastest = tables.at_speed(max(self.speeds))
        self.hops = tuple(tables.hops(link) for link in hops)
        """Seconds of a hop behind each layer, by gap between two devices."""
        self.least_hop = min((min(row[:-1], default=0.0) for row in self.hops), default=0.0)
        self._found: dict[tuple[int, int], LayerCut | None] = {}
        self._least: dict[tuple[int, int], float] = {}
        self._near_bound: tuple[int, ...] | None = None
        """Cut of the last bound; the cut of the next one is mostly near."""
        self._searches: dict[tuple[int, int], LayerCut | None] = {}
        self._runs: dict[tuple[tuple[int, ...], int], OneFOneB] = {}

    # ------------------------------------------------------------------------------------------------ one cut

    def times(self, at: tuple[int, ...]) -> PipelineTimes:
        """Returns the times of the stages and hops for a cut."""
        u, rows = self.unit_s, list(zip(self.scaled, pairwise(at), strict=True))
        return PipelineTimes(
            tuple(s.forward[y] - s.forward[x] + u for s, (x, y) in rows),
            tuple(s.backward[y] - s.backward[x] + u for s, (x, y) in rows),
            tuple(hop[x - 1] for hop, x in zip(self.hops, at[1:-1], strict=True)),
        )

    def tail_s(self, k: int, first: int, end: int, pipelines: int) -> float:
        """Returns the seconds from the end of a stage's last backward pass to the end of its optimizer step, with the
        part of the all-reduce that the pass does not hide.

        No plan has less, whatever groups of layers its pipelines make; one whose pipelines are cut alike has no more.
        """
        optimizer = self.scaled[k].optimizer
        found = optimizer[end] - optimizer[first]
        if pipelines > 1:
            sent_s = byte_s(pipelines, self.reduce)
            found += self.tables.exposed_s(self.speeds[k], sent_s, self.latency_s, first, end)
        return found

    def least_tail_s(self, k: int, first: int, end: int, pipelines: int) -> float:
        """Returns a lower bound of `tail_s` that never falls if a stage takes more layers: the seconds with one layer
        to reduce.
        """
        optimizer = self.scaled[k].optimizer
        return self.least_reduce_s(pipelines) + optimizer[end] - optimizer[first]

    def least_reduce_s(self, pipelines: int) -> float:
        """Returns the seconds of the all-reduce of the layer with the fewest gradient bytes."""
        return reduce_s(self.tables.least_gradient_nbytes, pipelines, self.reduce, self.job.overheads.hop_s)

    def memory(self, k: int, first: int, end: int, m: int) -> int:
        """Returns the peak memory of stage `k` in bytes, with as many micro-batches in flight as 1F1B has."""
        c = self.job.costs
        kept = self.tables.kept(in_flight(self.stages, k, m, self.extra))
        total = kept[end] - kept[first] + c.workspace(first, end)
        if self.job.memory.boundaries:
            total += m * (2 * c.boundary_in(first) + c.boundary_out(end))
        return total

    def fits(self, at: tuple[int, ...], m: int) -> bool:
        return all(self.memory(k, x, y, m) <= self.rooms[k] for k, (x, y) in enumerate(pairwise(at)))

    def most_micro_batches(self, at: tuple[int, ...], limit: int) -> int:
        """Returns the largest number of micro-batches per step, up to a limit, for which a cut fits into memory."""
        low, high = 0, limit + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(at, middle) else (low, middle)
        return low

    def charge(self, at: tuple[int, ...], m: int, pipelines: int, bound_s: float = -math.inf) -> LayerCut:
        """Returns a cut with its costs for `m` micro-batches in one of `pipelines` pipelines."""
        done = self._run(at, m)
        return LayerCut(at, tuple(done.ends_s), max(self._late(done, at, pipelines)), bound_s)

    def _run(self, at: tuple[int, ...], m: int) -> OneFOneB:
        found = self._runs.get((at, m))
        if found is None:
            if len(self._runs) > RUNS:
                self._runs.clear()
            found = self._runs[at, m] = OneFOneB(self.times(at), m, self.extra)
        return found

    def _late(self, done: OneFOneB, at: tuple[int, ...], pipelines: int) -> list[float]:
        """Returns the second at which each stage is done with its step, all-reduce and optimizer included."""
        return [
            end + self.tail_s(k, x, y, pipelines)
            for k, (end, (x, y)) in enumerate(zip(done.ends_s, pairwise(at), strict=True))
        ]

    # ------------------------------------------------------------------------------------------------ the best cut

    def best(self, m: int, pipelines: int) -> LayerCut | None:
        """Returns the best cut for `m` micro-batches in one of `pipelines` pipelines.

        Where there are more than `FEW` cuts, those are searched for some numbers of micro-batches and pipelines, and
        the nearest one is taken for the others.

        Returns:
            None where no cut fits into memory, or where there are fewer layers than stages.
        """
        if self.stages > self.count:
            return None
        key = (m, pipelines)
        if key not in self._found:
            self._found[key] = self._searched(*key) if self.few(m) else self._nearest(*key)
        return self._found[key]

    def few(self, m: int) -> bool:
        """Returns whether there are so few cuts that all of them are tried."""
        cuts = math.comb(self.count - 1, self.stages - 1)
        return cuts <= (FEW_SMALL if self.count <= SMALL else FEW) and 2 * cuts * self.stages * m <= FEW_UNITS

    def bound_s(self, m: int, pipelines: int) -> float:
        """Returns the least seconds of a step with these devices, whatever the cut; infinity if no cut fits into
        memory.
        """
        if self.stages == 1 or self.few(m):
            cut = self.best(m, pipelines)
            return math.inf if cut is None else cut.charged_s
        return self.relaxed_s(m, pipelines)

    def relaxed_s(self, m: int, pipelines: int) -> float:
        """Returns a lower bound of `bound_s` that needs no simulation."""
        if self.stages > self.count:
            return math.inf
        key = (m, pipelines)
        if key not in self._least:
            found = _Bounds(self, m, pipelines).least(relaxed=True, near=self._near_bound)
            self._near_bound, self._least[key] = found or (self._near_bound, math.inf)
        return self._least[key]

    def floor_s(self, m: int, pipelines: int) -> float:
        """Returns a lower bound of `relaxed_s` by a closed formula, for devices of one speed.

        It follows from the longest stage of the evenest cut: the time of all its units, and the bound `after first` of
        this module.
        """
        both, backward = self._longest_s
        warm = min(m, self.stages + self.extra)
        after = self.fastest.both[-1] + (m - warm) * both + (warm - 1) * backward
        return max(m * both, after) + self.tail_s(0, 0, 1, pipelines)

    def most(self, time_s: float, pipelines: int) -> int:
        """Returns the largest number of micro-batches for which `floor_s` is within a time limit."""
        both, backward = self._longest_s
        warm = self.stages + self.extra
        left = time_s * (1 + CLOSE) - self.tail_s(0, 0, 1, pipelines)
        after = left - self.fastest.both[-1]
        if after < 0:
            return 0
        more = 1 + after / backward if after < (warm - 1) * backward else warm + (after - (warm - 1) * backward) / both
        return int(min(left / both, more))

    @cached_property
    def _longest_s(self) -> tuple[float, float]:
        """Lower bounds of the longest stage's seconds, forward and backward, and of its backward seconds, for
        any cut.
        """
        both = evenest_s(self.fastest.both, self.stages)
        return both, both * min(x.backward_s / (x.forward_s + x.backward_s) for x in self.job.layers)

    def quick(self, m: int) -> tuple[int, ...] | None:
        """Returns a good cut found without search, for a job with several pipelines; None if none fits into memory."""
        if self.stages > self.count:
            return None
        if self.stages == 1:
            return (0, self.count) if self.fits((0, self.count), m) else None
        limits = _Bounds(self, m, 2)
        found = limits.least(relaxed=False)
        other = limits.balanced() if found else None
        return min((x[0] for x in (found, other) if x), key=lambda at: self.charge(at, m, 2).charged_s, default=None)

    def _nearest(self, m: int, pipelines: int) -> LayerCut | None:
        found = self._of_near(m, pipelines)
        # Where speeds differ, the cut for other numbers of micro-batches may be far from the best one.
        quick = self.quick(m) if len(set(self.speeds)) > 1 else None
        own = self.charge(quick, m, pipelines) if quick else None
        return min((x for x in (found, own) if x), key=_charged, default=None)

    def _of_near(self, m: int, pipelines: int) -> LayerCut | None:
        power = math.log(m, GRID)
        for near in (round(GRID ** round(power)), round(GRID ** (math.floor(power) + 1)), m):
            cut = self._searched(near, _usual(pipelines))
            if cut is not None and self.fits(cut.at, m):
                return self.charge(cut.at, m, pipelines)
        return None

    def _searched(self, m: int, pipelines: int) -> LayerCut | None:
        if (m, pipelines) not in self._searches:
            self._searches[m, pipelines] = self._search(m, pipelines)
        return self._searches[m, pipelines]

    def _search(self, m: int, pipelines: int) -> LayerCut | None:
        if self.stages == 1:
            only = self.charge((0, self.count), m, pipelines)
            return replace(only, bound_s=only.charged_s) if self.fits(only.at, m) else None
        limits = _Bounds(self, m, pipelines)
        relaxed = limits.least(relaxed=True)
        if relaxed is None:
            return None
        at, bound = relaxed
        starts = {at} if self.fits(at, m) else set()
        for other in (limits.least(relaxed=False) if not starts else None, limits.balanced()):
            starts |= {other[0]} if other else set()
        best = min((self.charge(at, m, pipelines, bound) for at in sorted(starts)), key=_charged, default=None)
        if best is not None and best.exact:
            return best
        if self.few(m):
            best = self._all(limits, best, bound)
            # All cuts that could be better were tried, so the best one found is the bound.
            return best and replace(best, bound_s=best.charged_s)
        return best and self._near(best, m, pipelines)

    def _all(self, limits: _Bounds, best: LayerCut | None, bound: float) -> LayerCut | None:
        """Returns the best of all cuts that fit into memory, by depth-first search that skips cuts in which a single
        stage is too slow already.
        """
        m, pipelines, last, at = limits.m, limits.pipelines, self.stages - 1, [0]
        of = cache(limits.of)
        fits = cache(lambda k, first, end: self.memory(k, first, end, m) <= self.rooms[k])

        def ends_of(k: int) -> Iterator[int]:
            return iter(range(at[k] + 1, self.count - last + k + 1) if k < last else (self.count,))

        ends = [ends_of(0)]
        while ends:
            k = len(ends) - 1
            del at[k + 1 :]
            end = next(ends[k], None)
            if end is None or (best is not None and of(k, at[k], end) >= best.charged_s):
                ends.pop()  # A longer stage takes no less.
            elif fits(k, at[k], end):
                at.append(end)
                if k < last:
                    ends.append(ends_of(k + 1))
                else:
                    other = self.charge(tuple(at), m, pipelines, bound)
                    best = other if best is None else min(best, other, key=_charged)
        return best

    def _near(self, best: LayerCut, m: int, pipelines: int) -> LayerCut:
        """Returns the cut improved by local search: moves one layer from one stage to another for as long as that
        helps.
        """
        tries = max(2, UNITS // (2 * self.stages * m))
        paths = [self._critical(best.at, m, pipelines)]
        while True:
            least = best.charged_s * (1 - CLOSE)
            found = None
            for at in _moves(best.at, paths, least):
                # The paths that were met since the moves were listed rule out some of them.
                if any(path.length_s(at) >= least for path in paths) or not self.fits(at, m):
                    continue
                if tries == 0:
                    return best
                tries -= 1
                other = self.charge(at, m, pipelines, best.bound_s)
                paths.append(self._critical(at, m, pipelines))
                if other.charged_s < least:
                    found = other
                    break
            if found is None:
                return best
            best, paths = found, paths[-PATHS:]

    def _critical(self, at: tuple[int, ...], m: int, pipelines: int) -> _Critical:
        """Returns the critical path of a step: the chain of forward and backward passes and hops that decides its
        length.
        """
        done = self._run(at, m)
        late = self._late(done, at, pipelines)
        stage = late.index(max(late))
        path = done.path(stage)
        first, end = at[stage : stage + 2]
        backward, sent_s = list(path.backward), byte_s(pipelines, self.reduce)
        still, own = self.least_reduce_s(pipelines), self.scaled[stage].backward
        # The larger of two parts of the tail that are sums over layers: one layer to reduce, or all without the last.
        most = sent_s * (self.job.costs.gradients[end] - self.job.costs.gradients[first]) - own[end] + own[first]
        if pipelines > 1 and self.tables.least_gradient_nbytes and self.latency_s + most > still:
            still = self.latency_s
            backward[stage] -= 1
        else:
            sent_s = 0.0
        stages = tuple(zip(path.forward, backward, (k == stage for k in range(self.stages)), strict=True))
        found = _Critical(self, stages, path.hops, sent_s)
        units = (path.forward[k] + path.backward[k] for k in range(self.stages))
        return replace(found, still_s=still + self.unit_s * sum(units))


@dataclass(frozen=True, slots=True)
class _Critical:
    """Critical path of a step, with its length as a sum over the stage borders of a cut."""

    row: DeviceRow
    stages: tuple[tuple[int, int, bool], ...]
    """Forward and backward units on the path by stage, and whether the path ends at that stage.

    One backward unit less where the path ends: all-reduces begin while the last one runs.
    """
    hops: tuple[int, ...]
    byte_s: float
    """Seconds of all-reduce per byte of gradients."""
    still_s: float = 0.0
    """Seconds of the path that no border changes."""

    def border_s(self, k: int, x: int) -> float:
        """Returns the seconds that border `k` contributes to the path if stage `k` begins with layer `x`."""
        found = self._sum_s(k - 1, x)
        if k < len(self.stages):
            found -= self._sum_s(k, x)
            hops = self.hops[k - 1]
            if hops:
                found += hops * self.row.hops[k - 1][x - 1]
        return found

    def _sum_s(self, k: int, x: int) -> float:
        scaled = self.row.scaled[k]
        forward, backward, last = self.stages[k]
        found = forward * scaled.forward[x] + backward * scaled.backward[x]
        if last:
            found += scaled.optimizer[x] + self.byte_s * self.row.job.costs.gradients[x]
        return found

    def length_s(self, at: tuple[int, ...]) -> float:
        return self.still_s + sum(self.border_s(k, at[k]) for k in range(1, len(at)))


def _moves(at: tuple[int, ...], paths: Iterable[_Critical], least: float) -> list[tuple[int, ...]]:
    """Returns the cuts with one layer moved on which all given paths are shorter than `least` (s), the most promising
    cut first.
    """
    stages, found = len(at) - 1, []
    for step in (1, -1):
        sums = []
        for path in paths:
            moved = (path.border_s(k, at[k] + step) - path.border_s(k, at[k]) for k in range(1, stages))
            sums.append((path.length_s(at), [0.0, *accumulate(moved)]))
        for i, j in combinations(range(stages), 2):
            # Borders i + 1 to j move: stage i gets a layer more or less, and stage j one less or more.
            gives = i if step < 0 else j
            if at[gives + 1] - at[gives] > 1:
                longest = max(total + row[j] - row[i] for total, row in sums)
                if longest < least:
                    found.append((longest, (*at[: i + 1], *(x + step for x in at[i + 1 : j + 1]), *at[j + 1 :])))
    return [x for _, x in sorted(found)]


class _Bounds:
    """Lower bounds of a step's time for one search, with fixed devices, micro-batches and number of pipelines."""

    def __init__(self, row: DeviceRow, m: int, pipelines: int) -> None:
        self.row, self.m, self.pipelines = row, m, pipelines
        self.stages = stages = row.stages
        self.tail = row.tail_s if len(set(row.speeds)) == 1 else row.least_tail_s
        """Function of a stage and its layers: seconds after its last backward unit. Where speeds differ, a stage that
        begins a layer later may hide less.
        """
        self.first_tail_s = self.tail(0, 0, 1, pipelines)
        """Seconds of the tail of the first stage, to which all gradients go back."""
        self.way_s = row.least_hop + row.unit_s
        """Seconds of a unit of no layers and its hop."""
        self.total = row.fastest.both[-1] + 2 * stages * row.unit_s + 2 * (stages - 1) * row.least_hop
        self.warm = [in_flight(stages, k, m, row.extra) for k in range(stages)]
        outputs = row.job.costs.outputs[:-1]
        self.least_output = min(outputs, default=0)
        self.alike = self.least_output == max(outputs, default=0)

    def of(self, k: int, first: int, end: int) -> float:
        """Returns a lower bound of the step's seconds if stage `k` has the layers [first, end)."""
        row, m, warm, u = self.row, self.m, self.warm[k], self.row.unit_s
        own, fastest = row.scaled[k], row.fastest
        f = own.forward[end] - own.forward[first] + u
        b = own.backward[end] - own.backward[first] + u
        ahead = fastest.forward[first] + k * self.way_s
        back = fastest.backward[first] + k * self.way_s
        through = ahead + m * (f + b) + back
        after = self.total + (m - 1) * b + (m - warm) * f
        turns = (m - 1) // warm
        behind = self.total - ahead - back
        in_turns = ahead + back + behind * (turns + 1) + (m - 1 - turns * warm) * b
        return max(through, after, in_turns) + max(self.first_tail_s, self.tail(k, first, end, self.pipelines) - back)

    def _longest_of(self, k: int, first: int, end: int) -> float:
        both = self.row.scaled[k].both
        return both[end] - both[first]

    def fits(self, k: int, first: int, end: int, *, relaxed: bool) -> bool:
        """Returns whether a stage fits into memory; `relaxed` counts the smallest boundary tensor, so that more layers
        never need less memory.
        """
        row, m = self.row, self.m
        nbytes = row.memory(k, first, end, m)
        if relaxed and not self.alike and row.job.memory.boundaries:
            c, least = row.job.costs, self.least_output
            nbytes -= m * 2 * (c.boundary_in(first) - least) if k else 0
            nbytes -= m * (c.boundary_out(end) - least) if k < self.stages - 1 else 0
        return nbytes <= row.rooms[k]

    def _longest(
        self, cost_of: Callable[[int, int, int], float], time_s: float, share: float, *, relaxed: bool
    ) -> tuple[tuple[int, ...] | None, float, float]:
        """Returns the greedy cut in which each stage, from the first on, takes as many layers as a time limit allows.

        Returns:
            The cut, or None where no cut keeps to the time; its bound; and the least time that lets some stage be
            longer.
        """
        row, stages = self.row, self.stages
        at, worst, more, first = [0], 0.0, math.inf, 0
        for k in range(stages):
            most, both = row.count - (stages - 1 - k), row.scaled[k].both
            end = min(most, bisect_right(both, both[first] + time_s / share * (1 + CLOSE)) - 1)
            if end < most:
                more = min(more, cost_of(k, first, end + 1))
            kept = row.tables.kept(self.warm[k])
            end = min(end, bisect_right(kept, kept[first] + row.rooms[k]) - 1)
            cost = cost_of(k, first, end) if end > first else 0.0
            if cost > time_s * (1 + CLOSE):
                below, above = first, end
                while above - below > 1:
                    middle = (below + above) // 2
                    cost = cost_of(k, first, middle)
                    below, above = (middle, above) if cost <= time_s * (1 + CLOSE) else (below, middle)
                more, end = min(more, cost_of(k, first, above)), below
            while end > first and not self.fits(k, first, end, relaxed=relaxed):
                end -= 1
            if end <= first or (k == stages - 1 and end < row.count):
                return None, worst, more
            worst = max(worst, cost_of(k, first, end))
            at.append(end)
            first = end
        return tuple(at), worst, more

    def least(self, *, relaxed: bool, near: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], float] | None:
        """Returns the cut with the least time according to the lower bounds, and that time; None if no cut fits into
        memory.

        Args:
            relaxed: Leave out how boundary tensors differ, so that it is a bound.
            near: A cut that may be the wanted one; of cuts that take as long, another one may be found then.
        """
        return self._least(self.of, self.m, relaxed=relaxed, near=near)

    def balanced(self) -> tuple[tuple[int, ...], float] | None:
        """Returns the cut whose longest stage is shortest, with early stages as long as possible; None if no cut fits
        into memory.
        """
        return self._least(self._longest_of, 1.0, relaxed=False)

    def _least(
        self,
        cost_of: Callable[[int, int, int], float],
        share: float,
        *,
        relaxed: bool,
        near: tuple[int, ...] | None = None,
    ) -> tuple[tuple[int, ...], float] | None:
        begin = None
        if near and all(self.fits(k, x, y, relaxed=relaxed) for k, (x, y) in enumerate(pairwise(near))):
            best, high = near, max(cost_of(k, x, y) for k, (x, y) in enumerate(pairwise(near)))
            begin = high * (1 - 2 * CLOSE)
        else:
            found, high, _ = self._longest(cost_of, math.inf, share, relaxed=relaxed)
            if found is None:
                return None
            best = found
        low = share * self.row.fastest.both[-1] / self.stages * (1 - CLOSE)
        while high > low * (1 + CLOSE):
            # Most answers are near the mean stage.
            middle, begin = begin or (3 * low + high) / 4, None
            at, worst, more = self._longest(cost_of, middle, share, relaxed=relaxed)
            if at is not None:
                best, high = at, min(worst, middle)  # they differ by rounding alone where no stage can be shorter
                continue
            # Nothing changes below `more`, so the answer is there or above.
            low = max(more, middle)
            if low >= high * (1 - CLOSE):
                break
            at, worst, _ = self._longest(cost_of, low, share, relaxed=relaxed)
            if at is not None:
                best, high = at, worst
                break
        return best, high


class Cutter:
    """Search for cuts of pipelines of any length, on devices of one kind.

    Args:
        job: Job with layers, overheads and memory rules.
        device: Any of the devices.
        hop: Link between neighbouring stages.
        reduce: Link between the owners of a layer.
        per_host: Devices of a host; a pipeline goes on to the next host after so many. 0: all its devices are on one
            host.
        across: Link between two stages on different hosts.
    """

    def __init__(
        self,
        job: TrainingJob,
        device: Device,
        hop: LinkRate,
        reduce: LinkRate,
        per_host: int = 0,
        across: LinkRate | None = None,
    ) -> None:
        self.job, self.device, self.hop, self.reduce = job, device, hop, reduce
        self.per_host, self.across = per_host, across or hop
        self.count = job.costs.count
        self._rows: dict[int, DeviceRow] = {}

    @cached_property
    def tables(self) -> Tables:
        return Tables(self.job)

    def row(self, stages: int) -> DeviceRow:
        """Returns the search for cuts of a pipeline of this many devices."""
        found = self._rows.get(stages)
        if found is None:
            each = self.per_host or stages
            hops = [self.hop if k % each else self.across for k in range(1, stages)]
            found = self._rows[stages] = DeviceRow(self.tables, (self.device,) * stages, hops, self.reduce)
        return found

    def best(self, stages: int, m: int, pipelines: int) -> LayerCut | None:
        """Returns the best cut of the layers into `stages` stages."""
        return self.row(stages).best(m, pipelines)
