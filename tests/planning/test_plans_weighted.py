"""Tests plans with weighted trees and named planners, as users write them and as a scheduler's settings carry them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos_lightning.control.options import settings_from_json, settings_to_json
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.plans import read_plan
from chaos_lightning.planning.trees import DRAWN
from chaos_lightning.protocol.types import PlanSpec, Settings, TreeSpec

STAR = {"members": ["a", "b", "c"], "parents": ["", "a", "a"], "weight": 2}
LINE = {"members": ["a", "b", "c"], "parents": ["b", "", "b"], "weight": 0.5}
WEIGHTED = PlanSpec(
    "trees",
    0,
    (TreeSpec(0, 0, ("a", "b", "c"), ("", "a", "a"), 2.0), TreeSpec(0, 0, ("a", "b", "c"), ("b", "", "b"), 0.5)),
)
RANGES = PlanSpec("user", 64, (TreeSpec(0, 128, ("a", "b"), ("", "a")), TreeSpec(128, 256, ("a", "b"), ("b", ""))))


def test_a_file_of_weighted_trees(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"trees": [STAR, LINE]}))
    assert read_plan(str(path)) == WEIGHTED


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({**LINE, "weight": -1}, "tree 1 of plan 'trees' has weight -1.0"),
        ({**LINE, "weight": 0}, "tree 1 of plan 'trees' has weight 0.0"),
        ({**LINE, "stop": 64}, r"tree 1 of plan 'trees' has the range \[0, 64\)"),
        ({**LINE, "weight": "much"}, "could not convert string to float: 'much'"),
    ],
)
def test_weights_that_cannot_be_are_refused_with_the_files_name(tmp_path: Path, tree: object, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"trees": [STAR, tree]}))
    with pytest.raises(ConfigurationError, match=words) as refused:
        read_plan(str(path))
    assert "plan.json" in str(refused.value)


@pytest.mark.parametrize("plan", [WEIGHTED, RANGES, PlanSpec("auto"), PlanSpec("tree:3", 4096)])
def test_a_plan_travels_with_the_settings(plan: PlanSpec) -> None:
    """A plan survives the JSON of settings that is handed to a job's own scheduler."""
    assert settings_from_json(settings_to_json(Settings(plan=plan))).plan == plan


@pytest.mark.parametrize("kind", [*DRAWN, "some.module:function"])
def test_planners_are_named_like_kinds(kind: str) -> None:
    assert read_plan(kind, 65536) == PlanSpec(kind, 65536)
