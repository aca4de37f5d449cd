"""Tests spanning trees of measured networks, against brute force on small ones."""

from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from overlay_networks import brute_force_trees, network_of, networks

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.network import Network
from chaos_lightning.planning.packing import bottleneck_bps, most_across, pack, spanning, weigh, widest

CHUNK = 1 << 16


def narrowest(network, tree):
    return min(network.worth(e) for e in tree)


def edges_of(parents):
    return tuple(sorted((min(i, p), max(i, p)) for i, p in enumerate(parents) if p >= 0))


@given(networks(most=5))
def test_no_spanning_tree_is_wider_than_the_widest(network):
    assume(len(network) > 1)
    best = max(narrowest(network, tree) for tree in brute_force_trees(network))
    found = widest(network, 1 << 24, CHUNK)
    assert narrowest(network, edges_of(found)) == best == bottleneck_bps(network)


@settings(deadline=None)
@given(networks(most=5, access=True))
def test_a_packing_carries_what_brute_force_finds_and_the_bound_says(network):
    """Packed trees carry as much as the optimum over all spanning trees, and the bound is no lower."""
    assume(len(network) > 1)
    packing = pack(network)
    everything = sum(weigh(network, brute_force_trees(network)))
    assert packing.rate_bps == pytest.approx(everything, rel=1e-4)
    assert packing.rate_bps <= packing.bound_bps * (1 + 1e-6)
    assert packing.bound_bps == pytest.approx(everything, rel=1e-3)


def partitions(items):
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        for i, part in enumerate(smaller):
            yield [*smaller[:i], [first, *part], *smaller[i + 1 :]]
        yield [[first], *smaller]


@settings(deadline=None)
@given(networks(most=5))
def test_the_bound_is_that_of_tutte_and_nash_williams(network):
    assume(len(network) > 1)
    least = float("inf")
    for parts in partitions(list(range(len(network)))):
        if len(parts) > 1:
            of = {i: k for k, part in enumerate(parts) for i in part}
            crossing = sum(network.worth(e) for e in network.edges if of[e[0]] != of[e[1]])
            least = min(least, crossing / (len(parts) - 1))
    assert pack(network).rate_bps == pytest.approx(least, rel=1e-4)


@settings(deadline=None)
@given(networks(most=5, access=True, hosts=True))
def test_no_set_of_trees_carries_more_across_any_parts_than_is_said(network):
    """No set of trees exceeds `most_across` for any partition, by brute force over all trees and partitions."""
    assume(len(network) > 1)
    everything = sum(weigh(network, brute_force_trees(network)))
    for parts in partitions(list(range(len(network)))):
        of = {i: k for k, part in enumerate(parts) for i in part}
        assert everything <= most_across(network, [of[i] for i in range(len(network))]) * (1 + 1e-6)


@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("degree", [8, 0])
def test_the_bound_of_many_members_is_that_of_their_cards(size, degree):
    """For many members the bound is that of the cards (n - 1 edges a tree, two cards an edge), though links could carry
    up to 60 times as much.
    """
    ids = [f"m{i}" for i in range(size)]
    steps = range(1, degree // 2 + 1 if degree else size // 2 + 1)
    pairs = {tuple(sorted((i, (i + step) % size))) for i in range(size) for step in steps}
    network = Network([rank(name, "") for name in ids], {(ids[i], ids[j]): (1e-4, 1e9, 1e9) for i, j in pairs})
    cards_bps = size * 1e9 / (2 * (size - 1))
    assert pack(network).bound_bps == pytest.approx(cards_bps)
    assert most_across(network, range(size)) == pytest.approx(cards_bps)


@settings(deadline=None, max_examples=30)
@given(networks(least=4, most=10, access=True))
def test_no_link_is_overfull(network):
    packing = pack(network)
    load = [0.0] * len(network.resources)
    for tree, rate in packing.trees:
        assert spanning(len(network), tree) == tree
        for e in tree:
            for r in network.uses[e]:
                load[r] += rate
    for used, resource in zip(load, network.resources, strict=True):
        assert used <= resource.capacity_bps * (1 + 1e-5), resource.name
    if not network.access:
        assert packing.rate_bps >= bottleneck_bps(network) * (1 - 1e-5)


def test_a_triangle_carries_one_and_a_half_links():
    packing = pack(network_of({"ab": 100, "bc": 100, "ac": 100}))
    assert packing.rate_bps == pytest.approx(150e6, rel=1e-5)
    assert packing.bound_bps == pytest.approx(150e6, rel=1e-5)
    assert len(packing.trees) == 3


def test_an_access_that_all_links_share_limits_the_packing():
    links = dict.fromkeys(map("".join, combinations("abcd", 2)), 100)
    free = pack(network_of(links))
    shared = pack(network_of(links, access=dict.fromkeys("abcd", 100)))
    assert free.rate_bps == pytest.approx(200e6, rel=1e-5)
    assert shared.rate_bps == pytest.approx(400e6 / 6, rel=1e-4)


def test_machines_with_several_ranks_have_one_network_card():
    names = ["a0", "a1", "b0", "b1"]
    links = {(x, y): (0.0, 1e9, 1e9) if x[0] != y[0] else (0.0, 40e9, 40e9) for x, y in combinations(names, 2)}
    network = Network([rank(n, n[0]) for n in names], links)
    assert pack(network).rate_bps == pytest.approx(1e9, rel=1e-4)


def rank(name, host):
    from overlay_networks import Rank

    return Rank(name, host)


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ({("a", "z"): (0, 1, 1)}, "link a-z names 'z', which is no member"),
        ({("a", "a"): (0, 1, 1)}, "link a-a leads from 'a' to itself"),
        ({("a", "b"): (-1, 1, 1)}, "latency -1 s"),
        ({("a", "b"): (0, float("nan"), 1)}, "expected finite"),
        ({("a", "b"): (0, 1, 1), ("b", "a"): (0, 1, 1)}, "link b-a is given twice"),
        ({("a", "b"): (0, 1, 1)}, r"the parts are: a, b \| c\. Expected a path"),
        ({("a", "b"): (0, 1, 1), ("b", "c"): (0, 0, 1)}, r"the parts are: a, b \| c"),
        ({}, r"the parts are: a \| b \| c"),
    ],
)
def test_links_that_make_no_network(links, words):
    with pytest.raises(PlanError, match=words):
        Network([rank(n, "") for n in "abc"], links)


def test_members_that_make_no_network():
    with pytest.raises(PlanError, match="at least one member"):
        Network([], {})
    with pytest.raises(PlanError, match="not distinct"):
        Network([rank("a", ""), rank("a", "")], {})
