"""Compares training curves around the coming or going of a node: how far they differ, approach each other and stay
smooth.

Theory of operation. Three curves are compared: `first`, trained all along by the nodes that the job begins with,
`second`, trained all along by those that it ends with, and `changing`, in which a node comes or goes on the way. All
are measured after the same optimizer steps. The paper's three observations become three numbers:

- *tracks*: the largest difference between `changing` and `first` up to the change (`gap`);
- *moves over*: which part of the way from `first` to `second` lies behind `changing` at the end (`moved`);
- *no sharp fluctuation*: its largest change from one measurement to the next just after the change, and the largest for
  the worse (a setback), beside the same of the curves in which nobody comes or goes (`sharpest`, `setback`).

Nothing here knows what is trained; a curve of accuracies and one of losses differ by `better`, +1 or -1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Change = Literal["", "out", "in"]
"""Change in mid-run: nothing, a node comes (scale-out), a node goes (scale-in)."""


@dataclass(frozen=True)
class Curve:
    """A measure of quality after some optimizer steps.

    Attributes:
        steps: optimizer steps of the job, rising.
        values: what was measured after each, such as an accuracy in percent.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            raise ValueError(f"a curve of {len(self.steps)} steps has {len(self.values)} values; expected one each")
        if any(a >= b for a, b in pairwise(self.steps)):
            raise ValueError(f"steps {list(self.steps)} do not rise: a curve is measured in the order of its steps")

    def within(self, since: float, until: float = math.inf) -> Curve:
        """Returns the part of the curve with since < step <= until."""
        kept = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if since < s <= until]
        return Curve(tuple(s for s, _ in kept), tuple(v for _, v in kept))


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Returns the mean curve of repetitions that were measured after the same steps.

    Raises:
        ValueError: there is none, or they were measured after different steps.
    """
    if not curves or any(c.steps != curves[0].steps for c in curves):
        raise ValueError(
            f"the mean of curves measured after {[len(c.steps) for c in curves]} steps: expected at least one curve, "
            "and the same steps in all"
        )
    rows = zip(*(c.values for c in curves), strict=True)
    return Curve(curves[0].steps, tuple(sum(row) / len(curves) for row in rows))


def gap(one: Curve, other: Curve, until: float = math.inf) -> float:
    """Returns the largest absolute difference of two curves at their common steps up to `until`.

    Raises:
        ValueError: there is no such step.
    """
    there = dict(zip(other.steps, other.values, strict=True))
    both = [abs(v - there[s]) for s, v in zip(one.steps, one.values, strict=True) if s in there and s <= until]
    if not both:
        raise ValueError(f"the curves have no step up to {until:g} in common: measure both after the same steps")
    return max(both)


def level(curve: Curve, since: float) -> float:
    """Returns the mean of a curve's values measured after more than `since` steps.

    Raises:
        ValueError: nothing was.
    """
    values = curve.within(since).values
    if not values:
        raise ValueError(f"nothing was measured after step {since:g}; the last step measured is {curve.steps[-1:]}")
    return sum(values) / len(values)


def moved(changing: Curve, first: Curve, second: Curve, since: float) -> float:
    """Returns how far a curve has moved from the level of `first` (0) to that of `second` (1) after step `since`.

    0: still where `first` is; 1: where `second` is; NaN where these two do not differ.
    """
    begin, end = level(first, since), level(second, since)
    return (level(changing, since) - begin) / (end - begin) if end != begin else math.nan


def _changes(curve: Curve, since: float, until: float) -> list[float]:
    """Returns the differences between each measurement with since < step <= until and the one before it."""
    values = list(zip(curve.steps, curve.values, strict=True))
    return [v - before for (_, before), (s, v) in pairwise(values) if since < s <= until]


def sharpest(curve: Curve, since: float, until: float = math.inf) -> float:
    """Returns the largest absolute change between neighbouring measurements in (since, until]; 0 if there is none."""
    return max((abs(c) for c in _changes(curve, since, until)), default=0.0)


def setback(curve: Curve, better: int, since: float, until: float = math.inf) -> float:
    """Returns the largest change for the worse between neighbouring measurements in (since, until]; 0 if there is none.

    Args:
        curve: the measurements.
        better: +1 where larger values are better (accuracy), -1 where smaller ones are (loss).
        since: steps, exclusive.
        until: steps, inclusive.
    """
    if better not in (1, -1):
        raise ValueError(f"better={better}: expected +1 (larger values are better) or -1 (smaller ones are)")
    return max([0.0, *(-better * c for c in _changes(curve, since, until))])


@dataclass(frozen=True)
class Smoothness:
    """The largest changes between neighbouring measurements, just after a change of nodes and in runs without one.

    Attributes:
        sharpest: of the changing curve just after the change, in the curve's unit.
        usual_sharpest: of the other curves over the same part of training and all that follows.
        setback: the largest for the worse of the changing curve just after the change; 0 if it only got better.
        usual_setback: that of the other curves.
    """

    sharpest: float
    usual_sharpest: float
    setback: float
    usual_setback: float


def smoothness(
    changing: Iterable[Curve], constant: Iterable[Curve], *, better: int, since: float, until: float
) -> Smoothness:
    """Compares the smoothness of runs with a change of nodes with that of runs without one.

    Args:
        changing: one curve per repetition.
        constant: the other curves, of any number of nodes.
        better: as in `setback`.
        since: the step of the change.
        until: where "just after" ends.
    """
    changes, still = list(changing), list(constant)
    return Smoothness(
        max((sharpest(c, since, until) for c in changes), default=0.0),
        max((sharpest(c, since) for c in still), default=0.0),
        max((setback(c, better, since, until) for c in changes), default=0.0),
        max((setback(c, better, since) for c in still), default=0.0),
    )
