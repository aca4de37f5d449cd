"""Tests, with real processes, that a plain loop trains a batch of fixed size as one process with PyTorch does, whoever
comes, goes or dies.
"""

from __future__ import annotations

from typing import Any

import fixed_members
import pytest
import torch
from engine_job import PRELOAD, Job

SIZES: dict[str, Any] = {"samples": 40, "batch": 16, "epochs": 8}
"""24 steps, of which each third one has 8 samples."""


def start(job: Job, name: str, rule: str, settings: dict[str, Any] | None = None, **spec: Any) -> None:
    given = {"batch": rule, "min_nodes": 2, "join_by": "pause", **(settings or {})}
    about = {"name": name, "endpoint": job.endpoint, "report": str(job.folder / f"{name}.pt"), "settings": given}
    job.harness.start_function(name, fixed_members.train, {**SIZES, **about, **spec}, preload=PRELOAD)


def check_equal(report: dict[str, Any], losses: list[float], parameters: list[torch.Tensor]) -> None:
    assert report["losses"] == pytest.approx(losses[-len(report["losses"]) :], rel=1e-10)
    torch.testing.assert_close(report["parameters"], parameters, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ["fixed:16/4", pytest.param("fixed", marks=pytest.mark.slow)])
def test_a_newcomer_and_a_death_within_a_step_change_no_step(job: Job, rule: str) -> None:
    """Two members train, a third one comes in and is killed within a step: the step begins again at the others."""
    gate, fits = job.gate("a"), {"fits": 3}
    start(job, "a", rule, fits, gates={1: gate})
    start(job, "b", rule, fits)
    job.harness.wait_step(1, node="a")
    job.harness.declare("c")
    start(job, "c", rule, fits, dies_at=7)
    job.admitted("c")
    job.open(gate)
    a, b = job.finish("a", "b")
    assert job.harness.wait_exit("c") == -9
    losses, parameters = fixed_members.alone(**SIZES)
    for report in (a, b):
        assert len(report["losses"]) == len(losses) == 24
        check_equal(report, losses, parameters)
        assert report["again"] >= 1


def join(job: Job, rule: str, **of_b: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Starts a member, and a second one that comes in; returns what one process trains."""
    gate, sizes = job.gate("a"), {**SIZES, "epochs": 20}
    start(job, "a", rule, {"min_nodes": 1}, gates={1: gate}, **sizes)
    job.harness.wait_step(1, node="a")
    start(job, "b", rule, {"min_nodes": 1}, **sizes, **of_b)
    job.admitted("b")
    job.open(gate)
    return fixed_members.alone(**sizes)


def test_a_signal_lets_a_member_go_and_no_step_begins_again(job: Job) -> None:
    """A member that is asked to leave computes its shares until the others can do without it."""
    gate = job.gate("b")
    losses, parameters = join(job, "fixed:16/4", gates={5: gate})
    job.harness.wait_step(5, node="b")
    job.harness.terminate("b")
    job.open(gate)
    a, b = job.finish("a", "b")
    assert len(a["losses"]) == len(losses)
    left = b["step"] - 1
    a["losses"][left] = losses[left]  # the leaver's part was in the step, and not in the gather after it
    check_equal(a, losses, parameters)
    assert b["step"] < a["step"]
    assert {r.name for r in job.harness.records} & {"death", "prepare", "fenced", "error"} == set()


@pytest.mark.slow
def test_who_leaves_without_asking_has_the_others_do_its_share(job: Job) -> None:
    losses, parameters = join(job, "fixed:16/4", exit_at=5)
    a, b = job.finish("a", "b")
    assert len(a["losses"]) == len(losses)
    check_equal(a, losses, parameters)
    assert a["again"] >= 1
    assert b["step"] == 5
    assert "without computing its share" in str(job.harness.wait_for("differs").fields)


@pytest.mark.slow
def test_noise_does_not_depend_on_the_members(job: Job) -> None:
    """One of three members with two micro-batches has stand-ins only; all draw the numbers of one process."""
    sizes = {**SIZES, "epochs": 3, "dropout": 0.5}
    for name in "abc":
        start(job, name, "fixed:16/8", {"min_nodes": 3}, **sizes)
    reports = job.finish("a", "b", "c")
    losses, parameters = fixed_members.alone(**sizes, micro_batch=8)
    for report in reports:
        check_equal(report, losses, parameters)
    assert max(report["idle"] for report in reports) >= 3
