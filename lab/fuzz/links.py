"""Fuzzes links between members with a hostile peer, or one on the way between them: frames, handshakes, sealed records.

Theory of operation. *Frames* are said to a live link, beside which another link of the same loop must go on working.
*Handshakes* are answered by either end; inputs whose second byte is P prove what they say, so that changes of what is
said get past the proof, as those of a member gone bad would.

*Sealed* records: an input's first byte says how they are protected (1: encrypted, else authenticated) and who reads
them (2: a stream as bulk connections have it, else a link); parts follow, each with what is to be sealed and, in its
number, what becomes of the sealed record on its way: it is altered, repeated, swapped, left out or cut. The keys are
right, so that what is sealed is read as a member's own words are. Whatever was done, what is believed must be the
beginning of what was sealed, byte for byte: a reader that takes one byte of anything else is a finding, as much as one
that crashes.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Sequence
from random import Random
from typing import Any

from chaos_lightning.errors import RefusedError, WireError
from chaos_lightning.membership.routing import RoutedMessage, unpacked
from chaos_lightning.protocol.codec import PEER
from chaos_lightning.protocol.types import VERSION, ViewId
from chaos_lightning.transport.frames import ATTEMPTS, HEADER_NBYTES, Frame, FrameType, pack, payload_checksum, unpack
from chaos_lightning.transport.handshake import Greeting, accept, dial
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.sealing import SEGMENT_NBYTES, TAG_NBYTES, Level, ProtectedSocket, SealedSession, mixed
from lab.fuzz import mutate
from lab.fuzz.messages import each, field_of, other, said
from lab.fuzz.target import LARGE_NBYTES, PATIENCE_S, FindingError, Target

# ------------------------------------------------------------------ links


class _End:
    """One end of a link, with an owner that receives frames as a member does."""

    def __init__(self, loop: IoLoop, sock: socket.socket, peer: str) -> None:
        self.over = threading.Event()
        self.got = threading.Event()
        self.delivered: list[bytes] = []
        """Payloads that came by value."""
        self.link = Link(loop, sock, peer, self)

    def target(self, peer: str, frame: Frame) -> memoryview | None:
        if frame.type in ATTEMPTS and frame.length > 1 << 20:
            return None  # as a member does with a chunk that it does not expect
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: str, frame: Frame, payload: Any) -> None:
        if isinstance(payload, memoryview) and not frame.pieces:
            self.delivered.append(bytes(payload))
        if isinstance(payload, memoryview) and frame.type == FrameType.MESSAGE:
            PEER.decode(payload)
        elif isinstance(payload, memoryview) and frame.type == FrameType.ROUTED:
            unpacked(payload)
        self.got.set()

    def broken(self, peer: str, link: Link, evidence: str) -> None:
        self.over.set()


class _Links:
    """Event loop with a link between two well-behaved ends, which must go on working."""

    def __init__(self) -> None:
        self.crashes: list[BaseException] = []
        self.loop = IoLoop("fuzz", self.crashes.append)
        self.loop.start()
        one, other = socket.socketpair()
        made: list[_End] = []
        self.do(lambda: made.extend((_End(self.loop, one, "well"), _End(self.loop, other, "too"))))
        self.well, self.too = made

    def do(self, function: Any) -> None:
        if not self.loop.call_and_wait(function, PATIENCE_S) or self.crashes:
            raise FindingError(f"the loop of all links has ended: {self.crashes}")

    def check(self) -> None:
        self.too.got.clear()
        self.too.delivered.clear()
        routed = memoryview(RoutedMessage("a~1", "b~2", 1, b"x").packed())
        self.do(lambda: self.well.link.send(FrameType.ROUTED, payload=(routed,)))
        if not self.too.got.wait(PATIENCE_S):
            raise FindingError("another link of the same member does not work any more")


@functools.cache
def _links() -> _Links:
    return _Links()


def _read_link(ours: socket.socket, theirs: socket.socket, said: bytes) -> list[bytes]:
    """Returns the payloads that a link delivers when its other end sends `said` and closes."""
    links = _links()
    made: list[_End] = []
    with theirs:
        links.do(lambda: made.append(_End(links.loop, ours, "x")))
        theirs.settimeout(PATIENCE_S)
        with contextlib.suppress(OSError):
            theirs.sendall(said)
            theirs.shutdown(socket.SHUT_WR)
        if not made[0].over.wait(PATIENCE_S):
            raise FindingError("a link whose other end has closed is still open")
    links.check()
    return made[0].delivered


def _feed_link(data: bytes) -> None:
    _read_link(*socket.socketpair(), data)


def _frames(data: bytes) -> list[tuple[Frame, bytes]]:
    """Returns the frames at the beginning of the data, with their payloads."""
    found: list[tuple[Frame, bytes]] = []
    at = 0
    while len(data) - at >= HEADER_NBYTES and len(found) < mutate.MAX_ITEMS:
        try:
            frame = unpack(bytearray(data[at : at + HEADER_NBYTES]))
        except WireError:
            break
        at += HEADER_NBYTES
        length = frame.pieces * 16 if frame.pieces else frame.length
        found.append((frame, data[at : at + length]))
        at += length
    return found


def _packed(frame: Frame, payload: bytes) -> bytes:
    checksum = payload_checksum((memoryview(payload),)) if payload and frame.summed else frame.checksum
    head = pack(
        frame.type,
        frame.view,
        frame.seq,
        frame.start,
        frame.length,
        checksum,
        summed=frame.summed,
        pieces=frame.pieces,
    )
    return head + payload


_LENGTHS = (0, 1, 1 << 20, 64 << 20, (64 << 20) + 1, (1 << 32) - 1)
_VIEWS = [ViewId(term, number) for term in (0, 1, (1 << 32) - 1) for number in (0, 1, (1 << 32) - 1)]


def _payload(kind: FrameType, rng: Random) -> bytes:
    if kind == FrameType.MESSAGE:
        return said(PEER, rng)
    if kind == FrameType.ROUTED:
        ends = [(rng.choice(mutate.IDS), rng.choice(mutate.IDS)) for _ in range(rng.choice((1, 1, 3)))]
        return b"".join(RoutedMessage(*pair, rng.randint(0, 9), b"payload").packed() for pair in ends)
    return bytes(rng.randint(0, 255) for _ in range(rng.choice((0, 0, 1, 16, 100))))


def _frame(kind: FrameType, payload: bytes, rng: Random) -> bytes:
    frame = Frame(kind, ViewId(1, rng.randint(0, 3)), rng.randint(0, 5), rng.randint(0, 64), len(payload), 0)
    return _packed(frame, payload)


def _link_seeds() -> list[bytes]:
    """Returns some frames of each type, and one frame for each message between members."""
    rng = Random(4)
    payloads = [(kind, _payload(kind, rng)) for kind in FrameType for _ in range(3)]
    payloads += [(FrameType.MESSAGE, message) for message in each(PEER, rng)]
    return [_frame(kind, payload, rng) for kind, payload in payloads]


def _mutate_frames(data: bytes, rng: Random) -> bytes:
    frames = _frames(data)
    if not frames or rng.randint(0, 9) == 0:
        return mutate.bytes_of(data, rng)
    at = rng.randint(0, len(frames) - 1)
    frame, payload = frames[at]
    what = rng.randint(0, 8)
    if what < 5:
        frame = field_of(frame, rng, length=(*_LENGTHS, len(payload) + 1), view=_VIEWS)
    elif what == 5:
        frame.pieces, frame.type = rng.choice((1, 2, 4096)), rng.choice((FrameType.UP, FrameType.DOWN))
        payload = bytes(rng.choice((0, 8, 255)) for _ in range(min(256, 16 * frame.pieces)))
    elif what < 8:
        message = what == 6 and frame.type == FrameType.MESSAGE
        payload = other(PEER, payload, rng) if message else mutate.bytes_of(payload, rng)
        frame.length = len(payload)
    else:
        kind = rng.choice(list(FrameType))
        return data + _frame(kind, _payload(kind, rng), rng)
    with contextlib.suppress(struct.error):
        return b"".join(_packed(f, p) for f, p in [*frames[:at], (frame, payload), *frames[at + 1 :]])
    return data


# ------------------------------------------------------------------ handshakes

_KEY = ("key 1", b"of this very pair")


class _Keys:
    """Key lookup of a pair of members that share one key, with the interface of control/link_keys.py."""

    def level(self, *, local: bool) -> Level:
        return Level.CHECKSUM

    def known(self, peer: str) -> Sequence[tuple[str, bytes]]:
        return (_KEY,)

    def find(self, peer: str, names: Sequence[str]) -> tuple[str, bytes] | None:
        return _KEY if _KEY[0] in names else None


def _received(sock: socket.socket) -> bytes:
    (length,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
    return sock.recv(length, socket.MSG_WAITALL)


def _proofs(role: bytes, *parts: bytes) -> dict[str, str]:
    """Returns a handshake's proofs by key name: without a key (""), and with the pair's key."""
    proofs = {}
    for name, key in (("", b""), _KEY):
        mac = hmac.new(mixed(b"", key), role, hashlib.sha256)
        for part in parts:
            mac.update(struct.pack("<I", len(part)) + part)
        proofs[name] = mac.hexdigest()
    return proofs


def _answer(sock: socket.socket, data: bytes, *, dialled: bool) -> None:
    """Plays the hostile end of a handshake; an input that begins with P gets valid proofs, as from a peer that has
    token and key.
    """
    with contextlib.suppress(OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError):
        if data[:1] == b"P" and dialled:
            proofs = _proofs(b"dial", _received(sock), data[1:])
            said = {"hello": data[1:].decode("utf-8", "replace"), "proofs": {k: [v] for k, v in proofs.items()}}
            data = _lengthy(said)
        elif data[:1] == b"P":
            opening = {"nonce": "00", "version": VERSION}
            sock.sendall(_lengthy(opening))
            hello_said = str(json.loads(_received(sock))["hello"]).encode()
            fields = json.loads(data[1:])
            proof = _proofs(b"accept", json.dumps(opening).encode(), hello_said).get(fields.get("key"), "")
            data = _lengthy({"proof": proof} | fields)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


def shaken(data: bytes) -> str:
    """Makes a handshake with a hostile peer; returns the refusal that the peer is told, or "" if it is let in.

    The first byte says which end it is (1: the listening one), and whether this pair has a key (2).
    """
    first, said = data[0] if data else 0, data[1:]
    listens, keys = bool(first & 1), _Keys() if first & 2 else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        port = listener.getsockname()[1]

        def hostile() -> None:
            with contextlib.suppress(OSError):
                if listens:
                    sock, _ = listener.accept()
                else:
                    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
                with sock:
                    sock.settimeout(PATIENCE_S)
                    _answer(sock, said, dialled=not listens)

        other = threading.Thread(target=hostile, daemon=True)
        other.start()
        try:
            if listens:
                greeting = Greeting("job", "a~1", "b~2", "link")
                dial("127.0.0.1", port, greeting, deadline_s=PATIENCE_S, keys=keys).close()
            else:
                sock, _ = listener.accept()
                with sock:
                    accept(sock, job="job", me="b~2", deadline_s=PATIENCE_S, keys=keys)
        except (RefusedError, WireError, OSError) as error:
            return str(error) or type(error).__name__
        finally:
            other.join(PATIENCE_S)
    return ""


def _feed_handshake(data: bytes) -> None:
    """Makes a handshake with a hostile peer; any exception other than a refusal is a finding."""
    shaken(data)


def _lengthy(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    return struct.pack("<I", len(body)) + body


def welcome_handshakes() -> list[bytes]:
    """Returns inputs that must be let in, for the dialling and the listening end, with a key and without."""
    found = []
    for flag, key in ((0, ""), (2, _KEY[0])):
        for level in Level if key else (Level.CHECKSUM,):
            said = {"job": "job", "me": "a~1", "peer": "b~2", "purpose": "link", "version": VERSION, "nonce": "00"}
            said |= {"level": str(level), "keys": [key]}
            found.append(bytes([flag]) + b"P" + json.dumps(said).encode())
        found.append(bytes([flag | 1]) + b"P" + json.dumps({"ok": True, "key": key}).encode())
    return found


def _handshake_seeds() -> list[bytes]:
    """Returns valid handshakes, and some whose proofs are wrong."""
    said = welcome_handshakes()[0][2:].decode()
    opening = _lengthy({"nonce": "00", "version": VERSION})
    return [
        *welcome_handshakes(),
        b"\0" + _lengthy({"hello": said, "proofs": {"": ["00"]}}),
        b"\1" + opening + _lengthy({"ok": True, "key": "", "proof": "00"}),
        b"\1" + opening + _lengthy({"ok": False, "reason": "no"}),
    ]


def _mutate_handshake(data: bytes, rng: Random) -> bytes:
    """Returns a changed, nearly valid handshake."""
    if data[1:2] == b"P" and rng.randint(0, 5):
        return data[:2] + mutate.json_of(data[2:], rng)
    parts, at = [], 1
    while at + 4 <= len(data):
        (length,) = struct.unpack("<I", data[at : at + 4])
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if not parts or rng.randint(0, 4) == 0:
        return data[:1] + mutate.bytes_of(data[1:], rng)
    which = rng.randint(0, len(parts) - 1)
    parts[which] = mutate.json_of(parts[which], rng)
    return data[:1] + b"".join(struct.pack("<I", len(p)) + p for p in parts)


# ------------------------------------------------------------------ sealed records

ENCRYPTED, STREAM = 1, 2
_MOST_SEALED_NBYTES = 1 << 20
_LENGTH_NBYTES = 4


class Fate(enum.IntEnum):
    """Fate of a sealed record on its way: it arrives unharmed, or is tampered with in one of several ways."""

    WELL = 0
    FLIPPED = 1
    """One bit of the record is flipped; the rest of the part's number says which."""
    TWICE = 2
    LEFT_OUT = 3
    SWAPPED = 4
    """The record is swapped with the next one."""
    CUT_SHORT = 5
    BEHIND_NOISE = 6
    TAG_OF_NONE = 7
    """The record's tag is replaced by zeros."""
    LENGTH_CHANGED = 8
    """The length before a stream's record is changed."""
    PLAIN = 9
    """The record is not sealed at all."""


