"""Tests the background frames that a link sends only when no other frames are queued."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from chaos_lightning.protocol.types import NO_VIEW, ViewId
from chaos_lightning.transport.frames import Frame, FrameType, pack
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.probe import Op
from chaos_lightning.transport.sealing import Level, ProtectedSocket, SealedSession

DEADLINE_S = 20.0
PIECE = memoryview(bytes(64 << 10))
VIEW = ViewId(1, 1)


class End:
    """One end of a link, which records the frames that arrive."""

    def __init__(self, loop: IoLoop, sock: socket.socket) -> None:
        self.frames: list[Frame] = []
        self.ended = threading.Event()
        self.evidence = ""
        self.link = Link(loop, sock, "peer", self)

    def target(self, peer: str, frame: Frame) -> memoryview:
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: str, frame: Frame, payload: object) -> None:
        self.frames.append(frame)
        if frame.type == FrameType.PROBE and frame.start == Op.END:
            self.ended.set()

    def broken(self, peer: str, link: Link, evidence: str) -> None:
        self.evidence = evidence
        self.ended.set()


class Pair:
    def __init__(self, level: str) -> None:
        self.crashes: list[BaseException] = []
        self.loop = IoLoop("pair", self.crashes.append)
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname())
            other, _ = server.accept()
        if level:
            one, other = (
                ProtectedSocket.around(sock, SealedSession(Level(level), b"key", b"said", dialled=sock is one))
                for sock in (one, other)
            )
        self.loop.start()
        ready = threading.Event()

        def attach() -> None:
            self.here, self.there = End(self.loop, one), End(self.loop, other)
            ready.set()

        self.loop.call(attach)
        assert ready.wait(DEADLINE_S)

    def close(self) -> None:
        self.loop.call(self.here.link.close)
        self.loop.call(self.there.link.close)
        self.loop.stop()
        assert not self.crashes


@pytest.fixture(params=["", "authenticated", "encrypted"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


def pieces(count: int) -> Iterator[list[memoryview]]:
    for _ in range(count):
        head = pack(FrameType.PROBE, NO_VIEW, 1, Op.FILL, PIECE.nbytes, 0, summed=False)
        yield [memoryview(head), PIECE]
    yield [memoryview(pack(FrameType.PROBE, NO_VIEW, 1, Op.END, 0, 0, summed=False))]


def test_a_background_is_sent_to_its_end(pair: Pair) -> None:
    source = pieces(300)
    pair.loop.call(lambda: pair.here.link.fill(lambda: next(source, None)))
    assert pair.there.ended.wait(DEADLINE_S)
    assert len(pair.there.frames) == 301
    assert pair.here.link.sent_nbytes > 300 * PIECE.nbytes


def test_a_chunk_goes_before_what_is_left_of_the_background(pair: Pair) -> None:
    """A chunk that is sent while background frames remain overtakes all of them but the few that the kernel has taken
    already.
    """
    source = pieces(500)  # 32 MiB: more than any buffer
    chunk = bytes(1000)

    def both() -> None:
        pair.there.link._read = lambda: None  # type: ignore[method-assign]  # it does not read yet
        pair.here.link.fill(lambda: next(source, None))
        pair.here.link.send(FrameType.UP, VIEW, 1, 0, (memoryview(chunk),))

    queued = threading.Event()
    pair.loop.call(both)
    pair.loop.call(queued.set)
    assert queued.wait(DEADLINE_S)
    pair.loop.call(lambda: delattr(pair.there.link, "_read"))
    pair.loop.call(lambda: pair.there.link._read())
    assert pair.there.ended.wait(DEADLINE_S)
    place = [frame.type for frame in pair.there.frames].index(FrameType.UP)
    assert place < 400
    assert len(pair.there.frames) == 502


def test_a_link_that_breaks_forgets_its_background(pair: Pair) -> None:
    source = pieces(10**9)
    pair.loop.call(lambda: pair.here.link.fill(lambda: next(source, None)))
    pair.loop.call(pair.there.link.close)
    assert pair.here.ended.wait(DEADLINE_S)
    assert pair.here.evidence.startswith("closed")


def test_only_the_job_disturbs_the_quiet(pair: Pair) -> None:
    def look() -> tuple[bool, int]:
        return pair.here.link.quiet(1e12, 1.0), pair.here.link.traffic

    seen: list[tuple[bool, int]] = []
    done = threading.Event()
    pair.loop.call(lambda: pair.here.link.send(FrameType.PING, NO_VIEW))
    pair.loop.call(lambda: seen.append((pair.here.link.traffic_at == 0.0, pair.here.link.traffic)))
    pair.loop.call(lambda: pair.here.link.send(FrameType.MESSAGE, payload=(memoryview(b"x"),)))
    pair.loop.call(lambda: seen.append((pair.here.link.quiet(pair.here.link.traffic_at, 0.5), pair.here.link.traffic)))
    pair.loop.call(done.set)
    assert done.wait(DEADLINE_S)
    assert seen == [(True, 0), (False, 1)]
    for _ in range(1000):  # until the bytes are acknowledged
        settled = threading.Event()
        pair.loop.call(lambda: seen.append(look()))
        pair.loop.call(settled.set)
        assert settled.wait(DEADLINE_S)
        if seen[-1] == (True, 1):
            break
    assert seen[-1] == (True, 1)


def test_nothing_is_sent_on_a_finished_link(pair: Pair) -> None:
    pair.loop.call(lambda: pair.here.link.send(FrameType.MESSAGE, payload=(memoryview(b"before"),)))
    pair.loop.call(lambda: pair.here.link.finish())
    pair.loop.call(lambda: pair.here.link.send(FrameType.MESSAGE, payload=(memoryview(b"after"),)))
    assert pair.there.ended.wait(DEADLINE_S)
    assert pair.there.evidence == "bye"
    assert [f.length for f in pair.there.frames] == [6]
