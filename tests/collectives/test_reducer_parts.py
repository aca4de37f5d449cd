"""Tests the all-reduce of parts among their owners over real sockets: dropped attempts, and parts that change
owners.
"""

from __future__ import annotations

import threading

import pytest
import torch
from test_reducer import DEADLINE_S, a_view, cluster  # noqa: F401  (a fixture)

from chaos_lightning.protocol.types import LinkSpec, Member, PlanSpec, TreeSpec, View, ViewId

PARTS = ("a", "a", "b", "c", "b")
OWNERS = {"a": ("n0", "n1"), "b": ("n1", "n2"), "c": ("n0",)}
F64 = torch.float64


def own(node) -> dict[str, torch.Tensor]:
    """Returns a node's own gradients, by name of the tensor."""
    return of(node, node.memory.own)


def result(node, seq: int = 1) -> dict[str, torch.Tensor]:
    return of(node, node.memory.results[seq % 2])


def of(node, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    slots = enumerate(node.layout.slots)
    return {s.name: node.memory.view(flat, i).clone() for i, s in slots if node.memory.holds(s.start)}


def sums(owns: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for one in owns:
        for name, value in one.items():
            found[name] = found[name] + value if name in found else value
    return found


def begin(node, view, seq: int = 1, *, cells=None, opens: bool = True) -> None:
    """Begins an attempt in this view, with gradients ready in these cells (by default in all)."""
    node.done.setdefault((view.id, seq), threading.Event())
    cells = [start for start, _ in node.memory.grid] if cells is None else cells
    if opens:
        node.loop.call(lambda: node.open(view, seq))
    node.loop.call(lambda: node.reducer.begin(seq, node.layout.scope(0), view=view.id))
    node.loop.call(lambda: node.reducer.ready(seq, cells, view.id))


def cells_of(node, part: str) -> list[int]:
    spans = node.layout.spans_of([part])
    return [a for a, b in node.memory.grid if any(first < b and a < stop for first, stop in spans)]


def drop(node, view) -> None:
    """Drops the attempt of this view, as a member does when the scheduler sends Prepare."""
    node.loop.call(lambda: node.reducer.drop(view.id))
    node.loop.call(lambda: [link.purge(view.id) for link in node.links.values()])
    node.loop.call(lambda: [link.divert(view.id) for link in node.links.values()])


def settled(node) -> None:
    assert node.loop.call_and_wait(lambda: None, DEADLINE_S)


def check(nodes, owns, seq: int = 1) -> None:
    """Checks that sums of each part are exact and equal at all its owners."""
    expected = sums(owns)
    for node in nodes:
        got = result(node, seq)
        assert set(got) == {s.name for s in node.layout.slots if node.me in node.owners[s.part]}
        for name, value in got.items():
            assert torch.equal(value, expected[name]), (node.me, name)


@pytest.mark.parametrize("kind", ["rotating", "chain", "tree"])
@pytest.mark.parametrize("by_reference", [False, True])
def test_each_part_is_summed_over_its_owners_alone(cluster, kind, by_reference):  # noqa: F811
    nodes = cluster(3, F64, by_reference=by_reference, chunk=32768, parts=PARTS, owners=OWNERS)
    view = a_view([n.me for n in nodes], PlanSpec(kind, 32768))
    for seq in (1, 2, 3):
        for i, n in enumerate(nodes):
            n.fill(seq + i / 10)
        owns = [own(n) for n in nodes]
        for n in nodes:
            begin(n, view, seq)
        for n in nodes:
            n.wait(view, seq)
        check(nodes, owns, seq)
        assert all(torch.equal(own(n)[k], v) for n, o in zip(nodes, owns, strict=True) for k, v in o.items())


def test_a_part_is_done_while_others_still_compute(cluster):  # noqa: F811
    """A part with one owner is complete at once, and a shared part when its owners are ready, while other members still
    compute.
    """
    nodes = cluster(3, F64, parts=PARTS, owners=OWNERS)
    view = a_view([n.me for n in nodes], PlanSpec("rotating", 4096))
    for i, n in enumerate(nodes):
        n.fill(1 + i / 10)
    owns = [own(n) for n in nodes]
    for n in nodes:
        begin(n, view, cells=[])
    first, second, third = nodes
    a, b, c = (cells_of(first, part) for part in "abc")
    first.loop.call(lambda: first.reducer.ready(1, c, view.id))
    settled(first)
    assert first.reducer.held() == first.layout.spans_of("c")
    for n in (first, second):
        n.loop.call(lambda n=n: n.reducer.ready(1, a, view.id))
    first.wait(view, 1)
    assert not second.done[view.id, 1].is_set()
    for n in (second, third):
        n.loop.call(lambda n=n: n.reducer.ready(1, b, view.id))
    for n in nodes:
        n.wait(view, 1)
    check(nodes, owns)


def test_who_owns_nothing_is_done_when_the_step_begins(cluster):  # noqa: F811
    nodes = cluster(3, F64, parts=PARTS, owners=dict.fromkeys("abc", ("n0", "n1")))
    view = a_view([n.me for n in nodes], PlanSpec("chain", 4096))
    stands_by = nodes[2]
    assert stands_by.memory.nbytes == 0
    for n in nodes:
        n.fill(1)
    owns = [own(n) for n in nodes]
    begin(stands_by, view)
    stands_by.wait(view, 1)
    for n in nodes[:2]:
        begin(n, view)
    for n in nodes[:2]:
        n.wait(view, 1)
    check(nodes, owns)


@pytest.mark.parametrize("by_reference", [False, True])
def test_an_attempt_that_is_dropped_halfway_leaves_nothing_in_the_next_one(cluster, by_reference):  # noqa: F811
    nodes = cluster(3, F64, by_reference=by_reference, chunk=32768, parts=PARTS, owners=OWNERS)
    names = [n.me for n in nodes]
    one, other = a_view(names, PlanSpec("rotating", 32768)), a_view(names, PlanSpec("rotating", 32768), number=2)
    for i, n in enumerate(nodes):
        n.fill(1 + i / 10)
    first, second, third = nodes
    begin(first, one)
    begin(second, one, cells=cells_of(first, "a"))
    begin(third, one)
    first.wait(one, 1)  # part a is reduced, of b the third has sent all, and the second nothing
    for n in nodes:
        drop(n, one)
    for n in nodes:
        settled(n)
    for i, n in enumerate(nodes):
        n.fill(5 + i / 10)
    owns = [own(n) for n in nodes]
    begin(first, other)
    # Late reports of the dropped attempt's gradients must not count for this attempt.
    second.done[other.id, 1] = threading.Event()
    second.loop.call(lambda: second.open(other, 1))
    second.loop.call(lambda: second.reducer.begin(1, second.layout.scope(0), view=other.id))
    second.loop.call(lambda: second.reducer.ready(1, [a for a, _ in second.memory.grid], one.id))
    begin(third, other)
    settled(second)
    assert second.reducer.held() == (), "it has given a gradient that is not ready"
    second.loop.call(lambda: second.reducer.ready(1, [a for a, _ in second.memory.grid], other.id))
    for n in nodes:
        n.wait(other, 1)
    check(nodes, owns)
    assert not second.done[one.id, 1].is_set()


def test_a_chunk_that_is_half_sent_when_its_attempt_is_dropped_is_no_damage(cluster):  # noqa: F811
    """A chunk is half sent when its attempt is dropped and its memory is reused; the receiver must not take the rest
    for damage.
    """
    nodes = cluster(3, F64, chunk=4 << 20, parts=PARTS, owners=OWNERS)
    for n in nodes:
        settled(n)
        assert len(n.links) == 2
        for link in n.links.values():
            link.sums = True  # as between machines
    names = [n.me for n in nodes]
    one, other = a_view(names, PlanSpec("chain", 4 << 20)), a_view(names, PlanSpec("chain", 4 << 20), number=2)
    first, second, third = nodes
    for i, n in enumerate(nodes):
        n.fill(1 + i / 10)
    wakes = threading.Event()
    begin(third, one)
    settled(third)
    third.loop.call(lambda: wakes.wait(DEADLINE_S))  # the root of b reads nothing meanwhile
    try:
        begin(second, one)
        settled(second)
        assert any(link.queued_nbytes for link in second.links.values()), "the socket took all of it"
        drop(second, one)
        settled(second)
        for n in (first, second):
            n.fill(5)
    finally:
        wakes.set()
    settled(third)
    drop(first, one)
    drop(third, one)
    settled(third)
    third.fill(5.1)
    owns = [own(n) for n in nodes]
    for n in nodes:
        begin(n, other)
    for n in nodes:
        n.wait(other, 1)
        assert n.broken_links == []
    check(nodes, owns)


def test_a_part_moves_to_another_owner(cluster):  # noqa: F811
    """After parts change owners, buffers are allocated anew and the next view reduces each part among its new
    owners.
    """
    nodes = cluster(3, F64, parts=PARTS, owners=OWNERS)
    names = [n.me for n in nodes]
    one, other = a_view(names, PlanSpec("rotating", 4096)), a_view(names, PlanSpec("rotating", 4096), number=2)
    for view, owners in ((one, OWNERS), (other, {"a": ("n0", "n2"), "b": ("n1",), "c": ("n0", "n1", "n2")})):
        for i, n in enumerate(nodes):
            n.owners = owners
            n.memory.lay_out(n.owned())
            n.fill(view.id.number + i / 10)
        owns = [own(n) for n in nodes]
        for n in nodes:
            begin(n, view, view.id.number)
        for n in nodes:
            n.wait(view, view.id.number)
        check(nodes[:2], owns, view.id.number)


def test_trees_of_the_view_serve_those_who_are_all_and_no_others(cluster):  # noqa: F811
    """A part owned by all members is reduced along the view's tree; a part owned by some uses a tree over the links
    between them.
    """
    nodes = cluster(3, F64, parts=PARTS, owners={"a": ("n0", "n1", "n2"), "b": ("n0", "n2"), "c": ("n0",)})
    line = PlanSpec("trees", 4096, (TreeSpec(0, 0, ("n0", "n1", "n2"), ("", "n0", "n1"), 1.0),))
    used = set()
    for n in nodes:
        send = n.reducer._send
        n.reducer._send = lambda peer, kind, view, seq, start, rest, n=n, send=send: (
            used.add((part_at(n, start), n.me, peer)),
            send(peer, kind, view, seq, start, rest),
        )
    view = a_view([n.me for n in nodes], line)
    for i, n in enumerate(nodes):
        n.fill(i)
    owns = [own(n) for n in nodes]
    for n in nodes:
        begin(n, view)
    for n in nodes:
        n.wait(view, 1)
    expected = sums(owns)
    for n in nodes:
        for name, value in result(n).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-14, atol=1e-14)
            assert torch.equal(value, result(nodes[0])[name])
    assert {(a, b) for part, a, b in used if part == "a"} == {("n0", "n1"), ("n1", "n0"), ("n1", "n2"), ("n2", "n1")}
    assert {(a, b) for part, a, b in used if part == "b"} == {("n0", "n2"), ("n2", "n0")}


def part_at(node, start: int) -> str:
    return next(run.part for run in node.layout.runs if run.start <= start < run.stop)


def test_links_of_the_view_are_those_that_owners_use(cluster):  # noqa: F811
    nodes = cluster(3, F64, parts=PARTS, owners={"a": ("n0", "n1", "n2"), "b": ("n1", "n2"), "c": ("n2",)})
    members = tuple(Member(n.me, n.me, "host", "127.0.0.1", 1) for n in nodes)
    links = (LinkSpec("n0", "n1"), LinkSpec("n1", "n2"))
    chain = PlanSpec("chain", 4096)
    view = View(ViewId(1, 1), ViewId(1, 0), members, plan=chain, links=links)
    for i, n in enumerate(nodes):
        n.fill(i)
    owns = [own(n) for n in nodes]
    for n in nodes:
        begin(n, view)
    for n in nodes:
        n.wait(view, 1)
    expected = sums(owns)
    for n in nodes:
        for name, value in result(n).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-14, atol=1e-14)
