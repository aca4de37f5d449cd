"""Keeps a job's decisions in a store, as a chain of views that no scheduler can fork (protocol.md 7, 14a).

Theory of operation. A job's log (service/store.py) has records of five kinds: a number that is reserved, a view that is
decided, a wish about a link that is granted, the end of the job, and one that takes the place of all before it
(`JobChain.cut`, summing.py). The log sees to it that one scheduler writes, and that it has seen all that is there; what
may follow what is `judge`'s to say, here: numbers are never reissued, a view follows the last one, and nothing follows
the end. The two together are a compare-and-set on term and predecessor.

A view's record says what changed against the view before, which it names by number and digest, and is applied to that
one alone; it has the whole view where its change would be no smaller. Readers fold them.

`Tip` is what of the chain a decision is compared with; it is folded from the records. The scheduler that writes keeps
it, since nobody else can write while its term is the last; it reads anew after an answer that got lost, and before it
believes a refusal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any, Literal, Self, get_args

from chaos_lightning.control import summing
from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.errors import OversizeError, StoreError, WireError
from chaos_lightning.membership.effects import Chain, LinkWish, Persist, RecordedEnd
from chaos_lightning.membership.peers import short
from chaos_lightning.protocol.changes import change_to, changed
from chaos_lightning.protocol.codec import decode, encode
from chaos_lightning.protocol.packing import PackedChange
from chaos_lightning.protocol.types import NO_VIEW, Header, Ledger, View, ViewId
from chaos_lightning.service.store import (
    EMPTY,
    MAX_BODY_NBYTES,
    Appended,
    End,
    Store,
    StoreRecord,
    outranked,
    packed_body,
)

MAX_VIEW_NBYTES = MAX_BODY_NBYTES - (1 << 16)
"""Limit of a view (bytes): a record has a base and a few words beside it."""
EntryKind = Literal["reserve", "view", "link", "finish"]
SUMMARY: Literal["summary"] = "summary"
"""Kind of a record that sums up all before it."""
FORM = 2
"""Version of a record's body, which its first line names; version 1 named none."""


@dataclass(frozen=True, slots=True)
class ChainEntry:
    """A decision in the chain; `revision` is its record's position in the store."""

    revision: int
    kind: EntryKind | Literal["summary"]
    number: ViewId
    view: View | None = None
    base: Header | None = None
    hand_on: bool = False
    wish: LinkWish | None = None
    ending: RecordedEnd | None = None
    change: PackedChange | None = field(default=None, compare=False, repr=False)
    """Change that the entry's record holds instead of the whole view; None: it holds the view."""
    digest: str = field(default="", compare=False, repr=False)
    """Digest of what the entry's record says of the view; with changes it covers all back to a whole view."""
    summed: Chain | None = field(default=None, repr=False)
    """Chain that a summary stands for; `view` is the last one of it."""

    def same(self, other: ChainEntry) -> bool:
        """Returns whether two entries are equal except for the revision."""
        return replace(self, revision=other.revision) == other


@dataclass(frozen=True, slots=True)
class Tip:
    """State at the end of the chain, by which a store judges whether the next decision may follow."""

    end: End = EMPTY
    highest: ViewId = NO_VIEW
    last_view: ViewId = NO_VIEW
    finished: bool = False
    ending: RecordedEnd | None = None
    last: ChainEntry | None = None
    view: View | None = None
    """Last view of the chain."""
    digest: str = ""
    """Digest of the last view's record, for the next record that changes it."""

    @property
    def term(self) -> int:
        return self.end.term

    @property
    def chain(self) -> str:
        """Id of the chain; "" if nobody has taken a term yet."""
        return self.end.id

    def tells_s(self, finished_s: float, now: float) -> float:
        """Returns for how long newcomers are still told that the job has finished, s, at wall time `now`; 0: no longer.

        A clock that was set back since then says nothing: they are told no more.
        """
        age_s = now - self.ending.at if self.finished and self.ending is not None else -1.0
        return max(0.0, finished_s - age_s) if age_s >= 0 else 0.0


