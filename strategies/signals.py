"""Ctrl+C and SIGTERM leave the job politely; a second Ctrl+C aborts."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Handlers from here until `restore`; nothing outside the main thread.

    Args:
        leave: Called in a thread of its own: a handler may interrupt whoever holds the locks that it needs.
        host: Its handlers end the process's work at once, and are not called; those of the user's are.
    """

    def __init__(self, leave: Callable[[str], None], host: object) -> None:
        self._leave = leave
        self._host = host
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        with contextlib.suppress(OSError, RuntimeError):  # the terminal is closed, or something is being printed
            print(
                f"{name}: leaving the job after the present step, or at once while waiting; once more aborts",
                file=sys.stderr,
                flush=True,
            )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=self._leave, args=(f"signal {name}",), name="chaos-leave", daemon=True).start()
        for handler in self._users(number):
            handler(number, frame)

    def _users(self, number: int) -> list[Callable[[int, FrameType | None], Any]]:
        """Handlers that the user had set. Lightning composes them with its own."""
        before = self._before[number]
        found = getattr(before, "signal_handlers", [before])
        ours = (None, signal.default_int_handler)
        return [h for h in found if callable(h) and h not in ours and getattr(h, "__self__", None) is not self._host]

    def restore(self) -> None:
        """What was before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
