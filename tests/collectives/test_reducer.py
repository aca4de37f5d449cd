"""Tests the reducer by itself: real sockets and loops in one process, without state machines."""

from __future__ import annotations

import itertools
import socket
import threading

import pytest
import torch

from chaos_lightning.collectives.layout import Layout, Section
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.collectives.reducer import Reducer
from chaos_lightning.planning.trees import expand
from chaos_lightning.protocol.types import Member, PlanSpec, View, ViewId
from chaos_lightning.transport.frames import Frame, FrameType
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.reference import Generation

DEADLINE_S = 20.0


class Node:
    """Member that consists of a reducer and links, with a loop of its own.

    Args:
        parts: Part of each tensor, in order of the tensors; empty: there is one part.
        owners: Owners of each part, by part; None: all members own all.
    """

    def __init__(
        self,
        me: str,
        shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
        chunk: int,
        *,
        by_reference: bool = False,
        parts: tuple[str, ...] = (),
        owners: dict[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.me = me
        self.broken_links: list[tuple[str, str]] = []
        self.generation = Generation() if by_reference else None
        self.crash: list[BaseException] = []
        self.done: dict[tuple[ViewId, int], threading.Event] = {}
        self.loop = IoLoop(me, self.crash.append)
        params = [(f"p{i}", torch.zeros(s, dtype=dtype)) for i, s in enumerate(shapes)]
        part_of = {f"p{i}": part for i, part in enumerate(parts)} if parts else None
        self.layout = Layout([Section("all", params)], part_of=part_of)
        self.owners = owners
        self.memory = Memory(self.layout, chunk, self.owned())
        self.links: dict[str, Link] = {}
        self.reducer = Reducer(
            self.memory, self.send, self.on_done, lambda _: self.layout.owned(self.owners) if self.owners else None
        )
        self.reducer.restart(me)
        self.loop.start()

    def owned(self) -> tuple[tuple[int, int], ...] | None:
        if self.owners is None:
            return None
        return self.layout.spans_of([part for part, names in self.owners.items() if self.me in names])

    def send(self, peer, kind, view, seq, start, payload) -> None:
        self.links[peer].send(kind, view, seq, start, payload)

    def on_done(self, view: ViewId, seq: int) -> None:
        self.done.setdefault((view, seq), threading.Event()).set()

    def target(self, peer, frame):
        return self.reducer.target(peer, frame)

    def arrived(self, peer, frame, payload) -> None:
        assert frame.type in (FrameType.UP, FrameType.DOWN)
        self.reducer.arrived(peer, frame, payload)

    def broken(self, peer, link, evidence) -> None:
        self.broken_links.append((peer, evidence))

    def attach(self, peer: str, sock: socket.socket) -> None:
        self.loop.call(lambda: self.links.__setitem__(peer, Link(self.loop, sock, peer, self, self.generation)))

    def open(self, view: View, seq: int) -> None:
        if self.generation is not None:
            self.generation.set(view.id, seq)
        self.reducer.open(view, seq)

    def wait_for_references(self, count: int) -> None:
        """Waits until all links (`count`) have agreed to send chunks by reference."""
        agreed = threading.Event()

        def look() -> None:
            if len(self.links) == count and all(link.by_reference for link in self.links.values()):
                agreed.set()
            else:
                self.loop.later(0.005, look)

        self.loop.call(look)
        assert agreed.wait(DEADLINE_S), "the kernel does not let these processes read each other's memory"

    def fill(self, value: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(value * 1000))
        for i, slot in enumerate(self.layout.slots):
            if not self.memory.holds(slot.start):
                continue
            view = self.memory.view(self.memory.own, i)
            view.copy_(torch.randn(view.shape, generator=generator))
        return self.memory.own.clone()

    def run(self, view: View, seq: int, *, empty: bool = False) -> None:
        self.done.setdefault((view.id, seq), threading.Event())
        self.loop.call(lambda: self.open(view, seq))
        self.loop.call(lambda: self.reducer.begin(seq, self.layout.scope(0), empty=empty))
        for start, _ in self.memory.grid:
            self.loop.call(lambda start=start: self.reducer.ready(seq, [start]))

    def wait(self, view: View, seq: int) -> None:
        assert self.done[view.id, seq].wait(DEADLINE_S), (self.me, self.crash)
        assert not self.crash

    def flat(self, seq: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.results[seq % 2].view(dtype)


def a_view(ids: list[str], plan: PlanSpec, number: int = 1) -> View:
    members = tuple(Member(i, i, "host", "127.0.0.1", 1) for i in ids)
    return View(ViewId(1, number), ViewId(1, number - 1), members, plan=plan)


@pytest.fixture
def cluster():
    nodes: list[Node] = []

    def build(count: int, dtype=torch.float32, chunk=4096, by_reference=False, **more) -> list[Node]:
        shapes = [(37, 41), (5,), (1000, 11), (3, 3, 3), (611, 307)]
        nodes.extend(Node(f"n{i}", shapes, dtype, chunk, by_reference=by_reference, **more) for i in range(count))
        for i in range(count):
            for j in range(i):
                a, b = socket.socketpair()
                nodes[i].attach(nodes[j].me, a)
                nodes[j].attach(nodes[i].me, b)
        if by_reference:
            for node in nodes:
                node.wait_for_references(count - 1)
        return nodes

    yield build
    for node in nodes:
        node.loop.call(lambda node=node: [link.close() for link in node.links.values()])
        node.loop.stop()


def summed(nodes: list[Node], plan: PlanSpec) -> None:
    """Makes three steps; checks that sums are exact and bitwise equal at all members, and own gradients unchanged."""
    view = a_view([n.me for n in nodes], plan)
    for seq in (1, 2, 3):
        owns = [n.fill(seq + i / 10).view(torch.float64) for i, n in enumerate(nodes)]
        for n in nodes:
            n.run(view, seq)
        for n in nodes:
            n.wait(view, seq)
        results = [n.flat(seq, torch.float64) for n in nodes]
        torch.testing.assert_close(results[0], torch.stack(owns).sum(0), rtol=1e-12, atol=1e-12)
        assert all(torch.equal(results[0], r) for r in results)
        assert all(torch.equal(n.memory.own.view(torch.float64), o) for n, o in zip(nodes, owns, strict=True))


# One member has no shape of a plan, and two make a chain of a tree.
@pytest.mark.parametrize(
    ("count", "kind"),
    [(1, "rotating"), (2, "rotating"), (2, "chain"), *itertools.product((3, 5), ("rotating", "chain", "tree"))],
)
@pytest.mark.parametrize(("by_reference", "chunk"), [(False, 4096), (True, 32768), (True, 1 << 20)])
def test_sum_is_exact_and_bit_identical_on_all_members(cluster, kind, count, by_reference, chunk):
    summed(cluster(count, torch.float64, by_reference=by_reference), PlanSpec(kind, chunk))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_its_own_type(cluster, dtype):
    nodes = cluster(2, dtype)
    view = a_view([n.me for n in nodes], PlanSpec("rotating", 4096))
    owns = [n.fill(1 + i).view(dtype) for i, n in enumerate(nodes)]
    for n in nodes:
        n.run(view, 1)
    for n in nodes:
        n.wait(view, 1)
    assert torch.equal(nodes[0].flat(1, dtype), owns[0] + owns[1])
    assert torch.equal(nodes[0].flat(1, dtype), nodes[1].flat(1, dtype))


@pytest.mark.parametrize("kind", ["rotating", "chain", "tree"])
@pytest.mark.parametrize("empty", [{1}, {0, 2}, {0, 1, 2}])
@pytest.mark.parametrize("by_reference", [False, True])
def test_members_without_samples_add_nothing(cluster, kind, empty, by_reference):
    nodes = cluster(3, by_reference=by_reference)
    view = a_view([n.me for n in nodes], PlanSpec(kind, 65536))
    owns = [n.fill(1 + i).view(torch.float32) for i, n in enumerate(nodes)]
    for i, n in enumerate(nodes):
        n.run(view, 1, empty=i in empty)
    for n in nodes:
        n.wait(view, 1)
    wanted = sum((o for i, o in enumerate(owns) if i not in empty), torch.zeros_like(owns[0]))
    torch.testing.assert_close(nodes[0].flat(1, torch.float32), wanted)
    assert all(torch.equal(nodes[0].flat(1, torch.float32), n.flat(1, torch.float32)) for n in nodes)


@pytest.mark.parametrize("by_reference", [False, True])
def test_gradients_that_lie_in_several_places_are_added_where_they_belong(cluster, by_reference):
    """Large gradients are read from autograd's own memory and small ones from the send buffer, and all are added at the
    right place.
    """
    nodes = cluster(3, chunk=1 << 20, by_reference=by_reference)
    view = a_view([n.me for n in nodes], PlanSpec("chain", 1 << 20))
    expected = torch.zeros_like(nodes[0].memory.own.view(torch.float32))
    for i, node in enumerate(nodes):
        whole = node.fill(i)
        expected += whole.view(torch.float32)
        for index in (0, 2, 4):
            lent = node.memory.view(whole, index).clone()
            node.memory.view(node.memory.own, index).fill_(float("nan"))
            node.memory.lend(index, lent)
    for node in nodes:
        node.run(view, 1)
    for node in nodes:
        node.wait(view, 1)
        assert torch.allclose(node.flat(1, torch.float32), expected, atol=1e-5)


@pytest.mark.parametrize("by_reference", [False, True])
def test_a_step_is_reduced_again_by_survivors_from_kept_gradients(cluster, by_reference):
    nodes = cluster(3, by_reference=by_reference)
    first = a_view([n.me for n in nodes], PlanSpec("rotating", 32768))
    owns = [n.fill(1 + i).view(torch.float32) for i, n in enumerate(nodes)]
    for n in nodes[:2]:  # the third never contributes
        n.run(first, 1)
    second = a_view([n.me for n in nodes[:2]], PlanSpec("rotating", 32768), number=2)
    for n in nodes[:2]:
        n.done[second.id, 1] = threading.Event()
        n.loop.call(lambda n=n: n.reducer.drop(first.id))
        n.loop.call(lambda n=n: n.open(second, 1))
    for n in nodes[:2]:
        n.wait(second, 1)
    assert torch.equal(nodes[0].flat(1, torch.float32), owns[0] + owns[1])
    assert torch.equal(nodes[1].flat(1, torch.float32), owns[0] + owns[1])
    assert not nodes[0].done[first.id, 1].is_set()
    # All that the dead one still had in its socket belongs to the old view and changes nothing.
    nodes[2].fill(9)
    nodes[2].run(first, 1)
    for n in nodes[:2]:
        n.fill(2)
        n.run(second, 2)
    for n in nodes[:2]:
        n.wait(second, 2)
    assert torch.equal(nodes[0].flat(1, torch.float32), owns[0] + owns[1])


@pytest.mark.parametrize("by_reference", [False, True])
def test_chunks_that_arrive_before_their_attempt_are_kept(cluster, by_reference):
    nodes = cluster(2, by_reference=by_reference)
    view = a_view([n.me for n in nodes], PlanSpec("rotating", 65536))
    owns = [n.fill(1 + i).view(torch.float32) for i, n in enumerate(nodes)]
    early = threading.Event()
    arrived = nodes[1].reducer.arrived

    def spy(peer, frame, payload):
        arrived(peer, frame, payload)
        early.set()

    nodes[1].reducer.arrived = spy  # type: ignore[method-assign]
    nodes[0].run(view, 1)
    assert early.wait(DEADLINE_S)
    nodes[1].run(view, 1)
    for n in nodes:
        n.wait(view, 1)
    assert torch.equal(nodes[1].flat(1, torch.float32), owns[0] + owns[1])


def test_held_ranges_name_exactly_what_is_complete(cluster):
    nodes = cluster(2, chunk=16384)
    view = a_view([n.me for n in nodes], PlanSpec("chain", 16384))
    for i, n in enumerate(nodes):
        n.fill(i)
    one, other = nodes
    one.run(view, 1)
    other.loop.call(lambda: other.open(view, 1))
    other.loop.call(lambda: other.reducer.begin(1, other.layout.scope(0)))
    other.loop.call(lambda: other.reducer.ready(1, [start for start, _ in other.memory.grid[:2]]))
    stop = other.memory.grid[1][1]
    seen = threading.Event()
    answer: list[tuple[tuple[int, int], ...]] = []

    def ask() -> None:
        held = one.reducer.held()
        if held and held[0][1] >= stop:
            answer.append(held)
            seen.set()
        else:
            one.loop.later(0.01, ask)

    one.loop.call(ask)
    assert seen.wait(DEADLINE_S)
    assert answer == [((0, stop),)]


def test_a_sender_that_went_on_without_the_reader_is_noticed(cluster):
    """A removed member that reads a chunk by reference too late, when the sender is in another attempt, does not use
    it.
    """
    late, gone_on = cluster(2, by_reference=True)
    view = a_view([late.me, gone_on.me], PlanSpec("chain", 1 << 20))
    late.fill(1)
    gone_on.fill(2)
    gone_on.run(view, 1)  # its partial sums (or results) are announced to the other one
    elsewhere = a_view([gone_on.me], PlanSpec("chain", 1 << 20), number=2)
    gone_on.done[elsewhere.id, 1] = threading.Event()
    gone_on.loop.call(lambda: gone_on.reducer.drop(view.id))
    gone_on.loop.call(lambda: gone_on.open(elsewhere, 1))
    gone_on.wait(elsewhere, 1)
    late.run(view, 1)
    settled = threading.Event()
    late.loop.call(lambda: late.loop.later(0.05, settled.set))
    assert settled.wait(DEADLINE_S)
    assert not late.done[view.id, 1].is_set()
    assert not late.crash


def test_memory_of_a_partial_sum_is_used_for_one_chunk_at_a_time():
    """Where a commit root reduces the last chunk itself, the next attempt opens before the chunk's call returns. Its
    partial sums, given back twice, would serve two chunks of that attempt at once.
    """
    params = [("p", torch.zeros(1024))]
    memory = Memory(Layout([Section("all", params)]), 2048)
    view = a_view(["n0", "n1"], PlanSpec("chain", 2048))
    reducer = Reducer(memory, lambda *_: None, lambda _, seq: reducer.open(view, seq + 1))
    root = expand(view.plan, view.ids(), memory.layout.nbytes, memory.layout.spans())[0].root
    reducer.restart(root)
    child = next(m for m in view.ids() if m != root)
    memory.own.view(torch.float32).fill_(1.0)
    reducer.open(view, 1)
    for seq in (1, 2, 3):
        frames = [Frame(FrameType.UP, view.id, seq, start, stop - start, 0) for start, stop in memory.grid]
        held = [reducer.target(child, frame) for frame in frames]
        for number, (frame, payload) in enumerate(zip(frames, held, strict=True), 1):
            assert payload is not None
            payload.cast("f")[:] = memoryview(torch.full((512,), 10.0 * number).numpy())
            reducer.arrived(child, frame, payload)
        reducer.begin(seq, memory.layout.scope(0))
        reducer.ready(seq, [start for start, _ in memory.grid])
        sums = memory.results[seq % 2].view(torch.float32).view(2, -1)
        assert sums.unique(dim=1).tolist() == [[11.0], [21.0]]
