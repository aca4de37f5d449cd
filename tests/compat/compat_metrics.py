"""Places of torchmetrics in jobs of two and three members, against one process and ddp at the same global batch.

    python tests/compat/compat_metrics.py

Theory of operation. Each row is one place in which a metric can live, or one moment at which it can be made. Every row
counts the validation data, and some the training data, and shows the value that its compute() gives. Rows run as those
of compat_features.py do, with two ranks of ddp as a further reference; values must be equal to 1e-6 on every member, or
all members must end with an error that names the metric. The table is written into docs/compat.md.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compat_features as base
import compat_run
import lightning.pytorch as pl
import torch
import torchmetrics as tm
from torch import Tensor, nn
from torch.utils.data import DataLoader

MARK, COMMAND = "metrics", "tests/compat/compat_metrics.py"


def error() -> tm.Metric:
    return tm.MeanSquaredError()


class Judged(base.Model):
    """Model that logs the metric of each validation as `value`; subclasses say where the metric is kept."""

    def metric(self) -> Any:
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.metric().update(self.net(x), y)

    def on_validation_epoch_end(self) -> None:
        self.log("value", self.metric().compute())
        self.metric().reset()


class Attribute(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.error = error()

    def metric(self) -> Any:
        return self.error


class MadeAt(Judged):
    """Model whose metric is made in one of Lightning's hooks."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self.make)

    def make(self, *_: Any, **__: Any) -> None:
        self.error = error()

    def metric(self) -> Any:
        return self.error


class InList(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [error()]

    def metric(self) -> Any:
        return self.kept[0]


class InDict(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"inner": [{"error": error()}]}

    def metric(self) -> Any:
        return self.kept["inner"][0]["error"]


class InModules(Judged):
    def __init__(self, modules: Callable[[tm.Metric], nn.Module]) -> None:
        super().__init__()
        self.kept = modules(error())

    def metric(self) -> Any:
        return next(m for m in self.kept.modules() if isinstance(m, tm.Metric))


class InClosure(Judged):
    """Model whose metric is hidden in a closure, so that no attribute leads to it."""

    def __init__(self) -> None:
        super().__init__()
        made = error()
        self.metric = lambda: made  # type: ignore[method-assign]


class Cloned(Judged):
    """Model that clones its metric for each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = error()

    def on_validation_epoch_start(self) -> None:
        self.error = self.first.clone()

    def metric(self) -> Any:
        return self.error


class Collected(Judged):
    """Model with a MetricCollection in which equal metrics form a compute group with shared states."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = tm.MetricCollection({"mse": tm.MeanSquaredError(), "again": tm.MeanSquaredError(),
                                         "mae": tm.MeanAbsoluteError()})  # fmt: skip

    def metric(self) -> Any:
        return self.kept

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.kept.compute())
        self.kept.reset()


class Composed(Attribute):
    def __init__(self) -> None:
        super().__init__()
        self.error = tm.MeanSquaredError() + tm.MeanAbsoluteError()


class Wrapped(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.kept = tm.MinMaxMetric(error())

    def metric(self) -> Any:
        return self.kept

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.kept.compute())


