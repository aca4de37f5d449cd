"""State machine of a cluster in outer sync: decides when to freeze, offer and adopt, and which pushes' bytes to free.

Theory of operation. A cluster trains from a *base*, the version that it adopted last. After enough inner steps it
*freezes* what it gained, offers that as a push, and trains on. One push is open at a time, offered until the chain
answers (O10a). It adopts when all its pushes are answered, and then the newest version that is served, at or after the
last answer (O8): what it trained since the freezing stays, on top of the new base. A rejection takes the version
outright and discards that, too. After a void its base stands, and the next push covers the progress of both.

Where steps are short, many of them would be trained while one version is under way, on a base that gets older and
older. So a cluster trains at most `ahead_steps` beyond a push, and then waits for the version (O9a). While the server
is away, or waits for its disks (O5), it trains on.

An accepted push is *kept*, since followers may have to fetch it again, until the leader frees it (O5). A rollback makes
kept pushes unanswered again: they are offered anew, in order, before the open one (O5a).

When its own loop is over it pushes what is left, and once all is answered and adopted it says its verdict, until the
job ends. The end may come in the midst of a round. Then the cluster takes the job's last version outright, as all do;
what it trained beyond that is discarded. What a push covers is counted here; the bytes are the shell's. What the leader
said is said again, so hearing it twice changes nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from chaos_lightning.outer.rules.effects import Connected, Disconnected, OuterNote, Say, TimePassed, Told
from chaos_lightning.outer.rules.messages import (
    Beat,
    ClusterHello,
    Dismissed,
    Eldest,
    Freed,
    FromCluster,
    Goodbye,
    Granted,
    Holder,
    Holders,
    JobFinished,
    LoopEnded,
    Offered,
    OnDisk,
    Paced,
    PushAnswered,
    Reopened,
    Served,
    ToCluster,
    Welcomed,
)
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    AHEAD,
    NO_VERSION,
    TICKS,
    Agreement,
    Covered,
    IncarnationId,
    JobProgress,
    Offer,
    ProcessPlace,
    PushAnswer,
    PushId,
    VersionId,
)
from chaos_lightning.planning.batches import UNTOLD
from chaos_lightning.protocol.spans import count, normalise, subtract
from chaos_lightning.protocol.types import Span

# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Trained:
    """News that inner steps were made; `covers` are the positions of the data that they used."""

    samples: int
    covers: tuple[Covered, ...] = ()
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Frozen:
    """News that the content of this push is fixed."""

    push: PushId
    manifest: str


@dataclass(frozen=True, slots=True)
class Got:
    """News that the cluster (all its ranks) has fetched this version."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Missed:
    """News that this version cannot be fetched: a follower stopped serving it."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """News that the user asks the cluster to leave, politely."""


@dataclass(frozen=True, slots=True)
class LoopOver:
    """News that the cluster's training loop has ended, so that it wants the job to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class AtRest:
    """News that training is between two steps."""


ClusterEvent = (
    Told | Connected | Disconnected | TimePassed | Trained | Frozen | Got | Missed | LeaveAsked | LoopOver | AtRest
)

# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Freeze:
    """Order to fix the content of this push before anything else is trained: the difference to the base, or with
    NO_VERSION the parameters. The answer is the event `Frozen`.

    `Frozen` may come later.
    """

    push: PushId
    base: VersionId


