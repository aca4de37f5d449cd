"""Checks that all private names of Lightning that the strategy uses exist, so that a new version fails here and not
in training.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, loggers
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle
from strategy_models import loader
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.metric import jit_distributed_available


@pytest.fixture
def bare(tmp_path: Path) -> Trainer:
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path, strategy="auto",
        enable_progress_bar=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        "_accelerator_connector.use_distributed_sampler",
        "_accelerator_connector._num_nodes_flag",
        "_data_connector._requires_distributed_sampler",
        "_signal_connector.received_sigterm",
        "_val_check_time_interval",
        "should_stop",
        "fit_loop.epoch_progress.current.processed",
        "fit_loop.max_batches",
        "fit_loop.max_epochs",
        "fit_loop.min_epochs",
        "fit_loop._combined_loader",
        "fit_loop._combined_loader_states_to_load",
        "fit_loop._load_combined_loader_states",
        "fit_loop._data_fetcher",
        "fit_loop._data_source",
        "fit_loop._last_train_dl_reload_epoch",
        "fit_loop._restarting",
        "fit_loop._loaded_from_state_dict",
        "fit_loop._resuming_from_checkpoint",
        "fit_loop._restart_stage",
        "fit_loop.restarted_mid_epoch",
        "fit_loop.epoch_loop.max_steps",
        "fit_loop.epoch_loop.batch_progress.current.ready",
        "fit_loop.epoch_loop.batch_progress.current.processed",
        "fit_loop.epoch_loop.batch_progress.is_last_batch",
        "fit_loop.epoch_loop._batches_that_stepped",
        "fit_loop.epoch_loop._skip_next_val",
        "fit_loop.epoch_loop._should_check_val_fx",
        "_checkpoint_connector._get_loops_state_dict",
        "fit_loop.epoch_loop._results",
        "fit_loop.epoch_loop.automatic_optimization.optim_progress",
        "fit_loop.epoch_loop.manual_optimization.optim_step_progress",
        "fit_loop.epoch_loop.val_loop._combined_loader",
        "fit_loop.epoch_loop.val_loop._has_run",
        "fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch",
        "fit_loop.epoch_loop.val_loop._results",
        "fit_loop.epoch_loop.val_loop.inference_mode",
        "fit_loop.epoch_loop.val_loop._build_kwargs",
        "fit_loop.epoch_loop.val_loop._build_step_args_from_hook_kwargs",
        "num_sanity_val_steps",
        "fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader",
        "_logger_connector._callback_metrics",
        "_logger_connector._logged_metrics",
        "_logger_connector._progress_bar_metrics",
        "_logger_connector._first_loop_iter",
        "_logger_connector._current_fx",
        "strategy._layer_sync_or_none",
    ],
)
def test_trainer_has(bare: Trainer, path: str) -> None:
    if path == "strategy._layer_sync_or_none":
        assert "_layer_sync" in inspect.getsource(ParallelStrategy.__init__)
        return
    at: Any = bare
    for name in path.split("."):
        assert hasattr(at, name), f"{type(at).__name__}.{name} is gone ({path})"
        at = getattr(at, name)


@pytest.mark.parametrize(
    ("thing", "names"),
    [
        (_PrefetchDataFetcher(), ("length", "fetched", "done", "iterator", "batches")),
        (LightningModule(), ("_current_fx_name", "_on_before_batch_transfer", "_call_batch_hook")),
        (_FxValidator, ("check_logging_and_get_default_levels",)),
        (ModelCheckpoint(), ("dirpath", "current_score", "_last_global_step_saved", "_last_checkpoint_saved",
                             "_defer_save_until_validation", "_every_n_train_steps", "_every_n_epochs",
                             "_train_time_interval", "_save_on_train_epoch_end", "_enable_version_counter",
                             "_last_time_checked")),
        (EarlyStopping("x"), ("wait_count", "best_score", "patience", "_check_on_train_epoch_end")),
        (Timer(), ("_duration", "_interval", "_start_time")),
        (EMAWeightAveraging(), ("_latest_update_epoch",)),
        (ThroughputMonitor(len), ("_throughputs", "_t0s", "_lengths", "_samples", "_batches")),
        (TQDMProgressBar(), ("_train_progress_bar", "enable", "disable")),
        (RichProgressBar(), ("progress", "train_progress_bar_id", "enable", "disable")),
        (MeanSquaredError(), ("distributed_available_fn", "_sync_dist", "_reductions", "_copy_state_dict")),
        (MeanSquaredError(), ("_update_count", "_computed", "_defaults", "process_group")),
        (Metric, ("sync", "update_called", "__setattr__")),
        (_ResultCollection(training=True), ("batch", "batch_size")),
        (StrategyRegistry, ("register", "available_strategies")),
        (_AutomaticOptimization, ("run", "_training_step", "_optimizer_step")),
        (LightningOptimizer, ("step", "toggle_model")),
        (call, ("_call_callback_hooks", "_call_lightning_module_hook", "_call_callbacks_state_dict")),
        (trainer_module, ("_log_hyperparams",)),
        (DDPStrategy(), ("_start_method", "_model_averaging_period", "_accelerator", "_checkpoint_io",
                         "_precision_plugin", "set_world_ranks", "num_processes")),
        (torch.distributed, ("_broadcast_coalesced",)),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, tuple) else "",
)  # fmt: skip
def test_object_has(thing: Any, names: tuple[str, ...]) -> None:
    for name in names:
        assert hasattr(thing, name), name


def test_results_have_the_fields_that_travel() -> None:
    names = {field.name for field in dataclasses.fields(_Metadata)}
    assert {
        "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "add_dataloader_idx",
        "dataloader_idx", "metric_attribute", "_sync",
    } == names  # fmt: skip
    assert {field.name for field in dataclasses.fields(_Sync)} == {"fn", "_should", "rank_zero_only", "_op", "_group"}
    metric = _ResultMetric(_Metadata("training_step", "x", _sync=_Sync()), True)
    assert metric.has_reset is False
    assert metric._forward_cache is None


def test_what_is_logged_has_the_arguments_that_are_recorded() -> None:
    assert set(inspect.signature(LightningModule.log).parameters) == {
        "self", "name", "value", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist",
        "sync_dist_group", "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
    }  # fmt: skip


def test_a_metric_looks_its_sync_up_on_its_class() -> None:
    """torchmetrics must look up `sync` on the class when a metric is computed, so that a replacement reaches metrics
    made earlier.
    """
    metric, asked = MeanSquaredError(), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Metric, "sync", lambda *_, **__: asked.append(True))
        metric.update(torch.ones(1), torch.ones(1))
        metric.compute()
    assert asked == [True]
    assert metric.distributed_available_fn is jit_distributed_available


def test_combined_loader_keeps_its_limits_and_iterator() -> None:
    combined = CombinedLoader(loader(), "max_size_cycle")
    combined.limits = [2]
    iter(combined)
    assert isinstance(combined._iterator, _MaxSizeCycle)
    assert combined._iterator.limits == [2]
    assert len(combined) == 2


def test_file_loggers_keep_version_and_experiment(tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path)
    assert hasattr(logger, "_version")
    assert hasattr(logger, "_experiment")
    assert logger.log_dir
