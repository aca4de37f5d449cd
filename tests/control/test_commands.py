"""Tests the commands of `chaos-lightning` that talk to the scheduler."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chaos_lightning import cli
from chaos_lightning.control import scheduler_main
from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.errors import RefusedError
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.types import NO_VIEW, Decide, Entered, Heartbeat, Hello, Ready, Settings, Welcome
from chaos_lightning.security.credentials import Credentials, KeyFolder
from chaos_lightning.security.keyfiles import NODES
from chaos_lightning.service.options import MEMORY

sys.path.insert(0, str(Path(__file__).parent))
from served import Served, attending, serving

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a token for the tests"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


def plain(text: str) -> str:
    """Returns a help text without frames and line breaks."""
    return " ".join("".join(c if c not in "│╭╮╰╯─" else " " for c in text).split())


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; sys.argv = ['chaos-lightning', '--help']\n"
        "from chaos_lightning.cli import main\n"
        "try: main()\n"
        "finally: print(*[m for m in ('torch', 'lightning', 'grpc', 'matplotlib', 'chaos_lightning.control.commands')"
        " if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stderr.split() == []
    for name, command in cli.COMMANDS.items():
        assert name in done.stdout
        assert command.help in plain(done.stdout)
    assert "torchrun --rdzv-backend=chaos" in done.stdout


def test_commands_show_the_keys_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    assert run("keys", "init", "--dir", str(keys), "--node", "a").exit_code == 0
    operator = str(keys / NODES / "operator")
    with serving(token=Credentials(keys=KeyFolder(keys / NODES / "a"))) as served, attending_as(served, keys):
        place = ("--endpoint", served.endpoint)
        for words in (["status"], ["top", "--once"], ["drain", "x"], ["link", "add", "x", "y"]):
            bare = run(*words, *place)
            assert bare.exit_code == 1
            assert "demands a certificate" in str(bare.exception)
        assert run("status", *place, "--keys-dir", operator).exit_code == 0
        assert run("top", "--once", *place, "--keys-dir", operator).exit_code == 0
        assert "asked to leave: a" in run("drain", "a", *place, "--keys-dir", operator).output
        monkeypatch.setenv("CHAOS_KEYS_DIR", operator)
        assert run("status", *place).exit_code == 0
        both = run("status", *place, "--keys-dir", operator, "--token-file", "token")
        assert "give one of them" in str(both.exception)


def attending_as(served: Served, keys: Path) -> Any:
    """Returns a context manager within which a member with node A's keys is connected to the scheduler and welcomed."""
    client = attending(served.endpoint, token=Credentials(keys=KeyFolder(keys / NODES / "a")))

    @contextlib.contextmanager
    def welcomed() -> Iterator[None]:
        with client as attended:
            attended.messages.wait_for(Welcome)
            yield

    return welcomed()


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_exists_and_explains_itself(name: str) -> None:
    command = cli.load(name)
    assert command.help
    result = run(name, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_a_mistyped_command_is_refused() -> None:
    result = run("statsu")
    assert result.exit_code == 2
    assert "No such command" in result.output


def test_version_names_what_a_bug_report_needs() -> None:
    result = run("version")
    assert result.exit_code == 0
    for word in ("chaos-lightning", "torch", "grpcio", "protobuf", "python"):
        assert word in result.output


def test_status_shows_members(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)

    class Machine:
        def __init__(self, settings: Settings, chain: fx.Chain) -> None: ...

        def on(self, now: float, *events: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
            return []

        def snapshot(self, page: int = 0) -> dict[str, Any]:
            rows = [{"id": "a~1", "standing": "member", "connected": False, "silent_s": 0.25, "dead": "[bold]x"}]
            return {"phase": "running", "view": "1.7", "reason": "a~1 [joined]", "members": rows, "others": []}

    with serving(machine=Machine, token=TOKEN.encode()) as served:
        result = run("status", "--endpoint", served.endpoint, "--token-file", str(token))
        assert result.exit_code == 0, result.output
        for word in ("running", "view 1.7", "a~1 [joined]", "connected", "no", "0.25", "[bold]x", "silent"):
            assert word in result.output
        result = run("status", "--endpoint", served.endpoint, "--token-file", str(token), "--json")
        assert json.loads(result.output)["machine"]["view"] == "1.7"


class Trains:
    """Real state machine with three members on one machine that train."""

    HOST = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0/pid:[4026531836]"

    def __init__(self, settings: Settings, _: fx.Chain) -> None:
        self._real = SchedulerMachine(replace(settings, min_nodes=3), fx.Chain(1, NO_VIEW, id="c"))
        decided: dict[int, Decide] = {}
        for number in range(3):
            hello = Hello("default", f"node-8-{number}", self.HOST, "127.0.0.1", 1, number + 1, 1, 1, 1, "0", ())
            for event in (fx.Opened(number), fx.MessageIn(number, hello), fx.MessageIn(number, Ready())):
                self._feed(event, decided)
        for number, said in list(decided.items()):
            self._feed(fx.MessageIn(number, Entered(said.view.id, said.base.seq, 0, said.base.hash)), decided)
            self._feed(fx.MessageIn(number, Heartbeat(said.view.id, 1234, 1230, 0.0125)), decided)

    def _feed(self, event: fx.SchedulerEvent, decided: dict[int, Decide]) -> None:
        for effect in self._real.on(0.0, event):
            match effect:
                case fx.Persist(token):
                    self._feed(fx.Stored(token, True), decided)
                case fx.Send(conn, Decide() as said):
                    decided[conn] = said

    def on(self, now: float, *events: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
        return []

    def snapshot(self, page: int = 0) -> dict[str, Any]:
        return self._real.snapshot(page)


def test_status_has_a_line_per_member_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with serving(machine=Trains) as served:
        result = run("status", "--endpoint", served.endpoint)
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        head = next(i for i, line in enumerate(lines) if line.startswith("id "))
        assert lines[head].split() == ["id", "host", "standing", "view", "seq", "step", "step_time", "silent"]
        rows = [line.split()[:3] for line in lines[head + 1 : head + 4]]
        assert rows == [[f"node-8-{i}~{i + 1}", "0f1e2d3c/1836", "member"] for i in range(3)], result.output
        told = run("status", "--endpoint", served.endpoint, "--json").output
        assert Trains.HOST in told
        assert json.loads(told)["machine"]["members"][0]["step_time_s"] == 0.0125


class Large:
    """Machine that reports a job of 40 members, of which one is not connected."""

    def __init__(self, settings: Settings, chain: fx.Chain) -> None: ...

    def on(self, now: float, event: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
        return []

    def snapshot(self, page: int = 0) -> dict[str, Any]:
        rows = [{"id": f"n{i:02}~{i}", "standing": "member", "connected": i != 7} for i in range(40)]
        counts = {"members": 40, "living": 40, "connected": 39, "here": 39, "leaving": 0, "others": {"standby": 2}}
        counts["links"] = {"in use": 160, "down": 1}
        shown = [rows[7]] if page == 0 else rows[32 * (page - 1) : 32 * page]
        return {"phase": "running", "members": shown, "others": [], "links": [], "counts": counts, "pages": 2}


def test_status_of_a_large_job_counts_and_lists_what_is_odd() -> None:
    with serving(machine=Large) as served:
        said = run("status", "--endpoint", served.endpoint).output
        assert "40 members, 1 of them not connected; 2 standby; links: 160 in use, 1 down." in " ".join(said.split())
        assert [line.split()[0] for line in said.splitlines() if line.startswith("n")] == ["n07~7"]
        said = run("status", "--endpoint", served.endpoint, "--all").output
        assert [line.split()[0] for line in said.splitlines() if line.startswith("n")] == [
            f"n{i:02}~{i}" for i in range(40)
        ]
        told = json.loads(run("status", "--endpoint", served.endpoint, "--all", "--json").output)
        assert (len(told["machine"]["members"]), told["machine"]["pages"]) == (40, 0)


def test_a_terminal_that_wants_no_colours_gets_none() -> None:
    """With NO_COLOR a command prints no colours (bold is none), and on a dumb terminal no escape sequences at all."""
    terminal = {"FORCE_COLOR": "1", "NO_COLOR": ""}
    colour = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3|4|9|10)[0-8][\d;]*m")
    with serving(machine=Trains) as served:

        def said(*command: str, **environment: str) -> str:
            words = [*command, "--endpoint", served.endpoint]
            done = CliRunner(env=terminal | environment).invoke(cli.app, words)
            assert done.exit_code == 0, done.output
            return str(done.stdout)

        assert colour.search(said("top", "--once", TERM="xterm"))
        for command in (("top", "--once"), ("status",)):
            assert "\x1b[" in said(*command, TERM="xterm")
            assert not colour.search(said(*command, TERM="xterm", NO_COLOR="1"))
            assert "\x1b" not in said(*command, TERM="dumb")


def test_status_of_an_empty_job() -> None:
    with serving() as served:
        result = run("status", "--endpoint", served.endpoint)
        assert result.exit_code == 0
        assert "nobody is here yet" in result.output


def test_what_a_scheduler_says_does_not_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a[/bold][red]\x1b[2J\x9b31m\u202e"
    facts = {"job": evil, "endpoint": "h:1", "term": evil, "min_nodes": 1, "max_nodes": 2, "owed": evil}
    machine = {"phase": evil, "view": evil, "reason": evil, "chain": evil, "members": [{"id": evil, "host": evil}]}
    monkeypatch.setattr("chaos_lightning.control.requests.fetch_status", lambda *_, **__: facts | {"machine": machine})
    monkeypatch.setattr("chaos_lightning.control.requests.change_link", lambda *_, **__: evil)
    monkeypatch.setattr("chaos_lightning.control.resetting.reset_job", lambda *_, **__: evil)

    def refuse(*_: object, **__: object) -> None:
        raise RefusedError(evil)

    monkeypatch.setattr("chaos_lightning.control.requests.drain", refuse)
    for words in (["status"], ["link", "add", "a", "b"], ["reset"], ["drain", "a"]):
        monkeypatch.setattr(sys, "argv", ["chaos-lightning", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert ended.value.code == (words[0] == "drain"), said
        assert "[/bold]" in said.out + said.err
        assert not set(said.out + said.err) & set("\x1b\x9b\u202e")


def test_drain_tells_whom_it_asked() -> None:
    with serving() as served, attending(served.endpoint, "edge-0") as client:
        client.states.wait(lambda s: s == "connected")
        result = run("drain", "edge", "--endpoint", served.endpoint)
        assert result.output == "asked to leave: edge-0\n"


def test_the_endpoint_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as served:
        monkeypatch.setenv("CHAOS_ENDPOINT", served.endpoint)
        assert run("status").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["status", "--endpoint", "127.0.0.1:9", "--timeout", "1"], 1, "no scheduler answered at 127.0.0.1:9"),
        (["drain", "x", "--endpoint", "127.0.0.1:9"], 1, "no scheduler answered"),
        (["status", "--token-file", "/nonexistent"], 2, "cannot be read"),
        (["scheduler", "--set", "colour=red"], 2, "unknown settings colour"),
        (["scheduler", "--set", "nonsense"], 2, "expected NAME=VALUE"),
        (["scheduler", "--min-nodes", "0"], 2, "min_nodes=0"),
        (["scheduler", "--min-nodes", "two"], 2, "--min-nodes='two': expected a whole number"),
        (["scheduler", "--job", "a b"], 2, "job='a b': expected 1 to 64 letters"),
        (["scheduler", "--job", "a\n"], 2, "expected 1 to 64 letters"),
        (["scheduler", "--listen", "0.0.0.0:1"], 2, "cluster token"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos-lightning", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert "Traceback" not in error


def test_scheduler_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[SchedulerOptions] = []
    monkeypatch.setattr(scheduler_main, "run", lambda options: seen.append(options) or 1)
    result = run(
        *(
            "scheduler",
            "--listen",
            "127.0.0.1:7",
            "--job",
            "j",
            "--min-nodes",
            "2",
            "--plan",
            "tree",
            "--store",
            MEMORY,
        ),
        *(
            "--idle-timeout",
            "5",
            "--log-dir",
            str(tmp_path),
            "--set",
            "hang_timeout_s=7",
            "--set",
            "linger_timeout_s=1",
        ),
    )
    assert result.exit_code == 1
    (options,) = seen
    assert (options.listen, options.store, options.idle_timeout_s) == ("127.0.0.1:7", MEMORY, 5.0)
    settings = options.settings
    assert (settings.job, settings.min_nodes, settings.max_nodes, settings.plan.kind) == ("j", 2, 256, "tree")
    assert (settings.hang_timeout_s, settings.linger_timeout_s) == (7.0, 1.0)
