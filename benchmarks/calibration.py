"""Fits the costs of a hop, of a unit and of a commit to measured steps, since a model file cannot contain them.

Theory of operation. The estimated step of a plan is the length of its critical path, so it is linear in the three
`Overheads` as long as the path stays the same, and its slope in each of them is a whole number: how many hops, units
and commits lie on the path. These counts are read off the estimator itself, by raising one cost a little. With the
counts as they are at the present values, the three values that bring the estimates nearest to the measured steps, none
below zero, are a least-squares problem of three unknowns, which is solved for each set of them that may be above
zero. At the new values the paths may be others, so this is repeated until the values stay. A running job needs no fit:
its members measure what lies beside layers (`Pipeliner.measured`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import JobError, Overheads, TrainingJob, check_number
from chaos_lightning.planning.pipelines.plan import PipelinePlan

NAMES = ("hop_s", "unit_s", "commit_s")
LITTLE = 1e-6
"""Share of a step by which a cost is raised to see its slope."""
STILL = 1e-12
"""Change of the squares' sum, as a share of it, that counts as none."""
ROUNDS = 50
"""Rounds at most; some five are usual."""

Row3 = tuple[float, float, float]


class CalibrationError(JobError):
    """Error: the measured steps do not determine the costs; the message names what is missing."""


class Residual(NamedTuple):
    """One measured step and the step that the fitted costs predict."""

    measured_s: float
    estimated_s: float

    @property
    def share(self) -> float:
        """Share by which the measured step is longer than the estimate."""
        return self.measured_s / self.estimated_s - 1


class Calibration(NamedTuple):
    """Fitted costs, and the errors of the steps predicted from them."""

    overheads: Overheads
    residuals: tuple[Residual, ...]
    """Errors of the predicted steps, one for each measurement, in the order given."""

    @property
    def worst(self) -> float:
        """Largest relative error of an estimated step."""
        return max(abs(r.share) for r in self.residuals)


def fit(job: TrainingJob, measured: Sequence[tuple[PipelinePlan, float]]) -> Calibration:
    """Fits a job's costs of a hop, a unit and a commit to measured steps.

    Args:
        job: The job; it has all devices of the plans. Its own overheads are where the search begins.
        measured: Plans and the seconds that their steps took.

    Raises:
        CalibrationError: There are fewer than three, or their plans do not tell the three costs apart.
        JobError: A time is no number above zero.
    """
    for i, (_, seconds) in enumerate(measured):
        check_number(f"measured step {i + 1}", seconds)
    if len(measured) < len(NAMES):
        raise CalibrationError(
            f"{len(measured)} measured steps; expected at least {len(NAMES)}, of plans that differ in stages and "
            f"micro-batches, for the three costs {', '.join(NAMES)}"
        )
    here = (job.overheads.hop_s, job.overheads.unit_s, job.overheads.commit_s)
    squares = _squares(job, measured, here)
    for _ in range(ROUNDS):
        rows = [_counts(job, plan, here) for plan, _ in measured]
        _check_told_apart(rows)
        aims = [s - _step_s(job, plan, here) + sum(map(_times, row, here))
                for (plan, s), row in zip(measured, rows, strict=True)]  # fmt: skip
        there = _least_squares(rows, aims)
        better = _towards(job, measured, here, there, squares)
        if better is None:
            break
        here, squares = better
    overheads = Overheads(**dict(zip(NAMES, here, strict=True)))
    return Calibration(overheads, tuple(Residual(s, _step_s(job, plan, here)) for plan, s in measured))


def _towards(
    job: TrainingJob, measured: Sequence[tuple[PipelinePlan, float]], here: Row3, there: Row3, squares: float
) -> tuple[Row3, float] | None:
    """Returns the first point with smaller errors on the way from the present costs to new ones: all the way, half of
    it, a quarter, ...; None if there is none.
    """
    for halvings in range(20):
        part = 0.5**halvings
        a, b, c = (x + part * (y - x) for x, y in zip(here, there, strict=True))
        found = _squares(job, measured, (a, b, c))
        if found < squares * (1 - STILL):
            return (a, b, c), found
    return None


def _times(a: float, b: float) -> float:
    return a * b


def _step_s(job: TrainingJob, plan: PipelinePlan, costs: Row3) -> float:
    changed = replace(job, overheads=Overheads(**dict(zip(NAMES, costs, strict=True))))
    changed.__dict__["costs"] = job.costs
    return estimate(changed, plan).step_s


def _squares(job: TrainingJob, measured: Sequence[tuple[PipelinePlan, float]], costs: Row3) -> float:
    return sum((s - _step_s(job, plan, costs)) ** 2 for plan, s in measured)


def _counts(job: TrainingJob, plan: PipelinePlan, costs: Row3) -> tuple[int, int, int]:
    """Returns how many hops, units and commits lie on the critical path of a plan."""
    step = _step_s(job, plan, costs)
    little = LITTLE * step

    def raised(which: int) -> int:
        a, b, c = (x + little * (i == which) for i, x in enumerate(costs))
        return round((_step_s(job, plan, (a, b, c)) - step) / little)

    return raised(0), raised(1), raised(2)


def _check_told_apart(rows: Sequence[tuple[int, int, int]]) -> None:
    """Raises an error if the counts of hops, units and commits have a rank below three (exact, as they are whole
    numbers).
    """
    gram = _gram(rows, (0, 1, 2))
    if _determinant(gram) == 0:
        never = [name for i, name in enumerate(NAMES) if not any(row[i] for row in rows)]
        what = f"never use {' and '.join(never)}" if never else f"do not tell {', '.join(NAMES)} apart"
        raise CalibrationError(
            f"the plans of the {len(rows)} measured steps {what}; expected plans that differ in stages and in "
            "micro-batches for each pipeline"
        )


def _least_squares(rows: Sequence[tuple[int, int, int]], aims: Sequence[float]) -> Row3:
    """Returns the three non-negative costs whose products with the rows of counts are nearest to the measured times
    (least squares).
    """

    def error(x: Row3) -> float:
        return sum((aim - sum(map(_times, row, x))) ** 2 for row, aim in zip(rows, aims, strict=True))

    return min(_corners(rows, aims), key=error)


def _corners(rows: Sequence[tuple[int, int, int]], aims: Sequence[float]) -> Iterator[Row3]:
    """Yields the least-squares costs for each subset of costs that may be non-zero, if none of them is negative
    (Cramer's rule).
    """
    for size in range(len(NAMES) + 1):
        for free in combinations(range(len(NAMES)), size):
            gram = _gram(rows, free)
            right = [sum(row[i] * aim for row, aim in zip(rows, aims, strict=True)) for i in free]
            found = [0.0] * len(NAMES)
            for k, i in enumerate(free):
                column = [[*line[:k], r, *line[k + 1 :]] for line, r in zip(gram, right, strict=True)]
                found[i] = _determinant(column) / _determinant(gram)
            if min(found) >= 0:
                yield found[0], found[1], found[2]


def _gram(rows: Sequence[tuple[int, int, int]], of: Sequence[int]) -> list[list[int]]:
    return [[sum(row[i] * row[j] for row in rows) for j in of] for i in of]


def _determinant(m: Sequence[Sequence[float]]) -> float:
    """Returns the determinant of a matrix by expansion along its first row; an integer for integers."""
    if not m:
        return 1
    minors = ([[*line[:i], *line[i + 1 :]] for line in m[1:]] for i in range(len(m)))
    return sum(
        (-x if i % 2 else x) * _determinant(minor) for i, (x, minor) in enumerate(zip(m[0], minors, strict=True))
    )
