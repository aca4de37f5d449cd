"""A chain in etcd: durable on a majority of its servers, so that any scheduler on any machine can continue it.

Theory of operation. All keys of a job lie under `PREFIX/jobs/JOB/`:

    tip               what the next write is compared with (store.Tip), as JSON, with the number of entries
    entry/%016d       one decision each, from 1 on; never changed
    leader            who leads: JSON, on the leader's lease (control/election.py)
    candidates/ID     who would, likewise
    asked/ID          which members asked that one for the leader of late, likewise (machine/reach.py)

A write reads nothing that it has not read before: the tip is remembered with the revision at which etcd stored it, and
the transaction that appends succeeds only if the tip is still of that revision. If it is not, the tip is read anew and
judged anew. An answer that got lost is recognised, since the very same entry is there then (store.judge). A leader's
transactions also name its key and its lease: they fail from the moment when it leads no more, even if nobody else has
taken a term yet.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from chaos_lightning.control import etcd_pb2 as pb
from chaos_lightning.control.etcd_client import CompactedError, EtcdClient, delete, put, same_revision
from chaos_lightning.control.store import (
    Appended,
    Entry,
    EntryKind,
    Store,
    Tip,
    advance,
    entry_of,
    former_id,
    judge,
    with_term,
)
from chaos_lightning.errors import ConfigurationError, StoreError, WireError
from chaos_lightning.membership.effects import LinkWish, Persist
from chaos_lightning.protocol.codec import decode, encode
from chaos_lightning.protocol.types import Header, View, ViewId

FORMAT = 2
"""1 had no id of the chain; its tip is read (store.former_id) and replaced with the next write."""
MAX_ENTRY_NBYTES = 1 << 20
"""etcd takes requests of up to 1.5 MiB."""
_RACES = 20
"""So often a write is tried anew because somebody else wrote in between; then something is wrong."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The tip, and the revision at which etcd stored it (0: there is none)."""

    tip: Tip
    count: int
    revision: int


