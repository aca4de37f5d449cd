"""Sends chunks between processes of one machine by reference: the frame says where the bytes lie, the receiver reads
them out of the sender's memory in one copy (process_vm_readv), straight to where they belong.

Theory of operation. Over loopback TCP each byte is copied twice by the kernel and passes its network stack; that, not
the sums, is most of what an all-reduce costs among members of one machine. A sender's chunks lie still long enough for
reading instead: its own gradient until the slot commits, results until the header after (protocol.md 3), and neither
happens before the receiver has read, or the receiver is out. Who is out may read late; so each process keeps a
`Generation`, the attempt that it has open, sets it before that attempt's bytes overwrite others, and the receiver reads
it *after* the bytes: bytes that were not still any more are recognised and dropped (`intact`).

A partial sum is not read when its frame comes but when it is added, block by block, so that each block is added while
it is in the processor's cache (`PartialSum`).

Whether a process may read another one's memory is up to the kernel (same user, no seccomp filter, same pid namespace),
so it is tried: each end of a link between addresses of one machine offers its generation, and references are sent only
to an end that has read it. A random nonce in the generation tells a process from a later one with the same pid.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chaos_lightning.errors import ChaosError, WireError
from chaos_lightning.protocol.types import ViewId

PIECE = struct.Struct("<QQ")
"""Layout of (address, length) of one piece of a chunk."""

SMALLEST_NBYTES = 16384
"""Size, bytes, below which a payload is cheaper to send than to point at."""

MAX_PIECES = 512
"""Largest number of pieces of a call. The kernel takes up to 1024; a chunk has a handful, as a rule one."""

_OFFER = struct.Struct("<QQ16s")
_LOAD = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Words(ctypes.Structure):
    _fields_ = (
        ("nonce", ctypes.c_ubyte * 16),
        ("seq", ctypes.c_uint64),
        ("term", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
    )


if _LOAD is not None:
    _LOAD.restype = ctypes.c_ssize_t
    _LOAD.argtypes = (
        ctypes.c_int, ctypes.POINTER(_Iovec), ctypes.c_ulong, ctypes.POINTER(_Iovec), ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip


def address_of(memory: memoryview) -> int:
    """Returns the memory address of a writable, contiguous buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def refer(pieces: Sequence[memoryview]) -> bytes:
    """Encodes the memory addresses and lengths of a chunk's pieces."""
    return b"".join(PIECE.pack(address_of(piece), piece.nbytes) for piece in pieces)


def pieces_of(references: memoryview) -> list[tuple[int, int]]:
    """Decodes the (address, length) pairs that `refer` encoded."""
    return list(PIECE.iter_unpack(references))


class Generation:
    """Record of the attempt that this process has open, in memory that its neighbours can read."""

    def __init__(self) -> None:
        self._words = _Words((ctypes.c_ubyte * 16)(*os.urandom(16)), 0, 0, 0)

    def set(self, view: ViewId, seq: int) -> None:
        """Sets the open attempt; to be called before any of its bytes overwrite those of an older attempt."""
        words = self._words
        words.seq, words.term, words.number = seq, view.term, view.number

    def offer(self) -> bytes:
        """Returns what a neighbour needs to read this process's memory: pid, address of this record, and its nonce."""
        return _OFFER.pack(os.getpid(), ctypes.addressof(self._words), bytes(self._words.nonce))


def intact(up: bool, view: ViewId, seq: int, now: tuple[ViewId, int]) -> bool:
    """Returns whether a chunk of (view, seq), read out of its sender's memory, is valid, if the sender's generation was
    `now` after the read.

    Args:
        up: A partial sum (own gradient or what was added to it, still while its attempt is open), not a result (still
            until the slot after the next begins).
        view: View of the chunk's attempt.
        seq: Slot of the chunk's attempt.
        now: The sender's open attempt, read after the chunk.
    """
    if now == (view, seq):
        return True
    return not up and now[1] == seq + 1


