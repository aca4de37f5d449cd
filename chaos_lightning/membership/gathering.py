"""Lets newcomers that come at about the same time in together: those that are ready first wait a moment for the others.

Theory of operation. Each view costs a durable write, a header that stops everybody for the newcomers' state, and new
trees. A hundred machines that were started together, let in as they become ready, would cost dozens of views. So where
many come, those that are ready wait while others link, or as long as further ones keep coming. A newcomer that comes
alone waits for nobody, and nobody waits in a small job.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.peers import Peer
from chaos_lightning.protocol.types import SMALL_JOB

GATHER_S = 1.0
"""Most seconds that a newcomer waits. A state takes longer to pull, and most newcomers of a wave are ready by then."""
QUIET_S = 0.2
"""Seconds without a further newcomer after which the wave is over."""


class Gathering:
    """Newcomers that come at about the same time and are let in together."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._ready: dict[str, float] = {}
        """Times (s) from which on newcomers wait, by id."""
        self._others: dict[str, float] = {}
        """Times (s) at which the others were seen first, by id."""

    def waits(self, coming: Sequence[Peer], others: Sequence[Peer], members: int) -> bool:
        """Returns whether newcomers that could be let in now wait for others. It is asked again until they are let in.

        Args:
            coming: Newcomers that could go in now.
            others: Newcomers that may soon be as far; one that takes longer than usual is not waited for.
            members: Number of members of the latest view.
        """
        now = self._desk.now
        ready = {p.id: self._ready.get(p.id, now) for p in coming}
        self._others = {p.id: self._others.get(p.id, now) for p in others}
        soon = any(now - since < GATHER_S for since in self._others.values())
        self._ready = {}
        if not ready or (len(ready) == 1 and not soon) or members + len(ready) + len(others) <= SMALL_JOB:
            return False
        if now - min(ready.values()) >= GATHER_S or not (soon or now - max(ready.values()) < QUIET_S):
            return False
        self._ready = ready
        return True
