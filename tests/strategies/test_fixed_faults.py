"""Tests, with real processes, that a batch of fixed size trains what one process trains: under features of Lightning,
bad numbers and faults.
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel

from chaos_lightning.data.pieces import Share, SharePiece
from chaos_lightning.pipeline.shares import ShareAttempt, UserStep
from chaos_lightning.planning.batch import read_split
from chaos_lightning.strategies.fixed_fit import FixedFit


def start(job: Any, name: str, rule: str, **spec: Any) -> None:
    from fixed_fault_members import member

    options = {"batch": rule, **spec.pop("options", {})}
    about = {"name": name, "port": job.port, "out": str(job.out), "options": options, **spec}
    job.harness.start_function(name, member, about)


def alone(spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Trains the same in this process, with plain Lightning."""
    from fixed_fault_members import studied

    return studied("auto", dict(spec), **more)


def near(value: Any, rel: float = 1e-10) -> Any:
    return pytest.approx(value, rel=rel, abs=1e-14, nan_ok=True)


def check_lines(found: list[Any], expected: list[Any]) -> None:
    """Compares histories: the same hooks ran at the same steps, with the same logged values."""
    assert [line[:2] for line in found] == [line[:2] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[2] == near(theirs[2]), mine[:2]


def check_end(found: dict[str, Any], expected: dict[str, Any], rel: float = 1e-10) -> None:
    assert found["steps"] == expected["steps"]
    for name, value in expected["parameters"].items():
        torch.testing.assert_close(found["parameters"][name], value, rtol=rel, atol=rel)


def summed(losses: list[float], parts: int) -> list[float]:
    """Returns the losses of steps, given those of their micro-batches; NaN of a step in which none had a loss."""
    steps = [losses[i : i + parts] for i in range(0, len(losses), parts)]
    return [math.nan if all(map(math.isnan, s)) else sum(x for x in s if not math.isnan(x)) for s in steps]


# ------------------------------------------------------------------------------------------ features of Lightning

BY_VALUE = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize("clips", [{"gradient_clip_val": 0.05}, pytest.param(BY_VALUE, marks=pytest.mark.slow)])
def test_what_lightning_counts_logs_clips_averages_and_validates_is_as_in_one_process(job: Any, clips: Any) -> None:
    limits = {"limit_train_batches": 5, "val_check_interval": 2, "max_steps": 13, "max_epochs": -1}
    spec = {"samples": 93, "drop_last": True, "validates": 1, "averages": 1, "scheduled": 1}
    spec["trainer"] = {**limits, **clips}
    job.fresh(min_nodes=2)
    for name in "ab":
        start(job, name, "fixed", options={"fits": 5, "state_hash_every": 1}, **spec)
    expected = alone(spec)
    for found in job.finish("a", "b"):
        check_lines(found["lines"], expected["lines"])
        check_end(found, expected)


def test_a_member_without_a_share_runs_hooks_and_callbacks_as_the_others(job: Any) -> None:
    """Two micro-batches for three members, with BatchNorm: losses are those of one process that accumulates."""
    spec = {"samples": 48, "batch": 8, "norm": 1, "scheduled": 1, "averages": 1, "validates": 1}
    job.fresh(min_nodes=3)
    for name in "abc":
        start(job, name, "fixed:16/8", **spec)
    expected = alone(spec, accumulate_grad_batches=2)
    found = job.finish("a", "b", "c")
    for each in found:
        assert each["losses"] == near(summed(expected["losses"], 2))
        check_lines(each["lines"], found[0]["lines"])
        check_end(each, expected)
        for name, value in found[0]["buffers"].items():
            torch.testing.assert_close(each["buffers"][name], value, rtol=0, atol=0)


def test_random_numbers_are_those_of_the_micro_batch_whoever_computes_it(job: Any) -> None:
    """Dropout, and noise in a transfer hook: a world of one and of three members have the same losses, and two that go
    on from a checkpoint.
    """
    spec = {"samples": 40, "batch": 4, "dropout": 0.3, "noise": 1}
    saves = str(job.out / "saves")
    losses = []
    for names, more in (("a", {"saves": saves}), ("bcd", {}), ("ef", {"ckpt_path": f"{saves}/step=4.ckpt"})):
        (job.again if losses else job.fresh)(min_nodes=len(names))
        for name in names:
            start(job, name, "fixed:16/4", **spec, **more)
        losses += [found["losses"] for found in job.finish(*names, audit=False)]
    assert [len(each) for each in losses] == [6, 6, 6, 6, 2, 2]
    for other in losses[1:]:
        assert other == near(losses[0][-len(other) :])
    without = alone({**spec, "dropout": 0.0, "noise": 0}, accumulate_grad_batches=4)
    assert losses[0] != near(summed(without["losses"], 4), 1e-3)


@pytest.mark.slow
def test_shares_of_a_model_with_batch_norm_have_two_samples_at_least(job: Any) -> None:
    """The epoch's last step has 5 samples for four members."""
    job.fresh(min_nodes=4)
    for name in "abcd":
        start(job, name, "fixed:16", samples=37, norm=1)
    found = job.finish(*"abcd")
    assert len(found[0]["losses"]) == 6
    for each in found[1:]:
        check_lines(each["lines"], found[0]["lines"])


def test_a_training_goes_on_from_the_midst_of_an_epoch_with_another_world(job: Any) -> None:
    spec = {"samples": 40, "batch": 8, "scheduled": 1, "averages": 1}
    job.fresh(min_nodes=2)
    for name in "ab":
        start(job, name, "fixed", saves=str(job.out / "saves"), **spec)
    expected = alone(spec)
    for found in job.finish("a", "b", audit=False):
        check_end(found, expected)
    job.again(min_nodes=3)
    for name in "cde":
        start(job, name, "fixed", ckpt_path=str(job.out / "saves" / "step=8.ckpt"), **spec)
    for found in job.finish("c", "d", "e", audit=False):
        assert found["losses"] == near(expected["losses"][8:])
        check_end(found, expected)


# ------------------------------------------------------------------------------------------ bad numbers, no numbers


@pytest.mark.parametrize("precision", ["scaled", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_steps_with_numbers_that_are_not_finite_end_as_in_one_process(job: Any, precision: str) -> None:
    """An infinite gradient: a gradient scaler leaves the step out at all members. A NaN: training ends for all."""
    spec = {"samples": 40, "batch": 4, "precision": precision, "nan": (1, 3), "stops": 1, "trainer": {"max_epochs": 4}}
    if precision == "scaled":
        spec["infinite"] = (0, 10)
    job.fresh(min_nodes=2)
    for name in "ab":
        start(job, name, "fixed:8/4", **spec)
    expected = alone(spec, accumulate_grad_batches=2)
    losses = [a + b for a, b in zip(expected["losses"][::2], expected["losses"][1::2], strict=True)]
    for found in job.finish("a", "b"):
        assert found["steps"] == expected["steps"] == (10, 2)
        assert found["scale"] == expected["scale"] == (16.0 if precision == "scaled" else 0.0)
        assert found["losses"] == near(losses, 2e-2)
        if precision == "scaled":
            check_end(found, expected, 1e-3)


def test_samples_without_a_loss_weigh_nothing_and_steps_without_any_are_skipped(job: Any) -> None:
    """training_step returns None: for one of two micro-batches, the other one's loss is the step's; for both, Lightning
    skips the step.
    """
    spec = {"samples": 40, "batch": 4, "skips": (2, 13, 16, 20)}
    job.fresh(min_nodes=2)
    for name in "ab":
        start(job, name, "fixed:8/4", **spec)
    # One process divides a loss by the number of micro-batches, those without a loss included.
    expected = alone({**spec, "alone": (4, 8)}, accumulate_grad_batches=2)
    for found in job.finish("a", "b"):
        assert found["losses"] == near(summed(expected["losses"], 2))
        assert found["losses"][2] != found["losses"][2]
        check_end(found, expected)
        hooks = [[line[:2] for line in each["lines"] if line[0] == "after backward"] for each in (found, expected)]
        assert [step for _, step in hooks[0]] == sorted({step for _, step in hooks[1]})
        assert found["lines"][-1][2]["samples"] == expected["lines"][-1][2]["samples"] == 40


@pytest.mark.parametrize(("output", "words"), [({"x": 1}, "'loss' key needs to be present"), (1.5, "must return")])
def test_an_output_that_is_no_loss_is_refused_as_lightning_refuses_it(output: Any, words: str) -> None:
    trainer: Any = MagicMock()
    trainer.lightning_module, trainer.precision_plugin.scaler = BoringModel(), None
    trainer.strategy.root_device = "cpu"
    trainer.lightning_module.training_step = lambda *_: output
    fit = FixedFit(trainer, Mock(), MagicMock(), seed=1)
    fit._step = Mock()
    attempt = fit._attempts(MagicMock(), Mock())
    with pytest.raises(MisconfigurationException, match=words):
        attempt.user.loss(SharePiece(0, ((0, 1),)), None)


def test_who_runs_out_of_memory_is_told_what_would_fit() -> None:
    def loss(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    batch = SimpleNamespace(samples=16, positions=(((0, 16),),), expect_share=Mock(), piece=Mock())
    user = UserStep(loss, Mock(), lambda *_: 1.0, bytes)
    view: Any = SimpleNamespace(id=(1, 1), batch="16:16", members=("a",), ids=lambda: ["a"])
    attempt = ShareAttempt(Mock(least=1), user, "a", batch, fits=16)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        attempt(view, 1)
    assert raised.value.__notes__ == ["a computed 16 samples at once; fits=8 halves that"]


# ------------------------------------------------------------------------------------------ members come, stop and die


def test_a_second_death_within_the_step_that_runs_again_changes_nothing(job: Any) -> None:
    """A member dies within a step, and another one while it runs again. What they have counted in the epoch is kept,
    and a newcomer has what was logged before it came.
    """
    spec = {"samples": 60, "batch": 16, "trainer": {"max_epochs": 5}, "validates": 1, "pause_s": 0.01}
    job.fresh(min_nodes=2)
    job.harness.declare("b", "c")
    start(job, "a", "fixed", gates={1: job.gate("one")}, **spec)
    start(job, "b", "fixed", dies=(18, 2), **spec)
    job.harness.wait_step(1, node="b")
    start(job, "c", "fixed", dies=(18, 1), late_s=0.5, **spec)  # others are done with this attempt
    start(job, "d", "fixed", **spec)
    for name in "cd":
        job.harness.wait_for("welcomed", node=name)
    job.open("one")
    expected = alone(spec)
    found = job.finish("a", "d")
    check_lines(found[0]["lines"], expected["lines"])
    check_lines(found[1]["lines"][1:], expected["lines"][1 - len(found[1]["lines"]) :])
    for each in found:
        check_end(each, expected)
    assert [job.harness.wait_exit(name) for name in "bc"] == [-9, -9]


@pytest.mark.slow
def test_a_member_that_is_frozen_within_a_step_and_thawed_comes_back(job: Any) -> None:
    spec = {"samples": 96, "batch": 16, "trainer": {"max_epochs": 3}}
    harness = job.harness
    job.fresh(min_nodes=2)
    start(job, "a", "fixed", gates={1: job.gate("one"), 12: job.gate("twelve")}, **spec)
    start(job, "b", "fixed", **spec)
    harness.wait_step(1, node="b")
    start(job, "c", "fixed", stays=(6, str(job.out / "within")), **spec)
    harness.wait_for("way_in", lambda r: r.member.startswith("c~"))
    job.open("one")
    harness.wait_until((job.out / "within").exists, "a step of c")
    harness.stop("c")
    gone = harness.wait_step(7, node="a")  # without it
    harness.cont("c")
    harness.wait_for("way_in", lambda r: r.member.startswith("c~"), after=gone)
    job.open("twelve")
    expected = alone(spec)
    found = job.finish("a", "b", "c")
    for each in found[:2]:
        check_lines(each["lines"], expected["lines"])
    check_lines(found[2]["lines"][-6:], expected["lines"][-6:])
    for each in found:
        check_end(each, expected)


@pytest.mark.slow
def test_a_member_twenty_times_slower_gets_little_or_nothing(job: Any) -> None:
    spec = {"samples": 320, "batch": 20, "trainer": {"max_epochs": 3}}
    job.fresh(min_nodes=2)
    start(job, "a", "fixed", pause_s=0.001, **spec)
    start(job, "b", "fixed", pause_s=0.02, **spec)
    expected = alone(spec)
    for found in job.finish("a", "b"):
        check_lines(found["lines"], expected["lines"])
        check_end(found, expected)
    told = "".join(path.read_text() for path in (job.harness.directory / "out").glob("*.log"))
    shares = [sorted(map(int, words.split(", "))) for words in re.findall(r"by rank: ([\d, ]+)", told)]
    assert [10, 10] in shares
    assert shares[-1][0] <= 4


def test_shares_of_five_samples_for_four_members_with_batch_norm() -> None:
    split = read_split("16:4x4", 4)
    shares = [Share(split, rank, 4, least=2).pieces((((0, 5),),)) for rank in range(4)]
    assert [[piece.spans for piece in pieces] for pieces in shares] == [[], [((0, 2),)], [], [((2, 5),)]]
