"""Ctrl+C and SIGTERM at a torchrun agent: its workers leave the job, and then the agent ends well.

Theory of operation. torch's own handler turns the first signal into an exception that takes the agent down: it signals
the workers, waits, and exits with an error, although all of them may have left as politely as can be. So once torch has
installed its handlers - it does so each time that it starts workers - they are replaced: the first signal is passed on
to the workers and the agent goes on watching them. When the last one has finished its step, left and exited with code
0, torch finds a worker group that succeeded, and exits with code 0 itself. Torch's way comes back

- at the second signal;
- if a worker fails on its way out: it would be restarted, into a job that it was asked to leave;
- if the workers have not ended after `patience_s`.

Nothing is touched where somebody else's handler stands (or torch was told not to handle the signal), nor where the
workers cannot be found: they are the agent's children that got its mark in their environment, read from /proc.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from chaos_lightning.machine.orphan import VARIABLE

logger = logging.getLogger("chaos_lightning.rendezvous")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TORCH = "torch.distributed.elastic.multiprocessing.api"


class PoliteExit:
    """The agent's side of a polite leave. All methods are for the agent's main thread.

    Args:
        mark: What this agent's workers have in their environment under CHAOS_AGENT.
        patience_s: How long workers may take to leave, s.
        workers: Finds the workers' process ids; for tests.
    """

    def __init__(self, mark: str, patience_s: float, workers: Callable[[str], list[int]] | None = None) -> None:
        self._mark = mark
        self._patience_s = patience_s
        self._workers = workers or workers_of
        self._torchs: dict[int, Any] = {}
        self.asked: signal.Signals | None = None
        """The signal that workers were asked to leave with; None before."""
        self._asked_at = 0.0

    def watch(self) -> None:
        """Puts the handlers in place, wherever torch has (again) put its own; gives up on workers that do not leave.

        Raises:
            SignalException: Torch's own, after `patience_s`.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if self.asked is None and getattr(handler, "__module__", "") == _TORCH:
                self._torchs[number] = handler
                signal.signal(number, self._on_signal)
                logger.info("%s is passed on to the workers from here on", signal.Signals(number).name)
        if self.asked is not None and time.monotonic() - self._asked_at > self._patience_s:
            logger.warning("the workers did not leave within %g s", self._patience_s)
            self.resort()

    def resort(self, frame: FrameType | None = None) -> None:
        """Torch's own way from here on.

        Raises:
            SignalException: Torch's own.
        """
        for number, handler in self._torchs.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        if self.asked is not None:
            self._torchs[self.asked](self.asked, frame)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked is not None, signal.Signals(number)
        workers = [] if again else self._workers(self._mark)
        if again or not workers:
            self.resort(frame)
            return
        self._asked_at = time.monotonic()
        say("torchrun agent", asking(self.asked, len(workers)))
        pass_on(number, workers)


def asking(number: signal.Signals, workers: int) -> str:
    """What is said as workers of this node are asked to leave."""
    return f"{number.name}: asking {workers} worker(s) to leave the job; once more ends them at once"


def pass_on(number: int, pids: Iterable[int]) -> None:
    """Sends these processes a signal."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # ended meanwhile: that is what was wanted


def say(who: str, text: str) -> None:
    """A line on standard error, in one write: the caller may be a handler that interrupts a print or a log call."""
    try:
        os.write(2, f"{who} {os.getpid()}: {text}\n".encode())
    except OSError:
        return


def workers_of(mark: str, parent: int | None = None) -> list[int]:
    """Process ids of the children of `parent` (this process) that have this mark in their environment."""
    parent = os.getpid() if parent is None else parent
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            if status[0] in "ZX" or int(status[1]) != parent:
                continue
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except (OSError, IndexError, ValueError):
            continue  # gone, or somebody else's
    return sorted(found)
