"""A private callback, first in the list: Lightning's hooks that a strategy does not get."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from chaos_lightning.strategies import results
from chaos_lightning.strategies.evaluation import refit_limits
from chaos_lightning.strategies.loops import unfinish_epoch
from chaos_lightning.strategies.stepping import IDLE_KEY

if TYPE_CHECKING:
    from chaos_lightning.strategies.strategy import ChaosStrategy


def no_rows(value: Any) -> Any:
    """The same kind of value for no samples: tensors without rows, empty containers; a single number stays."""
    if isinstance(value, Tensor):
        return value.new_empty((0, *value.shape[1:])) if value.dim() else value.detach()
    if isinstance(value, dict):
        return {key: no_rows(item) for key, item in value.items()}
    return type(value)() if type(value) in (list, tuple) else value


class Companion(Callback):
    """Inserted by the strategy for the time of fit; keeps no state of its own."""

    def __init__(self, strategy: ChaosStrategy) -> None:
        self._strategy = strategy
        self._like: dict[str, Any] = {"loss": torch.zeros(())}
        """What an idle member's `outputs` are: those of its last batch, without the samples."""
        self._began = 0.0

    @property
    def state_key(self) -> str:
        return "chaos_lightning.Companion"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """What comes first changes `outputs` for all hooks that follow: where no training_step has run, or where it
        returned None, there is no loss."""
        if not isinstance(outputs, dict):
            return
        idle = outputs.pop(IDLE_KEY, None)
        if idle is None:
            self._like = {name: no_rows(value) for name, value in outputs.items()}
            return
        outputs.clear()
        if idle:
            outputs.update(self._like, **{IDLE_KEY: True})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before any value of the epoch is computed: one that left ends fit here; the others agree on keys."""
        session = self._strategy.session
        if session is not None and session.departed:
            # fit's loop ends at a StopIteration, without the epoch-end hooks that would judge half an epoch.
            session.end_epoch()
            unfinish_epoch(trainer)
            raise StopIteration
        results.agree(
            trainer,
            trainer.fit_loop.epoch_loop._results,
            self._strategy.collectives.exchange,
            "the training epoch",
            self._strategy.reduce,
        )
        if session is not None and len(session.members) > 1:
            results.count_as_updated(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()
        refit_limits(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All members are past their batches: from here on they do the same again."""
        if self._strategy.session is not None:
            self._strategy.session.evaluating = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session = self._strategy.session
        if session is not None and session.in_job:
            session.engine.events.emit("validation", seconds=round(time.monotonic() - self._began, 4))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Other callbacks may write a checkpoint now; that must not call for the others."""
        if self._strategy.session is not None:
            self._strategy.session.abandon()

    def __deepcopy__(self, memo: dict[int, Any]) -> Companion:
        return Companion(self._strategy)
