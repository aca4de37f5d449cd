"""Tests runs in virtual time: 1F1B computed without lists against the lists, its critical path, and deadlocks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reroute_model import zero_bubble_h1
from chaos_lightning.planning.pipelines.schedules import (
    Instruction,
    ScheduleError,
    one_f_one_b,
)
from chaos_lightning.planning.pipelines.timing import OneFOneB, PipelineTimes, pipeline_timeline

seconds = st.floats(0.01, 10)
counts = st.integers(1, 14)


@st.composite
def pipelines(draw):
    """Draws times of passes and hops of a pipeline; some hops take no time."""
    p = draw(st.integers(1, 7))
    rows = st.lists(seconds, min_size=p, max_size=p).map(tuple)
    hops = st.lists(st.one_of(st.just(0.0), seconds), min_size=p - 1, max_size=p - 1).map(tuple)
    return PipelineTimes(draw(rows), draw(rows), draw(hops))


def equal_times(p, forward_s=1.0, backward_s=2.0):
    return PipelineTimes((forward_s,) * p, (backward_s,) * p, (0.0,) * (p - 1))


@given(pipelines(), counts, st.sampled_from([0, 0, 1, 2]))
def test_1f1b_without_lists_ends_as_its_lists_do(times, m, extra):
    lists = one_f_one_b(len(times.forward), m, extra)
    rows = pipeline_timeline(lists, times, m).rows
    assert OneFOneB(times, m, extra).ends_s == pytest.approx([row[-1].end_s for row in rows], rel=1e-12)


@given(pipelines(), counts, st.sampled_from([0, 0, 1, 2]))
def test_the_lengths_of_a_critical_path_add_up_to_the_end(times, m, extra):
    run = OneFOneB(times, m, extra)
    for stage, end_s in enumerate(run.ends_s):
        path = run.path(stage)
        counts = path.forward + path.backward + path.hops
        lengths = times.forward + times.backward + times.hops
        assert sum(n * s for n, s in zip(counts, lengths, strict=True)) == pytest.approx(end_s, rel=1e-9)


@given(st.integers(1, 8), counts)
def test_equal_stages_take_what_the_papers_equation_9_says(p, m):
    assert max(OneFOneB(equal_times(p), m).ends_s) == pytest.approx((p + m - 1) * 3, rel=1e-12)


@given(st.sampled_from([one_f_one_b, zero_bubble_h1]), pipelines(), counts)
def test_units_follow_what_they_need(schedule, times, m):
    p = len(times.forward)
    timeline = pipeline_timeline(schedule(p, m), times, m)
    spans = {s.instruction: s for row in timeline.rows for s in row}
    for worker, row in enumerate(timeline.rows):
        assert all(a.end_s <= b.start_s for a, b in pairwise(row))
        busy_s = sum(s.end_s - s.start_s for s in row)
        assert busy_s == pytest.approx(m * (times.forward[worker] + times.backward[worker]))
    for x, span in spans.items():
        if x.kind == "F" and x.stage:
            before = spans[Instruction(x.stage - 1, "F", x.micro_batch)]
            assert span.start_s >= before.end_s + times.hops[x.stage - 1]
        if x.kind in "BI" and x.stage < p - 1:
            behind = spans[Instruction(x.stage + 1, x.kind, x.micro_batch)]
            assert span.start_s >= behind.end_s + times.hops[x.stage]
    assert timeline.end_s == max(s.end_s for s in spans.values())


def test_zero_bubbles_are_shorter_by_the_halves_that_fill_them():
    p, m = 4, 8
    times = equal_times(p)
    whole = pipeline_timeline(one_f_one_b(p, m), times, m).end_s
    split = pipeline_timeline(zero_bubble_h1(p, m), times, m).end_s
    assert whole == (p + m - 1) * 3
    assert split == 3 * m + (p - 1)  # of each bubble of F + B = 3 a third is left: 2401.10241, table 2


def test_a_given_input_half_is_used():
    times = PipelineTimes((1.0,), (2.0,), (), (0.5,))
    first, second = (times.unit_s(Instruction(0, kind, 0)) for kind in "IW")
    assert (first, second) == (0.5, 1.5)


def test_lists_that_wait_for_each_other_are_refused():
    lists = [list(reversed(row)) for row in one_f_one_b(2, 2)]
    with pytest.raises(ScheduleError, match="deadlock: 0B0, 1F1 wait"):
        pipeline_timeline(lists, equal_times(2), 2)
