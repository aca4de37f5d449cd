"""Keeps the versions that a follower serves: the newest one, and one earlier version for clusters that are fetching it
(O8c).

Theory of operation. Whoever fetches a version takes a while, and the next ones do not wait for that. So the newest
version is served and one more: the one before, unless the leader says that an older one, which had this place, is being
fetched. The leader says so, for a fetch needs the same version of all followers. Who fetches the one that goes is
refused, and begins again with the newest. One goes before the next is computed, so a follower never has more than two
in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from chaos_lightning.outer.rules.types import NO_VERSION, VersionId

T = TypeVar("T")


class ServedVersions(Generic[T]):
    """Versions that a follower serves, two at most. Only one thread may change them; any thread may ask.

    Args:
        serve: Serves this version, whose content is this part.
        drop: Serves it no more.
    """

    def __init__(self, serve: Callable[[VersionId, T], None], drop: Callable[[VersionId, T], None]) -> None:
        self._serve, self._drop = serve, drop
        self._served: dict[VersionId, T] = {}
        """Contents of the versions, in the order of their computing."""
        self._held = NO_VERSION

    @property
    def served(self) -> dict[VersionId, T]:
        """Contents of the versions that are served, in the order in which they were computed."""
        return dict(self._served)

    def hold(self, version: VersionId) -> None:
        """Keeps this version beside the newest one from now on, if it is served; NO_VERSION keeps the one before the
        newest.
        """
        self._held = version

    def make_room(self) -> None:
        """Drops one version, if two are served, before memory for the next one is taken: the older one, unless `hold`
        keeps it.
        """
        if len(self._served) > 1:
            self._forget(next(version for version in self._served if version != self._held))

    def go_back(self, version: VersionId) -> None:
        """Stops serving all versions after this one: they may have been rolled back, and no cluster may adopt them."""
        for later in [served for served in self._served if served > version]:
            self._forget(later)

    def add(self, version: VersionId, part: T) -> None:
        """Adds the newest version to those that are served; its bytes must not change any more."""
        self._serve(version, part)
        self._served[version] = part

    def _forget(self, version: VersionId) -> None:
        self._drop(version, self._served.pop(version))
