"""Tests clusters as real processes with a real server: they train one model, join late, die and leave."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_support import run

from chaos_lightning.errors import SchedulerUnreachableError
from chaos_lightning.machine.listener import free_port
from chaos_lightning.observe.audit import VIOLATED
from chaos_lightning.observe.outer.audit import audit_folder
from chaos_lightning.outer.exchange.control_client import fetch_facts
from chaos_lightning.protocol.spans import count, normalise
from chaos_lightning.testing.harness import Harness


class OuterJob:
    """An outer job: a leader, followers and clusters, each a process."""

    def __init__(self, harness: Harness, out: Path) -> None:
        self.harness, self.out = harness, out
        self.server = f"127.0.0.1:{free_port()}"

    def serve(self, followers: int = 1) -> None:
        chain = str(self.out / "chain.sqlite")
        logs = ["--log-dir", str(self.harness.logs)]
        self._module(
            "leader", "leader_main", ["--listen", self.server, "--store", chain, *logs, "--followers", str(followers)]
        )
        for number in range(followers):
            self.follower(f"follower-{number}")
        self.harness.wait_until(self.facts, "the leader's answer")

    def follower(self, name: str) -> None:
        logs = ["--log-dir", str(self.harness.logs)]
        where = ["--server", self.server, "--name", name, "--dir", str(self.out / name), "--bind", "127.0.0.1"]
        self._module(name, "follower_main", [*where, *logs])

    def _module(self, name: str, module: str, arguments: list[str]) -> None:
        self.harness.start_function(
            name, run, f"chaos_lightning.outer.commands.{module}", arguments, dict(self.harness.environment())
        )

    def cluster(self, name: str, **spec: Any) -> None:
        from diloco_members import cluster

        self.harness.start_function(name, cluster, {"name": name, "server": self.server, "out": str(self.out), **spec})

    def gate(self, name: str) -> str:
        path = self.out / f"gate-{name}"
        os.mkfifo(path)
        return str(path)

    def open(self, name: str) -> None:
        with open(self.out / f"gate-{name}", "w"):
            pass

    def facts(self) -> dict[str, Any]:
        with contextlib.suppress(SchedulerUnreachableError):
            return fetch_facts(self.server, b"", 10.0)
        return {}

    def epoch(self) -> int:
        """Returns the epoch of which positions are being leased."""
        return int(self.facts().get("leases", {}).get("epoch", 0))

    def accepted(self, cluster: str) -> int:
        """Returns how many pushes of this cluster were accepted."""
        return next((each["accepted"] for each in self.facts().get("clusters", ()) if each["name"] == cluster), 0)

    def report(self, name: str) -> dict[str, Any]:
        return torch.load(self.out / f"{name}.pt", weights_only=False)

    def finish(self, *names: str) -> list[dict[str, Any]]:
        for name in names:
            assert self.harness.wait_exit(name) == 0
        return [self.report(name) for name in names]

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """Returns the entries of this kind in the outer job's chain, each once: a new leader logs the last entry a
        second time.
        """
        told = [r for r in self.harness.records if r.name == "entry" and r["kind"] == kind]
        return [*{r["hash"]: r["body"] for r in told}.values()]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[OuterJob]:
    with Harness(tmp_path, deadline_s=90.0) as harness:
        yield OuterJob(harness, tmp_path)


def told(job: OuterJob, **options: Any) -> dict[str, Any]:
    """Returns the strategy's settings for jobs that take seconds."""
    quick = {"heartbeat_s": 0.2, "lease_ahead_s": 0.3, "log_dir": str(job.harness.logs)}
    return {"inner_steps": 8, "options": {**quick, **options}}


def spent(job: OuterJob) -> dict[int, int]:
    """Returns how many positions of each epoch accepted pushes cover; fails if one is covered twice."""
    covers: dict[int, list[tuple[int, int]]] = {}
    for body in job.entries("Round"):
        for accepted in body["accepted"]:
            for each in accepted["offer"]["covers"]:
                covers.setdefault(each["epoch"], []).extend(tuple(span) for span in each["spans"])
    return {epoch: count(normalise(spans)) for epoch, spans in covers.items()}


