"""Tests audits of a real job's logs with a join, a leave and a death: complete logs prove the contract, and for a part
of them the audit says what it cannot show.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH

from chaos_lightning.events.reader import log_files, read_events
from chaos_lightning.observe.audit import NOT_SHOWN, VIOLATED, audit
from chaos_lightning.observe.commands import follow
from chaos_lightning.observe.outer.report import write_reports
from chaos_lightning.observe.render import draw

STEP_NBYTES = 200
OFTEN = ("committed", "links", "state_hash", "epoch", "boundary")
"""Events that there are more of the longer a job trains undisturbed."""


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def of_member(logs: Path, name: str) -> Path:
    (path,) = logs.glob(f"member-{name}-*.jsonl")
    return path


def without_file(name: str) -> Callable[[Path], None]:
    return lambda logs: of_member(logs, name).unlink()


def without_lines(name: str, first: float, last: float) -> Callable[[Path], None]:
    """Returns a function that deletes the lines of a member's log file between two shares of its length (0 to 1)."""

    def cut(logs: Path) -> None:
        lines = lines_of(path := of_member(logs, name))
        path.write_bytes(b"".join(lines[: int(first * len(lines))] + lines[int(last * len(lines)) :]))

    return cut


def without_scheduler(logs: Path) -> None:
    for path in logs.glob("scheduler-*.jsonl"):
        path.unlink()


def without_harness(logs: Path) -> None:
    for path in logs.glob("harness-*.jsonl"):
        path.unlink()


def all_without_middle(logs: Path) -> None:
    for name in "abcd":
        without_lines(name, 0.3, 0.7)(logs)


PARTS = {
    **{f"no file of {name}": without_file(name) for name in "abcd"},
    **{f"no head of {name}": without_lines(name, 0.0, 0.3) for name in "abcd"},
    **{f"no middle of {name}": without_lines(name, 0.4, 0.6) for name in "abcd"},
    **{f"no tail of {name}": without_lines(name, 0.6, 1.0) for name in "ab"},
    "no middle of all": all_without_middle,
    "no scheduler": without_scheduler,
    "no harness": without_harness,
}


@pytest.mark.slow
def test_a_part_of_the_logs_is_not_shown_and_never_violated(job: Job, tmp_path: Path) -> None:
    for name in "abc":
        job.start(name, settings={"min_nodes": 2}, rules={"min_nodes": 2} if name == "a" else None, epochs=UNTIL_ENOUGH)
        job.harness.wait_for("welcomed", node=name)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3)
    job.harness.wait_step(job.harness.records[-1].get("step", 0) + 150)
    job.start("d", settings={"min_nodes": 2}, epochs=UNTIL_ENOUGH)
    joined = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 4)
    job.harness.wait_step(joined["step"] + 100)
    job.harness.kill("c")
    alone = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, after=joined)
    job.harness.wait_step(alone["step"] + 100)
    job.harness.terminate("d")
    job.harness.wait_exit("d")
    left = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, after=alone)
    job.harness.wait_step(left["step"] + 100)
    job.finish("a", "b")
    job.harness.close()
    whole = audit(job.harness.logs)
    assert not [f for f in whole if f.verdict in (VIOLATED, NOT_SHOWN)], "\n".join(map(str, whole))
    short_enough(job.harness.logs)
    found = {}
    for what, take in PARTS.items():
        logs = tmp_path / what
        shutil.copytree(job.harness.logs, logs)
        take(logs)
        found[what] = {f.point: f for f in audit(logs)}
        draw(follow(logs)())
    told = "\n".join(f"{what}: {f}" for what, findings in found.items() for f in findings.values())
    assert not [f for findings in found.values() for f in findings.values() if f.verdict == VIOLATED], told
    for what, findings in found.items():
        if what not in ("no scheduler", "no harness"):
            assert {findings[point].verdict for point in (2, 3, 5)} == {NOT_SHOWN}, told
            assert words_of(what) in str(findings[2]), told
    write_reports(tmp_path / "no middle of all")


def words_of(what: str) -> str:
    name = what[-1]
    return {
        "no file": f"no log of {name}~",
        "no head": f"lost from member-{name}-",
        "no middle": f"lost from member-{name}-",
        "no tail": f"member-{name}-",
    }.get(what.partition(" of ")[0] if what != "no middle of all" else "", "log lines were lost from")


def short_enough(logs: Path) -> None:
    """Checks that a step costs each member less than a bound in bytes of log, without events that are written only
    once.
    """
    for path in log_files(logs):
        if path.name.startswith("member-"):
            steps = sum(r.name == "committed" and r["kind"] == "step" for r in read_events(path))
            often = [line for line in lines_of(path) if json.loads(line).get("name", "committed") in OFTEN]
            print(path.name, steps, path.stat().st_size / steps, sum(map(len, often)) / steps)
            assert sum(map(len, often)) / steps < STEP_NBYTES, path
