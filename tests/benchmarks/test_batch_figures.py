"""Tests what benchmarks.batch concludes from the words of members, and that it notices steps that are not equal."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.batch import Row, compare, shares
from benchmarks.batch_members import SAMPLES
from benchmarks.common import Result
from chaos_lightning.events.events import Record

TITLE = "case"
AMISS = "samples missing or twice in"


def took(name: str, step: int, view: str, samples: list[int], epoch: int = 0) -> Row:
    return {"name": name, "step": step, "view": view, "samples": samples, "epoch": epoch}


def done(step: int, view: str, members: str) -> Record:
    who = [[f"{m}~1", 1.0] for m in members]
    return Record(0.0, 0.0, "a~1", "committed", {"kind": "step", "step": step, "view": view, "contributors": who})


PLAIN = [took("alone", 1, "0.0", [3, 1, 2]), {"name": "alone", "step": 1, "loss": 2.0}]
OURS = [
    took("a", 1, "1.1", [1]),  # an attempt that a death ended
    took("b", 1, "1.1", [2]),
    took("a", 1, "1.2", [1]),
    took("a", 1, "1.2", [2]),
    took("c", 1, "1.2", [3]),
    {"name": "a", "step": 1, "loss": 2.0 + 1e-12},
]


def test_only_attempts_of_the_committed_view_count():
    assert shares(OURS, {1: done(1, "1.2", "ac")}) == {1: {"a": [1, 2], "c": [3]}}
    assert shares(OURS, {1: done(1, "1.1", "ab")}) == {1: {"a": [1], "b": [2]}}
    assert shares(OURS, {1: done(1, "1.2", "a")}) == {1: {"a": [1, 2]}}, "c was out"


def missed(rows: list[Row], plain: list[Row] = PLAIN, view: str = "1.2") -> list[str]:
    result = Result("batch")
    compare(result, TITLE, 1, rows, {1: done(1, view, "ac")}, plain, 1e-10)
    return [f.name.removeprefix(f"{TITLE}: ").partition(",")[0] for f in result.figures if not f.ok]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (OURS, []),
        ([*OURS, took("c", 1, "1.2", [3])], ["steps with other samples", f"{AMISS} 0 epochs and a part"]),
        ([r for r in OURS if r["name"] != "c"], ["steps with other samples"]),
        ([*OURS, {"name": "c", "step": 1, "loss": 2.0 + 1e-8}], ["losses of 1 steps at all members"]),
    ],
)  # fmt: skip
def test_a_step_that_is_not_that_of_one_process_is_seen(rows: list[Row], words: list[str]) -> None:
    assert missed(rows) == words


def test_a_sample_that_an_epoch_lacks_is_seen():
    whole = list(range(SAMPLES))
    later: dict[str, Any] = took("alone", 2, "0.0", [0], epoch=1)
    plain = [took("alone", 1, "0.0", whole), later, {"name": "alone", "step": 1, "loss": 1.0}]
    rows = [took("a", 1, "1.2", whole[1:]), {"name": "a", "step": 1, "loss": 1.0}]
    assert f"{AMISS} 1 epochs and a part" in missed(rows, plain)
