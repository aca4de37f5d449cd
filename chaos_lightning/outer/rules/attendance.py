"""Keeps the leader's list of clusters: decides which ones come in and which are removed, and knows which are heard from
and train (O14).

Theory of operation. A cluster's word is what it said last. An incarnation is in the chain before its cluster is told
(O3b). Who misses three heartbeats is removed; gaps of the leader's own clock count for nobody's silence, and after a
takeover clusters have a while to come back. One that alone holds what a shard may lack is waited for much longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chaos_lightning.outer.rules.leader_desk import LeaderDesk
from chaos_lightning.outer.rules.messages import Beat, ClusterHello, Dismissed, Eldest, Paced, ToCluster
from chaos_lightning.outer.rules.pace import local_steps
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    IncarnationId,
    JobOpened,
    Joined,
    Offer,
    PacedCluster,
    ProcessPlace,
    PushId,
    Removed,
    VersionId,
)
from chaos_lightning.planning.batches import Batches

MISSED = 3
"""Number of heartbeats that a cluster may miss (Di-PS 4.3)."""

DEAD = "its process is dead"
MOST_RATE = 1e12
"""Largest rate of samples or steps a second that is believed of a cluster."""


@dataclass(slots=True)
class ClusterState:
    """State of one incarnation, as the leader has last heard; `in_s`: by follower, when that one expects to have the
    incarnation's push.
    """

    conn: int | None
    heard_s: float
    nonce: str = ""
    rate: float = 0.0
    step_rate: float = 0.0
    steps: int = 0
    base: VersionId = NO_VERSION
    fetching: VersionId = NO_VERSION
    seeks_since: float = math.inf
    """Time (s) since which the cluster has wanted another version than its base."""
    left: int = 0
    pending: int = 0
    batches: Batches | None = None
    """Number of samples that the cluster trains at once; None if it has not told this leader yet."""
    offer: Offer | None = None
    refused: str = ""
    """Reason for which the push that the cluster offers is not taken in; it offers the same with each heartbeat."""
    leaving: bool = False
    verdict: str = ""
    """Reason for which the cluster's own loop is over."""
    gone: str = ""
    """Reason for which the cluster is known to be dead."""
    kept: frozenset[PushId] = frozenset()
    """Pushes whose bytes the cluster held when it came."""
    in_s: dict[str, float] = field(default_factory=dict)

    def stands(self, now: float, base: VersionId, fetching: VersionId) -> None:
        """Notes the cluster's base, and the version that it is fetching."""
        if fetching == NO_VERSION:
            self.seeks_since = math.inf
        elif self.seeks_since == math.inf or base != self.base:
            self.seeks_since = now
        self.base, self.fetching = base, fetching


