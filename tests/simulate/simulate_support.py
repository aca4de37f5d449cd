"""Runs a scenario written in a test."""

from __future__ import annotations

from chaos_lightning.lab.simulate.oracle import Violation
from chaos_lightning.lab.simulate.plan import Outcome
from chaos_lightning.lab.simulate.script import parse
from chaos_lightning.lab.simulate.world import World


def run(text: str) -> tuple[World, Outcome]:
    """The finished world and its outcome; fails with the violation, if there is one."""
    world = World(parse(text))
    outcome = world.run()
    if outcome.violation:
        raise Violation(outcome.violation)
    return world, outcome


def notes(world: World, name: str) -> list[dict[str, object]]:
    """Fields of all notes of this name by the scheduler alive at the end."""
    return [dict(note.fields) for _, note in world.scheduler.notes if note.name == name]


def outcome_of(world: World, name: str) -> str:
    return world.nodes[name].outcome
