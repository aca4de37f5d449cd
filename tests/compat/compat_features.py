"""Lightning's features in jobs of two and three members, against one process at the same global batch.

    python tests/compat/compat_features.py

Theory of operation. Each row is one feature: a model, settings, a training loader. It is trained in four ways, each
time with the same number of samples in a step: by Lightning's own strategy and by `chaos` in one process, and by
`chaos` in two and in three real processes. What a user sees at the end (weights, steps, learning rates, metrics, what
loggers and checkpoints hold) must be equal to 1e-6, on every member, or all of them must be refused by name. Weights
are float64 where a row does not say otherwise, so that a difference is one of rules and not of rounding.

Where samples are drawn at random, `chaos` has an order of its own, and one process with `chaos` is what others are
compared with. Half precision rounds within a micro-batch, so there the one process makes the same micro-batches: it
accumulates them, sums their gradients in float32 and divides once.

The rows run in the same processes, one after the other; a row that fails is reported and the next one begins. The table
is written into docs/compat.md.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import compat_run
import lightning.pytorch as pl
import torch
from compat_plugin import causes
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from chaos_lightning.errors import ChaosError, UnsupportedError
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.testing.harness import Harness

MARK, COMMAND = "features", "tests/compat/compat_features.py"
GLOBAL_BATCH = 12
SAMPLES = 48
UNEVEN = 54
"""Four steps and a half: some members have no samples in the last one."""
DROPPED = 51
"""Four steps, and fewer samples than any member's batch."""
EPOCHS = 3
TOLERANCE = 1e-6
WORLDS = (2, 3)
ROW_DEADLINE_S = 60.0
ENDING_DEADLINE_S = 20.0
"""Seconds for a step of a row that must end: a member waits so long for one that was put out."""


# ------------------------------------------------------------------------------------------------------- models


def dataset(samples: int = SAMPLES) -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 4, generator=g, dtype=torch.float64)
    y = torch.tanh(x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]], dtype=torch.float64))
    return TensorDataset(x, y + 0.1 * torch.randn(samples, 1, generator=g, dtype=torch.float64))


class Model(pl.LightningModule):
    """Small network that records its learning rates and logged values.

    Args:
        schedule: Makes what stands beside the optimizer in `configure_optimizers`, from optimizer and trainer.
        on_step: Whether the loss is logged for each step as well: the mean of members' means then, as with ddp.

    Attributes:
        parts: Micro-batches of one process, whose gradients are summed and divided once; 1 for all others.
    """

    def __init__(self, schedule: Callable[[Any, Any], Any] | None = None, on_step: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.schedule, self.on_step, self.lr, self.parts = schedule, on_step, 0.1, 1
        self.rates: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = (part.to(next(self.parameters()).dtype) for part in batch)
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=self.on_step, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss * self.parts

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        if self.parts > 1:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.parts)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer, self.trainer)}


