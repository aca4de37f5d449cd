"""Runs one outer job in virtual time: the product's state machines and arithmetic, real training, and randomly drawn
durations.

Theory of operation. `VirtualJob` is an event loop (the simulator's kernel) with one leader, some followers and the
clusters, each a small shell around the machine that real processes run: `LeaderMachine`, `FollowerMachine`,
`ClusterMachine`. Followers compute versions with `OuterState` and `RoundUpdate`, clusters freeze and adopt with the
product's functions and codecs. What is virtual is time alone: an inner step takes as long as its cluster's speed, its
jitter and its spells of straggling say, a push and a version take `TRANSFER` of a usual round each, and a word takes a
moment. A virtual second is an inner step of the fastest cluster.

Clusters share the data: they train what the leader leases to them. Modes are compared at equal samples *spent*: those
of all pushes that were answered, accepted or not, and what was trained beside a push that was rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, median

import torch
from torch import Tensor

from benchmarks.outer_convergence.curves import Point
from benchmarks.outer_convergence.learners import Learner, Samples, Task
from benchmarks.outer_convergence.poison import Poison, Verdicts
from chaos_lightning.outer.exchange.codec import FP32, Part, codec_of
from chaos_lightning.outer.exchange.kernel import OuterState, RoundUpdate, adopt, freeze
from chaos_lightning.outer.follower.staging import HeldShard
from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.cluster import ClusterMachine
from chaos_lightning.outer.rules.exact import ExactSum
from chaos_lightning.outer.rules.follower import FollowerMachine
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.messages import FromCluster, FromFollower, PushProduct
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Agreement,
    Covered,
    Entry,
    Offer,
    PushAnswer,
    PushId,
    Round,
    VersionId,
)
from chaos_lightning.planning.batches import Batches
from chaos_lightning.planning.fleet.kernel import Kernel
from lab.outer.store import ChainStore

TRANSFER = 0.05
"""Share of a usual round of the fastest cluster that a push, or a version, takes on the far link."""
JITTER = 0.2
"""Standard deviation of what a leg takes, as a part."""
STRAGGLING, SLOWER = 0.05, 4.0
"""One leg in so many takes so many times as long. A leg is what a cluster trains from one push to the next."""
WORD_S, STORE_S, SAVE_S, TICK_S = 0.01, 0.02, 0.2, 1.0
HEARTBEAT_S = 4.0
REMEMBERED = 32
"""Inner steps by which a cluster measures its rate: the median, so that a spell of straggling is none of it."""
BLOCK = 1 << 16
CLUSTERS, FOLLOWERS = 4, 2


def speeds(eta: int) -> list[float]:
    """Returns the virtual seconds of an inner step of each cluster, evenly spaced from 1 to 1 + eta / 100."""
    return [1.0 + eta / 100 * number / (CLUSTERS - 1) for number in range(CLUSTERS)]


@dataclass(frozen=True)
class Weather:
    """Random factors that lengthen the steps of a cluster between two pushes (a leg); the same in every mode.

    Attributes:
        seed: Seed of the draws.
        jitter: Standard deviation of the factor around 1.
        straggling: Share of the legs that straggle.
    """

    seed: int
    jitter: float = JITTER
    straggling: float = STRAGGLING

    def factor(self, cluster: int, leg: int) -> float:
        """Returns the factor by which all steps of a cluster's leg (the time between two pushes) are longer."""
        draw = Random(f"{self.seed} {cluster} {leg}")
        slower = SLOWER if draw.random() < self.straggling else 1.0
        return slower * max(0.3, draw.gauss(1.0, self.jitter))


@dataclass(frozen=True)
class Mode:
    """One policy of training together: its settings, and whether clusters train during a push.

    Attributes:
        name: Name in texts and pictures.
        settings: Settings of the server.
        overlap: Whether clusters train on while a push is under way.
    """

    name: str
    settings: OuterSettings
    overlap: bool


