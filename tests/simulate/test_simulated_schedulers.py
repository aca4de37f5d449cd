"""Tests schedulers that die between two effects, wake up after they were deposed, or lose their chain; some cases are
former failures, by seed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulate_support import showing

from chaos_lightning.membership.effects import Note
from chaos_lightning.protocol.types import Welcome
from lab.simulate.bugs import BUGS
from lab.simulate.node import Node
from lab.simulate.plan import Fault
from lab.simulate.plans.families import failing_family
from lab.simulate.script import parse
from lab.simulate.world import World, simulate

FOUR = "seed 4\nnodes n0:host=h1 n1:host=h1 n2:host=h2 n3:host=h2\nprogram length 400\nprogram work_s 0.02\n"


@pytest.mark.parametrize("number", range(1000, 1015))
def test_plans_with_failing_schedulers_hold_all_contracts(number: int) -> None:
    """One run of each kind of plan with failing schedulers holds all contracts; more seeds run in
    test_simulated_seeds.py.
    """
    assert simulate(failing_family(number)).violation == ""


def test_a_deposed_leader_puts_nobody_out() -> None:
    seed, _ = next(showing("7-unfenced"))
    assert simulate(BUGS["7-unfenced"].plan(seed)).violation == ""


def test_a_newcomer_without_a_link_confirms_no_death() -> None:
    seed, _ = next(showing("12-gullible"))
    assert simulate(BUGS["12-gullible"].plan(seed)).violation == ""


def test_whom_a_stored_view_let_go_is_released_by_the_next_scheduler() -> None:
    plan = parse(FOUR + "at 0.5 drain n1")
    crash = Fault(action="sched-crash", at=0.5, lasts=0.3, trap=("stored", 0, 0))
    world = World(replace(plan, faults=(*plan.faults, crash), orderly=True))
    outcome = world.run()
    assert outcome.violation == ""
    assert outcome.crashes == 1
    assert world.nodes["n1"].outcome.startswith("left: view")
    assert outcome.ejections == 0


def test_links_closed_in_good_order_are_told_so_again() -> None:
    world = World(parse(FOUR))
    node = world.nodes["n0"]
    world.kernel.at(0.5, lambda: node.link_changed("n3~9", True, "connected"))
    world.kernel.at(0.5, lambda: node.link_changed("n3~9", False, "bye"))
    told: list[object] = []
    world.kernel.at(0.6, lambda: told.extend(node.machine.on(0.6, _welcome_again(world))))
    assert world.run().violation == ""
    assert "bye" in [getattr(getattr(e, "message", None), "evidence", "") for e in told]


def _welcome_again(world: World) -> object:
    from chaos_lightning.membership.effects import ControlIn

    member = world.store.views[-1].members
    me = next(m for m in member if m.name == "n0")
    return ControlIn(Welcome(me, 1, "joiner", "welcome back", 0.1, 0.35))


def test_members_of_a_lost_chain_train_on() -> None:
    plan = parse(FOUR)
    world = World(replace(plan, faults=(Fault(action="chain-lost", at=0.5, lasts=0.2),), limit_s=2.5))
    steps: list[int] = []
    world.kernel.at(2.0, lambda: steps.extend(n.header.seq for n in world.nodes.values()))
    early: list[int] = []
    world.kernel.at(0.8, lambda: early.extend(n.header.seq for n in world.nodes.values()))
    outcome = world.run()
    assert outcome.ejections == 0
    assert not world.store.views
    assert min(steps) > max(early)
    assert "--rebuild" in str(world.scheduler.machine.snapshot()["reason"])


def test_a_newcomer_whose_view_was_announced_comes_in_though_the_chain_is_lost() -> None:
    """The chain is lost when a newcomer's view was announced: the newcomer meets the next scheduler without a view, and
    comes in by the late header.
    """
    world = World(replace(parse(FOUR + "program work_s 0.2\nlater j0 at 0.5"), limit_s=6.0))
    lost = Fault(action="chain-lost", lasts=0.02)

    def lose(note: Note) -> None:
        if note.name == "view" and "j0" in str(dict(note.fields)["joiners"]):
            world.on_note = lambda note: None
            world.kernel.after(0.01, lambda: world.schedulers.strike(lost))

    world.on_note = lose
    found: list[tuple[int, int]] = []
    world.kernel.at(5.0, lambda: found.extend((len(n.machine.view.ids()), n.header.seq) for n in _standing(world)))
    outcome = world.run()
    assert outcome.crashes == 1
    assert not world.store.views
    assert outcome.ejections == 0
    assert [count for count, _ in found] == [5] * 5
    assert min(seq for _, seq in found) > 10


def _standing(world: World) -> list[Node]:
    return [n for n in world.nodes.values() if n.machine.view is not None]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_lost_chain_is_rebuilt_by_more_than_half(dead: int) -> None:
    plan = parse(FOUR + "".join(f"at 0.7 kill n{i}\n" for i in range(dead)))
    faults = (*plan.faults, Fault(action="chain-lost", at=0.5, lasts=0.2), Fault(action="rebuild", at=1.0))
    world = World(replace(plan, faults=faults))
    outcome = world.run()
    assert outcome.violation == ""
    assert outcome.ejections == 0
    first = world.store.views[0]
    assert first.reason.startswith("rebuilt")
    assert len(first.members) == 4 - dead
    assert first.id.term > 1


def test_exactly_half_is_told_who_is_missing_and_waits() -> None:
    plan = parse(FOUR + "at 0.7 kill n0\nat 0.7 kill n1")
    faults = (*plan.faults, Fault(action="chain-lost", at=0.5, lasts=0.2), Fault(action="rebuild", at=1.0))
    world = World(replace(plan, faults=faults, limit_s=12.0))
    assert "stuck" in world.run().violation
    reason = str(world.scheduler.machine.snapshot()["reason"])
    assert "3 of the 4 members" in reason
    assert "n0~" in reason.partition("Missing")[2]
    assert not world.store.views
