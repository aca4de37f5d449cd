"""Tests members that come late: into a validation, before the last step, to a finished job; and one that dies at the
end.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import forked_support
import pytest
from strategy_job import Job
from strategy_models import Deals, MinesHard
from test_members import expected_validation, same, start_three, start_two, start_validating


def test_newcomer_comes_into_a_validation(job: Job) -> None:
    """A newcomer comes during a validation: it waits until the members have finished that, and trains from there on."""
    spec = {"epochs": 3, "samples": 48, "model": "Counting", "val_samples": 22}
    begun = start_validating(job, spec)
    job.start("c", **spec)
    job.wait_admitted("c")
    job.open("b")
    reports = job.finish("a", "b", "c")
    same(reports)
    a, b, c = reports
    assert c["trace"][:2] == ["epoch 0 starts", "epoch 1 starts"]
    assert job.harness.wait_for("joined", node="c").get("step") == begun
    for report in reports:
        expected_validation(report, 22)
    assert a["validated"] + b["validated"] + c["validated"] == 3 * 6
    assert c["validated"] < 6


def test_newcomer_comes_where_spikes_of_the_loss_are_looked_for(job: Job) -> None:
    """A newcomer joins members that use SpikeDetection: that callback cannot load its own state, and its window
    holds each member's own losses.
    """
    start_two(job, {"epochs": 3, "samples": 26, "callbacks": ("spikes",)}, 5, {}, {})
    same(job.finish("a", "b"))


def test_newcomer_tells_its_batch_sampler_the_epoch_in_time(job: Job) -> None:
    """A newcomer's script calls `set_epoch` on the batch sampler in a hook, after the state was taken over in the
    middle of the epoch: the order is the members'.
    """
    job.start("a", model=Deals.__name__, epochs=3, gates={8: job.gate("a")})
    job.harness.wait_step(8, node="a")
    job.start("b", model=Deals.__name__, epochs=3)
    job.wait_admitted("b")
    job.open("a")
    same(job.finish("a", "b"))


def test_newcomer_comes_just_before_the_last_step(job: Job) -> None:
    """A newcomer is let in before the last of 12 steps, and makes that step with the others."""
    start_two(job, {"epochs": 2, "model_args": {"sync": True}}, 10, {}, {})
    a, b = job.finish("a", "b")
    same([a, b])
    assert (a["step"], len([line for line in b["trace"] if "batch" in line])) == (12, 1)


@pytest.mark.parametrize("steps", [11, 12])
def test_newcomer_comes_when_no_rest_point_is_left(job: Job, steps: int) -> None:
    """A newcomer is admitted during or after the last step: the job ends as if it had not come, and its message says
    so.
    """
    job.harness.declare("b")
    start_two(job, {"epochs": 2, "model_args": {"sync": True}}, steps, {}, {})
    (a,) = job.finish("a")
    assert a["step"] == 12
    assert job.harness.wait_exit("b") == 0
    assert "came when the job was finished" in job.harness.children["b"].log.read_text()
    assert not (job.out / "b.pt").exists()


@pytest.mark.slow
def test_an_order_that_depends_on_losses_is_refused(job: Job) -> None:
    """A sampler orders samples by losses, of which each member has seen others: the newcomer, whose order differs,
    is put out.
    """
    job.harness.declare("b")
    job.start("a", model=MinesHard.__name__, epochs=3, gates={2: job.gate("a")})
    job.harness.wait_step(2, node="a")
    job.start("b", model=MinesHard.__name__, epochs=3)
    job.wait_admitted("b")
    job.open("a")
    assert job.harness.wait_exit("b") == 1
    said = job.harness.children["b"].log.read_text()
    assert "b~2 is put out of the job: slot " in said
    assert "b~2 has epoch 1 in order" in said
    assert "set_epoch" in said
    job.finish("a")  # the audit sees that each sample is in exactly one step
    steps = [r for r in job.harness.records if r.name == "committed" and r.node == "a" and r["kind"] == "step"]
    later = [r["contributors"] for r in steps if r["ledger"][0]["epoch"]]
    assert [[row[0] for row in rows] for rows in later] == [["a~1"]] * 12, "b has no part in any of its own order"


@pytest.mark.slow
def test_a_newcomer_whose_sampler_gives_another_order_is_refused_alone(job: Job) -> None:
    job.harness.declare("b")
    job.start("a", model=MinesHard.__name__, epochs=3, gates={8: job.gate("a")})
    job.harness.wait_step(8, node="a")
    job.start("b", model=MinesHard.__name__, epochs=3)
    job.wait_admitted("b")
    job.open("a")
    assert job.harness.wait_exit("b") == 1
    assert "epoch 1 is under way in order" in job.harness.children["b"].log.read_text()
    (a,) = job.finish("a")
    assert a["step"] == 18


def test_newcomer_comes_to_a_finished_job(job: Job) -> None:
    """A newcomer comes to a scheduler that keeps a finished job's chain: it ends with a message, and neither waits
    nor begins a new job.
    """
    job.start("a", epochs=1)
    job.finish("a")
    job.harness.wait_until(job._scheduler_gone, "the end of the finished job's scheduler")
    keeper = replace(job.options, keep_finished=True)
    job.harness.start_function("keeper", forked_support.run, forked_support.SCHEDULER, keeper.arguments())
    job.harness.declare("b")
    job.start("b", epochs=1, options={"host_scheduler": False})
    assert job.harness.wait_exit("b") == 1
    told = job.harness.children["b"].tail().splitlines()[-1]
    assert "RefusedError" in told
    assert "the job is finished" in told
    assert not (job.out / "b.pt").exists()


@pytest.mark.parametrize("who", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_death_in_on_train_end(job: Job, who: str) -> None:
    """A member dies after the last step, before the job's last slot: the others finish with equal states and a
    writer.
    """
    spec = {"epochs": 3, "model_args": {"sync": True}, "callbacks": ("checkpoint", "stopping")}
    job.harness.declare(who)
    start_three(job, {**spec, "plan": f"at step 6 in train_end: sigkill {who}"})
    assert job.harness.wait_exit(who) == -signal.SIGKILL
    left = [name for name in "abc" if name != who]
    reports = job.finish(*left)
    same(reports)
    assert [r["epoch"] for r in reports] == [3, 3]
    assert sorted(r["rank"] for r in reports) == [0, 1]
    assert (job.out / "ckpt" / "last.ckpt").exists()
