"""Tests that other strategies can read and write the same checkpoint files, how often objects are asked for state,
and optimizers without closures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_utilities.test.warning import no_warning_call
from strategy_models import Regression, loader, trainer, weights
from torch.optim.lr_scheduler import OneCycleLR

from chaos_lightning.strategies import ChaosStrategy

pytestmark = pytest.mark.usefixtures("double")

ENDED = "resuming from a checkpoint that ended before the epoch ended"


@pytest.mark.parametrize("every", [4, 6], ids=["mid-epoch", "end of an epoch"])
@pytest.mark.parametrize(("first", "second"), [("chaos", "auto"), ("auto", "chaos")])
def test_another_strategy_goes_on_from_a_checkpoint(tmp_path: Path, first: str, second: str, every: int) -> None:
    """A checkpoint can be resumed by another strategy, whose loaders have no state. If it is from within an epoch,
    some samples are used twice, and a warning says so.
    """
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=every)
    trainer(tmp_path, max_steps=every, strategy=first, callbacks=[keeper], enable_checkpointing=True).fit(
        Regression(), loader()
    )
    model, whole = Regression(), Regression()
    again = trainer(tmp_path, max_steps=12, strategy=second)
    with pytest.warns(PossibleUserWarning, match=ENDED) if every == 4 else no_warning_call(match=ENDED):
        again.fit(model, loader(), ckpt_path=keeper.best_model_path)
    assert again.global_step == 12
    if every == 6:
        trainer(tmp_path, max_steps=12, strategy="auto").fit(whole, loader())
        assert torch.allclose(weights(model), weights(whole), rtol=1e-6)


class Saves(Callback):
    """Callback that writes a checkpoint before the first batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_another_strategy_goes_on_from_a_checkpoint_written_before_the_first_batch(tmp_path: Path) -> None:
    """A checkpoint that was written before the first batch can be resumed by another strategy: it holds no state of
    the loader, although Lightning asks for one.
    """
    path = tmp_path / "kept.ckpt"
    trainer(tmp_path, max_steps=6, callbacks=[Saves(path)]).fit(Regression(), loader())
    again = trainer(tmp_path, max_steps=12, strategy="auto")
    again.fit(Regression(), loader(), ckpt_path=path)
    assert again.global_step == 12


def test_a_checkpoint_that_is_written_twice_keeps_its_place_in_the_data(tmp_path: Path) -> None:
    """The same checkpoint dictionary is written twice, as after the loss of the first file: both files hold the
    position in the data.
    """
    run = trainer(tmp_path, max_steps=4)
    run.fit(Regression(), loader())
    checkpoint = run._checkpoint_connector.dump_checkpoint()
    written = []
    for name in ("one", "two"):
        run.strategy.save_checkpoint(checkpoint, tmp_path / name)
        written.append(torch.load(tmp_path / name, weights_only=False)["chaos_lightning"])
    assert "combined_loader" in written[0]
    assert written[0] == written[1]


def test_a_lost_place_is_warned_of_though_few_members_were_foreseen_to_get_so_far(tmp_path: Path) -> None:
    """A checkpoint without a position in the data, from the middle of an epoch of one process, is warned of even if
    each of two members has fewer batches in an epoch than it had trained.
    """
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=5)
    trainer(tmp_path, max_steps=5, strategy="auto", callbacks=[keeper], enable_checkpointing=True).fit(
        Regression(), loader(32)
    )
    again = trainer(tmp_path, max_epochs=1, strategy=ChaosStrategy(min_nodes=2))
    with pytest.warns(PossibleUserWarning, match=ENDED):
        again.fit(Regression(), loader(32), ckpt_path=keeper.best_model_path)


def test_the_end_of_an_epoch_that_was_limited_is_no_lost_place(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=4)
    settings = {"limit_train_batches": 4, "enable_checkpointing": True}
    trainer(tmp_path, max_epochs=1, strategy="auto", callbacks=[keeper], **settings).fit(Regression(), loader())
    again = trainer(tmp_path, max_epochs=2, limit_train_batches=4)
    with no_warning_call(match=ENDED):
        again.fit(Regression(), loader(), ckpt_path=keeper.best_model_path)
    assert again.global_step == 8


class OneCycle(Regression):
    """Model whose learning rate schedule asks for the job's length before Lightning has read the checkpoint."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=total), "interval": "step"}]


def test_the_place_in_the_data_is_kept_where_the_length_was_asked_for_first(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    whole, again = OneCycle(), OneCycle()
    trainer(tmp_path, max_epochs=2, callbacks=[keeper], enable_checkpointing=True).fit(whole, loader())
    trainer(tmp_path, max_epochs=2).fit(again, loader(), ckpt_path=tmp_path / "step=4.ckpt")
    assert torch.equal(weights(again), weights(whole))


class Counts(Callback):
    """Callback that counts how often it is asked for its state."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"asked": self.asked}


def test_a_callback_is_asked_for_its_state_once_when_the_job_is_founded(tmp_path: Path) -> None:
    counts = Counts()
    trainer(tmp_path, max_epochs=1, callbacks=[counts]).fit(Regression(), loader())
    assert counts.asked == 1


class IgnoresClosure(torch.optim.SGD):
    """Optimizer that ignores its closure, as many optimizers of users do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


class Manual(Regression):
    """Model with manual optimization, whose optimizer ignores the closure of `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return IgnoresClosure(self.parameters(), 0.05)


def test_manual_optimization_needs_no_closure_to_be_called(tmp_path: Path) -> None:
    """With manual optimization gradients are averaged before the optimizer's step, even if the optimizer never calls
    its closure.
    """
    ours, plain = Manual(), Manual()
    run = trainer(tmp_path)
    run.fit(ours, loader())
    trainer(tmp_path, strategy="auto").fit(plain, loader())
    assert run.global_step == 12
    assert torch.allclose(weights(ours), weights(plain), rtol=1e-6)


class Sees(Regression):
    """Model that records the keys of the checkpoint that it loads."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.keys = set(checkpoint)


def test_hooks_see_the_checkpoint_that_lightning_has_written(tmp_path: Path) -> None:
    """Hooks that load a checkpoint see the same keys as with Lightning's own strategy, without those that chaos adds
    to the file.
    """
    seen = []
    for strategy in ("chaos", "auto"):
        keeper = ModelCheckpoint(tmp_path / strategy, every_n_train_steps=6)
        settings = {"strategy": strategy, "enable_checkpointing": True, "callbacks": [keeper]}
        trainer(tmp_path, max_steps=6, **settings).fit(Regression(), loader())
        again = Sees()
        trainer(tmp_path, max_steps=8, strategy=strategy).fit(again, loader(), ckpt_path=keeper.best_model_path)
        seen.append(again.keys)
    assert seen[0] == seen[1]
