"""Simulates the processes of an outer job: leader, followers, clusters, each a shell around its real state machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from chaos_lightning.outer.exchange.serving import ServedVersions
from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.cluster import ClusterMachine, Phase
from chaos_lightning.outer.rules.exact import ExactSum
from chaos_lightning.outer.rules.follower import FollowerMachine
from chaos_lightning.outer.rules.grid import Shard
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.messages import (
    ClusterHello,
    FollowerHello,
    Holders,
    Offered,
    OnDisk,
    PushAnswered,
    PushProduct,
    Welcomed,
)
from chaos_lightning.outer.rules.recut_steps import Steps, recut_steps
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    AHEAD,
    NO_VERSION,
    Agreement,
    Covered,
    Entry,
    Offer,
    PushAnswer,
    PushId,
    TensorSpec,
    VersionId,
)
from chaos_lightning.planning.batches import UNTOLD, Batches
from chaos_lightning.planning.fleet.kernel import Kernel
from chaos_lightning.protocol.spans import count, first_positions
from chaos_lightning.protocol.types import Span
from chaos_lightning.testing.world import SimClient, SimHost, SimStream
from lab.outer.blocks import grid_of, part_of
from lab.outer.content import Content
from lab.outer.oracle import Oracle, Violation, computed
from lab.outer.store import SAVING, ChainStore, Disk, digest_of

AGAIN_S = 0.05
ASK_S = 0.2
"""Seconds between two requests of a fetch for a part of a version."""
TICK_S = 0.1
SILENT_S = 1.2


class Cluster(Protocol):
    """Cluster of a simulated job, as far as other processes see it."""

    @property
    def bytes(self) -> dict[PushId, str]: ...

    def serves(self, push: PushId) -> bool: ...


class Job(Protocol):
    """Simulated job, as far as its processes see it."""

    kernel: Kernel
    store: ChainStore
    chain: OuterChain
    oracle: Oracle
    settings: OuterSettings
    went_back: bool
    leader: LeaderProcess | None
    followers: dict[str, FollowerProcess]
    disks: dict[str, Disk]
    machines: Machines
    codec: str
    residual: bool
    length: int
    shards: int
    sums: tuple[int, int]

    @property
    def clusters(self) -> Mapping[str, Cluster]: ...

    @property
    def host(self) -> SimHost | None: ...

    def number(self) -> int: ...

    def poisoned(self, push: PushId) -> bool: ...

    def stored(self, entry: Entry) -> None: ...

    def check_safe(self) -> None: ...

    def follower_died(self, name: str) -> None: ...

    def led(self, leader: LeaderProcess, reason: str, *, finished: bool) -> None: ...


TURNED = "turned"
"""Prefix of the names of clusters whose pushes are contrary to those of all others."""


@dataclass(frozen=True, slots=True)
class Machines:
    """State machines of a simulated job, and details of the processes around them; planted bugs replace some."""

    leader: Callable[[OuterChain, int, int], LeaderMachine] = LeaderMachine
    chain: type[OuterChain] = OuterChain
    store: type[ChainStore] = ChainStore
    follower: type[FollowerMachine] = FollowerMachine
    cluster: type[ClusterMachine] = ClusterMachine
    saving: tuple[str, ...] = SAVING
    """Steps of saving a file, in order."""
    syncs_first: bool = True
    """Whether a follower that starts syncs its folder before it tells which files it has."""
    compares: bool = True
    """Whether a file that is loaded is compared with its digest."""
    discards: bool = True
    """Whether inner steps trained before a rejection are gone after it."""
    merges: bool = True
    """Whether the base is the version as received: inner steps trained since the freezing stay progress (O9)."""
    residual: str = "answered"
    """Moment at which the residual changes (lab/outer/content.py): "answered", "sent", or "kept": not after a rejection
    (O10).
    """
    together: bool = True
    """Whether ranks of an elastic cluster adopt once all of them hold the version (O8)."""
    joiner_lacks: str = ""
    """Part of the state that newcomers of an elastic cluster do not get: "base", "frozen", "pushes" or "residual"."""
    early: bool = False
    """Whether a push of an elastic cluster counts as frozen, and is offered, at once (O8a)."""
    recut: Callable[[str, Sequence[str]], Steps] = recut_steps
    """Steps by which shard boundaries are changed (O15)."""
    cutting: tuple[str, ...] = SAVING
    """Steps of saving a file of a new shard, in order; steps behind "report" come after the record."""
    beside: bool = True
    """Whether files of new shards lie beside those of old ones."""
    spool: str = ""
    """Staged bytes that outlive their follower, told apart by "push" alone, or by "shard", too; "": they do not outlive
    it.
    """


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Plan of one cluster: its speed, its batches and its oddities.

    Attributes:
        name: Name of the cluster.
        start: Moment (virtual s) at which it starts.
        pace_s: Seconds of an inner step.
        overlap: Whether it trains while a push is under way.
        loop: Number of inner steps of its whole loop; 0: it has no end of its own.
        strange: Whether its model is another one.
        first_s: Seconds that it takes to fetch the version that it begins with, beside those that all take.
        fetch_s: Seconds that it takes to fetch each version, beside those that all take.
        fickle: Whether it offers other bytes under a number, too.
        ranks: Number of ranks at first, if it is an elastic job; 0: one process.
        batches: Sizes of its batches.
    """

    name: str
    start: float
    pace_s: float
    overlap: bool = True
    loop: int = 0
    strange: bool = False
    first_s: float = 0.0
    fetch_s: float = 0.0
    fickle: bool = False
    ranks: int = 0
    batches: Batches = UNTOLD


