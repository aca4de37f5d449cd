"""Tests a cut of all links between two halves of a job: one half goes on; the other one waits, says so, and joins
again.

The half that the scheduler reaches goes on, be it the one with the commit root or the other one; where it reaches both,
the one with the oldest member does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from engine_job import Job

from chaos_lightning.events.events import Record

OLD, YOUNG = "ab", "cd"
ALL = OLD + YOUNG
RING = {"a": "b,d", "b": "a,c", "c": "b,d", "d": "a,c"}
COMPLETE: dict[str, str] = {}
SPEC: dict[str, Any] = {"epochs": 1000, "step_s": 0.01}
SETTINGS: dict[str, Any] = {"min_nodes": 2, "state_hash_every": 10}


def training(job: Job, named: dict[str, str]) -> Record:
    """Starts four members in one view, in this order, with control streams that can be cut one by one; returns their
    first joint step.
    """
    job.serve(min_nodes=2)
    job.own_stream(*ALL)
    for name in ALL:
        job.start(name, settings={**SETTINGS, "neighbours": named.get(name, "")}, **SPEC)
        job.harness.wait_for("joined" if name in YOUNG else "welcomed", node=name)
    return job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 4, node="a")


def cut(job: Job) -> None:
    for one, other in itertools.product(OLD, YOUNG):
        job.harness.cut(one, other)


def restore(job: Job) -> None:
    for one, other in itertools.product(OLD, YOUNG):
        job.harness.restore(one, other)


def committed(job: Job, names: str) -> list[Record]:
    return [r for r in job.harness.records if r.name == "committed" and r.node in names]


def goes_on(job: Job, side: str, before: Record) -> Record:
    """Waits until the members of one side train in a view of their own; returns the decision for that view."""

    def theirs(record: Record) -> bool:
        return [str(m).partition("~")[0] for m in record.get("members") or ()] == list(side)

    decided = job.harness.wait_for("decide", theirs, node="default", after=before)
    for name in side:
        alone = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node=name, after=decided)
        job.harness.wait_step(alone["step"] + 5, node=name)
    return decided


def committed_nothing_meanwhile(job: Job, waiting: str, side: str, decided: Record) -> None:
    """Checks that waiting members committed nothing after the cut, except perhaps the step under way if the commit root
    is among them.

    Such a step is stable nowhere before the header after it (protocol.md 4).
    """
    first = min(r["seq"] for r in committed(job, side) if r["view"] == decided["id"])
    assert max(r["seq"] for r in committed(job, waiting)) <= (first if waiting == OLD else first - 1)
    one_chain([r for r in committed(job, ALL) if r["seq"] < first])


def one_chain(commits: Sequence[Record]) -> None:
    chain: dict[int, str] = {}
    for record in commits:
        assert chain.setdefault(record["seq"], record["header"]) == record["header"], f"a fork: {record}"


def all_train_again(job: Job, waited: str, side: str, healed: Record) -> None:
    joined = [job.harness.wait_for("joined", node=name, after=healed) for name in waited]
    later = max(joined, key=job.harness.records.index)
    root = side[0]
    four = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 4, node=root, after=later)
    hashed = job.harness.wait_for("state_hash", node=root, after=four)
    for name in ALL:
        alike = job.harness.wait_for("state_hash", lambda r: r["head"] == hashed["head"], node=name)
        assert alike["hash"] == hashed["hash"], name
    out = {r.member.partition("~")[0] for r in job.harness.records if r.name in ("fenced", "rejoin")}
    assert out == set(waited), "nobody of those who went on was put out"
    again = job.harness.records[job.harness.records.index(healed) :]
    one_chain([r for r in again if r.name == "committed"])
    job.leave(*ALL)


def shown(job: Job, name: str, text: str) -> None:
    """Waits until this text is on the member's terminal, which happens a moment after its event."""
    job.harness.wait_until(lambda: text in job.harness.children[name].log.read_text(), f"{text!r} on {name}'s terminal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "side"),
    [
        pytest.param(COMPLETE, OLD, id="complete"),
        pytest.param(COMPLETE, YOUNG, id="complete, without the root", marks=pytest.mark.slow),
        pytest.param(RING, OLD, id="ring", marks=pytest.mark.slow),
        pytest.param(RING, YOUNG, id="ring, without the root"),
    ],
)
def test_the_side_that_the_scheduler_reaches_goes_on_and_the_other_waits_and_says_so(
    routed_job: Job, named: dict[str, str], side: str
) -> None:
    job = routed_job
    before = training(job, named)
    other = YOUNG if side == OLD else OLD
    job.cut_stream(*other)
    cut(job)
    decided = goes_on(job, side, before)
    for name in other:
        said = job.harness.wait_for("notice", lambda r: bool(r.get("waiting")), node=name, after=before)
        text = str(said["text"])
        assert text.startswith("waits for the commit of slot "), text
        assert "(no scheduler answered at " in text
        assert f", and no link to {side[0]}~" in text or f"{side[1]}~" in text.partition(", and no link to ")[2], text
        shown(job, name, text)
    committed_nothing_meanwhile(job, other, side, decided)
    healed = job.harness.records[-1]
    restore(job)
    job.mend_stream(*other)
    all_train_again(job, other, side, healed)
    for name in other:
        shown(job, name, "waiting is over, this member is rank ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "named", [pytest.param(COMPLETE, id="complete", marks=pytest.mark.slow), pytest.param(RING, id="ring")]
)
def test_where_the_scheduler_reaches_both_sides_the_one_with_the_oldest_member_goes_on(
    routed_job: Job, named: dict[str, str]
) -> None:
    job = routed_job
    before = training(job, named)
    cut(job)
    for name in ALL:
        said = job.harness.wait_for("notice", lambda r: bool(r.get("waiting")), node=name, after=before)
        assert "all wait 3 s for one" in str(said["text"]), said
    decided = goes_on(job, OLD, before)
    for name in YOUNG:
        fenced = job.harness.wait_for("fenced", lambda r: r.get("rejoin") is True, node=name)
        assert "no link leads to a~1, b~2 (2 of 4 members), who go on" in str(fenced["reason"])

        def waits(record: Record) -> bool:
            return bool(record["waiting"]) and "in when" in str(record["text"])

        shown(job, name, str(job.harness.wait_for("notice", waits, node=name, after=decided)["text"]))
    committed_nothing_meanwhile(job, YOUNG, OLD, decided)
    healed = job.harness.records[-1]
    restore(job)
    all_train_again(job, YOUNG, OLD, healed)


@pytest.mark.parametrize("way", ["pause", "replay"])
def test_a_newcomer_is_cut_off_from_all_while_it_loads_and_the_others_go_on(routed_job: Job, way: str) -> None:
    """A newcomer is cut off from all while it loads the state: the others go on without it, and it joins when the cut
    is over.

    By pause it is in a view already, and the next step waits for it until it loses its place.
    """
    job = routed_job
    job.serve(min_nodes=2)
    job.own_stream("c")
    for name in "ab":
        job.start(name, settings=SETTINGS, **SPEC)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="a")
    gate = job.gate("c")
    job.start("c", settings={**SETTINGS, "join_by": way}, load_gate=gate, **SPEC)
    before = job.harness.wait_for("notice", lambda r: r["text"] == "about to pull", node="c")
    job.cut_stream("c")
    for name in "ab":
        job.harness.cut(name, "c")
    job.open(gate)
    for name in "ab":
        alone = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node=name, after=before)
        job.harness.wait_step(alone["step"] + 5, node=name)
    healed = job.harness.records[-1]
    for name in "ab":
        job.harness.restore(name, "c")
    job.mend_stream("c")
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="c", after=healed)
    job.leave(*"abc")
