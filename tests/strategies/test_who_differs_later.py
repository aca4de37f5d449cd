"""Tests that a member whose state comes to differ is put out by name, and the others continue; if none can, they
save the state.
"""

from __future__ import annotations

import re
from typing import Any

import odd_members
import pytest
from strategy_job import Job

BOTH = pytest.mark.parametrize("run", [odd_members.drifts, odd_members.drifts_plainly], ids=["lightning", "plain"])


def start(job: Job, name: str, run: Any, **spec: Any) -> None:
    given = {"name": name, "port": job.port, "out": str(job.out), "epochs": 6, **spec}
    job.harness.start_function(name, run, given)


@BOTH
@pytest.mark.slow
def test_a_newcomer_whose_schedule_is_another_is_put_out_by_name(job: Job, run: Any) -> None:
    start(job, "a", run, gates={2: job.gate("a")})
    job.harness.wait_step(2)
    start(job, "c", run, model_args={"drifts_at": 6})
    job.wait_admitted("c")
    job.open("a")
    job.harness.declare("c")
    assert job.harness.wait_exit("c") == 1
    said = job.harness.children["c"].tail()
    assert "c~2 is put out of the job: slot " in said
    assert "c~2 has hyper 'opt0.group0.lr=0.007', a~1 has 'opt0.group0.lr=0.05'" in said
    job.finish("a")  # the audit sees that each sample is in exactly one step
    fenced = [r for r in job.harness.records if r.name == "committed" and r.node == "a" and r["step"] == 7]
    assert [row[0] for row in fenced[0]["contributors"]] == ["a~1"], "what it gave to the open step is left out"


@BOTH
@pytest.mark.slow
def test_a_tensor_that_a_member_changes_for_itself_is_named_and_refused_when_it_differs_again(
    job: Job, run: Any
) -> None:
    """One of two members changes a weight after each step: at the first difference it must take over the older
    member's state, at the second it is put out.
    """
    settings = {"epochs": 60, "options": {"state_hash_every": 2}}
    start(job, "a", run, gates={2: job.gate("a")}, **settings)
    job.harness.wait_step(2)
    start(job, "c", run, model_args={"nudges": True}, **settings)
    job.wait_admitted("c")
    job.open("a")
    job.harness.declare("c")
    assert job.harness.wait_exit("c") == 1
    said = job.harness.children["c"].log.read_text()
    first = re.search(r"the state of (c~\d+) differs from the others' at step (\d+), in 'param.net.2.weight'; ", said)
    again = re.search(
        r"the state of (c~\d+) differs again from the others' at step \d+, in 'param.net.2.weight', ", said
    )
    assert first
    assert again
    assert first[1] != again[1], "it had joined again meanwhile"
    assert "state_hash_every=0" in said
    assert job.harness.wait_exit("a") == 0
    told = f"the state of {first[1]} differs at step {first[2]}, in 'param.net.2.weight'; it joins again"
    assert told in job.harness.children["a"].log.read_text()


@BOTH
@pytest.mark.slow
def test_where_no_member_can_go_on_the_state_is_kept(job: Job, run: Any, tmp_path: Any) -> None:
    options = {"on_last_exit": str(tmp_path / "kept")}
    job.fresh(min_nodes=2)
    for name in "ab":
        start(job, name, run, model_args={"gathers_at": 4}, options=options)
    job.harness.declare("a", "b")
    assert [job.harness.wait_exit(name) for name in "ab"] == [1, 1]
    assert "the limit is" in job.harness.children["a"].tail()
    kept = [r["step"] for r in job.harness.records if r.name == "kept"]
    assert kept == [4, 4]
    for name in "cd":
        start(job, name, run, options=options)
    assert [job.harness.wait_exit(name) for name in "cd"] == [0, 0]
    assert "goes on from step 4" in job.harness.children["c"].tail() + job.harness.children["d"].tail()
