"""State machine of the leader: decides entries of the chain, such as rounds, has each stored, and then tells clusters
and followers.

Theory of operation. All that must not be forgotten is in the chain (chain.py). Beside it the leader holds what it is
told: who is connected, which pushes are offered, which of them are *staged* at which shard, which versions followers
have computed and saved. After a restart it hears all of this again. `on(now, event)` takes an event in, and then turns
until nothing is left to do: one decision at a time, each stored before anybody hears of it (O1). While a `StoreEntry`
is out nothing else is decided.

It is put together of parts, each with a state of its own, which are told facts and give decisions: followers
(shards.py), clusters (attendance.py), pushes (pushes.py), samples (dealing.py) and the end (ending.py). In the order in
which decisions are looked for: follower starts are entered, so that these obey (O7); the shards are cut; clusters join;
who is silent or has gone is removed (O14); what was lost for good is rolled back (O5a); versions that all shards have
saved are marked (O6); the first content founds the job; staged pushes become a round (O2), unless too many are ahead of
the disk already; free samples are leased (O11); the job ends.

A leader that hears of a term, a version or an incarnation that its chain lacks holds an older copy of it, or is late:
it decides nothing more (O7).
"""

from __future__ import annotations

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.outer.rules.attendance import Attendance, ClusterState
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.dealing import Dealer
from chaos_lightning.outer.rules.effects import (
    EndAsked,
    EntryStored,
    HangUp,
    Heard,
    LeaderEffect,
    LeaderEvent,
    ProcessDied,
    StreamClosed,
    TimePassed,
)
from chaos_lightning.outer.rules.ending import Ending
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.leader_desk import LeaderDesk
from chaos_lightning.outer.rules.leases import Aside
from chaos_lightning.outer.rules.messages import (
    Applied,
    Apply,
    Beat,
    ClusterHello,
    Dismissed,
    DropPush,
    Eldest,
    FollowerHello,
    FromCluster,
    FromFollower,
    Goodbye,
    LoopEnded,
    Missing,
    News,
    Offered,
    OnDisk,
    OnItsWay,
    Paced,
    Served,
    Staged,
    Trouble,
    Welcomed,
    Written,
)
from chaos_lightning.outer.rules.pushes import Pushes
from chaos_lightning.outer.rules.rounds import Rounds
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.shards import Follower, Shards
from chaos_lightning.outer.rules.summaries import Summaries
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Agreement,
    Body,
    Cut,
    Durable,
    Ended,
    Entry,
    Founded,
    IncarnationId,
    JobOpened,
    Joined,
    Leased,
    LeftOver,
    Offer,
    PushAnswer,
    PushId,
    Removed,
    RolledBack,
    Round,
    Started,
    VersionId,
    Voided,
    named_offers,
)

MOST_REFUSED = 100
"""Number of refusals that are remembered, so that each is told on consoles once."""
MOST_WORDS = 2000
"""Largest number of characters of a reason that are recorded."""
MOST_ELEMENTS = 1 << 48
"""Largest number of elements of a model."""
MOST_LENGTH = 1 << 48
"""Largest number of positions of an epoch."""


