"""Loss curves of a run, over samples and over virtual time, and values read from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """One point of a run's curve: virtual seconds, samples spent, validation loss."""

    time_s: float
    samples: int
    loss: float


Curve = Sequence[Point]


def _at(curve: Curve, x: float, axis: Callable[[Point], float]) -> float:
    """Returns the loss at `x` by linear interpolation; beyond an end of the curve, the loss at that end."""
    before = curve[0]
    for point in curve:
        if axis(point) >= x:
            width = axis(point) - axis(before)
            part = (x - axis(before)) / width if width else 1.0
            return before.loss + part * (point.loss - before.loss)
        before = point
    return before.loss


def at_samples(curve: Curve, samples: float) -> float:
    """Returns the loss of a curve after a number of samples."""
    return _at(curve, samples, lambda point: point.samples)


def at_time(curve: Curve, time_s: float) -> float:
    """Returns the loss of a curve at a virtual time."""
    return _at(curve, time_s, lambda point: point.time_s)


def time_to(curve: Curve, loss: float) -> float:
    """Returns the first time at which a curve reaches a loss, by linear interpolation; infinity if never."""
    before = curve[0]
    for point in curve:
        if point.loss <= loss:
            height = before.loss - point.loss
            part = (before.loss - loss) / height if height > 0 else 1.0
            return before.time_s + min(1.0, max(0.0, part)) * (point.time_s - before.time_s)
        before = point
    return math.inf
