"""Classes of outer sync with planted bugs: each breaks one rule of docs/outer.md; bugs.py puts them into simulated
jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from chaos_lightning.outer.rules.attendance import Attendance
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.cluster import ClusterEffect, ClusterEvent, ClusterMachine
from chaos_lightning.outer.rules.effects import Connected
from chaos_lightning.outer.rules.ending import Ending
from chaos_lightning.outer.rules.follower import FollowerMachine
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.leader_desk import LeaderDesk
from chaos_lightning.outer.rules.leases import Leases
from chaos_lightning.outer.rules.messages import ClusterHello, DropPush, Freed, PushAnswered, ShardFile, ToFollower
from chaos_lightning.outer.rules.pushes import Pushes
from chaos_lightning.outer.rules.recut_steps import Check, DeleteBeyond, Steps, StoreCut, recut_steps
from chaos_lightning.outer.rules.rounds import Rounds, Rows
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.shards import Shards
from chaos_lightning.outer.rules.summaries import Summaries, summary_of
from chaos_lightning.outer.rules.types import (
    AHEAD,
    NO_VERSION,
    Body,
    Ended,
    Entry,
    Founded,
    IncarnationId,
    JobOpened,
    Leased,
    Offer,
    PushAnswer,
    PushId,
    Removed,
    RolledBack,
    Round,
    Started,
    Summary,
    VersionId,
    Voided,
)

# ---------------------------------------------------------------------- leaders
from chaos_lightning.planning.batches import Batches
from lab.outer.store import ChainStore


class EarlyLeader(LeaderMachine):
    """Planted bug: the leader tells clusters that pushes are accepted before it has stored the round."""

    def _turn(self) -> None:
        super()._turn()
        entry = self.desk.persisting
        if entry is not None and isinstance(entry.body, Round):
            for weighed in entry.body.accepted:
                push = weighed.offer.push
                said = PushAnswered(self.term, push, PushAnswer.ACCEPTED, entry.version, "")
                self.attendance.tell(push.incarnation, said)


class OneShardPushes(Pushes):
    """Planted bug: the leader treats a push as staged at all shards once one shard has it."""

    def staged(self) -> list[Offer]:
        if not self._desk.chain.founded:
            return super().staged()
        offers = [o for o in self._attendance.offers() if o.base != NO_VERSION]
        here = [o for o in offers if o.push.number == self._desk.chain.incarnations[o.push.incarnation].next]
        shards = self._shards.up()
        found = [o for o in here if any(o.push in f.staged for f in shards)]
        for offer in found:  # what the others would have said
            staged = next(f.staged[offer.push] for f in shards if offer.push in f.staged)
            for follower in shards:
                follower.staged.setdefault(offer.push, staged)
        return sorted(found, key=lambda o: o.push)


class FreeingPushes(Pushes):
    """Planted bug: the leader lets clusters delete a push as soon as a round has accepted it."""

    def free(self, whom: Iterable[IncarnationId]) -> None:
        for who in whom:
            pushes = tuple(self._desk.chain.incarnations[who].accepted(1000))
            if pushes:
                self._attendance.tell(who, Freed(self._desk.term, pushes))


class HastyAttendance(Attendance):
    """Planted bug: after a takeover the leader waits for no cluster to come back."""

    def _patience_s(self, who: IncarnationId) -> float:
        return 0.0


class ForgetfulCluster(ClusterMachine):
    """Planted bug: a cluster gives up its open push when it connects to the leader anew."""

    def on(self, event: ClusterEvent, *, resting: bool = True) -> list[ClusterEffect]:
        if isinstance(event, Connected):
            self.open = None
        return super().on(event, resting=resting)


class HomegoingCluster(ClusterMachine):
    """Planted bug: a cluster that joins after the job's end leaves without fetching the last version."""

    def _on_finished(self, version: VersionId, reason: str) -> None:
        if self.base == NO_VERSION:
            self._end(reason, again=False)
        else:
            super()._on_finished(version, reason)


class EarlyEnding(Ending):
    """Planted bug: the job ends before its last version is durable on all disks."""

    def next_end(self) -> Ended | None:
        super().next_end()
        return Ended(self._desk.chain.newest, self.reason) if self.reason else None


class OpenAttendance(Attendance):
    """Planted bug: clusters that waited for the job to open are let in without a check of their model."""

    def again(self) -> list[tuple[int, ClusterHello]]:
        return []


class WaitingLeader(LeaderMachine):
    """Planted bug: all of the leader's entries, not only rounds, wait for the followers' disks."""

    def _next(self) -> Body | None:
        return None if self.chain.ahead >= AHEAD else super()._next()


