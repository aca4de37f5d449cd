"""A job in pipelines as its logs tell it: the audit of sums and parts, the board, the report and the status."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from observe_synthetic import Script
from rich.console import Console

from chaos_lightning.events.reader import read_events
from chaos_lightning.observe import audit as auditing
from chaos_lightning.observe import report
from chaos_lightning.observe.render import draw, from_status, from_timeline
from chaos_lightning.observe.status import _show
from chaos_lightning.observe.timeline import Timeline

ROUTES = [["a~1", "b~1"], ["c~1", "d~1"]]
PLAN = {"layers": {"a~1": [[0, 2]], "b~1": [[2, 4]], "c~1": [[0, 2]], "d~1": [[2, 4]]}, "routes": ROUTES, "detours": 0}
AFTER = {
    "layers": {"a~1": [[0, 2]], "b~1": [[2, 4]], "c~1": [[0, 2], [2, 3]]},
    "routes": [["a~1", "b~1"], ["c~1", ""]],
    "detours": 2,
}
OWNS = {"a~1": [[0, 2], [4, 5]], "b~1": [[2, 5]], "c~1": [[0, 2], [4, 5]], "d~1": [[2, 5]]}
SUMS = {
    "a~1": [[0, 2, [[0, 2]]]],
    "b~1": [[2, 4, [[0, 2]]]],
    "c~1": [[0, 2, [[2, 4]]]],
    "d~1": [[2, 4, [[2, 4]]]],
}


def choose(run: Script, plan: dict[str, Any], way: str, **more: Any) -> None:
    candidates = [{"name": way, "step_s": 0.09, "transition_s": 0.15, "samples": 1e4, "lacks": ""}]
    run.say(
        "", "pipelines", file=f"scheduler-s-{run.pid}.jsonl", view=run.view_id, reason="the best that fits",
        candidates=candidates, chosen=0, **plan, step_s=0.09, lost_layers=[], least_members=None, **more,
    )  # fmt: skip


def own(run: Script, owns: dict[str, list[Any]]) -> None:
    """The view's events tell what each member owns."""
    for lines in run.lines.values():
        for line in lines:
            if line["name"] == "view" and line["id"] == run.view_id:
                line["owns"] = owns[line["member"]]


def sums(run: Script, header: str, covered: dict[str, list[Any]]) -> None:
    for lines in run.lines.values():
        for line in lines:
            if line["name"] == "committed" and line["header"] == header:
                line |= {"micro_batches": [[0, 4]], "coverage": covered[line["member"]]}


def made() -> Script:
    """Two pipelines of two stages; d is lost, its work goes to b, and layer 2 moves to c."""
    run = Script()
    run.found(["a", "b", "c", "d"])
    own(run, OWNS)
    choose(run, PLAN, "first: move", shape="2 x 2", moved_nbytes=0, busy=dict.fromkeys(OWNS, 0.6))
    for _ in range(3):
        sums(run, run.slot(), SUMS)
    run.say("", "death", file=f"scheduler-s-{run.pid}.jsonl", evidence="its stream is closed")["member"] = "d~1"
    run.view(["a~1", "b~1", "c~1"], "d~1: dead")
    own(run, OWNS | {"c~1": [[0, 3], [4, 5]]})
    choose(run, AFTER, "adaptive: reroute", shape="2 x 2, 1 vacant", moved_nbytes=1000, busy={"a~1": 0.5, "b~1": 0.9})
    for member in ("a~1", "b~1", "c~1"):
        run.say(member, "redo", view=run.view_id, base=run.seq, reason="d~1: dead")
    run.now += 0.1
    run.say("c~1", "part_pulled", part="layer.2", number=2, seq=run.seq, nbytes=1000, seconds=0.02, hash="5eed")
    after = {"a~1": SUMS["a~1"], "b~1": [[2, 4, [[0, 4]]]], "c~1": SUMS["c~1"]}
    for _ in range(4):
        sums(run, run.slot(), after)
    return run


def findings(run: Script, where: Path) -> dict[int, auditing.Finding]:
    return {f.point: f for f in auditing.audit(run.write(where))}


def test_sums_and_parts_of_a_good_run_hold(tmp_path: Path) -> None:
    found = findings(made(), tmp_path)
    assert found[3].verdict == auditing.OK, found[3]
    assert "each micro-batch once in each of 4 layers, in 7 slots" in found[3].text
    assert found[4].verdict == auditing.OK, found[4]
    assert "1 parts of the state were got and proved" in found[4].text


def commits(run: Script, member: str) -> list[dict[str, Any]]:
    return [x for lines in run.lines.values() for x in lines if x["name"] == "committed" and x["member"] == member]


def twice(run: Script) -> None:
    commits(run, "b~1")[1]["coverage"] = [[2, 4, [[0, 3]]]]


