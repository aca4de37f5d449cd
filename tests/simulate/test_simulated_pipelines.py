"""Tests simulated jobs with pipelines: no part of the state is lost, whenever in a step a member dies and whatever
parts are moving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from chaos_lightning.membership.pipelining import PipelineChoice, PipelinerFactory
from chaos_lightning.membership.planned import PlannedPipeliner
from chaos_lightning.membership.scheduler import planned
from chaos_lightning.membership.topology import every_pair, links_of, pair
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.planning.pipelines.units import ViewPipelines, coverage, coverage_error
from chaos_lightning.protocol.types import NO_VIEW, Kind, LinkSpec, Member, Settings, View, ViewId
from lab.simulate.part_plane import PartPlane, SumDown, SumUp
from lab.simulate.pipelines import RoundRobin
from lab.simulate.plan import Fault, NodeSpec, Plan
from lab.simulate.plans import staged
from lab.simulate.plans.families import FAMILIES
from lab.simulate.staged import StagedNode
from lab.simulate.staged_hooks import StagedHooks
from lab.simulate.staged_oracle import StagedOracle
from lab.simulate.training import Program
from lab.simulate.world import World, simulate

PLANS = (
    staged.rerun_plan, staged.founding_plan, staged.leaving_plan, staged.let_go_plan, staged.announced_plan,
    staged.torn_plan, staged.early_plan, staged.frozen_plan, staged.crowded_plan, staged.sides_plan,
    staged.drifting_plan, staged.parting_plan, staged.rounds_plan, staged.tied_plan,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_jobs_of_the_family_are_well(seed: int) -> None:
    assert simulate(FAMILIES["pipelines"](seed), StagedHooks).violation == ""


def test_members_that_have_no_room_for_all_layers_may_wait_for_others() -> None:
    """Two members with room for two layers each of six wait for others, which never come: the run reports no
    violation.
    """
    world = World(staged.staged_plan(650), StagedHooks())
    assert world.run().violation == ""
    assert not world.store.views


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1096, id="newcomers of a view that no header has carried are needed"),
        pytest.param(1734, id="a side of a split goes on from GENESIS, where owners make their parts"),
        pytest.param(3398, id="the same, and who is past GENESIS is out"),
        pytest.param(2831, id="a joiner that reaches nobody is put out while it loads"),
        pytest.param(3150, id="a job may have fewer members than any plan needs"),
        pytest.param(4109, id="after the closing header nobody needs parts"),
    ],
)
def test_jobs_at_which_something_was_found(seed: int) -> None:
    assert simulate(staged.staged_plan(seed), StagedHooks).violation == ""


@pytest.mark.parametrize("plan", PLANS)
def test_jobs_at_which_something_is_aimed_are_well(plan: Callable[[int], Plan]) -> None:
    assert simulate(plan(0), StagedHooks).violation == ""


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS, staged.moved_plan, staged.staged_plan])
def test_many_jobs_are_well(plan: Callable[[int], Plan]) -> None:
    for seed in range(100):
        assert simulate(plan(seed), StagedHooks).violation == "", seed


class PlannedHooks(StagedHooks):
    """Hooks for jobs whose pipelines come from the planner, as in a real scheduler."""

    def pipeliner_for(self, program: Program, seed: int) -> PipelinerFactory:
        return planned


@pytest.mark.parametrize("seed", range(30))
def test_jobs_of_the_family_are_well_with_the_planners_pipelines(seed: int) -> None:
    assert simulate(FAMILIES["pipelines"](seed), PlannedHooks).violation == ""


@pytest.mark.parametrize("plan", PLANS)
def test_jobs_at_which_something_is_aimed_are_well_with_the_planners_pipelines(plan: Callable[[int], Plan]) -> None:
    for seed in range(3):
        assert simulate(plan(seed), PlannedHooks).violation == "", seed


class HastyHooks(StagedHooks):
    """Hooks for jobs whose recoveries assign stages in turn, and whose scheduler searches for better pipelines
    later.
    """

    def pipeliner_for(self, program: Program, seed: int) -> PipelinerFactory:
        return lambda requests: DealtAtFirst(requests, RoundRobin(program, seed))


class DealtAtFirst(PlannedPipeliner):
    """Pipeliner of HastyHooks: at first assigns stages in turn, later uses the planner."""

    def __init__(self, requests: Mapping[str, PipelineRequest], dealer: RoundRobin) -> None:
        super().__init__(requests)
        self._dealer = dealer

    def reroute(self, before: str, members: Sequence[Member], **more: Any) -> PipelineChoice:
        return self._dealer.reroute(before, members, **more)


def test_better_pipelines_ride_on_headers_whatever_goes_wrong_meanwhile() -> None:
    better = 0
    for plan in (staged.rerun_plan, staged.announced_plan, staged.torn_plan, staged.moved_plan):
        for seed in range(2):
            world = World(plan(seed), HastyHooks())
            assert world.run().violation == "", (plan, seed)
            better += sum(v.reason.startswith("better pipelines") for v in world.store.views)
    assert better >= 3


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS, staged.moved_plan, staged.staged_plan])
def test_many_jobs_are_well_with_the_planners_pipelines(plan: Callable[[int], Plan]) -> None:
    for seed in range(100):
        assert simulate(plan(seed), PlannedHooks).violation == "", seed


def job_plan(*faults: Fault, members: int = 4, stages: int = 2, length: int = 480, **program: Any) -> Plan:
    """Returns the plan of a job with pipelines of `length` / 4 steps."""
    return Plan(
        seed=5,
        settings=Settings(job="sim", min_nodes=members - 1),
        program=Program(layers=4, stages=stages, micro_batches=4, epochs=1, length=length, **program),
        nodes=tuple(NodeSpec(name=f"n{i}") for i in range(members)),
        starts=tuple(0.001 * (i + 1) for i in range(members)),
        faults=faults,
    )


def run(plan: Plan) -> World:
    world = World(plan, StagedHooks())
    assert world.run().violation == ""
    return world


def job(*faults: Fault, members: int = 4, stages: int = 2) -> World:
    """Runs a job of 120 steps with these faults; returns its world."""
    return run(job_plan(*faults, members=members, stages=stages))


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


def steps(world: World) -> int:
    return sum(h.kind is Kind.STEP for h in world.oracle.headers.values())


def test_all_come_back_and_go_on_from_what_each_wrote_down() -> None:
    """All members leave with their own parts in files, and processes that replace them go on from these files without
    pulling parts.
    """
    plan = job_plan(*(Fault(action="leave", node=f"n{i}", at=0.4) for i in range(2)), members=2)
    again = tuple(NodeSpec(name=f"r{i}", after=f"n{i}") for i in range(2))
    world = run(replace(plan, nodes=(*plan.nodes, *again), starts=(*plan.starts, 0.1, 0.1)))
    parting = next(v for v in world.store.views if not v.members)
    founded = world.store.views[-1]
    assert founded.predecessor == parting.id
    assert "from the state that" in founded.reason
    assert steps(world) == steps(job(members=2))
    kept = {n.name: n.file[0] for n in world.nodes.values() if isinstance(n, StagedNode) and n.file is not None}
    assert {name: k.header.prev_hash for name, k in kept.items()} == {
        n: world.nodes[n].header.hash for n in ("n0", "n1")
    }
    assert all(k.parts != ((0, 5),) for k in kept.values())


def test_a_job_begins_anew_only_where_a_file_is_missing() -> None:
    """All leave, but n1 dies before it has written its layers, which no other member has: n0 writes its own, and need
    not wait.
    """
    faults = [Fault(action="leave", node=f"n{i}", at=0.4) for i in range(2)]
    plan = job_plan(*faults, Fault(action="kill", node="n1", trap=("keeps", 0, 0)), members=2)
    world = World(plan, StagedHooks())
    assert world.run().violation == ""
    assert [world.nodes[name].outcome.partition(":")[0] for name in ("n0", "n1")] == ["left", "killed"]
    assert world.store.views[-1].members == (), "nobody has founded it again"


def test_a_part_that_drifts_is_pulled_and_no_view_changes() -> None:
    world = run(replace(job_plan(length=80), drift=0.2))
    assert isinstance(world.oracle, StagedOracle)
    drifted = [d for h in world.oracle.headers.values() for d in h.drifted]
    assert len(drifted) > 2
    assert len(world.store.views) == len(run(job_plan(length=80)).store.views)
    assert world.oracle.pulls > len(drifted)


def test_rounds_of_evaluation_count_each_batch_once_also_after_a_death() -> None:
    plan = job_plan(
        Fault(action="kill", node="n2", trap=("forward", 9, 1)), length=80, evaluates=True, gather_every=1, shared=True
    )
    world = run(plan)
    rounds = [h for h in world.oracle.headers.values() if h.kind is Kind.GATHER]
    assert len(rounds) == steps(world) == 20
    assert all(any(h.answers) for h in rounds)


MACHINES = {"the root": "n0", "another member": "n2", "the scheduler": ""}


def dying(machine: str, skip: int) -> Plan:
    """Returns a plan in which the given machine dies just before effect number `skip`, while a member leaves and its
    layers move.
    """
    node, more = MACHINES[machine], {"gather_every": 3, "evaluates": True, "shared": True, "work_s": 0.4}
    fault = Fault(action="kill" if node else "sched-crash", node=node, lasts=0.1, trap=("any", 0, skip))
    leaves = Fault(action="leave", node="n3", at=0.1)
    plan = job_plan(leaves, fault, members=5, length=32, **more)
    return replace(plan, settings=replace(plan.settings, min_nodes=3), store_s=0.002, limit_s=25.0)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_death_before_any_effect_loses_nothing(machine: str, part: int) -> None:
    """The commit root, another member or the scheduler dies before any one of its effects: no part of the state is
    lost.
    """
    deaths = 0
    for skip in range(part, 1200, 12):
        world = run(dying(machine, skip))
        node = world.nodes.get(MACHINES[machine])
        if not (node.outcome == "killed" if node is not None else world.schedulers.crashes):
            break
        deaths += 1
    assert 4 < deaths < 99


def test_all_leave_at_one_header() -> None:
    world = job(*(Fault(action="leave", node=f"n{i}", at=0.4) for i in range(2)), members=2)
    last = world.store.views[-1]
    assert (last.ids(), len(last.leaving)) == ((), 2)
    assert len({n.header.hash for n in world.nodes.values()}) == 1


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_pipelines_that_are_dealt_run_each_micro_batch_once(members: int, stages: int) -> None:
    """Pipelines assigned in turn run each micro-batch once, even after members have gone one by one."""
    program = Program(layers=5, stages=stages, micro_batches=4)
    for seed in range(6):
        dealer, text = RoundRobin(program, seed), ""
        here = [Member(f"m~{i}", "m", "h", "127.0.0.1", 1) for i in range(members)]
        while here:
            ids = [m.id for m in here]
            choice = dealer.reroute(text, here, links=every_pair(ids))
            text = choice.text
            assert text, choice.reason
            pipelines = ViewPipelines.from_json(text)
            given = {m: coverage(pipelines.units(m)) for m in ids}
            assert coverage_error(5, [(0, 4)], given) == ""
            here.pop(seed % len(here))


def test_no_pipelines_are_dealt_where_members_lack_room_or_links() -> None:
    here = [Member(f"m~{i}", "m", "h", "127.0.0.1", 1) for i in range(2)]
    dealer = RoundRobin(Program(layers=5, stages=2, micro_batches=4, most=2))
    choice = dealer.reroute("", here, links=every_pair(["m~0", "m~1"]))
    assert (choice.text, choice.reason) == ("", "2 members are here, and a plan needs 3")
    dealer = RoundRobin(Program(layers=5, stages=2, micro_batches=4))
    choice = dealer.reroute("", here, links=())
    assert (choice.text, choice.reason) == ("", "no border between stages has a link")


def test_sums_reach_owners_that_have_no_link_with_each_other() -> None:
    members = tuple(Member(f"{n}~1", n, "h", "127.0.0.1", 1) for n in "abcd")
    rows = tuple(Pipeline((PlanStage(m.id, 0, 2),), 1) for m in members)
    links = tuple(LinkSpec(a.id, b.id) for a, b in pairwise(members))
    view = View(
        ViewId(1, 1), NO_VIEW, members, links=links, pipelines=ViewPipelines.of(PipelinePlan(2, rows)).to_json()
    )
    planes: dict[str, PartPlane] = {}
    over: list[str] = []
    for seq in range(4):  # another owner is the root
        for m in members:

            def send(to: str, message: SumUp | SumDown, me: str = m.id) -> None:
                assert pair(me, to) in links_of(view), f"{me} and {to} have no link"
                planes[to].take(message)

            planes[m.id] = PartPlane(send, lambda view, seq, me=m.id: over.append(me))  # type: ignore[misc]
            planes[m.id].me = m.id
            planes[m.id].open(view, seq)
        for part, m in product(range(2), members):
            planes[m.id].give(part, (10 * part + members.index(m),))
        assert sorted(over) == [m.id for m in members]
        assert all(p.results(view.id, seq) == {0: (0, 1, 2, 3), 1: (10, 11, 12, 13)} for p in planes.values())
        over.clear()