@dataclass
class Track:
    """Outcome of one run: its loss curve, and measurements.

    Attributes:
        curve: Points of the loss curve, ascending.
        fetched: Mean number of versions that clusters fetched for each push.
        idle: Share of the clusters' time in which they could not train.
        staleness: Mean staleness of accepted pushes.
        window: Mean number of pushes of a round.
        verdicts: Counts of verdicts on good and poisoned pushes.
        steps: Inner steps of each cluster's last push.
        anew: Number of times that a cluster came in anew, since its pushes were rejected again and again.
    """

    curve: list[Point] = field(default_factory=list)
    fetched: float = 0.0
    idle: float = 0.0
    staleness: float = 0.0
    window: float = 0.0
    verdicts: Verdicts = field(default_factory=Verdicts)
    steps: tuple[int, ...] = ()
    anew: int = 0


class LeaderShell:
    """Runs the leader's state machine in virtual time, on a store that never fails."""

    def __init__(self, job: VirtualJob, followers: int) -> None:
        self.job = job
        self.store = ChainStore()
        self.chain = OuterChain()
        self.machine = LeaderMachine(self.chain, self.store.take_term(), followers)
        self.hears: dict[int, Callable[[object], None]] = {}
        self._tick()

    def _tick(self) -> None:
        self.feed(fx.TimePassed())
        self.job.kernel.after(TICK_S, self._tick)

    def hear(self, conn: int, message: FromCluster | FromFollower) -> None:
        """Delivers a message to the leader after a moment."""
        self.job.kernel.after(WORD_S, lambda: self.feed(fx.Heard(conn, message)))

    def feed(self, event: fx.LeaderEvent) -> None:
        """Gives one event to the leader's state machine, and carries out its effects."""
        for effect in self.machine.on(1.0 + self.job.kernel.now, event):
            match effect:
                case fx.StoreEntry(entry):
                    self.job.kernel.after(STORE_S, lambda e=entry: self._write(e))  # type: ignore[misc]
                case fx.SendTo(conn, message):
                    self.job.kernel.after(WORD_S, lambda c=conn, m=message: self.hears[c](m))  # type: ignore[misc]
                case fx.Done(reason):
                    raise RuntimeError(f"the leader decides nothing more: {reason}")
                case _:
                    pass

    def _write(self, entry: Entry) -> None:
        refused = self.store.append(entry)
        assert not refused, refused
        self.feed(fx.EntryStored(True))
        self.job.stored(entry)


