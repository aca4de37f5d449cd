"""Part of the leader that knows which pushes are offered, staged by all shards, decided and answered.

Theory of operation. A push is offered under the next number of its incarnation and counts once all shards have its
bytes (O2, O3). What was decided on it is in the chain, and only the chain answers. What a version holds is freed once
that version is the second newest durable one (O5). Where part of a decided push is gone for good, the job goes back to
the version before it (O5a).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from chaos_lightning.outer.rules.attendance import Attendance
from chaos_lightning.outer.rules.leader_desk import LeaderDesk
from chaos_lightning.outer.rules.messages import Dismissed, DropPush, Freed, PushAnswered, Reopened
from chaos_lightning.outer.rules.offers import impossible, oversize
from chaos_lightning.outer.rules.rounds import Rounds
from chaos_lightning.outer.rules.shards import Shards
from chaos_lightning.outer.rules.types import (
    AHEAD,
    NO_VERSION,
    Founded,
    IncarnationId,
    Offer,
    PushAnswer,
    PushId,
    RolledBack,
    Round,
    VersionId,
    Voided,
)

KEPT = 16
"""Number of accepted pushes of an incarnation that are looked at as ones that it may still keep: it keeps at most 7
(O5).
"""


class Pushes:
    """Pushes that clusters offer, and what the leader decides on them.

    Args:
        desk: Desk of the leader.
        shards: Followers and shards, at which pushes are staged.
        attendance: List of the clusters, which offer the pushes.

    Attributes:
        rounds: Part of the leader that collects pushes and decides rounds.
    """

    def __init__(self, desk: LeaderDesk, shards: Shards, attendance: Attendance) -> None:
        self._desk = desk
        self._shards = shards
        self._attendance = attendance
        self.rounds = Rounds(desk.chain)
        self._refused: dict[IncarnationId, tuple[PushId, str]] = {}
        """Last refusal that was told, by incarnation that ever had a push refused."""

    # ------------------------------------------------------------------ questions

    def staged(self) -> list[Offer]:
        """Returns the offers that all shards have staged and that are the next to be answered of their incarnation (O2,
        O3).
        """
        if not self._shards.complete:
            return []
        known = self._desk.chain.incarnations
        offers = [o for o in self._attendance.offers() if o.push.number == known[o.push.incarnation].next]
        return sorted((offer for offer in offers if self._shards.have(offer)), key=lambda offer: offer.push)

    def reopened(self, who: IncarnationId) -> list[PushId]:
        """Returns the pushes of an incarnation that a round accepted and a rollback made unanswered again."""
        return sorted(push for push in self._desk.chain.reopened if push.incarnation == who)

    # ------------------------------------------------------------------ hearing

    def on_offer(self, offer: Offer) -> bool:
        """Handles an offer, which may be a repeated one; returns whether its cluster must be told its leases again."""
        desk, who, number = self._desk, offer.push.incarnation, offer.push.number
        cluster, known = self._attendance.clusters.get(who), desk.chain.incarnations.get(who)
        if cluster is None or known is None or known.over:
            return False
        if words := oversize(offer):
            cluster.gone = words
            return False
        given = known.answers.get(number)
        if given is not None:
            if given.offer.manifest != offer.manifest:
                self._refuse(offer, "other bytes under a number that is answered")
                return False
            cluster.refused = ""
            desk.send(cluster.conn, PushAnswered(desk.term, offer.push, given.answer, given.version, given.reason))
            return given.answer is not PushAnswer.ACCEPTED  # it drops its leases when it hears that
        if number != known.next or desk.chain.lacks(offer.base):
            self._refuse(offer, f"number {known.next} is next, base {offer.base}")
            return False
        before = cluster.offer
        if before is not None and before.push == offer.push and before.manifest != offer.manifest:
            self._refuse(offer, "other bytes under a number that is offered")
            return False
        cluster.offer, cluster.refused = offer, ""
        self._shards.stage(offer)
        return False

    def _refuse(self, offer: Offer, reason: str) -> None:
        said = offer.push, reason
        self._attendance.clusters[offer.push.incarnation].refused = f"push {offer.push.number}: {reason}"
        if self._refused.get(offer.push.incarnation) != said:  # it is offered again with each heartbeat
            self._refused[offer.push.incarnation] = said
            self._desk.note("push_refused", push=str(offer.push), reason=reason)

    # ------------------------------------------------------------------ decisions

    def next_rollback(self) -> RolledBack | None:
        """Returns the rollback that is due: when a connected follower lacks its piece of a decided push and the push's
        incarnation has been removed (O5a).
        """
        chain, clusters = self._desk.chain, self._attendance.clusters
        missing = {push for follower in self._shards.up() for push in follower.missing}
        if not missing:
            return None
        served = {push for who in self._attendance.living() for push in clusters[who].kept}
        # Only what the chain holds: a follower may name a push that there never was.
        lost = {push for push in missing & chain.needed() - served if chain.over(push.incarnation)}
        if not lost:
            return None
        line = [*chain.line()][::-1]
        first = next(i for i, v in enumerate(line) if lost.intersection(v.pushes))
        behind = line[first:]
        taken = [push for version in behind for push in version.pushes]
        samples = sum(w.offer.samples for v in behind if isinstance(v.entry.body, Round) for w in v.entry.body.accepted)
        gone = tuple(sorted(p for p in taken if chain.incarnations[p.incarnation].over))
        reason = (
            f"{', '.join(map(str, sorted(lost)))}: no follower has all of it, and its cluster is gone; "
            f"{len(behind)} versions of {len(taken)} pushes with {samples} samples are taken back"
        )
        return RolledBack(chain.next_number, line[first].before, gone, reason)

    def next_founding(self) -> Founded | None:
        """Returns the entry that founds the job with the first content that all shards have staged; None if there is
        none.
        """
        if self._desk.chain.founded:
            return None
        for offer in self.staged():
            if offer.base != NO_VERSION:
                continue
            chain, settings = self._desk.chain, self._desk.settings
            words = impossible(offer, chain.counters, settings, shared=chain.leases is not None)
            finite = all(f.staged[offer.push].finite for f in self._shards.up())
            if finite and not words:
                return Founded(chain.next_number, offer)
            if not self._attendance.clusters[offer.push.incarnation].gone:
                cluster = self._attendance.clusters[offer.push.incarnation]
                cluster.gone = f"no job can begin with its push: {words or 'its parameters are not finite'}"
                self._desk.send(cluster.conn, Dismissed(self._desk.term, cluster.gone, again=False))
        return None

    def next_round(self) -> Round | Voided | None:
        """Returns the next round on staged pushes; None if none is due, or if too many versions are not durable yet
        (O5).
        """
        chain, attendance = self._desk.chain, self._attendance
        if not chain.founded:
            return None
        if chain.ahead >= AHEAD:
            self.rounds.waits = f"{chain.ahead} versions are ahead of the disk: waits for {self._shards.unsaved()}"
            return None
        for offer in attendance.offers():
            if offer.base == NO_VERSION:
                return Voided(offer, "another cluster has founded the job")
            if chain.forgot(offer.base):
                return Voided(offer, f"its base {offer.base} is so old that nothing is known of it any more")
        offers = self.staged()
        rows = {offer.push: [f.staged[offer.push] for f in self._shards.up()] for offer in offers}
        in_s = {w: max(c.in_s.values()) for w, c in attendance.clusters.items() if c.offer is not None and c.in_s}
        again = {push for who in attendance.living() for push in self.reopened(who)}
        decided = self.rounds.next(
            self._desk.now,
            offers,
            rows,
            training=attendance.training(),
            in_s=in_s,
            again=again,
            settings=self._desk.settings,
        )
        return replace(decided, paced=attendance.paced()) if isinstance(decided, Round) else decided

    # ------------------------------------------------------------------ what follows

    def answer(self, offer: Offer, answer: PushAnswer, version: VersionId, reason: str) -> None:
        """Tells a cluster the answer to its push, which is in the chain already."""
        cluster = self._attendance.clusters.get(offer.push.incarnation)
        if cluster is None:
            return
        if cluster.offer is not None and cluster.offer.push == offer.push:
            cluster.offer, cluster.in_s = None, {}
        self._desk.send(cluster.conn, PushAnswered(self._desk.term, offer.push, answer, version, reason))
        if answer is PushAnswer.VOID:
            self._shards.tell(DropPush(self._desk.term, offer.push))

    def rolled_back(self, version: VersionId, lost: Collection[PushId]) -> None:
        """Tells followers and clusters of a rollback; clusters must offer reopened pushes again, before their newest
        one.
        """
        for follower in self._shards.up():
            for push in lost:
                self._desk.send(follower.conn, DropPush(self._desk.term, push))
        for who in self._attendance.living():
            self._attendance.clusters[who].offer = None
            self.tell_reopened(who, version)
        for follower in self._shards.up():
            follower.missing.clear()

    def tell_reopened(self, who: IncarnationId, version: VersionId) -> None:
        """Tells a cluster which of its pushes a rollback has made unanswered."""
        opened = tuple(self.reopened(who))
        if opened:
            self._attendance.tell(who, Reopened(self._desk.term, version, opened))

    def free(self, whom: Iterable[IncarnationId]) -> None:
        """Tells incarnations which of their accepted pushes the second newest durable version contains, so that their
        bytes may be freed (O5).
        """
        chain, needed = self._desk.chain, self._desk.chain.needed()
        for who in whom:
            own = [i for i in chain.incarnations if i.cluster == who.cluster]  # earlier ones' are kept, too (O5)
            accepted = [push for i in own for push in chain.incarnations[i].accepted(KEPT)]
            kept = self._attendance.clusters[who].kept if who in self._attendance.clusters else ()
            accepted += [push for push in kept if push.incarnation not in chain.incarnations]  # cut: nobody needs it
            free = tuple(push for push in accepted if push not in needed)
            if free:
                self._attendance.tell(who, Freed(self._desk.term, free))
