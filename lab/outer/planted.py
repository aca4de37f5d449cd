"""Machines of outer sync and parts of them, each with one rule of docs/outer.md broken; bugs.py plants them."""

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
    """Leader that tells answers before they are stored."""

    def _turn(self) -> None:
        super()._turn()
        entry = self.desk.persisting
        if entry is not None and isinstance(entry.body, Round):
            for weighed in entry.body.accepted:
                push = weighed.offer.push
                said = PushAnswered(self.term, push, PushAnswer.ACCEPTED, entry.version, "")
                self.attendance.tell(push.incarnation, said)


class OneShardPushes(Pushes):
    """Pushes of a leader that treats a push as staged everywhere once one shard has it."""

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
    """Pushes of a leader that lets clusters delete a push as soon as a round has it."""

    def free(self, whom: Iterable[IncarnationId]) -> None:
        for who in whom:
            pushes = tuple(self._desk.chain.incarnations[who].accepted(1000))
            if pushes:
                self._attendance.tell(who, Freed(self._desk.term, pushes))


class HastyAttendance(Attendance):
    """Attendance that waits for no cluster after a takeover."""

    def _patience_s(self, who: IncarnationId) -> float:
        return 0.0


class ForgetfulCluster(ClusterMachine):
    """Cluster that gives its open push up when its stream breaks."""

    def on(self, event: ClusterEvent, *, resting: bool = True) -> list[ClusterEffect]:
        if isinstance(event, Connected):
            self.open = None
        return super().on(event, resting=resting)


class HomegoingCluster(ClusterMachine):
    """Cluster that comes in anew after the job's end and ends without fetching the last version."""

    def _on_finished(self, version: VersionId, reason: str) -> None:
        if self.base == NO_VERSION:
            self._end(reason, again=False)
        else:
            super()._on_finished(version, reason)


class EarlyEnding(Ending):
    """End of a job that does not wait for the disks."""

    def next_end(self) -> Ended | None:
        super().next_end()
        return Ended(self._desk.chain.newest, self.reason) if self.reason else None


class OpenAttendance(Attendance):
    """Attendance that lets in clusters that waited before the job was opened without comparing their models with
    its own.
    """

    def again(self) -> list[tuple[int, ClusterHello]]:
        return []


class WaitingLeader(LeaderMachine):
    """Leader whose records wait for the disk as its rounds do."""

    def _next(self) -> Body | None:
        return None if self.chain.ahead >= AHEAD else super()._next()


class ImpatientLeader(LeaderMachine):
    """Leader that waits for no cluster, whatever that one alone holds."""

    def _holds_alone(self, who: IncarnationId) -> bool:
        return False


class TrustingDesk(LeaderDesk):
    """Outbox of a leader that goes on though another process knows more than its chain."""

    def lacks(self, term: int, *versions: VersionId, answered: PushId | None = None) -> str:
        return ""


class UnshownShards(Shards):
    """Shards whose followers obey the leader before their start is stored in the chain."""

    def next_start(self, offers: Iterable[Offer]) -> Started | None:
        for name, follower in self.followers.items():
            if follower.conn is not None and not follower.obeys:
                self.obey(name, offers)
        return None


class LaxShards(Shards):
    """Shards that count a push as there if anything is staged under its name, whether or not it is what was offered."""

    def have(self, offer: Offer) -> bool:
        return all(offer.push in follower.staged for follower in self.up())


# ---------------------------------------------------------------------- what is offered, and what is decided on it


class RepeatingPushes(Pushes):
    """Pushes of a leader that takes an answered push for a new one."""

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
    """Pushes of a leader that takes a push for a new one if another leader accepted it."""

    def _forgotten(self, push: PushId) -> bool:
        given = self._desk.chain.incarnations[push.incarnation].answers.get(push.number)
        made = self._desk.chain.versions.get(given.version) if given is not None else None
        return made is not None and made.entry.term < self._desk.term


class JumpingPushes(RepeatingPushes):
    """Pushes of a leader that takes them in any order."""

    def _forgotten(self, push: PushId) -> bool:
        known = self._desk.chain.incarnations[push.incarnation]
        return push.number not in known.answers and not known.over


