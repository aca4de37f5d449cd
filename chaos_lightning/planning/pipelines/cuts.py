"""Where to cut the layers of one pipeline of equal devices, and how long it then takes: exact, or with its gap.

Theory of operation. What a cut costs is the time of 1F1B (`timing.one_f_one_b_ends`), to which each stage adds the
all-reduce of its gradients and its optimizer (`charged`). No cut is shorter than three bounds, each of which looks at
one stage k of p with m micro-batches, F_k and B_k seconds for one, and w_k = min(p - k + extra, m) in flight:

    through      the way to stage k, m (F_k + B_k), the way back
    after first  sum over all of (F + B + hops), (m - 1) B_k + (m - w_k) F_k: the first backward unit comes back to k
                 only when it has been to the last stage, and no more than w_k forward units are done by then
    in turns     every w_k micro-batches go from k to the last stage and back

The second says that early stages may have more layers than late ones. Each bound of stage k is a function of its first
and last layer alone, and does not fall if the stage takes one layer more and its successors one less. So for a given
time the longest stages that keep to it, from the first on, tell whether any cut keeps to it, and the least such time is
a lower bound over all cuts. If the cut that comes with it takes no longer in the simulation it is the best one. Else
cuts whose bounds are lower than the best time so far are tried, all of them where there are few, and the gap is told.
Memory limits a stage in the same way.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise

from chaos_lightning.planning.pipelines.job import Device, Link, TrainingJob
from chaos_lightning.planning.pipelines.schedules import in_flight
from chaos_lightning.planning.pipelines.timing import OneFOneB, Path, PipelineTimes

FEW = 1000
"""Cuts: where there are no more, all of them are tried."""
FEW_UNITS = 2_000_000
"""Units that this simulates at most."""
PATHS = 12
"""Critical paths that are kept while the search moves on."""
RUNS = 20_000
"""Simulations that are kept."""
UNITS = 40_000
"""Units that one search simulates at most where there are more."""
CLOSE = 1e-12
"""Times nearer than this share of themselves are equal: sums in another order differ by it."""


GRID = 1.3
"""Ratio of the numbers of micro-batches for which cuts are searched."""


def _near_power(value: int, base: float) -> int:
    """The whole number next to a power of `base` that is next to `value`."""
    return round(base ** round(math.log(value, base)))


class _Missing:
    pass


_MISSING = _Missing()


def reduce_s(nbytes: float, owners: int, link: Link, hop_s: float = 0.0) -> float:
    """Seconds of an all-reduce among `owners` over trees whose slowest link is `link`."""
    if owners < 2 or not nbytes:
        return 0.0
    return 2 * (link.latency_s + hop_s) + 2 * (owners - 1) / owners * 8.0 * nbytes / link.rate_bps


@dataclass(frozen=True, slots=True)
class Cut:
    """Where one pipeline is cut, and what that costs."""

    at: tuple[int, ...]
    """First layer of each stage, and the number of layers."""
    ends_s: tuple[float, ...]
    """When each stage ends its last backward unit."""
    charged_s: float
    """The latest of the stages' ends with their all-reduce and optimizer."""
    bound_s: float
    """No cut is charged less."""

    @property
    def exact(self) -> bool:
        return self.charged_s <= self.bound_s * (1 + CLOSE)


