"""Fetches the version that a cluster wants, in a thread of its own, and retries until it has arrived.

Theory of operation. One version is here at a time. The next one may be wanted, and come, before the loop's thread gets
to adopt it. So whoever is about to adopt it takes it away at the moment in which that is settled. Who wants a version
is told when it is served no more, and may want another one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from chaos_lightning.errors import ChaosError, NoDonorError
from chaos_lightning.outer.exchange.codec import Part
from chaos_lightning.outer.exchange.fetching import drop_version, hold_version
from chaos_lightning.outer.rules.types import NO_VERSION, VersionId
from chaos_lightning.replication.server import StateServer

AGAIN_S = 0.1
"""Pause before another attempt, s."""
_LOOK_S = 0.5
"""Interval, s, at which the thread looks whether another version is wanted."""
_log = logging.getLogger("chaos_lightning")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt to fetch a version.

    Attributes:
        part: Memory for the version.
        blank: Nothing of the version is there yet.
        abandoned: Whether it is wanted no more.
    """

    part: Part
    blank: bool
    abandoned: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Sought:
    """Version that the cluster wants, and the function that fetches it.

    Attributes:
        version: Number and hash of the version.
        whose: Life of the cluster that wants the version; another one would not take it.
        get: Function that makes an attempt; it raises ChaosError or OSError if the attempt fails.
    """

    version: VersionId
    whose: object
    get: Callable[[Attempt], None]


class VersionGetter:
    """Thread that fetches the wanted version. Methods may be called from any thread.

    Args:
        changed: Notified when what `seek` says may have changed.
        empty: Makes memory for a version.
        seek: Returns the version that is wanted; None if none is. Called with `changed` held.
        missed: Told which version somebody who held a part of it has no more.
        landed: Told which version is here, with `changed` held.
        server: Server from which other processes may get the fetched version; None if they may not.

    Attributes:
        here: Version that was got and not taken.
    """

    def __init__(
        self,
        changed: threading.Condition,
        empty: Callable[[], Part],
        seek: Callable[[], Sought | None],
        missed: Callable[[VersionId], None],
        landed: Callable[[VersionId], None] = lambda version: None,
        server: StateServer | None = None,
    ) -> None:
        self.here: tuple[VersionId, Part] | None = None
        self._changed, self._empty, self._seek, self._server = changed, empty, seek, server
        self._missed, self._landed = missed, landed
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="chaos-outer-fetch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(5.0)

    def take(self, version: VersionId) -> Part | None:
        """Returns the fetched version, and forgets it, if it is the named one; else None."""
        with self._changed:
            found = self.here if self.here is not None and self.here[0] == version else None
            if found is not None:
                self.drop()
        return found[1] if found is not None else None

    def drop(self, but: VersionId = NO_VERSION) -> None:
        """Drops the fetched version, unless it is `but`."""
        with self._changed:
            if self.here is None or self.here[0] == but:
                return
            dropped, self.here = self.here, None
            self._changed.notify_all()
        if self._server is not None:
            drop_version(self._server, *dropped)

    def _run(self) -> None:
        part: Part | None = None
        of = NO_VERSION
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._closing.is_set() or self._open() is not None, _LOOK_S)
                sought = self._open()
            if sought is None or self._closing.is_set():
                continue
            if blank := part is None or of != sought.version:
                part, of = self._empty(), sought.version
            try:
                sought.get(Attempt(part, blank, partial(self._abandoned, sought)))
            except (ChaosError, OSError) as error:
                _log.debug("version %s is not here yet: %s", of, error)
                if isinstance(error, NoDonorError) and error.refused:
                    self._missed(of)
                self._closing.wait(AGAIN_S)
                continue
            if self._server is not None:
                hold_version(self._server, of, part)
            with self._changed:
                if not self._abandoned(sought):
                    self.drop()
                    self.here, part = (of, part), None
                    self._landed(of)
                    self._changed.notify_all()
                elif self._server is not None:
                    drop_version(self._server, of, part)

    def _abandoned(self, sought: Sought) -> bool:
        """Returns whether the fetch of this version is of no use any more: another version is wanted or none, or
        another incarnation wants it.
        """
        with self._changed:
            now = self._open()
        return self._closing.is_set() or now is None or now.version != sought.version or now.whose is not sought.whose

    def _open(self) -> Sought | None:
        """Returns the version that is wanted and not fetched yet; None if there is none."""
        sought = self._seek()
        here = sought is not None and self.here is not None and self.here[0] == sought.version
        return None if here else sought


__all__ = ["Sought", "VersionGetter"]
