"""What `chaos-lightning metrics` makes of event logs."""

from __future__ import annotations

from pathlib import Path

from observe_synthetic import Script, two_jobs

from chaos_lightning.observe.exporter import follow_logs


def test_a_finished_job_is_no_job_that_stands_still(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(5)
    now = follow_logs(run.write(tmp_path))
    values = now()
    assert values["last_commit_age_seconds"][()] > 0
    assert values["world_size"] == {(): 2}
    run.close()
    run.write(tmp_path)
    values = now()
    assert "last_commit_age_seconds" not in values
    assert values["world_size"] == {(): 0}
    assert values["step"] == {(): 5}


def test_the_job_after_a_finished_one_can_stand_still(tmp_path: Path) -> None:
    for run in two_jobs():
        run.write(tmp_path)
    values = follow_logs(tmp_path)()
    assert values["last_commit_age_seconds"][()] > 0
    assert values["world_size"] == {(): 2}
