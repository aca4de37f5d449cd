"""Measures how fast a cluster trains, as moving averages of samples and inner steps a second, and how long it waits."""

from __future__ import annotations

import time

FADE = 0.9
"""Weight of the moving average beside the next step."""


class TrainingRates:
    """Moving averages of the samples and inner steps that a second of training brings.

    Attributes:
        samples_per_s: Samples a second; 0.0 before anything was measured.
        steps_per_s: Inner steps a second; 0.0 before anything was measured.
    """

    def __init__(self) -> None:
        self.samples_per_s = self.steps_per_s = 0.0

    def take(self, samples: int, steps: int, took_s: float) -> None:
        """Adds samples and steps to the averages; `took_s` is the time in which they were trained, without waits."""
        if took_s > 0 and steps:
            self.samples_per_s = _after(self.samples_per_s, samples / took_s)
            self.steps_per_s = _after(self.steps_per_s, steps / took_s)


class Waits:
    """Time since the last adoption that outer sync has taken from the training thread.

    Attributes:
        kept_at: Time by `time.monotonic()` from which outer sync has the training thread; 0.0: it does not have it.
    """

    def __init__(self) -> None:
        self.kept_at = self._waited_s = 0.0

    def take(self) -> float:
        """Returns the seconds of waiting since the last adoption, and begins to count anew."""
        now = time.monotonic()
        waited_s, self._waited_s, self.kept_at = self._waited_s + now - self.kept_at, 0.0, now
        return waited_s

    def add(self, seconds: float) -> None:
        """Adds the seconds of another wait to those since the last adoption."""
        self._waited_s += seconds

    def let_go(self, now: float) -> None:
        """Notes that outer sync gives the training thread back at this time."""
        self._waited_s, self.kept_at = self._waited_s + now - self.kept_at, 0.0


def _after(before: float, new: float) -> float:
    """Returns the moving average after a new rate, computed on seconds per sample, so that a slow step has its full
    weight.
    """
    return new if not before or not new else 1 / (FADE / before + (1 - FADE) / new)
