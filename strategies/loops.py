"""Reads and writes Lightning's loop state: the counters that a newcomer takes over, and lengths that change when
members come and go.

Theory of operation. Lightning computes an epoch's length once and copies it to many places. Here it changes with the
members, so after each commit and each view change `refit` writes it everywhere again: before Lightning asks whether
the batch was the epoch's last one. A newcomer's loops stand at the start of epoch 0 when it is let in; `adopt` gives
them the donors' counters at the same point between two batches, so that from there on all members take the same
branches. Everything private that is touched here is listed in `tests/strategies/test_canary.py`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, ThroughputMonitor, Timer, TQDMProgressBar
from lightning.pytorch.loops import _Loop
from lightning.pytorch.loops.progress import _ProcessedTracker, _Progress
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader, _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader

from chaos_lightning.strategies.lightning_types import Trainer

ENDLESS = 1 << 62
"""Length that the fetcher is told while the length is unknown. Not None: then it would fetch a batch ahead."""

_CONNECTOR_DICTS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def batches_begun(trainer: Trainer) -> int:
    """Returns the number of micro-batches that Lightning has begun in this epoch."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def _processed(progress: _Progress) -> tuple[_ProcessedTracker, _ProcessedTracker]:
    """Returns the current and the total counts of one of Lightning's progress trackers, which must count processed
    items, too.
    """
    current, total = progress.current, progress.total
    assert isinstance(current, _ProcessedTracker)
    assert isinstance(total, _ProcessedTracker)
    return current, total


def epoch_of(trainer: Trainer) -> int:
    """Returns the number of the epoch that Lightning trains."""
    current, _ = _processed(trainer.fit_loop.epoch_progress)
    return current.processed


def stopped_within_epoch(trainer: Trainer) -> bool:
    """Returns whether fit resumes from a checkpoint that was written within an epoch, by the checkpoint's own
    account. Valid before the first batch only.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current, _ = _processed(progress)
    return trainer.fit_loop.restarted_mid_epoch and current.processed > 0 and not progress.is_last_batch


def limited(trainer: Trainer, total: float) -> float:
    """Returns an epoch's length under `limit_train_batches`: an int counts micro-batches of each member, a fraction
    is rounded down as Lightning does. A batch that was the epoch's last stays the last, even if the length grows
    afterwards.
    """
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(total, limit)
    if limit == 1.0 or math.isinf(total):
        return total
    begun = batches_begun(trainer)
    if begun and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
        return begun
    return min(total, max(1, int(total * limit)))


def refit(trainer: Trainer, total: float) -> bool:
    """Tells Lightning's loops, fetcher and progress bar how many micro-batches this epoch has.

    Args:
        trainer: Trainer in `fit`, at any point of a training epoch.
        total: Micro-batches of each member in this epoch, those already begun included; inf if unknown.

    Returns:
        Whether the batch begun last is the epoch's last.
    """
    fit_loop = trainer.fit_loop
    total = limited(trainer, total)
    begun = batches_begun(trainer)
    over = begun >= total
    fit_loop.max_batches = total
    combined = fit_loop._combined_loader
    if combined is not None:
        combined.limits = [total]
        if combined._iterator is not None:
            combined._iterator.limits = [total]
    fetcher = fit_loop._data_fetcher
    if fetcher is not None:
        fetcher.length = ENDLESS if math.isinf(total) else int(total)
        fetcher.fetched = begun
        fetcher.done = over
    fit_loop.epoch_loop.batch_progress.is_last_batch = over and begun > 0
    if getattr(trainer, "_val_check_time_interval", None) is None and not isinstance(trainer.val_check_interval, int):
        interval = trainer.val_check_interval
        trainer.val_check_batch = math.inf if math.isinf(total) else max(1, int(total * interval))
    _refit_bars(trainer, total)
    return over


def _refit_bars(trainer: Trainer, total: float) -> None:
    """Sets the total of the progress bar; redraws only if it changes."""
    bar = trainer.progress_bar_callback
    shown = None if math.isinf(total) else int(total)
    if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        if bar.train_progress_bar.total != shown:
            bar.train_progress_bar.total = shown
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        number = bar.train_progress_bar_id
        if any(task.id == number and task.total != shown for task in bar.progress.tasks):
            bar.progress.update(number, total=shown)


def unfinish_epoch(trainer: Trainer, *, begun: bool = True) -> None:
    """Subtracts one from Lightning's count of finished epochs, after a StopIteration ended the epoch midway. An
    epoch that this process has not `begun` was finished by the donors of its counters, and stays counted.
    """
    if not begun or not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
        for count in _processed(trainer.fit_loop.epoch_progress):
            count.processed -= 1


# --- clocks ----------------------------------------------------------------------------------------------------------


def start_clocks(trainer: Trainer, *, fresh: bool) -> None:
    """Starts the clocks of Timer and ModelCheckpoint when a member enters the job, since waiting for the others is no
    training time.

    Args:
        trainer: Trainer in fit.
        fresh: Whether the job starts. Else durations are the donors', and go on from here.
    """
    now = time.monotonic()
    if fresh:
        trainer._last_val_time = now
    for callback in trainer.callbacks:
        if isinstance(callback, Timer):
            callback._start_time[RunningStage.TRAINING] = now
        elif isinstance(callback, ModelCheckpoint) and fresh:
            callback._last_time_checked = now


def measure_anew(monitor: ThroughputMonitor) -> None:
    """Restarts a throughput monitor's clocks. Lightning starts them on rank zero only, when a stage starts; this
    member may become rank zero later.
    """
    for stage, throughput in monitor._throughputs.items():
        throughput.reset()
        monitor._lengths[stage] = monitor._samples[stage] = monitor._batches[stage] = 0
        monitor._t0s[stage] = time.perf_counter()


def refit_rates(trainer: Trainer, members: int) -> None:
    """Makes throughput monitors multiply this member's throughput by the number of members."""
    for callback in trainer.callbacks:
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                throughput.world_size = members


