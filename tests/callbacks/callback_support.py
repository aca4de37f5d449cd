"""Provides a Trainer that really trains, and a fake engine with the attributes that callbacks read."""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from chaos_lightning.errors import LeftJobError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.notices import NoticePlan
from chaos_lightning.protocol.types import GENESIS, Header, Kind, Member, View, ViewId


def view(number: int, *names: str, reason: str = "") -> View:
    members = tuple(Member(f"{n}~1", n, "box", "127.0.0.1", 1) for n in names)
    return View(ViewId(1, number), ViewId(1, number - 1), members, reason=reason)


@dataclass
class FakeEngine:
    """Double of an engine, with the attributes that callbacks use."""

    name: str = "a"
    rank: int = 0
    role: str = "founder"
    member_id: str = "a~1"
    founders: tuple[str, ...] = ("a~1", "b~1")
    out: bool = False
    view: View | None = field(default_factory=lambda: view(1, "a", "b"))
    header: Header = GENESIS
    events: EventLog = field(default_factory=lambda: EventLog(None))
    left: list[str] = field(default_factory=list)
    config: Any = field(
        default_factory=lambda: SimpleNamespace(
            endpoint="127.0.0.1:1", token_file="", keys_dir="", notice_plan=NoticePlan.read("")
        )
    )
    contributed: int = 0

    @property
    def world_size(self) -> int:
        return len(self.view.members) if self.view else 1

    @property
    def ruling_view(self) -> View | None:
        return self.view

    def leave(self, reason: str) -> None:
        self.left.append(reason)

    def heed(self, signal_name: str) -> None:
        self.left.append(f"followed {signal_name}")

    def commit(self) -> None:
        self.header = replace(self.header, seq=self.header.seq + 1, step=self.header.step + 1, kind=Kind.STEP)

    def step(self, **fields: Any) -> Header:
        self.contributed += 1
        self.commit()
        return self.header


class Job(Callback):
    """Callback in place of the strategy: makes a step of the job after each backward pass, and stops training once
    the engine was asked to leave.
    """

    def __init__(self, engine: FakeEngine):
        self.engine = engine

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.engine.step(weight=1.0, coefficient=1.0)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self.engine.left:
            trainer.should_stop = True


class Tiny(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(batches: int = 6) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(batches * 2, 4)), batch_size=2)


def trainer(engine: FakeEngine | None, *callbacks: Callback, root: str, **options: Any) -> Trainer:
    """Returns a single-device Trainer. With an engine, callbacks take its strategy for a chaos strategy."""
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": root,
        "num_sanity_val_steps": 0,
    } | options
    # The job's step must come after the fault callback's look at the optimizer phase, so Job goes last.
    made = Trainer(callbacks=[*callbacks, *([Job(engine)] if engine else [])], **settings)
    if engine is not None:
        made.strategy.engine = engine  # type: ignore[attr-defined]
        made.strategy.session = None  # type: ignore[attr-defined]
    return made


def fit(
    made: Trainer, batches: int = 6, *, validate: bool = False, model: Tiny | None = None, ckpt: str | None = None
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*number of training batches.*smaller than the logging interval.*")
        # Lightning 2.6's own, with this version of torch.
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*", category=FutureWarning)
        if not validate:
            made.limit_val_batches = 0
        made.fit(model or Tiny(), loader(batches), loader(2), ckpt_path=ckpt)


def victim(
    root: str, plan: str, name: str = "a", rank: int = 0, validate: bool = False, checkpoint: bool = False
) -> None:
    """Trains under a fault plan, as a process of the test harness."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from chaos_lightning.callbacks import FaultInjectorCallback

    engine = FakeEngine(name=name, rank=rank, events=EventLog.in_directory(os.environ["CHAOS_LOG_DIR"], name))
    engine.events.identify(f"{name}~1")
    extra = [ModelCheckpoint(dirpath=root, every_n_train_steps=2)] if checkpoint else []
    made = trainer(engine, FaultInjectorCallback(plan), *extra, root=root, enable_checkpointing=checkpoint)
    fit(made, validate=validate)
    engine.events.emit("finished", seq=engine.header.seq, step=engine.header.step, left=engine.left)
    engine.events.close()


def leaver(root: str) -> None:
    """Trains until it is asked to leave, as a process of the test harness."""
    from chaos_lightning.callbacks import ChaosExit

    log = EventLog.in_directory(os.environ["CHAOS_LOG_DIR"], "a")
    log.identify("a~1")
    engine = FakeEngine(events=log)

    class Beat(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            log.emit("committed", seq=engine.header.seq, step=engine.header.step, header=str(engine.header.step))

    made = trainer(engine, ChaosExit(debounce_s=0.3), Beat(), root=root, max_epochs=-1)
    made.callbacks = [c for c in made.callbacks if not isinstance(c, Job)] + [Stubborn(engine)]  # type: ignore[attr-defined]
    fit(made, batches=50)
    log.emit("left", reason=engine.left[0] if engine.left else "")
    log.close()


class Stubborn(Job):
    """Callback that stops training, after a request to leave, only once the file "go" exists, so that a second
    signal finds the process still running.
    """

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self.engine.left:
            if not getattr(self, "told", False):
                self.told = True
                self.engine.events.emit("leave", reason=self.engine.left[0])
            if os.path.exists(os.path.join(trainer.default_root_dir, "go")):
                trainer.should_stop = True


class Gate(Callback):
    """Callback that stops this member after a step until the test opens a FIFO."""

    def __init__(self, step: int, path: str):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self.path and trainer.global_step == self.step:
            self.path, path = "", self.path
            with open(path) as opened:
                opened.read()


def job_member(name: str, port: int, root: str, plan: str, gate: str = "", epochs: int = 8) -> None:
    """Runs a real member of a real job with all callbacks, as a process of the test harness."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from chaos_lightning.callbacks import ChaosExit, FaultInjectorCallback, LiveView, UsefulTime
    from chaos_lightning.strategies import ChaosStrategy

    torch.set_num_threads(1)
    strategy = ChaosStrategy(
        endpoint=f"127.0.0.1:{port}",
        name=name,
        log_dir=os.environ["CHAOS_LOG_DIR"],
        options={"join_timeout_s": 60.0, "step_timeout_s": 60.0, "state_hash_every": 4, "join_by": "pause"},
    )
    made = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        num_sanity_val_steps=0,
        callbacks=[
            FaultInjectorCallback(plan),
            ChaosExit(),
            useful := UsefulTime(),
            LiveView(),
            Gate(2, gate),
            ModelCheckpoint(
                dirpath=os.path.join(root, "ckpt"), every_n_train_steps=5, save_top_k=-1, filename="{step}"
            ),
        ],
    )
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(48, 4))
    with warnings.catch_warnings(), contextlib.suppress(LeftJobError):
        warnings.simplefilter("ignore")
        made.fit(Tiny(), DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=8))
    print(f"{name} ends at step {made.global_step}, useful share {useful.meter.share:.3f}, {useful.meter.lost_s}")