class EtcdStore(Store):
    """See the module.

    Args:
        client: How to reach etcd; closed with the store if `owned`.
        job: The job's name.
        guard: Comparisons that every write makes beside its own: those of a leader's key (control/election.py).
        owned: Whether the client is closed with the store.
    """

    def __init__(self, client: EtcdClient, job: str, *, guard: tuple[pb.Compare, ...] = (), owned: bool = True) -> None:
        super().__init__(job)
        self._client = client
        self._owned = owned
        self._guard = guard
        self._root = job_root(client.address.prefix, job)
        self._known: _Known | None = None
        self._closed = False
        self._stop = threading.Event()

    @property
    def place(self) -> str:
        return f"{self._client.address} (job {self.job})"

    def _key(self, name: str) -> str:
        self._check_open()
        return self._root + name

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.place} is closed")

    # ------------------------------------------------------------------ reading

    def _read(self) -> _Known:
        """The tip as a majority has it."""
        for _ in range(_RACES):
            found = self._client.get(self._key("tip"))
            if found is None:
                return _Known(Tip(), 0, 0)
            document = self._document(found.value, "tip")
            last = None
            try:
                count = int(document["count"])
                if count:
                    entry = self._client.get(self._key(f"entry/{count:016d}"))
                    if entry is None:  # a new job began in between
                        continue
                    last = self._entry(entry)
                if not all(type(n) is int for n in (*document["highest"], *document["last_view"])):
                    raise ValueError("its views are no pairs of integers")
                tip = Tip(
                    term=int(document["term"]),
                    highest=ViewId(*document["highest"]),
                    last_view=ViewId(*document["last_view"]),
                    finished=bool(document["finished"]),
                    last=last,
                    chain=self._id_in(document),
                    ended=tuple(map(str, document.get("ended", ()))),  # none before there were any
                )
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise StoreError(f"{self.place}: the key tip holds no tip of a chain: {error!r}") from error
            return _Known(tip, count, found.mod_revision)
        raise StoreError(f"{self.place}: the tip names entry {count}, which is missing")

    def _id_in(self, document: dict[str, Any]) -> str:
        if document["format"] == 1:
            return former_id(self.job, (e.view for e in self.entries() if e.view is not None))
        if not isinstance(document["chain"], str):
            raise ValueError("its id is no text")
        return document["chain"]

    def _document(self, value: bytes, what: str) -> dict[str, Any]:
        try:
            document = json.loads(value)
            if not isinstance(document, dict) or not isinstance(document.get("format"), int):
                raise ValueError("no object with a format")
        except (ValueError, RecursionError) as error:
            raise StoreError(
                f"{self.place}: the key {what} holds no part of a chain ({error}); if the keys are another program's, "
                "choose another prefix"
            ) from error
        if document["format"] not in (1, FORMAT):
            raise StoreError(
                f"{self.place} has format {document['format']}, this version reads {FORMAT}; finish the job with the "
                "version that began it, or choose another job name or prefix"
            )
        return document

    def _entry(self, found: pb.KeyValue) -> Entry:
        name = found.key.decode(errors="replace").rpartition("/")[2]
        document = self._document(found.value, f"entry/{name}")
        try:
            view, base, wish = document["view"], document["base"], document["wish"]
            if document["kind"] not in get_args(EntryKind):
                raise ValueError(f"kind {document['kind']!r}")
            if not all(type(n) is int for n in document["number"]):
                raise ValueError(f"number {document['number']!r}")
            return Entry(
                revision=int(name),
                kind=document["kind"],
                number=ViewId(*document["number"]),
                view=decode(View, base64.b64decode(view, validate=True)) if view is not None else None,
                base=decode(Header, base64.b64decode(base, validate=True)) if base is not None else None,
                hand_on=bool(document["hand_on"]),
                wish=LinkWish(**wish) if wish is not None else None,
            )
        except (KeyError, TypeError, ValueError, OverflowError, WireError) as error:
            raise StoreError(f"{self.place}: entry {name} is damaged: {error}") from error

    def tip(self) -> Tip:
        return self._read().tip

    def entries(self, after: int = 0) -> tuple[Entry, ...]:
        found, _ = self._client.get_all(self._key("entry/"))
        entries = tuple(self._entry(kv) for kv in found)
        for place, entry in enumerate(entries, 1):
            if entry.revision != place:
                raise StoreError(f"{self.place}: entry {place} is missing")
        return entries[after:]

    def wait(self, after: int, timeout_s: float) -> bool:
        """Watches from the revision of the last look, so that nothing falls between the two."""
        deadline = time.monotonic() + timeout_s
        while True:
            found, revision = self._client.get_all(self._key("entry/"))
            if len(found) > after:
                return True
            try:
                for events in self._client.watch(self._key("entry/"), revision + 1, self._stop):
                    if self._closed:
                        self._check_open()
                    if any(e.type == pb.Event.PUT for e in events):
                        break
                    if time.monotonic() >= deadline:
                        return False
            except CompactedError:
                continue
            if time.monotonic() >= deadline and not self._closed:
                return len(self._client.get_all(self._key("entry/"))[0]) > after
            self._check_open()

    # ------------------------------------------------------------------ writing

    def _write(self, known: _Known, tip: Tip, *more: pb.RequestOp, count: int) -> bool:
        """The new tip and what belongs to it, if the old one is still there; remembers it."""
        compare = [same_revision(self._key("tip"), known.revision), *self._guard]
        ok, revision = self._client.transact(compare, [put(self._key("tip"), _tip_bytes(tip, count)), *more])
        self._known = _Known(tip, count, revision) if ok else None
        return ok

    def take_term(self, above: int = 0, chain: str = "") -> int:
        for _ in range(_RACES):
            known = self._read()
            tip = with_term(known.tip, above, chain)
            if self._write(known, tip, count=known.count):
                self.term, self._seen = tip.term, tip
                return self.term
            self._check_guard()
        raise StoreError(f"{self.place}: others took {_RACES} terms in turn while this scheduler asked for one")

    def append(self, effect: Persist) -> Appended:
        entry = _fitting(entry_of(effect))
        for _ in range(_RACES):
            known = self._known or self._read()
            verdict = judge(known.tip, self.term, entry, self._seen)
            if not verdict.ok or verdict.detail:
                if self._known is None:
                    self._seen = known.tip if verdict.ok else self._seen
                    return verdict
                self._known = None  # what was remembered may be old
                continue
            count = known.count + 1
            entry = replace(entry, revision=count)
            record = put(self._key(f"entry/{count:016d}"), _entry_bytes(entry))
            try:
                tip = advance(known.tip, entry)
                if self._write(known, tip, record, count=count):
                    self._seen = tip
                    return verdict
            except StoreError:
                self._known = None  # it may have been written
                raise
            refused = self._lost_guard()
            if refused:
                return Appended(False, refused)
        raise StoreError(f"{self.place}: the tip changed {_RACES} times in turn while an entry was to be appended")

    def begin_again(self) -> str:
        gone = "deleted (etcd keeps no chains of jobs that are over)"
        known = self._read()
        tip = with_term(known.tip.begun_again())
        if self._write(known, tip, delete(self._key("entry/")), count=0):
            return gone
        # The client asks anew where an answer got lost: then it is our own write that stands in the way.
        found = self._read()
        if (found.tip, found.count) != (tip, 0) or self._lost_guard():
            raise StoreError(f"{self.place}: another scheduler has begun this job again; look who leads it")
        return gone

    def _lost_guard(self) -> str:
        """Why this scheduler may not write at all, if that is so."""
        for compare in self._guard:
            ok, _ = self._client.transact([compare], [])
            if not ok:
                return "this scheduler does not lead any more: its lease has ended, or another one was elected"
        return ""

    def _check_guard(self) -> None:
        refused = self._lost_guard()
        if refused:
            raise StoreError(refused)

    def holds_term(self) -> bool:
        return self.term > 0 and self.tip().term == self.term and not self._lost_guard()

    def close(self) -> None:
        self._closed = True
        self._stop.set()
        if self._owned:
            self._client.close()