class ChangingPushes(Pushes):
    """Pushes of a leader at which other bytes under a number that is offered take the place of the first ones."""

    def on_offer(self, offer: Offer) -> bool:
        cluster = self._attendance.clusters.get(offer.push.incarnation)
        if cluster is not None and cluster.offer is not None and cluster.offer.push == offer.push:
            cluster.offer = None
        return super().on_offer(offer)


class UnrecordedPushes(Pushes):
    """Pushes of a leader that answers a void push without storing that."""

    def next_round(self) -> Round | Voided | None:
        decided = super().next_round()
        if not isinstance(decided, Voided):
            return decided
        self.answer(decided.offer, PushAnswer.VOID, NO_VERSION, decided.reason)
        return None


class LatePushes(Pushes):
    """Pushes of a leader that also takes pushes of removed clusters."""

    def on_offer(self, offer: Offer) -> bool:
        cluster = self._attendance.clusters.get(offer.push.incarnation)
        known = self._desk.chain.incarnations.get(offer.push.incarnation)
        if cluster is None or known is None or not known.over or offer.push.number != known.next:
            return super().on_offer(offer)
        cluster.offer = offer
        self._shards.stage(offer)
        return False


class LateAttendance(Attendance):
    """Attendance that keeps removed clusters in, and does not tell them."""

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
    """Rounds that let in pushes of clusters that are not in the job."""

    def _objection(self, offer: Offer) -> str:
        words = super()._objection(offer)
        return "" if "is not in the job" in words else words


class UnbasedRounds(Rounds):
    """Rounds that do not check which pushes of its cluster a push's base holds."""

    def _objection(self, offer: Offer) -> str:
        return self._chain.leases.objection(offer) if self._chain.leases is not None else ""


class UncheckedRounds(Rounds):
    """Rounds that check neither a push's base nor the samples that it covers."""

    def _objection(self, offer: Offer) -> str:
        return ""


class UnleasedRounds(Rounds):
    """Rounds that do not check which samples a push covers."""

    def _objection(self, offer: Offer) -> str:
        words = super()._objection(offer)
        return words if words.startswith("its base") else ""


class RefusingRounds(Rounds):
    """Rounds that reject pushes that a rollback opened again."""

    def _objection(self, offer: Offer) -> str:
        return "it was taken before" if offer.push in self._chain.reopened else super()._objection(offer)


class RefusingUnleasedRounds(RefusingRounds, UnleasedRounds):
    """Rounds that reject pushes that a rollback opened again, and do not check which samples a push covers."""


class RefusingUncheckedRounds(RefusingRounds, UncheckedRounds):
    """Rounds that reject pushes that a rollback opened again, and check neither a push's base nor its samples."""


class LearningRounds(Rounds):
    """Rounds whose gate learns from pushes that it rejects."""

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
    """Rounds whose gate forgets which clusters it has refused."""

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
    """Rounds whose deadline moves to a later time with each arriving push."""

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
    """Attendance that waits for newcomers that have no version yet."""

    def training(self) -> set[IncarnationId]:
        return super().training() | {who for who in self.living() if self.clusters[who].base == NO_VERSION}


# ---------------------------------------------------------------------- what the chain says


class GreedyLeases(Leases):
    """Leases that take leased positions for free ones."""

    def _free(self, state: object) -> tuple[tuple[int, int], ...]:
        leased, state.leased = state.leased, {}  # type: ignore[attr-defined]
        free = super()._free(state)  # type: ignore[arg-type]
        state.leased = leased  # type: ignore[attr-defined]
        return free


class PartLeases(Leases):
    """Leases of parts of steps."""

    def grant(
        self,
        incarnation: IncarnationId,
        samples: int,
        batches: Batches,
        among: Collection[IncarnationId] | None = None,
    ) -> Leased | None:
        return super().grant(incarnation, samples, Batches(1, 1), among)


class GivingLeases(Leases):
    """Leases with which a rollback frees the positions of all pushes that it takes back, also of those that are offered
    again.
    """

    def rollback(self, body: RolledBack) -> None:
        super().rollback(replace(body, lost=tuple(self._accepted)))


def chain_with(leases: type[Leases]) -> type[OuterChain]:
    """Returns a class of chains whose leases are of this class."""

    class Planted(OuterChain):
        def follow(self, entry: Entry) -> None:
            super().follow(entry)
            if isinstance(entry.body, JobOpened) and self.leases is not None:
                self.leases.__class__ = leases

    return Planted


