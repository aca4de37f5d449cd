"""Transfer policies by name: how a newcomer shares the work among its sources, all really executed.

    adaptive      closed-form shares from estimates, then corrected by what is measured: who is idle takes from the
                  tail of whoever would end last, in proportion to both rates, and asks again for what is under way
                  elsewhere and would take longer there. Without estimates, whoever has room takes the next bytes.
    greedy        Chaos, Algorithms 1 and 2; shares are fixed.
    optimal       the exact assignment of equal shards; fixed.
    even          the same from each neighbour; fixed.
    single        all from the fastest neighbour (EDL+); fixed.
    multi_source  the same from every node, relayed over shortest paths (Autoscaling); fixed.
    stop_resume   through a checkpoint file that the oldest donor writes (Pollux).
    shared        a shared queue without estimates, stealing or duplicates.

Where shares are fixed only a failure moves work: what a lost source was to send is taken by whoever has room. All but
adaptive and shared are there to be compared with (baselines.py).

Theory of operation. A fixed share is a run of jobs in address order. The slower a source, the less may its share be
rounded up: shares are cut from the slowest to the fastest source, each rounded down to whole jobs, and the fastest
takes the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning import shards
from chaos_lightning.planning.shards import POLICIES, Links, Neighbour, SharePlan
from chaos_lightning.replication.policy import (
    MIN_REQUEST_NBYTES,
    Job,
    Queue,
    Request,
    SharedQueue,
    Shares,
    SourceStats,
    TransferPolicy,
)
from chaos_lightning.replication.table import PIECE_NBYTES

Estimates = Mapping[str, tuple[float, float]]
"""(latency in seconds, rate in bits per second) of the link to each member; at a rate of 0 it carries nothing."""

_QUANTUM_S = 0.02
"""A request is as large as a source sends in this time: what is under way cannot be taken from it any more."""
_WINDOW_S = 0.01
"""So much work, beyond round trips, is kept under way at least: a late wake-up leaves no gap."""
_WORTH = 1.25
"""A request is duplicated if the other source would take so many times longer."""
_WORTH_S = 0.01
_SILENT_S = 0.25
"""Where a rate is not known, so long a silence says that the other source had better do it."""
_MOST_COPIES = 2


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What some policies want to know."""

    ingress_bps: float = 0.0
    """The newcomer's own access link, in bits per second; 0: no limit of its own."""
    layer_nbytes: tuple[int, ...] = ()
    """greedy: sizes of the layers, between whose extremes Algorithm 1 searches the shard size."""
    shard_nbytes: int = 0
    """greedy, optimal: a fixed shard size; 0: searched, or 1 MiB."""
    links: Links = field(default_factory=dict)
    """multi_source: the overlay, as {(a, b): (latency in seconds, seconds per byte)}."""
    newcomer: str = ""
    """multi_source: this member's name in `links`."""
    barrier: bool = False
    """single: EDL+ makes everybody wait; recorded in the reason."""
    folder: str = ""
    """stop_resume: where the donor's checkpoints can be read."""
    disk_bps: float = 0.0
    """stop_resume: reading is held to this rate in bits per second; 0: as fast as the disk is."""

    def __post_init__(self) -> None:
        for name in ("ingress_bps", "disk_bps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name} must be finite and not negative, got {value}")
        if self.shard_nbytes < 0:
            raise ConfigurationError(f"shard_nbytes must not be negative, got {self.shard_nbytes}")

    @property
    def ingress_s_per_byte(self) -> float:
        return 8 / self.ingress_bps if self.ingress_bps else 0.0


class LinkEstimates:
    """What is known of a newcomer's links before a pull, for planners.

    Args:
        estimates: By member.

    Raises:
        ConfigurationError: They are no rates.
    """

    def __init__(self, estimates: Estimates | None) -> None:
        self.by_member = dict(estimates or {})
        for member, (latency_s, rate_bps) in self.by_member.items():
            if not (math.isfinite(latency_s) and latency_s >= 0 and math.isfinite(rate_bps) and rate_bps >= 0):
                raise ConfigurationError(
                    f"the link to {member} is estimated at {latency_s} s and {rate_bps} bps: expected finite numbers "
                    "that are not negative"
                )

    def prior(self, source: str) -> tuple[float, float] | None:
        """Of the link to this member, if it carries anything; as `TransferPolicy.prior`."""
        known = self.by_member.get(source)
        return known if known is not None and known[1] else None

    def neighbours(self, sources: Sequence[str]) -> tuple[list[Neighbour], str]:
        """The sources as the planner wants them; who is not estimated is taken for an average one."""
        known = {m: e for m, e in self.by_member.items() if e[1]}
        rates = [known[m][1] for m in sources if m in known]
        latencies = [known[m][0] for m in sources if m in known]
        usual = (statistics.median(latencies), statistics.median(rates)) if rates else (0.0, 1e9)
        usable = [m for m in sources if m not in self.by_member or self.by_member[m][1]] or list(sources)
        # A request has to go there before its bytes can come: two latencies.
        found = [Neighbour(m, 2 * known.get(m, usual)[0], 8 / known.get(m, usual)[1]) for m in usable]
        guessed = [m for m in usable if m not in known]
        return found, f"; no estimate of {', '.join(guessed)}, taken as usual" if guessed else ""


