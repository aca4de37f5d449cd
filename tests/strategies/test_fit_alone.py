"""Tests a whole `Trainer.fit` with one member: the same numbers as without the strategy, and all of Lightning's
features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from engine_double import EngineDouble
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from strategy_models import Deals, Dealt, Regression, data, fitted, loader, trainer, weights
from torch.utils.data import DataLoader

import chaos_lightning  # noqa: F401  (registers "chaos")
from chaos_lightning.member.keeping import LoadedCheckpoint
from chaos_lightning.protocol.types import Kind

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"limit_train_batches": 3},
        {"limit_train_batches": 0.5},
        {"limit_train_batches": 4, "accumulate_grad_batches": 2},
        {"max_steps": 7, "max_epochs": -1},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"val_check_interval": 0.5},
        {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
        {"overfit_batches": 2},
        {"fast_dev_run": True},
    ],
    ids=str,
)
def test_same_numbers_as_without_strategy(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain, ours = Regression(), Regression()
    a = fitted(tmp_path, plain, loader(), loader(8), **{**settings, "strategy": "auto"})
    b = fitted(tmp_path, ours, loader(), loader(8), **settings)
    assert len(ours.seen) == len(plain.seen)
    assert all(torch.equal(x, y) for x, y in zip(ours.seen, plain.seen, strict=True))
    assert torch.allclose(weights(ours), weights(plain), rtol=1e-6, atol=1e-7)
    assert (a.global_step, a.current_epoch) == (b.global_step, b.current_epoch)
    assert set(a.callback_metrics) == set(b.callback_metrics)
    for key, value in a.callback_metrics.items():
        assert torch.allclose(value, b.callback_metrics[key], rtol=1e-5), key


@pytest.mark.parametrize("tells", [True, False])
def test_a_batch_sampler_is_told_the_epoch_by_the_script_alone(tmp_path: Path, tells: bool) -> None:
    """Lightning calls set_epoch on samplers, but not on batch samplers. The user's script may call it before an
    epoch's first batch, and the order is as without the strategy.
    """
    plain, ours = Deals(tells), Deals(tells)
    samplers = [Dealt(), Dealt()]
    for model, sampler, strategy in zip((plain, ours), samplers, ("auto", "chaos"), strict=True):
        fitted(tmp_path, model, DataLoader(data(), batch_sampler=sampler), max_epochs=3, strategy=strategy)
    assert samplers[1].told == samplers[0].told == ([0, 1, 2] if tells else [])
    assert len(ours.seen) == len(plain.seen) == 18
    assert all(torch.equal(x, y) for x, y in zip(ours.seen, plain.seen, strict=True))


def test_uneven_last_batches_weigh_their_samples(tmp_path: Path, double: Any) -> None:
    fitted(tmp_path, Regression(), loader(22, 4), accumulate_grad_batches=4, max_epochs=1)
    (engine,) = double.made
    assert [s["weight"] for s in engine.steps] == [16.0, 6.0]
    assert [s["coefficient"] for s in engine.steps] == [16.0, 6.0]
    assert [s["spent"][0].spans for s in engine.steps] == [((0, 16),), ((16, 22),)]


def test_gradient_of_an_uneven_window_is_that_of_all_its_samples(tmp_path: Path) -> None:
    """Accumulated batches of 4, 4 and 2 samples give the same gradient as one batch of 10."""
    one, many = Regression(), Regression()
    fitted(tmp_path, one, loader(10, 10), max_epochs=1)
    fitted(tmp_path, many, loader(10, 4), max_epochs=1, accumulate_grad_batches=3)
    assert torch.allclose(weights(one), weights(many), rtol=1e-5)


def test_first_stopping_and_checkpoints(tmp_path: Path) -> None:
    model = Regression(lr=0.0, sync=True)
    kept = ModelCheckpoint(dirpath=tmp_path / "kept", monitor="val_loss", save_last=True, save_top_k=2)
    run = fitted(
        tmp_path, model, loader(), loader(8), max_epochs=20, enable_checkpointing=True,
        callbacks=[EarlyStopping("val_loss", patience=2), kept],
    )  # fmt: skip
    assert run.current_epoch == 3
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == [
        "epoch=0-step=6.ckpt",
        "epoch=1-step=12.ckpt",
        "last.ckpt",
    ]
    saved = torch.load(tmp_path / "kept" / "last.ckpt", weights_only=False)
    assert saved["chaos_lightning"]["step"] == saved["global_step"]


@pytest.mark.parametrize("stop", [1, 5, 6, 8, 11])
def test_whole_job_resumes_exactly_once(tmp_path: Path, stop: int) -> None:
    """A job that stopped in the middle of an epoch resumes from a checkpoint, and trains on exactly the remaining
    samples.
    """
    first = Regression()
    keep = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=stop, save_top_k=-1)
    fitted(tmp_path, first, loader(), max_steps=stop, max_epochs=-1, enable_checkpointing=True, callbacks=[keep])
    second = Regression()
    again = trainer(tmp_path, max_epochs=2)
    again.fit(second, loader(), ckpt_path=tmp_path / f"step={stop}.ckpt")
    saved = next(header for header in EngineDouble.made[0].log if header.kind == Kind.STEP and header.step == stop)
    assert [engine.loaded for engine in EngineDouble.made] == [None, LoadedCheckpoint(stop, saved.hash)]
    whole = Regression()
    fitted(tmp_path, whole, loader(), max_epochs=2)
    assert torch.equal(torch.cat(first.seen + second.seen), torch.cat(whole.seen))
    assert torch.allclose(weights(second), weights(whole), rtol=1e-6)
    assert again.global_step == 12


def test_who_founds_from_the_end_of_an_epoch_tells_the_others_that_its_rest_is_due(tmp_path: Path) -> None:
    """A founder that resumes at the end of an epoch, with its validation still due, tells the other founders so:
    they must make the same collectives.
    """
    told = []

    class Asks(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            state = trainer.strategy.session.state  # type: ignore[attr-defined]
            for state.ended in (True, False):
                told.append(state.manifest()["loops"].get("ended"))

    fitted(tmp_path, Regression(), loader(), max_steps=1, callbacks=[Asks()])
    assert told == [True, False]
