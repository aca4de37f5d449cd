"""Sends and receives frames on a bulk socket, which carries requests for state ranges and reduced bytes, and the
replies.

Theory of operation. A bulk socket is a connected, already authenticated, blocking TCP socket. The asking side sends
requests, headers without payload (but for ROUTE); the serving side answers each in order, so they can be pipelined and
need no number of their own. A header has a fixed size of `HEADER_NBYTES` bytes: magic, version, type, flags, slot,
head (the 8 bytes of a header's hash, protocol.md 4a), offset and length in bytes, an xxh3-64 checksum of the payload
and one of the header itself. `length` is the range's length in a request and the payload's in a reply.

Whatever arrives is checked in full, its length against the type's limit, before a byte is allocated for it; control
payloads grow as their bytes arrive, range payloads land in memory the receiver owns already. All waits run against a
stall timeout that every byte of progress winds up again, and against a deadline that nothing does. Anything odd is a
`WireError`; after one the stream is out of step and must be closed.

On a protected connection (transport/sealing.py) all of this travels in sealed records.
"""

from __future__ import annotations

import enum
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from chaos_lightning.errors import RefusedError, WireError
from chaos_lightning.transport.sealing import session_of

MAGIC = b"CLRB"
VERSION = 1
_FIELDS = struct.Struct("!4sBBHQ8sQQQ")
HEADER_NBYTES = _FIELDS.size + 8
MAX_RANGE_NBYTES = 64 << 20
"""Most bytes that a single request asks for."""
MAX_CONTROL_NBYTES = 128 << 20
"""Most bytes of a manifest or a table; a job with more state than these describe has to raise it here."""
MAX_NOTE_NBYTES = 1 << 14
MAX_INLINE_NBYTES = 1 << 20
"""Most reduced bytes of a slot of the log that may come in one reply."""
MAX_ROUTE_NBYTES = 1 << 12
MAX_STATE_NBYTES = 1 << 50
_GROW_NBYTES = 1 << 20
_IOV = min(512, os.sysconf("SC_IOV_MAX"))


class Type(enum.IntEnum):
    """Types of frames: requests are below 16, replies above; 13 and 29 belonged to frames that no longer exist."""

    GET_DIGEST = 1
    GET_TABLE = 2
    GET_MANIFEST = 3
    GET_STATE = 4
    GET_RESULT = 5
    GET_ENTRY = 6
    """Request for the header of slot `seq`, which stands on `head`, from the log; reduced bytes come along if they are
    at most `length`.
    """
    GET_PLACES = 7
    """Request for the places of the state in the donor's memory (by_reference.py); `length` 1: a snapshot's, with its
    manifest.
    """
    GET_BUFFERS = 8
    """Request for the places of reduced bytes in the donor's memory; the sender reads the log until this connection
    ends.
    """
    HAVE_STATE = 9
    """Message without a reply: the sender holds the first `offset` bytes of the snapshot."""
    HAVE_RESULT = 10
    """Message without a reply: the sender holds the reduced bytes of this slot."""
    PACE = 11
    """Message without a reply: at most `offset` bytes a second are to come on this connection from now on; 0: no
    bound.
    """
    ROUTE = 12
    """Request to pass everything that follows on this connection on to another member; the payload says the way
    (forward.py).
    """
    DIGEST = 17
    TABLE = 18
    MANIFEST = 19
    DATA = 20
    REFUSED = 21
    ENTRY = 23
    """Reply with the length of an encoded header (4 bytes), the header, and the slot's reduced bytes if they are few;
    `offset` is the last slot in the donor's log.
    """
    PLACES = 24
    BUFFERS = 25
    PENDING = 22
    """Reply that the donor lives, but has not published this head yet, or is still hashing; the answer follows.
    `offset`: milliseconds since the donor, or a donor of its own, got something of this state; 0 if it has the state.
    """
    ROUTED = 28


REQUESTS = frozenset(  # that ask for something of this header; such may be forwarded
    (Type.GET_DIGEST, Type.GET_TABLE, Type.GET_MANIFEST, Type.GET_STATE, Type.GET_RESULT, Type.GET_ENTRY)
)
NEIGHBOURLY = frozenset((Type.GET_PLACES, Type.GET_BUFFERS, Type.HAVE_STATE, Type.HAVE_RESULT))
"""Requests between members of one machine."""
FIRST_REPLY = 16
RANGES = frozenset((Type.GET_STATE, Type.GET_RESULT))
UNSUMMED = 1
"""Flag of DATA: the payload's checksum is left out since the table's piece hashes cover it."""

