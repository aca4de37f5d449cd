"""The plan for a fleet: at once a good one, then the best; with what it costs and how sure that is.

Theory of operation. For devices of one kind `equal` finds the shape, and what is left is who gets which place.
Pipelines, longest first, are put on the host on which they leave least room; those that no host has room for take what
is left, host by host. So most hops stay within a host. Then each layer whose owners would all be lost with one host is
given an owner elsewhere, by exchanging two devices, where that makes no step longer; where it would,
`PlannedPipelines.shared_fate` says what the cheapest exchange costs. Devices or links that are not alike are searched
(`unequal`).

`Prepared` holds plans for losses that have not happened: of any 1 to k devices, and of any one host; one for each way
in which a loss can matter, which for devices of one kind is their number. It has no clock: whoever has time left lets
it prepare the next one, and asks what there is when devices are lost.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from chaos_lightning.planning.pipelines.cuts import Cutter
from chaos_lightning.planning.pipelines.equal import PlanShape, Shapes
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.job import Device, JobError, LinkRate, TrainingJob, stage_memory
from chaos_lightning.planning.pipelines.moves import renamed
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.unequal import Mixed

EXCHANGES = 200
"""Exchanges of two devices that are tried for the sake of owners on several hosts."""
NEAR = 0.01
"""Where a step takes no more than this share above what was charged, no other shapes are looked at."""
SAME = 1e-9
"""Steps that differ by no more than this share are equal."""
GIB = 1 << 30


class NoPlanError(JobError):
    """No plan fits; says which one comes closest and what is missing where."""


@dataclass(frozen=True, slots=True)
class SharedFate:
    """Layers whose owners would all be lost with one host."""

    first: int
    end: int
    host: str
    cost_s: float
    """By which the cheapest exchange of two devices that mends it makes a step longer; infinite: none does."""


@dataclass(frozen=True, slots=True)
class PlannedPipelines:
    """A plan with what it costs."""

    plan: PipelinePlan
    estimate: StepEstimate
    exact: bool
    """No plan takes less: its simulated step meets a lower bound over all lengths, splits and cuts."""
    gap: float
    """Share of the step by which a better plan might take less, by that bound; of first answers, by all work alone."""
    why: str
    shared_fate: tuple[SharedFate, ...] = ()


class Planner:
    """Plans for a job on its devices, or on some of them.

    Args:
        job: The job and its whole fleet.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    @cached_property
    def _per_host(self) -> int:
        """Devices of the largest host; 0: hosts make no difference to hops."""
        hosts = Counter(d.place for d in self.job.devices)
        same = self.job.within_host.kind == self.job.between_hosts.kind
        return 0 if same or len(hosts) == 1 else max(hosts.values())

    def _shapes(
        self,
        hop: LinkRate,
        per_host: int = 0,
        only: Callable[[int], bool] | None = None,
        reduce: LinkRate | None = None,
    ) -> Shapes:
        job, between = self.job, self._usual
        cutter = Cutter(job, job.devices[0], hop, reduce or between, per_host, between)
        return Shapes(cutter, job.micro_batches, only=only)

    @cached_property
    def shapes(self) -> Shapes:
        """Of devices of one kind, as if every pipeline began with a host of its own."""
        return self._shapes(self.job.within_host if self._per_host else self._usual, self._per_host)

    @property
    def _usual(self) -> LinkRate:
        """Between any two devices, where hosts make no difference."""
        several = len({d.place for d in self.job.devices}) > 1
        return self.job.between_hosts if several else self.job.within_host

    @cached_property
    def _others(self) -> tuple[Shapes, ...]:
        """As if all-reduces were hidden; lengths that fill hosts evenly; pipelines that cross hosts at each hop."""
        h = self._per_host
        hidden = self._shapes(self.job.within_host if h else self._usual, h, reduce=LinkRate())
        if h < 2:
            return (hidden,)
        even = self._shapes(self.job.within_host, h, only=lambda p: h % p == 0 or p % h == 0)
        return hidden, even, self._shapes(self.job.between_hosts)

    @cached_property
    def _bounds(self) -> Shapes:
        """With links that no placement has faster ones than."""
        fast = min(self.job.within_host, self.job.between_hosts, key=lambda x: x.time_s(1e6))
        return self._shapes(fast, reduce=fast) if self._per_host else self.shapes

    def warm(self) -> None:
        """Fills the table of pipeline times, so that first answers come at once."""
        if self.job.alike:
            self.shapes.warm()

    def first(self, devices: Collection[str] | None = None) -> PlannedPipelines:
        """A good plan at once.

        Args:
            devices: Names of those that are left; None: all.

        Raises:
            NoPlanError: None fits.
        """
        return self._answer(devices, exact=False)

    def exact(self, devices: Collection[str] | None = None) -> PlannedPipelines:
        """The best plan; for devices or links that are not alike, the best one that a longer search finds.

        Args:
            devices: Names of those that are left; None: all.

        Raises:
            NoPlanError: None fits.
        """
        return self._answer(devices, exact=True)

    def _answer(self, devices: Collection[str] | None, *, exact: bool) -> PlannedPipelines:
        names = sorted(self.job.by_name) if devices is None else sorted(devices)
        job = self.job.with_devices([self.job.by_name[n] for n in names])
        if self.job.alike:
            shape = None if exact else self.shapes.first(len(names))
            # A first answer that finds nothing is no proof.
            found = self.seated(shape, names) if shape else self._best(names)
            if found is None:
                raise NoPlanError(nearest(job))
            return found
        searched = Mixed(job).search(improve=exact)
        if searched is None:
            raise NoPlanError(nearest(job))
        plan, _, bound_s = searched
        plan, fates = spread(job, plan)
        cost = estimate(job, plan)
        gap = max(0.0, 1 - (bound_s + cost.commit_s) / cost.step_s)
        why = f"{_rows(plan)}; the best of a search, {_at_most(gap)}"
        return PlannedPipelines(plan, cost, False, gap, why, fates)

    def _best(self, names: Sequence[str]) -> PlannedPipelines | None:
        """The plan with the shortest simulated step, and how far the best one may be away."""
        shape = self.shapes.exact(len(names))
        best = self._shortened(self.shapes, shape, names) if shape and math.isfinite(shape.charged_s) else None
        for shapes in self._others:
            if best is not None and shape is not None:
                # What a step takes if no hop and no all-reduce costs more than was charged.
                least_s = shape.charged_s + best.estimate.commit_s
                if best.estimate.step_s <= least_s * (1 + NEAR):
                    break
            other = shapes.exact(len(names))
            if other is not None and math.isfinite(other.charged_s):
                seated = self._shortened(shapes, other, names)
                best = seated if best is None else min(best, seated, key=lambda x: x.estimate.step_s)
        if best is None:
            return None
        near_s = shape.charged_s if shape else 0.0
        bound_s = self._bounds.bound_s(len(names), near_s) + best.estimate.commit_s
        gap = max(0.0, 1 - bound_s / best.estimate.step_s)
        exact = gap <= SAME
        sure = "the best there is" if exact else f"the best that was found, {_at_most(gap)}"
        return replace(best, exact=exact, gap=0.0 if exact else gap, why=f"{_rows(best.plan)}; {sure}")

    def _shortened(self, shapes: Shapes, shape: PlanShape, names: Sequence[str]) -> PlannedPipelines:
        """Leaves out the shortest pipelines while the simulated step gets shorter.

        A short pipeline has many layers in a stage, and their all-reduces begin when the last owner is ready, which the
        search does not charge: it counts from the pipeline's own end.
        """
        best = self.seated(shape, names, shapes)
        work_s = self.job.micro_batches * shapes.cutter.row(1).fastest.both[-1]
        while len(shape.rows) > 1:
            left = [p for p, _ in shape.pairs if p > shape.rows[-1].stages]
            if not left or work_s / sum(left) >= best.estimate.step_s:
                break
            fewer = shapes.over(shape.devices, left, shape.charged_s)
            other = self.seated(fewer, names, shapes) if fewer else None
            if fewer is None or other is None or other.estimate.step_s >= best.estimate.step_s:
                break
            best, shape = other, fewer
        return best

    def seated(self, shape: PlanShape, devices: Collection[str], shapes: Shapes | None = None) -> PlannedPipelines:
        """A shape on these devices.

        Args:
            shape: How many pipelines of which length.
            devices: Names.
            shapes: What found the shape, and cuts its pipelines; None: `shapes` of this planner.
        """
        shapes = shapes or self.shapes
        job = self.job.with_devices([self.job.by_name[n] for n in sorted(devices)])
        plan, fates = spread(job, place(job, shapes, shape))
        cost = estimate(job, plan)
        if self._per_host:
            # On few hosts all-reduces may be faster than where each layer outlives a host.
            packed = place(job, shapes, shape, packed=True)
            other = estimate(job, packed)
            if other.step_s < cost.step_s * (1 - SAME):
                plan, cost = packed, other
                fates = tuple(SharedFate(g.start, g.stop, h, math.inf) for g, h in _fates(job, plan))
        work_s = job.micro_batches * shapes.cutter.row(1).fastest.both[-1] / len(job.devices)
        gap = 1 - work_s / cost.step_s
        why = f"{_rows(plan)}; a first answer, {_at_most(gap)}"
        return PlannedPipelines(plan, cost, False, gap, why, fates)


