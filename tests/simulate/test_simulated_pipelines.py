"""Simulated jobs with pipelines: nothing is lost wherever in a step a member dies, and whatever moves meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chaos_lightning.lab.simulate.pipelines import RoundRobin
from chaos_lightning.lab.simulate.plan import Fault, NodeSpec, Plan
from chaos_lightning.lab.simulate.plans import staged
from chaos_lightning.lab.simulate.plans.families import FAMILIES
from chaos_lightning.lab.simulate.staged_hooks import StagedHooks
from chaos_lightning.lab.simulate.staged_oracle import StagedOracle
from chaos_lightning.lab.simulate.training import Program
from chaos_lightning.lab.simulate.world import World, simulate
from chaos_lightning.membership.topology import every_pair
from chaos_lightning.planning.pipelines.units import ViewPipelines, coverage, coverage_error
from chaos_lightning.protocol.types import Member, Settings

PLANS = (
    staged.rerun_plan, staged.founding_plan, staged.leaving_plan, staged.announced_plan, staged.torn_plan,
    staged.early_plan, staged.frozen_plan, staged.crowded_plan,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_jobs_of_the_family_are_well(seed: int) -> None:
    assert simulate(FAMILIES["pipelines"](seed), StagedHooks).violation == ""


@pytest.mark.parametrize("plan", PLANS)
def test_jobs_at_which_something_is_aimed_are_well(plan: Callable[[int], Plan]) -> None:
    for seed in range(3):
        assert simulate(plan(seed), StagedHooks).violation == "", seed


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS, staged.moved_plan, staged.staged_plan])
def test_many_jobs_are_well(plan: Callable[[int], Plan]) -> None:
    for seed in range(100):
        assert simulate(plan(seed), StagedHooks).violation == "", seed


def job(*faults: Fault, members: int = 4, stages: int = 2) -> World:
    """A finished job of 120 steps."""
    plan = Plan(
        seed=5,
        settings=Settings(job="sim", min_nodes=members - 1),
        program=Program(layers=4, stages=stages, micro_batches=4, epochs=1, length=480),
        nodes=tuple(NodeSpec(name=f"n{i}") for i in range(members)),
        starts=tuple(0.001 * (i + 1) for i in range(members)),
        faults=faults,
    )
    world = World(plan, StagedHooks())
    assert world.run().violation == ""
    return world


def committed(world: World) -> list[str]:
    return [f"{h.seq} {h.kind} in {h.view}" for h in world.oracle.headers.values()]


def test_a_death_costs_its_step_alone() -> None:
    world = job(Fault(action="kill", node="n2", trap=("backward", 8, 1)))
    assert len(committed(world)) == len(committed(job()))
    assert world.nodes["n2"].outcome == "killed"


def test_parts_move_when_a_member_leaves_and_the_leaver_goes_after_that() -> None:
    world = job(Fault(action="leave", node="n1", at=0.4), members=3, stages=3)
    assert isinstance(world.oracle, StagedOracle)
    let_go = next(v for v in world.store.views if v.leaving)
    assert [m.name for m in let_go.leaving] == ["n1"]
    assert world.oracle.pulls > 0
    assert world.nodes["n1"].outcome.startswith("left")


def test_all_leave_at_one_header() -> None:
    world = job(*(Fault(action="leave", node=f"n{i}", at=0.4) for i in range(2)), members=2)
    last = world.store.views[-1]
    assert (last.ids(), len(last.leaving)) == ((), 2)
    assert len({n.header.hash for n in world.nodes.values()}) == 1


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_pipelines_that_are_dealt_run_each_micro_batch_once(members: int, stages: int) -> None:
    """Also after members have gone, one after the other."""
    program = Program(layers=5, stages=stages, micro_batches=4)
    for seed in range(6):
        dealer, text = RoundRobin(program, seed), ""
        here = [Member(f"m~{i}", "m", "h", "127.0.0.1", 1) for i in range(members)]
        while here:
            ids = [m.id for m in here]
            text, why = dealer.reroute(text, here, links=every_pair(ids))
            assert text, why
            pipelines = ViewPipelines.from_json(text)
            given = {m: coverage(pipelines.units(m)) for m in ids}
            assert coverage_error(5, [(0, 4)], given) == ""
            here.pop(seed % len(here))


def test_no_pipelines_are_dealt_where_members_lack_room_or_links() -> None:
    here = [Member(f"m~{i}", "m", "h", "127.0.0.1", 1) for i in range(2)]
    dealer = RoundRobin(Program(layers=5, stages=2, micro_batches=4, most=2))
    assert dealer.reroute("", here, links=every_pair(["m~0", "m~1"])) == ("", "2 members are here, and a plan needs 3")
    dealer = RoundRobin(Program(layers=5, stages=2, micro_batches=4))
    assert dealer.reroute("", here, links=()) == ("", "no border between stages has a link")
