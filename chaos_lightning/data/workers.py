"""Ties a DataLoader's workers to the training process: they end with it or on its order, and ignore other signals.

Theory of operation. A worker is a fork of the training process. Three things follow.

- It holds copies of all its sockets. If the training process is killed, its links do not close before its workers are
  gone, and torch's workers look for their parent only every few seconds: neighbours would take that long to see the
  death. So a worker asks the kernel to be killed with its parent (Linux).
- It inherits the handlers for signals that ask the training process to leave, and would leave in its name.
- systemd and Slurm send SIGTERM to all processes of a unit, a terminal sends Ctrl+C and SIGHUP to all of its foreground
  group. A worker that dies of that takes the training process along (torch raises within its main thread), before it
  has left. The step that is open needs its batches, too, and so does a validation. So workers let these signals pass.
  Torch ends a worker that does not end by itself with SIGTERM: the iterator sends it SIGKILL in place of that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, MethodType
from typing import Any

from torch import multiprocessing
from torch._C import _remove_worker_pids  # type: ignore[attr-defined]
from torch.utils.data import DataLoader

from chaos_lightning.machine.orphan import die_with_parent
from chaos_lightning.machine.signals import POLITE


class WorkerInit:
    """Worker initializer that ties the worker to its parent process, then calls the user's own. Picklable if the user's
    is.
    """

    def __init__(self, user: Callable[[int], object] | None) -> None:
        self.user = user
        self.parent = 0
        self.tied = False

    def arm(self) -> None:
        """Records the present process as the parent, just before it makes workers."""
        self.parent = os.getpid()
        # The kernel means the parent's *thread*: a worker made by a short-lived one would die with it.
        self.tied = sys.platform == "linux" and threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        _let_signals_pass()
        if self.tied:
            self._tie()
        if self.user is not None:
            self.user(worker)

    def _tie(self) -> None:
        if not die_with_parent(signal.SIGKILL):
            return  # a kernel without it: the worker notices its orphanhood later, by itself
        if os.getppid() != self.parent and os.getppid() == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # the parent died before the request was made


def tie_workers(loader: Any) -> Any:
    """Ties all workers that this DataLoader will make to this process; returns the loader. Does nothing for other
    objects. Idempotent.
    """
    if isinstance(loader, DataLoader) and loader.num_workers and "_get_iterator" not in vars(loader):
        if not isinstance(loader.worker_init_fn, WorkerInit):
            loader.worker_init_fn = WorkerInit(loader.worker_init_fn)
        vars(loader)["_get_iterator"] = MethodType(_get_iterator, loader)  # a copy gets one of its own
    return loader


def _get_iterator(self: DataLoader[Any]) -> Any:
    assert isinstance(self.worker_init_fn, WorkerInit)
    self.worker_init_fn.arm()
    forks = (self.multiprocessing_context or multiprocessing).get_start_method() == "fork"
    with _held_back() if forks else contextlib.nullcontext():
        iterator = type(self)._get_iterator(self)
    for process in getattr(iterator, "_workers", ()):
        process._popen.terminate = _Kill(iterator, process._popen)
    return iterator


class _Kill:
    """Function that ends one worker by SIGKILL, since workers ignore SIGTERM."""

    def __init__(self, iterator: Any, popen: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self._popen = popen

    def __call__(self) -> None:
        iterator = self._iterator()
        if iterator is not None and iterator._worker_pids_set:  # torch takes the worker's end for a failure then
            _remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        self._popen.kill()


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Blocks signals while workers are made; in the workers they stay blocked until they are set to be ignored."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _let_signals_pass() -> None:
    # Handlers, and not SIG_IGN, which programs that the data set starts would inherit.
    for number in POLITE:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _nothing)
            signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Ignores a signal in a worker, because the training process gets the same signal and acts on it."""
