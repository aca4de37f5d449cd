"""Tests that a batch in which the last member is released, so that no step uses it, is counted nowhere."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from strategy_models import Manual, Regression, loader, trainer

from chaos_lightning.errors import LeftJobError


class Ends(pl.Callback):
    """Callback that records the steps at which hooks were told of a finished batch."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)


def scheduled(module: pl.LightningModule) -> pl.LightningModule:
    """Gives the module a learning rate schedule that falls with each step; returns the module."""

    def configure_optimizers() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    return module


def left(tmp_path: Path, double: Any, slots: int, model: pl.LightningModule, **arguments: Any) -> tuple[Any, Any, Ends]:
    """Runs a fit whose member is released after this many slots; returns Trainer, engine and recorded batch ends."""
    double.made.clear()
    double.setting.clear()
    double.setting.update(depart_at=slots, departs_armed=arguments.pop("armed", False))
    ends = Ends()
    each = ModelCheckpoint(tmp_path / "ckpt", "{step}", save_top_k=-1, every_n_train_steps=1)
    fit = trainer(
        tmp_path,
        enable_checkpointing=True,
        callbacks=[ends, each],
        logger=CSVLogger(tmp_path, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        **arguments,
    )
    with contextlib.suppress(LeftJobError):
        fit.fit(model, loader(24, 4))
    return fit, double.made[0], ends


@pytest.mark.parametrize(
    ("accumulate", "armed", "sync"), [(1, True, False), (1, False, True), (2, False, False), (2, True, True)]
)
def test_a_batch_that_no_step_uses_is_counted_nowhere(
    tmp_path: Path, double: Any, accumulate: int, armed: bool, sync: bool
) -> None:
    """A member is released at any point of a batch: as it sends gradients, waits for the step, or exchanges logged
    values, also in the epoch's last batch. The batch is counted by no loop, hook or logger.
    """
    _, whole, _ = left(tmp_path / "whole", double, -1, Regression(sync=sync), accumulate_grad_batches=accumulate)
    names = [header.name for header in whole.log]
    places = [at for at, name in enumerate(names) if name.startswith(("section", "values logged"))]
    each = len(places) // 12 * accumulate  # of two epochs of six batches
    last = 6 // accumulate - 1
    for at in [*places[each : 2 * each], *places[last * each : (last + 1) * each]]:
        where = tmp_path / str(at)
        model = scheduled(Regression(sync=sync))
        fit, engine, ends = left(where, double, at, model, armed=armed, accumulate_grad_batches=accumulate)
        steps = engine.header.step
        assert fit.interrupted
        assert engine.kept == [steps]
        assert fit.global_step == steps
        batches = fit.fit_loop.epoch_loop.batch_progress.total
        assert batches.ready == batches.completed == steps * accumulate
        told, open_ones = ends.steps[: steps * accumulate], ends.steps[steps * accumulate :]
        assert told == [number // accumulate for number in range(1, steps * accumulate + 1)]
        assert len(open_ones) < accumulate, (
            "batches of an accumulation are told of before it is known that none uses it"
        )
        assert fit.lr_scheduler_configs[0].scheduler.last_epoch == steps
        saved = {torch.load(f, weights_only=False)["global_step"] for f in (where / "ckpt").glob("*.ckpt")}
        assert max(saved, default=0) == steps
        (metrics,) = where.rglob("metrics.csv") if steps else ([],)
        rows = metrics.read_text().splitlines()[1:] if metrics else []
        assert len(rows) <= steps, rows


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_a_batch_of_manual_optimization_that_no_step_uses(tmp_path: Path, double: Any) -> None:
    """A member under manual optimization is released in a batch: the batch ends at its first backward pass, and is
    not counted.
    """
    _, whole, told = left(tmp_path / "whole", double, -1, Manual())
    each = sum(header.name.startswith("section") for header in whole.log) // len(told.steps)
    third = [at for at, header in enumerate(whole.log) if header.name.startswith("section")][2 * each]
    fit, engine, ends = left(tmp_path / "left", double, third, Manual())
    assert ends.steps == told.steps[:2]
    assert fit.global_step == ends.steps[-1]
    assert engine.kept == [whole.log[third - 1].step]
