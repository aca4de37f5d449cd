"""Tests, with real processes, that a model in stages trains as in one process, whichever member dies."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

MICRO_BATCHES = 4
SLOW = pytest.mark.slow
HALF = 80_000
"""Bytes of memory in which half of the blocks fit."""
LLAMA_HALF = 240_000
"""Bytes of memory in which half of the blocks of a Llama with as many blocks fit."""


def start(job: Any, names: str, **spec: Any) -> None:
    from pipeline_members import member

    for name in names:
        about = {"name": name, "port": job.port, "out": str(job.out), "micro_batches": MICRO_BATCHES, **spec}
        job.harness.start_function(name, member, about)


def alone(**spec: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains the same model with plain Lightning; returns the loss of each step, and the parameters."""
    from pipeline_members import quiet, trained

    quiet()
    module, rows = trained("auto", spec, [], accumulate_grad_batches=MICRO_BATCHES)
    means = [sum(rows.losses[i : i + MICRO_BATCHES]) for i in range(0, len(rows.losses), MICRO_BATCHES)]
    return means, {n: p.detach() for n, p in module.named_parameters()}


def check_equal(reports: list[dict[str, Any]], losses: list[float], parameters: dict[str, torch.Tensor]) -> None:
    seen: dict[str, torch.Tensor] = {}
    first = max((report["losses"] for report in reports), key=len)  # who comes later has fewer
    for report in reports:
        assert report["losses"] == first[-len(report["losses"]) :]
        assert report["logged"] == pytest.approx(report["losses"], rel=1e-6)
        for name, value in report["parameters"].items():
            assert name not in seen or torch.equal(seen[name], value), f"owners of {name} differ"
            seen[name] = value
    assert first == pytest.approx(losses, rel=1e-5)
    for name, value in parameters.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-4, atol=1e-5)


def plans(job: Any) -> list[dict[str, Any]]:
    """Returns the logged decisions about pipelines, in order."""
    return [r.fields for r in job.harness.records if r.name == "pipelines"]


def test_two_stages_train_as_one_process(job: Any) -> None:
    job.fresh(min_nodes=2)
    start(job, "ab", device_memory=HALF)
    a, b = job.finish("a", "b")
    check_equal([a, b], *alone())
    assert not set(a["parameters"]) & set(b["parameters"])


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"model": {"tied": True}}, id="tied"),
        pytest.param({"precision": "bf16-mixed"}, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_pipelines_train_as_one_process(job: Any, spec: dict[str, Any]) -> None:
    job.fresh(min_nodes=3)
    start(job, "abc", device_memory=HALF, **spec)
    reports = job.finish("a", "b", "c")
    losses, parameters = alone(**spec)
    if "precision" in spec:
        assert reports[0]["losses"] == pytest.approx(losses, rel=2e-2)
    else:
        check_equal(reports, losses, parameters)


def test_hooks_see_what_is_owned_and_the_norm_is_that_of_the_whole(job: Any) -> None:
    """The model's hooks see gradients of this member's layers only, but clipping uses the norm of the whole model."""
    job.fresh(min_nodes=3)
    start(job, "abc", device_memory=HALF, kind="Watched")
    reports = job.finish("a", "b", "c")
    check_equal(reports, *alone(kind="Watched"))
    for report in reports:
        owned = {name for name in report["parameters"] if not name.startswith("blocks.0.")}
        seen = {name.partition("/")[2] for name in report["seen"] if not name.endswith("_norm_total")}
        assert seen == owned


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"model": {"dropout": 0.3}}, id="dropout"),
        pytest.param({"samples": 90}, id="uneven", marks=pytest.mark.slow),
    ],
)
def test_plans_do_not_matter(job: Any, tmp_path: Path, spec: dict[str, Any]) -> None:
    """One device, three devices, and two that go on from a checkpoint have the same losses; random numbers are keyed by
    the global step.
    """
    folder = tmp_path / "files"
    job.fresh(min_nodes=1)
    start(job, "a", saves=folder, **spec)
    (whole,) = job.finish("a")
    job.again(min_nodes=3)
    start(job, "bcd", device_memory=HALF, **spec)
    check_equal(job.finish("b", "c", "d"), whole["losses"], whole["parameters"])
    job.again(min_nodes=2)
    start(job, "ef", device_memory=HALF, ckpt_path=folder / "step=6.ckpt", **spec)
    check_equal(job.finish("e", "f"), whole["losses"][6:], whole["parameters"])


