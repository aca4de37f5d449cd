"""Tests the plan that the benchmark of the paper's losses takes as the best, against all cuts of layers and known
results.
"""

from itertools import combinations, pairwise

import pytest

from benchmarks.common import Result
from benchmarks.paper_cases import LAYERS, LOSSES, best_s, compare, memory, multisets, pipeline_s
from benchmarks.paper_equations import eq11


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (2, 7), (3, 2), (3, 3), (3, 10)])
def test_the_best_cut_is_that_of_all(stages, micro_batches):
    tried = []
    for inner in combinations(range(1, LAYERS), stages - 1):
        lengths = [y - x for x, y in pairwise((0, *inner, LAYERS))]
        tried.append(eq11(lengths, [2 * n for n in lengths], micro_batches))
    assert pipeline_s(stages, micro_batches) == min(tried)


def test_multisets_are_all_with_a_sum_of_at_most_the_devices():
    assert set(multisets(5, 5, 2)) == {(), (2,), (3,), (4,), (5,), (2, 2), (3, 2)}


def test_the_best_plan_of_three_devices_is_one_pipeline_or_three():
    assert best_s(3, 16, 2) == pytest.approx(588)
    assert best_s(3, 16, 1) == pytest.approx(6 * LAYERS * 3)


@pytest.mark.parametrize(
    ("loss", "least", "shares"),
    [
        (LOSSES[0], 2, {16: 0.917, 32: 0.874, 64: 0.875}),
        (LOSSES[2], 2, {16: 0.735, 32: 0.731, 64: 0.729}),
        (LOSSES[2], 1, {16: 0.750, 32: 0.773, 64: 0.750}),
    ],
)
def test_shares_of_the_papers_original_plan(loss, least, shares):
    for m, share in shares.items():
        result = Result("paper_cases")
        compare(result, loss, "", m, least)
        figures = {f.name: f for f in result.figures}
        of_original = next(f for name, f in figures.items() if "of the paper's original plan" in name)
        assert of_original.value == pytest.approx(share, abs=0.0006)
        assert figures[": time over that of the best plan for what is left"].ok


def test_a_time_that_is_too_short_misses_the_bound(monkeypatch):
    monkeypatch.setattr("benchmarks.paper_cases.chosen_s", lambda job, loss, policy: 500.0)
    result = Result("paper_cases")
    compare(result, LOSSES[2], "", 16, 2)
    assert not result.figures[3].ok


def test_no_peak_rises_but_by_boundary_tensors():
    result = Result("paper_cases")
    memory(result, [16])
    assert [f.ok for f in result.figures if f.bound is not None] == [True, True]
