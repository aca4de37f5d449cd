"""The leader's side of outer sync, as a pure state machine: it decides rounds, stores them, and then tells of them.

Theory of operation. All that must not be forgotten is in the chain (chain.py). Beside it the leader holds what it is
told: who is connected, which pushes are offered, which of them are *staged* at which shard, which versions followers
have computed and saved. After a restart it hears all of this again. `on(now, event)` takes an event in, and then turns
until nothing is left to do: one decision at a time, each stored before anybody hears of it (O1). While a `StoreEntry`
is out nothing else is decided.

In the order in which they are looked for: follower starts are entered, so that these obey (O7); the shards are cut;
clusters join; who is silent or has gone is removed (O14); what was lost for good is rolled back (O5a); versions that
all shards have saved are marked (O6); the first content founds the job; staged pushes become a round (O2), unless too
many are ahead of the disk already; free samples are leased (O11); the job ends.

A leader that hears of a term, a version or an incarnation that its chain lacks holds an older copy of it, or is late:
it decides nothing more (O7).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from chaos_lightning.outer.chain import AHEAD, OuterChain, Version
from chaos_lightning.outer.effects import (
    Done,
    EntryStored,
    Heard,
    LeaderEffect,
    LeaderEvent,
    OuterNote,
    SendTo,
    StoreEntry,
    StreamClosed,
    TimePassed,
)
from chaos_lightning.outer.exact import ExactSum
from chaos_lightning.outer.gates import MeasuredPush
from chaos_lightning.outer.judging import judge
from chaos_lightning.outer.leases import wanted
from chaos_lightning.outer.messages import (
    Applied,
    Apply,
    Beat,
    ClusterHello,
    Dismissed,
    DropPush,
    FollowerHello,
    Freed,
    FromCluster,
    FromFollower,
    Goodbye,
    Granted,
    JobFinished,
    Keep,
    Marked,
    Missing,
    Obey,
    Offered,
    OnDisk,
    PushAnswered,
    Reopened,
    Served,
    Stage,
    Staged,
    Welcomed,
    Written,
)
from chaos_lightning.outer.settings import OuterSettings
from chaos_lightning.outer.types import (
    NO_VERSION,
    Body,
    Cut,
    Durable,
    Ended,
    Entry,
    Founded,
    IncarnationId,
    Joined,
    Leased,
    Offer,
    PushAnswer,
    PushId,
    Rejection,
    Removed,
    RolledBack,
    Round,
    Started,
    VersionId,
    Voided,
)
from chaos_lightning.outer.window import ArrivalRates, Window

MISSED = 3
"""Heartbeats that a cluster may miss (Di-PS 4.3)."""


@dataclass(slots=True)
class ClusterState:
    """What the leader is told by one incarnation."""

    conn: int | None
    heard_s: float
    nonce: str = ""
    rate: float = 0.0
    base: VersionId = NO_VERSION
    left: int = 0
    pending: int = 0
    offer: Offer | None = None
    leaving: bool = False
    gone: str = ""
    """Why it is known to be dead."""


@dataclass(slots=True)
class Follower:
    """What the leader is told by one follower."""

    conn: int | None
    nonce: str
    obeys: bool = False
    version: VersionId = NO_VERSION
    disk: dict[VersionId, str] = field(default_factory=dict)
    staged: dict[PushId, Staged] = field(default_factory=dict)
    missing: set[PushId] = field(default_factory=set)


class LeaderMachine:
    """See the module. The shell feeds a TimePassed a few times per heartbeat.

    Args:
        settings: The job's rules.
        chain: What the store holds.
        term: This leader's.
        followers: So many hold a shard each.
    """

    def __init__(self, settings: OuterSettings, chain: OuterChain, term: int, followers: int = 1) -> None:
        self.settings = settings
        self.chain = chain
        self.term = term
        self._wanted_followers = followers
        self.clusters: dict[IncarnationId, ClusterState] = {}
        self.followers: dict[str, Follower] = {}
        self._conns: dict[int, IncarnationId | str] = {}
        self._hellos: dict[str, tuple[int, ClusterHello]] = {}
        """Clusters that wait to be let in, by name."""
        self._now = 0.0
        self._begun_s: float | None = None
        self._window: Window | None = None
        self._rates = ArrivalRates()
        self._decided: tuple[VersionId, float, int] | None = None
        """The last round: its version, when it was stored (s), how many pushes it answered."""
        self._decided_before_s = 0.0
        self._persisting: Entry | None = None
        self._served = NO_VERSION
        """The newest version that all shards serve."""
        self._keep = NO_VERSION
        self._done = ""
        self._out: list[LeaderEffect] = []

    # ------------------------------------------------------------------ events

    def on(self, now: float, event: LeaderEvent) -> list[LeaderEffect]:
        """Takes one event in; returns the effects in the order in which they must happen.

        Args:
            now: Seconds by a clock that never goes back.
            event: What happened.
        """
        self._out = []
        if self._done:
            return []
        self._forgive(now)
        match event:
            case Heard(conn, message):
                self._hear(conn, message)
            case StreamClosed(conn, proof):
                self._close(conn, proof)
            case EntryStored(ok, detail):
                self._on_stored(ok, detail)
            case TimePassed():
                pass
        while not self._done and self._persisting is None and self._turn():
            pass
        if not self._done:
            self._save()
        return self._out

    def _forgive(self, now: float) -> None:
        """A gap in this process's own clock is nobody's silence (O14)."""
        if self._begun_s is None:
            self._begun_s = now
        gap = now - self._now if self._now else 0.0
        self._now = now
        if gap > self.settings.heartbeat_s:
            self._begun_s += gap
            for cluster in self.clusters.values():
                cluster.heard_s += gap

    def _send(self, conn: int | None, message: object) -> None:
        if conn is not None:
            self._out.append(SendTo(conn, message))  # type: ignore[arg-type]

    def _note(self, name: str, **fields: object) -> None:
        self._out.append(OuterNote(name, tuple(fields.items())))

    def _end(self, reason: str, *, finished: bool = False) -> None:
        self._done = reason
        self._out.append(Done(reason, finished))

    def _persist(self, body: Body) -> bool:
        self._persisting = self.chain.entry(self.term, body)
        self._out.append(StoreEntry(self._persisting))
        return True

    # ------------------------------------------------------------------ hearing

    def _hear(self, conn: int, message: FromCluster | FromFollower) -> None:
        match message:
            case ClusterHello():
                self._on_cluster(conn, message)
            case FollowerHello():
                self._on_follower(conn, message)
            case Offered(offer):
                self._on_offer(offer)
            case Beat():
                self._on_beat(message)
            case Goodbye(incarnation, reason):
                if incarnation in self.clusters:
                    self.clusters[incarnation].gone = f"it left: {reason}"
            case Staged():
                self._on_staged(message)
            case Applied(name, version):
                self.followers[name].version = version
                self._serve()
            case Written(name, version, digest):
                self.followers[name].disk[version] = digest
            case Missing(name, push):
                self.followers[name].missing.add(push)

    def _lacks(self, term: int, *versions: VersionId) -> str:
        """What somebody knows and this chain lacks, in words."""
        if term > self.term:
            return f"a leader with term {term}"
        unknown = [v for v in versions if v != NO_VERSION and v not in self.chain.versions]
        return f"version {unknown[0]}" if unknown else ""

    def _on_cluster(self, conn: int, hello: ClusterHello) -> None:
        who = hello.resume
        lacking = self._lacks(hello.term, hello.base, hello.newest)
        if not lacking and who is not None and who not in self.chain.incarnations:
            lacking = f"incarnation {who}"
        if lacking:
            self._end(f"{hello.cluster} knows {lacking}, which this chain lacks: it is an older copy, or another's")
            return
        if who is not None and self.chain.incarnations[who].over:
            self._send(conn, Dismissed(self.term, self.chain.incarnations[who].over, again=True))
        elif who is not None:
            self._take_over(conn, who, hello)
        else:
            self._hellos[hello.cluster] = (conn, hello)

    def _take_over(self, conn: int, who: IncarnationId, hello: ClusterHello) -> None:
        """The stream of a known incarnation: all that it may have missed is said again."""
        cluster = self.clusters.setdefault(who, ClusterState(conn, self._now))
        cluster.conn, cluster.heard_s, cluster.nonce, cluster.base = conn, self._now, hello.nonce, hello.base
        self._conns[conn] = who
        self._welcome(who)

    def _welcome(self, who: IncarnationId) -> None:
        known, cluster = self.chain.incarnations[who], self.clusters[who]
        self._send(cluster.conn, Welcomed(self.term, who, known.next, self._served, self.chain.founded))
        for answered in known.answers.values():
            message = PushAnswered(self.term, answered.offer.push, answered.answer, answered.version, answered.reason)
            self._send(cluster.conn, message)
        opened = tuple(sorted(self._reopened(who)))
        if opened:
            self._send(cluster.conn, Reopened(self.term, self.chain.newest, opened))
        self._free([who])
        if self.chain.durable:
            self._send(cluster.conn, OnDisk(self.term, self.chain.durable[-1][0]))
        self._grant(who)
        if self.chain.ended is not None:
            self._send(cluster.conn, JobFinished(self.term, self.chain.ended.version, self.chain.ended.reason))

    def _reopened(self, who: IncarnationId) -> list[PushId]:
        """Pushes of it that were accepted once, rolled back, and are unanswered."""
        held = {push for version in self.chain.versions.values() for push in version.pushes if push.incarnation == who}
        return [push for push in held if push.number not in self.chain.incarnations[who].answers]

    def _on_follower(self, conn: int, hello: FollowerHello) -> None:
        lacking = self._lacks(hello.term)  # its files may be another job's, or of versions that were never told
        if lacking:
            self._end(f"{hello.follower} knows {lacking}, which this chain lacks: it is an older copy, or late")
            return
        before = self.followers.get(hello.follower)
        if before is not None and before.conn is not None:
            self._conns.pop(before.conn, None)
        self.followers[hello.follower] = Follower(conn, hello.nonce, version=hello.version, disk=dict(hello.disk))
        self._conns[conn] = hello.follower

    def _on_offer(self, offer: Offer) -> None:
        who, number = offer.push.incarnation, offer.push.number
        cluster, known = self.clusters.get(who), self.chain.incarnations.get(who)
        if cluster is None or known is None or known.over:
            return
        given = known.answers.get(number)
        if given is not None:
            if given.offer.manifest != offer.manifest:
                self._note("push_refused", push=str(offer.push), reason="other bytes under a number that is answered")
                return
            self._send(cluster.conn, PushAnswered(self.term, offer.push, given.answer, given.version, given.reason))
            return
        if number != known.next or (offer.base not in self.chain.versions and offer.base != NO_VERSION):
            self._note("push_refused", push=str(offer.push), reason=f"number {known.next} is next, base {offer.base}")
            return
        if cluster.offer is not None and cluster.offer.push == offer.push and cluster.offer.manifest != offer.manifest:
            self._note("push_refused", push=str(offer.push), reason="other bytes under a number that is offered")
            return
        cluster.offer = offer
        for follower in self._shards():
            staged = follower.staged.get(offer.push)
            if staged is None or staged.manifest != offer.manifest:
                self._send(follower.conn, Stage(self.term, offer))

    def _on_beat(self, beat: Beat) -> None:
        cluster = self.clusters.get(beat.incarnation)
        if cluster is None:
            return
        cluster.heard_s, cluster.rate, cluster.base = self._now, beat.rate, beat.base
        cluster.left, cluster.pending, cluster.leaving = beat.left, beat.pending, beat.leaving

    def _on_staged(self, staged: Staged) -> None:
        follower = self.followers[staged.follower]
        follower.staged[staged.push] = staged
        follower.missing.discard(staged.push)

    def _close(self, conn: int, proof: bool) -> None:
        who = self._conns.pop(conn, None)
        self._hellos = {name: held for name, held in self._hellos.items() if held[0] != conn}
        if isinstance(who, IncarnationId) and self.clusters[who].conn == conn:
            self.clusters[who].conn = None
            self.clusters[who].gone = self.clusters[who].gone or ("its process is dead" if proof else "")
        elif isinstance(who, str) and self.followers[who].conn == conn:
            self.followers[who].conn = None

    # ------------------------------------------------------------------ who is there

    def _shards(self) -> list[Follower]:
        """Followers that obey, in shard order; those that are away are missing."""
        found = [self.followers[name] for name in self.chain.cut if name in self.followers]
        return [f for f in found if f.obeys and f.conn is not None]

    @property
    def _complete(self) -> bool:
        return bool(self.chain.cut) and len(self._shards()) == len(self.chain.cut)

    def _living(self) -> list[IncarnationId]:
        return [who for who in self.clusters if not self.chain.incarnations[who].over]

    def _training(self) -> set[IncarnationId]:
        """Who is waited for: it has a base, and samples to train or progress that is not pushed (O13)."""
        found = set()
        for who in self._living():
            cluster = self.clusters[who]
            if cluster.base == NO_VERSION or cluster.leaving:
                continue
            if self.chain.leases is None or cluster.left or cluster.pending or cluster.offer is not None:
                found.add(who)
        return found

    def _staged(self) -> list[Offer]:
        """Offers that all shards have, and that are next of their incarnation (O2, O3)."""
        shards = self._shards()
        if not self._complete:
            return []
        found = []
        for who in self._living():
            offer = self.clusters[who].offer
            if offer is None or offer.push.number != self.chain.incarnations[who].next:
                continue
            here = [f.staged.get(offer.push) for f in shards]
            if all(s is not None and s.manifest == offer.manifest for s in here):
                found.append(offer)
        return sorted(found, key=lambda offer: offer.push)

    # ------------------------------------------------------------------ turning

    def _turn(self) -> bool:
        """Decides at most one thing; True if something changed that may allow another decision."""
        if self.chain.ended is not None:  # another leader ended it: who comes is told for a while
            assert self._begun_s is not None
            if self._now - self._begun_s > self.settings.reconnect_s:
                self._end(self.chain.ended.reason, finished=True)
            return False
        return (
            self._turn_starts()
            or self._turn_cut()
            or self._turn_joins()
            or self._turn_removals()
            or self._turn_rollback()
            or self._turn_durable()
            or self._turn_founding()
            or self._turn_round()
            or self._turn_leases()
            or self._turn_end()
        )

    def _turn_starts(self) -> bool:
        for name, follower in self.followers.items():
            if follower.conn is None or follower.obeys:
                continue
            if self.chain.starts.get(name) != follower.nonce:
                return self._persist(Started(name, follower.nonce))
            self._have_obey(name)
        return False

    def _have_obey(self, name: str) -> None:
        follower, chain = self.followers[name], self.chain
        shard = chain.cut.index(name) if name in chain.cut else -1
        durable = self._durable_of(shard)
        told = tuple(v.entry for v in chain.since(chain.safe))
        follower.obeys = True
        self._send(follower.conn, Obey(self.term, follower.nonce, shard, len(chain.cut), durable, chain.safe, told))
        for who in self._living():
            if (offer := self.clusters[who].offer) is not None:
                self._send(follower.conn, Stage(self.term, offer))
        if self._keep != NO_VERSION:
            self._send(follower.conn, Keep(self.term, self._keep))

    def _durable_of(self, shard: int) -> tuple[tuple[VersionId, str], ...]:
        return tuple((v, digests[shard]) for v, digests in self.chain.durable) if shard >= 0 else ()

    def _turn_cut(self) -> bool:
        if self.chain.cut:
            return False
        here = sorted(name for name, f in self.followers.items() if f.conn is not None and f.obeys)
        return len(here) >= self._wanted_followers and self._persist(Cut(tuple(here[: self._wanted_followers])))

    def _turn_joins(self) -> bool:
        for name, (conn, hello) in sorted(self._hellos.items()):
            if not self.chain.cut:
                continue
            same = [who for who in self._living() if who.cluster == name]
            own = [who for who in same if self.clusters[who].nonce == hello.nonce]
            if own:  # its welcome was lost
                del self._hellos[name]
                self._take_over(conn, own[0], hello)
                return True
            if same and any(self.clusters[who].conn is not None for who in same):
                del self._hellos[name]
                words = f"a cluster called {name} is in already, at {self.chain.incarnations[same[0]].place}"
                self._send(conn, Dismissed(self.term, f"{words}: give this one another name", again=False))
                return True
            if not same:
                number = 1 + max((who.number for who in self.chain.incarnations), default=0)
                return self._persist(Joined(IncarnationId(name, number), hello.place))
        return False

    def _turn_removals(self) -> bool:
        for who in self._living():
            cluster = self.clusters[who]
            silent_s = self._now - cluster.heard_s
            if cluster.gone:
                return self._persist(Removed(who, cluster.gone))
            if self.chain.leases is not None and who in self.chain.leases.failing:
                return self._persist(Removed(who, "its pushes were rejected again and again: it comes in anew"))
            if silent_s <= MISSED * self.settings.heartbeat_s:
                continue
            if self._holds_alone(who) and silent_s <= self.settings.last_holder_timeout_s:
                continue
            return self._persist(Removed(who, f"nothing was heard of it for {silent_s:.1f} s"))
        for who, known in self.chain.incarnations.items():
            away = who not in self.clusters and not known.over and self._begun_s is not None
            if away and self._now - self._begun_s > self._patience_s(who):  # type: ignore[operator]
                return self._persist(Removed(who, "it has not come back since another leader took over"))
        return False

    def _patience_s(self, who: IncarnationId) -> float:
        return self.settings.last_holder_timeout_s if self._holds_alone(who) else self.settings.reconnect_s

    def _holds_alone(self, who: IncarnationId) -> bool:
        """Whether a shard lacks, or may lack, a push of it that the chain needs (O14)."""
        needed = [push for push in self.chain.needed() if push.incarnation == who]
        if not needed:
            return False
        shards = self._shards()
        return not self._complete or any(push not in f.staged for f in shards for push in needed)

    def _turn_rollback(self) -> bool:
        """Only where a follower that is up lacks its part of a decided push whose incarnation is over (O5a)."""
        lost = {
            push
            for follower in self._shards()
            for push in follower.missing
            if self.chain.incarnations[push.incarnation].over and push in self.chain.needed()
        }
        if not lost:
            return False
        line = [*self.chain.line()][::-1]
        first = next(i for i, v in enumerate(line) if lost.intersection(v.pushes))
        behind = line[first:]
        taken = [push for version in behind for push in version.pushes]
        samples = sum(w.offer.samples for v in behind if isinstance(v.entry.body, Round) for w in v.entry.body.accepted)
        gone = tuple(sorted(p for p in taken if self.chain.incarnations[p.incarnation].over))
        reason = (
            f"{', '.join(map(str, sorted(lost)))}: no follower has all of it, and its cluster is gone; "
            f"{len(behind)} versions of {len(taken)} pushes with {samples} samples are taken back"
        )
        return self._persist(RolledBack(self.chain.next_number, line[first].before, gone, reason))

    def _turn_durable(self) -> bool:
        shards = self._shards()
        if not self._complete:
            return False
        newest = self.chain.durable[-1][0] if self.chain.durable else NO_VERSION
        for version in self.chain.line():
            if version.id == newest:
                return False
            digests = [f.disk.get(version.id) for f in shards]
            if all(d is not None for d in digests):
                return self._persist(Durable(version.id, tuple(d for d in digests if d is not None)))
        return False

    def _turn_founding(self) -> bool:
        if self.chain.founded:
            return False
        offers = [offer for offer in self._staged() if offer.base == NO_VERSION]
        return bool(offers) and self._persist(Founded(self.chain.next_number, offers[0]))

    def _turn_round(self) -> bool:
        if not self.chain.founded or self.chain.ahead >= AHEAD:
            return False
        for who in self._living():
            offer = self.clusters[who].offer
            if offer is not None and offer.base == NO_VERSION:
                return self._persist(Voided(offer, "another cluster has founded the job"))
        offers = self._staged()
        if not offers:
            self._window = None
            return False
        training = self._training() | {o.push.incarnation for o in offers}
        if self._window is None:
            self._window = Window.opened(self._now, training, self._rates, self.settings)
        due = self._window.due(self._now, training, {o.push.incarnation for o in offers}, {})
        if not due.closes:
            return False
        self._window = None
        return self._decide(offers, due.usual, due.reason)

    def _decide(self, offers: Sequence[Offer], usual: int, why: str) -> bool:
        """A round on these pushes; what must be rejected whatever it holds is no candidate."""
        refused = [Rejection(offer, words) for offer in offers if (words := self._objection(offer))]
        rest = [offer for offer in offers if offer.push not in {r.offer.push for r in refused}]
        rows = {offer.push: [f.staged[offer.push] for f in self._shards()] for offer in rest}
        sums: dict[tuple[PushId, PushId], float] = {}
        for one in rows:
            for other in rows:
                if one <= other:
                    sums[one, other] = self._product(rows, one, other)
        # A push that a rollback opened again is not void for its age: later ones stand on what it holds.
        again = {push for who in self._living() for push in self._reopened(who)}
        ages = {offer.push: 0 if offer.push in again else self.chain.staleness(offer.base) for offer in rest}
        candidates = [
            MeasuredPush(offer, ages[offer.push], all(row.finite for row in rows[offer.push]), 0.0,
                         sums[offer.push, offer.push])
            for offer in rest
        ]  # fmt: skip
        chain = self.chain
        found = judge(candidates, sums, usual, chain.counters, chain.gate, self.settings, why)
        if found.void:
            return self._persist(Voided(*found.void[0]))
        rejected = sorted((*found.rejected, *refused), key=lambda refusal: refusal.offer.push)
        body = Round(chain.next_number, chain.newest, found.accepted, tuple(rejected), found.factors, found.counters,
                     found.gate, found.reason)  # fmt: skip
        return self._persist(body)

    def _objection(self, offer: Offer) -> str:
        """Why a round must reject this push, whatever it holds (O3, O11)."""
        chain, who = self.chain, offer.push.incarnation
        if chain.held(offer.base, who) != chain.held(chain.newest, who):
            return f"its base {offer.base} does not hold the pushes of {who} that stand"
        return chain.leases.objection(offer) if chain.leases is not None else ""

    def _product(self, rows: dict[PushId, list[Staged]], one: PushId, other: PushId) -> float:
        """Over all shards; whichever of the two came later has it."""
        whole = ExactSum.of(())
        for mine, theirs in zip(rows[one], rows[other], strict=True):
            found = dict(mine.products).get(other) or dict(theirs.products).get(one)
            if found is None:
                return 0.0  # one of them is not finite
            whole += ExactSum.decode(found)
        return float(whole)

    def _turn_leases(self) -> bool:
        """Samples for minutes ahead, to whoever has few left (O11)."""
        leases = self.chain.leases
        if leases is None or not self.chain.founded:
            return False
        living = self._living()
        for who in living:
            cluster = self.clusters[who]
            if cluster.base == NO_VERSION or cluster.leaving or cluster.conn is None:
                continue
            rate = cluster.rate or self.settings.round_samples / self.settings.lease_ahead_s
            samples = wanted(rate, self.settings.lease_ahead_s, leases.held(who))
            leased = leases.grant(who, samples, living) if samples > 0 else None
            if leased is not None:
                return self._persist(leased)
        return False

    # ------------------------------------------------------------------ what was stored

    def _on_stored(self, ok: bool, detail: str) -> None:
        entry, self._persisting = self._persisting, None
        assert entry is not None, "nothing was to be stored"
        if not ok:
            self._end(f"the store refused a write ({detail}): another leader rules")
            return
        self.chain.follow(entry)
        self._note("entry", position=entry.position, kind=type(entry.body).__name__, version=str(entry.version))
        match entry.body:
            case Started(name, _):
                if name in self.followers and self.followers[name].nonce == self.chain.starts[name]:
                    self._have_obey(name)
            case Cut():
                for name in self.followers:
                    if self.followers[name].obeys:
                        self._have_obey(name)
            case Joined(incarnation):
                conn, hello = self._hellos.pop(incarnation.cluster, (None, None))
                if conn is not None and hello is not None:
                    self._take_over(conn, incarnation, hello)
            case Removed(incarnation, reason):
                self._on_removed(incarnation, reason)
            case Voided(offer, reason):
                self._answer(offer, PushAnswer.VOID, NO_VERSION, reason)
            case Founded() | Round() | RolledBack():
                self._on_version(entry)
            case Durable():
                self._on_durable()
            case Leased(incarnation):
                self._grant(incarnation)
            case Ended(version, reason):
                self._tell_all(JobFinished(self.term, version, reason))
                self._end(reason, finished=True)

    def _tell_all(self, message: object) -> None:
        for who in self._living():
            self._send(self.clusters[who].conn, message)

    def _on_removed(self, who: IncarnationId, reason: str) -> None:
        cluster = self.clusters.get(who)
        if cluster is None:
            return
        if cluster.offer is not None:
            for follower in self._shards():
                self._send(follower.conn, DropPush(self.term, cluster.offer.push))
        self._send(cluster.conn, Dismissed(self.term, reason, again=True))
        if cluster.conn is not None:
            self._conns.pop(cluster.conn, None)
        del self.clusters[who]

    def _answer(self, offer: Offer, answer: PushAnswer, version: VersionId, reason: str) -> None:
        cluster = self.clusters.get(offer.push.incarnation)
        if cluster is None:
            return
        if cluster.offer is not None and cluster.offer.push == offer.push:
            cluster.offer = None
        self._send(cluster.conn, PushAnswered(self.term, offer.push, answer, version, reason))
        if answer is PushAnswer.VOID:
            for follower in self._shards():
                self._send(follower.conn, DropPush(self.term, offer.push))
        if answer is not PushAnswer.ACCEPTED:
            self._grant(offer.push.incarnation)

    def _on_version(self, entry: Entry) -> None:
        for follower in self._shards():
            self._send(follower.conn, Apply(self.term, entry))
        match entry.body:
            case Founded(_, offer):
                self._answer(offer, PushAnswer.ACCEPTED, entry.version, "it founded the job")
            case Round() as decided:
                self._decided_before_s = self._decided[1] if self._decided is not None else 0.0
                self._decided = (entry.version, self._now, len(decided.accepted) + len(decided.rejected))
                for weighed in decided.accepted:
                    self._answer(weighed.offer, PushAnswer.ACCEPTED, entry.version, decided.reason)
                for refusal in decided.rejected:
                    self._answer(refusal.offer, PushAnswer.REJECTED, entry.version, refusal.reason)
            case RolledBack(lost=lost):
                for follower in self._shards():
                    for push in lost:
                        self._send(follower.conn, DropPush(self.term, push))
                for who in self._living():
                    self.clusters[who].offer = None  # kept pushes come first, in order
                    opened = tuple(sorted(self._reopened(who)))
                    if opened:
                        self._send(self.clusters[who].conn, Reopened(self.term, entry.version, opened))
                for follower in self._shards():
                    follower.missing.clear()
        self._serve()

    def _save(self) -> None:
        """Has the newest version saved, unless one is being saved already."""
        newest = self.chain.durable[-1][0] if self.chain.durable else NO_VERSION
        if not self._complete or (self._keep > newest and self.chain.stands(self._keep)):
            return
        if self.chain.newest > newest and self.chain.founded:
            self._keep = self.chain.newest
            for follower in self._shards():
                self._send(follower.conn, Keep(self.term, self._keep))

    def _on_durable(self) -> None:
        for shard, name in enumerate(self.chain.cut):
            follower = self.followers.get(name)
            if follower is not None and follower.obeys:
                self._send(follower.conn, Marked(self.term, self._durable_of(shard), self.chain.safe))
        self._free(self._living())
        self._tell_all(OnDisk(self.term, self.chain.durable[-1][0]))

    def _free(self, whom: Iterable[IncarnationId]) -> None:
        """Accepted pushes that the second newest durable version holds (O5)."""
        needed = self.chain.needed()
        for who in whom:
            accepted = self.chain.incarnations[who].accepted()
            free = tuple(a.offer.push for a in accepted if a.offer.push not in needed)
            if free:
                self._send(self.clusters[who].conn, Freed(self.term, free))

    def _grant(self, who: IncarnationId) -> None:
        leases = self.chain.leases
        if leases is None or who not in self.clusters:
            return
        for epoch, spans in leases.leased(who).items():
            self._send(self.clusters[who].conn, Granted(self.term, Leased(who, epoch, spans)))

    def _serve(self) -> None:
        """Tells of the newest version that all shards have computed."""
        shards = self._shards()
        if not self._complete:
            return
        served = next((v for v in self.chain.line() if all(self._has(f, v) for f in shards)), None)
        if served is None or served.id == self._served or served.id < self._served:
            return
        self._served = served.id
        if self._decided is not None and self._decided[0] == served.id and self._decided_before_s:
            _, decided_s, pushes = self._decided
            self._rates = self._rates.after(pushes, decided_s - self._decided_before_s, self._now - decided_s)
        self._tell_all(Served(self.term, served.id))

    def _has(self, follower: Follower, version: Version) -> bool:
        """Whether a follower serves this version: the newest two that it computed."""
        return any(v.id == version.id for v in islice(self.chain.line(follower.version), 2))

    def _turn_end(self) -> bool:
        """Ends the job once its epochs are over, with a version that is durable (O16)."""
        leases, epochs = self.chain.leases, self.settings.epochs
        if leases is None or not epochs or not leases.over(epochs - 1) or not self.chain.durable:
            return False
        newest = self.chain.durable[-1][0]
        return newest == self.chain.newest and self._persist(Ended(newest, f"{epochs} epochs are over"))
