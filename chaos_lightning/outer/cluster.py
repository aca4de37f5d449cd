"""A cluster's side of outer sync, as a pure state machine: when it freezes, offers, adopts, and what it lets go of.

Theory of operation. A cluster trains from a *base*, the version that it adopted last. After enough inner steps it
*freezes* what it gained, offers that as a push, and trains on. One push is open at a time, offered until the chain
answers (O10a). It adopts when all its pushes are answered, and then the newest version that is served, at or after the
last answer (O8): what it trained since the freezing stays, on top of the new base. A rejection takes the version
outright and discards that, too. After a void its base stands, and the next push covers the progress of both.

An accepted push is *kept*, since followers may have to fetch it again, until the leader frees it (O5). A rollback makes
kept pushes unanswered again: they are offered anew, in order, before the open one (O5a).

What a push covers is counted here; the bytes are the shell's. Whatever the leader said is said again on each new
stream, so hearing it twice changes nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Self

from chaos_lightning.outer.effects import Connected, Disconnected, OuterNote, Say, TimePassed, Told
from chaos_lightning.outer.messages import (
    Beat,
    ClusterHello,
    Dismissed,
    Freed,
    FromCluster,
    Goodbye,
    Granted,
    JobFinished,
    Offered,
    OnDisk,
    PushAnswered,
    Reopened,
    Served,
    ToCluster,
    Welcomed,
)
from chaos_lightning.outer.types import NO_VERSION, IncarnationId, Offer, PushAnswer, PushId, VersionId
from chaos_lightning.protocol.spans import count, normalise, subtract
from chaos_lightning.protocol.types import Span

# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Trained:
    """An inner step was committed; `spans` are the positions of the epoch that it used."""

    samples: int
    epoch: int = 0
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Frozen:
    """The content of this push is fixed."""

    push: PushId
    manifest: str


@dataclass(frozen=True, slots=True)
class Got:
    """All ranks hold this version."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The user asks it to go, politely."""


ClusterEvent = Told | Connected | Disconnected | TimePassed | Trained | Frozen | Got | LeaveAsked

# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Freeze:
    """Fix this push, the delta to the base (NO_VERSION: the parameters themselves), then `Frozen`."""

    push: PushId
    base: VersionId


@dataclass(frozen=True, slots=True)
class FetchVersion:
    """Get this version from all followers, then `Got`; another one takes its place."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Adopt:
    """The base is this version from now on; `outright`: so are the parameters, and what was trained since is gone."""

    version: VersionId
    outright: bool


@dataclass(frozen=True, slots=True)
class Settle:
    """What becomes of the residual now that this push is answered (O10)."""

    push: PushId
    answer: PushAnswer


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody asks for the bytes of this push any more."""

    push: PushId


@dataclass(frozen=True, slots=True)
class Over:
    """This incarnation is over; `again`: the process comes in as a new one."""

    reason: str
    again: bool


ClusterEffect = Say | Freeze | FetchVersion | Adopt | Settle | Free | Over | OuterNote


class Phase(enum.StrEnum):
    """Where a cluster stands."""

    WAITING = "waiting"
    TRAINING = "training"
    GONE = "gone"


@dataclass(slots=True)
class Unpushed:
    """What was trained and no push covers yet."""

    samples: int = 0
    steps: int = 0
    epoch: int = 0
    spans: tuple[Span, ...] = ()


