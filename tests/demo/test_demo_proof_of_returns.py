"""Tests the proof that workers and states come back, on hand-written logs: each line holds, and fails for each
reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chaos_lightning.testing.demo.members import Roles, prove
from chaos_lightning.testing.demo.proof import Check, Evidence

ROLES = Roles(
    founders=("edge-1", "edge-3"),
    joins="edge-4",
    killed="edge-2",
    frozen="edge-3",
    leaves="edge-1",
    several="edge-3",
    last="edge-4",
    again=("edge-4", "edge-1"),
)
CODES: dict[str, int | None] = {"edge-1 before": 0, "edge-1": 0, "edge-3": 0, "edge-4 before": 0, "edge-4": 0}
SIBLING, VICTIM, BACK = "edge-3-0~2", "edge-3-1~3", "edge-3-1~4"
Lines = list[dict[str, Any]]


@dataclass
class Written:
    """A made-up run: its log lines in order of time, each with the name of its file."""

    lines: Lines = field(default_factory=list)
    seq: int = 0
    step: int = 0
    t: float = 1000.0

    def say(self, file: str, name: str, member: str = "", node: str = "", **fields: Any) -> None:
        self.t += 0.1
        node = node or member.partition("~")[0]
        self.lines.append({"file": file, "t": self.t, "mono": self.t, "member": member, "node": node, "name": name})
        self.lines[-1] |= fields

    def opens(self, file: str, member: str, pid: int, role: str) -> None:
        self.say(file, "opened", node=member.partition("~")[0], pid=pid, role="member")
        self.say(file, "welcomed", member, role=role)
        self.say(file, "joined", member, role=role, seq=self.seq, step=self.step)

    def commits(self, count: int, kind: str = "step", **by: str) -> None:
        """Logs that these members, given as file=member, commit `count` slots."""
        for _ in range(count):
            self.seq += 1
            self.step += kind == "step"
            who = [[member, 1.0] for member in by.values()] if kind == "step" else []
            for file, member in by.items():
                common = {"seq": self.seq, "kind": kind, "step": self.step, "contributors": who, "view": "1.1"}
                hashes = {"header": f"h{self.seq}", "prev": f"h{self.seq - 1}", "spent": [], "ledger": []}
                self.say(file, "committed", member, **common, **hashes)

    def founds(self, reason: str, **fields: Any) -> None:
        self.say("scheduler-default-1.jsonl", "view", node="default", reason=reason, **fields)

    def prove(self, folder: Path) -> dict[str, Check]:
        """Writes the logs and returns the proof's four lines about workers and states that come back, by short
        names.
        """
        events = folder / "events"
        events.mkdir()
        for line in self.lines:
            words = {key: value for key, value in line.items() if key != "file"}
            with (events / line["file"]).open("a") as file:
                file.write(json.dumps(words) + "\n")
        found = prove(Evidence(folder, CODES), ROLES)
        words_of = {"sibling": "its sibling trains on", "worker": "agent starts that worker", "kept": "the last member"}
        words_of["resumed"] = "the job goes on at that step"
        return {key: next(c for c in found if words in c.what) for key, words in words_of.items()}


def one_worker_dies_and_all_leave() -> Written:
    run = Written()
    run.say("scheduler-default-1.jsonl", "opened", node="default", role="scheduler", pid=10)
    run.say("scheduler-default-1.jsonl", "scheduler_started", node="default", term=1)
    run.opens("member-b.jsonl", SIBLING, 21, "founder")
    run.founds("founded by edge-3-0~2", id="1.1", members=[SIBLING])
    run.opens("member-c.jsonl", VICTIM, 22, "joiner")
    run.commits(3, **{"member-b.jsonl": SIBLING, "member-c.jsonl": VICTIM})
    run.say("harness-demo-1.jsonl", "opened", node="demo", role="harness", pid=9)
    run.say("harness-demo-1.jsonl", "fault_injected", node="edge-3-1", kind="sigkill", pid=22)
    run.say("scheduler-default-1.jsonl", "death", VICTIM, evidence="its control stream is closed")
    run.commits(4, **{"member-b.jsonl": SIBLING})
    run.say("member-d.jsonl", "opened", node="edge-3-1", role="member", pid=23)
    run.say("member-d.jsonl", "welcomed", BACK, role="joiner")
    run.say("member-d.jsonl", "pull_started", BACK, seq=7, head="h7", sources=[SIBLING])
    run.say("member-d.jsonl", "pull_done", BACK, nbytes=100, skipped=0, seconds=0.1, hash="x")
    run.say("member-d.jsonl", "joined", BACK, role="joiner", seq=7, step=7)
    run.commits(3, **{"member-b.jsonl": SIBLING, "member-d.jsonl": BACK})
    run.opens("member-e.jsonl", "edge-4-0~5", 24, "joiner")
    for file, member in (("member-b.jsonl", SIBLING), ("member-d.jsonl", BACK)):
        run.say(file, "left", member, reason="asked")
    run.commits(2, **{"member-e.jsonl": "edge-4-0~5"})
    run.say("member-e.jsonl", "state_hash", "edge-4-0~5", seq=13, step=12, head="h13", hash="equal")
    run.say("member-e.jsonl", "kept", "edge-4-0~5", step=12, seq=13, head="h13", path="x")
    run.say("scheduler-default-1.jsonl", "kept", "edge-4-0~5", step=12, view="1.1")
    del run.lines[-1]["node"]  # so a scheduler tells of members
    run.say("member-e.jsonl", "left", "edge-4-0~5", reason="asked")
    run.say("scheduler-default-1.jsonl", "scheduler_ended", node="default", reason="SIGTERM")
    run.say("scheduler-default-2.jsonl", "opened", node="default", role="scheduler", pid=11)
    run.say("scheduler-default-2.jsonl", "scheduler_started", node="default", term=2)
    run.founds("founded again by edge-4-0~9; from the state that edge-4-0~5 kept at step 12", members=["edge-4-0~9"])
    run.say("member-f.jsonl", "opened", node="edge-4-0", role="member", pid=25)
    run.say("member-f.jsonl", "welcomed", "edge-4-0~9", role="founder")
    run.commits(1, kind="boundary", **{"member-f.jsonl": "edge-4-0~9"})
    run.say("member-f.jsonl", "state_hash", "edge-4-0~9", seq=13, step=12, head="h13", hash="equal")
    run.say("member-f.jsonl", "resumed_kept", "edge-4-0~9", step=12, seq=13, keeper="edge-4-0~5", path="x")
    run.opens("member-g.jsonl", "edge-1-0~10", 26, "joiner")
    run.commits(3, **{"member-f.jsonl": "edge-4-0~9", "member-g.jsonl": "edge-1-0~10"})
    return run


def the(run: Written, name: str, member: str = "", nth: int = 0) -> dict[str, Any]:
    return [x for x in run.lines if x["name"] == name and x["member"] == member][nth]


def test_all_four_lines_hold_over_a_run_that_went_well(tmp_path: Path) -> None:
    checks = one_worker_dies_and_all_leave().prove(tmp_path)
    assert {key: check.found for key, check in checks.items() if not check.ok} == {}
    assert "process 21 was in 5 of 5 steps until the worker was back; none lost; 0 foundings" in checks["sibling"].found
    assert "process 23 instead of 22" in checks["worker"].found
    assert "edge-4-0~5 at step 12; it ended as 'left'" in checks["kept"].found
    assert "at step 12; state hash equal and then equal; next step 13" in checks["resumed"].found


def sibling_misses_a_step(run: Written) -> None:
    mine = [x for x in run.lines if x["name"] == "committed" and x["seq"] == 5]
    for line in mine:
        line["contributors"], line["member"], line["node"] = [["edge-9-0~9", 1.0]], "edge-9-0~9", "edge-9-0"


def sibling_comes_anew(run: Written) -> None:
    at = run.lines.index(the(run, "death", VICTIM))
    run.lines.insert(at + 1, {**the(run, "joined", SIBLING), "t": run.lines[at]["t"], "member": "edge-3-0~8"})


def a_step_is_lost(run: Written) -> None:
    for line in [x for x in run.lines if x["name"] == "committed" and x["seq"] > 4]:
        line["step"] += 1


def founded_meanwhile(run: Written) -> None:
    at = run.lines.index(the(run, "death", VICTIM))
    view = next(x for x in run.lines if x["name"] == "view")
    run.lines.insert(at + 1, {**view, "t": run.lines[at]["t"], "id": "1.2", "reason": "founded again by edge-3-0~2"})


def never_back(run: Written) -> None:
    run.lines = [x for x in run.lines if x["file"] != "member-d.jsonl"]


def same_process(run: Written) -> None:
    """Changes the logs so that a worker seems to have been excluded and to have rejoined, without a new process."""
    run.lines = [x for x in run.lines if not (x["name"] == "opened" and x.get("pid") == 23)]
    for line in run.lines:
        line["file"] = "member-c.jsonl" if line["file"] == "member-d.jsonl" else line["file"]


def nothing_kept(run: Written) -> None:
    run.lines = [x for x in run.lines if x["name"] != "kept"]


def kept_at_an_older_step(run: Written) -> None:
    the(run, "kept", "edge-4-0~5")["step"] = 11


def somebody_else_was_there(run: Written) -> None:
    for line in [x for x in run.lines if x["name"] == "committed" and x["seq"] == 12]:
        line["contributors"].append([BACK, 1.0])
        run.lines.insert(run.lines.index(line), {**line, "member": BACK, "file": "member-d.jsonl"})
        return


def scheduler_stays(run: Written) -> None:
    run.lines.remove(the(run, "scheduler_ended"))


def put_out(run: Written) -> None:
    the(run, "left", "edge-4-0~5")["name"] = "fenced"


def nobody_resumes(run: Written) -> None:
    run.lines.remove(the(run, "resumed_kept", "edge-4-0~9"))


def from_another_step(run: Written) -> None:
    the(run, "resumed_kept", "edge-4-0~9")["step"] = 0


def another_state(run: Written) -> None:
    the(run, "state_hash", "edge-4-0~9")["hash"] = "other"


def no_hash(run: Written) -> None:
    run.lines.remove(the(run, "state_hash", "edge-4-0~9"))


def at_step_one(run: Written) -> None:
    """Changes the logs so that the job, when it resumes, begins at step one again."""
    for line in [x for x in run.lines if x["name"] == "committed" and x["seq"] > 13]:
        line["step"] -= 12


def founded_from_nothing(run: Written) -> None:
    view = next(x for x in reversed(run.lines) if x["name"] == "view")
    view["reason"] = "founded again by edge-4-0~9; the state that it had (at step 12 or later) is lost"


def one_stays_away(run: Written) -> None:
    run.lines = [x for x in run.lines if x["file"] != "member-g.jsonl"]
    for line in run.lines:
        line["contributors"] = [x for x in line.get("contributors", ()) if x[0] != "edge-1-0~10"]


@pytest.mark.parametrize(
    ("tamper", "fails"),
    [
        (sibling_misses_a_step, {"sibling"}),
        (sibling_comes_anew, {"sibling"}),
        (a_step_is_lost, {"sibling"}),
        (founded_meanwhile, {"sibling", "resumed"}),
        (never_back, {"sibling", "worker"}),
        (same_process, {"worker"}),
        (nothing_kept, {"kept", "resumed"}),
        (kept_at_an_older_step, {"kept", "resumed"}),
        (somebody_else_was_there, {"kept"}),
        (scheduler_stays, {"kept"}),
        (put_out, {"kept"}),
        (nobody_resumes, {"resumed"}),
        (from_another_step, {"resumed"}),
        (another_state, {"resumed"}),
        (no_hash, {"resumed"}),
        (at_step_one, {"resumed"}),
        (founded_from_nothing, {"resumed"}),
        (one_stays_away, {"resumed"}),
    ],
)
def test_each_line_fails_for_each_of_its_reasons(
    tmp_path: Path, tamper: Callable[[Written], None], fails: set[str]
) -> None:
    run = one_worker_dies_and_all_leave()
    tamper(run)
    checks = run.prove(tmp_path)
    bad = {key for key, check in checks.items() if not check.ok}
    assert fails <= bad, {key: check.found for key, check in checks.items()}


@pytest.mark.parametrize(("node", "line"), [("edge-3", "sibling"), ("edge-4 before", "kept")])
def test_an_agent_that_ended_with_an_error_is_no_proof(tmp_path: Path, node: str, line: str) -> None:
    run = one_worker_dies_and_all_leave()
    checks = run.prove(tmp_path)
    assert checks[line].ok
    found = prove(Evidence(tmp_path, {**CODES, node: 1}), ROLES)
    assert not next(c for c in found if c.what == checks[line].what).ok