def _at_most(gap: float) -> str:
    return f"at most {gap:.2%} from the best there is"


def describe(shape: PlanShape) -> str:
    """In words."""
    return _words(Counter(shape.pairs), shape.devices - shape.used)


def _rows(plan: PipelinePlan) -> str:
    return _words(Counter((len(p.stages), p.micro_batches) for p in plan.pipelines), len(plan.idle))


def _words(counts: Counter[tuple[int, int]], idle: int) -> str:
    parts = [
        f"{k} of {_many(stages, 'stage')} with {_many(m, 'micro-batch', 'es')}"
        for (stages, m), k in sorted(counts.items(), reverse=True)
    ]
    words = f"{_many(counts.total(), 'pipeline')}: {', '.join(parts)}"
    return words + (f", {_many(idle, 'device')} idle" if idle else "")


def _many(count: int, word: str, more: str = "s") -> str:
    return f"{count} {word}{more if count != 1 else ''}"


# ------------------------------------------------------------------------------------------------ places


def place(job: TrainingJob, shapes: Shapes, shape: PlanShape, *, packed: bool = False) -> PipelinePlan:
    """Gives each place of a shape a device of the job.

    Args:
        job: The job; its devices get places.
        shapes: What the shape was found by; it cuts the layers.
        shape: How many pipelines of which length.
        packed: On few hosts, rather than so that no host is left with room for no pipeline.
    """
    free: dict[str, list[str]] = defaultdict(list)
    for d in sorted(job.devices, key=lambda d: (d.place, d.name)):
        free[d.place].append(d.name)
    if packed:
        free = dict(sorted(free.items(), key=lambda x: (-len(x[1]), x[0])))
    pipelines = []
    for row in shape.rows:
        cut = shapes.cutter.best(row.stages, row.micro_batches, shape.pipelines)
        assert cut is not None
        for _ in range(row.times):
            names = _take(free, row.stages, packed)
            stages = tuple(PlanStage(n, x, y) for n, x, y in zip(names, cut.at, cut.at[1:], strict=False))
            pipelines.append(Pipeline(stages, row.micro_batches))
    idle = tuple(sorted(n for names in free.values() for n in names))
    extra = job.memory.in_flight_extra
    return PipelinePlan(job.costs.count, tuple(pipelines), idle=idle, in_flight_extra=extra)


