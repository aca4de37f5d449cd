"""Learning-rate schedules of an exported checkpoint are moved to the exported version's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from chaos_lightning.outer.commands.export_schedules import move_schedules
from chaos_lightning.outer.rules.types import TICKS, JobProgress

Make = Callable[[torch.optim.Optimizer], schedules.LRScheduler]
MOVED: dict[str, Make] = {
    "StepLR": lambda o: schedules.StepLR(o, 10),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [5, 200]),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.99),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.5, 200),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, 1.0, 300),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 400),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 400),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 50, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=400),
}


def stood(make: Make, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the states of an optimizer and its learning-rate schedule after this number of steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], 0.1)
    schedule = make(optimizer)
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return optimizer.state_dict(), schedule.state_dict()


def moved(make: Make, before: int, progress: JobProgress, taken: int | None = None) -> tuple[dict[str, Any], list[str]]:
    optimizer, schedule = stood(make, before if taken is None else taken)
    like = {"global_step": before, "epoch": 2, "optimizer_states": [optimizer], "lr_schedulers": [schedule]}
    made = dict(like)
    return made, move_schedules(made, like, progress)


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize(
    ("taken", "goal"), [(103, 347), (51, 173), (2, 5)], ids=["each step", "each second step", "each epoch"]
)
def test_a_schedule_is_at_the_version_s_step(name: str, taken: int, goal: int) -> None:
    """Former bug: an exported checkpoint had its learning-rate schedule at step 103 of the cluster's checkpoint, and
    not at the version's step 347.
    """
    made, left = moved(MOVED[name], 103, JobProgress(1, 347 * TICKS, 5), taken)
    optimizer, schedule = stood(MOVED[name], goal)
    assert left == []
    assert made["lr_schedulers"] == [schedule]
    lr = [state["param_groups"][0]["lr"] for state in (*made["optimizer_states"], optimizer)]
    assert lr[0] == pytest.approx(lr[1])


def test_what_cannot_be_moved_is_named() -> None:
    made, (left,) = moved(
        lambda o: schedules.LambdaLR(o, lambda step: 1 / (step + 1)), 103, JobProgress(1, 347 * TICKS)
    )
    assert made["lr_schedulers"][0]["last_epoch"] == 347
    assert left.endswith(
        "the first step has the checkpoint's learning rate, and those after it go by the version's step, 347"
    )
    for make, goal in (
        (lambda o: schedules.OneCycleLR(o, 0.1, total_steps=200), 347),
        (MOVED["CosineAnnealingLR"], 90),
    ):
        made, (left,) = moved(make, 103, JobProgress(1, goal * TICKS))
        assert made["lr_schedulers"][0]["last_epoch"] == 103
        assert left.startswith(
            f"schedule 0 of the checkpoint stays at its step 103, and the version is at step {goal}: it is"
        )
