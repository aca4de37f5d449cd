"""Tests a finished job's scheduler: newcomers on other machines are told of the end, and another job can begin at its
endpoint at once.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine_job import Job
from test_members_come_go_and_die import same

pytestmark = pytest.mark.slow

FINISHED_S = 20.0


def begin(job: Job, name: str, machine: str, **spec: Any) -> None:
    """Starts a member as on this machine, with a state folder of its own."""
    env = {"CHAOS_HOST": machine, "XDG_STATE_HOME": str(job.folder / f"state-{machine}")}
    job.start(name, env=env, settings={"by_reference": False, **spec.pop("settings", {})}, **spec)


def ended_on_two_machines(job: Job, **settings: Any) -> None:
    gate = job.gate("start")
    begin(job, "a", "one", gates={2: gate}, settings=settings)
    job.harness.wait_step(2)
    begin(job, "b", "two", settings={**settings, "host_scheduler": False})
    job.admitted("b")
    job.open(gate)
    same(job.finish("a", "b"))


def test_who_comes_late_on_other_machines_is_told_until_finished_s_is_over(job: Job) -> None:
    """Newcomers come after the job's end: one on a machine with the final state goes on with it; any other one ends
    well without training.
    """
    job.serve(finished_s=FINISHED_S)
    ended_on_two_machines(job, host_scheduler=False, finished_s=FINISHED_S)
    for name, machine in (("late", "two"), ("elsewhere", "three")):
        begin(job, name, machine, settings={"host_scheduler": False, "finished_s": FINISHED_S})
    for name in ("late", "elsewhere"):
        assert job.harness.wait_exit(name) == 0
        assert "came when the job was finished" in job.harness.children[name].log.read_text()
    first, late = job.report("b"), job.report("late")
    assert (late["step"], late["hash"]) == (first["step"], first["hash"])
    assert not (job.folder / "elsewhere.pt").exists()
    assert "the final state is not on its machine" in job.harness.children["elsewhere"].log.read_text()
    assert job.served()
    assert job.harness.wait_exit("scheduler") == 0
    assert len(job.foundings()) == 1


def test_another_job_begins_at_once_at_the_port_of_a_finished_one(job: Job) -> None:
    """Another job begins at once at the port of a finished job's scheduler, which would tell newcomers of the end for
    ten minutes.
    """
    ended_on_two_machines(job)
    assert job.served()
    begin(job, "next", "one", settings={"job": "next"})
    assert job.harness.wait_exit("next") == 0
    report = job.report("next")
    assert report["step"] == 2 * 60
    joined = job.harness.wait_for("joined", node="next")
    assert (joined["job"], joined["role"]) == ("next", "founder")
