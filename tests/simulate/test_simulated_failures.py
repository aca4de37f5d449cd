"""Tests one simulated job for each kind of failure."""

from __future__ import annotations

import pytest
from simulate_support import notes, outcome_of, run

from lab.simulate.oracle import check_chain

THREE = """
seed 4
nodes n0 n1 n2
program work_s 0.01
"""


def test_root_dies_after_one_member_committed() -> None:
    """The commit root dies when one of two survivors has its header: a recovery hands it on, and both commit that
    slot.
    """
    world, outcome = run(THREE + "when n0 header 6 1 kill n0")
    decided = notes(world, "decide")[-1]
    assert decided["hand_on"] is True
    assert outcome_of(world, "n0") == "killed"
    assert outcome.commits > 0


def test_root_dies_before_anybody_has_the_header() -> None:
    """The commit root dies before any member has its header: the slot is reduced again without it, and others get its
    samples.
    """
    world, _ = run(THREE + "when n0 header 6 0 kill n0")
    assert notes(world, "decide")[-1]["hand_on"] is False


def test_frozen_member_wakes_up_excluded_and_joins_again() -> None:
    world, outcome = run(THREE + "program length 160\nat 0.20 freeze n1 for 1.0")
    assert outcome.ejections == 1
    assert outcome_of(world, "n1").startswith("left")
    ids = {m for view in world.store.views for m in view.ids() if m.startswith("n1~")}
    assert len(ids) == 2, "an id is never used twice"


def test_frozen_member_that_wakes_before_the_decision_stays_in() -> None:
    """A frozen member that was taken for dead wakes before a view excludes it: it stays in."""
    world, outcome = run("seed 4\nnodes n0 n1 n2\nset min_nodes 3\nprogram length 80\nat 0.20 freeze n1 for 1.2")
    assert [str(n["member"]).partition("~")[0] for n in notes(world, "death")] == ["n1"]
    assert outcome.ejections == 0
    assert len(world.store.views[-1].members) == 3


def test_two_members_die_at_once() -> None:
    world, _ = run("seed 3\nnodes n0 n1 n2 n3\nat 0.25 kill-too n0 n2")
    assert world.store.views[-1].ids() == tuple(m for m in world.store.views[-1].ids() if m[:2] in ("n1", "n3"))


def test_all_but_one_die() -> None:
    world, _ = run("seed 3\nnodes n0 n1 n2\nat 0.2 kill n0\nat 0.3 kill n1")
    assert outcome_of(world, "n2").startswith("left")


def test_last_member_dies_and_the_job_begins_again() -> None:
    """When the last member has died nobody holds the state: the next newcomer founds the job again, and the view's
    reason says so.
    """
    world, _ = run("seed 3\nnodes n0\nat 0.2 kill n0\nlater j0 at 0.3")
    assert "founded again" in world.store.views[-1].reason


def test_member_below_min_nodes_waits_for_a_newcomer() -> None:
    world, _ = run("seed 5\nnodes n0 n1\nset min_nodes 2\nat 0.2 kill n1\nlater j0 at 1.0")
    assert any("training waits" in str(n["text"]) for n in notes(world, "notice"))
    assert len(world.store.views[-1].members) == 2


def test_leave_below_min_nodes_waits_too() -> None:
    world, _ = run("seed 5\nnodes n0 n1\nset min_nodes 2\nprogram length 60\nat 0.2 leave n1\nlater j0 at 1.0")
    assert outcome_of(world, "n1").startswith("left")
    assert any("training waits" in str(n["text"]) for n in notes(world, "notice"))


@pytest.mark.parametrize("at", [0.2005, 0.203, 0.206, 0.21, 0.22])
@pytest.mark.parametrize("how", ["kill n1", "freeze n1 for 1.5"])
def test_leaver_dies_before_it_was_let_go(at: float, how: str) -> None:
    run(f"seed 5\nnodes n0 n1 n2\nprogram length 60\nat 0.2 leave n1\nat {at} {how}")


def test_everybody_leaves() -> None:
    world, _ = run("seed 5\nnodes n0 n1\nat 0.2 leave n0\nat 0.2 leave n1")
    assert all(outcome_of(world, n).startswith("left") for n in ("n0", "n1"))


def test_drained_node_leaves() -> None:
    world, _ = run("seed 5\nnodes n0 n1\nat 0.2 drain n0")
    assert outcome_of(world, "n0").startswith("left: view")


def test_two_join_at_once() -> None:
    world, outcome = run("seed 6\nnodes n0 n1\nprogram length 60\nlater j0 at 0.2\nlater j1 at 0.2")
    assert len(world.store.views[-1].members) == 4
    assert outcome.joins >= 3


def test_joiner_dies_while_it_loads() -> None:
    world, _ = run("seed 6\nnodes n0 n1\nlater j0 at 0.2\nwhen j0 entered 1 0 kill j0")
    assert outcome_of(world, "j0") == "killed"
    assert len(world.store.views[-1].members) == 2


