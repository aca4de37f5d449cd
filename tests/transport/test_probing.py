"""Tests probes over simulated links in virtual time: results, waits, and reports of dead links."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.types import NO_VIEW, LinkReport
from chaos_lightning.transport.frames import HEADER_NBYTES, Frame, FrameType, unpack
from chaos_lightning.transport.probe import PIECE_NBYTES, Op, ProbeConfig, Probes

NOTHING = memoryview(b"")


class World:
    """Virtual clock with timers."""

    def __init__(self) -> None:
        self.now = 100.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._count), function))

    def clock(self) -> float:
        return self.now

    def run(self, seconds: float = 60.0) -> None:
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, function = heapq.heappop(self._due)
            function()
        self.now = end


class Node:
    def __init__(self, world: World, name: str, config: ProbeConfig | None = None) -> None:
        self.world, self.name = world, name
        self.reports: list[LinkReport] = []
        self.told_at: list[float] = []
        self.probes = Probes(world.later, self.told, config, world.clock)
        self.shared: Pipe | None = None
        """Pipe through which everything comes in here."""

    def told(self, report: LinkReport) -> None:
        self.reports.append(report)
        self.told_at.append(self.world.now)


class Pipe:
    """Bottleneck of a given rate, which bytes pass one after the other."""

    def __init__(self, rate_bps: float) -> None:
        self.rate_bps = rate_bps
        self.free_at = 0.0

    def through(self, at: float, nbytes: int) -> float:
        self.free_at = max(at, self.free_at) + nbytes * 8 / self.rate_bps
        return self.free_at


class SimLink:
    """Simulated end of a link: a bottleneck and a delay towards the other end."""

    def __init__(self, node: Node, rate_bps: float, delay_s: float) -> None:
        self.node, self.world = node, node.world
        self.pipe, self.delay_s = Pipe(rate_bps), delay_s
        self.other: SimLink
        self.traffic = 0
        self.traffic_at = 0.0
        self.open = True
        self.dead = False
        """Bytes go in and do not come out."""
        self.queued_nbytes = 0
        self.train_nbytes = 0
        self.trains = 0
        self.pieces = 0
        self.lateness_s: list[float] = []
        """Seconds by which a busy receiver handles each piece of a train later than the piece before, for each of the
        first trains.
        """

    def quiet(self, now: float, quiet_s: float) -> bool:
        return now - self.traffic_at >= quiet_s and self.pipe.free_at <= now

    @property
    def delivered_nbytes(self) -> int:
        waiting = max(0.0, self.pipe.free_at - self.world.now) * self.pipe.rate_bps / 8
        return round(self.queued_nbytes - waiting) if not self.dead else 0

    def chunk(self, nbytes: int) -> None:
        """Sends bytes of the job, which are not part of a probe."""
        self.traffic += 1
        self.traffic_at = self.world.now
        self.queued_nbytes += nbytes
        self.pipe.through(self.world.now, nbytes)

    def send(self, kind: FrameType, view: object, seq: int, start: int, payload: Sequence[memoryview] = ()) -> None:
        data = b"".join(payload)
        self._go(Frame(kind, NO_VIEW, seq, start, len(data), 0), memoryview(bytearray(data)))

    def fill(self, background: Callable[[], list[memoryview] | None]) -> None:
        self.trains += 1
        self.pieces = 0

        def pull() -> None:
            parts = background()
            if parts is None:
                return
            frame = unpack(parts[0])
            self.train_nbytes += sum(part.nbytes for part in parts)
            self._go(frame, parts[1] if len(parts) > 1 else memoryview(b""))
            self.world.later(max(0.0, self.pipe.free_at - self.world.now), pull)

        pull()

    def _go(self, frame: Frame, payload: memoryview) -> None:
        if self.dead or not self.open:
            return
        self.queued_nbytes += HEADER_NBYTES + frame.length
        began = max(self.world.now, self.pipe.free_at)
        out = self.pipe.through(self.world.now, HEADER_NBYTES + frame.length)
        there, peer = self.other.node, self.node.name
        if there.shared is not None:
            began, out = max(began, there.shared.free_at), there.shared.through(out, HEADER_NBYTES + frame.length)
        if frame.length:
            head_at = began + HEADER_NBYTES * 8 / self.pipe.rate_bps + self.delay_s
            self.world.later(head_at - self.world.now, lambda: there.probes.target(self.other, frame))
        arrive = lambda: there.probes.arrived(peer, self.other, frame, payload)  # noqa: E731
        self.pieces += frame.start == Op.FILL
        late = self.lateness_s[self.trains - 1 : self.trains] if frame.start in (Op.FILL, Op.END) else []
        late_s = sum(late) * self.pieces
        self.world.later(out + self.delay_s + late_s - self.world.now, arrive)


def joined(one: Node, other: Node, rate_bps: float, delay_s: float, back_bps: float = 0.0) -> tuple[SimLink, SimLink]:
    there, back = SimLink(one, rate_bps, delay_s), SimLink(other, back_bps or rate_bps, delay_s)
    there.other, back.other = back, there
    return there, back


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("rate_bps", [1e6, 10e6, 100e6, 1e9, 10e9])
@pytest.mark.parametrize("delay_s", [0.0001, 0.005, 0.05])
def test_latency_and_rate_of_a_quiet_link_are_found(world: World, rate_bps: float, delay_s: float) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, rate_bps, delay_s)
    a.probes.measure("b", link, "link made")
    world.run()
    (report,) = a.reports
    assert report.peer == "b"
    assert report.evidence == "probe (link made)"
    assert report.latency_s == pytest.approx(delay_s + HEADER_NBYTES * 8 / rate_bps, rel=0.02)
    assert report.rate_bps == pytest.approx(rate_bps, rel=0.03)
    assert not a.probes.measuring("b")


@pytest.mark.parametrize("rate_bps", [1e5, 1e6, 10e6, 100e6])
def test_a_slow_link_is_not_filled_for_long(world: World, rate_bps: float) -> None:
    """A probe of a slow link sends little: the first train's 16 KiB twice, and three trains of 75 ms."""
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, rate_bps, 0.001)
    a.probes.measure("b", link, "link made")
    world.run()
    assert len(a.reports) == 1
    assert link.train_nbytes < 2 * (16 << 10) + 3 * 0.075 * rate_bps / 8


