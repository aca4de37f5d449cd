"""Tests that Lightning's settings, hooks and properties mean the same with one member as without the strategy."""

from __future__ import annotations

import pickle
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from strategy_models import AsksForItsFolder, Regression, WithMetrics, fitted, loader, trainer, weights
from torch.utils.data import DataLoader

import chaos_lightning  # noqa: F401  (registers "chaos")
from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.strategies.state import LightningState

pytestmark = pytest.mark.usefixtures("double")


def same(tmp_path: Path, make: Any, *args: Any, **settings: Any) -> tuple[Any, Any]:
    """Returns the models of a fit without the strategy and of one with it; checks that both saw the same batches.

    Weights differ where a window is not full: Lightning divides by the window, the strategy by the samples.
    """
    plain, ours = make(), make()
    a = fitted(tmp_path, plain, *args, **{**settings, "strategy": "auto"})
    b = fitted(tmp_path, ours, *args, **settings)
    assert len(ours.seen) == len(plain.seen)
    assert all(torch.equal(x, y) for x, y in zip(ours.seen, plain.seen, strict=True))
    if "accumulate_grad_batches" not in settings:
        assert torch.allclose(weights(ours), weights(plain), rtol=1e-6, atol=1e-7)
    assert (a.global_step, a.current_epoch) == (b.global_step, b.current_epoch)
    return plain, ours


# --- how long an epoch is ---


@pytest.mark.parametrize(
    ("samples", "settings"),
    [
        (64, {"limit_train_batches": 0.2}),
        (64, {"limit_train_batches": 0.2, "accumulate_grad_batches": 8}),
        (64, {"limit_train_batches": 0.29, "val_check_interval": 0.4}),
        (40, {"limit_train_batches": 5, "accumulate_grad_batches": 2}),
    ],
    ids=str,
)
def test_a_fraction_of_an_epoch_is_rounded_down(tmp_path: Path, samples: int, settings: dict[str, Any]) -> None:
    plain, _ = same(tmp_path, Regression, loader(samples, 1), loader(4), **settings)
    assert plain.seen


