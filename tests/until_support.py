"""Polls for conditions that send no notice, such as files, processes and answers of a server."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 30.0
_TURN_S = 0.002


def until(done: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Polls until `done()` is true, sleeping briefly in between; fails at the deadline with the text `what`."""
    deadline = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < deadline, f"waited {deadline_s:g} s for {what}"
        time.sleep(_TURN_S)
