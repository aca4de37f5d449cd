"""Estimates members' speeds, for plans of pipelines, from the speeds that they measure and report.

Theory of operation. A member tells how much faster or slower it computes than its own request foresees
(`Heartbeat.speed`). Requests are measured by each member for itself, and plans take the layers of the oldest one, so
what is told is first brought to those. All members may be off by the same factor, as when they were measured at rest.
That factor, the median, makes estimates true and chooses nothing. Beside it each member has a factor of its own: 1 for
one that has not told any.

A factor stays until what is told is off by more than `NOTICED`, and one that is as near to 1 as that is 1. So members
that differ little count as alike, for which plans are exact, and a speed that wavers changes no plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from chaos_lightning.membership.peers import Peer
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.protocol.types import MOST_SPEED

NOTICED = 0.15
"""Share by which a speed has to be off before it counts."""


class Speeds:
    """Estimated speeds of members, for plans of pipelines.

    Args:
        peers: Members by id, with what they tell.
        requests: Requests of members for pipelines, by id.
    """

    def __init__(self, peers: Mapping[str, Peer], requests: Mapping[str, PipelineRequest]) -> None:
        self._peers, self._requests = peers, requests
        self._common = 1.0
        self._own: dict[str, float] = {}
        self.planned: dict[str, float] = {}
        """Speed by which each member is planned, beside its device's; as of the last `look`."""

    def look(self, oldest: PipelineRequest) -> None:
        """Updates the estimates from the speeds that members have reported since the last look.

        Args:
            oldest: Request whose layers plans take.
        """
        told = {
            m: self._told(speed, m, oldest)
            for m, p in self._peers.items()
            if (speed := p.tempo.speed) and m in self._requests
        }
        if told:
            self._common = _counted(self._common, statistics.median_high(told.values()))
        self._own = {m: _counted(self._own.get(m, 1.0), speed / self._common) for m, speed in told.items()}
        self.planned.clear()
        self.planned.update((m, self._common * self._own.get(m, 1.0)) for m in self._requests)

    def _told(self, speed: float, member: str, oldest: PipelineRequest) -> float:
        told = speed * oldest.work_s / self._requests[member].work_s
        return min(MOST_SPEED, max(1 / MOST_SPEED, told))  # nonsense, too, even if it is no number

    def own(self, members: Iterable[str]) -> dict[str, float]:
        """Returns these members' speed factors, without the factor that is common to all members."""
        return {m: self._own.get(m, 1.0) for m in members}


def _counted(before: float, told: float) -> float:
    """Returns the newly reported factor, or the one used so far (or 1) if the difference is small."""
    near = (x for x in (before, 1.0) if max(told / x, x / told) <= 1 + NOTICED)
    return next(near, float(f"{told:.3g}"))


def changes(before: Mapping[str, float], now: Mapping[str, float]) -> Sequence[str]:
    """Returns in words which members are faster or slower than a plan assumed, the slowest first.

    Args:
        before: Factors by which it was made.
        now: Factors of the members that are there.
    """
    found = {m: speed / before.get(m, 1.0) for m, speed in now.items()}
    off = sorted((m for m, x in found.items() if max(x, 1 / x) > 1 + NOTICED), key=lambda m: found[m])
    return [
        f"{m} computes {max(found[m], 1 / found[m]):.2g} times {'slower' if found[m] < 1 else 'faster'} than foreseen"
        for m in off
    ]
