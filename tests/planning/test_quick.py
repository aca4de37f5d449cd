"""Tests all-reduce plans made within milliseconds: they are valid, spread the work, and are about as fast as searched
ones.
"""

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.graph import Pair, connected_parts, neighbours
from chaos_lightning.planning.network import Network
from chaos_lightning.planning.overlay import plan
from chaos_lightning.planning.quick import quick
from chaos_lightning.planning.trees import misfit
from chaos_lightning.protocol.types import Member, PlanSpec

NBYTES = 64 << 20
Values = dict[Pair, tuple[float, float, float]]


def members(size: int, workers: int = 1) -> list[Member]:
    return [Member(f"m{i}~{i}", f"m{i}", f"h{i // workers}", "", 0) for i in range(size)]


def regular(size: int, rates: tuple[float, float] = (1e9, 1e9)) -> Values:
    """Returns a network with 8 links for each member: to its next two neighbours on either side of a ring, and to far
    members.
    """
    chance = random.Random(size)
    pairs = {(i, (i + step) % size) for i in range(size) for step in (1, 2)}
    for _ in range(2):
        order = chance.sample(range(size), size)
        pairs |= set(zip(order, order[1:] + order[:1], strict=True))
    found = sorted({(min(pair), max(pair)) for pair in pairs})
    return {(f"m{a}~{a}", f"m{b}~{b}"): (5e-4, chance.uniform(*rates), chance.uniform(*rates)) for a, b in found}


def cards(links: Values) -> dict[str, tuple[float, float]]:
    """Returns rates of network cards such that each member's card is as fast as its fastest link."""
    widths: dict[str, float] = {}
    for pair, (_, there, back) in links.items():
        for name in pair:
            widths[name] = max(widths.get(name, 0.0), min(there, back))
    return {name: (bps, bps) for name, bps in widths.items()}


@given(st.integers(1, 20), st.data())
def test_fits_whatever_connects_all(size: int, data: st.DataObject) -> None:
    ids = [m.id for m in members(size)]
    value = st.sampled_from([0.0, 1e3, 1e8, 1e9])
    links = {
        pair: (0.001, data.draw(value), data.draw(value))
        for pair in combinations(ids, 2)
        if data.draw(st.integers(0, 3)) == 0
    }
    there = [pair for pair, (_, up, down) in links.items() if up and down]
    workers = data.draw(st.sampled_from([1, 3]))
    if len(connected_parts(ids, neighbours(ids, there))) == 1:
        spec, _ = quick(members(size, workers), links)
        assert misfit(spec, ids, there) == ""
    else:
        with pytest.raises(PlanError, match="do not connect all members; the parts are"):
            quick(members(size, workers), links)


@pytest.mark.parametrize("size", [24, 64, 128])
def test_eight_links_each_are_nearly_as_good_as_all(size: int) -> None:
    """With limited cards, 8 links for each member are nearly as good as links between all; with limited links, the
    quick plan is nearly as good as a searched one.
    """
    here, links = members(size), regular(size)
    spec, _ = quick(here, links)
    sparse_s = Network(here, links, cards(links)).seconds(spec, NBYTES)
    every = dict.fromkeys(combinations([m.id for m in here], 2), (0.0005, 1000000000.0, 1000000000.0))
    full_s = Network(here, every, cards(links)).seconds(PlanSpec(), NBYTES)
    assert sparse_s <= 1.15 * full_s
    if size < 128:
        assert Network(here, links).seconds(spec, NBYTES) <= 1.15 * plan(here, links, policy="packed").seconds
    if size == 64:
        assert plan(here, links).spec == spec, "a search finds none that are better"


def test_auto_leaves_long_searches_out() -> None:
    here, links = members(300), regular(300)
    spec, reason, _ = plan(here, links)
    assert spec == quick(here, links)[0]
    assert "widest" not in reason


def test_uneven_links_and_slow_members_are_spared() -> None:
    here, links = members(40), regular(40, (1e8, 1e9))
    spec, _ = quick(here, links)
    assert Network(here, links).seconds(spec, NBYTES) <= 1.6 * plan(here, links).seconds
    slow = {pair: (5e-4, 1e7, 1e7) if "m7~7" in pair else value for pair, value in regular(40).items()}
    spec, _ = quick(here, slow)
    assert all("m7~7" not in tree.parents for tree in spec.trees), "a slow member is a leaf"


def test_every_pair_alike_takes_no_trees() -> None:
    ids = [m.id for m in members(20)]
    links = dict.fromkeys(combinations(ids, 2), (0.0005, 1000000000.0, 1000000000.0))
    assert quick(members(20), links)[0] == PlanSpec()
    links[ids[0], ids[1]] = (0.01, 1e5, 1e5)
    spec, _ = quick(members(20), links)
    assert spec.kind == "trees"
    assert misfit(spec, ids, [pair for pair in links if pair != (ids[0], ids[1])]) == "", "the slow one is of no use"


def test_workers_of_a_machine_share_its_card() -> None:
    """Each tree enters each machine just once, over a link of any of the machine's workers."""
    here = members(24, workers=4)
    links = {(a.id, b.id): (1e-5, 1e11, 1e11) for a, b in combinations(here, 2) if a.host == b.host}
    links |= {(here[i].id, here[(i + 4) % 24].id): (5e-4, 1e9, 1e9) for i in range(24)}
    spec, _ = quick(here, links)
    host = {m.id: m.host for m in here}
    for tree in spec.trees:
        crossing = sum(bool(p) and host[m] != host[p] for m, p in zip(tree.members, tree.parents, strict=True))
        assert crossing == 5


def test_thousands_in_a_line_are_rooted_in_the_middle() -> None:
    here = members(3000)
    links = {(a.id, b.id): (5e-4, 1e9, 1e9) for a, b in pairwise(here)}
    spec, _ = quick(here, links)
    assert {tree.parents.index("") for tree in spec.trees} <= {1499, 1500}
    network = Network(here, links)
    assert network.rooted(network.edges, 1 << 16).index(-1) == 1499
    assert network.seconds(spec, NBYTES) > 0
