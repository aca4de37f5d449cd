"""Tests transfer plans of other systems, each against brute force, the paper's text and the closed-form bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.transfer import plans
from chaos_lightning.errors import PlanError
from chaos_lightning.planning import shards
from chaos_lightning.planning.shards import Neighbour, SharePlan, bound_s, predict_s

NEIGHBOURS = st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 50)), min_size=1, max_size=5).map(
    lambda rows: [Neighbour(f"n{i}", delay, cost) for i, (delay, cost) in enumerate(rows)]
)
FEW = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=3).map(
    lambda rows: [Neighbour(f"n{i}", float(delay), float(cost)) for i, (delay, cost) in enumerate(rows)]
)
ALL = (plans.greedy, plans.optimal, plans.even, plans.single)


def brute(count: int, size: int, neighbours: Sequence[Neighbour]) -> float:
    """Returns the least time over all assignments of equal shards to neighbours."""
    best = math.inf
    for counts in itertools.product(range(count + 1), repeat=len(neighbours)):
        if sum(counts) == count:
            ends = [n.seconds(c * size) for n, c in zip(neighbours, counts, strict=True) if c]
            best = min(best, max(ends, default=0.0))
    return best


def whole(plan: SharePlan, nbytes: int, neighbours: Sequence[Neighbour]) -> None:
    """Checks that a plan's shares are positive, belong to neighbours, and add up to the state's size."""
    assert sum(plan.shares.values()) == nbytes
    assert all(share > 0 for share in plan.shares.values())
    assert set(plan.shares) <= {n.member for n in neighbours}
    assert plan.reason


def figure_1() -> list[Neighbour]:
    """Returns the newcomer's three links in Fig. 1 of Chaos, in time units per unit of data."""
    return [Neighbour("3", 0.0, 8.0), Neighbour("6", 0.0, 31.0), Neighbour("9", 0.0, 44.0)]


def test_figure_1_of_the_paper() -> None:
    """Ten units take 80 time units from the fastest neighbour, 88 from all nodes and 62 from three neighbours, as in
    the paper.
    """
    near = figure_1()
    assert plans.single(10, near).seconds == 80
    overlay = {("11", n.member): (0.0, n.s_per_byte) for n in near}
    # Ten nodes; the text names the path 7 - 10 - 3 - 11. One node lies behind 9, one behind 6, the others behind 3.
    overlay |= dict.fromkeys([("3", "10"), ("10", "7"), ("3", "1"), ("3", "2"), ("1", "4")], (0.0, 2.0))
    overlay |= {("6", "5"): (0.0, 2.0), ("9", "8"): (0.0, 2.0)}
    plan = plans.multi_source(10, overlay, "11")
    assert plan.routes["7"] == ("3", "10", "7")
    assert plan.shares == {str(node): 1 for node in range(1, 11)}
    assert plan.seconds == 88
    for found in (plans.greedy(10, near, shard_nbytes=1), plans.optimal(10, near, shard_nbytes=1)):
        assert found.seconds == 62
        assert found.shares == {"3": 7, "6": 2, "9": 1}
    assert bound_s(10, near) == pytest.approx(10 / (1 / 8 + 1 / 31 + 1 / 44))


@settings(deadline=None)
@example(1, [Neighbour("n0", 1.0, 1.0), Neighbour("n1", 0.0, 0.0625), Neighbour("n2", 0.0, 0.0625)], 16)
@given(st.integers(1, 10**5), NEIGHBOURS, st.integers(16, 4096))
def test_no_planner_is_faster_than_the_bound(nbytes: int, neighbours: list[Neighbour], size: int) -> None:
    bound = bound_s(nbytes, neighbours)
    count = -(-nbytes // size)
    for plan in (
        plans.greedy(nbytes, neighbours, shard_nbytes=size),
        plans.optimal(nbytes, neighbours, shard_nbytes=size),
        plans.even(nbytes, neighbours),
        plans.single(nbytes, neighbours),
    ):
        whole(plan, nbytes, neighbours)
        assert plan.seconds >= bound * (1 - 1e-9)
        assert plan.seconds == predict_s(plan.shares, neighbours)
    # Each neighbour worth using completes at least all but one of the shards that it would have been given as bytes.
    full = bound_s(count * size, neighbours)
    rates = [1 / n.s_per_byte for n in neighbours if n.delay_s < full]
    exact = plans.optimal(nbytes, neighbours, shard_nbytes=size).seconds
    assert exact <= (full + len(rates) * size / sum(rates)) * (1 + 1e-9)


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 3), FEW)
def test_algorithm_2_and_the_exact_assignment_are_what_brute_force_finds(
    count: int, size: int, neighbours: list[Neighbour]
) -> None:
    best = brute(count, size, neighbours)
    assert plans.optimal(count * size, neighbours, shard_nbytes=size).seconds == best
    assert plans.greedy(count * size, neighbours, shard_nbytes=size).seconds == best


