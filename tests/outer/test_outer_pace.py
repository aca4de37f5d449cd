"""Dynamic local steps: clusters make numbers of inner steps that fit their speed."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.outer.rules.pace import local_steps
from chaos_lightning.outer.rules.types import IncarnationId


def ids(count: int) -> list[IncarnationId]:
    return [IncarnationId(f"c{number}", 1) for number in range(count)]


def test_clusters_of_unequal_speed_end_together() -> None:
    rates = dict(zip(ids(4), (1.0, 3 / 5, 3 / 7, 1 / 3), strict=True))
    steps, why = local_steps(rates, {}, 16)
    assert list(steps.values()) == [27, 16, 12, 9]
    assert why == "steps by measured rates: c0~1 27, c1~1 16, c2~1 12, c3~1 9"


def test_steps_change_by_at_most_a_quarter() -> None:
    a, b = ids(2)
    steps, why = local_steps({a: 9.0, b: 1.0}, {a: 64, b: 64}, 64)
    assert steps == {a: 80, b: 48}
    assert "c0~1 80 (not yet 115)" in why
    for _ in range(8):
        steps, _ = local_steps({a: 9.0, b: 1.0}, steps, 64)
    assert steps == {a: 115, b: 13}


def test_a_cluster_of_few_steps_can_still_change() -> None:
    """A quarter of 1 is rounded to 0, so that a cluster of one step for each push could never get more; it may change
    by one.
    """
    a, b = ids(2)
    assert local_steps({a: 1.0, b: 1.0}, {a: 1, b: 3}, 4)[0] == {a: 2, b: 4}


def test_one_whose_rate_is_unknown_counts_as_the_average() -> None:
    a, b, c = ids(3)
    assert local_steps({a: 3.0, b: 1.0, c: 0.0}, {}, 12)[0] == {a: 18, b: 6, c: 12}
    steps, why = local_steps({a: 0.0, b: math.nan, c: math.inf}, {}, 12)
    assert steps == {a: 12, b: 12, c: 12}
    assert why.startswith("no rate is known yet")
    assert local_steps({}, {}, 12)[0] == {}


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), st.integers(1, 500))
def test_a_round_is_a_full_one(rates: list[float], inner_steps: int) -> None:
    """If each cluster's steps were rounded by themselves, a round would often lack a step, and the momentum move only
    every other round.
    """
    given_rates = dict(zip(ids(len(rates)), rates, strict=True))
    steps, _ = local_steps(given_rates, {}, inner_steps)
    assert all(number >= 1 for number in steps.values())
    surplus = sum(steps.values()) - inner_steps * len(rates)
    slow = sum(number == 1 for number in steps.values())
    assert 0 <= surplus <= slow
    whole = math.fsum(rates)
    for who, rate in given_rates.items():
        assert abs(steps[who] - max(1.0, inner_steps * len(rates) * rate / whole)) < 1 + 1e-6
    assert local_steps(dict(reversed(given_rates.items())), {}, inner_steps)[0] == steps


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 300)), min_size=1, max_size=8))
def test_no_jump_whatever_is_measured(clusters: list[tuple[float, int]]) -> None:
    rates = {who: rate for who, (rate, _) in zip(ids(len(clusters)), clusters, strict=True)}
    before = {who: steps for who, (_, steps) in zip(ids(len(clusters)), clusters, strict=True)}
    after, _ = local_steps(rates, before, 64)
    for who, steps in after.items():
        assert steps >= 1
        assert abs(steps - before[who]) <= max(1, before[who] / 4)
