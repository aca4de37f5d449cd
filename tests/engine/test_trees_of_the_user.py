"""Tests gradients that travel over reduction trees drawn by the user, as long as the members are those in the
drawing.
"""

from __future__ import annotations

import json
import signal
from typing import Any

import engine_members
import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH
from until_support import until

from chaos_lightning.collectives.layout import Layout, Section
from chaos_lightning.member.training import reduced_buffers


def gradient_nbytes() -> int:
    """Returns the length in bytes of the buffer in which members' gradients are reduced."""
    model = engine_members.network()
    return Layout([Section("optimizer 0", list(model.named_parameters()))], reduced_buffers(model)).nbytes


def trees(*borders: int) -> list[dict[str, Any]]:
    """Returns two reduction trees: a line rooted in a, and a star rooted in c."""
    first, second, third = borders
    return [
        {"start": first, "stop": second, "members": ["a", "b", "c"], "parents": ["", "a", "b"]},
        {"start": second, "stop": third, "members": ["a", "b", "c"], "parents": ["c", "c", ""]},
    ]


def written(job: Job, plan: list[dict[str, Any]]) -> str:
    path = job.folder / "plan.json"
    path.write_text(json.dumps({"chunk_nbytes": 4096, "trees": plan}))
    return str(path)


@pytest.mark.slow
def test_a_fourth_member_does_not_fit_into_the_trees_of_three(job: Job) -> None:
    plan = written(job, trees(0, 1024, gradient_nbytes()))
    gate = job.gate("a")
    for name in "abc":
        job.start(
            name, settings={"min_nodes": 3, "plan": plan}, epochs=UNTIL_ENOUGH, gates={5: gate} if name == "a" else {}
        )
    job.harness.wait_step(5)
    job.start("d", epochs=UNTIL_ENOUGH)
    joining = job.harness.wait_for("view", lambda r: len(r.get("members") or ()) == 4, node="default")
    assert "plan: rotating instead: tree 0 does not span ['d~" in str(joining.get("reason"))
    job.open(gate)
    job.harness.wait_for("joined", node="d")
    job.harness.terminate("d", number=signal.SIGINT)
    left = job.harness.wait_for("view", node="default", after=joining)
    assert str(left.get("reason")).endswith("plan: user as configured")
    assert job.harness.wait_exit("d") == 0
    reports = job.finish("a", "b", "c")
    assert len({(r["hash"], r["step"]) for r in reports}) == 1, reports


def test_settings_that_the_job_does_not_go_by_are_warned_about(job: Job) -> None:
    gate = job.gate("a")
    job.start("a", gates={5: gate})
    job.harness.wait_step(5)
    job.start("b", settings={"min_nodes": 2, "max_nodes": 9, "heartbeat_timeout_s": 0.9, "plan": "chain"})
    job.admitted("b")
    job.open(gate)
    job.finish("a", "b")
    said = job.harness.children["b"].tail(200)
    for words in ("min_nodes=2", "max_nodes=9", "heartbeat_timeout_s=0.9", "plan=chain"):
        assert f"{words} of b is not honoured: the job's scheduler was started with " in said, said
    assert "is not honoured" not in job.harness.children["a"].tail(200)


def test_a_founder_is_told_of_another_min_nodes_before_it_waits(job: Job) -> None:
    job.serve(min_nodes=2)
    job.start("a")
    job.harness.wait_for("notice", lambda r: "the job waits for min_nodes=2" in r["text"], node="a")
    waits = "the job waits for min_nodes=2: 1 is here"
    until(lambda: waits in job.harness.children["a"].tail(200), f"{waits!r} on the console of a")
    said = job.harness.children["a"].tail(200)
    told = "min_nodes=1 of a is not honoured: the job's scheduler was started with 2"
    assert 0 <= said.find(told) < said.find(waits), said
    job.start("b")
    job.finish("a", "b")


@pytest.mark.parametrize("missing", [0, 64])
def test_trees_that_miss_bytes_of_the_model_end_the_member_before_it_joins(job: Job, missing: int) -> None:
    nbytes = gradient_nbytes()
    plan = written(job, trees(missing, 1024, nbytes + missing - 64))
    job.start("a", settings={"plan": plan})
    job.harness.declare("a")
    assert job.harness.wait_exit("a") != 0
    said = job.harness.children["a"].tail()
    assert f"plan file '{plan}'" in said if missing else f"'{plan}' does not fit this model" in said, said
    assert f"bytes [{nbytes - 64}, {nbytes}) are covered by no tree" in said or "bytes [0, 64) are" in said, said
    assert not list(job.harness.logs.glob("scheduler-*"))