def a_session(level: Level, *, dialled: bool) -> SealedSession:
    """Returns one end of a sealed connection with a fixed key."""
    return SealedSession(level, b"a secret of this fuzzer", b"a transcript", dialled=dialled)


def fate_of(tag: int) -> Fate:
    return Fate(tag % len(Fate))


def _records(level: Level, sealed: list[tuple[int, bytes]], *, stream: bool) -> list[tuple[Fate, int, bytes, bytes]]:
    """Returns each sealed record as (fate, position to tamper with, sealed bytes, plain bytes)."""
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
    """Tampers with sealed records; returns the bytes that arrive, and the plain bytes that the receiver may accept."""
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
    """Returns the plain bytes that a bulk connection accepts of the arriving ones, before an error or the end."""
    ours, theirs = socket.socketpair()
    session, got = a_session(level, dialled=False), bytearray()

    def speak() -> None:
        with theirs, contextlib.suppress(OSError):
            theirs.settimeout(PATIENCE_S)
            theirs.sendall(arrives)
            theirs.shutdown(socket.SHUT_WR)
            theirs.recv(1)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    sizes, turn = (1, 60, 4096, SEGMENT_NBYTES), 0
    with ours:
        ours.settimeout(PATIENCE_S)
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
    speaker.join(PATIENCE_S)
    return bytes(got)