class LeaderMachine:
    """State machine of a leader. Its caller must feed a TimePassed a few times per heartbeat.

    Args:
        chain: Chain of the job, as the store has it.
        term: Term of this leader.
        followers: Number of followers that hold a shard each, if the shards are not cut already; 0: as many as do, one
            in a new job.
    """

    def __init__(self, chain: OuterChain, term: int, followers: int = 0) -> None:
        self.desk = desk = LeaderDesk(chain, term)
        self.shards = shards = Shards(desk, followers)
        self.attendance = attendance = Attendance(desk, self._holds_alone)
        self.pushes = Pushes(desk, shards, attendance)
        self.dealer = Dealer(desk, attendance)
        self.end = Ending(desk, attendance)
        self.summaries = Summaries(desk, attendance)
        self._late: set[int] = set()
        """Streams of clusters that came after the job's end."""
        self._told_refused: set[tuple[str, str]] = set()
        """Refusals, as cluster and reason, of which the other clusters were told."""

    # ------------------------------------------------------------------ questions

    @property
    def chain(self) -> OuterChain:
        """State of the job's chain, as it is stored."""
        return self.desk.chain

    @property
    def term(self) -> int:
        """Term of this leader."""
        return self.desk.term

    @property
    def settings(self) -> OuterSettings:
        """Rules of the job, which its first cluster has brought."""
        return self.desk.settings

    @property
    def clusters(self) -> dict[IncarnationId, ClusterState]:
        """State of each cluster in the job, as the leader has last heard."""
        return self.attendance.clusters

    @property
    def followers(self) -> dict[str, Follower]:
        """State of each follower, as the leader has last heard."""
        return self.shards.followers

    @property
    def rounds(self) -> Rounds:
        """Part of the leader that collects pushes and decides rounds."""
        return self.pushes.rounds

    @property
    def served(self) -> VersionId:
        """Newest version that the followers of all shards serve."""
        return self.shards.served

    @property
    def ending(self) -> str:
        """Reason for which the job will end as soon as its newest version is durable, so that no round is decided any
        more; "" if none.
        """
        return self.end.reason

    def _holds_alone(self, who: IncarnationId) -> bool:
        """Returns whether a shard lacks, or may lack, a push of this incarnation that may still be needed to compute
        versions (O14).
        """
        needed = [push for push in self.chain.needed() if push.incarnation == who]
        return bool(needed) and self.shards.lack(needed)

    # ------------------------------------------------------------------ events

    def on(self, now: float, event: LeaderEvent) -> list[LeaderEffect]:
        """Handles one event; returns the effects in the order in which they must be carried out.

        Args:
            now: Seconds by a clock that never goes back.
            event: Event to handle.
        """
        desk = self.desk
        desk.out = []
        if desk.done:
            return []
        self.attendance.forgive(desk.passed(now))
        match event:
            case Heard(conn, message):
                self._hear(conn, message)
            case StreamClosed(conn, proof):
                self._late.discard(conn)
                self.attendance.closed(conn, proof=proof)
                if self.shards.closed(conn) in self.chain.cut:
                    self.attendance.tell_all(self.shards.holders())
            case ProcessDied(incarnation):
                self.attendance.died(incarnation)
            case EntryStored(ok, detail, unfit):
                if unfit:
                    self._on_unfit(detail)
                else:
                    self._on_stored(ok, detail)
            case TimePassed():
                pass
            case EndAsked(reason):
                self.end.ask(reason[:MOST_WORDS])
        if not desk.done and desk.persisting is None:
            self._turn()
        if not desk.done:
            self.shards.save()
            if self.attendance.spoken:
                self.shards.hold(self.attendance.fetched())
        return desk.out

    # ------------------------------------------------------------------ hearing

    def _hear(self, conn: int, message: FromCluster | FromFollower) -> None:
        clusters, followers = self.attendance.clusters, self.shards.followers
        if isinstance(message, Staged | Applied | Written | Missing | Trouble) and message.follower not in followers:
            return  # it was said before its hello, which will tell all that matters
        match message:
            case ClusterHello():
                self._on_cluster(conn, message)
            case FollowerHello():
                self._on_follower(conn, message)
            case Offered(offer):
                if self.pushes.on_offer(offer):
                    self.dealer.tell(offer.push.incarnation)
            case Beat(incarnation):
                if self.attendance.on_beat(conn, message):
                    self._welcome(incarnation)
            case LoopEnded(incarnation, reason):
                if incarnation in clusters:
                    clusters[incarnation].verdict = reason[:MOST_WORDS]
            case Goodbye(incarnation, reason):
                if incarnation in clusters:
                    clusters[incarnation].gone = f"it left: {reason[:MOST_WORDS]}"
            case Staged():
                self.shards.on_staged(message)
            case Applied():
                self._on_applied(message)
            case Written(name, version, digest):
                followers[name].disk[version] = digest
            case Missing(name, push):
                followers[name].missing.add(push)
            case OnItsWay(name, push, left_s):
                if push.incarnation in clusters:
                    clusters[push.incarnation].in_s[name] = self.desk.now + left_s
            case Trouble(name, reason):
                followers[name].trouble = reason

    def _on_cluster(self, conn: int, hello: ClusterHello) -> None:
        desk, chain, who = self.desk, self.chain, hello.resume
        if words := desk.stranger(hello.cluster, hello.job_id):
            self._turn_away(conn, hello, words)
            return
        answered = PushId(who, hello.answered) if who in chain.incarnations else None
        lacking = desk.lacks(hello.term, hello.base, hello.newest, answered=answered)
        if not lacking and who is not None and who not in chain.incarnations and who.number > chain.joined:
            lacking = f"incarnation {who}"
        if lacking:
            desk.doubt(hello.cluster, lacking)
            return
        agreed = chain.agreement
        if agreed is None and (words := _impossible(hello.agreement)):
            reason = f"{hello.cluster} cannot begin this job: {words}"
            self._refused(hello.cluster, reason)
            desk.send(conn, Dismissed(self.term, reason, again=False))
            return
        if agreed is not None and (words := agreed.difference(hello.agreement)):
            reason = f"{hello.cluster} cannot join this job, which {chain.by} began: {words}"
            self._refused(hello.cluster, reason)
            desk.send(conn, Dismissed(desk.term, reason, again=False))
            return
        if chain.ended is not None:
            self._tell_end(conn)
        elif who is not None and (over := chain.over(who)):
            desk.send(conn, Dismissed(desk.term, over, again=True))
        elif who is not None:
            self._take_over(conn, who, hello)
        else:
            self.attendance.waits(conn, hello)

    def _turn_away(self, conn: int, hello: ClusterHello | FollowerHello, words: str) -> None:
        """Refuses a process that belongs to another job.

        A cluster trains on as if its server were away, and asks again: the folder of its own job may be put back here.
        A follower would not heed a lower term than it knows, and its job may have had more leaders.
        """
        if isinstance(hello, ClusterHello):
            self._refused(hello.cluster, words)
            self.desk.out.append(HangUp(conn, words))
        else:
            self.desk.note("follower_refused", of=hello.follower, reason=words)
            self.desk.send(conn, Dismissed(max(self.term, hello.term), words, again=False))

    def _tell_end(self, conn: int) -> None:
        """Tells a cluster that comes after the job's end which followers serve the last version, and that the job is
        over.
        """
        told = self.end.told()
        assert told is not None, "the chain has its end"
        self._late.add(conn)
        self.desk.send(conn, self.shards.holders())
        if told.version != NO_VERSION:
            self.desk.send(conn, Served(self.term, told.version, self.chain.progress(told.version)))
        self.desk.send(conn, told)

    def farewell(self, conn: int, hello: ClusterHello | FollowerHello) -> list[LeaderEffect]:
        """Returns the answer to a hello that comes after the job's end; nothing if the job has not ended."""
        self.desk.out = []
        if (told := self.end.told()) is None:
            return []
        name = hello.cluster if isinstance(hello, ClusterHello) else hello.follower
        if words := self.desk.stranger(name, hello.job_id):
            self._turn_away(conn, hello, words)
        elif isinstance(hello, ClusterHello):
            self._tell_end(conn)
        else:
            self.desk.send(conn, told)
        return self.desk.out

    def _take_over(self, conn: int, who: IncarnationId, hello: ClusterHello) -> None:
        """Takes over the stream of an incarnation that is in the job, and repeats all that it may have missed."""
        self.attendance.on_stream(conn, who, hello)
        self._welcome(who)

    def _welcome(self, who: IncarnationId) -> None:
        chain, term, served = self.chain, self.term, self.shards.served
        tell = self.attendance.tell
        progress, job_id = chain.progress(served), chain.job_id
        tell(who, Welcomed(term, who, chain.incarnations[who].next, served, chain.founded, progress, job_id))
        tell(who, self.shards.holders())
        tell(who, Eldest(term, self.attendance.oldest() or who))
        tell(who, Paced(term, self.attendance.steps_of(self.clusters[who]), "as agreed, or paced before"))
        self.pushes.tell_reopened(who, chain.newest)
        self.pushes.free([who])
        if chain.durable:
            tell(who, OnDisk(term, chain.durable[-1][0]))
        self.dealer.tell(who)

    def _on_follower(self, conn: int, hello: FollowerHello) -> None:
        words = self.desk.stranger(hello.follower, hello.job_id)
        # Its files may be another job's; where its state stands it has from a leader of the job that it names.
        lacking = self.desk.lacks(hello.term, *([hello.version] if hello.job_id else []))
        if not words and lacking and not hello.job_id:
            words = f"{hello.follower} knows {lacking}, of another job, or of a server that leads here now"
        if words:
            self._turn_away(conn, hello, words)
            return
        if lacking:
            self.desk.doubt(hello.follower, lacking)
            return
        self.shards.on_hello(conn, hello)
        if self.chain.ended is not None:
            self._serve_last(hello.follower)
        if hello.follower in self.chain.cut:
            self.attendance.tell_all(self.shards.holders())

    def _on_applied(self, applied: Applied) -> None:
        self.shards.on_applied(applied)
        if self.chain.ended is not None:
            self._serve_last(applied.follower)
        else:
            self._serve()

    def _serve_last(self, name: str) -> None:
        """Orders a follower to load the last version of a job that has ended; a follower that has it is told of the
        end.

        No start is entered: nothing follows the end, and whoever shows it has the newest chain (O7, O16).
        """
        told, follower = self.end.told(), self.followers[name]
        assert told is not None, "the chain has its end"
        if follower.version != told.version and name in self.chain.cut:
            self.shards.obey(name, ())
            return
        self.desk.send(follower.conn, told)
        for conn in sorted(self._late):
            self.desk.send(conn, self.shards.holders())

    # ------------------------------------------------------------------ turning

    def _turn(self) -> None:
        """Decides the next entry, if one is due and none is being stored."""
        if self.chain.ended is not None:
            self.end.linger()
            return
        body = self._next()
        if body is not None:
            self.desk.persist(body)

    def _next(self) -> Body | None:
        """Returns the entry to store next; None if none is due."""
        ends = bool(self.end.reason)
        return (
            self.shards.next_start(self.attendance.offers())
            or self.attendance.next_opening()
            or self.shards.next_cut()
            or (self.attendance.next_join(self._take_over) if self.chain.cut and not ends else None)
            or self.attendance.next_removal()
            or self.pushes.next_rollback()
            or self.shards.next_mark()
            or self.summaries.next_summary()
            or self.pushes.next_founding()
            or (self.pushes.next_round() if not ends else None)
            or (self.dealer.next_lease() if not ends else None)
            or self.end.next_end()
        )

    # ------------------------------------------------------------------ what was stored

    def _on_unfit(self, words: str) -> None:
        """Removes the clusters whose offers are in an entry that is too large for the store, so that another entry can
        be decided.
        """
        entry, self.desk.persisting = self.desk.persisting, None
        assert entry is not None, "nothing was to be stored"
        offers = named_offers(entry.body)
        for who in {offer.push.incarnation for offer in offers} & self.clusters.keys():
            self.clusters[who].gone = f"what it offers fits into no record: {words}"
        if isinstance(entry.body, JobOpened):
            for conn, hello in self.attendance.again():
                reason = f"{hello.cluster} cannot begin a job with {len(hello.agreement.tensors)} tensors: {words}"
                self.desk.send(conn, Dismissed(self.term, reason, again=False))
        elif not offers:
            self.desk.end(f"an entry of kind {type(entry.body).__name__} fits into no record: {words}")

    def _on_stored(self, ok: bool, detail: str) -> None:
        desk = self.desk
        entry, desk.persisting = desk.persisting, None
        assert entry is not None, "nothing was to be stored"
        if not ok:
            desk.end(f"the store refused a write ({detail}): another leader rules")
            return
        before = self._aside()
        desk.chain.follow(entry)
        desk.note("entry", **entry.fields())
        for each in sorted(self._aside() - before, key=str):
            desk.note("set_aside", epoch=each.epoch, spans=each.spans, reason=str(each))
        match entry.body:
            case JobOpened():
                desk.take_settings()
                self._obey_all()
                for conn, hello in self.attendance.again():
                    self._on_cluster(conn, hello)  # they came before anybody knew what the job is
            case Started(name, _):
                if name in self.followers and self.followers[name].nonce == self.chain.starts[name]:
                    self.shards.obey(name, self.attendance.offers())
            case Cut():
                self._obey_all()
                if words := self.shards.unheeded:
                    desk.note("notice", text=words)
            case Joined(incarnation):
                if (come := self.attendance.has_come(incarnation)) is not None:
                    self._take_over(come[0], incarnation, come[1])
                    self._news(f"{incarnation} joins: {self._size}")
            case Removed(incarnation, reason):
                self.attendance.removed(incarnation, reason)
                self._news(f"{incarnation} is out ({reason}): {self._size}")
                first = PushId(incarnation, self.chain.incarnations[incarnation].next)
                self.shards.tell(DropPush(self.term, first, later=True))  # of one that never came back nobody knows
            case Voided(offer, reason):
                self._answer(offer, PushAnswer.VOID, NO_VERSION, reason)
            case Founded() | Round() | RolledBack():
                self._on_version(entry)
            case Durable(version, _):
                self.shards.marked()
                self.pushes.free(self.attendance.living())
                self.attendance.tell_all(OnDisk(self.term, version))
            case Leased(incarnation):
                self.dealer.tell(incarnation)
            case LeftOver():  # it may have ended the epoch, which its clusters hear with the version that they have
                served = self.shards.served
                self.attendance.tell_all(Served(self.term, served, self.chain.progress(served)))
            case Ended():
                self._on_end(entry.body)

    @property
    def _size(self) -> str:
        count = len(self.attendance.clusters)
        return f"{count} cluster{'s' if count != 1 else ''}"

    def _news(self, text: str) -> None:
        """Prints a line on the consoles of all clusters."""
        self.attendance.tell_all(News(self.term, text[:MOST_WORDS]))

    def _refused(self, cluster: str, reason: str) -> None:
        """Tells the log and the other clusters that a cluster is not let in."""
        self.desk.note("cluster_refused", of=cluster, reason=reason)
        if (cluster, reason) not in self._told_refused:  # one that is turned away asks again and again
            if len(self._told_refused) >= MOST_REFUSED:
                self._told_refused.clear()
            self._told_refused.add((cluster, reason))
            self._news(f"{cluster} is not let in: {reason}")

    def _aside(self) -> set[Aside]:
        """Returns the positions that are set aside: not trained any more in their epoch."""
        return {*self.chain.leases.aside} if self.chain.leases is not None else set()

    def _obey_all(self) -> None:
        """Sends all followers their orders again, since the chain that these contain has changed."""
        for name, follower in self.followers.items():
            if follower.obeys:
                self.shards.obey(name, self.attendance.offers())

    def _on_end(self, ended: Ended) -> None:
        told = self.end.told()
        assert told is not None, "the chain has its end"
        for offer in ended.voided:
            self.pushes.answer(offer, PushAnswer.VOID, NO_VERSION, ended.reason)
        for who in self.clusters:
            self.attendance.tell(who, told)
        for conn in self.attendance.waiting():
            self.desk.send(conn, told)
        for follower in self.followers.values():
            self.desk.send(follower.conn, told)
        self.desk.end(ended.reason, finished=True)

    def _answer(self, offer: Offer, answer: PushAnswer, version: VersionId, reason: str) -> None:
        self.pushes.answer(offer, answer, version, reason)
        if answer is not PushAnswer.ACCEPTED:
            self.dealer.tell(offer.push.incarnation)

    def _on_version(self, entry: Entry) -> None:
        self.shards.tell(Apply(self.term, entry))
        match entry.body:
            case Founded(_, offer):
                self._answer(offer, PushAnswer.ACCEPTED, entry.version, "it founded the job")
            case Round() as decided:
                self.rounds.decided(self.desk.now, entry.version, len(decided.accepted) + len(decided.rejected))
                self.attendance.pace(decided.paced)
                for weighed in decided.accepted:
                    self._answer(weighed.offer, PushAnswer.ACCEPTED, entry.version, decided.reason)
                for refusal in decided.rejected:
                    self._answer(refusal.offer, PushAnswer.REJECTED, entry.version, refusal.reason)
            case RolledBack(to=to, lost=lost, reason=reason):
                self._news(f"versions after {to} are lost: the job goes on from it, as {entry.version} ({reason})")
                self.pushes.rolled_back(entry.version, lost)
                self.end.rolled_back()
        self._serve()
        if not self.chain.founded:  # the first version is lost: somebody founds the job anew
            for who in self.attendance.living():
                self._welcome(who)

    def _serve(self) -> None:
        """Announces the newest version that all shards have computed, if it is not announced yet."""
        served = self.shards.newly_served()
        if served is not None:
            self.rounds.served(self.desk.now, served)
            self.attendance.tell_all(Served(self.term, served, self.chain.progress(served)))


def _impossible(agreement: Agreement) -> str:
    """Returns why no job can have this agreement; "" if one can."""
    try:
        OuterSettings.of_words(agreement.settings)
        grid = Grid(tuple(tensor.elements for tensor in agreement.tensors), agreement.block)
    except ConfigurationError as error:
        return str(error)
    if any(size < 0 for tensor in agreement.tensors for size in tensor.shape) or grid.elements > MOST_ELEMENTS:
        return f"no model has {grid.elements} elements; expected 1 to {MOST_ELEMENTS}"
    if not 0 <= agreement.length <= MOST_LENGTH:
        return f"an epoch cannot have {agreement.length} positions; expected 0 to {MOST_LENGTH}"
    return ""
