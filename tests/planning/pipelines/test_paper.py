"""Tests Algorithm 1 of the Chameleon paper: its candidates, and the rules that its search keeps."""

import math
from collections import Counter
from itertools import accumulate, combinations, pairwise
from itertools import product as all_of

from hypothesis import given
from hypothesis import strategies as st
from paper_jobs import job_of

from chaos_lightning.planning.pipelines.equal import Alike, PlanShape
from chaos_lightning.planning.pipelines.paper import (
    PARTITIONS,
    algorithm1,
    distribute_batch,
    integer_partition,
    split_layers,
)
from chaos_lightning.planning.pipelines.planner import Planner


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
    """After 4 pipelines of 2 stages lose a device, Algorithm 1 gives micro-batches by number of stages; the best split
    gives one less to the long pipeline, and is faster.
    """
    shapes = Planner(job_of(8, 16, 32, room=31)).shapes
    was = shapes.exact(8)
    assert [(r.stages, r.micro_batches) for r in was.rows] == [(2, 4)]
    found, best = algorithm1(shapes, 7, was), shapes.exact(7)
    assert (found.charged_s, best.charged_s) == (291, 288)
    assert Counter({(r.stages, r.micro_batches): r.times for r in found.rows}) == {(3, 7): 1, (2, 5): 1, (2, 4): 1}


def test_algorithm_1_finds_nothing_where_nothing_fits():
    shapes = Planner(job_of(3, 4, 8, room=1)).shapes
    assert algorithm1(shapes, 3, None) is None
