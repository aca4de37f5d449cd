"""Tests the benchmark of policies: its curves with intervals, and their picture."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import policies
from chaos_lightning.errors import ConfigurationError


@pytest.mark.slow
def test_ratios_have_intervals_and_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, picture = tmp_path / "a.json", tmp_path / "a.png"
    large = policies.job
    monkeypatch.setattr(policies, "job", lambda room: replace(large(room), layers=large(room).layers[:8]))
    given = ["--seeds", "2", "--transitions", "60", "600", "--out", str(out), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["policies", *given])
    assert policies.main() == 0
    curves = json.loads(out.read_text())["details"]["single losses, curves"]
    assert curves["adaptive"] == [[60, 1, 1, 1], [600, 1, 1, 1]]
    for _, mean, low, high in curves["dynamic"]:
        assert low <= mean <= high
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_picture_of_an_unknown_kind_is_refused_before_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["policies", "--plot", "a.unknown"])
    with pytest.raises(ConfigurationError, match=r"--plot a\.unknown: no pictures are of kind 'unknown'"):
        policies.main()
