"""Estimates rate and latency of the links between machines, for plans of pipelines, from what members measure.

Theory of operation. Members measure their links and report rates and latencies (topology.py). Plans know one link for
all pairs of members on different machines, since plans for unequal links are hard to find: the median one counts, and
of each pair the slower direction. It stays until the median is off by more than `NOTICED`, so that rates which waver
change no plan. Within a machine a link is a copy in memory, and its rate as measured tells how busy the machine is;
there, and where the user's profile names a rate, what the profile says counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from chaos_lightning.membership.topology import Topology
from chaos_lightning.planning.pipelines.job import LinkRate
from chaos_lightning.protocol.types import Member

NOTICED = 0.25
"""Share by which rate or latency has to be off before it counts."""
LOOK_PAUSE_S = 2.0
"""Seconds between two looks at what members have measured."""
_LITTLE_S = 0.0005
"""Seconds: latencies that differ by less count as equal."""
_FEW = 32
"""Number of members, the first by rank, whose links are looked at: 496 pairs are enough for a median."""


class MeasuredLink:
    """Usual rate and latency of a link between two machines, as members have measured them.

    Args:
        topology: Links as members have reported them.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.usual: LinkRate | None = None
        """Link between members on different machines; None: none was measured."""

    def look(self, members: Sequence[Member]) -> None:
        """Updates the estimate from what these members, in rank order, have reported of their links."""
        members = members[:_FEW]
        found = [
            [r for r in fact.reports.values() if r.rate_bps > 0]
            for at, a in enumerate(members)
            for b in members[at + 1 :]
            if _place(a) != _place(b) and (fact := self._topology.known(a.id, b.id)) is not None
        ]
        if not any(found):
            return
        told = LinkRate(
            rate_bps=statistics.median_low(min(r.rate_bps for r in rows) for rows in found if rows),
            latency_s=statistics.median_low(max(r.latency_s for r in rows) for rows in found if rows),
        )
        if self.usual is None or _differs(self.usual, told):
            self.usual = told


def _place(member: Member) -> str:
    return member.host or member.address


def _differs(one: LinkRate, other: LinkRate) -> bool:
    slower, faster = sorted((one.rate_bps, other.rate_bps))
    shorter, longer = sorted((one.latency_s, other.latency_s))
    return faster > (1 + NOTICED) * slower or longer > max((1 + NOTICED) * shorter, shorter + _LITTLE_S)


def change(before: LinkRate | None, now: LinkRate | None) -> str:
    """Returns in words how the links between machines differ from those by which a plan was made; "" if they do not.

    Args:
        before: Link by which the plan was made; None: not known.
        now: Link as it was measured; None: it was not.
    """
    if now is None or before is None or before == now:
        return ""
    was = "" if before == LinkRate() else f" where {_in_words(before)} were foreseen"
    return f"links between machines carry {_in_words(now)}{was}"


def _in_words(link: LinkRate) -> str:
    return f"{link.rate_bps / 1e6:.3g} Mbps after {1e3 * link.latency_s:.2g} ms"
