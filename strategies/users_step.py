"""Calls the user's `training_step` on a micro-batch that Lightning's loop does not see: within a step of several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch.trainer.call import _call_strategy_hook
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from chaos_lightning.data.steps import StepBatch
from chaos_lightning.strategies.lightning_types import Trainer


class UsersStep:
    """The user's `training_step` in one fit.

    Args:
        trainer: Trainer in fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._more: tuple[Any, ...] = ()

    def moved(self, batch: Any) -> Any:
        """Returns a micro-batch as Lightning gives it to `training_step`: after its batch hooks, on the device."""
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return _call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Keeps whole steps, which are the batches of Lightning's loop, from the user's transfer hooks while the block
        runs: these get each micro-batch by `moved`.
        """
        module: Any = self._trainer.lightning_module
        call = module._call_batch_hook

        def call_unless_whole(name: str, batch: Any, *more: Any) -> Any:
            return batch if isinstance(batch, StepBatch) else call(name, batch, *more)

        module._call_batch_hook = call_unless_whole
        try:
            yield
        finally:
            del module._call_batch_hook

    def around(self) -> AbstractContextManager[Any]:
        """Returns the context of the precision plugin, in which each forward pass runs."""
        return self._trainer.precision_plugin.forward_context()

    def begin(self, batch_idx: int) -> None:
        """Sets the batch index that the next calls give to `training_step`."""
        step = self._trainer.lightning_module.training_step
        self._more = (batch_idx,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()

    def __call__(self, batch: Any) -> Any:
        return self._trainer.lightning_module.training_step(batch, *self._more)
