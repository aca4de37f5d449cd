"""The best plan for n equal devices: how many pipelines, how long, how many micro-batches each; at once, then exact.

Theory of operation. A pipeline of p devices takes T(p, m) seconds for m micro-batches with its best cut (`cuts`), its
all-reduce and optimizer included. What it can do in t seconds is its *capacity* c_p(t), the most m with T(p, m) <= t. A
step of M micro-batches takes at most t if and only if some multiset of lengths with a sum of at most n has capacities
with a sum of at least M: an unbounded knapsack, of which one pass answers for all numbers up to n. The least such t is
one of the T(p, m); a search narrows it down from both sides, and ends where nothing lies between them. So the answer is
exact over all multisets of lengths and all splits of the micro-batches; devices that add nothing are idle.

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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from chaos_lightning.planning.pipelines.cuts import CLOSE, Cutter

LONGEST = 40
"""Stages of a pipeline at most, unless memory asks for more."""
MANY = 16
"""Pipelines that first answers are searched with; what is found is charged with its own number."""
FINE = 1e-3
"""How near first answers are searched, as a share of the time."""
COUNTED = 64
"""Devices: for no more than so many the number of pipelines is a dimension of the search."""


class Alike(NamedTuple):
    """Pipelines that are alike."""

    stages: int
    micro_batches: int
    """Of each."""
    times: int
    """How many there are."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many pipelines of which length, with which micro-batches."""

    devices: int
    rows: tuple[Alike, ...]
    """Longest first, then those with most micro-batches."""
    charged_s: float
    """Seconds of a step, without its commit, as the search counts them."""
    bound_s: float
    """No shape is charged less."""
    exact: bool
    """Nothing better exists over all multisets of lengths and splits, for the cuts that were found."""

    @property
    def pipelines(self) -> int:
        return sum(r.times for r in self.rows)

    @property
    def used(self) -> int:
        return sum(r.times * r.stages for r in self.rows)

    @property
    def gap(self) -> float:
        """Share by which a better shape might be charged less."""
        return 0.0 if self.exact else max(0.0, 1 - self.bound_s / self.charged_s)


class _Line(NamedTuple):
    """T(p, m) of one length, as linear in m between points."""

    at: tuple[int, ...]
    times_s: tuple[float, ...]
    most: int
    """Micro-batches that memory allows."""

    def capacity(self, time_s: float) -> int:
        """Micro-batches that it does in a time."""
        at, t = self.at, self.times_s
        if time_s < t[0]:
            return 0
        i = min(bisect_right(t, time_s) - 1, len(t) - 2)
        slope = (t[i + 1] - t[i]) / (at[i + 1] - at[i])
        return min(self.most, at[i] + int((time_s - t[i]) / slope))


Caps = dict[int, int]
"""By length: micro-batches that a pipeline does in some time; lengths that do none are left out."""


