"""The plan for a fleet: at once a good one, then the best; with what it costs and how sure that is.

Theory of operation. For devices and links of one kind `equal` finds the shape, and what is left is who gets which
place. Devices are sorted by host, and pipelines, longest first, take the next ones in turn, so that most hops stay
within a host. Then each layer whose owners are all on one host is given another one, by exchanging two devices, where
that makes no step longer; where it does, `Planned.shared_fate` says what it would cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from chaos_lightning.planning.pipelines.cuts import Cutter
from chaos_lightning.planning.pipelines.equal import Shape, Shapes
from chaos_lightning.planning.pipelines.estimate import Estimate, estimate
from chaos_lightning.planning.pipelines.job import Device, JobError, TrainingJob
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, Stage


class NoPlanError(JobError):
    """No plan fits; says which one comes closest and what is missing where."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what it costs."""

    plan: PipelinePlan
    estimate: Estimate
    exact: bool
    """Nothing better exists, as far as the search charges plans (`equal.Shape.exact`)."""
    gap: float
    """Share by which a better plan might take less, by a lower bound."""
    why: str


class Planner:
    """Plans for a job on its devices, or on some of them.

    Args:
        job: The job and its whole fleet.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    @cached_property
    def shapes(self) -> Shapes:
        """Of devices of one kind."""
        job = self.job
        hosts = {d.place for d in job.devices}
        # A hop between hosts is charged only where pipelines are longer than hosts have devices.
        between = job.between_hosts if len(hosts) > 1 else job.within_host
        widest = len(job.devices) // len(hosts)
        hop = job.within_host if widest > 1 else between
        return Shapes(Cutter(job, job.devices[0], hop, between), job.micro_batches)

    def first(self, devices: Sequence[str] | None = None) -> Planned:
        """A good plan at once."""
        return self._equal(devices, exact=False)

    def exact(self, devices: Sequence[str] | None = None) -> Planned:
        """The best plan."""
        return self._equal(devices, exact=True)

    def _equal(self, devices: Sequence[str] | None, *, exact: bool) -> Planned:
        job = self.job
        names = [d.name for d in job.devices] if devices is None else list(devices)
        shape = self.shapes.exact(len(names)) if exact else self.shapes.first(len(names))
        if shape is None:
            raise NoPlanError(f"no plan fits {len(names)} devices")
        plan = place(job, self.shapes, shape, [job.by_name[n] for n in names])
        return Planned(plan, estimate(job, plan), shape.exact, shape.gap, describe(shape))


def describe(shape: Shape) -> str:
    """In words."""
    rows = ", ".join(f"{r.times} of {r.stages} stages with {r.micro_batches} micro-batches" for r in shape.rows)
    idle = shape.devices - shape.used
    return f"{shape.pipelines} pipelines: {rows}" + (f"; {idle} devices are idle" if idle else "")


def place(job: TrainingJob, shapes: Shapes, shape: Shape, devices: Sequence[Device]) -> PipelinePlan:
    """Gives each place of a shape a device."""
    ordered = [d.name for d in sorted(devices, key=lambda d: (d.place, d.name))]
    pipelines, at = [], 0
    for row in shape.rows:
        cut = shapes.cutter.best(row.stages, row.micro_batches, shape.pipelines)
        assert cut is not None
        for _ in range(row.times):
            names = ordered[at : at + row.stages]
            at += row.stages
            stages = tuple(Stage(n, x, y) for n, x, y in zip(names, cut.at, cut.at[1:], strict=False))
            pipelines.append(Pipeline(stages, row.micro_batches))
    return PipelinePlan(
        job.costs.count, tuple(pipelines), idle=tuple(sorted(ordered[at:])), in_flight_extra=job.memory.in_flight_extra
    )
