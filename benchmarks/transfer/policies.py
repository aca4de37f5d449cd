"""Transfer policies of other systems, for comparison with the package's own (replication/policies.py).

    Greedy       Chaos, Algorithms 1 and 2; shares are fixed.
    Optimal      the exact assignment of equal shards; fixed.
    Even         the same from each neighbour; fixed.
    Single       all from the fastest neighbour (EDL+); fixed.
    MultiSource  the same from every node, relayed over shortest paths (Autoscaling); fixed.
    StopResume   through a checkpoint file that the oldest donor writes (Pollux).

A member of a real job takes one by `transfer=benchmarks.transfer.policies:Greedy`, all but the last, which needs donors
that write checkpoints when they are told to: those of net.py.

Theory of operation. All but StopResume carry out a plan (plans.py) as it is; only a failure moves work: what a lost
source was to send is taken by whoever has room. With StopResume a donor writes its state to a file. The newcomer reads
it in a folder that both see, at a disk's rate if one is given, and verifies each piece by hash as it would verify what
a connection brings.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.transfer import plans
from benchmarks.transfer.plans import ComparedPlan, Links
from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.replication import PolicyOptions, make_policy
from chaos_lightning.replication.bulk import BulkFrame, Type
from chaos_lightning.replication.client import Deliver, Donor, Sink
from chaos_lightning.replication.planned import LinkEstimates, cut_runs, planned_grain_nbytes
from chaos_lightning.replication.policy import Estimates, Job, Shares, SourceStats, TransferPolicy
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.replication.table import PIECE_NBYTES
from chaos_lightning.replication.work_queue import WorkQueue

USUAL_LINK = (0.001, 8 / 1e9)
"""(latency in s, seconds per byte) of links where none is known."""


class Fixed(TransferPolicy):
    """Policy that carries out a plan without changes."""

    patient = True
    plan: ClassVar[Callable[..., ComparedPlan]]

    def __init__(self, estimates: Estimates | None = None, options: PolicyOptions | None = None, **given: Any) -> None:
        """Makes the policy; `given` are further arguments of its plan."""
        options = options or PolicyOptions()
        self._links = LinkEstimates(estimates)
        self._planner = partial(type(self).plan, ingress_s_per_byte=options.ingress_s_per_byte, **given)

    def prior(self, source: str) -> tuple[float, float] | None:
        return self._links.prior(source)

    def grain_nbytes(self, nbytes: int, sources: int, request_nbytes: int) -> int:
        return planned_grain_nbytes(nbytes, sources, request_nbytes)

    def request_nbytes(self, stats: SourceStats, now: float, limit: int) -> int:
        return limit

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Shares:
        return self._links.shares(jobs, sources, self._planner)


class Greedy(Fixed):
    """Policy of Chaos; a shard size that is not given is searched between the sizes of the state's tensors."""

    name = "greedy"
    plan = staticmethod(plans.greedy)

    def __init__(
        self, estimates: Estimates | None = None, options: PolicyOptions | None = None, shard_nbytes: int = 0
    ) -> None:
        layers = options.layer_nbytes if options is not None else ()
        super().__init__(estimates, options, layer_nbytes=layers, shard_nbytes=shard_nbytes)


class Optimal(Fixed):
    """Policy that assigns equal shards of `shard_nbytes` so that the transfer takes the least time."""

    name = "optimal"
    plan = staticmethod(plans.optimal)


class Even(Fixed):
    """Policy that pulls the same number of bytes from each neighbour."""

    name = "even"
    plan = staticmethod(plans.even)


class Single(Fixed):
    """Policy that pulls everything from one neighbour."""

    name = "single"
    plan = staticmethod(plans.single)


class MultiSource(TransferPolicy):
    """Policy that pulls equal shares from all nodes of the overlay; distant nodes are reached through the neighbours'
    servers.

    Args:
        estimates: (latency in s, bits per second) of the newcomer's links, by neighbour.
        options: Facts on the pull, with the name of the newcomer.
        links: Links of the overlay; None: those that `overlay` returns.
    """

    name = "multi_source"
    patient = True

    def __init__(
        self, estimates: Estimates | None = None, options: PolicyOptions | None = None, links: Links | None = None
    ) -> None:
        self._options = options = options or PolicyOptions()
        self._overlay = overlay(estimates or {}, options) if links is None else links
        if not self._overlay or not options.newcomer:
            raise ConfigurationError("multi_source needs an overlay in which the newcomer has a link to a source")
        self._routes = plans.shortest_routes(self._overlay, options.newcomer, PIECE_NBYTES)

    def grain_nbytes(self, nbytes: int, sources: int, request_nbytes: int) -> int:
        return planned_grain_nbytes(nbytes, sources, request_nbytes)

    def request_nbytes(self, stats: SourceStats, now: float, limit: int) -> int:
        return limit

    def sources(self, donors: Sequence[Endpoint]) -> list[Endpoint]:
        """Returns all sources: the donors (the newcomer's neighbours), and all other nodes, each reached through a
        donor.
        """
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
        nbytes, options = sum(job.nbytes for job in jobs), self._options
        plan = plans.multi_source(
            nbytes, self._overlay, options.newcomer, ingress_s_per_byte=options.ingress_s_per_byte
        )
        shares = {m: share for m, share in plan.shares.items() if m in sources}
        return Shares(cut_runs(jobs, shares, {}), plan.reason)


