"""Tests simulated jobs in which newcomers come in by replay while one thing goes wrong (protocol.md 15-19)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulate_support import notes, outcome_of, run

from chaos_lightning.membership.donors import DONORS
from chaos_lightning.protocol.types import SMALL_JOB, Header
from lab.simulate.observing import Keeper
from lab.simulate.oracle import Violation
from lab.simulate.plan import Outcome, Plan, Replaying
from lab.simulate.plans.learners import (
    all_leave_plan,
    calm_plan,
    crowd_plan,
    flapping_plan,
    learner_plan,
    patient_plan,
    promise_plan,
    silent_plan,
)
from lab.simulate.script import parse
from lab.simulate.world import World, simulate

pytestmark = pytest.mark.slow  # test_simulated_seeds.py runs plans of all these families in the ordinary run

THREE = """
seed 4
nodes n0 n1 n2
program work_s 0.01
program length 90
set observe_timeout_s 1
"""
JOIN = THREE + "later j0:replay=yes at 0.1\n"


def run_with(text: str, replaying: Replaying, **nodes: bool) -> tuple[World, Outcome]:
    """Runs a scenario under these conditions of replay; `nodes` says which nodes have memory for a copy of the
    state.
    """
    plan = replace(parse(text), replaying=replaying)
    specs = tuple(replace(n, memory=nodes.get(n.name, True)) for n in plan.nodes)
    world = World(replace(plan, nodes=specs))
    outcome = world.run()
    if outcome.violation:
        raise Violation(outcome.violation)
    return world, outcome


def ways(world: World, name: str) -> list[tuple[object, object]]:
    """Returns the ways by which the scheduler decided to let this node in, with its reasons."""
    return [(n["way"], n["reason"]) for n in notes(world, "way_in") if str(n["member"]).startswith(f"{name}~")]


def test_nothing_is_left_to_move_when_a_newcomer_comes_in_by_replay() -> None:
    world, outcome = run(JOIN)
    assert [way for way, _ in ways(world, "j0")] == ["replay"]
    assert (outcome.replays, outcome.moved) == (1, 0)
    assert outcome.ejections == 0


def test_members_train_on_while_it_pulls_and_replays() -> None:
    """While a newcomer's transfer takes long, members commit step after step, and pause only to let it in."""
    world, outcome = run_with(JOIN, Replaying(pull_s=0.25))
    observation = world.nodes["j0"].observation
    assert observation is not None
    assert observation.catching_up.applied >= 8
    assert (outcome.replays, outcome.moved) == (1, 0)


@pytest.mark.parametrize("skip", range(3))
def test_root_dies_while_it_greets_the_learner(skip: int) -> None:
    """The commit root dies when some members have the header that names a learner: the job goes on, and the learner
    gets in.
    """
    world, outcome = run(
        f"{JOIN}when n0 greeting 1 0 kill n0\nlater j1:replay=yes at 0.1\nwhen n1 greeting 1 {skip} stream n1"
    )
    assert outcome_of(world, "n0") == "killed"
    assert outcome_of(world, "j0").startswith("left: the job is finished")
    assert any(m.startswith("j0~") for m in world.store.views[-1].ids())
    assert outcome.commits > 0


@pytest.mark.parametrize("kind", ["greeting", "header", "committed", "contribution"])
@pytest.mark.parametrize("seq", [8, 10, 12, 14])
def test_root_dies_at_any_slot_around_a_replay(kind: str, seq: int) -> None:
    world, _ = run(f"{JOIN}when n0 {kind} {seq} 1 kill n0")
    assert any(m.startswith("j0~") for m in world.store.views[-1].ids())


@pytest.mark.parametrize("trap", ["observe", "pull", "entered"])
@pytest.mark.parametrize("how", ["kill j0", "freeze j0 for 1.5", "leave j0", "stream j0", "link j0 n0"])
def test_learner_comes_to_harm(trap: str, how: str) -> None:
    """A learner fails: no member is affected, and members keep nothing for it in the end."""
    world, outcome = run(f"{JOIN}program length 270\nwhen j0 {trap} 0 0 {how}")
    assert all(outcome_of(world, n).startswith("left: the job is finished") for n in ("n0", "n1", "n2"))
    assert all(world.nodes[n].keeper.copy is None for n in ("n0", "n1", "n2"))
    assert outcome.errors == 0


def test_all_donors_but_the_newest_die_while_it_observes() -> None:
    world, outcome = run_with(f"{JOIN}at 0.15 kill n0\nat 0.25 kill n1", Replaying(pull_s=0.3))
    assert outcome.replays + sum(way == "pause" for way, _ in ways(world, "j0")) == 1
    assert outcome_of(world, "j0").startswith("left: the job is finished")


def test_last_donor_dies_and_the_learner_founds_the_job_from_its_own_state() -> None:
    """A learner's only donor, the last member, dies: the learner founds the job again, and does not use the bytes that
    it pulled.
    """
    world, outcome = run_with(
        "seed 3\nnodes n0\nprogram length 60\nlater j0:replay=yes at 0.1\nat 0.2 kill n0",
        Replaying(pull_s=0.3),
    )
    assert "founded again" in world.store.views[-1].reason
    assert outcome.replays == 0


def test_scheduler_restarts_while_a_newcomer_observes() -> None:
    """The scheduler restarts while a newcomer learns: the learner is forgotten at first, says hello again, and comes
    in.
    """
    world, _ = run(f"{JOIN}program length 200\nwhen n1 greeting 1 0 lag n1 for 0.01\nat 0.16 sched-crash for 0.2")
    assert world.store.term == 2
    assert any(m.startswith("j0~") for m in world.store.views[-1].ids())
    assert all(n.header.learners == () for n in world.nodes.values() if n.outcome.startswith("left: the job is"))