def test_donor_dies_while_a_joiner_loads() -> None:
    run("seed 6\nnodes n0 n1 n2\nlater j0 at 0.2\nprogram length 60\nat 0.2301 kill n0")


def test_control_streams_break() -> None:
    """All members' control streams break, one after the other: no member is put out, and no view changes."""
    world, outcome = run(
        "seed 7\nnodes n0 n1 n2\nset min_nodes 3\nat 0.2 stream n0\nat 0.21 stream n1\nat 0.3 stream n2"
    )
    assert outcome.ejections == 0
    assert len(world.store.views) == 1


def test_link_breaks_between_the_living() -> None:
    """A link between living members breaks and loses all bytes on it: the slot is reduced again in a view with the same
    members.
    """
    world, outcome = run("seed 7\nnodes n0 n1 n2\nset min_nodes 3\nat 0.2 link n0 n1")
    assert outcome.ejections == 0
    last = world.store.views[-1]
    assert "made anew" in last.reason
    assert len(last.members) == 3


def test_heartbeats_late_but_links_alive() -> None:
    """A member's heartbeats are late while its links work: neighbours deny its death, and it stays in."""
    world, outcome = run("seed 8\nnodes n0 n1 n2\nset min_nodes 3\nprogram length 80\nat 0.2 lag n1 for 0.8")
    assert notes(world, "suspect")
    assert not notes(world, "death")
    assert outcome.ejections == 0


def test_scheduler_freezes() -> None:
    world, outcome = run("seed 8\nnodes n0 n1 n2\nset min_nodes 3\nprogram length 80\nat 0.2 sched-freeze for 3")
    assert not notes(world, "death")
    assert outcome.ejections == 0


def test_scheduler_restarts_on_its_store_while_a_member_dies() -> None:
    world, _ = run("seed 8\nnodes n0 n1 n2\nprogram length 80\nat 0.2 sched-crash for 0.3\nat 0.25 kill n1")
    assert world.store.term == 2
    assert len(world.store.views[-1].members) == 2


def test_scheduler_restarts_and_nobody_is_touched() -> None:
    world, outcome = run("seed 8\nnodes n0 n1 n2\nset min_nodes 3\nprogram length 80\nat 0.2 sched-crash for 0.3")
    assert outcome.ejections == 0
    assert len(world.store.views) == 1, "all were in the last view: nothing to decide"


def test_scheduler_dies_after_it_reserved_a_number() -> None:
    """The scheduler dies after members promised its reserved number and wait: a restarted scheduler lets them go on."""
    world, _ = run("seed 2\nnodes n0 n1 n2\nprogram length 80\nat 0.2 kill n1\nat 0.209 sched-crash for 0.2")
    check_chain(world.store.views)
    assert world.store.views[-1].id.term == 2


def test_stale_gradient_is_refused_by_name() -> None:
    """A member whose training thread missed a commit is put out by name, and no member applies its gradient (4a,
    6b).
    """
    world, outcome = run("seed 9\nnodes n0 n1 n2\nset min_nodes 3\nat 0.2 stale n1")
    assert (outcome.violation, outcome.errors, outcome.ejections) == ("", 0, 1), "it is put out (6b)"
    assert any("n1~" in view.reason and "prev_hash" in view.reason for view in world.store.views)


def test_standby_gets_a_dead_members_place() -> None:
    world, _ = run("seed 9\nnodes n0 n1\nset max_nodes 2\nprogram length 80\nlater j0 at 0.1\nat 0.3 kill n0")
    assert {m.partition("~")[0] for m in world.store.views[-1].ids()} == {"n1", "j0"}


@pytest.mark.parametrize("seq", range(1, 12))
@pytest.mark.parametrize("skip", [0, 1])
def test_root_dies_at_any_header(seq: int, skip: int) -> None:
    """The commit root dies at a slot of any kind, after it has sent any number of its headers: the job goes on."""
    run(f"{THREE}program gather_every 1\nset min_nodes 2\nlater j0 at 0.12\nwhen n0 header {seq} {skip} kill n0")


@pytest.mark.parametrize("kind", ["contribution", "committed", "entered"])
@pytest.mark.parametrize("seq", range(0, 10, 2))
def test_member_freezes_anywhere(kind: str, seq: int) -> None:
    run(f"{THREE}set min_nodes 1\nwhen n1 {kind} {seq} 0 freeze n1 for 1.0\nlater j0 at 0.1")


@pytest.mark.parametrize("action", ["kill n1", "freeze n1 for 1.2", "leave n1", "stream n1", "link n1 n2"])
def test_second_failure_while_reports_are_collected(action: str) -> None:
    run(f"seed 4\nnodes n0 n1 n2 n3\nset min_nodes 1\nwhen n0 header 5 1 kill n0\nwhen n1 report 0 0 {action}")
