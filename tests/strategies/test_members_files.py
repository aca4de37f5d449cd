"""Tests, with real processes, that the files of a run stay together, whichever member writes them."""

from __future__ import annotations

import csv
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from strategy_job import Job

BOARDS = ("boards",) if find_spec("tensorboard") else ()
SPEC = {"samples": 48, "callbacks": ("log", "steps", *BOARDS), "trainer": {"val_check_interval": 0.5}}


def rows(job: Job) -> list[tuple[int, str]]:
    """Returns the rows of the run's only metrics.csv, in order: each row's step and the kind of its value."""
    (file,) = (job.out / "csv").rglob("metrics*.csv")
    kinds = ("loss_step", "val_loss", "loss_epoch")
    lines = csv.DictReader(file.read_text().splitlines())
    return [(int(line["step"]), next((kind for kind in kinds if line.get(kind)), "")) for line in lines]


def check(job: Job, last: int) -> None:
    """Checks that metrics.csv has each step's loss once, in order, and likewise the values of validations and
    epochs.
    """
    found = rows(job)
    assert [step for step, kind in found if kind == "loss_step"] == list(range(last))
    assert len(set(found)) == len(found), found
    for kind in ("val_loss", "loss_epoch"):
        steps = [step for step, of in found if of == kind]
        assert steps == sorted(steps)
        assert steps
    assert os.listdir(job.out / "csv" / "run") == ["version_0"]
    if BOARDS:
        assert os.listdir(job.out / "boards" / "run") == ["version_0"]
        assert shown(job.out / "boards" / "run" / "version_0") == list(range(last))


def shown(folder: Path) -> list[int]:
    """Returns the steps for which TensorBoard shows a loss from the files in this folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars("loss_step")]


def trains(job: Job, node: str, members: int) -> None:
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == members and r["kind"] == "step", node=node)


def test_two_writers_die_and_the_third_one_goes_on_with_their_files(job: Job) -> None:
    spec = {**SPEC, "epochs": 12}
    job.start("a", worlds={3: job.gate("a")}, gates={2: job.gate("start")}, **spec)
    job.harness.wait_step(2)
    job.start("b", gates={40: job.gate("b")}, **spec)
    job.wait_admitted("b")
    job.open("start")
    admitted = job.harness.wait_for("joined", node="b")
    job.start("c", gates={40: job.gate("c")}, **spec)
    job.harness.wait_for("way_in", lambda r: r.member.startswith("c~"), after=admitted)
    trains(job, "c", 3)
    job.harness.kill("a")
    job.harness.wait_step(39, node="c")
    job.harness.kill("b")
    job.open("c")
    (c,) = job.finish("c")
    assert c["rank"] == 0
    check(job, c["step"])


@pytest.mark.slow
def test_a_writer_that_is_put_out_and_comes_back_writes_no_more(job: Job) -> None:
    spec = {**SPEC, "epochs": 12}
    job.start("a", worlds={2: job.gate("a")}, gates={2: job.gate("start")}, **spec)
    job.harness.wait_step(2)
    job.start("b", worlds={1: job.gate("b")}, **spec)
    job.wait_admitted("b")
    job.open("start")
    trains(job, "b", 2)
    job.harness.stop("a")
    out = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 1, node="b")
    job.harness.cont("a")
    job.open("a")
    back = job.harness.wait_for("way_in", lambda r: r.member.startswith("a~"), after=out)
    job.open("b")
    job.harness.wait_for("joined", node="a", after=back)
    a, b = job.finish("a", "b")
    assert (b["rank"], a["step"]) == (0, b["step"])
    check(job, b["step"])