_LIMITS = {
    Type.GET_DIGEST: 0,
    Type.GET_TABLE: 0,
    Type.GET_MANIFEST: 0,
    Type.GET_STATE: MAX_RANGE_NBYTES,
    Type.GET_RESULT: MAX_RANGE_NBYTES,
    Type.GET_ENTRY: MAX_INLINE_NBYTES,
    Type.GET_PLACES: 1,
    Type.GET_BUFFERS: 0,
    Type.HAVE_STATE: 0,
    Type.HAVE_RESULT: 0,
    Type.PACE: 0,
    Type.PLACES: MAX_CONTROL_NBYTES,
    Type.BUFFERS: MAX_NOTE_NBYTES,
    Type.ENTRY: MAX_CONTROL_NBYTES,
    Type.DIGEST: MAX_NOTE_NBYTES,
    Type.TABLE: MAX_CONTROL_NBYTES,
    Type.MANIFEST: MAX_CONTROL_NBYTES,
    Type.DATA: MAX_RANGE_NBYTES,
    Type.REFUSED: MAX_NOTE_NBYTES,
    Type.PENDING: 0,
    Type.ROUTE: MAX_ROUTE_NBYTES,
    Type.ROUTED: 0,
}


@dataclass(frozen=True, slots=True)
class BulkFrame:
    """Header of one request or reply on a bulk socket."""

    type: Type
    head: str
    """First 8 bytes, as 16 hex digits, of the hash of the committed header whose state or result is meant."""
    seq: int
    offset: int = 0
    length: int = 0
    flags: int = 0
    checksum: int = 0

    def encode(self) -> bytes:
        """Returns this frame header as bytes, followed by a checksum of them."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.type,
            self.flags,
            self.seq,
            head_bytes(self.head),
            self.offset,
            self.length,
            self.checksum,
        )
        return fields + xxhash.xxh3_64_digest(fields)


def head_bytes(head: str) -> bytes:
    """Converts a header hash of 16 hex digits to 8 bytes; raises ValueError for anything else."""
    if len(head) != 16 or head != head.lower():
        raise ValueError(f"a head is 16 lower-case hex digits (Header.hash), got {head!r}")
    return bytes.fromhex(head)


def named_head(name: str) -> str:
    """Returns a made-up header hash under which a state of this name is served; a real header has it with probability
    2**-64.
    """
    return hashlib.blake2b(f"state:{name}".encode(), digest_size=8).hexdigest()


def decode(data: bytes | bytearray | memoryview) -> BulkFrame:
    """Decodes a frame header and checks all of its fields, so that no memory is allocated for a false length."""
    if len(data) != HEADER_NBYTES:
        raise WireError(f"a bulk frame header has {HEADER_NBYTES} bytes, got {len(data)}")
    fields, checksum = bytes(data[: _FIELDS.size]), bytes(data[_FIELDS.size :])
    magic, version, kind, flags, seq, head, offset, length, payload_sum = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise WireError(f"no bulk frame: expected magic {MAGIC!r}, got {magic!r}")
    if xxhash.xxh3_64_digest(fields) != checksum:
        raise WireError("a bulk frame header arrived corrupted: its checksum does not match")
    if version != VERSION:
        raise WireError(f"bulk frame of version {version}, this side speaks {VERSION}: use the same package everywhere")
    try:
        type_ = Type(kind)
    except ValueError:
        raise WireError(f"bulk frame of unknown type {kind}") from None
    if flags & ~UNSUMMED or (flags and type_ is not Type.DATA):
        raise WireError(f"bulk frame {type_.name} with unknown flags {flags:#x}")
    if length > _LIMITS[type_]:
        raise WireError(f"bulk frame {type_.name} of {length} bytes, the limit is {_LIMITS[type_]}")
    if offset + length > MAX_STATE_NBYTES:
        raise WireError(f"bulk frame {type_.name} reaches byte {offset + length}, the limit is {MAX_STATE_NBYTES}")
    return BulkFrame(type_, head.hex(), seq, offset, length, flags, payload_sum)


def checksum_of(parts: Sequence[memoryview | bytes]) -> int:
    """Returns the xxh3-64 checksum of these byte strings joined."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


