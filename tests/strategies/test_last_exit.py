"""Tests that the last member of a job leaves under Lightning, and the next fit resumes from its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_job import Job

from chaos_lightning.control.requests import drain


@pytest.mark.parametrize(("way", "windows"), [("signal", 2), ("drained", 1), ("notice", 1)])
def test_a_fit_that_the_last_member_left_goes_on_as_if_it_had_not(
    job: Job, tmp_path: Path, way: str, windows: int
) -> None:
    goes_on(job, tmp_path, way, 4, accumulate_grad_batches=windows)


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_epochs": 2}, {"max_steps": 8}])
def test_a_fit_that_is_left_in_the_last_step_of_its_epoch_goes_on(
    job: Job, tmp_path: Path, limit: dict[str, int]
) -> None:
    """The last member leaves in the last step of an epoch: the next fit resumes with the validation, the epoch's
    end, and maybe the fit's.
    """
    goes_on(job, tmp_path, "in the step", limit.get("max_steps", 13), **limit)


def goes_on(job: Job, tmp_path: Path, way: str, stop: int, **trainer: Any) -> None:
    """Checks that a training in two parts ends with the same weights, statistics, trace and schedules as an unbroken
    one.
    """
    spec: dict[str, Any] = {
        "model": "Scheduled",
        "model_args": {"norm": True},
        "samples": 52,
        "trainer": trainer,
        "callbacks": () if "max_steps" in trainer else ("stopping",),  # no validation is due at a step in mid-epoch
        "options": {"on_last_exit": str(tmp_path / "kept"), "notice": f"file:{tmp_path / 'taken'}"},
    }
    if way == "in the step":
        job.start("a", **spec, leaves_at=stop)
    else:
        job.start("a", **spec, gates={stop: job.gate("a")})
        job.harness.wait_step(stop)
        if way == "drained":
            assert drain(job.options.listen, "a") == ("a",)
            job.harness.wait_for("left", node="a")
        elif way == "notice":
            (tmp_path / "taken").touch()
            taken = job.harness.wait_for("notice_taken", node="a")
            assert job.harness.wait_for("leave")["reason"] == taken["reason"] == f"file {tmp_path / 'taken'}"
            (tmp_path / "taken").unlink()
        else:
            job.harness.terminate("a")
            job.harness.wait_for("leave")
        job.open("a")
    assert job.harness.wait_exit("a") == 0
    first = job.report("a")
    kept = job.harness.wait_for("kept", node="a")
    job.start("b", **spec)
    came = job.harness.wait_for("joined", node="b")
    assert came["step"] == kept["step"] >= stop
    (second,) = job.finish("b")
    assert f"goes on from step {kept['step']}: a~1 kept its training state" in job.harness.children["b"].tail()
    job.again()
    job.start("c", **spec)
    (whole,) = job.finish("c", audit=False)
    assert second["step"] == whole["step"] >= kept["step"]
    assert torch.equal(second["weights"], whole["weights"])
    for its, the_wholes in zip(second["buffers"], whole["buffers"], strict=True):
        assert torch.equal(its, the_wholes), "a pass that no step has used counts for nothing"
    lines, mine = ([line for line in part["trace"] if "starts" not in line] for part in (whole, second))
    assert mine == lines[len(lines) - len(mine) :]
    assert len([line for line in first["trace"] if "starts" not in line]) + len(mine) >= len(lines)
    assert first["step"] == kept["step"], "a batch that ran on after the leave does not count"
    said = [r for r in job.harness.records if r.name == "state_hash" and r["head"] == kept["head"]]
    assert {r.member for r in said} == {"a~1", "b~2"}, "for whoever reads the logs: what was kept is what came back"
    assert len({r["hash"] for r in said}) == 1
    left = [path.parent.name for path in (tmp_path / "kept").rglob("kept.json")]
    assert set(left) <= {"final"}, "the job is finished; for a while its final state answers who comes late"


@pytest.mark.slow
def test_a_kept_state_says_the_step_that_the_script_counts(job: Job, tmp_path: Path) -> None:
    """The job resumes from a checkpoint of step 5, and counts its own steps from 0: the message about the kept state
    gives both numbers.
    """
    options = {"on_last_exit": str(tmp_path / "kept"), "resume_from": "checkpoint"}
    spec: dict[str, Any] = {"callbacks": ("steps",), "options": options}
    for name, at, own, ckpt in (("a", 7, 7, None), ("b", 8, 3, str(job.out / "ckpt" / "step=5.ckpt"))):
        job.start(name, **spec, gates={at: job.gate(name)}, ckpt=ckpt)
        job.harness.wait_step(own, node=name)
        job.harness.terminate(name)
        job.harness.wait_for("leave", node=name)
        job.open(name)
        assert job.harness.wait_exit(name) == 0
    kept = job.harness.wait_for("kept", node="b")["step"]
    said = job.harness.children["b"].log.read_text()
    assert f"at step {5 + kept} (step {kept} of this job) is kept in" in said


@pytest.mark.parametrize("resume_from", ["newest", "checkpoint"])
def test_a_kept_state_counts_before_the_checkpoint_that_it_goes_on_from(
    job: Job, tmp_path: Path, resume_from: str
) -> None:
    """If the last member's saved state is newer than a checkpoint, the job resumes from that state, unless
    `resume_from` asks for the checkpoint.
    """
    options = {"on_last_exit": str(tmp_path / "kept"), "resume_from": resume_from}
    spec: dict[str, Any] = {"callbacks": ("steps",), "options": options}
    job.start("a", **spec, gates={7: job.gate("a")})
    job.harness.wait_step(7)
    job.harness.terminate("a")
    job.harness.wait_for("leave")
    job.open("a")
    assert job.harness.wait_exit("a") == 0
    kept = job.harness.wait_for("kept", node="a")["step"]
    assert kept >= 7
    job.start("b", **spec, ckpt=str(job.out / "ckpt" / "step=5.ckpt"))
    (second,) = job.finish("b", audit=False)
    goes_on = resume_from == "newest"
    assert job.harness.wait_for("resumed_kept" if goes_on else "resumed", node="b")["step"] == (kept if goes_on else 5)
    said = "from the checkpoint of step 5 that this script" if goes_on else "starts from what its script has loaded, by"
    assert said in job.harness.children["b"].log.read_text()
    assert second["step"] == 18
