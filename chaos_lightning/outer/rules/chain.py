"""Folds the leader's chain into a state, and checks which entries may follow.

Theory of operation. The chain is the one sequence of rounds and records (rule O1). `OuterChain.follow` takes the next
entry in; whoever folds the same entries holds the same: the leader that wrote them, the one that comes after it, an
audit. So nothing that decides what becomes of a push is kept anywhere else.

*Versions.* A founding, a round and a rollback make one each. A version *stands* unless a rollback went behind it. For
each version the chain knows which pushes it holds, by cluster: as a digest of their numbers in order (`holds`), since
all that is ever asked is whether two versions hold the same.

*Pushes.* Each incarnation numbers its own, and they are answered in order: `next` is the lowest number without an
answer. A rollback takes acceptances back, so numbers may be open again below others that stay rejected.

*Durable.* The two newest durable versions; what the older one holds can never be asked for again.

*Summaries.* A `Summary` takes the place of all entries before it (O1a): the chain goes on from what it says. What was
cut is known by its number alone: a version below `floor`, an incarnation up to `joined`, a push below `forgotten`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import assert_never

from chaos_lightning.errors import WireError
from chaos_lightning.outer.rules.arrivals import UNTAUGHT, ArrivalRates
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.leases import Leases
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Agreement,
    Body,
    Counters,
    Cut,
    Durable,
    Ended,
    Entry,
    Founded,
    GateState,
    IncarnationId,
    JobOpened,
    JobProgress,
    Joined,
    Leased,
    LeftOver,
    Offer,
    PacedCluster,
    ProcessPlace,
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
from chaos_lightning.protocol.plain import read_text


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """The chain's answer to one push."""

    offer: Offer
    answer: PushAnswer
    version: VersionId
    reason: str


@dataclass(slots=True)
class Incarnation:
    """State of one incarnation, according to the chain.

    Attributes:
        id: Name of the incarnation.
        place: Description, for people, of the place where it runs.
        first: Number of its first push.
        over: Reason for which it is removed; "" while it is in.
        answers: Answers to its pushes, by push number.
        rejected: Number of its last pushes in a row that were rejected.
        low: Number below which all its pushes are answered.
        forgotten: Number below which all its pushes are answered and the answers are not known any more.
        tally: Number of its answers of each kind, without those that a rollback took back.
        process: First process of the cluster; None where it has several.
    """

    id: IncarnationId
    place: str
    first: int
    over: str = ""
    answers: dict[int, GivenAnswer] = field(default_factory=dict)
    rejected: int = 0
    low: int = 0
    forgotten: int = 0
    tally: dict[PushAnswer, int] = field(default_factory=dict)
    process: ProcessPlace | None = None

    @property
    def next(self) -> int:
        """Number of the incarnation's next push that is not answered yet."""
        self.low = max(self.low, self.first, self.forgotten)
        while self.low in self.answers:
            self.low += 1
        return self.low

    def accepted(self, last: int) -> list[PushId]:
        """Returns, oldest first, those of the incarnation's `last` newest answered pushes that were accepted."""
        numbers = sorted(self.answers)[-last:]
        return [self.answers[n].offer.push for n in numbers if self.answers[n].answer is PushAnswer.ACCEPTED]


@dataclass(frozen=True, slots=True)
class Version:
    """Version of the outer state, with the entry that made it and the version before.

    Attributes:
        id: Name of the version.
        entry: Entry that made it.
        before: Version from whose state it is computed: for a round the one before it, for a rollback the one whose
            content it has.
    """

    id: VersionId
    entry: Entry
    before: VersionId

    @property
    def pushes(self) -> tuple[PushId, ...]:
        """Pushes that this version adds to the version before it."""
        return tuple(offer.push for offer in self.entry.offers)


@dataclass(frozen=True, slots=True)
class RoundState:
    """Counters, gate and epoch at a version, to which a rollback returns."""

    counters: Counters
    gate: GateState
    epoch: int = 0


BEGINNING = RoundState(Counters(), GateState())