class BulkSocket:
    """Blocking socket for bulk transfers, with a deadline and a stall timeout, which starts anew whenever bytes
    move.
    """

    def __init__(self, sock: socket.socket, *, stall_timeout_s: float, deadline: float = float("inf")) -> None:
        """Takes ownership of `sock`; no wait lasts beyond `deadline`, a `time.monotonic()` value."""
        self.sock = sock
        self.stall_timeout_s = stall_timeout_s
        self.deadline = deadline
        session = session_of(sock)
        self._stream = session.stream if session is not None else None

    def _arm(self, patience_s: float) -> None:
        left = min(patience_s, self.deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError("the transfer's deadline passed")
        self.sock.settimeout(left)

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, frame: BulkFrame, payload: Sequence[memoryview | bytes] = ()) -> None:
        """Sends a frame's header and payload straight from the given memory, without joining or copying it."""
        parts = [memoryview(p) for p in payload if len(p)]
        if self._stream is not None:  # the payload has records of its own, which open straight at its place
            self._send([memoryview(frame.encode())])
            self._send(parts)
        else:
            self._send([memoryview(frame.encode()), *parts])

    def send_bytes(self, part: memoryview) -> None:
        """Sends a part of a payload whose header was sent before."""
        self._send([part])

    def _send(self, parts: list[memoryview]) -> None:
        if self._stream is None:
            self._send_all(parts)
            return
        for sealed in self._stream.records(parts):
            self._send_all(sealed)

    def _send_all(self, parts: list[memoryview]) -> None:
        index = 0
        while index < len(parts):
            self._arm(self.stall_timeout_s)
            sent = self.sock.sendmsg(parts[index : index + _IOV])
            while sent:
                if sent >= len(parts[index]):
                    sent -= len(parts[index])
                    index += 1
                else:
                    parts[index] = parts[index][sent:]
                    sent = 0

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive_header(self, *, patience_s: float | None = None) -> BulkFrame | None:
        """Receives the next frame header; returns None if the stream ended between frames.

        Args:
            patience_s: Seconds to wait for the first byte; None: the stall timeout.
        """
        data = bytearray(HEADER_NBYTES)
        view = memoryview(data)
        got = 0
        while got < HEADER_NBYTES:
            patience = self.stall_timeout_s if got or patience_s is None else patience_s
            count = self._receive([view[got:]], patience)
            if not count:
                if got:
                    raise WireError(
                        f"the stream ended within a bulk frame header, after {got} of {HEADER_NBYTES} bytes"
                    )
                return None
            got += count
        return decode(data)

    def receive_into(self, buffers: Sequence[memoryview], on_bytes: Callable[[int], None] | None = None) -> None:
        """Fills these buffers, in order, with received bytes; raises ConnectionError if the stream ends too early."""
        parts = [b for b in buffers if len(b)]
        index = 0
        while index < len(parts):
            got = self._receive(parts[index : index + _IOV], self.stall_timeout_s, on_bytes)
            if not got:
                raise ConnectionError("the stream ended within a payload")
            while got:
                if got >= len(parts[index]):
                    got -= len(parts[index])
                    index += 1
                else:
                    parts[index] = parts[index][got:]
                    got = 0

    def _receive(
        self, parts: list[memoryview], patience_s: float, on_bytes: Callable[[int], None] | None = None
    ) -> int:
        """Receives bytes into the beginning of `parts`; returns how many came, 0 at the end of the stream."""

        def receive(views: list[memoryview]) -> int:
            nonlocal patience_s
            self._arm(patience_s)
            patience_s = self.stall_timeout_s
            return self.sock.recvmsg_into(views)[0]

        if self._stream is not None:
            return self._stream.fill(receive, parts, on_bytes)
        got = receive(parts)
        if got and on_bytes is not None:
            on_bytes(got)
        return got

    def reply_to(
        self, request: BulkFrame, answer: Type, heard: Callable[[BulkFrame], None] = lambda frame: None
    ) -> BulkFrame:
        """Waits for the answer to a request that was sent before, and returns its header; skips the donor's PENDING
        frames.

        Args:
            request: Request that was sent.
            answer: Type of the expected answer.
            heard: Function that is called with each header that comes; what it raises ends the wait.

        Raises:
            RefusedError: The donor has refused; the message has its words.
            OSError, WireError: The connection is of no use any more.
        """
        while True:
            frame = self.receive_header()
            if frame is None:
                raise ConnectionError("the donor closed the connection")
            heard(frame)
            if (frame.head, frame.seq) != (request.head, request.seq):
                raise WireError(
                    f"the donor answered for header {frame.head} (slot {frame.seq}), asked was {request.head} "
                    f"(slot {request.seq})"
                )
            if frame.type is Type.REFUSED:
                raise RefusedError(self.receive_payload(frame).decode(errors="replace"))
            if frame.type is answer:
                return frame
            if frame.type is not Type.PENDING:
                raise WireError(f"the donor answered {frame.type.name} where {answer.name} was expected")

    def ask(self, request: BulkFrame, answer: Type, heard: Callable[[BulkFrame], None] = lambda frame: None) -> bytes:
        """Sends a request and returns the answer's payload; arguments and errors are those of `reply_to`."""
        self.send(request)
        return self.receive_payload(self.reply_to(request, answer, heard))

    def receive_payload(self, frame: BulkFrame) -> bytes:
        """Receives a control payload; allocates memory as bytes arrive, not by the length that the header claims."""
        data = bytearray()
        while len(data) < frame.length:
            step = bytearray(min(_GROW_NBYTES, frame.length - len(data)))
            self.receive_into([memoryview(step)])
            data += step
        check_payload(frame, [memoryview(data)])
        return bytes(data)


def check_payload(frame: BulkFrame, parts: Sequence[memoryview]) -> None:
    """Raises WireError unless the payload matches the header's checksum."""
    if checksum_of(parts) != frame.checksum:
        raise WireError(f"payload of bulk frame {frame.type.name} arrived corrupted: its checksum does not match")


def reply(type_: Type, head: str, seq: int, payload: bytes, offset: int = 0) -> tuple[BulkFrame, tuple[bytes, ...]]:
    """Returns header and payload of a control reply, with the payload's checksum in the header."""
    return BulkFrame(type_, head, seq, offset, len(payload), 0, checksum_of([payload])), (payload,)
