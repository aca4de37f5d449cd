"""Tests that logged values of a training epoch cover each sample once, whichever member dies, leaves, or joins."""

from __future__ import annotations

from typing import Any

import pytest
import strategy_models as models
import torch
from strategy_job import Job

from chaos_lightning.control.requests import drain

SAMPLES = 64
SPEC: dict[str, Any] = {"epochs": 3, "samples": SAMPLES, "model": "Counted", "min_nodes": 1}


def expected() -> dict[str, float]:
    _, y = models.data(SAMPLES).tensors
    shown = {
        "metric mean": y.mean(), "metric large": y.sum(), "mse": (y * y).mean(), "same": (y * y).mean(),
        "most": y.max(), "labels": y.numel(), "sum": y.sum(),
    }  # fmt: skip
    return {name: round(float(value), 4) for name, value in shown.items()}


def covers_all(reports: list[dict[str, Any]]) -> None:
    """Checks that logged and computed values of the last epoch cover all samples once."""
    _, y = models.data(SAMPLES).tensors
    for report in reports:
        for epoch in report["epochs"]:
            assert epoch == pytest.approx(expected(), abs=2e-4)
        metrics = report["metrics"]
        assert metrics["count"] == SAMPLES
        assert metrics["largest"] == y.max()
        assert torch.allclose(torch.stack([metrics["mean"], metrics["unasked"]]), y.mean(), rtol=1e-5)


def start_three(job: Job, **of_a: Any) -> None:
    """Starts members a, b and c one after the other in the first epoch; once all three have made a step, a waits at
    gate "three".
    """
    gates = {2: job.gate("two"), 3: job.gate("three")}
    job.start("a", gates={1: job.gate("one"), **of_a.pop("gates", {})}, worlds=gates, **SPEC, **of_a)
    job.harness.wait_step(1)
    for name, gate in (("b", "one"), ("c", "two")):
        job.start(name, **SPEC)
        job.wait_admitted(name)
        job.open(gate)
        job.harness.wait_for("joined", node=name)
    for name in "ab":
        job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3 and r["kind"] == "step", node=name)


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_after_a_death(job: Job, gone: str) -> None:
    start_three(job)
    job.harness.kill(gone)
    if gone != "a":
        job.open("three")
    covers_all(job.finish(*(name for name in "abc" if name != gone)))


@pytest.mark.slow
def test_after_a_leave(job: Job) -> None:
    start_three(job)
    assert drain(job.options.listen, "c") == ("c",)
    job.open("three")
    covers_all(job.finish("a", "b", "c")[:2])


@pytest.mark.slow
@pytest.mark.parametrize("step", [6, 7])
def test_after_the_death_of_the_heir(job: Job, step: int) -> None:
    """The member that took over a dead member's values dies, too, before or after it has announced them in a step:
    all values still count once.
    """
    start_three(job, gates={step: job.gate("heir")})
    job.harness.kill("c")
    job.open("three")
    job.harness.wait_step(step, node="a")
    job.harness.wait_step(step, node="b")
    job.harness.kill("a")
    covers_all(job.finish("b"))


@pytest.mark.slow
def test_after_a_stop_of_the_whole_job(job: Job) -> None:
    """The whole job stops within an epoch and resumes: the last member's saved state holds the values logged so far."""
    spec = {**SPEC, "options": {"on_last_exit": str(job.out / "kept")}}
    job.start("a", **spec, leaves_at=5)
    assert job.harness.wait_exit("a") == 0
    job.start("b", **spec)
    covers_all(job.finish("b"))