class Tracked(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.kept = tm.MetricTracker(error(), maximize=False)

    def on_validation_epoch_start(self) -> None:
        self.kept.increment()

    def metric(self) -> Any:
        return self.kept

    def on_validation_epoch_end(self) -> None:
        self.log("value", self.kept.compute())
        best = self.kept.best_metric()
        self.log("best", torch.as_tensor(best))


class Listed(Judged):
    """Model with a metric whose states are lists, perhaps of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = tm.SpearmanCorrCoef()

    def metric(self) -> Any:
        return self.kept

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.kept.update(self.net(x).flatten(), y.flatten())


class Logged(Judged):
    """Model that logs a metric object, which Lightning computes and resets."""

    def __init__(self) -> None:
        super().__init__()
        self.error = error()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.error(self.net(x), y)
        self.log("value", self.error, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        pass


class Trained(base.Model):
    """Model with a metric of training batches, made in one of Lightning's hooks."""

    def __init__(self, hook: str) -> None:
        super().__init__(on_step=False)
        self.kept: dict[str, tm.Metric] = {}
        setattr(self, hook, self.make)

    def make(self) -> None:
        self.kept["error"] = error()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept["error"].update(self.net(batch[0]).detach(), batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("value", self.kept["error"].compute())
        self.kept["error"].reset()


class Observer(pl.Callback):
    """Callback with a metric of validation batches, which it makes at once, or anew in one of Lightning's hooks."""

    def __init__(self, make: Callable[[], Any], hook: str = "") -> None:
        self.make = make
        if hook:
            setattr(self, hook, self.renew)
        else:
            self.kept = make()

    def renew(self, *_: Any) -> None:
        self.kept = self.make()

    def metric(self) -> Any:
        kept = self.kept
        if isinstance(kept, tm.Metric | tm.MetricCollection):
            return kept
        return kept["error"] if isinstance(kept, dict) else kept[0]

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        x, y = batch
        self.metric().update(module.net(x), y)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        value = self.metric().compute()
        module.log_dict(value if isinstance(value, dict) else {"value": value})
        self.metric().reset()


class Data(pl.LightningDataModule):
    """Data module that keeps the metric as an attribute, with the usual data."""

    def __init__(self, place: base.Place) -> None:
        super().__init__()
        self.place, self.error = place, error()

    def train_dataloader(self) -> DataLoader:
        return base.sequential(self.place)

    def val_dataloader(self) -> DataLoader:
        return base.held_out(self.place)


class InData(Judged):
    def metric(self) -> Any:
        return self.trainer.datamodule.error


class OnRankZero(Attribute):
    """Model that computes its metric on rank zero only."""

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            super().on_validation_epoch_end()


class LackedByOthers(Judged):
    """Model that has a metric on rank zero only."""

    def on_validation_epoch_start(self) -> None:
        self.error = error() if self.trainer.is_global_zero else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.error is not None:
            super().validation_step(batch, batch_idx)

    def metric(self) -> Any:
        return self.error

    def on_validation_epoch_end(self) -> None:
        if self.error is not None:
            super().on_validation_epoch_end()


class SyncsOnStep(Attribute):
    def __init__(self) -> None:
        super().__init__()
        self.error = tm.MeanSquaredError(dist_sync_on_step=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error(self.net(batch[0]), batch[1])


def row(name: str, model: Callable[[], base.Model], **more: Any) -> base.Feature:
    return base.Feature(name=name, model=model, ddp=True, **more)


def insane(folder: Path) -> dict[str, Any]:
    """Returns Trainer arguments without a sanity check, which would see other data with ddp, or run before the metric
    is made.
    """
    return {"num_sanity_val_steps": 0}


def seen(name: str, make: Callable[[], Any], hook: str = "") -> base.Feature:
    return row(name, base.Model, settings=lambda f: {"callbacks": [Observer(make, hook)]})


FEATURES: tuple[base.Feature, ...] = (
    row("attribute of the module", Attribute),
    row("logged as an object: `self.log(name, metric)`", Logged),
    row("`nn.ModuleList` of the module", lambda: InModules(lambda m: nn.ModuleList([m]))),
    row("`nn.ModuleDict` of the module", lambda: InModules(lambda m: nn.ModuleDict({"error": m}))),
    row("`MetricCollection` with compute groups", Collected),
    row("`MetricTracker.increment()`", Tracked),
    row("`MinMaxMetric` around it", Wrapped, settings=insane),
    row("sum of two metrics", Composed),
    row("states are lists (`SpearmanCorrCoef`)", Listed),
    row("plain list of the module", InList),
    row("dict in a list in a dict of the module", InDict),
    row("closure: no attribute leads to it", InClosure),
    row("made in `on_fit_start`", lambda: MadeAt("on_fit_start")),
    row("made in `on_train_start`", lambda: MadeAt("on_train_start"), settings=insane),
    row("made in `on_validation_epoch_start`", lambda: MadeAt("on_validation_epoch_start")),
    row("`clone()` for each validation", Cloned),
    row("attribute of the data module", InData, datamodule=Data),
    seen("attribute of a callback", error),
    seen(
        "`MetricCollection` of a callback", lambda: tm.MetricCollection({"mse": error(), "mae": tm.MeanAbsoluteError()})
    ),
    seen("list of a callback", lambda: [error()]),
    seen("dict of a callback", lambda: {"error": error()}),
    seen("`nn.ModuleList` of a callback", lambda: nn.ModuleList([error()])),
    seen("made in a callback's `on_validation_epoch_start`", error, "on_validation_epoch_start"),
    row("of training, in a dict, made in `on_train_start`", lambda: Trained("on_train_start")),
    row("of training, in a dict, made in `on_train_epoch_start`", lambda: Trained("on_train_epoch_start")),
    base.Feature(name="compute() on rank zero alone", model=OnRankZero, ends="MeanSquaredError"),
    base.Feature(name="rank zero alone has the metric", model=LackedByOthers, ends="MeanSquaredError"),
    base.Feature(name="`dist_sync_on_step=True`, with forward in a step", model=SyncsOnStep, ends="MeanSquaredError"),
)


def described(found: Sequence[base.Row]) -> str:
    """Returns the table of metrics for the document, as Markdown."""
    out = [
        "Values of torchmetrics on every member of two and of three, against one process with Lightning's strategy and "
        f"with `chaos`, and against `ddp` with two ranks: the largest difference, which must be below "
        f"{base.TOLERANCE:g}. Members whose calls differ from the others' are put out by an error that names the "
        "metric; the others wait for them if fewer than `min_nodes` are left.",
        "", "| place of the metric | two members | three members |", "|---|---|---|",
    ]  # fmt: skip
    for feature in FEATURES:
        words = (
            re.sub(r"m\d~\d", "a member", re.sub(r":\d+\)", ")", row.words)) for row in found if row.feature is feature
        )
        two, three = map(compat_run.one_line, words)
        out.append(f"| {feature.name} | {two} | {'the same' if two == three and 'equal' not in two else three} |")
    return "\n".join(out)


if __name__ == "__main__":
    # Children import this module by its name; run as a script, it would be another one, with rows of its own.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import compat_metrics

    sys.exit(base.main(compat_metrics))
