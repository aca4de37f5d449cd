"""Keeps a log in etcd, durable on a majority of its servers, so that a writer on any machine can continue it.

Theory of operation. All keys of a service lie under a root of its own (`service_root`), PREFIX/jobs/JOB/ for a job:

    tip               the end of the log (store.End), as JSON
    record/%016d      one record each, from 1 on; never changed, and deleted by a cut
    leader            who leads: JSON, on the leader's lease (service/election.py)
    candidates/ID     who would, likewise
    asked/ID          which members asked that one for the leader of late, likewise (service/reach.py)

A write reads nothing that it has not read before: the tip is remembered with the revision at which etcd stored it, and
the transaction that appends succeeds only if the tip is still of that revision. If it is not, the tip is read anew and
judged anew. An answer that got lost is recognised, since the very same record is there then (store.judge). A cut is one
such transaction, too: the record that sums up, the tip that names it as the first one, and the end of all before it. A
leader's transactions also name its key and its lease: they fail from the moment when it leads no more, even if nobody
else has taken a term yet.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.service import etcd_pb2 as pb
from chaos_lightning.service.etcd_address import read_address
from chaos_lightning.service.etcd_client import CompactedError, EtcdClient, delete, open_client, put, same_revision
from chaos_lightning.service.store import PACKED_NBYTES, Appended, End, Store, StoreRecord, judge, packed_body

FORMAT = 3
"""Version of what lies in etcd. Up to 2 there were entries of a job's chain, with fields of their own."""
MAX_UNPACKED_NBYTES = 64 << 20
_RACES = 20
"""Number of times that a write is tried anew because somebody else wrote in between; then something is wrong."""


@dataclass(frozen=True, slots=True)
class _Known:
    """End of the log as last read, and etcd's revision of the key that holds it (0: there is none)."""

    end: End
    revision: int


