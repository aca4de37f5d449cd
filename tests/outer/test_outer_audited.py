"""Outer jobs of real processes, checked from their logs: no push is lost or counted twice, and training goes on soon
after a kill.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from outer_job_support import OuterJob, inner_step, open_session, small_model, wait_for_file

from chaos_lightning.events.reader import Record, read_events
from chaos_lightning.events.registry import problems
from chaos_lightning.observe.audit import OK
from chaos_lightning.observe.jobs import fold_jobs
from chaos_lightning.observe.outer.audit import audit_folder
from chaos_lightning.observe.outer.fold import OuterRun
from chaos_lightning.observe.outer.tables import OuterFacts, cluster_of
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.testing.harness import Harness

ROBUST = OuterSettings(
    policy="robust", inner_steps=4, batch=16, heartbeat_s=1.0, reconnect_s=30.0, lease_ahead_s=0.1, epochs=1
)
LENGTH = 16 * 400


def train_shared(server: str, name: str, logs: str, go: str) -> None:
    """Trains as a cluster of a job that shares one epoch; pauses long before the epoch's end until the file `go`
    exists.
    """
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = open_session(server, name, model, logs, ROBUST, length=LENGTH)
    try:
        session.start()
        step = 0
        while not session.over:
            covers = session.claim(16, 0.05)
            samples = sum(b - a for each in covers for a, b in each.spans)
            loss = inner_step(model, optimizer, name, step) if samples else None
            session.boundary(samples, covers, steps=bool(samples), loss=loss)
            step += bool(samples)
            if step == 60:
                wait_for_file(Path(go))
        session.finish("the epoch is over", 60)
    finally:
        session.close()


def answers_of(records: Sequence[Record]) -> list[dict[str, object]]:
    """Returns the last events about pushes, for the message of a failed check."""
    return [dict(r.fields) for r in records if r.name in ("push_frozen", "push_answered", "version_computed")][-20:]


@pytest.mark.slow
def test_a_job_whose_whole_server_was_killed_holds_every_point(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Harness(tmp_path, deadline_s=150) as harness:
        job = OuterJob(harness, 2).start()
        for name in ("a", "b"):
            harness.start_function(name, train_shared, job.server, name, str(harness.logs), str(go))
        harness.wait_for("entry", lambda r: r["version"].startswith("v3-"))
        job.kill_server()
        job.start()
        go.touch()
        harness.wait_all()
    records = list(read_events(harness.logs))
    assert [text for r in records for text in problems(r.name, r.fields)] == []
    (judged,) = audit_folder(harness.logs)
    assert [str(finding) for finding in judged.findings if finding.verdict != OK] == []
    (outer,) = fold_jobs(records, Timeline, OuterRun).outer
    facts = OuterFacts.of(outer)
    aside = [r for r in records if r.name == "set_aside"]  # near the end the gate may refuse a single batch three times
    assert all("were rejected at" in str(r["reason"]) for r in aside), aside
    assert facts.samples + sum(b - a for r in aside for a, b in r["spans"]) == LENGTH, (aside, answers_of(records))
    assert len(facts.run.leaders) == 2
    assert sorted(cluster_of(row.name) for row in facts.clusters) == ["a", "b"]
    assert all(row.loss is not None and row.pushed and row.fetched for row in facts.clusters)