def planned_grain_nbytes(nbytes: int, sources: int, request_nbytes: int) -> int:
    """Jobs of this size let planned shares come out to a sixteenth of the smallest; see
    `TransferPolicy.grain_nbytes`."""
    return min(PIECE_NBYTES, max(MIN_REQUEST_NBYTES, nbytes // (16 * max(1, sources))), request_nbytes)


def cut_runs(jobs: Sequence[Job], shares: Mapping[str, int], speeds: Mapping[str, float]) -> dict[str, list[Job]]:
    """Runs of jobs of about these sizes; `speeds` says who may better take what rounding leaves."""
    order = sorted(shares, key=lambda m: speeds.get(m, 0.0))
    scale = sum(job.nbytes for job in jobs) / max(1, sum(shares.values()))
    given: dict[str, list[Job]] = {m: [] for m in order}
    at = 0
    for member in order:
        left = shares[member] * scale if member != order[-1] else math.inf
        while at < len(jobs) and jobs[at].nbytes <= left + 0.5:
            given[member].append(jobs[at])
            left -= jobs[at].nbytes
            at += 1
    return {m: run for m, run in given.items() if run}


class Adaptive(TransferPolicy):
    """Planned first, corrected by what is measured."""

    name = "adaptive"
    recheck_s = 0.02

    def __init__(self, estimates: Estimates | None, options: PolicyOptions) -> None:
        self.options = options
        self.plan: SharePlan | None = None
        """The last plan that was made."""
        self._links = LinkEstimates(estimates)

    def prior(self, source: str) -> tuple[float, float] | None:
        return self._links.prior(source)

    def grain_nbytes(self, nbytes: int, sources: int, request_nbytes: int) -> int:
        return planned_grain_nbytes(nbytes, sources, request_nbytes)

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Shares:
        nbytes = sum(job.nbytes for job in jobs)
        if not any(self._links.prior(m) for m in sources):
            return Shares(reason="no estimates: whoever has room takes the next bytes")
        found, note = self._links.neighbours(sources)
        self.plan = shards.closed_form(nbytes, found, ingress_s_per_byte=self.options.ingress_s_per_byte)
        speeds = {n.member: 1 / n.s_per_byte for n in found}
        return Shares(cut_runs(jobs, self.plan.shares, speeds), self.plan.reason + note)

    def request_nbytes(self, stats: SourceStats, now: float, limit: int) -> int:
        return min(limit, int(stats.rate(now) * _QUANTUM_S))

    def window_nbytes(self, stats: SourceStats, now: float) -> int:
        # Two round trips' worth: with less, a rate that is measured on a window that is too small would keep it so.
        return int(stats.rate(now) * (4 * stats.latency_s + _WINDOW_S))

    def steal(
        self, thief: str, queues: Mapping[str, Queue], stats: Mapping[str, SourceStats], now: float
    ) -> tuple[str, int] | None:
        def ends(source: str) -> float:
            known = stats.get(source)
            return known.needs_s(known.under_way + queues[source].nbytes, now) if known is not None else math.inf

        victim = max(queues, key=lambda source: (ends(source), queues[source].nbytes))
        queue, mine = queues[victim], stats[thief]
        theirs = stats.get(victim)
        rate, other = mine.rate(now), theirs.rate(now) if theirs is not None else 0.0
        if not rate:
            return victim, queue.tail_nbytes  # one job shows what this source can do
        if not other:
            return victim, max(1, queue.nbytes // 2)  # nothing is known of the other: halves, until something is
        ahead = queue.nbytes + (theirs.under_way if theirs is not None else 0)
        # Both end at once: (ahead - x) / other == (mine.under_way + x) / rate
        share = (rate * ahead - other * mine.under_way) / (rate + other)
        if share < queue.tail_nbytes:
            sooner = (mine.under_way + queue.tail_nbytes) / rate + 2 * mine.latency_s < ends(victim)
            return (victim, queue.tail_nbytes) if sooner else None
        return victim, int(min(share, queue.nbytes))

    def duplicate(
        self, source: str, requests: Sequence[Request], stats: Mapping[str, SourceStats], now: float
    ) -> Request | None:
        mine = stats[source]
        rate = mine.rate(now)
        ahead: dict[str, int] = {}
        best: tuple[float, Request | None] = (0.0, None)
        for request in requests:  # in the order in which each source was asked
            before = ahead.get(request.source, 0)
            ahead[request.source] = before + request.job.nbytes - request.got
            if request.task.copies >= _MOST_COPIES:
                continue
            theirs = stats[request.source]
            if not (rate and theirs.rate(now)) and theirs.silent_s(now) < _SILENT_S:
                continue
            needs_s = theirs.needs_s(ahead[request.source], now)
            here_s = 2 * mine.latency_s + (request.job.nbytes / rate if rate else 0.0)
            if needs_s > _WORTH * here_s + _WORTH_S and needs_s > best[0]:
                best = (needs_s, request)
        return best[1]


def make_policy(
    name: str = "adaptive", estimates: Estimates | None = None, options: PolicyOptions | None = None
) -> TransferPolicy:
    """A transfer policy by name; make a new one for each pull.

    Args:
        name: One of `POLICIES`.
        estimates: {member: (latency in seconds, rate in bits per second)} of the newcomer's links. Members without an
            estimate are taken for average ones; without any, `adaptive` works by what it measures alone.
        options: What some policies want to know beside.

    Raises:
        ConfigurationError: An unknown name, estimates that are no rates, or something missing that this policy needs.
    """
    options = options or PolicyOptions()
    if name == "adaptive":
        return Adaptive(estimates, options)
    if name == "shared":
        return SharedQueue()
    if name in POLICIES:
        from chaos_lightning.replication.baselines import make_baseline  # for comparison: no usual transfer loads it

        return make_baseline(name, estimates, options)
    raise ConfigurationError(f"unknown transfer policy {name!r}: expected one of {', '.join(POLICIES)}")


__all__ = ["POLICIES", "Adaptive", "Estimates", "LinkEstimates", "PolicyOptions", "make_policy"]
