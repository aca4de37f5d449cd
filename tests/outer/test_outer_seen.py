"""`status`, `top` and `metrics` without an endpoint find the outer job whose parameter server runs on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from outer_served import outer_serving
from typer.testing import CliRunner

from chaos_lightning import cli
from chaos_lightning.errors import SchedulerUnreachableError
from chaos_lightning.events.events import EventLog
from chaos_lightning.observe import commands, exporter, status
from chaos_lightning.service.options import log_folder
from chaos_lightning.settings import DEFAULT_ENDPOINT


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes the scheduler at the default port unreachable, as another test may run one there."""

    def silent(*args: object, **kwargs: object) -> None:
        raise SchedulerUnreachableError("nobody answers")

    monkeypatch.setattr("chaos_lightning.control.requests.fetch_status", silent)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_status_shows_the_outer_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with outer_serving() as server:
        monkeypatch.setenv("CHAOS_PS", server.endpoint)
        shown = run("status")
        assert shown.exit_code == 0, shown.output
        assert f"at {server.endpoint}: " in shown.output
        assert "no cluster is here yet" in shown.output
        assert json.loads(run("status", "--json").output)["clusters"] == []
    gone = run("status")
    assert gone.exit_code == 1
    assert str(gone.exception) == "nobody answers"


def test_who_names_an_endpoint_is_told_of_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with outer_serving() as server:
        monkeypatch.setenv("CHAOS_PS", server.endpoint)
        assert run("status", "--endpoint", "127.0.0.1:9").exit_code == 1


def test_top_and_metrics_follow_what_the_outer_job_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    with outer_serving() as server:
        monkeypatch.setenv("CHAOS_PS", server.endpoint)
        folder = log_folder("auto", "outer-default", server.server.port, beside=True)
        with EventLog.in_directory(folder, "leader", role="leader") as log:
            log.emit("outer_leader_started", endpoint=server.endpoint, job="default", term=1, position=0, store="x")
            log.emit("cluster_welcomed", incarnation="paris~1", term=1, founded=False, member="paris")
        board = commands.ask(DEFAULT_ENDPOINT, must_answer=True)()
        assert f"led from {server.endpoint}" in board.reason
        assert exporter.ask_scheduler(DEFAULT_ENDPOINT)().job == "default"
    assert status.outer_job(DEFAULT_ENDPOINT, b"", 1.0) is None
