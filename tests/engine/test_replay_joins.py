"""Joins by replay, in real processes: the others train on, and whoever is in at the end holds the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from engine_job import Job
from test_members_come_go_and_die import same

BY_REPLAY = {"join_by": "replay"}


def ways(job: Job) -> dict[str, list[str]]:
    """Which ways each newcomer was given, by its name."""
    found: dict[str, list[str]] = {}
    for record in job.harness.records:
        if record.name == "way_in":
            found.setdefault(record.member.partition("~")[0], []).append(str(record.get("way")))
    return found


def pulls(job: Job, name: str) -> list[dict[str, Any]]:
    """What a newcomer's pulls moved, in order."""
    return [dict(r.fields) for r in job.harness.records if r.name == "pull_done" and r.node == name]


def test_a_newcomer_replays_while_the_others_train(job: Job) -> None:
    for name in "ab":
        job.start(name, settings={"min_nodes": 2}, epochs=60, width=300)
    job.harness.wait_step(10)
    job.start("c", seed=2, epochs=60, width=300, settings=BY_REPLAY)
    caught = job.harness.wait_for("caught_up")
    assert caught.member.startswith("c~")
    same(job.finish("a", "b", "c"))
    assert ways(job)["c"] == ["replay"]
    replayed = next(r for r in job.harness.records if r.name == "replayed" and r.node == "c")
    assert replayed.get("steps") > 0
    first, last = pulls(job, "c")
    assert first["nbytes"] > 50_000
    assert last["nbytes"] < first["nbytes"] / 20, "a good replay leaves next to nothing to pull at the header that lets it in"