def test_a_fast_link_is_measured_with_a_bounded_number_of_bytes(world: World) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 100e9, 0.0001)
    a.probes.measure("b", link, "link made")
    world.run()
    assert len(a.reports) == 1
    assert link.train_nbytes < 20 << 20


@pytest.mark.parametrize("lateness_s", [[0.015], [0.015, 0.006], [0.006, 0.015, 0.01]])
def test_a_busy_receiver_does_not_make_a_link_slow(world: World, lateness_s: list[float]) -> None:
    """A receiver that is late for the first trains does not lower the measured rate, since later trains are better."""
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 400e6, 0.001)
    link.lateness_s = lateness_s
    a.probes.measure("b", link, "asked")
    world.run()
    assert [r.rate_bps for r in a.reports] == [pytest.approx(400e6, rel=0.05)]


def test_each_direction_is_measured_by_its_sender(world: World) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, back = joined(a, b, 100e6, 0.01, back_bps=20e6)
    a.probes.measure("b", link, "link made")
    b.probes.measure("a", back, "link made")
    world.run()
    assert a.reports[0].rate_bps == pytest.approx(100e6, rel=0.03)
    assert b.reports[0].rate_bps == pytest.approx(20e6, rel=0.03)


def test_links_of_one_member_are_measured_one_after_the_other(world: World) -> None:
    """Six neighbours probe a newcomer whose access is hardly faster than one link; they take turns, and each finds its
    link's rate.
    """
    newcomer = Node(world, "j")
    newcomer.shared = Pipe(110e6)
    neighbours = [Node(world, name) for name in "abcdef"]
    for neighbour in neighbours:
        link, _ = joined(neighbour, newcomer, 100e6, 0.002)
        neighbour.probes.measure("j", link, "link made")
    world.run()
    for neighbour in neighbours:
        assert [r.rate_bps for r in neighbour.reports] == [pytest.approx(100e6, rel=0.1)], neighbour.name
    ends = sorted(t for n in neighbours for t in n.told_at)
    assert all(later - earlier > 0.05 for earlier, later in itertools.pairwise(ends))


