"""Eqs. 9 to 14 and Algorithm 1 of the paper: the cases in which they hold, or not, and the search's use of them."""

import math
from collections import Counter
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from itertools import product as all_of

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_jobs import job_of, plan_of

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines.equal import Alike, PlanShape
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import Device, LinkRate, MemoryUse
from chaos_lightning.planning.pipelines.paper import (
    ESTIMATORS,
    PARTITIONS,
    algorithm1,
    distribute_batch,
    eq9,
    eq10,
    eq11,
    eq12,
    eq13,
    eq14,
    get_execution_plan,
    integer_partition,
    paper_memory,
    paper_step_s,
    split_layers,
)
from chaos_lightning.planning.pipelines.plan import Detour, Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import Planner

seconds = st.floats(1e-4, 1e3)


# ------------------------------------------------------------------------------------------------ formulas


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
    """Eq. 11 equals the recurrence as printed, over the instruction lists of 1F1B."""
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
    """Two devices are lost in two stages of 4 x 4: the busiest stage has a third more to do, the sum says two
    thirds.
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
    """Returns two pipelines of two stages; the first one's first place is vacant, and the other one does its work."""
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


def test_the_papers_estimator_is_chosen_by_name():
    job = job_of(4, 8, 4, parameter_nbytes=10, optimizer_nbytes=20, activation_nbytes=5)
    plan = plan_of(4, ([2, 2], 4), ([2, 2], 4))
    assert next(iter(ESTIMATORS)) == "simulated"
    assert ESTIMATORS["simulated"](job, plan) == estimate(job, plan)
    theirs = ESTIMATORS["paper"](job, plan)
    assert theirs.step_s == eq9(2, 4, 2.0, 4.0)
    assert theirs.memory["d000"] == MemoryUse(state=2 * (10 + 20 + 10), activations=2 * 2 * 5)
    assert ESTIMATORS["paper"](job_of(4, 6, 4), vacant_plan()).step_s == eq12(2, 3, 2, 2.0, 4.0)


# ------------------------------------------------------------------------------------------------ Algorithm 1


@given(st.integers(1, 14), st.integers(1, 6), st.integers(1, 3), st.integers(3, 8))
def test_partitions_are_all_there_are(devices, pipelines, low, high):
    tries = all_of(range(low, high + 1), repeat=pipelines) if pipelines <= 4 else ()
    expected = {tuple(sorted(x, reverse=True)) for x in tries if sum(x) == devices}
    found = integer_partition(devices, pipelines, low, high)
    assert len(set(found)) == len(found) <= PARTITIONS
    if pipelines <= 4:
        assert set(found) == expected
    assert all(sum(x) == devices and low <= min(x) and max(x) <= high and len(x) == pipelines for x in found)


def test_where_partitions_are_too_many_the_most_even_one_is_tried():
    assert integer_partition(1023, 256, 1, 16) == [(4,) * 255 + (3,)]
    assert len(integer_partition(31, 4, 2, 16)) > 100
    assert integer_partition(7, 2, 4, 8) == integer_partition(7, 2, 1, 3) == []


@given(st.integers(1, 100), st.lists(st.integers(1, 16), min_size=1, max_size=12))
def test_micro_batches_go_by_devices_and_nobody_has_none(total, lengths):
    total = max(total, len(lengths))
    found = distribute_batch(total, lengths)
    assert sum(found) == total
    assert min(found) >= 1
    shares = [total * p // sum(lengths) for p in lengths]
    if min(shares):
        assert all(a <= b <= a + 1 for a, b in zip(shares, found, strict=True))


def even_cuts(layers, stages):
    each, more = divmod(layers, stages)
    for longer in combinations(range(stages), more):
        yield (0, *accumulate(each + (k in longer) for k in range(stages)))


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 8), st.integers(0, 40))
def test_layers_are_split_evenly_with_the_best_places_for_the_rest(layers, stages, m, activation):
    job = job_of(stages, m, layers, room=40, activation_nbytes=activation)
    cutter = Planner(job).shapes.cutter
    found, row = split_layers(cutter, stages, m, 1), cutter.row(stages)
    if stages > layers:
        assert found is None
        return
    tried = [row.charge(at, m, 1).charged_s for at in even_cuts(layers, stages) if row.fits(at, m)]
    assert (math.inf if found is None else found.charged_s) == min(tried, default=math.inf)
    if found is not None:
        lengths = {b - a for a, b in pairwise(found.at)}
        assert lengths <= {layers // stages, -(-layers // stages)}


shape_cases = st.tuples(st.integers(2, 9), st.integers(1, 16), st.integers(2, 7), st.integers(1, 4))


@given(shape_cases)
def test_algorithm_1_keeps_to_its_restrictions(case):
    devices, micro_batches, layers, fewest = case
    room = -(-layers // fewest)
    shapes = Planner(job_of(devices + 1, micro_batches, layers, room=room)).shapes
    was = shapes.exact(devices + 1)
    found = algorithm1(shapes, devices, was)
    if found is None:
        return
    assert found.used == found.devices == devices
    assert abs(found.pipelines - was.pipelines) < 2
    assert sum(r.micro_batches * r.times for r in found.rows) == micro_batches
    assert min(r.micro_batches for r in found.rows) >= 1
    assert min(r.stages for r in found.rows) >= -(-layers // room)
    best = shapes.exact(devices)
    assert found.charged_s >= best.charged_s * (1 - 1e-9)


@given(shape_cases)
def test_algorithm_1_is_the_best_of_its_candidates(case):
    devices, micro_batches, layers, fewest = case
    shapes = Planner(job_of(devices, micro_batches, layers, room=-(-layers // fewest))).shapes
    was = PlanShape(devices, (Alike(1, 1, 2),), 1.0, 0.0, False)
    times = []
    for pipelines in (1, 2, 3):
        for lengths in integer_partition(devices, pipelines, 1, layers) if pipelines <= micro_batches else ():
            cuts = [
                split_layers(shapes.cutter, p, m, pipelines)
                for p, m in zip(lengths, distribute_batch(micro_batches, lengths), strict=True)
            ]
            times.append(max(math.inf if c is None else c.charged_s for c in cuts))
    found = algorithm1(shapes, devices, was)
    assert (math.inf if found is None else found.charged_s) == min(times, default=math.inf)


def test_algorithm_1_is_worse_than_the_best_shape_after_a_loss():
    """A 4 x 2 job loses one of 8 devices: Algorithm 1 deals micro-batches by stages, where the best split has one less
    for the long pipeline.
    """
    shapes = Planner(job_of(8, 16, 32, room=31)).shapes
    was = shapes.exact(8)
    assert [(r.stages, r.micro_batches) for r in was.rows] == [(2, 4)]
    found, best = algorithm1(shapes, 7, was), shapes.exact(7)
    assert (found.charged_s, best.charged_s) == (291, 288)
    assert Counter({(r.stages, r.micro_batches): r.times for r in found.rows}) == {(3, 7): 1, (2, 5): 1, (2, 4): 1}


def test_one_best_over_all_fault_counts_is_that_of_one_fault():
    shapes = Planner(job_of(8, 16, 32, room=31)).shapes
    found = get_execution_plan(shapes, 8, 4, shapes.exact(8))
    assert found.devices == 7
    assert get_execution_plan(shapes, 1, 4, None) is None


def test_algorithm_1_finds_nothing_where_nothing_fits():
    shapes = Planner(job_of(3, 4, 8, room=1)).shapes
    assert algorithm1(shapes, 3, None) is None
