"""Tests that with --json a command prints one JSON object on stdout and nothing else, and errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos_lightning import cli
from chaos_lightning.events.events import EventLog
from chaos_lightning.observe import charts

sys.path.insert(0, str(Path(__file__).parent))
from served import attending, serving

Said = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """Function that runs a command, and returns its exit code, stdout and stderr."""

    def command(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["chaos-lightning", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def shown(said: Said, code: int = 0) -> dict[str, Any]:
    """Checks that stdout is one JSON object and nothing else; returns the object."""
    assert said[0] == code, said
    found = json.loads(said[1])
    assert isinstance(found, dict)
    return found


def test_version(run: Callable[..., Said]) -> None:
    assert {"chaos-lightning", "torch", "python", "system"} <= set(shown(run("version", "--json")))


def test_keys(run: Callable[..., Said], tmp_path: Path) -> None:
    place = ("--dir", str(tmp_path / "keys"), "--json")
    made = shown(run("keys", "init", "--node", "a=10.0.0.5", *place))["nodes"]
    assert {n["name"]: n["role"] for n in made} == {"a": "member", "operator": "operator"}
    assert all(Path(n["folder"]).is_dir() for n in made)
    more = shown(run("keys", "node", "b", *place))
    assert (more["role"], Path(more["folder"]).name) == ("member", "b")
    assert shown(run("keys", "rotate", *place))["rotating"] is True
    assert shown(run("keys", "show", *place))["rotating"] is True
    assert shown(run("keys", "rotate", "--finish", *place))["rotating"] is False
    code, out, error = run("keys", "init", *place)
    assert (code, out) == (2, "")
    assert error.startswith("error: keys init: name the nodes")


def test_commands_that_ask_a_scheduler(run: Callable[..., Said]) -> None:
    with serving() as served, attending(served.endpoint, "edge-0") as client:
        client.states.wait(lambda s: s == "connected")
        place = ("--endpoint", served.endpoint, "--json")
        assert shown(run("status", *place))["job"] == "default"
        assert shown(run("top", *place))["title"]
        assert shown(run("drain", "edge", *place)) == {"asked": ["edge-0"]}
    for words in (["status"], ["top"], ["drain", "x"], ["link", "add", "a", "b"]):
        code, out, error = run(*words, "--endpoint", "127.0.0.1:9", "--json")
        assert (code, out) == (1, "")
        assert error.startswith("error: no scheduler answered")


def test_what_was_done_is_told_in_words(run: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.control.resetting.reset_job", lambda *_, **__: "job [x]\x1b is over")
    monkeypatch.setattr("chaos_lightning.control.requests.change_link", lambda *_, **__: "a b: linked")
    assert shown(run("reset", "--json")) == {"done": "job [x]\x1b is over"}
    said = run("link", "add", "a", "b", "--json")
    assert shown(said) == {"done": "a b: linked"}
    assert "\x1b" not in run("reset", "--json")[1]


def test_what_logs_show(run: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "DRAWERS", {})
    monkeypatch.setattr(charts, "overview", lambda timeline: b"")
    with EventLog.in_directory(tmp_path, "a") as log:
        log.identify("a~1")
        log.emit("welcomed", id="a~1", role="founder", reason="founds")
        head = {"view": "1.1", "next_view": "1.1", "contributors": [["a~1", 1.0]], "spent": [], "ledger": []}
        for seq, (here, before) in enumerate([("1a", "00"), ("2b", "1a"), ("3c", "2b")], 1):
            log.emit("committed", seq=seq, kind="step", step=seq, header=here, prev=before, **head)
    logs = str(tmp_path)
    board = shown(run("top", "--logs", logs, "--json"))
    assert [row["name"] for row in board["rows"]] == ["a~1"]
    (job,) = shown(run("audit", logs, "--json"), code=1)["jobs"]
    assert [f["point"] for f in job["findings"]] == [1, 2, 3, 4, 5]
    assert job["findings"][1]["verdict"] == "violated"
    assert job["findings"][1]["promise"].startswith("stable steps")
    (page,) = shown(run("report", logs, "--json"))["reports"]
    assert Path(page["page"]).exists()
    code, out, error = run("audit", str(tmp_path / "nowhere"), "--json")
    assert (code, out) == (2, "")
    assert error.startswith("error: no event log at")


def test_logs_that_were_left_in_the_state_folder_are_found(
    run: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, out, error = run("audit")
    assert (code, out) == (2, "")
    assert "no job has logged events in" in error
    folder = tmp_path / "chaos-lightning" / "default-7" / "events"
    with EventLog.in_directory(folder, "a"):
        pass
    code, out, error = run("audit", "--json")
    assert code == 2
    assert [f["verdict"] for f in json.loads(out)["jobs"][0]["findings"]] == ["not shown"] * 5
    assert error.splitlines()[0] == f"logs in {folder}"
    assert "show nothing about the contract" in error


def test_a_user_without_a_home_is_told_what_to_name(run: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    with serving() as served, attending(served.endpoint, "edge-0") as client:
        client.states.wait(lambda s: s == "connected")
        for name in ("XDG_STATE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", nobody)
        assert shown(run("top", "--json", "--endpoint", served.endpoint))["lines"] == []
    for command in (["audit"], ["report"], ["scheduler", "--listen", "127.0.0.1:0"]):
        code, out, error = run(*command)
        assert (code, out) == (2, "")
        assert error == "error: this user has no home directory: set XDG_STATE_HOME, or name a folder\n"
