"""Runs member processes of the tests: a Trainer.fit with gates, and a report of its end."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import strategy_models as models
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler

from chaos_lightning.callbacks import CheckpointOnChange, FaultInjectorCallback
from chaos_lightning.errors import LeftJobError
from chaos_lightning.member import engine as engine_module
from chaos_lightning.member.engine import Engine
from chaos_lightning.strategies import ChaosStrategy, place
from chaos_lightning.transport.links import Links


class Gates(pl.Callback):
    """Callback that stops this member until the test opens the gate (a FIFO: no polling).

    Args:
        steps: Gates after these optimizer steps.
        worlds: Gates after the first step with so many members.
        validation: Gate within the first validation.
        batches: Gates after so many batches of the fit.
    """

    def __init__(self, steps: dict[int, str], worlds: dict[int, str], validation: str, batches: dict[int, str]) -> None:
        self.batches = dict(batches)
        self.steps = dict(steps)
        self.worlds = dict(worlds)
        self.validation = validation

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop(self.steps.pop(trainer.global_step, ""))
        self._stop(self.worlds.pop(trainer.world_size, ""))
        self._stop(self.batches.pop(trainer.fit_loop.epoch_loop.total_batch_idx + 1, ""))

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            gate, self.validation = self.validation, ""
            self._stop(gate)

    def _stop(self, gate: str) -> None:
        if gate:
            with open(gate) as opened:
                opened.read()


class Trace(pl.Callback):
    """Callback that records the loops' counters at each batch; all members' records must be equal line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        self.lines.append(
            f"epoch {trainer.current_epoch} batch {batch_idx} step {trainer.global_step} "
            f"last {loop.batch_progress.is_last_batch} of {trainer.num_training_batches} "
            f"lr {[g['lr'] for o in trainer.optimizers for g in o.param_groups]}"
        )

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.lines.append(f"epoch {trainer.current_epoch} starts")

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.lines.append(f"validation at step {trainer.global_step}: {trainer.callback_metrics.get('val_loss')}")


class Founding(pl.Callback):
    """Callback that records this process's rank before its first batch, and which rank-zero code ran by then."""

    def __init__(self) -> None:
        self.ranks: set[tuple[int, int]] = set()
        self.zero: list[str] = []

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._note(trainer, "setup")

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note(trainer, "on_fit_start")

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note(trainer, "on_train_start")

    def _note(self, trainer: pl.Trainer, hook: str) -> None:
        self.ranks.add((trainer.global_rank, trainer.world_size))
        rank_zero_only(self.zero.append)(hook)


class ByRank(pl.LightningDataModule):
    """DataModule whose validation data the user shards by rank, as Lightning's documentation shows for DDP."""

    def __init__(self, train: DataLoader, samples: int, batch: int) -> None:
        super().__init__()
        self.train, self.samples, self.batch = train, samples, batch

    def train_dataloader(self) -> DataLoader:
        return self.train

    def val_dataloader(self) -> DataLoader:
        held_out = models.data(self.samples)
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(held_out, self.batch, sampler=DistributedSampler(held_out, world, rank, shuffle=False))


