"""Tests the loss rates and probabilities that a job learns, against sums by hand and enumeration."""

from __future__ import annotations

from itertools import combinations

import pytest

from chaos_lightning.planning.pipelines.history import PRIOR_RATE, LossHistory, fatal_risk


def test_rate_is_the_priors_before_any_history() -> None:
    assert LossHistory().rate == pytest.approx(PRIOR_RATE)


def test_rate_is_the_mean_of_the_gamma_posterior() -> None:
    history = LossHistory(prior_losses=2, prior_rate=0.5)
    history.watched(3, 10.0)
    history.lost(1)
    assert history.rate == pytest.approx((2 + 1) / (2 / 0.5 + 30))


def test_rate_is_the_observed_one_after_a_long_history() -> None:
    history = LossHistory()
    for _ in range(1000):
        history.watched(100, 36.0)
        history.lost(1)
    assert history.rate == pytest.approx(1 / 3600, rel=0.05)


def test_no_history_and_no_prior_is_no_rate() -> None:
    assert LossHistory(prior_losses=0, prior_rate=0).rate == 0


def test_missing_devices_come_back_as_often_as_they_did() -> None:
    history = LossHistory(missing_s=10.0, returned=1.0)
    history.watched(8, 5.0)
    assert history.return_rate(8) == 0
    history.watched(6, 20.0)
    history.came(2)
    # 2 missing for 20 s.
    assert history.return_rate(5) == pytest.approx(3 * (1 + 2) / (10 + 40))
    assert history.return_rate(9) == 0


def test_shares_of_sizes_are_those_of_the_dirichlet_posterior() -> None:
    history = LossHistory(prior_sizes={1: 1.0, 2: 1.0})
    for size in (2, 2, 7):
        history.lost(size)
    assert history.size_shares == {1: 1 / 5, 2: 3 / 5, 7: 1 / 5}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_risk_of_disjoint_owners_is_what_enumeration_says(size: int) -> None:
    owners = ({0}, {1, 2}, {3, 4})
    losses = [set(x) for x in combinations(range(8), size)]
    expected = [sum(own <= lost for own in owners) for lost in losses]
    found = fatal_risk([1, 2, 2], 8, {size: 1.0})
    assert found == pytest.approx(sum(expected) / len(losses))
    assert found >= sum(x > 0 for x in expected) / len(losses)


def test_risk_of_single_losses_is_the_share_of_sole_owners() -> None:
    assert fatal_risk([1, 1, 5], 10, {1: 1.0}) == pytest.approx(0.2)


def test_loss_of_more_devices_than_there_are_takes_all() -> None:
    assert fatal_risk([2], 2, {6: 1.0}) == 1.0


def test_sizes_weigh_as_often_as_they_come() -> None:
    assert fatal_risk([2], 4, {1: 0.75, 2: 0.25}) == pytest.approx(0.25 / 6)
