"""Tests Eqs. 9 to 14 of the Chameleon paper: in which cases they hold, and in which they do not."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_jobs import job_of, plan_of

from benchmarks.paper_equations import (
    eq9,
    eq10,
    eq11,
    eq12,
    eq13,
    eq14,
    get_execution_plan,
    main,
    paper_memory,
    paper_step_s,
)
from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import Device, LinkRate
from chaos_lightning.planning.pipelines.plan import Detour, Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import Planner

seconds = st.floats(1e-4, 1e3)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20), seconds, seconds)
def test_the_estimator_is_eq_9_where_that_is_exact(stages, dp, each, m, forward, backward):
    job = job_of(stages * dp, dp * m, stages * each, forward_s=forward, backward_s=backward)
    plan = plan_of(stages * each, *[([each] * stages, m)] * dp)
    expected = eq9(stages, m, each * forward, each * backward)
    assert estimate(job, plan).step_s == pytest.approx(expected, rel=1e-12)
    assert paper_step_s(job, plan) == pytest.approx(expected, rel=1e-12)


def test_eq_9_knows_of_no_hop_and_no_all_reduce():
    job = job_of(4, 8, 4, gradient_nbytes=10**6, output_nbytes=10**6, link=LinkRate(rate_bps=1e6))
    plan = plan_of(4, ([2, 2], 4), ([2, 2], 4))
    assert paper_step_s(job, plan) == eq9(2, 4, 2.0, 4.0) == 30
    # A hop of 8 s each way, and 16 s for each stage's gradients, of which the last stage's is hidden.
    assert estimate(job, plan).step_s >= 30 + 2 * 8 + 16


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5), st.integers(1, 10))
def test_eq_11_is_the_longest_way_through_the_units(stages, m):
    """Eq. 11 as printed gives the length of the longest chain of passes in the instruction lists of 1F1B."""
    forward, backward = zip(*stages, strict=True)
    n, ends, at = len(stages), {}, [0.0] * len(stages)
    orders = []
    for k in range(n):
        warm = min(n - k, m)
        rest = [x for j in range(m) for x in (("B", j), ("F", warm + j)) if x[1] < m]
        orders.append([("F", j) for j in range(warm)] + rest)
    while any(orders):
        for k, order in enumerate(orders):
            while order:
                kind, j = order[0]
                before = k - 1 if kind == "F" else k + 1
                if 0 <= before < n and (kind, before, j) not in ends:
                    break
                order.pop(0)
                start = max(at[k], ends.get((kind, before, j), 0.0))
                at[k] = ends[kind, k, j] = start + (forward[k] if kind == "F" else backward[k])
    assert eq11(forward, backward, m) == pytest.approx(max(at), rel=1e-12)


def test_unequal_pipelines_take_the_slowest_ones_time():
    job = job_of(5, 9, 6)
    plan = plan_of(6, ([3, 3], 4), ([2, 2, 2], 5))
    assert paper_step_s(job, plan) == eq10([eq9(2, 4, 3, 6), eq9(3, 5, 2, 4)]) == 45
    # Equal pipelines of unequal stages have no closed form.
    assert paper_step_s(job_of(4, 8, 6), plan_of(6, ([4, 2], 4), ([4, 2], 4))) == eq11([4, 2], [8, 4], 4)
    with pytest.raises(PlanError, match="no pipeline"):
        eq10([])


def test_equal_pipelines_on_slow_devices_take_longer():
    job = job_of(2, 4, 4)
    slow = replace(job, devices=tuple(Device(name=d.name, memory_nbytes=1, speed=0.5) for d in job.devices))
    plan = plan_of(4, ([2, 2], 4))
    assert paper_step_s(slow, plan) == 2 * paper_step_s(job, plan)


@given(st.integers(1, 8), st.integers(1, 64), st.integers(2, 8), seconds, seconds)
def test_eq_13_of_one_loss_is_eq_12(stages, m, dp, forward, backward):
    expected = (stages + m - 1 + m / (dp - 1)) * (forward + backward)
    assert eq12(stages, m, dp, forward, backward) == pytest.approx(expected, rel=1e-12)
    lost = [0] * (stages - 1) + [1]
    assert eq13(stages, m, dp, lost, forward, backward) == pytest.approx(expected, rel=1e-12)
    assert eq13(stages, m, dp, [0] * stages, forward, backward) == eq9(stages, m, forward, backward)


def test_eq_13_adds_up_what_happens_at_once():
    """Eq. 13 overestimates two losses in different stages of 4 x 4: the busiest stage has a third more work, the
    equation's sum has two thirds more.
    """
    one, two = (eq13(4, 6, 4, lost, 1, 2) for lost in ([1], [1, 1]))
    assert (one, two) == (33, 39)


@pytest.mark.parametrize("lost", [4, 5])
def test_a_stage_without_owners_is_fatal_from_the_last_one_on(lost):
    assert math.isfinite(eq13(4, 6, 4, [3], 1, 2))
    assert math.isinf(eq13(4, 6, 4, [0, lost], 1, 2))
    assert math.isinf(eq12(4, 6, 1, 1, 2))


@pytest.mark.parametrize(("dp", "stages", "m", "slower"), [(3, 2, 6, 1.43), (2, 4, 8, 1.73), (4, 4, 8, 1.24)])
def test_eq_12_at_known_cases(dp, stages, m, slower):
    assert eq12(stages, m, dp, 1, 2) / eq9(stages, m, 1, 2) == pytest.approx(slower, abs=0.005)


def vacant_plan():
    """Returns a plan of two pipelines of two stages; the second one does the work of the first one's vacant first
    stage.
    """
    pipelines = (
        Pipeline((PlanStage("", 0, 2), PlanStage("d001", 2, 4)), 3),
        Pipeline((PlanStage("d002", 0, 2), PlanStage("d003", 2, 4)), 3),
    )
    plan = PipelinePlan(4, pipelines, detours=tuple(Detour(j, 0, 2, "d002") for j in range(3)))
    plan.check()
    return plan


def test_a_rerouted_plan_takes_eq_13():
    job = job_of(4, 6, 4)
    assert paper_step_s(job, vacant_plan()) == eq12(2, 3, 2, 2.0, 4.0) == 42
    apart = (*vacant_plan().pipelines, Pipeline((PlanStage("d000", 0, 4),), 1))
    with pytest.raises(PlanError, match="cut alike"):
        paper_step_s(job, replace(vacant_plan(), pipelines=apart))


def test_eq_14_counts_gradients_as_parameters_and_more_in_flight_than_there_are():
    assert eq14(3, 4, 1, 10, 20, 1) == 3 * (10 + 20 + 10) + 3 * 3
    assert eq14(3, 4, 1, 10, 20, 1, gradient_nbytes=40) == 3 * (10 + 20 + 40) + 3 * 3
    job = job_of(4, 2, 4, parameter_nbytes=10, gradient_nbytes=10, optimizer_nbytes=20, activation_nbytes=5)
    plan = plan_of(4, ([1, 1, 1, 1], 2))
    ours = {name: use.nbytes for name, use in estimate(job, plan).memory.items()}
    theirs = paper_memory(job, plan)
    # With two micro-batches no more than two are in flight; Eq. 14 says four and three.
    assert [theirs[n].nbytes - ours[n] for n in sorted(ours)] == [10, 5, 0, 0]
    assert set(paper_memory(job_of(4, 6, 4), vacant_plan())) == {"d001", "d002", "d003"}


def test_one_best_over_all_fault_counts_is_that_of_one_fault():
    shapes = Planner(job_of(8, 16, 32, room=31)).shapes
    found = get_execution_plan(shapes, 8, 4, shapes.exact(8))
    assert found.devices == 7
    assert get_execution_plan(shapes, 1, 4, None) is None


def test_a_plan_of_the_users_is_priced(tmp_path, monkeypatch) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"plan": {"layers": 4, "pipelines": [{"micro_batches": 8, "stages": [["d0", 0, 4]]}]}}))
    monkeypatch.setattr(
        "sys.argv", ["", "gpt:2,64", "--devices", "1", "--plan", str(plan), "--out", str(tmp_path / "x")]
    )
    assert main() == 0
    figures = json.loads((tmp_path / "x").read_text())["figures"]
    assert [f["unit"] for f in figures] == ["s", "s", "GiB"]
    assert figures[0]["value"] <= figures[1]["value"]
