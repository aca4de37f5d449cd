"""Tests members that are ranks of an outer-sync cluster and adopt versions while others join, replay, die and wake."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from simulate_support import SHOWED, notes, violation

from lab.simulate.bugs.outer import OUTER_BUGS
from lab.simulate.outer_ranks import OuterHooks
from lab.simulate.plan import Outcome, OuterScript, Replaying
from lab.simulate.plans.learners import calm_plan
from lab.simulate.plans.outer import outer_plan, waiting_plan
from lab.simulate.world import World, simulate

BOUND = 40
"""Within so many seeds each bug of these must show."""


def run(world: World) -> Outcome:
    outcome = world.run()
    assert outcome.violation == ""
    return outcome


def test_the_first_seeds_of_ranks_hold_all_contracts() -> None:
    worlds = [World(outer_plan(seed), OuterHooks()) for seed in range(10)]
    outcomes = [run(world) for world in worlds]
    assert sum(outcome.adoptions for outcome in outcomes) > 120
    assert sum(outcome.passed for outcome in outcomes) > 0
    answered = sum((world.outer.answered for world in worlds if world.outer is not None), Counter())
    assert set(answered) == {"accepted", "rejected", "void"}


@pytest.mark.slow
def test_ranks_that_wait_for_answers_let_the_others_go() -> None:
    for seed in range(4):
        world = World(waiting_plan(seed), OuterHooks())
        run(world)
        left = [node for node in world.nodes.values() if node.leaving and "rules without it" in node.outcome]
        assert len(left) == len(world.nodes) - 1


@pytest.mark.parametrize("seed", [235, 432, 1039, 1096, 1744])
def test_what_broke_a_contract_once_holds_it(seed: int) -> None:
    """Seeds that once broke a contract: in 235 and 1096 ranks wake after they were put out; for 432, 1039, 1744 see
    tests/BUGS.md.
    """
    run(World(outer_plan(seed), OuterHooks()))


@pytest.mark.slow
def test_two_thousand_seeds_of_ranks_hold_all_contracts() -> None:
    outcomes = [simulate(outer_plan(seed), OuterHooks) for seed in range(2000)]
    assert [(outcome.seed, outcome.violation) for outcome in outcomes if outcome.violation] == []


@pytest.mark.parametrize("name", OUTER_BUGS)
def test_a_rule_of_ranks_that_is_broken_shows_within_forty_seeds(name: str) -> None:
    assert any(violation(name, seed) for seed in (SHOWED.get(name, 0), *range(BOUND)))


def joined(seed: int, script: OuterScript, replaying: Replaying) -> World:
    """Returns a world without faults, in which newcomers come in by replay while versions are adopted."""
    plan = calm_plan(seed)
    starts = tuple(at + 0.6 if at > 0.05 else at for at in plan.starts)
    return World(replace(plan, outer=script, replaying=replaying, starts=starts), OuterHooks())


@pytest.mark.slow
def test_who_replays_passes_over_the_adoption_of_a_version_and_nothing_moves() -> None:
    """A newcomer that replays also adopts a version as the members did: its state equals theirs, so it pulls nothing
    when it is let in (18).
    """
    script = OuterScript(inner_steps=2, lossy=True, answer_s=(0.02, 0.06))
    outcomes = [run(joined(seed, script, Replaying(calm=True, pull_s=0.1))) for seed in range(6)]
    assert sum(outcome.passed for outcome in outcomes) > 3
    assert sum(outcome.replays for outcome in outcomes) > 4
    assert sum(outcome.moved for outcome in outcomes) == 0


@pytest.mark.slow
def test_where_no_member_has_a_version_any_more_a_newcomer_gives_way_to_a_pause() -> None:
    script = OuterScript(inner_steps=1, answer_s=(0.001, 0.002))
    worlds = [joined(seed, script, Replaying(apply_s=0.02, pull_s=0.3, log_entries=1000)) for seed in range(4)]
    for world in worlds:
        run(world)
    whys = [str(note.get("reason")) for world in worlds for note in notes(world, "way_in")]
    assert any(re.search(r"version v\d+-\w+, which slot \d+ adopted, is at no member any more", why) for why in whys)
