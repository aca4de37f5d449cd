"""Tests faults while the state is being sent: the death of a donor, of the last one, of the newcomer or the scheduler,
and a cut control stream.

Links to the newcomer are slow from the start, so what is done to it once some of the state has passed is done in the
middle of the transfer, however busy the machine is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from engine_job import Job

from chaos_lightning.control.requests import fetch_status
from chaos_lightning.events.events import Record
from chaos_lightning.testing.edge.relay import LinkRelay

WIDTH = 4000
"""Some 700 KB of training state."""
SLOW_BPS, FAST_BPS = 2e6, 1e9
SOME_NBYTES = 150_000
NEWCOMER = "d"
SPEC: dict[str, Any] = {"epochs": 1000, "width": WIDTH, "step_s": 0.02}
HASHED = {"state_hash_every": 10}
WAYS = pytest.mark.parametrize("way", [pytest.param("pause", marks=pytest.mark.slow), "replay"])


def training(job: Job, names: Sequence[str], rules: dict[str, Any] | None = None) -> LinkRelay:
    """Starts these members, waits until they train, and slows down their links to the later newcomer; `rules` are the
    scheduler's settings.
    """
    relay = job.relay
    for name in names:
        relay.shape(name, NEWCOMER, rate_bps=SLOW_BPS)
        job.start(name, settings=HASHED, rules=rules, **SPEC)
        job.harness.wait_for("joined", node=name)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == len(names))
    return relay


def begin_transfer(job: Job, relay: LinkRelay, way: str) -> None:
    """Starts the newcomer, and waits until it has received a small part of the state."""
    job.start(NEWCOMER, seed=2, settings={"join_by": way, **HASHED}, **SPEC)
    job.harness.wait_for("pull_started", node=NEWCOMER)

    def passed() -> bool:
        return sum(n for (_, to), n in relay.passed().items() if to == NEWCOMER) > SOME_NBYTES

    job.harness.wait_until(passed, "some of the state")
    assert not [r for r in job.harness.records if r.name == "pull_done" and r.node == NEWCOMER]


def hurry(relay: LinkRelay, names: Sequence[str]) -> None:
    for name in names:
        relay.shape(name, NEWCOMER, rate_bps=FAST_BPS)


def end(job: Job, names: Sequence[str]) -> None:
    """Checks that these members train together with equal states and that none was removed; then makes them leave."""
    hashed_alike(job, names)
    nobody_was_put_out(job)
    job.leave(*names)


def hashed_alike(job: Job, names: Sequence[str], joined: Record | None = None) -> None:
    """Checks that these members have the same hash of the state as the newcomer after its join."""
    joined = joined or job.harness.wait_for("joined", node=NEWCOMER)
    hashed = job.harness.wait_for("state_hash", node=NEWCOMER, after=joined)
    for name in names:
        alike = job.harness.wait_for("state_hash", lambda r: r["head"] == hashed["head"], node=name)
        assert alike["hash"] == hashed["hash"], name


def nobody_was_put_out(job: Job) -> None:
    """Checks that no living member was removed from the job."""
    killed = {r["node"] for r in job.harness.records if r.name == "fault_injected" and r["kind"] == "sigkill"}
    put_out = [r for r in job.harness.records if r.name in ("fenced", "rejoin")]
    out = [r for r in put_out if r.member.partition("~")[0] not in killed]
    assert not out, out


@WAYS
def test_a_donor_dies(routed_job: Job, way: str) -> None:
    job = routed_job
    relay = training(job, "abc")
    begin_transfer(job, relay, way)
    job.harness.kill("c")
    hurry(relay, "ab")
    end(job, "abd")


@WAYS
def test_the_last_donor_dies(routed_job: Job, way: str) -> None:
    """The last donor dies, so the newcomer has a mixture of states: it ends with an error, and the next process founds
    the job anew.
    """
    job = routed_job
    relay = training(job, "a")
    begin_transfer(job, relay, way)
    job.harness.declare(NEWCOMER)
    job.harness.kill("a")
    assert job.harness.wait_exit(NEWCOMER) == 1
    words = job.harness.children[NEWCOMER].tail().splitlines()[-1]
    assert "StateError" in words
    for part in ("its state is a mixture", "all members that had it are gone", "start this process again"):
        assert part in words, words
    before = job.harness.records[-1]
    job.start(NEWCOMER, settings=HASHED, **SPEC)  # as torchrun would
    began = job.harness.wait_for("joined", node=NEWCOMER, after=before)
    assert (began["role"], began["step"]) == ("founder", 0)
    job.harness.wait_for("committed", lambda r: r["step"] == 1, node=NEWCOMER, after=began)
    job.leave(NEWCOMER)


@WAYS
def test_the_newcomer_dies(routed_job: Job, way: str) -> None:
    job = routed_job
    relay = training(job, "ab")
    begin_transfer(job, relay, way)
    job.harness.kill(NEWCOMER)
    if way == "pause":
        gone = job.harness.wait_for("death", lambda r: r.member.startswith(f"{NEWCOMER}~"))
    else:
        gone = job.harness.wait_for("released", node="a")
    for name in "ab":
        job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node=name, after=gone)
    nobody_was_put_out(job)
    job.leave("a", "b")


@pytest.mark.slow
@WAYS
def test_the_scheduler_dies(routed_job: Job, way: str) -> None:
    """The scheduler dies while the state is being sent; the newcomer joins under the next scheduler, as the state does
    not pass through it.
    """
    job = routed_job
    relay = training(job, "ab")
    begin_transfer(job, relay, way)
    os.kill(fetch_status(job.endpoint)["pid"], signal.SIGKILL)
    lost = job.harness.wait_for("scheduler", lambda r: str(r["state"]).startswith("lost"), node=NEWCOMER)
    job.harness.wait_for("scheduler", lambda r: r["state"] == "connected", node=NEWCOMER, after=lost)
    assert fetch_status(job.endpoint)["term"] == 2
    hurry(relay, "ab")
    end(job, "abd")
    assert not [r for r in job.harness.records if r.name == "death"]


def stream_lost(job: Job) -> Record:
    """Waits until both the newcomer and the scheduler have noticed that the stream between them has ended."""
    lost = job.harness.wait_for("scheduler", lambda r: str(r["state"]).startswith("lost"), node=NEWCOMER)
    assert not [r for r in job.harness.records if r.name == "pull_done" and r.node == NEWCOMER]
    job.harness.wait_until(lambda: not job.connected(NEWCOMER), "the scheduler's word that the stream has ended")
    return lost


def came_in(job: Job, way: str) -> None:
    """Checks that the newcomer used the way of joining (pause or replay) that the test chose, however often it
    began.
    """
    chosen = [r["way"] for r in job.harness.records if r.name == "way_in" and r.member.startswith(f"{NEWCOMER}~")]
    assert set(chosen) == {way}, chosen


@WAYS
def test_the_newcomers_control_stream_is_cut_for_a_moment(routed_job: Job, way: str) -> None:
    """A newcomer's control stream is cut for a moment: members train on, and it joins; by pause it keeps its member id,
    by replay it gets a new one.
    """
    job = routed_job
    job.own_stream(NEWCOMER)
    relay = training(job, "ab")
    begin_transfer(job, relay, way)
    job.cut_stream(NEWCOMER)
    lost = stream_lost(job)
    job.mend_stream(NEWCOMER)
    again = job.harness.wait_for("welcomed", node=NEWCOMER, after=lost)
    hurry(relay, "ab")
    end(job, "abd")
    first = job.harness.wait_for("welcomed", node=NEWCOMER)
    assert (again.member == first.member) == (way == "pause")
    came_in(job, way)
    assert not [r for r in job.harness.records if r.name == "death"]


@WAYS
def test_the_newcomers_control_stream_is_cut_until_it_is_given_up(routed_job: Job, way: str) -> None:
    """A newcomer's control stream is cut until the job goes on without it: it joins again as another member, and no
    other one is removed.
    """
    job = routed_job
    job.own_stream(NEWCOMER)
    relay = training(job, "ab", {"hang_timeout_s": 2.0})
    begin_transfer(job, relay, way)
    job.cut_stream(NEWCOMER)
    stream_lost(job)
    if way == "pause":  # it was in a view already
        given_up = job.harness.wait_for("death", lambda r: r.member.startswith(f"{NEWCOMER}~"))
        assert "not a word for 2 s" in str(given_up["evidence"])
    else:
        given_up = job.harness.wait_for("released", node="a")
    for name in "ab":
        job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node=name, after=given_up)
    hurry(relay, "ab")
    job.mend_stream(NEWCOMER)
    first = job.harness.wait_for("welcomed", node=NEWCOMER)
    again = job.harness.wait_for("joined", lambda r: r.member != first.member, node=NEWCOMER)
    hashed_alike(job, "abd", again)
    came_in(job, way)
    out = [r for r in job.harness.records if r.name in ("fenced", "rejoin")]
    assert all(r.member.startswith(f"{NEWCOMER}~") for r in out), out
    job.leave(*"abd")
