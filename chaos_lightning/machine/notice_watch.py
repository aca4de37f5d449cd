"""Follows the sources of notices in threads, and has this process leave its job in time.

Theory of operation. Each source has a daemon thread, which asks it, tells the answer to a `Listener`, and does as that
decides; so a server that hangs holds up nobody else. A signal that is a notice is followed in the thread that its
handler starts. The first notice that is due counts: the event `notice_taken` and a line on the console say why, and the
process is asked to leave, once. While the job is over here, a notice that is due changes nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.notice_sources import EVERY_S, Look, as_it_is, looks_of, slurm
from chaos_lightning.machine.notices import (
    LONGEST_PAUSE_S,
    Listener,
    MachineNotice,
    NoAnswerError,
    NoticePlan,
    requeues_in_s,
)
from chaos_lightning.machine.units import duration

_log = logging.getLogger("chaos_lightning")


class NoticeWatch:
    """Watch over all sources of notices, from `start` until `close`.

    Args:
        plan: The setting `notice`.
        who: Name of the member in lines on the console.
        events: Event log of the member.
        leave: Asks to leave, for a reason; called at most once, in another thread.
        over: Returns whether there is nothing to leave any more.
        step_s: Returns the seconds that a step takes; 0: unknown.

    Attributes:
        reason: Reason for which the process was asked to leave; "" before.
    """

    def __init__(
        self,
        plan: NoticePlan,
        who: str,
        events: EventLog,
        leave: Callable[[str], object],
        over: Callable[[], bool] = lambda: False,
        step_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._plan, self._who, self._events = plan, who, events
        self._leave, self._over, self._step_s = leave, over, step_s
        self.reason = ""
        self._taken: MachineNotice | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()

    def start(self) -> None:
        """Begins to ask the sources."""
        for kind, look in looks_of(self._plan).items():
            given = (kind, EVERY_S[kind], look)
            threading.Thread(target=self._follow, args=given, name=f"chaos-notice-{kind}", daemon=True).start()

    def heed(self, signal_name: str) -> bool:
        """Follows the notice that a signal is, until it is time to leave; returns False at once if it is none. To be
        called in a thread of its own.
        """
        notice = self._plan.on_signal(signal_name, time.time())
        if notice is not None:
            self._follow(notice.source, LONGEST_PAUSE_S, partial(as_it_is, notice))
        return notice is not None

    def close(self, *, last: bool = False, finished: bool = False) -> None:
        """Ends the watch, and has the Slurm job queued again if the setting says so. Idempotent.

        Args:
            last: Whether this process was the last one in the job.
            finished: Whether the job is finished, so that it needs no further time.
        """
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        wait_s = requeues_in_s(self._plan, self._taken, time.time(), os.environ, last=last)
        if wait_s is not None and not finished:  # the interpreter waits for this thread, the script goes on
            threading.Thread(target=_requeue, args=(wait_s,), name="chaos-requeue").start()

    def _follow(self, kind: str, every_s: float, look: Look) -> None:
        listener = Listener(kind, every_s, self._plan.lead_s)
        while not (self.reason or self._closed.is_set()):
            try:
                verdict = listener.answered(look(), time.time(), self._step_s())
            except (NoAnswerError, OSError) as error:
                verdict = listener.failed(str(error), time.time(), self._step_s())
            for line in () if self._closed.is_set() else verdict.news:
                self._events.emit("notice", text=line, waiting=False)
                _log.warning("%s: %s", self._who, line)
            if listener.notice is not None and verdict.leave and not self._over():
                self._take(listener.notice, verdict.leave)
                return
            self._closed.wait(verdict.wait_s or every_s)

    def _take(self, notice: MachineNotice, reason: str) -> None:
        """Asks the process to leave, unless it was asked before."""
        with self._lock:
            if self.reason or self._closed.is_set():
                return
            self._taken, self.reason = notice, reason
        left = {"left_s": round(notice.taken_at - time.time(), 3)} if notice.taken_at else {}
        self._events.emit("notice_taken", source=notice.source, reason=self.reason, **left)
        _log.warning("%s leaves the job after the present step: %s", self._who, self.reason)
        self._leave(self.reason)


def _requeue(wait_s: float) -> None:
    """Has the Slurm job of this process queued again after a time; a failure is logged."""
    job = os.environ.get("SLURM_JOB_ID", "")
    _log.warning("Slurm job %s is queued again%s", job, f", in {duration(wait_s)}" if wait_s else "")
    time.sleep(wait_s)
    try:
        slurm("scontrol", "requeue", job)
    except NoAnswerError as error:
        _log.error("Slurm job %s is not queued again: %s; run scontrol requeue or sbatch", job, error)
