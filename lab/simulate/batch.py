"""Runs simulations with many seeds, in one process or several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from lab.simulate.bugs import BUGS
from lab.simulate.fixed_hooks import FixedHooks
from lab.simulate.outer_ranks import OuterHooks
from lab.simulate.plan import Outcome, Plan
from lab.simulate.plans.families import FAMILIES
from lab.simulate.staged_hooks import StagedHooks
from lab.simulate.world import Hooks, simulate

T = TypeVar("T")
R = TypeVar("R")
_CHUNK = 25
_HOOKS: dict[str, type[Hooks]] = {
    "outer": OuterHooks, "waiting": OuterHooks, "pipelines": StagedHooks, "batch": FixedHooks
}  # fmt: skip
"""Hooks of the families whose jobs have classes of their own."""


def behaviour(bug: str, family: str = "any") -> tuple[Callable[[int], Plan], Callable[[], Hooks]]:
    """Returns the function that makes a run's plan, and the class of its hooks, for this planted bug ("": none).

    Args:
        bug: Name of the bug, which brings its own plans.
        family: Family of plans (plans.FAMILIES), without a bug.
    """
    if not bug:
        return FAMILIES[family], _HOOKS.get(family, Hooks)
    return BUGS[bug].plan, BUGS[bug].hooks


def run_chunk(task: tuple[int, int, str, str]) -> list[Outcome]:
    """Runs the seeds [start, stop) with a planted bug ("": none)."""
    start, stop, bug, family = task
    plan, hooks = behaviour(bug, family)
    return [simulate(plan(seed), hooks, validate=not bug) for seed in range(start, stop)]


def outcomes(start: int, count: int, bug: str, jobs: int, family: str = "any") -> Iterator[list[Outcome]]:
    """Yields chunks of the runs' outcomes, in the order of their seeds."""
    tasks = [(s, min(s + _CHUNK, start + count), bug, family) for s in range(start, start + count, _CHUNK)]
    return spread(run_chunk, tasks, jobs)


def spread(run: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[R]:
    """Yields the result of `run` for each task, in the order of the tasks, from `jobs` processes."""
    if jobs <= 1:
        yield from map(run, tasks)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(run, tasks)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
