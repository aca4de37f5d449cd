"""What a DataLoader's worker process does before its work.

A worker is a fork of the training process and so holds copies of all its sockets. If the training process is
killed, its links do not close before its workers are gone, and torch's workers look for their parent only every few
seconds: neighbours would take that long to see the death. So a worker asks the kernel to be killed with its parent
(Linux).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


class WorkerInit:
    """A worker_init_fn that ties the worker to its parent and then calls the user's own. Picklable if that is."""

    def __init__(self, user: Callable[[int], object] | None) -> None:
        self.user = user
        self.parent = 0
        self.tied = False

    def arm(self) -> None:
        """In the training process, just before it makes workers."""
        self.parent = os.getpid()
        # The kernel means the parent's *thread*: a worker made by a short-lived one would die with it.
        self.tied = sys.platform == "linux" and threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        if self.tied:
            self._tie()
        if self.user is not None:
            self.user(worker)

    def _tie(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            return  # a kernel without it: the worker notices its orphanhood later, by itself
        if os.getppid() != self.parent and os.getppid() == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # the parent died before the request was made
