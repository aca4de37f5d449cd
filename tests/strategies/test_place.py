"""Who a process takes itself for before its first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from chaos_lightning.runtime.config import EngineConfig
from chaos_lightning.strategies import place
from chaos_lightning.strategies.place import Place

OWN, NAMED = "127.0.0.1:9", "192.0.2.1:9"
"""This machine, and another one."""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Place]]:
    """Founders, two of whom are wanted, at an endpoint where nobody answers yet."""
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
    """Each names its own candidate first, and then the one that all name."""
    here = found(endpoint)
    assert (here.rank, here.world_size) == (rank, 2)
