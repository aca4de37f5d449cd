"""Jobs of real processes over protected links: a join by replay, a death, and equal state at the end."""

from __future__ import annotations

from typing import Any

import pytest
from engine_job import Job
from test_members_come_go_and_die import same


def protected(job: Job, name: str, level: str, **spec: Any) -> None:
    settings = {"links": level, **spec.pop("settings", {})}
    job.start(name, settings=settings, width=300, **spec)


@pytest.mark.parametrize("level", ["authenticated", "encrypted"])
@pytest.mark.parametrize("by_reference", [False, True])
def test_a_join_by_replay_and_a_death_over_protected_links(job: Job, level: str, by_reference: bool) -> None:
    """Over sockets alone, as between machines; and with offers and references, which are sealed like all else."""
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
