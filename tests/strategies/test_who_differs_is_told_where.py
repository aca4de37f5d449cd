"""A member that cannot be in the job ends before it trains, and is told what of it differs; the job goes on."""

from __future__ import annotations

import re
from typing import Any

import odd_members
from strategy_job import Job

PRELOAD = ("torch", "lightning.pytorch", "torchmetrics", "chaos_lightning.strategies", "chaos_lightning.runtime.agent")

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "width": (
        {"model_args": {"width": 16}},
        r"parameter net\.0\.bias of width is torch\.float32 \(16,\), the job's \(from a\) is torch\.float32 \(8,\); "
        r"parameter net\.0\.weight is torch\.float32 \(16, 4\) instead of torch\.float32 \(8, 4\); parameter net\.1",
    ),
    "optimizer": (
        {"model_args": {"optimizer": "SGD"}},
        r"optimizers of optimizer is SGD, the job's \(from a\) is Adam; ",
    ),
    "lr": ({"model_args": {"lr": 0.5}}, r"optimizer 0 lr of lr is 0\.5, the job's \(from a\) is 0\.05: start"),
    "betas": (
        {"model_args": {"betas": (0.5, 0.9)}},
        r"optimizer 0 betas of betas is \(0\.5, 0\.9\), the job's \(from a\) is \(0\.9, 0\.999\): start",
    ),
    "accumulation": (
        {"trainer": {"accumulate_grad_batches": 2}},
        r"accumulate of accumulation is 2, the job's \(from a\) is 1: start",
    ),
    "seed": ({"options": {"seed": 3}}, r"data\.seed of seed is 3, the job's \(from a\) is \d+: start"),
    "length": ({"samples": 26}, r"data\.length of length is 26, the job's \(from a\) is 24: start"),
    "precision": (
        {"trainer": {"precision": "bf16-mixed"}},
        r"precision of precision is bf16-mixed, the job's \(from a\) is 32-true: start",
    ),
    "package": ({"package": "0.0.0"}, r"package version of package is 0\.0\.0, the job's \(from a\) is "),
}


def start(job: Job, name: str, **spec: Any) -> None:
    spec = {"name": name, "port": job.port, "out": str(job.out), "epochs": 3, **spec}
    job.harness.start_function(name, odd_members.odd, spec, preload=PRELOAD)


def test_who_differs_is_told_where(job: Job) -> None:
    start(job, "a", gates={7: job.gate("a")})
    job.harness.wait_step(7)  # of the second epoch: the scheduler has halved the learning rate
    for name, (spec, _) in CASES.items():
        start(job, name, **spec)
        job.harness.declare(name)
    said = {}
    for name in CASES:
        assert job.harness.wait_exit(name) not in (0, None), name
        said[name] = job.harness.children[name].tail()
    # Who is like the job is not refused, though the job's learning rate is another by now.
    start(job, "z")
    job.wait_admitted("z")
    job.open("a")
    a, z = job.finish("a", "z")
    assert a["step"] == z["step"]
    assert a["epoch"] == 3
    started = {r.node for r in job.harness.records if r.name == "committed"}
    assert started.isdisjoint(CASES)
    for name, (_, words) in CASES.items():
        assert re.search(words, said[name]), said[name]
