"""Runs a cluster of outer sync that is itself an elastic job: its ranks come, leave and die, and the cluster goes on.

Theory of operation. The ranks hold equal parameters, and so each of them holds the whole cluster: the same
`ClusterMachine`, base, residual, and the pushes that are open or kept (`ClusterModel`). All of it changes at commits of
the inner job only, by what the commit itself says: each rank adds an *answer* to its part of a step, and the header
hands all of them to all ranks. News for the machines stands in the answer of the *first* rank, the oldest one that
contributed: it alone talks to the leader (attendant.py). If it dies, the next one goes on as the same incarnation, and
the leader repeats what was lost on the way.

- A push is frozen at one commit. Each rank encodes it beside the training, and it is offered once all have.
- A version is fetched over the far link once, by the first rank; the others get it from whoever has it, on connections
  of the inner job. It is adopted at the commit in which everybody says that it is here (O8).
- Nothing leaves the job that depends on a commit that might be taken back: a rank says only what the commit *before*
  the present one has brought (O8a). By then all ranks serve what it offers, as they contributed to the present one.

If clusters share the data, the positions that are leased to this one stand in a row on a *tape* (planning/tape.py),
which grows with each grant. The inner job's ledger counts places on the tape; a step covers the positions at the places
that it has spent.

While the cluster may not train (it has no base, or waits for an answer), its ranks meet in small collectives in place
of steps. All of this stands in the state that newcomers get, and in its hash.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from chaos_lightning.errors import ChaosError, NoDonorError, StateError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.fits import Fit
from chaos_lightning.outer.cluster.attendant import Attendant
from chaos_lightning.outer.cluster.cluster_effects import Boundary, ClusterEffects
from chaos_lightning.outer.cluster.cluster_log import OuterLog
from chaos_lightning.outer.cluster.cluster_model import ClusterModel
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.exchange import Attempt, FollowerExchange, Sought, VersionGetter
from chaos_lightning.outer.cluster.leaving import put_out
from chaos_lightning.outer.cluster.push_serving import FETCH_S
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.cluster.training_rates import TrainingRates, Waits
from chaos_lightning.outer.exchange.codec import Part, codec_of
from chaos_lightning.outer.exchange.fetching import fetch, version_name
from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.cluster import ClusterMachine, Phase
from chaos_lightning.outer.rules.messages import ClusterHello, Holder
from chaos_lightning.outer.rules.ranks_machine import RankNews, RankSays, RanksEffect, RanksFacts, RanksMachine, Sealed
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Agreement,
    JobProgress,
    PushId,
    VersionId,
)
from chaos_lightning.planning.batches import UNTOLD, Batches
from chaos_lightning.planning.tape import Tape
from chaos_lightning.protocol.plain import read_text, text_of
from chaos_lightning.protocol.types import Span
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.replication.table import StateTable
from chaos_lightning.security.credentials import Credentials

_log = logging.getLogger("chaos_lightning")
_read = lru_cache(maxsize=64)(partial(read_text, RankSays))
"""Parser of ranks' answers. Ranks mostly say what they said before, and then a step parses nothing."""

POLL_S = 0.05
"""Longest time, s, between two meetings of ranks that wait; they meet sooner if the first rank has news."""
SOON_S = 0.005
"""Time, s, between two meetings while other ranks are about to have a version or push that the first rank has."""


class InnerJob(Protocol):
    """Elastic job whose ranks form one cluster: it serves this rank's states to the other ranks, and connects to
    theirs.
    """

    @property
    def server(self) -> StateServer:
        """Server that gives this rank's state to the other ranks."""
        ...

    def ways(self, members: Sequence[str]) -> list[Endpoint]:
        """Returns the endpoints of these ranks, leaving out ranks that are not in the view."""
        ...

    def dial(self, donor: Endpoint) -> Any:
        """Returns a connection to another rank; has the signature of `replication.source.Dial`."""
        ...


