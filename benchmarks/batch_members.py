"""Members of jobs whose batch has a fixed size, which benchmarks/batch.py starts, kills and compares.

A member trains by `Trainer(strategy="chaos")` with `batch=fixed`, or, as strategy "auto", by plain Lightning in one
process. Its layers take a given time for each sample. It writes down, in a file that outlives a SIGKILL, the samples
that each `training_step` got, with the view in which they were computed, and the loss of each committed step. Samples
carry their number in the data set, so it is the user's code that says them, and nothing of the product's accounts.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from chaos_lightning.pipeline.shares import ShareStep
from chaos_lightning.protocol.types import NO_VIEW, ViewId
from chaos_lightning.strategies import ChaosStrategy
from lab.timed_layer import TimedLayer

SAMPLES = 1_000
"""Samples of an epoch; no multiple of the batch, so an epoch's last step is shorter."""
BATCH = 48
WIDTH, LAYERS = 16, 2
PASSES = 3
"""Ratio of the time of both passes of a layer to that of its forward pass."""
ROWS = "rows"


class Rows(pl.Callback):
    """Callback that writes down the samples of each `training_step` and the loss of each step, a line of JSON each.

    Args:
        spec: Settings of the member.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._folder, self._name = Path(spec["folder"]), spec["name"]
        self._file = (self._folder / f"{self._name}-{os.getpid()}.{ROWS}").open("ab", buffering=0)
        self.rows: list[dict[str, Any]] = []
        self.view = NO_VIEW

    def watch(self) -> None:
        """Notes the view of each attempt at a step."""
        begin = ShareStep.open

        def begun(step: ShareStep, view: ViewId, seq: int, section: int) -> None:
            self.view = view
            begin(step, view, seq, section)

        ShareStep.open = begun  # type: ignore[method-assign]

    def add(self, **row: Any) -> None:
        self.rows.append({"name": self._name, **row})
        self._file.write(json.dumps(self.rows[-1]).encode() + b"\n")

    def took(self, trainer: pl.Trainer, numbers: Tensor) -> None:
        """Writes down the numbers of samples that the model is about to be trained on."""
        step, epoch = trainer.global_step + 1, trainer.current_epoch
        self.add(step=step, epoch=epoch, view=str(self.view), samples=numbers.tolist())

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.add(step=trainer.global_step, loss=float(outputs["loss"]))
        with contextlib.suppress(FileNotFoundError, ValueError):
            trainer.should_stop = trainer.global_step >= int((self._folder / "end").read_text())


class TimedRegression(pl.LightningModule):
    """Model whose layers take a given time for each sample, trained on values that are partly noise.

    Args:
        sample_s: Seconds of both passes of all layers, for a sample.
        rows: Record of what it is trained on.
    """

    def __init__(self, sample_s: float, rows: Rows) -> None:
        super().__init__()
        self.sample_s, self._rows = sample_s, rows
        self.layers = nn.ModuleList(TimedLayer(WIDTH, 0.0, 0.0) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        numbers, x, y = batch
        self._rows.took(self.trainer, numbers)
        forward_s = self.sample_s * len(x) / (PASSES * LAYERS)
        for layer in self.layers:
            layer.forward_s, layer.backward_s = forward_s, (PASSES - 1) * forward_s
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(self.head(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class EpochOrder(Sampler[int]):
    """Sampler with another order in each epoch, by a rule of the script's own, which plain Lightning follows as well.

    With shuffle=True the product draws an order of its own, in which a step cannot be compared with plain Lightning's.
    """

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __len__(self) -> int:
        return SAMPLES


def data() -> TensorDataset:
    """Returns samples that carry their own numbers, with targets that can only be learned in part."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    y = torch.sin(x.sum(1, keepdim=True)) + torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), x, y)


def member(spec: dict[str, Any]) -> None:
    """Runs one member of a job, or the whole training in one process.

    Args:
        spec: name, folder, steps, double (precision), sample_s, times (factors of sample_s, by name); endpoint,
            options (of the engine); strategy: "auto" for plain Lightning.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    warnings.simplefilter("ignore")
    rows, strategy = Rows(spec), spec.get("strategy")
    if strategy is None:
        rows.watch()
        options = {"host_scheduler": False, "join_timeout_s": 60.0, "step_timeout_s": 60.0, **spec.get("options", {})}
        strategy = ChaosStrategy(
            endpoint=spec["endpoint"],
            name=spec["name"],
            min_nodes=spec.get("min_nodes", 1),
            log_dir=os.environ["CHAOS_LOG_DIR"],
            options={"batch": "fixed", **options},
        )
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=-1, max_steps=spec.get("steps", -1),
        callbacks=[rows], precision="64-true" if spec.get("double") else "32-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    sample_s = spec.get("sample_s", 0.0) * spec.get("times", {}).get(spec["name"], 1)
    trainer.fit(TimedRegression(sample_s, rows), DataLoader(data(), BATCH, sampler=EpochOrder()))
    torch.save(rows.rows, Path(spec["folder"]) / f"{spec['name']}.pt")
