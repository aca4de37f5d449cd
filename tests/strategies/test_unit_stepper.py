"""Tests the values that a step of several units gives to the training loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chaos_lightning.pipeline.told import StepOutcome
from chaos_lightning.strategies.unit_stepper import UnitStepper


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_is_as_precise_as_the_model(dtype: torch.dtype) -> None:
    stepper: Any = object.__new__(UnitStepper)
    strategy, module = SimpleNamespace(root_device=torch.device("cpu")), SimpleNamespace(dtype=dtype)
    stepper._trainer, stepper.total_weight = SimpleNamespace(strategy=strategy, lightning_module=module), 4.0
    stepper._outcome = StepOutcome(0.0, True, 1 / 3, {}, {}, 4)
    loss = stepper.output()["loss"]
    assert loss.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert float(loss) == pytest.approx(1 / 3, rel=1e-15 if dtype is torch.float64 else 1e-7)