class EtcdStore(Store):
    """Log of a service, such as a job's chain, in etcd.

    Args:
        client: Client of etcd; closed with the store if `owned`.
        root: Prefix of all keys of the service (`service_root`).
        guard: Comparisons that every write makes beside its own: those of a leader's key (service/election.py).
        owned: Whether the client is closed with the store.
    """

    def __init__(
        self, client: EtcdClient, root: str, *, guard: tuple[pb.Compare, ...] = (), owned: bool = True
    ) -> None:
        super().__init__(root.rstrip("/").rpartition("/")[2])
        self._client = client
        self._owned = owned
        self._guard = guard
        self._root = root
        self._known: _Known | None = None
        self._closed = False
        self._stop = threading.Event()

    @property
    def place(self) -> str:
        address = self._client.address
        return f"{address}/{self._root.removeprefix(address.prefix).strip('/')}"

    def _key(self, name: str) -> str:
        if self._closed:
            raise StoreError(f"the store {self.place} is closed")
        return self._root + name

    # ------------------------------------------------------------------ reading

    def _look(self) -> _Known:
        """Reads the log's end from a majority of etcd's servers."""
        found = self._client.get(self._key("tip"))
        if found is None:
            return _Known(End(), 0)
        document = self._document(found.value, "tip")
        try:
            end = End(
                term=document["term"],
                id=document["id"],
                position=document["position"],
                hash=document["hash"],
                first=document["first"],
                ended=tuple(document["ended"]),
            )
            if not all(type(n) is int and n >= 0 for n in (end.term, end.position, end.first)):
                raise ValueError("numbers that are none")
            if not all(isinstance(text, str) for text in (end.id, end.hash, *end.ended)):
                raise ValueError("ids that are no texts")
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{self.place}: the key tip holds no tip of a chain: {error!r}") from error
        return _Known(end, found.mod_revision)

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
        if document["format"] != FORMAT:
            raise StoreError(
                f"{self.place} has format {document['format']}, this version reads {FORMAT}; finish the job with the "
                "version that began it, or choose another job name or prefix"
            )
        return document

    def _record(self, found: pb.KeyValue) -> StoreRecord:
        name = found.key.decode(errors="replace").rpartition("/")[2]
        document = self._document(found.value, f"record/{name}")
        try:
            kind, term, before = document["kind"], document["term"], document["before"]
            if type(term) is not int or not isinstance(kind, str) or not isinstance(before, str):
                raise ValueError(f"kind {kind!r}, term {term!r}, before {before!r}")
            body = base64.b64decode(document["body"], validate=True)
            if document.get("packed"):
                body = _unpacked(body)
            return StoreRecord(int(name), kind, term, body, before)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{self.place}: record {name} is damaged: {error}") from error

    def end(self) -> End:
        return self._look().end

    def read(self, after: int = 0) -> tuple[End, tuple[StoreRecord, ...]]:
        for _ in range(_RACES):
            known = self._look()
            records = [self._record(kv) for kv in self._client.get_all(self._key("record/"))[0]]
            try:
                # Records that were appended since are for the next read.
                known_ones = [r for r in records if r.position <= known.end.position]
                return known.end, self._checked(known.end, known_ones, after)
            except StoreError:
                if self._look() == known:  # nobody wrote in between
                    raise
        raise StoreError(f"{self.place}: the log changed {_RACES} times in turn while it was to be read")

    def wait(self, after: int, timeout_s: float) -> bool:
        """Waits for a record above position `after`, by a watch that begins where the last read ended, so that none is
        missed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            _, revision = self._client.get_all(self._key("tip"))
            if self.end().position > after:
                return True
            try:
                for events in self._client.watch(self._key("tip"), revision + 1, self._stop):
                    if any(e.type == pb.Event.PUT for e in events):
                        break
                    if time.monotonic() >= deadline or self._closed:
                        return self.end().position > after
            except CompactedError:
                continue

    # ------------------------------------------------------------------ writing

    def _write(self, known: _Known, end: End, *more: pb.RequestOp) -> bool:
        """Writes the log's new end, with further operations, if the end is still `known`; returns whether it was."""
        compare = [same_revision(self._key("tip"), known.revision), *self._guard]
        value = json.dumps({"format": FORMAT, **asdict(end)}).encode()
        ok, revision = self._client.transact(compare, [put(self._key("tip"), value), *more])
        self._known = _Known(end, revision) if ok else None
        return ok

    def take_term(self, above: int = 0, log_id: str = "") -> End:
        for _ in range(_RACES):
            known = self._look()
            end = known.end.with_term(above, log_id, self.term)
            if self._write(known, end):
                self.term = end.term
                return end
            if refused := self._lost_guard():
                raise StoreError(refused)
        raise StoreError(f"{self.place}: others took {_RACES} terms in turn while this scheduler asked for one")

    def _append(self, record: StoreRecord, seen: End, *, cut: bool) -> Appended:
        key, value = self._key(f"record/{record.position:016d}"), _record_bytes(record)
        for _ in range(_RACES):
            fresh = self._known is None
            known = self._known or self._look()
            verdict = judge(known.end, record, seen, cut=cut)
            if not verdict.ok or verdict.detail:
                if fresh:
                    return verdict
                self._known = None  # what was remembered may be old
                continue
            try:
                before = [delete(self._key("record/"), until=key)] if cut else []
                if self._write(known, verdict.end, put(key, value), *before):
                    return verdict
            except StoreError:
                self._known = None  # it may have been written
                raise
            if refused := self._lost_guard():
                return Appended(False, refused, known.end)
        raise StoreError(f"{self.place}: the tip changed {_RACES} times in turn while a record was to be appended")

    def begin_again(self) -> str:
        gone = "deleted (etcd keeps no chains of jobs that are over)"
        known = self._look()
        end = known.end.begun_again().with_term()
        if self._write(known, end, delete(self._key("record/"))):
            return gone
        # The client asks anew where an answer got lost: then it is our own write that stands in the way.
        if self.end() != end or self._lost_guard():
            raise StoreError(f"{self.place}: another scheduler has begun this job again; look who leads it")
        return gone

    def _lost_guard(self) -> str:
        """Returns why this scheduler may write no more, namely that it has lost the lead; "" if it may."""
        for compare in self._guard:
            ok, _ = self._client.transact([compare], [])
            if not ok:
                return "this scheduler does not lead any more: its lease has ended, or another one was elected"
        return ""

    def close(self) -> None:
        self._closed = True
        self._stop.set()
        if self._owned:
            self._client.close()


def service_root(prefix: str, services: str, name: str) -> str:
    """Returns the prefix of all keys of one service.

    Args:
        prefix: Prefix of all keys, from the address.
        services: Kind of the service, in the plural; keys of all services of a kind begin with it.
        name: Name of the service.

    Raises:
        ConfigurationError: The name cannot be part of a key.
    """
    if not name or "/" in name:
        raise ConfigurationError(f"{name!r} of {services}: what lies in etcd needs a name without slashes")
    return f"{prefix}/{services}/{name}/"


def job_root(prefix: str, job: str) -> str:
    """Returns the prefix of all keys of a job."""
    return service_root(prefix, "jobs", job)


def open_job(address: str, job: str) -> EtcdStore:
    """Opens the log of a job in the etcd at `address`.

    Raises:
        ConfigurationError: The address is none, or a file of it cannot be read.
    """
    client = open_client(read_address(address))
    return EtcdStore(client, job_root(client.address.prefix, job))


def _record_bytes(record: StoreRecord) -> bytes:
    """Returns a record as JSON, with its body compressed if it is large."""
    packed = len(record.body) > PACKED_NBYTES
    body = base64.b64encode(packed_body(record.body)).decode()
    head = {"format": FORMAT, "kind": record.kind, "term": record.term, "before": record.before, "wall": time.time()}
    return json.dumps({**head, **({"packed": True} if packed else {}), "body": body}).encode()


def _unpacked(body: bytes) -> bytes:
    """Decompresses a record's body.

    Raises:
        ValueError: The bytes are damaged, or more than any record has.
    """
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(body, MAX_UNPACKED_NBYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not reader.eof:
        raise ValueError(f"it is cut off, or larger than {MAX_UNPACKED_NBYTES} bytes")
    return data