def entry_of(effect: Persist) -> ChainEntry:
    """Returns the chain entry for a Persist effect; raises StoreError if the effect is malformed.

    Of a base it has what a scheduler reads back, and nothing that grows with the job: members keep the header itself.
    """
    kind = effect.kind
    if kind not in get_args(EntryKind):
        raise StoreError(f"Persist of the unknown kind {kind!r}; expected one of {', '.join(get_args(EntryKind))}")
    if (kind == "view") != (effect.view is not None):
        raise StoreError(f"Persist of kind {kind!r} {'with' if effect.view else 'without'} a view")
    if effect.view is not None and effect.view.id != effect.number:
        raise StoreError(f"Persist of view {effect.view.id} under the number {effect.number}")
    if kind != "finish" and effect.ending is not None:
        raise StoreError(f"Persist of kind {kind!r} with the end of a job")
    if (kind == "link") != (effect.wish is not None):
        raise StoreError(f"Persist of kind {kind!r} {'with' if effect.wish else 'without'} a wish")
    base = effect.base
    if base is not None:
        base = replace(base, shares=(), presence=b"", ledger=Ledger(), answers=(), hyper="", view_change=None, error="")
    what = (effect.view, base, effect.hand_on, effect.wish, effect.ending)
    return ChainEntry(0, kind, effect.number, *what)  # type: ignore[arg-type]


def judge(tip: Tip, term: int, entry: ChainEntry, seen: Tip | None = None) -> Appended:
    """Decides whether a scheduler with this term may append `entry` to a chain that ends with `tip`.

    Args:
        tip: The end of the chain as it is.
        term: Term of the writer.
        entry: Entry to append.
        seen: The end of the chain as the writer saw it last.
    """
    refused = outranked(tip.end, term, seen.end if seen is not None else None)
    if not refused and tip.last is not None and entry.same(tip.last):
        return Appended(True, "was there already", tip.end)
    return Appended(not refused, refused, tip.end) if refused else _follows(tip, term, entry)


def _follows(tip: Tip, term: int, entry: ChainEntry) -> Appended:
    words = ""
    if tip.finished:
        words = "the job is finished"
    elif entry.kind == "reserve" and (entry.number.term != term or entry.number <= tip.highest):
        words = f"number {entry.number} cannot be reserved after {tip.highest} in term {term}"
    elif entry.view is not None and entry.view.predecessor != tip.last_view:
        words = f"view {entry.number} follows {entry.view.predecessor}, the chain ends with {tip.last_view}"
    elif entry.view is not None and (
        entry.number.term != term or entry.number < tip.highest or entry.number <= tip.last_view
    ):
        words = f"number {entry.number} is behind {max(tip.highest, tip.last_view)} or not of term {term}"
    return Appended(not words, words, tip.end)


