"""Tests that workers whose torchrun agent has ended end themselves, and that others do not."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos_lightning.machine import orphan
from chaos_lightning.machine.orphan import VARIABLE, agent_mark, watch_parent
from chaos_lightning.machine.process_table import host_identity, start_time, still_runs

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0

AGENT = """
import os, subprocess, sys
from chaos_lightning.machine.orphan import VARIABLE, agent_mark
os.environ[VARIABLE] = agent_mark()
command = [sys.executable, "-c", sys.argv[1]]
if sys.argv[2] == "wrapped":  # as with `torchrun --no-python wrapper.sh`
    command = ["/bin/sh", "-c", '"$0" "$@"; exit $?', *command]
worker = subprocess.Popen(command, start_new_session=True)
worker.wait()
"""

WORKER = """
import os, select, signal, sys
from chaos_lightning.machine import orphan
if {polling}:
    del os.pidfd_open
    os.pidfd_open = lambda pid: (_ for _ in ()).throw(OSError("no pidfd here"))
    orphan._POLL_S = 0.02
terms = []
if {stubborn}:
    signal.signal(signal.SIGTERM, lambda *a: print("term", flush=True))
else:
    signal.signal(signal.SIGTERM, lambda *a: (print("term", flush=True), os._exit(0)))
assert orphan.watch_parent(lambda reason: print(reason, flush=True), grace_s={grace}) is not None
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


@contextmanager
def agent_and_worker(how: str = "direct", **options: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Starts an agent with one worker; yields the agent, and a pidfd of the worker."""
    values = {"polling": False, "stubborn": False, "grace": PATIENCE_S, **options}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, WORKER.format(**values), how],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    ) as agent:
        assert agent.stdout is not None
        worker = int(agent.stdout.readline())
        handle = os.pidfd_open(worker)
        try:
            yield agent, handle
        finally:
            agent.kill()
            if not select.select([handle], [], [], 0)[0]:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


def ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], PATIENCE_S)[0])


@pytest.mark.parametrize(("how", "polling"), [("direct", False), ("wrapped", False), ("wrapped", True)])
def test_a_worker_ends_when_its_agent_was_killed(how: str, polling: bool) -> None:
    with agent_and_worker(how, polling=polling) as (agent, worker):
        assert not select.select([worker], [], [], 0)[0]
        agent.kill()
        assert ended(worker)
        assert agent.stdout is not None
        said = agent.stdout.read()
        assert said.count("term") == 1
        if how == "wrapped":  # no PR_SET_PDEATHSIG there: the watching thread told why before anything else
            assert f"the torchrun agent (pid {agent.pid}) is gone" in said


def test_a_worker_that_ignores_the_polite_signal_is_killed_after_the_grace() -> None:
    with agent_and_worker(stubborn=True, grace=0.2) as (agent, worker):
        agent.kill()
        assert ended(worker)
        assert agent.stdout is not None
        said = agent.stdout.read()
        assert said.count("term") == 1
        assert "SIGKILL after 0.2 s" in said


def test_an_agent_that_ended_before_the_watch_began_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    mark = f"{gone.pid}:{start_time(gone.pid)}:{host_identity()}"
    gone.wait(PATIENCE_S)
    sent: list[int] = []
    killed, really = threading.Event(), os.kill

    def kill(pid: int, number: int) -> None:
        if not number:
            really(pid, number)
            return
        assert pid == os.getpid()
        sent.append(number)
        if number == signal.SIGKILL:
            killed.set()

    monkeypatch.setattr(orphan.os, "kill", kill)
    reasons: list[str] = []
    thread = watch_parent(reasons.append, grace_s=0.0, environ={VARIABLE: mark})
    assert thread is not None
    assert killed.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    assert "is gone" in reasons[0]


def test_without_an_agent_nothing_is_watched() -> None:
    assert watch_parent(environ={}) is None


@pytest.mark.parametrize("mark", ["nonsense", "1:2:another machine", "x:1:" + host_identity(), "PID::"])
def test_an_agent_that_cannot_be_seen_from_here_is_not_missed(mark: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert watch_parent(environ={VARIABLE: mark.replace("PID", str(os.getpid()))}) is None
    assert "would outlive it" in caplog.text


def test_a_pid_that_was_given_out_again_is_another_process() -> None:
    assert still_runs(os.getpid(), start_time(os.getpid()))
    assert not still_runs(os.getpid(), start_time(os.getpid()) + 1)
    assert agent_mark().startswith(f"{os.getpid()}:{start_time(os.getpid())}:")


def test_a_zombie_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = start_time(child.pid)
    handle = os.pidfd_open(child.pid)
    assert ended(handle)
    os.close(handle)
    assert not still_runs(child.pid, started)
    child.wait(PATIENCE_S)
