"""Tests a script that calls fit several times: members compare the numbers of their fits (docs/compat.md)."""

from __future__ import annotations

from typing import Any

import fold_members
import pytest
from strategy_job import Job


def start(job: Job, name: str, **spec: Any) -> None:
    given = {"name": name, "port": job.port, "out": str(job.out), **spec}
    job.harness.start_function(name, fold_members.folds, given)


def steps(job: Job, number: int) -> int:
    """Returns how many members' logs have a commit of the step with this number."""
    return sum(r.name == "committed" and r["step"] == number for r in job.harness.records)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["lightning", "plain"])
def test_who_begins_the_first_fold_is_not_let_into_the_second(job: Job, plain: bool) -> None:
    start(job, "a", plain=plain, gates={1: job.gate("a")})
    job.harness.wait_until(lambda: steps(job, 2) == 2, "step 2 of the second fold")
    start(job, "c", plain=plain)
    job.harness.declare("c")
    assert job.harness.wait_exit("c") not in (0, None)
    said = job.harness.children["c"].tail()
    assert "c begins fit 1 of this job in its script, the job (from a) is in fit 2" in said
    assert "through fold 0" not in said
    job.open("a")
    assert job.harness.wait_exit("a") == 0
