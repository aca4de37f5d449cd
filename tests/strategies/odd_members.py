"""Runs members that differ from the other members of their job in one thing."""

from __future__ import annotations

from typing import Any

import strategy_models as models
import torch
from strategy_members import member
from torch import nn

import chaos_lightning.member.hello as hello
from chaos_lightning.protocol.types import MAX_GATHER_NBYTES
from chaos_lightning.trainer import Trainer


class Odd(models.Regression):
    """Linear regression with a hidden layer of any width, any optimizer, and a falling learning rate."""

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
    """Runs `strategy_members.member` with model Odd, and with another package version if `spec` has "package"."""
    models.Odd = Odd  # type: ignore[attr-defined]
    if "package" in spec:
        hello.package_version = lambda: spec["package"]
    member({"model": "Odd", **spec})


class Alone(models.Regression):
    """Model of which one member makes a collective that the other member does not make.

    Args:
        asks: "save_checkpoint", "log", or "stop".
        folder: Folder of the checkpoint.
    """

    def __init__(self, asks: str, folder: str) -> None:
        super().__init__()
        self.asks, self.folder, self.together = asks, folder, 0

    def _is_time(self) -> bool:
        """Returns whether this is rank 0 of two, in the second of the three batches (for "stop" the third) of an
        epoch that both train from its start.
        """
        self.together += self.trainer.world_size == 2
        return bool(self.trainer.is_global_zero and self.together == (5 if self.asks == "stop" else 4))

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
    """Runs a plain loop in which rank 0 of two members alone saves a checkpoint, or breaks out of the loop.

    Args:
        spec: name, port, out, asks, gates {step: fifo}.
    """
    gates = dict(spec.get("gates", {}))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 1)), 4)
    with Trainer(
        name=spec["name"], endpoint=f"127.0.0.1:{spec['port']}", join_timeout_s=40.0, join_by="pause"
    ) as trainer:
        for (x,) in trainer.prepare(model, optimizer, loader, data="local"):
            optimizer.zero_grad()
            model(x).mean().backward()
            trainer.update()
            if trainer.world_size == 2 and trainer.rank == 0:
                if spec["asks"] == "break":
                    break
                trainer.save(f"{spec['out']}/alone.pt")
            trainer.check_state_replication()
            if gate := gates.pop(trainer.step, ""):
                with open(gate) as opened:
                    opened.read()


class Drifts(models.Regression):
    """Model of which one member changes its learning rate at some step, makes an additional collective, or changes a
    weight.

    Args:
        drifts_at: Step after which the learning rate changes; 0: never.
        gathers_at: Step after which the additional collective runs; 0: never.
        nudges: Whether this member changes a weight after each step; the other members do not.
    """

    def __init__(self, drifts_at: int = 0, gathers_at: int = 0, nudges: bool = False) -> None:
        super().__init__()
        self.drifts_at, self.gathers_at, self.nudges = drifts_at, gathers_at, nudges

    def nudge(self) -> None:
        if self.nudges:
            with torch.no_grad():
                self.net[2].weight.add_(1e-3)

    def on_train_batch_end(self, *_: Any) -> None:
        self.nudge()
        if self.global_step == self.drifts_at:
            self.optimizers().param_groups[0]["lr"] = 0.007  # type: ignore[union-attr]
        if self.global_step == self.gathers_at:
            self.gathers_at = 0
            self.all_gather(torch.zeros(MAX_GATHER_NBYTES // 4))


def drifts(spec: dict[str, Any]) -> None:
    """Runs `strategy_members.member` with model Drifts."""
    models.Drifts = Drifts  # type: ignore[attr-defined]
    member({"model": "Drifts", **spec})


def drifts_plainly(spec: dict[str, Any]) -> None:
    """Trains model Drifts by a plain loop; reports the last step.

    Args:
        spec: name, port, out, epochs, model_args, gates {step: fifo}.
    """
    gates, module = dict(spec.get("gates", {})), Drifts(**spec.get("model_args", {}))
    optimizer = module.configure_optimizers()
    settings = {"join_timeout_s": 40.0, "join_by": "pause", **spec.get("options", {})}
    with Trainer(name=spec["name"], endpoint=f"127.0.0.1:{spec['port']}", **settings) as trainer:
        batches = trainer.prepare(module, optimizer, models.loader(), epochs=spec["epochs"])
        began = trainer.step
        for x, y in batches:
            optimizer.zero_grad()
            trainer.backward(nn.functional.mse_loss(module.net(x), y))
            if trainer.update():
                module.nudge()
            if trainer.step == module.drifts_at:
                optimizer.param_groups[0]["lr"] = 0.007
            if trainer.step == module.gathers_at:
                trainer.gather(torch.zeros(MAX_GATHER_NBYTES // 4))
            trainer.check_state_replication()
            if gate := gates.pop(trainer.step, ""):
                with open(gate) as opened:
                    opened.read()
        torch.save({"step": trainer.step, "began": began}, f"{spec['out']}/{spec['name']}.pt")
