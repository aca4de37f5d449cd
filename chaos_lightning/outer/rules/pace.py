"""Sets dynamic local steps: how many inner steps each cluster takes from one push to the next.

Theory of operation. Of the H K inner steps of a full round each cluster takes its part by its measured rate v_j, H K
v_j / sum v: so all end the round together, and nobody waits. The parts are rounded so that they add up to H K. Rounded
each by itself they would often be one short, and the momentum, which moves once a full round's samples are in, would
move in every other round only. Nobody takes less than one step. A measured rate may be off, so a cluster's steps change
by at most a quarter per round (by one, where a quarter is less than that), and the sum may be another one meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from chaos_lightning.outer.rules.types import IncarnationId

MOST = 0.25
"""Largest change of a cluster's steps from one round to the next, as a part."""


def local_steps(
    steps_per_s: Mapping[IncarnationId, float], before: Mapping[IncarnationId, int], inner_steps: int
) -> tuple[dict[IncarnationId, int], str]:
    """Returns how many inner steps each cluster shall make from one push to the next (H_j), and why.

    Args:
        steps_per_s: Measured inner rate of each cluster that trains; 0.0 where none is known yet, which counts as the
            average of the others.
        before: Number of steps that each cluster was given last; one that is not in it may get any number.
        inner_steps: Number of inner steps (H) of a usual cluster from one push to the next.
    """
    known = [rate for rate in steps_per_s.values() if 0 < rate < math.inf]
    usual = math.fsum(known) / len(known) if known else 1.0
    rates = {who: rate if 0 < rate < math.inf else usual for who, rate in sorted(steps_per_s.items())}
    whole = math.fsum(rates.values())
    exact = {who: inner_steps * len(rates) * (rate / whole) for who, rate in rates.items()}
    steps = {who: max(1, math.floor(wanted)) for who, wanted in exact.items()}
    missing = max(0, inner_steps * len(rates) - sum(steps.values()))
    for who in sorted(exact, key=lambda one: (math.floor(exact[one]) - exact[one], one))[:missing]:
        steps[who] += 1
    bound = {who: _near(wanted, before[who]) if who in before else wanted for who, wanted in steps.items()}
    said = ", ".join(
        f"{who} {number}" + (f" (not yet {steps[who]})" if steps[who] != number else "")
        for who, number in bound.items()
    )
    return bound, f"steps by measured rates: {said}" if known else f"no rate is known yet: {said}"


def _near(wanted: int, before: int) -> int:
    """Returns the number of steps nearest to `wanted` that differs from `before` by at most a quarter, or by one."""
    change = max(1, math.floor(MOST * before))
    return max(1, before - change, min(wanted, before + change))
