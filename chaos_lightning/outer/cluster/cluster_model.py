"""Applies to a cluster's model the versions that it adopts and the end of its job, and writes both into the cluster's
log.

Theory of operation. `OuterContent` (content.py) has the arithmetic. A session of one process and a rank of an elastic
cluster do the same with it, between two steps, and tell the same. Of several ranks the first one alone tells.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.console import Teller
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.content import OuterContent
from chaos_lightning.outer.cluster.getting import Attempt
from chaos_lightning.outer.cluster.push_serving import PushServing
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.exchange.codec import Part, codec_of
from chaos_lightning.outer.rules.cluster import ClusterMachine, Over
from chaos_lightning.outer.rules.messages import Dismissed, News, PushAnswered, Welcomed
from chaos_lightning.outer.rules.types import Agreement, PushAnswer, VersionId

STEPS_TOLD_S = 1.0
"""Longest time, s, between two `inner_steps` lines of the event log while the cluster trains."""
VERSIONS_TOLD_S = 30.0
"""Shortest time, s, between two console lines about adopted versions."""
_log = logging.getLogger("chaos_lightning")


class ClusterModel:
    """Model of a cluster, with its base and its log. Only the training thread may call methods, except `tell`, `heard`,
    `who` and `get`.

    Args:
        replica: Part of the model that clusters exchange.
        agreement: Facts that all clusters of the job have in common.
        options: Options of this cluster.
        events: Log of this cluster.
        machine: Returns the cluster's present state machine; None if it has none.

    Attributes:
        tells: Whether this process writes the cluster's log.
    """

    def __init__(
        self,
        replica: Replica,
        agreement: Agreement,
        options: ClusterOptions,
        events: EventLog,
        machine: Callable[[], ClusterMachine | None],
    ) -> None:
        self.grid = replica.grid(agreement.block)
        self.codec = codec_of(agreement)
        self.content = OuterContent(replica, self.grid, self.codec)
        self.tells = True
        self._replica, self._options, self._events, self._machine = replica, options, events, machine
        self._untold, self._told_at = (0, 0), time.monotonic()
        """Inner steps and their samples that are not logged yet; time of the last such line."""
        self._loss: float | None = None
        self.console = Teller()
        """Console of the process that writes the log; others leave it silent."""
        self._away = threading.Event()
        """Event that is set from the end of a stream to the next welcome."""
        self._version_said = float("-inf")
        self._own: list[Tensor] | None = None
        """Parameters that are trained, while the model shows the base; else None."""

    def empty(self) -> Part:
        """Returns memory for a version of the whole model, in the codec's format."""
        return Part.empty(self.grid.whole, self.codec.version)

    def get(self, version: VersionId, attempt: Attempt, *, serving: PushServing) -> None:
        """Fills `attempt.part` with a version from the followers; errors are those of `PushServing.fetch`."""
        began = time.monotonic()
        nbytes = serving.fetch(version, attempt.part, attempt.abandoned, blank=attempt.blank)
        self.tell("version_fetched", version=str(version), nbytes=nbytes, seconds=_since(began), incarnation=self.who())

    # ------------------------------------------------------------------ what the log tells

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

    def adopt(self, version: VersionId, part: Part | None, *, outright: bool, waited_s: Callable[[], float]) -> bool:
        """Adopts a version that was fetched.

        Args:
            version: Name of the version.
            part: Encoded bytes of the version.
            outright: Whether what was trained since the freezing is gone.
            waited_s: Returns the seconds for which training stood still for it; called last.

        Returns:
            Whether the inner optimizer is to begin anew.
        """
        machine = self._machine()
        assert machine is not None
        assert part is not None
        self.tell_steps()
        own = machine.since_base[1]
        # Without overlap nothing has been trained since, but after a void.
        self.content.adopt(part, outright=outright or not (self._options.overlap or own))
        self.tell(
            "version_adopted",
            version=str(version),
            outright=outright,
            steps=own,
            waited_s=round(waited_s(), 6),
            progress_samples=machine.job.samples,
            progress_steps=machine.job.steps,
            incarnation=self.who(),
        )
        if (now := time.monotonic()) - self._version_said >= VERSIONS_TOLD_S:
            self._version_said = now
            job = machine.job
            self.say(f"version {version.number} is taken over: the job is at step {job.steps}, {job.samples} samples")
        return outright and self.content.resets_optimizer

    def take_last(self, version: VersionId, part: Part | None, steps: int, samples: int) -> None:
        """Takes over the job's last version at the end of the job. `part` is None if that version is the base
        already.
        """
        self.tell_steps()
        self.content.end_with(part)
        self.tell("last_taken", version=str(version), steps=steps, samples=samples, incarnation=self.who())
        self.say(f"the job is over, with version {version.number}")
        if steps and self.tells:
            _log.warning("cluster %s: the job is over, and its last version, %s, lacks %d inner steps of this cluster",
                         self._options.name, version, steps)  # fmt: skip

    def end(self, over: Over) -> None:
        """Logs the end of an incarnation; if the process will come in again, drops the base, since a new incarnation
        has none.
        """
        self.tell_steps()
        self.tell("cluster_over", reason=over.reason, again=over.again, incarnation=self.who())
        if over.again:
            _log.warning("cluster %s comes in again: %s", self._options.name, over.reason)
            self.content.forget()

    # ------------------------------------------------------------------ what is judged

    @property
    def shows_base(self) -> bool:
        """Whether the model's parameters are those of the base at the moment (see `show_base`)."""
        return self._own is not None

    def show_base(self) -> None:
        """Replaces the model's parameters by those of the base until `show_own`; nothing may be trained in between."""
        if self._own is None and self.content.base is not None:
            self._own = self._replica.copies()
            self._replica.adopt(self.content.base, None)

    def show_own(self) -> None:
        """Undoes `show_base`: the model has its trained parameters again. Idempotent."""
        if self._own is not None:
            self._replica.restore(self._own)
            self._own = None


def _since(began: float) -> float:
    return round(time.monotonic() - began, 6)
