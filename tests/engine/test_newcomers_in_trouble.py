"""Tests newcomers, in real processes, that are slow, come again and again, lack a link, or find members short of
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engine_job import Job

from chaos_lightning.events.events import Record

SPEC: dict[str, Any] = {"epochs": 1000, "width": 300, "step_s": 0.01}
HASHED = {"state_hash_every": 10}
WAYS = pytest.mark.parametrize("way", [pytest.param("pause", marks=pytest.mark.slow), "replay"])


def two_train(job: Job, **more: Any) -> None:
    """Starts members a and b, which train together; `more` has further settings by member."""
    for name in "ab":
        job.start(name, settings=HASHED, **SPEC, **more.get(name, {}))
        job.harness.wait_for("joined", node=name)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2)


def come(job: Job, name: str, way: str = "replay", **more: Any) -> None:
    job.start(name, seed=2, settings={"join_by": way, **HASHED}, **SPEC, **more)


def ways(job: Job, name: str) -> list[tuple[str, str]]:
    """Returns the ways of joining that the scheduler told a newcomer (replay or pause), each with its reason."""
    given = [r for r in job.harness.records if r.name == "way_in" and r.member.startswith(f"{name}~")]
    return [(str(r["way"]), str(r["reason"])) for r in given]


def hold_the_same(job: Job, names: Sequence[str], after: Record) -> None:
    """Checks that these members have the same state at a header committed after an event."""
    first = job.harness.wait_for("state_hash", node=names[0], after=after)
    heads = {names[0]: str(first["hash"])}
    for name in names[1:]:
        found = job.harness.wait_for("state_hash", lambda r: r["head"] == first["head"], node=name)
        heads[name] = str(found["hash"])
    assert len(set(heads.values())) == 1, heads


def nobody_was_put_out(job: Job, but: str = "-") -> None:
    records = [r for r in job.harness.records if r.name in ("fenced", "rejoin", "death")]
    out = [r for r in records if not r.member.startswith(f"{but}~")]
    assert not out, out


def stand_still(job: Job) -> tuple[str, Record]:
    """Starts newcomer c, which joins by replay and stops at a gate before the first entry of the log; returns the gate,
    and c's event.
    """
    gate = job.gate("c")
    come(job, "c", apply_gate=gate)
    return gate, job.harness.wait_for("notice", lambda r: r["text"] == "about to apply", node="c")


def go_on(job: Job, gate: str, after: Record, *, slots: int) -> None:
    """Lets c pass its gate once a and b have committed `slots` slots after an event; checks that all three end with
    equal states.
    """
    slot = job.harness.wait_for("committed", node="a", after=after)
    job.harness.wait_for("committed", lambda r: r["seq"] > slot["seq"] + slots, node="a")
    job.open(gate)
    hold_the_same(job, "abc", job.harness.wait_for("joined", node="c"))
    job.leave("a", "b", "c")


def test_one_that_applies_slower_than_the_log_grows_comes_in_by_a_pause(routed_job: Job) -> None:
    """A newcomer replays slower than the log grows, of which members keep four entries: it joins by a pause instead.

    Through the relay nothing is read out of others' memory, which is so quick that it may have nothing to apply.
    """
    job = routed_job
    two_train(job, a={"kept": {"log_cap_nbytes": 1}}, b={"kept": {"log_cap_nbytes": 1}})
    gate, applies = stand_still(job)
    go_on(job, gate, applies, slots=30)
    (first, _), (second, why) = ways(job, "c")
    assert (first, second) == ("replay", "pause")
    assert "was cut before" in why, why


def test_a_log_whose_lease_is_over_is_not_begun_again(routed_job: Job) -> None:
    """A newcomer stops until members have deleted their log for it, as its lease is over: it joins by a pause, not by
    replay again.
    """
    job = routed_job
    two_train(job, a={"kept": {"lease_s": 0.5}}, b={"kept": {"lease_s": 0.5}})
    gate, _ = stand_still(job)
    for name in "ab":
        gone = job.harness.wait_for("released", node=name)
    go_on(job, gate, gone, slots=20)
    (_, _), (way, why) = ways(job, "c")
    assert way == "pause"
    assert "the log was ended" in why, why


@pytest.mark.parametrize("late", ["a", "ab"])
def test_members_that_cannot_copy_a_slot_in_time(routed_job: Job, late: str) -> None:
    """A member cannot copy a slot into its log in time: the newcomer gets it from the other member, or joins by a pause
    if that one is late, too.
    """
    job = routed_job
    two_train(job, **{name: {"late_log": True} for name in late})
    come(job, "c")
    joined = job.harness.wait_for("joined", node="c")
    released = job.harness.wait_for("released", node="a")
    hold_the_same(job, "abc", joined)
    job.leave("a", "b", "c")
    assert released["left_out"] > 0
    if late == "a":
        assert [way for way, _ in ways(job, "c")] == ["replay"]
    else:
        (_, _), (way, why) = ways(job, "c")
        assert way == "pause"
        assert "its bytes were used again before they were copied" in why, why


@pytest.mark.parametrize("poor", ["a", "ab"])
def test_members_without_memory_for_a_copy(job: Job, poor: str) -> None:
    """A member lacks memory for a snapshot: the other member serves the newcomer, or if both lack it, the newcomer
    joins by a pause.
    """
    two_train(job, **{name: {"kept": {"snapshot_cap_nbytes": 1000}} for name in poor})
    come(job, "c")
    joined = job.harness.wait_for("joined", node="c")
    hold_the_same(job, "abc", joined)
    job.leave("a", "b", "c")
    refused = [r for r in job.harness.records if r.name == "error" and r.get("what") == "snapshot"]
    assert {r.node for r in refused} == set(poor)
    assert all("over the limit of 1000" in str(r["reason"]) for r in refused)
    if poor == "a":
        assert [way for way, _ in ways(job, "c")] == ["replay"]
        first = next(r for r in job.harness.records if r.name == "pull_source" and r.node == "c")
        assert str(first["source"]).startswith("b~")
    else:
        (_, _), (way, why) = ways(job, "c")
        assert way == "pause"
        assert "over the limit of 1000" in why, why


@WAYS
def test_one_that_comes_and_goes_again_and_again(job: Job, way: str) -> None:
    """A newcomer leaves as soon as it has joined, by turns politely and by SIGKILL: the others train on, and another
    newcomer joins.
    """
    two_train(job)
    come(job, "d", way)
    for turn in range(3):
        started = job.harness.records[-1]
        come(job, "c", way)
        job.harness.wait_for("joined", node="c", after=started)
        if turn % 2:
            job.harness.kill("c")
        else:
            job.harness.terminate("c")
        assert job.harness.wait_exit("c") == (-9 if turn % 2 else 0)
    stays = job.harness.wait_for("joined", node="d")
    gone = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="a", after=stays)
    hold_the_same(job, "abd", gone)
    nobody_was_put_out(job, but="c")
    job.leave("a", "b", "d")


@pytest.mark.slow
@WAYS
def test_ten_newcomers_at_once(job: Job, way: str) -> None:
    two_train(job)
    names = [f"n{i}" for i in range(10)]
    for name in names:
        come(job, name, way)
    joined = [job.harness.wait_for("joined", node=name) for name in names]
    last = max(joined, key=job.harness.records.index)
    hold_the_same(job, ["a", "b", *names], last)
    nobody_was_put_out(job)
    views = [r for r in job.harness.records if r.name == "view" and r.node == "default"]
    assert max(len(r["members"]) for r in views) == 12
    assert all(ways(job, name)[0][0] == way for name in names)
    job.leave("a", "b", *names)


@WAYS
def test_a_neighbour_that_refuses_is_left_out(routed_job: Job, way: str) -> None:
    """A newcomer cannot connect to one of two neighbours: it gets the state from the other one, which also passes on
    its messages.
    """
    job = routed_job
    job.relay.cut("a", "c")
    two_train(job)
    come(job, "c", way)
    told = job.harness.wait_for("notice", lambda r: "comes in without its links to" in str(r["text"]), node="c")
    assert "a~" in str(told["text"])
    assert job.harness.wait_for("notice", lambda r: f"does not reach {r.member}, which" in str(r["text"]), node="a")
    joined = job.harness.wait_for("joined", node="c")
    hold_the_same(job, "abc", joined)
    assert not [r for r in job.harness.records if r.name == "link_up" and r.node == "c" and r["peer"].startswith("a~")]
    nobody_was_put_out(job)
    job.leave("a", "b", "c")
