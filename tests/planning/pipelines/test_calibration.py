"""Tests calibration: the overheads of hops, passes and commits are recovered from steps of a job with known
overheads.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_jobs import job_of, plan_of

from benchmarks.calibration import CalibrationError, fit
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import JobError, LinkRate, Overheads

PLANS = [
    plan_of(8, ([8], 12)),
    plan_of(8, ([4, 4], 12)),
    plan_of(8, ([2, 2, 2, 2], 12)),
    plan_of(8, ([2, 2, 2, 2], 3)),
    plan_of(8, ([5, 3], 4), ([3, 3, 2], 4), ([4, 4], 4)),
]


def job(overheads=None):
    return job_of(
        8, 12, 8, forward_s=0.010, backward_s=0.020, gradient_nbytes=10**6, output_nbytes=10**5,
        link=LinkRate(rate_bps=1e9, latency_s=1e-4), overheads=overheads,
    )  # fmt: skip


def steps(overheads, plans=PLANS):
    there = job(overheads)
    return [(plan, estimate(there, plan).step_s) for plan in plans]


costs = st.one_of(st.just(0.0), st.floats(1e-5, 0.02))


@settings(max_examples=40)
@given(costs, costs, st.one_of(st.just(0.0), st.floats(1e-5, 0.5)))
def test_planted_costs_are_found_exactly(hop, unit, commit):
    planted = Overheads(hop_s=hop, unit_s=unit, commit_s=commit)
    found = fit(job(), steps(planted))
    for name in ("hop_s", "unit_s", "commit_s"):
        assert getattr(found.overheads, name) == pytest.approx(getattr(planted, name), rel=1e-6, abs=1e-9)
    assert found.worst < 1e-9
    overheads, residuals = found
    assert (overheads, len(residuals)) == (found.overheads, len(PLANS))


def test_where_the_search_begins_does_not_matter():
    planted = Overheads(hop_s=0.002, unit_s=0.001, commit_s=0.05)
    for start in (Overheads(), Overheads(hop_s=0.1, unit_s=0.1, commit_s=1.0)):
        assert fit(job(start), steps(planted)).overheads.hop_s == pytest.approx(0.002, rel=1e-6)


@settings(max_examples=20)
@given(st.lists(st.floats(-0.02, 0.02), min_size=2 * len(PLANS), max_size=2 * len(PLANS)))
def test_noise_of_two_percent_moves_estimates_by_little_more(noise):
    planted = Overheads(hop_s=0.003, unit_s=0.002, commit_s=0.05)
    measured = [(plan, s * (1 + x)) for (plan, s), x in zip(2 * steps(planted), noise, strict=True)]
    found = fit(job(), measured)
    assert found.worst < 0.07
    for (_, s), residual in zip(measured, found.residuals, strict=True):
        assert residual.measured_s == s
        assert residual.share == s / residual.estimated_s - 1
    # No other costs nearby fit better, by the squares of the errors.
    best = sum((r.measured_s - r.estimated_s) ** 2 for r in found.residuals)
    for name in ("hop_s", "unit_s", "commit_s"):
        for factor in (0.9, 1.1):
            other = job(replace(found.overheads, **{name: getattr(found.overheads, name) * factor + 1e-6}))
            assert best <= sum((s - estimate(other, plan).step_s) ** 2 for plan, s in measured) * (1 + 1e-9)


def test_steps_faster_than_the_model_cost_nothing_more():
    found = fit(job(), [(plan, 0.9 * s) for plan, s in steps(Overheads())])
    assert found.overheads == Overheads()
    assert all(r.share == pytest.approx(-0.1) for r in found.residuals)


@pytest.mark.parametrize("given_", [0, 1, 2])
def test_too_few_steps_are_refused(given_):
    with pytest.raises(CalibrationError, match=f"{given_} measured steps; expected at least 3"):
        fit(job(), steps(Overheads())[:given_])


def test_plans_that_do_not_tell_are_refused():
    with pytest.raises(CalibrationError, match="never use hop_s"):
        fit(job(), steps(Overheads(), [plan_of(8, ([8], m)) for m in (1, 2, 3)]))
    with pytest.raises(CalibrationError, match="do not tell hop_s, unit_s, commit_s apart"):
        fit(job(), steps(Overheads(), 3 * [PLANS[1]]))


def test_a_time_that_is_none_is_refused():
    measured = steps(Overheads())
    with pytest.raises(JobError, match="measured step 2 is nan"):
        fit(job(), [measured[0], (measured[1][0], float("nan")), *measured[2:]])
