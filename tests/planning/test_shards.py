"""Tests plans of state transfers against the closed-form bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chaos_lightning.errors import PlanError
from chaos_lightning.planning import shards
from chaos_lightning.planning.shards import Neighbour, SharePlan, bound_s, predict_s

NEIGHBOURS = st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 50)), min_size=1, max_size=5).map(
    lambda rows: [Neighbour(f"n{i}", delay, cost) for i, (delay, cost) in enumerate(rows)]
)


def whole(plan: SharePlan, nbytes: int, neighbours: Sequence[Neighbour]) -> None:
    """Checks that a plan's shares are positive, come from known neighbours, and add up to the whole."""
    assert sum(plan.shares.values()) == nbytes
    assert all(share > 0 for share in plan.shares.values())
    assert set(plan.shares) <= {n.member for n in neighbours}
    assert plan.reason


@settings(deadline=None)
@given(st.integers(0, 10**9), NEIGHBOURS)
def test_the_closed_form_reaches_the_bound(nbytes: int, neighbours: list[Neighbour]) -> None:
    plan = shards.closed_form(nbytes, neighbours)
    whole(plan, nbytes, neighbours)
    assert plan.seconds == bound_s(nbytes, neighbours)
    byte = max(n.s_per_byte for n in neighbours)
    assert predict_s(plan.shares, neighbours) <= plan.seconds * (1 + 1e-9) + 2 * byte
    used = [n for n in neighbours if n.delay_s < plan.seconds]
    if nbytes:
        formula = (nbytes + sum(n.delay_s / n.s_per_byte for n in used)) / sum(1 / n.s_per_byte for n in used)
        assert plan.seconds == pytest.approx(formula)


@settings(deadline=None)
@given(st.integers(1, 10**6), NEIGHBOURS, st.floats(0.001, 20))
def test_a_shared_ingress_bounds_everybody(nbytes: int, neighbours: list[Neighbour], ingress: float) -> None:
    plan = shards.closed_form(nbytes, neighbours, ingress_s_per_byte=ingress)
    whole(plan, nbytes, neighbours)
    first = min(n.delay_s for n in neighbours)
    assert plan.seconds >= max(bound_s(nbytes, neighbours), first + nbytes * ingress) * (1 - 1e-9)


def test_with_a_shared_ingress_gains_shrink() -> None:
    near = [Neighbour("a", 0.0, 8 / 600e6), Neighbour("b", 0.0, 8 / 300e6)]
    plan = shards.closed_form(75_000_000, near, ingress_s_per_byte=8 / 600e6)
    assert plan.seconds == pytest.approx(1.0)
    assert "held back by the newcomer's own 600 Mbps" in plan.reason
    fair = predict_s({"a": 37_500_000, "b": 37_500_000}, near, ingress_s_per_byte=8 / 600e6)
    assert fair == pytest.approx(1.0)  # both at 300 Mbps


def test_a_link_that_starts_too_late_is_not_used() -> None:
    near = [Neighbour("a", 0.0, 1e-8), Neighbour("late", 5.0, 1e-9)]
    assert shards.closed_form(1_000_000, near).shares == {"a": 1_000_000}


@settings(deadline=None)
@given(NEIGHBOURS, st.lists(st.integers(0, 10**6), min_size=5, max_size=5), st.floats(1e-3, 10))
def test_a_fair_access_link_is_never_faster_than_either_limit(
    neighbours: list[Neighbour], sizes: list[int], ingress: float
) -> None:
    shares = {n.member: size for n, size in zip(neighbours, sizes, strict=False)}
    assume(sum(shares.values()))
    seconds = predict_s(shares, neighbours, ingress_s_per_byte=ingress)
    assert seconds >= predict_s(shares, neighbours) * (1 - 1e-9)
    assert seconds >= sum(shares.values()) * ingress * (1 - 1e-9)
    last = max(n.delay_s for n in neighbours if shares[n.member])
    assert seconds <= (last + sum(shares[n.member] * max(n.s_per_byte, ingress) for n in neighbours)) * (1 + 1e-9)


def test_odd_input_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="at least one neighbour"):
        shards.closed_form(10, [])
    with pytest.raises(PlanError, match="a is given twice"):
        shards.closed_form(10, [Neighbour("a", 0.0, 1.0), Neighbour("a", 0.0, 2.0)])
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        shards.closed_form(-1, [Neighbour("a", 0.0, 1.0)])
    assert shards.closed_form(0, [Neighbour("a", 0.0, 1.0)]).shares == {}
    with pytest.raises(PlanError, match="planned for x"):
        predict_s({"x": 1}, [Neighbour("a", 0.0, 1.0)])


@pytest.mark.parametrize(("delay", "cost"), [(-1.0, 1.0), (0.0, 0.0), (math.inf, 1.0), (0.0, math.nan)])
def test_a_neighbour_is_a_pair_of_sane_numbers(delay: float, cost: float) -> None:
    with pytest.raises(ValueError, match="neighbour x"):
        Neighbour("x", delay, cost)
