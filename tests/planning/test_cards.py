"""Tests network cards shared by all links of a machine: their estimated rates, and plans of `auto` that spare them."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from test_quick import NBYTES, Values, members, regular

from chaos_lightning.planning.network import Network
from chaos_lightning.planning.overlay import Planned, plan
from chaos_lightning.planning.quick import quick
from chaos_lightning.planning.trees import fewest_hops
from chaos_lightning.protocol.types import SMALL_JOB

BPS = 1e9
LATENCY_S = 2e-4


def names(size: int) -> list[str]:
    return [m.id for m in members(size)]


def star(size: int) -> Values:
    """Returns links between the first member and every other one."""
    first, *others = names(size)
    return {(first, other): (LATENCY_S, BPS, BPS) for other in others}


def wheel(size: int) -> Values:
    """Returns links between the first member and every other one, and a ring of the others."""
    _, *others = names(size)
    ring = zip(others, [*others[1:], others[0]], strict=True)
    return star(size) | dict.fromkeys(ring, (LATENCY_S, BPS, BPS))


def floor_s(size: int) -> float:
    """Returns the least seconds of an all-reduce that cards allow: each tree has n - 1 edges, and each edge loads two
    cards.
    """
    return 8 * NBYTES / BPS * 2 * (size - 1) / size


def unlimited(size: int, links: Values) -> Planned:
    """Returns the plan that `auto` makes when no card limits the rates."""
    return plan(members(size), links, access=dict.fromkeys(names(size), (1e15, 1e15)))


def test_links_of_a_host_share_its_card_in_a_large_job() -> None:
    size = SMALL_JOB + 1
    network = Network(members(size), star(size))
    spec = fewest_hops(network.ids, network.links)
    each_s = 8 * NBYTES / BPS
    assert network.seconds(spec, NBYTES) == pytest.approx((size - 1) * each_s, rel=0.02)
    fast = Network(members(size), star(size), {network.ids[0]: (4 * BPS, 4 * BPS)})
    assert fast.seconds(spec, NBYTES) == pytest.approx((size - 1) / 4 * each_s, rel=0.02), "what is known counts"


def test_a_card_is_as_fast_as_the_fastest_link_through_it() -> None:
    size = SMALL_JOB + 1
    links = star(size)
    links[names(size)[0], names(size)[1]] = (LATENCY_S, 4 * BPS, 4 * BPS)
    network = Network(members(size), links)
    spec = fewest_hops(network.ids, network.links)
    assert network.seconds(spec, NBYTES) == pytest.approx((size - 1) / 4 * 8 * NBYTES / BPS, rel=0.02)


@pytest.mark.parametrize("size", [24, 64])
def test_a_hub_is_not_everybodys_parent(size: int) -> None:
    planned = plan(members(size), wheel(size))
    assert planned.seconds <= 1.2 * floor_s(size)
    first, _ = quick(members(size), wheel(size))
    assert Network(members(size), wheel(size)).seconds(first, NBYTES) <= 1.25 * floor_s(size)
    blind = unlimited(size, wheel(size))
    assert Network(members(size), wheel(size)).seconds(blind.spec, NBYTES) > 2 * floor_s(size)


@pytest.mark.parametrize("size", [2, 3, 8, SMALL_JOB])
def test_small_jobs_have_the_trees_that_they_had(size: int) -> None:
    chance = random.Random(size)
    every = dict.fromkeys(combinations(names(size), 2), (LATENCY_S, BPS, BPS))
    sparse = {pair: v for pair, v in every.items() if pair[0] == names(size)[0] or chance.random() < 0.3}
    for links in (every, sparse, star(size)):
        assert plan(members(size), links) == unlimited(size, links)


@pytest.mark.parametrize("size", [24, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slowest_bps", [1e8, 5e8, 1e9])
def test_auto_is_never_worse_for_knowing_of_cards(size: int, slowest_bps: float) -> None:
    links = regular(size, (slowest_bps, BPS))
    true = Network(members(size), links, dict.fromkeys(names(size), (BPS, BPS)))
    planned, blind = plan(members(size), links), unlimited(size, links)
    assert true.seconds(planned.spec, NBYTES) <= 1.03 * true.seconds(blind.spec, NBYTES)


@pytest.mark.parametrize("size", [24, 64])
def test_slow_cards_are_leaves_and_slow_links_are_left_out(size: int) -> None:
    """With every second member at a tenth of the rate, an all-reduce takes at most 1.3 times what the slow rate
    requires.
    """
    slow = set(names(size)[1::2])
    links = {pair: (LATENCY_S, *[BPS if slow.isdisjoint(pair) else BPS / 10] * 2) for pair in regular(size)}
    spec, _ = quick(members(size), links)
    assert Network(members(size), links).seconds(spec, NBYTES) <= 1.3 * 8 * NBYTES / (BPS / 10)


@pytest.mark.parametrize("machines", [8, SMALL_JOB])
def test_heads_of_machines_are_planned_for_with_the_cards_of_these(machines: int) -> None:
    """Planning for heads of machines takes their cards into account, which could not be inferred from links among the
    heads alone.
    """
    here, ids = members(2 * machines, workers=2), names(2 * machines)
    head = dict(zip(names(machines), ids[::2], strict=True))
    links = {(head[a], head[b]): values for (a, b), values in wheel(machines).items()}
    links |= {(ids[i], ids[i + 1]): (1e-5, 100 * BPS, 100 * BPS) for i in range(0, len(ids), 2)}
    assert plan(here, links, policy="local", nbytes=NBYTES).seconds <= 1.3 * floor_s(machines)
