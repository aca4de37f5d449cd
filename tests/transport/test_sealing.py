"""Tests sealed records: each opens as it was sent and only in its place in the order."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError, WireError
from chaos_lightning.transport import sealing
from chaos_lightning.transport.sealing import (
    SEGMENT_NBYTES,
    TAG_NBYTES,
    Level,
    Opener,
    ProtectedSocket,
    SealedSession,
    Sealer,
    mixed,
    segment_nbytes,
    session_of,
)

PROTECTED = (Level.AUTHENTICATED, Level.ENCRYPTED)
KEY = bytes(range(32))
levels = pytest.mark.parametrize("level", PROTECTED)


def ends(level: Level, secret: bytes = b"secret", transcript: bytes = b"said") -> tuple[SealedSession, SealedSession]:
    """Returns the dialler's session and the accepter's, for one connection."""
    return SealedSession(level, secret, transcript, dialled=True), SealedSession(
        level, secret, transcript, dialled=False
    )


def wire(sealer: Sealer, parts: list[bytes], *, header: bool = True) -> list[bytes]:
    """Returns the sealed records of a frame."""
    left, records, begins = [memoryview(part) for part in parts], [], header
    while left:
        sealed = sealer.frame(left, begins=begins)
        records.append(b"".join(bytes(part) for part in sealed))
        begins = False
    return records


def open_one(opener: Opener, record: bytes, nbytes: int) -> bytes:
    """Feeds one record's bytes to an opener in two parts; returns the opened bytes."""
    into = memoryview(bytearray(nbytes))
    opener.expect(into, nbytes)
    for part in (record[:7], record[7:]):
        whole = False
        while part:
            rooms, at = opener.room(), 0
            for room in rooms:
                taken = min(room.nbytes, len(part) - at)
                room[:taken] = part[at : at + taken]
                at += taken
            whole = opener.took(at)
            part = part[at:]
    assert whole
    return bytes(into)


@levels
@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5), st.integers(0, 2))
def test_what_was_sealed_opens(level: Level, pieces: list[bytes], big: int) -> None:
    """Payloads in pieces of any sizes, up to several segments, open as they were sealed."""
    one, other = ends(level)
    segment = segment_nbytes(level)
    payload = [*pieces, b"\xa5" * (big * segment)]
    header = b"h" * 44
    records = b"".join(wire(one.sealer, [header, *(piece for piece in payload if piece)]))
    assert open_one(other.opener, records[:60], 44) == header
    records, whole, opened = records[60:], b"".join(payload), b""
    while records:
        nbytes = min(segment, len(records) - TAG_NBYTES)
        opened += open_one(other.opener, records[: nbytes + TAG_NBYTES], nbytes)
        records = records[nbytes + TAG_NBYTES :]
    assert opened == whole


@levels
@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_bit_that_flips_is_noticed(level: Level, data: bytes, more: st.DataObject) -> None:
    one, other = ends(level)
    (record,) = wire(one.sealer, [data], header=False)
    bit = more.draw(st.integers(0, 8 * len(record) - 1))
    flipped = bytearray(record)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError, match="altered"):
        open_one(other.opener, bytes(flipped), len(data))


@levels
@settings(deadline=None, max_examples=80)
@given(st.lists(st.binary(min_size=9, max_size=9), min_size=2, max_size=6), st.data())
def test_only_the_order_in_which_records_were_sent_opens(level: Level, texts: list[bytes], more: st.DataObject) -> None:
    """Records that are replayed, reordered or left out do not open."""
    one, other = ends(level)
    records = [wire(one.sealer, [text], header=False)[0] for text in texts]
    order = more.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=8))
    for place, which in enumerate(order):
        if place == which:
            assert open_one(other.opener, records[which], 9) == texts[which]
        else:
            with pytest.raises(WireError, match=r"replayed, reordered or left out"):
                open_one(other.opener, records[which], 9)
            return


@levels
def test_a_record_of_one_length_does_not_open_as_one_of_another(level: Level) -> None:
    one, other = ends(level)
    (record,) = wire(one.sealer, [b"twenty bytes of text"], header=False)
    with pytest.raises(WireError, match="of 10 bytes"):
        open_one(other.opener, record[: 10 + TAG_NBYTES], 10)


@levels
def test_each_direction_and_each_connection_has_its_own_key(level: Level) -> None:
    one, other = ends(level)
    (record,) = wire(one.sealer, [b"to the other end"], header=False)
    for stranger in (
        one.opener,  # reflected
        ends(level, transcript=b"said another time")[1].opener,
        ends(level, secret=b"another secret")[1].opener,
        ends(Level.ENCRYPTED if level is Level.AUTHENTICATED else Level.AUTHENTICATED)[1].opener,
    ):
        with pytest.raises(WireError):
            open_one(stranger, record, 16)
    assert open_one(other.opener, record, 16) == b"to the other end"


