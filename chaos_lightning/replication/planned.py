"""Plans which source sends how much in a pull: estimates of links, and shares cut into jobs.

Theory of operation. A fixed share is a run of jobs in address order. The slower a source, the less may its share be
rounded up: shares are cut from the slowest to the fastest source, each rounded down to whole jobs, and the fastest
takes the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.shards import Neighbour, SharePlan
from chaos_lightning.replication.policy import MIN_REQUEST_NBYTES, Estimates, Job, Shares
from chaos_lightning.replication.table import PIECE_NBYTES

Planner = Callable[[int, Sequence[Neighbour]], SharePlan]
"""Function that plans shares, given a size in bytes and the neighbours that can send."""


class LinkEstimates:
    """Estimates of a newcomer's links before a pull, and the shares of the work computed from them.

    Args:
        estimates: Latency in seconds and rate in bits per second of the link to each member, by member.

    Raises:
        ConfigurationError: A latency or a rate is negative, or not finite.
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
        """Returns the estimated latency and rate of the link to this member; None without an estimate, or at rate 0."""
        known = self.by_member.get(source)
        return known if known is not None and known[1] else None

    def neighbours(self, sources: Sequence[str]) -> tuple[list[Neighbour], str]:
        """Converts sources to the planner's `Neighbour`s; a source without an estimate gets the median of the
        others.
        """
        known = {m: e for m, e in self.by_member.items() if e[1]}
        rates = [known[m][1] for m in sources if m in known]
        latencies = [known[m][0] for m in sources if m in known]
        usual = (statistics.median(latencies), statistics.median(rates)) if rates else (0.0, 1e9)
        usable = [m for m in sources if m not in self.by_member or self.by_member[m][1]] or list(sources)
        # A request has to go there before its bytes can come: two latencies.
        found = [Neighbour(m, 2 * known.get(m, usual)[0], 8 / known.get(m, usual)[1]) for m in usable]
        guessed = [m for m in usable if m not in known]
        return found, f"; no estimate of {', '.join(guessed)}, taken as usual" if guessed else ""

    def shares(self, jobs: Sequence[Job], sources: Sequence[str], planner: Planner) -> Shares:
        """Returns the jobs that this planner assigns to each source."""
        found, note = self.neighbours(sources)
        plan = planner(sum(job.nbytes for job in jobs), found)
        speeds = {n.member: 1 / n.s_per_byte for n in found}
        return Shares(cut_runs(jobs, plan.shares, speeds), plan.reason + note)


def planned_grain_nbytes(nbytes: int, sources: int, request_nbytes: int) -> int:
    """Returns a job size so small that planned shares are met to within a sixteenth of the smallest share."""
    return min(PIECE_NBYTES, max(MIN_REQUEST_NBYTES, nbytes // (16 * max(1, sources))), request_nbytes)


def cut_runs(jobs: Sequence[Job], shares: Mapping[str, int], speeds: Mapping[str, float]) -> dict[str, list[Job]]:
    """Divides jobs into runs of about these sizes, one for each source; the source of highest speed gets what rounding
    leaves.
    """
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
