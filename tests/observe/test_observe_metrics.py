"""Tests the metrics that `chaos-lightning metrics` computes from event logs."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from observe_synthetic import Script, two_jobs

from chaos_lightning.events.reader import read_events
from chaos_lightning.observe import commands, following
from chaos_lightning.observe.exporter import follow_logs


def test_a_finished_job_is_no_job_that_stands_still(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(5)
    now = follow_logs(run.write(tmp_path))
    values = now().values
    assert values["last_commit_age_seconds"][()] > 0
    assert values["world_size"] == {(): 2}
    run.close()
    run.write(tmp_path)
    values = now().values
    assert "last_commit_age_seconds" not in values
    assert values["world_size"] == {(): 0}
    assert values["step"] == {(): 5}


def test_the_job_after_a_finished_one_can_stand_still(tmp_path: Path) -> None:
    for run in two_jobs():
        run.write(tmp_path)
    values = follow_logs(tmp_path)().values
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


def test_counters_begin_anew_with_the_next_job(tmp_path: Path) -> None:
    first, second = Script(), Script(pid=2)
    first.found(["a", "b", "c"])
    first.steps(5)
    first.kill("c~1")
    first.steps(5)
    now = follow_logs(first.write(tmp_path))
    assert now().values["pauses_total"]["recovery",] == 1
    second.now = first.now + 3.0
    second.found(["a", "b"])
    second.steps(5)
    second.write(tmp_path)
    both = [now().values, follow_logs(tmp_path)().values]
    for values in both:
        assert "pauses_total" not in values
        assert values["steps_total"] == {(): 5}
        assert values["joins_total"] == {("founder",): 2}


def test_what_follows_a_run_of_days_keeps_its_latest_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "KEPT_SLOTS", 20)
    run, latest, most = Script(), following.Latest(), 0
    run.found(["a"])
    run.steps(100)
    for record in read_events(run.write(tmp_path)):
        latest.take(record)
        most = max(most, len(latest.timeline.slots))
    assert most == 41
    assert [slot.step for slot in latest.timeline.slots.values()][-20:] == list(range(81, 101))


def test_who_says_hello_anew_beside_a_kept_state_is_not_counted_as_put_out(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(3)
    run.say("b~1", "fenced", reason="no heartbeat", rejoin=True)
    source = run.process("c")
    run.welcome("c~3", source, "founder")
    run.say("c~3", "fenced", reason="a training state was kept on its machine: it says hello anew", rejoin=True)
    assert follow_logs(run.write(tmp_path))().values["fenced_total"] == {(): 1}


def test_the_jobs_name_is_told(tmp_path: Path) -> None:
    run = Script()
    run.found(["a"])
    run.say("a~1", "joined", role="joiner", rank=0, job="mine", endpoint="127.0.0.1:1")
    run.steps(1)
    assert follow_logs(run.write(tmp_path))().job == "mine"
