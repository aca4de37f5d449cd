"""Transfer policies of others, to be compared with by name; what a job does by itself never loads them.

What each does and where it comes from: policies.py, and planning/baselines.py for the plans.

Theory of operation. All but `stop_resume` carry out a plan as it is. With `stop_resume` a donor writes its state to a
file (checkpoint.py). The newcomer reads the file of that name in the folder that it was told of by its own user (never
a path that came over the wire), at a disk's rate if one is given, and verifies each piece by hash as it would verify
what a connection brings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from chaos_lightning.errors import ConfigurationError, StateError, WireError
from chaos_lightning.planning import baselines
from chaos_lightning.planning.shards import SHARD_NBYTES, SharePlan
from chaos_lightning.replication.bulk import BulkFrame, Type
from chaos_lightning.replication.checkpoint import DiskThrottle, file_name
from chaos_lightning.replication.client import Deliver, Donor, Sink
from chaos_lightning.replication.planned import (
    Estimates,
    LinkEstimates,
    Planner,
    PolicyOptions,
    cut_runs,
    planned_grain_nbytes,
)
from chaos_lightning.replication.policy import Job, Shares, SourceStats, TransferPolicy
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.replication.table import PIECE_NBYTES
from chaos_lightning.replication.work_queue import WorkQueue


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

    def way(self) -> Deliver:
        return reader(Path(self.options.folder), self.options.disk_bps)


def reader(folder: Path, disk_bps: float) -> Deliver:
    """How a joiner gets bytes from a donor through its checkpoint.

    Args:
        folder: Where the donor's checkpoints can be read.
        disk_bps: Reading is held to this rate in bits per second; 0: as fast as the disk is.
    """

    def deliver(donor: Donor, work_queue: WorkQueue, sink: Sink) -> None:
        request = work_queue.take(donor.member, depth=1, wait=True, deadline=donor.deadline)
        if request is None:
            return
        name = _saved(donor.ask(Type.SAVE, Type.SAVED), file_name(donor.head, donor.seq))
        try:
            file = (folder / name).open("rb", buffering=0)
        except OSError as error:
            raise ConfigurationError(
                f"{donor.member} has written the checkpoint {name}, but it cannot be read in {folder} here ({error}): "
                "stop_resume needs a folder that both see"
            ) from error
        throttle = DiskThrottle(disk_bps)
        with file:
            while request is not None:
                job = request.job
                buffers = sink.land(job)
                at = job.start
                for buffer in buffers:
                    got = os.preadv(file.fileno(), [buffer], at)
                    at += got
                    work_queue.arrived(request, got)
                    if got != len(buffer):
                        raise StateError(f"the checkpoint {name} ends at byte {at}, expected were {job.stop}")
                frame = BulkFrame(Type.DATA, donor.head, donor.seq, job.start, job.nbytes, sink.flags)
                bad = sink.landed(job, buffers, frame, in_place=True)
                if bad is None or bad:
                    work_queue.wrong(request, bad or ())
                else:
                    work_queue.done(request, buffers)
                throttle.passed(job.nbytes)
                request = work_queue.take(donor.member, depth=1, wait=True, deadline=donor.deadline)

    return deliver


def _saved(data: bytes, expected: str) -> str:
    try:
        document = json.loads(data)
        name = document["name"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"malformed answer to SAVE: {error!r}") from error
    if name != expected:
        raise WireError(f"the donor saved {name!r}, expected was {expected!r}")
    return expected


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
