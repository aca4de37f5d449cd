"""Tests a newcomer that starts before its scheduler: it says so while it waits, and waits as long as it was told to.

That it says so again and again is shown by tests/control/test_silent_endpoint.py.
"""

from __future__ import annotations

from engine_job import Job


def test_a_newcomer_says_that_no_scheduler_answers_and_joins_when_one_does(job: Job) -> None:
    job.start("a", settings={"host_scheduler": False})
    first = job.harness.wait_for("notice", node="a")
    assert first["text"] == f"waits for admission to the job: the scheduler at {job.endpoint} does not answer yet"
    job.serve(min_nodes=1)
    job.finish("a")
