"""What the leader's chain says: the state that its entries fold to, and what may follow it.

Theory of operation. The chain is the one sequence of rounds and records (rule O1). `OuterChain.follow` takes the next
entry in; whoever folds the same entries holds the same: the leader that wrote them, the one that comes after it, an
audit. So nothing that decides what becomes of a push is kept anywhere else.

*Versions.* A founding, a round and a rollback make one each. A version *stands* unless a rollback went behind it. For
each version the chain knows which pushes it holds, by cluster: as a digest of their numbers in order (`holds`), since
all that is ever asked is whether two versions hold the same.

*Pushes.* Each incarnation numbers its own, and they are answered in order: `next` is the lowest number without an
answer. A rollback takes acceptances back, so numbers may be open again below others that stay rejected.

*Durable.* The two newest durable versions; what the older one holds can never be asked for again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import assert_never

from chaos_lightning.outer.leases import Leases, chunk_size
from chaos_lightning.outer.types import (
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
    Offer,
    PushAnswer,
    PushId,
    Removed,
    RolledBack,
    Round,
    Started,
    VersionId,
    Voided,
)

CHUNKS = 4096
"""Of an epoch, at most."""
AHEAD = 3
"""So many versions at most are decided beyond the newest durable one (O5)."""


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """What the chain said of one push."""

    offer: Offer
    answer: PushAnswer
    version: VersionId
    reason: str


@dataclass(slots=True)
class Incarnation:
    """What the chain knows of one incarnation.

    Attributes:
        id: Its name.
        place: Where it runs, for people.
        first: Number of its first push.
        over: Why it is removed; "" while it is in.
        answers: By number.
        rejected: How often in a row its pushes were rejected.
        low: All numbers below it are answered.
    """

    id: IncarnationId
    place: str
    first: int
    over: str = ""
    answers: dict[int, GivenAnswer] = field(default_factory=dict)
    rejected: int = 0
    low: int = 0

    @property
    def next(self) -> int:
        """The number of its next push to be answered."""
        self.low = max(self.low, self.first)
        while self.low in self.answers:
            self.low += 1
        return self.low

    def accepted(self, last: int) -> list[PushId]:
        """Those of its last so many pushes that stand, oldest first."""
        numbers = sorted(self.answers)[-last:]
        return [self.answers[n].offer.push for n in numbers if self.answers[n].answer is PushAnswer.ACCEPTED]


@dataclass(frozen=True, slots=True)
class Version:
    """One version.

    Attributes:
        id: Its name.
        entry: What made it.
        before: The version whose state it is computed from: of a round the one before it, of a rollback the one whose
            content it has.
        holds: By incarnation a digest of the numbers of its pushes that this version holds.
    """

    id: VersionId
    entry: Entry
    before: VersionId
    holds: dict[IncarnationId, str]

    @property
    def pushes(self) -> tuple[PushId, ...]:
        """Those that this version adds to the one before."""
        return tuple(offer.push for offer in self.entry.offers)


class OuterChain:
    """See the module.

    Attributes:
        position: Of the last entry.
        hash: Of the last entry.
        last: That entry; None: there is none.
        versions: All of them, by id.
        newest: The last one; it stands.
        durable: The two newest durable ones with the digests of their shards, oldest first.
        safe: The second newest durable one, as it last was: what it holds is never asked for again, and no rollback
            goes behind it.
        incarnations: All that ever joined.
        starts: Followers and the number of their last start.
        cut: Followers in shard order; empty before the first.
        counters: Of the outer optimizer.
        gate: What the gate has seen.
        agreement: What all clusters have in common; None before the first one has come.
        by: Where that one ran.
        leases: Who may train which samples; None where each cluster has its own data.
        ended: The last version and why; None while the job goes on.
        rollbacks: How many there were.
    """

    def __init__(self) -> None:
        self.agreement: Agreement | None = None
        self.by = ""
        self.leases: Leases | None = None
        self.position = 0
        self.hash = ""
        self.last: Entry | None = None
        self.versions: dict[VersionId, Version] = {}
        self.newest = NO_VERSION
        self.durable: list[tuple[VersionId, tuple[str, ...]]] = []
        self.safe = NO_VERSION
        self.incarnations: dict[IncarnationId, Incarnation] = {}
        self.starts: dict[str, str] = {}
        self.cut: tuple[str, ...] = ()
        self.counters = Counters()
        self.gate = GateState()
        self.ended: Ended | None = None
        self.rollbacks = 0
        self._founded = False
        """Whether the first content stands."""
        self._states = {NO_VERSION: (Counters(), GateState())}
        """What a rollback to a version goes back to."""
        self._epochs: dict[VersionId, int] = {}

    # ------------------------------------------------------------------ questions

    def entry(self, term: int, body: Body) -> Entry:
        """The entry that would follow."""
        return Entry(self.position + 1, term, body, self.hash)

    @property
    def next_number(self) -> int:
        """Of the next version."""
        return self.newest.number + 1

    @property
    def founded(self) -> bool:
        """Whether there is a version with content; a rollback may take the first one back."""
        return self._founded

    @property
    def ahead(self) -> int:
        """How many versions are decided beyond the newest durable one; a rollback is none of them (O5a)."""
        newest = self.durable[-1][0] if self.durable else NO_VERSION
        beyond = takewhile(lambda v: v.id > newest, self.line())
        return sum(1 for v in beyond if not isinstance(v.entry.body, RolledBack))

    def line(self, version: VersionId | None = None) -> Iterator[Version]:
        """Versions from this one (the newest) back to the first: each is computed from the next one that comes."""
        at = self.newest if version is None else version
        while at in self.versions:
            found = self.versions[at]
            yield found
            at = found.before

    def since(self, version: VersionId) -> list[Version]:
        """What leads from this version to the newest, oldest first.

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
        """Whether the newest version comes from this one."""
        return any(v.id == version for v in self.line())

    def staleness(self, base: VersionId) -> int:
        """How many versions were made since this one: their numbers have no gaps."""
        return max(0, self.newest.number - base.number)

    def held(self, version: VersionId, incarnation: IncarnationId) -> str:
        """Which pushes of this incarnation the version holds, as a digest."""
        found = self.versions.get(version)
        return found.holds.get(incarnation, "") if found is not None else ""

    def progress(self, version: VersionId) -> JobProgress:
        """How far the job is with this version; nowhere with one that is not known."""
        counters, _ = self._states.get(version, self._states[NO_VERSION])
        return JobProgress(counters.samples, counters.ticks, self._epochs.get(version, 0))

    def needed(self) -> set[PushId]:
        """Pushes whose bytes somebody may ask for: accepted, and not held by the second newest durable version (O5)."""
        found: set[PushId] = set()
        for version in self.line():
            if version.id == self.safe:
                break
            found.update(version.pushes)
        return found

    # ------------------------------------------------------------------ following

    def follow(self, entry: Entry) -> None:
        """Takes the next entry in.

        Raises:
            ValueError: It does not follow: a bug, or a store that another leader wrote to.
        """
        if (entry.position, entry.before) != (self.position + 1, self.hash):
            raise ValueError(f"entry {entry.position} after {entry.before[:6]} does not follow {self.position}")
        body = entry.body
        match body:
            case JobOpened(agreement, by):
                self.agreement, self.by = agreement, by
                # Nobody can have joined before.
                self.leases = (
                    Leases(agreement.length, chunk_size(agreement.length, CHUNKS)) if agreement.length else None
                )
            case Started(follower, nonce):
                self.starts[follower] = nonce
            case Cut(followers):
                self.cut = followers
            case Joined(incarnation, place, first):
                self.incarnations[incarnation] = Incarnation(incarnation, place, first)
                if self.leases is not None:
                    self.leases.join(incarnation)
            case Founded() | Round() | RolledBack():
                self._version(entry, body)
            case Leased():
                assert self.leases is not None, "each cluster has its own data"
                self.leases.lease(body)
            case Removed(incarnation, reason):
                self.incarnations[incarnation].over = reason
                if self.leases is not None:
                    self.leases.remove(incarnation)
            case Voided(offer, reason):
                self._answer(offer, PushAnswer.VOID, NO_VERSION, reason)
            case Durable(version, digests):
                self._mark(version, digests)
            case Ended():
                self.ended = body
            case _:
                assert_never(body)
        self.position, self.hash, self.last = entry.position, entry.hash, entry

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
            holds = dict(self.versions[before].holds) if before in self.versions else {}
            for offer in entry.offers:
                self._answer(offer, PushAnswer.ACCEPTED, made, "")
                holds[offer.push.incarnation] = with_push(holds.get(offer.push.incarnation, ""), offer.push.number)
            if isinstance(body, Round):
                for refusal in body.rejected:
                    self._answer(refusal.offer, PushAnswer.REJECTED, made, refusal.reason)
                self.counters, self.gate = body.counters, body.gate
            self.versions[made] = Version(made, entry, before, holds)
        self.newest = made
        if not isinstance(body, Round):
            self._founded = any(isinstance(v.entry.body, Founded) for v in self.line())
        self._states[made] = (self.counters, self.gate)
        self._epochs[made] = self.leases.epoch if self.leases is not None else 0

    def _answer(self, offer: Offer, answer: PushAnswer, version: VersionId, reason: str) -> None:
        incarnation = self.incarnations[offer.push.incarnation]
        if offer.push.number != incarnation.next:
            raise ValueError(f"push {offer.push} is answered out of turn: {incarnation.next} is next (O3)")
        incarnation.answers[offer.push.number] = GivenAnswer(offer, answer, version, reason)
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

    def _roll_back(self, made: VersionId, entry: Entry, body: RolledBack) -> None:
        """Acceptances of the versions behind go; joins, rejections and voids stand (O5a)."""
        for version in self.since(body.to):
            for push in version.pushes:
                incarnation = self.incarnations[push.incarnation]
                answers, incarnation.low = incarnation.answers, 0
                if push in body.lost:
                    given = answers[push.number]
                    reason = "its bytes were lost, and the job went back"
                    answers[push.number] = GivenAnswer(given.offer, PushAnswer.VOID, made, reason)
                else:
                    del answers[push.number]
        self.rollbacks += 1
        if self.leases is not None:
            self.leases.rollback(body)
        self.counters, self.gate = self._states[body.to]
        holds = self.versions[body.to].holds if body.to in self.versions else {}
        self.versions[made] = Version(made, entry, body.to, dict(holds))
        self.durable = [(v, d) for v, d in self.durable if self._comes_from(made, v)]

    def _comes_from(self, version: VersionId, other: VersionId) -> bool:
        return any(v.id == other for v in self.line(version))


def with_push(held: str, number: int) -> str:
    """The digest of the pushes that a version holds, with one more."""
    return hashlib.blake2b(f"{held}/{number}".encode(), digest_size=8).hexdigest()
