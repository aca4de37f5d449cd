"""A member whose terminal was closed, or that is asked to leave while it prints, leaves politely all the same."""

from __future__ import annotations

import errno
import io
import queue
import signal
import sys

import pytest

from chaos_lightning.strategies.signals import Signals


class Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "closed"), RuntimeError("reentrant call")])
def test_who_cannot_say_that_it_leaves_leaves(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    left: queue.Queue[str] = queue.Queue()
    signals = Signals(left.put, host=None)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", Broken(error))
            signal.raise_signal(signal.SIGINT)
        assert left.get(timeout=30.0) == "signal SIGINT"
    finally:
        signals.restore()