@dataclass(frozen=True, slots=True)
class FetchVersion:
    """Order to fetch this version from all followers, and then to feed `Got`; a later order replaces this one."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Adopt:
    """Order to take this version as the base; `outright`: also as the parameters, so that all progress since the
    freezing is discarded.
    """

    version: VersionId
    outright: bool


@dataclass(frozen=True, slots=True)
class Settle:
    """Order to update the residual by the answer to this push."""

    push: PushId
    answer: PushAnswer


@dataclass(frozen=True, slots=True)
class Free:
    """Order to drop the bytes of this push, which no follower needs any more."""

    push: PushId


@dataclass(frozen=True, slots=True)
class ReachHolders:
    """Order to connect to these followers, in shard order, which hold the shards now: versions are fetched from them,
    and they fetch pushes.
    """

    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class TakeLast:
    """Order to take the job's last version as base and parameters, since the job has ended; it has been fetched, or is
    the base already.

    Attributes:
        version: Last version of the job.
        steps: Number of inner steps that are not in that version and are lost.
        samples: Number of samples that these steps used.
    """

    version: VersionId
    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Over:
    """News that this incarnation has ended.

    Attributes:
        reason: Reason for the end.
        again: Whether the process comes in as a new incarnation.
        failed: Whether the cluster's part ends without the job's last version: its model is not the job's.
    """

    reason: str
    again: bool
    failed: bool = False


ClusterEffect = Say | Freeze | FetchVersion | Adopt | Settle | Free | ReachHolders | TakeLast | Over | OuterNote


class Phase(enum.StrEnum):
    """Phase of a cluster's part in the job."""

    WAITING = "waiting"
    TRAINING = "training"
    ENDING = "ending"
    GONE = "gone"


@dataclass(slots=True)
class Unpushed:
    """Samples, inner steps and positions that were trained and that no push covers yet."""

    samples: int = 0
    steps: int = 0
    spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    """Positions by epoch, normal."""

    def add(self, samples: int, steps: int, covers: Iterable[Covered]) -> None:
        """Adds what was just trained: samples, steps and positions."""
        self.samples += samples
        self.steps += steps
        for each in covers:
            self.spans[each.epoch] = normalise([*self.spans.get(each.epoch, ()), *each.spans])

    @property
    def covers(self) -> tuple[Covered, ...]:
        """Positions in the form in which an offer lists them."""
        return tuple(Covered(epoch, spans) for epoch, spans in sorted(self.spans.items()))


def reckon(job: JobProgress, samples: int, steps: int, usual: int, paced: int) -> JobProgress:
    """Returns an estimate of the job's progress: that at a cluster's base, and what the cluster has trained since.

    Args:
        job: Progress of the job at the cluster's base.
        samples: Samples that the cluster has trained since.
        steps: Inner steps that the cluster has made since.
        usual: Steps of a usual cluster from one push to the next.
        paced: Steps of this cluster from one push to the next.
    """
    ticks = steps * TICKS * usual // max(1, paced)
    return JobProgress(job.samples + samples, job.ticks + ticks, job.epoch)


LAST_S = 60.0
"""Seconds after the job's end for which a cluster tries to get the last version; followers serve it as long."""
_AWAY, _CONNECTED, _WELCOME = range(3)
"""States of a cluster's stream to the leader; a welcome is an answer to its hello."""
_GIVEN = frozenset({"agreement", "ahead_steps", "_hello", "_out", "_resting"})
"""Attributes that are given to a machine, or live during one event only; `facts` leaves them out."""


