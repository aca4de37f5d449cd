"""Helps a cluster's loop to wait and to leave: warnings say what it waits for, and signals make it leave the job in
good order.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from types import FrameType

from chaos_lightning.errors import ChaosError, ConfigurationError, DeadlineError, RefusedError, StateError
from chaos_lightning.machine.signals import ExitSignals, Handler, aside, say

TELL_S = 10.0
"""Interval, s, at which a waiting process says for what it waits."""
_log = logging.getLogger("chaos_lightning")


class Patience:
    """Limit of a wait, which begins when this object is made.

    Args:
        who: Name of the cluster.
        waits_for: Returns in words what the cluster waits for at the moment.
        limit_s: Seconds after which the wait fails; None: never.
        tells: Whether to warn: of several processes of a cluster one is enough.
    """

    def __init__(
        self, who: str, waits_for: Callable[[], str], limit_s: float | None = None, *, tells: bool = True
    ) -> None:
        self._who, self._waits_for, self._limit_s, self._tells = who, waits_for, limit_s, tells
        self._began = self._told = time.monotonic()

    def look(self) -> None:
        """Warns, every ten seconds or so, that the cluster still waits.

        Raises:
            DeadlineError: The limit has passed; the message says what the cluster waited for.
        """
        now = time.monotonic()
        if self._limit_s is not None and now - self._began > self._limit_s:
            raise DeadlineError(f"cluster {self._who} waited {self._limit_s:g} s for {self._waits_for()}")
        if self._tells and now - self._told > TELL_S:
            self._told = now
            _log.warning("cluster %s waits for %s", self._who, self._waits_for())


def tell_refusal(who: str, error: RefusedError) -> None:
    """Warns that the server refuses a cluster that was in the job before, and that the cluster trains on without it."""
    _log.warning("cluster %s trains on, and its parameter server does not let it in: %s", who, error)


def put_out(who: str, reason: str, *, was_in: bool) -> ChaosError:
    """Returns the error to raise in a cluster that is out of the job and has not got the job's last version.

    Args:
        who: Name of the cluster.
        reason: Reason for which it is out.
        was_in: Whether the cluster has had a part in the job.
    """
    if not was_in:
        return ConfigurationError(reason)
    return StateError(f"cluster {who} is out of the job, and its model is not the job's last version: {reason}")


def _nothing(number: signal.Signals, frame: FrameType | None) -> None:
    """Does nothing: the default of `leaving_signals` for `also`."""


def cost(at_risk: int) -> str:
    """Returns a sentence about what is lost if the cluster ends now; `at_risk`: its inner steps that no durable version
    holds.
    """
    return (
        f"still waiting for the parameter server. To end now may cost {at_risk} inner steps of this cluster, which no "
        "durable version holds"
    )


def insist(signals: ExitSignals, number: signal.Signals, words: Callable[[], str]) -> None:
    """Prints, at the second signal, what may be lost if the process ends now, unless `words` returns ""; the third
    signal ends the process.
    """
    signals.stand_down()  # first: finding the words may take a lock
    if text := words():
        say(f"{number.name}: {text}; once more ends")


def leaving_signals(
    leave: Callable[[], None],
    at_risk: Callable[[], int],
    *,
    speaks: Callable[[], bool] = lambda: True,
    also: Handler = _nothing,
) -> ExitSignals:
    """Returns signal handlers: the first signal makes the cluster leave the job, the second prints what may be lost if
    the process ends now, the third ends it.

    Args:
        leave: Asks to leave. Called in a thread of its own.
        at_risk: Returns the number of inner steps of this cluster that no durable version holds.
        speaks: Returns whether this process prints messages.
        also: Further handler of the first signal.
    """

    def first(number: signal.Signals, frame: FrameType | None) -> None:
        if speaks():
            say(f"{number.name}: leaving the job after the present step, once what was trained is durable")
        aside(lambda _: leave(), number.name)
        also(number, frame)

    def again(number: signal.Signals, frame: FrameType | None) -> None:
        insist(signals, number, lambda: cost(at_risk()) if speaks() else "")

    signals = ExitSignals(first, again=again)
    return signals
