"""Tests PipelineProfile: it measures while a Trainer trains, writes the planner's file, and lets training continue."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_support import Tiny, fit, trainer
from torch import nn

from chaos_lightning.callbacks import PipelineProfile
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.pipelines.files import read_job


class Blocks(Tiny):
    """Module with a list of equal blocks as its chain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return self.net(x).square().mean()


def trained(folder: Path, **options: Any) -> int:
    """Trains ten batches; returns the number of steps."""
    made = trainer(None, PipelineProfile(folder / "p.yaml", **options), root=str(folder))
    fit(made, 10, model=Blocks())
    return made.global_step


def test_training_goes_on_behind_the_measurement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chaos_lightning.callbacks")
    assert trained(tmp_path, steps=4) == 10
    job = read_job(tmp_path / "p.yaml")
    assert [layer.name for layer in job.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    # The head is behind the chain, and Tiny's optimizer is plain SGD.
    assert [layer.parameter_nbytes for layer in job.layers] == [80, 80, 80 + (40 + 9) * 4]
    assert "a step takes" in caplog.text


def test_too_short_a_training_leaves_no_file_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, steps=8)
    assert "training ended after 5 of 8 measured steps, so there is no file" in caplog.text
    assert not (tmp_path / "p.yaml").exists()


def test_what_cannot_be_measured_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'tail' is no list of blocks of Blocks"):
        trained(tmp_path, chain="tail")
    (tmp_path / "p.yaml").touch()
    with pytest.raises(ConfigurationError, match="is there already; give force=True"):
        trained(tmp_path)
