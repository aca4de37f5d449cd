"""Estimates from past rounds when pushes arrive, and how much time a push loses that comes too late for its round
(outer/rules/window.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FADE = 0.9
"""Decay of a round's weight per later round."""


@dataclass(frozen=True, slots=True)
class ArrivalRates:
    """Estimates of the times between pushes, in which older rounds weigh less; the chain keeps them in each round
    (O12).

    Attributes:
        pushes: Number of pushes that arrived.
        span_s: Seconds in which these pushes arrived.
        cost_s: Seconds that a push which missed its window waited, summed over all rounds.
        rounds: Number of rounds.
    """

    pushes: float = 0.0
    span_s: float = 0.0
    cost_s: float = 0.0
    rounds: float = 0.0

    def after(self, pushes: int, span_s: float, cost_s: float) -> ArrivalRates:
        """Returns the estimates with one more round taken into account.

        Args:
            pushes: Number of pushes that the round decided on.
            span_s: Seconds from the decision of the round before to that of this one. If that is not known (after a
                takeover), it is not above 0, and the round teaches nothing.
            cost_s: Seconds from this round's decision until all shards served its version.
        """
        if not (0 < span_s < math.inf and 0 <= cost_s < math.inf):
            return self
        return ArrivalRates(
            FADE * self.pushes + pushes,
            FADE * self.span_s + span_s,
            FADE * self.cost_s + cost_s,
            FADE * self.rounds + 1,
        )

    @property
    def pushes_per_s(self) -> float:
        """Pushes a second (lambda); 0.0 while nothing is known."""
        return self.pushes / self.span_s if self.span_s else 0.0

    @property
    def missed_s(self) -> float:
        """Seconds (C) that a push waits if it comes too late for its round."""
        return self.cost_s / self.rounds if self.rounds else 0.0

    @property
    def grace_s(self) -> float:
        """Seconds for which a round should wait for another push."""
        expected = self.missed_s * self.pushes_per_s
        return math.log(expected) / self.pushes_per_s if expected > 1 else 0.0

    def round_s(self, clusters: int) -> float:
        """Returns the estimated seconds from one push of a cluster to its next; 0.0 while nothing is known."""
        return clusters / self.pushes_per_s if self.pushes_per_s else 0.0


UNTAUGHT = ArrivalRates()
"""Estimates before the first round."""