class Skips(Regression):
    """Model that ends each epoch before the batch with this number."""

    def __init__(self, at: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.at = at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.at else None


@pytest.mark.parametrize("at", [0, 2, 3, 5])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_on_train_batch_start_ends_the_epoch_with_minus_one(tmp_path: Path, at: int, accumulate: int) -> None:
    settings = {"max_epochs": 3, **({"accumulate_grad_batches": 2} if accumulate == 2 else {})}
    same(tmp_path, lambda: Skips(at), loader(), loader(8), **settings)


# --- time ---


class Late(pl.Callback):
    """Callback that sets the time of the last validation two hours back after these steps, and records validations."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.validated: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer._last_val_time -= 7200.0

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


def test_validation_by_the_clock(tmp_path: Path) -> None:
    late = Late(2, 3, 9)
    run = fitted(tmp_path, Regression(), loader(), loader(8), val_check_interval=timedelta(hours=1), callbacks=[late],
                 check_val_every_n_epoch=None)  # fmt: skip
    assert late.validated == [2, 3, 9]
    assert "_should_check_val_fx" not in vars(run.fit_loop.epoch_loop)


def test_waiting_for_the_job_is_no_training_time(tmp_path: Path, double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """max_time, Timer, and the time intervals of validation and checkpoints count from the moment when this member
    enters the job.
    """
    kept = ModelCheckpoint(dirpath=tmp_path / "kept", train_time_interval=timedelta(hours=1), save_top_k=-1)
    timer, late = Timer(timedelta(hours=1)), Late()
    run = trainer(
        tmp_path, callbacks=[timer, late, kept], enable_checkpointing=True, val_check_interval=timedelta(hours=1),
        check_val_every_n_epoch=None,
    )  # fmt: skip
    joined = double.join

    def two_hours(self: Any, **kwargs: Any) -> Any:
        timer._start_time["train"] -= 7200.0  # type: ignore[operator]
        kept._last_time_checked -= 7200.0  # type: ignore[operator]
        run._last_val_time -= 7200.0
        return joined(self, **kwargs)

    monkeypatch.setattr(double, "join", two_hours)
    run.fit(Regression(), loader(), loader(8))
    assert run.global_step == 12
    assert late.validated == []
    assert not list((tmp_path / "kept").glob("*"))
    assert timer.time_elapsed("train") < 3600


# --- checkpoints ---


class Reads(Regression):
    """Model whose checkpoint hook reads the states that Lightning has put into the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (state,) = checkpoint["optimizer_states"]
        checkpoint["steps of Adam"] = [float(s["step"]) for s in state["state"].values()]
        checkpoint["rates"] = [s["_last_lr"] for s in checkpoint["lr_schedulers"]]
        checkpoint["read"] = sorted({"loops", "callbacks", "state_dict", "pytorch-lightning_version"} & set(checkpoint))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = (checkpoint["steps of Adam"], len(checkpoint["optimizer_states"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_a_newcomer_gets_what_on_save_checkpoint_reads_of_optimizers(tmp_path: Path, double: Any) -> None:
    model = Reads()
    fitted(tmp_path, model, loader(), max_epochs=1)
    state: LightningState = double.made[0].state
    given = state.manifest()
    assert given["module"]["steps of Adam"] == [6.0] * 4
    assert given["module"]["rates"] == [[0.05 * 0.1]]
    assert len(given["module"]["read"]) == 4
    assert "optimizer_states" not in given["module"]
    state.adopt(given)
    assert model.loaded == ([6.0] * 4, 1)


def test_a_model_can_be_saved_without_fit(tmp_path: Path) -> None:
    run, model = trainer(tmp_path), Regression()
    run.strategy.connect(model)
    run.save_checkpoint(tmp_path / "bare.ckpt")
    saved = torch.load(tmp_path / "bare.ckpt", weights_only=False)
    assert all(torch.equal(saved["state_dict"][n], p) for n, p in model.state_dict().items())


# --- what is refused by name ---


def test_fabric_is_told_what_to_use_instead() -> None:
    from lightning.fabric import Fabric

    from chaos_lightning.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match=re.escape("chaos_lightning.trainer.Trainer")):
        Fabric(accelerator="cpu", devices=1, strategy="chaos")


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [
        (torch.nn.Linear(2, 2), torch.optim.LBFGS, "LBFGS: it evaluates the loss several times"),
        (torch.nn.Embedding(3, 2), torch.optim.SparseAdam, "SparseAdam: its gradients are sparse"),
        (
            torch.nn.Embedding(3, 2, sparse=True),
            torch.optim.SGD,
            "the model (Embedding): gradients are reduced in place",
        ),
        (torch.nn.SyncBatchNorm(3), torch.optim.SGD, "the model (SyncBatchNorm): it uses torch.distributed"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_plain_loop_is_refused_before_it_joins(model: Any, optimizer: Any, words: str) -> None:
    from chaos_lightning.errors import UnsupportedError
    from chaos_lightning.trainer import Trainer

    with Trainer(name="a") as chaos, pytest.raises(UnsupportedError, match=re.escape(words)):
        chaos.prepare(model, optimizer(model.parameters()), loader())


# --- leaving, and what is left ---


class Leaves(pl.Callback):
    """Callback that sends Ctrl+C, or another signal, at the end of the batch of this step."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step = step
        self.number = number

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            signal.raise_signal(self.number)
            for thread in threading.enumerate():
                if thread.name == "chaos-leave":
                    thread.join(20.0)


@pytest.mark.parametrize("step", [4, 5, 6])
def test_a_lone_member_that_is_interrupted_says_so_and_saves(tmp_path: Path, step: int) -> None:
    """The only member gets Ctrl+C: it saves a checkpoint, and a fit that resumes from it ends like an unbroken one."""
    whole, first, second = Regression(), Regression(), Regression()
    fitted(tmp_path, whole, loader())
    run = fitted(tmp_path, first, loader(), callbacks=[Leaves(step)])
    assert run.interrupted
    assert len(first.seen) == step
    run.save_checkpoint(tmp_path / "left.ckpt")
    again = trainer(tmp_path)
    again.fit(second, loader(), ckpt_path=tmp_path / "left.ckpt")
    assert not again.interrupted
    assert torch.equal(torch.cat(first.seen + second.seen), torch.cat(whole.seen))
    assert torch.allclose(weights(second), weights(whole), rtol=1e-6)


def test_who_left_a_job_that_goes_on_says_that_it_saves_nothing(
    tmp_path: Path, double: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(double, "world_size", property(lambda self: 2))
    stepped = double.step

    def step(self: Any, **kwargs: Any) -> Any:
        header = stepped(self, **kwargs)
        if header.step == 3:
            other = replace(self.view.members[0], id="other", name="other")
            self.view = self.ruling_view = replace(self.view, members=(other, *self.view.members))
            self.out = self.leaving = True
        return header

    monkeypatch.setattr(double, "step", step)
    run = fitted(tmp_path, Regression(), loader())
    assert run.interrupted
    run.save_checkpoint(tmp_path / "left.ckpt")
    assert not (tmp_path / "left.ckpt").exists()
    assert "has left the job after step 3" in caplog.text
    assert "left.ckpt is not written here" in caplog.text


class Outputs(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)


class Answers(Regression):
    """Model that returns predictions beside the loss, and None for the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else {"loss": loss, "answers": self.net(batch[0]), "names": ["x"], "number": 3}


@pytest.fixture
def nothing_said() -> Iterator[None]:
    """Makes Lightning warn again that training_step returned None, which it does once in a process."""
    Closure.warning_cache.clear()
    yield
    Closure.warning_cache.clear()


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_outputs_of_a_batch_that_came_to_nothing(tmp_path: Path) -> None:
    plain, ours = Outputs(), Outputs()
    fitted(tmp_path, Answers(), loader(), callbacks=[plain], strategy="auto")
    Closure.warning_cache.clear()
    with pytest.warns(UserWarning, match="training_step` returned `None"):
        fitted(tmp_path, Answers(), loader(), callbacks=[ours])
    assert [sorted(o) for o in ours.seen] == [sorted(o) for o in plain.seen]
    assert ours.seen[1] == {}


class Passes(Regression):
    """Model whose training_step returns None for every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_a_scaler_leaves_out_a_step_in_which_nobody_has_a_loss(tmp_path: Path) -> None:
    """A step in which no member has a loss is skipped, as without the strategy: a gradient scaler raises an error if
    there are no gradients.
    """

    def run(strategy: str) -> tuple[Any, Any]:
        model, precision = Passes(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=2))
        fitted(tmp_path, model, loader(), strategy=strategy, plugins=[precision])
        return weights(model), precision.scaler.state_dict()  # type: ignore[union-attr]

    (plain, scale), (ours, our_scale) = run("auto"), run("chaos")
    assert torch.allclose(plain, ours, rtol=1e-6, atol=1e-7)
    assert our_scale == scale


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_outputs_of_an_idle_member_have_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member without samples gives hooks the loss and, in place of values per sample, tensors with zero rows."""
    outputs = Outputs()
    fetched = ElasticLoader._next

    def idle_once(self: Any, caller: Any) -> Any:
        data = fetched(self, caller)
        if self.yielded == 3:
            self.current = replace(self.current, samples=0)
        return data

    monkeypatch.setattr(ElasticLoader, "_next", idle_once)
    fitted(tmp_path, Answers(), loader(), callbacks=[outputs], max_epochs=1)
    before, idle = outputs.seen[0], outputs.seen[2]
    assert idle["chaos_idle"]
    assert torch.equal(idle["loss"], before["loss"])
    assert idle["answers"].shape == (0, 1)
    assert (idle["names"], idle["number"]) == ([], 3)
    assert torch.cat([o["answers"] for o in outputs.seen if "answers" in o]).shape == (16, 1)


# --- what Lightning says ---


@pytest.mark.parametrize("stage", ["train", "val"])
def test_few_workers_are_hinted_at(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's warning of too few loader workers comes also with the loaders that the strategy puts in place of
    torch's.
    """
    monkeypatch.setattr("lightning.fabric.utilities.data._num_cpus_available", lambda: 4)
    with pytest.warns(PossibleUserWarning, match=f"The '{stage}_dataloader' does not have many workers"):
        fitted(tmp_path, Regression(), loader(), loader(8))


def test_log_dir_within_training_step(tmp_path: Path) -> None:
    model = AsksForItsFolder()
    run = fitted(tmp_path, model, loader(), logger=CSVLogger(tmp_path))
    assert run.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    assert {folder for _, folder in model.logged} == {run.log_dir}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_handler_of_the_users_is_called(tmp_path: Path, number: int) -> None:
    """A handler that the user had installed for the signal is called, and the member leaves the job nevertheless."""
    seen: list[int] = []
    before = signal.signal(number, lambda number, frame: seen.append(number))
    try:
        run = fitted(tmp_path, Regression(), loader(), callbacks=[Leaves(4, number)])
    finally:
        signal.signal(number, before)
    assert seen == [number]
    assert run.interrupted
    assert run.global_step == 4
    assert run.received_sigterm is (number == signal.SIGTERM)


# --- copies ---


def test_a_trainer_can_be_pickled_before_and_after_fit(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    assert pickle.loads(pickle.dumps(run)).world_size == 1
    model = WithMetrics()
    run.fit(model, loader(), loader(8))
    again = pickle.loads(pickle.dumps(run))
    assert again.global_step == run.global_step
    assert again.strategy.session is None
    assert isinstance(again.train_dataloader, DataLoader)
    assert isinstance(again.val_dataloaders, DataLoader)
