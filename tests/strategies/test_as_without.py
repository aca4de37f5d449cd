"""Tests cases in which a Trainer with chaos once behaved differently from one without it; Lightning's own tests
found them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner import Tuner
from strategy_models import Regression, loader, trainer, weights
from torch.utils.data import SequentialSampler

import chaos_lightning  # noqa: F401  (registers "chaos")

pytestmark = pytest.mark.usefixtures("double")


class Stop(Exception):
    """Exception that the user's code raises."""


class Raises(Regression):
    """Model that raises an exception in the middle of an epoch."""

    at = 8

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.at:
            raise Stop
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("ends", ["raises", "stops"])
def test_what_is_saved_after_fit_stands_where_fit_ended(tmp_path: Path, ends: str) -> None:
    """A checkpoint that is written after fit has ended within an epoch holds the data's position: a job that resumes
    from it trains on the rest of that epoch, then on the next one.
    """
    if ends == "raises":
        first: Regression = Raises()
        run = trainer(tmp_path, max_epochs=2)
        with pytest.raises(Stop):
            run.fit(first, loader())
    else:
        first = Regression()
        run = trainer(tmp_path, max_epochs=-1, max_steps=8)
        run.fit(first, loader())
    (data,) = run.fit_loop.state_dict()["state_dict"]["combined_loader"]
    assert (data["epoch"], data["yielded"], data["finished"]) == (1, 2, False)
    assert data["ledger"] == [["", 1, [[0, 8]]]]
    if ends == "stops":
        return  # Lightning counts the epoch as over then, with any strategy
    saved = tmp_path / "after.ckpt"
    run.save_checkpoint(saved)
    second, whole = Regression(), Regression()
    again = trainer(tmp_path, max_epochs=3)
    again.fit(second, loader(), ckpt_path=saved)
    trainer(tmp_path, max_epochs=3).fit(whole, loader())
    assert torch.equal(torch.cat(first.seen + second.seen), torch.cat(whole.seen))
    assert torch.allclose(weights(second), weights(whole), rtol=1e-6)
    assert again.global_step == 18


def test_tuner_works_with_a_trainer_that_has_fitted(tmp_path: Path) -> None:
    """The Tuner asks before its trial fits whether the strategy is distributed; after a fit the answer must be no."""

    class Sized(Regression):
        batch_size = 2

        def val_dataloader(self) -> Any:
            return loader(batch_size=self.batch_size)

    model, run = Sized(), trainer(tmp_path, max_epochs=1)
    run.fit(model, loader())
    Tuner(run).scale_batch_size(model, method="validate", max_trials=2)
    assert model.batch_size > 2


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_outside_fit_loaders_are_the_users(tmp_path: Path, stage: str) -> None:
    """Outside fit one process evaluates everything, so the user's sampler is kept: a DistributedSampler in its place
    might pad.
    """
    model = Regression()
    model.test_step = model.validation_step  # type: ignore[method-assign]
    model.predict_step = lambda batch, batch_idx: model.net(batch[0])  # type: ignore[method-assign]
    run = trainer(tmp_path)
    getattr(run, stage)(model, loader(8), **({} if stage == "predict" else {"verbose": False}))
    loops = {"validate": run.validate_loop, "test": run.test_loop, "predict": run.predict_loop}
    (used,) = loops[stage]._combined_loader.flattened  # type: ignore[union-attr]
    assert type(used.batch_sampler.sampler) is SequentialSampler


def test_the_base_class_hears_of_an_exception(tmp_path: Path) -> None:
    with patch.object(Strategy, "on_exception") as hook, pytest.raises(Stop):
        trainer(tmp_path, max_epochs=2).fit(Raises(), loader())
    hook.assert_called_once()


class Reloads(Regression):
    """Model that records the epochs in which its validation loader is made."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        self.asked.append(self.trainer.current_epoch)
        return loader(8)


@pytest.mark.parametrize(("each", "check", "plain"), [(3, 3, [2, 5, 8]), (4, 3, [2, 8]), (1, 4, [3, 7])])
def test_validation_data_are_made_anew_in_the_same_epochs(
    tmp_path: Path, each: int, check: int, plain: list[int]
) -> None:
    """Validation loaders are made once at the start of fit, and then in the same epochs as without the strategy."""
    settings: dict[str, Any] = {
        "max_epochs": 9, "limit_train_batches": 1, "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": check, "reload_dataloaders_every_n_epochs": each,
    }  # fmt: skip
    without, ours = Reloads(), Reloads()
    trainer(tmp_path, **settings, strategy="auto").fit(without)
    trainer(tmp_path, **settings).fit(ours)
    assert without.asked == plain
    assert ours.asked == [0, *plain]
