"""Tests the folder of event logs if the user names none: the state folder of the job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH
from typer.testing import CliRunner

from chaos_lightning import cli
from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.events.events import FORGOTTEN_S
from chaos_lightning.events.reader import log_files, read_events
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.observe.audit import OK, audit
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.exchange.server_options import ServerOptions
from chaos_lightning.outer.follower.follower_options import FollowerOptions
from chaos_lightning.service.options import log_folder
from chaos_lightning.settings import EngineConfig, absolute_log_dir


def test_members_and_their_scheduler_leave_evidence_by_default(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "chaos-lightning" / f"default-{split_endpoint(job.endpoint)[1]}" / "events"
    folder.mkdir(parents=True)
    old, fresh = folder / "member-x-1.jsonl", folder / "member-x-2.jsonl"
    for path in (old, fresh):
        path.touch()
    state = tmp_path / "state" / "chaos-lightning"
    long_over = (state / "default-7" / "events", state / "outer-default-8-events")
    for place in long_over:  # of jobs whose scheduler or server may be elsewhere
        place.mkdir(parents=True)
        (place / "member-x-1.jsonl").touch()
    chosen, begun = state / "default-7" / "x.jsonl", state / "default-9" / "events"
    chosen.touch()
    begun.mkdir(parents=True)
    for path in (old, chosen, *(place / "member-x-1.jsonl" for place in long_over), *long_over):
        os.utime(path, (time.time() - FORGOTTEN_S - 1,) * 2)
    for name in "ab":
        job.start(name, settings={"min_nodes": 2, "log_dir": "auto"}, epochs=1)
    for name in "ab":
        assert job.harness.wait_exit(name) == 0
        assert f"chaos: I log events in {folder} (" in job.harness.children[name].log.read_text()
    assert (old.exists(), fresh.exists()) == (False, True)
    assert [path.exists() for path in (*long_over, chosen, begun)] == [False, False, True, True]
    # Both may have started a scheduler at once, of which one gave way.
    assert {path.name.split("-")[0] for path in log_files(folder)} == {"member", "scheduler"}
    assert [r for r in read_events(folder) if r.name == "committed"]
    assert {f.point: f.verdict for f in audit(folder)}[3] == OK


def test_a_member_that_cannot_log_says_that_alone(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job.start("a", settings={"min_nodes": 1, "log_dir": str(tmp_path / "file" / "logs")}, epochs=1)
    assert job.harness.wait_exit("a") == 0
    said = job.harness.children["a"].log.read_text()
    assert said.count("this process leaves no evidence there") == 1
    assert "I log events" not in said


def test_top_shows_a_schedulers_job_with_what_members_here_log(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in "ab":
        job.start(name, settings={"min_nodes": 2, "log_dir": "auto"}, epochs=UNTIL_ENOUGH)

    def shown() -> str:
        return CliRunner().invoke(cli.app, ["top", "--once", "--endpoint", job.endpoint]).output

    job.harness.wait_until(lambda: "samples/s" in shown(), "a board with what members log")
    assert "phase running" in shown()
    (tmp_path / "enough").touch()
    for name in "ab":
        assert job.harness.wait_exit(name) == 0


def test_a_user_without_a_home_is_told_and_trains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user without a home directory, as in some containers, gets no log folder, and is told what to set."""
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert log_folder("auto", "j", 1) is None
    assert "nowhere: this user has no home directory: set XDG_STATE_HOME, or name a folder by log_dir" in caplog.text


def test_the_word_none_turns_it_off_and_a_folder_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    root = tmp_path / "chaos-lightning"
    assert EngineConfig(name="a").log_dir == "auto"
    assert log_folder("auto", "j", 1) == root / "j-1" / "events"
    assert [log_folder(text, "j", 1) for text in ("none", "", "logs")] == [None, None, Path("logs")]
    assert [absolute_log_dir(text) for text in ("auto", "none", "")] == ["auto", "none", ""]
    assert SchedulerOptions(listen="127.0.0.1:7").log_folder == root / "default-7" / "events"
    place = "127.0.0.1:8"
    outer = (ServerOptions(listen=place), FollowerOptions(server=place), ClusterOptions(server=place, name="c"))
    assert {one.log_folder for one in outer} == {root / "outer-default-8-events"}
