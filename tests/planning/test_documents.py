"""Tests that files with unknown or repeated keys are refused with the line number."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.documents import MOST_VALUES, read_json, read_yaml
from chaos_lightning.planning.pipelines.files import read_job
from chaos_lightning.planning.plans import read_plan
from chaos_lightning.planning.quantities import size_nbytes
from chaos_lightning.testing.edge.topology_file import load_topology
from chaos_lightning.testing.faults import FaultPlan

LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20))
"""Some 800 bytes that stand for 9 ** 19 values."""


def test_anchors_that_stand_for_billions_of_values_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=rf"^f:\d+: anchors make this more than {MOST_VALUES:,} values"):
        read_yaml(LAUGHS, "f")


@pytest.mark.parametrize(
    "read",
    [read_job, load_topology, FaultPlan.load, lambda path: read_plan(str(path), 0)],
    ids=["plan", "topology", "fault plan", "trees"],
)
@pytest.mark.parametrize("text", [LAUGHS, "a: &a [*a]\n", f"a: {'9' * 5000}\n"], ids=["laughs", "itself", "digits"])
def test_no_command_makes_them(read: object, text: str, tmp_path: Path) -> None:
    assert callable(read)
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"file\.yaml"):
        read(path)


def test_anchors_that_stand_for_little_are_what_they_say() -> None:
    text = "one: &one {rate: 1e9}\nother:\n  <<: *one\n  delay: 2\nlist: [*one, *one]\n"
    assert read_yaml(text, "f") == {
        "one": {"rate": 1e9},
        "other": {"rate": 1e9, "delay": 2},
        "list": [{"rate": 1e9}, {"rate": 1e9}],
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: {c: 1,\n  c: 2}\n", r"^f:3: the key 'c' is there twice in one mapping \(before in line 2\)"),
        ("? [a, b]\n: 1\n", "^f:1: a key is a list or mapping"),
        ("a: 2026-02-31\n", "^f: a value cannot be read: day is out of range"),
        ("[", "^f:[12]: no YAML: "),
        ("a: 1\n---\nb: 2\n", "^f:2: no YAML: but found another document"),
    ],
)
def test_yaml_is_refused_by_line(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read_yaml(text, "f")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "^f: the key 'a' is there twice"),
        ("{\n1}", "^f:2: no JSON: "),
        (f"[{'9' * 5000}]", "^f: a value cannot be read: "),
        ("[" * 100_000, "^f: nested too deep"),
    ],
)
def test_json_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read_json(text, "f")


@pytest.mark.parametrize("text", ["1e400 GiB", f"{'9' * 5000} B"])
def test_a_size_beyond_all_memory_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="more than any memory"):
        size_nbytes(text)
