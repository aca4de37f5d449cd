"""Splits the micro-batches of a step over pipelines: computes how many each can do within a time, and the least time
for all.

Theory of operation. A pipeline of some *kind* takes T(kind, m) seconds for m micro-batches, and T does not fall with m.
What it can do in t seconds is its *capacity*, the most m with T <= t. All times in which anything changes are values of
T, so a search from both sides ends: from above a filling found for a time takes at most the longest of its pipelines'
own times; from below, where none is found, nothing changes until the next time at which some capacity grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

from chaos_lightning.planning.pipelines.cuts import CLOSE

GROWN = 200
"""Most times that are tried until all micro-batches are done in one."""

Kind = TypeVar("Kind", bound=Hashable)
Pairs = Sequence[tuple[Kind, int]]
"""Kind and micro-batches of each pipeline."""


@dataclass(frozen=True, slots=True)
class Filling(Generic[Kind]):
    """Set of pipelines that together do all micro-batches of a step, with their time."""

    pairs: tuple[tuple[Kind, int], ...]
    time_s: float
    """Seconds of the slowest pipeline, charged for as many pipelines as there are."""
    bound_s: float
    """Lower bound of the seconds of all fillings that were searched."""


class Splitter(Generic[Kind]):
    """Search for the best split of a step's micro-batches over pipelines.

    Args:
        time_s: T(kind, m, pipelines), in seconds; infinite where nothing fits. It may depend on how many there are.
        total: Micro-batches of a step.
        guess: Function of kind and seconds: about how many micro-batches a pipeline does in that time.
    """

    def __init__(
        self,
        time_s: Callable[[Kind, int, int], float],
        total: int,
        guess: Callable[[Kind, float], int] | None = None,
    ) -> None:
        self.time_s, self.total = time_s, total
        self._guess = guess
        self._last: dict[tuple[Kind, int], int] = {}

    def capacity(self, kind: Kind, time_s: float, pipelines: int) -> int:
        """Returns the largest number of micro-batches that a pipeline can do within a time; 0 if it can do none."""
        limit = time_s * (1 + CLOSE)
        low, high, below, above = 0, self.total + 1, 0.0, math.inf
        guess = self._last.get((kind, pipelines)) or (self._guess(kind, time_s) if self._guess else 1)
        guess = min(max(guess, 1), self.total)
        while high - low > 1:
            found = self.time_s(kind, guess, pipelines)
            if found <= limit:
                low, below = guess, found
            else:
                high, above = guess, found
            # A micro-batch more costs about as much as each did so far.
            slope = (above - below) / (high - low) if low and math.isfinite(above) else found / (guess + 1)
            room = (limit - found) / slope if math.isfinite(found) and slope > 0 else -(guess // 2)
            step = round(max(-self.total, min(self.total, room)))
            guess = min(max(guess + step, low + 1), high - 1)
        self._last[kind, pipelines] = max(1, low)
        return low

    def capacities(self, kinds: Collection[Kind], time_s: float, pipelines: int) -> dict[Kind, int]:
        """Returns how many micro-batches each kind of pipeline can do within a time; kinds that can do none are left
        out.
        """
        return {k: c for k in kinds if (c := self.capacity(k, time_s, pipelines))}

    def next_s(self, kinds: Collection[Kind], time_s: float, pipelines: int) -> float:
        """Returns the next longer time (s) at which some kind of pipeline can do more micro-batches."""
        more = [(k, self.capacity(k, time_s, pipelines) + 1) for k in kinds]
        return min((self.time_s(k, m, pipelines) for k, m in more if m <= self.total), default=math.inf)

    def over(self, pipelines: Sequence[Kind], near_s: float = 0.0) -> Filling[Kind] | None:
        """Returns the best split of the micro-batches over the given pipelines, some of which may get none; None if
        none fits into memory.

        Args:
            pipelines: Kinds of the pipelines.
            near_s: Approximate seconds of the step, if known.
        """
        kinds, count = list(dict.fromkeys(pipelines)), len(pipelines)

        def filled(time_s: float) -> tuple[Pairs[Kind] | None, float]:
            caps = self.capacities(kinds, time_s, count)
            pairs = [(k, caps[k]) for k in pipelines if k in caps]
            enough = sum(m for _, m in pairs) >= self.total
            return (pairs, math.inf) if enough else (None, self.next_s(kinds, time_s, count))

        return self.least(kinds, count, filled, near_s=near_s)

    def least(
        self,
        kinds: Collection[Kind],
        pipelines: int,
        filled: Callable[[float], tuple[Pairs[Kind] | None, float]],
        best: Filling[Kind] | None = None,
        near_s: float = 0.0,
        close: float = CLOSE,
    ) -> Filling[Kind] | None:
        """Returns the set of pipelines that does all micro-batches in the least time, out of those that `filled`
        proposes for a time, with all-reduces priced for `pipelines`.

        Args:
            kinds: All kinds that `filled` uses.
            pipelines: Number of pipelines that the all-reduce is charged for in the search; the result is charged for
                its own.
            filled: Function of a time that returns pipelines that together do at least all micro-batches in it, or None
                where there are none; and the time before which there are none.
            best: Filling that is known already; only a better one is searched. None: any.
            near_s: Time at which the search begins if nothing is known; 0: the shortest time of one micro-batch.
            close: Fraction by which the bound may be below the time that was found.

        Returns:
            The better one of `best` and what was found; its bound is that of the search. None where there is nothing.
        """
        low, high = 0.0, math.inf if best is None else best.time_s
        if best is None:
            time_s = near_s or max(1e-12, min(self.time_s(k, 1, pipelines) for k in kinds))
            if math.isinf(time_s):
                return None
            grow = 1.02 if near_s else 1.5
            for _ in range(GROWN):
                pairs, more_s = filled(time_s)
                if pairs is not None:
                    best, high = self._trimmed(pairs, pipelines)
                    if math.isfinite(high):
                        break
                    time_s *= 1.02  # A cut was found for more micro-batches, and none for fewer.
                    continue
                if math.isinf(more_s):
                    return None
                low = more_s
                time_s, grow = max(low, grow * time_s), grow**2
            if best is None or math.isinf(high):
                return None
        while low < high * (1 - 4 * close):
            # The answer is `low` or above, and `high` or below.
            middle = (low + high) / 2 if low else 0.97 * high
            pairs, more_s = filled(middle)
            if pairs is None:
                low = max(middle, more_s)
                continue
            found, time_s = self._trimmed(pairs, pipelines)
            high = min(middle, time_s)
            if found.time_s < best.time_s * (1 - CLOSE):
                best = found
        return Filling(best.pairs, best.time_s, min(low, best.time_s))

    def _trimmed(self, pairs: Pairs[Kind], pipelines: int) -> tuple[Filling[Kind], float]:
        """Removes surplus micro-batches from the slowest pipelines until their sum is that of a step.

        Returns:
            The pipelines that are left, charged for their number; and their time as charged for `pipelines`.
        """
        count = len(pairs)
        heap = [(-self.time_s(k, m, pipelines), i, k, m) for i, (k, m) in enumerate(pairs)]
        heapify(heap)
        for _ in range(sum(m for _, m in pairs) - self.total):
            _, i, k, m = heap[0]
            if m == 1:
                heappop(heap)
            else:
                heapreplace(heap, (-self.time_s(k, m - 1, pipelines), i, k, m - 1))
        left, count = [(k, m) for _, _, k, m in sorted(heap, key=lambda x: x[1])], len(heap)
        time_s = max(self.time_s(k, m, count) for k, m in set(left))
        return Filling(tuple(left), time_s, 0.0), max(self.time_s(k, m, pipelines) for k, m in set(left))
