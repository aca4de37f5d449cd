"""Tests that the rate at which a donor sends a snapshot follows the duration of its own steps."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.replication.pace import LONGEST_S, START_S, Pace

NBYTES = 100_000_000


def calm(pace: Pace, step_s: float = 0.1, steps: int = 10) -> float:
    """Reports steps of equal duration to `pace` while no snapshot is sent; returns the time after them in seconds."""
    for number in range(steps):
        pace.step(step_s, number * step_s)
    return steps * step_s


def test_nothing_waits_before_a_snapshot_is_sent() -> None:
    assert Pace().delay_s(NBYTES, 1.0) == 0.0


def test_at_first_the_whole_state_takes_a_quarter_of_a_second() -> None:
    pace = Pace()
    pace.begin(NBYTES)
    delays = [pace.delay_s(NBYTES // 100, 1.0) for _ in range(100)]
    assert delays[0] == 0.0
    assert all(b >= a for a, b in pairwise(delays))
    assert 0.8 * START_S < delays[-1] <= START_S


def test_slow_steps_lower_the_rate_and_usual_ones_raise_it_again() -> None:
    pace = Pace()
    now = calm(pace)
    pace.begin(NBYTES)
    first = pace.rate_nbytes_s
    for _ in range(3):
        now += 0.2
        pace.delay_s(1000, now - 0.05)
        pace.step(0.2, now)
    assert pace.rate_nbytes_s < first / 4
    assert pace.slowed == 3
    low = pace.rate_nbytes_s
    for _ in range(3):
        now += 0.1
        pace.delay_s(1000, now - 0.05)
        pace.step(0.1, now)
    assert pace.rate_nbytes_s > 1.9 * low


def test_steps_that_are_slow_while_nothing_is_sent_change_what_is_usual() -> None:
    pace = Pace()
    now = calm(pace)
    pace.begin(NBYTES)
    first = pace.rate_nbytes_s
    for number in range(40):
        pace.step(0.3, now + 1.0 + 0.3 * number)  # the model grew, or the machine is busy otherwise
    pace.delay_s(1000, now + 20)
    pace.step(0.3, now + 20.1)
    assert pace.rate_nbytes_s > first
    assert pace.slowed == 0


@given(st.lists(st.floats(0.001, 10.0), max_size=60))
def test_a_newcomer_is_never_starved(steps: list[float]) -> None:
    pace = Pace()
    now = calm(pace, 0.001)
    pace.begin(NBYTES)
    for seconds in steps:
        now += seconds
        pace.delay_s(1, now)
        pace.step(seconds, now)
    assert pace.rate_nbytes_s >= NBYTES / LONGEST_S * 0.999


def test_the_end_ends_the_pacing() -> None:
    pace = Pace()
    pace.begin(NBYTES)
    pace.end()
    assert pace.delay_s(NBYTES, 1.0) == 0.0