class ForgettingChain(OuterChain):
    """Chain in which a rollback takes joins back, and their leases."""

    def _roll_back(self, made: VersionId, entry: Entry, body: RolledBack) -> None:
        super()._roll_back(made, entry, body)
        for who, known in self.incarnations.items():
            if not known.over and who.number > 1 and not known.answers and self.leases is not None:
                self.leases.remove(who)
                known.over = "its join was taken back"


class SilentChain(OuterChain):
    """Chain in which a rollback makes no version."""

    def _version(self, entry: Entry, body: Founded | Round | RolledBack) -> None:
        super()._version(entry, body)
        if isinstance(body, RolledBack):
            self.newest = body.to


class OpenStore(ChainStore):
    """Store that does not compare writes by their terms."""

    def append(self, entry: Entry) -> str:
        term, self.term = self.term, entry.term
        refused = super().append(entry)
        self.term = term
        return refused


# ---------------------------------------------------------------------- followers and clusters


class HoardingFollower(FollowerMachine):
    """Follower that keeps pushes that no round will ever take."""

    def _hear(self, message: ToFollower) -> None:
        if not isinstance(message, DropPush):
            super()._hear(message)


class PassedFollower(FollowerMachine):
    """Follower that computes on from its own version when the durable mark passes that version."""

    def _start(self) -> tuple[int, ShardFile | None, list[Entry]]:
        place, load, line = super()._start()
        return place, load if self.version == NO_VERSION else None, line


class NewestFileFollower(FollowerMachine):
    """Follower that starts from its own newest file."""

    def _start(self) -> tuple[int, ShardFile | None, list[Entry]]:
        place, load, line = super()._start()
        newest = max(self.disk, key=lambda file: file.version, default=None)
        known = {entry.version: number + 1 for number, entry in enumerate(line)}
        if self.version != NO_VERSION or newest is None or newest.version not in known:
            return place, load, line
        return known[newest.version], newest, line


class NumberedFollower(NewestFileFollower):
    """Follower that starts from its own newest file, and tells versions apart by their numbers alone."""

    def _start(self) -> tuple[int, ShardFile | None, list[Entry]]:
        place, load, line = super()._start()
        newest = max(self.disk, key=lambda file: file.version, default=None)
        begins = self.version == NO_VERSION and newest is not None
        at = newest.version if newest is not None and begins else self.version
        if at.number <= self._base.number or at in {entry.version for entry in line}:
            return place, load, line
        return sum(entry.version.number <= at.number for entry in line), newest if begins else None, line


class ChasingCluster(ClusterMachine):
    """Cluster that begins another fetch with each newer version."""

    def _turn_idle(self) -> None:
        if self._fetching < self._served:
            self._fetching = NO_VERSION
        super()._turn_idle()


class BoundlessCluster(ClusterMachine):
    """Cluster that trains on, however long a version takes."""

    @property
    def waits(self) -> bool:
        return not self.overlap and super().waits


class NewestBaseCluster(ClusterMachine):
    """Cluster whose pushes are deltas to the newest version."""

    def _on_frozen(self, push: PushId, manifest: str) -> None:
        base = self.base
        self.base = max(base, self._served) if base != NO_VERSION else base
        super()._on_frozen(push, manifest)
        self.base = base


class UnorderedCluster(ClusterMachine):
    """Cluster that after a rollback offers its open push before those that are open again."""

    def _unanswered(self) -> list[Offer]:
        return super()._unanswered()[::-1]


class ForgetfulSummaries(Summaries):
    """Summaries that have the newest versions alone, whatever clusters have for their base."""

    def next_summary(self) -> Summary | None:
        found = super().next_summary()
        return summary_of(self._desk.chain, (), 1) if found is not None else None


# ---------------------------------------------------------------------- another cut


def hasty_steps(job: str, names: Sequence[str]) -> Steps:
    """Yields steps in which files of followers that lose their shard go before the record."""
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
    """Yields steps that leave files of versions that the record does not name."""
    steps, came = recut_steps(job, names), None
    while True:
        try:
            step = steps.send(came)
        except StopIteration as end:
            return str(end.value)
        came = None if isinstance(step, DeleteBeyond) else (yield step)
