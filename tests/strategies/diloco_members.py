"""Starts clusters of an outer job for tests: each runs Trainer.fit with gates and at a set pace, and reports its
end.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import strategy_models as models
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from strategy_members import Gates

from chaos_lightning.diloco import DiLoCo
from chaos_lightning.errors import LeftJobError
from chaos_lightning.strategies import ChaosStrategy, DiLoCoStrategy


class Paced(models.Regression):
    """Model whose steps take a fixed time, as a larger model's would."""

    step_s = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.step_s)
        return super().training_step(batch, batch_idx)


class Rough(Paced):
    """Model with manual optimization and two optimizers."""

    def __init__(self) -> None:
        super().__init__(lr=0.01, sync=True)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, *others = self.net.children()
        rest = [p for other in others for p in other.parameters()]
        return [torch.optim.Adam(first.parameters(), 0.01), torch.optim.SGD(rest, 0.01)]


class Another(Paced):
    """Model with a further layer, so that it differs from the other clusters' model."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(3, 3)


FILE_LOGGERS: tuple[Any, ...] = (partial(CSVLogger, name="rows"),)
if find_spec("tensorboard"):
    FILE_LOGGERS += (partial(TensorBoardLogger, name="boards"),)
KINDS: dict[str, Any] = {"paced": partial(Paced, lr=0.01, sync=True), "rough": Rough, "another": Another}


class Follows(pl.Callback):
    """Callback that records epoch and step at each batch's end, epoch's end and validation."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, int]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.lines.append(("epoch", trainer.current_epoch, trainer.global_step))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.lines.append(("step", trainer.current_epoch, trainer.global_step))

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.lines.append(("validated", trainer.current_epoch, trainer.global_step))

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.lines.append(("end", trainer.current_epoch, trainer.global_step))


