"""Passes news from the I/O thread to the training thread: fields guarded by one condition, and waits with deadlines."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chaos_lightning.errors import (
    ChaosError,
    DeadlineError,
    DepartedError,
    DisagreementError,
    FencedError,
    FinishedJobError,
    RefusedError,
    RestartError,
)
from chaos_lightning.membership.effects import Committed, PullParts, PullState
from chaos_lightning.protocol.types import Header, Member, Span, ToldEnd, View


@dataclass(slots=True)
class Mailbox:
    """Fields that the I/O thread sets for the training thread. Every field is guarded by `changed`."""

    name: str
    changed: threading.Condition = field(default_factory=threading.Condition)
    commits: deque[Committed] = field(default_factory=deque)
    view: View | None = None
    member: Member | None = None
    pull: PullState | None = None
    observe: tuple[Header, View] | None = None
    attempt: tuple[View, int] | None = None
    """View and slot of the attempt that is open, where units of micro-batches run."""
    closed_under: View | None = None
    """View of the attempt that the last header closed, if it has pipelines."""
    parts: PullParts | None = None
    """Parts of the state that this member is to pull."""
    gone_parts: tuple[Span, ...] = ()
    """Parts that others own from now on."""
    let_go: View | None = None
    """View that goes on without this member, which serves its parts until it is released."""
    ejected: tuple[str, bool] | None = None
    ended: bool = False
    """Whether this member is out since the whole job has ended without being finished."""
    left: str = ""
    keeps: bool = True
    """Whether the job may go on from this member's state: `Left.keeps`."""
    job_over: ToldEnd | None = None
    """Word of the scheduler that this newcomer came too late: its job is finished."""
    together: bool = False
    """Whether two members or more were in one of the views that this member has seen."""
    crash: BaseException | None = None
    notice: str = ""
    step: int = 0
    endpoint: str = ""
    lost: str = ""
    """Reason why no scheduler serves this member, while that is so."""
    on_lost: Callable[[str, float, float], None] = lambda what, waited_s, left_s: None
    """Function that is told by a thread that waits while no scheduler serves it: for what, how long it has, how long
    it will.
    """
    greeting: str = ""
    """Role and reason of the scheduler's last welcome."""
    giving_up: bool = False
    """Whether this member is to leave, by its user's wish or the operator's: if it is not in the job yet, it waits no
    more.
    """

    def post(self, **values: object) -> None:
        """Sets fields and wakes the training thread."""
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def commit(self, commit: Committed) -> None:
        with self.changed:
            self.commits.append(commit)
            opened = self.attempt
            self.closed_under = opened[0] if opened is not None and opened[1] == commit.header.seq else None
            self.view, self.step = commit.view, commit.header.step
            self.changed.notify_all()

    def reset(self) -> None:
        """Clears all fields, for a member that joins again."""
        with self.changed:
            self.commits.clear()
            self.view = self.member = self.pull = self.observe = self.ejected = self.crash = None
            self.job_over = self.attempt = self.closed_under = self.parts = self.let_go = None
            self.gone_parts = ()
            self.left = self.notice = self.greeting = self.lost = ""
            self.giving_up, self.ended, self.keeps = False, False, True

    def who(self) -> str:
        return self.member.id if self.member is not None else self.name

    @property
    def over(self) -> bool:
        """Whether this member is out of the job, or is to leave."""
        return self.ejected is not None or self.crash is not None or self.giving_up or bool(self.left)

    def check(self) -> None:
        """Raises the error that ended this member's part in the job, if there is one."""
        if self.crash is not None:
            raise ChaosError(f"{self.who()}: the I/O thread failed: {self.crash!r}") from self.crash
        if self.ejected is not None:
            reason, rejoin = self.ejected
            if self.ended:
                raise RestartError(reason)
            if rejoin:
                raise FencedError(f"{self.who()} is out of the job: {reason}")
            raise RefusedError(reason) if self.view is None else DisagreementError(reason)
        if self.job_over is not None:
            raise FinishedJobError(f"{self.who()} came when the job was finished")
        if self.left and not self.commits:
            raise DepartedError(f"{self.who()} was let go: {self.left}")

    def wait(
        self, ready: Callable[[], bool], what: str, deadline: float, advice: str = "", *, tells: bool = True
    ) -> None:
        """Waits until `ready()` is true; the caller holds `changed`, not recursively.

        Args:
            ready: Condition that is waited for.
            what: Text that names what is waited for.
            deadline: Time by `time.monotonic()`, s.
            advice: Text on what the user can do if it does not come.
            tells: Whether the user is told if this waits for long and no scheduler serves this member.

        Raises:
            FencedError, RefusedError, DisagreementError, DepartedError: This member is out.
            FinishedJobError: This member is a newcomer of a job that is finished.
            RestartError: The job has ended for all, and begins again from a checkpoint.
            ChaosError: This member's I/O thread is broken.
            DeadlineError: `time.monotonic()` passed `deadline`.
        """
        began, told = time.monotonic(), 0.0
        while not ready():
            self.check()
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                raise DeadlineError(self._vain(what, advice))
            if tells and self.lost and now - told >= 1.0:
                told = now
                self.changed.release()  # a terminal that nobody reads must not hold up the I/O thread
                try:
                    self.on_lost(what, now - began, left)
                finally:
                    self.changed.acquire()
                continue
            self.changed.wait(min(left, 1.0))

    def pause(self, seconds: float) -> None:
        """Waits for some seconds, or until this member is to leave."""
        with self.changed:
            self.changed.wait_for(lambda: self.giving_up, seconds)

    def _vain(self, what: str, advice: str) -> str:
        view = f"view {self.view.id}" if self.view is not None else "no view yet"
        at = f" at {self.endpoint}" if self.endpoint else ""
        if self.view is not None:
            greeting = ""
        elif self.greeting:
            greeting = f"; the scheduler welcomed it as {self.greeting}"
        else:
            greeting = "; the scheduler has not welcomed it"
        said = f"; the scheduler says: {self.notice}" if self.notice else ""
        said += f"; no scheduler serves it ({self.lost})" if self.lost else ""
        status = f"`chaos-lightning status --endpoint {self.endpoint}`" if self.endpoint else "`chaos-lightning status`"
        return (
            f"{self.who()} waited in vain for {what}{at} ({view}, step {self.step}){greeting}{said}; "
            + (f"{advice}; " if advice else "")
            + f"see the event log and {status}"
        )
