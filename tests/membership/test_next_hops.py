"""Tests routes in a network that lacks links: shortest, the same at all members, without circles; and routed messages
as bytes.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import WireError
from chaos_lightning.membership.routing import MAX_HOPS, Hand, RoutedMessage, Router, Take, next_hops, unpacked
from chaos_lightning.protocol.types import LinkSpec, Member, View, ViewId

NAMES = [f"{c}~1" for c in "abcdefgh"]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[LinkSpec]]:
    members = draw(st.permutations(NAMES[: draw(st.integers(2, len(NAMES)))]))
    pairs = list(itertools.combinations(members, 2))
    chosen = draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True))
    return members, [LinkSpec(*pair) for pair in chosen]


def distances(start: str, members: list[str], links: list[LinkSpec]) -> dict[str, int]:
    """Returns each member's distance from `start`, in links, by relaxation: another algorithm than the tested one."""
    far = len(members) + 1
    found = dict.fromkeys(members, far) | {start: 0}
    for _ in members:
        for link in links:
            low = min(found[link.a], found[link.b]) + 1
            found[link.a], found[link.b] = min(found[link.a], low), min(found[link.b], low)
    return {m: d for m, d in found.items() if d < far and m != start}


@given(graphs())
def test_every_hop_is_one_link_nearer_whoever_looks_at_it(graph: tuple[list[str], list[LinkSpec]]) -> None:
    members, links = graph
    beside = {frozenset((link.a, link.b)) for link in links}
    tables = {m: next_hops(m, members, links) for m in members}
    for start in members:
        reached = distances(start, members, links)
        assert set(tables[start]) == set(reached)
        for to, far in reached.items():
            here = start
            for _ in range(far):
                hop = tables[here][to]
                assert frozenset((here, hop)) in beside
                here = hop
            assert here == to


@given(graphs(), st.randoms(use_true_random=False))
def test_the_order_of_the_links_changes_nothing(graph: tuple[list[str], list[LinkSpec]], random) -> None:
    members, links = graph
    shuffled = [LinkSpec(link.b, link.a) if random.random() < 0.5 else link for link in links]
    random.shuffle(shuffled)
    assert next_hops(members[0], members, shuffled) == next_hops(members[0], members, links)


def test_among_equals_the_neighbour_of_lowest_rank_is_taken() -> None:
    links = [LinkSpec("a", "c"), LinkSpec("a", "b"), LinkSpec("b", "d"), LinkSpec("c", "d")]
    assert next_hops("a", ["a", "b", "c", "d"], links)["d"] == "b"
    assert next_hops("a", ["c", "b", "a", "d"], links)["d"] == "c"


def test_without_links_every_pair_has_one() -> None:
    assert next_hops("a", ["a", "b", "c"], []) == {"b": "b", "c": "c"}


def test_who_cannot_be_reached_is_missing() -> None:
    assert next_hops("a", ["a", "b", "c"], [LinkSpec("b", "c"), LinkSpec("a", "x")]) == {}


def view(number: int, members: str, links: str, joiners: str = "") -> View:
    made = tuple(Member(f"{m}~1", m, "h", "127.0.0.1", 1) for m in members)
    specs = tuple(LinkSpec(f"{pair[0]}~1", f"{pair[1]}~1") for pair in links.split())
    entering = tuple(f"{j}~1" for j in joiners)
    return View(ViewId(1, number), ViewId(1, number - 1), made, entering, links=specs)


def test_newcomers_are_reached_by_the_view_that_is_coming() -> None:
    router = Router("a~1")
    assert router.hop("b~1") == ""
    router.rule(view(1, "abc", "ab bc"))
    assert (router.hop("c~1"), router.hop("d~1")) == ("b~1", "")
    router.foresee(view(2, "abcd", "ab ac bc cd", "d"))
    assert router.hop("d~1") == "c~1"
    assert router.hop("c~1") == "b~1", "the ruling view comes first"
    router.rule(view(2, "abcd", "ab bc bd", "d"))
    assert router.hop("d~1") == "b~1", "what was foreseen is over when it rules"
    router.foresee(view(1, "abce", "ae"))
    assert router.hop("e~1") == "", "older views are not foreseen"


def test_routed_messages_go_over_as_many_links_as_the_largest_view_has_members() -> None:
    router = Router("a~1")
    assert router.hops == 1
    router.rule(view(1, "abc", "ab bc"))
    router.foresee(view(2, "abcd", "ab bc cd"))
    assert router.hops == 4


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40), st.integers(0, MAX_HOPS), st.binary())
def test_a_routed_message_is_the_same_at_the_other_end(to: str, source: str, hops: int, payload: bytes) -> None:
    (routed,) = unpacked(memoryview(RoutedMessage(to, source, hops, payload).packed()))
    assert (routed.to, routed.source, routed.hops_left, bytes(routed.payload)) == (to, source, hops, payload)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_routed_message_are_an_error(data: bytes) -> None:
    try:
        routed = unpacked(memoryview(data))
    except WireError:
        return
    assert b"".join(message.packed() for message in routed) == data


def test_a_frame_may_carry_several() -> None:
    sent = [RoutedMessage("a~1", f"b~{i}", i, b"x" * i) for i in range(3)]
    got = unpacked(memoryview(b"".join(routed.packed() for routed in sent)))
    assert [(r.to, r.source, r.hops_left, bytes(r.payload)) for r in got] == [
        (r.to, r.source, r.hops_left, r.payload) for r in sent
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05\x01",
        struct.pack("<HHHQQI", 5, 0, 1, 1, 1, 0) + b"a",
        struct.pack("<HHHQQI", 5, 9, 9, 1, 1, 0) + b"ab",
        struct.pack("<HHHQQI", 5, 1, 1, 1, 1, 9) + b"abxyz",
        struct.pack("<HHHQQI", 5, 1, 1, 1, 1, 1) + b"\xff\xffx",
        RoutedMessage("a", "b", 5, b"x").packed() + b"more",
    ],
)
def test_a_broken_routed_message_says_what_is_wrong(data: bytes) -> None:
    with pytest.raises(WireError, match="routed message"):
        unpacked(memoryview(data))


def test_a_message_goes_down_a_row_of_a_thousand_members() -> None:
    ids = [f"m{i}" for i in range(1000)]
    row = View(ViewId(1, 1), ViewId(1, 0), tuple(Member(m, m, "h", "h", 1) for m in ids),
               links=tuple(LinkSpec(a, b) for a, b in pairwise(ids)))  # fmt: skip
    first, last = Router(ids[0], set(ids)), Router(ids[-1], set(ids))
    first.rule(row)
    last.rule(row)
    (step,) = first.send(ids[-1], b"x", row.id)
    assert isinstance(step, Hand)
    (routed,) = unpacked(memoryview(step.routed.packed()))
    assert routed.hops_left == 1000
    before = replace(routed, hops_left=routed.hops_left - 998)  # those between take one each
    assert last.arrived(before, ids[-2]) == [Take(before)]
