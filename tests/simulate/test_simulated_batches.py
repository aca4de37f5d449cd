"""Tests simulated jobs whose batch has a fixed size: each step has the samples, and leads to the state, of one process
that nothing disturbs, whoever comes, goes or dies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from chaos_lightning.planning.batch import read_split
from chaos_lightning.protocol.types import Kind, Ledger, Settings, Spent, View
from lab.simulate.fixed_hooks import FixedHooks
from lab.simulate.fixed_oracle import FixedOracle
from lab.simulate.fixed_training import step_of, undisturbed
from lab.simulate.plan import Fault, NodeSpec, Plan
from lab.simulate.plans import fixed
from lab.simulate.plans.families import FAMILIES
from lab.simulate.training import Program
from lab.simulate.world import World, simulate

PLANS = (
    fixed.changing_plan, fixed.rerun_plan, fixed.again_plan, fixed.announced_plan, fixed.restarted_plan,
    fixed.torn_plan, fixed.straying_plan,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(len(fixed.FIXED)))
def test_jobs_of_the_family_are_well(seed: int) -> None:
    assert simulate(FAMILIES["batch"](seed), FixedHooks).violation == ""


@pytest.mark.parametrize("plan", PLANS)
def test_jobs_at_which_something_is_aimed_are_well(plan: Callable[[int], Plan]) -> None:
    for seed in range(3):
        assert simulate(plan(seed), FixedHooks).violation == "", seed


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS, fixed.fixed_plan])
def test_many_jobs_are_well(plan: Callable[[int], Plan]) -> None:
    for seed in range(100):
        assert simulate(plan(seed), FixedHooks).violation == "", seed


@pytest.mark.slow
def test_three_thousand_seeds_are_well() -> None:
    for seed in range(3000):
        assert simulate(FAMILIES["batch"](seed), FixedHooks).violation == "", seed


def job_plan(
    *faults: Fault, batch: str = "12", members: int = 3, steps: int = 40, later: tuple[NodeSpec, ...] = ()
) -> Plan:
    """Returns the plan of a job of so many steps, the last of which lacks a sample."""
    samples = int(batch.partition("/")[0])
    nodes = (*(NodeSpec(name=f"n{i}", fits=3) for i in range(members)), *later)
    return Plan(
        seed=5,
        settings=Settings(job="sim", min_nodes=1),
        program=Program(batch=batch, epochs=1, length=samples * steps - 1, work_s=0.06),
        nodes=nodes,
        starts=(*(0.001 * (i + 1) for i in range(members)), *(0.2 for _ in later)),
        faults=faults,
    )


def run(plan: Plan) -> World:
    world = World(plan, FixedHooks())
    assert world.run().violation == ""
    return world


def last_state(world: World) -> tuple[int, ...]:
    """Returns the training state after the job's last step."""
    assert isinstance(world.oracle, FixedOracle)
    return max(world.oracle.alone.items(), key=lambda item: item[0][1])[1]


def splits(world: World) -> list[View]:
    """Returns the views that give the members of the view before other shares."""
    views = world.store.views
    return [b for a, b in pairwise(views) if a.ids() == b.ids() and a.batch != b.batch]


def steps(world: World) -> int:
    return sum(h.kind is Kind.STEP for h in world.oracle.headers.values())


@pytest.mark.parametrize("batch", ["12", "12/3"])
def test_a_death_costs_no_step_and_no_sample(batch: str) -> None:
    world = run(job_plan(Fault(action="kill", node="n2", trap=("forward", 8, 1)), batch=batch))
    assert world.nodes["n2"].outcome == "killed"
    assert steps(world) == steps(run(job_plan(batch=batch))) == 40
    weights = [h.total_weight for h in world.oracle.headers.values() if h.kind is Kind.STEP]
    assert weights == [12.0] * 39 + [11.0]


