"""Tests code around the engine that plain loops and Lightning share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from strategy_models import Regression, loader, trainer
from torch import nn, optim

from chaos_lightning.errors import StateError
from chaos_lightning.member.training import reduced_buffers, switch_quickly
from chaos_lightning.trainer import Trainer

OWN_S = 0.02


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(OWN_S)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("fails", [False, True])
def test_threads_switch_quickly_within_fit_only(tmp_path: Path, fails: bool) -> None:
    seen: list[float] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(sys.getswitchinterval())
            if fails:
                raise KeyError("the test said so")

    try:
        trainer(tmp_path, callbacks=[Looks()]).fit(Regression(), loader())
    except KeyError:
        assert fails
    assert set(seen) == {5e-4}
    assert sys.getswitchinterval() == pytest.approx(OWN_S)


def test_the_last_training_of_a_process_puts_back_what_was_before_the_first() -> None:
    first, second = switch_quickly(), switch_quickly()
    first()
    first()
    assert sys.getswitchinterval() == pytest.approx(5e-4)
    second()
    assert sys.getswitchinterval() == pytest.approx(OWN_S)


def test_what_somebody_else_has_set_meanwhile_stays() -> None:
    end = switch_quickly()
    sys.setswitchinterval(0.01)
    end()
    assert sys.getswitchinterval() == pytest.approx(0.01)


def test_a_buffer_that_is_not_there_is_named() -> None:
    """A misspelt buffer name is an error: otherwise the buffer that was meant would not be averaged, and members
    would drift apart.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert [name for name, _ in reduced_buffers(model)] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    batches = loader()
    with Trainer(name="a") as chaos, pytest.raises(StateError, match=r"reduced_buffers=.* names \['0\.mean'\], which"):
        chaos.prepare(model, optim.SGD(model.parameters(), 0.1), batches, reduced_buffers=["0.mean"])
