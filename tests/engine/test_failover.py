"""Tests several schedulers on one chain in a real etcd: the leading one dies, freezes or resigns, and training
goes on.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job, says, who_leads
from etcd_for_tests import servers

from chaos_lightning.events.events import Record
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.membership.leader_search import HEARS_SEVERAL_S
from chaos_lightning.service.etcd_servers import EtcdServers

SPEC: dict[str, Any] = {"epochs": 1000, "step_s": 0.04}
"""Slow steps: the test reads what is logged of each in the process whose threads relay members' heartbeats."""
SETTINGS: dict[str, Any] = {"state_hash_every": 10, "host_scheduler": False}


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServers]:
    with servers(tmp_path / "etcd", 3) as started:
        yield started


def stand_by(job: Job, etcd: EtcdServers, count: int, *, apart: bool = False) -> dict[str, str]:
    """Starts `count` candidates, which the members try in turn; returns their endpoints by name."""
    places = {f"s{n}": f"127.0.0.1:{port}" for n, port in enumerate(free_ports(count))}
    for name, place in places.items():
        env = {"CHAOS_HOST": name} if apart else None
        job.scheduler(name, "--settings", json.dumps({"min_nodes": 1}), "--store", etcd.address, at=place, env=env)
    job.endpoint = ",".join(places.values())
    job.harness.wait_for("elected")
    return places


def leading(job: Job, places: dict[str, str]) -> str:
    """Returns the name of the candidate that leads."""
    found = who_leads(job)["endpoint"]
    return next(name for name, place in places.items() if place == found)


def train(job: Job, *names: str) -> Record:
    for name in names:
        job.start(name, settings=SETTINGS, **SPEC)
        job.harness.wait_for("joined", node=name)
    return job.harness.wait_for("committed", lambda r: len(r["contributors"]) == len(names), node=names[0])


def equal(job: Job, names: str, after: Record) -> None:
    hashed = job.harness.wait_for("state_hash", node=names[0], after=after)
    for name in names:
        alike = job.harness.wait_for("state_hash", lambda r: r["head"] == hashed["head"], node=name)
        assert alike["hash"] == hashed["hash"], name


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow), "resign"])
def test_another_one_leads_at_once_and_nobody_is_put_out(job: Job, etcd: EtcdServers, how: str) -> None:
    places = stand_by(job, etcd, 3)
    before = train(job, *"ab")
    first = leading(job, places)
    if how == "kill":
        job.harness.kill(first)
    elif how == "stop":
        job.harness.stop(first)
    else:
        job.harness.terminate(first)
    second = job.harness.wait_for("scheduler_started", lambda r: r["term"] == 2, after=before)
    for name in "ab":
        job.harness.wait_for("scheduler", lambda r: r["state"] == "connected", node=name, after=second)
    if how == "stop":
        job.harness.cont(first)
        job.harness.wait_for("scheduler_ended", lambda r: "leads no more" in str(r["reason"]), after=second)
    job.start("c", settings=SETTINGS, **SPEC)
    joined = job.harness.wait_for("joined", node="c", after=second)
    equal(job, "abc", joined)
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin", "death", "prepare")]
    assert {r["term"] for r in job.harness.records if r.name == "scheduler_started"} == {1, 2}
    job.leave(*"abc")


def test_a_leader_that_freezes_when_it_has_just_welcomed_a_member_is_left(job: Job, etcd: EtcdServers) -> None:
    places = stand_by(job, etcd, 2)
    job.start("a", settings=SETTINGS, **SPEC)
    job.harness.wait_for("scheduler", lambda r: r["state"] == "connected", node="a")
    job.harness.stop(leading(job, places))
    second = job.harness.wait_for("scheduler_started", lambda r: r["term"] == 2)
    found = job.harness.wait_for("scheduler", lambda r: r["state"] == "connected", node="a", after=second)
    assert found.t - second.t < 10  # gRPC itself takes a minute to see that nobody answers
    job.harness.wait_for("committed", node="a", after=found)
    job.leave("a")


@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.slow), "stop"])
def test_a_member_dies_with_the_leader_and_the_others_go_on(job: Job, etcd: EtcdServers, how: str) -> None:
    places = stand_by(job, etcd, 2)
    before = train(job, *"abc")
    first = leading(job, places)
    (job.harness.kill if how == "kill" else job.harness.stop)(first)
    job.harness.kill("c")
    decided = job.harness.wait_for("decide", after=before)
    for name in "ab":
        job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node=name, after=decided)
    equal(job, "ab", decided)
    if how == "stop":
        job.harness.cont(first)
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin") and not r.member.startswith("c~")]
    job.leave(*"ab")


def test_etcds_leader_dies_with_the_leader(job: Job, etcd: EtcdServers) -> None:
    places = stand_by(job, etcd, 2)
    before = train(job, *"ab")
    etcd.kill(etcd.leader())
    job.harness.kill(leading(job, places))
    second = job.harness.wait_for("scheduler_started", lambda r: r["term"] == 2, after=before)
    job.start("c", settings=SETTINGS, **SPEC)
    equal(job, "abc", job.harness.wait_for("joined", node="c", after=second))
    job.leave(*"abc")


@pytest.mark.slow
def test_a_candidate_that_does_not_lead_names_the_one_that_does(job: Job, etcd: EtcdServers) -> None:
    places = stand_by(job, etcd, 2)
    train(job, "a")
    first = leading(job, places)
    other = next(name for name in places if name != first)
    says(job, places[other], role="standby", leader=places[first], candidates=str(sorted(places.values())))
    job.harness.terminate(first, number=signal.SIGTERM)
    says(job, places[other], role="leader", leader=places[other])
    job.leave("a")


def test_who_comes_when_the_job_has_just_finished_hears_of_it(job: Job, etcd: EtcdServers) -> None:
    stand_by(job, etcd, 2)
    job.start("a", settings=SETTINGS, epochs=1)
    job.harness.wait_for("finished", node="a")
    job.harness.wait_for("scheduler_started", lambda r: r["term"] == 2 and r["finished"])
    job.harness.declare("b")
    job.start("b", settings=SETTINGS, **SPEC)
    assert job.harness.wait_exit("b") != 0
    assert "finished" in job.harness.children["b"].tail(30)
    job.finish("a")


@pytest.mark.slow
def test_members_do_not_wait_for_a_frozen_leader_that_the_others_still_name(job: Job, etcd: EtcdServers) -> None:
    """A frozen leader's lease ends later than members give it up (candidates count as on other machines); they soon
    find the next leader.
    """
    places = stand_by(job, etcd, 3, apart=True)
    before = train(job, *"ab")
    first = leading(job, places)
    job.harness.stop(first)
    second = job.harness.wait_for("scheduler_started", lambda r: r["term"] == 2, after=before)
    for name in "ab":
        found = job.harness.wait_for("scheduler", lambda r: r["state"] == "connected", node=name, after=second)
        # Each of the others is asked again within a quarter of a second; one that has just begun to stand by listens.
        assert found.t - second.t < 1.2 + HEARS_SEVERAL_S
    job.leave(*"ab")
