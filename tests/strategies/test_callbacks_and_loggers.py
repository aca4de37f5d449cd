"""Tests callbacks and loggers around a fit: what the user has set is unchanged afterwards."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import Callback, RichProgressBar, ThroughputMonitor, TQDMProgressBar
from lightning.pytorch.callbacks.progress import rich_progress, tqdm_progress
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from strategy_models import Regression, loader, trainer

from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.strategies import ChaosStrategy
from chaos_lightning.strategies.companion import Companion, watch_spikes
from chaos_lightning.strategies.loops import refit
from chaos_lightning.strategies.state import LightningState, _adopt_callback, _callback_state
from chaos_lightning.strategies.stepping import IDLE_KEY

pytestmark = pytest.mark.usefixtures("double")


class Fails(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        raise ValueError("as asked")


@pytest.mark.parametrize("model", [Regression, Fails])
def test_fit_leaves_the_list_of_callbacks_as_it_was(tmp_path: Path, model: type[Regression]) -> None:
    run = trainer(tmp_path, callbacks=[Callback()])
    before = list(run.callbacks)
    for _ in range(2):
        with pytest.raises(ValueError, match="as asked") if model is Fails else contextlib.nullcontext():
            run.fit(model(), loader())
        assert run.callbacks == before


class KeyedByType(Callback):
    """Callback whose state key is its type, as before Lightning 1.5 and in callbacks that read checkpoints of that
    time.
    """

    value = 0

    @property
    def state_key(self) -> Any:
        return type(self)

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.value = state_dict["value"]


def test_a_callback_whose_key_is_its_type_travels(tmp_path: Path, double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = KeyedByType()
    run = trainer(tmp_path, callbacks=[mine])
    joined = double.join

    def taken_over(self: Any, **kwargs: Any) -> Any:
        state: LightningState = kwargs["state"]
        mine.value = 7
        manifest = copy.deepcopy(state.manifest())
        assert all(type(key) is str for key in manifest["callbacks"])  # type: ignore[attr-defined]
        mine.value = 0
        result = joined(self, **kwargs)
        state.adopt(manifest)
        return result

    monkeypatch.setattr(double, "join", taken_over)
    run.fit(Regression(), loader())
    assert mine.value == 7


def test_what_the_user_put_in_place_of_log_metrics_is_called_and_stays(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    own = logger.log_metrics = Mock()  # type: ignore[method-assign]
    trainer(tmp_path, logger=logger, log_every_n_steps=2).fit(Regression(), loader())
    assert logger.log_metrics is own
    assert own.call_count


class CountedTqdm(tqdm_progress.Tqdm):
    """Progress bar that records every total that it is given."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "total":
            vars(self).setdefault("totals", []).append(value)
        super().__setattr__(name, value)


def test_the_progress_bars_total_is_set_only_when_it_changes(tmp_path: Path) -> None:
    with patch.object(tqdm_progress, "Tqdm", CountedTqdm):
        run = trainer(tmp_path, callbacks=[TQDMProgressBar()], enable_progress_bar=True, max_epochs=1)
        run.fit(Regression(), loader())
    bar = run.progress_bar_callback.train_progress_bar  # type: ignore[union-attr]
    assert bar.totals[1:] == [6]  # the first one is of the constructor
    refit(run, 5)
    assert bar.totals[1:] == [6, 5]


def updates(tmp_path: Path, strategy: str) -> tuple[int, pl.Trainer]:
    """Returns how often a rich progress bar is updated in an epoch of six batches, and the Trainer."""
    run = trainer(tmp_path, callbacks=[RichProgressBar()], enable_progress_bar=True, max_epochs=1, strategy=strategy)
    real = rich_progress.CustomProgress.update
    with patch.object(rich_progress.CustomProgress, "update", autospec=True, side_effect=real) as update:
        run.fit(Regression(), loader())
    return update.call_count, run


def test_the_rich_progress_bar_is_drawn_as_often_as_without(tmp_path: Path) -> None:
    plain, _ = updates(tmp_path, "auto")
    ours, run = updates(tmp_path, "chaos")
    assert ours == plain
    bar: Any = run.progress_bar_callback
    assert (bar.train_progress_bar.completed, bar.train_progress_bar.total) == (6, 6)
    refit(run, 5)
    assert bar.train_progress_bar.total == 5


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_can_be_pickled_after_fit(tmp_path: Path, bar: type[Callback]) -> None:
    run = trainer(tmp_path, callbacks=[bar()], enable_progress_bar=True)
    run.fit(Regression(), loader(), loader(8))
    assert type(pickle.loads(pickle.dumps(run.progress_bar_callback))) is bar


def test_a_fit_that_ends_before_it_has_a_part_in_the_job_leaves_the_callbacks_as_they_were(tmp_path: Path) -> None:
    run = trainer(tmp_path, callbacks=[Callback()], strategy=ChaosStrategy(min_nodes=0))
    before = list(run.callbacks)
    with pytest.raises(ConfigurationError, match="min_nodes=0"):
        run.fit(Regression(), loader())
    assert run.callbacks == before


