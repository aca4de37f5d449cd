"""Tests the exchange of border tensors over links: attempts, waiting, refused frames, and real bytes between
members.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from border_nodes import BorderNode

from chaos_lightning.errors import AttemptOverError, DeadlineError, FencedError, WireError
from chaos_lightning.pipeline.borders import BorderExchange
from chaos_lightning.pipeline.executor import SlotAttempt
from chaos_lightning.pipeline.tensors import Border, write
from chaos_lightning.planning.pipelines.units import BACKWARD, FORWARD, BorderKey, StepUnit
from chaos_lightning.protocol.types import ViewId
from chaos_lightning.transport.frames import Frame, FrameType

OLD, NOW, NEXT, LATER = (SlotAttempt(ViewId(1, v), s) for v, s in ((1, 5), (2, 5), (2, 6), (3, 6)))
TAKES = [StepUnit(FORWARD, j, 1, 2, "a~1", "") for j in range(3)] + [StepUnit(BACKWARD, 0, 1, 2, "c~3", "a~1")]
KEY, BACK = BorderKey(FORWARD, 1, 1), BorderKey(BACKWARD, 0, 2)


class Sent:
    """Border exchange that records the frames it sends."""

    def __init__(self, limit_nbytes: int = 1 << 20) -> None:
        self.frames: list[tuple] = []
        self.exchange = BorderExchange(lambda *frame: self.frames.append(frame), limit_nbytes)


def deliver(exchange, peer, attempt, key, payloads):
    """Delivers frames to an exchange as a link does; returns whether all were accepted."""
    kind = FrameType.FORWARD if key.kind == FORWARD else FrameType.BACKWARD
    taken = []
    for payload in payloads:
        data = b"".join(payload)
        frame = Frame(kind, attempt.view, attempt.seq, key.micro_batch << 32 | key.layer, len(data), 0)
        into = exchange.target(peer, frame) if data else memoryview(bytearray())
        taken.append(into is not None)
        if into is not None:
            into[:] = data
            exchange.arrived(peer, frame, into)
    return all(taken)


def a_border(value=1.0, count=4):
    return Border((torch.full((count,), value),), "specs")


def opened(limit_nbytes=1 << 20):
    exchange = Sent(limit_nbytes).exchange
    exchange.open(NOW, TAKES)
    return exchange


def test_frames_name_their_attempt_and_key():
    sent = Sent()
    sent.exchange.open(NOW, TAKES)
    sent.exchange.send(NOW, "c~3", BorderKey(FORWARD, 3, 2), a_border())
    sent.exchange.send(NOW, "a~1", BorderKey(BACKWARD, 3, 1), a_border())
    assert [frame[:5] for frame in sent.frames] == [
        ("c~3", FrameType.FORWARD, NOW.view, 5, 3 << 32 | 2),
        ("a~1", FrameType.BACKWARD, NOW.view, 5, 3 << 32 | 1),
    ]


def test_a_border_is_taken_once_it_is_whole():
    exchange = opened()
    payloads = write(a_border(2.0, 100), 256)
    assert len(payloads) > 2
    got = []
    waiting = threading.Thread(target=lambda: got.append(exchange.take(NOW, KEY)))
    waiting.start()
    assert deliver(exchange, "a~1", NOW, KEY, payloads)
    waiting.join(30)
    assert torch.equal(got[0].tensors[0], torch.full((100,), 2.0))
    assert got[0].specs == "specs"
    assert exchange.nbytes == 0


def test_what_comes_early_waits_for_its_attempt():
    exchange = Sent().exchange
    assert deliver(exchange, "a~1", NOW, KEY, write(a_border(1.0)))
    assert deliver(exchange, "a~1", NEXT, KEY, write(a_border(2.0)))
    assert deliver(exchange, "a~1", LATER, KEY, write(a_border(3.0)))
    for attempt, value in ((NOW, 1.0), (NEXT, 2.0), (LATER, 3.0)):
        exchange.open(attempt, TAKES)
        assert float(exchange.take(attempt, KEY).tensors[0][0]) == value
    assert exchange.nbytes == 0


def test_what_came_early_from_another_member_is_forgotten():
    exchange = Sent().exchange
    deliver(exchange, "c~3", NOW, KEY, write(a_border(1.0)))
    exchange.open(NOW, TAKES)
    assert exchange.nbytes == 0
    assert deliver(exchange, "a~1", NOW, KEY, write(a_border(2.0)))
    assert float(exchange.take(NOW, KEY).tensors[0][0]) == 2.0


def test_older_attempts_are_diverted_and_purged():
    exchange = opened()
    assert not deliver(exchange, "a~1", OLD, KEY, write(a_border()))
    deliver(exchange, "a~1", NOW, KEY, write(a_border()))
    deliver(exchange, "a~1", NEXT, KEY, write(a_border()))
    deliver(exchange, "a~1", LATER, KEY, write(a_border()))
    held = exchange.nbytes
    exchange.drop(NOW.view)
    assert exchange.nbytes * 3 == held
    assert not deliver(exchange, "a~1", NEXT, KEY, write(a_border()))
    for call in (
        lambda: exchange.take(NOW, KEY),
        lambda: exchange.check(NOW),
        lambda: exchange.send(NOW, "b", KEY, a_border()),
    ):
        with pytest.raises(AttemptOverError, match=r"slot 5 under view 1\.2 is over"):
            call()
    exchange.open(LATER, TAKES)
    exchange.check(LATER)
    exchange.take(LATER, KEY)


@pytest.mark.parametrize(
    "end", [lambda e: e.drop(NOW.view), lambda e: e.open(LATER, TAKES), lambda e: e.stop(FencedError("out"))]
)
def test_a_wait_ends(end):
    exchange = opened()
    errors = []

    def wait():
        try:
            exchange.take(NOW, KEY)
        except (AttemptOverError, FencedError) as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    end(exchange)
    waiting.join(30)
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("peer", "key", "words"),
    [
        ("c~3", KEY, "c~3 sends activations of micro-batch 1 at layer 1, which no unit here takes from it"),
        ("a~1", BorderKey(FORWARD, 9, 1), "activations of micro-batch 9 at layer 1, which no unit here takes"),
        ("a~1", BACK, "gradients of micro-batch 0 at layer 2, which no unit here takes"),
    ],
)
def test_what_no_unit_takes_is_refused(peer, key, words):
    with pytest.raises(WireError, match=words):
        deliver(opened(), peer, NOW, key, write(a_border()))


def test_a_border_that_does_not_come_is_named_with_its_sender():
    exchange = BorderExchange(lambda *frame: None, timeout_s=0.01)
    exchange.open(NOW, TAKES)
    words = r"activations of micro-batch 1 at layer 1 did not come from a~1 within 0.01 s"
    with pytest.raises(DeadlineError, match=words):
        exchange.take(NOW, KEY)


def test_a_second_border_is_refused():
    exchange = opened()
    deliver(exchange, "a~1", NOW, KEY, write(a_border()))
    with pytest.raises(WireError, match="which a~1 has sent"):
        deliver(exchange, "a~1", NOW, KEY, write(a_border()))
    exchange.take(NOW, KEY)
    with pytest.raises(WireError, match="which no unit here takes"):
        deliver(exchange, "a~1", NOW, KEY, write(a_border()))
    deliver(exchange, "a~1", NEXT, KEY, write(a_border()))
    with pytest.raises(WireError, match="which a~1 has sent"):
        deliver(exchange, "b~2", NEXT, KEY, write(a_border()))


def test_frames_without_bytes_are_refused():
    with pytest.raises(WireError, match="a frame of no bytes"):
        deliver(opened(), "a~1", NOW, KEY, [[b""]])
    exchange = opened()
    first = write(a_border(1.0, 100), 256)[:1]
    deliver(exchange, "a~1", NOW, KEY, first)
    with pytest.raises(WireError, match="a frame of no bytes"):
        deliver(exchange, "a~1", NOW, KEY, [[b""]])


def test_what_waits_is_bounded():
    exchange = opened(limit_nbytes=1000)
    deliver(exchange, "a~1", NEXT, KEY, write(a_border(1.0, 100)))
    with pytest.raises(WireError, match="would have more than 1000 bytes"):
        deliver(exchange, "a~1", NEXT, BorderKey(FORWARD, 2, 1), write(a_border(1.0, 150)))
    with pytest.raises(WireError, match="would have more than 1000 bytes"):
        deliver(exchange, "a~1", NEXT, BorderKey(FORWARD, 0, 1), write(a_border(1.0, 200), 128)[:1])


def test_who_joins_again_begins_with_any_view():
    """A member that joins again accepts views with lower numbers than those dropped before, since another chain numbers
    its views anew.
    """
    exchange = opened()
    deliver(exchange, "a~1", NEXT, KEY, write(a_border()))
    exchange.drop(LATER.view)
    exchange.restart()
    assert exchange.nbytes == 0
    exchange.open(OLD, TAKES)
    assert deliver(exchange, "a~1", OLD, KEY, write(a_border()))
    assert exchange.take(OLD, KEY).specs == "specs"


# ------------------------------------------------------------------------------------------------ over links


@pytest.fixture
def nodes() -> Iterator[list[BorderNode]]:
    made = [BorderNode("a~1"), BorderNode("b~2", 1 << 28)]
    threads = [threading.Thread(target=n.connect, args=(o.member,)) for n, o in (made, made[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield made
    for node in made:
        node.close()


def test_a_border_beyond_a_frame_goes_over_a_link(nodes):
    one, other = nodes
    large = Border((torch.arange(18 << 20, dtype=torch.float32), torch.tensor(7)), "specs")
    assert len(write(large)) == 3
    for node in nodes:
        node.exchange.open(NOW, TAKES)
    for key, border in ((KEY, large), (BorderKey(FORWARD, 0, 1), a_border())):
        one.exchange.send(NOW, "b~2", key, border)
    got = other.exchange.take(NOW, KEY)
    assert torch.equal(got.tensors[0], large.tensors[0])
    assert int(got.tensors[1]) == 7
    assert other.exchange.take(NOW, BorderKey(FORWARD, 0, 1)).specs == "specs"


def test_a_refused_border_breaks_the_link_by_name(nodes):
    one, other = nodes
    other.exchange.open(NOW, TAKES)
    one.exchange.open(NOW, ())
    one.exchange.send(NOW, "b~2", BACK, a_border())
    assert "damaged (a~1 sends gradients of micro-batch 0 at layer 2, which no unit here takes" in other.wait_broken()


def test_a_job_without_pipelines_refuses_borders(nodes):
    from dataclasses import replace

    one, other = nodes
    other.links._takers = replace(other.links._takers, borders=None)
    one.exchange.open(NOW, ())
    one.exchange.send(NOW, "b~2", KEY, a_border())
    assert "a~1 sends a border tensor, and this job has no pipelines" in other.wait_broken()
