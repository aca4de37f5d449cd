"""The coordination store: the chain of decided views, kept so that no scheduler can fork it (PROTOCOL.md 7, 14a).

Theory of operation. A store holds one job's chain: an append-only list of entries (a number that is reserved, a view
that is decided, a wish about a link that is granted, the end of the job), each with a revision that counts up from 1. A
scheduler first takes a *term*, one higher than any before; from then on every older scheduler's writes fail. A write
states what it builds on - its term and, for a view, the predecessor - and is applied only if that is still true:
compare-and-set. When a write returned, it is durable. Writing the very same entry again succeeds, so that a writer may
retry after an answer that got lost.

Besides, a store over a network (etcd) has three things to say that an embedded one answers trivially: whether this
scheduler still holds its lease, what was appended after a revision, and when something is.
"""

from __future__ import annotations

import abc
import hashlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self, get_args

from chaos_lightning.errors import StoreError
from chaos_lightning.membership.effects import Chain, LinkWish, Persist
from chaos_lightning.membership.peers import short
from chaos_lightning.protocol.codec import encode
from chaos_lightning.protocol.types import NO_VIEW, Header, View, ViewId

EntryKind = Literal["reserve", "view", "link", "finish"]


MAX_ENDED = 16
"""So many chains that were put away are remembered: members of older ones are long gone."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One durable decision."""

    revision: int
    kind: EntryKind
    number: ViewId
    view: View | None = None
    base: Header | None = None
    hand_on: bool = False
    wish: LinkWish | None = None

    def same(self, other: Entry) -> bool:
        """Equal but for the revision."""
        return replace(self, revision=other.revision) == other


@dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of a compare-and-set. ok False: somebody else decided meanwhile; `detail` says what is there."""

    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tip:
    """What a write is compared with."""

    term: int = 0
    highest: ViewId = NO_VIEW
    last_view: ViewId = NO_VIEW
    finished: bool = False
    last: Entry | None = None
    chain: str = ""
    """The chain's id; "": nobody has taken a term yet."""
    ended: tuple[str, ...] = ()
    """Ids of the last chains that were put away here, oldest first."""

    def begun_again(self) -> Tip:
        """Of the empty chain that follows this one."""
        ended = (*self.ended, self.chain) if self.chain else self.ended
        return Tip(term=self.term, ended=ended[-MAX_ENDED:])


def with_term(tip: Tip, above: int = 0, chain: str = "") -> Tip:
    """The tip with a term higher than any before, and all up to `above`; with the first one a chain gets its id.

    Args:
        tip: As it is.
        above: A term that a member has heard of.
        chain: The id of a chain that is to be rebuilt here; "": as it is.

    Raises:
        StoreError: Decisions of another chain are here.
    """
    if chain and tip.chain and tip.chain != chain and tip.last_view != NO_VIEW:
        raise StoreError(f"chain {short(tip.chain)} cannot become chain {short(chain)}: it holds views already")
    return replace(tip, term=max(tip.term, above) + 1, chain=chain or tip.chain or secrets.token_hex(8))


def former_id(job: str, views: Iterable[View]) -> str:
    """The id of a chain that was begun before chains had ids: the same for each copy of it; "" for an empty one."""
    first = next(iter(views), None)
    return hashlib.blake2b(job.encode() + encode(first), digest_size=8).hexdigest() if first is not None else ""


def entry_of(effect: Persist) -> Entry:
    """The entry that a Persist effect asks for; a malformed one is a StoreError."""
    kind = effect.kind
    if kind not in get_args(EntryKind):
        raise StoreError(f"Persist of the unknown kind {kind!r}; expected one of {', '.join(get_args(EntryKind))}")
    if (kind == "view") != (effect.view is not None):
        raise StoreError(f"Persist of kind {kind!r} {'with' if effect.view else 'without'} a view")
    if effect.view is not None and effect.view.id != effect.number:
        raise StoreError(f"Persist of view {effect.view.id} under the number {effect.number}")
    if (kind == "link") != (effect.wish is not None):
        raise StoreError(f"Persist of kind {kind!r} {'with' if effect.wish else 'without'} a wish")
    return Entry(0, kind, effect.number, effect.view, effect.base, effect.hand_on, effect.wish)  # type: ignore[arg-type]