class FollowerShell:
    """Runs a follower's state machine: stages pushes, computes versions and serves the two newest."""

    def __init__(self, job: VirtualJob, name: str) -> None:
        self.job, self.conn = job, job.connect(self.hear)
        self.machine = FollowerMachine(name, f"{name} begins", endpoint=f"{name}:1")
        self.state: OuterState | None = None
        self.versions: dict[VersionId, Part] = {}
        self._parts: dict[PushId, Part] = {}
        self._open: list[PushId] = []
        """Staged, and in no version yet."""
        self.feed(fx.Connected())

    def hear(self, message: object) -> None:
        self.feed(fx.Told(message))  # type: ignore[arg-type]

    def feed(self, event: fx.FollowerEvent) -> None:
        """Gives one event to the follower's state machine, and carries out its effects."""
        after = self.job.kernel.after
        for effect in self.machine.on(event):
            match effect:
                case fx.Say(message):
                    self.job.leader.hear(self.conn, message)  # type: ignore[arg-type]
                case fx.HoldShard(agreement, shard, shards):
                    self.held = HeldShard.of(agreement, shard, shards)
                case fx.FetchPush(offer):
                    after(0.0, lambda o=offer: self.feed(fx.Progressed(o.push, self.job.transfer_s)))  # type: ignore[misc]
                    after(self.job.transfer_s, lambda o=offer: self._fetched(o))  # type: ignore[misc]
                case fx.Compute(entry):
                    self._compute(entry, [self._parts[offer.push] for offer in entry.offers])
                    after(WORD_S, lambda e=entry: self._computed(e))  # type: ignore[misc]
                case fx.Save(version):
                    assert self.state is not None
                    after(SAVE_S, lambda v=version, d=self.state.digest: self.feed(fx.StateSaved(v, d)))  # type: ignore[misc]
                case fx.Forget(push):
                    self._parts.pop(push, None)
                    self._open = [one for one in self._open if one != push]
                case _:
                    pass

    def _fetched(self, offer: Offer) -> None:
        whole = self.job.pushes[offer.push]
        shard = self.held.shard
        data = whole.data[whole.offsets[shard.first] : whole.offsets[shard.stop]]
        part = self._parts[offer.push] = Part(shard, whole.format, data)
        self._open.append(offer.push)
        rows = tuple(self._product(push, part) for push in self._open)
        finite = ExactSum.decode(rows[-1].sum).finite
        momentum, at = "0", NO_VERSION
        if self.state is not None:
            momentum, at = self._lean(offer.push).sum, self.machine.version
        self.feed(fx.Fetched(offer.push, whole.hash, rows, finite, momentum, at))

    def _product(self, push: PushId, part: Part) -> PushProduct:
        return PushProduct(push, self.held.product(part, self._parts[push]))

    def _lean(self, push: PushId) -> PushProduct:
        assert self.state is not None
        return PushProduct(push, self.held.lean(self._parts[push], self.state))

    def _compute(self, entry: Entry, parts: list[Part]) -> None:
        codec, shard = self.job.codec, self.held.shard
        if isinstance(entry.body, Round):
            assert self.state is not None
            version = Part.empty(shard, codec.version)
            pushes = [(weighed.factor, part) for weighed, part in zip(entry.body.accepted, parts, strict=True)]
            RoundUpdate(self.state, pushes, entry.body.factors, version, parameters=codec.parameters).run()
        else:
            self.state = OuterState(shard, parts[0].decoded())
            version = Part.encoded(shard, codec.version, self.state.theta)
        self.versions = dict([*self.versions.items(), (entry.version, version)][-2:])

    def _computed(self, entry: Entry) -> None:
        body = entry.body
        gone = {offer.push for offer in entry.offers}
        if isinstance(body, Round):
            gone |= {refusal.offer.push for refusal in body.rejected}
        self._open = [push for push in self._open if push not in gone]
        self.feed(fx.Computed(entry.version, tuple(self._lean(push) for push in self._open)))
        self.job.computed(entry)


