"""Tests members that wait for their job and are asked to leave, and what a waiting member prints."""

from __future__ import annotations

import signal

import pytest
import torch
from strategy_job import Job

from chaos_lightning.control.requests import drain


def needs_two(job: Job) -> None:
    """Starts the job's scheduler anew, with min_nodes=2."""
    assert job.scheduler.stop()
    job.again(min_nodes=2)


def test_signal_ends_the_wait_for_min_nodes(job: Job) -> None:
    needs_two(job)
    job.start("a", callbacks=("checkpoint", "stopping", "log"))
    job.harness.wait_for("welcomed", node="a")
    job.harness.terminate("a", number=signal.SIGINT)
    (a,) = job.finish("a", audit=False)
    assert (a["step"], a["rank"], a["trace"]) == (0, 1, ["epoch 0 starts"])
    assert not (job.out / "ckpt").exists()
    assert "gave up waiting" in job.harness.children["a"].tail()


@pytest.mark.parametrize("way", ["signal", "drained"])
def test_standby_leaves_at_once(job: Job, way: str) -> None:
    """A standby is asked to leave while no place is free: it leaves at once."""
    assert job.scheduler.stop()
    job.again(max_nodes=1)
    job.start("a", gates={2: job.gate("a")})
    job.harness.wait_step(2)
    job.start("b")
    job.harness.wait_for("notice", lambda r: "standby" in str(r.get("text")), node="b")
    if way == "drained":
        assert drain(job.options.listen, "b") == ("b",)
    else:
        job.harness.terminate("b")
    (b,) = job.finish("b", audit=False)
    assert b["step"] == 0
    assert "gave up waiting" in job.harness.children["b"].tail()
    job.open("a")
    (a,) = job.finish("a")
    assert a["epoch"] == 3


def test_newcomer_leaves_before_a_boundary_lets_it_in(job: Job) -> None:
    """A newcomer leaves after its admission, before a safe point lets it in: the other member continues without it,
    and loses no work.
    """
    job.start("a", gates={2: job.gate("a")})
    job.harness.wait_step(2)
    job.start("b")
    job.wait_admitted("b")
    job.harness.declare("b")
    job.harness.terminate("b")
    (b,) = job.finish("b", audit=False)
    assert b["step"] == 0
    job.open("a")
    (a,) = job.finish("a")
    assert (a["epoch"], a["step"]) == (3, 18)
    assert torch.isfinite(a["weights"]).all()


def test_waiting_is_told_once_on_the_terminal(job: Job) -> None:
    needs_two(job)
    job.start("a", worlds={2: job.gate("a")})
    job.harness.wait_for("notice", lambda r: "min_nodes=2: 1 is here" in str(r.get("text")))
    job.start("b")
    job.open("a")
    job.finish("a", "b")
    words = job.harness.children["a"].tail().splitlines()
    told = [line.partition(": ")[2] for line in words if "wait" in line and "I log events in" not in line]
    assert told == ["the job waits for min_nodes=2: 1 is here", "waiting is over, this member is rank 0 of 2"]
    assert "waits for" not in job.harness.children["b"].tail()


def test_pause_below_min_nodes_is_told_on_the_terminal(job: Job) -> None:
    """A member dies, so that there are fewer than min_nodes: the other one prints that training waits, and later
    that it continues.
    """
    needs_two(job)
    job.start("a", gates={3: job.gate("a"), 5: job.gate("late")})
    job.start("b")
    job.harness.wait_step(3)
    job.harness.kill("b")
    job.open("a")
    job.harness.wait_for("notice", lambda r: "training waits: 1 of min_nodes=2" in str(r.get("text")))
    job.start("c")
    job.wait_admitted("c")
    job.open("late")
    job.finish("a", "c")
    words = job.harness.children["a"].tail()
    assert words.count("training waits: 1 of min_nodes=2 nodes are here") == 1
    assert "waiting is over, the job goes on after step" in words
