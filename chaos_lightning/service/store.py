"""Interface of a service's store: a log of typed records that no two writers can fork, and that can be shortened.

Theory of operation. A log is an append-only list of records, at positions that count up from 1. The content of a record
is its writer's affair: a kind, which the user of the log chooses, and bytes. The log adds who wrote the record and what
it follows: the writer's *term*, and the hash of the record before, so that each record vouches for all before it.

A writer first takes a term, one higher than any before; from then on writes of every older term fail. It appends to the
end of the log as it saw that last. `judge`, the one rule of all stores, lets the write pass only if the end is still
the same: compare-and-set. When a write has returned, it is durable. Writing the very same record again succeeds, so
that a writer may try again after an answer that got lost. The log's id, drawn with its first term, and what the writer
saw last tell it when another log, or an older copy of this one, has taken its store's place.

A record may be appended as a *cut*: it sums up all before it, and takes their place. Both happen in one transaction:
whenever a process dies, the log begins with the old records or with the new one. So a reader finds one of two: all that
was ever written, or a record that sums up what is missing, and what followed it. A reader that has read up to a
position and wants the rest gets `ReadAnewError` if that is not possible any more: it reads anew from the start, which
now is the record that sums up. Positions and hashes go on through a cut, so compare-and-set does as well.

Further rules on which record may follow which are set by the user of a log: for a job's decisions, in
control/job_chain.py.
"""

from __future__ import annotations

import abc
import hashlib
import json
import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from chaos_lightning.errors import OversizeError, StoreError
from chaos_lightning.membership.peers import short

MAX_ENDED = 16
"""Number of logs that were put away that are remembered: members that knew an older one are long gone."""
_HASH_NBYTES = 16
MAX_RECORD_NBYTES = 1 << 20
"""Limit (bytes) of a record as etcd holds it, which takes requests of up to 1.5 MiB. All stores keep to it: a job may
move.
"""
PACKED_NBYTES = 1 << 16
"""Body (bytes) above which a record counts as compressed, as it is in etcd."""
MAX_BODY_NBYTES = MAX_RECORD_NBYTES * 3 // 4 - 4096
"""Limit (bytes) of a body that fits whatever it holds: base64 takes a third more, and a few words stand around it."""


def packed_body(body: bytes) -> bytes:
    """Returns a record's body, compressed if it is large: the names of a model's tensors are much alike."""
    return zlib.compress(body, 9) if len(body) > PACKED_NBYTES else body


def check_size(record: StoreRecord) -> None:
    """Raises OversizeError if a record is larger than some store can take."""
    nbytes = len(record.body)
    if nbytes > MAX_BODY_NBYTES and (nbytes := len(packed_body(record.body))) > MAX_BODY_NBYTES:
        raise OversizeError(
            f"a record of kind {record.kind} has {nbytes} bytes, and stores take {MAX_BODY_NBYTES} of a record"
        )


class ReadAnewError(StoreError):
    """Error of a read after a position whose following records were cut away: read the log from its start."""


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """A record of a log.

    Attributes:
        position: Number of the record, from 1 on.
        kind: Kind of the record, as the user of the log names it.
        term: Term of the writer.
        body: Content.
        before: Hash of the record before; "" for the first one.
    """

    position: int
    kind: str
    term: int
    body: bytes = field(repr=False)
    before: str = ""

    @property
    def hash(self) -> str:
        """Hash of the record and, through `before`, of all records before it."""
        head = json.dumps([self.position, self.kind, self.term, self.before]).encode()
        return hashlib.blake2b(head + b"\n" + self.body, digest_size=_HASH_NBYTES).hexdigest()


@dataclass(frozen=True, slots=True)
class End:
    """State at the end of a log, with which each write is compared.

    Attributes:
        term: Term that was taken last.
        id: Id of the log, drawn with its first term and kept by every copy; "": nobody has taken a term yet.
        position: Position of the last record; 0: there is none.
        hash: Hash of the last record.
        first: Position of the first record that is there; what was before it, that one sums up.
        ended: Ids of the last logs that were put away here, oldest first.
    """

    term: int = 0
    id: str = ""
    position: int = 0
    hash: str = ""
    first: int = 1
    ended: tuple[str, ...] = ()

    def with_term(self, above: int = 0, log_id: str = "", own: int = 0) -> End:
        """Returns this end with a term above all former ones and above `above`; a log's first term also draws its id.

        Args:
            above: A term that somebody has heard of.
            log_id: The id of a log that is to be continued here; "": as it is.
            own: The term of whoever asks.

        Raises:
            StoreError: The log has another id, and another writer has taken it.
        """
        if log_id and self.id not in ("", log_id) and own != self.term:
            raise StoreError(
                f"log {short(self.id)} cannot become log {short(log_id)}: a writer with term {self.term} has taken it"
            )
        return replace(self, term=max(self.term, above) + 1, id=log_id or self.id or secrets.token_hex(8))

    def then(self, record: StoreRecord, *, cut: bool = False) -> End:
        """Returns the end of the log after `record` was appended to it."""
        first = record.position if cut else self.first
        return replace(self, position=record.position, hash=record.hash, first=first)

    def begun_again(self) -> End:
        """Returns the end of the empty log that takes the place of this one."""
        ended = (*self.ended, self.id) if self.id else self.ended
        return End(term=self.term, ended=ended[-MAX_ENDED:])


