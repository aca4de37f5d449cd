"""Tests that the example of a batch of fixed size trains the same on 1, 3 and 2 processes, noise included: losses,
validation, learning rates and names of checkpoints.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from benchmarks.same_losses import BOUND, DOUBLE, Trained, in_turn, read, trained

QUIET = ("--no-noise", *DOUBLE)
EACH = 8
"""Micro-batches of a step."""
LAUNCHERS = {
    "run": [sys.executable, "-m", "chaos_lightning", "run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=chaos"],
}
pytestmark = pytest.mark.filterwarnings("ignore")


class StepLosses(L.Callback):
    """Callback that records the mean loss of each step of Lightning alone."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % EACH == 0:
            self.losses.append(0.0)
        self.losses[-1] += float(outputs["loss"])  # Lightning has divided it by EACH


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Training of one process, with noise."""
    return trained(tmp_path_factory.mktemp("one"), "a", *DOUBLE)


def check_equal(got: Trained, expected: Trained, bound: float = BOUND, **but: Any) -> None:
    differences = got.differences(expected, **but)
    assert {"val_loss", "val_accuracy", "loss_epoch", "lr-AdamW"} <= differences.keys()
    assert max(differences.values()) <= bound, differences


def test_it_trains_with_lightning_alone(tmp_path: Path) -> None:
    main = importlib.import_module("fixed_batch").main
    main(["--plain", "--samples", "256", "--micro-batch", "64", "--epochs", "1", "--out", str(tmp_path)])
    assert len(read(tmp_path).values["lr-AdamW"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("names", ["abc", "ab"])
def test_several_processes_train_what_one_trains(tmp_path: Path, one: Trained, names: str) -> None:
    got = trained(tmp_path, names, *DOUBLE)
    check_equal(got, one)
    assert [name.partition("-")[0] for name in got.files] == ["step=100", "step=150", "step=50"]
    assert all(len(shares) == len(names) and sum(shares.values()) == 64 for shares in got.samples.values())


@pytest.mark.slow
def test_single_precision_differs_by_the_order_of_sums_only(tmp_path: Path) -> None:
    one, three = (trained(tmp_path / names, names, "--epochs", "3") for names in ("a", "abc"))
    check_equal(three, one, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["c", "a"])
def test_members_that_come_and_one_that_is_killed_change_no_value(tmp_path: Path, one: Trained, victim: str) -> None:
    """The victim is a newcomer, or the first member, which writes logs and checkpoints."""
    got = in_turn(tmp_path, victim, *DOUBLE)
    check_equal(got, one)
    worlds = [len(got.samples[step]) for step in sorted(got.samples)]
    assert (worlds[0], max(worlds), worlds[-1]) == (1, 3, 2)
    assert {sum(shares.values()) for shares in got.samples.values()} == {64}


@pytest.mark.slow
def test_without_noise_it_trains_what_lightning_alone_does(tmp_path: Path) -> None:
    rows = StepLosses()
    importlib.import_module("fixed_batch").main(["--plain", *QUIET, "--out", str(tmp_path / "plain")], rows)
    plain, got = read(tmp_path / "plain"), trained(tmp_path / "three", "abc", *QUIET)
    check_equal(got, plain, but=["loss_step"])
    assert list(got.values["loss_step"].values()) == pytest.approx(rows.losses, rel=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_starts_it(tmp_path: Path, one: Trained, launcher: str) -> None:
    def launch(name: str) -> list[str]:
        logs = f"--rdzv-conf=log_dir={tmp_path / 'events'}"
        return [*LAUNCHERS[launcher], "--nproc-per-node=2", "--rdzv-endpoint={endpoint}", "--nnodes=1:2", logs]

    got = trained(tmp_path, "a", *DOUBLE, launch=launch)
    check_equal(got, one)
    assert {sum(shares.values()) for shares in got.samples.values()} == {64}
