"""Tests six processes that found a job with different states: those that have loaded the state pass it on (protocol.md
15).
"""

from __future__ import annotations

from collections import Counter

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH

from chaos_lightning.protocol.types import SMALL_JOB

FOUNDERS = "abcdef"


@pytest.mark.slow
def test_founders_get_the_state_of_one_another(job: Job) -> None:
    """Each founder sends the state to one other at a time, so later founders pull at least a part of it from those that
    have loaded it.
    """
    for seed, name in enumerate(FOUNDERS):
        rules = {"min_nodes": len(FOUNDERS)} if name == "a" else {}
        job.start(name, seed=seed, settings=rules, epochs=UNTIL_ENOUGH, width=400_000, kept={"pulls": 1}, by_wire=True)
        job.harness.wait_for("welcomed", node=name)
    for name in FOUNDERS:
        job.harness.wait_for("joined", node=name)
    reports = job.finish(*FOUNDERS)
    assert len({(r["hash"], r["step"]) for r in reports}) == 1, reports
    served: Counter[str] = Counter()
    for record in job.harness.records:
        if record.name == "pull_source":
            served[str(record.get("source")).partition("~")[0]] += int(record.get("nbytes"))
    print("bytes by donor:", dict(served))
    assert served["a"] < sum(served.values()), served
    assert sum(n > 0 for n in served.values()) > 1, served


@pytest.mark.slow
def test_a_job_begins_without_a_founder_behind_a_slow_link_if_another_node_is_ready(job: Job) -> None:
    """A founder that gets 6 kB/s from each of the others (the state has 2.7 MB) is replaced by a waiting node, so the
    job begins; it then joins by replay.
    """
    founders = ["first", "slow", *(f"f{i}" for i in range(SMALL_JOB - 1))]
    for seed, name in enumerate([*founders, "spare"]):
        job.start(
            name,
            seed=seed,
            rules={"join_timeout_s": 15.0} if name == "first" else {},
            settings={"min_nodes": len(founders), "join_by": "auto"},
            env={"CHAOS_EMULATE": '{"slow": 5e4}'},
            epochs=UNTIL_ENOUGH,
            width=40_000,
            by_wire=True,
        )
        job.harness.wait_for("welcomed", node=name)
    put_out = job.harness.wait_for("death", lambda r: r.member.startswith("slow~"))
    assert "half of the others had it" in str(put_out["evidence"])
    job.harness.wait_for("joined", node="spare")
    after = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == len(founders), node="first")
    assert not any(member.startswith("slow~") for member, _ in after["contributors"])
    ways = job.harness.wait_for("way_in", lambda r: r.member.startswith("slow~"), after=put_out)
    assert ways["way"] == "replay"
    job.harness.kill("slow")
    job.finish("first", "spare", *founders[2:])