def told(tip: Tip, entry: ChainEntry) -> ChainEntry:
    """Returns the entry as it will be recorded after `tip`: its view as a change to the last one, if that is shorter.

    Raises:
        OversizeError: The view would fit into no record as a whole, and some record must have it as a whole.
    """
    if (view := entry.view) is None:
        return entry
    whole = encode(view)
    nbytes, count = len(whole), len(view.members)
    if nbytes > MAX_VIEW_NBYTES:
        fits = max(1, count * MAX_VIEW_NBYTES // nbytes)
        size = f"a view of {count} members and {len(view.links)} links takes {nbytes} bytes"
        words = f"{size}, and records {MAX_VIEW_NBYTES}: {fits} members fit"
        raise OversizeError(words, fits)
    entry = replace(entry, digest=_digest(whole))
    if tip.view is None or not tip.digest:
        return entry
    change = change_to(tip.view, view, tip.digest)
    if change is None or len(data := encode(change)) >= nbytes:
        return entry
    return replace(entry, change=change, digest=_digest(data))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def advance(tip: Tip, entry: ChainEntry, end: End) -> Tip:
    """Returns the chain's tip after `entry` was appended; `end` is the log's new end."""
    return Tip(
        end=end,
        highest=max(tip.highest, entry.number),
        last_view=entry.view.id if entry.view is not None else tip.last_view,
        finished=tip.finished or entry.kind == "finish",
        ending=entry.ending or tip.ending,
        last=replace(entry, revision=end.position),
        view=entry.view or tip.view,
        digest=entry.digest if entry.view is not None else tip.digest,
    )


def chain_of(tip: Tip, term: int, entries: Sequence[ChainEntry]) -> Chain:
    """Returns the chain that a starting scheduler needs, built from entries that end with `tip`; `term` is its own."""
    begun, rest = Chain(0, NO_VIEW), entries
    if entries and entries[0].summed is not None:
        begun, rest = entries[0].summed, entries[1:]
    numbers = begun.numbers.copy()
    for entry in rest:
        if entry.kind in ("reserve", "view"):
            numbers.add(entry.number)
    return Chain(
        term=term,
        highest=tip.highest,
        views=begun.views + tuple(e.view for e in rest if e.view is not None),
        finished=tip.finished,
        ending=tip.ending,
        wishes=begun.wishes + tuple(e.wish for e in rest if e.wish is not None),
        changes=begun.changes + tuple(e.number for e in rest if e.view is not None and e.base is None),
        id=tip.chain,
        numbers=numbers,
        step=reached(rest, begun.step),
        ended=tip.end.ended,
        past=begun.past,
    )


def summary_of(tip: Tip, entries: Sequence[ChainEntry]) -> ChainEntry:
    """Returns one summary entry that can replace all the given entries, which end with `tip` and have a view."""
    summed = summing.summed(chain_of(tip, tip.term, entries))
    last = summed.views[-1]
    return ChainEntry(0, SUMMARY, tip.highest, last, digest=_digest(encode(last)), summed=summed)


def check_id(tip: Tip, chain: str) -> None:
    """Checks that a store whose chain ends with `tip` may be used to rebuild the chain with the id `chain`.

    Raises:
        StoreError: The store holds decisions of another chain.
    """
    if chain and tip.chain not in ("", chain) and tip.last_view != NO_VIEW:
        raise StoreError(f"chain {short(tip.chain)} cannot become chain {short(chain)}: it holds views already")


def reached(entries: Iterable[ChainEntry], step: int = 0) -> int:
    """Returns the last optimizer step that entries name since the job was founded; `step` if they name none."""
    for base in (e.base for e in entries if e.base is not None):
        step = base.step if base.next_view == NO_VIEW else max(step, base.step)
    return step


# ------------------------------------------------------------------ bytes


def entry_bytes(entry: ChainEntry) -> bytes:
    """Returns an entry as a record's body: one line of JSON with the sizes of its parts, then view (or change) and
    base.

    A summary has the last views behind its line.
    """
    if entry.summed is not None:
        return _joined(summing.as_document(entry.summed), [encode(view) for view in entry.summed.views])
    head = {
        "number": [entry.number.term, entry.number.number],
        "hand_on": entry.hand_on,
        "wish": asdict(entry.wish) if entry.wish is not None else None,
        **({"ending": asdict(entry.ending)} if entry.ending is not None else {}),
        **({"changes": True} if entry.change is not None else {}),
    }
    parts = (entry.change or entry.view, entry.base)
    return _joined(head, [encode(part) if part is not None else None for part in parts])


def _joined(head: dict[str, Any], parts: Sequence[bytes | None]) -> bytes:
    head = {"form": FORM, **head, "nbytes": [len(part) if part is not None else None for part in parts]}
    return json.dumps(head).encode() + b"\n" + b"".join(part or b"" for part in parts)


class _OtherVersionError(ValueError):
    """Error about a record in the format of another release."""


def _split(body: bytes) -> tuple[dict[str, Any], list[bytes | None]]:
    """Splits a record's body, as `_joined` made it, into its first line and its parts."""
    line, _, rest = body.partition(b"\n")
    head = json.loads(line)
    if not isinstance(head, dict):
        raise ValueError("its first line is no object of JSON")
    if (form := head.get("form", 1)) != FORM:
        raise _OtherVersionError(f"version {form}, and this program reads {FORM}: go on with the release that wrote it")
    sizes = head["nbytes"]
    if not all(size is None or (type(size) is int and size >= 0) for size in sizes):
        raise ValueError("sizes that are none")
    stops = list(accumulate((size or 0 for size in sizes), initial=0))
    if len(rest) != stops[-1]:
        raise ValueError(f"{len(rest)} bytes behind its first line, not {sizes}")
    return head, [rest[a:b] if size is not None else None for size, (a, b) in zip(sizes, pairwise(stops), strict=True)]


def entry_from(record: StoreRecord, before: Tip | None = None) -> ChainEntry:
    """Returns the entry that a record holds; `tip` is the chain's end before it.

    Raises:
        StoreError: There is something else, or what changes another view.
    """
    if record.kind not in (*get_args(EntryKind), SUMMARY):
        raise StoreError(
            f"record {record.position} is of the unknown kind {record.kind!r}; go on with the version that wrote it"
        )
    try:
        head, parts = _split(record.body)
        found = _summary(head, parts, before) if record.kind == SUMMARY else _decision(record.kind, head, parts, before)
    except _OtherVersionError as error:
        raise StoreError(f"record {record.position} has {error}") from error
    except (KeyError, TypeError, ValueError, RecursionError, WireError, StoreError) as error:
        raise StoreError(f"record {record.position} is damaged: {error}") from error
    return replace(found, revision=record.position)


def _decision(kind: str, head: dict[str, Any], parts: list[bytes | None], before: Tip | None) -> ChainEntry:
    part, base_part = parts
    term, number = head["number"]
    if not all(type(n) is int and n >= 0 for n in (term, number)):
        raise ValueError("numbers that are none")
    view, change = None, None
    if part is not None and head.get("changes"):
        change = decode(PackedChange, part)
        if before is None or before.view is None:
            raise ValueError(f"it changes view {change.view.predecessor}, which is not there")
        view = changed(before.view, change, before.digest)
    elif part is not None:
        view = decode(View, part)
    base = decode(Header, base_part) if base_part is not None else None
    wish = LinkWish(**head["wish"]) if head["wish"] is not None else None
    ending = _ending(head["ending"]) if "ending" in head else None
    found = entry_of(Persist(0, kind, ViewId(term, number), view, base, bool(head["hand_on"]), wish, ending))
    return replace(found, change=change, digest=_digest(part) if part is not None else "")


def _summary(head: dict[str, Any], parts: list[bytes | None], before: Tip | None) -> ChainEntry:
    views = [decode(View, part) for part in parts if part is not None]
    if not views:
        raise ValueError("it sums up a chain without a view")
    summed = summing.from_document(head, views)
    if before is not None and before.last is not None:
        raise ValueError(f"it sums up what is there, up to record {before.end.position}")
    if before is not None and before.chain not in ("", summed.id):
        raise ValueError(f"it sums up chain {short(summed.id)}, and this is chain {short(before.chain)}")
    return ChainEntry(0, SUMMARY, summed.highest, views[-1], digest=_digest(encode(views[-1])), summed=summed)


def _ending(said: dict[str, object]) -> RecordedEnd:
    terms, step, at = said["terms"], said["step"], said["at"]
    if not (isinstance(terms, str) and isinstance(step, int) and isinstance(at, float)):
        raise ValueError("the end of a job that is none")
    return RecordedEnd(terms, step, at)


# ------------------------------------------------------------------ the chain in its store


class JobChain:
    """Chain of one job in its store. Methods block; call them from one thread at a time. All raise StoreError if the
    store fails.

    Args:
        store: Its log; closed with the chain.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._tip: Tip | None = None
        """Tip as this scheduler left it; None: to be read."""
        self._seen: Tip | None = None
        """Tip as this scheduler saw it last, its own writes included."""
        self._whole_until = 0
        """Position up to which no record had room for what sums up the chain."""

    @property
    def job(self) -> str:
        return self.store.name

    @property
    def place(self) -> str:
        """Name of the store, for messages."""
        return self.store.place

    @property
    def term(self) -> int:
        """Term that `take_term` took; 0 for a chain that is only read."""
        return self.store.term

    def take_term(self, above: int = 0, chain: str = "") -> int:
        """Takes a term above all former schedulers' and above `above`, durably, so that their writes fail; returns it.

        Where a lost chain is rebuilt, `chain` gives its id to one that holds no views.
        """
        if chain:
            check_id(self.tip(), chain)
        self._seen, self._tip = Tip(self.store.take_term(above, chain)), None
        return self.term

    def tip(self) -> Tip:
        """Reads the chain's present end from the store."""
        return self._read()[0]

    def entries(self, after: int = 0) -> tuple[ChainEntry, ...]:
        """Returns entries with a revision above `after`, oldest first."""
        return tuple(entry for entry in self._read()[1] if entry.revision > after)

    def load(self) -> Chain:
        """Returns the chain that a starting scheduler needs; call `take_term` first."""
        tip, entries = self._read()
        self._seen = self._tip = tip
        return chain_of(tip, self.term, entries)

    def append(self, effect: Persist) -> Appended:
        """Appends a decision by compare-and-set; it is durable if the outcome is ok. Appending the last entry again
        succeeds, too.
        """
        entry = entry_of(effect)
        while True:
            fresh = self._tip is None
            tip = self._tip or self.tip()
            self._tip = None  # unless it turns out to be right; what fails may have been written
            outcome = judge(tip, self.term, entry, self._seen)
            if outcome.ok and not outcome.detail:
                entry = told(tip, entry)
                outcome = self.store.append(entry.kind, entry_bytes(entry), tip.end)
                tip = advance(tip, entry, outcome.end)
            elif not fresh:
                continue
            if outcome.ok:
                self._tip = self._seen = tip
            if outcome.ok or fresh:
                return outcome

    def cut(self) -> int:
        """Replaces all records by one summary if there are many; returns how many records were replaced.

        Nothing depends on it: what fails is tried again after more decisions.

        Raises:
            OversizeError: No record has room for it.
            StoreError: The store fails.
        """
        tip = self._tip
        if tip is None or tip.finished or tip.view is None:
            return 0
        if tip.end.position < max(tip.end.first, self._whole_until) + summing.EVERY:
            return 0
        found, entries = self._read()
        if found.end != tip.end:
            return 0  # somebody else writes
        entry, self._tip = summary_of(found, entries), None
        try:
            outcome = self.store.append(SUMMARY, body := entry_bytes(entry), tip.end, cut=True)
        except OversizeError as error:
            # Each try reads all that is there: the next one comes when there is twice as much.
            self._tip, self._whole_until = tip, 2 * tip.end.position - tip.end.first
            assert entry.summed is not None
            count = len({*entry.summed.past.members, *tip.view.ids()})
            fits = count * MAX_BODY_NBYTES // len(packed_body(body))
            words = f"{error}: it names {count} members that are or were in the job, and {fits} would fit"
            raise OversizeError(words, fits) from error
        if not outcome.ok:
            return 0
        self._tip = self._seen = advance(Tip(), entry, outcome.end)
        return len(entries)

    def begin_again(self) -> str:
        """Begins an empty chain after a finished job; returns a text that says what became of the old chain."""
        self._tip, self._seen, self._whole_until = None, None, 0
        return self.store.begin_again()

    def _read(self) -> tuple[Tip, tuple[ChainEntry, ...]]:
        end, records = self.store.read()
        tip, entries = Tip(replace(end, position=0)), list[ChainEntry]()
        for record in records:
            entries.append(self._entry(record, tip))
            tip = advance(tip, entries[-1], replace(end, position=record.position))
        return replace(tip, end=end), tuple(entries)

    def _entry(self, record: StoreRecord, before: Tip) -> ChainEntry:
        try:
            return entry_from(record, before)
        except StoreError as error:
            raise StoreError(f"{self.place}: {error}") from error

    def close(self) -> None:
        """Closes the chain's file or connection. Idempotent."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_chain(options: SchedulerOptions, *, read_only: bool) -> JobChain | None:
    """Opens the chain that a scheduler's options name; None if it is kept in memory, or its file does not exist.

    Args:
        options: Options of a scheduler.
        read_only: Whether a file is only read; else no other process may write to it meanwhile.

    Raises:
        ConfigurationError, StoreError: The store cannot be used.
    """
    if options.in_etcd:
        from chaos_lightning.service.etcd_store import open_job

        return JobChain(open_job(options.store, options.settings.job))
    path = options.store_path
    if path is None or not path.exists():
        return None
    from chaos_lightning.service.sqlite_store import SqliteStore

    return JobChain(SqliteStore(path, options.settings.job, read_only=read_only, exclusive=not read_only))