def test_one_train_at_a_time_leaves_a_member(world: World) -> None:
    a = Node(world, "a")
    links = []
    for name in "bcd":
        link, _ = joined(a, Node(world, name), 100e6, 0.002)
        links.append(link)
        a.probes.measure(name, link, "asked")
    world.run(0.05)
    assert sum(link.trains > 0 for link in links) == 1
    world.run()
    assert sorted(r.peer for r in a.reports) == ["b", "c", "d"]


def test_it_waits_until_the_job_leaves_the_link_alone(world: World) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 100e6, 0.001)
    for i in range(200):  # an all-reduce of a second
        world.later(i * 0.005, lambda: link.chunk(50_000))
    world.run(0.01)
    a.probes.measure("b", link, "asked")
    world.run(0.9)
    assert link.trains == 0
    world.run()
    assert a.reports[0].rate_bps == pytest.approx(100e6, rel=0.03)


def test_a_chunk_ends_a_train(world: World) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 10e6, 0.001)
    sent: list[int] = []

    def chunk() -> None:
        if link.trains == 1 and not sent:
            sent.append(link.train_nbytes)
            link.chunk(1000)
        elif not sent:
            world.later(0.001, chunk)

    chunk()
    a.probes.measure("b", link, "asked")
    world.run(0.2)
    assert sent
    piece = (16 << 10) // 4 + HEADER_NBYTES
    assert sent[0] <= piece, "the chunk came when the first piece had gone"
    world.run()
    assert a.reports[0].rate_bps == pytest.approx(10e6, rel=0.03)


@pytest.mark.parametrize("gap_s", [0.004, 0.06])
def test_a_link_that_is_never_quiet_is_disturbed_little_and_misjudged_never(world: World, gap_s: float) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 100e6, 0.001)
    stop = world.now + 30

    def chunk() -> None:
        link.chunk(10_000)
        if world.now < stop:
            world.later(gap_s, chunk)

    chunk()
    world.run(0.001)
    a.probes.measure("b", link, "asked")
    world.run(25)
    assert not a.probes.measuring("b")
    assert link.trains > 0
    assert link.train_nbytes < 10 * gap_s * 100e6 / 8 + (64 << 10), "its trains end as soon as they are in the way"
    if gap_s == 0.06:  # long enough to say something
        (report,) = a.reports
        assert report.rate_bps == pytest.approx(100e6, rel=0.05)
    else:
        assert not a.reports


def test_a_link_that_carries_nothing_is_reported_with_rate_zero(world: World) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 100e6, 0.001)
    link.dead = True
    a.probes.measure("b", link, "asked")
    world.run(4.9)
    assert not a.reports
    world.run(1)
    (report,) = a.reports
    assert (report.rate_bps, report.evidence) == (0.0, "probe (asked; nothing came back within 5 s)")


def test_a_link_that_dies_in_a_train_is_reported_with_rate_zero(world: World) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 10e6, 0.001)

    def kill() -> None:
        link.dead = link.trains > 0
        if not link.dead:
            world.later(0.001, kill)

    kill()
    a.probes.measure("b", link, "asked")
    world.run()
    (report,) = a.reports
    assert report.rate_bps == 0.0
    assert report.latency_s == pytest.approx(0.001, rel=0.1)


