"""Tests the order in which a link sends chunks of several trees, and how few bytes it leaves in the kernel's buffer."""

from __future__ import annotations

import socket
import threading

from chaos_lightning.protocol.types import NO_VIEW, ViewId
from chaos_lightning.transport.frames import Frame, FrameType
from chaos_lightning.transport.holding import AT_FIRST_NBYTES, LEAST_NBYTES, MOST_NBYTES, Holding
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.loop import IoLoop

DEADLINE_S = 20.0
OLD, VIEW = ViewId(1, 1), ViewId(1, 2)
UP, DOWN, MESSAGE = FrameType.UP, FrameType.DOWN, FrameType.MESSAGE
FORWARD, BACKWARD = FrameType.FORWARD, FrameType.BACKWARD
BLOCKER = memoryview(bytes(32 << 20))
"""More than the kernel takes at once: what follows waits in the link's queue."""


class End:
    def __init__(self, loop: IoLoop, sock: socket.socket, count: int) -> None:
        self.count = count
        self.frames: list[tuple[FrameType, int]] = []
        self.all = threading.Event()
        self.link = Link(loop, sock, "peer", self)

    def target(self, peer: str, frame: Frame) -> memoryview:
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: str, frame: Frame, payload: object) -> None:
        self.frames.append((frame.type, frame.start))
        if len(self.frames) == self.count:
            self.all.set()

    def broken(self, peer: str, link: Link, evidence: str) -> None:
        self.all.set()


Sent = list[tuple[FrameType, ViewId, int, int]]


def order_of(sent: Sent) -> list[tuple[FrameType, int]]:
    """Returns the order in which frames arrive that are sent while another frame is half sent."""
    crashes: list[BaseException] = []
    loop = IoLoop("pair", crashes.append)
    one, other = socket.socketpair()
    here, there = End(loop, one, -1), End(loop, other, len(sent) + 1)

    def send() -> None:
        here.link.send(UP, VIEW, 1, 500, (BLOCKER,))
        for kind, view, seq, start in sent:
            here.link.send(kind, view, seq, start, (memoryview(bytes(100)),))

    loop.call(send)
    loop.start()
    try:
        assert there.all.wait(DEADLINE_S)
    finally:
        loop.call(here.link.close)
        loop.call(there.link.close)
        loop.stop()
    assert not crashes
    return there.frames[1:]


def test_a_result_passes_partial_sums_that_are_due_later() -> None:
    sent = [(UP, VIEW, 1, s) for s in (600, 700, 800)] + [(DOWN, VIEW, 1, s) for s in (400, 650, 900)]
    assert order_of(sent) == [(DOWN, 400), (UP, 600), (DOWN, 650), (UP, 700), (UP, 800), (DOWN, 900)]


def test_nothing_passes_a_message_nor_does_a_message_pass() -> None:
    sent = [(UP, VIEW, 1, 700), (MESSAGE, NO_VIEW, 0, 0), (UP, VIEW, 1, 800), (DOWN, VIEW, 1, 600)]
    assert order_of(sent) == [(UP, 700), (MESSAGE, 0), (DOWN, 600), (UP, 800)]


def test_slots_and_views_stay_in_order() -> None:
    sent = [(UP, OLD, 9, 700), (DOWN, VIEW, 1, 600), (UP, VIEW, 1, 800), (UP, VIEW, 2, 100), (DOWN, VIEW, 1, 700)]
    assert order_of(sent) == [(UP, 700), (DOWN, 600), (DOWN, 700), (UP, 800), (UP, 100)]


def test_a_border_passes_chunks_and_no_border_and_no_message() -> None:
    sent = [
        (UP, VIEW, 1, 700),
        (FORWARD, VIEW, 1, 9),
        (BACKWARD, VIEW, 1, 3),
        (DOWN, VIEW, 1, 600),
        (FORWARD, VIEW, 2, 1),
    ]
    assert order_of(sent) == [(FORWARD, 9), (BACKWARD, 3), (FORWARD, 1), (DOWN, 600), (UP, 700)]
    sent = [
        (UP, VIEW, 1, 700),
        (MESSAGE, NO_VIEW, 0, 0),
        (UP, VIEW, 1, 800),
        (FORWARD, VIEW, 1, 9),
        (FORWARD, VIEW, 1, 9),
    ]
    assert order_of(sent) == [(UP, 700), (MESSAGE, 0), (FORWARD, 9), (FORWARD, 9), (UP, 800)]


# --- how much the kernel may hold --------------------------------------------------------------------------------


def keep_busy(holding: Holding, rate_bps: float, late_s: float, wakes: int = 500) -> int:
    """Simulates a link of this rate that always has work, but whose process wakes this late; returns how often it ran
    idle.
    """
    idle = 0
    for _ in range(wakes):
        left = max(0, int(holding.limit_nbytes / 2 - rate_bps / 8 * late_s))
        idle += left == 0 < holding.limit_nbytes
        holding.woken(left)
    return idle


def test_a_slow_link_gets_little() -> None:
    holding = Holding(AT_FIRST_NBYTES)
    assert keep_busy(holding, 100e6, 0.0002) == 0
    assert holding.limit_nbytes == LEAST_NBYTES


def test_a_link_is_given_what_it_sends_before_the_process_comes() -> None:
    """The limit settles at about the bytes that the link sends while the process is late, so that it runs idle only now
    and then.
    """
    holding = Holding(AT_FIRST_NBYTES)
    assert keep_busy(holding, 1e9, 0.005) < 50
    assert 2 * 1e9 / 8 * 0.005 < holding.limit_nbytes < MOST_NBYTES


def test_a_fast_link_has_no_limit_in_the_end() -> None:
    holding = Holding(AT_FIRST_NBYTES)
    assert keep_busy(holding, 20e9, 0.002, wakes=10) <= 5
    assert holding.limit_nbytes == 0


def test_a_paced_link_begins_with_what_its_rate_says() -> None:
    holding = Holding(0)
    assert not holding.woken(0)
    holding.told(200e6)
    assert holding.limit_nbytes == 250_000
    holding.told(1e6)
    assert holding.limit_nbytes == LEAST_NBYTES
    for rate in (100e9, None):
        holding.told(rate)
        assert holding.limit_nbytes == 0