def test_the_same_is_trained_by_one_process_and_by_three_that_die_and_join() -> None:
    """The first founder's state is the job's, so the jobs end in equal states if all their steps were equal."""
    alone = run(job_plan(members=1))
    faults = [Fault(action="kill", node="n1", at=0.5), Fault(action="leave", node="n2", at=0.8)]
    late = (NodeSpec(name="j0", replay=True), NodeSpec(name="j1", paces=((0.0, 4.0),)))
    assert last_state(run(job_plan(*faults, later=late))) == last_state(alone)


def test_a_slow_member_gets_less_and_more_again_once_it_is_fast() -> None:
    slow = job_plan(members=2, steps=120)
    nodes = (slow.nodes[0], replace(slow.nodes[1], paces=((0.0, 3.0), (2.0, 1.0))))
    world = run(replace(slow, nodes=nodes))
    shares = [split.shares[1] for v in splits(world) if (split := read_split(v.batch, 2)) is not None]
    assert min(shares) in (3, 4), "of 12 units, where it takes three times as long"
    assert shares[-1] >= 5
    assert all("by measured speed" in v.reason for v in splits(world))


def test_members_without_a_share_follow_and_take_over() -> None:
    world = run(job_plan(Fault(action="kill", node="n0", trap=("forward", 9, 0)), batch="2", members=4))
    first = read_split(world.store.views[0].batch, 1)
    assert first is not None
    assert any(0 in split.shares for v in world.store.views if (split := read_split(v.batch, len(v.members))))
    assert world.nodes["n0"].outcome == "killed"
    assert steps(world) == 40


def test_splits_change_in_most_jobs_whose_speeds_do() -> None:
    """The family is about splits that change, so they must do so."""
    worlds = [run(fixed.changing_plan(seed)) for seed in range(6)]
    assert sum(bool(splits(world)) for world in worlds) >= 3


@pytest.mark.parametrize("kind", ["persist", "stored", "next", "send"])
def test_the_scheduler_dies_where_a_split_changes(kind: str) -> None:
    """It dies before, in the midst of and after the write and the announcement of every view."""
    slow = job_plan(members=2, steps=60)
    nodes = (slow.nodes[0], replace(slow.nodes[1], paces=((0.0, 3.0),)))
    changed = 0
    for skip in range(8):
        crash = Fault(action="sched-crash", lasts=0.05, at=0.1, trap=(kind, 0, skip))
        world = run(replace(slow, nodes=nodes, faults=(crash,), limit_s=30.0))
        changed += bool(splits(world))
    assert changed >= 4


MACHINES = {"the root": "n0", "another member": "n1", "the scheduler": ""}


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_death_before_any_effect_costs_no_sample(machine: str, part: int) -> None:
    """The root, another member or the scheduler dies before any one of its effects, while splits change."""
    node = MACHINES[machine]
    slow = job_plan(batch="8/2", steps=24)
    nodes = (*slow.nodes[:2], replace(slow.nodes[2], paces=((0.0, 3.0),)))
    deaths = 0
    for skip in range(part, 1200, 12):
        fault = Fault(action="kill" if node else "sched-crash", node=node, lasts=0.1, trap=("any", 0, skip))
        world = run(replace(slow, nodes=nodes, faults=(fault,), limit_s=25.0))
        if not (world.nodes[node].outcome == "killed" if node else world.schedulers.crashes):
            break
        deaths += 1
    assert deaths > 4


def test_what_members_find_in_the_ledger_is_what_one_process_takes() -> None:
    for batch, length in (("7", 20), ("6/2", 19), ("4/4", 4), ("9", 5)):
        program, ledger = Program(batch=batch, length=length, epochs=2), Ledger()
        for number in range(1, 1 + 2 * -(-length // program.rule.samples)):
            step = step_of(program, ledger)
            assert step == undisturbed(program, number)
            done = length if (last := step.spans(step.all_units)[-1][1]) == length else last
            ledger = Ledger((Spent("", step.epoch, ((0, done),)),))
        assert program.epoch(ledger) == 2
