"""Tests clusters under Lightning that are cut off when their job ends: their last checkpoints hold the job's last
version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from test_diloco_members import OuterJob, spent, told

from chaos_lightning.outer.exchange.control_client import ask_end
from chaos_lightning.testing.edge.relay import Way
from chaos_lightning.testing.harness import Harness

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path: Path) -> Iterator[OuterJob]:
    with Harness(tmp_path, deadline_s=90.0) as harness:
        yield OuterJob(harness, tmp_path)


def start(job: OuterJob, name: str, server: str, *, shared: bool, step_s: float) -> None:
    """Starts a cluster; all write to one folder, as the docs show. With data of its own, an epoch takes ten steps."""
    rules = told(job, last_holder_timeout_s=0.5, reconnect_s=2.0)
    rules |= {} if shared else {"data": "local"}
    spec = {"samples": 240 if shared else 40, "trainer": {"max_epochs": 2 if shared else 10_000}}
    job.cluster(name, told=rules, step_s=step_s, server=server, last=str(job.out / "last"), **spec)


@pytest.mark.parametrize("ending", ["its data is trained", "an operator ends it"])
def test_who_is_cut_off_over_the_end_ends_with_the_last_version(job: OuterJob, ending: str) -> None:
    """A cluster is cut off, removed, and trains on while the job ends: its later steps are in no version. Both
    clusters exit with 0 and the last version, which the last checkpoint holds, too.
    """
    shared = ending == "its data is trained"
    job.serve()
    with closing(Way(job.server)) as way:
        start(job, "away", way.endpoint, shared=shared, step_s=0.05)
        job.harness.wait_for("version_adopted", node="away")
        start(job, "other", job.server, shared=shared, step_s=0.03)
        job.harness.wait_until(lambda: job.accepted("away") > 0 and job.accepted("other") > 0, "pushes of both")
        way.cut()
        job.harness.wait_for("entry", lambda r: r["kind"] == "Removed")
        if not shared:
            ask_end(job.server, "enough", b"", 60.0)
        job.harness.wait_for("entry", lambda r: r["kind"] == "Ended")
        if shared:
            assert job.harness.wait_exit("other") == 0
            check_last(job, "other")
        way.restore()
        away, other = job.finish("away", "other")
    assert torch.equal(away["weights"], other["weights"])
    assert away["step"] == other["step"] > 0
    check_last(job, "other")
    if shared:
        assert spent(job) == dict.fromkeys(range(2), 240)


def check_last(job: OuterJob, name: str) -> None:
    """Checks that the last checkpoint holds the weights with which this cluster has ended."""
    found: dict[str, Any] = torch.load(job.out / "last" / "last.ckpt", weights_only=False)
    report = job.report(name)
    assert found["global_step"] == report["step"]
    assert torch.equal(torch.cat([t.flatten() for t in found["state_dict"].values()]), report["weights"])


def test_the_next_oldest_saves_last_where_the_oldest_died_just_before_the_end(job: OuterJob) -> None:
    """Former bug: the oldest cluster died just before the job's end, and the next oldest had no batch left in which
    to learn of it: no last checkpoint was written, or the dead cluster's older file was left.
    """
    job.serve()
    start(job, "dies", job.server, shared=False, step_s=0.03)
    job.harness.wait_for("version_adopted", node="dies")
    start(job, "lives", job.server, shared=False, step_s=0.03)
    job.harness.wait_until(lambda: job.accepted("dies") > 0 and job.accepted("lives") > 0, "pushes of both")
    job.harness.kill("dies")
    job.harness.wait_for("entry", lambda r: r["kind"] == "Removed")
    ask_end(job.server, "enough", b"", 60.0)
    job.finish("lives")
    check_last(job, "lives")


def test_the_last_checkpoint_holds_the_last_version_where_the_own_loop_ends(job: OuterJob) -> None:
    """ModelCheckpoint saves at the end of the last epoch, before the last push has become a version: the last
    checkpoint is then written once more.
    """
    job.serve()
    rules = told(job) | {"data": "local"}
    job.cluster("a", told=rules, server=job.server, last=str(job.out / "last"), samples=40, trainer={"max_epochs": 3})
    job.finish("a")
    check_last(job, "a")