def agree_on_validation(trainer: Trainer, broadcast: Callable[[bool], bool]) -> None:
    """Makes the writer's clock decide when to validate, if `val_check_interval` is a time. Otherwise each process
    would ask its own clock after each batch.
    """
    if getattr(trainer, "_val_check_time_interval", None) is None:
        return
    epoch_loop = trainer.fit_loop.epoch_loop
    asked = type(epoch_loop)._should_check_val_fx

    def is_validation_due(fetcher: Any) -> bool:
        return broadcast(asked(epoch_loop, fetcher))

    vars(epoch_loop)["_should_check_val_fx"] = is_validation_due


def forget_agreement(trainer: Trainer) -> None:
    """Undoes `agree_on_validation`: each process asks its own clock again."""
    vars(trainer.fit_loop.epoch_loop).pop("_should_check_val_fx", None)


# --- the counters that travel ----------------------------------------------------------------------------------------


def loops_manifest(trainer: Trainer) -> dict[str, Any]:
    """Returns the counters of all of fit's loops at a safe point, and the Trainer's fields that decide what it does
    next.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    states = {key: value for key, value in fit_loop.state_dict().items() if key != "state_dict"}
    connector = trainer._logger_connector
    return {
        "loops": states,
        "skip_next_val": epoch_loop._skip_next_val,
        "val_has_run": epoch_loop.val_loop._has_run,
        "train_reload_epoch": _finite(fit_loop._last_train_dl_reload_epoch),
        "val_reload_epoch": _finite(epoch_loop.val_loop._last_val_dl_reload_epoch),
        "seen_val_batches": dict(epoch_loop.val_loop._seen_batches_per_dataloader),
        "should_stop": bool(trainer.should_stop),
        "since_validation_s": (now := time.monotonic()) - getattr(trainer, "_last_val_time", now),
        "first_loop_iter": connector._first_loop_iter,
        "current_fx": connector._current_fx,
        "metrics": {name: _plain(getattr(connector, name)) for name in _CONNECTOR_DICTS},
    }


def rolled_back(manifest: dict[str, Any], batches: int, *, ended: bool = False) -> dict[str, Any]:
    """Returns the counters as they were before the last `batches` micro-batches, which no step has used.

    Args:
        manifest: Result of `loops_manifest`, at a safe point or within a batch whose step did not take place.
        batches: Number of these micro-batches; 0 at a safe point.
        ended: Whether the epoch was ended after its last batch without what follows that, which is to be made up for.
    """
    loops = {key: copy.deepcopy(value) for key, value in manifest["loops"].items()}
    for counts in (loops["epoch_loop.batch_progress"][scope] for scope in ("total", "current")):
        begun = counts["ready"] - batches
        counts.update(dict.fromkeys(counts, begun))
    optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    steps = (optimizer["step"], optimizer["zero_grad"], loops["epoch_loop.manual_optimization.optim_step_progress"])
    for counts in (progress[scope] for progress in steps for scope in ("total", "current")):
        counts.update(dict.fromkeys(counts, counts["completed"]))
    if ended:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        for counts in (loops["epoch_progress"][scope] for scope in ("total", "current")):
            counts["processed"] -= 1
    return {**manifest, "loops": loops, "skip_next_val": False, "ended": ended}


def uncount(trainer: Trainer, manifest: dict[str, Any]) -> None:
    """Resets the loops' counters to those that `rolled_back` returned, after a batch whose step did not take place."""
    loops, epoch_loop = manifest["loops"], trainer.fit_loop.epoch_loop
    epoch_loop.batch_progress.load_state_dict(loops["epoch_loop.batch_progress"])
    automatic, manual = epoch_loop.automatic_optimization, epoch_loop.manual_optimization
    automatic.optim_progress.load_state_dict(loops["epoch_loop.automatic_optimization.optim_progress"])
    manual.optim_step_progress.load_state_dict(loops["epoch_loop.manual_optimization.optim_step_progress"])
    epoch_loop._batches_that_stepped = loops["epoch_loop.state_dict"]["_batches_that_stepped"]


