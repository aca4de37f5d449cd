"""When the leader stops collecting pushes and decides a round, and for which clusters it waits."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.outer.rules.arrivals import ArrivalRates
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import IncarnationId
from chaos_lightning.outer.rules.window import Window

A, B, C, D = (IncarnationId(name, 1) for name in "abcd")
ALL = frozenset((A, B, C, D))
RATES = ArrivalRates(pushes=4.0, span_s=100.0, cost_s=40.0, rounds=1.0)
"""A round takes 100 s. One push in 25 s, of which 40 are lost by coming too late: waiting ln(1.6) 25 = 11.75 s pays."""


def opened(policy: str = "di_ps", rates: ArrivalRates = RATES, training: frozenset[IncarnationId] = ALL) -> Window:
    return Window.opened(1000.0, training, rates, OuterSettings(policy=policy))


def test_it_closes_when_everybody_that_trains_is_in() -> None:
    window = opened()
    due = window.due(1001.0, ALL, ALL, {})
    assert due.closes
    assert due.usual == 4
    assert due.reason == "everybody that trains is in (4)"


def test_it_closes_at_its_deadline_and_names_who_is_missing() -> None:
    window = opened()
    assert window.deadline_s - window.opened_s == pytest.approx(25 * math.log(1.6))
    early = window.due(1011.7, ALL, {A, B}, {})
    assert not early.closes
    assert early.reason.startswith("waits for c~1, d~1 (11.8 s: 0.04 pushes/s, 40 s lost by coming too late)")
    late = window.due(1011.8, ALL, {A, B}, {})
    assert late.closes
    assert late.usual == 4
    assert late.reason.endswith("missing: c~1, d~1")


def test_the_longest_wait_is_half_a_round() -> None:
    window = opened(rates=ArrivalRates(4.0, 100.0, 4000.0, 1.0))
    assert window.deadline_s == 1050.0
    assert "0.5 of a round" in window.why


def test_robust_waits_so_long_whatever_coming_too_late_costs() -> None:
    """Under `robust` the leader collects pushes for half a round, however much time late ones lose: clusters train on,
    and the gate judges many pushes better than few.
    """
    for cost_s in (0.0, 40.0, 4000.0):
        window = opened("robust", ArrivalRates(4.0, 100.0, cost_s, 1.0))
        assert window.deadline_s == 1050.0
        assert not window.due(1049.0, ALL, {A, B}, {}).closes
        assert window.due(1050.0, ALL, {A, B}, {}).reason.startswith("the deadline has passed (50 s: 0.5 of a round)")
    assert opened("robust", ArrivalRates()).deadline_s == 1000.0, "how long a round is, the first one teaches"


def test_nobody_is_waited_for_where_waiting_does_not_pay() -> None:
    for rates in (ArrivalRates(), ArrivalRates(4.0, 100.0, 25.0, 1.0), ArrivalRates(4.0, 100.0, 0.0, 1.0)):
        window = opened(rates=rates)
        assert window.deadline_s == 1000.0
        assert window.due(1000.0, ALL, {A}, {}).closes


def test_later_arrivals_do_not_wind_the_deadline_up() -> None:
    """Planted bug: if each arriving push moved the deadline, a round could be put off for ever."""
    window = opened()
    with pytest.raises(FrozenInstanceError):
        window.deadline_s = 2000.0  # type: ignore[misc]
    closed = []
    for number, staged in enumerate(({A}, {A, B}, {A, B, C})):
        now_s = 1000.0 + 6 * number
        closed.append(window.due(now_s, ALL, staged, {D: now_s + 5}).closes)
    assert closed == [False, False, True]


def test_a_push_under_way_is_waited_for_only_if_it_will_be_in_before_the_deadline() -> None:
    window = opened()
    assert not window.due(1001.0, ALL, {A, B, C}, {D: 1010.0}).closes
    hopeless = window.due(1001.0, ALL, {A, B, C}, {D: 1012.0})
    assert hopeless.closes
    assert hopeless.reason == "what is missing will not be in before the deadline: d~1"
    assert hopeless.usual == 4
    assert not window.due(1001.0, ALL, {A, B}, {D: 1012.0}).closes, "c may still come"


def test_sync_waits_for_all_that_train_without_a_deadline() -> None:
    window = opened("sync")
    for now_s in (1001.0, 1e9):
        waiting = window.due(now_s, ALL, {A, B, C}, {D: math.inf})
        assert not waiting.closes
        assert "waits for d~1" in waiting.reason
    assert window.due(1e9, ALL, ALL, {}).closes


def test_sync_does_not_wait_for_a_newcomer() -> None:
    """Planted bug: if a round waited for a cluster that has just joined, that cluster's first steps would delay all
    others.
    """
    window = opened("sync", training=frozenset((A, B)))
    due = window.due(1001.0, frozenset((A, B, C)), {A, B}, {})
    assert due.closes
    assert due.usual == 2
    early = window.due(1001.0, frozenset((A, B, C)), {A, B, C}, {})
    assert early.usual == 3, "but it counts if it is in"


@pytest.mark.parametrize("policy", ["robust", "sync", "di_ps"])
def test_who_leaves_or_has_no_samples_left_is_not_waited_for(policy: str) -> None:
    window = opened(policy)
    assert not window.due(1001.0, ALL, {A, B, C}, {}).closes
    assert window.due(1001.0, ALL - {D}, {A, B, C}, {}).closes
    # At the end of an epoch those whose last push is staged train no more; they count all the same.
    last = window.due(1001.0, frozenset(), {A, B, C}, {})
    assert last.closes
    assert last.usual == 3


def test_async_waits_for_nobody() -> None:
    window = opened("async")
    due = window.due(1000.0, ALL, {A}, {B: 1000.5})
    assert due.closes
    assert due.usual == 4
    assert "async takes each push by itself" in due.reason


def test_a_window_whose_only_push_was_removed_does_not_close() -> None:
    due = opened().due(2000.0, ALL, frozenset(), {})
    assert not due.closes
    assert "forgotten" in due.reason


def test_many_that_are_missing_are_not_all_named() -> None:
    many = frozenset(IncarnationId(f"c{number}", 1) for number in range(9))
    reason = opened(training=many).due(1001.0, many, {IncarnationId("c0", 1)}, {}).reason
    assert "c1~1, c2~1, c3~1, c4~1 and 4 more" in reason


def test_rates_follow_the_rounds() -> None:
    rates = ArrivalRates()
    assert (rates.pushes_per_s, rates.missed_s, rates.grace_s, rates.round_s(4)) == (0.0, 0.0, 0.0, 0.0)
    for _ in range(50):
        rates = rates.after(4, 100.0, 40.0)
    assert rates.pushes_per_s == pytest.approx(0.04)
    assert rates.missed_s == pytest.approx(40.0)
    assert rates.round_s(4) == pytest.approx(100.0)
    for _ in range(50):
        rates = rates.after(4, 10.0, 4.0)
    assert rates.round_s(4) == pytest.approx(10.0, rel=0.06)
    assert rates.missed_s == pytest.approx(4.0, rel=0.06)


@pytest.mark.parametrize(("span_s", "cost_s"), [(0.0, 1.0), (-5.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, -1.0)])
def test_a_round_whose_times_nobody_knows_teaches_nothing(span_s: float, cost_s: float) -> None:
    assert RATES.after(3, span_s, cost_s) is RATES


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e5))
def test_the_grace_is_where_the_paper_s_cost_is_least(pushes_per_s: float, missed_s: float) -> None:
    rates = ArrivalRates(pushes_per_s, 1.0, missed_s, 1.0)

    def cost_s(wait_s: float) -> float:
        return wait_s + missed_s * math.exp(-pushes_per_s * wait_s)

    best = rates.grace_s
    assert best >= 0
    for other in (0.0, best * 0.5, best * 0.9, best * 1.1, best * 2, best + 0.1):
        assert cost_s(best) <= cost_s(other) * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.sets(st.sampled_from(sorted(ALL)), min_size=1)), max_size=12),
    st.sampled_from(["robust", "async", "di_ps"]),
)
def test_it_closes_at_the_deadline_whatever_came_before(
    asked: list[tuple[float, set[IncarnationId]]], policy: str
) -> None:
    window = opened(policy)
    for ahead_s, staged in sorted(asked, key=lambda one: one[0]):
        due = window.due(1000.0 + ahead_s, ALL, staged, {D: 1e9})
        assert due.reason
        assert due.closes or 1000.0 + ahead_s < window.deadline_s <= 1050.0
