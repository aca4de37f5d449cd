"""Bounds what strangers can have written to a log."""

from __future__ import annotations

import threading
import time

_MAX_LINES_PER_S = 5


class FewLines:
    """Limit of a few lines a second, which counts the others: a stranger must not fill the disk. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s = 0.0
        self._lines = self._dropped = 0

    def take(self) -> int | None:
        """Returns the number of lines that were left out since the last one that was let through; None: leave this one
        out.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._since_s > 1.0:
                self._since_s, self._lines = now, 0
            if self._lines >= _MAX_LINES_PER_S:
                self._dropped += 1
                return None
            self._lines += 1
            dropped, self._dropped = self._dropped, 0
            return dropped
