"""Tests Oobleck's templates and Varuna's equal pipelines against trying all possibilities."""

import math
from dataclasses import replace
from itertools import combinations_with_replacement, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_jobs import job_of

from chaos_lightning.planning.pipelines.job import LinkRate, MemoryRules
from chaos_lightning.planning.pipelines.planner import Planner
from chaos_lightning.planning.pipelines.templates import oobleck, split, symmetric, templates


def shapes_of(devices, micro_batches, fewest=1, layers=8, **about):
    """Returns the shape search for layers of 1 byte on devices of which at least `fewest` are needed to hold
    the model.
    """
    return Planner(job_of(devices, micro_batches, layers, room=-(-layers // fewest), **about)).shapes


def multisets(sizes, devices, least, most):
    for k in range(least, min(most, devices) + 1):
        yield from (x for x in combinations_with_replacement(sizes, k) if sum(x) == devices)


def test_templates_have_consecutive_sizes_from_the_fewest_devices_on():
    shapes = shapes_of(20, 20, fewest=2)
    assert templates(shapes, 7, 1) == range(2, 6)
    assert templates(shapes, 20, 1) == range(2, 9)  # Eight layers have eight stages at most.
    assert list(templates(shapes, 3, 1)) == []
    assert list(templates(Planner(job_of(2, 4, 4, room=0.5)).shapes, 2, 0)) == []


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 2), st.integers(0, 14))
def test_every_number_of_devices_from_the_least_on_is_covered(fewest, faults, more):
    """Oobleck's claim: n0 templates of consecutive sizes suffice for every number of devices from the least on."""
    devices = (faults + 1) * fewest + more
    shapes = shapes_of(devices, 3 * devices, fewest)
    assert len(templates(shapes, 100, faults)) >= fewest
    found = oobleck(shapes, devices, faults)
    assert found.used == devices
    assert found.pipelines > faults
    assert {r.stages for r in found.rows} <= set(templates(shapes, devices, faults))
    assert sum(r.micro_batches * r.times for r in found.rows) == 3 * devices
    if (faults + 1) * fewest > 1:
        assert oobleck(shapes, (faults + 1) * fewest - 1, faults) is None


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_it_is_the_best_of_all_ways(devices, micro_batches, fewest, faults, reduces):
    about = {"gradient_nbytes": 10**6, "link": LinkRate(rate_bps=1e6)} if reduces else {}
    shapes = shapes_of(devices, micro_batches, fewest, layers=6, **about)

    def slowest(lengths):
        pairs = split(shapes, lengths, len(lengths))
        return max(shapes.time_s(p, m, len(lengths)) for p, m in pairs)

    sizes = templates(shapes, devices, faults)
    tried = [slowest(x) for x in multisets(sizes, devices, faults + 1, micro_batches)]
    found = oobleck(shapes, devices, faults)
    if not reduces:
        assert (found.charged_s if found else math.inf) == pytest.approx(min(tried, default=math.inf), rel=1e-9)
    elif found:
        # The all-reduce is charged for the number of pipelines of the last search; others may do a little better.
        assert min(tried) * (1 - 1e-9) <= found.charged_s <= 1.2 * min(tried)
    else:
        assert not tried


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 8))
def test_the_split_makes_the_slowest_pipeline_fastest(lengths, more):
    total = len(lengths) + more
    shapes = shapes_of(12, total, layers=4)

    def ways(left, parts):
        if parts == 1:
            yield (left,)
            return
        for x in range(1, left - parts + 2):
            yield from ((x, *rest) for rest in ways(left - x, parts - 1))

    best = min(
        max(shapes.time_s(p, m, len(lengths)) for p, m in zip(lengths, way, strict=True))
        for way in ways(total, len(lengths))
    )
    found = split(shapes, lengths, len(lengths))
    assert sum(m for _, m in found) == total
    assert sorted(p for p, _ in found) == sorted(lengths)
    assert max(shapes.time_s(p, m, len(lengths)) for p, m in found) == best


def test_more_pipelines_than_micro_batches_are_avoided():
    shapes = shapes_of(8, 3)
    found = oobleck(shapes, 8, 1)
    assert found.used == 8
    assert 2 <= found.pipelines <= 3
    assert oobleck(shapes_of(8, 1), 8, 1) is None


@pytest.mark.parametrize(("micro_batches", "fits"), [(2, True), (3, False)])
def test_memory_limits_what_a_template_takes(micro_batches, fits):
    """Boundary tensors limit a template's micro-batches: of 6 bytes a second stage of 4 bytes has 2 left, which is
    enough for one micro-batch.
    """
    job = replace(
        job_of(4, micro_batches, 8, room=6, output_nbytes=1), memory=MemoryRules(flat_buffers=0, boundaries=True)
    )
    assert (oobleck(Planner(job).shapes, 4, 1) is not None) == fits


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3))
def test_the_rectangle_is_the_best_one(devices, micro_batches, fewest):
    shapes = shapes_of(devices, micro_batches, fewest, layers=6)
    found = symmetric(shapes, devices)
    tried = [
        shapes.time_s(p, -(-micro_batches // k), k)
        for p in range(1, devices + 1)
        for k in range(1, min(micro_batches, devices // p) + 1)
    ]
    if found is None:
        assert min(tried) == math.inf
        return
    assert found.charged_s == min(tried)
    assert len({r.stages for r in found.rows}) == 1
    assert found.used <= devices
    assert sum(r.micro_batches * r.times for r in found.rows) == micro_batches
    assert max(r.micro_batches for r in found.rows) - min(r.micro_batches for r in found.rows) <= 1


def test_theirs_is_no_better_than_the_best_shape():
    for devices in range(2, 12):
        shapes = shapes_of(devices, 24, 2, layers=16)
        best = shapes.exact(devices).charged_s
        theirs = [x.charged_s for x in (oobleck(shapes, devices, 0), symmetric(shapes, devices)) if x]
        assert theirs
        assert min(theirs) >= best * (1 - 1e-9)
    assert next(n for n in count(4) if oobleck(shapes_of(n, 24, 2, layers=16), n, 1)) == 4
