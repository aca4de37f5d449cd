"""Tests new starts: a script that failed and was edited, and one that waits for lost members until the operator ends
their job.
"""

from __future__ import annotations

import pytest
from engine_job import Job

from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.control.resetting import reset_job


def test_an_edited_script_begins_anew_where_the_one_before_failed(job: Job) -> None:
    """A script fails, and an edited one with another model founds the job anew, though the scheduler of the failed one
    still runs.
    """
    job.start("a", fails_at=3)
    job.harness.declare("a")
    assert job.harness.wait_exit("a") == 1
    job.start("b", width=16)
    (b,) = job.finish("b")
    assert b["step"] > 3
    assert len(job.foundings()) == 2


def test_an_edited_script_begins_anew_where_the_one_before_was_killed(job: Job) -> None:
    job.start("a", gates={5: job.gate("a")})
    job.harness.wait_step(5)
    job.harness.declare("a")
    job.harness.kill("a")
    job.start("b", width=16)
    job.finish("b")
    assert len(job.foundings()) == 2


def test_after_the_death_of_all_at_once_whoever_founds_the_job_again_says_what_is_lost(job: Job) -> None:
    job.serve(min_nodes=2)
    gate = job.gate("both")
    for name in "ab":
        job.start(name, gates={5: gate})
        job.harness.declare(name)
    for name in "ab":
        job.harness.wait_step(5, node=name)
    for name in "ab":
        job.harness.kill(name)
    for name in "cd":
        job.start(name)
    job.finish(*"cd")
    for name in "cd":
        words = job.harness.children[name].log.read_text()
        assert "the job begins anew, from what it was started with: founded again by" in words
        assert "the state that it had" in words
        assert "is lost" in words


def test_what_the_last_ones_keep_is_the_state_at_the_last_header(job: Job) -> None:
    """Two survivors end in mid-step, when forward passes have changed batch norm's counts; the state that they save is
    that at the last header.
    """
    job.serve(min_nodes=3)
    job.start("a", gates={5: job.gate("a")})
    for name in "bc":
        job.start(name)
    for name in "abc":  # who has not heard of the header when its root dies keeps the state before it
        job.harness.wait_step(5, node=name)
    job.harness.kill("a")
    job.harness.wait_for("notice", lambda r: "training waits: 2 of" in r["text"], node="default")
    for name in "bc":
        job.harness.terminate(name)
    job.finish(*"bc")  # the audit compares
    kept = [r for r in job.harness.records if r.name == "kept" and r.node in ("b", "c")]
    assert {r.node for r in kept} == {"b", "c"}
    said = [r for r in job.harness.records if r.name == "state_hash" and r["head"] == kept[0]["head"]]
    assert {r.node for r in said} == {"b", "c"}
    assert len({r["hash"] for r in said}) == 1


def test_an_edited_script_begins_anew_where_the_one_before_was_interrupted(job: Job) -> None:
    """A script is interrupted and saves its state, which does not fit the edited script that follows; that one founds
    the job anew.
    """
    job.start("a", gates={5: (gate := job.gate("a"))})
    job.harness.wait_step(5)
    job.harness.terminate("a")
    job.open(gate)
    job.harness.wait_for("kept", node="a")
    assert job.harness.wait_exit("a") == 0
    job.start("b", width=16)
    job.finish("b")
    assert "does not fit" in job.harness.children["b"].tail()
    begun = job.foundings()[-1]
    assert "is lost; a~1 kept one at step" in begun
    assert "on that machine does not go on from it" in begun


@pytest.mark.slow
def test_who_may_live_is_waited_for_until_the_operator_ends_its_job(job: Job) -> None:
    """The only member with the state is frozen: another program waits and names the command `reset`, by which the
    operator ends the job.
    """
    job.start("a", gates={5: job.gate("a")})
    job.harness.wait_step(5)
    job.harness.declare("a")
    job.harness.stop("a")
    job.harness.wait_for("suspect", lambda r: r.member == "a~1")
    job.start("b", width=16)
    job.harness.wait_for("notice", lambda r: "`chaos-lightning reset`" in r["text"], node="b")
    assert "a~1" in reset_job(job.endpoint, SchedulerOptions(listen=job.endpoint), b"", force=False)
    job.finish("b")
    assert len(job.foundings()) == 2


def test_who_begins_a_dead_job_anew_says_what_is_lost(job: Job) -> None:
    """The only member is killed, so no state is left: the next member founds the job anew, and says what is lost."""
    job.serve(min_nodes=1)
    job.start("a", gates={5: job.gate("a")})
    job.harness.wait_step(5)
    job.harness.kill("a")
    job.start("b")
    job.finish("b")
    assert len(job.foundings()) == 2
    assert "the job begins anew, from what it was started with" in job.harness.children["b"].tail()
    assert "is lost" in job.harness.children["b"].tail()
