"""Makes transfer policies by name; a policy decides how a newcomer divides a pull among its sources.

    adaptive      closed-form shares from estimates, then corrected by what is measured: who is idle takes from the
                  tail of whoever would end last, in proportion to both rates, and asks again for what is under way
                  elsewhere and would take longer there. Without estimates, whoever has room takes the next bytes.
    shared        a shared queue without estimates, stealing or duplicates.

Others are classes by MODULE:CLASS, as those that these two are compared with (benchmarks/transfer/policies.py).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from functools import partial

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning import shards
from chaos_lightning.planning.shards import POLICIES, wrong_policy
from chaos_lightning.replication.planned import LinkEstimates, planned_grain_nbytes
from chaos_lightning.replication.policy import (
    Estimates,
    Job,
    PolicyOptions,
    Queue,
    Request,
    SharedQueue,
    Shares,
    SourceStats,
    TransferPolicy,
)

_QUANTUM_S = 0.02
"""Seconds of sending for which a request is made: bytes under way cannot be taken from a source any more."""
_WINDOW_S = 0.01
"""Seconds of work, beyond round trips, that are kept under way at least, so that a late wake-up leaves no gap."""
_WORTH = 1.25
"""Factor by which the other source must be slower before a request is duplicated."""
_WORTH_S = 0.01
_SILENT_S = 0.25
"""Seconds of silence, where a rate is not known, after which another source had better do the work."""
_MOST_COPIES = 2


class Adaptive(TransferPolicy):
    """Policy that plans by estimates first, and corrects the plan by measured rates."""

    name = "adaptive"
    recheck_s = 0.02

    def __init__(self, estimates: Estimates | None = None, options: PolicyOptions | None = None) -> None:
        self._links = LinkEstimates(estimates)
        self._planner = partial(
            shards.closed_form, ingress_s_per_byte=options.ingress_s_per_byte if options is not None else 0.0
        )

    def prior(self, source: str) -> tuple[float, float] | None:
        return self._links.prior(source)

    def grain_nbytes(self, nbytes: int, sources: int, request_nbytes: int) -> int:
        return planned_grain_nbytes(nbytes, sources, request_nbytes)

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Shares:
        if not any(self._links.prior(m) for m in sources):
            return Shares(reason="no estimates: whoever has room takes the next bytes")
        return self._links.shares(jobs, sources, self._planner)

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


def policy_class(name: str) -> type[TransferPolicy]:
    """Returns the class of a transfer policy; each object of it serves for one pull.

    Args:
        name: One of `POLICIES`, or MODULE:CLASS: a TransferPolicy made of estimates and PolicyOptions.

    Raises:
        ConfigurationError: There is no policy of this name.
    """
    if wrong := wrong_policy(name):
        raise ConfigurationError(f"unknown transfer policy {name!r}: {wrong}")
    if ":" not in name:
        return Adaptive if name == "adaptive" else SharedQueue
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"transfer policy {name!r} cannot be loaded: {error}; expected MODULE:CLASS"
        ) from error
    if not (isinstance(found, type) and issubclass(found, TransferPolicy)):
        raise ConfigurationError(
            f"transfer policy {name!r} is no class of a policy; expected a subclass of "
            "chaos_lightning.replication.TransferPolicy"
        )
    return found


def make_policy(
    name: str = "adaptive", estimates: Estimates | None = None, options: PolicyOptions | None = None
) -> TransferPolicy:
    """Makes a transfer policy by name; each pull needs a new one.

    Args:
        name: Name of the policy: one of `POLICIES`, or MODULE:CLASS (`policy_class`).
        estimates: {member: (latency in seconds, rate in bits per second)} of the newcomer's links. Members without an
            estimate are taken for average ones; without any, `adaptive` works by what it measures alone.
        options: Facts that it may plan by.

    Raises:
        ConfigurationError: An unknown name, or estimates that are no rates.
    """
    return policy_class(name)(estimates, options or PolicyOptions())


__all__ = ["POLICIES", "Adaptive", "make_policy", "policy_class"]