def _take(free: dict[str, list[str]], count: int, packed: bool) -> list[str]:
    """Devices for one pipeline: of the host on which it leaves least room, or else of the emptiest hosts.

    If `packed`, of the first one in order that has room.
    """
    roomy = [host for host, names in free.items() if len(names) >= count]
    roomy = roomy[:1] if packed else roomy
    taken: list[str] = []
    while len(taken) < count:
        host = min(roomy, key=lambda h: (len(free[h]), h)) if roomy else max(free, key=lambda h: (len(free[h]), h))
        need = count - len(taken)
        taken += free[host][:need]
        free[host] = free[host][need:]
        if not free[host]:
            del free[host]
    return taken


def spread(job: TrainingJob, plan: PipelinePlan) -> tuple[PipelinePlan, tuple[SharedFate, ...]]:
    """Gives layers whose owners are all on one host an owner elsewhere, where no step gets longer by it.

    Returns:
        The plan, and what could not be mended for nothing. Plans of one pipeline have one owner for each layer anyhow.
    """
    if len(plan.pipelines) < 2 or len({d.place for d in job.devices}) < 2:
        return plan, ()
    step_s, tries, fates = estimate(job, plan).step_s, EXCHANGES, []
    for group in _together(job, plan):
        cheapest = math.inf
        if not any(g.start == group.start for g in _together(job, plan)):
            continue  # An exchange for an earlier group mended it.
        owners = plan.owners[plan.groups.index(group)]
        host = job.by_name[owners[0]].place
        for other in islice(_exchanged(job, plan, owners, host), max(0, tries)):
            tries -= 1
            if any(g.start == group.start for g in _together(job, other)):
                continue
            cost = estimate(job, other).step_s - step_s
            cheapest = min(cheapest, cost)
            if cost <= 1e-9 * step_s and len(_together(job, other)) < len(_together(job, plan)):
                plan = other
                break
        else:
            fates.append(SharedFate(group.start, group.stop, host, cheapest))
    return plan, tuple(fates)


