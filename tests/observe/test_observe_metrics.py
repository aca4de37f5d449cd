"""What `chaos-lightning metrics` makes of event logs."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from observe_synthetic import Script, two_jobs

from chaos_lightning.observe import commands
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


@pytest.mark.parametrize("follow", [follow_logs, commands.follow])
def test_a_long_history_is_not_held_in_memory(tmp_path: Path, follow: Callable[[Path], Callable[[], object]]) -> None:
    for name, begin in ("a", 0.0), ("b", 0.5):
        with (tmp_path / f"member-{name}-1.jsonl").open("w") as file:
            for second in range(8000):
                line = {
                    "t": begin + second,
                    "mono": begin,
                    "member": f"{name}~1",
                    "name": "published",
                    "head": "x" * 400,
                }
                file.write(json.dumps(line) + "\n")
    look = follow(tmp_path)
    tracemalloc.start()
    try:
        look()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2e6, "the files have 8 MB"
