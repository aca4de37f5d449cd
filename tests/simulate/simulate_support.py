"""Helpers of tests: run a scenario from a test's text, and find seeds at which a planted bug breaks a rule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from lab.simulate.bugs import BUGS
from lab.simulate.oracle import Violation
from lab.simulate.plan import Outcome
from lab.simulate.script import parse
from lab.simulate.world import World, simulate


def run(text: str) -> tuple[World, Outcome]:
    """Runs this scenario; returns the finished world and its outcome; raises Violation if a rule was broken."""
    world = World(parse(text))
    outcome = world.run()
    if outcome.violation:
        raise Violation(outcome.violation)
    return world, outcome


def notes(world: World, name: str) -> list[dict[str, object]]:
    """Returns the fields of all event-log lines with this name by the scheduler that lives at the end."""
    return [dict(note.fields) for _, note in world.scheduler.notes if note.name == name]


def outcome_of(world: World, name: str) -> str:
    return world.nodes[name].outcome


BOUND = 120
"""Within so many seeds each bug must show."""

SHOWED = {
    **{
        "1-mixed": 23,
        "4-hasty": 21,
        "7-lax": 5,
        "P5-strict": 43,
        "P14-generous": 13,
        "7-misapplied": 12,
        "7-reissued": 51,
        "7-unfenced": 34,
        "8-learners": 4,
        "10-redeal": 13,
    },
    **{"P4-steps-only": 12, "P5-believing": 6, "P6-eager": 14, "P9-lingering": 8, "P13-forgetful": 20, "P14-copies": 5},
    **{"12-gullible": 6, "12a-stubborn": 21, "14a-hurried": 6, "15-mixed": 27, "links-own-ways": 11},
    **{"links-stale": 3, "11-stubborn": 75, "O8-no-residual": 13, "2-held": 1, "9-careless": 4, "14a-wishless": 2},
    **{
        "P4-kept": 3,
        "P4-bare": 1,
        "P5-not-handed-on": 4,
        "P8-tidy": 3,
        "P9-selfish": 1,
        "P13-own-header": 4,
        "14a-stale": 2,
    },
    "B3-late": 6,
}
"""Tried first: seeds that showed a bug, of those that many seeds before do not show. One that shows it no more costs a
run, and may go."""


@cache
def violation(name: str, seed: int) -> str:
    """Returns the violation that this planted bug causes in the run with this seed; "" if none."""
    bug = BUGS[name]
    return simulate(bug.plan(seed), bug.hooks, validate=False).violation


def showing(name: str) -> Iterator[tuple[int, str]]:
    """Yields seeds below BOUND at which the planted bug breaks a rule, with the violation; the seed in SHOWED comes
    first.
    """
    first = SHOWED.get(name, 0)
    for seed in (first, *(s for s in range(BOUND) if s != first)):
        if found := violation(name, seed):
            yield seed, found