class ClusterShell:
    """Runs a cluster's state machine, and trains the samples leased to it."""

    def __init__(self, job: VirtualJob, number: int, step_s: float) -> None:
        self.job, self.number, self.step_s = job, number, step_s
        self.conn = job.connect(self.hear)
        name = f"c{number}"
        self.machine = ClusterMachine(name, name, f"{name} begins", job.agreement, overlap=job.mode.overlap)
        self.machine.batches = Batches(job.task.batch, job.task.batch)
        self.learner = Learner(job.samples, job.seed)
        self.idle_s = 0.0
        self._base: Part | None = None
        self._frozen: Tensor | None = None
        self._since = 0
        """Samples since the last freezing, which a rejection throws away."""
        self._legs = 0
        self._factor = job.weather.factor(number, 0)
        self._took: list[float] = []
        self._busy, self._idle_since = False, 0.0
        self.feed(fx.Connected())
        self._beat()

    def hear(self, message: object) -> None:
        self.feed(fx.Told(message))  # type: ignore[arg-type]

    def _beat(self) -> None:
        self.feed(fx.TimePassed())
        self.job.kernel.after(HEARTBEAT_S, self._beat)

    def feed(self, event: cl.ClusterEvent) -> None:
        """Gives one event to the cluster's state machine, carries out its effects, and trains if it may."""
        for effect in self.machine.on(event):
            match effect:
                case fx.Say(message):
                    self.job.leader.hear(self.conn, message)  # type: ignore[arg-type]
                case cl.Freeze(push, base):
                    self._freeze(push, base)
                case cl.FetchVersion(version):
                    self._fetch(version)
                case cl.Adopt(version, outright):
                    self._adopt(version, outright)
                case cl.Settle(_, PushAnswer.VOID):
                    self._frozen = None
                case cl.Settle(_, PushAnswer.REJECTED):
                    self.job.spent += self._since
                    self._since = 0
                case cl.Free(push):
                    self.job.pushes.pop(push, None)
                case cl.Over():
                    self._come_anew()
                case _:
                    pass
        self._train()

    def _come_anew(self) -> None:
        """Restarts the cluster as another incarnation, since its old one has ended."""
        self.machine = self.machine.anew()
        self._base, self._frozen = None, None
        old, self.conn = self.conn, self.job.connect(self.hear)
        after = self.job.kernel.after
        after(WORD_S, lambda: self.job.leader.feed(fx.StreamClosed(old)))
        after(WORD_S, lambda: self.feed(fx.Connected()))
        self.job.track.anew += 1

    def begin_cold(self) -> None:
        """Restarts the cluster with an inner optimizer that has no state yet."""
        self.learner.forget()
        self._come_anew()

    # ------------------------------------------------------------------ training

    def _train(self) -> None:
        if self._busy or not self.machine.may_train or self.machine.dry:
            return
        self._busy = True
        self.idle_s += self.job.kernel.now - self._idle_since
        took = self.step_s * self._factor
        self.job.kernel.after(took, lambda: self._step(took))

    def _step(self, took_s: float) -> None:
        self._busy, self._idle_since = False, self.job.kernel.now
        covers = self._share()
        if covers:
            self.learner.step(self.job.samples.take(covers))
            self._took = [*self._took, took_s][-REMEMBERED:]
            self.machine.step_rate = 1 / median(self._took)
            self.machine.rate = self.job.task.batch * self.machine.step_rate
            samples = sum(b - a for c in covers for a, b in c.spans)
            self._since += samples
            self.feed(cl.Trained(samples, covers))
        self._train()

    def _share(self) -> tuple[Covered, ...]:
        """Returns the next samples leased to the cluster: a batch of them, or all if there are fewer."""
        left, found = self.job.task.batch, []
        for epoch, spans in sorted(self.machine.free_spans().items()):
            some = []
            for start, stop in spans:
                if left:
                    some.append((start, min(stop, start + left)))
                    left -= some[-1][1] - start
            if some:
                found.append(Covered(epoch, tuple(some)))
        return tuple(found)

    # ------------------------------------------------------------------ pushes and versions

    def _freeze(self, push: PushId, base: VersionId) -> None:
        job, flat = self.job, self.learner.flat
        whole, codec = job.grid.whole, job.codec
        part = Part.encoded(whole, codec.format_of(base), flat)
        if base != NO_VERSION:
            assert self._base is not None
            delta = Part.empty(whole, FP32 if codec.parameters else codec.push)
            freeze(self._base, flat, delta)
            gained = delta.decoded()
            spoiled = job.poison.spoil(push, job.accepted, gained)
            if codec.parameters and spoiled:
                part = Part.encoded(whole, codec.push, self._base.decoded() - gained)
            elif not codec.parameters:
                part = Part.encoded(whole, codec.push, gained) if spoiled else delta
            self._frozen = flat.clone()
        job.pushes[push] = part
        self._since = 0
        self._legs += 1
        self._factor = job.weather.factor(self.number, self._legs)
        job.kernel.after(0.0, lambda: self.feed(cl.Frozen(push, part.hash)))

    def _fetch(self, version: VersionId) -> None:
        parts = [follower.versions.get(version) for follower in self.job.followers]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            self.job.kernel.after(self.job.transfer_s, lambda: self.feed(cl.Missed(version)))
            return
        whole = Part(self.job.grid.whole, found[0].format, torch.cat([part.data for part in found]))
        self.job.fetches += 1
        self.job.kernel.after(self.job.transfer_s, lambda: self._got(version, whole))

    def _got(self, version: VersionId, whole: Part) -> None:
        self._fetched = whole
        self.feed(cl.Got(version))

    def _adopt(self, version: VersionId, outright: bool) -> None:
        job, flat = self.job, self.learner.flat
        if outright or self._base is None or not (self.machine.overlap or self.machine.since_base[1]):
            adopt(flat, self._fetched)
        else:
            frozen = Part.of(job.grid.whole, self._frozen) if self._frozen is not None else self._base
            adopt(flat, self._fetched, frozen)
        self._base, self._frozen = self._fetched, None