class Manual(Model):
    """Model with Lightning's manual optimization.

    Args:
        clip: Arguments of `clip_gradients`.
        optimizers: One for all parameters, or two, each for a layer.
        every: Micro-batches whose gradients are summed for a step.
        plain: Whether backward passes are torch's own, and not `manual_backward`.
    """

    def __init__(
        self, clip: Mapping[str, Any] | None = None, optimizers: int = 1, every: int = 1, plain: bool = False
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip, self.count, self.every, self.plain = clip, optimizers, every, plain

    def training_step(self, batch: Any, batch_idx: int) -> None:
        found = self.optimizers()
        steps = found if isinstance(found, list) else [found]
        for place, optimizer in enumerate(steps):
            if len(steps) > 1:
                self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            if self.plain:
                (loss / self.every).backward()
            else:
                self.manual_backward(loss / self.every)
            if (batch_idx + 1) % self.every == 0:
                if self.clip is not None:
                    self.clip_gradients(optimizer, **self.clip)
                optimizer.step()
                optimizer.zero_grad()
            if len(steps) > 1:
                self.untoggle_optimizer(optimizer)
            self.log(f"loss_{place}", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        if self.count == 1:
            return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        return [torch.optim.SGD(self.net[place].parameters(), self.lr, momentum=0.9) for place in (0, 2)]


class Pairs(Model):
    """Model whose validation result shows which batches a CombinedLoader put together."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        sums = [part[0].sum() for part in batch if part is not None]
        self.log("pairs", torch.stack(sums).prod(), batch_size=1)
        self.log("val_loss", self.loss(batch[0] or batch[1]), batch_size=1)


def combined(mode: Any) -> Callable[[Place], CombinedLoader]:
    """Returns a function that makes a CombinedLoader of two loaders, with three and five batches."""
    data = dataset(24)
    return lambda place: CombinedLoader([DataLoader(Subset(data, range(n)), batch_size=4) for n in (12, 19)], mode)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


class ClipsAfterBackward(Model):
    def on_after_backward(self) -> None:
        clip(self)


class ClipsBeforeStep(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        clip(self)


class OwnClipping(Model):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        clip(self)


class OwnBackward(Model):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class Clipper(pl.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        clip(pl_module)


class Rows(IterableDataset):
    """Iterable data set of one member's part of each global batch."""

    def __init__(self, member: int, world: int) -> None:
        each = GLOBAL_BATCH // world
        rows = dataset()
        self.rows = [rows[i] for i in range(SAMPLES) if (i % GLOBAL_BATCH) // each == member]

    def __iter__(self) -> Any:
        return iter(self.rows)


class Backwards(Sampler):
    """Sampler, as of a user, that goes from the last sample to the first."""

    def __iter__(self) -> Any:
        return iter(range(SAMPLES - 1, -1, -1))

    def __len__(self) -> int:
        return SAMPLES


class Batches(BatchSampler):
    """Subclass of BatchSampler, as a user may have one."""


# ------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Place:
    """Rank and number of members for which a loader is made; the batch size is a member's part of the global batch.

    For ddp the sampler is given, since Lightning's own would shuffle.
    """

    member: int
    world: int
    ddp: bool = False

    @property
    def batch(self) -> int:
        return GLOBAL_BATCH // self.world

    def sampler(self, data: TensorDataset) -> Sampler:
        """Returns a sampler that takes the data in order; for ddp, this rank's part of them."""
        return DistributedSampler(data, self.world, self.member, shuffle=False) if self.ddp else SequentialSampler(data)


def sequential(place: Place) -> DataLoader:
    data = dataset()
    return DataLoader(data, batch_size=place.batch, sampler=place.sampler(data))


def held_out(place: Place) -> DataLoader:
    """Makes the loader of the validation data."""
    data = dataset(24)
    return DataLoader(data, batch_size=4, sampler=place.sampler(data))


def uneven(place: Place) -> DataLoader:
    return DataLoader(dataset(UNEVEN), batch_size=place.batch)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature of Lightning that is tried in jobs of several members: one row of the table.

    Attributes:
        name: Name of the feature in the document.
        model: Makes the module.
        loader: Makes the training loader.
        validation: Makes the validation loader.
        settings: Makes further arguments of the Trainer, given a folder.
        numbers: Precision, an argument of the Trainer.
        data: Argument of the strategy.
        plain: Whether Lightning's own strategy has the same order of samples.
        parts: Half precision: one process makes the members' micro-batches.
        ddp: Whether two ranks of Lightning's ddp are compared, too.
        datamodule: Makes what gives the data, if not loaders.
        ends: Members that differ are put out with an error of the job that has these words, or all end with such an
            error; others wait by name for those who were put out.
    """

    name: str
    model: Callable[[], Model] = Model
    loader: Callable[[Place], Any] = sequential
    validation: Callable[[Place], Any] = held_out
    settings: Callable[[Path], dict[str, Any]] = field(default=lambda folder: {})
    numbers: str = "64-true"
    data: str = "shared"
    plain: bool = True
    parts: bool = False
    ddp: bool = False
    datamodule: Callable[[Place], pl.LightningDataModule] | None = None
    ends: str = ""


def _clipped(value: float, algorithm: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}


def _with(*made: Callable[[], pl.Callback]) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"callbacks": [make() for make in made]}


def _scheduled(schedule: Callable[[Any, Any], Any]) -> Callable[[], Model]:
    return lambda: Model(schedule)


def _plateau(optimizer: Any, trainer: Any) -> dict[str, Any]:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    return {"scheduler": plateau, "monitor": "val_loss"}


def _one_cycle(optimizer: Any, trainer: Any) -> dict[str, Any]:
    steps = int(trainer.estimated_stepping_batches)
    made = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=steps)
    return {"scheduler": made, "interval": "step"}


def _by_step(make: Callable[[Any], Any]) -> Callable[[Any, Any], dict[str, Any]]:
    return lambda optimizer, trainer: {"scheduler": make(optimizer), "interval": "step"}


def _kept(folder: Path) -> dict[str, Any]:
    kept = cb.ModelCheckpoint(folder / "kept", monitor="val_loss", save_top_k=1, filename="best")
    return {"callbacks": [kept], "enable_checkpointing": True}


def _scaled(folder: Path) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}


def _csv(folder: Path) -> dict[str, Any]:
    return {"logger": CSVLogger(folder, name="csv", version="")}


def _tensorboard(folder: Path) -> dict[str, Any]:
    from lightning.pytorch.loggers import TensorBoardLogger

    return {"logger": TensorBoardLogger(folder, name="board", version="")}


_lr = torch.optim.lr_scheduler
FEATURES: tuple[Feature, ...] = (
    Feature(name="automatic optimisation"),
    Feature(name="the last batch is smaller", model=lambda: Model(on_step=False), loader=uneven),
    Feature(name="accumulate_grad_batches=2", settings=lambda f: {"accumulate_grad_batches": 2}),
    Feature(
        name="accumulate_grad_batches=2, the last step has one batch",
        model=lambda: Model(on_step=False),
        loader=uneven,
        settings=lambda f: {"accumulate_grad_batches": 2},
        plain=False,
    ),
    Feature(name="manual optimisation", model=Manual),
    Feature(name="manual optimisation, two optimizers, toggled", model=lambda: Manual(optimizers=2)),
    Feature(name="manual optimisation, a step every second batch", model=lambda: Manual(every=2)),
    Feature(name="clipping by norm, automatic", settings=_clipped(0.05, "norm")),
    Feature(name="clipping by value, automatic", settings=_clipped(0.01, "value")),
    Feature(
        name="clipping by norm, manual",
        model=lambda: Manual({"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"}),
    ),
    Feature(
        name="clipping by value, manual",
        model=lambda: Manual({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ),
    Feature(
        name="clipping by norm, manual, after `loss.backward()`",
        model=lambda: Manual({"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"}, every=2, plain=True),
    ),
    Feature(name="`on_after_backward` that clips", model=ClipsAfterBackward),
    Feature(
        name="`on_after_backward` of a callback that clips, the last batch is smaller",
        model=lambda: Model(on_step=False),
        loader=uneven,
        settings=_with(Clipper),
    ),
    Feature(name="`on_before_optimizer_step` that clips", model=ClipsBeforeStep),
    Feature(name="`configure_gradient_clipping` of the module's own", model=OwnClipping),
    Feature(name="`backward` of the module's own", model=OwnBackward),
    Feature(name="StepLR by epochs", model=_scheduled(lambda o, t: _lr.StepLR(o, 1, 0.5))),
    Feature(name="StepLR by steps", model=_scheduled(_by_step(lambda o: _lr.StepLR(o, 4, 0.5)))),
    Feature(name="OneCycleLR over trainer.estimated_stepping_batches", model=_scheduled(_one_cycle)),
    Feature(name="LambdaLR", model=_scheduled(_by_step(lambda o: _lr.LambdaLR(o, lambda n: 1 / (1 + n))))),
    Feature(name="CosineAnnealingLR", model=_scheduled(_by_step(lambda o: _lr.CosineAnnealingLR(o, 10)))),
    Feature(name="ReduceLROnPlateau", model=_scheduled(_plateau)),
    Feature(name="SequentialSampler"),
    Feature(
        name="RandomSampler (shuffle=True)",
        loader=lambda p: DataLoader(dataset(), batch_size=p.batch, shuffle=True),
        plain=False,
    ),
    Feature(
        name="WeightedRandomSampler",
        loader=lambda p: DataLoader(
            dataset(), batch_size=p.batch, sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(SAMPLES)], SAMPLES)
        ),
        plain=False,
    ),
    Feature(
        name="a sampler of the user's",
        loader=lambda p: DataLoader(dataset(), batch_size=p.batch, sampler=Backwards()),
    ),
    Feature(
        name="a batch_sampler of the user's",
        loader=lambda p: DataLoader(dataset(48), batch_sampler=Batches(SequentialSampler(range(48)), p.batch, False)),
    ),
    Feature(
        name="DistributedSampler, given by the user",
        loader=lambda p: DataLoader(
            dataset(), batch_size=p.batch, sampler=DistributedSampler(dataset(), p.world, p.member, shuffle=False)
        ),
    ),
    Feature(name="drop_last=True", loader=lambda p: DataLoader(dataset(DROPPED), p.batch, drop_last=True)),
    Feature(name="DataLoader with two workers", loader=lambda p: DataLoader(dataset(), p.batch, num_workers=2)),
    Feature(name="IterableDataset", loader=lambda p: DataLoader(Rows(0, 1), batch_size=p.batch)),
    Feature(
        name="IterableDataset with data='local'",
        loader=lambda p: DataLoader(Rows(p.member, p.world), batch_size=p.batch),
        data="local",
    ),
    *(
        Feature(name=f'CombinedLoader(..., "{mode}") in validation', model=Pairs, validation=combined(mode))
        for mode in ("max_size", "min_size", "max_size_cycle")
    ),
    Feature(name="CSVLogger, metrics with sync_dist=True", settings=_csv),
    Feature(name="TensorBoardLogger", settings=_tensorboard),
    Feature(name="EarlyStopping", settings=_with(lambda: cb.EarlyStopping("val_loss", min_delta=0.05, patience=0))),
    Feature(name="ModelCheckpoint", settings=_kept),
    Feature(
        name="LearningRateMonitor",
        model=_scheduled(_by_step(lambda o: _lr.StepLR(o, 4, 0.5))),
        settings=lambda f: {**_csv(f), **_with(lambda: cb.LearningRateMonitor("step"))(f)},
    ),
    Feature(name="EMAWeightAveraging", settings=_with(lambda: cb.EMAWeightAveraging(decay=0.8))),
    Feature(name="WeightAveraging", settings=_with(lambda: cb.WeightAveraging(avg_fn=lambda a, m, n: a + (m - a) / 2))),
    Feature(name="StochasticWeightAveraging", settings=_with(lambda: cb.StochasticWeightAveraging(0.05, 1))),
    Feature(name="GradientAccumulationScheduler", settings=_with(lambda: cb.GradientAccumulationScheduler({0: 2}))),
    Feature(name="LearningRateFinder", settings=_with(cb.LearningRateFinder)),
    Feature(name="BatchSizeFinder", settings=_with(cb.BatchSizeFinder)),
    Feature(name="BackboneFinetuning", settings=_with(cb.BackboneFinetuning)),
    Feature(name="ModelPruning", settings=_with(lambda: cb.ModelPruning("l1_unstructured"))),
    Feature(name="precision 64-true"),
    Feature(name="precision 32-true", numbers="32-true"),
    Feature(name="precision bf16-mixed", numbers="bf16-mixed", parts=True),
    Feature(name="precision 16-mixed", numbers="16-mixed", settings=_scaled, parts=True),
)


# ------------------------------------------------------------------------------------------------------- training


def trained(
    feature: Feature, strategy: Any, place: Place, folder: Path, *, parts: int = 1, **more: Any
) -> dict[str, Any]:
    """Runs one fit of a feature; returns the results that a user sees: weights, steps, learning rates, metrics,
    files.
    """
    made: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": EPOCHS, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1,
        "default_root_dir": str(folder), "precision": feature.numbers, "strategy": strategy,
        "accumulate_grad_batches": parts, **more, **feature.settings(folder),
    }  # fmt: skip
    if "plugins" in made:
        del made["precision"]
    trainer = pl.Trainer(**made)
    model = feature.model()
    model.parts = parts
    where = replace(place, world=place.world * parts)
    if feature.datamodule is not None:
        trainer.fit(model, datamodule=feature.datamodule(where))
    else:
        trainer.fit(model, feature.loader(where), feature.validation(where))
    facts: dict[str, Any] = {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).double().tolist(),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "rates": model.rates,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }
    if parts == 1 and trainer.is_global_zero:
        facts["files"] = files(folder)
    return facts


def files(folder: Path) -> dict[str, Any]:
    """Returns the contents of files that loggers and ModelCheckpoint wrote, by writer."""
    found: dict[str, Any] = {}
    for path in sorted((folder / "csv").glob("metrics*.csv")):
        head, *rows = (row.split(",") for row in path.read_text().splitlines())
        found["csv"] = [{name: float(v) for name, v in sorted(zip(head, row, strict=True)) if v} for row in rows]
    for path in sorted((folder / "kept").glob("*.ckpt")):
        saved = torch.load(path, weights_only=False)
        found[path.name] = [t.double().flatten().tolist() for t in saved["state_dict"].values()]
    return found


def one_process(folder: str, ports: Mapping[int, int], table: str) -> None:
    """Trains each feature in one process, for comparison: with Lightning's own strategy, and as the only member of a
    job.
    """
    from chaos_lightning.strategies import ChaosStrategy

    _quiet()
    for number in ports:
        feature = importlib.import_module(table).FEATURES[number]
        if feature.ends:
            continue
        for world in WORLDS if feature.parts else (1,):
            parts = world if feature.parts else 1
            strategies: dict[str, Any] = {"plain": "auto"} if feature.plain else {}
            if not feature.parts:  # else it would weigh the micro-batches as well: what is compared is the sum by hand
                strategies["chaos"] = ChaosStrategy(
                    endpoint=f"127.0.0.1:{ports[number]}", job=f"row-{number}", name="only", data=feature.data
                )
            for how, strategy in strategies.items():
                out = Path(folder, f"{how}-{world}-{number}")
                _report(out, feature, lambda f, s=strategy, o=out, p=parts: trained(f, s, Place(0, 1), o, parts=p))


def rank(folder: str, numbers: Sequence[int], table: str, index: int, port: int) -> None:
    """Trains, as one of two ranks of ddp, the features that are compared with ddp."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", LOCAL_RANK=str(index))
    _quiet()
    for number in numbers:
        feature = importlib.import_module(table).FEATURES[number]
        out = Path(folder, f"ddp-1-{number}") if index == 0 else Path(folder, f"second-rank-{number}")
        more = {"accelerator": "cpu", "devices": 2, "use_distributed_sampler": False}
        _report(out, feature, lambda f, o=out, m=more: trained(f, "ddp", Place(index, 2, True), o, **m))


def member(folder: str, ports: Mapping[int, int], table: str, index: int, world: int) -> None:
    """Trains each feature as one member of a job."""
    from chaos_lightning.strategies import ChaosStrategy

    _quiet()
    for number in ports:
        feature = importlib.import_module(table).FEATURES[number]
        step_timeout_s = ENDING_DEADLINE_S if feature.ends else ROW_DEADLINE_S
        strategy = ChaosStrategy(
            endpoint=f"127.0.0.1:{ports[number]}", job=f"row-{number}", name=f"m{index}", min_nodes=world,
            data=feature.data, options={"join_timeout_s": ROW_DEADLINE_S, "step_timeout_s": step_timeout_s},
        )  # fmt: skip
        out = Path(folder, f"members-{world}-{number}", str(index))
        _report(out, feature, lambda f, s=strategy, o=out: trained(f, s, Place(index, world), o))


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _report(folder: Path, feature: Feature, run: Callable[[Feature], dict[str, Any]]) -> None:
    """Trains a feature, and writes its results or its error into a file."""
    folder.mkdir(parents=True)
    try:
        result: dict[str, Any] = {"facts": run(feature)}
    except Exception as error:
        ours = [e for e in causes(error) if isinstance(e, ChaosError)]
        refused = next((str(e) for e in ours if isinstance(e, UnsupportedError)), "")
        result = {"refused": refused, "error": f"{type(error).__name__}: {error}", "named": bool(ours)}
        if isinstance(error, ModuleNotFoundError):
            result["missing"] = str(error)
    torch.save(result, folder / "result.pt")
    print(feature.name, "refused" if result.get("refused") else result.get("error", "done"), flush=True)


# ------------------------------------------------------------------------------------------------------- comparing


def difference(a: Any, b: Any) -> float:
    """Returns the largest difference between numbers at equal places, relative to numbers above 1; inf if the shapes
    differ.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return max((difference(a[k], b[k]) for k in a), default=0.0) if a.keys() == b.keys() else math.inf
    if isinstance(a, list) and isinstance(b, list):
        return max((difference(x, y) for x, y in zip(a, b, strict=True)), default=0.0) if len(a) == len(b) else math.inf
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return abs(a - b) / max(1.0, abs(a))


@dataclass(frozen=True)
class Row:
    """Result of comparing one feature in jobs of one size."""

    feature: Feature
    world: int
    words: str
    held: bool
    gap: float = 0.0


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "result.pt"
    return torch.load(path, weights_only=False) if path.exists() else {"error": "it did not come to an end"}


def judged(folder: Path, number: int, feature: Feature, world: int) -> Row:
    """Compares the results of all members of a job with those of one process."""
    members = [_read(folder / f"members-{world}-{number}" / str(index)) for index in range(world)]
    kind = world if feature.parts else 1
    if feature.ends:
        return Row(feature, world, *_ended(feature, members))
    references = {
        how: found
        for how in ("plain", "chaos", "ddp")
        if (path := folder / f"{how}-{kind}-{number}").exists() and (found := _read(path))
    }
    if any("missing" in result for result in members):
        return Row(feature, world, absent(next(r["missing"] for r in members if "missing" in r)), True)
    refusals = {result.get("refused", "") for result in members}
    if refusals != {""}:
        held = len(refusals) == 1 and all("facts" not in result for result in members)
        return Row(feature, world, "refused by name: " + said(next(r for r in refusals if r)), held)
    if bad := [result["error"] for result in (*members, *references.values()) if "facts" not in result]:
        return Row(feature, world, f"fails: {bad[0]}", False)
    gap, where = 0.0, ""
    for how, reference in references.items():
        theirs = reference["facts"]
        for result in members:
            facts = result["facts"]
            for name in facts.keys() & theirs.keys():
                if feature.parts and name == "metrics":
                    continue  # one process logs each micro-batch by itself
                found = difference(theirs[name], facts[name])
                if found > gap or not where:
                    gap, where = found, f"{name} against {how}"
    if gap > TOLERANCE:
        return Row(feature, world, f"differs by {gap:.1e} ({where})", False, gap)
    return Row(feature, world, f"equal ({gap:.0e})", True, gap)


def _ended(feature: Feature, members: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """Checks that members have ended with the error that the feature must cause, or waited for those who have; returns
    a text, and whether that is so.
    """
    errors = [result.get("error", "none") for result in members]
    ended = [error for error in errors if feature.ends in error]
    waited = [error for error in errors if error not in ended and "training waits: " in error]
    if not ended or len(ended) + len(waited) < len(errors) or not all(result.get("named") for result in members):
        return f"does not end as it must: {'; '.join(errors)}", False
    return "ends by name: " + max(ended, key=len).partition(": ")[2], True


def said(refusal: str) -> str:
    """Returns the line of a refusal that names the feature and the reason."""
    lines = [line.removeprefix("- ") for line in refusal.splitlines() if line.startswith("- ")]
    return lines[0] if lines else refusal


def absent(words: str) -> str:
    """Returns a short form of Lightning's message about a missing package."""
    packages = re.findall(r"Requirement '(\w+)' not met", words)
    needed = " or ".join(f"`{name}`" for name in sorted(packages)) or words
    return f"not tried: needs {needed}, which chaos-lightning does not need and is not installed here"


def rows(
    folder: Path, deadline_s: float, only: str = "", table: str = "compat_features", worlds: Sequence[int] = WORLDS
) -> list[Row]:
    """Trains the features whose names match `only`, one job after another in the same processes; returns their
    comparisons.

    Args:
        folder: Folder for the files that the processes leave behind.
        deadline_s: Seconds that all rows of one size of job may take.
        only: Regular expression for names of features.
        table: Name of the module with the rows, as `FEATURES`.
        worlds: Sizes of jobs.
    """
    features: Sequence[Feature] = importlib.import_module(table).FEATURES
    numbers = [number for number, feature in enumerate(features) if re.search(only, feature.name)]
    state = {"XDG_STATE_HOME": str(folder / "state")}
    with Harness(folder / "processes", deadline_s=deadline_s, env=state) as harness:
        with_ddp = [number for number in numbers if features[number].ddp]
        (meeting,) = free_ports(1)
        for index in range(2 if with_ddp else 0):
            harness.start_function(f"rank-{index}", rank, str(folder), with_ddp, table, index, meeting)
        for index in range(2 if with_ddp else 0):
            harness.wait_exit(f"rank-{index}")
        for world in (1, *worlds):
            ports = dict(zip(numbers, free_ports(len(numbers)), strict=True))
            names = [f"of-{world}-{index}" for index in range(world)]
            for index, name in enumerate(names):
                if world == 1:
                    harness.start_function(name, one_process, str(folder), ports, table)
                else:
                    harness.start_function(name, member, str(folder), ports, table, index, world)
            for name in names:
                harness.wait_exit(name)
    return [judged(folder, number, features[number], world) for number in numbers for world in worlds]


def described(found: Sequence[Row]) -> str:
    """Returns the table of features for the document, as Markdown."""
    out = [
        "Final weights, steps, learning rates at each step, metrics, and the files of loggers and checkpoints of two "
        "and of three members, against one process at the same global batch "
        f"({GLOBAL_BATCH} samples): the largest difference, which must be below {TOLERANCE:g}.",
        "", "| feature | numbers | compared with | two members | three members |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for feature in FEATURES:
        two, three = (row for row in found if row.feature is feature)
        against = "one process, Lightning's strategy and `chaos`" if feature.plain else "one process with `chaos`"
        if feature.parts:
            against = "one process that accumulates the same micro-batches, Lightning's strategy"
        same = two.words.startswith(("refused", "not tried")) and two.words == three.words
        cells = [feature.name, feature.numbers, against if "equal" in two.words else "",
                 compat_run.one_line(two.words), "the same" if same else compat_run.one_line(three.words)]  # fmt: skip
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def main(table: ModuleType) -> int:
    """Trains the features that a module lists, prints the results and writes them into the document; returns the exit
    code.
    """
    parser = argparse.ArgumentParser(description=(table.__doc__ or "").splitlines()[0])
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds for all rows of one size of job")
    parser.add_argument("--keep", type=Path, help="folder for what the processes leave behind")
    parser.add_argument("--only", default="", help="regular expression: these features, and the page stays as it is")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="compat-") as scratch:
        found = rows(given.keep or Path(scratch), given.deadline, given.only, table.__name__)
    for row in found:
        print(f"{row.feature.name}, {row.world} members: {row.words}")
    if not given.only:
        compat_run.put(table.described(found), table.MARK, table.COMMAND)
    return 0 if all(row.held for row in found) else 1


if __name__ == "__main__":
    # Children import this module by its name; run as a script, it would be another one, with rows of its own.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import compat_features

    sys.exit(compat_features.main(compat_features))
