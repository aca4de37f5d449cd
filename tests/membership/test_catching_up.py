"""Tests when a replaying newcomer is given up: only if it is not projected to catch up soon, with figures in the
reason.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from chaos_lightning.membership.catching_up import (
    FINAL_WAIT_S,
    JUDGED_AFTER,
    JUDGED_OVER_S,
    PROJECTED_LIMIT_S,
    CatchingUp,
)


def judge(lags: Iterable[float], every_s: float = 0.1, since: float = 1000.0) -> tuple[int, str]:
    """Returns the first verdict that a newcomer with these lags will never catch up ("": none), and the number of log
    entries until then.
    """
    catching_up, taken = CatchingUp(), 0
    for taken, lag in enumerate(lags, 1):
        verdict = catching_up.hopeless(int(lag), since + taken * every_s)
        if verdict:
            return taken, verdict
    return taken, ""


def shrinking(lag: float, per_s: float, seconds: float, every_s: float = 0.1) -> list[float]:
    return [lag - per_s * every_s * i for i in range(round(seconds / every_s))]


def test_a_lag_that_stays_is_given_up_once_the_window_is_full() -> None:
    taken, verdict = judge([50] * 100)
    assert JUDGED_OVER_S / 0.1 < taken <= JUDGED_OVER_S / 0.1 + 2
    assert "50 slots behind, no less than before (0 more per s)" in verdict
    assert "never" in verdict


def test_a_lag_that_grows_says_how_fast() -> None:
    _, verdict = judge(shrinking(50, -10, 10))
    assert "10 more per s" in verdict


def test_a_slot_less_per_window_is_given_up_with_its_projection() -> None:
    """A newcomer that is 300 slots behind and gains one in 3 s is given up: it would take 900 s, as the reason says."""
    lags = [300 - i // 30 for i in range(100)]
    taken, verdict = judge(lags)
    assert taken <= 40
    assert "slots behind" in verdict
    assert "less per s, projected to take" in verdict
    projected = float(verdict.split("projected to take ")[1].split(" s ")[0])
    assert 850 < projected < 950


@pytest.mark.parametrize(("share", "given_up"), [(0.8, False), (1.3, True)])
def test_the_projection_is_held_against_the_limit(share: float, given_up: bool) -> None:
    lag = 6000
    _, verdict = judge(shrinking(lag, lag / (share * PROJECTED_LIMIT_S), 4))
    assert bool(verdict) == given_up


def test_a_newcomer_that_slows_down_on_its_way_is_given_up_then() -> None:
    fast = shrinking(1000, 100, 5)
    assert judge(fast)[1] == ""
    taken, verdict = judge(fast + shrinking(fast[-1], 1, 20))
    assert len(fast) < taken < len(fast) + 40
    assert "projected" in verdict


def test_a_short_lag_is_never_judged() -> None:
    assert judge([JUDGED_AFTER] * 500) == (500, "")


def test_few_entries_or_little_time_judge_nothing() -> None:
    assert judge([100] * (JUDGED_AFTER - 1), every_s=5.0)[1] == ""
    assert judge([100] * 500, every_s=JUDGED_OVER_S / 501)[1] == ""


def test_rare_entries_are_judged_over_as_many_as_are_needed() -> None:
    taken, _ = judge([100] * 50, every_s=5.0)
    assert taken == JUDGED_AFTER


def test_it_has_caught_up_once_it_is_near_with_nothing_left_to_apply() -> None:
    catching_up = CatchingUp()
    assert not catching_up.arrives(0.0, idle=True)  # nothing was applied: what the others do is not known
    catching_up.applied = 1
    assert not catching_up.arrives(2.0, idle=True)
    assert not catching_up.arrives(1.9, idle=False)
    assert catching_up.arrives(1.9, idle=True)
    assert not catching_up.arrives(1.9, idle=True)
    assert not any(catching_up.hopeless(1000, float(i)) for i in range(100))


def test_a_state_that_is_younger_than_a_step_needs_no_entry() -> None:
    assert CatchingUp().arrives(0.0, idle=True, fresh=True)


def test_who_has_not_caught_up_lets_nobody_wait_for_the_last_entries() -> None:
    """A newcomer that has not caught up comes in by a pause, and does not wait for the log's last entries."""
    catching_up = CatchingUp()
    catching_up.applied = 5
    assert catching_up.final_wait_s == 0
    assert catching_up.arrives(1.0, idle=True)
    assert catching_up.final_wait_s == FINAL_WAIT_S
