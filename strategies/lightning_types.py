"""Declares attributes of Lightning's Trainer that its class does not declare, since its connectors set them.

For type checkers only; in a running program this is Lightning's own class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule
    from lightning.pytorch import Trainer as _Trainer

    class Trainer(_Trainer):
        """Lightning's Trainer, with the attributes that the strategy uses."""

        callbacks: list[Callback]
        datamodule: LightningDataModule | None
        fast_dev_run: bool | int
        log_every_n_steps: int
        overfit_batches: int | float
        reload_dataloaders_every_n_epochs: int
        _val_check_time_interval: float | None
        _last_val_time: float
else:
    from lightning.pytorch import Trainer

__all__ = ["Trainer"]
