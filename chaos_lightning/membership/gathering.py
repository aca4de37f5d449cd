"""Newcomers that come at once are let in at once: the first of them waits a moment for those that are on their way.

Theory of operation. Each view costs a durable write, a header that stops everybody for the newcomers' state, and new
trees. A hundred machines that were started together, let in as they become ready, would cost dozens of views. So where
many come, those that are ready wait while others link, or as long as further ones keep coming. A newcomer that comes
alone waits for nobody, nor does anybody in a small job.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.peers import Peer
from chaos_lightning.protocol.types import SMALL_JOB

GATHER_S = 1.0
"""Seconds that the first one waits at most: little beside the pull of a state, and most of a wave is here by then."""
QUIET_S = 0.2
"""Seconds without a further newcomer after which the wave is over."""


class Gathering:
    """See the module."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._since: float | None = None
        """When (s) the first of those that wait could have gone in."""
        self._latest = (0, 0.0)
        """Number of newcomers that were as far, and when (s) there were more than before."""
        self._seen: dict[str, float] = {}
        """When (s) the present others were seen first."""

    def waits(self, coming: Sequence[Peer], others: Sequence[Peer], members: int) -> bool:
        """Whether those that could go in wait for others; asked anew until they go.

        Args:
            coming: Newcomers that could go in now.
            others: Newcomers that may soon be as far; one that takes longer than usual is not waited for.
            members: Number of members of the latest view.
        """
        now, number = self._desk.now, len(coming)
        since, self._since = self._since, None
        self._seen = {p.id: self._seen.get(p.id, now) for p in others}
        soon = any(now - at < GATHER_S for at in self._seen.values())
        if not coming or (number == 1 and not soon) or members + number + len(others) <= SMALL_JOB:
            return False
        if since is None:
            since, self._latest = now, (number, now)
        elif number > self._latest[0]:
            self._latest = number, now
        if now - since >= GATHER_S or not (soon or now - self._latest[1] < QUIET_S):
            return False
        self._since = since
        return True
