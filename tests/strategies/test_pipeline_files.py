"""Tests that checkpoints of fits with pipelines and of plain Lightning can replace each other, and that counters are
converted.
"""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from strategy_models import Regression, loader
from torch import Tensor

from chaos_lightning.errors import StateError
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.loaded import LoadedParts
from chaos_lightning.pipeline.parts import REST, ModelParts
from chaos_lightning.pipeline.whole_file import PartialModel
from chaos_lightning.replication.part_state import PartState
from chaos_lightning.strategies import pipeline_files, saving
from chaos_lightning.strategies.saving import KEY

LAYERS = {"net.0": 0, "net.1": 1, "net.2": 1}


class Net(Regression):
    """Model that plain Lightning trains: with batch norm, AdamW and a scheduler that steps."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def parts_of(module: Net) -> ModelParts:
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    part_of = {name: f"layer.{LAYERS[name.rpartition('.')[0]]}" for name in names}
    return ModelParts(2, part_of, {"layer.0": (0,), "layer.1": (1,), REST: (0, 1)})


class Plain(pl.Trainer):
    def __init__(self, folder: Path, **kwargs: Any) -> None:
        given = {"max_epochs": 2, "accumulate_grad_batches": 2, "enable_checkpointing": False, **kwargs}
        super().__init__(
            accelerator="cpu", logger=False, default_root_dir=folder, enable_progress_bar=False,
            enable_model_summary=False, **given,
        )  # fmt: skip


class Members:
    """Trainer that has finished a plain fit and then keeps only one layer, with doubles of the members that own the
    others.
    """

    def __init__(self, folder: Path, owned: str = "layer.0", plugin: CheckpointIO | None = None, **kwargs: Any) -> None:
        self.trainer = Plain(folder, plugins=plugin, **kwargs)
        self.trainer.fit(Net(), loader())
        self.module = self.trainer.lightning_module
        self.parts = parts_of(self.module)
        (optimizer,) = self.trainer.optimizers
        self.dumped = copy.deepcopy(self.trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
        others = copy.deepcopy((self.module.net, optimizer))
        self._whole = {"net": others[0], "optimizer": others[1]}
        self.served = 0
        leave = [n for n, part in self.parts.part_of.items() if part != owned]
        for p in [p for n, p in self.module.named_parameters() if n in leave]:
            optimizer.state.pop(p)
        ModelMemory(self.module, 1, "cpu").leave_out(leave)
        self.model = PartialModel(self.module, self.parts, [optimizer])

    # --- a source of parts

    def _part(self, part: str) -> PartState:
        names = [n.removeprefix("net.") for n in self.parts.names(part)]
        return PartState(part, self._whole["net"], names, [self._whole["optimizer"]])

    def manifest(self, part: str) -> Mapping[str, Any]:
        found: Any = self._part(part).manifest()
        (kept,) = found["optimizers"]
        return {**found, "optimizers": [{**kept, "state": {f"net.{n}": tree for n, tree in kept["state"].items()}}]}

    def tensors(self, part: str) -> list[tuple[str, Tensor]]:
        renamed = []
        for name, tensor in self._part(part).tensors():
            kind, _, rest = name.partition(".")
            renamed.append((f"{kind}.net.{rest}", tensor))
        return renamed

    # --- a session

    def share_parts(self) -> Members:
        self.served += 1
        return self

    def session(self, **more: Any) -> Any:
        found = {
            "in_job": True,
            "engine": self,
            "config": SimpleNamespace(name="a"),
            "collectives": SimpleNamespace(exchange=lambda name, value: [value]),
            "says_unsaved": lambda path: False,
            "hooks": SimpleNamespace(writes=True),
            "entered": False,
            **more,
        }
        return SimpleNamespace(**found)

    def checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        partial: Any = lambda: pipeline_files.lightning_module_state_dict(self.module)  # noqa: E731
        self.trainer.strategy.lightning_module_state_dict = partial  # type: ignore[method-assign]
        return self.trainer._checkpoint_connector.dump_checkpoint(weights_only)

    def save(self, path: Any, weights_only: bool = False, options: Any = None, **more: Any) -> None:
        pipeline_files.save_checkpoint(
            self.trainer.strategy, self.session(**more), self.checkpoint(weights_only), path, options, self.model
        )


def same(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}.{index}")
    else:
        assert a == b, path


# ------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("owned", ["layer.0", "layer.1", REST])
def test_the_file_is_lightnings_and_plain_lightning_goes_on_from_it(tmp_path: Path, owned: str) -> None:
    members = Members(tmp_path, owned)
    path = tmp_path / "folder" / "whole.ckpt"
    members.save(path)
    assert members.served == 1
    assert os.listdir(path.parent) == ["whole.ckpt"]
    saved = torch.load(path, weights_only=True)
    assert KEY not in saved
    same(saved, members.dumped)
    torch.save(members.dumped, tmp_path / "plain.ckpt")
    ended = []
    for file in (path, tmp_path / "plain.ckpt"):
        again = Plain(tmp_path, max_epochs=4)
        again.fit(Net(), loader(), ckpt_path=str(file))
        ended.append((again.global_step, again.lightning_module.state_dict(), again.optimizers[0].state_dict()))
    same(*ended)


def test_weights_only_have_no_optimizer(tmp_path: Path) -> None:
    members = Members(tmp_path)
    members.save(tmp_path / "x", weights_only=True)
    saved = torch.load(tmp_path / "x", weights_only=True)
    assert "optimizer_states" not in saved
    same(saved["state_dict"], members.dumped["state_dict"])


class Foreign(CheckpointIO):
    def __init__(self) -> None:
        self.saved: list[tuple[dict[str, Any], Any, Any]] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saved.append((checkpoint, path, storage_options))

    def load_checkpoint(self, path: Any, **_: Any) -> Any:
        return {"state_dict": {"x": torch.ones(5)}}

    def remove_checkpoint(self, path: Any) -> None:
        pass


def test_a_plugin_of_the_users_gets_the_whole_and_the_user_is_told_how_much_that_is(tmp_path: Path) -> None:
    members = Members(tmp_path, plugin=(plugin := Foreign()))
    with pytest.warns(UserWarning, match=r"Foreign gets a checkpoint of the whole model for x: \d{4,} bytes in "):
        members.save("x", options={"a": 1})
    ((saved, path, options),) = plugin.saved
    assert (path, options) == ("x", {"a": 1})
    saved.pop(KEY, None)
    same(saved, members.dumped)


def test_a_remote_address_gets_the_whole(tmp_path: Path) -> None:
    members = Members(tmp_path)
    with pytest.warns(UserWarning, match=r"TorchCheckpointIO gets a checkpoint of the whole model"):
        members.save("memory://there/x.ckpt")
    with fsspec.open("memory://there/x.ckpt", "rb") as file:
        saved = torch.load(file, weights_only=True)
    saved.pop(KEY, None)
    same(saved, members.dumped)


def test_asynchronous_files_are_written_at_once(tmp_path: Path) -> None:
    members = Members(tmp_path, plugin=AsyncCheckpointIO())
    with pytest.warns(UserWarning, match="write checkpoints while training waits"):
        members.save(tmp_path / "x")
    same(torch.load(tmp_path / "x", weights_only=True)["state_dict"], members.dumped["state_dict"])


def test_options_that_nobody_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        Members(tmp_path).save(tmp_path / "x", options={"a": 1})


def test_who_does_not_write_serves_its_parts_at_each_attempt(tmp_path: Path) -> None:
    """The first writer dies while writing: a member that does not write serves its parts at the second attempt, too."""
    members = Members(tmp_path)
    answers = iter([[["", False, True]], [["", True, True]]])
    collectives = SimpleNamespace(exchange=lambda name, value: next(answers))
    strategy: Any = SimpleNamespace(is_global_zero=False, checkpoint_io=TorchCheckpointIO())
    pipeline_files.save_checkpoint(
        strategy, members.session(collectives=collectives), members.checkpoint(), tmp_path / "x", None, members.model
    )  # fmt: skip
    assert members.served == 2
    assert not (tmp_path / "x").exists()


def test_a_full_disk_says_how_much_the_whole_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos_lightning.pipeline import whole_file

    members = Members(tmp_path)
    members.save(tmp_path / "x")
    nbytes = (tmp_path / "x").stat().st_size
    monkeypatch.setattr(whole_file.os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=1, f_frsize=1))
    with pytest.raises(OSError, match=rf"the checkpoint .*y needs {nbytes} bytes, free in") as got:
        members.save(tmp_path / "y")
    assert got.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["x"]


def test_outside_of_the_job_parts_cannot_be_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    members = Members(tmp_path)
    with pytest.raises(StateError, match=r"x is not written: layer.1 of the model are at other members"):
        members.save(tmp_path / "x", in_job=False)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:  # as ModelCheckpoint(save_on_exception=True) does
        members.save(tmp_path / "x", in_job=False)
    assert "x is not written: layer.1" in caplog.text
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------------ loading


class Partial(SingleDeviceStrategy):
    """Strategy that loads checkpoints with the functions under test, into a model that lacks some parts."""

    def __init__(self, owned: tuple[str, ...]) -> None:
        super().__init__("cpu")
        self.owned = owned
        self.loaded: LoadedParts | None = None

    def load_checkpoint(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        self.loaded = LoadedParts(self.lightning_module)
        parts = parts_of(self.lightning_module)  # type: ignore[arg-type]
        ModelMemory(self.lightning_module, 1, "cpu").leave_out(
            [n for n, part in parts.part_of.items() if part not in self.owned]
        )
        return pipeline_files.load_checkpoint(self.checkpoint_io, path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.loaded is not None
        pipeline_files.load_model_state_dict(self.loaded, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.loaded is not None
        pipeline_files.load_optimizer_state_dict(self.loaded, self.optimizers, self.root_device, checkpoint)


class Stop(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        raise StopIteration("far enough")


def plain_file(folder: Path, **kwargs: Any) -> Path:
    trainer = Plain(folder, **kwargs)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(path := folder / "plain.ckpt")
    return path


def test_a_member_of_all_parts_goes_on_from_a_plain_file_as_plain_lightning_does(tmp_path: Path) -> None:
    path, ended = plain_file(tmp_path), []
    for strategy in ("auto", Partial(("layer.0", "layer.1"))):
        again = Plain(tmp_path, max_epochs=4, strategy=strategy)
        again.fit(Net(), loader(), ckpt_path=str(path))
        ended.append((again.global_step, again.lightning_module.state_dict(), again.optimizers[0].state_dict()))
    same(*ended)


@pytest.mark.parametrize("owned", [("layer.0",), ("layer.1",), ()])
def test_a_member_takes_its_parts_from_a_plain_file(tmp_path: Path, owned: tuple[str, ...]) -> None:
    path = plain_file(tmp_path)
    again = Plain(tmp_path, max_epochs=4, strategy=Partial(owned), callbacks=[Stop()])
    with pytest.raises(StopIteration):
        again.fit(module := Net(), loader(), ckpt_path=str(path))
    saved, parts = torch.load(path, weights_only=True), parts_of(module)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert is_absent(tensor) == (parts.part_of[name] not in owned), name
        assert is_absent(tensor) or torch.equal(tensor, saved["state_dict"][name]), name
    (optimizer,), states = again.strategy.optimizers, saved["optimizer_states"][0]["state"]
    kept = {at: p for at, p in enumerate(module.parameters()) if p in optimizer.state}
    assert {parts.part_of[list(dict(module.named_parameters()))[at]] for at in kept} == set(owned)
    for at, p in kept.items():
        same(dict(optimizer.state[p]), states[at])
    assert again.lr_scheduler_configs[0].scheduler.state_dict() == saved["lr_schedulers"][0]


def test_a_file_that_cannot_be_mapped_is_read_and_the_user_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"state_dict": {"x": torch.ones(5)}}, tmp_path / "old", _use_new_zipfile_serialization=False)
    assert torch.equal(
        pipeline_files.load_checkpoint(TorchCheckpointIO(), tmp_path / "old")["state_dict"]["x"], torch.ones(5)
    )
    assert "old cannot be mapped: its tensors were read, 20 bytes" in caplog.text
    caplog.clear()
    pipeline_files.load_checkpoint(Foreign(), tmp_path / "nowhere")
    assert "nowhere cannot be mapped" in caplog.text


def test_a_file_that_is_not_there_is_missed_as_by_lightning(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        pipeline_files.load_checkpoint(TorchCheckpointIO(), tmp_path / "x")


# ------------------------------------------------------------------------------------------------ counters


class Everywhere(pl.Callback):
    """Callback that writes a checkpoint after each batch and validation, and at each epoch's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[tuple[str, int, Path]] = []

    def _save(self, trainer: pl.Trainer, where: str) -> None:
        path = self.folder / f"{len(self.files)}.ckpt"
        trainer.save_checkpoint(path)
        self.files.append((where, trainer.global_step, path))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save(trainer, "epoch")


