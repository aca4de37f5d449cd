"""Tests the rank that a process assumes until its first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from strategy_job import Job

from chaos_lightning.settings import EngineConfig
from chaos_lightning.strategies import place
from chaos_lightning.strategies.place import Place, end_evaluating, place_to_evaluate

OWN, NAMED = "127.0.0.1:9", "192.0.2.1:9"
"""This machine, and another one."""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Place]]:
    """Function that makes the places of founders, two of which are needed, at an endpoint where no scheduler answers
    yet.
    """
    monkeypatch.setattr(place, "listens", lambda endpoint: False)
    founders: list[Place] = []

    def one(endpoint: str) -> Place:
        founders.append(Place(EngineConfig(endpoint=endpoint, min_nodes=2, job="job-of-test-place")))
        return founders[-1]

    yield one
    for founder in founders:
        founder.leave()


@pytest.mark.parametrize(
    ("endpoint", "rank"), [(OWN, 0), (NAMED, 1), (f"{OWN},{NAMED}", 1), (f"192.0.2.2:9,{OWN}", 0), (f"{OWN},{OWN}0", 0)]
)
def test_of_all_founders_machines_one_at_most_has_a_rank_zero(
    found: Callable[[str], Place], endpoint: str, rank: int
) -> None:
    """Founders are on several machines: only one on the machine of the last endpoint, which all of them name, may
    get rank 0.
    """
    here = found(endpoint)
    assert (here.rank, here.world_size) == (rank, 2)


@pytest.fixture
def elsewhere(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Endpoint of a scheduler that this process takes for another machine's, with lock files in a folder of their
    own.
    """
    monkeypatch.setattr(place, "is_local", lambda host: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return f"127.0.0.1:{job.port}"


@pytest.mark.parametrize("least", [1, 2])
def test_the_scheduler_says_who_is_rank_zero_where_it_is_on_another_machine(elsewhere: str, least: int) -> None:
    config = EngineConfig(endpoint=elsewhere, min_nodes=least)
    first, second = Place(config), Place(config)
    assert [(p.rank, p.world_size) for p in (first, second)] == [(0, least), (1, 2)]
    first.leave()
    third = Place(config)
    assert (third.rank, third.world_size) == (0, least)
    second.leave()
    third.leave()


def test_who_evaluates_first_is_rank_zero_of_its_fit_too(elsewhere: str) -> None:
    """A process that evaluates before fit as rank 0 gives up that number before it takes one for fit, and so gets
    rank 0 again.
    """
    config = EngineConfig(endpoint=elsewhere, min_nodes=2)
    evaluating = place_to_evaluate(config)
    assert evaluating.rank == 0
    assert place_to_evaluate(config) is evaluating
    end_evaluating(config)
    fitting = Place(config)
    assert fitting.rank == 0
    fitting.leave()


def test_another_jobs_scheduler_makes_nobody_rank_zero(elsewhere: str) -> None:
    other = Place(EngineConfig(endpoint=elsewhere, min_nodes=2, job="other"))
    assert (other.rank, other.world_size) == (1, 2)