def test_a_logger_that_is_given_twice_is_the_users_again_after_fit(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer(tmp_path, logger=[logger, logger], max_epochs=1).fit(Regression(), loader(), loader(8))
    assert "log_metrics" not in vars(logger)


class Measured(Regression):
    flops_per_batch = 10


class FoundAMember:
    """Double of Place: while it sets up, the process is rank 1 of two; when it enters the job, the other member is
    gone.
    """

    rank, world_size = 1, 2

    def __init__(self, config: Any) -> None:
        self.leave = lambda: None


def test_who_becomes_the_writer_measures_throughput_from_there_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that becomes the writer counts batches from there on. Lightning's ThroughputMonitor starts its clocks
    on rank zero alone, and reads the number of processes only once.
    """
    monkeypatch.setattr("chaos_lightning.strategies.strategy.Place", FoundAMember)
    logger, monitor = CSVLogger(tmp_path), ThroughputMonitor(batch_size_fn=len, window_size=3)
    logged = logger.log_metrics = Mock()  # type: ignore[method-assign]
    run = trainer(tmp_path, logger=logger, callbacks=[monitor], log_every_n_steps=1, max_epochs=1)
    run.fit(Measured(), loader(), loader(8))
    shown = [call.kwargs["metrics"] for call in logged.call_args_list]
    assert [m["train/batches"] for m in shown if "train/batches" in m] == [1, 2, 3, 4, 5, 6]
    assert [m["validate/batches"] for m in shown if "validate/batches" in m] == [1, 2]
    assert not any("train/samples_per_sec" in m for m in shown)  # of several devices; there is one
    assert any("train/device/samples_per_sec" in m for m in shown)


class Inherits(Callback):
    """Callback by which this member is rank 1 of two, until the other one is gone in the first validation's second
    batch.
    """

    place = (1, 2)

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if batch_idx == 1 and not trainer.sanity_checking and self.place != (0, 1):
            self.place = (0, 1)
            trainer.strategy.barrier("the slot that says so")


def test_a_writer_that_dies_in_validation_hands_on_its_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: Any
) -> None:
    """If the writer dies in a validation, its successor measures the rest of that validation, and the next epoch as
    a whole.
    """
    inherits = Inherits()
    monkeypatch.setattr("chaos_lightning.strategies.strategy.Place", FoundAMember)
    monkeypatch.setattr(double, "rank", property(lambda self: inherits.place[0]))
    monkeypatch.setattr(double, "world_size", property(lambda self: inherits.place[1]))
    logger = CSVLogger(tmp_path)
    logged = logger.log_metrics = Mock()  # type: ignore[method-assign]
    callbacks = [inherits, ThroughputMonitor(batch_size_fn=len)]
    trainer(tmp_path, logger=logger, callbacks=callbacks, log_every_n_steps=1).fit(Measured(), loader(), loader(8))
    shown = [call.kwargs["metrics"] for call in logged.call_args_list]
    assert [m["validate/batches"] for m in shown if "validate/batches" in m] == [1, 1, 2]
    assert [m["train/batches"] for m in shown if "train/batches" in m] == [1, 2, 3, 4, 5, 6]


def test_who_joins_again_measures_the_world_that_it_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: Any
) -> None:
    """A member was put out of a job of three, and joins again when two are left: throughput is then multiplied by
    two.
    """
    monkeypatch.setattr(double, "world_size", property(lambda self: 2 if self.rejoined else 3))
    double.setting["fence_at"] = 4
    monitor = ThroughputMonitor(batch_size_fn=len)
    run = trainer(tmp_path, callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    run.fit(Measured(), loader(), loader(8))
    assert double.made[0].rejoined == 1
    assert {throughput.world_size for throughput in monitor._throughputs.values()} == {2}


class OddState(Callback):
    def state_dict(self) -> dict[str, int]:
        return {"found": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.missing.update(state_dict)  # type: ignore[attr-defined]


def test_a_callback_that_cannot_load_its_state_is_named() -> None:
    with pytest.raises(StateError, match=r"OddState.load_state_dict cannot take .*no attribute 'missing'"):
        _adopt_callback(OddState(), _callback_state(OddState()))


def test_a_batch_without_samples_is_no_loss_beside_which_the_next_one_is_a_spike(tmp_path: Path) -> None:
    """A batch without samples has a loss of 0, which SpikeDetection must ignore: otherwise the next true loss would
    count as a spike.
    """
    spikes, companion, model = SpikeDetection(), Companion(None), Regression()
    run = trainer(tmp_path, callbacks=[spikes], strategy="auto")
    idle = {"loss": torch.zeros(()), IDLE_KEY: True}
    batches = [idle, {"loss": torch.tensor(1.0)}, {"loss": torch.tensor(1.1)}, dict(idle)]
    for number, outputs in enumerate(batches):
        companion.on_train_batch_end(run, model, outputs, None, number)
        spikes.on_train_batch_end(run, model, outputs, None, number)
    assert spikes.running_mean.compute() == pytest.approx(1.05)
    watch_spikes([spikes], idle=False)  # as at the end of fit
    with pytest.raises(TrainingSpikeException):
        spikes.on_train_batch_end(run, model, {"loss": torch.tensor(9.0)}, None, 4)