class Cutter:
    """Cuts the layers of a job for pipelines of devices of one kind.

    Args:
        job: Layers, overheads, memory rules.
        device: Any of the devices.
        hop: Between neighbouring stages.
        reduce: Between the owners of a layer.
    """

    def __init__(self, job: TrainingJob, device: Device, hop: Link, reduce: Link) -> None:
        self.job, self.device, self.hop, self.reduce = job, device, hop, reduce
        c, v, o = job.costs, device.speed, job.overheads
        self.count = c.count
        self.unit_s = o.unit_s
        self.extra = job.memory.in_flight_extra
        self.forward = [x / v for x in c.forward]
        self.backward = [x / v for x in c.backward]
        self.both = [a + b for a, b in zip(self.forward, self.backward, strict=True)]
        self.optimizer_s = [x / v for x in c.optimizer_s]
        self.hops = [o.hop_s + hop.time_s(x) for x in c.outputs]
        """By layer: seconds of a hop behind it."""
        self.least_hop = min(self.hops[:-1], default=0.0)
        still = [p + o + (1 + job.memory.flat_buffers) * g
                 for p, o, g in zip(c.parameters, c.optimizer, c.gradients, strict=True)]  # fmt: skip
        self._kept = [still]
        """By micro-batches in flight: sums over layers of all that a stage keeps, but workspace and boundaries."""
        self._found: dict[tuple[int, int, int], Cut | None] = {}
        self._runs: dict[tuple[tuple[int, ...], int], OneFOneB] = {}

    # ------------------------------------------------------------------------------------------------ one cut

    def times(self, at: tuple[int, ...]) -> PipelineTimes:
        """Of the stages of a cut."""
        f, b, u = self.forward, self.backward, self.unit_s
        pairs = list(pairwise(at))
        return PipelineTimes(
            tuple(f[y] - f[x] + u for x, y in pairs),
            tuple(b[y] - b[x] + u for x, y in pairs),
            tuple(self.hops[x - 1] for x in at[1:-1]),
        )

    def tail_s(self, first: int, end: int, pipelines: int) -> float:
        """All-reduce and optimizer of a stage."""
        gradients = self.job.costs.gradients
        return (
            reduce_s(gradients[end] - gradients[first], pipelines, self.reduce, self.job.overheads.hop_s)
            + self.optimizer_s[end]
            - self.optimizer_s[first]
        )

    def kept(self, in_flight: int) -> list[int]:
        """Sums over layers of the bytes that a stage keeps, but for workspace and boundaries."""
        while len(self._kept) <= in_flight:
            last = self._kept[-1]
            self._kept.append([x + y for x, y in zip(last, self.job.costs.activations, strict=True)])
        return self._kept[in_flight]

    def memory(self, stages: int, k: int, first: int, end: int, m: int) -> int:
        """Peak bytes of stage `k`, in flight as 1F1B has it."""
        c, rules = self.job.costs, self.job.memory
        kept = self.kept(in_flight(stages, k, m, self.extra))
        total = kept[end] - kept[first] + c.workspace(first, end)
        if rules.boundaries:
            total += m * (2 * c.boundary_in(first) + c.boundary_out(end))
        return total

    def fits(self, at: tuple[int, ...], m: int) -> bool:
        stages, room = len(at) - 1, self.device.memory_nbytes
        return all(self.memory(stages, k, x, y, m) <= room for k, (x, y) in enumerate(pairwise(at)))

    def most_micro_batches(self, at: tuple[int, ...], limit: int) -> int:
        """How many micro-batches of a step this cut has memory for, up to a limit."""
        low, high = 0, limit + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(at, middle) else (low, middle)
        return low

    def charge(self, at: tuple[int, ...], m: int, pipelines: int, bound_s: float = -math.inf) -> Cut:
        """What a cut costs with `m` micro-batches, beside `pipelines - 1` other pipelines."""
        done = self._run(at, m)
        return Cut(at, tuple(done.ends_s), max(self._late(done, at, pipelines)), bound_s)

    def _run(self, at: tuple[int, ...], m: int) -> OneFOneB:
        found = self._runs.get((at, m))
        if found is None:
            if len(self._runs) > RUNS:
                self._runs.clear()
            found = self._runs[at, m] = OneFOneB(self.times(at), m, self.extra)
        return found

    def _late(self, done: OneFOneB, at: tuple[int, ...], pipelines: int) -> list[float]:
        """By stage: its end, all-reduce and optimizer included."""
        pairs = pairwise(at)
        return [e + self.tail_s(x, y, pipelines) for e, (x, y) in zip(done.ends_s, pairs, strict=True)]

    # ------------------------------------------------------------------------------------------------ the best cut

    def best(self, stages: int, m: int, pipelines: int) -> Cut | None:
        """The best cut into `stages` for `m` micro-batches beside `pipelines - 1` other pipelines.

        Where there are more than `FEW` cuts, those are searched for some numbers of micro-batches and pipelines, and
        the nearest one is taken for the others.

        Returns:
            None where no cut fits into memory, or where there are fewer layers than stages.
        """
        if not 0 < stages <= self.count:
            return None
        key = (stages, m, pipelines)
        if key in self._found:
            return self._found[key]
        searched = key if self.few(stages, m) else (stages, _near_power(m, GRID), _near_power(pipelines, 2.0))
        found = self._found.get(searched, _MISSING)
        if isinstance(found, _Missing):
            found = self._found[searched] = self._best(*searched)
        if searched != key and found is not None:
            fits = self.fits(found.at, m)
            found = self.charge(found.at, m, pipelines) if fits else self._best(*key)
        self._found[key] = found
        return found

    def few(self, stages: int, m: int) -> bool:
        """All cuts into so many stages are tried, so that the best one is known."""
        cuts = math.comb(self.count - 1, stages - 1)
        return cuts <= FEW and 2 * cuts * stages * m <= FEW_UNITS

    def quick(self, stages: int, m: int) -> tuple[int, ...] | None:
        """A good cut at once, for more than one pipeline; None where none is found that fits."""
        limits = _Bounds(self, stages, m, 2)
        found = [x[0] for x in (limits.least(relaxed=False), limits.balanced()) if x]
        return min(found, key=lambda at: self.charge(at, m, 2).charged_s, default=None)

    def _best(self, stages: int, m: int, pipelines: int) -> Cut | None:
        limits = _Bounds(self, stages, m, pipelines)
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
        if self.few(stages, m):
            best = self._all(limits, best, bound)
            # All cuts that could be better were tried, so the best one found is the bound.
            return best and Cut(best.at, best.ends_s, best.charged_s, best.charged_s)
        return best and self._near(best, m, pipelines)

    def _all(self, limits: _Bounds, best: Cut | None, bound: float) -> Cut | None:
        for at in combinations(range(1, self.count), limits.stages - 1):
            cut = (0, *at, self.count)
            pairs = list(pairwise(cut))
            if best and any(limits.of(k, x, y) >= best.charged_s for k, (x, y) in enumerate(pairs)):
                continue
            if self.fits(cut, limits.m):
                other = self.charge(cut, limits.m, limits.pipelines, bound)
                best = other if best is None else min(best, other, key=_charged)
        return best

    def _near(self, best: Cut, m: int, pipelines: int) -> Cut:
        """Moves one layer from a stage to another one, by way of those between, while that helps.

        A move can only help if it shortens every critical path that was met so far, so most need no simulation.
        """
        stages = len(best.at) - 1
        tries = max(4, UNITS // (2 * stages * m))
        moves = [(i, j, d) for i, j in combinations(range(1, stages + 1), 2) for d in (1, -1)]
        paths = [self._critical(best.at, m, pipelines)]
        while tries > 0:
            least = best.charged_s * (1 - CLOSE)
            hopeful = []
            for i, j, step in moves:
                at = (*best.at[:i], *(x + step for x in best.at[i:j]), *best.at[j:])
                if at[i - 1] < at[i] and at[j - 1] < at[j]:
                    longest = max(self._along(path, at, pipelines) for path in paths)
                    if longest < least:
                        hopeful.append((longest, at))
            hopeful.sort()
            found = None
            for _, at in hopeful:
                if tries <= 0 or max(self._along(path, at, pipelines) for path in paths) >= least:
                    continue
                if not self.fits(at, m):
                    continue
                tries -= 1
                other = self.charge(at, m, pipelines, best.bound_s)
                if other.charged_s < least:
                    found = other
                    break
                paths.append(self._critical(at, m, pipelines))
            if found is None:
                break
            best = found
            paths = [*paths[-PATHS:], self._critical(best.at, m, pipelines)]
        return best

    def _critical(self, at: tuple[int, ...], m: int, pipelines: int) -> tuple[int, Path]:
        """The stage that ends last, and the critical path to its end."""
        done = self._run(at, m)
        late = self._late(done, at, pipelines)
        stage = late.index(max(late))
        return stage, done.path(stage)

    def _along(self, critical: tuple[int, Path], at: tuple[int, ...], pipelines: int) -> float:
        """What a cut takes at least: the same units one after another as on a critical path of another cut."""
        stage, path = critical
        f, b, u = self.forward, self.backward, self.unit_s
        total, x = self.tail_s(at[stage], at[stage + 1], pipelines), 0
        for y, forward, backward in zip(at[1:], path.forward, path.backward, strict=True):
            total += forward * (f[y] - f[x] + u) + backward * (b[y] - b[x] + u)
            x = y
        return total + sum(n * self.hops[y - 1] for n, y in zip(path.hops, at[1:-1], strict=True) if n)


class _Bounds:
    """The bounds of one search: stages, micro-batches and pipelines are fixed."""

    def __init__(self, cutter: Cutter, stages: int, m: int, pipelines: int) -> None:
        self.cutter, self.stages, self.m, self.pipelines = cutter, stages, m, pipelines
        self.way_s = cutter.least_hop + cutter.unit_s
        """Of a unit of no layers and its hop."""
        self.total = cutter.both[-1] + 2 * stages * cutter.unit_s + 2 * (stages - 1) * cutter.least_hop
        self.warm = [in_flight(stages, k, m, cutter.extra) for k in range(stages)]
        outputs = cutter.job.costs.outputs[:-1]
        self.least_output = min(outputs, default=0)
        self.alike = self.least_output == max(outputs, default=0)

    def of(self, k: int, first: int, end: int) -> float:
        """Lower bound of what is charged if stage `k` has layers [first, end)."""
        c, m, warm, u = self.cutter, self.m, self.warm[k], self.cutter.unit_s
        f = c.forward[end] - c.forward[first] + u
        b = c.backward[end] - c.backward[first] + u
        ahead = c.forward[first] + k * self.way_s
        back = c.backward[first] + k * self.way_s
        through = ahead + m * (f + b) + back
        after = self.total + (m - 1) * b + (m - warm) * f
        turns = (m - 1) // warm
        behind = self.total - ahead - back
        in_turns = ahead + back + behind * (turns + 1) + (m - 1 - turns * warm) * b
        return max(through, after, in_turns) + max(0.0, c.tail_s(first, end, self.pipelines) - back)

    def fits(self, k: int, first: int, end: int, *, relaxed: bool) -> bool:
        """Whether memory suffices; `relaxed` takes the least boundary tensor, so that more layers never need less."""
        c, m = self.cutter, self.m
        nbytes = c.memory(self.stages, k, first, end, m)
        if relaxed and not self.alike and c.job.memory.boundaries:
            outputs, least = c.job.costs, self.least_output
            nbytes -= m * 2 * (outputs.boundary_in(first) - least) if k else 0
            nbytes -= m * (outputs.boundary_out(end) - least) if k < self.stages - 1 else 0
        return nbytes <= c.device.memory_nbytes

    def _longest(
        self, cost_of: Callable[[int, int, int], float], time_s: float, share: float, *, relaxed: bool
    ) -> tuple[tuple[int, ...] | None, float, float]:
        """The cut whose stages, from the first on, are as long as keeps to a time.

        Returns:
            The cut, or None where none keeps to it; its bound; and the least time that lets some stage be longer.
        """
        c, stages = self.cutter, self.stages
        at, worst, more = [0], 0.0, math.inf
        both, first = c.both, 0
        for k in range(stages):
            most = c.count - (stages - 1 - k)
            spare = time_s / share
            end = min(most, bisect_right(both, both[first] + spare * (1 + CLOSE)) - 1)
            if end < most:
                more = min(more, cost_of(k, first, end + 1))
            kept = c.kept(self.warm[k])
            end = min(end, bisect_right(kept, kept[first] + c.device.memory_nbytes) - 1)
            cost = 0.0
            while end > first:
                cost = cost_of(k, first, end)
                if cost > time_s * (1 + CLOSE):
                    more = min(more, cost)
                elif self.fits(k, first, end, relaxed=relaxed):
                    break
                end -= 1
            if end <= first or (k == stages - 1 and end < c.count):
                return None, worst, more
            worst = max(worst, cost)
            at.append(end)
            first = end
        return tuple(at), worst, more

    def least(self, *, relaxed: bool) -> tuple[tuple[int, ...], float] | None:
        """The least time that some cut keeps to, by the bounds, and that cut."""
        return self._least(self.of, self.m, relaxed=relaxed)

    def _least(
        self, cost_of: Callable[[int, int, int], float], share: float, *, relaxed: bool
    ) -> tuple[tuple[int, ...], float] | None:
        best, high, _ = self._longest(cost_of, math.inf, share, relaxed=relaxed)
        if best is None:
            return None
        low = 0.0
        while high > low * (1 + CLOSE):
            middle = (low + high) / 2
            at, worst, more = self._longest(cost_of, middle, share, relaxed=relaxed)
            if at is not None:
                best, high = at, worst
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

    def balanced(self) -> tuple[tuple[int, ...], float] | None:
        """The cut whose longest stage is shortest, early stages long first."""
        c = self.cutter

        def longest(k: int, first: int, end: int) -> float:
            return c.both[end] - c.both[first]

        return self._least(longest, 1.0, relaxed=False)


def _charged(cut: Cut) -> float:
    return cut.charged_s
