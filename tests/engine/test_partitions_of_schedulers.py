"""Tests candidates, members and etcd that cannot reach each other: exactly one side goes on, the others wait, and the
chain never forks.

Real processes on a real etcd of three servers; ways are cut by relays (schedulers_apart.py). What was chosen, and why,
must stand in `status` and in the event logs.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from engine_job import Job, who_leads
from schedulers_apart import Apart
from test_failover import SETTINGS, SPEC, equal, etcd, train
from test_graph_in_two import one_chain

from chaos_lightning.events.events import Record
from chaos_lightning.observe.status import status
from chaos_lightning.service.etcd_servers import EtcdServers

__all__ = ["etcd"]

Way = Callable[..., None]
"""Function that cuts a candidate off from members."""
LOUDLY = pytest.param(Apart.cut_from_members, id="cut")
SILENTLY = pytest.param(Apart.stall_from_members, marks=pytest.mark.slow, id="stall")


@pytest.fixture
def apart(job: Job, etcd: EtcdServers) -> Iterator[Apart]:
    made = Apart(job, etcd, 2, hang_timeout_s=120.0, last_holder_timeout_s=240.0)
    yield made
    made.close()


@pytest.fixture
def routed_apart(routed_job: Job, etcd: EtcdServers) -> Iterator[Apart]:
    made = Apart(routed_job, etcd, 2, min_nodes=2)
    yield made
    made.close()


def trains_on(job: Job, names: str, since: Record, steps: int = 10) -> None:
    for name in names:
        first = job.harness.wait_for("committed", node=name, after=since)
        job.harness.wait_step(first["step"] + steps, node=name)


def here(job: Job) -> Record:
    """Returns the last event logged so far."""
    return job.harness.records[-1]


def connected(job: Job, names: str, after: Record) -> None:
    for name in names:
        job.harness.wait_for("scheduler", lambda r: r["state"] == "connected", node=name, after=after)


def nobody_is_put_out(job: Job) -> None:
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin", "death", "prepare")]


def a_newcomer_joins(job: Job, name: str, names: str, after: Record) -> None:
    job.start(name, settings=SETTINGS, **SPEC)
    equal(job, names + name, job.harness.wait_for("joined", node=name, after=after))


def next_term(job: Job, term: int, after: Record) -> Record:
    return job.harness.wait_for("scheduler_started", lambda r: r["term"] == term, after=after)


# ------------------------------------------------------------------------------------------------ the leader is cut off


@pytest.mark.slow
@pytest.mark.parametrize("how", [LOUDLY, SILENTLY])
def test_a_leader_that_no_member_reaches_hands_over_to_one_that_they_reach(apart: Apart, how: Way) -> None:
    job = apart.job
    train(job, *"ab")
    first = apart.leading()
    (second,) = apart.others(first)
    before = here(job)
    how(apart, first, *"ab")
    gave_up = job.harness.wait_for("deposed", lambda r: "reach" in str(r["reason"]), after=before)
    who, found, rest = str(gave_up["reason"]).partition(" reach ")
    assert found, gave_up
    assert set(who.rpartition(": ")[2].split(", ")) <= {"a", "b"}, "one may still be on its way to the other one"
    assert "and not this scheduler, which nobody reaches" in rest
    led = next_term(job, 2, before)
    assert apart.named(led["endpoint"]) == second
    connected(job, "ab", led)
    place = apart.paths[second].endpoint
    waits_for = f"the end of the lease of {place}, which leads"
    facts = apart.says(first, role="standby", leader=place, waits_for=waits_for)
    assert "had ended, or was given back" in facts["led_because"]
    a_newcomer_joins(job, "c", "ab", led)
    nobody_is_put_out(job)
    job.leave(*"abc")


@pytest.mark.slow
def test_a_leader_that_etcd_does_not_reach_decides_nothing_and_another_one_goes_on(apart: Apart) -> None:
    job = apart.job
    train(job, *"ab")
    first = apart.leading()
    (second,) = apart.others(first)
    before = here(job)
    apart.cut_from_etcd(first)
    facts = apart.says(first, role="leader", waits_for="etcd, to prolong its lease")
    assert "it decides nothing meanwhile" in facts["waits_for"]
    led = next_term(job, 2, before)
    assert apart.named(led["endpoint"]) == second
    ended = job.harness.wait_for("deposed", lambda r: "could not prolong its lease" in str(r["reason"]), after=before)
    connected(job, "ab", ended)
    facts = apart.says(second, role="leader", waits_for="", leader=apart.paths[second].endpoint)
    assert abs(facts["led_since"] - led.t) < 1.0
    a_newcomer_joins(job, "c", "ab", ended)
    apart.says(first, waits_for="etcd; without it nobody can be elected")
    apart.mend_to_etcd(first)
    apart.says(first, waits_for=f"the end of the lease of {apart.paths[second].endpoint}")
    nobody_is_put_out(job)
    job.leave(*"abc")


@pytest.mark.slow
def test_a_leader_that_etcd_does_not_reach_does_not_end_a_members_death_but_the_next_one_does(apart: Apart) -> None:
    job = apart.job
    train(job, *"abc")
    first = apart.leading()
    before = here(job)
    apart.cut_from_etcd(first)
    job.harness.kill("c")
    led = next_term(job, 2, before)
    decided = job.harness.wait_for("decide", after=led)
    assert decided["id"].startswith("2."), decided
    for name in "ab":
        job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node=name, after=decided)
    equal(job, "ab", decided)
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin")]
    job.leave(*"ab")


@pytest.mark.slow
@pytest.mark.parametrize("how", [LOUDLY, SILENTLY])
def test_one_member_that_does_not_reach_the_leader_trains_on_and_is_not_put_out(apart: Apart, how: Way) -> None:
    job = apart.job
    train(job, *"abc")
    first = apart.leading()
    before = here(job)
    how(apart, first, "c")
    lost = job.harness.wait_for("scheduler", lambda r: "lost" in str(r["state"]), node="c", after=before)
    trains_on(job, "abc", lost, steps=120)
    assert apart.leading() == first, "one of three is no reason to hand over"

    def hears() -> dict[str, bool]:
        members = apart.facts(first)["machine"]["members"]
        return {p["id"].partition("~")[0]: p["connected"] and p["silent_s"] < 2.0 for p in members}

    job.harness.wait_until(lambda: hears() == {"a": True, "b": True, "c": False}, "a leader that misses c only")
    nobody_is_put_out(job)
    a_newcomer_joins(job, "d", "abc", lost)
    nobody_is_put_out(job)
    apart.mend_to_members(first, "c")
    connected(job, "c", here(job))
    job.leave(*"abcd")


@pytest.mark.slow
@pytest.mark.parametrize("how", [LOUDLY, SILENTLY])
def test_most_members_reach_another_candidate_and_that_one_leads(apart: Apart, how: Way) -> None:
    job = apart.job
    train(job, *"abc")
    first = apart.leading()
    before = here(job)
    how(apart, first, *"bc")
    gave_up = job.harness.wait_for("deposed", lambda r: "which a reaches" in str(r["reason"]), after=before)
    led = next_term(job, 2, gave_up)
    connected(job, "abc", led)
    a_newcomer_joins(job, "d", "abc", led)
    nobody_is_put_out(job)
    job.leave(*"abcd")


# ------------------------------------------------------------------------------------------------ members are cut


@pytest.mark.slow
def test_of_two_halves_the_one_that_reaches_the_leader_goes_on(routed_apart: Apart) -> None:
    """A job is cut into halves with one candidate each: the half whose candidate leads goes on, and the other one
    waits.
    """
    apart, job = routed_apart, routed_apart.job
    quorum = {"settings": {**SETTINGS, "min_nodes": 2}, **SPEC}
    for name in "abcd":
        job.start(name, **quorum)
        job.harness.wait_for("welcomed", node=name)
    before = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 4, node="a")
    first = apart.leading()
    (second,) = apart.others(first)
    job.harness.declare("c", "d")  # the scheduler may find them gone before the last cut is made
    apart.cut_from_members(first, *"cd")
    apart.cut_from_members(second, *"ab")
    for one, other in itertools.product("ab", "cd"):
        job.harness.cut(one, other)

    def alone(record: Record) -> bool:
        return {str(m).partition("~")[0] for m in record.get("members") or ()} == set("ab")

    decided = job.harness.wait_for("decide", alone, after=before)
    trains_on(job, "ab", decided)
    for name in "cd":
        said = job.harness.wait_for("notice", lambda r: bool(r.get("waiting")), node=name, after=before)
        assert "no scheduler serves it" in str(said["text"])
    assert apart.facts(first)["role"] == "leader", "as many on both sides: it stays"
    commits = [r for r in job.harness.records if r.name == "committed"]
    one_chain(commits)
    assert not [r for r in commits if r.node in "cd" and r.t > decided.t], "who waits commits nothing"
    for one, other in itertools.product("ab", "cd"):
        job.harness.restore(one, other)
    apart.mend_to_members(first, *"cd")
    apart.mend_to_members(second, *"ab")
    healed = here(job)
    joined = [job.harness.wait_for("joined", node=name, after=healed) for name in "cd"]
    equal(job, "abcd", max(joined, key=job.harness.records.index))
    job.leave(*"abcd")


# ------------------------------------------------------------------------------------------------ etcd


@pytest.mark.slow
def test_without_a_majority_of_etcd_nobody_leads_and_training_goes_on(apart: Apart) -> None:
    job, etcd = apart.job, apart.etcd
    train(job, *"abc")
    first = apart.leading()
    before = here(job)
    dead = [etcd.leader(), next(s for s in etcd.servers if s is not etcd.leader())]
    for server in dead:
        etcd.kill(server)
    apart.says(first, waits_for="etcd, to prolong its lease")
    ended = job.harness.wait_for("deposed", after=before)
    for name in apart.paths:
        apart.says(name, waits_for="without it nobody can be elected", store_error="etcd")
    trains_on(job, "abc", ended, steps=30)
    job.harness.kill("c")
    said = job.harness.wait_for("notice", lambda r: bool(r.get("waiting")), node="a", after=ended)
    assert "no scheduler serves it" in str(said["text"])
    waiting = here(job)
    assert not [r for r in job.harness.records if r.name == "decide" and r.t > ended.t]
    for server in dead:
        etcd.run(server)
    etcd.wait_ready(60.0)
    led = next_term(job, 2, before)
    decided = job.harness.wait_for("decide", after=waiting)
    assert decided.t > led.t
    equal(job, "ab", decided)
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin")]
    job.leave(*"ab")


# ------------------------------------------------------------------------------------------------ long pauses


@pytest.mark.slow
@pytest.mark.parametrize("members_too", [False, True], ids=["schedulers and etcd", "the whole machine"])
def test_leases_end_during_a_long_pause_of_all_schedulers_and_etcd(apart: Apart, members_too: bool) -> None:
    """All schedulers and etcd pause for longer than any lease: whichever scheduler leads afterwards continues the
    chain.
    """
    job, etcd = apart.job, apart.etcd
    train(job, *"ab")
    frozen = [*apart.paths, *("ab" if members_too else "")]
    pids = [server.pid for server in etcd.servers]
    for name in frozen:
        job.harness.stop(name)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    stopped = here(job)
    until = time.monotonic() + 6.0
    job.harness.wait_until(lambda: time.monotonic() > until, "a pause that outlasts all leases")
    if not members_too:
        trains_on(job, "ab", stopped, steps=30)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for name in frozen:
        job.harness.cont(name)
    woken = here(job)

    def served() -> bool:
        facts = who_leads(job)
        return not facts["waits_for"] and len(facts["streams"]) == 2

    job.harness.wait_until(served, "a leader that both members are connected to")
    a_newcomer_joins(job, "c", "ab", woken)
    started = [r["term"] for r in job.harness.records if r.name == "scheduler_started"]
    assert started == sorted(set(started)), "every lead has a term of its own"
    nobody_is_put_out(job)
    job.leave(*"abc")


@pytest.mark.slow
def test_a_leader_that_was_frozen_beyond_its_lease_wakes_while_a_member_dies(apart: Apart) -> None:
    job = apart.job
    train(job, *"abc")
    first = apart.leading()
    before = here(job)
    job.harness.stop(first)
    led = next_term(job, 2, before)
    connected(job, "abc", led)
    job.harness.kill("c")
    job.harness.cont(first)
    decided = job.harness.wait_for("decide", after=led)
    assert decided["id"].startswith("2."), decided
    equal(job, "ab", decided)
    woken = job.harness.wait_for("scheduler_ended", after=led)
    assert "leads no more" in woken["reason"]
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin")]
    job.leave(*"ab")


def test_status_tells_people_who_leads_since_when_and_why(apart: Apart, capsys: pytest.CaptureFixture[str]) -> None:
    job = apart.job

    def shown(name: str, *, here: bool = False) -> str:
        status(endpoint=apart.paths[name].endpoint, token_file="", as_json=False, timeout=10.0, here=here)
        return " ".join(capsys.readouterr().out.split())

    train(job, "a")
    first = apart.leading()
    (second,) = apart.others(first)
    places = {name: path.endpoint for name, path in apart.paths.items()}
    apart.says(second, leader=places[first])
    text = shown(second, here=True)
    assert f"job default at {places[second]}: stands by" in text
    assert f"waits for: the end of the lease of {places[first]}, which leads" in text
    text = shown(second)
    assert f"job default at {places[first]}: " in text
    assert f"leads: {places[first]} since {time.strftime('%Y-%m-%d ')}" in text
    assert f"because nobody led stand by: {places[second]}" in text
    before = here(job)
    job.harness.kill(first)
    next_term(job, 2, before)
    because = apart.says(second, role="leader")["led_because"]
    assert because == f"the lease of {places[first]} had ended, or was given back"
    text = shown(second)
    assert f"because {because} stand by: nobody" in text
    assert "waits for" not in text
    job.leave("a")
