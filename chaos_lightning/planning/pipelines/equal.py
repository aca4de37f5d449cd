"""Finds the best plan for n equal devices: number and lengths of pipelines, and micro-batches of each; a good one at
once, then the best one.

Theory of operation. A pipeline of p devices takes T(p, m) seconds for m micro-batches with its best cut (`cuts`), its
all-reduce and optimizer included, and has a capacity c_p(t) (`split`). A step of M micro-batches takes at most t if and
only if some multiset of lengths with a sum of at most n has capacities with a sum of at least M: an unbounded knapsack,
of which one pass answers for all numbers up to n. So the answer is exact over all multisets of lengths and all splits
of the micro-batches; devices that add nothing are idle.

An all-reduce among P pipelines costs 2 (P - 1) / P of a stage's gradients, so T depends on P. The search assumes a
number that no good plan is below, which bounds the answer from below, and charges what it finds with the real number.
Where that differs, the number of pipelines becomes a dimension of the knapsack, for as many devices as that is cheap
for; beyond that the gap is told.

The first answer takes T as linear in m between points that are simulated beforehand (`warm`), and charges what it
finds in full.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from chaos_lightning.planning.pipelines.cuts import CLOSE, Cutter
from chaos_lightning.planning.pipelines.split import Filling, Pairs, Splitter

LONGEST = 40
"""Most stages of a pipeline where there are more than `COUNTED` devices, unless memory asks for more."""
MANY = 16
"""Number of pipelines with which first answers are searched; a plan that is found is charged with its own number."""
PROMISING = 12
"""Most lengths that first answers are made of: those that do most per device."""
FINE = 2e-3
"""Precision of the search for first answers, as a fraction of the time."""
ROUGH = 1e-4
"""Precision of bounds that the best plan does not meet, as a fraction of the time."""
COUNTED = 64
"""Most devices for which the number of pipelines is a dimension of the search."""


class Alike(NamedTuple):
    """Group of pipelines with the same length and number of micro-batches."""

    stages: int
    micro_batches: int
    """Micro-batches of each of these pipelines."""
    times: int
    """Number of these pipelines."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """Shape of a plan: number of pipelines of each length, with the micro-batches of each."""

    devices: int
    rows: tuple[Alike, ...]
    """Pipelines that are alike; longest first, then those with most micro-batches."""
    charged_s: float
    """Seconds of a step, without its commit, as the search counts them."""
    bound_s: float
    """Lower bound of `charged_s` over all shapes."""
    exact: bool
    """Whether no better shape exists over all multisets of lengths and splits, for the cuts that were found."""

    @property
    def pipelines(self) -> int:
        return sum(r.times for r in self.rows)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Number of stages and of micro-batches of each pipeline."""
        return tuple((r.stages, r.micro_batches) for r in self.rows for _ in range(r.times))

    @property
    def used(self) -> int:
        return sum(r.times * r.stages for r in self.rows)

    @property
    def gap(self) -> float:
        """Largest fraction by which the step of a better shape might be shorter."""
        return 0.0 if self.exact else max(0.0, 1 - self.bound_s / self.charged_s)


class _Line(NamedTuple):
    """Seconds of a pipeline of one length by its number of micro-batches, interpolated linearly between simulated
    points.
    """

    at: tuple[int, ...]
    times_s: tuple[float, ...]
    most: int
    """Most micro-batches that memory allows."""

    def capacity(self, time_s: float) -> int:
        """Returns how many micro-batches the pipeline can do within a time (s)."""
        at, t = self.at, self.times_s
        if time_s < t[0]:
            return 0
        i = min(bisect_right(t, time_s) - 1, len(t) - 2)
        slope = (t[i + 1] - t[i]) / (at[i + 1] - at[i])
        return min(self.most, at[i] + int((time_s - t[i]) / slope))


Steps = tuple[Splitter[int], ...]
"""Splitters that are tried in order: each one's times are no less than those of the one before, and cost more to find
out; those of the last one are right.
"""
Caps = dict[int, int]
"""Micro-batches that a pipeline of each length does in some time; lengths that do none are left out."""


