"""Sealed records: somebody on the way who alters, repeats, swaps, leaves out and cuts them, and a member gone bad.

Theory of operation. An input's first byte says how records are protected (1: encrypted, else authenticated) and who
reads them (2: a stream as bulk connections have it, else a link); parts follow, each with what is to be sealed and, in
its number, what becomes of the sealed record on its way. The keys are right, so that what is sealed is read as a
member's own words are: there a hostile member speaks.

Whatever was done to the records, what is believed must be the beginning of what was sealed, byte for byte: a reader
that takes one byte of anything else is a finding, as much as one that crashes.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from chaos_lightning.errors import WireError
from chaos_lightning.lab.fuzz import mutate
from chaos_lightning.lab.fuzz.target import FindingError
from chaos_lightning.transport.frames import HEADER_NBYTES
from chaos_lightning.transport.sealing import SEGMENT_NBYTES, TAG_NBYTES, Level, ProtectedSocket, Session

ENCRYPTED, STREAM = 1, 2
_PATIENCE_S = 5.0
_MOST_SEALED_NBYTES = 1 << 20
_LENGTH_NBYTES = 4


class Fate(enum.IntEnum):
    """What becomes of a record on its way."""

    WELL = 0
    FLIPPED = 1
    """One bit of it; which one, the rest of the part's number says."""
    TWICE = 2
    LEFT_OUT = 3
    SWAPPED = 4
    """With the next one."""
    CUT_SHORT = 5
    BEHIND_NOISE = 6
    TAG_OF_NONE = 7
    """Its tag is zeros."""
    LENGTH_CHANGED = 8
    """Of a stream: another length before it."""
    PLAIN = 9
    """Not sealed at all."""


def a_session(level: Level, *, dialled: bool) -> Session:
    """One end of a connection whose keys everybody here knows."""
    return Session(level, b"a secret of this fuzzer", b"a transcript", dialled=dialled)


def fate_of(tag: int) -> Fate:
    return Fate(tag % len(Fate))


def _records(level: Level, sealed: list[tuple[int, bytes]], *, stream: bool) -> list[tuple[Fate, int, bytes, bytes]]:
    """(fate, place within it, as sealed, in the clear) of each record."""
    session = a_session(level, dialled=True)
    found: list[tuple[Fate, int, bytes, bytes]] = []
    room = _MOST_SEALED_NBYTES
    for tag, clear in sealed:
        fate, place = fate_of(tag), tag // len(Fate)
        clear, room = clear[:room], room - len(clear[:room])
        if stream:
            for parts in session.stream.records([memoryview(clear)]):
                record = b"".join(bytes(part) for part in parts)
                found.append((fate, place, record, clear[: len(record) - _LENGTH_NBYTES - TAG_NBYTES]))
                clear = clear[len(record) - _LENGTH_NBYTES - TAG_NBYTES :]
            continue
        at, begins = 0, True
        while at < len(clear):
            piece = clear[at : at + (HEADER_NBYTES if begins else SEGMENT_NBYTES)]
            parts = session.sealer.frame([memoryview(piece)], begins=True)
            found.append((fate, place, b"".join(bytes(part) for part in parts), piece))
            at, begins = at + len(piece), False
    return found


def travelled(level: Level, sealed: list[tuple[int, bytes]], *, stream: bool) -> tuple[bytes, bytes]:
    """(what arrives, what of it may be believed)."""
    records = _records(level, sealed, stream=stream)
    arrives: list[bytes] = []
    held = b""
    for fate, place, record, clear in records:
        match fate:
            case Fate.FLIPPED:
                at = (place * 7) % len(record)
                record = record[:at] + bytes([record[at] ^ 1 << place % 8]) + record[at + 1 :]
            case Fate.TWICE:
                record = record * 2
            case Fate.LEFT_OUT:
                record = b""
            case Fate.SWAPPED if not held:
                held = record
                continue
            case Fate.CUT_SHORT:
                record = record[: len(record) - 1 - place % len(record)]
            case Fate.BEHIND_NOISE:
                record = bytes([place, 0, 255, place]) + record
            case Fate.TAG_OF_NONE:
                record = record[:-TAG_NBYTES] + bytes(TAG_NBYTES)
            case Fate.LENGTH_CHANGED if stream:
                length = (0, 1, SEGMENT_NBYTES, SEGMENT_NBYTES + 1, 1 << 31, (1 << 32) - 1)[place % 6]
                record = struct.pack("<I", length) + record[_LENGTH_NBYTES:]
            case Fate.PLAIN:
                record = clear
        arrives += [record, held]
        held = b""
    whole, believed, at = b"".join(arrives), b"", 0
    for _, _, record, clear in records:
        if whole[at : at + len(record)] != record:
            break
        believed, at = believed + clear, at + len(record)
    return whole, believed