def letter(count: int, size: int, neighbours: Sequence[Neighbour]) -> list[int]:
    """Returns the counts of shards by Algorithm 2, computed line by line as published."""
    counts = [0] * len(neighbours)
    for _ in range(count):
        loads = [n.delay_s + counts[i] * (size * n.s_per_byte) for i, n in enumerate(neighbours)]
        # The load after the shard, as the implementation rounds it: l_u + s * t_u.
        after = [n.delay_s + (counts[i] + 1) * (size * n.s_per_byte) for i, n in enumerate(neighbours)]
        assert all(a >= load for a, load in zip(after, loads, strict=True))
        counts[after.index(min(after))] += 1
    return counts


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 5), NEIGHBOURS)
def test_algorithm_2_hands_out_shards_as_it_is_written(count: int, size: int, neighbours: list[Neighbour]) -> None:
    assert plans.greedy_counts(count, size, neighbours)[0] == letter(count, size, neighbours)


@settings(deadline=None)
@given(st.integers(50, 400), FEW, st.integers(0, 40))
def test_counting_the_first_shards_at_once_changes_nothing(
    count: int, neighbours: list[Neighbour], literal: int
) -> None:
    usual = plans.greedy_counts(count, 3, neighbours)
    keep = plans._LITERAL
    plans._LITERAL = literal
    try:
        assert plans.greedy_counts(count, 3, neighbours) == usual
    finally:
        plans._LITERAL = keep


def test_algorithm_1_searches_between_the_smallest_and_the_largest_layer() -> None:
    near = [Neighbour("a", 0.0, 1e-8), Neighbour("b", 0.01, 3e-8)]
    plan = plans.greedy(50_000_000, near, layer_nbytes=[4096, 0, 9_000_000, 64_000])
    assert 4096 <= plan.shard_nbytes <= 9_000_000
    assert "4096 to 9000000 bytes searched" in plan.reason
    # The search as the paper writes it, with the objective of P2.
    low, high, best, theta = 4096, 9_000_000, 0, math.inf
    while low <= high:
        size = (low + high) // 2
        counts, _ = plans.greedy_counts(-(-50_000_000 // size), size, near)
        found = max(n.seconds(c * size) for n, c in zip(near, counts, strict=True) if c)
        if found < theta:
            theta, best, high = found, size, size - 1
        else:
            low = size + 1
    assert plan.shard_nbytes == best
    assert plan.seconds <= theta


def test_a_search_down_to_tiny_shards_ends_soon() -> None:
    near = [Neighbour(f"n{i}", 0.01 * i, (i + 1) * 1e-8) for i in range(6)]
    plan = plans.greedy(500 << 20, near, layer_nbytes=[2, 40 << 20])
    whole(plan, 500 << 20, near)
    assert plan.seconds <= 1.1 * bound_s(500 << 20, near)


def test_shared_links_of_the_overlay_carry_the_sum() -> None:
    links = {("new", "a"): (0.001, 1e-8), ("a", "b"): (0.001, 1e-9), ("b", "c"): (0.001, 1e-9)}
    plan = plans.multi_source(3_000_000, links, "new")
    assert plan.routes == {"a": ("a",), "b": ("a", "b"), "c": ("a", "b", "c")}
    assert plan.seconds == pytest.approx(0.003 + 3_000_000 * 1e-8)
    assert "the link a to new carries" in plan.reason


def test_directions_of_a_link_may_differ() -> None:
    links = {("a", "new"): (0.0, 1e-8), ("new", "a"): (0.0, 1.0), ("b", "new"): (0.0, 1e-7)}
    assert plans.multi_source(2_000, links, "new").seconds == pytest.approx(1_000 * 1e-7)


@settings(deadline=None)
@given(st.integers(1, 10**6), NEIGHBOURS, st.floats(0.001, 20))
def test_no_planner_is_faster_than_the_closed_form_behind_a_shared_ingress(
    nbytes: int, neighbours: list[Neighbour], ingress: float
) -> None:
    least = shards.closed_form(nbytes, neighbours, ingress_s_per_byte=ingress).seconds
    for planner in ALL:
        found = planner(nbytes, neighbours, ingress_s_per_byte=ingress)
        assert found.seconds >= least * (1 - 1e-6)
        assert found.seconds >= predict_s(found.shares, neighbours) * (1 - 1e-6)
    near = [Neighbour("a", 0.0, 8 / 600e6), Neighbour("b", 0.0, 8 / 300e6)]
    assert plans.single(75_000_000, near, ingress_s_per_byte=8 / 600e6).seconds == pytest.approx(1.0)


@pytest.mark.parametrize("planner", ALL)
def test_odd_input_is_refused_by_name(planner) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match="at least one neighbour"):
        planner(10, [])
    with pytest.raises(PlanError, match="a is given twice"):
        planner(10, [Neighbour("a", 0.0, 1.0), Neighbour("a", 0.0, 2.0)])
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        planner(-1, [Neighbour("a", 0.0, 1.0)])
    assert planner(0, [Neighbour("a", 0.0, 1.0)]).shares == {}


def test_an_overlay_that_is_cut_or_empty_is_refused() -> None:
    with pytest.raises(PlanError, match="no path leads from c, d to new"):
        plans.multi_source(10, {("new", "a"): (0.0, 1.0), ("c", "d"): (0.0, 1.0)}, "new")
    with pytest.raises(PlanError, match="no link"):
        plans.multi_source(10, {}, "new")
    with pytest.raises(PlanError, match="itself"):
        plans.multi_source(10, {("a", "a"): (0.0, 1.0)}, "new")
