"""Transfer policies of others, to be compared with by name; what a job does by itself never loads them.

What each does and where it comes from: policies.py, and planning/baselines.py for the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning import baselines
from chaos_lightning.planning.shards import SHARD_NBYTES, SharePlan
from chaos_lightning.replication.planned import (
    Estimates,
    LinkEstimates,
    Planner,
    PolicyOptions,
    cut_runs,
    planned_grain_nbytes,
)
from chaos_lightning.replication.policy import Checkpoint, Job, Shares, SourceStats, TransferPolicy
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.replication.table import PIECE_NBYTES


class Fixed(TransferPolicy):
    """A plan that is carried out as it is."""

    patient = True

    def __init__(self, name: str, planner: Planner, estimates: Estimates | None, *, barrier: bool) -> None:
        self.name, self.barrier = name, barrier
        self._links = LinkEstimates(estimates)
        self._planner = planner

    def prior(self, source: str) -> tuple[float, float] | None:
        return self._links.prior(source)

    def grain_nbytes(self, nbytes: int, sources: int, request_nbytes: int) -> int:
        return planned_grain_nbytes(nbytes, sources, request_nbytes)

    def request_nbytes(self, stats: SourceStats, now: float, limit: int) -> int:
        return limit

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Shares:
        return self._links.shares(jobs, sources, self._planner)


class MultiSource(TransferPolicy):
    """The same from all nodes of the overlay; those that are no neighbours are reached through neighbours' servers."""

    name = "multi_source"
    patient = True

    def __init__(self, options: PolicyOptions) -> None:
        self.options = options
        if not options.links or not options.newcomer:
            raise ConfigurationError("multi_source needs the overlay: give `links` and `newcomer`")
        self._routes = baselines.shortest_routes(options.links, options.newcomer, PIECE_NBYTES)

    def grain_nbytes(self, nbytes: int, sources: int, request_nbytes: int) -> int:
        return planned_grain_nbytes(nbytes, sources, request_nbytes)

    def request_nbytes(self, stats: SourceStats, now: float, limit: int) -> int:
        return limit

    def sources(self, donors: Sequence[Endpoint]) -> list[Endpoint]:
        """The donors given are the neighbours; everybody else is asked through them."""
        near = {e.member: e for e in donors}
        unreachable = sorted(m for m, route in self._routes.items() if route[0] not in near)
        if unreachable:
            raise ConfigurationError(
                f"multi_source: {', '.join(unreachable)} lie behind members that are no donors; donors are "
                f"{', '.join(near)}"
            )
        order = [*(m for m in near if m in self._routes), *sorted(set(self._routes) - set(near))]
        routes = [self._routes[m] for m in order]
        return [near[r[-1]] if len(r) == 1 else replace(near[r[0]], member=r[-1], route=r) for r in routes]

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Shares:
        nbytes = sum(job.nbytes for job in jobs)
        options = self.options
        plan = baselines.multi_source(
            nbytes, options.links, options.newcomer, ingress_s_per_byte=options.ingress_s_per_byte
        )
        shares = {m: share for m, share in plan.shares.items() if m in sources}
        return Shares(cut_runs(jobs, shares, {}), plan.reason)


class StopResume(TransferPolicy):
    """The oldest donor writes a checkpoint, the newcomer reads it."""

    name = "stop_resume"
    patient = True
    barrier = True

    def __init__(self, options: PolicyOptions) -> None:
        if not options.folder:
            raise ConfigurationError("stop_resume needs `folder`: where the donors' checkpoints can be read")
        self.options = options

    def may_take(self, source: str, stats: Mapping[str, SourceStats]) -> bool:
        return source == next(iter(stats))

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Shares:
        writer = sources[0]
        folder = self.options.folder
        return Shares({writer: list(jobs)}, f"{writer} writes a checkpoint to {folder}, this member reads it there")

    @property
    def checkpoint(self) -> Checkpoint:  # type: ignore[override]
        return Checkpoint(self.options.folder, self.options.disk_bps)


def make_baseline(name: str, estimates: Estimates | None, options: PolicyOptions) -> TransferPolicy:
    """One of these by name; see `policies.make_policy`."""
    if name == "multi_source":
        return MultiSource(options)
    if name == "stop_resume":
        return StopResume(options)
    planners: dict[str, Callable[..., SharePlan]] = {
        "greedy": partial(baselines.greedy, layer_nbytes=options.layer_nbytes, shard_nbytes=options.shard_nbytes),
        "optimal": partial(baselines.optimal, shard_nbytes=options.shard_nbytes or SHARD_NBYTES),
        "even": baselines.even,
        "single": partial(baselines.single, barrier=options.barrier),
    }
    planner = partial(planners[name], ingress_s_per_byte=options.ingress_s_per_byte)
    return Fixed(name, planner, estimates, barrier=options.barrier and name == "single")
