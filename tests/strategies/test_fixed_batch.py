"""Tests, with real processes, that a batch of fixed size is trained as in one process, whoever comes, goes or dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def start(job: Any, name: str, rule: str, **spec: Any) -> None:
    from pipeline_members import member

    options = {"batch": rule, **spec.pop("options", {})}
    about = {"name": name, "port": job.port, "out": str(job.out), "options": options, **spec}
    job.harness.start_function(name, member, about)


def alone(**spec: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains the same model with plain Lightning; returns the loss of each step, and the parameters."""
    from pipeline_members import quiet, trained

    quiet()
    parts = spec.pop("parts", 1)
    module, rows = trained("auto", spec, [], accumulate_grad_batches=parts)
    means = [sum(rows.losses[i : i + parts]) for i in range(0, len(rows.losses), parts)]
    return means, {n: p.detach() for n, p in module.named_parameters()}


def check_equal(reports: list[dict[str, Any]], losses: list[float], parameters: dict[str, torch.Tensor]) -> None:
    for report in reports:
        assert len(report["losses"]) <= len(losses)
        assert report["losses"] == pytest.approx(losses[-len(report["losses"]) :], rel=1e-5)
        assert report["logged"] == pytest.approx(report["losses"], rel=1e-6)
        for name, value in parameters.items():
            torch.testing.assert_close(report["parameters"][name], value, rtol=1e-4, atol=1e-5)
    assert len(reports[0]["losses"]) == len(losses)


def test_two_members_share_micro_batches_as_one_process_accumulates(job: Any) -> None:
    job.fresh(min_nodes=2)
    for name in "ab":
        start(job, name, "fixed:16/4")
    check_equal(job.finish("a", "b"), *alone(batch=4, parts=4))


@pytest.mark.parametrize("names", ["a", "abc"])
def test_members_share_the_loaders_batch_as_one_process_has_it(job: Any, names: str) -> None:
    job.fresh(min_nodes=len(names))
    for name in names:
        start(job, name, "fixed", batch=10, options={"fits": 3})
    check_equal(job.finish(*names), *alone(batch=10))


def test_a_death_within_a_step_changes_no_step(job: Any) -> None:
    job.fresh(min_nodes=2)
    start(job, "a", "fixed:16/4", model={"pause_s": 0.02})
    start(job, "b", "fixed:16/4", model={"pause_s": 0.02}, dies=(5, 1, 0))
    job.harness.declare("b")
    check_equal(job.finish("a"), *alone(batch=4, parts=4))
