"""Tests plain loops that clip, accumulate, train in half precision, save and resume, against Lightning with the same
model.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import plain_members
import pytest
import torch
from strategy_job import Job

from chaos_lightning.control.requests import fetch_status
from chaos_lightning.observe.audit import audit

CLIP = {"clip_norm": 0.5, "accumulate": 2}
"""Settings of a plain loop; then the same for Lightning."""
LIGHTNING = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
SPEC: dict[str, Any] = {"samples": 44, "batch": 4, "epochs": 3, "model_args": {"norm": True}}
"""One member makes six steps per epoch, the last one of a single batch; two make three, the last one of three."""


def start(job: Job, name: str, run: Any = plain_members.member, **spec: Any) -> None:
    """Starts a member that trains by a plain loop."""
    given = {"name": name, "port": job.port, "out": str(job.out), **SPEC, "prepare": CLIP, **spec}
    job.harness.start_function(name, run, given)


def run(job: Job, names: str, **spec: Any) -> list[dict[str, Any]]:
    for name in names:
        start(job, name, **spec)
    return job.finish(*names, audit=False)


def again(job: Job, names: str) -> None:
    job.again(min_nodes=len(names))


def near(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=1e-6)
    for mine, theirs in zip(one["buffers"], other["buffers"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def same(reports: list[dict[str, Any]]) -> None:
    assert len({(report["hash"], report["step"]) for report in reports}) == 1, reports


@pytest.mark.parametrize("names", [pytest.param("a", marks=pytest.mark.slow), "ab"])
@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.slow)])
def test_equals_lightning_also_across_a_checkpoint_in_mid_epoch(job: Job, names: str, precision: str) -> None:
    scales = precision == "16-mixed"
    job.fresh(min_nodes=len(names))
    for name in names:
        of_lightning = {**LIGHTNING, **({} if scales else {"precision": precision})}
        job.start(name, **SPEC, trainer=of_lightning, scaler=scales)
    lightning = job.finish(*names, audit=False)

    again(job, names)
    spec = {"precision": precision, "scaler": scales}
    whole = run(job, names, **spec)
    same(whole)
    near(whole[0], lightning[0])
    assert whole[0]["step"] == lightning[0]["step"] == {1: 18, 2: 9}[len(names)]

    again(job, names)
    file = str(job.out / "half.pt")
    stopped = run(job, names, **spec, saves={4: file}, stops_at=4)
    assert {report["step"] for report in stopped} == {4}
    again(job, names)
    log = job.out / "resumed"
    resumed = run(job, names, **spec, prepare={**CLIP, "resume": file}, settings={"log_dir": str(log)})
    assert {report["began"] for report in resumed} == {4}
    same(resumed)
    near(resumed[0], lightning[0])
    assert resumed[0]["step"] == lightning[0]["step"], "what the checkpoint had spent of its epoch is not trained again"
    assert resumed[0]["scale"] == whole[0]["scale"]
    first = [
        float(r["loss"]) for r in job.harness.records if r.name == "train_loss" and r.node == "a" and r["step"] == 1
    ]
    assert len(first) == 3, "Lightning's, the whole one's, and the one that stopped; the last one logs elsewhere"
    if names == "a":  # of two founders either may come first, and has the first samples then
        assert first == pytest.approx([first[0]] * 3, rel=1e-3)
    findings = {finding.point: finding for finding in audit(log)}
    assert findings[3].verdict == "ok", findings[3]


def told_step(job: Job) -> int:
    """Returns the newest step that the scheduler knows; before the first one no newcomer can join by replay."""
    return max((int(m["step"]) for m in fetch_status(f"127.0.0.1:{job.port}")["machine"]["members"]), default=0)


@pytest.mark.slow
def test_newcomer_replays_clipped_steps_of_a_resumed_job(job: Job) -> None:
    """A newcomer without a checkpoint joins a job that resumed from one, and replays clipped steps: it ends with the
    same state and counts.
    """
    file = str(job.out / "half.pt")
    run(job, "a", saves={4: file}, stops_at=4)
    again(job, "a")
    spec = {"epochs": 240, "settings": {"join_by": "replay"}}
    start(job, "c", **spec, prepare={**CLIP, "resume": file}, gates={6: job.gate("c")})
    job.harness.wait_until(lambda: told_step(job) > 0, "a heartbeat that tells of a step")
    start(job, "d", **spec)
    job.harness.wait_for("way_in", lambda r: r.member.startswith("d~"))
    job.open("c")
    c, d = job.finish("c", "d", audit=False)
    same([c, d])
    assert d["role"] == "joiner"
    assert d["began"] > 6
    mine = [r for r in job.harness.records if r.node == "d"]
    assert sum(int(r.get("steps")) for r in mine if r.name == "replayed") > 0
    assert [int(r.get("nbytes")) for r in mine if r.name == "pull_done"][-1] < 200, "what was replayed fits"


def test_a_death_in_mid_accumulation_leaves_equal_survivors(job: Job) -> None:
    """A member dies in the middle of an accumulation: the others train its samples, and end with equal states."""
    job.fresh(min_nodes=2)
    spec: dict[str, Any] = {"precision": "bf16-mixed", "epochs": 40}
    for name in "abc":
        start(job, name, **spec, worlds={3: job.gate(name)})
    for name in "ac":
        job.open(name)
        if name == "a":
            job.harness.kill("b")
    a, c = job.finish("a", "c")
    same([a, c])


def test_a_batch_without_backward_weighs_nothing_and_sends_nothing(job: Job) -> None:
    """A batch without backward counts for nothing, even if `.grad` still holds the last step's average, because the
    loop zeroes it right before backward.
    """
    job.fresh(min_nodes=2)
    start(job, "a", plain_members.leaves_batches_out, x=1.0, out_at={4: "stale"})
    start(job, "b", plain_members.leaves_batches_out, x=3.0, out_at={1: "zeroed", 3: "stale", 4: "stale"})
    a, b = job.finish("a", "b")
    assert a["moved"] == b["moved"] == [2.0, 1.0, 2.0, 1.0, 0.0, 2.0]
    last = [r for r in job.harness.records if r.name == "committed" and r.node == "a"][-1]
    assert last["step"] == 6, "steps without a batch count"


def test_members_that_clip_otherwise_are_told_both_values(job: Job) -> None:
    start(job, "a", gates={2: job.gate("a")})
    job.harness.wait_step(2)
    job.harness.declare("b")
    start(job, "b", prepare={"accumulate": 2, "clip_value": 0.5})
    assert job.harness.wait_exit("b") == 1
    words = job.harness.children["b"].tail()
    assert "clipping" in words
    assert "value 0.5" in words
    assert "norm 0.5" in words
    job.open("a")
    job.finish("a")


def test_all_gather_also_who_is_idle(job: Job) -> None:
    job.fresh(min_nodes=2)
    reports = run(job, "ab", prepare={}, samples=20, gathers=True, epochs=2)
    first = reports[0]["gathered"]
    assert len(first) == 6
    for values in first:
        assert [value["who"] for value in values] in (["a", "b"], ["b", "a"])
        assert all(isinstance(value["loss"], torch.Tensor) for value in values)
    assert [any(value["idle"] for value in values) for values in first] == [False, False, True] * 2
    assert repr(first) == repr(reports[1]["gathered"])


def test_who_skips_idle_batches_takes_part_all_the_same(job: Job) -> None:
    job.fresh(min_nodes=2)
    a, b = run(job, "ab", prepare={}, samples=20, skips_idle=True, epochs=4)
    same([a, b])
    assert a["skipped"] + b["skipped"] == 4


def test_who_leaves_within_a_batch_brings_nothing_of_it(job: Job) -> None:
    """A member leaves within a batch, when its `.grad` holds the last average: the others' step does not include
    that.
    """
    spec: dict[str, Any] = {"prepare": {}, "samples": 80, "settings": {"join_by": "pause"}}
    start(job, "a", **spec, gates={1: job.gate("a")}, watches=True)
    job.harness.wait_step(1)
    start(job, "b", **spec, leaves_at=4)
    job.wait_admitted("b")
    job.open("a")
    a, b = job.finish("a", "b")
    assert b["out"]
    assert b["step"] < a["step"]
    assert a["apart"], "a step in which only one of two had samples"
    assert max(a["apart"]) < 1e-6


def test_an_interrupted_loop_ends_its_own_part_alone(job: Job) -> None:
    """A second Ctrl+C interrupts one member's loop: that member ends, and the others continue without waiting for
    it.
    """
    spec: dict[str, Any] = {"settings": {"join_by": "pause"}}
    start(job, "a", **spec, gates={1: job.gate("a")})
    job.harness.wait_step(1)
    job.harness.declare("b")
    start(job, "b", **spec, gates={4: job.gate("b")})
    job.wait_admitted("b")
    job.open("a")
    job.harness.wait_step(4, node="b")
    job.harness.terminate("b", number=signal.SIGINT)
    said = job.harness.children["b"].tail
    job.harness.wait_until(lambda: "capture_exit_event() is true" in said(), "b's answer to the first Ctrl+C")
    job.harness.terminate("b", number=signal.SIGINT)
    assert job.harness.wait_exit("b") != 0
    assert "KeyboardInterrupt" in said()
    (a,) = job.finish("a")
    assert a["step"] > 4


def test_the_next_member_saves_if_the_writer_dies(job: Job) -> None:
    file = job.out / "saved.pt"
    spec: dict[str, Any] = {"saves": {6: str(file)}, "settings": {"join_by": "pause"}}
    start(job, "a", plain_members.dies_writing, **spec, gates={1: job.gate("a")})
    job.harness.wait_step(1)
    job.harness.declare("a")
    start(job, "b", **spec)
    job.wait_admitted("b")
    job.open("a")
    assert [job.harness.wait_exit(name) for name in "ab"] == [-signal.SIGKILL, 0]
    saved = torch.load(file, weights_only=True)
    assert saved["chaos_lightning"]["step"] == 6
    assert [path.name for path in job.out.iterdir() if "saved" in path.name] == ["saved.pt"]


def test_all_members_raise_if_the_writer_cannot_save(job: Job) -> None:
    job.fresh(min_nodes=2)
    nowhere = str(job.out / "no such folder" / "a.pt")
    job.harness.declare("a", "b")
    for name in "ab":
        start(job, name, plain_members.fails_writing, saves={2: nowhere})
    assert [job.harness.wait_exit(name) for name in "ab"] == [1, 1]
    errors = sorted(job.report(name)["error"].partition(":")[0] for name in "ab")
    assert errors == ["RuntimeError", "StateError"]


def test_a_checkpoint_is_not_lost_to_a_job_that_is_behind(job: Job, tmp_path: Path) -> None:
    file = str(tmp_path / "ahead.pt")
    run(job, "a", saves={8: file}, stops_at=8)
    before = job.harness.wait_for("finished", node="a")
    again(job, "a")
    start(job, "a", gates={2: job.gate("a")})
    job.harness.wait_for("committed", lambda r: r["step"] >= 2, node="a", after=before)  # b comes to a job that runs
    job.harness.declare("b")
    start(job, "b", prepare={**CLIP, "resume": file}, settings={"join_by": "pause"})
    job.wait_admitted("b")
    job.open("a")
    assert job.harness.wait_exit("b") == 1
    assert "the checkpoint of resume= is of step 8" in job.harness.children["b"].tail()
    job.finish("a")