def _together(job: TrainingJob, plan: PipelinePlan) -> list[range]:
    """Groups of layers with owners on one host alone."""
    return [group for group, _ in _fates(job, plan)]


def _fates(job: TrainingJob, plan: PipelinePlan) -> list[tuple[range, str]]:
    """The same with their hosts."""
    found = []
    for group, owners in zip(plan.groups, plan.owners, strict=True):
        hosts = {job.by_name[n].place for n in owners}
        if len(hosts) == 1:
            found.append((group, next(iter(hosts))))
    return found


def _exchanged(job: TrainingJob, plan: PipelinePlan, owners: Sequence[str], host: str) -> Iterator[PipelinePlan]:
    """Plans in which one of these owners changes places with a device of another host."""
    others = [n for n in (*plan.idle, *plan.stages) if job.by_name[n].place != host]
    names = {n: n for n in plan.devices}
    for a in owners:
        for b in others:
            if job.by_name[a].kind == job.by_name[b].kind:
                yield renamed(plan, names | {a: b, b: a})


# ------------------------------------------------------------------------------------------------ why none fits


def nearest(job: TrainingJob) -> str:
    """Why no plan fits: the layer that fits on no device, or the plan that comes closest and what it lacks."""
    roomy = max(job.devices, key=lambda d: d.memory_nbytes)
    for i, layer in enumerate(job.layers):
        use = stage_memory(job, i, i + 1, 1, 1).nbytes
        if use > roomy.memory_nbytes:
            return (
                f"layer {i} ({layer.name!r}) fits on no device: alone with one micro-batch it needs "
                f"{use / GIB:.2f} GiB, {use - roomy.memory_nbytes} bytes more than {roomy.name!r} has, which has most; "
                "give devices more memory, or cut the layer in two"
            )
    devices = sorted(job.devices, key=lambda d: (-d.memory_nbytes, d.name))[: job.costs.count]
    at, short = _tightest(job, devices)
    k = max(range(len(devices)), key=lambda i: short[i])
    return (
        f"no plan fits {len(job.devices)} devices and {job.micro_batches} micro-batches of {job.costs.count} layers; "
        f"the closest is one pipeline of {len(devices)} stages, whose stage {k} (layers {at[k]} to {at[k + 1]}, on "
        f"{devices[k].name!r}) lacks {short[k]} bytes; give devices more memory, add devices, or make micro-batches "
        "smaller"
    )


def _tightest(job: TrainingJob, devices: Sequence[Device]) -> tuple[list[int], list[int]]:
    """One pipeline that lacks least where it lacks most, for all micro-batches: its cut, and what each stage lacks."""
    count, stages, m = job.costs.count, len(devices), job.micro_batches
    extra = job.memory.in_flight_extra

    def lack(k: int, first: int, end: int) -> int:
        flight = min(stages - k + extra, m)
        return stage_memory(job, first, end, flight, m).nbytes - devices[k].memory_nbytes

    # best[end]: (the most that any stage so far lacks, where the last one begins)
    best: list[dict[int, tuple[int, int]]] = [{0: (-(1 << 62), 0)}]
    for k in range(stages):
        row: dict[int, tuple[int, int]] = {}
        for end in range(k + 1, count - (stages - 1 - k) + 1):
            row[end] = min(
                (max(worst, lack(k, first, end)), first) for first, (worst, _) in best[-1].items() if first < end
            )
        best.append(row)
    at = [count]
    for k in range(stages, 0, -1):
        at.insert(0, best[k][at[0]][1])
    return at, [lack(k, at[k], at[k + 1]) for k in range(stages)]


# ------------------------------------------------------------------------------------------------ plans ahead


Composition = tuple[tuple[float, int], ...]
"""Kinds of the devices of a host, sorted."""
Left = tuple[Composition, ...] | frozenset[str]
"""What a plan depends on: the hosts that are left, by what is on them; with links of their own, the very devices."""


