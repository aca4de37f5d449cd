"""The versions that a follower serves: its newest one, and beside it one that somebody is fetching (O8c).

Theory of operation. Whoever fetches a version takes a while, and the next ones do not wait for that. So the newest
version is served and one more: the one before, unless somebody is still fetching an older one that had this place. Who
fetches the one that goes is refused, and begins again with the newest. Nobody holds the place for longer than
`HOLD_S`. One goes before the next is computed, so a follower never has more than two in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from chaos_lightning.outer.codec import Part
from chaos_lightning.outer.fetching import drop_version, hold_version, version_name
from chaos_lightning.outer.types import VersionId
from chaos_lightning.replication.server import StateServer

HOLD_S = 60.0
"""From the moment at which another version became the newest."""
QUIET_S = 3.0
"""Who asks for nothing for so long fetches no more."""


@dataclass(slots=True)
class _Served:
    version: VersionId
    part: Part
    until: float = float("inf")
    """It is not held for those who fetch it beyond this."""


class ServedVersions:
    """See the module. One thread changes what is served; any may ask.

    Args:
        server: Serves them.
        clock: As `time.monotonic`.
    """

    def __init__(self, server: StateServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._clock = server, clock
        self._served: list[_Served] = []
        """Oldest first."""

    @property
    def versions(self) -> tuple[VersionId, ...]:
        """Those that are served, oldest first."""
        return tuple(one.version for one in self._served)

    def make_room(self) -> None:
        """Before the next version gets its memory: of two one goes, the older one unless somebody is fetching it."""
        if len(self._served) > 1:
            self._drop(1 if self._fetched(self._served[0]) else 0)

    def add(self, version: VersionId, part: Part) -> None:
        """This is the newest one; its bytes must not change any more."""
        hold_version(self._server, version, part)
        if self._served:
            self._served[-1].until = self._clock() + HOLD_S
        self._served.append(_Served(version, part))

    def busy(self) -> bool:
        """Whether somebody is fetching one of them."""
        return any(self._fetched(one) for one in list(self._served))

    def _fetched(self, one: _Served) -> bool:
        now = self._clock()
        asked_at = self._server.asked_at(version_name(one.version, one.part.shard, one.part.format.name), 0)
        return now - asked_at < QUIET_S and now < one.until

    def _drop(self, place: int) -> None:
        one = self._served.pop(place)
        drop_version(self._server, one.version, one.part)