class NeighbourMemory:
    """Memory of another process on this machine that this process may read.

    Args:
        offer: Bytes that `Generation.offer` returned in the other process.

    Raises:
        WireError: The offer is malformed.
        OSError: This process may not read the other one's memory, or the other one is not who it says.
    """

    def __init__(self, offer: bytes) -> None:
        if len(offer) != _OFFER.size:
            raise WireError(f"an offer of memory has {len(offer)} bytes, expected {_OFFER.size}")
        self._pid, self._address, self._nonce = _OFFER.unpack(offer)
        self._seen = _Words()
        self.generation()

    def generation(self) -> tuple[ViewId, int]:
        """Returns the attempt (view, slot) that the neighbour has open."""
        return self.read([], None)

    def read(self, pieces: Sequence[tuple[int, int]], into: memoryview | None) -> tuple[ViewId, int]:
        """Copies pieces of the neighbour's memory into `into`; returns the neighbour's generation after the copy.

        Raises:
            ProcessLookupError: The process is gone.
            OSError: One of the pieces cannot be read.
        """
        return self.scatter(pieces, () if into is None else (into,))

    def scatter(self, pieces: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> tuple[ViewId, int]:
        """Copies pieces of the neighbour's memory into several buffers, filled one after the other; returns the
        generation after the copy. At most `MAX_PIECES` of either.

        Raises:
            ProcessLookupError: The process is gone.
            OSError: One of the pieces cannot be read.
        """
        if _LOAD is None:
            raise OSError("this system has no process_vm_readv")
        seen = self._seen
        generation_nbytes = ctypes.sizeof(seen)
        count = len(into) + 1
        mine = (*((address_of(b), b.nbytes) for b in into), (ctypes.addressof(seen), generation_nbytes))
        ours = (_Iovec * count)(*(_Iovec(*piece) for piece in mine))
        remote = (*pieces, (self._address, generation_nbytes))
        theirs = (_Iovec * len(remote))(*(_Iovec(*piece) for piece in remote))
        wanted = generation_nbytes + sum(b.nbytes for b in into)
        done = int(_LOAD(self._pid, ours, count, theirs, len(remote), 0))
        if done != wanted:
            number = ctypes.get_errno() if done < 0 else 0
            raise OSError(number, os.strerror(number) if number else f"{done} of {wanted} bytes can be read")
        if bytes(seen.nonce) != self._nonce:
            raise ProcessLookupError(3, f"process {self._pid} is another one by now")
        return ViewId(int(seen.term), int(seen.number)), int(seen.seq)


class UnreadableError(ChaosError):
    """Error that memory to which a reference points cannot be read any more: the link broke, or the view is over."""


@dataclass(slots=True)
class PartialSum:
    """Partial sum of a reduction that is still in its sender's memory.

    Attributes:
        neighbour: Memory of the sender's process.
        pieces: Pieces of that memory (address, length), in order.
        view: View of the chunk's attempt.
        seq: Slot of the chunk's attempt.
        lost: Function that is told when the neighbour cannot be read any more; it must not break the link at once,
            since reading happens in the middle of a sum.
    """

    neighbour: NeighbourMemory
    pieces: list[tuple[int, int]]
    view: ViewId
    seq: int
    lost: Callable[[OSError], None]

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """Copies bytes [start, stop) of the chunk out of the sender's memory.

        Raises:
            UnreadableError: The bytes are not there any more.
        """
        wanted: list[tuple[int, int]] = []
        at = 0
        for address, nbytes in self.pieces:
            low, high = max(start, at), min(stop, at + nbytes)
            if low < high:
                wanted.append((address + low - at, high - low))
            at += nbytes
        try:
            now = self.neighbour.read(wanted, into)
        except OSError as error:
            self.lost(error)
            raise UnreadableError(f"a chunk of slot {self.seq} cannot be read: {error}") from error
        if not intact(True, self.view, self.seq, now):
            raise UnreadableError(f"a chunk of slot {self.seq} is from {self.view}, its sender is at {now}")
