"""Tests the simulated world of services: real jobs are right, planted bugs are found, seeds say all."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos_lightning.service.spec import PutRecord, RecordStored, ServiceEffect, ServiceEvent, TellClient
from chaos_lightning.testing.service_world import FAULTS, simulate, simulate_many

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "counter.py"


@pytest.fixture(scope="module")
def counter() -> Any:
    spec = importlib.util.spec_from_file_location("simulated_counter", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["simulated_counter"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_counter_is_right_in_a_thousand_jobs_in_which_every_fault_strikes(counter: Any) -> None:
    struck = dict.fromkeys(FAULTS, 0)
    for seed in range(1000):
        outcome = simulate(counter.COUNTER, counter.adders, counter.check, seed)
        assert not outcome.problem, (seed, outcome.problem, outcome.log)
        for what, number in outcome.struck.items():
            struck[what] += number
    assert min(struck.values()) > 500, struck


def test_the_planted_bug_is_found(counter: Any, capsys: pytest.CaptureFixture[str]) -> None:
    spec = replace(counter.COUNTER, machine=counter.TooSoon)
    found = simulate_many(spec, counter.adders, counter.check, range(200))
    assert found
    assert f"seed {found[0].seed}: " in capsys.readouterr().out


def test_other_mistakes_are_found_too(counter: Any) -> None:
    class CountsTwice(counter.Counter):  # type: ignore[misc, name-defined]
        """Does not know what it has counted: a request that is repeated counts again."""

        def on(self, now: float, event: ServiceEvent) -> list[ServiceEffect]:
            if isinstance(event, RecordStored):
                return [TellClient(self.asked[event.record.client], self.count(event.record))]
            if hasattr(event, "message"):
                self.asked[event.name] = event.conn
                return [PutRecord(counter.Added(event.name, event.message.number, event.message.amount))]
            return []

    class Forgets(counter.Counter):  # type: ignore[misc, name-defined]
        """Begins at nought whatever its store holds."""

        def __init__(self, records: Sequence[Any]) -> None:
            super().__init__(())

    class Deaf(counter.Counter):  # type: ignore[misc, name-defined]
        """Answers nobody."""

        def on(self, now: float, event: ServiceEvent) -> list[ServiceEffect]:
            return []

    for wrong in (CountsTwice, Forgets, Deaf):
        spec = replace(counter.COUNTER, machine=wrong)
        assert any(simulate(spec, counter.adders, counter.check, seed).problem for seed in range(60)), wrong


def test_a_seed_says_all(counter: Any) -> None:
    first, second = (simulate(counter.COUNTER, counter.adders, counter.check, 7) for _ in "ab")
    assert (first.log, first.ended_s, first.struck) == (second.log, second.ended_s, second.struck)