def test_below_min_nodes_a_learner_takes_no_more_time() -> None:
    world, _ = run_with(f"{JOIN}set min_nodes 3\nat 0.2 kill n1", Replaying(pull_s=0.5))
    (first, _), (then, why) = ways(world, "j0")
    assert (first, then) == ("replay", "pause")
    assert "min_nodes=3" in str(why)


def test_log_that_is_too_short_ends_in_a_pause() -> None:
    world, outcome = run_with(JOIN, Replaying(log_entries=2, pull_s=0.3))
    (_, _), (then, why) = ways(world, "j0")
    assert then == "pause"
    assert "of the log" in str(why)
    assert outcome.replays == 0


def test_one_that_applies_slower_than_others_train_is_told_so() -> None:
    slow = Replaying(apply_s=0.2, pull_s=0.2, log_entries=1000)
    world, _ = run_with(f"{JOIN}program length 1200\nset observe_timeout_s 30", slow)
    (_, _), (then, why) = ways(world, "j0")
    assert then == "pause"
    assert "behind" in str(why)


def test_one_that_takes_too_long_is_let_in_by_a_pause() -> None:
    world, _ = run_with(f"{JOIN}set observe_timeout_s 0.2", Replaying(pull_s=3.0))
    assert "observe_timeout_s=0.2" in str(ways(world, "j0")[-1][1])


def test_some_donors_have_no_memory_for_a_copy() -> None:
    _, outcome = run_with(JOIN, Replaying(), n0=False, n2=False)
    assert (outcome.replays, outcome.moved) == (1, 0)


def test_no_donor_has_memory_for_a_copy() -> None:
    world, _ = run_with(JOIN, Replaying(), n0=False, n1=False, n2=False)
    assert "nobody keeps the state" in str(ways(world, "j0")[-1][1])
    assert any(m.startswith("j0~") for m in world.store.views[-1].ids())


def test_steps_that_are_no_pure_function_cost_a_pull_and_harm_nobody() -> None:
    """A member wrongly declared its steps pure functions: the learner's state differs by hash, and it pulls the
    different bytes in a pause (19).
    """
    world, outcome = run_with(f"{JOIN}program length 150", Replaying(impure=1.0, pull_s=0.1))
    assert outcome.replays == 1
    assert 0 < outcome.moved <= world.program.ranges + 1


def test_ten_newcomers_at_once_are_served_from_one_header() -> None:
    later = "".join(f"later j{i}:replay=yes at 0.1\n" for i in range(10))
    world, outcome = run(f"{THREE}program length 300\n{later}")
    assert (outcome.replays, outcome.moved) == (10, 0)
    observed = {n.observation.header.seq for n in world.nodes.values() if n.observation is not None}
    assert len(observed) <= 2, "one generation, or a late one beside it"


@pytest.mark.parametrize("how", ["leave", "kill"])
def test_one_that_comes_and_goes_keeps_nobody_out(how: str) -> None:
    flapping = "".join(
        f"later f{i}:replay=yes at {0.1 + 0.1 * i:g}\nat {0.17 + 0.1 * i:g} {how} f{i}\n" for i in range(6)
    )
    world, outcome = run(f"{THREE}program length 200\n{flapping}later j0:replay=yes at 0.2")
    assert any(m.startswith("j0~") for m in world.store.views[-1].ids())
    assert outcome.ejections == 0


def test_nobody_takes_the_state_along_while_a_newcomer_observes() -> None:
    world, _ = run_with(
        "seed 3\nnodes n0 n1\nprogram length 80\nlater j0:replay=yes at 0.1\nat 0.2 leave n0\nat 0.2 leave n1",
        Replaying(pull_s=0.5),
    )
    assert not any("founded again" in view.reason for view in world.store.views)
    assert outcome_of(world, "j0") == "left: the job is finished"


@pytest.mark.parametrize(
    ("plan", "seeds"),
    [
        (calm_plan, 12),
        (learner_plan, 30),
        (crowd_plan, 6),
        (flapping_plan, 10),
        (all_leave_plan, 15),
        (promise_plan, 10),
        (silent_plan, 3),
        (patient_plan, 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_first_seeds_hold_all_contracts(plan: Callable[[int], Plan], seeds: int) -> None:
    outcomes = [simulate(plan(seed)) for seed in range(seeds)]
    assert [(o.seed, o.violation) for o in outcomes if o.violation] == []
    assert sum(o.joins for o in outcomes) > 0


def test_families_of_plans_do_come_in_by_replay() -> None:
    """Random plans contain many joins by replay; otherwise seeds without violations would prove nothing."""
    outcomes = [simulate(learner_plan(seed)) for seed in range(40)]
    assert sum(o.replays for o in outcomes) >= 20
    assert sum(o.moved for o in outcomes) > 0


def test_in_a_large_job_few_keep_the_state_for_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: set[str] = set()
    begin = Keeper.begin_copy

    def begun(self: Keeper, header: Header) -> None:
        kept.add(self.node.name)
        begin(self, header)

    monkeypatch.setattr(Keeper, "begin_copy", begun)
    names = " ".join(f"n{i}" for i in range(SMALL_JOB + 2))
    job = f"seed 4\nnodes {names}\nset max_nodes 64\nprogram work_s 0.02\nprogram length 90\n"
    world, outcome = run(f"{job}later j0:replay=yes at 0.4\n")
    assert [way for way, _ in ways(world, "j0")] == ["replay"]
    assert (outcome.replays, outcome.moved) == (1, 0)
    assert 1 < len(kept) <= DONORS
