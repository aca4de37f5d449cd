"""Runs many simulated outer jobs, in one process or several; a module of its own because worker processes import it."""

from __future__ import annotations

from collections.abc import Iterator

from lab.outer.bugs import BUGS
from lab.outer.plans import FAMILIES
from lab.outer.processes import Machines
from lab.outer.world import Outcome, World
from lab.simulate.batch import spread

_CHUNK = 20


def run_chunk(task: tuple[int, int, str, str]) -> list[Outcome]:
    """Runs one simulated job of a family of plans for each seed in [start, stop), with a planted bug ("" for none)."""
    start, stop, family, bug = task
    machines = BUGS[bug].machines if bug else Machines()
    return [World(FAMILIES[family](seed), machines).run() for seed in range(start, stop)]


def outcomes(start: int, count: int, family: str, bug: str, jobs: int) -> Iterator[list[Outcome]]:
    """Yields the outcomes of simulated jobs in chunks, in the order of their seeds."""
    tasks = [(s, min(s + _CHUNK, start + count), family, bug) for s in range(start, start + count, _CHUNK)]
    return spread(run_chunk, tasks, jobs)