class VirtualJob:
    """One outer job in virtual time: leader, followers and clusters, by the product's state machines.

    Args:
        task: Model that is trained, and its training settings.
        mode: Policy of training together.
        eta: The slowest cluster takes 1 + eta / 100 times as long for a step as the fastest.
        seed: Seed of weights, order of samples and weather.
        total: Samples after which the run ends.
        poison: Share of all pushes that are poisoned.
    """

    def __init__(self, task: Task, mode: Mode, eta: int, seed: int, total: int, poison: float = 0.0) -> None:
        self.task, self.mode, self.seed, self.total = task, mode, seed, total
        settings = mode.settings
        self.kernel = Kernel(seed)
        self.samples = Samples(task, seed)
        self.weather = Weather(seed)
        self.poison = Poison(poison, seed, settings.gate_warmup)
        self.judge = Learner(self.samples, seed)
        self.agreement = Agreement(self.judge.specs, block=BLOCK, length=self.samples.length, settings=settings.words)
        self.codec = codec_of(self.agreement)
        self.grid = Grid(tuple(spec.elements for spec in self.judge.specs), BLOCK)
        self.transfer_s = TRANSFER * settings.inner_steps
        self.every = settings.round_samples * CLUSTERS
        self.pushes: dict[PushId, Part] = {}
        self.track = Track()
        self.accepted = 0
        self.spent = 0
        """Samples of answered pushes, and those that a rejection threw away beside them."""
        self.fetches = 0
        self._sizes: list[int] = []
        self._ages: list[int] = []
        self._standing: dict[VersionId, int] = {}
        self._samples: dict[VersionId, int] = {}
        self._next = 0
        self.leader = LeaderShell(self, FOLLOWERS)
        self.followers: list[FollowerShell] = []
        self.clusters: list[ClusterShell] = []
        for number in range(FOLLOWERS):
            self.followers.append(FollowerShell(self, f"f{number}"))
        for number, step_s in enumerate(speeds(eta)):
            self.clusters.append(ClusterShell(self, number, step_s))

    def connect(self, hear: Callable[[object], None]) -> int:
        """Opens a new stream to the leader; returns its number."""
        self.leader.hears[len(self.leader.hears)] = hear
        return len(self.leader.hears) - 1

    def stored(self, entry: Entry) -> None:
        """Counts the samples and verdicts of an entry that was stored in the chain."""
        self.track.verdicts.read(entry, self.poison.kinds)
        body = entry.body
        if isinstance(body, Round):
            self.accepted += len(body.accepted)
            self._sizes.append(len(body.accepted) + len(body.rejected))
            self._ages += [weighed.staleness for weighed in body.accepted]
            offers = [weighed.offer for weighed in body.accepted] + [refusal.offer for refusal in body.rejected]
            self.spent += sum(offer.samples for offer in offers)
            self._samples[entry.version] = self.spent

    def computed(self, entry: Entry) -> None:
        """Counts a follower that has computed this version; once all have, adds a point to the loss curve if one is
        due.
        """
        count = self._standing[entry.version] = self._standing.get(entry.version, 0) + 1
        samples = self._samples.get(entry.version, 0)
        if count < len(self.followers) or samples < self._next:
            return
        states = [follower.state for follower in self.followers]
        self.judge.flat.copy_(torch.cat([state.theta for state in states if state is not None]))
        self.track.curve.append(Point(self.kernel.now, samples, self.judge.loss(self.samples.tests)))
        self._next = samples - samples % self.every + self.every

    def run(self) -> Track:
        """Trains until the given number of samples is spent.

        Raises:
            RuntimeError: Nothing happens any more.
        """
        limit_s = 60.0 * self.total / self.task.batch
        if not self.kernel.run(limit_s, lambda: self.track.curve != [] and self.track.curve[-1][1] >= self.total):
            raise RuntimeError(f"{self.mode.name}: stuck at {self.track.curve[-1:]} after {self.kernel.now:.0f} s")
        track, pushes = self.track, max(1, sum(self._sizes))
        track.idle = fmean(shell.idle_s for shell in self.clusters) / self.kernel.now
        track.staleness = sum(self._ages) / max(1, len(self._ages))
        track.window = pushes / max(1, len(self._sizes))
        track.fetched = self.fetches / pushes
        track.steps = tuple(shell.machine.inner_steps for shell in self.clusters)
        return track
