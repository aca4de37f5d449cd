"""Runs members that share a batch of fixed size under features of Lightning and faults, and the same in one process."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from pipeline_members import quiet, set_without_chance
from strategy_members import Gates
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from chaos_lightning.strategies import ChaosStrategy

CALLS = Counter[int]()
"""Number of calls of `training_step` by step; attributes of the model are put back when a step runs again."""


def numbered(samples: int, seed: int = 5) -> TensorDataset:
    """Returns data whose samples say their numbers, by which faults find them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=g, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1, keepdim=True)).sin(), torch.arange(samples))


class Study(pl.LightningModule):
    """Small model with what may happen in a step.

    Args:
        spec: norm (BatchNorm), dropout (its probability), noise (a transfer hook adds random numbers), rate (of SGD),
            scheduled (a schedule), skips (samples with which training_step returns None), alone (samples whose loss
            counts twice), infinite (epoch and sample whose gradient is infinite), nan (epoch and sample whose loss is
            NaN), pause_s (seconds for a sample), dies (step, and number of a call in it, at which this process is
            killed), late_s (seconds before that), stays (step in which it stays for seconds, and a file that says so).
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        norm = nn.BatchNorm1d(8) if spec.get("norm") else nn.Identity()
        self.net = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Dropout(spec.get("dropout", 0)), nn.Linear(8, 1))
        self.mse, self.val_mse = (MeanSquaredError().set_dtype(torch.float64) for _ in range(2))
        set_without_chance(self)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 1.5, batch[1], batch[2]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and self.spec.get("noise"):
            batch[0] = batch[0] + 0.1 * torch.randn_like(batch[0])
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y, numbers = batch[0], batch[1], batch[2].tolist()
        self._suffer(len(numbers))
        found = self.net(x)
        if self._hit("infinite", numbers):
            found.register_hook(lambda g: g * float("inf"))
        loss = nn.functional.mse_loss(found, y)
        if self._hit("nan", numbers):
            loss = loss * float("nan")
        self.mse(found, y)
        self.log("mse", self.mse, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("plain", loss)
        self.log("given", y.abs().mean(), on_step=False, on_epoch=True, batch_size=len(y), sync_dist=True)
        self.log("most", x.abs().max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("least", x.abs().min(), on_step=True, on_epoch=True, reduce_fx="min")
        self.log_dict({"samples": float(len(x))}, on_step=False, on_epoch=True, reduce_fx="sum")
        if set(self.spec.get("skips", ())) & set(numbers):
            return None
        return loss * (2 if set(self.spec.get("alone", ())) & set(numbers) else 1)

    def _hit(self, what: str, numbers: list[int]) -> bool:
        epoch, sample = self.spec.get(what, (-1, -1))
        return epoch == self.current_epoch and sample in numbers

    def _suffer(self, samples: int) -> None:
        step = self.trainer.global_step
        CALLS[step] += 1
        time.sleep(self.spec.get("pause_s", 0.0) * samples)
        if (step, CALLS[step]) == self.spec.get("dies"):
            time.sleep(self.spec.get("late_s", 0.0))
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.spec.get("stays", (-1, ""))[0]:
            Path(self.spec.pop("stays")[1]).touch()
            time.sleep(3.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.net(batch[0])
        self.val_mse.update(found, batch[1])
        self.log("val_loss", nn.functional.mse_loss(found, batch[1]))
        self.log("val_mse", self.val_mse)

    def configure_optimizers(self) -> Any:
        if not self.spec.get("scheduled"):
            return torch.optim.SGD(self.parameters(), self.spec.get("rate", 0.1), momentum=0.5)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class History(pl.Callback):
    """Callback that records which hooks ran, with the step, the learning rate and all logged values."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, dict[str, float]]] = []
        self.losses: list[float] = []

    def note(self, hook: str, trainer: pl.Trainer, **more: float) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.lines.append((hook, trainer.global_step, {**values, "lr": rate, **more}))

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.note("epoch starts", trainer, batches=trainer.num_training_batches)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch starts", trainer, number=batch_idx)

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self.note("after backward", trainer)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        found = [p.grad.norm() for p in module.parameters() if p.grad is not None]
        self.note("before step", trainer, norm=float(torch.stack(found).norm()) if found else 0.0)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = float(outputs["loss"]) if outputs else float("nan")
        self.losses.append(loss)
        self.note("batch ends", trainer, number=batch_idx, loss=loss)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.note("validated", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.note("epoch ends", trainer)


class Kept(pl.Callback):
    """Callback that keeps a copy of the model's parameters as of the last step, before weights are averaged."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.parameters = {name: p.detach().clone() for name, p in module.named_parameters()}


def studied(strategy: Any, spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Trains as `spec` says with this strategy; returns the history, losses and parameters.

    Args:
        strategy: Strategy of the Trainer.
        spec: samples, batch, trainer (its options), precision ("scaled": float16 with a GradScaler), averages (EMA of
            the weights), stops (at a loss that is not finite), saves (folder of checkpoints, every 2 steps), ckpt_path,
            gates; and what `Study` has.
        more: Further options of the Trainer.
    """
    quiet()
    warnings.filterwarnings("ignore", message=".*`training_step` returned `None`.*")
    pl.seed_everything(7, verbose=False)
    module, history, kept = Study(spec), History(), Kept()
    callbacks: list[pl.Callback] = [history, kept, Gates(spec.get("gates", {}), spec.get("worlds", {}), "", {})]
    if spec.get("averages"):
        callbacks.append(EMAWeightAveraging(decay=0.7, update_starting_at_step=2))
    if spec.get("stops"):
        callbacks.append(EarlyStopping("loss_epoch", patience=99, check_on_train_epoch_end=True))
    if "saves" in spec:
        callbacks.append(ModelCheckpoint(spec["saves"], "{step}", every_n_train_steps=2, save_top_k=-1))
    precision, plugins = spec.get("precision", "64-true"), []
    if precision == "scaled":
        plugins, precision = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))], None
    fit = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=callbacks,
        plugins=plugins,
        precision=precision,
        enable_progress_bar=False,
        enable_checkpointing="saves" in spec,
        enable_model_summary=False,
        logger=False,
        log_every_n_steps=1,
        **{"max_epochs": 2, **spec.get("trainer", {}), **more},
    )
    size, drop = spec.get("batch", 16), spec.get("drop_last", False)
    data = numbered(spec.get("samples", 60))
    if precision == "64-true":
        module.double()  # Lightning does so after it has loaded a checkpoint
    else:
        data = TensorDataset(*(t.float() if t.is_floating_point() else t for t in data.tensors))
    loader = DataLoader(data, size, drop_last=drop)
    held_out = DataLoader(numbered(12, 9), 4) if "validates" in spec else None
    fit.fit(module, loader, held_out, ckpt_path=spec.get("ckpt_path"))
    return {
        "lines": history.lines,
        "losses": history.losses,
        "parameters": {name: p.detach() for name, p in module.named_parameters()},
        "kept": kept.parameters,
        "buffers": {name: b.detach() for name, b in module.named_buffers()},
        "steps": (fit.global_step, fit.current_epoch),
        "scale": fit.precision_plugin.scaler.get_scale() if precision is None else 0.0,
    }


def member(spec: dict[str, Any]) -> None:
    """Runs one member.

    Args:
        spec: name, port, out (folder of the report), options (of the strategy); and what `studied` has.
    """
    strategy = ChaosStrategy(
        endpoint=f"127.0.0.1:{spec['port']}",
        name=spec["name"],
        log_dir=os.environ["CHAOS_LOG_DIR"],
        options={"join_timeout_s": 40.0, "step_timeout_s": 40.0, **spec["options"]},
    )
    torch.save(studied(strategy, spec), Path(spec["out"]) / f"{spec['name']}.pt")