def test_what_the_job_sends_before_it_does_not_make_a_link_dead(world: World) -> None:
    """An echo that waits behind 20 s of the job's chunks does not make the link count as dead."""
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 1e6, 0.001)
    a.probes.measure("b", link, "asked")
    for i in range(12):
        world.later(0.0005 + i, lambda: link.chunk(150_000))
    world.run(120)
    (report,) = a.reports
    assert report.rate_bps == pytest.approx(1e6, rel=0.05)


def test_who_was_frozen_itself_blames_no_link(world: World) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 10e6, 0.5)
    a.probes.measure("b", link, "asked")
    world.run(0.1)
    world.now += 30.0  # this process was stopped: its timers are all late
    world.run()
    (report,) = a.reports
    assert report.rate_bps == pytest.approx(10e6, rel=0.05)


def test_a_broken_link_ends_its_measurement_and_lets_others_have_their_turn(world: World) -> None:
    a, b, c = Node(world, "a"), Node(world, "b"), Node(world, "c")
    link, _ = joined(a, b, 1e6, 0.001)
    other, _ = joined(a, c, 100e6, 0.001)
    a.probes.measure("b", link, "asked")
    world.run(0.05)
    assert link.trains == 1
    a.probes.measure("c", other, "asked")
    link.open = False
    a.probes.lost("b", link)
    assert not a.probes.measuring("b")
    world.run()
    assert [r.peer for r in a.reports] == ["c"]


def test_who_is_granted_a_train_and_dies_does_not_keep_others_waiting(world: World) -> None:
    a, b, c = Node(world, "a"), Node(world, "b"), Node(world, "c")
    _, at_c = joined(a, c, 100e6, 0.001)
    other, _ = joined(b, c, 100e6, 0.001)
    c.probes.arrived("a", at_c, Frame(FrameType.PROBE, NO_VIEW, 7, Op.ASK, 0, 0), memoryview(b""))
    b.probes.measure("c", other, "asked")
    world.run(1.0)
    assert other.trains == 0
    world.run()
    assert len(b.reports) == 1, "the lease of a, which sends nothing, is over"
    c.probes.arrived("a", at_c, Frame(FrameType.PROBE, NO_VIEW, 8, Op.ASK, 0, 0), memoryview(b""))
    b.probes.measure("c", other, "asked")
    c.probes.lost("a", at_c)
    world.run(1.0)
    assert len(b.reports) == 2, "the link to a broke"


def test_a_link_made_anew_is_measured_anew(world: World) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 1e6, 0.001)
    a.probes.measure("b", link, "link made")
    world.run(0.05)
    again, _ = joined(a, b, 50e6, 0.001)
    a.probes.measure("b", again, "link made")
    a.probes.lost("b", link)
    world.run()
    assert [r.rate_bps for r in a.reports] == [pytest.approx(50e6, rel=0.05)]


@pytest.mark.parametrize(
    ("start", "length"),
    [(99, 0), (99, 8), (Op.FILL, PIECE_NBYTES + 1), (Op.DONE, 15), (Op.ECHO, 4), (0, 1)],
)
def test_frames_that_no_probe_sends_are_refused(world: World, start: int, length: int) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 1e6, 0.001)
    frame = Frame(FrameType.PROBE, NO_VIEW, 1, start, length, 0)
    arrives = partial(a.probes.target, link, frame) if length else partial(a.probes.arrived, "b", link, frame, NOTHING)
    with pytest.raises(WireError, match="PROBE frame"):
        arrives()


def test_answers_to_nothing_that_was_asked_are_ignored(world: World) -> None:
    a, b = Node(world, "a"), Node(world, "b")
    link, _ = joined(a, b, 1e6, 0.001)
    for op in (Op.ECHOED, Op.GO, Op.END):
        a.probes.arrived("b", link, Frame(FrameType.PROBE, NO_VIEW, 5, op, 0, 0), memoryview(b""))
    assert not a.reports
    assert link.trains == 0