def marks(report: dict[str, Any]) -> list[tuple[str, int]]:
    return [line[:2] for line in report["lines"] if line[0] != "step"]


def ends(report: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [line for line in report["lines"] if line[0] == "end"]


def epochs(*numbers: int) -> list[tuple[str, int]]:
    return [(what, epoch) for epoch in numbers for what in ("epoch", "validated", "end")]


def went_through(report: dict[str, Any], *numbers: int) -> bool:
    """Returns whether a cluster's report has these epochs. The last one may lack its end, if the job ended during
    its validation.
    """
    return marks(report) in (epochs(*numbers), epochs(*numbers)[:-1])


def test_two_clusters_train_each_sample_once_an_epoch_and_end_alike(job: OuterJob) -> None:
    job.serve(followers=2)
    for name in ("one", "two"):
        job.cluster(name, told=told(job), step_s=0.01, trainer={"max_epochs": 3})
    one, two = job.finish("one", "two")
    assert torch.equal(one["weights"], two["weights"])
    assert spent(job) == dict.fromkeys(range(3), 240)
    assert went_through(one, 0, 1, 2)
    assert went_through(two, 0, 1, 2)
    assert ends(one)[:2] == ends(two)[:2]
    assert one["step"] == two["step"] > ends(one)[1][2]


@pytest.mark.slow
def test_a_late_cluster_takes_over_and_trains_on_where_another_dies(job: OuterJob) -> None:
    """One cluster joins in a later epoch, another one dies: the dead one's samples are leased again, and each counts
    once.
    """
    job.serve()
    job.cluster("one", told=told(job), step_s=0.03, trainer={"max_epochs": 4})
    job.cluster("dies", told=told(job), step_s=0.03, trainer={"max_epochs": 4})
    job.harness.wait_until(lambda: job.epoch() == 1, "the second epoch")
    job.cluster("late", told=told(job), step_s=0.03, trainer={"max_epochs": 4})
    job.harness.wait_until(lambda: job.accepted("late") > 1, "pushes of the late cluster")
    job.harness.kill("dies")
    one, late = job.finish("one", "late")
    assert torch.equal(one["weights"], late["weights"])
    assert spent(job) == dict.fromkeys(range(4), 240)
    assert marks(one) == epochs(0, 1, 2, 3)
    first = late["lines"][0]
    assert first[0] == "epoch"
    assert first[1] >= 1
    assert first[2] > 0
    assert marks(late)[3:] == epochs(*range(first[1] + 1, 4))
    assert ends(one)[-len(ends(late)) :] == ends(late)


@pytest.mark.slow
def test_a_signal_leaves_once_all_is_durable_and_loses_nothing(job: OuterJob) -> None:
    job.serve()
    for name in ("one", "leaves"):
        job.cluster(name, told=told(job), step_s=0.03, trainer={"max_epochs": 2})
    job.harness.wait_until(lambda: job.accepted("leaves") > 1, "pushes of the one that is to leave")
    job.harness.terminate("leaves")
    job.harness.declare("leaves")
    (gone,) = job.finish("leaves")
    assert gone["over"] == "it was asked to leave"
    assert "INTERRUPTED" in gone["status"]
    assert job.facts()["versions"]["durable"]
    (one,) = job.finish("one")
    assert spent(job) == dict.fromkeys(range(2), 240)
    steps = sum(w["offer"]["steps"] for body in job.entries("Round") for w in body["accepted"])
    trained = sum(len([line for line in each["lines"] if line[0] == "step"]) for each in (one, gone))
    assert steps == trained


@pytest.mark.slow
@pytest.mark.parametrize("data", ["shared", "local"])
def test_metrics_go_on_in_one_folder_when_the_oldest_cluster_dies(job: OuterJob, data: str) -> None:
    job.serve()
    files = job.out / "files"
    last = {"max_epochs": 4} if data == "shared" else {"max_epochs": -1, "max_steps": 300}
    spec = {
        "told": {**told(job), "data": data},
        "step_s": 0.03,
        "trainer": {**last, "log_every_n_steps": 1},
        "files": str(files),
    }
    job.cluster("one", **spec)
    job.harness.wait_until(lambda: job.accepted("one") > 0, "a push of the oldest cluster")
    job.cluster("two", **spec)
    job.harness.wait_until(lambda: job.accepted("two") > 1, "pushes of the other cluster")
    job.harness.kill("one")
    before = steps_logged(files / "rows" / "version_0")
    assert before
    (two,) = job.finish("two")
    for logger in os.listdir(files):
        assert os.listdir(files / logger) == ["version_0"], "no other folder, of metrics or checkpoints"
    steps = steps_logged(files / "rows" / "version_0")
    assert steps[: len(before)] == before
    assert steps[-1] == two["step"] - 1
    assert steps == sorted(steps), "it begins behind what is there"
    assert {file.suffix for file in (files / "rows" / "version_0" / "checkpoints").iterdir()} == {".ckpt"}


def steps_logged(folder: Path) -> list[int]:
    """Returns the steps for which a folder's metrics.csv has a loss, in order."""
    with (folder / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get("loss_step")]


def audited(job: OuterJob) -> None:
    """Audits the logs; fails at any violation."""
    (judged,) = audit_folder(job.harness.logs)
    assert [str(found) for found in judged.findings if found.verdict == VIOLATED] == []


@pytest.mark.slow
def test_a_frozen_cluster_is_removed_and_comes_in_again(job: OuterJob) -> None:
    """A frozen cluster is removed and joins again: it loses the steps that it had not pushed; their samples are
    leased again, and each counts once.
    """
    job.serve()
    harness = job.harness
    job.cluster("one", told=told(job, last_holder_timeout_s=0.5), step_s=0.02, trainer={"max_epochs": 2})
    harness.wait_for("version_adopted", lambda r: r["progress_steps"] > 0)
    harness.stop("one")
    harness.wait_for("entry", lambda r: r["kind"] == "Removed")
    harness.cont("one")
    again = harness.wait_for("cluster_welcomed", lambda r: r["incarnation"] == "one~2")
    harness.wait_for("version_adopted", lambda r: r["steps"] > 0, after=again)
    job.finish("one")
    assert [r["again"] for r in harness.records if r.name == "cluster_over"] == [True, False]
    assert [body["incarnation"]["number"] for body in job.entries("Joined")] == [1, 2]
    assert spent(job) == {0: 240, 1: 240}
    audited(job)


def test_a_signal_to_a_plain_loop_leaves_once_all_is_durable(job: OuterJob) -> None:
    from diloco_members import loop

    job.serve()
    rules = {"heartbeat_s": 0.2, "inner_steps": 8, "host_server": False, "log_dir": str(job.harness.logs)}
    spec = {"name": "loop", "server": job.server, "out": str(job.out), "told": rules, "step_s": 0.01}
    job.harness.start_function("loop", loop, spec)
    job.harness.wait_until(lambda: job.accepted("loop") > 1, "pushes")
    job.harness.terminate("loop")
    (report,) = job.finish("loop")
    accepted = [each["offer"]["steps"] for body in job.entries("Round") for each in body["accepted"]]
    assert sum(accepted) == report["steps"]
    removed = job.harness.wait_for("entry", lambda r: r["kind"] == "Removed")
    assert "it was asked to leave" in removed["body"]["reason"]
    durable = max(body["version"]["number"] for body in job.entries("Durable"))
    assert durable == max(body["number"] for body in job.entries("Round"))
    audited(job)


def test_a_notice_to_a_cluster_leaves_once_all_is_durable(job: OuterJob) -> None:
    from diloco_members import loop

    job.serve()
    flag = job.out / "taken"
    rules = {"heartbeat_s": 0.2, "inner_steps": 8, "host_server": False, "log_dir": str(job.harness.logs)}
    told = {**rules, "notice": f"file:{flag}"}
    spec = {"name": "loop", "server": job.server, "out": str(job.out), "told": told, "step_s": 0.01}
    job.harness.start_function("loop", loop, spec)
    job.harness.wait_until(lambda: job.accepted("loop") > 1, "pushes")
    flag.touch()
    (report,) = job.finish("loop")
    assert job.harness.wait_for("notice_taken", node="loop")["reason"] == f"file {flag}"
    accepted = [each["offer"]["steps"] for body in job.entries("Round") for each in body["accepted"]]
    assert sum(accepted) == report["steps"], "no step is lost"
    assert f"loop leaves the job after the present step: file {flag}" in job.harness.children["loop"].log.read_text()
    audited(job)


@pytest.mark.slow
def test_a_notice_ends_the_fit_of_a_cluster(job: OuterJob) -> None:
    job.serve()
    flag = job.out / "taken"
    for name in ("one", "leaves"):
        notice = {"notice": f"file:{flag}"} if name == "leaves" else {}
        job.cluster(name, told=told(job, **notice), step_s=0.03, trainer={"max_epochs": 2})
    job.harness.wait_until(lambda: job.accepted("leaves") > 1, "pushes of the one that is to leave")
    flag.touch()
    (gone,) = job.finish("leaves")
    assert gone["over"] == "it was asked to leave"
    assert "INTERRUPTED" in gone["status"]
    (one,) = job.finish("one")
    assert spent(job) == dict.fromkeys(range(2), 240)
    steps = sum(w["offer"]["steps"] for body in job.entries("Round") for w in body["accepted"])
    trained = sum(len([line for line in each["lines"] if line[0] == "step"]) for each in (one, gone))
    assert steps == trained


def test_training_goes_on_while_the_whole_server_is_killed_and_comes_back(job: OuterJob) -> None:
    job.serve()
    for name in ("one", "two"):
        job.cluster(name, told=told(job, lease_ahead_s=5.0, reconnect_s=30.0), step_s=0.03, trainer={"max_epochs": 2})
    job.harness.wait_until(lambda: job.accepted("two") > 1, "some pushes")
    for name in ("leader", "follower-0"):
        job.harness.kill(name)
        job.harness.wait_exit(name)
    job.serve()
    one, two = job.finish("one", "two")
    assert torch.equal(one["weights"], two["weights"])
    assert spent(job) == dict.fromkeys(range(2), 240)
    steps = sum(w["offer"]["steps"] for body in job.entries("Round") for w in body["accepted"])
    assert steps == sum(len([line for line in each["lines"] if line[0] == "step"]) for each in (one, two))


def test_own_data_in_step_and_exact_until_max_steps_of_the_job(job: OuterJob) -> None:
    """Two clusters with own data of different sizes and speeds average exactly, until `max_steps` of the job: they
    end at the same step with the same weights.
    """
    job.serve()
    exact = {**told(job), "data": "local", "policy": "sync", "codec": "fp32", "overlap": False}
    for name, samples, step_s in (("one", 40, 0.01), ("two", 80, 0.02)):
        job.cluster(name, told=exact, samples=samples, step_s=step_s, trainer={"max_steps": 48, "max_epochs": -1})
    one, two = job.finish("one", "two")
    assert torch.equal(one["weights"], two["weights"])
    assert one["step"] == two["step"] >= 48
    assert one["over"] == two["over"]
    assert "max_steps=48 reached" in one["over"]


def test_a_checkpoint_that_one_cluster_alone_was_given_is_refused_with_what_to_do(job: OuterJob) -> None:
    import strategy_models as models

    trainer = models.fitted(job.out, models.Regression(), models.loader(), strategy="auto")
    trainer.save_checkpoint(job.out / "old.ckpt")
    job.serve()
    job.cluster("one", told=told(job), batches={2: job.gate("one")}, trainer={"max_epochs": 1})
    job.harness.wait_for("version_adopted", node="one")
    job.cluster("two", told=told(job), ckpt=str(job.out / "old.ckpt"), trainer={"max_epochs": 3})
    job.harness.declare("two")
    assert job.harness.wait_exit("two") == 1
    said = (job.out / "out" / "two.0.log").read_text()
    assert "its checkpoint (ckpt_path) is of 12 steps, 2 epochs, the job's is none. A job goes on from one" in said
    job.open("one")
    job.finish("one")
