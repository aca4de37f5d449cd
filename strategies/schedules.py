"""Provides learning rate schedules by samples, which mean the same with any number of members.

Theory of operation. `Trainer.estimated_stepping_batches`, and each schedule made of it, counts optimizer steps, of
which a job takes the fewer the more members it has. Samples it uses the same number of, whatever happens to them.
So `BySamples` walks a schedule that was written for one machine, which takes a step after each `samples_per_step`
samples: after an optimizer step of the job it goes as many steps as the samples in it are worth, and what is left over
counts next time. How many samples a committed step used is the difference of two headers' ledgers, the same on all
members (protocol.md 25, 27); the sum is part of the schedule's state, which checkpoints and newcomers get.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.ledger import is_length_stream
from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import Ledger


class BySamples(LRScheduler):
    """Schedule that goes by the samples that the job has used instead of by optimizer steps.

    Under any other strategy each optimizer step is one step of the schedule, as without this.

    Args:
        scheduler: Any schedule that steps without a metric, written for a machine that takes a step after so many
            samples.
        samples_per_step: Samples that one step of the schedule stands for, such as batch size times
            `accumulate_grad_batches` of one process. Where the training loader has a batch sampler of its own, batches.

    Attributes:
        samples: Samples that the job has used so far.
        steps: Steps that the schedule has taken so far.
    """

    def __init__(self, scheduler: LRScheduler, samples_per_step: int) -> None:
        # Not the parent's: it would take a first step, which the schedule inside has taken.
        if isinstance(scheduler, ReduceLROnPlateau) or not hasattr(scheduler, "step"):
            raise ConfigurationError(
                f"BySamples got a {type(scheduler).__name__}; expected a scheduler that steps without a metric "
                "(ReduceLROnPlateau goes by its metric, however many members there are)"
            )
        if isinstance(samples_per_step, bool) or not isinstance(samples_per_step, int) or samples_per_step < 1:
            raise ConfigurationError(
                f"BySamples: samples_per_step={samples_per_step!r}; expected a positive number, such as the batch size"
            )
        self.scheduler = scheduler
        self.samples_per_step = samples_per_step
        self.samples = 0
        self.steps = 0
        self.counted = False
        """Whether the job counts the samples; else each step counts as `samples_per_step`."""

    @property
    def optimizer(self) -> Optimizer:  # type: ignore[override]
        return self.scheduler.optimizer

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Steps of the schedule."""
        return self.scheduler.last_epoch

    @property
    def base_lrs(self) -> list[float | Tensor]:  # type: ignore[override]
        return self.scheduler.base_lrs

    def get_last_lr(self) -> list[float | Tensor]:
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float | Tensor]:
        return self.scheduler.get_lr()

    def step(self, epoch: int | None = None) -> None:
        """Takes, after an optimizer step, as many steps of the schedule as its samples are worth, maybe none."""
        if not self.counted:
            self.samples += self.samples_per_step
        while (self.steps + 1) * self.samples_per_step <= self.samples:
            self.steps += 1
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "steps": self.steps, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples, self.steps = state_dict["samples"], state_dict["steps"]
        self.scheduler.load_state_dict(state_dict["scheduler"])


class SampleCount:
    """Tells the schedules of a fit how many samples each committed step has used.

    Args:
        configs: Schedulers of the Trainer.
    """

    def __init__(self, configs: Iterable[LRSchedulerConfig]) -> None:
        self._schedules = [c.scheduler for c in configs if isinstance(c.scheduler, BySamples)]
        for schedule in self._schedules:
            schedule.counted = True
        self._ledger = Ledger()

    def begin(self, ledger: Ledger) -> None:
        """Sets the ledger of spent samples from which counting starts; the samples in it were counted before."""
        self._ledger = ledger

    def committed(self, ledger: Ledger) -> None:
        """Counts the samples that a committed header adds to the ledger of spent samples."""
        before, self._ledger = self._ledger, ledger
        if self._schedules and ledger is not before:
            used = used_between(before, ledger)
            for schedule in self._schedules:
                schedule.samples += used


def used_between(before: Ledger, after: Ledger) -> int:
    """Returns how many samples were used between two ledgers of spent samples, those of one header and of the next."""
    known = {entry.stream: entry for entry in before.streams}
    total = 0
    for entry in after.streams:
        if is_length_stream(entry.stream):
            continue
        total += count(entry.spans)
        old = known.get(entry.stream)
        if old is not None and old.epoch == entry.epoch:
            total -= count(old.spans)
    return total


def go_by_step(configs: Iterable[LRSchedulerConfig]) -> None:
    """Makes Lightning step the schedules by samples after each optimizer step, whatever interval the user gave."""
    for config in configs:
        if isinstance(config.scheduler, BySamples):
            config.interval, config.frequency = "step", 1


def name_of(scheduler: Any) -> str:
    """Returns a readable name of a schedule, for the job's fingerprint."""
    if isinstance(scheduler, BySamples):
        return f"BySamples({name_of(scheduler.scheduler)}, {scheduler.samples_per_step})"
    return type(scheduler).__name__
