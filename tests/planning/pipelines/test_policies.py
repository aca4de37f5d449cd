"""Tests the policies' proposals on fleets of equal devices, with step times and rerouted micro-batches calculated by
hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines import policies
from chaos_lightning.planning.pipelines.choice import FILL, KEEP, MOVE, RESTART, Outlook, PlanCandidate
from chaos_lightning.planning.pipelines.equal import Alike, PlanShape
from chaos_lightning.planning.pipelines.formation import EqualFleet, EqualOptions, Formation, Pauses
from chaos_lightning.planning.pipelines.job import PLAIN_MEMORY, Device, Layer, TrainingJob

GIB = 1 << 30
LAYERS = 8


def fleet(devices: int = 16, micro_batches: int = 32, room: float = 2.5, **pauses: float) -> EqualFleet:
    """Returns a fleet for layers of 1 s forward, 2 s backward and 1 GiB; `room` is the number of layers that fit on a
    device.
    """
    layer = Layer(name="", forward_s=1.0, backward_s=2.0, parameter_nbytes=GIB)
    job = TrainingJob(
        layers=tuple(replace(layer, name=f"l{i}") for i in range(LAYERS)),
        devices=tuple(Device(name=f"d{i}", memory_nbytes=int(room * GIB)) for i in range(devices)),
        micro_batches=micro_batches,
        memory=PLAIN_MEMORY,
    )
    return EqualFleet(job, Pauses(**pauses))


def alike(pipelines: int, stages: int, micro_batches: int) -> Formation:
    """Returns a formation of equal pipelines with equal cuts."""
    each = LAYERS // stages
    step_s = (micro_batches + stages - 1) * each * 3.0
    shape = PlanShape(pipelines * stages, (Alike(stages, micro_batches, pipelines),), step_s, step_s, True)
    return Formation(shape, (tuple(range(0, LAYERS + 1, each)),))


FOUR = alike(4, 4, 8)
"""4 pipelines of 4 stages; the place of stage s in pipeline q is 4 q + s."""


def options(f: Formation | None, of: EqualFleet | None = None, **more: Any) -> EqualOptions:
    of = of or fleet()
    devices = f.places - len(f.vacant) if f else len(of.job.devices)
    return EqualOptions(fleet=of, before=f, **{"devices": devices} | more)


def chosen(name: str, o: EqualOptions, rate: float = 1e-5, **more: Any) -> PlanCandidate:
    found = policies.decide(name, o, Outlook(rate=rate, **more)).chosen
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------ formations


def test_places_are_counted_through_the_pipelines() -> None:
    mixed = Formation(PlanShape(11, (Alike(4, 5, 2), Alike(3, 4, 1)), 0.0, 0.0, False), ((0, 2, 4, 6, 8), (0, 3, 6, 8)))
    assert [mixed.seat(x) for x in (0, 5, 8, 10)] == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 0, 2)]
    lost = mixed.without([5, 10])
    assert lost.holes == ((0, 1, 0, 0), (0, 0, 1))
    assert replace(mixed, vacant=frozenset({5, 10})).holes == lost.holes
    assert lost.without([5]) is lost


def test_newcomers_go_where_most_are_vacant() -> None:
    lost = FOUR.without([0, 4, 1])
    assert lost.filled(1).holes == ((1, 1, 0, 0),)
    assert lost.filled(2).vacant == {4} or lost.filled(2).holes == ((0, 1, 0, 0),)
    assert lost.filled(9) == FOUR


@pytest.mark.parametrize(("lost", "guests"), [([0], 3), ([0, 4], 8), ([0, 4, 8], 24)])
def test_owners_share_the_micro_batches_of_the_lost(lost: list[int], guests: int) -> None:
    # 8 F / (4 - F), rounded up.
    assert fleet().guests(FOUR.without(lost)) == [(guests, 0, 0, 0)]


def test_guests_of_unlike_cuts_are_weighed_by_their_layers() -> None:
    f = fleet(room=4.5)
    mixed = Formation(PlanShape(6, (Alike(4, 6, 1), Alike(2, 12, 1)), 0.0, 0.0, False), ((0, 2, 4, 6, 8), (0, 4, 8)))
    # Stage 0 of four has layers 0 and 1; they are half of the other pipeline's stage 0.
    assert f.guests(mixed.without([0])) == [(0, 0, 0, 0), (3, 0)]
    # Stage 0 of two has layers 0 to 3; both stages of the other one take all of its micro-batches.
    assert f.guests(mixed.without([4])) == [(12, 12, 0, 0), (0, 0)]


def test_step_without_vacant_places_is_as_planned() -> None:
    f = fleet()
    best = f.formation("best", 16)
    assert best is not None
    assert f.step_s(best) == pytest.approx(best.shape.charged_s)
    # (8 + 4 - 1) units of 2 layers at 3 s.
    assert best.shape.charged_s == pytest.approx(66.0)


def test_every_loss_makes_the_step_longer() -> None:
    f, places = fleet(), [0, 4, 8]
    steps = [f.step_s(FOUR.without(places[:k])) for k in range(4)]
    assert steps == sorted(set(steps))


def test_slow_device_makes_the_step_as_long_as_its_stage_takes() -> None:
    f = fleet()
    assert f.step_s(FOUR, {5: 0.5}) > 8 * 12.0
    assert f.step_s(FOUR, {5: 1.0}) == pytest.approx(f.step_s(FOUR))


def test_search_of_a_cut_ends_where_stages_are_equal_but_for_rounding() -> None:
    time_s = 24 * 4096**2 * 2048 / 100e12
    layers = tuple(Layer(name=f"l{i}", forward_s=time_s, backward_s=2 * time_s) for i in range(32))
    job = TrainingJob(layers=layers, devices=(Device(name="d", memory_nbytes=1),), micro_batches=64)
    assert EqualFleet(job).formation("best", 4) is not None


def test_plans_of_large_fleets_leave_few_devices_idle() -> None:
    f = fleet(devices=1, micro_batches=512)
    found = f.formation("best", 2047)
    assert found is not None
    assert found is f.formation("best", 2046)


# ------------------------------------------------------------------------------------------------ policies


def test_rerouting_keeps_its_plan_until_a_layer_has_no_owner() -> None:
    f = fleet()
    assert chosen("reroute", options(FOUR.without([0, 4, 8]), f)).kind == KEEP
    lost = options(FOUR.without([0, 4, 8, 12]), f, void_samples=100.0)
    assert lost.fatal
    decision = policies.decide("reroute", lost, Outlook(rate=1e-5))
    assert decision.chosen is not None
    assert (decision.chosen.kind, decision.chosen.policy) == (RESTART, "otherwise")
    assert decision.chosen.void_samples == 100.0


def test_rerouting_seats_newcomers() -> None:
    found = chosen("reroute", options(FOUR.without([0, 4]), idle=1, devices=15))
    assert found.kind == FILL
    assert found.devices == 15


def test_dynamic_moves_after_a_loss_whatever_it_costs() -> None:
    found = chosen("dynamic", options(FOUR.without([0]), fleet(move_s=1e5)), rate=1e-3)
    assert found.kind == MOVE
    assert found.plan == fleet().formation("best", 15)


def test_dynamic_keeps_a_plan_of_which_nobody_is_lost() -> None:
    f = fleet()
    best = f.formation("best", 15)
    found = chosen("dynamic", options(best, f, devices=15))
    assert (found.kind, found.transition_s) == (KEEP, 0)


@pytest.mark.parametrize(("move_s", "kind"), [(1.0, MOVE), (1e5, KEEP)])
def test_adaptive_is_the_better_of_both(move_s: float, kind: str) -> None:
    o = options(FOUR.without([0]), fleet(move_s=move_s))
    found = chosen("adaptive", o, rate=1e-3)
    assert found.kind == kind
    others = [chosen(name, o, rate=1e-3) for name in ("reroute", "dynamic")]
    assert found.value == max(c.value for c in others)


def test_adaptive_moves_away_from_a_slow_device_that_costs_more_than_the_threshold() -> None:
    f = fleet()
    slow = options(FOUR, f, slow={5: 0.2}, lost=False)
    assert chosen("adaptive", slow, threshold=0.05).kind != KEEP
    hardly = options(FOUR, f, slow={5: 0.99}, lost=False)
    assert chosen("adaptive", hardly, threshold=0.05).kind == KEEP


def test_risk_is_the_chance_that_a_sole_owner_is_next() -> None:
    lost = FOUR.without([0, 4, 8])
    keep = options(lost).keep()
    assert keep is not None
    assert keep.risk == pytest.approx(1 / 13)


def test_restart_goes_back_unless_nobody_of_the_plan_is_lost() -> None:
    found = chosen("restart", options(FOUR.without([0]), fleet(move_s=5.0, reload_s=7.0), void_samples=9.0))
    assert (found.kind, found.pause_s, found.void_samples) == (RESTART, 12.0, 9.0)
    assert len({r.stages for r in found.plan.shape.rows}) == 1
    assert chosen("restart", options(FOUR, idle=3, devices=19)).kind == KEEP


def test_redundant_takes_over_where_no_neighbours_are_lost() -> None:
    f = fleet(room=4.5)
    begun = chosen("redundant", options(None, f))
    assert begun.plan.shadowed
    stages = begun.plan.shape.rows[0].stages
    assert stages >= 4
    one = chosen("redundant", options(begun.plan.without([1]), f), rate=1.0)
    assert one.kind == KEEP
    assert one.step_s > begun.step_s
    assert options(begun.plan.without([1, 2]), f).shadow() is None


def test_layer_is_lost_where_both_holders_are() -> None:
    f = fleet(room=4.5)
    begun = chosen("redundant", options(None, f))
    assert not options(begun.plan.without([1]), f).fatal
    row = begun.plan.shape.rows[0]
    both = [q * row.stages + s for q in range(row.times) for s in (0, 1)]
    if len(begun.plan.shape.rows) == 1:
        assert options(begun.plan.without(both), f).fatal


@pytest.mark.parametrize("name", list(policies.POLICIES))
def test_every_policy_begins_and_goes_on_after_a_loss(name: str) -> None:
    f = fleet(room=4.5)
    begun = chosen(name, options(None, f))
    assert begun.pause_s == 0
    assert chosen(name, options(begun.plan.without([0]), f)).fits


# ------------------------------------------------------------------------------------------------ users' own


def raising(options: policies.Options) -> Iterator[PlanCandidate | None]:
    yield options.keep()
    raise RuntimeError("not today")


def generous(options: policies.Options) -> Iterator[PlanCandidate | None]:
    found = options.keep()
    yield found and replace(found, step_s=found.step_s / 100, about="mine")


def empty(options: policies.Options) -> Iterator[PlanCandidate | None]:
    yield PlanCandidate(policy="", kind=KEEP, step_s=1.0, samples=1)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("plan", "x", "PlanError: plan is 'x'; expected that of a candidate which an option made"),
        ("samples", math.nan, "JobError: samples is nan; expected a finite number above 0"),
        ("step_s", 0, "JobError: step_s is 0; expected a finite number above 0"),
        ("step_s", 1e-320, "JobError: samples / step_s is inf; expected a finite number above 0"),
        ("transition_s", math.inf, "JobError: transition_s is inf; expected a finite number at least 0"),
        ("redo_s", -1.0, "JobError: redo_s is -1.0; expected a finite number at least 0"),
        ("risk", math.nan, "JobError: risk is nan; expected a finite number at least 0"),
        ("risk", 1.5, "PlanError: risk is 1.5; expected a probability"),
        ("void_samples", math.nan, "JobError: void_samples is nan; expected a finite number at least 0"),
        ("devices", "all", "TypeError: "),
        ("lacks", None, "PlanError: lacks is None, about is "),
    ],
)
def test_candidate_of_wrong_values_is_lost_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, words: str
) -> None:
    def wrong(options: policies.Options) -> Iterator[PlanCandidate | None]:
        found = options.keep()
        assert found is not None
        yield replace(found, **{field: value})

    monkeypatch.setattr(policies, "installed", lambda: {"wrong": wrong})
    decision = policies.decide("adaptive", options(FOUR.without([0])), Outlook(rate=1e-5))
    ((who, what),) = decision.failed
    assert who == "wrong"
    assert what.startswith(words)
    assert "wrong" not in {c.policy for c in decision.candidates}


def test_policy_under_a_name_that_is_taken_is_refused_and_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("adaptive", f"{__name__}:generous", policies.GROUP)]
    monkeypatch.setattr(policies, "entry_points", lambda group: entries)
    policies.installed.cache_clear()
    try:
        decision = policies.decide("adaptive", options(FOUR.without([0])), Outlook())
    finally:
        policies.installed.cache_clear()
    assert {c.about for c in decision.candidates}.isdisjoint({"mine"})
    ((who, what),) = decision.failed
    assert who.startswith("adaptive (")
    assert "under a name that is taken; expected another than 'adaptive'" in what


def test_candidate_that_nobody_could_follow_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "installed", lambda: {"empty": empty})
    decision = policies.decide("empty", options(FOUR), Outlook())
    assert "this is no way to go on" in decision.failed[0][1]
    assert decision.chosen is not None
    assert decision.chosen.policy == "otherwise"


def test_decision_with_formations_is_a_value_of_json() -> None:
    decision = policies.decide("adaptive", options(FOUR.without([5])), Outlook())
    about = json.loads(json.dumps(decision.to_dict()))
    kept = next(c for c in about["candidates"] if c["kind"] == KEEP)
    assert kept["plan"]["vacant"] == [5]
    assert kept["plan"]["rows"] == [{"stages": 4, "micro_batches": 8, "times": 4, "cut": [0, 2, 4, 6, 8]}]


def test_policy_that_raises_loses_its_candidate_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "installed", lambda: {"raising": raising, "generous": generous})
    decision = policies.decide("raising", options(FOUR.without([0])), Outlook())
    assert decision.failed == (("raising", "RuntimeError: not today"),)
    assert decision.chosen is not None
    assert decision.chosen.policy == "otherwise"
    adaptive = policies.decide("adaptive", options(FOUR.without([0])), Outlook())
    assert adaptive.failed == decision.failed
    assert adaptive.chosen is not None
    assert adaptive.chosen.policy == "generous"


def test_installed_policies_are_found_and_those_that_cannot_be_loaded_lose_their_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = f"{__name__}:generous"
    entries = [EntryPoint("mine", here, policies.GROUP), EntryPoint("broken", "nowhere:policy", policies.GROUP)]
    monkeypatch.setattr(policies, "entry_points", lambda group: entries)
    policies.installed.cache_clear()
    try:
        decision = policies.decide("adaptive", options(FOUR.without([0])), Outlook())
    finally:
        policies.installed.cache_clear()
    assert decision.chosen is not None
    assert decision.chosen.policy == "mine"
    assert decision.failed == (
        ("broken", "PlanError: nowhere:policy cannot be loaded: No module named 'nowhere'"),
    )  # fmt: skip


def test_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(PlanError, match=r"policy 'adptive' is unknown; expected one of adaptive, reroute, dynamic, "):
        policies.policy("adptive")


def test_nothing_fits_where_memory_is_too_small() -> None:
    decision = policies.decide("dynamic", options(None, fleet(devices=4, room=0.5)), Outlook())
    assert decision.chosen is None
    assert decision.reason.startswith("no plan fits")
