"""Tests that newcomers wait for a scheduler's port that is silent or free, and report what they wait for."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from served import PATIENCE_S, SCHEDULER, Facts, attending, place_of, scheduler_process, serving
from until_support import until

from chaos_lightning.control import requests
from chaos_lightning.control.hosting import ensure_scheduler, look
from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.control.service_pb2_grpc import SchedulerStub
from chaos_lightning.errors import SchedulerUnreachableError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine import listener
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.machine.listener import is_another_kind, who_listens
from chaos_lightning.member import waiting
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.waiting import Waiting
from chaos_lightning.membership.effects import MessageIn
from chaos_lightning.protocol.types import Heartbeat, Settings, Welcome
from chaos_lightning.service.options import MEMORY

import grpc  # isort: skip  (after channel, which sets gRPC's environment)


class Said(logging.Handler):
    """Log handler that collects lines, so that tests can wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    logger = logging.getLogger("chaos_lightning")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


IMPATIENT = """
import sys
from chaos_lightning.service import channel
given = [name for name, _ in channel.SERVER_OPTIONS]
channel.SERVER_OPTIONS[given.index("grpc.server_handshake_timeout_ms")] = ("grpc.server_handshake_timeout_ms", 2000)
from chaos_lightning.control.scheduler_main import main
sys.exit(main())
"""
"""A scheduler that waits for less long for who says nothing, so that the test does, too."""


@pytest.fixture
def scheduler() -> Iterator[subprocess.Popen[str]]:
    with scheduler_process("--store", MEMORY) as process:
        yield process


def freeze(process: subprocess.Popen[str]) -> Callable[[], None]:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    return lambda: process.send_signal(signal.SIGCONT)


