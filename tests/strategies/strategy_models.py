"""Small models and data whose runs can be compared number by number."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MeanSquaredError, MetricCollection, SumMetric

from chaos_lightning.errors import LeftJobError
from chaos_lightning.strategies import BySamples


def data(samples: int = 24, seed: int = 5) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=g)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.1 * torch.randn(samples, 1, generator=g)
    return TensorDataset(x, y)


def loader(samples: int = 24, batch_size: int = 4, shuffle: bool = False, seed: int = 5, **kwargs: Any) -> DataLoader:
    return DataLoader(data(samples, seed), batch_size=batch_size, shuffle=shuffle, **kwargs)


class Stream(IterableDataset):
    """Iterable data set of a node's own samples, whose number is unknown."""

    def __init__(self, samples: int, seed: int) -> None:
        self.rows = list(data(samples, seed))

    def __iter__(self) -> Any:
        return iter(self.rows)


class Regression(pl.LightningModule):
    """Linear regression, which records the batches it gets and the weights after each batch."""

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


class AssignsBuffer(Regression):
    """Model with a running mean that training_step replaces by a new tensor; `averaged` names the buffers to be
    averaged.
    """

    def __init__(self, averaged: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.chaos_buffers = averaged
        self.register_buffer("centre", torch.zeros(4))
        self.first = self.centre

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.centre = 0.9 * self.centre + 0.1 * batch[0].mean(0)
        return loss


class Looks(Regression):
    """Model that records the gradient that each hook sees, by hook and by (step, micro-batch within the step, whether
    it is the last).

    Args:
        manual: Manual optimization.
    """

    def __init__(self, manual: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = not manual
        self.found: dict[str, dict[tuple[int, int, bool], Tensor]] = {}
        weight = self.net[0].weight
        weight.register_hook(lambda grad: self.note("Tensor.register_hook", grad))
        weight.register_post_accumulate_grad_hook(lambda p: self.note("register_post_accumulate_grad_hook", p.grad))

    def note(self, hook: str, grad: Tensor | None = None) -> None:
        grad = self.net[0].weight.grad if grad is None else grad
        if grad is not None:
            parts = self.trainer.accumulate_grad_batches
            part = (self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1) % parts
            last = part == parts - 1 or self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            self.found.setdefault(hook, {})[(self.trainer.global_step, part, last)] = grad.detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.note("manual_backward")
            optimizer.step()
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.note("backward")

    def on_after_backward(self) -> None:
        self.note("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.note("configure_gradient_clipping")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note("on_before_zero_grad")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.note("optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("on_train_batch_end")


class ClipsAfterBackward(Regression):
    """Model that clips gradients in `on_after_backward`, and counts its calls."""

    counter = 0

    def on_after_backward(self) -> None:
        self.counter += 1
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClipsInBackward(Regression):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class MinesHard(Regression):
    """Model that records each sample's loss; in the next epoch its sampler yields the samples with the largest
    losses first.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.losses: dict[float, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        errors = (self.net(x) - y).detach().abs().flatten()
        self.losses |= dict(zip(x[:, 0].tolist(), errors.tolist(), strict=True))
        return super().training_step(batch, batch_idx)


class ByLoss(Sampler):
    """Sampler of 24 samples in descending order of the losses that this member has seen."""

    def __init__(self, model: MinesHard) -> None:
        self.model = model

    def __iter__(self) -> Any:
        x = data().tensors[0][:, 0].tolist()
        return iter(sorted(range(24), key=lambda i: -self.model.losses.get(x[i], 0.0)))

    def __len__(self) -> int:
        return 24


class Dealt(Sampler):
    """Batch sampler of 24 samples, whose order depends on the epoch that `set_epoch` was given; `told` lists these
    epochs.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __iter__(self) -> Any:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[i : i + 4] for i in range(0, 24, 4))

    def __len__(self) -> int:
        return 6


class Deals(Regression):
    """Model that calls `set_epoch` on its loader's batch sampler, since Lightning does not.

    Args:
        tells: Whether the model makes this call.
    """

    def __init__(self, tells: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tells = tells

    def on_train_epoch_start(self) -> None:
        if self.tells:
            self.trainer.train_dataloader.batch_sampler.set_epoch(self.current_epoch)


class Grows(Regression):
    """Model that makes its own loaders; every two epochs their data are replaced by more samples."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.validated: list[float] = []

    @staticmethod
    def data(epoch: int) -> TensorDataset:
        return data(16 + 8 * (epoch // 2), seed=epoch // 2)

    @staticmethod
    def batches(epoch: int) -> int:
        return len(Grows.data(epoch)) // 4

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data(self.trainer.current_epoch), 4, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.data(self.trainer.current_epoch), 4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(batch[0].sum().item())
        super().validation_step(batch, batch_idx)


class AsksForItsFolder(Regression):
    """Model that reads `trainer.log_dir` in each training step, and records the answers with their steps."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.logged: list[tuple[int, str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logged.append((self.trainer.global_step, self.trainer.log_dir))
        return super().training_step(batch, batch_idx)


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


def fitted(tmp_path: Any, model: pl.LightningModule, *args: Any, **kwargs: Any) -> pl.Trainer:
    run = trainer(tmp_path, **kwargs)
    with contextlib.suppress(LeftJobError):  # `run.interrupted` is what tells it
        run.fit(model, *args)
    return run


class WithMetrics(Regression):
    """Model with torchmetrics in training and validation, one of them with list states."""

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


class Counted(Regression):
    """Model that logs and computes values of the training epoch in every supported way, and records their final
    values.
    """

    def __init__(self, rows: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kept: dict[str, Any] = {"mean": MeanMetric()}
        self.all = CatMetric()
        self.both = MetricCollection({"mse": MeanSquaredError(), "same": MeanSquaredError(), "most": MaxMetric()})
        self.epochs: list[dict[str, float]] = []
        self.large = SumMetric()
        if rows:
            self.large.add_state("rows", torch.zeros(rows), dist_reduce_fx="sum")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.kept["mean"].update(y)
        self.all.update(y)
        self.both["most"].update(y.max())
        for name in ("mse", "same"):
            self.both[name].update(y, torch.zeros_like(y))
        self.large.update(y)
        self.log("count", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("mean", y.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        self.log("largest", y.max(), on_step=False, on_epoch=True, reduce_fx="max", batch_size=len(x))
        self.log("unasked", y.mean(), on_step=False, on_epoch=True, batch_size=len(x))
        return nn.functional.mse_loss(self.net(x), y)

    def on_train_epoch_end(self) -> None:
        metrics = {"mean": self.kept["mean"], "large": self.large}
        shown = {f"metric {name}": metric.compute() for name, metric in metrics.items()} | self.both.compute()
        labels = self.all.compute()
        shown |= {"labels": labels.numel(), "sum": labels.sum()}
        self.epochs.append({name: round(float(value), 4) for name, value in shown.items()})
        for metric in (*metrics.values(), self.both, self.all):
            metric.reset()


class Counting(Regression):
    """Model that logs sums and means in validation, one of them per step; only that one asks for sync."""

    validated = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.validated += not self.trainer.sanity_checking
        self.log("val_loss", loss)
        self.log("val_count", float(len(x)), reduce_fx="sum")
        self.log("val_max", y.max(), reduce_fx="max", on_step=True, on_epoch=True, sync_dist=True)


class Evaluated(Counting):
    """Model that also has a test step and a predict step."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_count", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


class Gan(pl.LightningModule):
    """Model with two optimizers under manual optimization, a schedule stepped by hand, and toggled parameters."""

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
    """Model with a schedule of a selectable kind and state of its own in checkpoints."""

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
        if self.kind == "samples":
            return [optimizer], [BySamples(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n), 4)]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class LogsOnce(Regression):
    """Model that logs only in an epoch's second batch with two members, where one of them has no samples."""

    def __init__(self, manual: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = not manual
        self.logged: list[tuple[int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        if batch_idx == 1 and self.trainer.world_size == 2:
            self.log("late", loss, on_step=True, on_epoch=False, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if "late" in self.trainer.callback_metrics:
            self.logged.append((self.trainer.global_step, self.trainer.callback_metrics["late"].item()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        if batch_idx == 2:
            self.log("val_late", nn.functional.mse_loss(self.net(x), y), on_step=True, on_epoch=False, sync_dist=True)


class OwnClocks(Regression):
    """Model whose members' clocks differ: validation is due by rank 0's clock after the steps `due`, by the others'
    after every step.
    """

    due = (3, 7)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_rank or self.trainer.global_step in self.due:
            self.trainer._last_val_time -= 7200.0


class Manual(Regression):
    """Model with many kinds of manual training steps; a second optimizer trains a scale of the output.

    Kind "each": all of `MANUAL` in turn, each for two epochs and from the first weights; `ends` has the last ones.
    """

    def __init__(self, kind: str = "plain", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(1))
        self.moved: list[float] = []
        self.norms: list[float] = []
        self.ends: list[Tensor] = []
        self.first = {n: p.detach().clone() for n, p in self.named_parameters()} if kind == "each" else {}

    def on_train_epoch_start(self) -> None:
        number, second = divmod(self.current_epoch, 2)
        if not self.first or second:
            return
        self.kind = MANUAL[number]
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(self.first[name])
                param.grad = None
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()

    def on_train_epoch_end(self) -> None:
        if self.current_epoch % 2:
            self.ends.append(weights(self))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]) * self.scale, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0].detach().clone())
        before = weights(self)
        optimizer, other = self.optimizers()
        getattr(self, f"step_{self.kind}")(batch, batch_idx, optimizer, other)
        self.moved.append((weights(self) - before).abs().sum().item())

    def step_plain(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def step_clip(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()

    def step_torch_clip(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.norms.append(nn.utils.clip_grad_norm_(self.net.parameters(), 0.1).item())
        optimizer.step()

    def step_look(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        """Makes a step after changing the gradients by a function of their values."""
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for param in self.net.parameters():
            param.grad = torch.sign(param.grad) * param.grad.abs().max()
        optimizer.step()

    def step_twice(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        """Makes one optimizer step after two backward passes, then one after a single pass."""
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(0.1 * self.net(batch[0]).abs().mean())
        optimizer.step()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def step_accumulate(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        """Makes an optimizer step after every two batches, which may be of different epochs."""
        self.manual_backward(self.loss(batch) / 2)
        if (self.trainer.fit_loop.epoch_loop.total_batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    def step_quiet(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        """Makes an optimizer step after every two batches, and asks for no gradient sync in the first one."""
        steps = (self.trainer.fit_loop.epoch_loop.total_batch_idx + 1) % 2 == 0
        with optimizer.toggle_model(sync_grad=steps):
            self.manual_backward(self.loss(batch) / 2)
        if steps:
            optimizer.step()
            optimizer.zero_grad()

    def step_toggled(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        for one in (optimizer, other):
            self.toggle_optimizer(one)
            one.zero_grad()
            self.manual_backward(self.loss(batch))
            one.step()
            self.untoggle_optimizer(one)

    def step_both(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        """Makes two backward passes, each reaching both optimizers' parameters; the second optimizer steps with the
        sum of both.
        """
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.manual_backward(self.loss(batch))
        other.step()
        other.zero_grad()

    def step_closure(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    def step_raw(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        """Makes one step by `loss.backward()` without Lightning, and one with a gradient assigned from
        `torch.autograd.grad`.
        """
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()
        (self.scale.grad,) = torch.autograd.grad(self.loss(batch), self.scale)
        other.step()

    def step_raw_clip(self, batch: Any, batch_idx: int, optimizer: Any, other: Any) -> None:
        """Calls `loss.backward()` without Lightning in each batch; after every two, clips, changes the gradients by
        a function of their values, and steps.
        """
        (self.loss(batch) / 2).backward()
        if (self.trainer.fit_loop.epoch_loop.total_batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, 0.1, "norm")
            for param in self.net.parameters():
                param.grad.copy_(torch.sign(param.grad) * param.grad.abs().max())
            optimizer.step()
            optimizer.zero_grad()
        other.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), self.lr), torch.optim.SGD([self.scale], self.lr)]


MANUAL = tuple(name.removeprefix("step_") for name in vars(Manual) if name.startswith("step_"))
