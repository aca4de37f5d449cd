"""`chaos-lightning ps`: a whole server started as a user does, its supervisor, and the commands' output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from outer_served import AGREEMENT, ScriptedCluster, ScriptedFollower, at_once, outer_serving
from recut_support import Stopped
from until_support import until

from chaos_lightning.errors import ChaosError, ConfigurationError, SchedulerUnreachableError, StoreError
from chaos_lightning.events.events import read_events
from chaos_lightning.machine.listener import free_port
from chaos_lightning.machine.process_table import process_state
from chaos_lightning.machine.signals import END
from chaos_lightning.outer.cluster import server_start
from chaos_lightning.outer.cluster.server_start import ensure_server
from chaos_lightning.outer.commands import ps
from chaos_lightning.outer.commands.server_main import gives_way
from chaos_lightning.outer.commands.supervisor import LEADER, SPARE
from chaos_lightning.outer.exchange.control_client import fetch_facts
from chaos_lightning.outer.exchange.server_options import ServerOptions
from chaos_lightning.outer.exchange.vocabulary import body_bytes
from chaos_lightning.outer.rules.types import JobOpened
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.service.hosting import HostedProcess
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.testing.processes import Child, start_command

STARTS_S = 60.0
"""The spare imports torch, beside other tests."""


class Up:
    """A running `chaos-lightning ps up`, started as a user does."""

    def __init__(self, folder: Path, *more: str, port: int = 0) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "chaos_lightning.cli", "ps", "up", f"--listen={self.endpoint}"]
        command += [f"--dir={folder / 'job'}", f"--log-dir={folder / 'events'}", *more]
        self.child: Child = start_command("up", command, folder / "up.log", env=os.environ)

    def pids(self) -> dict[str, int]:
        """Returns the process ids of the server's running children, by name."""
        return pids(self.folder / "events")

    def connected(self, count: int) -> bool:
        try:
            return sum(1 for f in fetch_facts(self.endpoint, b"", 2.0)["followers"] if f["connected"]) == count
        except ChaosError:
            return False

    def replaced(self, name: str, number: int, count: int) -> None:
        """Sends a signal to this child, and waits until another process has replaced it and all followers are
        connected.
        """
        old = self.pids()[name]
        os.kill(old, number)
        until(lambda: self.pids().get(name, old) != old, f"another {name} after signal {number}", STARTS_S)
        until(lambda: self.connected(count), f"{count} followers after signal {number} for {name}", STARTS_S)


def pids(logs: Path) -> dict[str, int]:
    found = {}
    for event in read_events(logs) if logs.exists() else ():
        if event.name == "server_child":
            found[event["child"]] = event["pid"]
    return {name: pid for name, pid in found.items() if pid}


def all_gone(numbers: Sequence[int]) -> bool:
    return all(process_state(pid, 0) == "gone" for pid in numbers)


@contextmanager
def up(folder: Path, *more: str, port: int = 0) -> Iterator[Up]:
    running = Up(folder, *more, port=port)
    try:
        yield running
    except BaseException:
        print(running.child.tail())
        raise
    finally:
        running.child.end_group()
        until(lambda: not running.child.running, "the end of the supervisor")
        running.child.release()


