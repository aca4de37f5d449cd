"""Tells the user on the terminal what a member waits for, and ends a wait that the user gives up.

Theory of operation. The scheduler tells whoever waits what for, in Notices, and in refusals of a member that may knock
again. Each text is shown once, by the logger "chaos_lightning" at WARNING, which is shown unless the user turned it
off; the end of the wait is shown, too, if there was anything to wait for. A member that is in no view yet need not wait
for a header in order to leave: it says so, gives the scheduler a moment to release it, and closes its control stream.

A newcomer that reaches no scheduler says so in few words at first, since one may be about to start, and after some
seconds again and again, with the cause.

A member that no scheduler serves, because none answers or because it lacks the job's chain, hears nothing of it, and as
a rule need not, for training goes on without it. Only when a slot does not commit meanwhile (after a death, or on one
side of a graph that was cut in two), such a member says of itself what it waits for and whom it does not reach: once
for each wait with links that are down, and once until the scheduler is back where a slot is only slow.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from chaos_lightning.errors import ChaosError, DepartedError, RestartError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.terminal import printable
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.protocol.types import Notice, Refused, ToMember, Welcome

_log = logging.getLogger("chaos_lightning")
_RELEASE_TIMEOUT_S = 2.0
_RESET = "`chaos-lightning reset"
SEVERED_S, SLOW_S = 2.0, 10.0
"""Seconds that a slot may take without the scheduler until something is said: if a link is down, and if all stand."""
UNHEARD_S = 5.0
"""Seconds between two lines of a newcomer that no scheduler answers."""
STARTS_S = 10.0
"""Seconds that a scheduler may take to start, before a newcomer says what to do about it."""
ADVICE = "start the members that are missing, with this endpoint, or set min_nodes lower or join_timeout_s higher"


class Waiting:
    """Messages to the user about one member's waits.

    Args:
        mail: Mailbox in which the training thread waits.
        events: This member's event log.
        severed: Returns the members of the view that this one should have a link to, and has none.
    """

    def __init__(self, mail: Mailbox, events: EventLog, severed: Callable[[], Sequence[str]] = lambda: ()) -> None:
        self._mail = mail
        self._severed = severed
        self._told_severed = self._told_slow = False
        mail.on_lost = self._lost
        self._events = events
        self._shown: set[str] = set()
        self._refused = False
        self._unheard_at: float | None = None
        """Time (s of a wait) at which a newcomer that no scheduler has answered said so last; None: one has."""

    def hear(self, message: ToMember) -> None:
        """Handles a message from the scheduler (agent's thread)."""
        match message:
            case Welcome(_, _, role, reason):
                self._mail.post(greeting=f"{role}: {reason}")
                if self._refused:  # no longer what it waits for
                    self._refused = False
                    self._mail.post(notice="")
            case Notice():
                self._events.emit("notice", text=message.text, waiting=message.waiting)
                self._told(message)
            case Refused(reason, retry):
                self._events.emit("refused", reason=reason)
                if retry:  # a final one ends the wait with an exception that says so
                    self._refused, self._unheard_at = True, None
                    self._mail.post(lost="")
                    self._told(Notice(reason, waiting=True))

    def stream(self, state: str) -> None:
        """Handles a new state of the control stream (agent's thread; states as in control/agent.py)."""
        self._events.emit("scheduler", state=state)
        if state == "connected":
            self._told_severed = self._told_slow = False
            self._unheard_at = None
            self._mail.post(lost="")
        elif state.startswith("lost: ") and (self._mail.view is not None or not self._refused):
            # A refusal that is not final tells a newcomer what it waits for; a member waits for its slot.
            self._mail.post(lost=state.removeprefix("lost: "))
        elif state.startswith("waits: "):
            self._unheard_at = float("-inf") if self._unheard_at is None else self._unheard_at
            self._mail.post(lost=state.removeprefix("waits: "))

    def _lost(self, what: str, waited_s: float, left_s: float) -> None:
        """Tells the user, if it lasts, that the training thread waits while no scheduler serves this member."""
        if self._unheard_at is not None:
            self._unheard(what, waited_s, left_s, self._unheard_at)
            return
        if self._told_severed:
            return
        severed = self._severed() if waited_s >= SEVERED_S else ()
        if severed:
            self._told_severed = True
        elif waited_s >= SLOW_S and not self._told_slow:
            self._told_slow = True
        else:
            return
        text = f"waits for {what}: no scheduler serves it at {self._mail.endpoint} ({self._mail.lost})"
        text += f", and no link to {', '.join(severed)} stands" if severed else ""
        self._say(f"{text}; it goes on, or joins again, when the scheduler is back, and gives up in {left_s:.0f} s")

    def _unheard(self, what: str, waited_s: float, left_s: float, before: float) -> None:
        """Tells the user that no scheduler has answered this newcomer so far; repeated every few seconds."""
        first, starts = before < 0, waited_s < STARTS_S
        if waited_s < SEVERED_S or waited_s - before < UNHEARD_S or (starts and not first):
            return
        self._unheard_at = waited_s
        if starts:
            self._say(f"waits for {what}: the scheduler at {self._mail.endpoint} does not answer yet")
            return
        self._say(
            f"waits for {what}: {self._mail.lost}. Start the scheduler, or the node that hosts it, or check the "
            f"endpoint; gives up in {left_s:.0f} s"
        )

    def _say(self, text: str) -> None:
        """Logs this text, in which the member itself says why it waits, and shows it to the user."""
        self._events.emit("notice", text=text, waiting=True)
        self._shown.add(text)
        _log.warning("%s: %s", self._mail.who(), text)

    def _told(self, message: Notice) -> None:
        text, endpoint = message.text, self._mail.endpoint
        if endpoint:  # the scheduler does not know where its members reach it
            text = text.replace(_RESET, f"{_RESET} --endpoint {endpoint}")
        self._mail.post(notice=text if message.waiting else "")
        if text not in self._shown:
            if message.waiting or self._shown:  # else it waits for nothing, and nothing will be over
                self._shown.add(text)
            _log.warning("%s: %s", self._mail.who(), printable(text))

    def over(self, words: str) -> None:
        """Tells the user that waiting is over, because training begins or continues."""
        self._told_severed = False
        if self._shown:
            self._shown = set()
            _log.warning("%s: waiting is over, %s", self._mail.who(), words)

    def give_up(self, close: Callable[[], None]) -> DepartedError:
        """Closes the control stream of a member that is to leave before it is in the job; returns the error to
        raise.
        """
        mail = self._mail
        if mail.member is not None and mail.view is None and mail.pull is None:
            with mail.changed, contextlib.suppress(ChaosError, RestartError):
                mail.wait(lambda: bool(mail.left), "release", time.monotonic() + _RELEASE_TIMEOUT_S, tells=False)
        close()
        mail.post(left=mail.left or "it asked to leave before it was in the job")
        return DepartedError(f"{mail.who()} gave up waiting for the job, which it was asked to leave")
