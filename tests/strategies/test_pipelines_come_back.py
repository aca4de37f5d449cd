"""Tests members of pipelines that freeze, all leave, or lose their scheduler, and continue."""

from __future__ import annotations

from typing import Any

import pytest
from test_pipelines_train import HALF, alone, check_equal, start


@pytest.mark.slow
def test_a_frozen_stage_is_put_out_and_comes_back(job: Any) -> None:
    # Few steps in 64 bits: this training makes of an order of sums 10^7 times the difference in 140 steps.
    double: dict[str, Any] = {"epochs": 16, "precision": "64-true"}
    job.fresh(min_nodes=2, heartbeat_timeout_s=1.0, confirm_timeout_s=0.5)
    start(job, "abcd", device_memory=2 * HALF, paced_s=0.15, **double)
    for name in "abcd":
        job.harness.wait_for("joined", node=name)
    job.harness.wait_step(5)
    job.harness.stop("b", seconds=3.5)
    job.harness.wait_for("rejoin", node="b")
    a, b, c, d = job.finish("a", "b", "c", "d")
    b["losses"], b["logged"] = b["losses"][-10:], b["logged"][-10:]  # it missed what the others trained meanwhile
    check_equal([a, b, c, d], *alone(**double))


@pytest.mark.slow
def test_a_newcomer_that_a_recovery_meets_half_way_counts_as_the_others_do(job: Any) -> None:
    """A stage dies while a newcomer pulls the rest of the state, from donors that are within a batch: the newcomer
    ends with the same counters as they.
    """
    spec = {"device_memory": 2 * HALF, "epochs": 8, "paced_s": 0.05, "precision": "64-true"}
    waits = job.out / "go on"
    job.fresh(min_nodes=3)
    start(job, "abcd", **spec)
    job.harness.declare("d")
    job.harness.wait_step(3)
    start(job, "e", **spec, rest_waits=str(waits))
    job.harness.wait_until((job.out / "asked").exists, "e to ask for the rest")
    job.harness.kill("d")
    job.harness.wait_for("redo", node="a", after=job.harness.wait_for("fault_injected"))
    waits.touch()
    a, b, c, e = job.finish("a", "b", "c", "e")
    assert len(a["losses"]) > len(e["losses"])
    assert len(e["epochs"]) > 2
    check_equal([a, b, c, e], *alone(**spec))


@pytest.mark.slow
def test_all_leave_and_come_back(job: Any) -> None:
    job.fresh(min_nodes=3)
    job.harness.declare("a", "b", "c")
    start(job, "abc", device_memory=HALF, epochs=40, paced_s=0.03)
    job.harness.wait_step(7)
    for name in "abc":
        job.harness.terminate(name)
    for name in "abc":
        assert job.harness.wait_exit(name) == 143
    start(job, "abc", device_memory=HALF, epochs=40)
    reports = job.finish("a", "b", "c")
    losses, parameters = alone(epochs=40)
    gone = len(losses) - max(len(report["losses"]) for report in reports)
    assert gone >= 7, "what was trained before was trained again"
    check_equal(reports, losses[gone:], parameters)


@pytest.mark.slow
@pytest.mark.parametrize("asks", ["SIGTERM", pytest.param("reset --force", marks=pytest.mark.slow)])
def test_a_member_that_waits_for_lost_parts_leaves_at_once_and_says_what_it_keeps(job: Any, asks: str) -> None:
    from chaos_lightning.control.requests import reset

    job.fresh(min_nodes=2)
    job.harness.declare("a", "b")
    start(job, "ab", device_memory=HALF, epochs=40, paced_s=0.03, saves_last=str(job.out / "last.ckpt"))
    job.harness.wait_step(7)
    job.harness.kill("a")
    log, endpoint = job.harness.children["b"].log, f"127.0.0.1:{job.port}"
    job.harness.wait_until(lambda: "are at no member that lives" in log.read_text(), "the notice of b")
    console = "".join(job.harness.children[name].log.read_text() for name in "ab")  # of rank 0
    assert "any loss stops this job: no layer has two owners" in console
    assert f"`chaos-lightning reset --endpoint {endpoint} --force`" in log.read_text()
    if asks == "SIGTERM":
        job.harness.terminate("b")
    else:
        reset(endpoint, force=True, token=b"")
    assert job.harness.wait_exit("b", deadline_s=20.0) == (143 if asks == "SIGTERM" else 75)
    said = log.read_text()
    if asks == "SIGTERM":
        halves = ["blocks.0, blocks.1", "blocks.2, blocks.3"]
        its, lost = halves if f"{halves[1]} of the training state (step" in said else reversed(halves)
        assert f": a part ({its}) of the training state of job default at step " in said
        assert f"goes on from it only with files of other members that have {lost} at that step, too" in said
        assert "last.ckpt is not written here: blocks." in said
    else:
        assert "are not kept: an operator has ended the job" in said
        assert "last.ckpt is not written here: an operator has ended the job" in said
    assert "the others go on" not in said
