"""Limits how many log lines strangers can cause."""

from __future__ import annotations

import threading
import time

_MAX_LINES_PER_S = 5


class FewLines:
    """Limit of a few log lines per second, which counts the lines left out. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s = 0.0
        self._lines = self._dropped = 0

    def take(self) -> int | None:
        """Returns None if the next line must be left out, else the number of lines left out since the last one
        allowed.
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
