"""Reads the entries of a leader's chain from its log, and folds them into the facts that the audit needs.

Theory of operation. A leader writes down each entry with its hash and its whole body, so a log can be held against
itself: `read_entry` builds the dataclasses again, and the hash is computed anew. `JobEntries` folds entries in the
order of their positions, of all leaders' logs together. It shares nothing with the leader's own folds but the
dataclasses: what judges the leader must not make its mistakes.

*Gaps.* A log may lack entries: a leader was killed after the store had one and before its line was written, or a log
was not collected. What such an entry said is unknown. So each thing that the fold remembers has the position from which
it is known, and a contradiction counts only if no gap lies between the two things that contradict each other. Else it
is a doubt, which is told and proves nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.reader import Record
from chaos_lightning.observe import fields as f
from chaos_lightning.observe.outer.leases import LeaseBook
from chaos_lightning.observe.outer.rounds import amiss
from chaos_lightning.outer.rules import types as ot
from chaos_lightning.outer.rules.settings import OuterSettings

BODIES: Mapping[str, type] = {cls.__name__: cls for cls in typing.get_args(ot.Body)}
AHEAD = 3
"""Number of rounds that may be decided beyond the newest durable version (O5)."""

# ------------------------------------------------------------------------------------------------ reading


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _rebuilt(wanted: Any, given: Any) -> Any:
    """Returns a value of type `wanted` from its JSON form; numbers stay as they are, since 1 and 1.0 have different
    hashes.
    """
    if isinstance(wanted, types.UnionType):
        some, _ = typing.get_args(wanted)  # or None
        return None if given is None else _rebuilt(some, given)
    if is_dataclass(wanted):
        assert isinstance(wanted, type)
        names = [x.name for x in fields(wanted)]
        if not isinstance(given, Mapping) or list(given) != names:
            raise ValueError(f"expected a {wanted.__name__} with {', '.join(names)}, got {str(given)[:80]}")
        return wanted(**{name: _rebuilt(_hints(wanted)[name], given[name]) for name in names})
    if typing.get_origin(wanted) is tuple:
        if not isinstance(given, list):
            raise ValueError(f"expected a list, got {str(given)[:80]}")
        kinds = typing.get_args(wanted)
        kinds = kinds[:1] * len(given) if kinds[-1] is Ellipsis else kinds
        return tuple(_rebuilt(kind, item) for kind, item in zip(kinds, given, strict=True))
    if wanted is float and isinstance(given, str):
        return float(given)  # not finite, which strict JSON cannot hold
    if isinstance(given, bool) or not isinstance(given, (int, float) if wanted is float else wanted):
        raise ValueError(f"expected {wanted.__name__}, got {str(given)[:80]}")
    return given


@dataclass(frozen=True, slots=True)
class ToldEntry:
    """Log line of an `entry` event, with the entry of the chain that it describes.

    Attributes:
        t: Wall time of the line, s.
        source: Name of the file.
        position: Position in the chain; 0 if the line does not say it.
        hash: Hash as told.
        entry: Entry as rebuilt; None if it could not be.
        trouble: Trouble with the line by itself, in words; "" for none.
    """

    t: float
    source: str
    position: int
    hash: str
    entry: ot.Entry | None
    trouble: str = ""


def read_entry(r: Record) -> ToldEntry:
    """Reads an `entry` event, and checks that its hash fits its content."""
    position, told = f.integer(r.get("position")), str(r.get("hash", ""))
    where = f"entry {position} in {r.source}"
    try:
        if (kind := str(r.get("kind", ""))) not in BODIES:
            raise ValueError(f"there is no kind {kind!r}")
        body = _rebuilt(BODIES[kind], r.get("body"))
        entry = ot.Entry(position, f.integer(r.get("term")), body, str(r.get("before", "")))
    except (ValueError, TypeError) as error:
        return ToldEntry(r.t, r.source, position, told, None, f"{where} cannot be read: {error}")
    if entry.hash != told:
        return ToldEntry(r.t, r.source, position, told, entry, f"{where} has hash {told}, its content {entry.hash}")
    if r.get("version") != str(entry.version):
        text = f"{where} is said to make {r.get('version')}, and makes {entry.version}"
        return ToldEntry(r.t, r.source, position, told, entry, text)
    return ToldEntry(r.t, r.source, position, told, entry)


# ------------------------------------------------------------------------------------------------ the chain


def _harmless(told: ToldEntry) -> bool:
    """Returns whether an entry decides nothing, since it only says that a follower has started."""
    return told.entry is not None and isinstance(told.entry.body, ot.Started)


def _longest(by_position: Mapping[int, list[ToldEntry]]) -> set[str]:
    """Returns the hashes of the entry with the highest position and of all its predecessors, as far as the logs have
    them.

    A server that was started on an older copy of its store has written entries at positions that are taken.
    """
    line: set[str] = set()
    wanted = ""
    for position in sorted(by_position, reverse=True):
        entries = [told.entry for told in by_position[position] if told.entry is not None]
        found = next((e for e in entries if e.hash == wanted), None)
        found = found or max(entries, key=lambda entry: entry.term)  # the last one, or the last one before a gap
        line.add(found.hash)
        wanted = found.before
    return line


@dataclass(frozen=True, slots=True)
class ChainAnswer:
    """Answer to a push, with the position of the chain's entry that gives it."""

    offer: ot.Offer
    answer: ot.PushAnswer
    version: ot.VersionId
    position: int