def run(folder: Path, batches: int, accumulate: int, **kwargs: Any) -> Everywhere:
    folder.mkdir()
    found = Everywhere(folder)
    trainer = Plain(folder, accumulate_grad_batches=accumulate, callbacks=[found], num_sanity_val_steps=0, **kwargs)
    trainer.fit(Net(), loader(4 * batches), loader(4))
    return found


def fit_loop(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)["loops"]["fit_loop"]
    return found


@pytest.mark.parametrize("batches", [6, 5])
def test_batches_become_steps(tmp_path: Path, batches: int) -> None:
    """A plain fit's checkpoint is converted for pipelines: its counters equal those of a fit in which each batch is
    a step.
    """
    files = run(tmp_path / "batches", batches, 2, val_check_interval=2).files
    steps = run(tmp_path / "steps", 3, 1, val_check_interval=1).files
    wanted = {(where, step): fit_loop(path) for where, step, path in steps}
    seen = 0
    for where, step, path in files:
        checkpoint = torch.load(path, weights_only=True)
        counters = checkpoint["loops"]["fit_loop"]
        within = counters["epoch_loop.batch_progress"]["current"]["ready"] % 2 == 1 and where == "batch"
        last = counters["epoch_loop.batch_progress"]["is_last_batch"]
        saving.convert_position(checkpoint, 2)
        if within and not last:  # in the middle of a step, which is lost
            assert counters["epoch_loop.batch_progress"]["total"]["ready"] == step
            continue
        seen += 1
        for key in ("epoch_loop.batch_progress", "epoch_loop.state_dict", "epoch_progress"):
            assert counters[key] == wanted[where, step][key], (where, step, key)
    assert seen == (len(steps) if batches == 6 else len(steps) - 2), "of 5 batches the last one is not validated"


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_a_fit_that_counts_steps_ends_where_the_one_that_counts_batches_does(tmp_path: Path) -> None:
    total = 2 * 3
    files = run(tmp_path / "batches", 6, 2, val_check_interval=2).files
    for where, step, path in files[: len(files) // 2]:  # of the first epoch
        checkpoint = torch.load(path, weights_only=True)
        saving.convert_position(checkpoint, 2)
        torch.save(checkpoint, tmp_path / "converted.ckpt")
        again = Plain(tmp_path, accumulate_grad_batches=1, num_sanity_val_steps=0, val_check_interval=1)
        again.fit(Net(), loader(12), loader(4), ckpt_path=str(tmp_path / "converted.ckpt"))
        assert again.global_step == total, (where, step)


def test_model_checkpoint_keeps_last_and_best(tmp_path: Path) -> None:
    """ModelCheckpoint in a job with pipelines writes the whole model to each of its files, also to "last"."""
    members = Members(tmp_path)
    kept = ModelCheckpoint(dirpath=tmp_path / "kept", save_last=True, filename="{step}")
    trainer: Any = members.trainer
    trainer.save_checkpoint = lambda path, weights_only, *_: members.save(path, bool(weights_only))
    kept.setup(trainer, members.module, "fit")
    kept._save_topk_checkpoint(trainer, {"step": torch.tensor(6), "epoch": torch.tensor(1)})
    kept._save_last_checkpoint(trainer, {"step": torch.tensor(6), "epoch": torch.tensor(1)})
    files = sorted(p.name for p in (tmp_path / "kept").iterdir())
    assert files == ["last.ckpt", "step=6.ckpt"]
    for name in files:
        same(torch.load(tmp_path / "kept" / name, weights_only=True)["state_dict"], members.dumped["state_dict"])
