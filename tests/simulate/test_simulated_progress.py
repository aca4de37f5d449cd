"""Tests that jobs with many faults make progress, or can say why not (lab/simulate/progress.py)."""

from __future__ import annotations

import pytest
from simulate_support import notes, outcome_of, run

from chaos_lightning.membership.backoff import FREE, LONGEST_S, Backoff
from lab.simulate.plans.families import sparse_family
from lab.simulate.plans.links import bridge_plan, flapping_link_plan, stranded_plan
from lab.simulate.world import World, simulate

ROW = (
    "seed 7\nnodes n0:neighbours=n1+n2 n1:neighbours=n0 n2:neighbours=n0\nset min_nodes 3\n"
    "program length 90\nprogram epochs 1\nprogram work_s 0.03\n"
)
LINE = "seed 7\nnodes n0:neighbours=n1 n1:neighbours=n0+n2 n2:neighbours=n1\nprogram length 300\n"


def test_newcomer_that_bridges_a_link_that_carries_nothing_comes_in_with_one_view() -> None:
    world, _ = run(f"{ROW}measured\nlater j0:neighbours=n0+n1+n2 at 0.6\nat 0.3 rate n0 n1 0")
    assert len(world.store.views) <= 3, [v.reason for v in world.store.views]
    assert len(world.store.views[-1].members) == 4


def test_two_newcomers_whose_link_carries_nothing_come_in() -> None:
    """Two newcomers come in although the link between them carries no data, as their view would fall apart without
    it.
    """
    world, _ = run(
        "seed 3\nnodes n0:neighbours=n1 n1:neighbours=n0\nmeasured\nprogram length 120\n"
        "later j0:neighbours=n1+j1 at 0.3\nlater j1:neighbours=j0+n0 at 0.3\n"
        "at 0.2 rate n0 n1 0\nat 0.2 rate j0 j1 0\nat 0.25 rate j1 n0 0"
    )
    assert len(world.store.views) < 10, [v.reason for v in world.store.views]


def test_part_that_newcomers_make_enough_goes_on_and_not_the_one_with_the_oldest_member() -> None:
    world, _ = run(
        "seed 3\nnodes a:neighbours=b b:neighbours=a+c\nset min_nodes 2\nprogram length 120\n"
        "later c:neighbours=b at 0.6\nat 0.4 cut a b for 100"
    )
    assert [v.ids() for v in world.store.views[1:]] == [("b~2",), ("b~2", "c~3")]


def test_recoveries_in_a_row_wait_longer_and_longer_and_all_are_told() -> None:
    world = World(flapping_link_plan(0))
    told = [f"at {world.plan.seed}"]
    world.on_note = lambda note: told.append(str(dict(note.fields).get("text", ""))) if note.name == "notice" else None
    assert world.run().violation == ""
    assert any("attempts in a row to go on committed no slot" in text for text in told)


def test_back_off_begins_anew_with_each_slot() -> None:
    backoff = Backoff()
    now = 0.0
    for attempt in range(1, FREE + 8):
        assert (backoff.left_s(now, 5) > 0) == (attempt > FREE)
        now += backoff.left_s(now, 5)
        backoff.begins(now, 5)
    assert backoff.left_s(now, 5) == LONGEST_S
    assert backoff.left_s(now, 6) == 0
    assert backoff.fruitless == 0


@pytest.mark.parametrize("how", ["leave", "drain"])
def test_bridge_that_leaves_is_told_and_goes_after_a_while(how: str) -> None:
    world, _ = run(f"{LINE}at 0.6 {how} n1")
    assert outcome_of(world, "n1").startswith("left: n1~")
    assert any("they stay until there is one" in str(n["text"]) for n in notes(world, "notice"))
    assert "they stay until there is one" in world.nodes["n1"].machine.notice


@pytest.mark.parametrize("how", ["leave", "drain"])
def test_bridge_that_leaves_waits_for_a_newcomer_that_links_the_others(how: str) -> None:
    world, outcome = run(f"{LINE}later j0:neighbours=n0+n2 at 0.8\nat 0.6 {how} n1")
    assert outcome.ejections == 0
    assert outcome_of(world, "n1").startswith("left: view")
    assert {m.name for m in world.store.views[-1].members} == {"n0", "n2", "j0"}


@pytest.mark.parametrize("plan", [stranded_plan, bridge_plan])
@pytest.mark.parametrize("seed", range(8))
def test_aimed_plans_get_on(plan: object, seed: int) -> None:
    assert simulate(plan(seed)).violation == ""  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(1000, 1016))
def test_sparse_graphs_get_on_or_say_why_not(seed: int) -> None:
    assert simulate(sparse_family(seed)).violation == ""


@pytest.mark.slow
def test_more_sparse_graphs_get_on_or_say_why_not() -> None:
    assert [(s, v) for s in range(150) if (v := simulate(sparse_family(s)).violation)] == []
