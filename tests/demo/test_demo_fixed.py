"""Tests the proof of the demo's part about a batch of fixed size, on hand-written logs: each line holds, and fails for
each of its reasons.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_demo_proof_of_returns import Written

from chaos_lightning.testing.demo import ALONE, STEP_LOSS
from chaos_lightning.testing.demo.fixed import FIRST, KILLED, LEAVES, NODES, SAMPLES, SLOW, prove
from chaos_lightning.testing.demo.proof import Check, Evidence

CODES: dict[str, int | None] = {**dict.fromkeys((*NODES, ALONE), 0), KILLED: -9}
MEMBERS = {name: f"{name}-0~{i}" for i, name in enumerate(NODES)}
LENGTH = 7 * SAMPLES + 16
"""Samples of an epoch."""
KEYS = {
    "whole": "24 samples", "less": "gets fewer", "killed": "SIGKILL", "one": "one loss", "close": "of one process",
    "unbroken": "no committed step", "once": "exactly once", "ended": "exit code 0",
}  # fmt: skip


class Job(Written):
    """A made-up job whose steps have a batch of fixed size, one process beside it, and their logs."""

    at = 0

    def shares(self, **counts: int) -> None:
        """Logs a step in which nodes, given without "batch-", compute so many samples, and each member's loss."""
        who = {f"batch-{number[1:]}": count for number, count in counts.items()}
        self.seq, self.step, first = self.seq + 1, self.step + 1, self.at
        self.at += sum(who.values())
        rows = [[MEMBERS[name], float(count)] for name, count in who.items()]
        for name, count in who.items():
            spent, first = [{"stream": "", "epoch": 0, "spans": [[first, first + count]]}], first + count
            ledger = [{"stream": "", "epoch": 0, "spans": [[0, self.at]]}]
            facts = {"seq": self.seq, "kind": "step", "step": self.step, "view": "1.1", "contributors": rows}
            hashes = {"header": f"h{self.seq}", "prev": f"h{self.seq - 1}", "spent": spent, "ledger": ledger}
            file = f"member-{name}.jsonl"
            self.say(file, "committed", MEMBERS[name], **facts, **hashes)
            self.say(file, STEP_LOSS, MEMBERS[name], step=self.step, loss=1 / self.step)

    def lines_by_key(self, folder: Path, codes: dict[str, int | None] = CODES) -> dict[str, Check]:
        """Writes the logs; returns the proof's lines but that of the audit, by short names."""
        for name in ("events", ALONE):
            (folder / name).mkdir()
        for line in self.lines:
            path = folder / (ALONE if line["file"] == "script-alone.jsonl" else "events") / line["file"]
            with path.open("a") as file:
                file.write(json.dumps({key: value for key, value in line.items() if key != "file"}) + "\n")
        checks = prove(Evidence(folder, codes))
        return {key: next(c for c in checks if words in c.what) for key, words in KEYS.items()}


def whole() -> Job:
    job = Job()
    for i, name in enumerate(NODES):
        job.opens(f"member-{name}.jsonl", MEMBERS[name], 20 + i, "joiner")
    job.say(f"member-{FIRST}.jsonl", "epoch", MEMBERS[FIRST], stream="", epoch=0, length=LENGTH)
    job.shares(b1=24)
    job.shares(b1=6, b2=6, b3=6, b4=6)
    job.shares(b1=7, b2=8, b3=7, b4=2)
    job.shares(b1=7, b2=8, b3=7, b4=2)
    job.say("harness-demo-1.jsonl", "opened", node="demo", role="harness", pid=9)
    job.say("harness-demo-1.jsonl", "fault_injected", node=f"{KILLED}-0", kind="sigkill", pid=22)
    job.say("scheduler-default-1.jsonl", "death", MEMBERS[KILLED], evidence="its control stream is closed")
    job.shares(b1=11, b2=10, b4=3)
    job.say(f"member-{LEAVES}.jsonl", "left", MEMBERS[LEAVES], reason="asked")
    job.shares(b1=20, b4=4)
    job.shares(b1=20, b4=4)
    job.shares(b1=13, b4=3)
    for step in range(1, 12):
        job.say("script-alone.jsonl", STEP_LOSS, node=ALONE, step=step, loss=1 / step + 1e-7)
    return job