def missing(run: Script) -> None:
    commits(run, "b~1")[1]["coverage"] = [[2, 3, [[0, 2]]], [3, 4, [[0, 1]]]]


def foreign(run: Script) -> None:
    commits(run, "c~1")[1]["coverage"] = [[0, 2, [[2, 5]]]]


def otherwise(run: Script) -> None:
    commits(run, "c~1")[1]["micro_batches"] = [[0, 3]]


def unpulled(run: Script) -> None:
    for lines in run.lines.values():
        lines[:] = [x for x in lines if x["name"] != "part_pulled"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (twice, "slot 2, layers 2 to 3: micro-batches [2, 3) are in two sums"),
        (missing, "slot 2, layer 3: micro-batches [1, 2) are in no sum"),
        (foreign, "slot 2, layers 0 to 1: micro-batches [4, 5) are none of this slot's"),
        (otherwise, "slot 2 has micro-batches [0, 4) by a~1, and [0, 3) by c~1"),
        (
            unpulled,
            "c~1 contributed to slot 4 and owned 1 parts, [2, 3), that it had neither owned before nor got",
        ),
    ],
)
def test_what_sums_hold_and_who_has_parts_is_judged(
    tmp_path: Path, change: Callable[[Script], None], words: str
) -> None:
    run = copy.deepcopy(made())
    change(run)
    bad = auditing.violations(auditing.audit(run.write(tmp_path)))
    assert any(words in line for line in bad), bad


def test_parts_that_were_read_from_a_file_are_had(tmp_path: Path) -> None:
    run = made()
    for lines in run.lines.values():
        for line in lines:
            if line["name"] == "part_pulled":
                line.update(name="resumed_kept", step=3, keeper="c~0", path="f", parts=[[2, 3]])
    assert not [line for line in auditing.violations(auditing.audit(run.write(tmp_path))) if "neither" in line]


def test_a_sum_that_nobody_tells_is_none_that_is_missing(tmp_path: Path) -> None:
    """The log of a member that was killed ends before its commit."""
    run = made()
    for lines in run.lines.values():
        lines[:] = [x for x in lines if not (x["name"] == "committed" and x["member"] == "d~1" and x["seq"] == 3)]
    assert not [line for line in auditing.violations(auditing.audit(run.write(tmp_path))) if "micro-batches" in line]


def shown(what: Any, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_the_board_shows_pipelines_bubbles_reruns_and_who_runs_what(tmp_path: Path) -> None:
    run = made()
    timeline = Timeline.of(read_events(run.write(tmp_path)))
    text = shown(draw(from_timeline(timeline, run.now + 1)))
    for words in ("pipelines 2 x 2, 1 vacant", "step estimated 90 ms", "bubbles 30%", "reruns 1"):
        assert words in " ".join(text.split()), text
    assert "layers 0-2" in text
    assert "layers 2-3" in text


def test_the_report_shows_each_choice_with_what_was_estimated_and_measured(tmp_path: Path, unpictured: None) -> None:
    page = report.write_report(made().write(tmp_path)).page.read_text()
    assert "<h2>Pipelines</h2>" in page
    rows = [r for r in page.split("<tr>") if "adaptive: reroute" in r]
    assert len(rows) == 1
    for words in ("2 x 2, 1 vacant, 2 detours", "90 ms", "0.1 s", "30%", "1000 B in 20 ms", ">1<"):
        assert words in rows[0], rows[0]
    assert "a~1 <span class=small>layers 0-1</span> &rarr; b~1" in page
    assert "vacant" in page


def test_a_report_of_a_job_without_pipelines_has_none(tmp_path: Path, unpictured: None) -> None:
    run = Script()
    run.found(["a"])
    run.slot()
    assert "<h2>Pipelines</h2>" not in report.write_report(run.write(tmp_path)).page.read_text()


def test_the_status_tells_the_estimated_and_the_measured_step(capsys: pytest.CaptureFixture[str]) -> None:
    member = {"id": "a~1", "standing": "member", "step": 3, "step_time_s": 0.12, "runs": "layers 0-1"}
    machine = {
        "phase": "running", "view": "1.1", "members": [member], "others": [], "links": [], "pipelines": "2 x 2",
        "estimated_step_s": 0.09,
    }  # fmt: skip
    facts = {"job": "j", "endpoint": "h:1", "term": 1, "min_nodes": 1, "max_nodes": 2, "machine": machine}
    _show(facts)
    said = " ".join(capsys.readouterr().out.split())
    assert "pipelines: 2 x 2 (pipelines x stages); a step is estimated at 90 ms, measured 0.12 s" in said
    assert ("step estimated", "90 ms") in from_status(facts).figures
