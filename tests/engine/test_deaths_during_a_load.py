"""Tests the death of a third member while a newcomer loads the state: the newcomer joins, and no other member has to
start over.
"""

from __future__ import annotations

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH


@pytest.mark.parametrize("when", ["a view is decided without it", "the pull begins"])
@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_third_member_dies_while_a_newcomer_loads(job: Job, victim: str, when: str) -> None:
    """The commit root or another member dies before or during a newcomer's pull, for which it is a source as well; the
    newcomer joins all the same.
    """
    gate, first = job.gate("d"), job.gate("a")
    for name in "abc":
        gates = {5: first} if name == "a" else {}
        job.start(name, settings={"min_nodes": 3 if name == "a" else 1}, epochs=UNTIL_ENOUGH, gates=gates)
        job.harness.wait_for("welcomed", node=name)
    job.harness.wait_step(5)
    job.start("d", epochs=UNTIL_ENOUGH, load_gate=gate)
    job.harness.wait_for("welcomed", node="d")
    job.open(first)
    job.harness.wait_for("notice", lambda r: r.get("text") == "about to pull", node="d")
    job.harness.kill(victim)
    if when == "a view is decided without it":
        death = job.harness.wait_for("death", lambda r: r.member.startswith(f"{victim}~"))
        decided = job.harness.wait_for("decide", node="default", after=death)
        assert [m.partition("~")[0] for m in decided.get("members") or ()] == [n for n in "abcd" if n != victim]
    job.open(gate)
    job.harness.wait_for("joined", node="d")
    alive = [name for name in "abcd" if name != victim]
    reports = job.finish(*alive)
    assert len({(r["hash"], r["step"]) for r in reports}) == 1, reports
    out = [r for r in job.harness.records if r.name in ("fenced", "rejoin")]
    assert not [r for r in out if not r.member.startswith(f"{victim}~")], out


def test_who_has_just_loaded_hands_the_state_on_when_its_only_donor_dies(job: Job) -> None:
    """Only the first of three founders has the state; it dies once the second has pulled it, so the third gets it from
    the second.
    """
    gate = job.gate("c")
    for name in "abc":
        given = {"load_gate": gate} if name == "c" else {}
        job.start(name, settings={"min_nodes": 3 if name == "a" else 1}, epochs=UNTIL_ENOUGH, **given)
        job.harness.wait_for("welcomed", node=name)
    job.harness.wait_for("joined", node="b")
    job.harness.wait_for("notice", lambda r: r.get("text") == "about to pull", node="c")
    job.harness.kill("a")
    death = job.harness.wait_for("death", lambda r: r.member.startswith("a~"))
    job.start("d", epochs=UNTIL_ENOUGH)
    job.harness.wait_for("decide", node="default", after=death)
    job.open(gate)
    job.harness.wait_for("joined", node="c")
    reports = job.finish("b", "c", "d")
    assert len({(r["hash"], r["step"]) for r in reports}) == 1, reports
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin")]
