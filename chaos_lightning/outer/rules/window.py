"""Decides when the staged pushes become a round: how long it pays to wait for another push.

Theory of operation. A window opens with the first staged push, and its deadline is fixed then: a `Window` is immutable,
so no later arrival can put the deadline off (reset by each arrival, it could be put off for ever). It closes when
everybody that trains is in, or at the deadline. Who is missing is not waited for if its push is under way and will
not be in by then. Who began to train after the opening is not waited for either: a newcomer would hold up everybody for
a whole round, and goes into the next window.

How long. A push that misses the window waits C seconds, until the round is decided, computed and fetched. Pushes come
at lambda per second. Waiting tau costs tau + C e^(-lambda tau), least at tau = ln(C lambda) / lambda if C lambda > 1,
else at 0 (the paper's section 4.1). Since both are estimates, tau is at most a part of a round (`grace_cap`). So di_ps.

That sum takes a cluster for idle while it waits. With overlap it trains on, so waiting costs nothing but the age of its
push, and a fuller window gives more: the others' directions to judge it by, and one version in place of several, which
all fetch. So `robust` waits for the whole part of a round. Measured (docs/outer.md, Convergence): from no wait to three
quarters of a round the final loss is the same within 1.3%, pushes of a round go from 1.0 to 3.2, and versions that a
cluster fetches for each of its pushes from 3.8 to 1.2.

`sync` has no deadline, and `async` waits for nobody.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from chaos_lightning.outer.rules.arrivals import ArrivalRates
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import IncarnationId

_NAMED = 4


@dataclass(frozen=True, slots=True)
class Due:
    """Decision whether to stop collecting pushes and make a round of them.

    Attributes:
        closes: Whether to stop now.
        reason: Reason to stop, or what the window waits for.
        usual: Number of clusters (K) of the round: those that train and that the window knows of, and all whose push is
            in.
    """

    closes: bool
    reason: str
    usual: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Time in which pushes for one round are collected. A new leader begins a new one (O12).

    Attributes:
        opened_s: Time, s, when the window opened, by the leader's own clock.
        deadline_s: Time, s, until which it waits at most, by the same clock; infinite for `sync`.
        known: Incarnations that trained when it opened.
        why: Words that explain the deadline.
    """

    opened_s: float
    deadline_s: float
    known: frozenset[IncarnationId]
    why: str

    @classmethod
    def opened(
        cls, now_s: float, training: Collection[IncarnationId], rates: ArrivalRates, settings: OuterSettings
    ) -> Window:
        """Returns a window that begins now, with the first staged push.

        Args:
            now_s: Present time, s, by the leader's clock.
            training: Incarnations that train (O13).
            rates: Estimates of the times between pushes, from earlier rounds.
            settings: Rules of the job.
        """
        known = frozenset(training)
        if settings.policy == "sync":
            return cls(now_s, math.inf, known, "no deadline: sync waits for all that train")
        if settings.policy == "async":
            return cls(now_s, now_s, known, "no wait: async takes each push by itself")
        cap_s = settings.grace_cap * rates.round_s(len(known))
        if settings.policy == "robust":
            return cls(now_s, now_s + cap_s, known, f"{cap_s:.3g} s: {settings.grace_cap:g} of a round")
        wait_s = min(rates.grace_s, cap_s)
        if rates.grace_s <= 0:
            why = "no wait: a push that comes too late loses less time than the others would"
        elif rates.grace_s <= cap_s:
            why = f"{wait_s:.3g} s: {rates.pushes_per_s:.3g} pushes/s, {rates.missed_s:.3g} s lost by coming too late"
        else:
            why = f"{wait_s:.3g} s: the longest wait, {settings.grace_cap:g} of a round"
        return cls(now_s, now_s + wait_s, known, why)

    def due(
        self,
        now_s: float,
        training: Set[IncarnationId],
        staged: Set[IncarnationId],
        in_s: Mapping[IncarnationId, float],
    ) -> Due:
        """Returns whether to stop collecting pushes now, and why.

        Args:
            now_s: Present time, s, by the leader's clock.
            training: Incarnations that train now (O13).
            staged: Incarnations whose push is staged by all shards.
            in_s: Time, s, at which the push of each incarnation that is under way will be in, by the leader's clock.
        """
        usual = self.known & training | staged
        if not staged:
            return Due(False, "none of its pushes is left: the window is to be forgotten", len(usual))
        missing = usual - staged
        if not missing:
            return Due(True, f"everybody that trains is in ({len(staged)})", len(usual))
        if now_s >= self.deadline_s:
            return Due(True, f"the deadline has passed ({self.why}); missing: {_in_words(missing)}", len(usual))
        awaited = {who for who in missing if in_s.get(who, now_s) <= self.deadline_s}
        if not awaited:
            return Due(True, f"what is missing will not be in before the deadline: {_in_words(missing)}", len(usual))
        return Due(False, f"waits for {_in_words(awaited)} ({self.why})", len(usual))


def _in_words(who: Iterable[IncarnationId]) -> str:
    names = [str(one) for one in sorted(who)]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