class Shapes:
    """Search for the best shape of a plan, for any number of devices of one kind.

    Args:
        cutter: Cuts pipelines of such devices.
        micro_batches: Micro-batches of a step.
        only: Lengths that are looked at; None: all.
    """

    def __init__(self, cutter: Cutter, micro_batches: int, only: Callable[[int], bool] | None = None) -> None:
        self.cutter, self.total, self.only = cutter, micro_batches, only
        self._lines: dict[int, _Line | None] = {}
        self._exact = self._by_steps(self.time_s)
        self._bounds = self._by_steps(lambda p, m, count: cutter.row(p).bound_s(m, count))
        self.splitter = self._exact[-1]
        self._asked = defaultdict[object, dict[int, int]](dict)
        """Number of steps that were taken to find out the capacity of each length, by search."""
        self.longest = min(cutter.count, LONGEST)
        if not any(self._line(p) for p in range(1, self.longest + 1)):
            self.longest = cutter.count

    # ------------------------------------------------------------------------------------------------ times

    def time_s(self, stages: int, m: int, pipelines: int) -> float:
        """Returns the seconds of one of `pipelines` pipelines, with `stages` stages and `m` micro-batches: T(p, m);
        infinity if no cut fits into memory.
        """
        cut = self.cutter.best(stages, m, pipelines)
        return math.inf if cut is None else cut.charged_s

    def _line(self, stages: int) -> _Line | None:
        if stages not in self._lines:
            self._lines[stages] = self._draw(stages)
        return self._lines[stages]

    def _draw(self, stages: int) -> _Line | None:
        points = (1, stages, 3 * stages) if stages > 1 else (1, 2)
        row = self.cutter.row(stages)
        cuts: dict[int, tuple[int, ...]] = {}
        at: tuple[int, ...] | None = None
        for m in reversed(points):
            if at is None or not row.fits(at, m):
                at = row.quick(min(m, 2 * stages))
            if at is not None and row.fits(at, m):
                cuts[m] = at
        if not cuts:
            return None
        last = max(cuts)
        if len(cuts) < 2:
            cuts[last + 1] = cuts[last]
        times = tuple(row.charge(at, m, MANY).charged_s for m, at in sorted(cuts.items()))
        return _Line(tuple(sorted(cuts)), times, row.most_micro_batches(cuts[last], self.total))

    def _by_steps(self, time_s: Callable[[int, int, int], float]) -> Steps:
        """Returns two splitters of micro-batches: one by a cheap lower bound of pipeline times, one by the times
        themselves.
        """

        def least_s(p: int, m: int, pipelines: int) -> float:
            row = self.cutter.row(p)
            return row.relaxed_s(m, pipelines) if row.few(m) else time_s(p, m, pipelines)

        return Splitter(least_s, self.total, self._guess), Splitter(time_s, self.total, self._guess)

    def _guess(self, stages: int, time_s: float) -> int:
        line = self._line(stages)
        return line.capacity(time_s) if line else 1

    def warm(self) -> None:
        """Simulates pipelines of all lengths in advance, so that the first answers come at once."""
        for p in range(1, self.longest + 1):
            self._line(p)

    # ------------------------------------------------------------------------------------------------ answers

    def first(self, devices: int) -> PlanShape | None:
        """Returns a good shape at once; None if no pipeline of at most this many devices fits into memory."""
        lengths = self._lengths(devices)
        shortest = next((line for p in lengths if (line := self._line(p))), None)
        if shortest is None:
            return None

        def filled(time_s: float) -> list[int] | None:
            def capacity(p: int) -> int:
                line = self._line(p)
                return line.capacity(time_s) if line else 0

            def fill(caps: Caps) -> list[int] | None:
                dense = sorted(caps, key=lambda p: -caps[p] / p)[:PROMISING]
                return _fill({p: caps[p] for p in dense}, devices, self.total)

            most = {p: self._most(p, time_s, MANY) for p in lengths}
            found, _, _ = self._looked_up(most, [capacity], fill, self._asked[None])
            return found

        # All work over all devices; no plan takes less.
        low = self.total * self.cutter.row(1).fastest.both[-1] / devices
        high, best = 1.2 * low, None
        while best is None:
            if high > self.total * shortest.times_s[0] * 2:
                return None
            best = filled(high)
            low, high = (low, high) if best else (high, 1.3 * high)
        while high - low > FINE * high:
            middle = (low + high) / 2
            found = filled(middle)
            low, high, best = (low, middle, found) if found else (middle, high, best)
        return self.over(devices, best, high)

    def over(self, devices: int, lengths: Collection[int], near_s: float = 0.0) -> PlanShape | None:
        """Returns the best shape of pipelines with the given lengths: splits the micro-batches over them; None if none
        fits into memory.

        Args:
            devices: Number of devices.
            lengths: Lengths of the pipelines.
            near_s: Approximate seconds of the step, if known.
        """
        chosen = sorted(lengths, reverse=True)[: self.total]
        return self._shape(devices, self.splitter.over(chosen, near_s)) if chosen else None

    def exact(self, devices: int) -> PlanShape | None:
        """Returns the best shape; None if no pipeline of at most this many devices fits into memory."""
        lengths, first = self._lengths(devices), self.first(devices)
        best = Filling(first.pairs, first.charged_s, 0.0) if first else None
        return self._shape(devices, self._best(self._exact, devices, lengths, best))

    def bound_s(self, devices: int, near_s: float = math.inf) -> float:
        """Returns a lower bound of a step's seconds, without commit, over all lengths, splits and cuts; infinity if no
        pipeline fits into memory.

        Args:
            devices: Number of devices.
            near_s: Seconds that the best shape is charged; a bound beyond that is not looked for.
        """
        lengths, steps = self._lengths(devices, every=True), self._bounds
        if not lengths:
            return math.inf
        if math.isinf(near_s):
            found = self._best(steps, devices, lengths, None)
            return math.inf if found is None else found.bound_s
        near: Filling[int] = Filling((), near_s, 0.0)
        if devices <= COUNTED:
            return self._counted(steps, devices, lengths, near).bound_s
        few = self._few(steps, devices, lengths, near_s * (1 - 10 * CLOSE))
        found = self._relaxed(steps, devices, lengths, few, near, ROUGH) if few <= devices else None
        return near_s if found is None else found.bound_s

    def _lengths(self, devices: int, *, every: bool = False) -> list[int]:
        longest = self.cutter.count if every or devices <= COUNTED else self.longest
        return [p for p in range(1, min(longest, devices) + 1) if self.only is None or self.only(p)]

    def _best(
        self,
        steps: Steps,
        devices: int,
        lengths: list[int],
        best: Filling[int] | None,
    ) -> Filling[int] | None:
        """Returns the best set of pipelines, with a lower bound for all sets; None if none fits into memory."""
        best = best or (self._relaxed(steps, devices, lengths, 1, None) if lengths else None)
        if best is None:
            return None
        if devices <= COUNTED:
            return self._counted(steps, devices, lengths, best)
        tried: set[int] = set()
        while len(best.pairs) not in tried:
            tried.add(len(best.pairs))
            best = self._relaxed(steps, devices, lengths, len(best.pairs), best) or best
        return self._proved(steps, devices, lengths, best)

    def _relaxed(
        self,
        steps: Steps,
        devices: int,
        lengths: list[int],
        pipelines: int,
        best: Filling[int] | None,
        close: float = CLOSE,
    ) -> Filling[int] | None:
        """Returns the best set of pipelines, of any number, with all-reduces priced as among `pipelines` of them."""

        def filled(time_s: float) -> tuple[Pairs[int] | None, float]:
            return self._filled(steps, lengths, time_s, pipelines, lambda caps: _fill(caps, devices, self.total))

        return steps[-1].least(lengths, pipelines, filled, best, close=close)

    def _filled(
        self,
        steps: Steps,
        lengths: list[int],
        time_s: float,
        pipelines: int,
        fill: Callable[[Caps], list[int] | None],
    ) -> tuple[Pairs[int] | None, float]:
        """Returns the pipelines that `fill` chooses for a time limit; exact capacities are computed only for lengths
        that it would choose.

        The others are taken to do what `DeviceRow.floor_s` lets them, which is more.

        Returns:
            The pipelines, or None where `fill` finds none; and the time before which it finds none.
        """
        found, caps, steps_of = self._looked_up(
            {p: self._most(p, time_s, pipelines) for p in lengths},
            [partial(x.capacity, time_s=time_s, pipelines=pipelines) for x in steps],
            fill,
            self._asked[steps, pipelines],
        )
        if found is not None:
            return [(p, caps[p]) for p in found], 0.0
        times_s = [self._floor_s, *(x.time_s for x in steps)]
        more = (times_s[steps_of[p]](p, caps[p] + 1, pipelines) for p in lengths if caps[p] < self.total)
        return None, min(more, default=math.inf)

    def _floor_s(self, stages: int, m: int, pipelines: int) -> float:
        return self.cutter.row(stages).floor_s(m, pipelines)

    def _most(self, stages: int, time_s: float, pipelines: int) -> int:
        """Returns an upper bound of the micro-batches that a pipeline can do within a time (`DeviceRow.floor_s`)."""
        return min(self.total, self.cutter.row(stages).most(time_s, pipelines))

    def _looked_up(
        self,
        most: Caps,
        capacities: Sequence[Callable[[int], int]],
        fill: Callable[[Caps], list[int] | None],
        asked: dict[int, int],
    ) -> tuple[list[int] | None, Caps, dict[int, int]]:
        """Returns the lengths of pipelines that `fill` chooses; exact capacities are computed only for lengths that it
        would choose.

        Args:
            most: Upper bound of the capacity of each length.
            capacities: Functions of a length that return its capacity; each is at most the one before and dearer to
                find out, and the last one is right.
            fill: Function that chooses lengths, or none.
            asked: Number of steps that are taken at once for each length, as an earlier call had to; kept up to date.

        Returns:
            The chosen lengths, the capacities, and the number of steps that were taken for each length.
        """
        caps, taken = dict(most), {p: asked.get(p, 0) for p in most}
        unknown = [p for p, k in taken.items() if k]
        while True:
            for p in unknown:
                caps[p] = min(caps[p], capacities[taken[p] - 1](p))
            found = fill({p: c for p, c in caps.items() if c})
            unknown = [p for p in set(found or ()) if taken[p] < len(capacities)]
            if not unknown:
                return found, caps, taken
            for p in unknown:
                taken[p] += 1
                asked[p] = taken[p]

    def _proved(self, steps: Steps, devices: int, lengths: list[int], best: Filling[int]) -> Filling[int]:
        """Returns the set of pipelines `best` with a lower bound of any set's time, found with as few pipelines as a
        faster set would have.
        """
        limit = best.time_s * (1 - 10 * CLOSE)
        few = self._few(steps, devices, lengths, limit)
        if few >= len(best.pairs):
            return replace(best, bound_s=best.time_s)
        low = self._relaxed(steps, devices, lengths, few, best)
        assert low is not None
        return replace(best, bound_s=low.bound_s if low.bound_s < limit else best.time_s)

    def _few(self, steps: Steps, devices: int, lengths: list[int], time_s: float) -> int:
        """Returns the least number of pipelines that do all micro-batches within a time, with all-reduces priced for
        that number.
        """
        # Two pipelines of the longest kind do half of the micro-batches each, at least one stage in the mean time.
        mean_s = self.cutter.row(1).fastest.both[-1] / lengths[-1]
        few = 3 if self.total / 2 * mean_s > time_s else 1
        while few <= devices and (more := self._fewest(steps, lengths, time_s, few, devices)) > few:
            few = more
        return few

    def _fewest(self, steps: Steps, lengths: list[int], time_s: float, pipelines: int, devices: int) -> int:
        """Returns the least number of pipelines that do all micro-batches within a time, with all-reduces priced for
        `pipelines`; `devices` + 1 if no number does.
        """
        least = devices + 1

        def fill(caps: Caps) -> list[int] | None:
            nonlocal least
            least, chosen = _fewest(caps, devices, self.total)
            return chosen

        self._filled(steps, lengths, time_s, pipelines, fill)
        return least

    def _counted(self, steps: Steps, devices: int, lengths: list[int], best: Filling[int]) -> Filling[int]:
        """Returns the best set of pipelines, by a knapsack over lengths and their number, in which all-reduces are
        priced for the number used.
        """
        for pipelines in range(1, min(devices, self.total) + 1):
            limit = best.time_s * (1 - 10 * CLOSE)
            some, _ = self._filled(steps, lengths, limit, pipelines, lambda caps: _fill(caps, devices, self.total))
            if some is None:
                break  # More pipelines are charged more.

            def filled(time_s: float, most: int = pipelines) -> tuple[Pairs[int] | None, float]:
                return self._filled(
                    steps, lengths, time_s, most, lambda caps: _fill_counted(caps, devices, self.total, most)
                )

            if filled(limit)[0] is not None:
                best = steps[-1].least(lengths, pipelines, filled, best) or best
        return replace(best, bound_s=best.time_s)

    def _shape(self, devices: int, filling: Filling[int] | None) -> PlanShape | None:
        if filling is None:
            return None
        rows = tuple(Alike(p, m, k) for (p, m), k in sorted(Counter(filling.pairs).items(), reverse=True))
        return PlanShape(
            devices, rows, filling.time_s, filling.bound_s, filling.bound_s >= filling.time_s * (1 - 10 * CLOSE)
        )


