"""Tests CheckpointOnChange: which changes cause a checkpoint, under which name, and which files stay."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_support import FakeEngine, fit, trainer, view
from lightning.pytorch import Callback, Trainer

from chaos_lightning.callbacks import CheckpointOnChange
from chaos_lightning.errors import ConfigurationError


class Views(Callback):
    """Callback that puts the engine into these views: the members' names, by the batch that they begin with."""

    def __init__(self, engine: FakeEngine, names: dict[int, str]) -> None:
        self.engine, self.names = engine, names

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.names:
            number = self.engine.view.id.number + 1 if self.engine.view is not None else 1
            self.engine.view = view(number, *self.names.pop(batch_idx))


def train(
    root: Path,
    names: dict[int, str],
    callback: CheckpointOnChange | None = None,
    *others: Callback,
    engine: FakeEngine | None = None,
    ckpt: str | None = None,
    **options: Any,
) -> list[str]:
    """Trains six batches per epoch; returns the names of the checkpoints that lie in the folder then."""
    engine = engine or FakeEngine()
    callback = callback or CheckpointOnChange(keep=0)
    made = trainer(
        engine, *others, Views(engine, names), callback, root=str(root), enable_checkpointing=True, **options
    )
    fit(made, ckpt=ckpt)
    return sorted(path.stem for path in (root / "checkpoints").glob("*"))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({}, []),
        ({2: "a"}, ["step-3-members-1"]),
        ({2: "abc"}, ["step-3-members-3"]),
        ({2: "ac"}, ["step-3-members-2"]),
        ({2: "a", 4: "ac"}, ["step-3-members-1", "step-5-members-2"]),
        ({2: "a", 3: "ac"}, ["step-3-members-1", "step-4-members-2"]),
        ({2: "ab"}, []),
        ({2: "ba"}, []),
        ({0: "a"}, ["step-1-members-1"]),
    ],
    ids=["none", "death", "join", "both", "two", "two in a row", "links only", "ranks only", "before the first step"],
)
def test_each_change_of_the_members_writes_one_checkpoint(
    tmp_path: Path, names: dict[int, str], expected: list[str]
) -> None:
    assert train(tmp_path, names) == expected


def test_changes_within_an_accumulation_write_one_at_its_step(tmp_path: Path) -> None:
    found = train(tmp_path, {0: "abc", 1: "ac", 2: "a"}, accumulate_grad_batches=3)
    assert found == ["step-1-members-1"]
    saved = torch.load(tmp_path / "checkpoints" / "step-1-members-1.ckpt", weights_only=False)
    assert saved["global_step"] == 1


def test_changes_that_are_undone_before_the_step_write_none(tmp_path: Path) -> None:
    assert train(tmp_path, {0: "abc", 2: "ab"}, accumulate_grad_batches=3) == []


def test_a_newcomer_asks_for_the_checkpoint_of_its_own_coming_and_for_no_other(tmp_path: Path) -> None:
    assert train(tmp_path, {}, engine=FakeEngine(founders=())) == ["step-1-members-2"]


def test_a_newcomer_within_accumulations_waits_for_its_first_step(tmp_path: Path) -> None:
    engine = FakeEngine(founders=())
    engine.commit()  # it has come in at this step
    assert train(tmp_path, {}, engine=engine, accumulate_grad_batches=3) == ["step-1-members-2"]


def test_a_member_that_comes_back_asks_for_the_checkpoint_of_its_return_only(tmp_path: Path) -> None:
    engine = FakeEngine()

    class Back(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:  # while it was away, others have gone and come, and made many steps
                engine.member_id, engine.founders, engine.view = "a~4", (), view(9, "c", "d")
                for _ in range(5):
                    engine.commit()

    assert train(tmp_path, {}, None, Back(), engine=engine) == ["step-4-members-2"]


def test_a_member_that_leaves_asks_for_none(tmp_path: Path) -> None:
    engine = FakeEngine()

    class Leaving(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
            engine.out = trainer.global_step == 5  # the last step's header lets it go

    assert train(tmp_path, {5: "b"}, None, Leaving(), engine=engine) == []


def test_a_trial_run_writes_none(tmp_path: Path) -> None:
    assert train(tmp_path, {1: "a"}, fast_dev_run=3) == []


@pytest.mark.parametrize(("keep", "stay"), [(0, [2, 3, 4, 5]), (1, [5]), (3, [3, 4, 5])])
def test_only_the_newest_files_stay(tmp_path: Path, keep: int, stay: list[int]) -> None:
    names = {1: "a", 2: "ab", 3: "b", 4: "bc"}
    callback = CheckpointOnChange(str(tmp_path / "checkpoints"), "at{step}", keep)
    assert train(tmp_path, names, callback) == [f"at{step}" for step in stay]


def test_a_name_without_the_step_is_written_over(tmp_path: Path) -> None:
    assert train(tmp_path, {1: "a", 3: "ab"}, CheckpointOnChange(filename="newest", keep=2)) == ["newest"]
    saved = torch.load(tmp_path / "checkpoints" / "newest.ckpt", weights_only=False)
    assert saved["global_step"] == 4


def test_the_file_that_was_resumed_stays_and_others_of_that_run_go(tmp_path: Path) -> None:
    """Members that come later may be started with the same `ckpt_path`."""
    assert len(train(tmp_path, {3: "a", 5: "ab"}, CheckpointOnChange(keep=2))) == 2
    resumed = tmp_path / "checkpoints" / "step-6-members-2.ckpt"
    engine, callback = FakeEngine(), CheckpointOnChange(keep=1)
    found = train(tmp_path, {1: "a", 4: "abc"}, callback, engine=engine, ckpt=str(resumed), max_epochs=2)
    assert found == ["step-11-members-3", resumed.stem]
    assert callback.state_dict() == {"files": ["step-11-members-3.ckpt"]}


def test_the_writer_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chaos_lightning.callbacks")
    train(tmp_path, {2: "acd"})
    (line,) = [record.getMessage() for record in caplog.records if "CheckpointOnChange" in record.getMessage()]
    assert line.endswith("step-3-members-3.ckpt, because c~1, d~1 joined; b~1 left or died")


def test_a_strategy_without_members_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(trainer(None, CheckpointOnChange(), root=str(tmp_path), enable_checkpointing=True))
    (line,) = [record.getMessage() for record in caplog.records if "CheckpointOnChange" in record.getMessage()]
    assert "SingleDeviceStrategy has no members that could change" in line
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"filename": ""},
        {"filename": "some/name"},
        {"filename": "{epoch}"},
        {"filename": "{}"},
        {"filename": "{step"},
        {"filename": "{step.x}"},
        {"keep": -1},
    ],
    ids=str,
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigurationError, match="expected") as caught:
        CheckpointOnChange(**wrong)
    assert f"{name} {value!r}" in str(caught.value)
