"""Chance: many short jobs with faults of every kind must hold all contracts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.lab.simulate.batch import outcomes
from chaos_lightning.lab.simulate.plans.families import any_plan
from chaos_lightning.lab.simulate.world import World, simulate


def test_first_hundred_seeds_hold_all_contracts() -> None:
    results = [o for chunk in outcomes(0, 100, "", 1) for o in chunk]
    assert [(o.seed, o.violation) for o in results if o.violation] == []
    assert sum(o.hand_ons for o in results) > 0
    assert sum(o.ejections for o in results) > 0
    assert sum(o.joins for o in results) > 100


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(100, 10**6))
def test_any_seed_holds_all_contracts(seed: int) -> None:
    assert simulate(any_plan(seed)).violation == ""


@pytest.mark.slow
def test_five_thousand_seeds_hold_all_contracts() -> None:
    results = [o for chunk in outcomes(0, 5000, "", 2) for o in chunk]
    assert [(o.seed, o.violation) for o in results if o.violation] == []


@pytest.mark.parametrize("seed", [4, 7, 9])
def test_run_is_a_function_of_its_seed(seed: int) -> None:
    one, other = World(any_plan(seed)), World(any_plan(seed))
    assert one.run() == other.run()
    assert [v.id for v in one.store.views] == [v.id for v in other.store.views]
    assert one.oracle.external == other.oracle.external


@pytest.mark.parametrize("seed", [113, 149])
def test_run_is_the_same_in_every_process(seed: int) -> None:
    """Python orders a set of strings anew in each process; these seeds were told differently by that."""

    def told(order: int) -> str:
        command = [sys.executable, "-m", "chaos_lightning.lab.simulate", "--tell", str(seed)]
        given = {**os.environ, "PYTHONHASHSEED": str(order)}
        return subprocess.run(command, env=given, capture_output=True, check=True, text=True, timeout=120).stdout

    assert told(0) == told(1)
