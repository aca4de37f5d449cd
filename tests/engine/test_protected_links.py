"""Tests jobs of real processes over protected links: a join by replay, a death, and equal state at the end."""

from __future__ import annotations

from typing import Any

import protected_members
import pytest
from engine_job import PRELOAD, Job
from middleman import Middleman

from chaos_lightning.events.events import Record


def protected(job: Job, name: str, level: str, **spec: Any) -> None:
    settings = {"links": level, **spec.pop("settings", {})}
    job.start(name, settings=settings, width=300, **spec)


@pytest.mark.parametrize(
    ("level", "by_reference"),
    [
        ("encrypted", False),
        ("authenticated", True),
        pytest.param("authenticated", False, marks=pytest.mark.slow),
        pytest.param("encrypted", True, marks=pytest.mark.slow),
    ],
)
def test_a_join_by_replay_and_a_death_over_protected_links(job: Job, level: str, by_reference: bool) -> None:
    """A newcomer joins by replay over protected links, and a member dies; both with sockets alone, and with memory
    passed by reference.
    """
    way = {"min_nodes": 2, "by_reference": by_reference}
    for name in "ab":
        protected(job, name, level, settings=way, epochs=1000, step_s=0.002)
        job.harness.wait_for("welcomed", node=name)
    job.harness.wait_step(5)
    protected(job, "c", level, seed=2, epochs=1000, step_s=0.002, settings={**way, "join_by": "replay"})
    joined = job.harness.wait_for("joined", node="c")
    ways = [r.get("way") for r in job.harness.records if r.name == "way_in"]
    assert ways == ["replay"]
    job.harness.kill("b")
    death = job.harness.wait_for("death", lambda r: r.member.startswith("b~"), after=joined)
    job.harness.wait_for("committed", node="c", after=death)
    job.leave("a", "c")


# ------------------------------------------------------------------------------------------------ in the middle


@pytest.mark.parametrize("level", ["authenticated", "encrypted"])
def test_whoever_changes_what_passes_cuts_a_link_and_nothing_else(
    watched_job: tuple[Job, Middleman], level: str
) -> None:
    job, relay = watched_job
    for name in "abc":
        protected(job, name, level, settings={"min_nodes": 3, "by_reference": False}, epochs=1000, step_s=0.002)
        job.harness.wait_for("welcomed", node=name)
    last: Record | None = job.harness.wait_step(5)
    for pair, kind in (("ab", "flip"), ("bc", "replay"), ("ac", "reorder"), ("ab", "drop")):
        relay.harm(*pair, kind)
        assert relay.harmed.wait(30), kind
        down = job.harness.wait_for(
            "link_down", lambda r: "altered, replayed, reordered or left out" in str(r.get("evidence")), after=last
        )
        assert {down.node, str(down.get("peer")).partition("~")[0]} == set(pair), (kind, down)
        decided = job.harness.wait_for("decide", node="default", after=down)
        last = job.harness.wait_for("committed", node="a", after=decided)
    assert relay.done == ["flip", "replay", "reorder", "drop"]
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin", "death")]
    job.leave(*"abc")


@pytest.mark.parametrize(("level", "shows"), [("checksum", True), ("authenticated", True), ("encrypted", False)])
def test_what_an_eavesdropper_sees(watched_job: tuple[Job, Middleman], level: str, shows: bool) -> None:
    """An eavesdropper on the links finds gradients and a newcomer's weights without encryption, and none of them with
    it.
    """
    job, relay = watched_job
    relay.records = True
    settings = {"links": level, "by_reference": False, "join_by": "pause"}

    def start(name: str, steps: int) -> None:
        report = str(job.folder / f"{name}.pt")
        spec = {"name": name, "endpoint": job.endpoint, "settings": settings, "steps": steps, "report": report}
        job.harness.start_function(name, protected_members.train, spec, preload=PRELOAD)

    start("a", 100_000)
    job.harness.wait_for("joined", node="a")
    start("b", 10)
    job.harness.wait_exit("b")
    report = job.report("b")
    assert report["weight"] == pytest.approx(protected_members.WEIGHT)
    assert report["steps"] == 10
    seen = [bytes(data) for data in list(relay.seen.values())]
    assert sum(map(len, seen)) > 3 * 40_000
    for value in (protected_members.GRADIENT, protected_members.WEIGHT):
        found = any(protected_members.pattern(value).search(data) for data in seen)
        assert found is shows, value


def test_a_member_that_insists_on_another_level_is_told(job: Job) -> None:
    protected(job, "a", "authenticated", epochs=1000, step_s=0.01)
    job.harness.wait_step(2)
    protected(job, "b", "encrypted", epochs=1000)
    job.harness.declare("b")
    assert job.harness.wait_exit("b") != 0
    words = "links=encrypted was set here, but the job goes by links=authenticated"
    assert words in job.harness.children["b"].tail()
    job.leave("a")


@pytest.mark.parametrize("level", ["encrypted", pytest.param("authenticated", marks=pytest.mark.slow)])
def test_links_are_mended_without_a_scheduler_and_the_next_one_makes_new_keys(routed_job: Job, level: str) -> None:
    """A link breaks while there is no scheduler: its ends connect again with their old keys; the next scheduler makes
    new ones.
    """
    job = routed_job
    job.serve(links=level, min_nodes=2)
    for name in "ab":
        job.start(name, settings={"min_nodes": 2, "by_reference": False, "host_scheduler": False}, epochs=1000)
        job.harness.wait_for("welcomed", node=name)
    job.harness.wait_step(5)
    job.harness.kill("scheduler")
    job.harness.wait_exit("scheduler")
    job.harness.cut("a", "b")
    down = job.harness.wait_for("link_down", node="b")
    job.harness.restore("a", "b")
    mended = job.harness.wait_for("link_up", node="b", after=down)
    job.serve(links=level, min_nodes=2)
    job.harness.wait_for("committed", node="a", after=mended)
    job.start("c", settings={"min_nodes": 2, "by_reference": False, "host_scheduler": False}, epochs=1000)
    joined = job.harness.wait_for("joined", node="c")
    job.harness.wait_for("committed", node="c", after=joined)
    job.leave(*"abc")
