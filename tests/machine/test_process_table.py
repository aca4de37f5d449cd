"""Tests what the process table shows of a process: a stopped one may continue, a dead one never does."""

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

from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.scheduler_server import real_machine
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine import watcher
from chaos_lightning.machine.process_table import (
    Sight,
    host_identity,
    process_state,
    rebooted,
    same_machine_verdict,
    start_time,
)
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.shell import Shell
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import (
    NO_VIEW,
    FromMember,
    Member,
    Probe,
    Settings,
    Verdict,
    View,
    ViewId,
    Welcome,
)
from chaos_lightning.service.memory_store import MemoryStore

sys.path.insert(0, str(Path(__file__).parent))
from served import attending, serving
from until_support import until


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Process that runs until its stdin is closed."""
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
    assert same_machine_verdict(suspect) == Sight(False, "its process is gone", certain=True)
    child.wait()
    assert same_machine_verdict(suspect) == Sight(False, "its process is gone", certain=True)


@pytest.mark.parametrize("changes", [{"host": "another machine"}, {"host": f"unknown-{os.uname().nodename}"}])
def test_nothing_is_said_about_other_machines(changes: dict[str, Any]) -> None:
    assert same_machine_verdict(member(os.getpid(), **changes)) == Sight(False, "")
    assert same_machine_verdict(member(0)) == Sight(False, "")
    assert same_machine_verdict(None) == Sight(False, "")


def test_process_that_proc_hides_is_not_called_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member whose process /proc hides (mount option hidepid) is reported as unknown, not as gone."""
    suspect = member(os.getpid())
    monkeypatch.setattr(watcher, "stat", lambda pid: None)
    assert same_machine_verdict(suspect) == Sight(False, "")


def test_newcomer_that_knows_no_view_can_be_asked() -> None:
    said: list[FromMember] = []
    nobody = cast(Any, SimpleNamespace(server=None, grid=()))
    links = SimpleNamespace(
        silence_s=lambda peer, now: float("inf"),
        up=lambda peer: False,
        sight=lambda peer: Sight(False, ""),
        chunk=None,
        generation=None,
    )
    shell = Shell(nobody, Mailbox("b"), EventLog(None), cast(Any, links), nobody, nobody, said.append, nobody)
    shell.control(Probe("a~1", member(os.getpid())))
    shell.control(Probe("a~1", member(os.getpid(), pid_start=start_time(os.getpid()) + 1)))
    shell.control(Probe("a~1", member(os.getpid(), host="another machine")))
    alive, gone, unknown = said
    assert isinstance(alive, Verdict)
    assert alive.alive
    assert alive.seen
    assert gone == Verdict("a~1", False, "its process is gone", certain=True, seen=True)
    assert unknown == Verdict("a~1", False, "no link", certain=False, seen=False)


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, ""), (PermissionError, ""), (ProcessLookupError, "gone")],
    ids=["ours", "theirs", "gone"],
)
def test_a_process_that_is_hidden_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None, state: str
) -> None:
    """For a process that /proc hides (hidepid), signal 0 decides whether it is gone or merely hidden."""

    def signal_it(pid: int, number: int) -> None:
        assert (pid, number) == (4711, 0)
        if error is not None:
            raise error

    monkeypatch.setattr(watcher, "stat", lambda pid: None)
    monkeypatch.setattr(watcher.os, "kill", signal_it)
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


OTHER_BOOT = "01234567-89ab-cdef-0123-456789abcdef/pid:[4026531836]"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": OTHER_BOOT}, "was started anew since"),
        ({"host": OTHER_BOOT, "address": "192.0.2.1"}, ""),
        ({"host": "somewhere"}, ""),
        ({"host": OTHER_BOOT, "pid": 0}, ""),
        ({}, ""),
    ],
    ids=["this machine's address", "another's", "unknown", "no process", "the same boot"],
)
def test_a_machine_that_was_started_anew_has_none_of_its_processes(changes: dict[str, Any], words: str) -> None:
    found = rebooted(member(**{"pid": os.getpid(), **changes}))
    assert words in found
    assert bool(found) == bool(words)


def test_nobody_waits_for_processes_of_before_the_machine_was_started_anew() -> None:
    """A job whose only member ran before a reboot is given up once living members would have reconnected, not later."""
    store = MemoryStore()
    chain = JobChain(store)
    chain.take_term()
    gone = member(os.getpid(), host=OTHER_BOOT)
    view = View(ViewId(1, 1), NO_VIEW, (gone,))
    chain.append(fx.Persist(1, "view", view.id, view))
    rules = Settings(reconnect_grace_s=0.3)
    with (
        serving(machine=real_machine, open_store=lambda: store, settings=rules) as served,
        attending(served.endpoint, "b") as client,
    ):
        client.messages.wait(lambda m: isinstance(m, Welcome) and m.role == "joiner")
        until(lambda: served.server.status()["machine"]["phase"] == "lost", "the end of the wait for the dead")


def test_nobody_waits_for_processes_that_are_gone_from_this_machine() -> None:
    """A job whose only member's process has ended on this machine is given up without waiting for any timeout."""
    store = MemoryStore()
    chain = JobChain(store)
    chain.take_term()
    gone = member(os.getpid(), pid_start=start_time(os.getpid()) + 1)
    view = View(ViewId(1, 1), NO_VIEW, (gone,))
    chain.append(fx.Persist(1, "view", view.id, view))
    with serving(machine=real_machine, open_store=lambda: store) as served, attending(served.endpoint, "b") as client:
        client.messages.wait_for(Welcome)
        until(lambda: served.server.status()["machine"]["phase"] == "lost", "the end of the wait for the dead")
