"""Tests that an invalid plan is refused with a one-line error, both as a value and as text."""

from dataclasses import replace

import pytest

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines.plan import VACANT, Detour, Pipeline, PipelinePlan, PlanStage

ROWS = (
    Pipeline((PlanStage("a", 0, 2), PlanStage("b", 2, 4)), 2),
    Pipeline((PlanStage("c", 0, 2), PlanStage("d", 2, 4)), 2),
)
VACANT_ROW = Pipeline((PlanStage(VACANT, 0, 2), PlanStage("d", 2, 4)), 2)
PLAN = PipelinePlan(4, ROWS, idle=("f",))
REROUTED = replace(PLAN, pipelines=(ROWS[0], VACANT_ROW), detours=(Detour(2, 0, 2, "a"), Detour(3, 0, 2, "a")))


@pytest.mark.parametrize("plan", [PLAN, REROUTED])
def test_a_plan_is_read_as_it_was_written(plan: PipelinePlan) -> None:
    plan.check()
    assert PipelinePlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(REROUTED, detours=(*REROUTED.detours, Detour(2, 1, 2, "a"))), "have layers in common"),
        (replace(PLAN, in_flight_extra=-3), "in_flight_extra of a plan: -3; expected at least 0"),
        (
            PipelinePlan(4, tuple(replace(p, micro_batches=0) for p in ROWS)),
            "micro-batches of a plan: 0; expected at least 1",
        ),
        (PipelinePlan(0, (Pipeline((), 1),)), "layers of a plan: 0; expected at least 1"),
    ],
)
def test_what_does_not_run_each_layer_once_is_no_plan(plan: PipelinePlan, words: str) -> None:
    with pytest.raises(PlanError, match=words) as refused:
        plan.check()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 2.9}, "2.9 is no whole number"),
        ({"layers": True}, "True is no whole number"),
        ({"idel": ["f"]}, "'idel' is an unknown key; expected some of layers, pipelines, "),
        ({"keepers": [["f", 0, 2]]}, "'keepers' is an unknown key"),
        ({"pipelines": [{"micro_batches": 4, "stages": [["a", 0, 4]], "x": 1}]}, "'x' is an unknown key"),
        ({"pipelines": [{"micro_batches": 4, "stages": [["a", "0", 4]]}]}, "'0' is no whole number"),
        ({"idle": [5]}, "5 is no name of a device"),
        ({"pipelines": 5}, "this is no plan of pipelines"),
    ],
)
def test_what_is_no_text_of_a_plan(change: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words) as refused:
        PipelinePlan.from_dict(PLAN.to_dict() | change)
    assert "\n" not in str(refused.value)
