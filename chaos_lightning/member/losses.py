"""Logs the training loss now and then, for boards and reports.

Theory of operation. To read a loss waits for the device, so it is read once in `EVERY_S`, after a step's commit, where
the device has just been waited for; and once in `EVERY_STEPS` at most, so that of what slow steps log it is a small
part. In the steps between nothing is kept.
"""

from __future__ import annotations

import time

from torch import Tensor

from chaos_lightning.events.events import EventLog

EVERY_S = 1.0
EVERY_STEPS = 10


class Losses:
    """Log of one member's losses; for the training thread.

    Args:
        events: The member's log.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._due = 0.0
        self._rest = 0
        """Number of steps before the next one whose loss is told, unless it is not due by then."""
        self._parts: list[tuple[Tensor, float]] = []

    def add(self, loss: object, weight: float) -> None:
        """Adds the mean loss of another micro-batch of `weight` samples; ignores a loss that is no single number."""
        due = not self._rest and time.monotonic() >= self._due
        if due and weight and isinstance(loss, Tensor) and loss.numel() == 1:
            self._parts.append((loss.detach(), weight))

    def tell(self, step: int) -> None:
        """Logs the loss of a committed step, if one is due; step 0 stands for an accumulation that came to nothing,
        whose loss is dropped.
        """
        parts, self._parts = self._parts, []
        if step:
            self._rest = max(0, self._rest - 1)
        if parts and step:
            self._due, self._rest = time.monotonic() + EVERY_S, EVERY_STEPS - 1
            weight = sum(w for _, w in parts)
            loss = sum(float(part) * w for part, w in parts) / weight
            self._events.emit("train_loss", step=step, loss=float(f"{loss:.6g}"), weight=weight)
