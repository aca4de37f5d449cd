"""The loss of a step now and then, for boards and reports.

Theory of operation. To read a loss waits for the device, so it is read once in `EVERY_S`, after a step's commit, where
the device has just been waited for. In the steps between nothing is kept.
"""

from __future__ import annotations

import time

from torch import Tensor

from chaos_lightning.events.events import EventLog

EVERY_S = 1.0


class Losses:
    """Of one member; training thread.

    Args:
        events: The member's log.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._due = 0.0
        self._parts: list[tuple[Tensor, float]] = []

    def add(self, loss: object, weight: float) -> None:
        """The mean loss of another micro-batch, of so many samples; what is no number is left out."""
        if weight and isinstance(loss, Tensor) and loss.numel() == 1 and time.monotonic() >= self._due:
            self._parts.append((loss.detach(), weight))

    def tell(self, step: int) -> None:
        """The step was committed, or came to nothing (0)."""
        parts, self._parts = self._parts, []
        if parts and step:
            self._due = time.monotonic() + EVERY_S
            weight = sum(w for _, w in parts)
            loss = sum(float(part) * w for part, w in parts) / weight
            self._events.emit("train_loss", step=step, loss=float(f"{loss:.6g}"), weight=weight)
