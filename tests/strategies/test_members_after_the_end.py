"""Tests members that come, wait, or wake up when their job is finished: no code after fit runs with other weights
than the final ones.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from strategy_job import Job
from test_members import same, start_two
from torch import equal


def finished_job(job: Job, tmp_path: Path, **spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs a job of two members to its end; returns the settings for a further member, and the final report."""
    spec = {"epochs": 2, "options": {"on_last_exit": str(tmp_path / "kept")}, "callbacks": ("checkpoint",), **spec}
    start_two(job, spec, 2, {}, {})
    a, b = job.finish("a", "b")
    same([a, b])
    return spec, a


def test_who_comes_after_the_end_goes_on_with_the_final_state(job: Job, tmp_path: Path) -> None:
    """A member comes after the job's end to a machine that has the final state: it loads that, trains nothing, and
    overwrites no files.
    """
    spec, a = finished_job(job, tmp_path)
    written = {p: p.stat().st_mtime_ns for p in (job.out / "ckpt").iterdir()}
    job.again(finished_s=600.0)
    job.start("c", **spec)
    (c,) = job.finish("c", audit=False)
    assert equal(c["weights"], a["weights"])
    assert (c["step"], c["epoch"]) == (a["step"], a["epoch"])
    assert c["left_with"] is None, "code behind fit runs"
    assert c["rank"] != 0
    assert [line for line in c["trace"] if "batch" in line] == []
    assert c["callbacks"]["ModelCheckpoint"]["best_model_path"] == a["callbacks"]["ModelCheckpoint"]["best_model_path"]
    assert {p: p.stat().st_mtime_ns for p in (job.out / "ckpt").iterdir()} == written
    assert "came when the job was finished" in job.harness.children["c"].tail()
    assert job.harness.wait_for("came_late", node="c")["step"] == a["step"]


def test_who_comes_without_the_final_state_ends_well_and_does_nothing(job: Job, tmp_path: Path) -> None:
    """A member comes after the job's end to a machine without the final state: it exits with 0, and no code after
    fit runs.
    """
    spec, _ = finished_job(job, tmp_path)
    job.again(finished_s=600.0)
    job.start("c", **{**spec, "options": {"on_last_exit": str(tmp_path / "elsewhere")}})
    assert job.harness.wait_exit("c") == 0
    assert not (job.out / "c.pt").exists(), "no code behind fit runs"
    assert "the final state is not on its machine" in job.harness.children["c"].log.read_text()


@pytest.mark.parametrize("why", ["another program", "no time"])
def test_others_begin_the_job_anew(job: Job, tmp_path: Path, why: str) -> None:
    spec, _ = finished_job(job, tmp_path, samples=24)
    job.again(finished_s=600.0 if why == "another program" else 0.0)
    job.start("c", **{**spec, **({"samples": 28} if why == "another program" else {})})
    (c,) = job.finish("c", audit=False)
    assert c["step"] == 2 * (7 if why == "another program" else 6)
    assert [line for line in c["trace"] if "batch" in line]


def test_a_standby_ends_well_with_the_job_that_it_waited_for(job: Job, tmp_path: Path) -> None:
    """A standby waits while the only member finishes the job, without a final state on disk: the standby exits with
    0, and no new job begins.
    """
    assert job.scheduler.stop()
    job.again(max_nodes=1)
    spec = {"options": {"on_last_exit": str(tmp_path / "kept")}}
    job.start("a", gates={2: job.gate("a")}, **spec)
    job.harness.wait_step(2)
    job.start("b", **spec)
    job.harness.wait_for("notice", lambda r: "standby" in str(r.get("text")), node="b")
    job.open("a")
    job.finish("a")
    assert job.harness.wait_exit("b") == 0
    assert "came when the job was finished" in job.harness.children["b"].log.read_text()
    assert not (job.out / "b.pt").exists()


@pytest.mark.slow
def test_who_was_frozen_over_the_end_wakes_up_with_the_final_state(job: Job, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"epochs": 2, "options": {"on_last_exit": str(tmp_path / "kept")}}
    start_two(job, spec, 2, {}, {"worlds": {2: job.gate("two")}})
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="b")
    job.harness.declare("b")
    job.harness.stop("b")
    opened = threading.Thread(target=job.open, args=("two",))
    opened.start()
    (a,) = job.finish("a", audit=False)
    job.again(finished_s=600.0)
    job.harness.cont("b")
    (b,) = job.finish("b", audit=False)
    opened.join()
    assert equal(b["weights"], a["weights"])
