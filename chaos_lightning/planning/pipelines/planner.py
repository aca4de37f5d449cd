"""Finds the plan for a fleet: a good one at once, then the best one, with its costs and the largest possible gap to the
optimum.

Theory of operation. For devices of one kind `equal` finds the shape, `places` says who gets which place, and the whole
is simulated. Devices or links that are not alike are searched (`unequal`). Where no plan fits, `shortage` says why.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from chaos_lightning.planning.pipelines.at_once import plan_at_once
from chaos_lightning.planning.pipelines.cuts import Cutter
from chaos_lightning.planning.pipelines.equal import COUNTED, PlanShape, Shapes
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.job import Device, JobError, LinkRate, TrainingJob
from chaos_lightning.planning.pipelines.places import SAME, SharedFate, on_one_host, seated, spread
from chaos_lightning.planning.pipelines.plan import PipelinePlan
from chaos_lightning.planning.pipelines.shortage import nearest, tightest
from chaos_lightning.planning.pipelines.unequal import Mixed

FEWER = 2
"""Largest number of devices by which plans may use fewer than there are; more devices may be in the way."""
NEAR = 0.01
"""Fraction by which a step may exceed what was charged, so that no other shapes are looked at."""


class NoPlanError(JobError):
    """Error that no plan fits into memory; says which plan comes closest and which device lacks how much."""


@dataclass(frozen=True, slots=True)
class PlannedPipelines:
    """Plan with its estimated costs, and whether it is known to be the best."""

    plan: PipelinePlan
    estimate: StepEstimate
    exact: bool
    """Whether no plan takes less: the simulated step meets a lower bound over all lengths, splits and cuts."""
    gap: float
    """Fraction of the step by which a better plan might take less, by that bound; of first answers, by all work
    alone.
    """
    why: str
    shared_fate: tuple[SharedFate, ...] = ()


class Planner:
    """Planner for a job on all or some of its devices.

    Args:
        job: The job and its whole fleet.
        copies: Number of devices that must own each layer, at least.
        hosts: Whether owners of each layer must be on two hosts, so that the loss of a host loses no layer.
    """

    def __init__(self, job: TrainingJob, *, copies: int = 1, hosts: bool = False) -> None:
        self.job, self.copies, self.hosts = job, max(copies, 2 if hosts else 1), hosts

    def _enough(self, plan: PipelinePlan) -> bool:
        """Returns whether every layer of a plan has as many owners as required."""
        return len(plan.pipelines) >= self.copies and not (self.hosts and on_one_host(self.job, plan))

    @cached_property
    def _per_host(self) -> int:
        """Number of devices of the largest host; 0 if links within hosts are no different from others."""
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
        longest = len(job.devices) // self.copies

        def allowed(p: int) -> bool:
            return p <= longest and (only is None or only(p))

        return Shapes(cutter, job.micro_batches, only=only if self.copies == 1 else allowed)

    @cached_property
    def shapes(self) -> Shapes:
        """Search for plan shapes on equal devices, as if each pipeline began on a host of its own."""
        return self._shapes(self.job.within_host if self._per_host else self._usual, self._per_host)

    @property
    def _usual(self) -> LinkRate:
        """Link between any two devices, for jobs in which hosts make no difference."""
        several = len({d.place for d in self.job.devices}) > 1
        return self.job.between_hosts if several else self.job.within_host

    @cached_property
    def _others(self) -> tuple[Shapes, ...]:
        """Alternative searches for plan shapes: as if all-reduces cost nothing; with lengths that fill hosts evenly;
        with every hop between hosts.
        """
        h = self._per_host
        hidden = self._shapes(self.job.within_host if h else self._usual, h, reduce=LinkRate())
        if h < 2:
            return (hidden,)
        even = self._shapes(self.job.within_host, h, only=lambda p: h % p == 0 or p % h == 0)
        return hidden, even, self._shapes(self.job.between_hosts)

    @cached_property
    def _bounds(self) -> Shapes:
        """Search for plan shapes with the fastest possible links, for lower bounds."""
        return self._shapes(self._fast, reduce=self._fast) if self._per_host else self.shapes

    @cached_property
    def _fast(self) -> LinkRate:
        """Link that is at least as fast as the link of any two devices."""
        within, between = self.job.within_host, self.job.between_hosts
        hosts = Counter(d.place for d in self.job.devices)
        if len(hosts) == 1 or max(hosts.values()) == 1:
            return self._usual
        return LinkRate(
            rate_bps=max(within.rate_bps, between.rate_bps), latency_s=min(within.latency_s, between.latency_s)
        )

    def first(self, devices: Collection[str] | None = None) -> PlannedPipelines:
        """Returns a good plan without a long search.

        Args:
            devices: Names of the devices that are left; None: all.

        Raises:
            NoPlanError: No plan fits.
        """
        return self._answer(devices, exact=False)

    def at_once(self) -> PlannedPipelines:
        """Returns a plan within milliseconds; for unequal devices or links, the best of a few starts.

        Raises:
            NoPlanError: No plan fits.
        """
        if self.job.alike and (shape := self.shapes.first(len(self.job.devices))) is not None:
            first = self.seated(shape, self.job.by_name)
            if self._enough(first.plan):
                return first
        found = plan_at_once(self.job, self.copies)
        if found is None:
            plan = tightest(self.job) if self.copies == 1 else None
            if plan is None:
                raise NoPlanError(nearest(self.job) if self.copies == 1 else self._lacks())
            found = estimate(self.job, plan), plan
        cost, plan = found
        work_s = self.job.micro_batches * (self.job.costs.forward[-1] + self.job.costs.backward[-1])
        gap = max(0.0, 1 - work_s / sum(d.speed for d in self.job.devices) / cost.step_s)
        return PlannedPipelines(plan, cost, False, gap, f"{_rows(plan)}; the best of few starts, {_at_most(gap)}")

    def on(self, job: TrainingJob) -> Planner:
        """Returns a planner for the same job on another fleet; tables of times that still hold are reused."""
        found = Planner(job, copies=self.copies, hosts=self.hosts)
        if "shapes" in self.__dict__ and found._tables_of == self._tables_of:
            found.__dict__["shapes"] = self.shapes
        return found

    @property
    def _tables_of(self) -> tuple[object, ...]:
        """Values that the times in `shapes` depend on."""
        job = self.job
        longest = 0 if self.copies == 1 else len(job.devices) // self.copies
        return (
            job.alike, job.devices[0].kind, self._per_host, self._usual, job.within_host, job.layers, job.micro_batches,
            replace(job.overheads, commit_s=0.0), job.memory, job.tied_nbytes, longest,
        )  # fmt: skip

    def exact(self, devices: Collection[str] | None = None) -> PlannedPipelines:
        """Returns the best plan; for unequal devices or links, the best that a longer search finds.

        Args:
            devices: Names of the devices that are left; None: all.

        Raises:
            NoPlanError: No plan fits.
        """
        return self._answer(devices, exact=True)

    def _answer(self, devices: Collection[str] | None, *, exact: bool) -> PlannedPipelines:
        names = sorted(self.job.by_name) if devices is None else sorted(devices)
        job = self.job.with_devices([self.job.by_name[n] for n in names])
        if job.alike and not self.job.alike:
            return Planner(job, copies=self.copies, hosts=self.hosts)._answer(None, exact=exact)
        if self.job.alike:
            shape = None if exact else self.shapes.first(len(names))
            # A first answer that finds nothing is no proof.
            found = self.seated(shape, names) if shape else None
            if found is None or not self._enough(found.plan):
                found = self._best(names)
            if found is not None:
                return found
        mixed = Mixed(job, copies=self.copies, hosts=self.hosts)
        plans = [plan for _, plan in mixed.search(improve=exact)] or [x for x in [tightest(job)] if x]
        if not plans:
            raise NoPlanError(nearest(job))
        told = [spread(job, plan, pay=self.hosts) for plan in sorted(plans, key=lambda x: estimate(job, x).step_s)]
        told = [x for x in told if self._enough(x[0])]
        if not told:
            raise NoPlanError(self._lacks())
        plan, cost, fates = min(told, key=lambda x: x[1].step_s) if self.hosts else told[0]
        gap = max(0.0, 1 - (mixed.bound_s() + job.overheads.commit_s) / cost.step_s)
        sure = "the best there is" if gap <= SAME else f"the best of a search, {_at_most(gap)}"
        return PlannedPipelines(plan, cost, gap <= SAME, gap if gap > SAME else 0.0, f"{_rows(plan)}; {sure}", fates)

    def _lacks(self) -> str:
        """Returns the error text for a job in which no plan has as many owners of each layer as required."""
        where = "two hosts" if self.hosts else f"{self.copies} devices"
        return (
            f"no plan was found in which each layer has owners on {where}: so many copies do not fit, or lie on one "
            "host; add devices or hosts, or ask for less (--copies, --survive none)"
        )

    def _best(self, names: Sequence[str]) -> PlannedPipelines | None:
        """Returns the plan with the shortest simulated step, and a bound on how much shorter any step can be; None if
        no plan fits into memory.
        """
        shape = self.shapes.exact(len(names))
        best = self.seated(shape, names) if shape and math.isfinite(shape.charged_s) else None
        for shapes in self._others:
            if best is not None and shape is not None:
                # The least that a step takes if no hop and no all-reduce costs more than was charged.
                least_s = shape.charged_s + best.estimate.commit_s
                if best.estimate.step_s <= least_s * (1 + NEAR):
                    break
            other = shapes.exact(len(names))
            if other is not None and math.isfinite(other.charged_s):
                found = self.seated(other, names, shapes)
                best = found if best is None else min(best, found, key=lambda x: x.estimate.step_s)
        if best is None:
            return None
        best = self._on_one_host(names, best) or best
        enough = [x for x in (best, *self._simpler(names, shape)) if self._enough(x.plan)]
        if not enough:
            return None
        best = min(enough, key=lambda x: x.estimate.step_s)
        bound_s = self._bound_s(len(names), shape.charged_s if shape else math.inf)
        gap = max(0.0, 1 - bound_s / best.estimate.step_s)
        exact = gap <= SAME
        sure = "the best there is" if exact else f"the best that was found, {_at_most(gap)}"
        return replace(best, exact=exact, gap=0.0 if exact else gap, why=f"{_rows(best.plan)}; {sure}")

    def _simpler(self, names: Sequence[str], than: PlanShape | None) -> Iterator[PlannedPipelines]:
        """Yields plans that may be faster than the search's costs predict: the first answer, single devices, and shapes
        for a few devices fewer.
        """
        count, shapes = len(names), self.shapes
        fewer = range(max(1, count - FEWER), count) if count <= COUNTED else ()
        found = (shapes.first(count), shapes.over(count, [1]), *map(shapes.exact, fewer))
        known = {shape.rows: shape for shape in found if shape is not None and math.isfinite(shape.charged_s)}
        for rows, shape in known.items():
            if than is None or rows != than.rows:
                yield self.seated(replace(shape, devices=count), names)

    def _bound_s(self, devices: int, near_s: float) -> float:
        """Returns a lower bound of a step's seconds, commit included; values above `near_s` are not computed
        exactly.
        """
        o = self.job.overheads
        several_s = self._bounds.bound_s(devices, near_s) + 2 * (self._fast.latency_s + o.hop_s)
        alone_s = self._bounds.cutter.row(1).bound_s(self.job.micro_batches, 1)
        return min(several_s, alone_s) + o.commit_s

    def _on_one_host(self, names: Sequence[str], than: PlannedPipelines) -> PlannedPipelines | None:
        """Returns a better plan on the largest host alone, for jobs with slow links between hosts; None if there is
        none.
        """
        hosts = defaultdict[str, list[Device]](list)
        for n in names:
            hosts[self.job.by_name[n].place].append(self.job.by_name[n])
        devices = min(hosts.values(), key=lambda found: (-len(found), found[0].place))
        work_s = self.job.micro_batches * self.shapes.cutter.row(1).fastest.both[-1]
        if not self._per_host or len(hosts) == 1 or self.hosts or work_s / len(devices) >= than.estimate.step_s:
            return None
        found = Planner(self.job.with_devices(devices), copies=self.copies)._best([d.name for d in devices])
        if found is None or found.estimate.step_s >= than.estimate.step_s:
            return None
        used = found.plan.stages
        plan = replace(found.plan, idle=tuple(sorted(n for n in names if n not in used)))
        fates = tuple(SharedFate(g.start, g.stop, h, math.inf) for g, h in on_one_host(self.job, plan))
        return replace(found, plan=plan, shared_fate=fates if len(plan.pipelines) > 1 else ())

    def seated(self, shape: PlanShape, devices: Collection[str], shapes: Shapes | None = None) -> PlannedPipelines:
        """Returns the plan that puts devices into a given shape.

        Args:
            shape: Shape of the plan.
            devices: Names of the devices.
            shapes: Shapes by which the shape was found; they cut its pipelines. None: `shapes` of this planner.
        """
        shapes = shapes or self.shapes
        job = self.job.with_devices([self.job.by_name[n] for n in sorted(devices)])
        plan, cost, fates = seated(job, shapes, shape, hosts_matter=bool(self._per_host), on_two=self.hosts)
        work_s = job.micro_batches * shapes.cutter.row(1).fastest.both[-1] / len(job.devices)
        gap = 1 - work_s / cost.step_s
        why = f"{_rows(plan)}; a first answer, {_at_most(gap)}"
        return PlannedPipelines(plan, cost, False, gap, why, fates)


def _at_most(gap: float) -> str:
    return f"at most {gap:.2%} from the best there is"


def describe(shape: PlanShape) -> str:
    """Returns a plan's shape in words."""
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
