"""Decides when a client starts a new server in place of one that does not answer, and how often it tries.

Theory of operation. Somebody who waits for a server may be able to start one (hosting.py). That takes seconds, so it
happens in a helper thread, one at a time, and the function itself decides whether it is its turn. What cannot start, or
ends at once because its disk is full, is tried ever more seldom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from chaos_lightning.errors import ChaosError
from chaos_lightning.machine.restarts import RestartPolicy, Restarts

AFTER = 3
"""Number of failed attempts in a row after which a server is started."""
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0
"""First and longest pause (s) after a start, until the server answers."""


class Reviver:
    """Starts a server in place of one that does not answer. Methods may be called from one thread only.

    Args:
        revive: May start a server; None: there is nobody who could.
        failed: Takes what went wrong, in the helper thread.
    """

    def __init__(self, revive: Callable[[], object] | None, failed: Callable[[ChaosError], None]) -> None:
        self._revive, self._failed = revive, failed
        self._thread: threading.Thread | None = None
        self._at = 0.0
        self._restarts = Restarts(RestartPolicy(FIRST_PAUSE_S, MOST_PAUSE_S))

    def answered(self) -> None:
        """Resets the pauses between attempts, since the server has answered."""
        self._at = 0.0
        self._restarts.well()

    def try_it(self, failures: int) -> None:
        """Starts the server in a helper thread, if the last `failures` attempts to reach it failed and the pause is
        over.
        """
        revive, now = self._revive, time.monotonic()
        busy = self._thread is not None and self._thread.is_alive()
        if revive is None or failures < AFTER or now < self._at or busy:
            return
        self._at = now + self._restarts.failed()

        def work() -> None:
            try:
                revive()
            except ChaosError as error:
                self._failed(error)

        self._thread = threading.Thread(target=work, name="chaos-revive", daemon=True)
        self._thread.start()
