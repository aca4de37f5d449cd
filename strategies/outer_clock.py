"""Keeps Lightning's counters and learning rate schedules at the outer job's progress, in one of its clusters.

Theory of operation. A version carries how far the job is: inner steps of a synchronous job of the same data, samples,
and the epoch. A cluster counts on from its base by its own pace, and is put right by each version that it adopts. So
`trainer.global_step`, which max_steps, loggers and checkpoints go by, is the job's, and so are the steps of schedules:
they are not taken by Lightning, once per optimizer step of this cluster, but here, as far as the clock has come. A late
joiner catches up at once. What was reckoned too fast is waited for, but for an epoch's end, where all clusters have the
same number. Schedules never go back.

What a checkpoint had trained before the job began is counted in front: all clusters of a job start from the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.loops.progress import _Progress
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.utilities.types import LRSchedulerConfig

from chaos_lightning.outer.rules.types import JobProgress
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import settle
from chaos_lightning.strategies.schedules import BySamples, go_by_step

_NEVER = 1 << 62
"""A frequency by which Lightning never steps a schedule."""


@dataclass(slots=True)
class _Schedule:
    """A learning rate schedule that follows the outer job's steps.

    Attributes:
        config: Lightning's configuration of it.
        frequency: Frequency as the user set it.
        taken: Steps of it so far.
    """

    config: LRSchedulerConfig
    frequency: int
    taken: int


class JobClock:
    """Clock of an outer job in one fit: sets Lightning's counters and schedules to the job's progress.

    Args:
        trainer: Trainer in fit, with its training state restored, before the first batch.

    Attributes:
        first_step: Optimizer steps that were trained before the job began.
        first_epoch: Epochs that were trained before the job began; one that was not over begins anew.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        epoch_loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
        self.first_step = trainer.global_step
        # A checkpoint that was written after an epoch's last batch lacks what follows that, which is not made up for.
        over = epochs.completed < epochs.ready and epoch_loop.batch_progress.is_last_batch
        self.first_epoch = epochs.completed + over
        self._batches_before = self.first_step if self._automatic else epoch_loop._batches_that_stepped
        self._steps = 0
        self._schedules: list[_Schedule] = []
        self._by_samples: list[tuple[BySamples, int]] = []
        self._per_step = 1
        """Steps of optimizers that Lightning counts for one of ours."""

    def begin(self) -> None:
        """Sets the loops to the start of an epoch, before its first batch, and takes over the schedules' steps from
        Lightning.
        """
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        for loop in (fit_loop, epoch_loop, epoch_loop.val_loop, epoch_loop.automatic_optimization,
                     epoch_loop.manual_optimization):  # fmt: skip
            settle(loop)
        self._put_epoch(self.first_epoch)
        go_by_step(trainer.lr_scheduler_configs)
        for config in trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, BySamples):
                config.scheduler.counted = True
                self._by_samples.append((config.scheduler, config.scheduler.samples))
            elif config.interval == "step" and not config.reduce_on_plateau and self._automatic:
                taken = self.first_step // config.frequency
                self._schedules.append(_Schedule(config, config.frequency, taken))
                config.frequency = _NEVER

    def end(self) -> None:
        """Gives the schedules' steps back to Lightning."""
        for schedule in self._schedules:
            schedule.config.frequency = schedule.frequency
        for scheduler, _ in self._by_samples:
            scheduler.counted = False
        self._schedules, self._by_samples = [], []

    def manifest(self) -> dict[str, Any]:
        """Returns the clock's numbers as plain values, for another process of the same cluster."""
        return {
            "first": (self.first_step, self.first_epoch, self._batches_before),
            "steps": self._steps,
            "taken": [schedule.taken for schedule in self._schedules],
            "samples": [before for _, before in self._by_samples],
        }

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        """Takes over the numbers that `manifest` returned at another process. Both clocks must have begun."""
        self.first_step, self.first_epoch, self._batches_before = manifest["first"]
        self._steps = manifest["steps"]
        for schedule, taken in zip(self._schedules, manifest["taken"], strict=True):
            schedule.taken = taken
        samples = manifest["samples"]
        self._by_samples = [(s, before) for (s, _), before in zip(self._by_samples, samples, strict=True)]

    @property
    def _automatic(self) -> bool:
        return bool(self._trainer.lightning_module.automatic_optimization)

    # ------------------------------------------------------------------ steps

    def put(self, now: JobProgress, *, in_batch: bool, counted: int = 0, back: bool = False) -> None:
        """Sets Lightning's counters and schedules to the outer job's progress.

        Args:
            now: Progress of the job, as this cluster sees it.
            in_batch: Whether it is within a batch that steps, before Lightning has counted its step.
            counted: Steps of optimizers in this batch, where Lightning counts each; 0: none were taken.
            back: Whether the clock may go back: what was trained is discarded, or the version says all there is to say.
        """
        self._steps = now.steps if back else max(self._steps, now.steps)
        self._per_step = counted or self._per_step
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if self._automatic:
            progress: _Progress = epoch_loop.automatic_optimization.optim_progress.optimizer.step
            total = self.first_step + self._steps
            progress.total.ready, progress.total.completed = total, total - in_batch
        else:
            progress = epoch_loop.manual_optimization.optim_step_progress
            progress.total.ready = progress.total.completed = self.first_step + self._steps * self._per_step
        # Loggers count by it. Lightning adds one at the end of a batch that has stepped.
        epoch_loop._batches_that_stepped = self._batches_before + self._steps - in_batch
        self._step_schedules(now.samples)

    def _step_schedules(self, samples: int) -> None:
        trainer = self._trainer
        for schedule in self._schedules:
            due = (self.first_step + self._steps) // schedule.frequency
            _may_step(schedule.config.scheduler)
            while schedule.taken < due:
                schedule.taken += 1
                _call_lightning_module_hook(trainer, "lr_scheduler_step", schedule.config.scheduler, None)
        for scheduler, before in self._by_samples:
            scheduler.samples = max(scheduler.samples, before + samples)
            _may_step(scheduler)
            scheduler.step()

    # ------------------------------------------------------------------ epochs

    def skip_epochs(self, number: int) -> None:
        """Skips `number` epochs that the job finished without this cluster: their schedules step, their hooks do not
        run.
        """
        if number <= 0:
            return
        before = self._trainer.fit_loop.epoch_progress.current.completed
        progress = self._trainer.fit_loop.epoch_progress
        for counts in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(counts, name, getattr(counts, name) + number)
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "epoch" and not config.reduce_on_plateau:
                _may_step(config.scheduler)
                for _ in range((before + number) // config.frequency - before // config.frequency):
                    _call_lightning_module_hook(self._trainer, "lr_scheduler_step", config.scheduler, None)

    def _put_epoch(self, epoch: int) -> None:
        progress = self._trainer.fit_loop.epoch_progress
        for counts in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(counts, name, epoch)


def _may_step(scheduler: Any) -> None:
    """Marks a schedule's optimizer as having stepped. Torch warns if a schedule steps first, and here other
    clusters' optimizers have stepped.
    """
    scheduler.optimizer._opt_called = True
