"""Members that differ from the job in one thing."""

from __future__ import annotations

from typing import Any

import strategy_models as models
import torch
from strategy_members import member
from torch import nn

import chaos_lightning.member.hello as hello


class Odd(models.Regression):
    """A regression of any width, with any optimizer and, if wanted, a falling learning rate."""

    def __init__(self, width: int = 8, optimizer: str = "Adam", lr: float = 0.05, **settings: Any) -> None:
        super().__init__(lr)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        self.optimizer, self.settings = optimizer, settings

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), self.lr, **self.settings)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def odd(spec: dict[str, Any]) -> None:
    """A member of strategy_members with another package version, if `spec` has "package"."""
    models.Odd = Odd  # type: ignore[attr-defined]
    if "package" in spec:
        hello.package_version = lambda: spec["package"]
    member({"model": "Odd", **spec})