def make_up_for_end(trainer: Trainer) -> None:
    """Runs what follows an epoch's last batch and was left out: validation, schedulers, loggers."""
    fit_loop = trainer.fit_loop
    assert fit_loop._data_fetcher is not None
    fit_loop.epoch_loop.on_advance_end(fit_loop._data_fetcher)


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics with their tensors cloned, since a donor trains on while the bytes are sent."""
    return {k: v.detach().clone() if hasattr(v, "detach") else v for k, v in metrics.items()}


def adopt_loops(trainer: Trainer, manifest: dict[str, Any]) -> None:
    """Sets this member's loop counters to the donors'. May be called between two batches only."""
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    fit_loop.load_state_dict(dict(manifest["loops"]))
    fit_loop._combined_loader_states_to_load = []
    for loop in (
        fit_loop,
        epoch_loop,
        epoch_loop.val_loop,
        epoch_loop.automatic_optimization,
        epoch_loop.manual_optimization,
    ):
        settle(loop)
    epoch_loop._skip_next_val = manifest["skip_next_val"]
    epoch_loop.val_loop._has_run = manifest["val_has_run"]
    for loop, name, key in (
        (fit_loop, "_last_train_dl_reload_epoch", "train_reload_epoch"),
        (epoch_loop.val_loop, "_last_val_dl_reload_epoch", "val_reload_epoch"),
    ):
        setattr(loop, name, -math.inf if manifest[key] is None else manifest[key])
    epoch_loop.val_loop._seen_batches_per_dataloader.clear()
    epoch_loop.val_loop._seen_batches_per_dataloader.update(manifest["seen_val_batches"])
    trainer.should_stop = manifest["should_stop"]
    trainer._last_val_time = time.monotonic() - manifest["since_validation_s"]
    connector = trainer._logger_connector
    connector._first_loop_iter = manifest["first_loop_iter"]
    connector._current_fx = manifest["current_fx"]
    device = trainer.strategy.root_device
    for name in _CONNECTOR_DICTS:
        moved = {k: v.to(device) if hasattr(v, "to") else v for k, v in manifest["metrics"][name].items()}
        setattr(connector, name, moved)


def reload_epochs(trainer: Trainer) -> tuple[float, float]:
    """Returns the epochs in which the loaders of training and of validation were last made
    (`reload_dataloaders_every_n_epochs`); -inf if not yet.
    """
    fit_loop = trainer.fit_loop
    return fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch


@contextmanager
def at_epoch(trainer: Trainer, epoch: float) -> Iterator[None]:
    """Makes `trainer.current_epoch` return `epoch` within this context, for user code that makes loaders by it."""
    current, _ = _processed(trainer.fit_loop.epoch_progress)
    kept = current.completed
    current.completed = int(epoch) if math.isfinite(epoch) else kept
    try:
        yield
    finally:
        current.completed = kept


def training_loader(trainer: Trainer) -> Any:
    """Makes the training loader anew with the user's code; returns it wrapped by the strategy."""
    made = _request_dataloader(trainer.fit_loop._data_source)
    (loader,) = made.flattened if isinstance(made, CombinedLoader) else (made,)
    return _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, loader)


