"""Tests the loss of the scheduler and the file of its chain: the job waits, and `--rebuild` restores the chain on the
operator's order (14a).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job
from etcd_for_tests import servers
from test_failover import SETTINGS, SPEC, equal, leading, train

from chaos_lightning.control.requests import fetch_status
from chaos_lightning.events.events import Record
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.service.etcd_address import read_address
from chaos_lightning.service.etcd_client import delete
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.service.etcd_store import job_root

RULES = {"min_nodes": 1, "reconnect_grace_s": 2.0}


def lose_the_chain(job: Job) -> None:
    """Kills the scheduler, and deletes the file of its chain."""
    job.harness.kill("scheduler")
    for path in job.folder.glob("chain.sqlite*"):
        path.unlink()


def begin(job: Job, name: str, *options: str, store: str = "") -> None:
    """Starts a scheduler at the same endpoint, on the store of this name, or else on an empty store with its
    own name.
    """
    path = job.folder / f"{store or name}.sqlite"
    job.scheduler(name, "--settings", json.dumps(RULES), "--store", str(path), *options)
    job.harness.wait_until(job.served, "the scheduler's answer")


def machine(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = fetch_status(job.endpoint)["machine"]
    return found


def goes_on(job: Job, name: str, after: Record) -> Record:
    return job.harness.wait_for("committed", node=name, after=after)


def test_without_the_word_nothing_is_founded_and_with_it_all_go_on_and_a_newcomer_joins(job: Job) -> None:
    job.serve(**RULES)
    before = train(job, *"abc")
    lose_the_chain(job)
    begin(job, "empty")
    lost = job.harness.wait_for("chain_lost")
    assert "--rebuild" in lost["text"]
    assert "--rebuild" in machine(job)["reason"]
    assert not machine(job)["members"]
    trains = goes_on(job, "b", lost)
    assert trains["step"] > before["step"]

    job.harness.kill("empty")
    begin(job, "rebuilder", "--rebuild")
    rebuilt = job.harness.wait_for(
        "decide", lambda r: str(r["reason"]).startswith("rebuilt"), node="default", after=trains
    )
    assert len(rebuilt["members"]) == 3
    goes_on(job, "a", rebuilt)
    joined = train_too(job, "d")
    equal(job, "abcd", joined)
    assert not [r for r in job.harness.records if r.name == "fenced"]
    assert len(job.foundings()) == 1
    job.leave(*"abcd")


def train_too(job: Job, name: str) -> Record:
    job.start(name, settings={"state_hash_every": 10, "host_scheduler": False}, epochs=1000, step_s=0.01)
    job.harness.wait_for("joined", node=name)
    return job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 4, node=name)


def test_a_minority_is_refused_by_name_and_the_rest_lets_it_go_on(job: Job) -> None:
    job.serve(**RULES)
    train(job, *"abc")
    lose_the_chain(job)
    for name in "bc":
        job.harness.stop(name)
    begin(job, "rebuilder", "--rebuild")
    job.harness.wait_until(lambda: "1 did" in machine(job)["reason"], "the word that too few report")
    reason = machine(job)["reason"]
    assert "2 of the 3 members" in reason
    assert "b~" in reason.partition("Missing")[2]
    assert "c~" in reason.partition("Missing")[2]
    assert machine(job)["phase"] == "rebuilding"
    job.harness.cont("b")
    rebuilt = job.harness.wait_for("decide", lambda r: str(r["reason"]).startswith("rebuilt"), node="default")
    assert {m[0] for m in rebuilt["members"]} == {"a", "b"}
    goes_on(job, "a", rebuilt)
    job.harness.cont("c")
    job.harness.wait_for("fenced", node="c")
    back = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="a", after=rebuilt)
    equal(job, "abc", back)
    job.leave(*"abc")


@pytest.mark.slow  # three schedulers, one after the other
def test_a_newcomer_that_waits_for_a_place_when_the_chain_is_lost_is_put_off_and_comes_in_later(job: Job) -> None:
    """The chain is lost while newcomer d waits for room: a scheduler without the chain refuses d, which joins once the
    chain is rebuilt.
    """
    job.serve(**RULES, max_nodes=2)
    train(job, *"ab")
    job.start("d", settings={"state_hash_every": 10, "host_scheduler": False}, epochs=1000, step_s=0.01)
    waits = job.harness.wait_for("notice", lambda r: "on standby" in r["text"], node="d")
    lose_the_chain(job)
    begin(job, "empty")
    put_off = job.harness.wait_for("refused", lambda r: "no job is founded" in r["reason"], node="d", after=waits)
    job.harness.kill("empty")
    begin(job, "rebuilder", "--rebuild")
    rebuilt = job.harness.wait_for("decide", lambda r: str(r["reason"]).startswith("rebuilt"), after=put_off)
    assert {m[0] for m in rebuilt["members"]} == {"a", "b"}
    anew = job.harness.wait_for("rejoin", node="d", after=put_off)
    assert anew["old_id"] == "d~3"
    joined = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="d", after=anew)
    equal(job, "abd", joined)
    job.leave(*"abd")


def test_a_newcomer_with_another_model_that_is_first_at_the_empty_store_ends_nobody_but_itself(job: Job) -> None:
    job.serve(**RULES)
    train(job, *"ab")
    lose_the_chain(job)
    for name in "ab":
        job.harness.stop(name)
    begin(job, "rebuilder", "--rebuild")
    job.harness.declare("d")
    job.start("d", settings=SETTINGS, width=64, **SPEC)
    first = job.harness.wait_for("scheduler", lambda r: r["state"] == "connected", node="d")
    for name in "ab":
        job.harness.cont(name)
    rebuilt = job.harness.wait_for("decide", lambda r: str(r["reason"]).startswith("rebuilt"), after=first)
    assert {m[0] for m in rebuilt["members"]} == {"a", "b"}
    assert job.harness.wait_exit("d") != 0
    assert "start all members with the same script" in job.harness.children["d"].tail(30)
    goes_on(job, "a", rebuilt)
    equal(job, "ab", rebuilt)
    job.leave(*"ab")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServers]:
    with servers(tmp_path / "etcd", 1) as started:
        yield started


def candidates(job: Job, etcd: EtcdServers, names: str, *options: str) -> dict[str, str]:
    """Starts candidates at the endpoints of earlier ones; returns their endpoints by name."""
    places = dict(zip(names, job.endpoint.split(","), strict=True))
    for name, place in places.items():
        job.scheduler(name, "--settings", json.dumps(RULES), "--store", etcd.address, *options, at=place)
    return places


@pytest.mark.slow  # two generations of schedulers
def test_a_chain_whose_keys_are_gone_from_etcd_is_rebuilt_there_and_the_next_leader_goes_on(
    job: Job, etcd: EtcdServers
) -> None:
    job.endpoint = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    candidates(job, etcd, "st")
    job.harness.wait_for("elected")
    before = train(job, *"abc")
    for name in "st":
        job.harness.kill(name)
    client = etcd.client()
    client.transact([], [delete(job_root(read_address(etcd.address).prefix, "default"))])
    client.close()

    places = candidates(job, etcd, "uv", "--rebuild")
    rebuilt = job.harness.wait_for("decide", lambda r: str(r["reason"]).startswith("rebuilt"), after=before)
    assert len(rebuilt["members"]) == 3
    goes_on(job, "a", rebuilt)
    job.harness.kill(leading(job, places))
    second = job.harness.wait_for(
        "scheduler_started", lambda r: r["term"] > int(rebuilt["id"].partition(".")[0]), after=rebuilt
    )
    joined = train_too(job, "d")
    assert joined.t > second.t
    equal(job, "abcd", joined)
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin")]
    job.leave(*"abcd")
