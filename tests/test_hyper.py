"""Tests that hyperparameters are written as text and read back unchanged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam

from chaos_lightning.collectives.hyper import hyper_words, scaled, set_hyper
from chaos_lightning.errors import StateError


def optimizer(**group: Any) -> SGD:
    return SGD([{"params": [torch.zeros(2, requires_grad=True)], **group}], 0.1)


def there_and_back(value: Any, before: Any = "something else") -> Any:
    giver, taker = optimizer(own=value), optimizer(own=before)
    set_hyper([taker], hyper_words([giver]))
    assert hyper_words([giver]) == hyper_words([taker])
    return taker.param_groups[0]["own"]


@pytest.mark.parametrize(
    "value",
    [0.1, 1e-300, 1 / 3, 5, -7, True, False, None, "", "words; with = 'all' \\; \"signs\" \\x3b", (0.9, 0.99), (), (1,),
     ((1, "a;b"), None), math.inf, -math.inf, (1e-6, math.inf)],
    ids=repr,
)  # fmt: skip
def test_values_come_back(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_what_is_no_number_comes_back_too() -> None:
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize("value", [np.float64(0.1), np.float32(0.1), np.int64(3)], ids=repr)
def test_a_number_of_numpy_is_a_number(value: Any) -> None:
    """NumPy numbers, whose repr is not that of Python's, are written as plain numbers."""
    assert there_and_back(value) == value


def test_lists_are_the_same_words_as_tuples_and_stay_lists() -> None:
    assert hyper_words([optimizer(own=[0.9, 0.99])]) == hyper_words([optimizer(own=(0.9, 0.99))])
    assert there_and_back((0.8, 0.9), before=[0.7, 0.7]) == [0.8, 0.9]


def test_a_tensor_is_filled_in_place() -> None:
    rate = torch.tensor(0.5)
    assert there_and_back(0.25, before=rate) is rate
    assert rate == 0.25
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    back = there_and_back((0.5, 0.75), before=betas)
    assert back[0] is betas[0]
    assert betas[1] == 0.75


def test_a_tensors_number_is_exact() -> None:
    rate = torch.tensor(0.1)
    other = torch.tensor(7.0)
    there_and_back(rate, before=other)
    assert torch.equal(rate, other)


def test_all_groups_of_all_optimizers() -> None:
    def made(rate: float) -> list[Any]:
        params = [torch.zeros(1, requires_grad=True) for _ in range(3)]
        return [Adam([{"params": params[:1], "lr": rate}, {"params": params[1:2]}], 0.5), SGD(params[2:], 2 * rate)]

    giver, taker = made(0.1), made(0.3)
    set_hyper(taker, hyper_words(giver))
    assert [g["lr"] for o in taker for g in o.param_groups] == [0.1, 0.5, 0.2]


def test_no_words_change_nothing() -> None:
    taker = optimizer(own=3)
    set_hyper([taker], "")
    assert taker.param_groups[0]["own"] == 3


def test_what_has_no_words_is_left_out() -> None:
    assert "own" not in hyper_words([optimizer(own=torch.zeros(3))])
    assert "own" not in hyper_words([optimizer(own=print)])
    assert "own" not in hyper_words([optimizer(own=(1, print))])


@pytest.mark.parametrize(
    "words",
    [
        "lr=0.1",
        "opt0.0.lr=0.1",
        "opt1.group0.lr=0.1",
        "opt0.group1.lr=0.1",
        "opt0.group0.params=()",
        "opt0.group0.lr",
        "opt0.group0.lr=print(1)",
        "opt0.group0.lr=0.1 + 1j",
        "opt0.group0.lr=[1]",
        "opt0.group0.lr=" + "(" * 5000,
        "opt0.group0.wide=0.1",
        "opt0.group0.tensor='text'",
    ],
)
def test_words_of_another_kind_are_refused(words: str) -> None:
    taker = optimizer(wide=torch.zeros(3), tensor=torch.zeros(()))
    with pytest.raises(StateError, match="cannot be set here"):
        set_hyper([taker], words)
    assert taker.param_groups[0]["lr"] == 0.1


def test_rates_are_scaled_within_a_block_alone() -> None:
    shared, weights = torch.tensor(0.5), [torch.zeros(2, requires_grad=True) for _ in range(3)]
    rates = (0.1, shared, shared)
    given = SGD([{"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)])
    with scaled(given, 3.0):
        assert [float(g["lr"]) for g in given.param_groups] == pytest.approx([0.3, 1.5, 1.5])
    assert [g["lr"] for g in given.param_groups] == [0.1, shared, shared]
    assert all(g["lr"] is shared for g in given.param_groups[1:])
    assert shared == 0.5


def test_a_rate_that_a_hook_sets_meanwhile_stays() -> None:
    given = optimizer()
    with scaled(given, 3.0):
        given.param_groups[0]["lr"] = 0.7
    assert given.param_groups[0]["lr"] == 0.7
    del given.param_groups[0]["lr"]
    with scaled(given, 3.0):
        assert "lr" not in given.param_groups[0]
