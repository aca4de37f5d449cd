"""Describes the training state as byte ranges: names, shapes, and a hash for each piece of bytes.

Theory of operation. The state is an ordered list of named tensors, laid end to end in one address space of bytes. The
first ones are *replicated* (protocol.md 21): equal on all members. After them come *attached* ones, tensors that a
manifest refers to (a callback's running average, say), which only the donor of that manifest is sure to hold. Each
tensor is cut into pieces of at most `PIECE_NBYTES`; pieces never cross tensors and each has an xxh3-128 hash. The
state hash covers names, types, shapes and piece hashes of the replicated tensors, so it is equal exactly where the
bytes are (protocol.md 19), and a piece whose hash a joiner already has is not sent (protocol.md 16).

xxh3 hashes 11-18 GB/s here, 200 MiB in 18 ms; pieces of 1 MiB stay in the core's cache between arriving and being
verified, and cost 32 bytes of table each. It guards against accidents, not against a member that lies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import xxhash
from torch import Tensor

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.replication.memory import Region, check_tensor, region

PIECE_NBYTES = 1 << 20
"""Bytes of a piece. Part of the protocol, for the state hash depends on it: all members of a job must cut alike. Other
states than a member's may be cut otherwise, by agreement.
"""
DIGEST_NBYTES = 16
MAX_TENSORS = 1 << 20

Named = Iterable[tuple[str, Tensor]]

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Types of this torch by their names; a name that arrives is looked up here and nowhere else."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, such as "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Entry of a state's table: one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """First byte in the state's address space."""
    nbytes: int
    hashes: tuple[bytes, ...] = ()
    attached: bool = False
    device: str = "cpu"
    """Kind of device at the donor; says where an attached tensor is made. No part of any hash."""

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes

    def words(self) -> str:
        """Describes the tensor by name, type and shape, for error messages."""
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece of a state that is hashed and verified as one: bytes [start, stop) of tensor number `entry`."""

    entry: int
    start: int
    stop: int
    digest: bytes

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class StateTable:
    """Table of a state's tensors, replicated ones first; each tensor is hashed in pieces of at most `piece_nbytes`."""

    entries: tuple[TableEntry, ...]
    piece_nbytes: int = PIECE_NBYTES

    @cached_property
    def nbytes(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    @cached_property
    def state_hash(self) -> str:
        """Hash of the replicated tensors, as 32 hex digits."""
        return _fold(e for e in self.entries if not e.attached)

    @cached_property
    def attached_hash(self) -> str:
        """Hash of the attached tensors, as 32 hex digits."""
        return _fold(e for e in self.entries if e.attached)

    def digests(self, nbytes: int) -> dict[str, bytes]:
        """Returns the digest of each replicated tensor (name, type, shape and bytes), shortened to `nbytes` bytes."""
        return {e.name: bytes.fromhex(_fold([e]))[:nbytes] for e in self.entries if not e.attached}

    def pieces(self) -> Iterator[Piece]:
        """Yields all pieces in address order."""
        for index, entry in enumerate(self.entries):
            for number, (start, stop) in enumerate(cuts(entry.nbytes, self.piece_nbytes)):
                yield Piece(index, start, stop, entry.hashes[number])

    def encode(self) -> bytes:
        """Returns the table as JSON, with piece hashes as one hex string per tensor."""
        rows = [
            [e.name, e.dtype, list(e.shape), e.nbytes, b"".join(e.hashes).hex(), int(e.attached), e.device]
            for e in self.entries
        ]
        return json.dumps({"piece": self.piece_nbytes, "tensors": rows}, separators=(",", ":")).encode()


def _fold(entries: Iterable[TableEntry]) -> str:
    state = xxhash.xxh3_128()
    for e in entries:
        state.update(json.dumps([e.name, e.dtype, list(e.shape), e.nbytes]).encode())
        state.update(b"".join(e.hashes))
    return state.hexdigest()


def cuts(nbytes: int, piece_nbytes: int = PIECE_NBYTES) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each piece of a tensor of this size in bytes."""
    return ((start, min(start + piece_nbytes, nbytes)) for start in range(0, nbytes, piece_nbytes))


def decode_table(data: bytes, piece_nbytes: int = PIECE_NBYTES) -> StateTable:
    """Decodes a table from `StateTable.encode()`; raises WireError unless it is consistent and has pieces of this
    size.
    """
    try:
        document = json.loads(data)
        found, rows = document["piece"], document["tensors"]
        if found != piece_nbytes:
            raise WireError(f"state table with pieces of {found!r} bytes, expected {piece_nbytes}")
        if type(rows) is not list or len(rows) > MAX_TENSORS:
            raise WireError(f"state table without a list of at most {MAX_TENSORS} tensors")
        entries: list[TableEntry] = []
        offset = 0
        for row in rows:
            entries.append(_entry(row, offset, piece_nbytes))
            offset = entries[-1].stop
    except WireError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"malformed state table: {error!r}") from error
    if len({e.name for e in entries}) != len(entries):
        raise WireError("state table names a tensor twice")
    if any(a.attached and not b.attached for a, b in pairwise(entries)):
        raise WireError("state table with a replicated tensor after an attached one")
    return StateTable(tuple(entries), piece_nbytes)


def _entry(row: object, offset: int, piece_nbytes: int) -> TableEntry:
    if type(row) is not list or len(row) != 7:
        raise WireError("state table with a malformed row")
    name, dtype, shape, nbytes, digests, attached, device = row
    if type(name) is not str or type(device) is not str or not device.isalnum() or attached not in (0, 1):
        raise WireError(f"state table with a malformed row for tensor {name!r}")
    if type(dtype) is not str or dtype not in DTYPES:
        raise WireError(f"state table: tensor {name!r} has the unknown type {dtype!r}")
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise WireError(f"state table: tensor {name!r} has the impossible shape {shape!r}")
        count *= size
    if type(nbytes) is not int or nbytes != count * DTYPES[dtype].itemsize:
        raise WireError(f"state table: tensor {name!r} {dtype}{shape} cannot have {nbytes!r} bytes")
    raw = bytes.fromhex(digests)
    if len(raw) != -(-nbytes // piece_nbytes) * DIGEST_NBYTES:
        raise WireError(f"state table: tensor {name!r} of {nbytes} bytes has {len(raw) / DIGEST_NBYTES} piece hashes")
    hashes = tuple(raw[i : i + DIGEST_NBYTES] for i in range(0, len(raw), DIGEST_NBYTES))
    return TableEntry(name, dtype, tuple(shape), offset, nbytes, hashes, bool(attached), device)


def hash_region(source: Region, piece_nbytes: int = PIECE_NBYTES) -> tuple[bytes, ...]:
    """Returns the xxh3-128 hash of each piece of one tensor."""
    digest = xxhash.xxh3_128_digest
    return tuple(digest(source.read(start, stop)) for start, stop in cuts(source.nbytes, piece_nbytes))


def build_table(
    tensors: Named,
    attached: Named = (),
    *,
    regions: Sequence[Region] | None = None,
    hashes: Sequence[tuple[bytes, ...]] | None = None,
    piece_nbytes: int = PIECE_NBYTES,
    tick: Callable[[], None] | None = None,
) -> StateTable:
    """Hashes the state; returns its table.

    Args:
        tensors: Replicated tensors in their fixed order.
        attached: Tensors that only a manifest refers to.
        regions: Ways to the tensors' bytes, in the same order, if the caller has them already.
        hashes: Hashes of the pieces of each tensor, if the caller has them already; attached ones come after the
            others.
        piece_nbytes: Bytes of a piece.
        tick: Function that is called now and then, so that a long hash does not look like a death.
    """
    rows = [(name, t, False) for name, t in tensors] + [(name, t, True) for name, t in attached]
    entries: list[TableEntry] = []
    offset = 0
    for index, (name, tensor, extra) in enumerate(rows):
        source = regions[index] if regions is not None else region(name, tensor)
        digests = hash_region(source, piece_nbytes) if hashes is None else hashes[index]
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        entries.append(TableEntry(name, dtype, shape, offset, source.nbytes, digests, extra, tensor.device.type))
        offset += source.nbytes
        if tick is not None:
            tick()
    if len({e.name for e in entries}) != len(entries):
        twice = next(e.name for i, e in enumerate(entries) if e.name in {x.name for x in entries[:i]})
        raise StateError(f"two tensors of the training state have the name {twice!r}: names must be unique")
    return StateTable(tuple(entries), piece_nbytes)


def state_hash(tensors: Named) -> str:
    """Returns a hash of 32 hex digits over tensors' names, types, shapes and bytes (protocol.md 19, 24)."""
    return build_table(tensors).state_hash


def layout_hash(tensors: Named, groups: Iterable[Iterable[str]] = ()) -> str:
    """Returns a hash of 16 hex digits over tensors' names, shapes and types in order, and how names are grouped
    (protocol.md 20).
    """
    rows = []
    for name, tensor in tensors:
        check_tensor(name, tensor)
        rows.append([name, dtype_name(tensor.dtype), list(tensor.shape)])
    text = json.dumps([rows, [list(group) for group in groups]], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_layout(table: StateTable, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raises StateError that names the first tensor in which the donor's replicated state and this member's differ."""
    theirs = [e for e in table.entries if not e.attached]
    for entry, (name, tensor) in zip(theirs, tensors, strict=False):
        mine = f"{name!r} {dtype_name(tensor.dtype)}{list(tensor.shape)}"
        if (entry.name, entry.dtype, entry.shape) != (name, dtype_name(tensor.dtype), tuple(tensor.shape)):
            raise StateError(
                f"the training state is laid out differently here: the donor has tensor {entry.words()} where this "
                f"member has {mine}; start all members with the same model, optimizers and configuration"
            )
    if len(theirs) != len(tensors):
        longer = "the donor" if len(theirs) > len(tensors) else "this member"
        at = min(len(theirs), len(tensors))
        name, tensor = tensors[at] if at < len(tensors) else ("", Tensor())
        first = theirs[at].words() if at < len(theirs) else f"{name!r} {dtype_name(tensor.dtype)}{list(tensor.shape)}"
        raise StateError(
            f"the training state is laid out differently here: the donor has {len(theirs)} tensors, this member "
            f"{len(tensors)}; only {longer} has tensor {first}; start all members with the same model, optimizers and "
            "configuration"
        )


def placeholder(entry: TableEntry) -> Tensor:
    """Returns a tensor without memory that stands for one still to be made."""
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")


def make_attached(table: StateTable, limit_nbytes: int) -> dict[str, Tensor]:
    """Allocates the tensors that only the manifest refers to, on the same kind of device as at the donor.

    Raises:
        StateError: The tensors need more than the limit.
    """
    entries = [e for e in table.entries if e.attached]
    total = sum(e.nbytes for e in entries)
    if total > limit_nbytes:
        raise StateError(
            f"callbacks and other parts of the manifest hold {total} bytes of tensors, the limit is {limit_nbytes} "
            "(PullConfig.max_attached_nbytes)"
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    made = {}
    for e in entries:
        here = accelerator is not None and e.device == accelerator.type
        made[e.name] = torch.empty(e.shape, dtype=DTYPES[e.dtype], device=accelerator if here else "cpu")
    return made
