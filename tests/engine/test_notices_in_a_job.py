"""Tests members of plain loops, as real processes, whose machines will be taken away: they leave before that, say why,
and no step is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job

from benchmarks.metadata import SPOT, MetadataServer
from chaos_lightning.member.engine import Engine
from chaos_lightning.protocol.types import GENESIS, Kind
from chaos_lightning.settings import EngineConfig

ENDLESS = 10_000
"""Epochs, so that nothing ends by itself."""


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as made:
        yield made


def steps_of(job: Job, name: str) -> list[int]:
    """Returns the steps that a member has committed, in order."""
    told = [r for r in job.harness.records if r.name == "committed" and r.node == name]
    return [int(r["step"]) for r in told if r["kind"] == Kind.STEP]


def lost(job: Job) -> set[str]:
    """Returns the names of events that tell of a death, a recovery or an exclusion."""
    return {r.name for r in job.harness.records} & {"death", "prepare", "fenced", "error"}


def test_a_spot_notice_lets_the_member_go_and_the_others_train_on(job: Job, server: MetadataServer) -> None:
    job.start("a", epochs=ENDLESS)
    job.harness.wait_for("joined", node="a")
    job.start("b", epochs=ENDLESS, settings={"notice": f"aws:{server.base}"})
    job.harness.wait_for("joined", node="b")
    server.wait_asked(SPOT)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 118))
    server.set(spot={"action": "terminate", "time": at})
    taken = job.harness.wait_for("notice_taken", node="b")
    assert taken["reason"].startswith("spot notice of AWS (terminate), in 1")
    left = job.harness.wait_for("left", node="b")
    assert job.harness.wait_exit("b") == 0
    wish = job.harness.wait_for("leave", node="b")
    assert wish["reason"] == taken["reason"], "the scheduler and the others are told why"
    assert left.t - taken.t < taken["left_s"], "before the machine was taken"
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 1, node="a", after=left)
    job.leave("a")
    assert lost(job) == set()
    steps = steps_of(job, "a")
    assert steps == list(range(1, steps[-1] + 1))


def test_a_notice_for_all_members_at_once_leaves_the_state_in_a_file(job: Job) -> None:
    """Both machines are taken at the same moment: all members leave, the last one keeps the state, and the next start
    goes on from it, without a step lost.
    """
    flag = job.folder / "maintenance"
    spec: dict[str, Any] = {"epochs": ENDLESS, "settings": {"min_nodes": 2, "notice": f"file:{flag}"}}
    for name in "ab":
        job.start(name, **spec)
    job.harness.wait_step(5)
    flag.touch()
    assert [job.harness.wait_exit(name) for name in "ab"] == [0, 0]
    for name in "ab":
        assert job.harness.wait_for("notice_taken", node=name)["reason"] == f"file {flag}"
    kept = int(job.harness.wait_for("kept")["step"])
    assert kept == max(max(steps_of(job, name)) for name in "ab")
    flag.unlink()
    for name in "cd":
        job.start(name, **spec)
    assert job.harness.wait_for("resumed_kept")["step"] == kept
    for name in "cd":
        job.harness.wait_step(kept + 1, node=name)
    flag.touch()
    job.finish("a", "b", "c", "d")


def test_sigterm_with_a_grace_time_is_no_hurry(job: Job) -> None:
    """SIGTERM comes a long time before the machine is taken: the loop trains on, and the member leaves once a second
    notice is due.
    """
    flag = job.folder / "now"
    job.start("a", epochs=ENDLESS, settings={"notice": f"sigterm:2h+file:{flag}"})
    job.harness.wait_step(3)
    job.harness.terminate("a")
    told = job.harness.wait_for(
        "notice", lambda r: "end of the grace time of SIGTERM, in 120 min" in r["text"], node="a"
    )
    job.harness.wait_for("committed", lambda r: r["step"] > 50, node="a", after=told)
    flag.touch()
    assert job.harness.wait_for("notice_taken", node="a")["source"] == "file"
    job.finish("a")
    assert "SIGTERM: capture_exit_event() is true in 118 min; once more ends at once" in (
        job.harness.children["a"].log.read_text()
    )


def test_sigterm_with_a_short_grace_time_leaves_at_once(job: Job) -> None:
    job.start("a", epochs=ENDLESS, settings={"notice": "sigterm:30s"})
    job.harness.wait_step(3)
    job.harness.terminate("a")
    taken = job.harness.wait_for("notice_taken", node="a")
    assert taken["reason"].startswith("end of the grace time of SIGTERM, in ")
    assert 0 < taken["left_s"] <= 30
    job.finish("a")


def test_a_member_that_waits_for_its_job_leaves_at_once(job: Job) -> None:
    flag = job.folder / "leave"
    job.start("a", epochs=ENDLESS, settings={"min_nodes": 2, "notice": f"file:{flag}"})
    job.harness.wait_for("welcomed", node="a")
    flag.touch()
    job.harness.wait_for("notice_taken", node="a")
    assert job.harness.wait_exit("a") == 0
    assert not [r for r in job.harness.records if r.name == "joined"]


def test_a_notice_between_the_last_step_and_the_end_costs_nothing(job: Job) -> None:
    flag, gate = job.folder / "leave", job.gate("a")
    job.start("a", epochs=1, settings={"notice": f"file:{flag}"}, gates={60: gate})
    job.harness.wait_step(60, node="a")
    flag.touch()
    job.harness.wait_for("notice_taken", node="a")
    job.open(gate)
    (report,) = job.finish("a")
    assert report["step"] == job.harness.wait_for("kept", node="a")["step"] == 60


@pytest.mark.parametrize("over", [{"out": True}, {"header": replace(GENESIS, kind=Kind.CLOSING)}])
def test_a_notice_after_the_end_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: dict[str, Any]
) -> None:
    (tmp_path / "leave").touch()
    engine = Engine(EngineConfig(name="a", notice=f"file:{tmp_path / 'leave'}", log_dir=str(tmp_path / "events")))
    try:
        for name, value in over.items():
            setattr(engine, name, value)
        with monkeypatch.context() as patch:
            looks = threading.Semaphore(0)
            over_now = engine._notices._over
            patch.setattr(engine._notices, "_over", lambda: looks.release() or over_now())
            engine._notices.start()
            assert looks.acquire(timeout=30.0)
        assert (engine.leaving, engine.noticed) == (False, "")
    finally:
        engine.close()