def read_stream(level: Level, arrives: bytes) -> bytes:
    """What a bulk connection believes of it, before an error or the end."""
    ours, theirs = socket.socketpair()
    session, got = a_session(level, dialled=False), bytearray()

    def speak() -> None:
        with theirs, contextlib.suppress(OSError):
            theirs.settimeout(_PATIENCE_S)
            theirs.sendall(arrives)
            theirs.shutdown(socket.SHUT_WR)
            theirs.recv(1)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    sizes, turn = (1, 60, 4096, SEGMENT_NBYTES), 0
    with ours:
        ours.settimeout(_PATIENCE_S)
        while True:
            into, turn = memoryview(bytearray(sizes[turn % 4])), turn + 1
            try:
                count = session.stream.fill(lambda views: ours.recvmsg_into(views)[0], [into])
            except WireError:
                break
            except TimeoutError as error:
                raise FindingError("a stream whose other end says no more is still waited for") from error
            if not count:
                break
            got += into[:count]
    speaker.join(_PATIENCE_S)
    return bytes(got)


Reader = Callable[[socket.socket, socket.socket, bytes], list[bytes]]
"""Has a link read from the first socket what is said at the second, its other end; the payloads that it delivers."""


def feeding(read_link: Reader) -> Callable[[bytes], None]:
    """The target's reader, with this one for links."""

    def feed(data: bytes) -> None:
        mode, sealed = data[0] if data else 0, mutate.split(data[1:])
        level = Level.ENCRYPTED if mode & ENCRYPTED else Level.AUTHENTICATED
        arrives, believed = travelled(level, sealed, stream=bool(mode & STREAM))
        if mode & STREAM:
            got = read_stream(level, arrives)
            if got != believed[: len(got)]:
                raise FindingError(f"a stream believed {len(got)} bytes, of which some were not sealed in this place")
            return
        ours, theirs = socket.socketpair()
        delivered = read_link(ProtectedSocket.around(ours, a_session(level, dialled=False)), theirs, arrives)
        at = 0
        for payload in delivered:
            found = believed.find(payload, at)
            if found < 0:
                raise FindingError(f"a link delivered {len(payload)} bytes that were not sealed in this place")
            at = found + len(payload)

    return feed


# ------------------------------------------------------------------ inputs


def seeds_of(frames: list[bytes]) -> list[bytes]:
    """Each fate, at each level, for a link and for a stream."""

    def each() -> Iterator[bytes]:
        for mode in range(4):
            for fate in Fate:
                tags = (Fate.WELL, fate, Fate.WELL, Fate.WELL)
                picked = [frames[(mode + 3 * n + fate) % len(frames)] for n in range(len(tags))]
                yield bytes([mode]) + mutate.joined(list(zip(tags, picked, strict=True)))
            yield bytes([mode]) + mutate.joined([(Fate.WELL, frame) for frame in frames])

    return list(each())


def mutating(change: Callable[[bytes, Random], bytes]) -> Callable[[bytes, Random], bytes]:
    """The target's mutator, with this one for what is sealed."""

    def changed(data: bytes, rng: Random) -> bytes:
        mode = data[:1] or b"\0"
        if rng.randint(0, 9) == 0:
            mode = bytes([rng.randint(0, 3)])
        tags: list[Any] = [Fate.WELL] * 5 + [fate + len(Fate) * rng.randint(0, 15) for fate in Fate]
        return mode + mutate.parts_of(data[1:], rng, lambda tag, part, r: change(part, r), tags)

    return changed
