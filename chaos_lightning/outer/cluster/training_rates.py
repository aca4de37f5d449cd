"""Measures how fast a cluster trains, as moving averages of samples and inner steps a second, and how long it waits."""

from __future__ import annotations

import time

FADE = 0.9
"""Weight of the moving average beside the next step."""


class TrainingRates:
    """Moving averages of what a second of training gives.

    Attributes:
        samples_per_s: 0.0 before anything was measured.
        steps_per_s: Likewise.
    """

    def __init__(self) -> None:
        self.samples_per_s = self.steps_per_s = 0.0

    def take(self, samples: int, steps: int, took_s: float) -> None:
        """Adds what was trained in this time; waits are not part of the time."""
        if took_s > 0 and steps:
            self.samples_per_s = _after(self.samples_per_s, samples / took_s)
            self.steps_per_s = _after(self.steps_per_s, steps / took_s)


class Waits:
    """Time for which outer sync has had the training thread since the last adoption.

    Attributes:
        kept_at: When it took it, by `time.monotonic()`; 0.0: it does not have it.
    """

    def __init__(self) -> None:
        self.kept_at = self._waited_s = 0.0

    def take(self) -> float:
        """Returns the seconds of waiting up to now; later waits count for the next adoption."""
        now = time.monotonic()
        waited_s, self._waited_s, self.kept_at = self._waited_s + now - self.kept_at, 0.0, now
        return waited_s

    def add(self, seconds: float) -> None:
        """Adds the seconds of another wait to those since the last adoption."""
        self._waited_s += seconds

    def let_go(self, now: float) -> None:
        """Notes the time at which outer sync gives the training thread back."""
        self._waited_s, self.kept_at = self._waited_s + now - self.kept_at, 0.0


def _after(before: float, new: float) -> float:
    """Returns the moving average after a new rate. Seconds per sample are averaged, so that a step that took long
    counts in full.
    """
    return new if not before or not new else 1 / (FADE / before + (1 - FADE) / new)