class ClusterMachine:
    """State machine of one incarnation of a cluster. Its caller must feed a TimePassed for each heartbeat.

    Args:
        name: Name of the cluster.
        place: Description, for people, of the place where it runs.
        nonce: Random text, drawn at the start of its process.
        agreement: Facts that it must have in common with the other clusters.
        process: Process of its first rank.
        overlap: Whether it trains on while a push is under way; else it waits for the answer and the version.
        ahead_steps: With overlap: largest number of steps beyond a push, while the server is there; 0: as many as from
            one push to the next.
    """

    def __init__(
        self,
        name: str,
        place: str,
        nonce: str,
        agreement: Agreement,
        *,
        process: ProcessPlace = ProcessPlace(),
        overlap: bool = True,
        ahead_steps: int = 0,
    ) -> None:
        self.agreement = agreement
        self._hello = ClusterHello(name, place, nonce, 0, None, NO_VERSION, NO_VERSION, agreement, process)
        self.job_id = ""
        """Name of the job that the cluster was let into; "" before."""
        self.ahead_steps = ahead_steps if overlap else None
        """Number of steps that the cluster may train beyond a push; None without overlap."""
        self.inner_steps = self._usual_steps = OuterSettings.of_words(agreement.settings).inner_steps
        """Least number of inner steps from one push to the next."""
        self.phase, self.term = Phase.WAITING, 0
        self.incarnation: IncarnationId | None = None
        self.oldest: IncarnationId | None = None
        """Oldest incarnation that is in, as the leader told last."""
        self.base = NO_VERSION
        self.newest = NO_VERSION
        """Newest version that the cluster was told of."""
        self.open: Offer | None = None
        """Push that is frozen and not answered; None if there is none."""
        self.kept: dict[PushId, Offer] = {}
        """Pushes that were accepted once, and are not freed."""
        self.leased: dict[int, tuple[Span, ...]] = {}
        self.unpushed = Unpushed()
        self.job = JobProgress()
        """Progress of the job with the base."""
        self.rate, self.step_rate, self.batches = 0.0, 0.0, UNTOLD
        """Samples and steps that the cluster trains per second, and positions of shared data that it takes at once."""
        self.leaving, self.verdict = False, ""
        """Whether the cluster was asked to leave; why its own loop is over."""
        self._reopened: list[PushId] = []
        """Kept pushes that are unanswered again, in order."""
        self._freezing: PushId | None = None
        self._covered = Unpushed()
        """Training that the push covers which is being frozen."""
        self._next = 1
        self._due: VersionId | None = None
        """Version at or after which one is to be adopted, as all pushes are answered; None if none is due."""
        self._outright = False
        self._served = NO_VERSION
        self._durable = NO_VERSION
        self._progress: dict[VersionId, JobProgress] = {}
        """Progress of the job with each version that may be adopted."""
        self._in: dict[PushId, VersionId] = {}
        """Version that holds each kept push."""
        self._fetching = self._here = NO_VERSION
        self._last: tuple[VersionId, str, int] | None = None
        """Last version of the job once it is over, why it ended, and how many heartbeats may go by until the version is
        here.
        """
        self._resting = True
        self._stream, self._whole = _AWAY, True
        """State of the stream to the leader, and whether all followers are there, as told last."""
        self._founded = True
        self._out: list[ClusterEffect] = []

    # ------------------------------------------------------------------ questions

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return self._hello.cluster

    @property
    def nonce(self) -> str:
        """Number that was drawn at the start of the cluster's process."""
        return self._hello.nonce

    @property
    def overlap(self) -> bool:
        """Whether the cluster trains on while a push travels."""
        return self.ahead_steps is not None

    def free_spans(self) -> dict[int, tuple[Span, ...]]:
        """Returns the leased positions that the cluster has not trained yet, by epoch."""
        found = {}
        for epoch, spans in self.leased.items():
            left = subtract(spans, self._used(epoch))
            if left:
                found[epoch] = left
        return found

    def _used(self, epoch: int) -> tuple[Span, ...]:
        used = [*self.unpushed.spans.get(epoch, ()), *self._covered.spans.get(epoch, ())]
        for offer in self._unanswered():
            used += [span for each in offer.covers if each.epoch == epoch for span in each.spans]
        return normalise(used)

    def hello(self) -> ClusterHello:
        """Returns the first message on a stream to a leader."""
        return replace(
            self._hello,
            term=self.term,
            resume=self.incarnation,
            base=self.base,
            newest=self.newest,
            kept=tuple(sorted(self.kept)),
            job_id=self.job_id,
            fetching=max(self._fetching, self._here),
            answered=self._next - 1 - (self._freezing is not None or self.open is not None),
        )

    @property
    def freezing(self) -> PushId | None:
        """Push that is being frozen; None if there is none."""
        return self._freezing

    @property
    def fetching(self) -> VersionId:
        """Version that is being fetched; `NO_VERSION` if none is."""
        return self._fetching

    def facts(self) -> dict[str, Any]:
        """Returns the whole state of the machine, for `restore` at a machine with the same arguments: the objects
        themselves, no copies.
        """
        return {name: value for name, value in vars(self).items() if name not in _GIVEN}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Takes over the state that another machine's `facts` returned; its objects belong to this machine from then
        on.
        """
        assert facts.keys() == self.facts().keys()
        vars(self).update(facts)

    @property
    def was_in(self) -> bool:
        """Whether the cluster has taken part in the job, as this incarnation or as an earlier one."""
        return self.incarnation is not None or self.newest != NO_VERSION

    @property
    def may_train(self) -> bool:
        """Whether an inner step may begin."""
        return self.phase is Phase.TRAINING and not self.leaving and not self.verdict and not self.waits

    @property
    def since_base(self) -> tuple[int, int]:
        """(samples, inner steps) that the cluster has trained since its base and no round has accepted."""
        samples = self.unpushed.samples + self._covered.samples
        steps = self.unpushed.steps + self._covered.steps
        if self.open is not None:
            samples, steps = samples + self.open.samples, steps + self.open.steps
        return samples, steps

    @property
    def ahead(self) -> tuple[int, int]:
        """(samples, inner steps) that are not in the base: those of `since_base`, and those of accepted pushes whose
        version is not adopted yet.
        """
        samples, steps = self.since_base
        for push, offer in self.kept.items():
            if self._in.get(push, self.base) > self.base:
                samples, steps = samples + offer.samples, steps + offer.steps
        return samples, steps

    @property
    def reckoned(self) -> JobProgress:
        """Progress of the job as this cluster estimates it: that of its base, and what it has trained since, scaled by
        its pace.
        """
        return reckon(self.job, *self.ahead, self._usual_steps, self.inner_steps)

    @property
    def waits_for(self) -> str:
        """Event for which the cluster waits before it trains on or may leave, in words."""
        if self.incarnation is None:
            return "the parameter server to let it in"
        if self._last is not None:
            return "the job's last version"
        if self.phase is not Phase.TRAINING:
            return "the newest version" if self.base != NO_VERSION or self.fetching != NO_VERSION else "a first version"
        if self.overlap and self.waits:
            return f"the next version: it is {self.unpushed.steps} steps ahead of its last push (ahead_steps)"
        if self.open is not None:
            return f"the answer to push {self.open.push}"
        if self.verdict:
            return "the end of the job: other clusters train, or its last version is being written"
        return "samples to train, or the last version to be durable"

    @property
    def at_risk(self) -> int:
        """Number of this cluster's inner steps that no durable version contains."""
        kept = [offer for push, offer in self.kept.items() if self._in.get(push, self.newest) > self._durable]
        return self.since_base[1] + sum(offer.steps for offer in kept)

    @property
    def covering(self) -> Unpushed:
        """Samples, steps and positions that the push being frozen covers."""
        return self._covered

    @property
    def may_be_ahead(self) -> int:
        """Number of inner steps that the cluster may train beyond an unanswered push (O9a)."""
        return 0 if self.ahead_steps is None else self.ahead_steps or self.inner_steps

    @property
    def waits(self) -> bool:
        """Whether no step may begin because a push is unanswered or its version not adopted yet."""
        under_way = self._freezing is not None or bool(self._unanswered()) or self._due is not None
        if not under_way or (self.overlap and not self._versions_come):
            return False
        return self.unpushed.steps >= self.may_be_ahead

    @property
    def _versions_come(self) -> bool:
        """Whether new versions are possible: leader and followers are connected, and no full disk delays the next
        version (O5).
        """
        there = self._stream == _WELCOME and self._whole
        return there and self.newest.number - self._durable.number < AHEAD

    @property
    def dry(self) -> bool:
        """Whether the cluster trains leased positions of shared data, and has none left."""
        return self.agreement.length > 0 and not self.free_spans()

    # ------------------------------------------------------------------ events

    def on(self, event: ClusterEvent, *, resting: bool = True) -> list[ClusterEffect]:
        """Handles one event; returns the effects in order.

        Args:
            event: Event to handle.
            resting: Whether the inner training is between two steps, and will be until the effects are carried out.
                Freeze and Adopt come only then.

        Raises:
            ValueError: Some positions were trained, or are leased, twice.
        """
        self._out, self._resting = [], resting
        if self.gone:
            return []
        match event:
            case Connected():
                self._stream = _CONNECTED
                self._say(self.hello())
            case Disconnected():
                self._stream = _AWAY
            case Told(message):
                self._hear(message)  # type: ignore[arg-type]
            case Trained(samples, covers, steps):
                self.unpushed.add(samples, steps, covers)
            case Frozen(push, manifest):
                self._on_frozen(push, manifest)
            case Got(version):
                self._on_got(version)
            case Missed(version):
                self._on_missed(version)
            case LeaveAsked():
                self.leaving = True
            case LoopOver(reason):
                self.verdict = reason
            case AtRest():
                pass
            case TimePassed():
                if self._last is not None:
                    self._last = (*self._last[:2], self._last[2] - 1)
                self._beat()
                self._offer()
        if self._last is not None:
            self._take_last(*self._last)
        elif not self.gone:
            if resting:
                self._take_got()
            self._turn()
        return self._out

    @property
    def gone(self) -> bool:
        """Whether this incarnation has ended."""
        return self.phase is Phase.GONE

    def _say(self, message: FromCluster) -> None:
        if self._stream != _AWAY:
            self._out.append(Say(message))

    def _beat(self) -> None:
        if self.incarnation is not None and self._stream == _WELCOME:
            left = sum(count(spans) for spans in self.free_spans().values())
            samples, leaving = self.unpushed.samples, self.leaving or bool(self.verdict)
            coming = max(self._fetching, self._here)
            self._say(
                Beat(
                    self.incarnation, self.rate, self.step_rate, self.base, left, samples, leaving, coming, self.batches
                )
            )
            if self.verdict and self._settled:
                self._say(LoopEnded(self.incarnation, self.verdict))

    def _hear(self, message: ToCluster) -> None:
        if message.term < self.term:
            return
        self.term = message.term
        match message:
            case Welcomed():
                self._founded, self.job_id = message.founded, message.job_id
                if not message.founded:  # or not any more
                    self._served = self._fetching = NO_VERSION
                self._on_welcome(message.incarnation, message.first)
                self._on_served(message.version, message.progress)
            case Holders(_, holders):
                self._whole = all(holder.endpoint for holder in holders)
                self._out.append(ReachHolders(holders))
            case Eldest(_, incarnation):
                self.oldest = incarnation
            case Paced(_, steps, _):
                self.inner_steps = steps
            case PushAnswered():
                self._on_answer(message)
            case Served(_, version, progress):
                self._on_served(version, progress)
            case Freed(_, pushes):
                for push in pushes:
                    if self.kept.pop(push, None) is not None:
                        self._in.pop(push, None)
                        self._out.append(Free(push))
            case OnDisk(_, version):
                self._durable = max(self._durable, version)
            case Reopened(_, version, pushes):
                self.newest = max(self.newest, version)
                self._reopened = sorted(p for p in pushes if p in self.kept)
                for push in self._reopened:
                    self._in.pop(push, None)
                self._offer()
            case Granted(_, leased):
                self.leased = {each.epoch: normalise(each.spans, what="leases") for each in leased}
            case Dismissed(_, reason, again):
                self._end(reason, again=again, failed=not again)
            case JobFinished(_, version, reason):
                self._on_finished(version, reason)

    def _on_finished(self, version: VersionId, reason: str) -> None:
        if version == NO_VERSION:
            self._end(f"the job has ended without a version: {reason}", again=False, failed=True)
        elif not self.was_in:  # it may be about to begin the next job on the same server
            self._end(f"the job has ended with {version}: {reason}", again=False, failed=True)
        elif self._last is None:
            beats = math.ceil(LAST_S / OuterSettings.of_words(self.agreement.settings).heartbeat_s)
            self.phase, self._last = Phase.ENDING, (version, reason, beats)
            if version not in (self.base, self._here, self._fetching):
                self._fetching = version
                self._out.append(FetchVersion(version))

    def _take_last(self, version: VersionId, reason: str, beats: int) -> None:
        if self.gone or not self._resting:
            return
        if version in (self.base, self._here):
            samples, steps = self.since_base
            for offer in self._opened:  # not in `since_base`: the base may hold them, so far as `reckoned` goes
                samples, steps = samples + offer.samples, steps + offer.steps
            self.base, self.open, self._freezing = version, None, None
            self.unpushed, self._covered = Unpushed(), Unpushed()
            self.job = self._progress.get(version, self.job)
            self._out.append(TakeLast(version, steps, samples))
            self._end(reason, again=False)
        elif beats <= 0:
            self._end(f"{reason}. Its last version, {version}, could not be had", again=False, failed=True)

    def _end(self, reason: str, *, again: bool, failed: bool = False) -> None:
        self.phase = Phase.GONE
        self._out.append(Over(reason, again, failed))

    def _on_welcome(self, incarnation: IncarnationId, first: int) -> None:
        self._stream, self.leased = _WELCOME, {}
        if self.incarnation is None:
            self.incarnation, self._next = incarnation, first
        if incarnation == self.incarnation:
            self._offer()
        else:  # the hello did not name ours: it was said before the first welcome was taken in, and ours is over
            self._end(f"{self.incarnation} was removed, and let in again as {incarnation}", again=True)

    def _on_served(self, version: VersionId, progress: JobProgress) -> None:
        self._progress[version] = progress
        if version == self.base:
            self.job = progress
        self._served = max(self._served, version)
        self.newest = max(self.newest, version)

    # ------------------------------------------------------------------ pushes

    @property
    def _opened(self) -> list[Offer]:
        """Pushes that a rollback has made unanswered again and whose bytes the cluster still has."""
        return [self.kept[p] for p in self._reopened if p in self.kept]

    def _unanswered(self) -> list[Offer]:
        """Returns the unanswered pushes in the order of their numbers, beginning with those that a rollback has
        reopened.
        """
        return [*self._opened, self.open] if self.open is not None else self._opened

    def _offer(self) -> None:
        """Offers the first unanswered push to the leader; repeated with each heartbeat, as a message may get lost.

        Nothing is offered while a push is being frozen. The chain could reject the older one meanwhile, which drops the
        residual that the new push takes in. Ranks that come in then would encode the new push without it.
        """
        waiting = self._unanswered() if self._freezing is None else []
        if waiting and self._stream == _WELCOME:
            self._say(Offered(waiting[0]))

    def _on_frozen(self, push: PushId, manifest: str) -> None:
        if push != self._freezing:
            return  # of the incarnation before, which is over
        self._freezing = None
        done, self._covered = self._covered, Unpushed()
        if self.base == NO_VERSION:
            self.open = Offer(push, NO_VERSION, manifest, 0, 0)
        else:
            self.open = Offer(push, self.base, manifest, done.samples, done.steps, done.covers)
        self._offer()

    def _on_answer(self, message: PushAnswered) -> None:
        waiting = self._unanswered()
        if not waiting or waiting[0].push != message.push:
            return  # heard before
        offer = waiting[0]
        reopened = bool(self._reopened) and self._reopened[0] == offer.push
        if reopened:
            del self._reopened[0]
        else:
            self.open = None
        self._founded = True
        self.newest = max(self.newest, message.version)
        self._out.append(Settle(offer.push, message.answer))
        match message.answer:
            case PushAnswer.ACCEPTED:
                self.kept[offer.push] = offer
                self._in[offer.push] = message.version
                self._due = message.version
                for each in offer.covers:
                    self.leased[each.epoch] = subtract(self.leased.get(each.epoch, ()), each.spans)
            case PushAnswer.REJECTED:
                self._drop(offer)
                self._due, self._outright, self.leased = message.version, True, {}
                self.unpushed = Unpushed()
            case PushAnswer.VOID:
                self._drop(offer)
                if offer.base != NO_VERSION:  # what it covered, the next one covers, from a newer base if there is one
                    self.unpushed.add(offer.samples, offer.steps, offer.covers)
                    self._due = self.newest if self.newest > self.base else self._due
        self._offer()

    def _drop(self, offer: Offer) -> None:
        self.kept.pop(offer.push, None)
        self._in.pop(offer.push, None)
        self._out.append(Free(offer.push))

    # ------------------------------------------------------------------ versions

    def _on_got(self, version: VersionId) -> None:
        if version != self._fetching:
            return
        self._fetching, self._here = NO_VERSION, version

    def _on_missed(self, version: VersionId) -> None:
        """Gives up the fetch of a version that is not served any more; but the job's last version is fetched until it
        has arrived.
        """
        if version == self._fetching and self._last is None:
            self._fetching = NO_VERSION

    def _take_got(self) -> None:
        """Adopts the version that has been fetched, if that is allowed now."""
        version, self._here = self._here, NO_VERSION
        if version == NO_VERSION:
            return
        if self._unanswered() or self._freezing is not None or version < self.base:
            return  # a push was frozen meanwhile: what it is a delta to stays the base until it is answered
        if not self._may_adopt or (self._due is not None and version < self._due):
            return
        outright = self._outright or self.base == NO_VERSION
        self._due, self._outright = None, False
        self.base, self.newest = version, max(self.newest, version)
        self.job = self._progress.get(version, self.job)
        self._progress = {v: p for v, p in self._progress.items() if v > version}
        if outright:
            self.unpushed = Unpushed()
        self.phase = Phase.TRAINING
        self._out.append(Adopt(version, outright))
        self._beat()  # who waits for all that train waits for this one from now on

    def _turn(self) -> None:
        if self.incarnation is None or (self._stream != _WELCOME and self.phase is Phase.WAITING):
            return
        if self._freezing is None and not self._unanswered():
            self._turn_idle()
        if self.leaving and self._resting and self._may_go():  # else a step is under way that it will hear of
            self._say(Goodbye(self.incarnation, "it was asked to leave"))
            self._end("it was asked to leave", again=False)

    def _turn_idle(self) -> None:
        """Orders what is due while no push is unanswered: to freeze the next push, or to fetch a version.

        A fetch that is under way goes on though newer versions come: where a fetch takes longer than a round, none
        would ever end. What is here waits for the end of an inner step, and is adopted first: heartbeats name one
        version that is to be the base, and the chain keeps that one (O1a).
        """
        # Enough is pushed from the base that there is: where newer ones come all the time, it would never be.
        assert self.incarnation is not None
        founds = self.base == NO_VERSION and self._stream == _WELCOME and not self._founded
        hurries = self.dry or self.leaving or bool(self.verdict)
        enough = self.unpushed.steps >= self.inner_steps or (self.unpushed.steps > 0 and hurries)
        ready = self._due is None and self._resting
        if ready and (founds or (self.base != NO_VERSION and enough)):
            self._freezing = PushId(self.incarnation, self._next)
            self._next += 1
            self._covered, self.unpushed = self.unpushed, Unpushed()
            self._fetching = NO_VERSION  # once the push is answered, a newer one is due
            self._out.append(Freeze(self._freezing, self.base))
            return
        coming = self._serves(self._fetching) or self._serves(self._here)
        if self._serves(self._served) and not coming and self._may_adopt:
            self._fetching = self._served
            self._out.append(FetchVersion(self._served))
            self._beat()  # so that it is served until it is here

    def _serves(self, version: VersionId) -> bool:
        """Returns whether this version is new enough to be adopted next."""
        return version > self.base and (self._due is None or version >= self._due)

    @property
    def _may_adopt(self) -> bool:
        """Whether a version may be adopted now. Without overlap a cluster adopts only between a push's answer and the
        next step.
        """
        return self.overlap or self._due is not None or not self.unpushed.steps

    @property
    def _settled(self) -> bool:
        """Whether nothing is left to push, to be answered, or to be adopted."""
        waiting = self._unanswered() or self._freezing is not None or self._due is not None
        return not waiting and not self.unpushed.steps

    def _may_go(self) -> bool:
        """Returns whether a durable version contains all that the cluster pushed, and nothing is left to push (O5b)."""
        return self._settled and all(version <= self._durable for version in self._in.values())

    def anew(self) -> Self:
        """Returns a new machine with which the same process joins again. Its old pushes stay available until they are
        freed (O3b, O5).
        """
        me = self._hello
        found = type(self)(
            self.name, me.place, self.nonce, self.agreement, process=me.process, overlap=self.overlap,
            ahead_steps=self.ahead_steps or 0,
        )  # fmt: skip
        found.job_id = self.job_id
        found.term, found.newest, found.verdict, found.leaving = self.term, self.newest, self.verdict, self.leaving
        found.kept, found._in, found.batches = dict(self.kept), dict(self._in), self.batches
        return found