# ------------------------------------------------------------------------------------------------ knapsacks


def _useful(caps: Caps, devices: int) -> list[tuple[int, int]]:
    """Returns the (length, capacity) pairs of pipelines that do more micro-batches than every shorter one, shortest
    first.
    """
    found: list[tuple[int, int]] = []
    for p in sorted(caps):
        if p <= devices and (not found or caps[p] > found[-1][1]):
            found.append((p, caps[p]))
    return found


def _fill(caps: Caps, devices: int, total: int) -> list[int] | None:
    """Returns lengths of pipelines, with `devices` devices at most, that do at least `total` micro-batches; None if
    there are none.
    """
    items = _useful(caps, devices)
    if not items:
        return None
    dense, most = max(items, key=lambda x: (x[1] / x[0], -x[0]))
    # From here on some best filling has the length that does most per device.
    regular = items[-1][0] * dense
    value = [0] * (min(devices, regular + dense) + 1)
    for n in range(1, len(value)):
        best = value[n - 1]
        for p, c in items:
            if p > n:
                break
            got = value[n - p] + c
            if got > best:
                best = got
        value[n] = best
    beyond = max(0, -(-(devices - len(value) + 1) // dense))
    at = devices - beyond * dense
    if value[at] + beyond * most < total:
        return None
    lengths = [dense] * beyond
    while at > 0 and value[at]:
        for p, c in reversed(items):
            if p <= at and value[at - p] + c == value[at]:
                lengths.append(p)
                at -= p
                break
        else:
            at -= 1
    return lengths


def _fill_counted(caps: Caps, devices: int, total: int, most: int) -> list[int] | None:
    """Returns at most `most` lengths of pipelines, with `devices` devices at most, that do at least `total`
    micro-batches; None if there are none.
    """
    items = _useful(caps, devices)
    rows = [[0] * (devices + 1)]
    while rows[-1][-1] < total:
        if len(rows) > most:
            return None
        last = rows[-1]
        row = [max((last[n - p] + c for p, c in items if p <= n), default=0) for n in range(devices + 1)]
        for n in range(1, devices + 1):
            row[n] = max(row[n], row[n - 1], last[n])
        if row == last:
            return None
        rows.append(row)
    lengths, at = [], devices
    for k in range(len(rows) - 1, 0, -1):
        while at and rows[k][at - 1] == rows[k][at]:
            at -= 1
        if rows[k - 1][at] == rows[k][at]:
            continue
        p = next(p for p, c in reversed(items) if p <= at and rows[k - 1][at - p] + c == rows[k][at])
        lengths.append(p)
        at -= p
    return lengths


def _fewest(caps: Caps, devices: int, total: int) -> tuple[int, list[int] | None]:
    """Returns a lower bound of the number of pipelines that do `total` micro-batches on `devices`, by linear
    programming.

    Returns:
        Number of pipelines and their lengths; `devices` + 1 and None if no number of pipelines does.
    """
    items = _useful(caps, devices)
    best, chosen = math.inf, list[int]()
    for i, (p, c) in enumerate(items):
        if p * total <= devices * c and total / c < best:
            best, chosen = total / c, [p]
        for q, d in items[:i]:
            # x of length p and y of length q: c x + d y = total, p x + q y = devices.
            below = c * q - d * p
            if below:
                x, y = (total * q - d * devices) / below, (c * devices - p * total) / below
                if x >= 0 and y >= 0 and x + y < best:
                    best, chosen = x + y, [p, q]
    return (math.ceil(best - 1e-9), chosen) if chosen else (devices + 1, None)
