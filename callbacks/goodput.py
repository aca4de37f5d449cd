"""Goodput: how much of the job's time was useful, logged to the Trainer's loggers.

Theory of operation. Every member meters (one call a step), rank 0 logs. The totals travel with the training state
like any callback's, so whoever becomes rank 0 goes on from the same numbers, and a resumed job does, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from chaos_lightning.callbacks.member import engine_of
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.observe.meter import GoodputMeter


class Goodput(Callback):
    """Logs `chaos/goodput`, `chaos/step_s`, `chaos/members` and `chaos/lost_<cause>_s`.

    Args:
        every_n_steps: How often; 0: as often as the Trainer logs (`log_every_n_steps`).
        prefix: Of the names.
    """

    def __init__(self, every_n_steps: int = 0, prefix: str = "chaos/") -> None:
        if every_n_steps < 0:
            raise ConfigurationError(f"Goodput: every_n_steps {every_n_steps}; expected 0 or more")
        self.every_n_steps = every_n_steps
        self.prefix = prefix
        self.meter = GoodputMeter()
        self._clock: Callable[[], float] = time.monotonic
        self._step = -1
        self._logged = -1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        engine = engine_of(trainer)
        before, self._step = self._step, trainer.global_step if engine is None else engine.header.step
        if self._step in (before, 0):
            return  # accumulating
        if engine is not None and engine.view is not None:
            change = engine.header.view_change
            # A header takes out only who asked to leave; who is missing after a decision is dead.
            carried = change is not None and change.id == engine.view.id
            self.meter.step(self._clock(), engine.view.ids(), leaving=carried or "leav" in engine.view.reason)
        else:
            self.meter.step(self._clock(), (str(trainer.global_rank),))
        every = self.every_n_steps or int(getattr(trainer, "log_every_n_steps", 0)) or 50
        if trainer.is_global_zero and trainer.global_step // every != self._logged // every:
            self._logged = trainer.global_step
            self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meter.pause()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self.meter.steps:
            self._log(trainer)

    def metrics(self, members: int) -> dict[str, float]:
        """What is logged, by name."""
        values = {"goodput": self.meter.share, "step_s": self.meter.last_s, "members": float(members)}
        values |= {f"lost_{cause}_s": seconds for cause, seconds in self.meter.lost_s.items()}
        return {self.prefix + name: value for name, value in values.items()}

    def _log(self, trainer: Trainer) -> None:
        engine = engine_of(trainer)
        members = engine.world_size if engine is not None else trainer.world_size
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics(members), step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return self.meter.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.meter.load(state_dict)