@dataclass(frozen=True, slots=True)
class MadeVersion:
    """Version, with the entry that made it and what it contains.

    Attributes:
        id: Name of the version.
        told: Line that tells of the version.
        before: Version that it is computed from; NO_VERSION: none.
        pushes: Pushes that it adds.
        holds: Token of the pushes that it holds of each incarnation: equal tokens stand for the same pushes.
        counters: Counters after this version; None where a gap hides them.
        shards: Followers that held the shards when it was decided.
    """

    id: ot.VersionId
    told: ToldEntry
    before: ot.VersionId
    pushes: tuple[ot.Offer, ...]
    holds: Mapping[ot.IncarnationId, int]
    counters: ot.Counters | None
    shards: tuple[str, ...]

    @property
    def body(self) -> ot.Body:
        """Body of the entry that made the version."""
        assert self.told.entry is not None
        return self.told.entry.body


@dataclass(frozen=True, slots=True)
class Mark:
    """Durable mark of a version: its digest per shard, the followers of the shards, and whether the shards had been cut
    anew.
    """

    version: ot.VersionId
    digests: tuple[str, ...]
    followers: tuple[str, ...]
    t: float
    recut: bool


@dataclass(frozen=True, slots=True)
class Rollback:
    """Rollback, with the versions and accepted pushes that it took back."""

    told: ToldEntry
    body: ot.RolledBack
    versions: tuple[ot.VersionId, ...]
    pushes: tuple[ot.Offer, ...]
    """Pushes whose acceptance it took back."""

    @property
    def lost(self) -> tuple[ot.Offer, ...]:
        """Accepted pushes that the rollback took back for good: no cluster can offer them again."""
        return tuple(offer for offer in self.pushes if offer.push in self.body.lost)


@dataclass(slots=True)
class KnownIncarnation:
    """Incarnation of a cluster, as the entries of the chain describe it."""

    joined: ot.Joined
    position: int
    t: float
    over: str = ""
    over_t: float = 0.0
    over_at: int = 0
    """Position of the entry that ended it."""


