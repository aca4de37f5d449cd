"""Tests that the benchmark of moves reports a missed bound if moves are assigned worse than in the best way."""

from dataclasses import replace

import pytest

from benchmarks import moves
from benchmarks.common import Figure, Result
from chaos_lightning.planning.pipelines.moves import Moves, move_list


def bounded(measure, count):
    """Runs a measurement of the benchmark; returns its figures that have bounds."""
    result = Result("moves")
    measure(result, 1, count)
    return [f for f in result.figures if f.bound is not None]


def missed(figures: list[Figure]) -> list[str]:
    return [f.name.split(", ", 1)[1] for f in figures if not f.ok]


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("assign", lambda job, old, new: moves.rank_order(old, new), "those with more bytes than the best permutation"),
        ("move_list", lambda *case: forgetful(move_list(*case)), "those with a list of more or fewer bytes"),
    ],
)
def test_moves_are_counted_without_the_list(monkeypatch, name, other, words):
    assert missed(bounded(moves.against_permutations, 10)) == []
    monkeypatch.setattr(moves, name, other)
    assert missed(bounded(moves.against_permutations, 10)) == [words]


def forgetful(found: Moves) -> Moves:
    return replace(found, links=found.links[1:])


def test_rounds_that_are_longer_than_the_best_miss_a_bound(monkeypatch):
    assert missed(bounded(moves.against_colourings, 10)) == []
    monkeypatch.setattr(moves, "colour", lambda vertices: [[v] for v in vertices])
    words = "10 plans of up to 8 groups: those longer than the best colouring"
    assert missed(bounded(moves.against_colourings, 10)) == [words]