def agreement(settings: OuterSettings, length: int, codec: str = "bf16", prefix: str = "") -> Agreement:
    """Returns the agreement of a job with epochs of `length` positions; a prefix renames its tensor (another model)."""
    tensors = (TensorSpec(f"{prefix}w", "float32", (4 * 64,)),)
    return Agreement(tensors, block=64, codec=codec, length=length, settings=settings.words)


def said(words: str) -> float:
    """Returns a pseudo-random number from 0 to 1 that depends on `words` only, so that all shards compute the same."""
    return Random(words).random()


def turned(push: PushId) -> bool:
    """Returns whether a push is from a cluster whose pushes oppose those of all others (plans.py)."""
    return push.incarnation.cluster.startswith(TURNED)


def product(one: PushId, other: PushId) -> str:
    """Returns a made-up inner product of two pushes in one shard; largest for a push with itself."""
    if one == other:
        return ExactSum.of([1.0 + 0.2 * said(f"{one}")]).encode()
    sign = 1 if turned(one) == turned(other) else -1
    return ExactSum.of([sign * (0.4 * said(f"{min(one, other)} {max(one, other)}") - 0.005)]).encode()


def lean(push: PushId, version: VersionId) -> str:
    """Returns a made-up inner product of a push with a version's momentum."""
    size = said(f"{push} {version}")
    return ExactSum.of([-size if turned(push) else size - 0.5]).encode()


class LeaderProcess(SimHost):
    """Simulated leader process, from its start to its death."""

    repeats = 0.02

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job.kernel, name)
        self.job = job
        self.term = job.store.take_term()
        self.chain = job.machines.chain()
        for entry in job.store.entries:
            self.chain.follow(entry)
        self.machine = job.machines.leader(self.chain, self.term, job.shards)
        self.machine.summaries.every, self.machine.summaries.versions = job.sums
        self._deadline_s = 0.0
        self.timer(TICK_S, self._tick)

    def _tick(self) -> None:
        self.feed(fx.TimePassed())
        self.timer(TICK_S, self._tick)

    def feed(self, event: fx.LeaderEvent) -> None:
        """Feeds an event to the machine and carries out its effects in order; clients that come after the job's end are
        told so.
        """
        hello = event.message if isinstance(event, fx.Heard) else None
        if self.machine.desk.done and isinstance(hello, ClusterHello | FollowerHello):
            assert isinstance(event, fx.Heard)
            effects = self.machine.farewell(event.conn, hello)
        else:
            effects = self.machine.on(self.kernel.now + 1.0, event)
        for effect in effects:
            if not self.alive or self.dies():
                break
            match effect:
                case fx.StoreEntry(entry):
                    self.kernel.after(self.kernel.between(0.001, 0.02), lambda e=entry: self._write(e))  # type: ignore[misc]
                case fx.SendTo(conn, message):
                    self.tell(conn, message)
                case fx.HangUp(conn):
                    if conn in self.streams:
                        self.streams[conn].cut()
                case fx.OuterNote():
                    pass
                case fx.Done(reason, finished):
                    self.job.led(self, reason, finished=finished)
        self._watch_window()

    def _watch_window(self) -> None:
        """Checks that the deadline of an open round never moves (O13)."""
        window = self.machine.rounds._window
        deadline_s = window.deadline_s if window is not None else 0.0
        if self._deadline_s and deadline_s and deadline_s != self._deadline_s:
            raise Violation(f"the deadline of an open window was moved from {self._deadline_s} to {deadline_s} (O13)")
        self._deadline_s = deadline_s

    def _write(self, entry: Entry) -> None:
        """Writes an entry to the store; if the leader has died in the meantime, the write may still arrive."""
        store, again = self.job.store, self.job.store.holds(entry)
        if not self.alive and (store.down or self.kernel.random.random() < 0.5):
            return
        refused = "" if store.down else store.append(entry)
        stored = not again and store.holds(entry)
        if stored:
            self.job.stored(entry)
        if store.down or (stored and store.doubtful):
            self.kernel.after(AGAIN_S, lambda: self._write(entry))
            return
        self.deliver(lambda: self.feed(fx.EntryStored(not refused, refused)))

    def heard(self, stream: SimStream, message: Any) -> None:
        self.feed(fx.Heard(stream.conn, message))

    def left(self, stream: SimStream, proof: bool) -> None:
        self.feed(fx.StreamClosed(stream.conn, proof))

    def killed(self) -> None:
        self.job.led(self, "it was killed", finished=False)