def test_encrypted_payloads_do_not_show_and_authenticated_ones_do() -> None:
    text = b"weights of the model" * 100
    assert text in b"".join(wire(ends(Level.AUTHENTICATED)[0].sealer, [text], header=False))
    sealed = b"".join(wire(ends(Level.ENCRYPTED)[0].sealer, [text], header=False))
    assert not any(text[i : i + 8] in sealed for i in range(0, len(text), 8))


@levels
def test_a_key_is_not_used_for_ever(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "MAX_RECORDS", 2)
    one, _ = ends(level)
    assert len(wire(one.sealer, [b"one"], header=False) + wire(one.sealer, [b"two"], header=False)) == 2
    with pytest.raises(WireError, match="made anew"):
        wire(one.sealer, [b"three"], header=False)


class Reader:
    """Reader of frames, as a link reads them: headers of 44 bytes that begin with the payload's length, then payloads.

    Attributes:
        frames: Payloads that were read completely; None for those that were diverted.
        calls: Number of calls of `receive`.
    """

    def __init__(self, opener: Opener) -> None:
        self.opener = opener
        self.head = memoryview(bytearray(44))
        self.into: memoryview | None = None
        self.payload = False
        self.left = 0
        self.frames: list[bytes | None] = []
        self.calls = 0
        self.expect()

    def expect(self) -> None:
        if not self.payload:
            self.opener.expect(self.head, 44)
            return
        at = 0 if self.into is None else self.into.nbytes - self.left
        self.opener.expect(None if self.into is None else self.into[at:], self.left, ahead_nbytes=44)

    def receive(self, data: bytes) -> bytes:
        """Receives as many bytes as fit into the opener's buffers; returns the rest."""
        self.calls += 1
        at = 0
        for room in self.opener.room():
            taken = min(room.nbytes, len(data) - at)
            room[:taken] = data[at : at + taken]
            at += taken
        came = at
        while self.opener.took(came):
            if self.payload:
                self.left -= self.opener.nbytes
            else:
                self.left = int.from_bytes(self.head[:4], "little")
                self.into = memoryview(bytearray(self.left))
                self.payload = True
            if not self.left:
                self.frames.append(None if self.into is None else bytes(self.into))
                self.payload = False
            self.expect()
            came = 0
        return data[at:]

    def divert(self) -> None:
        if self.payload:
            self.opener.divert()
            self.into = None


def frame_of(sealer: Sealer, payload: bytes) -> bytes:
    return b"".join(wire(sealer, [len(payload).to_bytes(4, "little") + bytes(40), *([payload] if payload else [])]))


@levels
@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from([0, 1, 43, 44, 60, 200, 1000]), min_size=1, max_size=6),
    st.lists(st.integers(1, 150), min_size=1, max_size=8),
    st.sets(st.integers(0, 30), max_size=4),
)
def test_frames_open_however_the_network_cuts_them(
    level: Level, sizes: list[int], cuts: list[int], diverted: set[int]
) -> None:
    """Frames open however the stream is cut into received parts, even if a payload is diverted."""
    one, other = ends(level)
    payloads = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    stream = b"".join(frame_of(one.sealer, payload) for payload in payloads)
    reader, turn = Reader(other.opener), 0
    while stream:
        cut = cuts[turn % len(cuts)]
        stream = reader.receive(stream[:cut]) + stream[cut:]
        if turn in diverted:
            reader.divert()
        turn += 1
    assert len(reader.frames) == len(payloads)
    assert all(got in (None, sent) for got, sent in zip(reader.frames, payloads, strict=True))
    assert None not in reader.frames or diverted


@levels
def test_a_payload_and_the_next_header_take_one_call(level: Level) -> None:
    one, other = ends(level)
    reader = Reader(other.opener)
    stream = b"".join(frame_of(one.sealer, bytes([n]) * 5000) for n in range(10))
    while stream:
        stream = reader.receive(stream)
    assert reader.frames == [bytes([n]) * 5000 for n in range(10)]
    assert reader.calls == 11


@levels
def test_a_header_that_came_along_has_to_open_as_any_other(level: Level) -> None:
    """A damaged header that was received together with the payload before it is noticed; that payload is delivered."""
    for flipped in (5000 + 16, 5000 + 16 + 43, 5000 + 16 + 44, 5000 + 16 + 59):
        one, other = ends(level)
        reader = Reader(other.opener)
        stream = bytearray(frame_of(one.sealer, b"a" * 5000) + frame_of(one.sealer, b"b" * 5000))
        stream[60 + flipped] ^= 1
        rest = reader.receive(bytes(stream))
        with pytest.raises(WireError, match="record 2 of 44 bytes"):
            reader.receive(rest)
        assert reader.frames == [b"a" * 5000]
        assert not reader.payload