def remake_validation_loaders(trainer: Trainer) -> None:
    """Makes the validation loaders anew with the user's code."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    kept, val_loop._combined_loader = val_loop._last_val_dl_reload_epoch, None
    trainer.validating = True
    val_loop.setup_data()
    trainer.training = True
    val_loop._last_val_dl_reload_epoch = kept


def settle(loop: _Loop) -> None:
    """Marks a loop as in the middle of its run, neither restarting nor resuming. Lightning's `restarting` setter
    would mark it as restarting whenever max_steps is set.
    """
    loop._restarting = False
    loop._loaded_from_state_dict = False
    loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()


# --- getting to the next safe point whatever the counters say --------------------------------------------------------


@dataclass
class Suspension:
    """The Trainer's limits, which are lifted while this member is out of the job and must reach its next safe point."""

    max_steps: int
    max_epochs: int | None
    min_epochs: int | None
    should_stop: bool

    @classmethod
    def begin(cls, trainer: Trainer) -> Suspension:
        """Lifts the limits, so that nothing ends the loop before the member joins again: its counters are void."""
        fit_loop = trainer.fit_loop
        kept = cls(fit_loop.epoch_loop.max_steps, fit_loop.max_epochs, fit_loop.min_epochs, trainer.should_stop)
        fit_loop.epoch_loop.max_steps = -1
        fit_loop.max_epochs = -1
        fit_loop.min_epochs = 1 << 62
        trainer.should_stop = False
        skip_validation(trainer)
        refit(trainer, math.inf)
        return kept

    def end(self, trainer: Trainer) -> None:
        trainer.fit_loop.epoch_loop.max_steps = self.max_steps
        trainer.fit_loop.max_epochs = self.max_epochs
        trainer.fit_loop.min_epochs = self.min_epochs
        trainer.should_stop = self.should_stop
        trainer.fit_loop.epoch_loop._skip_next_val = False


def why_over(trainer: Trainer) -> str:
    """Returns the reason why the training loop has ended."""
    fit_loop = trainer.fit_loop
    if trainer.should_stop:
        return "training was stopped early"
    if fit_loop.max_steps != -1 and trainer.global_step >= fit_loop.max_steps:
        return f"max_steps={fit_loop.max_steps} reached"
    return f"max_epochs={fit_loop.max_epochs} reached"


def save_last_again(trainer: Trainer) -> None:
    """Lets `ModelCheckpoint(save_last=True)` write once more at the end of fit, as its file is older than the job's
    last version.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last is True:
            callback._last_checkpoint_saved = ""


def skip_validation(trainer: Trainer) -> None:
    """Prevents the validation that would follow the present batch."""
    trainer.fit_loop.epoch_loop._skip_next_val = True
