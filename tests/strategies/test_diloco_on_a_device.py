"""Tests clusters on an accelerator beside one on the CPU, as real processes with a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_diloco_elastic import ElasticJob, audited, counted, hashes
from test_diloco_members import OuterJob, ends, spent, told

from chaos_lightning.testing.harness import Harness

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch.accelerator finds no device here"),
]

PRECISIONS = {"one": {}, "two": {"precision": "bf16-mixed"}}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[OuterJob]:
    with Harness(tmp_path, deadline_s=90.0) as harness:
        yield OuterJob(harness, tmp_path)


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[ElasticJob]:
    with Harness(tmp_path, deadline_s=90.0) as harness:
        made = ElasticJob(harness, tmp_path)
        try:
            yield made
        finally:
            made.close()


def device() -> str:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found.type


def on_the_device(**more: Any) -> dict[str, Any]:
    """Returns the arguments of a Trainer on the accelerator."""
    return {"accelerator": device(), "devices": 1, "max_epochs": 3, **more}


def same(*reports: dict[str, Any]) -> bool:
    first, *others = (each["weights"].cpu() for each in reports)
    return all(torch.equal(first, other) for other in others)


def test_clusters_on_a_device_and_one_on_the_cpu_train_one_model(job: OuterJob) -> None:
    """Two clusters on an accelerator, one in mixed precision, and one on the CPU exchange fp32 parameters, and end
    with the same model.
    """
    job.serve(followers=2)
    for name, precision in PRECISIONS.items():
        job.cluster(name, told=told(job), step_s=0.01, trainer=on_the_device(**precision))
    job.cluster("three", told=told(job), step_s=0.01, trainer={"max_epochs": 3})
    one, two, three = job.finish("one", "two", "three")
    assert same(one, two, three)
    assert spent(job) == dict.fromkeys(range(3), 240)
    assert ends(one) == ends(two) == ends(three)
    assert {each["seen"].device.type for each in (one, two)} == {device()}


@pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])
def test_exact_versions_on_a_device(job: OuterJob, overlap: bool) -> None:
    """With a lossless codec two clusters on an accelerator end with the same bits, with and without overlapped
    exchange.
    """
    job.serve()
    rules = told(job) | {"data": "local", "policy": "sync", "codec": "fp32", "overlap": overlap}
    for name in ("one", "two"):
        job.cluster(name, told=rules, step_s=0.01, trainer=on_the_device(max_steps=40, max_epochs=-1))
    one, two = job.finish("one", "two")
    assert same(one, two)
    assert one["step"] == two["step"] == 40


def test_ranks_of_an_elastic_cluster_share_a_device_and_one_is_killed(elastic: ElasticJob) -> None:
    elastic.serve()
    for name in ("a", "b", "c"):
        elastic.rank(name, min_nodes=2, step_s=0.02, trainer=on_the_device(max_epochs=4))
    elastic.harness.wait_until(lambda: len(elastic.entries("Round")) >= 2, "two rounds")
    elastic.harness.kill("c")
    a, b = elastic.finish("a", "b")
    assert same(a, b)
    assert counted(elastic)[1] > 0
    assert all(len(set(each)) == 1 for each in hashes(elastic).values())
    audited(elastic)


def test_a_process_group_of_a_device_has_meetings_on_the_cpu(job: OuterJob) -> None:
    """A DDP cluster on an accelerator meets by a second process group, on the CPU. It has a single rank, since NCCL
    allows one per device.
    """
    from diloco_members import ddp

    from chaos_lightning.machine.listener import free_port

    job.serve()
    common = {"server": job.server, "out": str(job.out), "ranks": 1, "rank": 0, "step_s": 0.01}
    rules = {**told(job), "inner": "ddp"}
    trainer = {"accelerator": device(), "max_epochs": 3}
    job.harness.start_function(
        "many.0", ddp, {**common, "name": "many", "port": free_port(), "told": rules, "trainer": trainer}
    )
    job.cluster("one", told=told(job), step_s=0.01, trainer=on_the_device())
    assert job.harness.wait_exit("many.0") == 0
    many, (one,) = job.report("rank-0/many"), job.finish("one")
    assert same(many, one)
    assert spent(job) == dict.fromkeys(range(3), 240)


def test_a_plain_loop_on_a_device_and_one_on_the_cpu(job: OuterJob) -> None:
    from diloco_members import loop

    job.serve()
    rules = {"inner_steps": 8, "heartbeat_s": 0.2, "host_server": False, "log_dir": str(job.harness.logs)}
    given = {"server": job.server, "out": str(job.out), "step_s": 0.01, "told": rules}
    names = {"here": device(), "there": "cpu"}
    for name, where in names.items():
        job.harness.start_function("loop-" + name, loop, {**given, "name": name, "device": where})
    job.harness.wait_until(lambda: all(job.accepted(name) > 3 for name in names), "pushes of both")
    for name in names:
        job.harness.terminate("loop-" + name)
    for name in names:
        assert job.harness.wait_exit("loop-" + name) == 0
    accepted = [each["offer"] for body in job.entries("Round") for each in body["accepted"]]
    assert sum(offer["steps"] for offer in accepted) == sum(job.report(name)["steps"] for name in names)
    assert all(job.report(name)["weights"].isfinite().all() for name in names)