@dataclass(slots=True)
class _Step:
    """Figures of one rank for its coming step: samples used, speed of training, and time spent waiting."""

    samples: int = 0
    since: float = field(default_factory=time.monotonic)
    rates: TrainingRates = field(default_factory=TrainingRates)
    waits: Waits = field(default_factory=Waits)

    @property
    def rounded(self) -> tuple[float, float]:
        """Samples and steps a second, rounded to two digits: these rates are part of the rank's answer, which is
        encoded anew only when it changes.
        """
        return float(f"{self.rates.samples_per_s:.2g}"), float(f"{self.rates.steps_per_s:.2g}")


@dataclass(slots=True)
class NewcomerFacts:
    """Facts that a newcomer gets along with the training state and the tensors, encoded as text in a tensor of its
    own.
    """

    ranks: RanksFacts
    pending: PushId | None
    rejections: int
    holders: tuple[Holder, ...]


class ElasticCluster:
    """One rank's part in a cluster of several ranks. Only the training thread may call methods, except `close`.

    It is a `replication.access.StateAccess`: what newcomers get beside the training state.

    Args:
        replica: Part of the model that clusters exchange.
        agreement: Facts that all clusters of the job have in common.
        options: Options of this cluster, equal at all ranks but for folders.
        inner: Job of the ranks.
        events: Event log of this rank, as part of the cluster.
        batches: Batch sizes of this rank, in positions of the shared data.

    Attributes:
        leaves: Whether this rank has said `leave`.
        held: Whether this rank was asked to leave after the loop of all ranks, and has not been let go. If all are
            held, the cluster leaves.
    """

    def __init__(
        self,
        replica: Replica,
        agreement: Agreement,
        options: ClusterOptions,
        inner: InnerJob,
        events: EventLog,
        batches: Batches = UNTOLD,
    ) -> None:
        self.options, self.agreement, self._batches = options, agreement, batches
        self._fit = Fit(options.job, ",".join(options.endpoints))
        self._inner, self._events = inner, events
        self._log = OuterLog(options, events, lambda: self._state.machine if self._state is not None else None)
        self._log.tells = False
        self._model = ClusterModel(replica, replica.grid(agreement.block), codec_of(agreement))
        self._settings = OuterSettings.of_words(agreement.settings)
        self._secret = Credentials.load(options.keys_dir, options.token_file)
        self._changed = threading.Condition(threading.RLock())
        self._state: RanksMachine | None = None
        self._landing: Tensor | None = None
        """Facts of the other ranks' machine, as text, while their state arrives."""
        self._first = False
        self._attendant: Attendant | None = None
        self._hello: ClusterHello | None = None
        self._news: deque[RankNews] = deque()
        """News that the first rank's next answer tells the machines."""
        self._sent = 0
        """Number of `_news` that stand in an answer that was given."""
        self._encoding: PushId | None = None
        """Push that this rank encodes, or has encoded."""
        self._encoded: tuple[PushId, Part, str] | None = None
        self._step = _Step()
        getter = VersionGetter(self._changed, self._model.empty, self._sought, self._missed, server=inner.server)
        self._exchange = FollowerExchange(
            options,
            self._secret,
            self._model,
            self._log,
            events.emit,
            self._changed,
            lambda: self._log.who() or options.name,
            getter,
        )
        self._effects = ClusterEffects(
            self._model, self._exchange, self._log, overlap=options.overlap, waited_s=lambda: self._step.waits.take()
        )
        self._told: tuple[Any, Any] = (None, None)
        """Version and push, here and encoded, that the last answer told."""
        self._me, self._ranks = "", 1
        self._said = RankSays(), text_of(RankSays, RankSays())
        """Last answer of this rank, and that as text."""
        self._reason = self._failed = ""
        self.leaves = self.held = False
        self._closing = threading.Event()

    # ------------------------------------------------------------------ questions

    @property
    def state(self) -> RanksMachine:
        """State that is equal at all ranks of the cluster."""
        assert self._state is not None, "this rank is not in the cluster yet"
        return self._state

    @property
    def machine(self) -> ClusterMachine:
        return self.state.machine

    @property
    def over(self) -> str:
        """Reason for which the cluster's part in the job has ended; "" until then."""
        return self._state.over if self._state is not None else ""

    @property
    def founded(self) -> bool:
        """Whether this rank has the cluster's state."""
        return self._state is not None

    @property
    def shows_base(self) -> bool:
        """Whether the model's parameters are those of the base at the moment (see `show_base`)."""
        return self._model.shows_base

    @property
    def base(self) -> VersionId:
        """Version that the cluster adopted last."""
        return self.machine.base

    @property
    def waits(self) -> bool:
        """Whether no step may begin for now: until one may, ranks call `meeting` and `commit` to exchange news."""
        machine = self.machine
        return not self.over and (machine.phase is not Phase.TRAINING or machine.waits or (self.dry and not self.ends))

    @property
    def dry(self) -> bool:
        """Whether the ranks have used all samples that are leased to the cluster, and wait for more."""
        return self.state.leased is not None and self.state.leased.used_up

    @property
    def tape(self) -> Tape | None:
        """Leased positions, in the order in which the ranks use them; None if the cluster has data of its own."""
        return self.state.leased.tape if self.state.leased is not None else None

    @property
    def ends(self) -> bool:
        """Whether the ranks train no further step."""
        return bool(self.over or self.machine.leaving or self.machine.verdict)

    def waits_for(self) -> str:
        """Returns in words the event for which the cluster waits."""
        if self._attendant is not None and self._attendant.trouble:
            return f"the parameter server at {','.join(self.options.endpoints)}: {self._attendant.trouble}"
        return self.machine.waits_for

    @property
    def reckoned(self) -> JobProgress:
        """Progress of the job as this cluster estimates it: that of its base, and what it has trained since."""
        return self.machine.reckoned

    # ------------------------------------------------------------------ coming in

    def found(self, nonce: str, *, alone: bool) -> None:
        """Makes the cluster's state, unless the training state with which the ranks begin contains one already.

        Args:
            nonce: Random text, drawn when the ranks began.
            alone: Whether there is no other rank. A rank that begins with the state that the last rank of a cluster
                that had left kept on its disk comes in anew.
        """
        if alone and self.over:
            self.forget()
        if self._state is None:
            self._state = self._make(nonce)

    def begin(self, me: str, *, first: bool) -> None:
        """Starts this rank once it has the state that the other ranks have; from then on it may call `answer`.

        Args:
            me: Id of this rank in the inner job.
            first: Whether this rank is the oldest one.
        """
        self._me, self._step = me, _Step()
        self._hello = self.machine.hello()
        self._exchange.reach(self._exchange.holders)
        self._resume_encoding()
        self._exchange.start()
        if first:
            self._attend()

    def _make(self, nonce: str) -> RanksMachine:
        # No process stands for the cluster, so none is named: the death of one proves nothing.
        options = self.options
        place = f"{options.name} (elastic)"
        machine = ClusterMachine(
            options.name, place, nonce, self.agreement, overlap=options.overlap, ahead_steps=options.ahead_steps
        )
        return RanksMachine(machine)

    def forget(self) -> None:
        """Drops the cluster's state, since the other ranks removed this rank; `begin` is called once it has their state
        again.
        """
        self._leave_off()
        self._state = None
        self._model.forget()
        self._exchange.forget()
        self._drop_encoded()
        self._exchange.drop()
        with self._changed:
            self._sent = 0
            self._news.clear()

    # ------------------------------------------------------------------ the state that travels

    def tensors(self) -> list[tuple[str, Tensor]]:
        content = self._model
        named = [("outer.base", content.base.data if content.base is not None else None)]
        named += [("outer.residual", content.residual), ("outer.frozen", content.frozen)]
        named += [(f"outer.push {push}", part.data) for push, part in sorted(content.pushes.items())]
        named += [("outer.machine", self._landing if self._landing is not None else self._facts())]
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def _facts(self) -> Tensor | None:
        if self._state is None:
            return None
        content = self._model
        facts = NewcomerFacts(self._state.facts(), content.pending, content.rejections, self._exchange.holders)
        return torch.frombuffer(bytearray(text_of(NewcomerFacts, facts)), dtype=torch.uint8)

    def manifest(self) -> dict[str, object]:
        content, facts = self._model, self._facts()
        return {
            "base": content.base is not None,
            "residual": content.residual is not None,
            "frozen": content.frozen is not None,
            "pushes": [
                (text_of(PushId, push), part.format == self._model.codec.push)
                for push, part in sorted(content.pushes.items())
            ],
            "facts": 0 if facts is None else facts.numel(),
        }

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        whole, content = self._model.grid.whole, self._model
        content.base = Part.empty(whole, self._model.codec.version) if manifest["base"] else None
        content.residual = torch.zeros(self._model.grid.elements) if manifest["residual"] else None
        content.frozen = torch.zeros(self._model.grid.elements) if manifest["frozen"] else None
        content.pushes = {
            read_text(PushId, push): Part.empty(whole, content.format_of(founding=not delta))
            for push, delta in manifest["pushes"]
        }
        self._landing = torch.zeros(manifest["facts"], dtype=torch.uint8) if manifest["facts"] else None

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        landing, self._landing = self._landing, None
        if landing is None:
            self._state = None
            return
        facts = read_text(NewcomerFacts, bytes(landing.numpy()))
        self._state = self._make(facts.ranks.nonce)
        self._state.restore(facts.ranks)
        self._model.pending, self._model.rejections = facts.pending, facts.rejections
        self._exchange.holders = facts.holders

    # ------------------------------------------------------------------ commits

    def used(self, samples: int) -> None:
        """Adds to the number of samples that this rank has used for the coming step."""
        self._step.samples += samples

    def answer(self) -> bytes:
        """Returns the message that this rank contributes to the coming commit."""
        with self._changed:
            events = tuple(self._news) if self._first else ()
            self._sent, self._told = len(events), (self._exchange.here, self._encoded)
            said = self._answer(events)
            if said != self._said[0]:
                self._said = said, text_of(RankSays, said)
            return self._said[1]

    def _answer(self, events: tuple[RankNews, ...]) -> RankSays:
        fetched, encoded = self._exchange.here, self._encoded
        return RankSays(
            fetched[0] if fetched is not None else NO_VERSION,
            (encoded[0], encoded[2]) if encoded is not None and self._exchange.holders else None,
            self._step.samples,
            self._step.rounded if self._first else (0.0, 0.0),
            self._reason,
            self.leaves,
            self._failed,
            events,
            self.held,
            self._batches,
        )

    def meeting(self) -> bytes:
        """Returns the message that this rank contributes to a commit without a step; the first rank waits a while for
        news beforehand.
        """
        # Without samples it does not wait for versions.
        self._step.waits.kept_at = 0.0 if self.dry else time.monotonic()
        with self._changed:
            if self._first:
                soon = self._exchange.here is not None or self._encoded is not None
                self._changed.wait_for(lambda: self._has_news or self._closing.is_set(), SOON_S if soon else POLL_S)
        return self.answer()

    @property
    def _has_news(self) -> bool:
        """Whether this rank has news that its last answer did not contain."""
        told = self._told
        return bool(self._news or self._failed) or self._exchange.here is not told[0] or self._encoded is not told[1]

    def alone(self) -> Boundary:
        """Commits, without a step, for this rank alone, since the other ranks are gone."""
        return self.commit([self._me], [self.meeting()])

    def commit(
        self,
        ranks: Sequence[str],
        answers: Sequence[bytes],
        *,
        steps: int = 0,
        spent: Sequence[Span] = (),
        loss: float | None = None,
    ) -> Boundary:
        """Applies a commit of the inner job, after the optimizer's step if the commit is one; returns the outcome.

        Args:
            ranks: Ranks that contributed, in rank order.
            answers: Answers of these ranks; none where the commit carries none.
            steps: Number of inner steps in the commit: 1, or 0.
            spent: Places on the tape that are spent with it, if it is a step.
            loss: Loss of this rank's part of the step, for the log; None if it is not known.

        Raises:
            StateError: The push of this rank differs from the others', or a rank cannot go on.
        """
        began = time.monotonic()
        state = self.state
        self._hello = state.machine.hello()
        self._say_known()
        if not answers:
            return Boundary()
        self._step.waits.kept_at = self._step.waits.kept_at or began
        said = [_read(answer) if answer else RankSays() for answer in answers]
        found = Boundary()
        self._take_place(ranks)
        if steps:
            samples = sum(each.samples for each in said)
            if self._first:
                self._log.trained(steps, samples, loss if self._step.samples else None)
            self._step.rates.take(samples, steps, began - self._step.since)
            self._step.samples = 0
        for effect in state.commit(ranks, said, steps, spent):
            found = self._carry_out(effect, found)
        with self._changed:
            self._changed.notify_all()  # who has the version that is wanted is known
        if len(ranks) == 1:
            self._say_known()
        now = time.monotonic()
        self._step.waits.let_go(now)
        self._step.since = now
        return dataclasses.replace(found, over=self.over, waited_s=now - began)

    def _say_known(self) -> None:
        for message in self.state.known():
            if self._attendant is not None:
                self._attendant.say(message)

    def _take_place(self, ranks: Sequence[str]) -> None:
        """Finds out from the list of contributors whether this rank is the first one, and drops the news that its last
        answer contained.
        """
        if len(ranks) != self._ranks:
            self._ranks = len(ranks)
            self._exchange.share(self._ranks)
        with self._changed:
            if ranks[0] == self._me and self._first:
                for _ in range(self._sent):
                    self._news.popleft()
            self._sent = 0
        if ranks[0] == self._me and not self._first:
            self._attend()

    def _carry_out(self, effect: RanksEffect, found: Boundary) -> Boundary:
        part: Part | None = None
        match effect:
            case fx.Told(message):
                self._log.heard(message)
                return found
            case Sealed(push, manifest):
                self._seal(push, manifest)
                return found
            case cl.Adopt(version) | cl.TakeLast(version):
                part, self.state.having = self._exchange.take(version), ()
            case cl.FetchVersion(version):
                self._exchange.drop(version)
                self.state.having = ()
        found = self._effects.carry_out(effect, self.machine, part, found)
        match effect:
            case cl.Freeze():
                self._resume_encoding()
            case cl.Over() as over:
                self._end_of_life(over)
        return found

    # ------------------------------------------------------------------ pushes

    def _resume_encoding(self) -> None:
        """Encodes the frozen push in the background, unless there is none, or all ranks are known to have encoded
        it.
        """
        push = self.machine.freezing
        if push is None or self._closing.is_set() or self._encoding == push:
            return  # the last commit of a rank that leaves is told after its farewell
        self._encoding = push

        def wanted() -> bool:
            return self._encoding == push and not self._closing.is_set()

        def done(part: Part, manifest: str) -> bool:
            # It is served already. Nobody asks for it before it is offered, which is when the next commit is known.
            with self._changed:
                if not wanted():
                    return push in self._model.pushes
                self._encoded = (push, part, manifest)
                self._changed.notify_all()
                return True

        def failed(error: Exception) -> None:
            _log.error("push %s could not be encoded", push, exc_info=error)
            with self._changed:
                words = str(error) if isinstance(error, ChaosError) else repr(error)
                self._failed = f"rank {self._me} could not encode push {push}: {words}"
                self._changed.notify_all()

        machine = self.machine
        self._exchange.encode(push, machine.base, machine.covering, wanted=wanted, done=done, failed=failed)

    def _seal(self, push: PushId, manifest: str) -> None:
        assert self._encoded is not None
        _, part, own = self._encoded
        if own != manifest:
            raise StateError(f"push {push} is {own} at rank {self._me}, and {manifest} at the first one")
        with self._changed:
            self._encoding = self._encoded = None
            self._model.pushes[push] = part
        self._exchange.serve()  # else there was nobody yet who could ask

    def _drop_encoded(self) -> None:
        """Drops a push that this rank has encoded but that no commit has confirmed as encoded by all."""
        with self._changed:
            encoded, self._encoding, self._encoded = self._encoded, None, None
        if encoded is not None:
            self._exchange.free(encoded[0])

    # ------------------------------------------------------------------ versions

    def _sought(self) -> Sought | None:
        """Returns the version to fetch and from whom: from ranks that have it, else, at the first rank only, from the
        followers; None if no version is wanted.
        """
        state = self._state
        wanted = state.machine.fetching if state is not None else NO_VERSION
        if state is None or wanted == NO_VERSION:
            return None
        others = tuple(rank for rank in state.having if rank != self._me)

        if others:
            return Sought(wanted, state.machine, lambda attempt: self._copy(wanted, attempt, others))
        get = partial(self._exchange.fetch, wanted)
        return Sought(wanted, state.machine, get) if self._first and self._exchange.holders else None

    def _missed(self, version: VersionId) -> None:
        """Queues, at the first rank, the news that a version is not served any more, unless that news is queued
        already.
        """
        event = cl.Missed(version)
        with self._changed:
            if self._first and event not in self._news:
                self._news.append(event)
                self._changed.notify_all()

    def _copy(self, wanted: VersionId, attempt: Attempt, ranks: Sequence[str]) -> None:
        part = attempt.part
        name = version_name(wanted, part.shard, part.format.name)
        for donor in self._inner.ways(ranks):
            try:
                fetch(name, [donor], self._inner.dial, [part.data], deadline_s=FETCH_S, abandoned=attempt.abandoned)
                return
            except NoDonorError as error:
                _log.debug("version %s is not at %s: %s", wanted, donor.member, error)
        raise NoDonorError(f"no rank of {', '.join(ranks)} gives version {wanted}")

    # ------------------------------------------------------------------ the first rank

    def _attend(self) -> None:
        """Makes this rank the first one: from then on it talks to the leader."""
        with self._changed:
            self._first = self._log.tells = True
            self._news.clear()
            self._changed.notify_all()

        self._attendant = Attendant(
            self.options, self._secret, self._settings.heartbeat_s, self, hello=self._present_hello
        )
        self._attendant.start()

    def _present_hello(self) -> ClusterHello:
        assert self._hello is not None
        return self._hello

    def happened(self, event: RankNews) -> None:
        """Queues news for the machines. Any thread."""
        if isinstance(event, fx.Disconnected):
            self._log.away("its stream has ended")
        with self._changed:
            self._news.append(event)
            self._changed.notify_all()

    def refused(self, error: ChaosError) -> None:
        """Notes why the server will not let this cluster in, or cannot be had. Any thread."""
        with self._changed:
            self._failed = str(error)
            self._changed.notify_all()

    @property
    def was_in(self) -> bool:
        """Whether the cluster has taken part in the job, in its present incarnation or in one that was dismissed."""
        hello = self._present_hello()
        return hello.resume is not None or hello.newest != NO_VERSION

    @property
    def job_id(self) -> str:
        """Hash that names the job; "" until the leader has let this cluster in."""
        return self._present_hello().job_id

    # ------------------------------------------------------------------ what is judged

    def show_base(self) -> None:
        """Replaces the model's parameters by those of the base until `show_own`; nothing may be trained in between."""
        self._model.show_base()

    def show_own(self) -> None:
        """Undoes `show_base`: the model has its trained parameters again. Idempotent."""
        self._model.show_own()

    # ------------------------------------------------------------------ the end

    def finish(self, reason: str) -> None:
        """Notes that the training loop of all ranks has ended; ranks call `meeting` until `over` has a reason."""
        self._reason = reason

    def leave(self) -> None:
        """Notes that the cluster should leave the job; ranks call `meeting` until `over` has a reason. Only the first
        rank's request counts.
        """
        self.leaves = True

    def _end_of_life(self, over: cl.Over) -> None:
        if over.failed and self.machine.was_in:
            raise put_out(self.options.name, over.reason, was_in=True)
        if not over.again:
            return
        for push in set(self._model.pushes) - set(self.machine.kept):
            self._exchange.free(push)
        self._exchange.drop()
        self.state.having = ()
        self._drop_encoded()
        self._hello = self.machine.anew().hello()
        if self._attendant is not None:
            self._leave_off()
            self._attend()

    def _leave_off(self) -> None:
        attendant, self._attendant = self._attendant, None
        self._first = self._log.tells = False
        if attendant is not None:
            attendant.close()

    def close(self) -> None:
        """Ends threads and connections. Idempotent."""
        if self._state is not None:
            self._fit.over()
            self._say_known()
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._leave_off()
        self._exchange.close()
        self._log.console.close()
        self._events.close()


__all__ = ["ElasticCluster", "InnerJob"]
