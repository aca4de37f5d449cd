"""Ending exactly the processes of one lab or demo: a mark in their environment that only it knows.

Theory of operation. Whatever a lab starts, and whatever that starts in turn (agents, workers, a scheduler that
detaches itself), inherits an environment variable with a value of this lab. A process is signalled through a pidfd that
was opened before its mark was read, so a number that was given out anew is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

MARK = "CHAOS_LAB"
POLITE_S = 4.0
"""Between SIGTERM and SIGKILL, s."""
_TURN_S = 0.05


class Mark:
    """One lab's processes.

    Args:
        value: Unique; by default a new one.
        name: Of the environment variable.
    """

    def __init__(self, value: str = "", name: str = MARK) -> None:
        self.value = value or uuid.uuid4().hex
        self.name = name
        self._words = f"{name}={self.value}".encode()

    def environment(self) -> dict[str, str]:
        """What processes of this lab must be started with."""
        return {self.name: self.value}

    def alive(self) -> set[int]:
        """Processes that bear the mark and run, but for this one."""
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        return {pid for pid in pids if pid != os.getpid() and self._bears(pid)}

    def end(self, polite_s: float = POLITE_S) -> int:
        """Ends them all: SIGTERM, then SIGKILL; frozen ones are woken for it. How many there were."""
        ended: set[int] = set()
        for number, patience_s in ((signal.SIGTERM, polite_s), (signal.SIGKILL, 10.0)):
            signalled: set[int] = set()
            deadline = time.monotonic() + patience_s
            while (alive := self.alive()) and time.monotonic() < deadline:
                for pid in alive - signalled:
                    self.send(pid, signal.SIGCONT, number)  # a frozen one would sleep through SIGTERM
                    signalled.add(pid)
                ended |= alive
                time.sleep(_TURN_S)
        return len(ended)

    def send(self, pid: int, *numbers: int) -> bool:
        """Signals this process, in order; False if it bears the mark no more (or never did), or has ended."""
        with self._open(pid) as handle:
            if handle < 0:
                return False
            try:
                for number in numbers:
                    signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                return False
            return True

    @contextlib.contextmanager
    def _open(self, pid: int) -> Iterator[int]:
        """A pidfd of this process if it bears the mark; else -1."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            yield -1
            return
        try:
            yield handle if self._bears(pid) else -1
        finally:
            os.close(handle)

    def _bears(self, pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state not in "ZX" and self._words in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            return False