EMPTY = End()
"""End of a log that has not begun."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of appending a record by compare-and-set.

    Attributes:
        ok: Whether the record is in the log; False: somebody else wrote before.
        detail: Why it was not appended; if `ok`, whether it was in the log already.
        end: End of the log after the attempt.
    """

    ok: bool
    detail: str = ""
    end: End = EMPTY


def outranked(end: End, term: int, seen: End | None) -> str:
    """Returns why a writer may append nothing more to a log with this end; "" if it may.

    Args:
        end: The log's end, as it is in the store.
        term: Term of the writer.
        seen: The log's end as the writer saw it last, its own writes included; None if it never did. If the store went
            back since, or holds another log now, a copy took its place under the writer.
    """
    if seen is not None and end.term <= seen.term and end.id != seen.id:
        return f"log {short(end.id)} took the place of log {short(seen.id)} in the store"
    if seen is not None and (end.term, end.position) < (seen.term, seen.position):
        return (
            f"the store went back from record {seen.position} of term {seen.term} to record {end.position} of term "
            f"{end.term}: this is an older copy"
        )
    if term != end.term:
        return f"term {term} is over, a writer with term {end.term} has taken the log"
    return ""


def judge(end: End, record: StoreRecord, seen: End, *, cut: bool = False) -> Appended:
    """Decides whether `record` may be appended to a log with this end, by the one rule that all stores share.

    Args:
        end: The log's end, as it is in the store.
        record: Record that was made to follow `seen`.
        seen: The log's end as the writer saw it last.
        cut: Whether the record takes the place of all before it.
    """
    if refused := outranked(end, record.term, seen):
        return Appended(False, refused, end)
    if (end.position, end.hash) == (record.position, record.hash):
        return Appended(True, "was there already", end)
    if (end.position, end.hash) != (seen.position, seen.hash):
        return Appended(False, f"record {end.position} is there, which its writer has not seen", end)
    return Appended(True, "", end.then(record, cut=cut))


class Store(abc.ABC):
    """Interface of a store, which keeps one log. Methods block; call them from one thread at a time. All raise
    StoreError on failure.

    Args:
        name: Name of the service that keeps the log, such as a job.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.term = 0
        """Term that was taken by `take_term`; 0 for a store that is only read."""

    @property
    @abc.abstractmethod
    def place(self) -> str:
        """Name of the store, for messages."""

    @abc.abstractmethod
    def take_term(self, above: int = 0, log_id: str = "") -> End:
        """Takes a term above all former writers' and above `above`, durably, so that their writes fail.

        The first term draws the log's id. Where a lost log is continued, `log_id` gives its id to this one
        (`End.with_term` says when it may).
        """

    @abc.abstractmethod
    def end(self) -> End:
        """Returns the log's end, with which the next write is compared."""

    def append(self, kind: str, body: bytes, after: End, *, cut: bool = False) -> Appended:
        """Appends a record by compare-and-set; it is durable if the outcome is ok.

        Args:
            kind: Kind of the record, as the user of the log names it.
            body: Content of the record.
            after: The end of the log as this writer saw it last: of `take_term`, `read` or the last `append`.
            cut: Whether the record sums up all records before it, which are deleted in the same moment.

        Raises:
            OversizeError: The record is too large, for this store or for another that the job might move to.
        """
        record = StoreRecord(after.position + 1, kind, self.term, body, after.hash)
        check_size(record)
        return self._append(record, after, cut=cut)

    @abc.abstractmethod
    def _append(self, record: StoreRecord, seen: End, *, cut: bool) -> Appended: ...

    @abc.abstractmethod
    def read(self, after: int = 0) -> tuple[End, tuple[StoreRecord, ...]]:
        """Returns the end of the log, and all records with a position above `after`, oldest first.

        Raises:
            ReadAnewError: Some of them were cut away, or this is no log that ever had a record at `after`.
        """

    @abc.abstractmethod
    def wait(self, after: int, timeout_s: float) -> bool:
        """Waits until there is a record above position `after`; returns False after `timeout_s`."""

    @abc.abstractmethod
    def begin_again(self) -> str:
        """Begins an empty log in place of the present one, in which old terms count no more.

        Returns:
            What became of the old one, in words: "archived as ...".

        Raises:
            StoreError: The store fails, or somebody else wrote in between.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the log's file or connection. Idempotent."""

    def _checked(self, end: End, found: Sequence[StoreRecord], after: int) -> tuple[StoreRecord, ...]:
        """Checks that the records found are all that the log has; returns those above `after`."""
        if after > end.position:
            raise ReadAnewError(
                f"{self.place} ends with record {end.position}, before {after}: it was begun again, or is an older "
                "copy; read it from its start"
            )
        if 0 < after < end.first - 1:
            raise ReadAnewError(
                f"{self.place}: what followed record {after} was cut away, and record {end.first} sums it up; read "
                "the log from its start, which is there now"
            )
        expected, before = end.first, ""
        for record in found:
            if record.position != expected:
                raise StoreError(f"{self.place}: record {expected} is missing")
            if before and record.before != before:
                raise StoreError(f"{self.place}: record {expected - 1} is damaged: the next one follows another")
            expected, before = expected + 1, record.hash
        if expected - 1 != end.position or before != end.hash:
            what = "is missing" if expected <= end.position else "is damaged: it is not the one that was written"
            raise StoreError(f"{self.place}: record {end.position} {what}")
        return tuple(r for r in found if r.position > after)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


StoreFactory = Callable[[], Store]
