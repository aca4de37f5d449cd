"""What the process table says, and who looks into it: a stopped process may wake up, a dead one never does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.types import NO_VIEW, FromMember, Member, Probe, Verdict, View, ViewId, Welcome
from chaos_lightning.observe.events import EventLog
from chaos_lightning.runtime import process_table
from chaos_lightning.runtime.mailbox import Mailbox
from chaos_lightning.runtime.memory_store import MemoryStore
from chaos_lightning.runtime.process_table import (
    Sight,
    host_identity,
    process_state,
    same_machine_verdict,
    start_time,
)
from chaos_lightning.runtime.server import real_machine
from chaos_lightning.runtime.shell import Shell

sys.path.insert(0, str(Path(__file__).parent))
from served import attending, serving


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its input to end."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def member(pid: int, **changes: Any) -> Member:
    values: dict[str, Any] = {"id": "a~1", "name": "a", "host": host_identity(), "address": "127.0.0.1", "port": 1}
    return Member(**{**values, "pid": pid, "pid_start": start_time(pid), **changes})


def test_only_death_is_certain(child: subprocess.Popen[bytes]) -> None:
    suspect = member(child.pid)
    assert same_machine_verdict(suspect).alive
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert same_machine_verdict(suspect) == Sight(False, "its process is stopped", certain=False)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert same_machine_verdict(suspect) == Sight(False, "its process has died", certain=True)
    child.wait()
    assert same_machine_verdict(suspect) == Sight(False, "its process is gone", certain=True)


@pytest.mark.parametrize("changes", [{"host": "another machine"}, {"host": f"unknown-{os.uname().nodename}"}])
def test_nothing_is_said_about_other_machines(changes: dict[str, Any]) -> None:
    assert same_machine_verdict(member(os.getpid(), **changes)) == Sight(False, "")
    assert same_machine_verdict(member(0)) == Sight(False, "")
    assert same_machine_verdict(None) == Sight(False, "")


def test_process_that_proc_hides_is_not_called_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid, /proc shows no processes of other users."""
    suspect = member(os.getpid())
    monkeypatch.setattr("chaos_lightning.runtime.process_table._stat", lambda pid: None)
    assert same_machine_verdict(suspect) == Sight(False, "")


def test_newcomer_that_knows_no_view_can_be_asked() -> None:
    said: list[FromMember] = []
    nobody = cast(Any, SimpleNamespace(server=None))
    shell = Shell(nobody, Mailbox("b"), EventLog(None), nobody, said.append)
    shell.links = cast(Any, SimpleNamespace(silence_s=lambda peer, now: float("inf"), up=lambda peer: False))
    shell.control(Probe("a~1", member(os.getpid())))
    shell.control(Probe("a~1", member(os.getpid(), pid_start=start_time(os.getpid()) + 1)))
    shell.control(Probe("a~1", member(os.getpid(), host="another machine")))
    alive, gone, unknown = said
    assert isinstance(alive, Verdict)
    assert alive.alive
    assert gone == Verdict("a~1", False, "its process is gone", certain=True)
    assert unknown == Verdict("a~1", False, "no link", certain=False)


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, ""), (PermissionError, ""), (ProcessLookupError, "gone")],
    ids=["ours", "theirs", "gone"],
)
def test_a_process_that_is_hidden_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None, state: str
) -> None:
    """As where /proc is mounted with hidepid; signals tell the two apart."""

    def signal_it(pid: int, number: int) -> None:
        assert (pid, number) == (4711, 0)
        if error is not None:
            raise error

    monkeypatch.setattr(process_table, "_stat", lambda pid: None)
    monkeypatch.setattr(process_table.os, "kill", signal_it)
    assert process_state(4711, 5) == state


@pytest.mark.parametrize("where", ["gone", "here", "elsewhere"])
def test_only_processes_that_are_gone_from_this_machine_are_called_gone(where: str) -> None:
    pid_start = start_time(os.getpid()) + (where != "here")
    host = host_identity() if where != "elsewhere" else "another machine"
    suspect = member(os.getpid(), host=host, pid_start=pid_start)

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        return [fx.Look(suspect)] if event == fx.Drain("look") else None

    with serving(rule) as served:
        served.feed(fx.Drain("look"))
        served.feed(fx.Drain("and then"))
        served.events.wait(lambda e: e == fx.Drain("and then"))
        expected = [fx.Gone("a~1", "its process is gone")] if where == "gone" else []
        assert [e for e in served.events.seen if isinstance(e, fx.Gone)] == expected


def test_nobody_waits_for_processes_that_are_gone_from_this_machine() -> None:
    """The last view's only member died with its scheduler: the next one begins again at once, whatever the timeouts."""
    store = MemoryStore()
    store.take_term()
    gone = member(os.getpid(), pid_start=start_time(os.getpid()) + 1)
    view = View(ViewId(1, 1), NO_VIEW, (gone,))
    store.append(fx.Persist(1, "view", view.id, view))
    with serving(machine=real_machine, open_store=lambda: store) as served, attending(served.endpoint, "b") as client:
        assert client.messages.wait_for(Welcome).role == "founder"
