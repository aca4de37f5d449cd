"""Tests broken links between living members: the open step is repeated without them or over new ones, and no member is
removed.
"""

from __future__ import annotations

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH

from chaos_lightning.events.events import Record
from chaos_lightning.testing.faults import FaultPlan


def founded(job: Job, *, gate: str = "") -> Record:
    """Founds a job of three members, of which a is the commit root and c dials the other two. With a gate, a waits at
    it after step 5.
    """
    for name in "abc":
        gates = {5: gate} if gate and name == "a" else {}
        job.start(name, settings={"min_nodes": 3}, epochs=UNTIL_ENOUGH, gates=gates)
        job.harness.wait_for("welcomed", node=name)
    view = job.harness.wait_for("view", lambda r: len(r.get("members") or ()) == 3, node="default")
    job.harness.wait_step(5)
    return view


def remade(job: Job, before: Record, *ends: str) -> Record:
    """Returns the decision for another view of the same members, made because two of them lost or renewed their
    link.
    """

    def about(record: Record) -> bool:
        reason = str(record.get("reason"))
        return "was made anew" in reason or "and both live" in reason

    decided = job.harness.wait_for("decide", about, node="default", after=before)
    reason = str(decided.get("reason"))
    assert all(f"{name}~" in reason.partition(" (")[0] for name in ends), reason
    assert list(decided.get("members") or ()) == list(before.get("members") or ())
    return decided


@pytest.mark.parametrize("ends", ["ab", "bc"])
def test_a_cut_link_is_dialled_again_and_the_open_step_redone(routed_job: Job, ends: str) -> None:
    """A link is cut for 0.5 s, with the commit root at one end or at none: it is dialled again, and the open step
    repeated.
    """
    job = routed_job
    gate = job.gate("a")
    view = founded(job, gate=gate)
    plan = FaultPlan.parse(f"at step 5: cut {ends[0]} {ends[1]} for 0.5 s")
    left = job.harness.drive(lambda: any(r.get("kind") == "restore" for r in job.harness.records), plan=plan)
    assert left.open == ()
    down = job.harness.wait_for("link_down", lambda r: str(r.get("evidence")).startswith("closed"), node=ends[1])
    assert str(down.get("peer")).startswith(f"{ends[0]}~")
    decided = remade(job, view, *ends)
    job.open(gate)
    job.harness.wait_for("committed", node="a", after=decided)
    job.unharmed(*"abc")


@pytest.mark.slow
def test_a_link_that_is_cut_again_and_again_stops_nobody_for_good(routed_job: Job) -> None:
    job = routed_job
    view = founded(job)
    for one, other in ("ab", "bc", "ac", "ab"):
        job.harness.cut(one, other)
        job.harness.wait_for("link_down", lambda r: str(r.get("evidence")).startswith("closed"), node=other, after=view)
        job.harness.restore(one, other)
        view = remade(job, view, one, other)
        job.harness.wait_for("committed", node="a", after=view)
    job.unharmed(*"abc")


@pytest.mark.slow
def test_a_stalled_link_is_noticed_though_nobody_closes_it(routed_job: Job) -> None:
    """A link swallows all bytes and is never closed: both ends notice the silence, and the step is repeated over a new
    link.
    """
    job = routed_job
    view = founded(job)
    job.harness.stall("b", "c")
    for here, there in ("bc", "cb"):
        down = job.harness.wait_for("link_down", node=here, after=view)
        assert str(down.get("evidence")).startswith("silent (nothing was heard for"), down
        assert str(down.get("peer")).startswith(f"{there}~")
    job.harness.restore("b", "c")
    decided = remade(job, view, *"bc")
    assert "silent (nothing was heard for" in str(decided.get("reason"))
    job.harness.wait_for("committed", node="a", after=decided)
    job.unharmed(*"abc")


@pytest.mark.slow
def test_a_short_stall_is_waited_out(routed_job: Job) -> None:
    """A short stall of a link loses nothing, so the same step goes on in the same view."""
    job = routed_job
    founded(job)
    job.harness.stall("a", "b", seconds=0.3)
    restored = job.harness.wait_for("fault_injected", lambda r: r.get("kind") == "restore")
    job.harness.wait_for("committed", node="b", after=restored)
    job.unharmed(*"abc")
    assert not [r for r in job.harness.records if r.name == "prepare"]


def test_a_link_that_stays_away_is_done_without_and_comes_back_with_a_header(routed_job: Job) -> None:
    """A link stays cut: messages pass through the third member without a wait for `step_timeout_s`, and it returns with
    a header once mended.
    """
    job = routed_job
    view = founded(job)
    job.harness.cut("a", "b")
    decided = job.harness.wait_for("decide", lambda r: "and both live" in str(r.get("reason")), node="default")
    gone = job.harness.wait_for("view", lambda r: len(r.get("links") or ()) == 2, node="b", after=view)
    assert {name for link in gone.get("links") or () for name in link} == set(view.get("members") or ())
    for name in "abc":
        job.harness.wait_for("committed", node=name, after=gone)
    job.harness.restore("a", "b")
    back = job.harness.wait_for("view", lambda r: "comes in" in str(r.get("reason")), node="default", after=decided)
    job.harness.wait_for("committed", node="b", after=back)
    job.unharmed(*"abc")
    decisions = [r for r in job.harness.records if r.name == "decide" and r.node == "default"]
    assert len(decisions) == 2, "founded, and gone on without the link; it comes back without stopping anybody"
