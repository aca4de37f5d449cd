"""Members that differ from the job in one thing."""

from __future__ import annotations

from typing import Any

import strategy_models as models
import torch
from strategy_members import member
from torch import nn

import chaos_lightning.member.hello as hello
from chaos_lightning.trainer import Trainer


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


class Alone(models.Regression):
    """A model of whose members one asks the others for something that they do not foresee.

    Args:
        asks: "save_checkpoint", "log", or "stop".
        folder: Where a checkpoint goes.
    """

    def __init__(self, asks: str, folder: str) -> None:
        super().__init__()
        self.asks, self.folder = asks, folder

    def _is_time(self) -> bool:
        return bool(self.trainer.is_global_zero and self.global_step >= 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.asks == "log" and self._is_time():
            self.log("mine", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.asks == "save_checkpoint" and self._is_time():
            self.trainer.save_checkpoint(f"{self.folder}/alone.ckpt")
        if self.asks == "stop" and self._is_time():
            self.trainer.should_stop = True


def alone(spec: dict[str, Any]) -> None:
    models.Alone = Alone  # type: ignore[attr-defined]
    member({"model": "Alone", "model_args": {"asks": spec["asks"], "folder": spec["out"]}, **spec})


def saves_alone(spec: dict[str, Any]) -> None:
    """A plain loop in which rank 0 alone saves, or breaks."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 1)), 4)
    with Trainer(name=spec["name"], endpoint=f"127.0.0.1:{spec['port']}", join_timeout_s=40.0) as trainer:
        for (x,) in trainer.prepare(model, optimizer, loader, data="local"):
            optimizer.zero_grad()
            model(x).mean().backward()
            trainer.update()
            if trainer.step == 3 and trainer.rank == 0:
                if spec["asks"] == "break":
                    break
                trainer.save(f"{spec['out']}/alone.pt")
            trainer.check_state_replication()
