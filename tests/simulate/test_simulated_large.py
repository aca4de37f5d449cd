"""Tests large simulated jobs: few links per member, headers down a tree, many joins and deaths at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from simulate_support import notes, outcome_of, run

from chaos_lightning.membership.donors import DONORS
from chaos_lightning.membership.learners import Learners
from chaos_lightning.membership.peers import Peer
from chaos_lightning.planning.graph import parting_nodes
from lab.simulate.plan import Fault
from lab.simulate.plans.large import large_plan, thin_plan
from lab.simulate.world import World, simulate


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_twenty_members_hold_all_contracts(seed: int) -> None:
    world = World(large_plan(seed))
    assert not world.run().violation
    largest = max(world.store.views, key=lambda v: len(v.members))
    assert len(largest.members) > 16
    assert 0 < len(largest.links) < len(largest.members) * (len(largest.members) - 1) // 2


def test_where_few_links_are_given_others_make_up_for_a_nodes_loss() -> None:
    assert not simulate(thin_plan(1)).violation


def given_donors(monkeypatch: pytest.MonkeyPatch, size: int) -> tuple[str, float, tuple[str, ...]]:
    """Returns the scenario of a job with `size` members and a learner j0, the time at which j0 is told to begin (s),
    and its donors' names.
    """
    chosen: list[tuple[float, tuple[str, ...]]] = []
    choose = Learners._donors_of

    def chose(self: Learners, learner: Peer, busy: Collection[str] = ()) -> tuple[str, ...]:
        donors = choose(self, learner, busy)
        chosen.append((self._desk.now, donors))
        return donors

    monkeypatch.setattr(Learners, "_donors_of", chose)
    names = " ".join(f"n{i}" for i in range(size))
    job = f"seed 4\nnodes {names}\nset max_nodes 64\nprogram work_s 0.02\nprogram length 1000\n"
    job += "later j0:replay=yes at 0.5\n"
    run(job)
    ((at, donors),) = chosen
    assert len(donors) == DONORS
    return job, at, tuple(m.partition("~")[0] for m in donors)


def begins_again(job: str) -> None:
    """Checks that in this scenario the learner j0 gets new donors on its way, and still comes in by replay."""
    world, outcome = run(job)
    ways = [(n["way"], str(n["reason"])[:15]) for n in notes(world, "way_in") if str(n["member"]).startswith("j0~")]
    assert [way for way, _ in ways] == ["replay", "replay"]
    assert ways[-1][1] == "it begins again"
    assert (outcome.replays, outcome.moved) == (1, 0)
    assert outcome_of(world, "j0") == "left: the job is finished"


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(27, marks=pytest.mark.slow), 20])
def test_a_learner_whose_donors_all_die_before_it_begins_gets_others_at_once(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """All donors of a learner die before it begins: it gets others at once; of 20 members all that are left serve
    it.
    """
    job, at, donors = given_donors(monkeypatch, size)
    begins_again(job + "".join(f"at {at + 0.0002:.6f} kill {name}\n" for name in donors))


@pytest.mark.slow
def test_a_learner_that_sleeps_while_its_donors_die_begins_again_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner is frozen while its donors die: when it wakes it begins again with the new donors that it was given."""
    job, at, donors = given_donors(monkeypatch, 27)
    job += "when j0 observe 0 0 freeze j0 for 0.25\n"
    begins_again(job + "".join(f"at {at + 0.1:.6f} kill {name}\n" for name in donors))


@pytest.mark.slow
def test_links_that_stay_cut_are_replaced_until_no_node_parts_the_view() -> None:
    plan, random = thin_plan(4), Random(4)
    cuts = tuple(
        Fault(action="cut", node=one.name, other=other.name, at=3.0, lasts=300.0)
        for one, other in combinations(plan.nodes, 2)
        if random.random() < 0.3
    )
    program = replace(plan.program, length=30 * 20, work_s=1.0)
    world = World(replace(plan, faults=cuts, program=program), validate=False)
    assert not world.run().violation
    last = world.store.views[-1]
    assert parting_nodes({m.id: m.place for m in last.members}, [(link.a, link.b) for link in last.links]) == []


@pytest.mark.slow
def test_a_hundred_seeds_of_64_members_hold_all_contracts() -> None:
    assert [(s, v) for s in range(100) if (v := simulate(large_plan(s, 64)).violation)] == []


@pytest.mark.slow
def test_ten_seeds_of_256_members_hold_all_contracts() -> None:
    assert [(s, v) for s in range(10) if (v := simulate(large_plan(s, 256)).violation)] == []
