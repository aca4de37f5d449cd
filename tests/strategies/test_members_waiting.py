"""Members that wait for the job and are told to leave it, and what a member that waits says on its terminal."""

from __future__ import annotations

import signal

import pytest
import torch
from strategy_job import Job


def needs_two(job: Job) -> None:
    """The job's scheduler anew, with min_nodes=2."""
    assert job.scheduler.stop()
    job.again(min_nodes=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_wait_for_min_nodes(job: Job, number: int) -> None:
    needs_two(job)
    job.start("a", callbacks=("checkpoint", "stopping", "log"))
    job.harness.wait_for("welcomed", node="a")
    job.harness.terminate("a", number=number)
    (a,) = job.finish("a", audit=False)
    assert (a["step"], a["rank"], a["trace"]) == (0, 1, ["epoch 0 starts"])
    assert not (job.out / "ckpt").exists()
    job.harness.wait_for("left", lambda r: "was not in the job yet" in str(r.get("reason")))
    assert "gave up waiting" in job.harness.children["a"].tail()


def test_standby_leaves_at_once(job: Job) -> None:
    """Its place is not free and will not be: that is no reason to wait."""
    assert job.scheduler.stop()
    job.again(max_nodes=1)
    job.start("a", gates={2: job.gate("a")})
    job.harness.wait_step(2)
    job.start("b")
    job.harness.wait_for("notice", lambda r: "standby" in str(r.get("text")), node="b")
    job.harness.terminate("b")
    (b,) = job.finish("b", audit=False)
    assert b["step"] == 0
    job.open("a")
    (a,) = job.finish("a")
    assert a["epoch"] == 3


def test_newcomer_leaves_before_a_boundary_lets_it_in(job: Job) -> None:
    """A view that names it is decided; the others go on without it, and nothing of what they have done is lost."""
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
