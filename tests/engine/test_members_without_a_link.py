"""Tests real members that are not all linked with each other, and links that are measured: steps are committed all the
same.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH

from chaos_lightning.testing.emulation import RATES


def beside(job: Job, name: str) -> set[str]:
    """Returns the members with which this one ever had a link."""
    ups = [r for r in job.harness.records if r.name == "link_up" and r.node == name]
    return {str(r.get("peer")).partition("~")[0] for r in ups}


@pytest.mark.slow
def test_contributions_and_headers_pass_through_the_member_between(job: Job) -> None:
    """Links form a line a - b - c - d with the commit root a at its end: messages from and to d pass through b
    and c.
    """
    named = {"a": "b", "b": "a,c", "c": "b,d", "d": "c"}
    for name, neighbours in named.items():
        job.start(name, settings={"min_nodes": 4, "neighbours": neighbours}, epochs=8)
        job.harness.wait_for("welcomed", node=name)
    job.unharmed(*named)
    for name, neighbours in named.items():
        assert beside(job, name) == set(neighbours.split(",")), name
    views = [r for r in job.harness.records if r.name == "view" and r.node == "default" and r.get("members")]
    assert len(views[0].get("members") or ()) == 4


def test_links_that_are_emulated_are_measured_by_both_ends_while_the_job_trains(job: Job) -> None:
    emulated = {RATES: json.dumps(dict.fromkeys("abc", 4e8))}
    for name in "abc":
        # Steps of a few milliseconds leave no room for a probe, and their traffic is too little to show a rate.
        job.start(name, settings={"min_nodes": 3}, epochs=1000, env=emulated, step_s=0.05)
        job.harness.wait_for("welcomed", node=name)
    for name in "abc":
        for other in set("abc") - {name}:
            measured = job.harness.wait_for(
                "link_measured", lambda r, other=other: str(r.get("peer")).startswith(f"{other}~"), node=name
            )
            assert str(measured.get("evidence")).startswith("probe")
            assert 0 < float(measured.get("rate_bps") or 0) < 1e9, "this machine's own loopback is many times as fast"
    for name in "abc":
        told = job.harness.wait_for(
            "links", lambda r: sum("rate_bps" in x and x["sent_bps"] > 0 for x in r["links"]) == 2, node=name
        )
        assert {str(x["peer"]).partition("~")[0] for x in told["links"]} == set("abc") - {name}
    for name in "abc":
        job.harness.terminate(name)
    job.finish(*"abc")


@pytest.mark.parametrize("dead", ["b", pytest.param("a", marks=pytest.mark.slow)])
def test_the_member_that_messages_pass_through_is_killed(job: Job, dead: str) -> None:
    """In a ring a - b - c - d, messages between a and c pass through b; b is killed, or d is, and the others go on."""
    named = {"a": "b,d", "b": "a,c", "c": "b,d", "d": "a,c"}
    for name, neighbours in named.items():
        job.start(name, settings={"min_nodes": 3, "neighbours": neighbours}, epochs=UNTIL_ENOUGH)
        job.harness.wait_for("welcomed", node=name)
    joined = job.harness.wait_for("joined", node="d")
    job.harness.wait_for("committed", node="a", after=joined)
    job.harness.kill(dead)
    without = job.harness.wait_for(
        "decide", lambda r: not any(m.startswith(f"{dead}~") for m in r.get("members") or ()), node="default"
    )
    left = [name for name in named if name != dead]
    job.harness.wait_for("committed", node=left[0], after=without)
    reports: list[dict[str, Any]] = job.finish(*left)
    assert len({(r["hash"], r["step"]) for r in reports}) == 1, reports
    # A member that is dead is put out by a decision where a neighbour noticed before the scheduler did.
    out = [r for r in job.harness.records if r.name in ("fenced", "rejoin")]
    assert all(r.member.startswith(f"{dead}~") for r in out), out
    assert "c" not in beside(job, "a")
    assert "b" not in beside(job, "d")
