"""Tests CheckpointOnChange among real members: each change causes one checkpoint, and all ask for it at one step."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_job import Job
from strategy_models import Regression, loader, trainer
from test_members import same

from chaos_lightning.callbacks import CheckpointOnChange
from chaos_lightning.events.reader import Record
from chaos_lightning.strategies.saving import KEY

SPEC: dict[str, Any] = {"epochs": 30, "callbacks": ("on_change",)}


def written(folder: Path) -> list[tuple[int, int]]:
    """Returns step and number of members of each checkpoint in this folder, in the order of steps."""
    found = [re.fullmatch(r"step-(\d+)-members-(\d+)\.ckpt", path.name) for path in folder.glob("*")]
    assert all(found), list(folder.glob("*"))
    return sorted((int(name[1]), int(name[2])) for name in found if name is not None)


def changes(job: Job, node: str) -> list[tuple[int, int]]:
    """Returns step and number of members of each step whose header named other members than the step before, as the
    log of this node has it.
    """
    records = job.harness.records
    views = {r["id"]: set(r["members"]) for r in records if r.name == "view"}
    steps = [r for r in records if r.name == "committed" and r.node == node and r["kind"] == "step"]
    named = [(r["step"], views[r["next_view"]]) for r in steps]
    return [(step, len(now)) for (_, before), (step, now) in pairwise(named) if now != before]


def check(job: Job, members: list[int]) -> None:
    """Checks that each change that member a has seen has its checkpoint, of that very step, and that there is no
    other one.

    Args:
        job: Job that is over.
        members: Number of members after each change.
    """
    found = written(job.out / "changes")
    assert [count for _, count in found] == members
    assert found == changes(job, "a")
    for step, count in found:
        saved = torch.load(job.out / "changes" / f"step-{step}-members-{count}.ckpt", weights_only=False)
        assert (saved["global_step"], saved[KEY]["step"]) == (step, step)


def three(job: Job, **of_b: Any) -> Record:
    """Starts three members one after the other; the first one waits at gate "three" after the first step with all.
    Returns that step's event.
    """
    job.start("a", gates={2: job.gate("start")}, worlds={2: job.gate("two"), 3: job.gate("three")}, **SPEC)
    job.harness.wait_step(2)
    job.start("b", **SPEC, **of_b)
    job.wait_admitted("b")
    job.open("start")
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2 and r["kind"] == "step", node="b")
    job.start("c", **SPEC)
    job.wait_admitted("c")
    job.open("two")
    return job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3 and r["kind"] == "step", node="c")


def test_joins_a_death_and_a_leave_write_one_each(job: Job) -> None:
    """The third member dies as all are about to write the checkpoint of its coming: that one is written all the same,
    and another one after the next step.
    """
    three(job, gates={40: job.gate("b")})
    job.harness.kill("c")
    job.open("three")
    job.harness.wait_step(40, node="b")
    job.harness.terminate("b")
    job.harness.wait_for("leave", node="b")
    job.open("b")
    job.finish("a", "b")
    check(job, [2, 3, 2, 1])


def test_two_that_die_between_two_steps_write_one(job: Job) -> None:
    together = three(job)
    job.harness.kill("c")
    job.harness.kill("b")
    job.harness.wait_for("view", lambda r: len(r["members"]) == 1, node="default", after=together)
    job.open("three")
    job.finish("a")
    check(job, [2, 3, 1])


def test_the_writer_dies_and_the_next_one_writes(job: Job) -> None:
    """The writer's death is a change, too; whoever writes next removes the files that are too many."""
    spec = {**SPEC, "keep": 1}
    job.start("b", gates={2: job.gate("start")}, worlds={2: job.gate("two")}, **spec)
    job.harness.wait_step(2)
    job.start("a", **spec)
    job.wait_admitted("a")
    job.open("start")
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2 and r["kind"] == "step", node="a")
    job.harness.kill("b")
    (a,) = job.finish("a")
    assert a["rank"] == 0
    said = [r for r in job.harness.records if r.name == "checkpoint"]
    assert [(r.node, r["path"].rpartition("-")[2]) for r in said] == [("a", "2.ckpt"), ("a", "1.ckpt")]
    assert written(job.out / "changes") == changes(job, "a")[-1:], "the first of the two was removed"


