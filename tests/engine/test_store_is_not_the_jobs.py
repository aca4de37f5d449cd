"""Tests a scheduler whose store is another job's or an old copy: no member is removed, and the chain never
forks (14a).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job
from etcd_for_tests import servers
from test_failover import SETTINGS, SPEC, equal, train
from test_rebuilt_chain import begin, candidates, goes_on, machine

from chaos_lightning.events.events import Record
from chaos_lightning.machine.listener import free_ports

RULINGS = ("prepare", "decide", "view", "fenced", "left", "rejoin")


def end(job: Job, name: str) -> None:
    """Kills the scheduler of this name."""
    job.harness.kill(name)


def copy(job: Job, name: str, to: str) -> None:
    """Copies the files of a chain that no scheduler is using."""
    for path in job.folder.glob(f"{name}.sqlite*"):
        shutil.copy(path, job.folder / path.name.replace(name, to, 1))


def nothing_was_decided(job: Job, since: Record) -> None:
    decided = [r for r in job.harness.records if r.node == "default" and r.t > since.t]
    assert not [r for r in decided if r.name in RULINGS], [r for r in decided if r.name in RULINGS]


def first_ruling(job: Job, after: Record) -> Record:
    """Returns the first action that the scheduler takes after an event: it refuses to rule, or it decides a view."""

    def found() -> Record | None:
        since = [r for r in job.harness.records if r.t > after.t]
        stops = ("chain_stale", "chain_foreign")
        rules = [r for r in since if r.name in stops or (r.name in RULINGS and r.node == "default")]
        return rules[0] if rules else None

    return job.harness.wait_until(found, "a ruling of the scheduler")


def first_day(job: Job) -> Record:
    """Runs a job that is killed as a whole, unfinished, after b has left politely."""
    begin(job, "day1")
    job.start("a-before", member="a", settings=SETTINGS, **SPEC)
    job.harness.wait_for("joined", node="a")
    job.start("b-before", member="b", settings=SETTINGS, **SPEC)
    both = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="a")
    job.harness.terminate("b-before")
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 1, node="a", after=both)
    for name in ("a-before", "day1"):
        job.harness.kill(name)
    return job.harness.records[-1]


def test_a_leftover_chain_of_the_day_before_harms_nobody(job: Job) -> None:
    day1 = first_day(job)
    begin(job, "day2")
    for name in "ab":
        job.start(name, settings=SETTINGS, **SPEC)
        job.harness.wait_for("joined", node=name, after=day1)
    before = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="b", after=day1)
    end(job, "day2")
    begin(job, "leftover", store="day1")
    told = first_ruling(job, before)
    assert told.name == "chain_foreign", told
    assert told["chain"] != told["here"]
    for chain in (told["chain"], told["here"]):
        assert chain[:8] in machine(job)["reason"]
    trains = goes_on(job, "a", told)
    goes_on(job, "b", told)
    nothing_was_decided(job, told)
    end(job, "leftover")
    begin(job, "right", store="day2")
    job.start("d", settings=SETTINGS, **SPEC)
    joined = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="d")
    equal(job, "abd", joined)
    assert joined["step"] > trains["step"]
    nothing = [r for r in job.harness.records if r.name in ("fenced", "rejoin") and r.t > before.t]
    assert not nothing
    job.leave(*"abd")


def without_a(job: Job) -> Record:
    """Makes a copy of the chain that only knows a; then b and c join, a freezes, and the two go on without it."""
    begin(job, "chain")
    train(job, "a")
    end(job, "chain")
    copy(job, "chain", "backup")
    begin(job, "again", store="chain")
    for name in "bc":
        job.start(name, settings=SETTINGS, **SPEC)
        job.harness.wait_for("joined", node=name)
    all_in = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="b")
    job.harness.stop("a")
    alone = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="b", after=all_in)
    end(job, "again")
    return alone


@pytest.mark.slow
def test_a_backup_that_knows_only_who_was_put_out_since_forks_nothing_and_can_be_rebuilt(job: Job) -> None:
    before = without_a(job)
    begin(job, "stale", store="backup")
    job.harness.cont("a")
    told = first_ruling(job, before)
    assert told.name == "chain_stale", told
    goes_on(job, "b", told)
    goes_on(job, "c", told)
    facts: dict[str, Any] = machine(job)
    assert facts["phase"] == "stale"
    assert "older copy" in facts["reason"]
    nothing_was_decided(job, before)
    last = job.harness.wait_for("committed", node="b", after=told)
    assert not [r for r in job.harness.records if r.node == "a" and r.name == "committed" and r.t > before.t]
    end(job, "stale")
    begin(job, "rebuilder", "--rebuild", store="backup")
    rebuilt = job.harness.wait_for("decide", lambda r: str(r["reason"]).startswith("rebuilt"), after=last)
    assert {m[0] for m in rebuilt["members"]} == {"b", "c"}
    back = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="b", after=rebuilt)
    equal(job, "bca", back)
    job.leave(*"bca")


@pytest.mark.slow
def test_a_backup_that_knows_one_of_three_members_has_nobody_train_alone(job: Job) -> None:
    """A scheduler starts on a backup that knows a and b; a has left since, and c and d have joined. It stops, and
    nobody trains alone.
    """
    begin(job, "chain")
    train(job, *"ab")
    end(job, "chain")
    copy(job, "chain", "backup")
    begin(job, "again", store="chain")
    for name in "cd":
        job.start(name, settings=SETTINGS, **SPEC)
        job.harness.wait_for("joined", node=name)
    all_in = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 4, node="b")
    job.harness.terminate("a")
    before = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="b", after=all_in)
    assert job.harness.wait_exit("a") == 0
    end(job, "again")
    begin(job, "stale", store="backup")
    told = first_ruling(job, before)
    assert told.name == "chain_stale", told
    for name in "bcd":
        assert len(goes_on(job, name, told)["contributors"]) == 3
    nothing_was_decided(job, before)
    end(job, "stale")
    begin(job, "rebuilder", "--rebuild", store="backup")
    rebuilt = job.harness.wait_for("decide", lambda r: str(r["reason"]).startswith("rebuilt"), after=told)
    assert {m[0] for m in rebuilt["members"]} == {"b", "c", "d"}
    equal(job, "bcd", goes_on(job, "b", rebuilt))
    job.leave(*"bcd")


HOSTS: dict[str, Any] = {"state_hash_every": 10}
"""Settings of members that may start a scheduler, on the default store of this machine, where nothing is."""


def test_members_leave_the_endpoint_to_the_scheduler_that_has_their_chain(job: Job) -> None:
    begin(job, "operators")
    for name in "ab":
        job.start(name, settings=HOSTS, **SPEC)
        job.harness.wait_for("joined", node=name)
    before = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="a")
    end(job, "operators")

    def refrains() -> bool:
        said = [r for r in job.harness.records if r.name == "scheduler" and "holds none. Start one" in r["state"]]
        return {r.node for r in said} == {"a", "b"}

    job.harness.wait_until(lambda: refrains() or job.served(), "what the members do about it")
    assert not job.served()
    begin(job, "again", store="operators")
    job.start("c", settings=HOSTS, **SPEC)
    joined = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="c", after=before)
    equal(job, "abc", joined)
    job.leave(*"abc")


@pytest.mark.slow
def test_a_scheduler_that_a_newcomer_began_gives_the_endpoint_up_to_the_one_that_has_the_chain(job: Job) -> None:
    """A newcomer that knows of no chain starts a scheduler at the endpoint of the operator's: it gives the endpoint up
    once members call.
    """
    begin(job, "operators")
    before = train(job, *"ab")
    end(job, "operators")
    job.start("c", settings=HOSTS, **SPEC)
    ended = job.harness.wait_for("scheduler_ended", lambda r: r.t > before.t, node="default")
    assert "gives the endpoint up" in str(ended["reason"])
    begin(job, "again", store="operators")
    joined = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="c", after=before)
    equal(job, "abc", joined)
    assert len(job.foundings()) == 1
    job.leave(*"abc")


@pytest.mark.slow  # etcd three times, and four generations of schedulers
def test_an_older_snapshot_of_etcd_decides_nothing_and_can_be_rebuilt(job: Job, tmp_path: Path) -> None:
    with servers(tmp_path / "etcd", 1) as etcd:
        job.endpoint = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
        candidates(job, etcd, "st")
        job.harness.wait_for("elected")
        first = train(job, "a")
        killed(job, "st")
    shutil.copytree(tmp_path / "etcd", tmp_path / "snapshot")
    with servers(tmp_path / "etcd", 1) as etcd:
        candidates(job, etcd, "uv")
        job.harness.wait_for("elected", after=first)
        before = train_more(job, *"bc")
        killed(job, "uv")
    with servers(tmp_path / "snapshot", 1) as etcd:
        candidates(job, etcd, "wx")
        told = first_ruling(job, before)
        assert told.name == "chain_stale", told
        for name in "abc":
            goes_on(job, name, told)
        nothing_was_decided(job, before)
        killed(job, "wx")
        candidates(job, etcd, "yz", "--rebuild")
        rebuilt = job.harness.wait_for("decide", lambda r: str(r["reason"]).startswith("rebuilt"), after=told)
        assert {m[0] for m in rebuilt["members"]} == {"a", "b", "c"}
        equal(job, "abc", goes_on(job, "a", rebuilt))
        job.leave(*"abc")


def killed(job: Job, names: str) -> None:
    for name in names:
        job.harness.kill(name)


def train_more(job: Job, *names: str) -> Record:
    for name in names:
        job.start(name, settings=SETTINGS, **SPEC)
        job.harness.wait_for("joined", node=name)
    return job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 1 + len(names), node="a")
