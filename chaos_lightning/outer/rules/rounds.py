"""Collects staged pushes for the leader, and decides when a round is due and what it says.

Theory of operation. A window is nothing durable: a new leader opens a new one with a full deadline, by the estimates of
the last round (O12), and what followers have told of pushes is told again. Which pushes count is judging.py's to say,
from norms and products that are exact sums over all shards.

Where pushes hold parameters f_j (`OuterSettings.pushes_parameters`) they count for theta - f_j, of the version before
the round. Followers tell <f_j, f_k> once, and L_j = <theta, theta> - 2 <theta, f_j> of each version. Then

    <theta - f_j, theta - f_k> = <f_j, f_k> + (L_j + L_k) / 2

so a round waits there until all shards have told L_j of the newest version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.exact import ExactSum
from chaos_lightning.outer.rules.gates import MeasuredPush
from chaos_lightning.outer.rules.judging import judge
from chaos_lightning.outer.rules.messages import Staged
from chaos_lightning.outer.rules.offers import impossible
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import IncarnationId, Offer, PushId, Rejection, Round, VersionId, Voided
from chaos_lightning.outer.rules.window import Window

Rows = Mapping[PushId, Sequence[Staged]]
"""Reports of the followers on each push, in shard order."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Facts of the last round: its version, when it was stored (s), and how many pushes it answered."""

    version: VersionId
    at_s: float
    pushes: int


class Rounds:
    """Part of the leader that collects pushes and decides rounds.

    Args:
        chain: Chain of the job.

    Attributes:
        rates: Estimates of the times between pushes, from past rounds.
        waits: Reason for which no round is decided at the moment; "" if nothing is staged.
    """

    def __init__(self, chain: OuterChain) -> None:
        self._chain = chain
        self._window: Window | None = None
        self.rates = chain.rates
        self._last: Answered | None = None
        self._before_s = 0.0
        self.waits = ""

    def next(
        self,
        now_s: float,
        offers: Sequence[Offer],
        rows: Rows,
        *,
        training: Set[IncarnationId],
        in_s: Mapping[IncarnationId, float],
        again: Collection[PushId],
        settings: OuterSettings,
    ) -> Round | Voided | None:
        """Returns the round, or another decision on staged pushes, that is due now; None if there is none.

        Args:
            now_s: Present time, s, by the leader's clock.
            offers: Offers of pushes that all shards have, in the order of their names.
            rows: Reports of the followers on each push.
            training: Incarnations that train (O13).
            in_s: Time, s, at which the push of each incarnation that is under way will be in.
            again: Pushes that a rollback opened again: they are not void for their age, since later ones stand on them.
            settings: Rules of the job.
        """
        staged = {offer.push.incarnation for offer in offers}
        if not offers:
            self._window, self.waits = None, ""
            return None
        if self._window is None:
            self._window = Window.opened(now_s, training | staged, self.rates, settings)
        due = self._window.due(now_s, training | staged, staged, in_s)
        self.waits = "" if due.closes else due.reason
        if not due.closes:
            return None
        newest, told = self._chain.newest, (row for each in rows.values() for row in each)
        if settings.pushes_parameters and any(row.finite and row.at != newest for row in told):
            self.waits = f"{newest} is being computed, from which pushes are subtracted"
            return None
        self._window = None
        return self._decide(offers, rows, again, due.usual, due.reason, settings)

    def _decide(
        self,
        offers: Sequence[Offer],
        rows: Rows,
        again: Collection[PushId],
        usual: int,
        why: str,
        settings: OuterSettings,
    ) -> Round | Voided:
        """Decides a round on these pushes, after sorting out those that must be rejected whatever their content."""
        chain = self._chain
        shared = chain.leases is not None
        refused = [
            Rejection(offer, words)
            for offer in offers
            if (words := impossible(offer, chain.counters, settings, shared=shared) or self._objection(offer))
        ]
        rest = [offer for offer in offers if offer.push not in {r.offer.push for r in refused}]
        names = [offer.push for offer in rest]
        leans = {name: _lean(rows[name], chain.newest) for name in names}
        known = leans if settings.pushes_parameters else {}
        sums = {(one, other): _product(rows, one, other, known) for one in names for other in names if one <= other}
        candidates = [
            MeasuredPush(
                offer,
                0 if offer.push in again else chain.staleness(offer.base),
                all(row.finite for row in rows[offer.push]),
                0.0 if known else float(leans[offer.push]),  # there is no momentum to compare parameters with
                sums[offer.push, offer.push],
            )
            for offer in rest
        ]
        found = judge(candidates, sums, usual, chain.counters, chain.gate, settings, why)
        if found.void:
            return Voided(*found.void[0])
        rejected = sorted((*found.rejected, *refused), key=lambda refusal: refusal.offer.push)
        return Round(
            chain.next_number,
            chain.newest,
            found.accepted,
            tuple(rejected),
            found.factors,
            found.counters,
            found.gate,
            found.reason,
            self.rates,
        )

    def _objection(self, offer: Offer) -> str:
        """Returns why this push must be rejected whatever its content (O3, O11); "" if there is no such reason."""
        chain, who = self._chain, offer.push.incarnation
        if chain.held(offer.base, who) != chain.held(chain.newest, who):
            return f"its base {offer.base} does not hold the pushes of {who} that stand"
        return chain.leases.objection(offer) if chain.leases is not None else ""

    def decided(self, now_s: float, version: VersionId, pushes: int) -> None:
        """Notes that a round is stored."""
        self._before_s = self._last.at_s if self._last is not None else 0.0
        self._last = Answered(version, now_s, pushes)

    def served(self, now_s: float, version: VersionId) -> None:
        """Updates the estimates of arrivals from the last round, now that all shards serve its version."""
        last = self._last
        if last is not None and last.version == version and self._before_s:
            self.rates = self.rates.after(last.pushes, last.at_s - self._before_s, now_s - last.at_s)


def _product(rows: Rows, one: PushId, other: PushId, leans: Mapping[PushId, ExactSum]) -> float:
    """Returns the scalar product of two pushes over all shards, which followers reported with the later one; 0.0 if one
    of them is not finite.

    `leans`: L_j of each push, where pushes hold parameters; else empty.
    """
    whole = ExactSum.of(())
    for mine, theirs in zip(rows[one], rows[other], strict=True):
        found = _said(mine, other) or _said(theirs, one)
        if found is None:
            return 0.0
        whole += ExactSum.decode(found)
    if leans:
        twice = float(whole + whole + leans[one] + leans[other])
        return max(0.0, twice / 2) if one == other else twice / 2  # rounding may leave less than nothing of a square
    return float(whole)


def _said(staged: Staged, of: PushId) -> str | None:
    return next((product.sum for product in staged.products if product.push == of), None)


def _lean(rows: Sequence[Staged], newest: VersionId) -> ExactSum:
    """Returns a push's scalar product with the newest version's momentum, or L_j, over all shards; 0 if a shard has not
    reported it yet.
    """
    whole = ExactSum.of(())
    if any(row.at != newest for row in rows):
        return whole
    for row in rows:
        whole += ExactSum.decode(row.momentum)
    return whole
