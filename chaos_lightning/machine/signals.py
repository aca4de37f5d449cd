"""Handles signals that ask a process to end: the first one politely; further ones end it as by default.

Theory of operation. A strategy, a plain loop, a callback and an agent of torchrun all want the same: take signals over
for a while, do something of their own at the first one, let the second one have its usual effect, and put back what
stood before. A handler may interrupt whoever holds a lock. So it does nothing that takes one: it writes a line with one
system call, and leaves the job in a thread of its own.

Signals that are ignored since the start (`nohup`) stay so, but for SIGINT, which shells make background jobs ignore.

A closed terminal (SIGHUP) is a wish, too, with three things of its own. The kernel sends it, the shell as well, and a
session manager sends SIGTERM beside it: so it is never the second signal, and what follows it within `HANGUP_S` is the
same wish. What is written to the terminal from now on fails; it goes to the null device instead (`machine.terminal`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from chaos_lightning.machine.terminal import TerminalGuard, silence_dead_terminals

POLITE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a user, a terminal or a batch system asks a process to end."""
STAY, END = signal.SIGUSR1, signal.SIGUSR2
"""Signals by which a supervisor asks a child to end: once those have left who leave at this moment; and at once."""
HANGUP_S = 2.0
"""Seconds: signals that follow SIGHUP within this time are the same wish."""

_IGNORED = frozenset(n for n in (signal.SIGTERM,) if signal.getsignal(n) is signal.SIG_IGN)
"""SIGTERM if it was ignored when this module was imported: Lightning puts a handler in place all the same."""

Handler = Callable[[signal.Signals, FrameType | None], None]


class ExitSignals:
    """Handlers of signals, active from `install` until `restore`; none outside the main thread.

    Args:
        first: Called within the handler, at the first signal.
        numbers: Signals that are handled.
        again: Called within the handler, at each further signal. None: a further signal has its default effect.
        debounce_s: Seconds within which further signals count as the same request.
        clock: Returns monotonic seconds.

    Attributes:
        asked: The first signal; None before.
        asked_at: Time of the first signal, by the clock.
        before: Handlers that were installed before, by signal.
    """

    def __init__(
        self,
        first: Handler,
        numbers: Iterable[signal.Signals] = POLITE,
        *,
        again: Handler | None = None,
        debounce_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = first
        self._numbers = tuple(numbers)
        self._again = again
        self._debounce_s = debounce_s
        self._clock = clock
        self.asked: signal.Signals | None = None
        self.asked_at = 0.0
        self.before: dict[signal.Signals, Any] = {}
        self._terminals = TerminalGuard()
        self._immune = frozenset(number for number in self._numbers if _is_immune(number))

    def install(self, replaces: Callable[[Any], bool] = lambda handler: True) -> list[signal.Signals]:
        """Installs the handlers, and installs them again if other code has replaced them.

        Args:
            replaces: Whether a handler that stands is one to be replaced.

        Returns:
            The signals that were taken over now.
        """
        if threading.current_thread() is not threading.main_thread():
            return []
        self._terminals.open()
        taken = []
        for number in self._numbers:
            stands = signal.getsignal(number)
            if stands == self.receive or not replaces(stands):
                continue
            if number in self._immune or _is_immune(number):
                signal.signal(number, signal.SIG_IGN)
            else:
                self.before.setdefault(number, stands)
                signal.signal(number, self.receive)
                taken.append(number)
        return taken

    def restore(self) -> None:
        """Restores the former handlers, except where other code has replaced ours. Idempotent."""
        for number, handler in self.before.items():
            if signal.getsignal(number) in (self.receive, _after_the_first(number)):
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.before.clear()
        self._terminals.close()

    def stand_down(self) -> None:
        """Lets the next signal have its default effect, since a process that is stuck runs no Python handlers."""
        for each in self.before:
            if signal.getsignal(each) == self.receive:
                signal.signal(each, _after_the_first(each))

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: the first one politely, a further one by `again` or the default effect."""
        came = signal.Signals(number)
        silence_dead_terminals()  # an agent whose terminal was closed asks its workers by SIGTERM
        if self.asked is None:
            self.asked, self.asked_at = came, self._clock()
            if came is signal.SIGHUP:
                self._debounce_s = max(self._debounce_s, HANGUP_S)
            if self._again is None and not self._debounce_s:
                self.stand_down()  # now, not then
            self._first(came, frame)
        elif came is signal.SIGHUP or self._clock() - self.asked_at < self._debounce_s:
            return
        elif self._again is not None:
            self._again(came, frame)
        else:
            end_by(came)


def end_by(number: signal.Signals) -> None:
    """Ends this process in the way in which an unhandled signal would."""
    signal.signal(number, _default(number))
    os.kill(os.getpid(), number)


def ends() -> list[signal.Signals]:
    """Returns the signals of `POLITE` that should end a server: without those that its parent made it ignore, except
    SIGINT, which shells make background jobs ignore.
    """
    ignored = [number for number in POLITE if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in POLITE if number not in ignored or number is signal.SIGINT]


def _is_immune(number: int) -> bool:
    return number != signal.SIGINT and (number in _IGNORED or signal.getsignal(number) is signal.SIG_IGN)


def _after_the_first(number: int) -> Any:
    return signal.SIG_IGN if number == signal.SIGHUP else _default(number)


def _default(number: int) -> Any:
    """Returns Python's default handler of a signal: KeyboardInterrupt for Ctrl+C, death for others."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def aside(leave: Callable[[str], None], reason: str) -> None:
    """Calls `leave(reason)` in a new thread, since a signal handler may have interrupted code that holds the locks it
    needs.
    """
    threading.Thread(target=leave, args=(reason,), name="chaos-leave", daemon=True).start()


def say(line: str) -> None:
    """Writes a line to stderr in one system call, safe in a signal handler; a closed terminal is no error."""
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        return
