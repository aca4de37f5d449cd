"""Encodes outer sync's messages and chain entries as bytes, and decodes them."""

from __future__ import annotations

from typing import Any, get_args

from chaos_lightning.errors import StoreError, WireError
from chaos_lightning.outer.exchange import outer_pb2
from chaos_lightning.outer.rules import messages, types
from chaos_lightning.outer.rules.messages import FromCluster, FromFollower, ToCluster, ToFollower
from chaos_lightning.outer.rules.types import Body, Entry, Summary
from chaos_lightning.protocol.codec import Vocabulary
from chaos_lightning.service.store import StoreRecord

MAX_ENTRY_NBYTES = 48 << 20
"""Largest size of an entry, bytes, so that it fits into a message. An entry names all tensors of the model at most;
etcd takes less (service/etcd_store.py).
"""
_BODIES = {cls.__name__: cls for cls in get_args(Body)}


def _put_entry(entry: Any) -> Any:
    if type(entry) is not Entry:
        raise TypeError(f"expected an Entry, got {entry!r}")
    return outer_pb2.EntryRecord(
        position=entry.position,
        term=entry.term,
        kind=type(entry.body).__name__,
        body=body_bytes(entry.body),
        before=entry.before,
    )


def _get_entry(said: Any) -> Entry:
    return Entry(said.position, said.term, _body(said.kind, said.body), said.before)


def _body(kind: str, data: bytes) -> Body:
    if kind not in _BODIES:
        raise WireError(f"an entry of the unknown kind {kind[:40]!r}; use the same package everywhere")
    body: Body = OUTER.decode(_BODIES[kind], data, MAX_ENTRY_NBYTES)
    return body


OUTER = Vocabulary(
    [*vars(types).values(), *vars(messages).values()],
    outer_pb2,
    special={Entry: ("EntryRecord", (_put_entry, _get_entry))},
)
FROM_CLUSTER = OUTER.envelope(FromCluster, outer_pb2.FromClusterEnvelope)
TO_CLUSTER = OUTER.envelope(ToCluster, outer_pb2.ToClusterEnvelope)
FROM_FOLLOWER = OUTER.envelope(FromFollower, outer_pb2.FromFollowerEnvelope)
TO_FOLLOWER = OUTER.envelope(ToFollower, outer_pb2.ToFollowerEnvelope)


def body_bytes(body: Body) -> bytes:
    """Encodes the content of a chain entry as the body of a store's record.

    Raises:
        WireError: More than `MAX_ENTRY_NBYTES`.
    """
    return OUTER.encode(body, MAX_ENTRY_NBYTES)


def entry_of(record: StoreRecord, before: str) -> Entry:
    """Decodes a record of the store into the chain entry that it contains.

    Args:
        record: Record whose position, term and kind are the entry's.
        before: Hash of the entry before; a summary names it itself, for that one may be cut.

    Raises:
        StoreError: The record is damaged, or another version of this package wrote it.
    """
    try:
        body = _body(record.kind, record.body)
        return Entry(record.position, record.term, body, body.after if isinstance(body, Summary) else before)
    except (WireError, TypeError, ValueError) as error:
        raise StoreError(f"record {record.position} is no entry of outer sync's chain: {error}") from error
