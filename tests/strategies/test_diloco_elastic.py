"""Tests clusters of several ranks that join, leave and die, as real processes with a real parameter server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import strategy_models as models
import torch
from forked_support import patient, run, scheduler
from lightning.pytorch.trainer.states import TrainerStatus

from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.events.registry import problems
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.machine.listener import free_port
from chaos_lightning.observe.audit import VIOLATED
from chaos_lightning.observe.outer.audit import audit_folder
from chaos_lightning.protocol.spans import count, normalise
from chaos_lightning.security import keyfiles
from chaos_lightning.security.keyfiles import NODES, KeyHolder
from chaos_lightning.security.roles import CLUSTER, FOLLOWER
from chaos_lightning.strategies import ChaosStrategy, DiLoCoStrategy
from chaos_lightning.testing.harness import Harness


class ElasticJob:
    """Parameter server, and elastic clusters with a scheduler each, as processes."""

    def __init__(self, harness: Harness, out: Path) -> None:
        self.harness, self.out = harness, out
        self.server = f"127.0.0.1:{free_port()}"
        self._schedulers: dict[str, Any] = {}
        self._options: dict[str, SchedulerOptions] = {}

    def serve(self, keys: Path | None = None) -> None:
        """Starts a leader and a follower; `keys` has a folder of keys for each."""
        logs = ["--log-dir", str(self.harness.logs)]
        chain, where = str(self.out / "chain-of-versions.sqlite"), str(self.out / "follower")
        leader = ["--listen", self.server, "--store", chain, "--followers", "1", *logs]
        follower = ["--server", self.server, "--name", "follower", "--dir", where, "--bind", "127.0.0.1", *logs]
        for name, arguments in (("leader", leader), ("follower", follower)):
            arguments += ["--keys-dir", str(keys / name)] if keys is not None else []
            module, environment = f"chaos_lightning.outer.commands.{name}_main", dict(self.harness.environment())
            self.harness.start_function(name, run, module, arguments, environment)

    def rank(self, name: str, cluster: str = "home", **spec: Any) -> None:
        """Starts a rank of an elastic cluster, and with the first rank its scheduler."""
        from diloco_members import rank

        if cluster not in self._schedulers:
            folder = self.out / cluster
            folder.mkdir()
            options = patient(folder)
            rules = replace(options.settings, min_nodes=spec.get("min_nodes", 1))
            self._options[cluster] = replace(options, settings=rules, log_dir="")
            self._schedulers[cluster] = scheduler(self._options[cluster])
        port = split_endpoint(self._schedulers[cluster].endpoint)[1]
        quick = {"heartbeat_s": 0.3, "log_dir": str(self.harness.logs)}
        told = {"inner_steps": 8, "options": {**quick, **spec.pop("rules", {})}, **spec.pop("told", {})}
        given = {"name": name, "cluster": cluster, "server": self.server, "out": str(self.out), "port": port}
        self.harness.start_function(name, rank, {**given, "told": told, **spec})

    def kill_scheduler(self, cluster: str = "home") -> None:
        """Kills the scheduler of the elastic cluster."""
        os.kill(self._schedulers.pop(cluster).pid, signal.SIGKILL)

    def start_scheduler(self, cluster: str = "home") -> None:
        """Starts the scheduler of the elastic cluster again, on its former chain."""
        self._schedulers[cluster] = scheduler(self._options[cluster])

    def finish(self, *names: str) -> list[dict[str, Any]]:
        for name in names:
            assert self.harness.wait_exit(name) == 0
        return [torch.load(self.out / f"{name}.pt", weights_only=False) for name in names]

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """Returns the entries of this kind in the outer job's chain, each once: a new leader logs the last entry a
        second time.
        """
        told = [r for r in self.harness.records if r.name == "entry" and r["kind"] == kind]
        return [*{r["hash"]: r["body"] for r in told}.values()]

    def close(self) -> None:
        for each in self._schedulers.values():
            each.stop()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ElasticJob]:
    with Harness(tmp_path, deadline_s=90.0) as harness:
        made = ElasticJob(harness, tmp_path)
        try:
            yield made
        finally:
            made.close()


def audited(job: ElasticJob) -> None:
    """Audits the logs of the outer job and of the clusters; fails at any violation."""
    records = job.harness.records
    assert [text for r in records for text in problems(r.name, r.fields)] == []
    judged = audit_folder(job.harness.logs)
    assert len(judged) >= 2
    assert [str(found) for each in judged for found in each.findings if found.verdict == VIOLATED] == []


def counted(job: ElasticJob) -> tuple[int, int]:
    """Returns the samples and inner steps of all accepted pushes; fails if one was accepted twice."""
    offers = [each["offer"] for body in job.entries("Round") for each in body["accepted"]]
    names = [str(offer["push"]) for offer in offers]
    assert len(names) == len(set(names))
    return sum(offer["samples"] for offer in offers), sum(offer["steps"] for offer in offers)


def spent(job: ElasticJob) -> dict[int, int]:
    """Returns how many positions of each epoch accepted pushes cover; fails if one is covered twice."""
    covers: dict[int, list[tuple[int, int]]] = {}
    for body in job.entries("Round"):
        for each in (each for accepted in body["accepted"] for each in accepted["offer"]["covers"]):
            covers.setdefault(each["epoch"], []).extend(tuple(span) for span in each["spans"])
    return {epoch: count(normalise(spans)) for epoch, spans in covers.items()}


def hashes(job: ElasticJob) -> dict[int, list[str]]:
    """Returns the state hashes of one cluster's ranks, by slot; fails if ranks differ."""
    found: dict[int, list[str]] = {}
    for record in job.harness.records:
        if record.name == "state_hash":
            found.setdefault(record["seq"], []).append(record["hash"])
    assert all(len(set(each)) == 1 for each in found.values())
    return found