Holds = dict[IncarnationId, str]
"""Digests, by incarnation, of the numbers of its pushes that a version holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedChain:
    """State of a chain whose earlier entries may be dropped: those attributes of `OuterChain`, with `leases` as
    text.
    """

    agreement: Agreement | None
    by: str
    job_id: str
    leases: str
    newest: VersionId
    durable: tuple[tuple[VersionId, tuple[str, ...]], ...]
    safe: VersionId
    joined: int
    floor: int
    incarnations: tuple[Incarnation, ...]
    starts: dict[str, str]
    cut: tuple[str, ...]
    counters: Counters
    gate: GateState
    rates: ArrivalRates
    paced: dict[IncarnationId, PacedCluster]
    rounds: int
    rollbacks: int
    tally: dict[PushAnswer, int]
    versions: tuple[Version, ...]
    bases: dict[VersionId, Holds]
    states: dict[VersionId, RoundState]
    reopened: dict[PushId, Offer]

    @classmethod
    def of(cls, body: Summary) -> SummedChain:
        """Returns the state that a summary contains.

        Raises:
            ValueError: The summary's state cannot be read.
        """
        try:
            return read_text(cls, zlib.decompress(base64.b64decode(body.state, validate=True)))
        except (zlib.error, WireError) as error:
            raise ValueError(f"this summary cannot be read: {error!r}") from error


class OuterChain:
    """State that results from the entries of a job's chain.

    Args:
        whole: Whether to pass over summaries, and keep all that it has followed.

    Attributes:
        position: Position of the last entry.
        hash: Hash of the last entry.
        last: Last entry; None: there is none.
        summed: Position of the last summary; 0: there is none.
        versions: Versions by id; of those before the last summary, only the ones that followers may compute from.
        bases: Digests, by incarnation, of the numbers of the pushes in each version that a push may have for its base.
        floor: Version number below which some versions are not known any more.
        newest: Last version that was made.
        durable: Two newest durable versions with the digests of their shards, oldest first.
        safe: Second newest durable version, as it last was: the pushes in it are never asked for again, and no rollback
            goes behind it.
        incarnations: Incarnations that ever joined, but those that are over and were cut.
        joined: Highest number of an incarnation so far.
        starts: Followers and the number of their last start.
        cut: Followers in shard order; empty before the first.
        counters: Counters of the outer optimizer.
        gate: Statistics of the gate on accepted pushes.
        rates: Estimates of the times between pushes, from past rounds.
        paced: Known pace of each cluster in the job.
        agreement: Facts that all clusters have in common; None before the first cluster has come.
        by: Name of the first cluster, and the place where it ran.
        job_id: Name of this job among all jobs: the hash of the entry that opened it; "" before.
        leases: Leases of samples to clusters; None where each cluster has its own data.
        ended: Entry that ended the job, with the last version and the reason; None while the job goes on.
        last_in: Incarnations that were in the job when it ended.
        rounds: Number of rounds so far.
        rollbacks: Number of rollbacks so far.
        tally: Number of answers of each kind, without those that a rollback took back.
        reopened: Pushes of clusters in the job that were accepted once, rolled back, and are unanswered.
        states: Counters, gate and leased epoch at each version, which a rollback to that version restores.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self.agreement: Agreement | None = None
        self.by = ""
        self.job_id = ""
        self.leases: Leases | None = None
        self.position = 0
        self.hash = ""
        self.last: Entry | None = None
        self.summed = 0
        self.versions: dict[VersionId, Version] = {}
        self.bases: dict[VersionId, Holds] = {}
        self.floor = 0
        self.newest = NO_VERSION
        self.durable: list[tuple[VersionId, tuple[str, ...]]] = []
        self.safe = NO_VERSION
        self.incarnations: dict[IncarnationId, Incarnation] = {}
        self.joined = 0
        self.starts: dict[str, str] = {}
        self.cut: tuple[str, ...] = ()
        self.counters = Counters()
        self.gate = GateState()
        self.rates = UNTAUGHT
        self.paced: dict[IncarnationId, PacedCluster] = {}
        self.ended: Ended | None = None
        self.last_in: frozenset[IncarnationId] = frozenset()
        self.rounds = 0
        self.rollbacks = 0
        self.tally: dict[PushAnswer, int] = {}
        self.reopened: dict[PushId, Offer] = {}
        self.states = {NO_VERSION: BEGINNING}

    # ------------------------------------------------------------------ questions

    def entry(self, term: int, body: Body) -> Entry:
        """Returns the next entry of the chain, with this body."""
        return Entry(self.position + 1, term, body, self.hash)

    @property
    def next_number(self) -> int:
        """Number of the next version."""
        return self.newest.number + 1

    @property
    def founded(self) -> bool:
        """Whether the job has a version with content; False again if a rollback undid the first one."""
        made = self.versions.get(self.newest)
        return made is not None and (made.before != NO_VERSION or isinstance(made.entry.body, Founded))

    def over(self, who: IncarnationId) -> str:
        """Returns why this incarnation has left the job; "" while it is in.

        Raises:
            KeyError: The incarnation never joined.
        """
        if who not in self.incarnations and who.number <= self.joined:
            return "it is over, and so long that nothing else is known of it"
        return self.incarnations[who].over

    def unanswered(self, push: PushId) -> bool:
        """Returns whether this push has no answer yet, so that a round may take it."""
        known = self.incarnations.get(push.incarnation)
        return known is not None and not known.over and known.next <= push.number not in known.answers

    def answered(self, push: PushId) -> bool:
        """Returns whether this push of a known incarnation is answered, or was answered before a rollback reopened it
        (O5a).
        """
        following = self.incarnations[push.incarnation].next
        return push.number < following or PushId(push.incarnation, following) in self.reopened

    def lacks(self, version: VersionId) -> bool:
        """Returns whether this version cannot be one of this chain; False for one so old that the chain may have
        dropped it.
        """
        return version != NO_VERSION and version not in self.bases and version.number >= self.floor

    def forgot(self, base: VersionId) -> bool:
        """Returns whether the chain has dropped the record of which pushes this version contains."""
        return base != NO_VERSION and base not in self.bases and base.number < self.floor

    @property
    def ahead(self) -> int:
        """Number of versions that are newer than the newest durable one, without rollbacks (O5a)."""
        newest = self.durable[-1][0] if self.durable else NO_VERSION
        beyond = takewhile(lambda v: v.id > newest, self.line())
        return sum(1 for v in beyond if not isinstance(v.entry.body, RolledBack))

    def line(self, version: VersionId | None = None) -> Iterator[Version]:
        """Yields the versions from `version` (None: the newest) back to the first; each was computed from the one that
        is yielded next.
        """
        at = self.newest if version is None else version
        while at in self.versions:
            found = self.versions[at]
            yield found
            at = found.before

    def since(self, version: VersionId) -> list[Version]:
        """Returns the versions after this one, up to the newest, oldest first.

        Raises:
            KeyError: The newest does not come from it.
        """
        found: list[Version] = []
        for step in self.line():
            if step.id == version:
                return found[::-1]
            found.append(step)
        if version != NO_VERSION:
            raise KeyError(version)
        return found[::-1]

    def stands(self, version: VersionId) -> bool:
        """Returns whether the newest version descends from this one."""
        return any(v.id == version for v in self.line())

    def staleness(self, base: VersionId) -> int:
        """Returns how many versions were made after this one; version numbers have no gaps."""
        return max(0, self.newest.number - base.number)

    def held(self, version: VersionId, incarnation: IncarnationId) -> str:
        """Returns a digest of this incarnation's pushes that the version contains."""
        return self.bases.get(version, {}).get(incarnation, "")

    def progress(self, version: VersionId) -> JobProgress:
        """Returns the job's progress at this version; no progress if the version is not known."""
        state = self.states.get(version, BEGINNING)
        return JobProgress(state.counters.samples, state.counters.ticks, state.epoch)

    def cut_for(self, names: Sequence[str]) -> bool:
        """Returns whether the shards are cut for as many followers as these would hold, and at least one of these holds
        a shard.
        """
        agreed = self.agreement
        assert agreed is not None
        blocks = Grid(tuple(tensor.elements for tensor in agreed.tensors), agreed.block).blocks
        return len(self.cut) == min(len(names), blocks) and not {*names[:blocks]}.isdisjoint(self.cut)

    def open(self) -> tuple[PushId, ...]:
        """Returns, for each incarnation in the job, its first push that is not answered."""
        return tuple(PushId(who, known.next) for who, known in self.incarnations.items() if not known.over)

    def needed(self) -> set[PushId]:
        """Returns the pushes whose bytes somebody may still ask for: accepted ones that the second newest durable
        version does not contain (O5).
        """
        found: set[PushId] = set()
        for version in self.line():
            if version.id == self.safe:
                break
            found.update(version.pushes)
        return found

    # ------------------------------------------------------------------ following

    def follow(self, entry: Entry) -> None:
        """Adds the next entry, and changes the state by it.

        Raises:
            ValueError: The entry does not follow: a bug, or a store that another leader wrote to.
        """
        begins = isinstance(entry.body, Summary) and not self.position
        if not begins and (entry.position, entry.before) != (self.position + 1, self.hash):
            raise ValueError(f"entry {entry.position} after {entry.before[:6]} does not follow {self.position}")
        body = entry.body
        match body:
            case JobOpened(agreement, by):
                self.agreement, self.by, self.job_id = agreement, by, entry.hash
                # No cluster can have joined before.
                self.leases = Leases(agreement.length) if agreement.length else None
            case Started(follower, nonce):
                self.starts[follower] = nonce
            case Cut(followers, durable):
                self.cut = followers
                if self.durable:  # of the former shards
                    self.durable = [(mark.version, mark.digests) for mark in durable]
            case Joined(incarnation, place, first, process):
                self.incarnations[incarnation] = Incarnation(incarnation, place, first, process=process)
                self.joined = max(self.joined, incarnation.number)
                if self.leases is not None:
                    self.leases.join(incarnation)
            case Founded() | Round() | RolledBack():
                self._version(entry, body)
            case Leased() | LeftOver():
                self._deal(body)
            case Removed(incarnation, reason):
                self._remove(incarnation, reason)
            case Voided(offer, reason):
                self._answer(offer, PushAnswer.VOID, NO_VERSION, reason)
            case Durable(version, digests):
                self._mark(version, digests)
            case Ended(_, reason, voided):
                self.ended = body
                for offer in voided:
                    self._answer(offer, PushAnswer.VOID, NO_VERSION, reason)
                self.last_in = frozenset(who for who, known in self.incarnations.items() if not known.over)
                for who in self.last_in:
                    self._remove(who, f"the job has ended: {reason}")
            case Summary():
                self.summed = entry.position
                if not self._whole:
                    self._begin(body)
            case _:
                assert_never(body)
        self.position, self.hash, self.last = entry.position, entry.hash, entry

    def _deal(self, body: Leased | LeftOver) -> None:
        assert self.leases is not None, "each cluster has its own data"
        if isinstance(body, Leased):
            self.leases.lease(body)
            return
        self.leases.set_aside(body)
        self.states[self.newest] = replace(self.states[self.newest], epoch=self.leases.epoch)

    def _remove(self, who: IncarnationId, reason: str) -> None:
        self.incarnations[who].over = reason
        self.paced.pop(who, None)
        self.reopened = {push: offer for push, offer in self.reopened.items() if push.incarnation != who}
        if self.leases is not None:
            self.leases.remove(who)

    def _mark(self, version: VersionId, digests: tuple[str, ...]) -> None:
        self.durable = [*self.durable, (version, digests)][-2:]
        if len(self.durable) > 1:
            self.safe = self.durable[0][0]
            if self.leases is not None:
                self.leases.settle(self.safe.number)

    def _version(self, entry: Entry, body: Founded | Round | RolledBack) -> None:
        if body.number != self.next_number:
            raise ValueError(f"version {body.number} does not follow {self.newest}")
        made = entry.version
        if isinstance(body, RolledBack):
            self._roll_back(made, entry, body)
        else:
            before = body.before if isinstance(body, Round) else NO_VERSION
            if before != (self.newest if self.founded else NO_VERSION):
                raise ValueError(f"version {made} is made of {before}, not of {self.newest}")
            holds = dict(self.bases.get(before, {}))
            for offer in entry.offers:
                self._answer(offer, PushAnswer.ACCEPTED, made, "")
                holds[offer.push.incarnation] = with_push(holds.get(offer.push.incarnation, ""), offer.push.number)
            if isinstance(body, Round):
                for refusal in body.rejected:
                    self._answer(refusal.offer, PushAnswer.REJECTED, made, refusal.reason)
                self.counters, self.gate, self.rounds = body.counters, body.gate, self.rounds + 1
                self.rates = body.rates
                self.paced |= {each.incarnation: each for each in body.paced}
            self.versions[made], self.bases[made] = Version(made, entry, before), holds
        self.newest = made
        self.states[made] = RoundState(self.counters, self.gate, self.leases.epoch if self.leases is not None else 0)

    def _answer(self, offer: Offer, answer: PushAnswer, version: VersionId, reason: str) -> None:
        incarnation = self.incarnations[offer.push.incarnation]
        if offer.push.number != incarnation.next:
            raise ValueError(f"push {offer.push} is answered out of turn: {incarnation.next} is next (O3)")
        incarnation.answers[offer.push.number] = GivenAnswer(offer, answer, version, reason)
        self.reopened.pop(offer.push, None)
        self._count(incarnation, answer, 1)
        incarnation.rejected = incarnation.rejected + 1 if answer is PushAnswer.REJECTED else 0
        if self.leases is None:
            return
        if answer is PushAnswer.ACCEPTED:
            if offer.base != NO_VERSION:  # what founds the job was not trained
                self.leases.accept(offer, version.number)
        elif answer is PushAnswer.REJECTED:
            self.leases.reject(offer)
        else:
            self.leases.void(offer)

    def _count(self, incarnation: Incarnation, answer: PushAnswer, more: int) -> None:
        for tally in (self.tally, incarnation.tally):
            tally[answer] = tally.get(answer, 0) + more

    def _roll_back(self, made: VersionId, entry: Entry, body: RolledBack) -> None:
        """Takes back the acceptances in the versions that a rollback undoes; joins, rejections and voids stay (O5a)."""
        for version in self.since(body.to):
            for push in version.pushes:
                incarnation = self.incarnations[push.incarnation]
                answers, incarnation.low = incarnation.answers, 0
                given = answers.pop(push.number)
                self._count(incarnation, PushAnswer.ACCEPTED, -1)
                if push in body.lost:
                    reason = "its bytes were lost, and the job went back"
                    answers[push.number] = GivenAnswer(given.offer, PushAnswer.VOID, made, reason)
                    self._count(incarnation, PushAnswer.VOID, 1)
                elif not incarnation.over:
                    self.reopened[push] = given.offer
        self.rollbacks += 1
        if self.leases is not None:
            self.leases.rollback(body)
        self.counters, self.gate = self.states[body.to].counters, self.states[body.to].gate
        self.versions[made], self.bases[made] = Version(made, entry, body.to), dict(self.bases.get(body.to, {}))
        self.durable = [(v, d) for v, d in self.durable if self._comes_from(made, v)]

    def _begin(self, body: Summary) -> None:
        """Sets the state to that of a summary, with which the chain may begin."""
        summed = SummedChain.of(body)
        for name in set(SummedChain.__slots__) - {"leases", "durable", "incarnations", "versions"}:
            setattr(self, name, getattr(summed, name))
        self.leases = Leases.decode(json.loads(summed.leases)) if summed.leases else None
        self.durable = [*summed.durable]
        self.incarnations = {known.id: known for known in summed.incarnations}
        self.versions = {version.id: version for version in summed.versions}

    def _comes_from(self, version: VersionId, other: VersionId) -> bool:
        return any(v.id == other for v in self.line(version))


def with_push(held: str, number: int) -> str:
    """Returns the digest of a version's pushes with one more push added."""
    return hashlib.blake2b(f"{held}/{number}".encode(), digest_size=8).hexdigest()
