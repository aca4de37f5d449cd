"""The client of the leader's stream: it finds the leader, leaves one that is silent, finds the next one; messages
arrive.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from outer_served import Scripted, ScriptedCluster, ScriptedFollower, at_once, outer_serving
from served import Facts
from until_support import until

from chaos_lightning.errors import RefusedError, SchedulerUnreachableError
from chaos_lightning.machine.listener import free_port
from chaos_lightning.outer.exchange import outer_pb2
from chaos_lightning.outer.exchange.control_client import ask_end, control_client, fetch_facts
from chaos_lightning.outer.exchange.outer_pb2_grpc import ParameterServerServicer, add_ParameterServerServicer_to_server
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.types import IncarnationId
from chaos_lightning.service.client import ServiceClient

NOBODY = "127.0.0.1:9"


def test_what_is_said_before_the_close_arrives() -> None:
    with outer_serving() as served:
        follower, cluster = ScriptedFollower(served.endpoint), ScriptedCluster(served.endpoint)
        with at_once(follower):
            with at_once(cluster):
                cluster.served(1)
                assert cluster.me is not None
                cluster.client.say(say.Goodbye(cluster.me, "enough"))

            def removed() -> bool:
                facts = fetch_facts(served.endpoint, b"")
                return not facts["clusters"] and not facts["away"]

            until(removed, "its removal")


def test_nobody_is_told_to_nobody_and_a_server_may_be_revived() -> None:
    revived: Facts[str] = Facts()
    port = free_port()
    follower = ScriptedFollower(f"127.0.0.1:{port}", revive=lambda: revived.add("once"))
    follower.client.say(say.Trouble("one", "dropped: there is no stream"))
    with at_once(follower):
        assert "no parameter server answered" in str(follower.troubles.wait_for(SchedulerUnreachableError))
        revived.wait_for(str)
        with outer_serving(port=port) as served:
            follower.states.wait(lambda state: state == "connected")
            until(lambda: fetch_facts(served.endpoint, b"")["followers"], "its hello")
        follower.states.wait(lambda state: state != "connected")
        with outer_serving(port=port):
            follower.states.wait(lambda state: state == "connected", 2)


def test_a_revival_that_fails_is_told() -> None:
    def fail() -> None:
        raise RefusedError("there is nothing to revive")

    lonely = Scripted(NOBODY, "Attend", revive=fail)
    with at_once(lonely):
        lonely.troubles.wait(lambda error: "nothing to revive" in str(error))


def test_of_several_one_that_answers_is_found() -> None:
    with outer_serving() as served:
        follower = ScriptedFollower(f"{NOBODY},{served.endpoint}")
        with at_once(follower):
            follower.states.wait(lambda state: state == "connected")
        assert fetch_facts(f"{NOBODY},{served.endpoint}", b"")["role"] == "leader"


def test_nobody_answers() -> None:
    with pytest.raises(SchedulerUnreachableError, match="no parameter server answered"):
        fetch_facts(NOBODY, b"", 1.0)
    with pytest.raises(SchedulerUnreachableError, match="no parameter server answered"):
        ask_end(NOBODY, "enough", b"", 1.0)


def test_a_name_that_nobody_knows_is_trouble_and_not_the_end() -> None:
    lost = Scripted("no-such-host.invalid:1", "Follow")
    with at_once(lost):
        lost.troubles.wait(lambda error: "no-such-host.invalid" in str(error))


def test_what_is_no_message_of_the_call_is_a_mistake_of_the_caller() -> None:
    with outer_serving() as served:
        follower = ScriptedFollower(served.endpoint)
        with at_once(follower):
            follower.states.wait(lambda state: state == "connected")
            with pytest.raises(TypeError, match="Goodbye is no message"):
                follower.client.say(say.Goodbye(IncarnationId("a", 1), "of a cluster"))


def test_a_callback_may_close_the_client() -> None:
    with outer_serving() as served:
        clients: list[ServiceClient] = []
        client = control_client(
            [served.endpoint],
            b"",
            call="Follow",
            on_connected=lambda: clients[0].close(),
            on_message=lambda message: None,
            on_disconnected=lambda reason: None,
        )
        clients.append(client)
        client.start()
        client.join(30.0)
        assert not client.is_alive()


class Odd(ParameterServerServicer):  # type: ignore[misc]
    """Server that sends messages such as a later version of the protocol might have."""

    def Follow(self, _requests: Any, _context: Any) -> Iterator[Any]:
        odd = outer_pb2.ToFollowerEnvelope()
        odd.apply.term = 1
        odd.apply.entry.kind = "NoSuchEntry"
        yield outer_pb2.ToFollowerEnvelope()
        yield odd


def test_a_leader_that_nobody_understands_is_left() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    add_ParameterServerServicer_to_server(Odd(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        puzzled = Scripted(f"127.0.0.1:{port}", "Follow")
        with at_once(puzzled):
            assert "NoSuchEntry" in puzzled.states.wait(lambda state: state != "connected")
    finally:
        server.stop(0).wait()


@contextmanager
def leader_process(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "chaos_lightning.outer.commands.leader_main", f"--listen=127.0.0.1:{port}"]
    command += [f"--store={folder / 'chain.sqlite'}"]
    with (folder / "leader.log").open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_frozen_leader_is_left_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("chaos_lightning.service.client.SILENT_S", 1.0)
    port = free_port()
    with leader_process(tmp_path, port) as process:
        follower = ScriptedFollower(f"127.0.0.1:{port}")
        with at_once(follower):
            follower.states.wait(lambda state: state == "connected")
            process.send_signal(signal.SIGSTOP)
            assert "was silent for 1 s" in follower.states.wait(lambda state: state != "connected")
            process.send_signal(signal.SIGCONT)
            follower.states.wait(lambda state: state == "connected", 2)
        process.terminate()
        assert process.wait(30.0) == 128 + signal.SIGTERM
    said = (tmp_path / "leader.log").read_text()
    assert "ends: stopped by SIGTERM" in said