@levels
def test_a_record_that_is_diverted_still_has_to_open(level: Level) -> None:
    """A record is diverted halfway: nothing more is written to its first destination, and it still must open."""
    one, other = ends(level)
    records = [wire(one.sealer, [text], header=False)[0] for text in (b"a" * 64, b"b" * 64)]
    into = memoryview(bytearray(64))
    other.opener.expect(into, 64)
    other.opener.room()[0][:32] = records[0][:32]
    other.opener.took(32)
    before = bytes(into)
    other.opener.divert()
    rest = records[0][32:]
    while rest:
        room = other.opener.room()[0]
        taken = min(room.nbytes, len(rest))
        room[:taken] = rest[:taken]
        assert other.opener.took(taken) == (taken == len(rest))
        rest = rest[taken:]
    assert bytes(into) == before
    assert open_one(other.opener, records[1], 64) == b"b" * 64


def sockets(level: Level) -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    a, b = ends(level)
    return ProtectedSocket.around(one, a), ProtectedSocket.around(other, b)


@levels
@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5), st.lists(st.integers(1, 90), min_size=1))
def test_a_stream_comes_out_whatever_the_pieces_it_is_read_in(
    level: Level, sent: list[bytes], sizes: list[int]
) -> None:
    near, far = sockets(level)
    with near, far:
        mine, its = session_of(near), session_of(far)
        assert mine is not None
        assert its is not None
        for sealed in mine.stream.records([memoryview(part) for part in sent]):
            near.sendmsg(sealed)
        near.shutdown(socket.SHUT_WR)
        whole, got, turn = b"".join(sent), b"", 0
        while True:
            size = sizes[turn % len(sizes)]
            parts = [memoryview(bytearray(size)), memoryview(bytearray(2 * size))]
            count = its.stream.fill(lambda views: far.recvmsg_into(views)[0], parts)
            if not count:
                break
            got, turn = got + b"".join(bytes(part) for part in parts)[:count], turn + 1
        assert got == whole


@levels
def test_a_stream_that_is_cut_short_or_announces_too_much_is_refused(level: Level) -> None:
    for harm, words in (
        (lambda data: data[:-1], "ended within a record"),
        (lambda data: data[:2], "within the length"),
        (lambda data: (SEGMENT_NBYTES + 1).to_bytes(4, "little") + data[4:], "a record announces 262145 bytes"),
        (lambda data: (11).to_bytes(4, "little") + data[4:], "altered"),
        (lambda data: bytes(4) + data[4:], "announces 0 bytes"),
    ):
        near, far = sockets(level)
        with near, far:
            mine, its = session_of(near), session_of(far)
            assert mine is not None
            assert its is not None
            (sealed,) = mine.stream.records([memoryview(b"twelve bytes")])
            near.sendall(harm(b"".join(sealed)))
            near.shutdown(socket.SHUT_WR)
            with pytest.raises(WireError, match=words):
                its.stream.fill(lambda views, far=far: far.recvmsg_into(views)[0], [memoryview(bytearray(12))])


def test_a_protected_socket_keeps_its_session_when_it_is_duplicated() -> None:
    near, far = sockets(Level.ENCRYPTED)
    near.settimeout(3.5)
    twin = near.dup()
    with near, far, twin:
        assert session_of(twin) is session_of(near) is not None
        assert twin.gettimeout() == 3.5
    plain, other = socket.socketpair()
    with plain, other:
        assert ProtectedSocket.around(plain, None) is plain
        assert session_of(plain) is None


def test_both_directions_at_once_do_not_disturb_each_other() -> None:
    near, far = sockets(Level.ENCRYPTED)
    near.settimeout(20.0)
    far.settimeout(20.0)
    data = bytes(range(256)) * 4096
    came: dict[str, bytes] = {}

    def send(sock: socket.socket) -> None:
        session = session_of(sock)
        assert session is not None
        for sealed in session.stream.records([memoryview(data)]):
            while sealed:
                sent = sock.sendmsg(sealed)
                while sealed and sent >= sealed[0].nbytes:
                    sent -= sealed.pop(0).nbytes
                if sent:
                    sealed[0] = sealed[0][sent:]

    def take(name: str, sock: socket.socket) -> None:
        session = session_of(sock)
        assert session is not None
        whole = memoryview(bytearray(len(data)))
        at = 0
        while at < len(data):
            at += session.stream.fill(lambda views: sock.recvmsg_into(views)[0], [whole[at:]])
        came[name] = bytes(whole)

    with near, far:
        threads = [threading.Thread(target=send, args=(sock,)) for sock in (near, far)]
        threads += [threading.Thread(target=take, args=(n, s)) for n, s in (("near", near), ("far", far))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert came == {"near": data, "far": data}


def test_token_and_key_both_count() -> None:
    assert len({mixed(b"token", b"key"), mixed(b"token", b""), mixed(b"", b"key"), mixed(b"t", b"key")}) == 4


def test_without_the_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'cryptography>=48', or set links=checksum"):
        sealing.require_library()
