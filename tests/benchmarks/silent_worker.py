"""Stand-in for a benchmark's worker process that sends nothing back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Silent:
    """Worker that records the orders sent to it, and sends nothing back."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.pipe = SimpleNamespace(send=self.sent.append, closed=True)
        self.process = SimpleNamespace(exitcode=None)

    def kill(self) -> None:
        pass