def _feed_sealed(data: bytes) -> None:
    mode, sealed = data[0] if data else 0, mutate.split(data[1:])
    level = Level.ENCRYPTED if mode & ENCRYPTED else Level.AUTHENTICATED
    arrives, believed = travelled(level, sealed, stream=bool(mode & STREAM))
    if mode & STREAM:
        got = read_stream(level, arrives)
        if got != believed[: len(got)]:
            raise FindingError(f"a stream believed {len(got)} bytes, of which some were not sealed in this place")
        return
    ours, theirs = socket.socketpair()
    delivered = _read_link(ProtectedSocket.around(ours, a_session(level, dialled=False)), theirs, arrives)
    at = 0
    for payload in delivered:
        found = believed.find(payload, at)
        if found < 0:
            raise FindingError(f"a link delivered {len(payload)} bytes that were not sealed in this place")
        at = found + len(payload)


def _sealed_seeds() -> list[bytes]:
    """Returns inputs with each kind of tampering at each protection level, for a link and for a bulk connection."""
    frames = _link_seeds()
    seeds = []
    for mode in range(4):
        for fate in Fate:
            tags = (Fate.WELL, fate, Fate.WELL, Fate.WELL)
            picked = [frames[(mode + 3 * n + fate) % len(frames)] for n in range(len(tags))]
            seeds.append(bytes([mode]) + mutate.joined(list(zip(tags, picked, strict=True))))
        seeds.append(bytes([mode]) + mutate.joined([(Fate.WELL, frame) for frame in frames]))
    return seeds


def _mutate_sealed(data: bytes, rng: Random) -> bytes:
    mode = data[:1] or b"\0"
    if rng.randint(0, 9) == 0:
        mode = bytes([rng.randint(0, 3)])
    tags: list[Any] = [Fate.WELL] * 5 + [fate + len(Fate) * rng.randint(0, 15) for fate in Fate]
    return mode + mutate.parts_of(data[1:], rng, lambda tag, part, r: _mutate_frames(part, r), tags)


LINKS = (
    Target("frames", "frames, by a live link", _link_seeds, _feed_link, _mutate_frames, LARGE_NBYTES),
    Target("handshake", "the handshake of a link, by either end", _handshake_seeds, _feed_handshake, _mutate_handshake),
    Target(
        "sealed",
        "sealed records, by a live link and as a bulk connection reads them",
        _sealed_seeds,
        _feed_sealed,
        _mutate_sealed,
        LARGE_NBYTES,
    ),
)
