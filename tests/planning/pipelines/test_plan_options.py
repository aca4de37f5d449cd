"""Tests a job's options after a loss as plans of real devices, and a policy's choice between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chaos_lightning.planning.pipelines.choice import FILL, KEEP, MOVE, RESTART, Outlook, choose
from chaos_lightning.planning.pipelines.files import job_of
from chaos_lightning.planning.pipelines.formation import Pauses
from chaos_lightning.planning.pipelines.options import PlanOptions
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import Planner
from chaos_lightning.planning.pipelines.policies import POLICIES, decide


def options(
    lost: tuple[str, ...], rows: tuple[tuple[str, ...], ...] = (("d0", "d1"), ("d2", "d3")), **more: Any
) -> PlanOptions:
    """Returns the options of six devices for four layers of 100 bytes, in pipelines of two stages with four
    micro-batches each.
    """
    job = job_of(
        {
            "micro_batches": 4 * len(rows),
            "layers": [{"name": "x", "repeat": 4, "forward_s": 1, "backward_s": 2, "parameter_nbytes": 100}],
            "devices": [{"name": "d", "count": 6, "memory_nbytes": 1000, **more}],
            "between_hosts": {"rate_bps": 800},
            "memory": {"flat_buffers": 0, "boundaries": False},
        }
    )
    used = {name for row in rows for name in row}
    plan = PipelinePlan(
        4,
        tuple(Pipeline((PlanStage(row[0], 0, 2), PlanStage(row[1], 2, 4)), 4) for row in rows),
        idle=tuple(d.name for d in job.devices if d.name not in used),
    )
    return PlanOptions(planner=Planner(job), before=plan, lost=lost, pauses=Pauses(move_s=0.5, fill_s=0.25))


def test_keeping_moves_nothing_and_costs_time() -> None:
    ways = options(("d1",))
    kept = ways.keep()
    assert kept is not None
    assert kept.kind == KEEP
    assert kept.step_s > ways.before_s
    assert ways.moves(kept.plan).nbytes == 0
    # The open step is run again, whatever is chosen.
    assert kept.pause_s == kept.redo_s == ways.before_s / 2


def test_idle_devices_take_vacant_places() -> None:
    ways = options(("d1",))
    filled = ways.fill()
    assert filled is not None
    assert filled.kind == FILL
    assert filled.plan.pipelines[0].stages == (PlanStage("d0", 0, 2), PlanStage("d4", 2, 4))
    assert filled.plan.idle == ("d5",)
    assert filled.step_s == ways.before_s
    assert filled.redo_s == ways.before_s / 2
    assert [(m.source, m.target, m.layer, m.stop) for m in ways.moves(filled.plan).moves] == [
        ("d3", "d4", 2, 100),
        ("d3", "d4", 3, 100),
    ]
    assert filled.transition_s == pytest.approx(2.0)  # 200 bytes at 100 bytes/s, more than what seating costs
    three = (("d0", "d1"), ("d2", "d3"), ("d4", "d5"))
    assert options(("d1",), three).fill() is None


def test_a_move_is_the_best_plan_with_the_fewest_bytes() -> None:
    ways = options(("d1",))
    moved = ways.move()
    assert moved is not None
    assert moved.kind == MOVE
    assert moved.step_s == pytest.approx(ways.planned.estimate.step_s)
    assert "d1" not in moved.plan.devices
    assert moved.redo_s == ways.before_s / 2
    assert moved.transition_s == max(0.5, ways.moves(moved.plan).seconds)


def test_without_an_owner_only_a_checkpoint_helps() -> None:
    ways = options(("d1", "d3"))
    assert "layers 2, 3" in ways.fatal
    assert (ways.keep(), ways.fill(), ways.move()) == (None, None, None)
    decision = decide("adaptive", ways, Outlook(rate=1e-6))
    assert decision.chosen is not None
    assert decision.chosen.kind == RESTART
    assert decision.chosen.void_samples > 0


def test_nothing_lost_is_nothing_to_do() -> None:
    ways = options(())
    assert ways.whole
    kept = ways.keep()
    assert kept is not None
    assert kept.plan == ways.before
    assert kept.pause_s == 0


def test_an_idle_device_that_is_lost_leaves_the_plan() -> None:
    decision = decide("adaptive", options(("d4",)), Outlook(rate=10.0))
    assert decision.failed == ()
    kept = decision.candidates[0]
    assert (kept.kind, kept.transition_s, kept.plan.idle) == (KEEP, 0.0, ("d5",))
    assert kept.plan.pipelines == options(()).before.pipelines


def test_devices_that_die_together_are_one_owner() -> None:
    apart, together = options(()).keep(), options((), unit="rack").keep()
    assert apart is not None
    assert together is not None
    assert apart.risk == 0.0
    assert together.risk == 1.0


def test_what_does_not_fit_is_said() -> None:
    ways = options(("d1",), memory_nbytes=190)
    kept = ways.keep()
    assert kept is not None
    assert kept.lacks.endswith("lacks 10 bytes of memory")


def test_where_no_plan_fits_what_is_left_that_is_the_decision() -> None:
    decision = decide("adaptive", options(("d1", "d3", "d4"), memory_nbytes=190), Outlook())
    assert decision.failed == ()
    assert decision.chosen is None
    assert decision.reason.startswith("no plan fits")


def test_a_policy_that_is_in_a_hurry_reroutes_and_one_with_time_moves() -> None:
    for rate, kind in ((1e-9, MOVE), (10.0, KEEP)):
        ways = options(("d1",), (("d0", "d1"), ("d2", "d3"), ("d4", "d5")))
        decision = decide("adaptive", ways, Outlook(rate=rate, with_risk=False))
        assert decision.chosen is not None
        assert decision.chosen.kind == kind


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_finds_a_way(name: str) -> None:
    decision = decide(name, options(("d1",), (("d0", "d1"), ("d2", "d3"), ("d4", "d5"))), Outlook(rate=1e-6))
    assert decision.failed == ()
    assert decision.chosen is not None
    assert "d1" not in decision.chosen.plan.devices
    if name == "restart":
        assert decision.chosen.kind == RESTART


def test_idle_devices_take_the_places_of_slow_ones_and_nothing_is_done_again() -> None:
    ways = replace(options(()), slow={"d1": 0.5})
    kept, around, moved = ways.keep(), ways.avoid(), ways.move()
    assert kept is not None
    assert around is not None
    assert moved is not None
    assert kept.step_s > around.step_s == options(()).before_s
    assert (around.kind, around.redo_s, around.transition_s) == (FILL, 0.0, pytest.approx(2.0))
    assert around.plan.pipelines[0].stages == (PlanStage("d0", 0, 2), PlanStage("d4", 2, 4))
    assert around.plan.idle == ("d1", "d5")
    assert "d1" in moved.plan.idle


def test_where_nobody_is_idle_peers_take_the_work_of_a_slow_device() -> None:
    ways = replace(options((), (("d0", "d1"), ("d2", "d3"), ("d4", "d5"))), slow={"d1": 0.1})
    around = ways.avoid()
    assert around is not None
    assert around.plan.idle == ("d1",)
    assert around.plan.detours
    assert replace(ways, slow={}).avoid() is None


def test_a_slow_device_hands_over_what_nobody_else_holds() -> None:
    ways = replace(options((), (("d0", "d1"),)), slow={"d1": 0.1})
    moved = ways.move()
    assert moved is not None
    assert "d1" in moved.plan.idle
    assert "d1" in {m.source for m in ways.moves(moved.plan).moves}


def test_a_device_that_is_a_little_slow_is_kept() -> None:
    ways = replace(options(()), slow={"d1": 0.99})
    kept, around = ways.keep(), ways.avoid()
    assert kept is not None
    assert around is not None
    for threshold, kind in ((0.0, FILL), (0.05, KEEP)):
        chosen = choose([kept, around], Outlook(rate=1e-9, threshold=threshold)).chosen
        assert chosen is not None
        assert chosen.kind == kind


def test_layers_that_are_handed_over_need_memory_until_the_first_step() -> None:
    """A device with room for three layers that swaps its two layers for two others lacks memory for one, since it keeps
    the old ones until the first step; after a restart it lacks none.
    """
    ways = options((), (("d0", "d1"), ("d2", "d3")), memory_nbytes=300)
    turned = PipelinePlan(
        4,
        tuple(Pipeline((PlanStage(b, 0, 2), PlanStage(a, 2, 4)), 4) for a, b in (("d0", "d1"), ("d2", "d3"))),
        idle=("d4", "d5"),
    )
    assert ways._lacking(turned, MOVE) == dict.fromkeys(("d0", "d1", "d2", "d3"), 100)
    assert ways._lacking(turned, RESTART) == ways._lacking(ways.before, KEEP) == {}


def test_all_ways_do_half_a_step_again() -> None:
    ways = options(("d1",), (("d0", "d1"), ("d2", "d3")))
    found = [ways.keep(), ways.fill(), ways.move(), ways.restart()]
    assert {c.redo_s for c in found if c is not None} == {ways.before_s / 2}
    assert None not in found
    told = replace(ways, running_s=7.0).keep()
    assert told is not None
    assert told.redo_s == 3.5