class Shapes:
    """Finds shapes for one kind of device and any number of them.

    Args:
        cutter: Cuts pipelines of such devices.
        micro_batches: Of a step.
        longest: Stages of a pipeline at most; 0: `LONGEST`, or more where memory asks for more.
    """

    def __init__(self, cutter: Cutter, micro_batches: int, longest: int = 0) -> None:
        self.cutter, self.total = cutter, micro_batches
        self._lines: dict[int, _Line | None] = {}
        self._guess: dict[tuple[int, int], int] = {}
        self.longest = min(cutter.count, longest or LONGEST)
        if not longest and not any(self._line(p) for p in range(1, self.longest + 1)):
            self.longest = cutter.count

    # ------------------------------------------------------------------------------------------------ times

    def time_s(self, stages: int, m: int, pipelines: int) -> float:
        """T(p, m) beside `pipelines - 1` others; infinite where nothing fits."""
        cut = self.cutter.best(stages, m, pipelines)
        return math.inf if cut is None else cut.charged_s

    def _line(self, stages: int) -> _Line | None:
        if stages not in self._lines:
            self._lines[stages] = self._draw(stages)
        return self._lines[stages]

    def _draw(self, stages: int) -> _Line | None:
        points = (1, stages, 2 * stages, 4 * stages) if stages > 1 else (1, 2)
        row = self.cutter.row(stages)
        cuts: dict[int, tuple[int, ...]] = {}
        for m in reversed(points):
            usual = next(iter(cuts.values()), None) or row.quick(min(m, 2 * stages))
            at = usual if usual and row.fits(usual, m) else row.quick(m)
            if at:
                cuts[m] = at
        if not cuts:
            return None
        last = max(cuts)
        cuts.setdefault(last + 1, cuts[last])
        times = tuple(row.charge(at, m, MANY).charged_s for m, at in sorted(cuts.items()))
        return _Line(tuple(sorted(cuts)), times, row.most_micro_batches(cuts[last], self.total))

    def warm(self) -> None:
        """Fills the table of pipeline times, so that first answers come at once."""
        for p in range(1, self.longest + 1):
            self._line(p)

    def _capacity(self, stages: int, time_s: float, pipelines: int) -> int:
        """c_p(t): the most micro-batches that take no longer; 0: none does."""
        limit = time_s * (1 + CLOSE)
        low, high, below, above = 0, self.total + 1, 0.0, math.inf
        guess = self._guess.get((stages, pipelines))
        if guess is None:
            line = self._line(stages)
            guess = line.capacity(time_s) if line else 1
        guess = min(max(guess, 1), self.total)
        while high - low > 1:
            found = self.time_s(stages, guess, pipelines)
            if found <= limit:
                low, below = guess, found
            else:
                high, above = guess, found
            # A micro-batch more costs about as much as each did so far.
            slope = (above - below) / (high - low) if low and math.isfinite(above) else found / (guess + stages)
            step = (limit - found) / slope if math.isfinite(found) else -(guess // 2)
            guess = min(max(guess + round(step), low + 1), high - 1)
        self._guess[stages, pipelines] = max(1, low)
        return low

    def _caps(self, lengths: Iterable[int], time_s: float, pipelines: int) -> Caps:
        return {p: c for p in lengths if (c := self._capacity(p, time_s, pipelines))}

    def _next(self, lengths: Iterable[int], time_s: float, pipelines: int) -> float:
        """The least time beyond `time_s` at which some capacity grows."""
        caps = self._caps(lengths, time_s, pipelines)
        more = [(p, caps.get(p, 0) + 1) for p in lengths]
        return min((self.time_s(p, m, pipelines) for p, m in more if m <= self.total), default=math.inf)

    # ------------------------------------------------------------------------------------------------ answers

    def first(self, devices: int) -> Shape | None:
        """A good shape at once; None where no pipeline of at most so many devices fits into memory."""
        lines = {p: x for p in range(1, min(self.longest, devices) + 1) if (x := self._line(p))}
        if not lines:
            return None

        def filled(time_s: float) -> list[int] | None:
            caps = {p: c for p, x in lines.items() if (c := min(self.total, x.capacity(time_s)))}
            return _fill(caps, devices, self.total)

        low, high, best = 0.0, min(x.times_s[0] for x in lines.values()), None
        while best is None:
            if high > self.total * lines[min(lines)].times_s[0] * 2:
                return None
            best = filled(high)
            low, high = (low, high) if best else (high, 2 * high)
        while high - low > FINE * high:
            middle = (low + high) / 2
            found = filled(middle)
            low, high, best = (low, middle, found) if found else (middle, high, best)
        return self._split(devices, best)

    def _split(self, devices: int, lengths: Sequence[int]) -> Shape | None:
        """The best split of the micro-batches over given pipelines."""
        counts = Counter(sorted(lengths, reverse=True)[: self.total])
        pipelines = sum(counts.values())

        def filled(time_s: float) -> list[tuple[int, int]] | None:
            caps = self._caps(counts, time_s, pipelines)
            done = sum(caps.get(p, 0) * k for p, k in counts.items())
            return [(p, caps[p]) for p in counts.elements() if p in caps] if done >= self.total else None

        return self._least(devices, counts, pipelines, filled)

    def _least(
        self,
        devices: int,
        lengths: Iterable[int],
        pipelines: int,
        filled: Callable[[float], list[tuple[int, int]] | None],
        high: Shape | None = None,
    ) -> Shape | None:
        """The least time in which `filled` finds room for all micro-batches, with times as of `pipelines`.

        Args:
            devices: How many there are.
            lengths: Of pipelines that `filled` uses.
            pipelines: How many the all-reduce is charged for.
            filled: (length, micro-batches) of pipelines that do it in a time, together at least all.
            high: A shape that takes no less; None: it is searched from above.
        """
        known = list(lengths)
        low, best = 0.0, high
        if best is None:
            time_s = max(1e-12, min(self.time_s(p, 1, pipelines) for p in known))
            while (rows := filled(time_s)) is None:
                low = self._next(known, time_s, pipelines)
                if math.isinf(low):
                    return None
                time_s = max(low, 1.5 * time_s)
            best = self._shape(devices, rows)
        while low < best.charged_s * (1 - CLOSE):
            # The answer is low or above, and best or below.
            middle = (low + best.charged_s) / 2 if low else 0.97 * best.charged_s
            rows = filled(middle)
            if rows is not None:
                found = self._shape(devices, rows)
                if found.charged_s >= best.charged_s * (1 - CLOSE):
                    break
                best = found
            else:
                low = max(middle, self._next(known, middle, pipelines))
        return replace(best, bound_s=min(low, best.charged_s))

    def _shape(self, devices: int, pairs: Sequence[tuple[int, int]]) -> Shape:
        """The shape of some pipelines, after what is more than all micro-batches is taken from the slowest."""
        count = len(pairs)
        heap = [(-self.time_s(p, m, count), p, m) for p, m in pairs]
        heapify(heap)
        for _ in range(sum(m for _, m in pairs) - self.total):
            _, p, m = heap[0]
            if m == 1:
                heappop(heap)
            else:
                heapreplace(heap, (-self.time_s(p, m - 1, count), p, m - 1))
        counts = Counter((p, m) for _, p, m in heap)
        rows = tuple(Alike(p, m, k) for (p, m), k in sorted(counts.items(), reverse=True))
        charged = max(self.time_s(p, m, len(heap)) for p, m in counts)
        return Shape(devices, rows, charged, 0.0, False)

    def exact(self, devices: int) -> Shape | None:
        """The best shape; None where no pipeline of at most so many devices fits into memory."""
        lengths = range(1, min(self.longest, devices) + 1)
        best = self.first(devices) or self._relaxed(devices, lengths, 1, None)
        if best is None:
            return None
        if devices <= COUNTED:
            return self._counted(devices, lengths, best)
        tried: set[int] = set()
        while best.pipelines not in tried:
            tried.add(best.pipelines)
            found = self._relaxed(devices, lengths, best.pipelines, best)
            if found is not None and found.charged_s < best.charged_s * (1 - CLOSE):
                best = found
        return self._proved(devices, lengths, best)

    def _relaxed(self, devices: int, lengths: Sequence[int], pipelines: int, best: Shape | None) -> Shape | None:
        """The best shape of any number of pipelines that are charged as if they were `pipelines`."""

        def filled(time_s: float) -> list[tuple[int, int]] | None:
            caps = self._caps(lengths, time_s, pipelines)
            found = _fill(caps, devices, self.total)
            return None if found is None else [(p, caps[p]) for p in found]

        return self._least(devices, lengths, pipelines, filled, best)

    def _proved(self, devices: int, lengths: Sequence[int], best: Shape) -> Shape:
        """Says whether anything better could exist: how few pipelines it would have, and what those can do."""
        limit = best.charged_s * (1 - 10 * CLOSE)
        few = 1
        while True:
            more = _fewest(self._caps(lengths, limit, few), devices, self.total)
            if more <= few:
                break
            few = more
        low = self._relaxed(devices, lengths, few, best)
        assert low is not None
        if low.bound_s >= limit or few >= best.pipelines:
            return replace(best, bound_s=best.charged_s, exact=True)
        return replace(best, bound_s=low.bound_s, exact=False)

    def _counted(self, devices: int, lengths: Sequence[int], best: Shape) -> Shape:
        """The best shape, with the number of pipelines as a dimension of the knapsack."""
        for pipelines in range(1, min(devices, self.total) + 1):
            limit = best.charged_s * (1 - 10 * CLOSE)
            if _fill(self._caps(lengths, limit, pipelines), devices, self.total) is None:
                break  # More pipelines are charged more.

            def filled(time_s: float, most: int = pipelines) -> list[tuple[int, int]] | None:
                caps = self._caps(lengths, time_s, most)
                found = _fill_counted(caps, devices, self.total, most)
                return None if found is None else [(p, caps[p]) for p in found]

            found = self._least(devices, lengths, pipelines, filled, best)
            if found is not None and found.charged_s < best.charged_s * (1 - CLOSE):
                best = found
        return replace(best, bound_s=best.charged_s, exact=True)


# ------------------------------------------------------------------------------------------------ knapsacks


def _useful(caps: Caps, devices: int) -> list[tuple[int, int]]:
    """Lengths that do more than every shorter one, shortest first."""
    found: list[tuple[int, int]] = []
    for p in sorted(caps):
        if p <= devices and (not found or caps[p] > found[-1][1]):
            found.append((p, caps[p]))
    return found


def _fill(caps: Caps, devices: int, total: int) -> list[int] | None:
    """Lengths with a sum of at most `devices` that do at least `total`; None if there are none."""
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
    """As `_fill`, of at most `most` lengths."""
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


def _fewest(caps: Caps, devices: int, total: int) -> int:
    """No fewer pipelines do `total` on `devices`: the linear program over one or two lengths, rounded up.

    Returns:
        `devices` + 1 where no number of them does.
    """
    items = _useful(caps, devices)
    best = math.inf
    for i, (p, c) in enumerate(items):
        if p * total <= devices * c:
            best = min(best, total / c)
        for q, d in items[:i]:
            # x of length p and y of length q: c x + d y = total, p x + q y = devices.
            below = c * q - d * p
            if below:
                x, y = (total * q - d * devices) / below, (c * devices - p * total) / below
                if x >= 0 and y >= 0:
                    best = min(best, x + y)
    return devices + 1 if math.isinf(best) else math.ceil(best - 1e-9)
