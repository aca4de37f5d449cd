"""Tests plans that users write: names, files, and errors before training begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chaos_lightning.control.hosting import options_for_engine
from chaos_lightning.control.options import check_settings
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.plans import absolute_plan, check_bytes, read_plan
from chaos_lightning.planning.trees import expand
from chaos_lightning.protocol.types import PlanSpec, Settings, TreeSpec
from chaos_lightning.rendezvous.options import read_options
from chaos_lightning.settings import EngineConfig

STAR = {"start": 0, "stop": 128, "members": ["a", "b", "c"], "parents": ["", "a", "a"]}
LINE = {"start": 128, "stop": 1000, "members": ["a", "b", "c"], "parents": ["b", None, "b"]}
SPEC = PlanSpec(
    "user",
    4096,
    (TreeSpec(0, 128, ("a", "b", "c"), ("", "a", "a")), TreeSpec(128, 1000, ("a", "b", "c"), ("b", "", "b"))),
)
YAML = """
chunk_nbytes: 4096
trees:
  - {start: 0, stop: 128, members: [a, b, c], parents: ["", a, a]}
  - {start: 128, stop: 1000, members: [a, b, c], parents: [b, "", b]}
"""


def written(folder: Path, plan: Any, name: str = "plan.json") -> str:
    path = folder / name
    path.write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return str(path)


@pytest.mark.parametrize("kind", ["rotating", "chain", "tree", "tree:5"])
def test_kinds_by_name(kind: str) -> None:
    assert EngineConfig(plan=kind).plan_spec == PlanSpec(kind)
    assert EngineConfig(plan=kind, chunk_nbytes=8192).plan_spec == PlanSpec(kind, 8192)


def test_a_file_of_trees_whichever_way_it_is_named(tmp_path: Path) -> None:
    as_json = written(tmp_path, {"kind": "user", "chunk_nbytes": 4096, "trees": [STAR, LINE]})
    as_yaml, short = written(tmp_path, YAML, "plan.yaml"), written(tmp_path, YAML, "plan.yml")
    odd = written(tmp_path, YAML, "my plan")
    for text in (as_json, as_yaml, short, f"file:{as_json}", f"file:{odd}"):
        assert EngineConfig(plan=text).plan_spec == SPEC
    assert read_plan(as_json, 8192).chunk_nbytes == 8192


def test_one_tree_over_everything_needs_no_range(tmp_path: Path) -> None:
    text = written(tmp_path, {"trees": [{"members": ["a", "b"], "parents": ["", "a"]}]})
    assert read_plan(text).trees == (TreeSpec(0, 0, ("a", "b"), ("", "a")),)


def test_a_file_may_name_a_kind(tmp_path: Path) -> None:
    assert read_plan(written(tmp_path, {"kind": "tree:4", "chunk_nbytes": 65536})) == PlanSpec("tree:4", 65536)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("{", "no JSON: "),
        ("[]", "expected an object with kind, chunk_nbytes, trees"),
        ({"treees": []}, "unknown keys .'treees'."),
        ({"trees": 3}, "trees is 3, expected a list"),
        ({"trees": [7]}, "tree 0: expected an object"),
        ({"trees": [{**STAR, "parent": []}]}, "tree 0: unknown keys .'parent'."),
        ({"trees": [{"start": 0}]}, "'members'"),
        ({"trees": [{**STAR, "members": "abc"}]}, "tree 0: members is 'abc', expected a list"),
        ({"trees": [{**STAR, "start": "x"}]}, "invalid literal"),
        ({"trees": [{**STAR, "members": [], "parents": []}]}, "at least one member"),
        ({"kind": "chain", "trees": [STAR]}, "'chain' has no trees of its own"),
        ({"kind": "user"}, "has no trees"),
        ({"kind": "ring"}, "'ring' is unknown"),
        ({"chunk_nbytes": 8}, "chunk_nbytes is 8"),
        ({"trees": [LINE]}, r"bytes \[0, 128\) are covered by no tree"),
        ({"trees": [STAR, {**LINE, "start": 64}]}, "the bytes before 128 are covered already"),
        ({"trees": [{**STAR, "stop": 100}, {**LINE, "start": 100}]}, "ends at byte 100; borders are multiples of 64"),
        ({"trees": [STAR, {**LINE, "members": ["a", "b", "d"]}]}, "tree 1 names 'd', which is no member"),
        ({"trees": [{**STAR, "parents": ["b", "c", "a"]}]}, "tree 0 has 0 roots"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, plan: Any, words: str) -> None:
    text = written(tmp_path, plan)
    with pytest.raises(ConfigurationError, match=words) as caught:
        EngineConfig(plan=text)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ring", "'ring' is unknown.*a file of trees"),
        ("tree:1", "at least 2 children"),
        ("user", "has no trees; expected.*file:PATH"),
        ("nowhere.yaml", "plan file 'nowhere.yaml' cannot be read"),
        ("file:nowhere", "plan file 'nowhere' cannot be read"),
    ],
)
def test_wrong_words_are_refused_with_the_right_ones(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        EngineConfig(plan=text)


def test_yaml_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"plan.yaml.*: no YAML: "):
        read_plan(written(tmp_path, "trees: [", "plan.yaml"))


def test_ranges_must_cover_the_models_gradients(tmp_path: Path) -> None:
    text = written(tmp_path, {"trees": [STAR, LINE]})
    spec = read_plan(text)
    check_bytes(text, spec, 1000, ((0, 500), (500, 1000)))
    check_bytes("chain", PlanSpec("chain"), 5, ())
    with pytest.raises(ConfigurationError, match=r"plan.json.*ends at byte 1000, but the buffer has 900"):
        check_bytes(text, spec, 900, ())
    assert len(expand(spec, ("a~1", "b~2", "c~3"), 1000, ())) >= 2


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    text = written(tmp_path, {"chunk_nbytes": 4096, "trees": [STAR, LINE]})
    config = EngineConfig.build({}, {"CHAOS_PLAN": text})
    assert config.plan_spec == SPEC
    assert options_for_engine(config).settings.plan == SPEC
    with pytest.raises(ConfigurationError, match="gone"):
        EngineConfig.build({"plan": "file:gone"}, {"CHAOS_PLAN": text})


def test_workers_of_torchrun_find_the_file_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, {"chunk_nbytes": 4096, "trees": [STAR, LINE]})
    monkeypatch.chdir(tmp_path)
    asked: dict[str, Any] = {"endpoint": "127.0.0.1:29500", "run_id": "j", "nodes": (1, 4)}
    for options in (
        read_options(**asked, given={"plan": "plan.json"}, environ={}),
        read_options(**asked, given={}, environ={"CHAOS_PLAN": "file:plan.json"}),
    ):
        monkeypatch.chdir("/")
        assert EngineConfig.build({}, options.environment()).plan_spec == SPEC
        monkeypatch.chdir(tmp_path)
    assert absolute_plan("tree:3") == "tree:3"
    with pytest.raises(ConfigurationError, match=r"plan file '/.*wrong.yaml' cannot be read"):
        read_options(**asked, given={"plan": "wrong.yaml"}, environ={})


def test_a_settings_file_is_checked_too() -> None:
    with pytest.raises(ConfigurationError, match="'ring' is unknown"):
        check_settings(Settings(plan=PlanSpec("ring")))
