"""Tests the pauses before a process is started again, and when it is given up."""

from __future__ import annotations

from chaos_lightning.machine.restarts import RestartPolicy, Restarts


def test_pauses_double_up_to_a_bound_and_begin_anew_after_a_steady_run() -> None:
    restarts = Restarts(RestartPolicy(1.0, 5.0, steady_s=10.0))
    assert [restarts.failed(0.1) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert restarts.failed(10.0) == 1.0
    assert restarts.failures == 0
    assert restarts.failed(0.1) == 1.0


def test_the_first_failures_cost_no_pause() -> None:
    restarts = Restarts(RestartPolicy(0.2, 10.0, steady_s=10.0, at_once=1))
    assert [restarts.failed(0.1) for _ in range(4)] == [0.0, 0.2, 0.4, 0.8]
    assert restarts.failed(60.0) == 0.0


def test_one_that_fails_too_often_in_a_row_is_given_up() -> None:
    restarts = Restarts(RestartPolicy(0.0, 0.0, steady_s=10.0, most=3))
    for ran_s, over in ((1.0, False), (1.0, False), (11.0, False), (1.0, False), (1.0, False), (1.0, True)):
        restarts.failed(ran_s)
        assert restarts.exhausted == over
    restarts.well()
    assert not restarts.exhausted


def test_a_process_that_fails_for_ever_has_a_finite_pause() -> None:
    restarts = Restarts(RestartPolicy(1.0, 30.0))
    assert [restarts.failed() for _ in range(5000)][-1] == 30.0