class ClusterMachine:
    """See the module. The shell feeds a TimePassed per heartbeat.

    Args:
        name: Of the cluster.
        place: Where it runs, for people.
        nonce: Drawn at the start of its process.
        inner_steps: From one push to the next, at least.
        shared: Whether clusters share the data, so that it trains only what it is leased.
    """

    def __init__(self, name: str, place: str, nonce: str, inner_steps: int, *, shared: bool = False) -> None:
        self.name = name
        self.place = place
        self.nonce = nonce
        self.inner_steps = inner_steps
        self.shared = shared
        self.phase = Phase.WAITING
        self.term = 0
        self.incarnation: IncarnationId | None = None
        self.base = NO_VERSION
        self.newest = NO_VERSION
        """The newest version that it was told of."""
        self.open: Offer | None = None
        """Frozen and not answered."""
        self.kept: dict[PushId, Offer] = {}
        """Accepted once, and not freed."""
        self.leased: dict[int, tuple[Span, ...]] = {}
        self.progress = Unpushed()
        self.rate = 0.0
        self.leaving = False
        self._reopened: list[PushId] = []
        """Kept, and unanswered again; in order."""
        self._freezing: PushId | None = None
        self._next = 1
        self._due: VersionId | None = None
        """All pushes are answered: a version at or after this one is to be adopted."""
        self._outright = False
        self._served = NO_VERSION
        self._durable = NO_VERSION
        self._in: dict[PushId, VersionId] = {}
        """Kept pushes: the version that holds each."""
        self._fetching = NO_VERSION
        self._connected = self._welcome = False
        self._founded = True
        self._out: list[ClusterEffect] = []

    # ------------------------------------------------------------------ questions

    def free_spans(self) -> dict[int, tuple[Span, ...]]:
        """Positions that it may train next, by epoch."""
        found = {}
        for epoch, spans in self.leased.items():
            left = subtract(spans, self._used(epoch))
            if left:
                found[epoch] = left
        return found

    def _used(self, epoch: int) -> tuple[Span, ...]:
        used = list(self.progress.spans) if self.progress.epoch == epoch else []
        for offer in (self.open, *(self.kept[p] for p in self._reopened)):
            if offer is not None and offer.epoch == epoch:
                used += offer.spans
        return normalise(used)

    @property
    def may_train(self) -> bool:
        """Whether an inner step may begin."""
        return self.phase is Phase.TRAINING and not self.leaving

    # ------------------------------------------------------------------ events

    def on(self, event: ClusterEvent) -> list[ClusterEffect]:
        """Takes one event in; returns the effects in order."""
        self._out = []
        if self.gone:
            return []
        match event:
            case Connected():
                self._connected, self._welcome = True, False
                self._say(
                    ClusterHello(self.name, self.place, self.nonce, self.term, self.incarnation, self.base, self.newest)
                )
            case Disconnected():
                self._connected = self._welcome = False
            case Told(message):
                self._hear(message)  # type: ignore[arg-type]
            case Trained():
                self._count(event)
            case Frozen(push, manifest):
                self._on_frozen(push, manifest)
            case Got(version):
                self._on_got(version)
            case LeaveAsked():
                self.leaving = True
            case TimePassed():
                self._beat()
        if not self.gone:
            self._turn()
        return self._out

    @property
    def gone(self) -> bool:
        """This incarnation is over."""
        return self.phase is Phase.GONE

    def _say(self, message: FromCluster) -> None:
        if self._connected:
            self._out.append(Say(message))

    def _beat(self) -> None:
        if self.incarnation is not None and self._welcome:
            left = sum(count(spans) for spans in self.free_spans().values())
            self._say(Beat(self.incarnation, self.rate, self.base, left, self.progress.samples, self.leaving))
            self._offer()

    def _hear(self, message: ToCluster) -> None:
        if message.term < self.term:
            return
        self.term = message.term
        match message:
            case Welcomed(_, incarnation, first, version, founded):
                self._founded = founded
                self._on_welcome(incarnation, first)
                self._on_served(version)
            case PushAnswered():
                self._on_answer(message)
            case Served(_, version):
                self._on_served(version)
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
                self.leased[leased.epoch] = leased.spans
            case Dismissed(_, reason, again):
                self._end(reason, again=again)
            case JobFinished(_, _, reason):
                self._end(reason, again=False)

    def _end(self, reason: str, *, again: bool) -> None:
        self.phase = Phase.GONE
        self._out.append(Over(reason, again))

    def _on_welcome(self, incarnation: IncarnationId, first: int) -> None:
        self._welcome, self.leased = True, {}
        if self.incarnation is None:
            self.incarnation, self._next = incarnation, first
        self._offer()

    def _on_served(self, version: VersionId) -> None:
        self._served = max(self._served, version)
        self.newest = max(self.newest, version)

    # ------------------------------------------------------------------ pushes

    def _unanswered(self) -> list[Offer]:
        """In the order of their numbers: kept ones that a rollback opened again come first."""
        opened = [self.kept[p] for p in self._reopened if p in self.kept]
        return [*opened, self.open] if self.open is not None else opened

    def _offer(self) -> None:
        """The first that is unanswered; said again with each heartbeat, as any word may be lost."""
        waiting = self._unanswered()
        if waiting and self._welcome:
            self._say(Offered(waiting[0]))

    def _count(self, trained: Trained) -> None:
        if trained.spans and self.progress.samples and trained.epoch != self.progress.epoch:
            raise ValueError(f"a step of epoch {trained.epoch}, and no push covers what was trained of the one before")
        self.progress.samples += trained.samples
        self.progress.steps += 1
        self.progress.epoch = trained.epoch
        self.progress.spans = normalise([*self.progress.spans, *trained.spans])

    def _on_frozen(self, push: PushId, manifest: str) -> None:
        self._freezing = None
        done = self.progress
        if self.base == NO_VERSION:
            self.open = Offer(push, NO_VERSION, manifest, 0, 0)
        else:
            self.open = Offer(push, self.base, manifest, done.samples, done.steps, done.epoch, done.spans)
        self.progress = Unpushed(epoch=done.epoch)
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
                left = subtract(self.leased.get(offer.epoch, ()), offer.spans)
                self.leased[offer.epoch] = left
            case PushAnswer.REJECTED:
                self._drop(offer)
                self._due, self._outright, self.leased = message.version, True, {}
                self.progress = Unpushed()
            case PushAnswer.VOID:
                self._drop(offer)
                if offer.base != NO_VERSION:
                    self._cover(offer)
        self._offer()

    def _drop(self, offer: Offer) -> None:
        self.kept.pop(offer.push, None)
        self._in.pop(offer.push, None)
        self._out.append(Free(offer.push))

    def _cover(self, offer: Offer) -> None:
        """What a void push covered, the next one covers."""
        done = self.progress
        spans = normalise([*done.spans, *offer.spans])
        self.progress = Unpushed(done.samples + offer.samples, done.steps + offer.steps, offer.epoch, spans)

    # ------------------------------------------------------------------ versions

    def _on_got(self, version: VersionId) -> None:
        if version != self._fetching:
            return
        self._fetching = NO_VERSION
        if self._unanswered() or self._freezing is not None or version < self.base:
            return  # a push was frozen meanwhile: what it is a delta to stays the base until it is answered
        if self._due is not None and version < self._due:
            return
        outright = self._outright or self.base == NO_VERSION
        self._due, self._outright = None, False
        self.base, self.newest = version, max(self.newest, version)
        if outright:
            self.progress = Unpushed(epoch=self.progress.epoch)
        self.phase = Phase.TRAINING
        self._out.append(Adopt(version, outright))

    def _turn(self) -> None:
        if self.incarnation is None or (not self._welcome and self.phase is Phase.WAITING):
            return
        if self._freezing is None and not self._unanswered():
            self._turn_idle()
        if self.leaving and self._may_go():
            self._say(Goodbye(self.incarnation, "it was asked to leave"))
            self._end("it was asked to leave", again=False)

    def _turn_idle(self) -> None:
        """No push is under way: a version is fetched, or the next push is frozen."""
        newer = self._served > self.base and (self._due is None or self._served >= self._due)
        if newer:
            if self._fetching != self._served:
                self._fetching = self._served
                self._out.append(FetchVersion(self._served))
            return
        if self._due is not None:
            return  # its version is not served yet
        founds = self.base == NO_VERSION and self._welcome and not self._founded
        dry = self.shared and not self.free_spans()
        enough = self.progress.steps >= self.inner_steps or (self.progress.steps > 0 and (dry or self.leaving))
        if founds or (self.base != NO_VERSION and enough):
            assert self.incarnation is not None
            self._freezing = PushId(self.incarnation, self._next)
            self._next += 1
            self._out.append(Freeze(self._freezing, self.base))

    def _may_go(self) -> bool:
        """All that it pushed is in a durable version, and nothing is left to push (O5b)."""
        if self._unanswered() or self._freezing is not None or self.progress.steps or self._due is not None:
            return False
        return all(version <= self._durable for version in self._in.values())

    def anew(self) -> Self:
        """With which the same process comes in again: it holds nothing, but knows what it was told (O3b)."""
        found = type(self)(self.name, self.place, self.nonce, self.inner_steps, shared=self.shared)
        found.term, found.newest = self.term, self.newest
        return found
