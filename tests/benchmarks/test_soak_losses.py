"""Tests what a soak concludes from its losses beside those of undisturbed runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common import Result
from benchmarks.soak import pipelines

STEPS = 60
CLOSE, MISSING = "losses of calm steps", "calm steps that are missing"


def missed(monkeypatch: pytest.MonkeyPatch, *, off: float = 0.0, apart_from: int = STEPS) -> list[str]:
    """Returns the figures beyond their bounds of a soak whose loss of step 40 is off, while two undisturbed runs differ
    by 1e-9 from a step on.
    """

    def alone(strategy: str | None = None, *, steps: int, **about: Any) -> dict[str, Any]:
        drift = [1e-9 if strategy is None and step >= apart_from else 0.0 for step in range(1, steps + 1)]
        return {"rows": {step: {"loss": 2.0 + value} for step, value in enumerate(drift, 1)}}

    monkeypatch.setattr(pipelines, "alone", alone)
    result = Result("soak")
    pipelines.compare(result, {step: 2.0 + off * (step == 40) for step in range(1, STEPS + 1)}, {})
    return [f.name.partition(":")[0] for f in result.figures if f.ok is False]


def test_equal_losses_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed(monkeypatch) == []


def test_one_wrong_partial_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed(monkeypatch, off=4e-6) == [CLOSE]


def test_a_soak_without_calm_steps_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed(monkeypatch, off=4e-6, apart_from=1) == [MISSING]