@pytest.mark.slow
def test_a_server_is_started_with_another_number_of_followers(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    stopped = Stopped(folder, 2, lambda: SqliteStore(folder / "chain.sqlite", "job"))
    newest = stopped.chain.durable[-1][0]
    with up(tmp_path, "--job=job", f"--store={folder / 'chain.sqlite'}", "--followers=3") as server:
        until(lambda: server.connected(3), "three followers", STARTS_S)
        assert "were cut anew for follower-0, follower-1, follower-2" in server.child.tail()

        def stand() -> list[tuple[int, str]]:
            return [(f["shard"], f["version"]) for f in fetch_facts(server.endpoint, b"")["followers"]]

        until(lambda: stand() == [(shard, str(newest)) for shard in range(3)], "the durable version")
    stopped.check()
    (entry,) = [event for event in read_events(tmp_path / "events") if event.name == "entry" and event["kind"] == "Cut"]
    assert entry["body"]["followers"] == ["follower-0", "follower-1", "follower-2"]


def ignores(pid: int, number: int) -> bool:
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.slow
def test_what_dies_is_started_again_and_sigterm_ends_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with up(tmp_path, "--followers=2") as server:
        until(lambda: server.connected(2), "two followers", STARTS_S)
        with up(tmp_path, port=free_port()) as other:
            until(lambda: not other.child.running, "its end")
            assert other.child.poll() == 2
            assert "another server uses" in other.child.tail()
        until(lambda: set(server.pids()) == {LEADER, SPARE, "follower-0", "follower-1"}, "all children")
        server.replaced("follower-0", signal.SIGKILL, 2)
        server.replaced(SPARE, signal.SIGKILL, 2)
        server.replaced("follower-1", signal.SIGKILL, 2)  # made by a spare that was not warm yet
        server.replaced(LEADER, signal.SIGKILL, 2)
        server.replaced("follower-0", signal.SIGSTOP, 2)
        server.replaced("follower-1", END, 2)
        server.replaced(LEADER, END, 2)
        assert ps.status([f"--server={server.endpoint}"]) == 0
        shown = capsys.readouterr().out
        assert "opening: waits for a cluster to begin the job" in shown
        assert "follower-1" in shown
        left = [*server.pids().values()]
        assert len(left) == 4
        assert all(ignores(pid, signal.SIGTERM) for pid in left), "it is the supervisor that ends them"
        server.child.send(signal.SIGTERM)
        until(lambda: not server.child.running, "the end")
        assert server.child.poll() == 128 + signal.SIGTERM
        assert all_gone(left)
    ended = [e for e in read_events(tmp_path / "events") if e.name == "server_child" and not e["up"]]
    assert {e["reason"] for e in ended} >= {"signal SIGKILL", f"exit code {128 + END}"}


@pytest.mark.slow
def test_a_job_that_has_ended_is_put_away_by_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with up(tmp_path) as server:
        until(lambda: server.connected(1), "a follower", STARTS_S)
        assert ps.end([f"--server={server.endpoint}", "--reason=nobody needs it"]) == 0
        assert "has ended with no version: nobody needs it" in capsys.readouterr().out
        until(lambda: not server.child.running, "the end")
        assert server.child.poll() == 0
    options = ServerOptions(listen=server.endpoint, dir=str(tmp_path / "job"), log_dir=str(tmp_path / "more"))
    kept = ensure_server(options, again=True)
    assert kept is not None
    assert fetch_facts(server.endpoint, b"")["phase"] == "ended"
    assert kept.stop()
    fresh = ensure_server(options)
    assert fresh is not None
    assert fetch_facts(server.endpoint, b"")["phase"] == "opening"
    assert fresh.stop()
    assert len(list(tmp_path.glob("job-ended-*/chain.sqlite"))) == 1


# ------------------------------------------------------------------------------------------------ hosting


def test_two_that_start_one_find_the_same_and_a_killed_one_is_started_on_its_files(tmp_path: Path) -> None:
    logs = tmp_path / "events"
    options = ServerOptions(listen=f"127.0.0.1:{free_port()}", dir=str(tmp_path / "job"), log_dir=str(logs))
    found: list[Any] = []
    starters = [threading.Thread(target=lambda: found.append(ensure_server(options))) for _ in range(2)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    (server,) = [f for f in found if f is not None]
    try:
        until(lambda: LEADER in pids(logs), "its leader")
        left = pids(logs)
        assert ensure_server(options) is None
        with pytest.raises(ConfigurationError, match="not of 'another'"):
            ensure_server(ServerOptions(listen=options.listen, job="another"))
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: all_gone([server.pid, *left.values()]), "the end of its children")
        server = ensure_server(options, again=True)
        assert server is not None
        assert fetch_facts(options.listen, b"")["term"] == 2
    finally:
        assert server is not None
        assert server.stop()


def test_a_job_is_not_begun_anew_for_who_had_one(tmp_path: Path) -> None:
    options = ServerOptions(listen=f"127.0.0.1:{free_port()}", dir=str(tmp_path / "job"))
    with pytest.raises(StoreError, match="its chain is not at"):
        ensure_server(options, again=True)
    assert ensure_server(ServerOptions(listen="192.0.2.1:29470")) is None


def test_another_jobs_server_is_not_started_for_who_had_one(tmp_path: Path) -> None:
    """Former bug: a cluster whose server was gone started one on another job's files at the default place, and then
    could not train on.
    """
    options = ServerOptions(listen=f"127.0.0.1:{free_port()}", dir=str(tmp_path / "job"))
    assert options.store_path is not None
    with SqliteStore(options.store_path, options.job) as store:
        begun = store.take_term()
        store.append(JobOpened.__name__, body_bytes(JobOpened(AGREEMENT, "another at a test", "n")), begun)
        job_id = load_chain(store).job_id
    with pytest.raises(StoreError, match=rf"but another's \({job_id[:8]} and not 01234567\). Start one there on"):
        ensure_server(options, again=True, job_id="0123456789abcdef")
    server_start._check_chain(options, job_id)


def test_a_server_that_cannot_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("no folder")
    options = ServerOptions(listen=f"127.0.0.1:{free_port()}", dir=str(tmp_path / "job"))
    with pytest.raises(SchedulerUnreachableError, match="ended at once; its log"):
        ensure_server(options)


def test_who_lost_the_race_for_a_server_waits_for_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Former bug: a server that loses a start race shares its log with the winner, and the cluster that started it
    ended with an error or told the user to end the winner.
    """
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as ended:
        ended.wait()
    log = tmp_path / "job.log"
    log.write_text(f"error: another server uses it, so {gives_way(ended.pid)}\n" + "the winner is up\n" * 5)
    options = ServerOptions(listen=f"127.0.0.1:{free_port()}", dir=str(tmp_path / "job"))
    seen = iter(["free", *["silent"] * 3, "free", "serves"])
    monkeypatch.setattr(server_start, "look", lambda *given: next(seen))
    monkeypatch.setattr("chaos_lightning.service.hosting.RACE_S", 0.0)
    monkeypatch.setattr("chaos_lightning.service.hosting.TELL_S", 0.0)
    monkeypatch.setattr(
        server_start, "_spawn", lambda *given, **named: HostedProcess(options.listen, ended.pid, 0, log, None)
    )
    assert ensure_server(options) is None
    assert "another process of this machine starts it" in caplog.text
    assert "another server uses" not in caplog.text


# ------------------------------------------------------------------------------------------------ the supervisor


SUPERVISE = """
import json, sys
from chaos_lightning.outer.commands.supervisor import Supervisor
emit = lambda name, **fields: print(name, json.dumps(fields), flush=True)
sys.exit(Supervisor(["-I", "-S", "-c", sys.argv[1]], {}, emit).run())
"""


@contextmanager
def supervising(leader: str, folder: Path) -> Iterator[Child]:
    """Yields a running supervisor that runs this Python program as its leader."""
    child = start_command("supervisor", [sys.executable, "-c", SUPERVISE, leader], folder / "log", env=os.environ)
    try:
        yield child
    finally:
        child.end_group()
        until(lambda: not child.running, "its end")
        child.release()


@pytest.mark.parametrize("code", [0, 2, 3])
def test_a_leader_says_when_it_needs_no_more_starts(code: int, tmp_path: Path) -> None:
    with supervising(f"import sys; sys.exit({code})", tmp_path) as child:
        until(lambda: not child.running, "its end", STARTS_S)
        assert child.poll() == code
        assert sum('"leader"' in line and "true" in line for line in child.tail().splitlines()) == 1


def test_a_leader_that_fails_is_started_again_and_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    leader = f"import sys; file = open({str(count)!r}, 'a'); file.write('x'); sys.exit(1 if file.tell() < 4 else 0)"
    with supervising(leader, tmp_path) as child:
        until(lambda: not child.running, "its end", STARTS_S)
        assert child.poll() == 0
        assert count.read_text() == "xxxx"
        assert child.tail().count("leader ended with exit code 1; it is started again") == 3


# ------------------------------------------------------------------------------------------------ the command


def test_status_shows_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    with outer_serving() as served:
        follower, cluster = ScriptedFollower(served.endpoint), ScriptedCluster(served.endpoint)
        with at_once(follower, cluster):
            founded = cluster.served(1)
            until(lambda: fetch_facts(served.endpoint, b"")["versions"]["durable"], "a durable mark")
            assert ps.status([f"--server={served.endpoint}"]) == 0
            shown = capsys.readouterr().out
            assert ps.status([f"--server={served.endpoint}", "--json"]) == 0
            facts = json.loads(capsys.readouterr().out)
    assert f"job default at {served.endpoint}: training (term 1)" in shown
    assert f"newest {founded} (0 samples, 0 steps)" in shown
    assert "policy robust: 0 rounds, 1 pushes accepted, 0 rejected, 0 void, 0 rollbacks" in shown
    assert "home" in shown
    assert facts["followers"][0]["name"] == "one"


def test_the_command_knows_its_sub_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        ps.ps(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ps.SUBCOMMANDS)
    with pytest.raises(SystemExit, match="2"):
        ps.ps([])
    with pytest.raises(ConfigurationError, match="ps fly: expected one of up, leader"):
        ps.ps(["fly"])
    with pytest.raises(SchedulerUnreachableError, match="no parameter server answered"):
        ps.ps(["status", "--server=127.0.0.1:9"])
    for name in ("up", "leader", "follower", "status", "end"):
        with pytest.raises(SystemExit, match="0"):
            ps.ps([name, "--help"])
