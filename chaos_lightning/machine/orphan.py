"""Ends a worker whose torchrun agent has ended, since nobody would stop or restart it any more.

Theory of operation. torchrun starts each worker in a session of its own, so that a SIGKILL of the agent leaves the
workers training, unseen. The rendezvous backend names its agent in the environment (CHAOS_AGENT, "pid:start
time:process table"). A worker in the same process table watches that process: through a pidfd, which is readable the
moment it ends, or by looking at the process table twice a second where there are none. Besides, if the agent is the
direct parent, the kernel is asked for a SIGTERM at its death (PR_SET_PDEATHSIG), which needs no thread of ours to be
scheduled. An orphan first gets SIGTERM - the polite way out, as torchrun itself would have sent it - and SIGKILL if it
is still there after the grace.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping

from chaos_lightning.machine.process_table import host_identity, start_time, still_runs

logger = logging.getLogger("chaos_lightning.machine")

VARIABLE = "CHAOS_AGENT"
GRACE_S = 30.0
"""Seconds from SIGTERM to SIGKILL, as torchrun's own --shutdown-timeout by default."""
_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


def agent_mark() -> str:
    """Returns an identification of this agent's process, which workers get by the environment in order to watch it."""
    return f"{os.getpid()}:{start_time(os.getpid())}:{host_identity()}"


def _parse(mark: str) -> tuple[int, int] | None:
    """Parses an agent's mark into (pid, start time); None if the agent is in another process table or the mark is
    malformed.
    """
    pid, _, rest = mark.partition(":")
    started, _, host = rest.partition(":")
    if not pid.isdigit() or not started.isdigit() or host != host_identity():
        return None
    return int(pid), int(started)


def watch_parent(
    on_orphan: Callable[[str], None] = lambda reason: None,
    *,
    grace_s: float = GRACE_S,
    environ: Mapping[str, str] = os.environ,
) -> threading.Thread | None:
    """Starts a thread that ends this process after its torchrun agent has ended; call it once, early.

    Args:
        on_orphan: Called first with the reason, in the watching thread (for the event log).
        grace_s: Seconds between SIGTERM and SIGKILL.
        environ: Environment variables, which have the agent's mark.

    Returns:
        The watching thread; None if there is no agent to watch (no torchrun, or another process table).
    """
    mark = environ.get(VARIABLE, "")
    agent = _parse(mark)
    if agent is None:
        if mark:
            logger.warning("cannot watch the torchrun agent %r from here: this worker would outlive it", mark)
        return None
    pid, started = agent
    asked = os.getppid() == pid and die_with_parent(signal.SIGTERM)
    # Without prctl the watching thread does it alone. The agent may have ended before the kernel was asked;
    # then the parent is another one by now.
    asked = asked and os.getppid() == pid
    thread = threading.Thread(
        target=_watch, args=(pid, started, on_orphan, grace_s, asked), name="chaos-orphan", daemon=True
    )
    thread.start()
    return thread


def die_with_parent(number: signal.Signals) -> bool:
    """Asks the Linux kernel to signal this process when the thread that started it ends; returns False if it cannot."""
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0)
    return False


def _watch(pid: int, started: int, on_orphan: Callable[[str], None], grace_s: float, asked: bool) -> None:
    _wait_for_end(pid, started)
    reason = f"the torchrun agent (pid {pid}) is gone; this worker ends, with SIGKILL after {grace_s:g} s"
    logger.warning("%s", reason)
    try:
        on_orphan(reason)
    finally:
        if not asked:  # a second SIGTERM could be taken for impatience
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(pid: int, started: int) -> None:
    """Waits until the process with this id and start time has ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        handle = -1
    try:
        # The check comes after opening: from here on the handle cannot mean another process.
        if not still_runs(pid, started):
            return
        if handle >= 0:
            select.select([handle], [], [])
            return
        pause = threading.Event()
        while still_runs(pid, started):
            pause.wait(_POLL_S)
    finally:
        if handle >= 0:
            os.close(handle)