def test_a_frozen_member_that_comes_back_asks_for_no_other_checkpoint_than_the_others(job: Job) -> None:
    spec = {**SPEC, "epochs": 12, "samples": 48}
    job.start("a", gates={2: job.gate("a"), 60: job.gate("a2")}, **spec)
    job.harness.wait_step(2)
    job.start("b", gates={20: job.gate("b")}, **spec)
    job.wait_admitted("b")
    job.open("a")
    job.harness.wait_step(20, node="b")
    job.harness.stop("b")
    job.harness.wait_step(60, node="a")
    job.harness.cont("b")
    job.open("b")
    job.harness.wait_for("rejoin", node="b")
    job.harness.wait_for("view", lambda r: "b~3" in (r.get("joiners") or ()), node="default")
    job.open("a2")
    same(job.finish("a", "b"), lines=36)
    check(job, [2, 1, 2])


@pytest.mark.parametrize("kept", [False, True], ids=["anew", "from a kept state"])
def test_the_members_that_a_job_begins_with_write_none(job: Job, tmp_path: Path, kept: bool) -> None:
    """Two members found the job, or found it again on the state that an earlier last member has kept."""
    spec = {**SPEC, "epochs": 4, "options": {"on_last_exit": str(tmp_path / "kept")}}
    if kept:
        job.start("a", gates={2: job.gate("a")}, **spec)
        job.harness.wait_step(2)
        job.harness.terminate("a")
        job.harness.wait_for("leave", node="a")
        job.open("a")
        assert job.harness.wait_exit("a") == 0
        job.harness.wait_for("kept", node="a")
    job.fresh(min_nodes=2)
    for name in "de":
        job.start(name, **spec)
    reports = job.finish("d", "e")
    same(reports)
    assert any(r.name == "resumed_kept" for r in job.harness.records) is kept
    assert not (job.out / "changes").exists()


def test_a_job_resumes_from_such_a_checkpoint(job: Job) -> None:
    """The members that the file was written among are gone: those who go on from it write none for that."""
    job.start("a", gates={2: job.gate("a")}, **{**SPEC, "epochs": 4})
    job.harness.wait_step(2)
    job.start("b", **{**SPEC, "epochs": 4})
    job.wait_admitted("b")
    job.open("a")
    job.finish("a", "b")
    ((step, members),) = written(job.out / "changes")
    assert members == 2
    job.again(min_nodes=2)
    path = job.out / "changes" / f"step-{step}-members-{members}.ckpt"
    for name in "cd":
        job.start(name, ckpt=str(path), **{**SPEC, "epochs": 5})
    reports = job.finish("c", "d", audit=False)
    same(reports)
    assert reports[0]["epoch"] == 5
    assert written(job.out / "changes") == [(step, members)]
    assert reports[0]["callbacks"]["CheckpointOnChange"] == {"files": [path.name]}


def test_members_must_agree_on_having_it(tmp_path: Path, double: Any) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": True}
    run = trainer(tmp_path, callbacks=[CheckpointOnChange()], **options)
    run.fit(Regression(), loader(8, 4), loader(8))
    assert double.made[0].fingerprint["checkpoint and stopping callbacks"] == "CheckpointOnChange"
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_stages_that_die_and_come_write_one_each(job: Job) -> None:
    """Two pipelines of two members lose one and get another one. Views that only move layers write none."""
    from test_pipelines_train import HALF, alone, check_equal, start

    spec = {"device_memory": 2 * HALF, "epochs": 12, "paced_s": 0.05, "precision": "64-true"}
    changing = {**spec, "saves_changes": str(job.out / "changes")}
    job.fresh(min_nodes=3)
    start(job, "abcd", **changing)
    for name in "abcd":
        job.harness.wait_for("joined", node=name)
    job.harness.wait_step(5)
    job.harness.kill("d")
    job.harness.wait_for("checkpoint", lambda r: "members-3" in r["path"], after=job.harness.wait_for("fault_injected"))
    start(job, "e", **changing)
    joined = job.harness.wait_for("joined", node="e")
    job.harness.wait_for("checkpoint", lambda r: "members-4" in r["path"], after=joined)
    reports = job.finish("a", "b", "c", "e")
    check_equal(reports, *alone(**spec))
    assert written(job.out / "changes") == changes(job, "a")
    assert [count for _, count in written(job.out / "changes")][-2:] == [3, 4]


@pytest.mark.slow
def test_a_newcomer_that_replays_asks_at_the_end_of_its_first_accumulation(job: Job) -> None:
    """It comes in between two accumulations, while the others train: its first batch is not yet a step."""
    from test_members_replay import three as start_three

    start_three(job, "replay", **{**SPEC, "epochs": 40, "samples": 48}, trainer={"accumulate_grad_batches": 2})
    same(job.finish("a", "b", "c"), lines=5)
    assert any(r.name == "replayed" and r.node == "c" for r in job.harness.records)
    check(job, [3])
