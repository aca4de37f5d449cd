"""Tests protected links and bulk connections: bytes arrive as they were sent, or the connection is cut."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable

import pytest

from chaos_lightning.errors import ChaosError
from chaos_lightning.protocol.types import ViewId
from chaos_lightning.replication import bulk
from chaos_lightning.replication.bulk import BulkSocket, Type
from chaos_lightning.replication.forward import Forwarder, send_route
from chaos_lightning.transport.frames import HEADER_NBYTES, Frame, FrameType
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.sealing import (
    CLEAR_SEGMENT_NBYTES,
    TAG_NBYTES,
    Level,
    ProtectedSocket,
    SealedSession,
    segment_nbytes,
)

DEADLINE_S = 20.0
VIEW = ViewId(1, 1)
HEAD = "0123456789abcdef"
levels = pytest.mark.parametrize("level", ["authenticated", "encrypted"])


def protect(sock: socket.socket, level: str, *, dialled: bool) -> socket.socket:
    return ProtectedSocket.around(sock, SealedSession(Level(level), b"key", b"said", dialled=dialled))


def sockets(level: str) -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    return protect(one, level, dialled=True), protect(other, level, dialled=False)


class End:
    """End of a link that records arriving frames; chunks are received into `memory`, other frames into new buffers."""

    def __init__(self, loop: IoLoop, sock: socket.socket) -> None:
        self.memory = memoryview(bytearray(4 * CLEAR_SEGMENT_NBYTES))
        self.frames: list[tuple[FrameType, int, bytes]] = []
        self.evidence: list[str] = []
        self.happened = threading.Condition()
        self.targets: list[int] = []
        self.link = Link(loop, sock, "peer", self)

    def target(self, peer: str, frame: Frame) -> memoryview | None:
        self.targets.append(frame.length)
        if frame.type in (FrameType.UP, FrameType.DOWN):
            return self.memory[frame.start : frame.start + frame.length]
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: str, frame: Frame, payload: object) -> None:
        assert isinstance(payload, memoryview)
        with self.happened:
            self.frames.append((frame.type, frame.start, bytes(payload)))
            self.happened.notify_all()

    def broken(self, peer: str, link: Link, evidence: str) -> None:
        with self.happened:
            self.evidence.append(evidence)
            self.happened.notify_all()

    def wait(self, ready: Callable[[], object]) -> None:
        with self.happened:
            assert self.happened.wait_for(ready, DEADLINE_S), (self.evidence, len(self.frames))


@levels
def test_frames_of_every_size_and_in_pieces_arrive(level: str) -> None:
    """Frames of all sizes, from empty to several segments, arrive on a protected link, even if their payloads have many
    pieces.
    """
    crashes: list[BaseException] = []
    loop = IoLoop("pair", crashes.append)
    loop.start()
    one, other = sockets(level)
    ends: list[End] = []
    loop.call_and_wait(lambda: ends.extend((End(loop, one), End(loop, other))), DEADLINE_S)
    here, there = ends
    draw = random.Random(1)
    segment = segment_nbytes(Level(level))
    sizes = [1, 43, 44, 60, segment - 1, segment, segment + 1, 3 * segment]
    payloads = []
    for nbytes in sizes:
        data, cuts = draw.randbytes(nbytes), sorted({draw.randrange(nbytes + 1) for _ in range(6)})
        payloads.append([memoryview(data)[a:b] for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True) if a < b])

    def send() -> None:
        for pieces in payloads:
            here.link.send(FrameType.MESSAGE, payload=pieces)
            here.link.send(FrameType.PING)
            there.link.send(FrameType.DOWN, VIEW, 1, 0, pieces)

    loop.call(send)
    try:
        there.wait(lambda: len(there.frames) == 2 * len(sizes))
        here.wait(lambda: len(here.frames) == len(sizes))
        sent = [b"".join(pieces) for pieces in payloads]
        assert [data for kind, _, data in there.frames if kind is FrameType.MESSAGE] == sent
        assert [data for _, _, data in here.frames] == sent
        assert not here.evidence + there.evidence
    finally:
        for end in ends:
            loop.call(end.link.close)
        loop.stop()
    assert not crashes


@pytest.mark.parametrize("level", ["checksum", "authenticated", "encrypted"])
@pytest.mark.parametrize("sent", [FrameType.UP, FrameType.FORWARD, FrameType.BACKWARD])
def test_what_is_half_on_the_wire_may_be_overwritten_once_it_is_purged(level: str, sent: FrameType) -> None:
    """A half-sent frame's memory is overwritten after a purge; the rest of the frame is sent from a copy, so that its
    tag or checksum still fits.
    """
    crashes: list[BaseException] = []
    loop = IoLoop("pair", crashes.append)
    loop.start()
    one, other = socket.socketpair() if level == "checksum" else sockets(level)
    ends: list[End] = []
    memory = bytearray(random.Random(4).randbytes(4 * segment_nbytes(Level(level))))
    before = bytes(memory)

    queued: list[int] = []

    def send_half() -> None:
        here = End(loop, one)
        ends.append(here)
        here.link.sums = level == "checksum"  # as between machines
        here.link.send(sent, VIEW, 1, 0, (memoryview(memory),))
        here.link.send(sent, VIEW, 2, 0, (memoryview(memory),))
        queued.append(here.link.queued_nbytes)
        here.link.purge(VIEW)
        queued.append(here.link.queued_nbytes)
        memory[:] = bytes(len(memory))  # the slot is done again
        here.link.send(FrameType.MESSAGE, payload=(memoryview(b"the next one"),))
        ends.append(End(loop, other))

    try:
        assert loop.call_and_wait(send_half, DEADLINE_S)
        assert queued[0] > len(memory) > queued[1] > 0, "one is half on the wire, the other one forgotten"
        there = ends[1]
        there.wait(lambda: there.evidence or len(there.frames) == 2)
        assert not there.evidence
        assert [kind for kind, _, _ in there.frames] == [sent, FrameType.MESSAGE]
        assert there.frames[0][2] == before
        assert there.frames[1][2] == b"the next one"
    finally:
        for end in ends:
            loop.call(end.link.close)
        loop.stop()
    assert not crashes


def altered(stream: bytes, how: str, segment: int) -> bytes:
    """Returns the bytes of a stream of frames after one kind of damage (`how`): bits flipped, or records replayed,
    swapped or left out.
    """
    header = HEADER_NBYTES + TAG_NBYTES
    middle = header + segment + TAG_NBYTES
    if how == "header":
        return bytes([stream[0] ^ 1]) + stream[1:]
    if how == "length":
        return stream[:32] + bytes([stream[32] ^ 0x40]) + stream[33:]
    if how == "payload":
        return stream[: middle - 100] + bytes([stream[middle - 100] ^ 0x80]) + stream[middle - 99 :]
    if how == "tag":
        return stream[: middle - 1] + bytes([stream[middle - 1] ^ 1]) + stream[middle:]
    if how == "replay":
        return stream[:header] * 2 + stream[header:]
    if how == "segments":
        return stream[:header] + stream[middle : middle + segment + TAG_NBYTES] + stream[header:middle]
    assert how == "left out"
    return stream[:header] + stream[middle:]


@levels
@pytest.mark.parametrize("how", ["header", "length", "payload", "tag", "replay", "segments", "left out"])
def test_harm_is_found_before_anything_is_believed(level: str, how: str) -> None:
    """Damage to a protected stream cuts the link; nothing of the damaged frame arrives, and no memory is allocated for
    an altered length.
    """
    segment = segment_nbytes(Level(level))
    crashes: list[BaseException] = []
    loop = IoLoop("pair", crashes.append)
    loop.start()
    one, wire = socket.socketpair()
    there_sock, far = socket.socketpair()
    ends: list[End] = []

    def attach() -> None:
        ends.append(End(loop, protect(one, level, dialled=True)))
        ends.append(End(loop, protect(there_sock, level, dialled=False)))
        ends[0].link.send(FrameType.UP, VIEW, 1, 0, (memoryview(bytes(range(256)) * (segment // 128)),))
        ends[0].link.send(FrameType.MESSAGE, payload=(memoryview(b"the next one"),))

    loop.call_and_wait(attach, DEADLINE_S)
    wanted = 2 * (HEADER_NBYTES + TAG_NBYTES) + 2 * (segment + TAG_NBYTES) + 12 + TAG_NBYTES
    wire.settimeout(DEADLINE_S)
    stream = b""
    while len(stream) < wanted:
        stream += wire.recv(wanted - len(stream))
    there = ends[1]

    def pass_on() -> None:
        with contextlib.suppress(OSError):  # the link is cut before all of it is sent
            far.sendall(altered(stream, how, segment) + bytes(segment))

    passing = threading.Thread(target=pass_on)
    passing.start()
    try:
        there.wait(lambda: there.evidence)
        assert there.evidence[0].startswith("damaged (record ")
        assert "altered, replayed, reordered or left out" in there.evidence[0]
        assert there.frames == []
        assert set(there.targets) <= {2 * segment}
    finally:
        for end in ends:
            loop.call(end.link.close)
        loop.stop()
        passing.join(DEADLINE_S)
        for sock in (wire, far):
            sock.close()
    assert not crashes


# ------------------------------------------------------------------------------------------------ bulk


@levels
def test_requests_and_replies_pass_a_bulk_connection(level: str) -> None:
    """Replies on a protected bulk connection fill buffers of any sizes, and progress is reported as bytes come."""
    near, far = sockets(level)
    data = random.Random(2).randbytes(700_000)
    with near, far:
        joiner, donor = BulkSocket(near, stall_timeout_s=5), BulkSocket(far, stall_timeout_s=5)
        joiner.send(bulk.BulkFrame(Type.GET_STATE, HEAD, 3, 0, len(data)))
        request = donor.receive_header()
        assert request is not None
        assert request.length == len(data)
        frame = bulk.BulkFrame(Type.DATA, HEAD, 3, 0, len(data), 0, bulk.checksum_of([data]))
        parts = [memoryview(data)[:300_000], memoryview(data)[300_000:300_010], memoryview(data)[300_010:]]
        sender = threading.Thread(target=lambda: donor.send(frame, parts))
        sender.start()
        reply = joiner.receive_header()
        buffers = [memoryview(bytearray(n)) for n in (10, 5, 299_985, 400_000)]
        told: list[int] = []
        joiner.receive_into(buffers, told.append)
        sender.join(DEADLINE_S)
        assert reply == frame
        assert b"".join(bytes(b) for b in buffers) == data
        assert sum(told) == len(data)
        donor.send(*bulk.reply(Type.MANIFEST, HEAD, 3, b"words"))
        reply = joiner.receive_header()
        assert reply is not None
        assert joiner.receive_payload(reply) == b"words"
        donor.sock.shutdown(socket.SHUT_WR)
        assert joiner.receive_header() is None


@levels
def test_a_relay_seals_each_hop_anew(level: str) -> None:
    """A relay opens the records of one hop and seals them with the other hop's key; the joiner gets the donor's
    bytes.
    """
    near, at_relay = sockets(level)
    onwards, far = sockets(level)
    data = random.Random(3).randbytes(600_001)

    def donate() -> None:
        donor = BulkSocket(far, stall_timeout_s=5)
        request = donor.receive_header()
        assert request is not None
        frame = bulk.BulkFrame(Type.DATA, HEAD, 3, 0, len(data), 0, bulk.checksum_of([data]))
        donor.send(frame, [memoryview(data)])

    def relay() -> None:
        channel = BulkSocket(at_relay, stall_timeout_s=5)
        request = channel.receive_header()
        assert request is not None
        ended.append(Forwarder("r", lambda _: onwards, stall_timeout_s=5).relay(channel, request))

    ended: list[str] = []
    threads = [threading.Thread(target=work) for work in (donate, relay)]
    with near, at_relay, onwards, far:
        for thread in threads:
            thread.start()
        joiner = BulkSocket(near, stall_timeout_s=5)
        send_route(joiner, HEAD, 3, ["d"])
        joiner.send(bulk.BulkFrame(Type.GET_STATE, HEAD, 3, 0, len(data)))
        reply = joiner.receive_header()
        assert reply is not None
        into = memoryview(bytearray(len(data)))
        joiner.receive_into([into])
        near.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(DEADLINE_S)
    assert bytes(into) == data
    assert ended == ["the relay to d ended"]


@levels
@pytest.mark.parametrize("where", [0, 3, 10, 60, 75, 1000])
def test_a_bulk_connection_on_which_a_bit_flipped_is_given_up(level: str, where: int) -> None:
    """A flipped bit in a length, header or payload ends a protected bulk connection with an error or a timeout."""
    one, wire = socket.socketpair()
    far, near = socket.socketpair()
    donor = BulkSocket(protect(one, level, dialled=True), stall_timeout_s=5)
    joiner = BulkSocket(protect(near, level, dialled=False), stall_timeout_s=1)
    with wire, far, donor.sock, joiner.sock:
        donor.send(*bulk.reply(Type.MANIFEST, HEAD, 3, bytes(2000)))
        stream = bytearray(wire.recv(1 << 20))
        stream[where] ^= 1
        far.sendall(stream)

        def take() -> None:
            frame = joiner.receive_header()
            assert frame is not None
            joiner.receive_payload(frame)

        with pytest.raises((ChaosError, TimeoutError)):
            take()