class Poison(pl.Callback):
    """Callback that once sets a parameter to NaN, when the job has made this many steps; never if -1."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if 0 <= self.step <= trainer.global_step:
            self.step = -1
            with torch.no_grad():
                next(module.parameters()).fill_(torch.nan)


def cluster(spec: dict[str, Any]) -> None:
    """Trains one cluster of a single process.

    Args:
        spec: "name", "server", "out", "trainer" (arguments), "told" (of the strategy), "samples", "step_s", "gates",
            "ckpt", "files" (folder to which it logs, and writes checkpoints), "last" (folder of its last checkpoint).
    """
    callbacks: list[pl.Callback] = [Gates(spec.get("gates", {}), {}, "", spec.get("batches", {})), *last(spec)]
    files = {"enable_checkpointing": True} if "last" in spec else {}
    if "files" in spec:
        files = files_in(spec["files"]) | {"enable_checkpointing": True}
        callbacks.append(pl.callbacks.ModelCheckpoint(save_top_k=-1))
    run(spec, Path(spec["out"]), Paced(lr=0.01), callbacks, **files)


def last(spec: dict[str, Any]) -> list[pl.Callback]:
    """Returns a ModelCheckpoint that saves the last checkpoint to the folder `spec["last"]`, if the spec has one."""
    return [pl.callbacks.ModelCheckpoint(spec["last"], save_last=True)] if "last" in spec else []


def files_in(folder: str) -> dict[str, Any]:
    """Returns the arguments of a Trainer that logs to this folder."""
    return {"logger": [kind(folder) for kind in FILE_LOGGERS]}


def run(spec: dict[str, Any], out: Path, model: Paced, callbacks: list[pl.Callback], **trainer: Any) -> None:
    """Trains one cluster, and writes a report of its end."""
    follows = Follows()
    model.step_s = spec.get("step_s", 0.0)
    strategy = DiLoCoStrategy(name=spec["name"], server=spec["server"], **spec.get("told", {}))
    run = models.trainer(
        out / spec["name"], strategy=strategy, callbacks=[*callbacks, follows], **trainer, **spec.get("trainer", {})
    )
    train, validate = models.loader(spec.get("samples", 240)), models.loader(8, batch_size=4)
    with contextlib.suppress(LeftJobError):  # what it reports says how far it came
        run.fit(model, train, validate, ckpt_path=spec.get("ckpt"))
    report = {
        "weights": models.weights(model),
        "lines": follows.lines,
        "seen": torch.cat(model.seen) if model.seen else torch.zeros(0, 4),
        "step": run.global_step,
        "epoch": run.current_epoch,
        "status": str(run.state.status),
        "over": strategy.fit.session.over if strategy.fit is not None else "",
    }
    torch.save(report, out / f"{spec['name']}.pt")


def loop(spec: dict[str, Any]) -> None:
    """Trains a cluster by a plain loop until the job ends; reports the number of its steps.

    Args:
        spec: "name", "server", "out", "told" (of `DiLoCo`), "step_s", "device".
    """
    device = spec.get("device", "cpu")
    model, steps = models.Regression().net.to(device), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with DiLoCo(model, optimizer, name=spec["name"], server=spec["server"], data="local", **spec["told"]) as diloco:
        for x, y in diloco.prepare(models.loader(), epochs=100_000):
            time.sleep(spec["step_s"])
            optimizer.zero_grad()
            ((model(x.to(device)) - y.to(device)) ** 2).mean().backward()
            optimizer.step()
            steps += 1
            diloco.step()
    torch.save({"steps": steps, "weights": models.weights(model)}, Path(spec["out"]) / f"{spec['name']}.pt")


def ddp(spec: dict[str, Any]) -> None:
    """Runs one DDP rank of a cluster, with the environment that Lightning's launcher gives it.

    Args:
        spec: Settings as of `cluster`, and "rank", "ranks", "port" (of their group), "kind" (of model), "keep"
            (folder of checkpoints).
    """
    os.environ |= {"LOCAL_RANK": str(spec["rank"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(spec["port"])}
    torch.set_num_threads(1)
    out = Path(spec["out"]) / f"rank-{spec['rank']}"
    out.mkdir(exist_ok=True)
    keep, more = spec.get("keep", ""), {"enable_checkpointing": True} if spec.get("keep") else {}
    callbacks = [pl.callbacks.ModelCheckpoint(keep, monitor="val_loss", save_top_k=-1)] if keep else []
    run(spec, out, KINDS[spec.get("kind", "paced")](), callbacks, devices=spec["ranks"], **more)


def rank(spec: dict[str, Any]) -> None:
    """Runs one rank of a cluster that is itself an elastic job.

    Args:
        spec: Settings as of `cluster`, and "cluster" (its name), "port" (of the inner job's scheduler), "min_nodes",
            "options" (of the inner strategy), "poison" (after that step), "ckpt_path", "files" (folder to which it
            logs), "last".
    """
    out = Path(spec["out"])
    torch.set_num_threads(1)
    model, follows = Paced(lr=0.01), Follows()
    model.step_s = spec.get("step_s", 0.0)
    inner = ChaosStrategy(
        endpoint=f"127.0.0.1:{spec['port']}",
        name=spec["name"],
        min_nodes=spec.get("min_nodes", 1),
        log_dir=os.environ["CHAOS_LOG_DIR"],
        options={"join_timeout_s": 40.0, "step_timeout_s": 40.0, "state_hash_every": 4, **spec.get("options", {})},
    )
    told = {"data": "local", **spec.get("told", {})}
    strategy = DiLoCoStrategy(inner=inner, name=spec["cluster"], server=spec["server"], **told)
    callbacks = [follows, Poison(spec.get("poison", -1)), *last(spec)]
    files = files_in(spec["files"]) if "files" in spec else {}
    files |= {"enable_checkpointing": True} if "last" in spec else {}
    trainer = models.trainer(
        out / spec["name"], strategy=strategy, callbacks=callbacks, **files, **spec.get("trainer", {})
    )
    loaders = models.loader(spec.get("samples", 240)), models.loader(8, batch_size=8)
    with contextlib.suppress(LeftJobError):
        trainer.fit(model, *loaders, ckpt_path=spec.get("ckpt_path"))
    session = strategy.session
    report = {
        "weights": models.weights(model),
        "lines": follows.lines,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "status": str(trainer.state.status),
        "over": session.hooks.cluster.over if session is not None and not session.hooks.owns_result else "",
    }
    torch.save(report, out / f"{spec['name']}.pt")
