"""Tests parts and paths of a graph against their definitions on small graphs."""

from collections.abc import Iterable
from itertools import combinations, product
from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.planning.graph import (
    Pair,
    breadth_first,
    centred,
    connected_parts,
    neighbours,
    parting_nodes,
    removable,
)

NAMES = tuple(f"m{i}" for i in range(9))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[tuple[str, ...], list[Pair]]:
    """Draws members in random rank order, and links, some of which are repeated, name strangers, or connect a member
    with itself.
    """
    members = tuple(draw(st.permutations(NAMES)))[: draw(st.integers(0, 8))]
    pairs = st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES))
    return members, draw(st.lists(pairs, max_size=20))


def reached(start: str, links: Iterable[Pair], among: Iterable[str]) -> set[str]:
    found, inside = {start}, set(among)
    while new := {b for pair in links for a, b in (pair, pair[::-1]) if a in found and b in inside} - found:
        found |= new
    return found


@given(graphs())
def test_neighbours_are_those_that_a_link_leads_to_in_rank_order(graph: tuple[tuple[str, ...], list[Pair]]) -> None:
    members, links = graph
    there = {frozenset(pair) for pair in links}
    assert neighbours(members, links) == {
        a: [b for b in members if a != b and frozenset((a, b)) in there] for a in members
    }


@given(graphs())
def test_parts_hold_all_that_can_reach_each_other(graph: tuple[tuple[str, ...], list[Pair]]) -> None:
    members, links = graph
    parts = connected_parts(members, neighbours(members, links))
    assert [m for part in parts for m in part if part[0] == m] == [part[0] for part in parts]
    assert sorted(m for part in parts for m in part) == sorted(members)
    assert [part[0] for part in parts] == sorted((part[0] for part in parts), key=members.index)
    for part in parts:
        assert part == [m for m in members if m in reached(part[0], links, members)]


class Counted(dict[str, list[str]]):
    """Dict of each member's neighbours that counts how many neighbours have been looked at."""

    seen = 0

    def __getitem__(self, member: str) -> list[str]:
        self.seen += len(found := super().__getitem__(member))
        return found


@given(graphs(), st.data())
def test_who_can_go_is_told_as_if_each_were_tried_alone(
    graph: tuple[tuple[str, ...], list[Pair]], data: st.DataObject
) -> None:
    members, links = graph
    leaving = data.draw(st.permutations(members))[: data.draw(st.integers(0, len(members)))]
    gone: list[str] = []
    for one in leaving:
        rest = [m for m in members if m != one and m not in gone]
        if len(connected_parts(rest, neighbours(rest, links))) <= 1:
            gone.append(one)
    near = Counted(neighbours(members, links))
    assert removable(near, leaving) == gone
    ends = sum(map(len, near.values()))
    assert near.seen <= ends * (3 + 2 * ceil(log2(max(1, len(leaving)))))


@given(graphs(), st.data())
def test_a_parting_node_leaves_more_parts_behind(
    graph: tuple[tuple[str, ...], list[Pair]], data: st.DataObject
) -> None:
    members, links = graph
    places = {m: data.draw(st.sampled_from(["n0", "n1", "n2", "n3", m])) for m in members}
    inner = [(a, b) for a, b in combinations(members, 2) if places[a] == places[b]]
    nodes = list(dict.fromkeys(places.values()))

    def count(rest: list[str]) -> int:
        return len(connected_parts(rest, neighbours(rest, [*links, *inner])))

    expected = [n for n in nodes if count([m for m in members if places[m] != n]) > count(list(members))]
    assert parting_nodes(places, links) == expected


def test_long_lines_are_walked() -> None:
    """A line of 5,000 nodes, longer than Python's stack is deep, is handled; every inner node separates the others."""
    members = [f"m{i}" for i in range(5000)]
    links = [(members[i], members[i + 1]) for i in range(4999)]
    near = neighbours(members, links)
    assert connected_parts(members, near) == [members]
    assert breadth_first(members[0], near, "")[members[-1]] == (members[-2], 4999)
    assert parting_nodes({m: m for m in members}, links) == members[1:-1]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), max_size=12))
def test_a_tree_has_its_root_where_it_is_lowest(branches: list[tuple[int, int]]) -> None:
    size = len(branches) + 1
    lengths = {frozenset((i, at % i)): float(length) for i, (at, length) in enumerate(branches, 1)}
    far = {(i, j): 0.0 if i == j else lengths.get(frozenset((i, j)), 1e9) for i in range(size) for j in range(size)}
    for over, i, j in product(range(size), repeat=3):
        far[i, j] = min(far[i, j], far[i, over] + far[over, j])
    edges = [(min(ends), max(ends)) for ends in lengths]
    trees = centred(size, edges, lambda i, j: lengths[frozenset((i, j))])
    heights = [max(far[root, i] for i in range(size)) for root in range(size)]
    assert heights[trees[0].index(-1)] == min(heights)
    for tree in trees:
        assert {frozenset((i, p)) for i, p in enumerate(tree) if p >= 0} == lengths.keys()
        assert tree.count(-1) == 1
