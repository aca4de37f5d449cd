"""Tests members of the plain loop that wait for the job: one told to leave it, and some that wait in vain."""

from __future__ import annotations

import signal

import pytest
from engine_job import Job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_wait_in_prepare(job: Job, number: int) -> None:
    job.start("a", settings={"min_nodes": 2})
    job.harness.wait_for("welcomed", node="a")
    job.harness.terminate("a", number=number)
    (a,) = job.finish("a")
    assert (a["step"], a["out"]) == (0, True)


def test_newcomer_is_told_to_leave_as_it_is_about_to_pull_the_state(job: Job) -> None:
    job.start("a", gates={5: job.gate("a")})
    job.harness.wait_step(5)
    gate = job.gate("load")
    job.harness.declare("b")
    job.start("b", load_gate=gate)
    job.admitted("b")
    job.open(str(job.folder / "a.gate"))
    job.harness.wait_for("notice", lambda r: r.get("text") == "about to pull", node="b")
    job.harness.terminate("b")
    job.harness.wait_for("leave", lambda r: r.member.startswith("b~"))
    job.open(gate)
    a, b = job.finish("a", "b")
    assert a["step"] > b["step"] == 0
    assert b["out"]


def test_vain_wait_says_for_what_where_and_what_to_do(job: Job) -> None:
    job.harness.declare("a")
    job.start("a", settings={"min_nodes": 2, "join_timeout_s": 4.0})
    assert job.harness.wait_exit("a") == 1
    words = job.harness.children["a"].tail().splitlines()[-1]
    for part in (
        f"waited in vain for admission to the job at {job.endpoint}",
        "welcomed it as founder: the job begins when min_nodes=2 are ready",
        "the scheduler says: the job waits for min_nodes=2: 1 is here",
        "start the members that are missing",
        f"`chaos-lightning status --endpoint {job.endpoint}`",
    ):
        assert part in words


def test_founders_between_whom_no_link_leads_are_told_so(job: Job) -> None:
    """There are enough founders but no link between them; they give up, and say that links are missing, not members."""
    job.harness.declare("a", "b")
    for name, neighbour in (("a", "x"), ("b", "y")):
        job.start(name, settings={"min_nodes": 2, "join_timeout_s": 4.0, "neighbours": neighbour})
        job.harness.wait_for("welcomed", node=name)
    assert [job.harness.wait_exit(name) for name in "ab"] == [1, 1]
    words = job.harness.children["a"].tail().splitlines()[-1]
    assert "the job waits for links: 2 members are here (min_nodes=2), but no link leads between a~1 | b~2" in words
