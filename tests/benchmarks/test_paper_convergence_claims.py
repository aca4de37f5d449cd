"""Tests facts that the convergence figures read in event logs, and the paper's claims with the measured results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper.convergence import claims as convergence_claims
from benchmarks.paper.convergence import figures as convergence
from benchmarks.paper.convergence.claims import curve_claims, knowledge_claim, lora_claims
from benchmarks.paper.convergence.curves import Change, Curve
from benchmarks.paper.convergence.figures import Comparison, Schedule
from benchmarks.paper.convergence.training import Run, change_in, contributors_by_step, rewirings, transfer_facts
from benchmarks.paper.figure import FigureResult
from chaos_lightning.events.reader import Record


def curve(*values: float, every: int = 10) -> Curve:
    return Curve(tuple(every * (i + 1) for i in range(len(values))), values)


# ---------------------------------------------------------------------------------------------------- event logs


def event(name: str, node: str, **fields: Any) -> Record:
    return Record(t=0.0, mono=0.0, member=f"{node}~1", name=name, fields={"node": node, **fields})


def committed(step: int, weights: list[float], kind: str = "step") -> Record:
    contributors = [[f"node{i}~{i}", w] for i, w in enumerate(weights)]
    return event("committed", "node1", step=step, kind=kind, contributors=contributors)


def test_who_brought_samples_is_counted_from_the_log() -> None:
    records = [
        committed(1, [16, 16]),
        committed(1, [0, 0], kind="boundary"),
        committed(2, [16, 16, 16]),
        committed(3, [16, 0, 16]),
        event("committed", "node2", step=4, kind="step", contributors=[]),
    ]
    counts = contributors_by_step(records, "node1")
    assert counts == {1: 2, 2: 3, 3: 2}
    with pytest.raises(ValueError, match=r"before steps \[2, 3\]"):
        change_in(counts)
    assert change_in({1: 4, 2: 4, 3: 5}) == 3
    assert change_in({1: 4, 2: 4}) == 0


def test_trees_that_changed_before_the_fifth_node_did_are_told_of() -> None:
    def view(t: float, members: list[str], reason: str) -> Record:
        found = event("view", "default", members=members, reason=reason)
        return replace(found, t=t)

    records = [
        view(1.0, ["a~1", "b~2"], "founded"),
        view(3.0, ["a~1", "b~2"], "a link returned"),
        replace(committed(7, [16, 0]), t=5.0),
        view(4.0, ["a~1"], "b~2 leaves"),
        view(6.0, ["a~1"], "a link was slow"),
    ]
    assert rewirings(records, "node1", 7) == ["a link returned"]
    assert rewirings(records, "node1", 0) == ["a link returned", "a link was slow"]


def test_what_a_join_moved_is_read_from_the_newcomers_log() -> None:
    records = [
        event("observing", "node3", seq=1, head="h"),
        event("pull_done", "node3", nbytes=300, skipped=1000, hash="a", seconds=0.1),
        event("pull_done", "node2", nbytes=7, skipped=7, hash="z", seconds=0.1),
        event("replayed", "node3", seq=5, step=5, steps=4, nbytes=80),
        event("pull_done", "node3", nbytes=0, skipped=1300, hash="b", seconds=0.1),
    ]
    facts = transfer_facts(records, "node3")
    assert (facts["way"], facts["log_nbytes"], facts["replayed"]) == ("replay", 80, 4)
    assert [p["nbytes"] for p in facts["pulls"]] == [300, 0]


# ---------------------------------------------------------------------------------------------------- claims

SCHEDULE = Schedule(passes=8, change=4, per_pass=1, after=2.0, last=2.0)
LOW = (50.0, 60.0, 65.0, 70.0, 70.2, 70.0, 70.3, 70.1)
HIGH = (52.0, 64.0, 69.0, 74.0, 74.0, 73.8, 74.1, 74.1)


def comparison(change: Change, first: tuple[float, ...], second: tuple[float, ...], changing: tuple[float, ...]) -> Any:
    runs = []
    for values, how in ((first, ""), (second, ""), (changing, change)):
        run = Run(how, curve(*values), curve(*values), equal=True)  # type: ignore[arg-type]
        run.changed = 42 if how else 0
        runs.append([run])
    return Comparison("vgg", change, 10, SCHEDULE, *runs).as_json()


def agreements(change: Change, *curves: tuple[float, ...]) -> list[bool]:
    return [c.agrees for c in curve_claims([comparison(change, *curves)], change)]


def test_a_curve_that_moves_over_smoothly_agrees() -> None:
    assert agreements("out", LOW, HIGH, (*LOW[:4], 71.5, 73.0, 73.9, 74.0)) == [True, True, True]
    assert agreements("in", HIGH, LOW, (*HIGH[:4], 73.8, 73.0, 72.5, 71.8)) == [True, True, False]


def test_a_dip_after_the_change_disagrees() -> None:
    assert agreements("out", LOW, HIGH, (*LOW[:4], 60.0, 73.0, 73.9, 74.0)) == [True, True, False]


def test_the_same_to_the_last_bit_is_said_of_states_alone() -> None:
    def row(states: dict[int, str]) -> dict[str, Any]:
        runs = [
            Run("", curve(*LOW), curve(*LOW)),
            Run("", curve(*HIGH), curve(*HIGH)),
            Run("out", curve(*LOW), curve(*LOW)),
        ]
        runs[0].states, runs[2].states, runs[2].changed = {10: "a", 40: "b", 50: "c"}, states, 42
        return Comparison("vgg", "out", 10, SCHEDULE, *([r] for r in runs)).as_json()

    for states, identical in (({10: "a", 40: "b", 50: "x"}, True), ({10: "a", 40: "x"}, False), ({}, False)):
        found = row(states)
        assert found["identical"] is identical
        assert ("to the last bit" in curve_claims([found], "out")[0].ours) is identical


def test_changed_trees_are_the_reason_for_other_bits() -> None:
    found = comparison("in", HIGH, LOW, (*HIGH[:4], 73.8, 73.0, 72.5, 71.8)) | {"rewired": ["a link returned"]}
    assert found["unexplained"]
    assert "do not tell" in curve_claims([found], "in")[0].why
    assert "a link returned" in curve_claims([found | {"unexplained": False}], "in")[0].why
    assert "a link returned" not in curve_claims([found | {"identical": True}], "in")[0].why


def test_a_pair_is_explained_by_its_own_trees_alone() -> None:
    def run(change: Change, state: str, *rewired: str) -> Run:
        return Run(change, states={10: state}, changed=42 if change else 0, rewired=list(rewired))

    two = Comparison(
        "vgg", "in", 10, SCHEDULE, [run("", "a"), run("", "b")], [], [run("in", "x", "why"), run("in", "b")]
    )
    assert not two.identical()
    assert not two.unexplained()
    two.changing[1].states[10] = "y"
    assert two.unexplained()


def test_a_curve_that_stays_disagrees() -> None:
    assert agreements("out", LOW, HIGH, LOW) == [True, False, True]


def test_a_curve_that_was_elsewhere_before_disagrees() -> None:
    early = (50.0, 60.0, 65.0, 73.0, 73.0, 73.5, 73.9, 74.0)
    assert agreements("out", LOW, HIGH, early)[0] is False


def test_what_is_retained_is_measured_on_the_leavers_kinds() -> None:
    kept = comparison("in", HIGH, LOW, (*HIGH[:4], 73.8, 73.0, 72.5, 71.8))
    lost = comparison("in", HIGH, LOW, (*HIGH[:4], 70.0, 69.0, 69.0, 69.0))
    assert knowledge_claim([kept]).agrees
    assert not knowledge_claim([kept, lost]).agrees


def test_a_repetition_of_the_picture_needs_plain_data_alone(tmp_path: Path) -> None:
    row = comparison("out", LOW, HIGH, (*LOW[:4], 71.5, 73.0, 73.9, 74.0))
    result = FigureResult("11", "title", "how", [], {"change": "out", "models": [row]})
    again = FigureResult.from_json(result.as_json())
    convergence.plot_fig11(again, tmp_path / "fig11.png")
    assert (tmp_path / "fig11.png").read_bytes()[:4] == b"\x89PNG"


def transfer(moved_nbytes: int, *, skipped: int = 1000, base_equal: bool = True) -> dict[str, Any]:
    return {
        "way": "replay",
        "pulls": [{"nbytes": moved_nbytes, "skipped": skipped, "hash": "h"}, {"nbytes": 0, "skipped": 0, "hash": "h"}],
        "log_nbytes": 0,
        "trained_nbytes": 100,
        "optimizer_nbytes": 208,
        "buffers_nbytes": 0,
        "frozen_nbytes": 1000,
        "base_equal": base_equal,
    }


@pytest.mark.parametrize(
    ("join", "agrees"),
    [
        (transfer(308), True),
        (transfer(1308, skipped=0), False),
        (transfer(300), False),
        (transfer(308, base_equal=False), False),
    ],
)
def test_only_what_learns_may_move(join: dict[str, Any], agrees: bool) -> None:
    assert convergence_claims.only_learned_moved(join) is agrees
    assert [c.agrees for c in lora_claims([transfer(308), join], None)] == [agrees]
    full = {"held": join, "bare": transfer(1308, skipped=0)}
    assert [c.agrees for c in lora_claims([transfer(308)], full)] == [True, agrees]


def test_a_figure_stops_repeating_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int, str]] = []

    def quick_run(kind: str, scale: Any, seed: int, nodes: int, change: str) -> Run:
        done.append((kind, nodes, change))
        values = HIGH if nodes == 5 else LOW
        return Run(change, curve(*values), curve(*values), changed=41, equal=True)  # type: ignore[arg-type]

    monkeypatch.setattr(convergence, "run_of", quick_run)
    monkeypatch.setattr(convergence, "problem_of", lambda kind, scale, seed: _Fake())
    monkeypatch.setattr(convergence, "image_schedule", lambda scale: SCHEDULE)
    scale = convergence.Scale(quick=False, budget_s=-1.0)
    found, repetitions = convergence.compare("12", ["vgg"], "in", scale, began=0.0)
    assert repetitions == 1
    assert done == [("vgg", 5, ""), ("vgg", 4, ""), ("vgg", 5, "in")]
    assert found[0].levels()[:2] == pytest.approx((74.1, 70.2))


class _Fake:
    steps_per_pass = 10
