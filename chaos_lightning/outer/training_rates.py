"""How fast a cluster trains: moving averages of samples and inner steps a second."""

from __future__ import annotations

FADE = 0.9
"""What is known counts so much beside the next step."""


class TrainingRates:
    """See the module.

    Attributes:
        samples_per_s: 0.0 before anything was measured.
        steps_per_s: Likewise.
    """

    def __init__(self) -> None:
        self.samples_per_s = self.steps_per_s = 0.0

    def take(self, samples: int, steps: int, took_s: float) -> None:
        """So much was trained in this time; waits are not part of it."""
        if took_s > 0 and steps:
            self.samples_per_s = _after(self.samples_per_s, samples / took_s)
            self.steps_per_s = _after(self.steps_per_s, steps / took_s)


def _after(before: float, new: float) -> float:
    """As seconds a sample, so that a step that took long counts in full."""
    return new if not before or not new else 1 / (FADE / before + (1 - FADE) / new)
