"""Tests writers that die while they write a checkpoint: no half file is ever visible, and the next writer continues."""

from __future__ import annotations

import signal

import torch
from strategy_job import Job
from test_members import same, start_three

from chaos_lightning.strategies.saving import KEY


def test_deaths_while_a_checkpoint_is_written(job: Job) -> None:
    """The first writer dies with half of a checkpoint written, the second before it renames its complete file. The
    third one writes it, and the whole job resumes from the files.
    """
    spec = {"epochs": 4, "samples": 48, "callbacks": ("steps",), "model_args": {"sync": True}}
    job.harness.declare("a", "b")
    start_three(job, spec, dies_writing="half", of_b={"dies_writing": "whole"})
    assert [job.harness.wait_exit(name) for name in "abc"] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    steps = job.report("c")["step"]
    findings = {finding.point: finding for finding in job.harness.audit()}
    assert findings[1].verdict == "ok", findings[1]
    assert findings[4].verdict == "ok", findings[4]

    folder = job.out / "ckpt"
    assert not list(folder.glob(".*.part")), "the next writer has removed what the dead ones began"
    files = {int(path.stem.removeprefix("step=")): path for path in folder.glob("*.ckpt")}
    assert sorted(files) == list(range(5, steps + 1, 5)), "also the one that the dead writers began"
    for step, path in files.items():
        saved = torch.load(path, weights_only=False)
        assert (saved["global_step"], saved[KEY]["step"]) == (step, step)

    job.again(min_nodes=2)
    more = {**spec, "epochs": 6, "ckpt": str(files[max(files)])}
    job.start("d", **more)
    job.start("e", **more)
    resumed = job.finish("d", "e", audit=False)
    same(resumed)
    assert resumed[0]["epoch"] == 6
    assert resumed[0]["step"] > steps
