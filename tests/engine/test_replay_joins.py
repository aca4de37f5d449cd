"""Tests joins by replay in real processes: the others train on, and all members end with bitwise equal states."""

from __future__ import annotations

from typing import Any

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH
from test_members_come_go_and_die import same

BY_REPLAY = {"join_by": "replay"}


def ways(job: Job) -> dict[str, list[str]]:
    """Returns by newcomer the ways of joining that the scheduler told it (replay or pause)."""
    found: dict[str, list[str]] = {}
    for record in job.harness.records:
        if record.name == "way_in":
            found.setdefault(record.member.partition("~")[0], []).append(str(record.get("way")))
    return found


def pulls(job: Job, name: str) -> list[dict[str, Any]]:
    """Returns the facts of each pull that a newcomer finished, in order."""
    return [dict(r.fields) for r in job.harness.records if r.name == "pull_done" and r.node == name]


def test_a_newcomer_replays_while_the_others_train(job: Job) -> None:
    for name in "ab":
        job.start(name, settings={"min_nodes": 2}, epochs=UNTIL_ENOUGH, width=300, step_s=0.01)
    job.harness.wait_step(10)
    job.start("c", seed=2, epochs=UNTIL_ENOUGH, width=300, step_s=0.01, settings=BY_REPLAY)
    caught = job.harness.wait_for("caught_up")
    assert caught.member.startswith("c~")
    same(job.finish("a", "b", "c"))
    assert ways(job)["c"] == ["replay"]
    replayed = next(r for r in job.harness.records if r.name == "replayed" and r.node == "c")
    assert replayed.get("steps") > 0
    first, last = pulls(job, "c")
    assert first["nbytes"] > 50_000
    assert last["nbytes"] < first["nbytes"] / 20, "a good replay leaves next to nothing to pull"


def two_train(job: Job, **spec: Any) -> None:
    for name in "ab":
        job.start(name, epochs=1000, width=300, step_s=0.01, **spec)
        job.harness.wait_for("joined", node=name)
    job.harness.wait_for("committed", lambda r: len(r.get("contributors")) == 2)


def held_newcomer(job: Job, name: str) -> str:
    """Starts a newcomer that has begun to observe and waits at a gate before its pull; returns the gate."""
    gate = job.gate(name)
    job.start(name, seed=2, epochs=1000, width=300, step_s=0.01, settings=BY_REPLAY, load_gate=gate)
    job.harness.wait_for("notice", lambda r: r.get("text") == "about to pull", node=name)
    return gate


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_donor_dies_while_it_is_needed(job: Job, victim: str) -> None:
    """A donor (the commit root or another one) dies before a newcomer's pull: the survivor also has the snapshot and
    the log, and the newcomer joins.
    """
    two_train(job)
    gate = held_newcomer(job, "c")
    job.harness.kill(victim)
    death = job.harness.wait_for("death", lambda r: r.member.startswith(f"{victim}~"))
    survivor = "b" if victim == "a" else "a"
    job.harness.wait_for("committed", node=survivor, after=death)
    job.open(gate)
    joined = job.harness.wait_for("joined", node="c")
    job.harness.wait_for("committed", node="c", after=joined)
    job.leave(survivor, "c")
    assert ways(job)["c"] == ["replay"]


def test_a_learner_that_dies_leaves_the_others_alone(job: Job) -> None:
    two_train(job)
    held_newcomer(job, "c")
    job.harness.kill("c")
    gone = job.harness.wait_for("released", node="a")
    job.start("d", epochs=1000, width=300, settings=BY_REPLAY)
    job.harness.wait_for("joined", node="d", after=gone)
    job.leave("a", "b", "d")
    assert not [r for r in job.harness.records if r.name == "decide" and "c~" in str(r.get("reason"))]


def test_three_newcomers_at_once_share_one_snapshot(job: Job) -> None:
    two_train(job)
    for name in "cde":
        job.start(name, seed=2, epochs=1000, width=300, step_s=0.01, settings=BY_REPLAY)
    for name in "cde":
        job.harness.wait_for("joined", node=name)
    job.leave(*"abcde")
    assert all(way == ["replay"] for way in ways(job).values() if way != ["pause"])