def test_two_ranks_are_one_cluster(job: ElasticJob) -> None:
    job.serve()
    for name in ("a", "b"):
        job.rank(name, min_nodes=2, trainer={"max_epochs": 2}, last=str(job.out / "last"))
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    last = torch.load(job.out / "last" / "last.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(torch.cat([t.flatten() for t in last.values()]), a["weights"])
    assert a["over"] == b["over"] == "home~1 says: max_epochs=2 reached"
    assert counted(job) == (2 * 240, 60)
    assert all(len(each) == 2 for each in hashes(job).values())
    assert len(job.entries("Joined")) == 1
    audited(job)


@pytest.mark.slow
def test_metrics_go_on_in_one_folder_when_the_oldest_elastic_cluster_dies(job: ElasticJob) -> None:
    job.serve()
    files = job.out / "files"
    spec = {
        "step_s": 0.03,
        "trainer": {"max_epochs": -1, "max_steps": 240, "log_every_n_steps": 1},
        "files": str(files),
    }
    job.rank("a", **spec)
    job.harness.wait_for("version_adopted", lambda r: r["progress_steps"] > 0)
    joined = job.harness.wait_for("joined", node="a")
    job.rank("b", cluster="away", **spec)
    job.harness.wait_for("push_answered", lambda r: "away" in str(r["push"]), after=joined)
    job.harness.kill("a")
    file = files / "rows" / "version_0" / "metrics.csv"
    before = file.read_text().splitlines()
    assert len(before) > 1
    (b,) = job.finish("b")
    for logger in os.listdir(files):
        assert os.listdir(files / logger) == ["version_0"]
    after = file.read_text().splitlines()
    assert len(after) > len(before)
    assert b["status"] == str(TrainerStatus.FINISHED)


@pytest.mark.slow
def test_the_first_rank_is_killed_in_mid_push(job: ElasticJob) -> None:
    """The first rank is killed while it pushes: another rank finishes the push as the same incarnation, and no inner
    step is lost.
    """
    job.serve()
    harness = job.harness
    for name in ("a", "b"):
        job.rank(name, step_s=0.02, samples=1600, trainer={"max_epochs": 1}, rules={"heartbeat_s": 2.0})
        joined = harness.wait_for("joined", node=name)
    first = harness.wait_for("version_adopted", after=joined)
    harness.stop("follower")
    frozen = harness.wait_for("push_frozen", after=first)
    harness.declare("a")
    harness.kill("a")
    harness.wait_for("cluster_stream", lambda r: bool(r["up"]), after=frozen)
    harness.cont("follower")
    (b,) = job.finish("b")
    samples, steps = counted(job)
    assert samples == 1600
    assert len(job.entries("Joined")) == 1
    assert not job.entries("Removed")
    committed = max(r["step"] for r in harness.records if r.name == "committed")
    assert steps == committed
    assert b["step"] == committed
    frozen_here = [r["push"] for r in harness.records if r.name == "push_frozen"]
    assert len(frozen_here) == len(set(frozen_here))
    audited(job)


@pytest.mark.slow
def test_the_last_rank_is_killed_in_mid_push(job: ElasticJob) -> None:
    """The only rank of a cluster is killed while it pushes: its steps that were not pushed are lost, the next rank
    joins as a new incarnation, and accepted pushes count once.
    """
    job.serve()
    harness = job.harness
    rules = {"last_holder_timeout_s": 0.5}
    spec: dict[str, Any] = {"step_s": 0.02, "samples": 800, "trainer": {"max_epochs": 1}, "rules": rules}
    job.rank("a", **spec)
    counts = harness.wait_for("version_adopted", lambda r: r["progress_steps"] > 0)
    harness.stop("follower")
    frozen = harness.wait_for("push_frozen", after=counts)
    harness.declare("a")
    harness.kill("a")
    harness.wait_exit("a")
    harness.cont("follower")
    harness.wait_for("entry", lambda r: r["kind"] == "Removed", after=frozen)
    before = counted(job)[0]
    job.rank("b", **spec)
    (b,) = job.finish("b")
    assert torch.isfinite(b["weights"]).all()
    assert [each["incarnation"]["number"] for each in job.entries("Joined")] == [1, 2]
    assert counted(job)[0] == before + 800, "its own epoch, and what counted before"
    audited(job)


@pytest.mark.slow
def test_a_rank_joins_between_push_and_adoption(job: ElasticJob) -> None:
    job.serve()
    spec: dict[str, Any] = {"step_s": 0.02, "samples": 3000, "trainer": {"max_epochs": 1}, "told": {"codec": "int8"}}
    for name in ("a", "b"):
        job.rank(name, min_nodes=2, **spec)
    harness = job.harness
    first = harness.wait_for("version_adopted", lambda r: r["progress_steps"] > 0)
    harness.stop("follower")
    harness.wait_for("push_frozen", after=first)
    job.rank("c", **spec)
    joined = harness.wait_for("joined", node="c")
    harness.cont("follower")
    harness.wait_for("version_adopted", after=joined)
    reports = job.finish("a", "b", "c")
    for each in reports:
        assert torch.equal(each["weights"], reports[0]["weights"])
    assert any(len(each) == 3 for each in hashes(job).values())
    assert counted(job)[0] == 3000
    fetched = [r["version"] for r in harness.records if r.name == "version_fetched"]
    assert len(fetched) == len(set(fetched))
    audited(job)


@pytest.mark.slow
def test_a_cluster_of_one_process_beside_it(job: ElasticJob) -> None:
    """A cluster of one process trains beside one of two ranks. It came first, so it alone writes checkpoints; in the
    end all have the last version.
    """
    from diloco_members import cluster

    job.serve()
    trained = {"max_epochs": 2, "enable_checkpointing": True}
    told = {"inner_steps": 8, "data": "local", "options": {"heartbeat_s": 0.3, "log_dir": str(job.harness.logs)}}
    spec = {"name": "solo", "server": job.server, "out": str(job.out), "told": told, "step_s": 0.02}
    job.harness.start_function("solo", cluster, {**spec, "trainer": {**trained, "max_epochs": 6}})
    job.harness.wait_for("cluster_welcomed")
    for name in ("a", "b"):
        job.rank(name, min_nodes=2, step_s=0.01, trainer=trained)
    a, b, solo = job.finish("a", "b", "solo")
    assert torch.equal(a["weights"], b["weights"])
    assert torch.equal(a["weights"], solo["weights"])
    assert counted(job)[0] > 2 * 240, "both train"
    assert {path.relative_to(job.out).parts[0] for path in job.out.rglob("*.ckpt")} == {"solo"}
    audited(job)


def test_ranks_leave_and_the_last_one_takes_the_cluster_along(job: ElasticJob) -> None:
    """The first rank leaves, and the other continues as the same incarnation; when that one leaves, too, it pushes
    the remaining steps first.
    """
    job.serve()
    harness = job.harness
    for name in ("a", "b"):
        job.rank(name, step_s=0.02, samples=100_000, trainer={"max_epochs": 1}, rules={"heartbeat_s": 2.0})
        joined = harness.wait_for("joined", node=name)
    harness.wait_for("version_adopted", after=joined)
    harness.terminate("a")
    assert harness.wait_exit("a") == 0
    taken = harness.wait_for("cluster_stream", lambda r: bool(r["up"]), after=joined)
    harness.wait_for("version_adopted", after=taken)
    harness.terminate("b")
    assert harness.wait_exit("b") == 0
    committed = max(r["step"] for r in harness.records if r.name == "committed")
    harness.wait_until(lambda: counted(job)[1] == committed, "the rounds with all steps")
    assert len(job.entries("Joined")) == 1
    assert "it was asked to leave" in job.entries("Removed")[0]["reason"]
    audited(job)


def test_who_begins_with_what_a_cluster_that_left_had_kept_comes_in_anew(job: ElasticJob, tmp_path: Path) -> None:
    """Former bug: a rank that resumed from the state kept by a cluster that had left ended at once, because the
    state said that the cluster's part is over. It now joins as a new incarnation.
    """
    job.serve()
    harness = job.harness
    keeps = {"on_last_exit": str(tmp_path / "kept")}
    spec: dict[str, Any] = {"options": keeps, "trainer": {"max_epochs": 1}, "step_s": 0.02}
    for name in ("a", "b"):
        job.rank(name, samples=100_000, **spec)
        joined = harness.wait_for("joined", node=name)
        harness.wait_for("version_adopted", lambda r: r["progress_steps"] > 0, after=joined)
        harness.terminate(name)
        assert harness.wait_exit(name) == 0
    began = min(r["step"] for r in harness.records if r.name == "committed" and r.node == "b")
    assert began > 1, "b goes on from there"
    assert len(job.entries("Joined")) == 2
    audited(job)


def asked_again(job: ElasticJob, name: str, words: str) -> None:
    """Sends a leaving rank a second signal; checks that it prints `words`, and keeps running."""
    child = job.harness.children[name]
    job.harness.wait_until(lambda: "leaving the job" in child.tail(), "word of the first signal")
    job.harness.terminate(name)
    job.harness.wait_until(lambda: "SIGTERM: still waiting" in child.tail(), "word of the second signal")
    assert re.search(words, child.tail())
    assert child.running


def test_a_second_signal_says_what_it_may_cost(job: ElasticJob) -> None:
    """Former bug: a second signal aborted the process, and the last rank of a cluster lost all that was not durable.
    It now prints what would be lost, and a third signal aborts.
    """
    job.serve()
    harness = job.harness
    for name in ("a", "b"):
        job.rank(name, step_s=0.02, samples=100_000, trainer={"max_epochs": 1}, rules={"heartbeat_s": 2.0})
        joined = harness.wait_for("joined", node=name)
    harness.wait_for("version_adopted", lambda r: r["progress_steps"] > 0, after=joined)
    job.kill_scheduler()
    harness.terminate("a")
    asked_again(job, "a", "To end now costs nothing as long as another rank stays")
    harness.terminate("a")
    harness.declare("a")
    assert harness.wait_exit("a") == -signal.SIGTERM
    job.start_scheduler()
    alone = harness.wait_for("view", lambda r: len(r["members"]) == 1, after=joined)
    harness.wait_for("version_adopted", after=harness.wait_for("push_frozen", after=alone))
    harness.stop("follower")
    harness.terminate("b")
    asked_again(job, "b", r"To end now may cost [1-9]\d* inner steps of this cluster")
    harness.cont("follower")
    assert harness.wait_exit("b") == 0
    committed = max(r["step"] for r in harness.records if r.name == "committed")
    harness.wait_until(lambda: counted(job)[1] == committed, "the rounds with all steps")
    assert "it was asked to leave" in job.entries("Removed")[0]["reason"]
    audited(job)


def wait_for_meetings(job: ElasticJob, trained: int = 0) -> None:
    """Waits until the ranks have trained `trained` samples and only meet, since they may not train on."""

    def waits() -> bool:
        slots = [r for r in job.harness.records if r.name == "committed"]
        samples = max((count(each["spans"]) for r in slots for each in r["ledger"]), default=0)
        return samples >= trained and len(slots) > 50 and {r["kind"] for r in slots[-50:]} == {"gather"}

    job.harness.wait_until(waits, "meetings in place of steps")


def leave_a_meeting(job: ElasticJob, trained: int = 0) -> None:
    """Makes rank a leave while the ranks only meet; checks that a meeting's header released it."""
    harness = job.harness
    wait_for_meetings(job, trained)
    harness.terminate("a")
    assert harness.wait_exit("a") == 0
    carried = [r["kind"] for r in harness.records if r.name == "committed" and r["next_view"] != r["view"]]
    assert carried[-1] == "gather"


def leave_while_it_waits(job: ElasticJob, stopped: str) -> None:
    """Makes both ranks leave while their cluster waits for the stopped process: the first one ends at once, the last
    one only when all is durable.
    """
    harness = job.harness
    harness.wait_for("version_adopted", lambda r: r["progress_steps"] > 0)
    harness.stop(stopped)
    leave_a_meeting(job)
    harness.terminate("b")
    harness.wait_for("left", node="b")
    assert harness.children["b"].running
    harness.cont(stopped)
    assert harness.wait_exit("b") == 0
    committed = max(r["step"] for r in harness.records if r.name == "committed")
    harness.wait_until(lambda: counted(job)[1] == committed, "the rounds with all steps")
    assert len(job.entries("Joined")) == 1
    assert "it was asked to leave" in job.entries("Removed")[0]["reason"]
    hashes(job)
    audited(job)


def test_a_rank_leaves_while_its_cluster_waits_for_an_answer(job: ElasticJob) -> None:
    """A rank leaves between two batches, while its cluster waits for the answer to a push."""
    job.serve()
    spec: dict[str, Any] = {"step_s": 0.02, "samples": 100_000, "trainer": {"max_epochs": 1}}
    for name in ("a", "b"):
        job.rank(name, told={"overlap": False}, rules={"heartbeat_s": 2.0}, **spec)
        job.harness.wait_for("joined", node=name)
    leave_while_it_waits(job, "follower")


def test_a_rank_leaves_while_all_that_its_cluster_was_dealt_is_used(job: ElasticJob) -> None:
    """A rank leaves within a batch whose step is made, while its cluster waits for further leased samples."""
    job.serve()
    rules = {"heartbeat_s": 2.0, "lease_ahead_s": 0.3, "ahead_steps": 1000}
    spec: dict[str, Any] = {"step_s": 0.02, "samples": 100_000, "trainer": {"max_epochs": 1}, "rules": rules}
    for name in ("a", "b"):
        job.rank(name, told={"data": "shared"}, **spec)
        job.harness.wait_for("joined", node=name)
    leave_while_it_waits(job, "leader")


THROUGH = 400
"""Number of samples after which ranks a and b are through."""


def through(job: ElasticJob, **rules: Any) -> None:
    """Starts ranks a and b, which soon finish their training, and another cluster of one process, which waits until
    `go_on`.
    """
    from diloco_members import cluster

    job.serve()
    told = {"inner_steps": 8, "data": "local", "options": {"heartbeat_s": 0.3, "log_dir": str(job.harness.logs)}}
    spec = {"name": "solo", "server": job.server, "out": str(job.out), "told": told, "step_s": 0.02}
    os.mkfifo(job.out / "gate")
    stops = {"batches": {20: str(job.out / "gate")}, "trainer": {"max_epochs": 1}}
    job.harness.start_function("solo", cluster, {**spec, **stops})
    job.harness.wait_for("cluster_welcomed")
    for name in ("a", "b"):
        job.rank(name, step_s=0.1, samples=THROUGH, trainer={"max_epochs": 1}, rules=rules)
        job.harness.wait_for("joined", node=name)


def go_on(job: ElasticJob) -> dict[str, Any]:
    """Lets the cluster of one process train to its end; returns its report."""
    (job.out / "gate").write_text("")
    return job.finish("solo")[0]


def left_in_good_order(job: ElasticJob) -> None:
    """Checks that the cluster of ranks a and b has left before the other cluster continued, and that all its samples
    count.
    """
    removed = job.harness.wait_for("entry", lambda r: r["kind"] == "Removed")
    assert "it was asked to leave" in removed["body"]["reason"]
    assert job.harness.children["solo"].running
    go_on(job)
    assert counted(job)[0] == THROUGH + 240
    hashes(job)
    audited(job)


@pytest.mark.slow
def test_a_rank_leaves_while_its_cluster_is_through_and_another_is_not(job: ElasticJob) -> None:
    through(job)
    leave_a_meeting(job, THROUGH)
    solo = go_on(job)
    (b,) = job.finish("b")
    assert torch.equal(b["weights"], solo["weights"])
    assert counted(job)[0] == THROUGH + 240
    audited(job)


@pytest.mark.slow
def test_the_last_rank_leaves_while_its_cluster_is_through_and_another_is_not(job: ElasticJob) -> None:
    through(job)
    leave_a_meeting(job, THROUGH)
    job.harness.terminate("b")
    assert job.harness.wait_exit("b") == 0
    left_in_good_order(job)


@pytest.mark.slow
def test_all_ranks_are_asked_to_leave_at_once_while_their_cluster_is_through(job: ElasticJob) -> None:
    through(job)
    wait_for_meetings(job, THROUGH)
    for name in ("a", "b"):
        job.harness.terminate(name, number=signal.SIGINT)
    assert [job.harness.wait_exit(name) for name in ("a", "b")] == [0, 0]
    left_in_good_order(job)


@pytest.mark.slow
def test_all_ranks_leave_while_their_cluster_is_through_and_their_scheduler_is_away(job: ElasticJob) -> None:
    """The ranks have finished training and have no scheduler, so none of them can be released alone: they leave
    together.
    """
    through(job)
    wait_for_meetings(job, THROUGH)
    job.kill_scheduler()
    for name in ("a", "b"):
        job.harness.terminate(name)
    assert [job.harness.wait_exit(name) for name in ("a", "b")] == [0, 0]
    left_in_good_order(job)


@pytest.mark.slow
def test_a_cluster_of_ranks_that_is_through_long_before_the_others_leaves(job: ElasticJob) -> None:
    through(job, patience_s=2.0)
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    assert a["over"] == b["over"] == "it was asked to leave"
    assert a["status"] == b["status"] == str(TrainerStatus.FINISHED)
    left_in_good_order(job)


@pytest.mark.slow
def test_a_rank_comes_when_the_others_are_through(job: ElasticJob) -> None:
    """A rank joins when the others have finished training: it trains nothing, and as the last one to leave takes the
    cluster out of the job.
    """
    through(job)
    wait_for_meetings(job, THROUGH)
    job.rank("c", step_s=0.1, samples=THROUGH, trainer={"max_epochs": 1})
    late = job.harness.wait_for("joined", node="c")
    assert late["step"] == max(r["step"] for r in job.harness.records if r.name == "committed")
    for name in ("a", "b", "c"):
        job.harness.terminate(name)
        assert job.harness.wait_exit(name) == 0
    reports = job.finish("a", "b", "c")
    assert len({each["step"] for each in reports}) == 1
    assert {each["epoch"] for each in reports} == {1}
    assert [line[0] for line in reports[2]["lines"]] == ["epoch"]
    left_in_good_order(job)


@pytest.mark.slow
def test_ranks_that_cannot_even_leave_give_up(job: ElasticJob) -> None:
    """The follower never answers the last push: the ranks wait for `patience_s`, ask to leave, wait as long again,
    and give up with an error.
    """
    job.serve()
    harness = job.harness
    rules = {"patience_s": 2.0, "ahead_steps": 1000}
    for name in ("a", "b"):
        job.rank(name, step_s=0.05, samples=1600, trainer={"max_epochs": 1}, rules=rules)
        harness.wait_for("joined", node=name)
    harness.wait_for("version_adopted", lambda r: r["progress_steps"] > 0)
    harness.stop("follower")
    harness.declare("a", "b")
    assert [harness.wait_exit(name) for name in ("a", "b")] == [1, 1]
    harness.cont("follower")
    for name in ("a", "b"):
        said = harness.children[name].log.read_text()
        assert "this cluster is through, so it leaves" in said
        assert "DeadlineError: cluster home waited 2 s for the answer to push" in said


@pytest.mark.slow
def test_the_first_rank_is_frozen_and_comes_back(job: ElasticJob) -> None:
    job.serve()
    harness = job.harness
    for name in ("a", "b"):
        job.rank(name, step_s=0.02, samples=3000, trainer={"max_epochs": 1}, rules={"heartbeat_s": 3.0})
        joined = harness.wait_for("joined", node=name)
    harness.wait_for("version_adopted", after=joined)
    harness.stop("a")
    taken = harness.wait_for("cluster_stream", lambda r: bool(r["up"]), after=joined)
    adopted = harness.wait_for("version_adopted", after=taken)
    harness.cont("a")
    again = harness.wait_for("joined", node="a", after=adopted)
    harness.wait_for("version_adopted", after=again)
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    assert counted(job)[0] == 3000
    assert len(job.entries("Joined")) == 1
    assert not job.entries("Removed")
    hashes(job)
    audited(job)


def test_what_ranks_of_a_cluster_cannot_be_told_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs name="):
        DiLoCoStrategy(inner="chaos", data="local")
    apart = DiLoCoStrategy(inner=ChaosStrategy(data="local"), name="home")
    with pytest.raises(UnsupportedError, match="data='local' of the inner strategy is not supported where clusters"):
        models.trainer(tmp_path, strategy=apart).fit(models.Regression(), models.loader())
    inner = ChaosStrategy(options={"join_by": "replay"})
    trainer = models.trainer(tmp_path, strategy=DiLoCoStrategy(inner=inner, name="home", data="local"))
    with pytest.raises(UnsupportedError, match="join_by='replay' is not supported by ranks"):
        trainer.fit(models.Regression(), models.loader())


def test_clusters_share_the_data_and_each_sample_counts_once_an_epoch(job: ElasticJob) -> None:
    """Clusters share the data, one of two ranks and one of a single process: each sample counts once an epoch."""
    from diloco_members import cluster

    job.serve()
    rules = {"heartbeat_s": 0.3, "lease_ahead_s": 0.3, "log_dir": str(job.harness.logs)}
    for name in ("a", "b"):
        job.rank(name, min_nodes=2, step_s=0.01, trainer={"max_epochs": 3}, told={"data": "shared"}, rules=rules)
    spec = {"name": "solo", "server": job.server, "out": str(job.out), "told": {"inner_steps": 8, "options": rules}}
    job.harness.start_function("solo", cluster, {**spec, "step_s": 0.01, "trainer": {"max_epochs": 3}})
    a, b, solo = job.finish("a", "b", "solo")
    assert torch.equal(a["weights"], b["weights"])
    assert spent(job) == dict.fromkeys(range(3), 240)
    # A member that ends the job waits for nobody who is still in its last epoch; but all end with its last version.
    assert torch.equal(a["weights"], solo["weights"])
    marks = [[line for line in each["lines"] if line[0] != "step"] for each in (a, b, solo)]
    assert marks[0] == marks[1]
    whole = [(what, epoch) for epoch in range(3) for what in ("epoch", "validated", "end")]
    for each in marks:
        assert whole[:7] == [line[:2] for line in each][:7]
    assert marks[0][1:6] == marks[2][1:6], "all but the first: who comes a moment later begins with the job's steps"
    audited(job)


@pytest.mark.slow
def test_ranks_die_and_join_while_they_share_out_leases(job: ElasticJob) -> None:
    job.serve()
    harness = job.harness
    rules = {"heartbeat_s": 2.0, "lease_ahead_s": 0.5}
    spec: dict[str, Any] = {"step_s": 0.02, "samples": 2000, "trainer": {"max_epochs": 2}, "rules": rules}
    for name in ("a", "b"):
        job.rank(name, told={"data": "shared"}, **spec)
        joined = harness.wait_for("joined", node=name)
    harness.wait_for("version_adopted", after=joined)
    harness.declare("a")
    harness.kill("a")
    job.rank("c", told={"data": "shared"}, **spec)
    harness.wait_for("joined", node="c")
    b, c = job.finish("b", "c")
    assert torch.equal(b["weights"], c["weights"])
    assert spent(job) == {0: 2000, 1: 2000}
    assert len(job.entries("Joined")) == 1
    hashes(job)
    audited(job)


@pytest.mark.slow
def test_what_a_rejection_gives_back_is_dealt_again(job: ElasticJob) -> None:
    """A push with NaN is rejected: its samples are leased again, and the ranks adopt the version without their own
    steps.
    """
    job.serve()
    rules = {"lease_ahead_s": 0.3}
    for name in ("a", "b"):
        spec = {"poison": 20, "step_s": 0.01, "samples": 400, "trainer": {"max_epochs": 2}, "rules": rules}
        job.rank(name, min_nodes=2, told={"data": "shared"}, **spec)
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    assert torch.isfinite(a["weights"]).all()
    rejected = [each for body in job.entries("Round") for each in body["rejected"]]
    assert len(rejected) == 1, "the optimizer's state was not a number either, and begins anew with the parameters"
    assert spent(job) == {0: 400, 1: 400}
    assert any(r["outright"] and r["progress_steps"] for r in job.harness.records if r.name == "version_adopted")
    hashes(job)
    audited(job)


def test_without_overlap_ranks_stand_still_for_each_version(job: ElasticJob) -> None:
    job.serve()
    for name in ("a", "b"):
        job.rank(name, min_nodes=2, trainer={"max_epochs": 1}, told={"overlap": False, "codec": "fp32"})
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    assert counted(job) == (240, 30)
    adopted = [r for r in job.harness.records if r.name == "version_adopted"]
    assert [r["steps"] for r in adopted] == [0] * len(adopted)
    assert all(r["waited_s"] > 0 for r in adopted)
    assert any(r["loss"] for r in job.harness.records if r.name == "inner_steps")
    hashes(job)
    audited(job)


def test_all_ranks_send_a_part_of_a_push_by_keys_of_the_leader(job: ElasticJob, tmp_path: Path) -> None:
    """All ranks of a cluster send parts of a push with keys of the outer job, each rank with a folder of its own."""
    keys = tmp_path / "keys"
    holders = [KeyHolder("leader"), KeyHolder("follower", FOLLOWER), KeyHolder("a", CLUSTER), KeyHolder("b", CLUSTER)]
    keyfiles.init(keys, holders)
    job.serve(keys / NODES)
    for name in ("a", "b"):
        rules = {"keys_dir": str(keys / NODES / name)}
        job.rank(name, min_nodes=2, step_s=0.02, trainer={"max_epochs": 1}, rules=rules)
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    assert counted(job) == (240, 30)
    sources = {who for r in job.harness.records if r.name == "push_staged" for who in r["sources"]}
    assert len(sources) == 2
    assert not [r for r in job.harness.records if r.name == "refused"]


def test_a_checkpoint_founds_a_cluster_of_ranks_that_goes_on_from_it(job: ElasticJob, tmp_path: Path) -> None:
    trained = models.trainer(tmp_path / "before", max_epochs=1)
    trained.fit(models.Regression(lr=0.01), models.loader(240))
    trained.save_checkpoint(tmp_path / "before.ckpt")
    job.serve()
    for name in ("a", "b"):
        job.rank(name, min_nodes=2, trainer={"max_epochs": 2}, ckpt_path=str(tmp_path / "before.ckpt"))
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    assert counted(job) == (240, 30)
    for each in (a, b):
        assert next(line for line in each["lines"] if line[0] == "step") == ("step", 1, 61)
        assert each["step"] == 90
    audited(job)


@pytest.mark.slow
def test_the_scheduler_of_the_ranks_dies_and_training_goes_on(job: ElasticJob) -> None:
    """The cluster's scheduler dies: pushes and versions continue. Then the first rank dies, and the restarted
    scheduler lets the other one continue.
    """
    job.serve()
    harness = job.harness
    for name in ("a", "b"):
        job.rank(name, step_s=0.02, samples=2400, trainer={"max_epochs": 1}, rules={"heartbeat_s": 2.0})
        joined = harness.wait_for("joined", node=name)
    adopted = harness.wait_for("version_adopted", after=joined)
    job.kill_scheduler()
    away = harness.wait_for("push_frozen", after=adopted)
    harness.wait_for("version_adopted", after=away)
    job.start_scheduler()
    harness.declare("a")
    harness.kill("a")
    (b,) = job.finish("b")
    samples, steps = counted(job)
    assert samples == 2400
    assert steps == b["step"]
    assert len(job.entries("Joined")) == 1
    audited(job)


@pytest.mark.slow
def test_a_dismissed_cluster_comes_in_again(job: ElasticJob) -> None:
    """All ranks of a cluster are frozen until the leader removes it: it joins again, and reports the loss of the
    steps that it had not pushed.
    """
    job.serve()
    harness = job.harness
    rules = {"last_holder_timeout_s": 0.5}
    for name in ("a", "b"):
        job.rank(name, min_nodes=2, step_s=0.02, samples=2400, trainer={"max_epochs": 1}, rules=rules)
    harness.wait_for("version_adopted", lambda r: r["progress_steps"] > 0)
    for name in ("a", "b"):
        harness.stop(name)
    harness.wait_for("entry", lambda r: r["kind"] == "Removed")
    for name in ("a", "b"):
        harness.cont(name)
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    assert [str(r["incarnation"]) for r in harness.records if r.name == "cluster_welcomed"] == ["home~1", "home~2"]
    assert [r["again"] for r in harness.records if r.name == "cluster_over"] == [True, False]
    committed = max(r["step"] for r in harness.records if r.name == "committed")
    assert 0 < counted(job)[1] <= committed
    hashes(job)
    audited(job)