class Client(SimClient):
    """Simulated process of a follower or cluster."""

    repeats = 0.05

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job.kernel, name, job)
        self.job = job

    def lag_s(self) -> float:
        return self.kernel.between(0.0, 0.2) if self.kernel.random.random() < 0.1 else 0.0


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Bytes of a push for one shard, with the manifest of the whole push."""

    manifest: str
    blocks: str


class FollowerProcess(Client):
    """Simulated follower process, from one start to its death; its disk outlives it."""

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job, name)
        self.disk = job.disks[name]
        self.machine = job.machines.follower(name, f"{name}-{job.number()}", self.disk.found(), f"{name}:1")
        self.content = ""
        self.versions = ServedVersions[str](lambda version, content: None, lambda version, content: None)
        self.parts: dict[PushId, StagedPart] = {}
        self.held: Shard | None = None
        self.troubled = False
        self.born = job.kernel.now
        self.timer(TICK_S, self._tick)
        self.connect()

    def _tick(self) -> None:
        self.listen(SILENT_S)
        self.feed(fx.TimePassed())
        self.timer(TICK_S, self._tick)

    def begun(self) -> None:
        self.feed(fx.Connected())

    def ended(self) -> None:
        self.feed(fx.Disconnected())

    def hear(self, message: object) -> None:
        self.feed(fx.Told(message))  # type: ignore[arg-type]
        chain = self.job.chain
        started = chain.starts.get(self.name)
        lacks = self.job.went_back or chain.ended is not None  # so may an older copy; and nothing follows the end
        if self.alive and self.machine._obeys and not lacks and started != self.machine.nonce:
            raise Violation(f"{self.name} obeys, and the chain has its start {started}, not {self.machine.nonce} (O7)")

    def feed(self, event: fx.FollowerEvent) -> None:
        for effect in self.machine.on(event):
            if self.dies():
                return
            self._apply(effect)

    def killed(self) -> None:
        if self.kernel.random.random() < 0.5:
            self.disk.lose_power(self.kernel.random)
        self.job.follower_died(self.name)

    def _apply(self, effect: fx.FollowerEffect) -> None:
        between = self.kernel.between
        match effect:
            case fx.Say(message):
                self.say(message)
            case fx.HoldShard(agreed, shard, shards):
                self._hold(grid_of(agreed).cut(shards)[shard])
            case fx.FetchPush(offer):
                self.timer(between(0.01, 0.1), lambda: self._fetch(offer))
            case fx.Compute(entry):
                parts = [
                    self.parts[offer.push].blocks for offer in entry.offers
                ]  # held, whatever is forgotten meanwhile
                self.timer(between(0.005, 0.05), lambda: self._compute(entry, parts))
            case fx.Empty(version):
                self.timer(between(0.005, 0.05), lambda: self._empty(version))
            case fx.Save(version):
                content = self.content
                self._save(version, content, self.job.machines.saving)
            case fx.Load(version, digest):
                self.timer(between(0.01, 0.1), lambda: self._load(version, digest))
            case fx.Delete(version):
                self.disk.delete(version)
            case fx.Forget(push):
                self.parts.pop(push, None)
            case fx.HoldVersion(version):
                self.versions.hold(version)
            case fx.TurnedAway():
                self.kill()  # and it is started again
            case fx.OuterNote():
                pass

    def _hold(self, shard: Shard) -> None:
        """Sets the follower's shard; the process kills itself if it held another shard, to start anew."""
        if self.held is not None and self.held != shard:
            self.kill()
        self.held = shard

    def _fetch(self, offer: Offer) -> None:
        """Fetches a push from its cluster; slow fetches report their progress to the machine."""
        if self.kernel.random.random() < 0.2:
            left_s = self.kernel.between(0.1, 1.0)
            self.feed(fx.Progressed(offer.push, left_s))
            self.timer(left_s, lambda: self._fetched(offer))
        else:
            self._fetched(offer)

    def _fetched(self, offer: Offer) -> None:
        push = offer.push
        found = [c.bytes[push] for c in self.job.clusters.values() if c.serves(push)]
        if not found or self.kernel.random.random() < 0.05:
            self.feed(fx.NotFetched(push))
            return
        self.parts[push] = self._part(push, offer.manifest if offer.manifest in found else found[0])
        self.job.oracle.staged.add((self.name, push))
        finite = not self.job.poisoned(push)
        products = tuple(PushProduct(p, product(push, p)) for p in sorted(self.parts)) if finite else ()
        at = self.machine.version
        self.feed(fx.Fetched(push, self.parts[push].manifest, products, finite, lean(push, at), at))

    def _part(self, push: PushId, manifest: str) -> StagedPart:
        """Returns the bytes of a push for the follower's shard, as the cluster sent them."""
        assert self.held is not None
        blocks, spool = part_of(manifest, self.held), self.job.machines.spool
        if spool:
            name = (push, self.held.first, self.held.stop) if spool == "shard" else (push,)
            blocks = self.disk.staged.setdefault(name, blocks)
        return StagedPart(manifest, blocks)

    def _leans(self, version: VersionId) -> tuple[PushProduct, ...]:
        return tuple(PushProduct(push, lean(push, version)) for push in sorted(self.parts))

    def _compute(self, entry: Entry, parts: list[str]) -> None:
        self._stand(entry.version, computed(self.content, entry, parts))
        self.feed(fx.Computed(entry.version, self._leans(entry.version)))

    def _empty(self, version: VersionId) -> None:
        self.content = ""
        self.versions.go_back(NO_VERSION)
        self.feed(fx.Computed(version, self._leans(version)))

    def _stand(self, version: VersionId, content: str) -> None:
        self.content = content
        self.versions.make_room()
        self.versions.add(version, content)
        assert self.held is not None
        self.job.oracle.stands(version, self.held, content)

    def _save(self, version: VersionId, content: str, steps: Sequence[str]) -> None:
        """Runs the remaining steps of saving a file, each after a while; a crash may come between any two."""
        if steps:
            self.timer(self.kernel.between(0.003, 0.06), lambda: self._save_on(version, content, steps))

    def _save_on(self, version: VersionId, content: str, steps: Sequence[str]) -> None:
        if self.disk.full:
            if not self.troubled:
                self.troubled = True
                self.feed(fx.DiskTrouble("the disk is full"))
            self.timer(0.3, lambda: self._save_on(version, content, steps))
            return
        if self.troubled:
            self.troubled = False
            self.feed(fx.DiskTrouble(""))
        if steps[0] == "report":
            self.feed(fx.StateSaved(version, digest_of(content)))
        else:
            self.disk.step(steps[0], version, content)
        self._save(version, content, steps[1:])

    def _load(self, version: VersionId, digest: str) -> None:
        content = self.disk.read(version, digest)
        if content is None or (digest_of(content) != digest and self.job.machines.compares):
            self.feed(fx.Loaded(version, False))
            return
        self._stand(version, content)
        self.feed(fx.Loaded(version, True, self._leans(version)))