def die_writing(when: str) -> None:
    """Kills this process at its next checkpoint: with half of the bytes written ("half"), or all, but not yet
    renamed ("whole").
    """
    real = TorchCheckpointIO.save_checkpoint

    def save_checkpoint(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        real(self, checkpoint, path, storage_options)
        if when == "half":
            os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    TorchCheckpointIO.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


def full_disk(after: int) -> None:
    """Makes every checkpoint after the first `after` ones fail as on a full disk."""
    real, written = TorchCheckpointIO.save_checkpoint, 0

    def save_checkpoint(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        nonlocal written
        if written == after:
            with open("/dev/full", "wb", buffering=0) as disk:
                disk.write(b"some bytes")
        real(self, checkpoint, path, storage_options)
        written += 1

    TorchCheckpointIO.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


def slow_acceptor() -> None:
    """Makes the thread that accepts links end half a second late."""
    real = Links._accept_all

    def accept_all(self: Any) -> None:
        real(self)
        threading.Event().wait(0.5)

    Links._accept_all = accept_all  # type: ignore[method-assign]


def evaluate(trainer: pl.Trainer, model: pl.LightningModule, samples: int, batch: int) -> dict[str, Any]:
    """Validates and tests before fit on data that the user shards by rank, and predicts on all data; returns the
    results.
    """
    held_out = models.data(samples)
    rows = {}
    for name in ("validate", "test"):
        sampler = DistributedSampler(held_out, trainer.world_size, trainer.global_rank, shuffle=False)
        (rows[name],) = getattr(trainer, name)(model, DataLoader(held_out, batch, sampler=sampler), verbose=False)
    predicted = trainer.predict(model, DataLoader(held_out, batch))
    who = (trainer.global_rank, trainer.world_size, trainer.is_global_zero)
    return {"who": who, **rows, "predicted": sum(len(p) for p in predicted)}


def leave_at(step: int) -> None:
    """Makes this process ask to leave once this step is committed, before the optimizer applies it."""
    real = Engine.step
    engine_module.MAY_GO_S = 40.0

    def committed(self: Engine, **more: Any) -> Any:
        header = real(self, **more)
        if header.step == step:
            self.leave("as told")
        return header

    Engine.step = committed  # type: ignore[method-assign]


def make_model(spec: dict[str, Any]) -> pl.LightningModule:
    return getattr(models, spec.get("model", "Regression"))(**spec.get("model_args", {}))


def member(spec: dict[str, Any]) -> None:
    """Runs one member that trains by Trainer.fit.

    Args:
        spec: name, port, out (folder of the report); samples, batch, val_samples, val_batch, val_loaders, epochs,
            gates, batches, by_rank (validation data are), evaluates (before fit, on as many data and by rank),
            model, model_args, trainer, options, data,
            callbacks ("checkpoint", "steps", "on_change", "stopping", "spikes", "log", "boards": to TensorBoard, too),
            every_n_train_steps and ckpt_dir (of "steps"), plan (of faults),
            leaves_at (within this step), elsewhere (than the scheduler, as far as its place goes),
            dies_writing ("half", "whole"), room (for so many checkpoints; then the disk is full, and the report is what
            fit raised).
    """
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for text in (
        ".*LeafSpec.*",
        ".*does not have many workers.*",
        "The number of training batches.*",
        "Be aware that when using `ckpt_path`.*",
        "Checkpoint directory .* exists and is not empty.*",
        "The `srun` command is available",
        *spec.get("ignore", ()),
    ):
        warnings.filterwarnings("ignore", message=text)
    out = Path(spec["out"])
    trace, founding = Trace(), Founding()
    callbacks: list[pl.Callback] = [
        trace,
        founding,
        Gates(spec.get("gates", {}), spec.get("worlds", {}), spec.get("val_gate", ""), spec.get("batches", {})),
    ]
    wanted = spec.get("callbacks", ())
    if "checkpoint" in wanted:
        callbacks.append(ModelCheckpoint(dirpath=out / "ckpt", monitor="val_loss", save_top_k=2, save_last=True))
    if "steps" in wanted:
        each = spec.get("every_n_train_steps", 5)
        where = out / spec.get("ckpt_dir", "ckpt")
        callbacks.append(ModelCheckpoint(dirpath=where, filename="{step}", every_n_train_steps=each, save_top_k=-1))
    if "on_change" in wanted:
        callbacks.append(CheckpointOnChange(str(out / "changes"), keep=spec.get("keep", 0)))
    if "stopping" in wanted:
        callbacks.append(EarlyStopping("val_loss", patience=spec.get("patience", 3), min_delta=0.0))
    if "spikes" in wanted:
        callbacks.append(SpikeDetection(rtol=30.0))
    if spec.get("slow_acceptor"):
        slow_acceptor()
    if spec.get("elsewhere"):
        place.is_local = lambda host: False  # type: ignore[assignment]
    if "leaves_at" in spec:
        leave_at(spec["leaves_at"])
    if "dies_writing" in spec:
        die_writing(spec["dies_writing"])
    strategy = ChaosStrategy(
        endpoint=f"127.0.0.1:{spec['port']}",
        name=spec["name"],
        min_nodes=spec.get("min_nodes"),
        data=spec.get("data", "shared"),
        log_dir=os.environ["CHAOS_LOG_DIR"],
        options={
            "join_timeout_s": 40.0,
            "step_timeout_s": 40.0,
            "state_hash_every": 4,
            "join_by": "pause",  # members are held at gates until somebody is admitted; replay has tests of its own
            **spec.get("options", {}),
        },
    )
    settings: dict[str, Any] = {"max_epochs": spec.get("epochs", 3), "callbacks": callbacks, "log_every_n_steps": 1}
    if {"checkpoint", "steps", "on_change"} & set(wanted):
        settings["enable_checkpointing"] = True
    if spec.get("plan"):
        callbacks.append(FaultInjectorCallback(spec["plan"]))
    if "ema" in wanted:
        callbacks.append(EMAWeightAveraging(decay=0.8))
    if spec.get("scaler"):
        # Half precision's scaler without a device: what matters is that it stays equal, and that idle members manage.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        settings["plugins"] = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    if "log" in wanted:
        settings["logger"] = [CSVLogger(out / "csv" / spec.get("log_as", ""), name="run")]
        if "boards" in wanted:
            settings["logger"].append(TensorBoardLogger(out / "boards", name="run"))
    trainer = models.trainer(out, **{**settings, **spec.get("trainer", {}), "strategy": strategy})
    model = make_model(spec)
    if spec.get("stream"):
        train = DataLoader(models.Stream(spec["samples"], spec["data_seed"]), batch_size=spec.get("batch", 4))
    elif spec.get("model") == "Deals":
        train = DataLoader(models.data(), batch_sampler=models.Dealt())
    elif spec.get("model") == "MinesHard":
        train = models.loader(spec.get("samples", 24), spec.get("batch", 4), sampler=models.ByLoss(model))
    else:
        train = models.loader(
            spec.get("samples", 24), spec.get("batch", 4), shuffle=True, seed=spec.get("data_seed", 5)
        )
    val_samples, val_batch = spec.get("val_samples", 8), spec.get("val_batch", 4)
    held_out = [models.loader(val_samples, val_batch) for _ in range(spec.get("val_loaders", 1))]
    evaluated: dict[str, Any] = {}
    if spec.get("evaluates"):
        evaluated = evaluate(trainer, model, val_samples, val_batch)
    before = set(threading.enumerate())
    left_with = None
    if "room" in spec:
        full_disk(spec["room"])
        try:
            trainer.fit(model, train, held_out)
        except Exception as error:
            torch.save(
                {"error": f"{type(error).__name__}: {error}", "step": trainer.global_step}, out / f"{spec['name']}.pt"
            )
            raise
    else:
        try:
            if spec.get("own_data"):
                trainer.fit(model)
            elif spec.get("by_rank"):
                trainer.fit(model, datamodule=ByRank(train, val_samples, val_batch))
            else:
                trainer.fit(model, train, held_out, ckpt_path=spec.get("ckpt"))
        except LeftJobError as error:  # what it reports says how far it came
            left_with = error.code
    threads = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("chaos")]
    buffers = [b.clone() for b in model.buffers()]
    with torch.no_grad():  # as in training, which changes running statistics
        x, y = models.data(val_samples).tensors
        val_loss = torch.nn.functional.mse_loss(model.net(x), y).item() if hasattr(model, "net") else 0.0
    torch.save(
        {
            "val_loss": val_loss,
            "evaluated": evaluated,
            "threads": threads,
            "validated": getattr(model, "validated", 0),
            "weights": models.weights(model),
            "buffers": buffers,
            "step": trainer.global_step,
            "left_with": left_with,
            "epoch": trainer.current_epoch,
            "synced": getattr(model, "sync", True),
            "scale": trainer.precision_plugin.state_dict(),
            "rank": trainer.global_rank,
            "seen": getattr(model, "seen", []),
            "epochs": getattr(model, "epochs", []),
            "counter": getattr(model, "counter", 0),
            "logged": getattr(model, "logged", []),
            "found": getattr(model, "found", {}),
            "setup_ranks": founding.ranks,
            "zero": founding.zero,
            "moved": getattr(model, "moved", []),
            "ends": getattr(model, "ends", []),
            "trace": trace.lines,
            "metrics": dict(trainer.callback_metrics),
            "callbacks": {type(c).__name__: c.state_dict() for c in callbacks},
        },
        out / f"{spec['name']}.pt",
    )
