"""A job in pipelines, seen from its logs: the audit of sums and state parts, the live board, the report and the
status.
"""

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
from chaos_lightning.machine.units import amount
from chaos_lightning.observe import audit as auditing
from chaos_lightning.observe import folds, report
from chaos_lightning.observe.exporter import RunTotals
from chaos_lightning.observe.outer.report import write_reports
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
    """Adds to the events of the present view the layers that each member has."""
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
    """Returns a run of two pipelines with two stages each; d is lost, its work goes to b, and layer 2 moves to c."""
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
    """A member's gradient sums are not reported as missing if its log ends before the commit, as it was killed."""
    run = made()
    for lines in run.lines.values():
        lines[:] = [x for x in lines if not (x["name"] == "committed" and x["member"] == "d~1" and x["seq"] == 3)]
    assert not [line for line in auditing.violations(auditing.audit(run.write(tmp_path))) if "micro-batches" in line]


def joined_by_parts() -> Script:
    """Returns a run that a fifth process joins: it pulls the state in three parts, and one more in the next view."""
    run = made()
    run.welcome("e~2", run.process("e"), "joiner")
    head = run.slot("boundary")
    members = ["a~1", "b~1", "c~1", "e~2"]
    owns = OWNS | {"c~1": [[0, 3], [4, 5]], "e~2": [[2, 5]]}
    run.view(members, "e~2 joins", ("e~2",))
    own(run, owns)
    for number, (nbytes, donor) in enumerate([(1000, "b~1"), (2000, "c~1"), (4, "a~1")], 2):
        run.now += 0.25
        about = {"part": f"layer.{number}", "number": number, "nbytes": nbytes, "by_source": {donor: nbytes}}
        run.say("e~2", "part_pulled", **about, seq=run.seq, seconds=0.2, hash="5eed")
    run.say("e~2", "joined", role="joiner", seq=run.seq, step=run.step)
    for member in ("b~1", "e~2"):
        run.say(member, "state_hash", seq=run.seq, head=f"{head}/layer.3", hash="5eed")
    run.slot(took=0.6)
    run.view(members, "layers move")
    own(run, owns | {"e~2": [[1, 5]]})
    run.now += 0.2
    about = {"part": "layer.1", "number": 1, "nbytes": 500, "by_source": {"a~1": 500}}
    run.say("e~2", "part_pulled", **about, seq=run.seq, seconds=0.1, hash="5eed")
    run.slot()
    return run


def test_who_came_in_by_parts_has_joined(tmp_path: Path, unpictured: None) -> None:
    records = list(read_events(joined_by_parts().write(tmp_path)))
    timeline = Timeline.of(records)
    (join,) = folds.joins(timeline)
    assert (join.member, join.nbytes, join.seconds) == ("e~2", 3004, pytest.approx(0.6))
    assert join.sources == (("c~1", 2000, 0.2), ("b~1", 1000, 0.2), ("a~1", 4, 0.2))
    assert join.pull_done is not None
    assert join.contributed is not None
    assert join.pause > 0.3
    assert "; 1 joins;" in report.summary(timeline)
    page = write_reports(tmp_path)[0].page.read_text()
    (row,) = [r for r in page.split("<tr>") if f"c {amount(2000)}" in r]
    assert "not done" not in row
    assert "then 500 B" in row


def test_bytes_of_parts_count_as_those_of_a_state_until_a_newcomer_is_in(tmp_path: Path) -> None:
    totals = RunTotals()
    for record in read_events(joined_by_parts().write(tmp_path)):
        totals.take(record)
    assert totals.values["state_bytes_total"][()] == 3004


def test_a_newcomer_that_never_came_in_has_not_joined(tmp_path: Path) -> None:
    run = joined_by_parts()
    for lines in run.lines.values():
        cut = [i for i, x in enumerate(lines) if x["name"] == "joined" and x["member"] == "e~2"]
        del lines[cut[0] if cut else len(lines) :]
    timeline = Timeline.of(read_events(run.write(tmp_path)))
    assert timeline.lives["e~2"].pulls[0].nbytes == 3004
    assert "; 0 joins;" in report.summary(timeline)


def test_who_has_all_from_a_file_has_joined(tmp_path: Path) -> None:
    run = joined_by_parts()
    for lines in run.lines.values():
        for line in lines:
            if line["name"] == "part_pulled" and line["member"] == "e~2":
                line.update(name="resumed_kept", step=3, keeper="e~0", path="f", parts=[[2, 5]], nbytes=0)
    assert "; 1 joins;" in report.summary(Timeline.of(read_events(run.write(tmp_path))))