class Attendance:
    """Part of the leader that keeps the list of clusters.

    Args:
        desk: Desk of the leader.
        holds_alone: Whether a shard may lack a push of this incarnation that the chain needs.

    Attributes:
        clusters: State of each cluster in the job, by incarnation; incarnations that are over are not in it.
    """

    def __init__(self, desk: LeaderDesk, holds_alone: Callable[[IncarnationId], bool]) -> None:
        self._desk = desk
        self._holds_alone = holds_alone
        self._conns: dict[int, IncarnationId] = {}
        self._hellos: dict[int, ClusterHello] = {}
        """Hellos of clusters that wait to be let in, by stream. Ranks of one cluster may have several, some of them
        gone.
        """
        self._why = ""
        """Reason of the paces that were decided last."""
        self.clusters: dict[IncarnationId, ClusterState] = {}
        self._dead: set[IncarnationId] = set()
        """Incarnations without a stream whose process is known to be dead."""

    # ------------------------------------------------------------------ questions

    def living(self) -> list[IncarnationId]:
        """Returns the incarnations that the chain has as members and that have spoken to this leader."""
        return [who for who in self.clusters if not self._desk.chain.incarnations[who].over]

    def training(self) -> set[IncarnationId]:
        """Returns the incarnations for whose pushes rounds wait: those with a base, and with samples to train or
        progress to push (O13).
        """
        found = set()
        for who in self.living():
            cluster = self.clusters[who]
            if cluster.base == NO_VERSION or cluster.leaving:
                continue
            if self._desk.chain.leases is None or cluster.left or cluster.pending or cluster.offer is not None:
                found.add(who)
        return found

    def oldest(self) -> IncarnationId | None:
        """Returns the oldest incarnation in the job; when its loop ends, the job does."""
        living = [who for who, known in self._desk.chain.incarnations.items() if not known.over]
        return min(living, key=lambda who: who.number, default=None)

    def steps_of(self, cluster: ClusterState) -> int:
        """Returns the number of inner steps from one push of a cluster to its next."""
        return cluster.steps or self._desk.settings.inner_steps

    def sole_holders(self) -> dict[IncarnationId, float]:
        """Returns, with their silence in seconds, the silent incarnations that are not removed only because no one else
        may have a push of theirs that a shard needs (O14).
        """
        desk = self._desk
        silent_s = {who: desk.now - self.clusters[who].heard_s for who in self.living()}
        for who, known in desk.chain.incarnations.items():
            if who not in self.clusters and not known.over:
                silent_s[who] = desk.now - desk.begun_s
        missed_s = MISSED * desk.settings.heartbeat_s
        return {who: for_s for who, for_s in silent_s.items() if for_s > missed_s and self._holds_alone(who)}

    @property
    def spoken(self) -> bool:
        """Whether all clusters in the job have told this leader what their base is."""
        known = self._desk.chain.incarnations.items()
        return all(who in self.clusters for who, incarnation in known if not incarnation.over)

    def fetched(self) -> list[VersionId]:
        """Returns the versions that clusters are fetching, beginning with the cluster that has waited longest (O8c)."""
        seeking = [who for who in self.living() if self.clusters[who].fetching != NO_VERSION]
        return [self.clusters[who].fetching for who in sorted(seeking, key=lambda who: self.clusters[who].seeks_since)]

    def offers(self) -> list[Offer]:
        """Returns the unanswered pushes that clusters in the job offer."""
        found = [self.clusters[who].offer for who in self.living()]
        return [offer for offer in found if offer is not None]

    # ------------------------------------------------------------------ hearing

    def waits(self, conn: int, hello: ClusterHello) -> None:
        """Notes that a new cluster wants to be let in."""
        self._hellos[conn] = hello

    def waiting(self) -> list[int]:
        """Returns the streams of clusters that wait to be let in."""
        return [*self._hellos]

    def again(self) -> list[tuple[int, ClusterHello]]:
        """Empties the list of clusters that wait to be let in, and returns their streams and hellos, so that each is
        judged anew.
        """
        found, self._hellos = [*self._hellos.items()], {}
        return found

    def has_come(self, who: IncarnationId) -> tuple[int, ClusterHello] | None:
        """Returns stream and hello of the waiting cluster for which this incarnation was stored; None if it waits no
        more.
        """
        found = next((each for each in self._in_turn() if each[1].cluster == who.cluster), None)
        if found is not None:
            del self._hellos[found[0]]
        return found

    def _in_turn(self) -> list[tuple[int, ClusterHello]]:
        return sorted(self._hellos.items(), key=lambda each: (each[1].cluster, each[0]))

    def on_stream(self, conn: int, who: IncarnationId, hello: ClusterHello) -> None:
        """Notes the stream on which a known incarnation speaks."""
        now = self._desk.now
        cluster = self.clusters.setdefault(who, ClusterState(conn, now))
        if (known := self._desk.chain.paced.get(who)) is not None and not cluster.steps:
            cluster.steps, cluster.rate, cluster.step_rate = known.steps, known.rate, known.step_rate
        cluster.conn, cluster.heard_s, cluster.nonce = conn, now, hello.nonce
        cluster.stands(now, hello.base, hello.fetching)
        cluster.kept = frozenset(hello.kept)
        self._conns[conn] = who

    def on_beat(self, conn: int, beat: Beat) -> bool:
        """Handles a heartbeat; returns whether the cluster must be told everything again, since the stream on which it
        was told has ended.

        Where a cluster has several ranks, one that was put out may say hello last, and go.
        """
        cluster = self.clusters.get(beat.incarnation)
        if cluster is None:
            return False
        cluster.heard_s = self._desk.now
        cluster.stands(self._desk.now, beat.base, beat.fetching)
        cluster.rate, cluster.step_rate = (min(max(rate, 0.0), MOST_RATE) for rate in (beat.rate, beat.step_rate))
        cluster.left, cluster.pending, cluster.leaving = beat.left, beat.pending, beat.leaving
        cluster.batches = beat.batches
        if cluster.conn is not None or cluster.gone:
            return False
        cluster.conn, self._conns[conn] = conn, beat.incarnation
        return True

    def closed(self, conn: int, *, proof: bool) -> None:
        """Notes that a stream has ended; `proof` means that its process is known to be dead."""
        who = self._conns.pop(conn, None)
        self._hellos.pop(conn, None)
        cluster = self.clusters.get(who) if who is not None else None
        if cluster is not None and cluster.conn == conn:  # it may be removed, or here again
            cluster.conn = None
            cluster.gone = cluster.gone or (DEAD if proof else "")

    def absent(self) -> dict[IncarnationId, ProcessPlace]:
        """Returns the processes of clusters that are in the job and have no stream to this leader."""
        known = self._desk.chain.incarnations.items()
        return {
            who: incarnation.process
            for who, incarnation in known
            if incarnation.process is not None
            and not incarnation.over
            and (who not in self.clusters or self.clusters[who].conn is None)
        }

    def died(self, who: IncarnationId) -> None:
        """Notes that the process of an incarnation has been found dead."""
        if who in self.absent():
            self._dead.add(who)

    def forgive(self, gap_s: float) -> None:
        """Moves the times at which clusters were last heard by `gap_s`, a time in which the leader itself did not run,
        so that no cluster counts as silent for it.
        """
        for cluster in self.clusters.values():
            cluster.heard_s += gap_s

    # ------------------------------------------------------------------ decisions

    def next_opening(self) -> JobOpened | None:
        """Returns the entry that opens the job with the first cluster's agreement; None if the job is open, or no
        cluster waits.
        """
        if self._desk.chain.agreement is not None or not self._hellos:
            return None
        hello = next(iter(self._hellos.values()))
        return JobOpened(hello.agreement, f"{hello.cluster} at {hello.place}", hello.nonce)

    def next_join(self, welcome: Callable[[int, IncarnationId, ClusterHello], None]) -> Joined | None:
        """Returns the entry by which the next waiting cluster joins. Its name must be free: no incarnation has it, or
        the one that has it has long not reached this leader (O3b).

        Args:
            welcome: Told of one that is in already, whose welcome was lost: its stream, its name and its word.
        """
        chain, desk = self._desk.chain, self._desk
        awaited = desk.now - desk.begun_s <= desk.settings.reconnect_s
        for conn, hello in self._in_turn():
            name = hello.cluster
            named = [who for who, known in chain.incarnations.items() if who.cluster == name and not known.over]
            same = [who for who in named if awaited or who in self.clusters]
            here = {who: self.clusters[who] for who in same if who in self.clusters}
            own = [who for who, cluster in here.items() if cluster.nonce == hello.nonce]
            if own:
                del self._hellos[conn]
                welcome(conn, own[0], hello)
            elif any(cluster.conn is not None for cluster in here.values()):
                del self._hellos[conn]
                words = f"a cluster called {name} is in already, at {chain.incarnations[same[0]].place}"
                words += ": give this one another name"
                self._desk.send(conn, Dismissed(self._desk.term, words, again=False))
            elif not same:
                process = hello.process if hello.process.pid else None
                return Joined(IncarnationId(name, chain.joined + 1), hello.place, process=process)
        return None

    def next_removal(self) -> Removed | None:
        """Returns the entry that removes the next incarnation: one that left, was rejected again and again, or was
        silent for too long (O14).
        """
        desk, chain = self._desk, self._desk.chain
        for who in sorted(self._dead):
            self._dead.discard(who)
            if not chain.incarnations[who].over:
                return Removed(who, DEAD)
        for who in self.living():
            cluster = self.clusters[who]
            silent_s = desk.now - cluster.heard_s
            if cluster.gone:
                return Removed(who, cluster.gone)
            if cluster.base != NO_VERSION and not chain.founded:
                return Removed(who, "the job lost its first version: whoever comes in anew founds it with what it has")
            if chain.leases is not None and who in chain.leases.failing:
                return Removed(who, "its pushes were rejected again and again: it comes in anew")
            if silent_s <= MISSED * desk.settings.heartbeat_s:
                continue
            if silent_s <= desk.settings.last_holder_timeout_s and self._holds_alone(who):
                continue
            return Removed(who, f"nothing was heard of it for {silent_s:.1f} s")
        for who, known in chain.incarnations.items():
            away = who not in self.clusters and not known.over
            if away and desk.now - desk.begun_s > self._patience_s(who):
                return Removed(who, "it has not come back since another leader took over")
        return None

    def _patience_s(self, who: IncarnationId) -> float:
        """Returns for how many seconds a new leader waits for a cluster that has not connected yet."""
        settings = self._desk.settings
        return settings.last_holder_timeout_s if self._holds_alone(who) else settings.reconnect_s

    # ------------------------------------------------------------------ what follows

    def tell(self, who: IncarnationId, message: ToCluster) -> None:
        """Sends a message to a cluster, if it has a stream."""
        cluster = self.clusters.get(who)
        if cluster is not None:
            self._desk.send(cluster.conn, message)

    def tell_all(self, message: ToCluster) -> None:
        """Sends a message to all clusters in the job."""
        for who in self.living():
            self._desk.send(self.clusters[who].conn, message)

    def removed(self, who: IncarnationId, reason: str) -> None:
        """Forgets an incarnation that was removed, and tells its cluster."""
        cluster = self.clusters.pop(who, None)
        if (oldest := self.oldest()) is not None and oldest.number > who.number:
            self.tell_all(Eldest(self._desk.term, oldest))
        if cluster is not None and cluster.conn is not None:
            self._desk.send(cluster.conn, Dismissed(self._desk.term, reason, again=True))
            self._conns.pop(cluster.conn, None)

    def paced(self) -> tuple[PacedCluster, ...]:
        """Returns the pace of each cluster from the next round on; under the policy `robust`, paces make all pushes
        arrive together.
        """
        training = {who: self.clusters[who] for who in sorted(self.training())}
        steps = {who: cluster.steps for who, cluster in training.items()}
        if self._desk.settings.policy == "robust":
            rates = {who: cluster.step_rate for who, cluster in training.items()}
            before = {who: number for who, number in steps.items() if number}
            steps, self._why = local_steps(rates, before, self._desk.settings.inner_steps)
        return tuple(PacedCluster(who, steps[who], c.rate, c.step_rate) for who, c in training.items())

    def pace(self, paced: Iterable[PacedCluster]) -> None:
        """Sets the clusters' paces to those in a stored round, and tells the clusters whose pace changes."""
        for each in paced:
            cluster = self.clusters.get(each.incarnation)
            if cluster is not None and each.steps:
                if each.steps != self.steps_of(cluster):
                    self.tell(each.incarnation, Paced(self._desk.term, each.steps, self._why))
                cluster.steps = each.steps