def job_root(prefix: str, job: str) -> str:
    """Before all keys of a job."""
    if not job or "/" in job:
        raise ConfigurationError(f"job {job!r}: a job in etcd needs a name without slashes")
    return f"{prefix}/jobs/{job}/"


def _fitting(entry: Entry) -> Entry:
    """Without the answers of a large collective: they are kept by members, and no scheduler reads them back."""
    if entry.base is not None and entry.base.answers:
        entry = replace(entry, base=replace(entry.base, answers=()))
    size = len(_entry_bytes(entry))
    if size > MAX_ENTRY_NBYTES:
        raise StoreError(f"{entry.kind} {entry.number} has {size} bytes, etcd takes {MAX_ENTRY_NBYTES}")
    return entry


def _entry_bytes(entry: Entry) -> bytes:
    def packed(message: View | Header | None) -> str | None:
        return base64.b64encode(encode(message)).decode() if message is not None else None

    return json.dumps(
        {
            "format": FORMAT,
            "kind": entry.kind,
            "number": [entry.number.term, entry.number.number],
            "view": packed(entry.view),
            "base": packed(entry.base),
            "hand_on": entry.hand_on,
            "wish": asdict(entry.wish) if entry.wish is not None else None,
            "wall": time.time(),
        }
    ).encode()


def _tip_bytes(tip: Tip, count: int) -> bytes:
    return json.dumps(
        {
            "format": FORMAT,
            "term": tip.term,
            "highest": [tip.highest.term, tip.highest.number],
            "last_view": [tip.last_view.term, tip.last_view.number],
            "finished": tip.finished,
            "count": count,
            "chain": tip.chain,
            "ended": tip.ended,
        }
    ).encode()
