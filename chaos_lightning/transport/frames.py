"""Packs and parses frames: a fixed header of 44 bytes, then the payload.

Theory of operation. A link is a TCP stream of frames. Every frame carries the view and the slot it belongs to, so that
bytes of an older attempt are recognised and diverted (protocol.md 1, 11), a checksum of its payload and one of the
header itself, so that a damaged length is found before anything is allocated or awaited.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.types import ViewId
from chaos_lightning.transport.reference import MAX_PIECES

MAGIC = 0xC4A0
_LAYOUT = struct.Struct("<HBBIIQQIQ")  # magic, type, flags, term, number, seq, start, length, payload checksum
_SUM = struct.Struct("<I")
HEADER_NBYTES = _LAYOUT.size + _SUM.size
MAX_PAYLOAD_NBYTES = 64 << 20
"""Largest payload of a frame, bytes: chunks are at most 16 MiB, messages at most 64 MiB (gathered payloads)."""


class FrameType(enum.IntEnum):
    UP = 1
    """Partial sum on its way to the root of its tree."""
    DOWN = 2
    """Complete sum on its way back."""
    MESSAGE = 3
    """Encoded PeerMessage."""
    PING = 4
    BYE = 5
    """Word that the sender closes this link on purpose: no failure."""
    OFFER = 6
    """Word that the sender's memory may be read, if the kernel allows it (transport/reference.py)."""
    ACCEPT = 7
    """Word that the offered memory can be read: chunks may come by reference."""
    ROUTED = 8
    """Encoded PeerMessage that goes over several links (membership/routing.py)."""
    PROBE = 9
    """Part of a measurement of this very link (transport/probe.py)."""
    FORWARD = 10
    """Activations for the next stage of a pipeline, or a part of them."""
    BACKWARD = 11
    """Gradients for the stage before, or a part of them."""


CHUNKS = (FrameType.UP, FrameType.DOWN)
"""Frames with gradients on their way through trees; they may go by reference."""
BORDERS = (FrameType.FORWARD, FrameType.BACKWARD)
"""Frames with tensors between stages of a pipeline."""
ATTEMPTS = (*CHUNKS, *BORDERS)
"""Frames of an attempt, which are purged with its view."""

_TYPES = {int(t): t for t in FrameType}


@dataclass(slots=True)
class Frame:
    """Header of a frame. `length` is the payload's size in bytes; `start` is a chunk's byte offset in the gradient
    layout, or the number of a border tensor.
    """

    type: FrameType
    view: ViewId
    seq: int
    start: int
    length: int
    checksum: int
    summed: bool = True
    """Whether the checksum was taken (chunks between processes of one machine go without)."""
    pieces: int = 0
    """Number of (address, length) pairs that follow instead of the payload, if it goes by reference; the number takes
    the checksum's place.
    """


def payload_checksum(pieces: Sequence[memoryview]) -> int:
    """Returns the xxh3-64 checksum of these pieces' bytes joined."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


_SUMMED, _REFERRED = 1, 2


def pack(
    frame_type: FrameType,
    view: ViewId,
    seq: int,
    start: int,
    length: int,
    checksum: int,
    *,
    summed: bool = True,
    pieces: int = 0,
) -> bytes:
    """Encodes a frame header; with `pieces` the frame carries references instead of a payload, and no checksum."""
    flags, last = (_REFERRED, pieces) if pieces else (int(summed), checksum)
    head = _LAYOUT.pack(MAGIC, frame_type, flags, view.term, view.number, seq, start, length, last)
    return head + _SUM.pack(xxhash.xxh32_intdigest(head))


def unpack(data: bytearray | memoryview) -> Frame:
    """Decodes and checks a frame header.

    Raises:
        WireError: Magic, header checksum, type or length is not ours.
    """
    head = bytes(data[: _LAYOUT.size])
    magic, kind, flags, term, number, seq, start, length, checksum = _LAYOUT.unpack(head)
    if magic != MAGIC:
        raise WireError(f"frame starts with {magic:#06x}, expected {MAGIC:#06x}: the peer does not speak this protocol")
    if _SUM.unpack_from(data, _LAYOUT.size)[0] != xxhash.xxh32_intdigest(head):
        raise WireError("frame header fails its checksum: bytes were damaged on the way")
    if kind not in _TYPES:
        raise WireError(f"frame type {kind} is unknown; expected one of {sorted(_TYPES)}")
    if flags > _REFERRED:
        raise WireError(f"frame flags {flags:#04x} are unknown; expected 0, 1 or 2")
    if length > MAX_PAYLOAD_NBYTES:
        raise WireError(f"frame announces {length} bytes, the limit is {MAX_PAYLOAD_NBYTES}")
    frame = Frame(_TYPES[kind], ViewId(term, number), seq, start, length, checksum, flags == _SUMMED)
    if flags == _REFERRED:
        if frame.type not in CHUNKS or not 0 < checksum <= MAX_PIECES:
            raise WireError(f"a {frame.type.name} frame of {checksum} references; expected chunks of 1 to {MAX_PIECES}")
        frame.pieces, frame.checksum = checksum, 0
    return frame
