"""Tests watchers, which report to each other whether their machines' members are alive, and believe no one else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from links_support import Node, connect
from until_support import until

from chaos_lightning.machine import watcher
from chaos_lightning.machine.process_table import start_time
from chaos_lightning.transport import links
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.watching import Watching

KEY = bytes(range(watcher.KEY_NBYTES))
DEADLINE_S = 20.0
"""Only there to end a hung test."""


class Beside:
    """Watcher process beside this process, with the member's end of the channel to it."""

    def __init__(self, pid: int) -> None:
        self.control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(DEADLINE_S)
        command = [sys.executable, "-I", "-S", watcher.__file__, str(its.fileno()), str(pid), str(start_time(pid))]
        self.process = subprocess.Popen(command, pass_fds=[its.fileno()])
        its.close()

    def add(self, peer: str, sock: socket.socket, *, dialled: bool, key: bytes = KEY) -> None:
        with sock:
            order = b"A" + (b"d" if dialled else b"a") + key + peer.encode()
            socket.send_fds(self.control, [order], [sock.fileno()])

    def asks(self, peer: str) -> tuple[str, str]:
        """Asks the watcher about a neighbour; returns the state reported, and of whom."""
        self.control.send(b"Q" + peer.encode())
        told = self.control.recv(4096)
        return watcher.STATES[told[:1]], told[1:].decode()

    def until(self, peer: str, state: str) -> None:
        while self.asks(peer) != (state, peer):
            pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.control.send(b"E")
        self.control.close()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def mine() -> Iterator[Beside]:
    beside = Beside(os.getpid())
    yield beside
    beside.close()


@pytest.fixture
def its(child: subprocess.Popen[bytes]) -> Iterator[Beside]:
    beside = Beside(child.pid)
    yield beside
    beside.close()


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    accepted.settimeout(DEADLINE_S)
    return dialled, accepted


def test_it_tells_whether_the_process_runs_is_stopped_or_gone(
    mine: Beside, its: Beside, child: subprocess.Popen[bytes]
) -> None:
    dialled, accepted = connection()
    mine.add("child~1", dialled, dialled=True)
    its.add("self~2", accepted, dialled=False)
    assert mine.asks("child~1") == ("runs", "child~1")
    assert its.asks("self~2") == ("runs", "self~2")
    child.send_signal(signal.SIGSTOP)
    mine.until("child~1", "stopped")
    child.send_signal(signal.SIGCONT)
    mine.until("child~1", "runs")
    child.kill()
    mine.until("child~1", "gone")


def test_it_outlives_its_member_while_somebody_may_ask_and_no_longer(
    mine: Beside, its: Beside, child: subprocess.Popen[bytes]
) -> None:
    dialled, accepted = connection()
    mine.add("child~1", dialled, dialled=True)
    its.add("self~2", accepted, dialled=False)
    assert mine.asks("child~1") == ("runs", "child~1")
    child.kill()
    its.control.close()
    mine.until("child~1", "gone")
    mine.control.send(b"D" + b"child~1")
    assert its.process.wait(DEADLINE_S) == 0


def frame(kind: bytes, number: bytes, state: bytes, key: bytes, who: bytes = b"a") -> bytes:
    proof = watcher.blake2b(who + kind + number + state, key=key, digest_size=16).digest()
    return kind + number + state + proof


@pytest.mark.parametrize("how", ["of another key", "its own, sent back"])
def test_a_frame_that_the_neighbours_watcher_did_not_write_ends_the_connection(mine: Beside, how: str) -> None:
    dialled, accepted = connection()
    mine.add("b~1", dialled, dialled=True)
    mine.control.send(b"Qb~1")
    question = accepted.recv(100)
    forged = question if how != "of another key" else frame(b"A", question[1:9], b"G", bytes(watcher.KEY_NBYTES))
    accepted.sendall(forged)
    assert accepted.recv(100) == b""
    accepted.close()


def test_the_answer_to_an_earlier_question_is_none_to_this_one(mine: Beside) -> None:
    dialled, accepted = connection()
    mine.add("b~1", dialled, dialled=True)
    mine.control.send(b"Qb~1")
    first = accepted.recv(100)
    mine.control.send(b"Qb~1")
    second = accepted.recv(100)
    accepted.sendall(frame(b"A", first[1:9], b"G", KEY) + frame(b"A", second[1:9], b"R", KEY))
    assert mine.control.recv(100) == b"Rb~1"
    accepted.close()


def test_a_signal_to_the_members_terminal_does_not_end_it(mine: Beside) -> None:
    dialled, accepted = connection()
    mine.add("b~1", dialled, dialled=True)
    mine.control.send(b"Qb~1")
    accepted.recv(100)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        mine.process.send_signal(number)
    mine.control.send(b"Qb~1")
    assert len(accepted.recv(100)) == 26
    accepted.close()


def test_a_connection_that_breaks_is_told_to_the_member_and_an_idle_one_is_kept_alive(mine: Beside) -> None:
    """A watcher enables TCP keep-alive on its connection, which a firewall might forget, and reports to the member when
    it breaks.
    """
    dialled, accepted = connection()
    mine.add("b~1", dialled.dup(), dialled=True)
    mine.control.send(b"Qb~1")
    accepted.recv(100)
    with dialled:
        assert dialled.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert dialled.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
    accepted.close()
    assert mine.control.recv(100) == b"Lb~1"


@pytest.mark.parametrize("whose", ["a~1", "b~2"])
def test_a_watcher_that_died_is_replaced_while_the_link_stands(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that is killed is replaced while the link is up, so that a busy process is not taken for a dead one."""
    monkeypatch.setattr(links, "WATCH_AGAIN_S", 0.05)
    a, b = Node("a~1"), Node("b~2")
    try:
        connect({"a": a, "b": b}, "ab")

        def sees(one: Node, other: str) -> bool:
            one.do(lambda: one.links._watching.ask(other))
            return one.links.sight(other).alive

        until(lambda: sees(a, "b~2") and sees(b, "a~1"), "both watchers")
        watched = (a if whose == "a~1" else b).links._watching
        assert watched._process is not None
        watched._process.kill()
        watched._process.wait(DEADLINE_S)
        for one in (a, b):
            one.do(one.links._watching._said.clear)
        until(lambda: watched._process.poll() is None and sees(a, "b~2") and sees(b, "a~1"), "both watchers again")
    finally:
        a.close()
        b.close()


def test_a_job_that_ends_while_its_watcher_is_started_leaves_the_loop_whole() -> None:
    crashes: list[BaseException] = []
    loop = IoLoop("loop", crashes.append)
    watching = Watching(loop, lambda why: pytest.fail(why), lambda peer: None)
    dialled, accepted = connection()
    watching.add("b~1", dialled, KEY, dialled=True)
    watching.close()
    accepted.close()
    loop.start()  # only now: what was handed in before the end is done after it
    done = loop.call_and_wait(lambda: None, DEADLINE_S)
    loop.stop()
    assert (crashes, done) == ([], True)