class ImpatientLeader(LeaderMachine):
    """Planted bug: the leader removes a silent cluster early although only it has a push that a shard lacks."""

    def _holds_alone(self, who: IncarnationId) -> bool:
        return False


class TrustingDesk(LeaderDesk):
    """Planted bug: a leader goes on although another process knows entries that its own chain lacks."""

    def lacks(self, term: int, *versions: VersionId, answered: PushId | None = None) -> str:
        return ""


class UnshownShards(Shards):
    """Planted bug: followers may obey the leader before the chain has stored that they started."""

    def next_start(self, offers: Iterable[Offer]) -> Started | None:
        for name, follower in self.followers.items():
            if follower.conn is not None and not follower.obeys:
                self.obey(name, offers)
        return None


class LaxShards(Shards):
    """Planted bug: shards count as having a push if anything is staged under its name, even other bytes."""

    def have(self, offer: Offer) -> bool:
        return all(offer.push in follower.staged for follower in self.up())


# ---------------------------------------------------------------------- what is offered, and what is decided on it


class RepeatingPushes(Pushes):
    """Planted bug: the leader treats a push that was already answered as a new one."""

    def on_offer(self, offer: Offer) -> bool:
        cluster = self._attendance.clusters.get(offer.push.incarnation)
        if cluster is None or not self._forgotten(offer.push):
            return super().on_offer(offer)
        cluster.offer = offer
        self._shards.stage(offer)
        return False

    def staged(self) -> list[Offer]:
        if not self._shards.complete:
            return []
        here = [offer for offer in self._attendance.offers() if self._shards.have(offer)]
        return sorted(here, key=lambda offer: offer.push)

    def _forgotten(self, push: PushId) -> bool:
        return push.number in self._desk.chain.incarnations[push.incarnation].answers


class ForgetfulPushes(RepeatingPushes):
    """Planted bug: the leader treats a push that an earlier leader accepted as a new one."""

    def _forgotten(self, push: PushId) -> bool:
        given = self._desk.chain.incarnations[push.incarnation].answers.get(push.number)
        made = self._desk.chain.versions.get(given.version) if given is not None else None
        return made is not None and made.entry.term < self._desk.term


class JumpingPushes(RepeatingPushes):
    """Planted bug: the leader takes a cluster's pushes in any order."""

    def _forgotten(self, push: PushId) -> bool:
        known = self._desk.chain.incarnations[push.incarnation]
        return push.number not in known.answers and not known.over


class ChangingPushes(Pushes):
    """Planted bug: other bytes under the number of an open push replace the bytes offered first."""

    def on_offer(self, offer: Offer) -> bool:
        cluster = self._attendance.clusters.get(offer.push.incarnation)
        if cluster is not None and cluster.offer is not None and cluster.offer.push == offer.push:
            cluster.offer = None
        return super().on_offer(offer)


class UnrecordedPushes(Pushes):
    """Planted bug: the leader answers that a push is void without storing that in the chain."""

    def next_round(self) -> Round | Voided | None:
        decided = super().next_round()
        if not isinstance(decided, Voided):
            return decided
        self.answer(decided.offer, PushAnswer.VOID, NO_VERSION, decided.reason)
        return None


class LatePushes(Pushes):
    """Planted bug: the leader also takes pushes of removed clusters."""

    def on_offer(self, offer: Offer) -> bool:
        cluster = self._attendance.clusters.get(offer.push.incarnation)
        known = self._desk.chain.incarnations.get(offer.push.incarnation)
        if cluster is None or known is None or not known.over or offer.push.number != known.next:
            return super().on_offer(offer)
        cluster.offer = offer
        self._shards.stage(offer)
        return False


class LateAttendance(Attendance):
    """Planted bug: removed clusters still count as living, and are not told of their removal."""

    def living(self) -> list[IncarnationId]:
        return [*self.clusters]

    def next_removal(self) -> Removed | None:
        found, all_of_them = None, self.clusters
        self.clusters = {who: c for who, c in all_of_them.items() if not self._desk.chain.incarnations[who].over}
        found = super().next_removal()
        self.clusters = all_of_them
        return found

    def removed(self, who: IncarnationId, reason: str) -> None:
        pass


class LaxRounds(Rounds):
    """Planted bug: rounds accept pushes of clusters that are not in the job."""

    def _objection(self, offer: Offer) -> str:
        words = super()._objection(offer)
        return "" if "is not in the job" in words else words


class UnbasedRounds(Rounds):
    """Planted bug: rounds do not check which pushes of its cluster a push's base holds."""

    def _objection(self, offer: Offer) -> str:
        return self._chain.leases.objection(offer) if self._chain.leases is not None else ""