def overlay(estimates: Estimates, options: PolicyOptions) -> Links:
    """Returns the links by which the newcomer can reach members that have the state.

    Rates between others are not measured here. They count as a usual link, so routes are those of fewest hops.
    """
    me, view = options.newcomer, options.view
    holders = {m.id for m in options.sources}
    own = {m: (e[0], 8 / e[1]) for m, e in estimates.items() if e[1]}
    known = [own[m] for m in sorted(holders & set(own))]
    usual = (statistics.median(e[0] for e in known), statistics.median(e[1] for e in known)) if known else USUAL_LINK
    between = view.links if view is not None else ()
    beside = holders & set(options.near) if between else holders
    links = {(me, m): own.get(m, usual) for m in sorted(beside)}
    links |= {(link.a, link.b): usual for link in between if {link.a, link.b} <= holders}
    reached = {me, *plans.shortest_routes(links, me, PIECE_NBYTES)}
    return {ends: cost for ends, cost in links.items() if set(ends) <= reached}


class StopResume(TransferPolicy):
    """Policy in which the oldest donor writes a checkpoint and the newcomer reads it.

    Args:
        save: Has this donor write its state, and returns the file: all tensors end to end.
        disk_bps: Reading is held to this rate in bits per second; 0: as fast as the disk is.
    """

    name = "stop_resume"
    patient = True

    def __init__(self, save: Callable[[str], Path], disk_bps: float = 0.0) -> None:
        self._save, self._s_per_byte = save, 8 / disk_bps if disk_bps else 0.0

    def may_take(self, source: str, stats: Mapping[str, SourceStats]) -> bool:
        return source == next(iter(stats))

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Shares:
        return Shares({sources[0]: list(jobs)}, f"{sources[0]} writes a checkpoint, this member reads it")

    def way(self) -> Deliver:
        return self._deliver

    def _deliver(self, donor: Donor, work_queue: WorkQueue, sink: Sink) -> None:
        request = work_queue.take(donor.member, depth=1, wait=True, deadline=donor.deadline)
        if request is None:
            return
        path = self._save(donor.member)
        began, nbytes = time.monotonic(), 0
        with path.open("rb", buffering=0) as file:
            while request is not None:
                job = request.job
                buffers = sink.land(job)
                at = job.start
                for buffer in buffers:
                    got = os.preadv(file.fileno(), [buffer], at)
                    at += got
                    work_queue.arrived(request, got)
                    if got != len(buffer):
                        raise StateError(f"the checkpoint {path} ends at byte {at}, expected were {job.stop}")
                frame = BulkFrame(Type.DATA, donor.head, donor.seq, job.start, job.nbytes, sink.flags)
                donor.judge(request, work_queue, sink, buffers, frame)
                nbytes += job.nbytes
                time.sleep(max(0.0, began + nbytes * self._s_per_byte - time.monotonic()))
                request = work_queue.take(donor.member, depth=1, wait=True, deadline=donor.deadline)


_COMPARED = {policy.name: policy for policy in (Greedy, Optimal, Even, Single, MultiSource)}


def policy_of(
    name: str, estimates: Estimates | None = None, options: PolicyOptions | None = None, **given: Any
) -> TransferPolicy:
    """Returns the transfer policy of this name, for one pull: one that the package has, or one of this module.

    Args:
        name: Name of a policy, one of `POLICIES` and `COMPARED` of planning/shards.py.
        estimates: (latency in s, bits per second) of the newcomer's links, by neighbour.
        options: Further facts to plan by.
        given: Arguments that only this policy has.
    """
    if name == "stop_resume":
        return StopResume(**given)
    if name in _COMPARED:
        return _COMPARED[name](estimates, options, **given)
    return make_policy(name, estimates, options)