@dataclass(slots=True)
class VersionFetch:
    """Fetch of a version from all followers at once, like that of `exchange.VersionGetter`.

    Args:
        job: Job of the version.
        takes_s: Seconds from the first question to the last byte.
    """

    job: Job
    takes_s: float
    version: VersionId = NO_VERSION
    _until: float = 0.0

    def ask(self, version: VersionId) -> tuple[Sequence[str] | None, bool]:
        """Asks all followers for their parts of a version; the caller repeats this until the fetch's time is over.

        Returns:
            Their contents when it is all here, and whether a follower serves it no more.
        """
        now = self.job.kernel.now
        if version != self.version:
            self.version, self._until = version, now + self.takes_s
        names = self.job.leader.chain.cut if self.job.leader is not None else ()
        here = [f for name in names if (f := self.job.followers.get(name)) is not None and f.alive and not f.frozen]
        found = [f.versions.served.get(version) for f in here]
        contents = [content for content in found if content is not None]
        if len(contents) < len(found):
            self.version = NO_VERSION
            return None, True
        if not names or len(contents) < len(names) or now < self._until:
            return None, False
        return contents, False


class ClusterProcess(Client):
    """Simulated process of a cluster, which trains, pushes and adopts versions."""

    def __init__(self, job: Job, name: str, spec: ClusterSpec) -> None:
        super().__init__(job, name)
        self.spec = spec
        self.machine = job.machines.cluster(
            name,
            name,
            f"{name}-{job.number()}",
            agreement(job.settings, job.length, job.codec, "another" if spec.strange else ""),
            overlap=spec.overlap,
        )
        self.machine.batches = spec.batches
        self.content = Content(job.residual, job.machines.residual)
        self.trained: set[int] = set()
        """Inner steps that this process has trained."""
        self.given_up: set[int] = set()
        """Inner steps of pushes that were open when an incarnation ended."""
        self.left = ""
        self._life = 0
        self._busy = False
        """Whether the process is in an inner step: nothing touches the parameters before it ends."""
        self._todo: list[cl.ClusterEffect] = []
        self._getting = VersionFetch(job, spec.fetch_s)
        self.seeks_since = math.inf
        """Moment (virtual s) since which it has wanted a newer version; infinite: it wants none."""
        self._welcome = self._whole = False
        """Whether a leader has welcomed it, and whether all followers are there."""
        self._told = self._durable = NO_VERSION
        """Newest version that it was told of, and newest durable one."""
        self.timer(TICK_S, self._tick)
        self._train(0)
        self.connect()

    def serves(self, push: PushId) -> bool:
        """Returns whether the cluster can serve a push's bytes now."""
        return self.alive and not self.frozen and push in self.content.pushes

    @property
    def bytes(self) -> dict[PushId, str]:
        """Manifests of the pushes that the cluster holds."""
        return {push: pushed.manifest for push, pushed in self.content.pushes.items()}

    def _tick(self) -> None:
        self.listen(SILENT_S)
        self.feed(fx.TimePassed())
        self.timer(TICK_S, self._tick)

    def begun(self) -> None:
        self.feed(fx.Connected())

    def ended(self) -> None:
        self._welcome = False
        self.feed(fx.Disconnected())

    def hear(self, message: object) -> None:
        match message:
            case PushAnswered():
                self.job.oracle.told(message)
            case Welcomed():
                self._welcome = True
            case Holders(_, holders):
                self._whole = all(holder.endpoint for holder in holders)
            case OnDisk(_, version):
                self._durable = max(self._durable, version)
        self._told = max(self._told, getattr(message, "version", NO_VERSION))
        self.feed(fx.Told(message))  # type: ignore[arg-type]

    def say(self, message: object) -> None:
        super().say(message)
        if self.spec.fickle and isinstance(message, Offered) and self.kernel.random.random() < 0.3:
            super().say(Offered(replace(message.offer, manifest=f"{message.offer.manifest}!")))

    def feed(self, event: cl.ClusterEvent) -> None:
        for effect in self.machine.on(event, resting=not self._busy):
            if self.dies():
                return
            self._apply(effect)

    def _apply(self, effect: cl.ClusterEffect) -> None:
        match effect:
            case fx.Say(message):
                self.say(message)
            case cl.FetchVersion(version):
                self.seeks_since = min(self.seeks_since, self.kernel.now)
                self.timer(self.kernel.between(0.01, 0.1), lambda: self._fetch(version))
            case fx.OuterNote() | cl.TakeLast():
                pass
            case _ if self._busy:
                self._todo.append(effect)
            case _:
                self._carry_out(effect)

    def _carry_out(self, effect: cl.ClusterEffect) -> None:
        """Carries out an effect that must not fall into an inner step."""
        match effect:
            case cl.Freeze(push, _):
                self._freeze(push)
            case cl.Adopt(version, outright):
                self.seeks_since = math.inf
                live = self.content.live
                self._discard(self.content.adopt(version, outright=outright))
                if outright and not self.job.machines.discards:
                    self.content.live = live
                elif not outright and not self.job.machines.merges:
                    self.content.live = []
            case cl.Settle(push, answer):
                live = self.content.live
                self._discard(self.content.settle(push, answer))
                if answer is PushAnswer.REJECTED and not self.job.machines.discards:
                    self.content.live = live
            case cl.Free(push):
                self.content.pushes.pop(push, None)
            case cl.Over(reason, again):
                self._over(reason, again=again)

    def _discard(self, steps: Iterable[int]) -> None:
        self.job.oracle.discarded.update(steps)

    def _freeze(self, push: PushId) -> None:
        self.content.freeze(push)
        pushed = self.content.pushes[push] = self.content.encoded()
        self.job.oracle.frozen(push, pushed, self.kernel.now)
        self.timer(0.002, lambda: self.feed(cl.Frozen(push, pushed.manifest)))

    def _fetch(self, version: VersionId) -> None:
        if self.machine.gone or self.machine.fetching != version:
            return
        self._getting.takes_s = self.spec.fetch_s + (self.spec.first_s if self.machine.base == NO_VERSION else 0.0)
        contents, refused = self._getting.ask(version)
        if contents is not None:
            self.job.oracle.adopted(version, contents)
            self.feed(cl.Got(version))
        elif refused:
            self.feed(cl.Missed(version))
        else:
            self.timer(AGAIN_S if self._getting.takes_s < ASK_S else ASK_S, lambda: self._fetch(version))

    def _over(self, reason: str, *, again: bool) -> None:
        self._discard(self.content.forget())
        self._todo, self._busy = [], False
        self._life += 1
        self.seeks_since = math.inf
        if not again:
            self.left = reason
            self.die()
            if self.stream is not None:
                self.stream.cut()
            return
        self.machine = self.machine.anew()
        for push in [push for push in self.content.pushes if push not in self.machine.kept]:
            self.given_up.update(self.content.pushes.pop(push).steps)  # it may be accepted all the same
        if "lost its first version" in reason:  # what it has trained is in the model that founds the job anew
            self.given_up.update(step for pushed in self.content.pushes.values() for step in pushed.steps)
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.cut()
        self.timer(self.kernel.between(0.02, 0.1), self.connect)
        self._train(self._life)

    def unaccounted(self) -> set[int]:
        """Returns trained inner steps that are in none of the cluster's records and were not discarded: the cluster
        lost them.
        """
        return self.trained - self.content.held - self.given_up - self.job.oracle.discarded

    def leave(self) -> None:
        """Makes the cluster leave, as Ctrl+C does."""
        self.feed(cl.LeaveAsked())

    # ------------------------------------------------------------------ training

    def _train(self, life: int) -> None:
        """Begins an inner step if one may begin; nothing changes the parameters before the step ends."""
        machine, pace_s = self.machine, self.spec.pace_s * self.kernel.between(0.7, 1.3)
        spans = self._share()
        if machine.phase is Phase.TRAINING and machine.may_train and spans is not None:
            self._busy = True
            there = self._welcome and self._whole and self._told.number - self._durable.number < AHEAD
            if machine.overlap and there and len(self.content.live) >= machine.inner_steps:
                raise Violation(f"{self.name} trains {len(self.content.live) + 1} steps beyond its push (O9a)")
            self.timer(pace_s, lambda: self._trained(life, *spans))
        else:
            self.timer(pace_s, lambda: self._train(life) if life == self._life else None)

    def _trained(self, life: int, epoch: int, spans: tuple[Span, ...]) -> None:
        if life != self._life:
            return
        step = self.job.number()
        self.content.live.append(step)
        self.trained.add(step)
        machine = self.machine
        machine.rate, machine.step_rate = 4 / self.spec.pace_s, 1 / self.spec.pace_s
        covers = (Covered(epoch, spans),) if self.job.length else ()
        self._busy = False
        for effect in [*self._todo, *machine.on(cl.Trained(count(spans), covers))]:
            if self.dies():
                return
            self._apply(effect)
        if life != self._life:
            return
        self._todo = []
        self.feed(cl.AtRest())
        if len(self.trained) == self.spec.loop:
            self.feed(cl.LoopOver("its loop is over"))
        if life == self._life:
            self._train(life)

    def _share(self) -> tuple[int, tuple[Span, ...]] | None:
        if not self.job.length:
            return 0, ((0, 4),)
        batches = self.machine.batches
        for epoch, spans in sorted(self.machine.free_spans().items()):
            taken = first_positions(spans, batches.next(batches.batch or 4, count(spans)))
            if count(taken) < batches.least:
                raise Violation(f"{self.name} trains {taken} of epoch {epoch}, fewer than {batches.least} (O11)")
            return epoch, taken
        return None