def test_the_audit_says_what_it_compared_of_joiners_that_came_by_parts(tmp_path: Path) -> None:
    found = findings(joined_by_parts(), tmp_path)[4]
    assert found.verdict == auditing.OK, found
    assert "1 joiners came in by parts, and parts of 1 of them were compared with those of other owners" in found.text
    assert "5 parts of the state were got and proved" in found.text
    assert "0 of 0" not in found.text


def test_a_recovery_begins_with_the_suspicion_that_led_to_it(tmp_path: Path, unpictured: None) -> None:
    """A recovery's time begins with the suspicion that led to a removal, not with earlier ones that were cleared; time
    below min_nodes is counted apart.
    """
    run = Script()
    run.found(["a", "b", "c"])
    scheduler = f"scheduler-s-{run.pid}.jsonl"
    run.say("", "suspect", file=scheduler, evidence="silent")["member"] = "c~1"
    for _ in range(30):
        run.slot()
    run.now += 0.3
    for what in ("suspect", "death"):
        run.say("", what, file=scheduler, evidence="silent")["member"] = "c~1"
    for member in ("a~1", "b~1"):
        run.say(member, "notice", text="training waits: 2 of min_nodes=3 nodes are here", waiting=True)
    run.now += 4.0
    for member in ("a~1", "b~1"):
        run.say(member, "notice", text="enough nodes are here", waiting=False)
    run.view(["a~1", "b~1"], "c~1: dead")
    run.slot(took=1.0)
    timeline = Timeline.of(read_events(run.write(tmp_path)))
    (recovery,) = folds.recoveries(timeline)
    assert recovery.seconds == pytest.approx(5.0, abs=0.01)
    assert recovery.waited == pytest.approx(4.0, abs=0.01)
    assert "recovered within 5 s (4 s of it waiting)" in report.summary(timeline)


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
    page = write_reports(made().write(tmp_path))[0].page.read_text()
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
    assert "<h2>Pipelines</h2>" not in write_reports(run.write(tmp_path))[0].page.read_text()


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


def dead_and_leaving() -> dict[str, Any]:
    """Returns a leader's facts of a job in which one member has died and one is leaving."""
    why = "its control stream is closed, and its link to vm-0-2334~2000001: closed (Connection reset by peer)"
    usual = {
        "id": "", "host": "a-host-with-a-long-name.example", "standing": "member", "connected": True, "view": "3.2",
        "seq": 4711, "step": 3012, "step_time_s": 0.62, "loaded": True, "way": "", "progress": "", "leaving": "",
        "dead": "", "silent_s": 0.1, "speed": 0.97,
    }  # fmt: skip
    members = [
        usual | {"id": "vm-0-2334~2000001", "runs": "layers 0-2"},
        usual | {"id": "vm-0-2338~2000002", "runs": "layers 3-5", "dead": why, "connected": False, "silent_s": 12.5},
        usual | {"id": "vm-0-2335~2000003", "runs": "stands by", "leaving": "Ctrl+C"},
    ]
    machine = {"phase": "preparing", "view": "3.1", "members": members, "others": [], "links": []}
    return {"job": "j", "endpoint": "h:1", "term": 3, "min_nodes": 2, "max_nodes": 4, "machine": machine}


@pytest.mark.parametrize("width", [80, 0])
def test_who_is_dead_and_why_takes_no_room_from_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """The status prints long reasons of dead and leaving members so that other columns keep their room, on 80 columns
    and into a pipe.
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    facts = dead_and_leaving()
    _show(facts)
    lines = capsys.readouterr().out.splitlines()
    names = [member["id"] for member in facts["machine"]["members"]]
    one, two, three = (next(x for x in lines if x.startswith(f"{name} ")) for name in names)
    for line, words in ((one, "member 3012 layers 0-2 0.97"), (two, "dead 3012 layers 3-5"), (three, "leaving 3012")):
        assert set(words.split()) <= set(line.split()), line
    assert ("a-host" in one) == (not width)
    if width:
        assert max(map(len, lines)) <= width
    said = " ".join(" ".join(lines).split())
    assert "vm-0-2338~2000002: dead: its control stream is closed, and its link to vm-0-2334~2000001: closed (" in said
    assert lines[-1] == "vm-0-2335~2000003: leaving: Ctrl+C"
    if not width:
        assert lines[-2].endswith("closed (Connection reset by peer)")
