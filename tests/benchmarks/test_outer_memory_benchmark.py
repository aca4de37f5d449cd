"""Tests the benchmark of a follower's memory: its figures with bounds, and the memory that they count."""

from __future__ import annotations

import pytest

from benchmarks.common import MIB, Result
from benchmarks.outer_memory import FOLLOWERS, LEAST_MIB, peak
from chaos_lightning.events.events import Record

PARAMETERS = 256 * MIB / 4 / FOLLOWERS


def staged(held: int, of_one: int) -> list[Record]:
    told = {"held": held, "held_of_one": of_one}
    return [
        Record(1.0, 1.0, "", "push_staged", told),
        Record(2.0, 2.0, "", "push_staged", {"held": 1, "held_of_one": 1}),
    ]


def missed(nbytes: float, told: list[Record], parameters: float = PARAMETERS) -> list[str]:
    result = Result("outer_server")
    peak(result, "f", int(nbytes), parameters, told)
    return [figure.name for figure in result.figures if figure.ok is False]


@pytest.mark.parametrize(
    ("beside", "of_one", "expected"),
    [
        (27.9, 7, []),
        (28.1, 7, ["f: peak memory (52.1) beside pushes"]),
        (27.9, 8, ["f: pushes of one cluster that it held at most"]),
    ],
)
def test_what_a_follower_gathers_as_it_works_is_within_its_bound(
    beside: float, of_one: int, expected: list[str]
) -> None:
    """A follower's peak memory without its pushes has a bound, and so has the number of pushes that it keeps of one
    cluster (seven).
    """
    assert missed((beside + 2 * 12) * PARAMETERS, staged(12, of_one)) == expected


def test_a_small_model_has_no_bound_of_its_memory() -> None:
    small = (LEAST_MIB - 1) * MIB / 4 / FOLLOWERS
    assert missed(99 * small, staged(12, 7), small) == []
