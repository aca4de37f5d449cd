"""Tests learning rate schedules: the steps that `estimated_stepping_batches` counts, and schedules by samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from strategy_job import Job
from strategy_models import Regression, loader, trainer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.protocol.types import Ledger, Spent
from chaos_lightning.strategies import BySamples, ChaosStrategy
from chaos_lightning.strategies.schedules import used_between


class ByLambda(Regression):
    """Model with a schedule that shows its number of steps in the learning rate, which is recorded."""

    def __init__(self, wrap: int = 0) -> None:
        super().__init__(lr=0.01)
        self.wrap = wrap
        self.estimated = 0.0
        self.rates: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        self.estimated = self.trainer.estimated_stepping_batches
        scheduler: Any = LambdaLR(optimizer, lambda n: 1 / (1 + n))
        if self.wrap:
            scheduler = BySamples(scheduler, self.wrap)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize(("members", "workers", "steps"), [(1, 1, 12), (2, 1, 6), (4, 1, 4), (2, 2, 4)])
def test_the_estimate_counts_the_members_that_the_job_starts_with(
    tmp_path: Path, double: Any, monkeypatch: pytest.MonkeyPatch, members: int, workers: int, steps: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(workers))
    model = ByLambda()
    trainer(tmp_path, limit_val_batches=0, strategy=ChaosStrategy(min_nodes=members)).fit(model, loader())
    assert model.estimated == steps == 2 * math.ceil(6 / (members * workers))
    (engine,) = double.made
    words = f"counted for {members * workers} members"
    assert engine.fingerprint["estimated_stepping_batches"] == words
    # The double's world has one member.
    told = [r.getMessage() for r in caplog.records if "estimated_stepping_batches was read" in r.getMessage()]
    assert len(told) == (members * workers > 1)
    assert not told or f"counted with {members * workers} members" in told[0]


def test_within_the_job_the_estimate_is_that_of_the_present_members(tmp_path: Path, double: Any) -> None:
    model = ByLambda()
    run = trainer(tmp_path, limit_val_batches=0, strategy=ChaosStrategy(min_nodes=2))
    run.fit(model, loader())
    assert run.estimated_stepping_batches == 12


def test_nothing_is_said_where_nobody_asked_for_the_estimate(tmp_path: Path, double: Any, caplog: Any) -> None:
    trainer(tmp_path, limit_val_batches=0, strategy=ChaosStrategy(min_nodes=2)).fit(Regression(), loader())
    assert "estimated_stepping_batches" not in double.made[0].fingerprint
    assert "estimated_stepping_batches" not in caplog.text


# --- by samples ---


@pytest.mark.parametrize("strategy", ["chaos", "auto"])
def test_by_samples_is_the_schedule_itself_where_steps_are_what_it_says(
    tmp_path: Path, double: Any, strategy: str
) -> None:
    plain, ours = ByLambda(), ByLambda(wrap=4)
    trainer(tmp_path, limit_val_batches=0, strategy="auto").fit(plain, loader(), loader(8))
    trainer(tmp_path, limit_val_batches=0, strategy=strategy).fit(ours, loader(), loader(8))
    assert ours.rates == plain.rates


def test_by_samples_goes_as_far_as_the_samples_do(tmp_path: Path, double: Any) -> None:
    """A schedule that steps once for every 3 samples gets optimizer steps of 8 samples: the remainder is carried
    over.
    """
    model = ByLambda(wrap=3)
    trainer(tmp_path, limit_val_batches=0, accumulate_grad_batches=2).fit(model, loader())
    seen = [model.rates[i] for i in range(1, 12, 2)]
    assert seen == [0.01 * (1 / (1 + 8 * step // 3)) for step in range(1, 7)]


def test_by_samples_goes_on_after_a_resume(tmp_path: Path, double: Any) -> None:
    whole, first, second = ByLambda(wrap=3), ByLambda(wrap=3), ByLambda(wrap=3)
    trainer(tmp_path, limit_val_batches=0).fit(whole, loader())
    keep = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer(tmp_path, limit_val_batches=0, max_steps=5, max_epochs=-1, enable_checkpointing=True, callbacks=[keep]).fit(
        first, loader()
    )
    trainer(tmp_path, limit_val_batches=0).fit(second, loader(), ckpt_path=tmp_path / "step=5.ckpt")
    assert first.rates + second.rates == whole.rates


def test_what_by_samples_does_not_take() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau"):
        BySamples(ReduceLROnPlateau(optimizer), 4)
    with pytest.raises(ConfigurationError, match="samples_per_step=0"):
        BySamples(OneCycleLR(optimizer, 0.1, total_steps=4), 0)


def test_samples_between_two_ledgers() -> None:
    before = Ledger((Spent("", 0, ((0, 8),)), Spent("a", 1, ((0, 2),)), Spent("a/length", 1, ((0, 9),))))
    after = Ledger((Spent("", 0, ((0, 12), (16, 20))), Spent("a", 2, ((0, 3),)), Spent("b", 0, ((4, 6),))))
    assert used_between(before, after) == 8 + 3 + 2
    assert used_between(after, after) == 0


def test_by_samples_ends_where_one_machine_would_whoever_comes(job: Job) -> None:
    """A member joins in the middle: the schedule by samples still takes as many steps as on one machine."""
    spec = {"epochs": 4, "samples": 24, "model": "Scheduled", "model_args": {"kind": "samples"}}
    job.start("a", gates={1: job.gate("first")}, **spec)
    job.harness.wait_step(1)
    job.start("b", **spec)
    job.wait_admitted("b")
    job.open("first")
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    assert a["step"] < 24
    for report in (a, b):
        (*_, last) = [line for line in report["trace"] if " lr " in line]
        assert last.endswith(f"lr [{0.01 * 0.9**24}]")