@pytest.mark.parametrize(("unit", "raises"), [pytest.param(0, 0, marks=SLOW), (1, 0), pytest.param(1, 1, marks=SLOW)])
def test_a_stage_that_dies_within_a_step_costs_nothing_but_time(job: Any, unit: int, raises: int) -> None:
    """A stage dies within a step, by a kill or as its layer runs out of memory: the losses are those of an
    undisturbed training.
    """
    job.fresh(min_nodes=3)
    job.harness.declare("d")
    gate = {1: job.gate("one")}
    start(job, "ab", device_memory=HALF, epochs=3)
    start(job, "c", device_memory=HALF, epochs=3, gates=gate)
    job.harness.wait_step(1)
    start(job, "d", device_memory=HALF, epochs=3, dies=(7, unit, raises))
    job.wait_admitted("d")
    job.open("one")
    reports = job.finish("a", "b", "c")
    check_equal(reports, *alone(epochs=3))
    assert job.harness.wait_exit("d") == (1 if raises else -9)


@pytest.mark.slow
def test_a_member_leaves_and_nobody_redoes_anything(job: Any) -> None:
    job.fresh(min_nodes=2)
    job.harness.declare("c")
    start(job, "abc", device_memory=HALF, epochs=20)
    job.harness.wait_for("joined", node="c")
    job.harness.wait_step(4)
    job.harness.terminate("c")
    check_equal(job.finish("a", "b"), *alone(epochs=20))
    assert job.harness.wait_exit("c") == 143
    assert not [r for r in job.harness.records if r.name == "redo" and r.fields["base"] > 0]


@pytest.mark.slow
def test_what_is_validated_is_equal_to_one_process(job: Any) -> None:
    job.fresh(min_nodes=3)
    start(job, "abc", device_memory=HALF, validation=22)
    reports = job.finish("a", "b", "c")
    from pipeline_members import quiet, trained

    quiet()
    _, rows = trained("auto", {"validation": 22}, [], accumulate_grad_batches=MICRO_BATCHES)
    for report in reports:
        assert report["validated"] == pytest.approx(rows.validated, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["pipelines", "one process"])
def test_checkpoints_are_lightnings_own(job: Any, writer: str, tmp_path: Any) -> None:
    """A training that resumes from a checkpoint in the middle of an epoch, written by plain Lightning or with
    pipelines, ends like an unbroken one.
    """
    from pipeline_members import quiet, trained

    quiet()
    folder = tmp_path / "files"
    if writer == "pipelines":
        job.fresh(min_nodes=3)
        start(job, "abc", device_memory=HALF, saves=folder)
        job.finish("a", "b", "c")
    else:
        trained("auto", {"saves": folder}, [], accumulate_grad_batches=MICRO_BATCHES)
    files = sorted(folder.glob("*.ckpt"))
    assert [f.name for f in files] == [f"step={n}.ckpt" for n in (12, 3, 6, 9)]
    losses, parameters = alone()
    whole = torch.load(folder / "step=12.ckpt", weights_only=True)
    for name, value in parameters.items():
        torch.testing.assert_close(whole["state_dict"][name], value, rtol=1e-4, atol=1e-5)
    assert len(whole["optimizer_states"][0]["state"]) == len(parameters)
    job.again(min_nodes=2) if writer == "pipelines" else job.fresh(min_nodes=2)
    start(job, "de", device_memory=HALF, ckpt_path=folder / "step=6.ckpt")
    reports = job.finish("d", "e")
    check_equal(reports, losses[6:], parameters)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_llama_trains_as_one_process(job: Any) -> None:
    """A Llama in stages trains as in one process: each stage computes masks and rotary tables from the batch."""
    job.fresh(min_nodes=2)
    start(job, "ab", device_memory=LLAMA_HALF, kind="Llama")
    a, b = job.finish("a", "b")
    check_equal([a, b], *alone(kind="Llama"))
    assert not set(a["parameters"]) & set(b["parameters"])


def test_a_member_trains_where_slurm_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns where it finds `srun` and is not run by it; members of these tests take warnings for errors."""
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from pipeline_members import quiet

    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with warnings.catch_warnings():
        quiet()
        assert not SLURMEnvironment.detect()
