"""Tests the comparison of Lightning's features between jobs of several members and one process: a difference is
noticed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import compat_features
import pytest
import torch

EQUAL = {"weights": [1.0, 2.0], "steps": 4, "metrics": {"loss": 0.5}}


def leave(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        (folder / name).mkdir(parents=True)
        torch.save(result, folder / name / "result.pt")


def judged(folder: Path, *members: dict[str, Any]) -> compat_features.Row:
    feature = replace(compat_features.FEATURES[0], name="it")
    leave(folder, {"plain-1-0": {"facts": EQUAL}, "chaos-1-0": {"facts": EQUAL}})
    leave(folder, {f"members-2-0/{place}": result for place, result in enumerate(members)})
    return compat_features.judged(folder, 0, feature, 2)


def test_equal_members_are_equal(tmp_path: Path) -> None:
    row = judged(tmp_path, {"facts": EQUAL}, {"facts": {**EQUAL, "files": {"csv": []}}})
    assert (row.held, row.words) == (True, "equal (0e+00)")


def test_a_package_that_is_not_here_is_named(tmp_path: Path) -> None:
    words = "Neither is available. Requirement 'tensorboardX' not met. HINT: ... Requirement 'tensorboard' not met."
    row = judged(tmp_path, {"missing": words, "refused": "", "error": words})
    assert row.held
    assert row.words.startswith("not tried: needs `tensorboard` or `tensorboardX`, which")


def test_one_number_of_one_member_that_differs_is_seen(tmp_path: Path) -> None:
    row = judged(tmp_path, {"facts": EQUAL}, {"facts": {**EQUAL, "weights": [1.0, 2.00001]}})
    assert not row.held
    assert "weights" in row.words


def test_all_members_must_be_refused_alike(tmp_path: Path) -> None:
    refused = {"refused": "strategy chaos does not support:\n- it: why", "error": "UnsupportedError: ..."}
    assert judged(tmp_path / "all", refused, refused).words == "refused by name: it: why"
    assert judged(tmp_path / "all again", refused, refused).held
    assert not judged(tmp_path / "one", refused, {"facts": EQUAL}).held


def test_an_error_that_is_no_refusal_and_a_member_without_a_word_are_failures(tmp_path: Path) -> None:
    failed = {"refused": "", "error": "RuntimeError: odd"}
    row = judged(tmp_path / "error", {"facts": EQUAL}, failed)
    assert (row.held, row.words) == (False, "fails: RuntimeError: odd")
    assert not judged(tmp_path / "silent", {"facts": EQUAL}).held


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [(1.0, 1.5, 0.5), (100.0, 101.0, 0.01), ([1.0], [1.0, 2.0], math.inf), ({"a": 1.0}, {"b": 1.0}, math.inf),
     (math.nan, math.nan, 0.0), (math.nan, 1.0, math.inf), ({"a": [0.0, 3.0]}, {"a": [0.0, 3.5]}, 0.5 / 3)],
)  # fmt: skip
def test_difference(a: Any, b: Any, gap: float) -> None:
    assert compat_features.difference(a, b) == pytest.approx(gap)


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_every_feature_is_equal_to_one_process_or_refused_by_name(tmp_path: Path) -> None:
    found = compat_features.rows(tmp_path, 550.0)
    assert [f"{row.feature.name}, {row.world} members: {row.words}" for row in found if not row.held] == []
