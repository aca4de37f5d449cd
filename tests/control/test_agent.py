"""Tests a member's control stream: it reconnects, resumes and ends, and forked children do not keep it open."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served import PATIENCE_S, Client, Facts, attending, hello, serving, welcome

from chaos_lightning.control.agent import Agent
from chaos_lightning.control.scheduler_server import real_machine
from chaos_lightning.errors import RefusedError, SchedulerUnreachableError, StoreError
from chaos_lightning.machine import forks
from chaos_lightning.machine.addresses import join_endpoint
from chaos_lightning.machine.listener import free_port
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership import leader_search
from chaos_lightning.protocol.codec import decode, encode
from chaos_lightning.protocol.types import (
    NO_VIEW,
    VERSION,
    Fence,
    Heartbeat,
    Hello,
    Leave,
    Pulse,
    Ready,
    Refused,
    Released,
    ViewId,
    other_version,
)
from chaos_lightning.service import reviving

ROOT = Path(__file__).resolve().parents[2]


def hellos(event: fx.SchedulerEvent) -> bool:
    return isinstance(event, fx.MessageIn) and isinstance(event.message, Hello)


def beats(event: fx.SchedulerEvent) -> bool:
    return isinstance(event, fx.MessageIn) and isinstance(event.message, Heartbeat)


def test_heartbeats_carry_what_the_member_says_and_start_with_the_welcome() -> None:
    numbers = iter(range(1, 1 << 30))
    held = threading.Event()

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if hellos(event) and not held.is_set():
            return []
        return None

    with (
        serving(rule) as served,
        attending(served.endpoint, heartbeat=lambda: Heartbeat(ViewId(1, 2), next(numbers), 0)) as client,
    ):
        served.events.wait(hellos)
        assert client.states.seen == []
        held.set()
        served.loop.call_soon_threadsafe(
            served.server._driver.feed, fx.MessageIn(1, hello("a"))
        )  # the same Hello, answered now
        served.events.wait(beats, count=5)
        said = [e.message.seq for e in served.events.seen if beats(e)]  # type: ignore[union-attr]
        assert said[:5] == [1, 2, 3, 4, 5]
        assert client.states.seen == ["connected"]


def test_a_lost_scheduler_is_found_again_and_the_member_resumes() -> None:
    port = free_port()
    with attending(f"127.0.0.1:{port}") as client:
        for round_ in range(3):
            with serving(port=port) as served:
                client.states.wait(lambda s: s == "connected", count=round_ + 1)
                first = served.events.wait(hellos)
                assert first.message.resume == ("" if round_ == 0 else "a~1")  # type: ignore[union-attr]
                client.agent.send(Leave(str(round_)))
                served.events.wait(lambda e, r=round_: getattr(e, "message", None) == Leave(str(r)))  # type: ignore[misc]
            client.states.wait(lambda s: s.startswith("lost"), count=round_ + 1)
        seen = [s for s in client.states.seen if not s.startswith("waits")]
        assert seen == ["connected", seen[1]] * 3 or len(seen) == 6


def test_who_was_refused_hears_when_nobody_answers_any_more() -> None:
    """A member that a scheduler without the job's chain has refused also reports when that scheduler has ended."""
    port, refusal = free_port(), Refused("the chain is lost", retry=True)

    def refuse(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        return [fx.Send(event.conn, refusal)] if hellos(event) else None  # type: ignore[union-attr]

    with attending(f"127.0.0.1:{port}") as client:
        with serving(port=port):
            client.states.wait(lambda s: s == "connected")
        with serving(refuse, port=port):
            client.states.wait(lambda s: s == "lost: the scheduler said: the chain is lost")
        client.states.wait(lambda _: client.states.seen[-1].startswith("lost: no scheduler answered"))
        states = [s.partition(" at ")[0] for s in client.states.seen if not s.startswith("waits")]
        assert states == [
            "connected",
            "lost: no scheduler answered",
            "lost: the scheduler said: the chain is lost",
            "lost: no scheduler answered",
        ]


def test_a_scheduler_of_another_version_is_refused_by_name() -> None:
    """A newcomer ends with a clear error, and ignores further messages, if the scheduler's welcome has no version or
    another.
    """

    def before(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        return [fx.Send(event.conn, replace(welcome("a"), version=0))] if hellos(event) else None  # type: ignore[union-attr]

    with serving(before) as served, attending(served.endpoint) as client:
        state = client.states.wait(lambda s: s.startswith("failed"))
        assert f"{served.endpoint} speaks a version before 4 of the protocol, and this side {VERSION}" in state
        assert client.messages.seen == []


def test_a_hello_of_an_older_release_is_read_and_refused_in_words() -> None:
    """A hello of an older release, which has no version, is parsed and answered by a refusal that the old release can
    read.
    """
    old = replace(hello("old"), version=0)
    assert decode(Hello, encode(old)) == old
    with (
        serving(machine=real_machine) as served,
        attending(served.endpoint, hello_factory=lambda: old) as client,
    ):
        refused = client.messages.wait_for(Refused)
        assert refused == Refused(f"old {other_version(0)}")


def test_what_could_not_be_sent_is_dropped_not_repeated() -> None:
    port = free_port()
    with attending(f"127.0.0.1:{port}") as client:
        client.agent.send(Ready())  # nobody is there
        with serving(port=port):
            client.states.wait(lambda s: s == "connected")
        client.states.wait(lambda s: s.startswith("lost"))
        client.agent.send(Leave("into the void"))
        with serving(port=port) as served:
            client.states.wait(lambda s: s == "connected", count=2)
            client.agent.send(Leave("heard"))
            served.events.wait(lambda e: getattr(e, "message", None) == Leave("heard"))
            spoken = [e.message for e in served.events.seen if isinstance(e, fx.MessageIn) and not beats(e)]
            assert [type(m) for m in spoken] == [Hello, Leave]


def test_nobody_there_fails_after_the_timeout_with_the_reason() -> None:
    with attending(f"127.0.0.1:{free_port()}", connect_timeout_s=0.3) as client:
        state = client.states.wait(lambda s: s.startswith("failed"))
        assert "within 0.3 s" in state
        assert "no scheduler answered" in state
        client.agent.join(PATIENCE_S)
        assert not client.agent.is_alive()


def test_a_member_that_was_admitted_never_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviving, "FIRST_PAUSE_S", 0.2)
    port = free_port()
    tries = Facts[int]()
    with attending(f"127.0.0.1:{port}", connect_timeout_s=0.2, revive=lambda: tries.add(1)) as client:
        with serving(port=port):
            client.states.wait(lambda s: s == "connected")
        tries.wait(lambda _: True, count=3)  # each after a pause: long beyond the timeout
        with serving(port=port):
            client.states.wait(lambda s: s == "connected", count=2)
        assert not any(s.startswith("failed") for s in client.states.seen)


def test_a_name_nobody_knows_is_tried_again_until_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("chaos_lightning.machine.addresses.socket.getaddrinfo", nowhere)
    with attending("no-such-host:29400", connect_timeout_s=0.2) as client:
        state = client.states.wait(lambda s: s.startswith("failed"))
        assert "'no-such-host' cannot be resolved" in state


def test_something_else_at_the_port_fails_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with attending(f"127.0.0.1:{port}", connect_timeout_s=0.2) as client:
            threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
            client.states.wait(lambda s: s.startswith("failed"))


def test_a_scheduler_that_accepts_but_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.membership.leader_search.ANSWER_TIMEOUT_S", 0.2)

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        return []

    with serving(rule) as served, attending(served.endpoint, connect_timeout_s=0.5) as client:
        state = client.states.wait(lambda s: s.startswith("failed"))
        assert "did not answer within 0.2 s" in state


def test_a_scheduler_that_pulses_and_listens_to_hundreds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former bug: members reconnected every two seconds while a new scheduler, busy with hundreds of hellos, only sent
    heartbeats.
    """
    monkeypatch.setattr("chaos_lightning.membership.leader_search.ANSWER_TIMEOUT_S", 0.1)
    held: list[int] = []
    ticks = 0

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        nonlocal ticks
        if hellos(event):
            held.append(event.conn)  # type: ignore[union-attr]
            return [fx.Send(held[-1], Pulse(5.0))]
        if held and isinstance(event, fx.SchedulerTick):
            ticks += 1
            if ticks == 40:
                return [fx.Send(held[-1], welcome("a"))]
        return None

    with serving(rule) as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        assert len(held) == 1


def test_refused_for_now_tries_again() -> None:
    heard = threading.Event()

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if hellos(event) and not heard.is_set():
            return [fx.Send(event.conn, Refused("the name is taken", retry=True))]  # type: ignore[union-attr]
        return None

    with serving(rule) as served, attending(served.endpoint) as client:
        client.messages.wait(lambda m: m == Refused("the name is taken", True), count=2)
        assert client.states.seen == []
        heard.set()
        client.states.wait(lambda s: s == "connected")


@pytest.mark.parametrize("last", [Fence("excluded"), Released("finished"), Refused("fingerprint")])
def test_after_the_last_word_the_thread_ends(last: Any) -> None:
    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        return [fx.Send(1, last)] if getattr(event, "message", None) == Leave("x") else None

    with serving(rule) as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        client.agent.send(Leave("x"))
        client.messages.wait(lambda m: m == last)
        client.agent.join(PATIENCE_S)
        assert not client.agent.is_alive()
        assert served.events.wait_for(fx.Closed) == fx.Closed(1, abrupt=False)
        client.agent.send(Ready())  # harmless


def test_closing_from_a_callback_and_twice() -> None:
    with serving() as served:
        client = Client(served.endpoint)

        def on_message(message: Any) -> list[Any]:
            client.agent.close()
            return []

        client.answer = on_message
        client.agent.join(PATIENCE_S)
        assert not client.agent.is_alive()
        client.close()


def test_closing_does_not_wait_for_a_scheduler_that_is_not_there() -> None:
    client = Client(f"127.0.0.1:{free_port()}")
    client.close()
    client.agent.join(PATIENCE_S)
    assert not client.agent.is_alive()


def test_closing_before_the_start() -> None:
    agent = Agent(
        endpoints=("127.0.0.1:1",),
        token=b"",
        hello_factory=hello,
        on_message=lambda m: None,
        on_state=lambda s: None,
        heartbeat=lambda: Heartbeat(NO_VIEW, 0, 0),
    )
    agent.close()
    agent.start()
    agent.join(PATIENCE_S)
    assert not agent.is_alive()


def test_an_error_in_a_callback_is_told_not_swallowed() -> None:
    errors: Facts[Any] = Facts()
    previous, threading.excepthook = threading.excepthook, lambda args: errors.add(args.exc_value)
    try:
        with serving() as served:
            client = Client(served.endpoint)
            client.answer = lambda message: 1 / 0  # type: ignore[assignment, return-value]
            assert "ZeroDivisionError" in client.states.wait(lambda s: s.startswith("failed"))
            errors.wait_for(ZeroDivisionError)
            client.agent.join(PATIENCE_S)
    finally:
        threading.excepthook = previous


def test_a_message_that_does_not_fit_is_the_callers_error() -> None:
    with serving() as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        with pytest.raises(TypeError, match=r"Leave\.reason"):
            client.agent.send(Leave(3))  # type: ignore[arg-type]


def test_a_scheduler_that_is_gone_is_revived_by_whoever_may() -> None:
    port = free_port()
    revived: list[Any] = []

    def revive() -> None:
        if not revived:
            revived.append(None)
            raise SchedulerUnreachableError("not yet")
        context = serving(port=port)
        revived.append(context)
        context.__enter__()

    client = Client(f"127.0.0.1:{port}", revive=revive)
    try:
        client.states.wait(lambda s: s == "cannot revive the scheduler: not yet")
        client.states.wait(lambda s: s == "connected")
        assert len(revived) == 2
    finally:
        client.close()
        revived[1].__exit__(None, None, None)


def test_one_process_may_have_many_agents_one_after_the_other() -> None:
    """A fenced member makes a new Agent in the same process; what gRPC still keeps of the old one does not disturb
    it.
    """
    with serving() as served:
        for number in range(1, 6):
            with attending(served.endpoint) as client:
                client.states.wait(lambda s: s == "connected")
                client.messages.wait(lambda m, n=number: m == welcome("a", n))  # type: ignore[misc]
        served.events.wait(lambda e: e == fx.Closed(5, abrupt=False))


# ------------------------------------------------------------------------------------------------ forks

FORKER = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from served import Client
client = Client(sys.argv[2])
client.states.wait(lambda state: state == "connected")
child = os.fork()
if child == 0:
    time.sleep(60)  # as a DataLoader worker would that has not noticed yet
    os._exit(0)
print(child, flush=True)
threading.Event().wait()
"""


def test_a_forked_child_does_not_hide_the_death_of_its_parent() -> None:
    with (
        serving() as served,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", FORKER, str(Path(__file__).parents[1]), served.endpoint],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as parent,
    ):
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            # The parent's stream still works after the fork.
            count = sum(map(beats, served.events.seen))
            served.events.wait(beats, count=count + 5)
            parent.send_signal(signal.SIGKILL)
            assert served.events.wait_for(fx.Closed) == fx.Closed(1, abrupt=True)
            os.kill(child, 0)  # the child lives, and yet
        finally:
            os.kill(child, signal.SIGKILL)


def run_in_child(function: Any) -> bytes:
    """Runs `function` in a forked child; returns its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, function())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return data


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_registered_descriptors_are_closed_in_children_only() -> None:
    def is_open(fd: int) -> bool:
        try:
            os.fstat(fd)
        except OSError:
            return False
        return True

    mine, theirs = socket.socketpair()
    recycled, _ = socket.socketpair()
    with mine, theirs, recycled, _:
        forks.close_in_children(mine.fileno())
        forks.close_in_children(recycled.fileno())
        os.dup2(theirs.fileno(), recycled.fileno())  # the number now means another socket
        seen = run_in_child(
            lambda: b"%d%d%d" % (is_open(mine.fileno()), is_open(theirs.fileno()), is_open(recycled.fileno()))
        )
        assert seen == b"011"
        assert is_open(mine.fileno())
        forks.keep_in_children(mine.fileno())
        forks.keep_in_children(recycled.fileno())
        assert run_in_child(lambda: b"%d" % is_open(mine.fileno())) == b"1"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_connections_to_registered_peers_are_closed_in_children_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        address = server.getsockname()
        with socket.create_connection(address) as first, socket.create_connection(other.getsockname()) as second:

            def look() -> bytes:
                found = b""
                for sock in (first, second):
                    try:
                        sock.getpeername()
                        found += b"1"
                    except OSError:
                        found += b"0"
                return found

            endpoint = join_endpoint(*address)
            with forks.only_here(endpoint):
                with forks.only_here(endpoint):
                    assert run_in_child(look) == b"01"
                assert run_in_child(look) == b"01"
            assert run_in_child(look) == b"11"
            assert look() == b"11"


def test_heartbeats_do_not_pile_up_before_a_scheduler_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Facts[int]()

    def heartbeat() -> Heartbeat:
        made.add(1)
        return Heartbeat(NO_VIEW, 0, 0)

    with serving() as served, attending(served.endpoint, heartbeat=heartbeat) as client:
        made.wait(lambda _: True, count=3)
        monkeypatch.setattr("chaos_lightning.service.client.Talk.clogged", True)
        client.agent.send(Leave("a"))
        served.events.wait(lambda e: getattr(e, "message", None) == Leave("a"))
        before = len(made.seen)
        until = time.monotonic() + 15 * welcome("a").heartbeat_interval_s
        for text in map(str, itertools.count()):
            if time.monotonic() > until:
                break
            client.agent.send(Leave(text))
            served.events.wait(lambda e, t=text: getattr(e, "message", None) == Leave(t))  # type: ignore[misc]
        assert len(made.seen) <= before + 1


def test_a_scheduler_that_cannot_start_is_tried_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member retries to start a scheduler after longer and longer pauses, and reports the same error once."""
    tried: list[float] = []
    for name, seconds in (("_FIRST_PAUSE_S", 0.001), ("LONGEST_PAUSE_S", 0.002)):
        monkeypatch.setattr(leader_search, name, seconds)
    monkeypatch.setattr(reviving, "FIRST_PAUSE_S", 0.05)
    enough = threading.Event()

    def revive() -> None:
        tried.append(client.agent._client._reviver._restarts.pause_s)
        if len(tried) == 4:
            enough.set()
        raise StoreError("the disk is full")

    with attending(f"127.0.0.1:{free_port()}", revive=revive) as client:
        assert enough.wait(PATIENCE_S)
        client.states.wait(lambda s: s.startswith("cannot revive"))
    assert tried == [0.05, 0.1, 0.2, 0.4]
    assert [s for s in client.states.seen if "revive" in s] == ["cannot revive the scheduler: the disk is full"]


def test_a_newcomer_whose_job_ended_while_it_knocked_ends() -> None:
    def revive() -> None:
        raise RefusedError("job 'job' is finished; nothing is left to do")

    with attending(f"127.0.0.1:{free_port()}", revive=revive) as client:
        client.states.wait(lambda s: s == "failed: job 'job' is finished; nothing is left to do")
