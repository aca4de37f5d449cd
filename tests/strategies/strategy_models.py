"""Small models and data whose runs can be compared number by number."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import CatMetric, MeanSquaredError


def data(samples: int = 24, seed: int = 5) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=g)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.1 * torch.randn(samples, 1, generator=g)
    return TensorDataset(x, y)


def loader(samples: int = 24, batch_size: int = 4, shuffle: bool = False, seed: int = 5, **kwargs: Any) -> DataLoader:
    return DataLoader(data(samples, seed), batch_size=batch_size, shuffle=shuffle, **kwargs)


class Stream(IterableDataset):
    """Own data of a node that nobody knows the length of."""

    def __init__(self, samples: int, seed: int) -> None:
        self.rows = list(data(samples, seed))

    def __iter__(self) -> Any:
        return iter(self.rows)


class Regression(pl.LightningModule):
    """Linear regression; remembers the batches it saw and the weights after each batch."""

    def __init__(self, lr: float = 0.05, norm: bool = False, sync: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Linear(8, 1))
        self.lr = lr
        self.sync = sync
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen.append(x.detach().clone())
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=self.sync)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=self.sync)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def trainer(tmp_path: Any, **kwargs: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": str(tmp_path),
        "strategy": "chaos",
    }
    return pl.Trainer(**{**settings, **kwargs})


class WithMetrics(Regression):
    """torchmetrics in training and validation, one of them with list states."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.train_mse = MeanSquaredError()
        self.val_mse = MeanSquaredError()
        self.kept = CatMetric()
        self.epochs: list[tuple[int, int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen.append(x.detach().clone())
        self.train_mse(self.net(x), y)
        self.kept.update(y)
        self.log("mse", self.train_mse, on_step=False, on_epoch=True)
        self.log("samples", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return nn.functional.mse_loss(self.net(x), y)

    def on_train_epoch_end(self) -> None:
        labels = self.kept.compute()
        self.epochs.append((self.current_epoch, labels.numel(), round(labels.sum().item(), 3)))
        self.kept.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_mse.update(self.net(x), y)
        self.log("val_loss", self.val_mse)


class Counting(Regression):
    """Sums and means over the validation set, per step too; none of them asks for sync but one."""

    validated = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.validated += not self.trainer.sanity_checking
        self.log("val_loss", loss)
        self.log("val_count", float(len(x)), reduce_fx="sum")
        self.log("val_max", y.max(), reduce_fx="max", on_step=True, on_epoch=True, sync_dist=True)


class Gan(pl.LightningModule):
    """Two optimizers, manual optimization, a scheduler stepped by hand, toggled parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Linear(2, 4)
        self.discriminator = nn.Linear(4, 1)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        self.seen.append(x.detach().clone())
        g, d = self.optimizers()
        self.toggle_optimizer(d)
        d.zero_grad()
        real = nn.functional.softplus(-self.discriminator(x)).mean()
        fake = nn.functional.softplus(self.discriminator(self.generator(x[:, :2]).detach())).mean()
        self.manual_backward(real + fake)
        d.step()
        self.untoggle_optimizer(d)
        self.toggle_optimizer(g)
        g.zero_grad()
        loss = nn.functional.softplus(-self.discriminator(self.generator(x[:, :2]))).mean()
        self.manual_backward(loss)
        g.step()
        self.untoggle_optimizer(g)
        self.lr_schedulers().step()
        self.log("g", loss, on_step=True, on_epoch=True, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.discriminator(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        g = torch.optim.Adam(self.generator.parameters(), 0.01)
        d = torch.optim.SGD(self.discriminator.parameters(), 0.05, momentum=0.9)
        return [g, d], [torch.optim.lr_scheduler.StepLR(g, 3, 0.9)]


class Scheduled(Regression):
    """A closure scheduler, one on a plateau of a synced metric, and a module that keeps state of its own."""

    def __init__(self, kind: str = "onecycle", **kwargs: Any) -> None:
        super().__init__(lr=0.01, **kwargs)
        self.kind = kind
        self.counter = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.counter += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counter"] = self.counter

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counter = checkpoint["counter"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        if self.kind == "onecycle":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.02, total_steps=int(self.trainer.estimated_stepping_batches) * 4
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        if self.kind == "lambda":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.9**e)
            return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