class UncheckedRounds(Rounds):
    """Planted bug: rounds check neither a push's base nor the samples that it covers."""

    def _objection(self, offer: Offer) -> str:
        return ""


class UnleasedRounds(Rounds):
    """Planted bug: rounds do not check which samples a push covers."""

    def _objection(self, offer: Offer) -> str:
        words = super()._objection(offer)
        return words if words.startswith("its base") else ""


class RefusingRounds(Rounds):
    """Planted bug: rounds reject pushes that a rollback reopened."""

    def _objection(self, offer: Offer) -> str:
        return "it was taken before" if offer.push in self._chain.reopened else super()._objection(offer)


class RefusingUnleasedRounds(RefusingRounds, UnleasedRounds):
    """Planted bug: rounds reject pushes that a rollback reopened, and do not check which samples a push covers."""


class RefusingUncheckedRounds(RefusingRounds, UncheckedRounds):
    """Planted bug: rounds reject pushes that a rollback reopened, and check neither a push's base nor its samples."""


class LearningRounds(Rounds):
    """Planted bug: the gate also learns from the pushes that it rejects."""

    def _decide(
        self,
        offers: Sequence[Offer],
        rows: Rows,
        again: Collection[PushId],
        usual: int,
        why: str,
        settings: OuterSettings,
    ) -> Round | Voided:
        made = super()._decide(offers, rows, again, usual, why, settings)
        if isinstance(made, Voided):
            return made
        return replace(made, gate=replace(made.gate, count=made.gate.count + len(made.rejected)))


class ShuttingRounds(Rounds):
    """Planted bug: the gate forgets how often it has rejected each cluster, and so may shut a cluster out."""

    def _decide(
        self,
        offers: Sequence[Offer],
        rows: Rows,
        again: Collection[PushId],
        usual: int,
        why: str,
        settings: OuterSettings,
    ) -> Round | Voided:
        made = super()._decide(offers, rows, again, usual, why, settings)
        return made if isinstance(made, Voided) else replace(made, gate=replace(made.gate, rows=()))


class WindingRounds(Rounds):
    """Planted bug: each arriving push moves the deadline of the open round to a later time."""

    def next(
        self,
        now_s: float,
        offers: Sequence[Offer],
        rows: Rows,
        *,
        training: Set[IncarnationId],
        in_s: Mapping[IncarnationId, float],
        again: Collection[PushId],
        settings: OuterSettings,
    ) -> Round | Voided | None:
        if self._window is not None and len(offers) > len(self._window.known) // 2:
            self._window = None
        return super().next(now_s, offers, rows, training=training, in_s=in_s, again=again, settings=settings)


class WaitingAttendance(Attendance):
    """Planted bug: rounds also wait for newcomers that have no version yet."""

    def training(self) -> set[IncarnationId]:
        return super().training() | {who for who in self.living() if self.clusters[who].base == NO_VERSION}


# ---------------------------------------------------------------------- what the chain says


class GreedyLeases(Leases):
    """Planted bug: positions that one cluster has leased are leased to another one, too."""

    def _free(self, state: object) -> tuple[tuple[int, int], ...]:
        leased, state.leased = state.leased, {}  # type: ignore[attr-defined]
        free = super()._free(state)  # type: ignore[arg-type]
        state.leased = leased  # type: ignore[attr-defined]
        return free


class PartLeases(Leases):
    """Planted bug: leases may contain parts of steps."""

    def grant(
        self,
        incarnation: IncarnationId,
        samples: int,
        batches: Batches,
        among: Collection[IncarnationId] | None = None,
    ) -> Leased | None:
        return super().grant(incarnation, samples, Batches(1, 1), among)


class GivingLeases(Leases):
    """Planted bug: a rollback frees the positions of all pushes that it takes back, even of those that will be offered
    again.
    """

    def rollback(self, body: RolledBack) -> None:
        super().rollback(replace(body, lost=tuple(self._accepted)))


def chain_with(leases: type[Leases]) -> type[OuterChain]:
    """Returns a class of chains that use the given (broken) class of leases."""

    class Planted(OuterChain):
        def follow(self, entry: Entry) -> None:
            super().follow(entry)
            if isinstance(entry.body, JobOpened) and self.leases is not None:
                self.leases.__class__ = leases

    return Planted


class ForgettingChain(OuterChain):
    """Planted bug: a rollback also takes back joins, and the leases of those clusters."""

    def _roll_back(self, made: VersionId, entry: Entry, body: RolledBack) -> None:
        super()._roll_back(made, entry, body)
        for who, known in self.incarnations.items():
            if not known.over and who.number > 1 and not known.answers and self.leases is not None:
                self.leases.remove(who)
                known.over = "its join was taken back"