def judge(tip: Tip, term: int, entry: Entry, seen: Tip | None = None) -> Appended:
    """Whether `entry` of the scheduler with this term may follow `tip`; the one rule all stores share.

    Args:
        tip: The end of the chain as it is.
        term: The writer's.
        entry: What it writes.
        seen: The end of the chain as the writer saw it last. If the store went back since, or holds another chain now,
            a copy took its place under the writer: members would promise numbers that the job's own store lacks.
    """
    if seen is not None and tip.term <= seen.term and tip.chain != seen.chain:
        return Appended(False, f"chain {short(tip.chain)} took the place of chain {short(seen.chain)} in the store")
    if seen is not None and (tip.term, tip.highest) < (seen.term, seen.highest):
        return Appended(False, f"the store went back from {seen.highest} to {tip.highest}: this is an older copy")
    if tip.last is not None and term == tip.term and entry.same(tip.last):
        return Appended(True, "was there already")
    if term != tip.term:
        return Appended(False, f"term {term} is over, a scheduler with term {tip.term} has taken the chain")
    if tip.finished:
        return Appended(False, "the job is finished")
    if entry.kind == "reserve" and (entry.number.term != term or entry.number <= tip.highest):
        return Appended(False, f"number {entry.number} cannot be reserved after {tip.highest} in term {term}")
    if entry.kind == "view":
        assert entry.view is not None
        if entry.view.predecessor != tip.last_view:
            return Appended(
                False, f"view {entry.number} follows {entry.view.predecessor}, the chain ends with {tip.last_view}"
            )
        if entry.number.term != term or entry.number < tip.highest or entry.number <= tip.last_view:
            return Appended(
                False, f"number {entry.number} is behind {max(tip.highest, tip.last_view)} or not of term {term}"
            )
    return Appended(True)


def reached(entries: Iterable[Entry]) -> int:
    """The last optimizer step that a decision names since the job was founded; 0 if none does."""
    step = 0
    for base in (e.base for e in entries if e.base is not None):
        step = base.step if base.next_view == NO_VIEW else max(step, base.step)
    return step


class Store(abc.ABC):
    """One job's chain. Methods block; call them from one thread at a time. All raise StoreError if the store fails."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.term = 0
        """The term taken by `take_term`; 0 for a store that is only read."""
        self._seen: Tip | None = None
        """The end of the chain as this scheduler saw it last, its own writes included."""

    @property
    @abc.abstractmethod
    def place(self) -> str:
        """Where the chain is, for people."""

    @abc.abstractmethod
    def take_term(self, above: int = 0, chain: str = "") -> int:
        """Durably outranks every scheduler so far, and all up to the term `above`; returns the new term.

        The first one draws the chain's id. Where a lost chain is rebuilt, `chain` gives its id to an empty store.
        """

    @abc.abstractmethod
    def tip(self) -> Tip:
        """What the next write is compared with."""

    @abc.abstractmethod
    def append(self, effect: Persist) -> Appended:
        """Compare-and-set: durable when it returns ok."""

    @abc.abstractmethod
    def entries(self, after: int = 0) -> tuple[Entry, ...]:
        """Entries with a revision above `after`, oldest first (range read)."""

    @abc.abstractmethod
    def wait(self, after: int, timeout_s: float) -> bool:
        """Waits until an entry above revision `after` is there (watch); False after `timeout_s`."""

    @abc.abstractmethod
    def begin_again(self) -> str:
        """Where the job is finished: an empty chain, which no term of the old one outranks.

        Returns:
            What became of the old one, in words: "archived as ...".

        Raises:
            StoreError: The store fails, or somebody else wrote in between.
        """

    def holds_term(self) -> bool:
        """Whether no other scheduler has taken a later term (for etcd: and the lease stands)."""
        return self.term > 0 and self.tip().term == self.term

    def load(self) -> Chain:
        """The chain as a starting scheduler needs it; call `take_term` first."""
        tip = self._seen = self.tip()
        entries = self.entries()
        return Chain(
            term=self.term,
            highest=tip.highest,
            views=tuple(e.view for e in entries if e.view is not None),
            finished=tip.finished,
            wishes=tuple(e.wish for e in entries if e.wish is not None),
            changes=tuple(e.number for e in entries if e.view is not None and e.base is None),
            id=tip.chain,
            numbers=tuple(e.number for e in entries if e.kind in ("reserve", "view")),
            step=reached(entries),
            ended=tip.ended,
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of file or connection. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


StoreFactory = Callable[[], Store]


def advance(tip: Tip, entry: Entry) -> Tip:
    """The tip after this entry."""
    return replace(
        tip,
        highest=max(tip.highest, entry.number),
        last_view=entry.number if entry.kind == "view" else tip.last_view,
        finished=tip.finished or entry.kind == "finish",
        last=entry,
    )