def test_all_lines_hold_over_a_job_that_went_well(tmp_path: Path) -> None:
    found = whole().lines_by_key(tmp_path)
    assert {key: check.found for key, check in found.items() if not check.ok} == {}
    assert found["whole"].found == "7 steps of 24 samples by 1, 2, 3, 4 members, 1 of 16 at the ends of 1 epochs"
    assert "batch-1 6, batch-2 6, batch-3 6, batch-4 6 at" in found["less"].found
    assert "then batch-1 7, batch-2 8, batch-3 7, batch-4 2 at" in found["less"].found
    assert "all 3 held step 5 after" in found["killed"].found
    assert "8 steps compared, largest difference 1.0e-07" in found["close"].found


def weigh(job: Job, step: int, **counts: int) -> None:
    """Changes how many samples nodes computed in a step; what they say they used stays."""
    rows = [[MEMBERS[f"batch-{number[1:]}"], float(count)] for number, count in counts.items()]
    for line in job.lines:
        if line["name"] == "committed" and line["step"] == step:
            line["contributors"] = rows


def without(job: Job, wanted: Callable[[dict[str, Any]], bool]) -> None:
    job.lines = [line for line in job.lines if not wanted(line)]


def one_sample_less(job: Job) -> None:
    weigh(job, 3, b1=7, b2=8, b3=7, b4=1)


def two_short_steps(job: Job) -> None:
    weigh(job, 7, b1=13, b4=3)


def never_three(job: Job) -> None:
    weigh(job, 5, b1=12, b4=12)


def equal_shares(job: Job) -> None:
    for step in (3, 4):
        weigh(job, step, b1=6, b2=6, b3=6, b4=6)


def slow_one_gets_nothing(job: Job) -> None:
    for step in (3, 4):
        weigh(job, step, b1=8, b2=8, b3=8, b4=0)


def nobody_is_killed(job: Job) -> None:
    without(job, lambda line: line["name"] in ("fault_injected", "death"))


def two_losses(job: Job) -> None:
    next(line for line in job.lines if line["name"] == STEP_LOSS and line["step"] == 4)["loss"] += 1e-9


def no_losses(job: Job) -> None:
    without(job, lambda line: line["name"] == STEP_LOSS and line["node"] != ALONE)


def another_loss_alone(job: Job) -> None:
    next(line for line in job.lines if line["node"] == ALONE and line["step"] == 6)["loss"] += 2e-4


def alone_ends_early(job: Job) -> None:
    without(job, lambda line: line["node"] == ALONE and line["step"] > 6)


def nobody_was_alone(job: Job) -> None:
    without(job, lambda line: line["node"] == ALONE)


def a_sample_twice(job: Job) -> None:
    line = next(line for line in job.lines if line["name"] == "committed" and line["step"] == 2)
    line["spent"] = [{"stream": "", "epoch": 0, "spans": [[0, 6]]}]


def a_step_is_missing(job: Job) -> None:
    without(job, lambda line: line["name"] == "committed" and line["step"] == 1)


@pytest.mark.parametrize(
    ("tamper", "fails"),
    [
        (one_sample_less, {"whole"}),
        (two_short_steps, {"whole"}),
        (never_three, {"whole"}),
        (equal_shares, {"less"}),
        (slow_one_gets_nothing, {"less"}),
        (nobody_is_killed, {"killed"}),
        (two_losses, {"one"}),
        (no_losses, {"one", "close"}),
        (another_loss_alone, {"close"}),
        (alone_ends_early, {"close"}),
        (nobody_was_alone, {"close"}),
        (a_sample_twice, {"once"}),
        (a_step_is_missing, {"whole", "close", "unbroken"}),
    ],
)
def test_each_line_fails_for_each_of_its_reasons(
    tmp_path: Path, tamper: Callable[[Job], None], fails: set[str]
) -> None:
    job = whole()
    tamper(job)
    assert {key for key, check in job.lines_by_key(tmp_path).items() if not check.ok} == fails


@pytest.mark.parametrize(("name", "code", "fails"), [(SLOW, 1, "ended"), (ALONE, 1, "ended"), (KILLED, 0, "killed")])
def test_exit_codes_are_evidence_too(tmp_path: Path, name: str, code: int, fails: str) -> None:
    found = whole().lines_by_key(tmp_path, {**CODES, name: code})
    assert {key for key, check in found.items() if not check.ok} == {fails}