@dataclass(slots=True)
class JobEntries:
    """Facts folded from the chain entries of one job; `of` computes them.

    Attributes:
        told: Line that counts for each position.
        gaps: First and last position of each run of entries that no log has.
        contradictions: Contradictions by topic: "chain", "pushes", "samples" or "durable".
        doubts: Things that would be wrong if no gap explained them.
        versions: Versions by name.
        offers: First offer of each push, and its position.
        answers: All answers to each push, oldest first; those that a rollback took back, too.
        standing: Answer to each push that stands now.
    """

    told: dict[int, ToldEntry] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    contradictions: list[tuple[str, str]] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    """Entries that a server wrote behind an older copy of the chain, and that decided nothing."""
    versions: dict[ot.VersionId, MadeVersion] = field(default_factory=dict)
    newest: ot.VersionId = ot.NO_VERSION
    opened: ot.JobOpened | None = None
    members: dict[ot.IncarnationId, KnownIncarnation] = field(default_factory=dict)
    offers: dict[ot.PushId, tuple[ot.Offer, int]] = field(default_factory=dict)
    answers: dict[ot.PushId, list[ChainAnswer]] = field(default_factory=dict)
    standing: dict[ot.PushId, ChainAnswer] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    durable: list[Mark] = field(default_factory=list)
    """Durable marks whose version stands."""
    recut: set[tuple[str, str]] = field(default_factory=set)
    """Versions that were cut into other shards, with the digests of these."""
    rollbacks: list[Rollback] = field(default_factory=list)
    leases: LeaseBook = field(default_factory=LeaseBook)
    ended: ot.Ended | None = None
    _position: int = 0
    _gap: int = 0
    """Last position of the latest gap."""
    _cut: tuple[str, ...] = ()
    _recut_at: int = 0
    """Position of the last cut."""
    _marked: int = 0
    """Position of the newest mark."""
    _versioned: int = 0
    """Position of the newest version."""
    _next: dict[ot.IncarnationId, int] = field(default_factory=dict)
    _settings: OuterSettings | None = None
    """Rules of the job; None where they are not known, or are another release's."""
    _opened: set[ot.PushId] = field(default_factory=set)
    """Pushes that a rollback made unanswered."""
    _tokens: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[ToldEntry]) -> JobEntries:
        """Returns the facts in these log lines about chain entries, given in any order."""
        chain = cls()
        by_position: dict[int, list[ToldEntry]] = {}
        for told in entries:
            if told.trouble:
                chain.contradictions.append(("chain", told.trouble))
            if told.entry is not None:
                by_position.setdefault(told.position, []).append(told)
        line = _longest(by_position)
        for position in sorted(by_position):
            chain._take(position, by_position[position], line)
        return chain

    def _take(self, position: int, here: list[ToldEntry], line: Collection[str]) -> None:
        versions = {told.entry.hash: told for told in reversed(here) if told.entry is not None}
        ours = {h: told for h, told in versions.items() if h in line or not _harmless(told)}
        if ours.keys() & line:
            strays = [stray.source for h, stray in versions.items() if h not in ours]
            self.strays += [
                f"entry {position} in {source} stands behind an older copy of the chain" for source in strays
            ]
            versions = ours
        if len(versions) > 1:
            rows = " and ".join(f"{t.source} has {h} (term {t.entry.term})" for h, t in versions.items() if t.entry)
            self.contradictions.append(("chain", f"two entries at position {position}: {rows}"))
        told = next((t for h, t in versions.items() if h in line), None)
        told = told or max(versions.values(), key=lambda t: t.entry.term if t.entry else 0)
        entry = told.entry
        assert entry is not None
        last = self.told[self._position].entry if self._position else None
        if position > self._position + 1:
            self.gaps.append((self._position + 1, position - 1))
            self._gap = position - 1
        elif entry.before != (last.hash if last is not None else ""):
            text = f"entry {position} follows {entry.before or 'nothing'}"
            self._say("chain", f"{text}, and entry {position - 1} is {last.hash if last else 'none'}", position)
        if last is not None and entry.term < last.term:
            text = f"entry {position} is of term {entry.term}, entry {self._position} before it of {last.term}"
            self._say("chain", text, position)
        self._position = position
        self.told[position] = told
        self._fold(told, entry)

    def _say(self, topic: str, text: str, since: int) -> None:
        """Notes a contradiction, or a doubt if entries missing after position `since` may explain it."""
        if since > self._gap or not self._gap:
            self.contradictions.append((topic, text))
        else:
            self.doubts.append(f"{text} (or the gap before entry {self._gap + 1} explains it)")

    # ------------------------------------------------------------------ entries

    def _fold(self, told: ToldEntry, entry: ot.Entry) -> None:
        body = entry.body
        if self.ended is not None:
            text = f"entry {self._position}, {type(body).__name__}, was stored after the job had ended (O16)"
            self._say("chain", text, self._position)
        match body:
            case ot.JobOpened():
                self.opened = body
                self.leases.length = body.agreement.length
                with contextlib.suppress(ConfigurationError):
                    self._settings = OuterSettings.of_words(body.agreement.settings)
            case ot.Cut(followers, durable):
                self._recut_at, self._cut = self._position, followers
                self.recut |= {(str(mark.version), digest) for mark in durable for digest in mark.digests}
            case ot.Joined(incarnation, _, first):
                if incarnation in self.members:
                    self._say("chain", f"{incarnation} joins at entry {self._position} a second time", self._position)
                self.members[incarnation] = KnownIncarnation(body, self._position, told.t)
                self._next[incarnation] = first
            case ot.Leased():
                for text, since in self.leases.lease(body):
                    self._say("samples", f"entry {self._position} {text}", since)
            case ot.LeftOver():
                for text, since in self.leases.set_aside(body):
                    self._say("samples", f"entry {self._position} {text}", since)
            case ot.Removed(incarnation, reason):
                self._remove(told, incarnation, reason)
            case ot.Voided(offer, _):
                self._answer(offer, ot.PushAnswer.VOID, ot.NO_VERSION)
            case ot.Founded(number, offer):
                if any(made.pushes for made in self.line()):
                    self._say("chain", f"{entry.version} founds the job a second time", self._position)
                self._made(told, number, ot.NO_VERSION, (offer,), ot.Counters())
            case ot.Round():
                self._round(told, entry.version, body)
            case ot.RolledBack():
                self._roll_back(told, entry.version, body)
            case ot.Durable():
                self._mark(told, body)
            case ot.Ended():
                self._end(told, body)
            case ot.Started() | ot.Summary():
                pass

    def _end(self, told: ToldEntry, body: ot.Ended) -> None:
        self.ended = body
        if body.version not in {mark.version for mark in self.durable}:
            self._say("durable", f"the job ended with {body.version}, which is not durable (O16)", 1)
        for offer in body.voided:
            self._answer(offer, ot.PushAnswer.VOID, ot.NO_VERSION)
        for who in [who for who, member in self.members.items() if not member.over]:
            self._remove(told, who, f"the job has ended: {body.reason}")

    def _remove(self, told: ToldEntry, who: ot.IncarnationId, reason: str) -> None:
        if (member := self.members.get(who)) is not None:
            member.over, member.over_t, member.over_at = reason, told.t, self._position
        self.leases.remove(who)

    def line(self) -> Iterator[MadeVersion]:
        """Yields the newest version and its predecessors, newest first, as far as the logs have them."""
        at = self.newest
        while at in self.versions:
            yield self.versions[at]
            at = self.versions[at].before

    def _round(self, told: ToldEntry, version: ot.VersionId, body: ot.Round) -> None:
        before = self.versions.get(body.before)
        if body.before != self.newest:
            self._say("chain", f"{version} is made of {body.before}, and {self.newest} was the newest", self._versioned)
        accepted = tuple(weighed.offer for weighed in body.accepted)
        covered = sum(offer.samples for offer in accepted)
        counted = before.counters.samples if before is not None and before.counters is not None else None
        if counted is not None and body.counters.samples != counted + covered:
            text = f"{version} counts {body.counters.samples} samples: its pushes cover {covered}"
            self._say("samples", f"{text}, and {body.before} had counted {counted}", self._position)
        if counted is not None and before is not None and before.counters is not None and self._settings is not None:
            living = sum(not member.over or member.over_at > self._versioned for member in self.members.values())
            for text in amiss(body, before.counters, self._settings, living, self._opened):
                self._say("samples", f"{version}: {text}", before.told.position)
        for offer in accepted:
            base, who = self.versions.get(offer.base), offer.push.incarnation
            if base is None:
                self._say("pushes", f"{version} accepts {offer.push}, whose base {offer.base} is of no chain", 1)
            elif before is not None and base.holds.get(who, 0) != before.holds.get(who, 0):
                text = f"{version} accepts {offer.push}, whose base {offer.base} does not hold the pushes of {who}"
                self._say("pushes", f"{text} that stand (O3)", self._since(base, before))
        self._made(told, body.number, body.before, accepted, body.counters)
        for refusal in body.rejected:
            self._answer(refusal.offer, ot.PushAnswer.REJECTED, version)

    def _since(self, *versions: MadeVersion) -> int:
        return min(made.told.position for made in versions)

    def _made(
        self,
        told: ToldEntry,
        number: int,
        before: ot.VersionId,
        pushes: tuple[ot.Offer, ...],
        counters: ot.Counters,
    ) -> None:
        assert told.entry is not None
        version = told.entry.version
        self._numbered(version)
        old = self.versions.get(before)
        holds = dict(old.holds) if old is not None else {}
        for offer in pushes:
            self._answer(offer, ot.PushAnswer.ACCEPTED, version)
            who = offer.push.incarnation
            holds[who] = self._tokens.setdefault((holds.get(who, 0), offer.push.number), len(self._tokens) + 1)
        self.versions[version] = MadeVersion(version, told, before, pushes, holds, counters, self._cut)
        self.newest, self._versioned = version, self._position
        marked = self.durable[-1].version.number if self.durable else 0
        ahead = itertools.takewhile(lambda made: made.id.number > marked, self.line())
        if sum(1 for made in ahead if not isinstance(made.body, ot.RolledBack)) > AHEAD:
            text = f"{version} is decided more than {AHEAD} versions ahead of the newest durable one (O5)"
            self._say("durable", text, self._marked)

    def _numbered(self, version: ot.VersionId) -> None:
        if version.number != self.newest.number + 1:
            since = self._versioned if version.number > self.newest.number else self._position
            self._say("chain", f"{version} follows {self.newest}", since)

    def _answer(self, offer: ot.Offer, answer: ot.PushAnswer, version: ot.VersionId) -> None:
        push, who = offer.push, offer.push.incarnation
        what = f"{push} is {answer.value} at entry {self._position}"
        first, where = self.offers.setdefault(push, (offer, self._position))
        if first != offer:
            self._say("pushes", f"{what} and is not the push that entry {where} names so (O3)", self._position)
        member = self.members.get(who)
        if member is None:
            self._say("pushes", f"{what}, and {who} never joined", 1)
        elif member.over:
            self._say("pushes", f"{what} after {who} was over: {member.over}", self._position)
        if (given := self.standing.get(push)) is not None:
            words = f"{what}, and was {given.answer.value} at entry {given.position}"
            self._say("pushes", f"{words}: it is answered twice (O3)", given.position)
        elif who in self._next and push.number != self._next[who]:
            text = f"{what}, and {self._next[who]} is the next number of {who}: out of turn (O3)"
            self._say("pushes", text, member.position if member is not None else 1)
            self._next[who] = push.number + 1
        said = ChainAnswer(offer, answer, version, self._position)
        self.answers.setdefault(push, []).append(said)
        self.standing[push] = said
        self._advance(who)
        for text, since in self.leases.answer(offer, answer, self._position):
            self._say("samples", f"entry {self._position}: {text}", since)

    def _advance(self, who: ot.IncarnationId) -> None:
        number = self._next.get(who, 1)
        while ot.PushId(who, number) in self.standing:
            number += 1
        self._next[who] = number

    def _roll_back(self, told: ToldEntry, version: ot.VersionId, body: ot.RolledBack) -> None:
        behind: list[MadeVersion] = []
        for made in self.line():
            if made.id == body.to:
                break
            behind.append(made)
        else:
            if body.to != ot.NO_VERSION or (behind and behind[-1].before != ot.NO_VERSION):
                text = f"{version} goes back to {body.to}, from which {self.newest} does not come"
                self._say("chain", text, 1)
                self._gap = self._position  # what it holds is not known
        if len(self.durable) > 1 and body.to.number < self.durable[-2].version.number:
            text = f"{version} goes back to {body.to}, behind {self.durable[-2].version}, the second newest durable one"
            self._say("durable", f"{text} (O5a)", self._position)
        taken = tuple(offer for made in reversed(behind) for offer in made.pushes)
        for offer in taken:
            self.standing.pop(offer.push, None)
            if offer.push in body.lost:
                said = ChainAnswer(offer, ot.PushAnswer.VOID, version, self._position)
                self.answers[offer.push].append(said)
                self.standing[offer.push] = said
        for who in {offer.push.incarnation for offer in taken}:
            self._next[who] = self.members[who].joined.first if who in self.members else 1
            self._advance(who)
        self._opened |= {offer.push for offer in taken} - {*body.lost}
        self.leases.roll_back(taken, body.lost)
        self.rollbacks.append(Rollback(told, body, tuple(made.id for made in reversed(behind)), taken))
        to = self.versions.get(body.to)
        self._numbered(version)
        nothing = ot.Counters() if body.to == ot.NO_VERSION else None
        holds, counters = (to.holds, to.counters) if to is not None else ({}, nothing)
        self.versions[version] = MadeVersion(version, told, body.to, (), holds, counters, self._cut)
        self.newest, self._versioned = version, self._position
        self.durable = [mark for mark in self.durable if self._stands(mark.version)]

    def _mark(self, told: ToldEntry, body: ot.Durable) -> None:
        version = body.version
        if not self._stands(version):
            self._say("durable", f"{version} is marked at entry {self._position} and does not stand", 1)
        if self.durable and version.number <= self.durable[-1].version.number:
            text = f"{version} is marked at entry {self._position} after {self.durable[-1].version}"
            self._say("durable", text, self._position)
        if self._cut and len(body.digests) != len(self._cut):
            text = f"{version} is marked with {len(body.digests)} digests of {len(self._cut)} shards"
            self._say("durable", text, self._position)
        made = self.versions.get(version)
        recut = made is not None and made.told.position < self._recut_at
        mark = Mark(version, body.digests, self._cut, told.t, recut)
        self.marks.append(mark)
        self.durable.append(mark)
        self._marked = self._position

    def _stands(self, version: ot.VersionId) -> bool:
        newer = itertools.dropwhile(lambda made: made.id.number > version.number, self.line())
        return any(made.id == version for made in itertools.islice(newer, 1))

    # ------------------------------------------------------------------ questions of others

    def names(self) -> dict[str, MadeVersion]:
        """Returns the versions by their names as written in logs."""
        return {str(version): made for version, made in self.versions.items()}
