"""Six processes found a job of states that differ: the copies spread over those that have loaded (protocol.md 15)."""

from __future__ import annotations

from collections import Counter

from engine_job import Job
from engine_members import UNTIL_ENOUGH

FOUNDERS = "abcdef"


def test_founders_get_the_state_of_one_another(job: Job) -> None:
    """Each sends it to one at a time, so that who comes later gets at least a part of it elsewhere."""
    for seed, name in enumerate(FOUNDERS):
        rules = {"min_nodes": len(FOUNDERS)} if name == "a" else {}
        job.start(name, seed=seed, settings=rules, epochs=UNTIL_ENOUGH, width=40_000, kept={"pulls": 1}, by_wire=True)
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