def exhaust(process: subprocess.Popen[str]) -> Callable[[], None]:
    """Limits a process to the file descriptors that it has; returns a function that restores the limit."""
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    count = len(os.listdir(f"/proc/{process.pid}/fd"))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (count, hard))
    return lambda: resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the time after which an endpoint counts as silent."""
    monkeypatch.setattr(requests, "fetch_status", lambda *a, **named: fetch_status(*a, **{**named, "timeout_s": 0.3}))
    monkeypatch.setattr(
        "chaos_lightning.service.hosting.is_another_kind", lambda host, port: is_another_kind(host, port, 0.2)
    )


@pytest.mark.usefixtures("soon_silent")
@pytest.mark.parametrize(
    ("hurt", "words"), [(freeze, "which is stopped"), pytest.param(exhaust, "files open", marks=pytest.mark.slow)]
)
def test_a_scheduler_that_stands_still_is_waited_for_by_name(
    scheduler: subprocess.Popen[str],
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
    hurt: Callable[[subprocess.Popen[str]], Callable[[], None]],
    words: str,
) -> None:
    monkeypatch.setattr("chaos_lightning.service.hosting.ODD_LISTENER_PATIENCE_S", 0.0)
    monkeypatch.setattr("chaos_lightning.service.hosting.TELL_S", 0.1)
    endpoint = place_of(scheduler)
    heal = hurt(scheduler)
    options = SchedulerOptions(listen=endpoint, settings=Settings())
    results: list[object] = []
    waits = threading.Thread(target=lambda: results.append(ensure_scheduler(options, timeout_s=PATIENCE_S)))
    waits.start()
    try:
        until(
            lambda: len([line for line in said.lines if f"pid {scheduler.pid} (" in line and words in line]) > 1,
            "that it says for whom it waits, again and again",
        )
        assert "no answer at" in said.lines[-1]
    finally:
        heal()
        waits.join(PATIENCE_S)
    assert results == [None]  # it serves


@pytest.mark.usefixtures("soon_silent")
def test_who_gives_up_waits_no_more(scheduler: subprocess.Popen[str]) -> None:
    endpoint = place_of(scheduler)
    freeze(scheduler)
    options = SchedulerOptions(listen=endpoint, settings=Settings())
    assert ensure_scheduler(options, given_up=lambda: True) is None
    with pytest.raises(SchedulerUnreachableError, match=rf"no answer at .*pid {scheduler.pid} .*which is stopped"):
        ensure_scheduler(options, timeout_s=0.1)


@pytest.mark.usefixtures("soon_silent")
def test_a_crowd_before_a_frozen_scheduler_does_not_look_like_a_free_port() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        host, port = server.getsockname()
        crowd = [socket.socket() for _ in range(4)]
        try:
            for one in crowd:
                one.setblocking(False)
                one.connect_ex((host, port))
            assert look(f"{host}:{port}", "default", b"") == "silent"
        finally:
            for one in crowd:
                one.close()


def test_connections_that_say_nothing_do_not_keep_newcomers_out() -> None:
    with contextlib.ExitStack() as crowd:
        scheduler = crowd.enter_context(scheduler_process("--store", MEMORY, program=(sys.executable, "-c", IMPATIENT)))
        host, port = split_endpoint(place_of(scheduler))
        count, room = len(os.listdir(f"/proc/{scheduler.pid}/fd")), 40
        resource.prlimit(scheduler.pid, resource.RLIMIT_NOFILE, (count + room, count + room))
        for _ in range(2 * room):
            crowd.enter_context(socket.create_connection((host, port), timeout=PATIENCE_S))
        with pytest.raises(SchedulerUnreachableError):  # else the test shows nothing
            fetch_status(f"{host}:{port}", timeout_s=0.5)

        def answers() -> bool:
            with contextlib.suppress(SchedulerUnreachableError):
                return bool(fetch_status(f"{host}:{port}", timeout_s=1.0))
            return False

        until(answers, "that somebody who speaks is heard")


def test_streams_that_say_nothing_are_closed_and_told() -> None:
    told: Facts[dict[str, object]] = Facts()
    log = EventLog(None)
    log.emit = lambda name, **fields: told.add({"name": name, **fields})  # type: ignore[assignment,method-assign]
    with serving(hello_timeout_s=0.2, log=log) as served, grpc.insecure_channel(served.endpoint) as channel:
        silent: queue.SimpleQueue[object] = queue.SimpleQueue()
        call = SchedulerStub(channel).Attend(iter(silent.get, None), timeout=PATIENCE_S)
        assert list(call) == []  # the stream has ended
        silent.put(None)
        refused = told.wait(lambda event: event["name"] == "refused")
        assert "no hello within 0.2 s" in str(refused["reason"])
        with attending(served.endpoint) as client:
            client.messages.wait_for(Welcome)
            last = len(told.seen)
            served.events.wait(lambda event: isinstance(event, MessageIn) and isinstance(event.message, Heartbeat), 20)
            assert not [event for event in told.seen[last:] if event["name"] == "refused"]


def test_a_scheduler_takes_all_the_descriptors_that_it_may_have() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with_few = ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", *SCHEDULER]
    with scheduler_process("--store", MEMORY, program=with_few) as process:
        place_of(process)  # it has started
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_only_who_hangs_up_or_speaks_otherwise_is_of_another_kind() -> None:
    with serving() as served:
        assert not is_another_kind("127.0.0.1", served.server.port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_another_kind("127.0.0.1", port, 0.1)
        assert who_listens(port).startswith(f"pid {os.getpid()} (")

        def speak() -> None:
            for _ in range(2):  # the first one has hung up by now
                with closing(server.accept()[0]) as talk:
                    talk.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        speaker = threading.Thread(target=speak)
        speaker.start()
        assert is_another_kind("127.0.0.1", port)
        speaker.join(PATIENCE_S)
    assert who_listens(port) == ""
    assert listener._inodes(port) == set()


def test_a_newcomer_that_nobody_answers_says_so_every_few_seconds(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SEVERED_S", 0.0)
    monkeypatch.setattr(waiting, "UNHEARD_S", 0.05)
    monkeypatch.setattr(waiting, "STARTS_S", 0.0)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        mail = Mailbox("m", endpoint=f"127.0.0.1:{port}")
        speaker = Waiting(mail, EventLog(None))
        with attending(mail.endpoint, "m") as client:
            client.states.wait(lambda s: s.startswith("waits: no scheduler answered at"))
            speaker.stream(client.states.seen[0])
            stop = threading.Timer(PATIENCE_S, lambda: mail.post(left="in vain"))
            stop.start()
            try:
                with mail.changed:
                    mail.wait(lambda: len(said.lines) > 1, "admission", float("inf"))
            finally:
                stop.cancel()
    for line in said.lines:
        assert line.startswith(f"m: waits for admission: no scheduler answered at 127.0.0.1:{port}")