class SilentChain(OuterChain):
    """Planted bug: a rollback makes no version, so the newest version is an old one."""

    def _version(self, entry: Entry, body: Founded | Round | RolledBack) -> None:
        super()._version(entry, body)
        if isinstance(body, RolledBack):
            self.newest = body.to


class OpenStore(ChainStore):
    """Planted bug: the store accepts writes of leaders whose term is over."""

    def append(self, entry: Entry) -> str:
        term, self.term = self.term, entry.term
        refused = super().append(entry)
        self.term = term
        return refused


# ---------------------------------------------------------------------- followers and clusters


class HoardingFollower(FollowerMachine):
    """Planted bug: a follower keeps pushes that no round will ever take."""

    def _hear(self, message: ToFollower) -> None:
        if not isinstance(message, DropPush):
            super()._hear(message)


class PassedFollower(FollowerMachine):
    """Planted bug: a follower computes on from its own version after the durable mark has passed that version."""

    def _start(self) -> tuple[int, ShardFile | None, list[Entry]]:
        place, load, line = super()._start()
        return place, load if self.version == NO_VERSION else None, line


class NewestFileFollower(FollowerMachine):
    """Planted bug: a follower starts from its own newest file instead of the durable version."""

    def _start(self) -> tuple[int, ShardFile | None, list[Entry]]:
        place, load, line = super()._start()
        newest = max(self.disk, key=lambda file: file.version, default=None)
        known = {entry.version: number + 1 for number, entry in enumerate(line)}
        if self.version != NO_VERSION or newest is None or newest.version not in known:
            return place, load, line
        return known[newest.version], newest, line


class NumberedFollower(NewestFileFollower):
    """Planted bug: a follower starts from its own newest file, and compares versions by their numbers alone."""

    def _start(self) -> tuple[int, ShardFile | None, list[Entry]]:
        place, load, line = super()._start()
        newest = max(self.disk, key=lambda file: file.version, default=None)
        begins = self.version == NO_VERSION and newest is not None
        at = newest.version if newest is not None and begins else self.version
        if at.number <= self._base.number or at in {entry.version for entry in line}:
            return place, load, line
        return sum(entry.version.number <= at.number for entry in line), newest if begins else None, line


class ChasingCluster(ClusterMachine):
    """Planted bug: a cluster abandons a fetch and begins another with each newer version."""

    def _turn_idle(self) -> None:
        if self._fetching < self._served:
            self._fetching = NO_VERSION
        super()._turn_idle()


class BoundlessCluster(ClusterMachine):
    """Planted bug: a cluster trains on without limit while it waits for a version."""

    @property
    def waits(self) -> bool:
        return not self.overlap and super().waits


class NewestBaseCluster(ClusterMachine):
    """Planted bug: a cluster declares its push a delta to the newest version instead of its own base."""

    def _on_frozen(self, push: PushId, manifest: str) -> None:
        base = self.base
        self.base = max(base, self._served) if base != NO_VERSION else base
        super()._on_frozen(push, manifest)
        self.base = base


class UnorderedCluster(ClusterMachine):
    """Planted bug: after a rollback a cluster offers its open push before the older ones that the rollback reopened."""

    def _unanswered(self) -> list[Offer]:
        return super()._unanswered()[::-1]


class ForgetfulSummaries(Summaries):
    """Planted bug: summaries keep only the newest version, although clusters still have older ones as their base."""

    def next_summary(self) -> Summary | None:
        found = super().next_summary()
        return summary_of(self._desk.chain, (), 1) if found is not None else None


# ---------------------------------------------------------------------- another cut


def hasty_steps(job: str, names: Sequence[str]) -> Steps:
    """Planted bug: when shards are cut anew, files of dropped followers are deleted before the chain records the new
    shards.
    """
    steps, came, held = recut_steps(job, names), None, set()
    while True:
        try:
            step = steps.send(came)
        except StopIteration as end:
            return str(end.value)
        if isinstance(step, Check):
            held.add(step.source.follower)
        for name in sorted(held - {*names}) if isinstance(step, StoreCut) else ():
            yield DeleteBeyond(name, 0)
        came = yield step


def leaving_steps(job: str, names: Sequence[str]) -> Steps:
    """Planted bug: when shards are cut anew, old files that the record does not name stay on the disks and may be taken
    for new ones.
    """
    steps, came = recut_steps(job, names), None
    while True:
        try:
            step = steps.send(came)
        except StopIteration as end:
            return str(end.value)
        came = None if isinstance(step, DeleteBeyond) else (yield step)
