"""Handles Ctrl+C, SIGTERM and SIGHUP at a torchrun agent: its workers leave the job, and then the agent ends with
success.

Theory of operation. torch's own handler turns the first signal into an exception that takes the agent down: it signals
the workers, waits, and exits with an error, although all of them may have left as politely as can be. So once torch has
installed its handlers - it does so each time that it starts workers - they are replaced: the first signal is passed on
to the workers and the agent goes on watching them. When the last one has finished its step, left and exited with code
0, torch finds a worker group that succeeded, and exits with code 0 itself. Torch's way comes back

- at the second signal;
- if a worker fails on its way out: it would be restarted, into a job that it was asked to leave;
- if the workers have not ended after `patience_s`.

Torch's handlers replace also a SIGHUP that is ignored (`nohup torchrun ...`): it is ignored again.

Nothing is touched where somebody else's handler stands (or torch was told not to handle the signal), nor where the
workers cannot be found: they are the agent's children that got its mark in their environment, read from /proc.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from chaos_lightning.machine.orphan import VARIABLE
from chaos_lightning.machine.signals import ExitSignals, say

logger = logging.getLogger("chaos_lightning.rendezvous")

_TORCH = "torch.distributed.elastic.multiprocessing.api"


class PoliteExit:
    """Makes an agent's workers leave the job when the agent gets a signal. All methods are for the agent's main thread.

    Args:
        mark: Value of CHAOS_AGENT in the environment of this agent's workers.
        patience_s: Time that workers may take to leave, s.
        workers: Finds the workers' process ids; for tests.
    """

    def __init__(self, mark: str, patience_s: float, workers: Callable[[str], list[int]] | None = None) -> None:
        self._mark = mark
        self._patience_s = patience_s
        self._workers = workers or workers_of
        self._torchs: dict[signal.Signals, Any] = {}
        self._signals = ExitSignals(self._ask, again=self._resort_to)

    @property
    def asked(self) -> signal.Signals | None:
        """Signal by which workers were asked to leave; None before."""
        return self._signals.asked

    def watch(self) -> None:
        """Installs the signal handlers in place of torch's, which torch may have installed again; gives up on workers
        that do not leave in time.

        Raises:
            SignalException: Torch's own, after `patience_s`.
        """
        if self.asked is None:
            for number in self._signals.install(lambda handler: getattr(handler, "__module__", "") == _TORCH):
                self._torchs[number] = self._signals.before[number]
                logger.info("%s is passed on to the workers from here on", number.name)
        elif time.monotonic() - self._signals.asked_at > self._patience_s:
            logger.warning("the workers did not leave within %g s", self._patience_s)
            self.resort()

    def resort(self) -> None:
        """Returns to torch's own handling of signals.

        Raises:
            SignalException: Torch's own.
        """
        if self.asked is None:
            self._signals.restore()
        else:
            self._resort_to(self.asked, None)

    def _resort_to(self, number: signal.Signals, frame: FrameType | None) -> None:
        self._signals.restore()
        self._torchs[number](number, frame)

    def _ask(self, number: signal.Signals, frame: FrameType | None) -> None:
        workers = self._workers(self._mark)
        if not workers:
            self._resort_to(number, frame)
            return
        say(f"torchrun agent {os.getpid()}: {asking(number, len(workers))}")
        pass_on(number, workers)


def asking(number: signal.Signals, workers: int) -> str:
    """Returns the line that an agent prints when it asks its workers to leave."""
    return f"{number.name}: asking {workers} worker(s) to leave the job; once more ends them at once"


def pass_on(number: int, pids: Iterable[int]) -> None:
    """Sends these workers the signal to leave: SIGINT as SIGINT, all others (also the end of a terminal) as SIGTERM."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        except ProcessLookupError:
            continue  # ended meanwhile: that is what was wanted


def workers_of(mark: str, parent: int | None = None) -> list[int]:
    """Returns the process ids of children of `parent` (default: this process) that have the mark in their
    environment.
    """
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