class Prepared:
    """Plans for losses that have not happened.

    Args:
        job: The job and its whole fleet.
        losses: Plans are prepared for the loss of any 1 to so many devices, and of any one host.
        most: Plans that are kept at most; those for the largest losses are left out.
    """

    def __init__(self, job: TrainingJob, losses: int = 8, most: int = 64) -> None:
        self.planner, self.losses, self.most = Planner(job), losses, most
        self._plans: dict[Left, PlannedPipelines | NoPlanError] = {}

    def fleet(self, job: TrainingJob) -> None:
        """Devices came or went: plans for what can no longer be left soon are dropped."""
        if job.layers != self.planner.job.layers:
            self._plans = {}
        self.planner = Planner(job)
        wanted = [key for key, _ in self._wanted()]
        self._plans = {key: self._plans[key] for key in wanted if key in self._plans}

    def prepare_next(self) -> int | None:
        """Prepares the most urgent plan that is missing.

        Returns:
            How many devices would be left; None: all plans are there.
        """
        for key, names in self._wanted():
            if key not in self._plans:
                try:
                    self._plans[key] = self.planner.exact(names)
                except NoPlanError as error:
                    self._plans[key] = error
                return len(names)
        return None

    def after(self, lost: Collection[str]) -> tuple[PlannedPipelines, bool]:
        """The plan after a loss.

        Args:
            lost: Names of devices; those that are not there do not count.

        Returns:
            The plan, and whether it was prepared (the best one) or made now (a good one).

        Raises:
            NoPlanError: None fits what is left.
        """
        names = [n for n in sorted(self.planner.job.by_name) if n not in set(lost)]
        found = self._plans.get(self._key(names)) if names else None
        if isinstance(found, NoPlanError):
            raise found
        if found is None:
            return self.planner.first(names), False
        return self._onto(found, names), True

    def _hosts(self, names: Collection[str]) -> list[tuple[Composition, list[str]]]:
        """By host, the largest first: what is on it, and its devices in the order of their kinds."""
        by_name = self.planner.job.by_name
        hosts: dict[str, list[str]] = defaultdict(list)
        for n in sorted(names, key=lambda n: (by_name[n].kind, n)):
            hosts[by_name[n].place].append(n)
        rows = [(tuple(by_name[n].kind for n in found), found) for found in hosts.values()]
        return sorted(rows, key=lambda row: (-len(row[0]), row))

    def _key(self, names: Collection[str]) -> Left:
        if self.planner.job.links:
            return frozenset(names)
        return tuple(composition for composition, _ in self._hosts(names))

    def _wanted(self) -> Iterator[tuple[Left, tuple[str, ...]]]:
        """What may be left, the smallest losses first, with one host's after single devices'."""
        there = tuple(sorted(self.planner.job.by_name))
        seen = {self._key(there)}
        level, found = [there], 0
        for k in range(self.losses):
            fewer = []
            for names in level:
                for left in self._less_one(names):
                    key = self._key(left) if left else None
                    if key is not None and key not in seen and found < self.most:
                        seen.add(key)
                        found += 1
                        fewer.append(left)
                        yield key, left
            if k == 0:
                for _, host in self._hosts(there):
                    left = tuple(n for n in there if n not in host)
                    key = self._key(left) if left else None
                    if key is not None and key not in seen and found < self.most:
                        seen.add(key)
                        found += 1
                        yield key, left
            level = fewer

    def _less_one(self, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Without one device, once for each way in which that makes a difference."""
        by_name, seen = self.planner.job.by_name, set()
        for composition, host in self._hosts(names):
            for n in reversed(host):
                way = n if self.planner.job.links else (composition, by_name[n].kind)
                if way not in seen:
                    seen.add(way)
                    yield tuple(x for x in names if x != n)

    def _onto(self, planned: PlannedPipelines, names: Collection[str]) -> PlannedPipelines:
        """The same plan on hosts that have the same devices on them."""
        job = self.planner.job
        old, new = self._hosts(planned.plan.devices), self._hosts(names)
        pairs = zip((n for _, host in old for n in host), (n for _, host in new for n in host), strict=True)
        seats = dict(pairs)
        if all(a == b for a, b in seats.items()):
            return planned
        there = job.with_devices([job.by_name[n] for n in sorted(names)])
        plan = renamed(planned.plan, seats)
        return replace(planned, plan=plan, estimate=estimate(there, plan))
