"""Writes a cluster's log and console: what it trains, what the leader tells it, and what becomes of its model.

Theory of operation. A session of one process and a rank of an elastic cluster tell the same. Of several ranks the first
one alone tells.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.console import Teller
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.rules.cluster import ClusterMachine, Over
from chaos_lightning.outer.rules.messages import Dismissed, News, PushAnswered, Welcomed
from chaos_lightning.outer.rules.types import JobProgress, PushAnswer, VersionId

STEPS_TOLD_S = 1.0
"""Longest time, s, between two `inner_steps` lines of the event log while the cluster trains."""
VERSIONS_TOLD_S = 30.0
"""Shortest time, s, between two console lines about adopted versions."""
_log = logging.getLogger("chaos_lightning")


class OuterLog:
    """Event log and console of a cluster. Only the training thread may call methods, except `tell`, `heard`, `away` and
    `who`.

    Args:
        options: Options of this cluster.
        events: Log of this cluster.
        machine: Returns the cluster's present state machine; None if it has none.

    Attributes:
        tells: Whether this process writes the cluster's log.
        console: Console of the process that writes the log; others leave it silent.
    """

    def __init__(self, options: ClusterOptions, events: EventLog, machine: Callable[[], ClusterMachine | None]) -> None:
        self.tells = True
        self.console = Teller()
        self._options, self._events, self._machine = options, events, machine
        self._untold, self._told_at = (0, 0), time.monotonic()
        """Inner steps and their samples that are not logged yet; time of the last such line."""
        self._loss: float | None = None
        self._away = threading.Event()
        """Event that is set from the end of a stream to the next welcome."""
        self._version_said = float("-inf")

    def who(self) -> str:
        """Returns the name of the cluster's incarnation; "" before it has one."""
        machine = self._machine()
        return str(machine.incarnation or "") if machine is not None else ""

    def tell(self, name: str, **fields: Any) -> None:
        """Writes an event into the cluster's log, unless another process of the cluster writes that log."""
        if self.tells:
            self._events.emit(name, **fields)

    def trained(self, steps: int, samples: int, loss: float | None) -> None:
        """Counts inner steps and their samples for the log; `loss` is that of the last step, if it is known."""
        self._untold = (self._untold[0] + steps, self._untold[1] + samples)
        self._loss = loss if loss is not None else self._loss
        if time.monotonic() - self._told_at > STEPS_TOLD_S:
            self.tell_steps()

    def tell_steps(self) -> None:
        """Logs the inner steps that are not logged yet. Called before a push is frozen or a version adopted, so that
        the log has the steps before the event that covers or discards them.
        """
        (steps, samples), self._untold = self._untold, (0, 0)
        self._told_at = time.monotonic()
        if steps:
            loss, self._loss = self._loss, None
            self.tell("inner_steps", steps=steps, samples=samples, loss=loss, incarnation=self.who())

    def heard(self, message: Any) -> None:
        """Logs a message from the leader, and prints what the user should know of it."""
        match message:
            case Welcomed(term, incarnation, _, _, founded):
                self._events.identify(str(incarnation), self._options.name)
                self.tell("cluster_welcomed", incarnation=str(incarnation), term=term, founded=founded)
                back = self._away.is_set()
                self._away.clear()
                self.say("the parameter server is back" if back else f"I am cluster {incarnation}")
            case PushAnswered(_, push, answer, version, reason):
                self.tell("push_answered", push=str(push), answer=str(answer), version=str(version), reason=reason)
                if answer is not PushAnswer.ACCEPTED:
                    self.say(f"push {push} does not count: {reason}")
            case News(_, text):
                self.say(text)
            case Dismissed(_, reason, again) if self.tells and not again:
                _log.warning("cluster %s is out: %s", self._options.name, reason)

    def say(self, line: str) -> None:
        """Prints a line on the console, unless another process of the cluster writes the cluster's log."""
        if self.tells:
            self.console.tell(line)

    def away(self, reason: str) -> None:
        """Says on the console that the stream to the leader has ended: once, and again only after the leader has let
        the cluster in again.
        """
        if self.who() and not self._away.is_set():
            self._away.set()
            self.say(f"the parameter server is away ({reason}); training goes on with the samples that are leased")

    # ------------------------------------------------------------------ what becomes of the model

    def adopted(self, version: VersionId, steps: int, job: JobProgress, waited_s: float, *, outright: bool) -> None:
        """Logs that a version was adopted, `steps` inner steps after the freezing, and how far the job is with it."""
        self.tell(
            "version_adopted",
            version=str(version),
            outright=outright,
            steps=steps,
            waited_s=round(waited_s, 6),
            progress_samples=job.samples,
            progress_steps=job.steps,
            incarnation=self.who(),
        )
        if (now := time.monotonic()) - self._version_said >= VERSIONS_TOLD_S:
            self._version_said = now
            self.say(f"version {version.number} is taken over: the job is at step {job.steps}, {job.samples} samples")

    def took_last(self, version: VersionId, steps: int, samples: int) -> None:
        """Logs that the job is over, and with which version; what was trained here, and it lacks, is lost."""
        self.tell("last_taken", version=str(version), steps=steps, samples=samples, incarnation=self.who())
        self.say(f"the job is over, with version {version.number}")
        if steps and self.tells:
            _log.warning("cluster %s: the job is over, and its last version, %s, lacks %d inner steps of this cluster",
                         self._options.name, version, steps)  # fmt: skip

    def ended(self, over: Over) -> None:
        """Logs the end of an incarnation."""
        self.tell_steps()
        self.tell("cluster_over", reason=over.reason, again=over.again, incarnation=self.who())
        if over.again:
            _log.warning("cluster %s comes in again: %s", self._options.name, over.reason)
