"""Tests the scheduler's server around a scripted machine: order of effects, streams, strangers, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from served import PATIENCE_S, Facts, Served, attending, hello, serving, welcome
from until_support import until

from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.requests import drain, fetch_status
from chaos_lightning.control.scheduler_server import real_machine
from chaos_lightning.control.service_pb2_grpc import SchedulerStub
from chaos_lightning.errors import ConfigurationError, RefusedError, SchedulerUnreachableError, StoreError
from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.codec import wrap_from_member
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Decide,
    Heartbeat,
    Leave,
    Notice,
    Prepare,
    Ready,
    Refused,
    Released,
    Settings,
    View,
    ViewId,
    Welcome,
)
from chaos_lightning.service import auth_interceptor
from chaos_lightning.service.channel import CLIENT_OPTIONS, SERVER_OPTIONS
from chaos_lightning.service.memory_store import MemoryStore
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.store import Appended, End, StoreRecord

ROOT = Path(__file__).resolve().parents[2]
TOKEN = b"a long enough token \xff"


def said(message: object) -> Any:
    return lambda event: isinstance(event, fx.MessageIn) and event.message == message


def closed(event: fx.SchedulerEvent) -> bool:
    return isinstance(event, fx.Closed)


# ------------------------------------------------------------------------------------------------ streams


def test_a_stream_is_opened_speaks_and_closes_in_good_order() -> None:
    with serving() as served, attending(served.endpoint) as client:
        client.messages.wait(lambda m: m == welcome("a"))
        client.agent.send(Ready())
        client.agent.send(Leave("enough"))
        served.events.wait(said(Leave("enough")))
        client.close()
        assert served.events.wait(closed) == fx.Closed(1, abrupt=False)
        kinds = [e for e in served.events.seen if not said(Heartbeat(NO_VIEW, 0, 0))(e)]
        assert kinds[0] == fx.Opened(1)
        assert [e.message for e in kinds[2:-1]] == [Ready(), Leave("enough")]  # type: ignore[union-attr]


def test_a_member_that_is_answered_at_once_keeps_its_stream() -> None:
    """A member that the machine answers before its stream is open at both ends keeps the stream."""

    def at_once(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        return [fx.Send(event.conn, welcome("a", event.conn))] if isinstance(event, fx.Opened) else None

    with serving(at_once) as served:
        for number in range(1, 21):
            with attending(served.endpoint) as client:
                client.messages.wait(lambda m: isinstance(m, Welcome))
                assert client.messages.seen[0] == welcome("a", number), "an earlier stream was lost"
                client.close()


MEMBER = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from served import Client
client = Client(sys.argv[2])
client.states.wait(lambda state: state == "connected")
print("connected", flush=True)
threading.Event().wait()
"""


def member(served: Served) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(Path(__file__).parents[1]), served.endpoint],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "connected\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_member_is_an_abrupt_end(number: signal.Signals) -> None:
    with serving() as served, member(served) as child:
        child.send_signal(number)
        assert served.events.wait(closed) == fx.Closed(1, abrupt=True)


def test_a_frozen_member_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of a frozen member is not reported as ended, neither by the server nor by gRPC's pings."""
    quick = [(key, 100 if "keepalive" in key or "ping_timeout" in key else value) for key, value in SERVER_OPTIONS]
    monkeypatch.setattr(auth_interceptor, "SERVER_OPTIONS", quick)
    beats = said(Heartbeat(NO_VIEW, 0, 0))
    with serving() as served, member(served) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            with attending(served.endpoint, "b") as other:
                other.states.wait(lambda s: s == "connected")
                served.events.wait(lambda e: beats(e) and e.conn == 2, count=20)  # type: ignore[union-attr]
                assert not any(closed(e) for e in served.events.seen)
                child.send_signal(signal.SIGCONT)
                before = sum(beats(e) and e.conn == 1 for e in served.events.seen)  # type: ignore[union-attr]
                served.events.wait(lambda e: beats(e) and e.conn == 1, count=before + 1)  # type: ignore[union-attr]
        finally:
            child.kill()


def test_the_machine_closes_a_stream_after_its_last_words() -> None:
    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if said(Leave("x"))(event):
            return [fx.Send(1, Notice("first")), fx.Send(1, Released("bye")), fx.Close(1, "released")]
        return None

    with serving(rule) as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        client.agent.send(Leave("x"))
        client.messages.wait_for(Released)
        assert client.messages.seen[1:] == [Notice("first"), Released("bye")]
        assert served.events.wait(closed) == fx.Closed(1, abrupt=False)
        client.agent.join(PATIENCE_S)
        assert not client.agent.is_alive()


def test_words_for_a_stream_that_is_gone_are_dropped() -> None:
    with serving() as served:
        served.rule = lambda event: [fx.Send(77, Ready()), fx.Close(77, "x")] if event == fx.Drain("x") else None  # type: ignore[list-item]
        served.feed(fx.Drain("x"))
        served.events.wait_for(fx.Drain)
        assert fetch_status(served.endpoint)["machine"] == {"names": []}


# ------------------------------------------------------------------------------------------------ the store first


class Journal(MemoryStore):
    """Store in memory that logs each write; tests can hold it up, let it fail, or let another scheduler outrank it."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = 0
        self.deposed = False

    def _append(self, record: StoreRecord, seen: End, *, cut: bool) -> Appended:
        assert self.gate.wait(PATIENCE_S)
        if self.broken:
            self.broken -= 1
            raise StoreError("the disk is full")
        if self.deposed:
            return Appended(False, "term 1 is over")
        outcome = super()._append(record, seen, cut=cut)
        self.log.append(f"stored {record.kind}")
        return outcome


def persisting(journal: Journal) -> Any:
    """Returns a rule for the scripted machine: at Leave it takes two decisions, with messages before, between and
    after; it reports each as stored.
    """

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if said(Leave("x"))(event):
            view = View(ViewId(1, 2), NO_VIEW, ())
            return [
                fx.Send(1, Notice("before")),
                fx.Persist(1, "reserve", ViewId(1, 1)),
                fx.Send(1, Prepare(ViewId(1, 1), "between")),
                fx.Persist(2, "view", view.id, view),
                fx.Send(1, Notice("after")),
            ]
        if isinstance(event, fx.Stored):
            journal.log.append(f"heard {event.token}")
            return [fx.Send(1, Notice(f"stored {event.token} {event.ok}"))]
        return None

    return rule


def test_a_decision_is_durable_before_anything_behind_it_is_said() -> None:
    journal = Journal()
    journal.gate.clear()
    with serving(persisting(journal), open_store=lambda: journal) as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        client.agent.send(Leave("x"))
        client.messages.wait(lambda m: m == Notice("before"))
        # While the disk is busy streams are read, but nothing behind the write is said and no event is fed.
        with attending(served.endpoint, "b") as other:
            assert fetch_status(served.endpoint)["job"] == "default"
            assert not other.messages.seen
            assert client.messages.seen[1:] == [Notice("before")]
            journal.gate.set()
            client.messages.wait(lambda m: m == Notice("stored 2 True"))
        expected = [Notice("before"), Prepare(ViewId(1, 1), "between"), Notice("after")]
        assert client.messages.seen[1:] == [*expected, Notice("stored 1 True"), Notice("stored 2 True")]
        assert journal.log == ["stored reserve", "stored view", "heard 1", "heard 2"]


def test_a_hiccup_of_the_store_is_survived(tmp_path: Path) -> None:
    journal = Journal()
    journal.broken = 2
    log = EventLog(tmp_path / "s.jsonl", role="scheduler")
    with (
        serving(persisting(journal), open_store=lambda: journal, log=log) as served,
        attending(served.endpoint) as client,
    ):
        client.states.wait(lambda s: s == "connected")
        client.agent.send(Leave("x"))
        client.messages.wait(lambda m: m == Notice("stored 2 True"))
    errors = [e for e in read_events(tmp_path) if e.name == "error"]
    assert [e["text"] for e in errors] == ["the disk is full"]
    stored = [e for e in read_events(tmp_path) if e.name == "stored"]
    assert [(e["kind"], e["number"], e["ok"]) for e in stored] == [("reserve", "1.1", True), ("view", "1.2", True)]


def test_a_store_that_stays_broken_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.service.writer.PATIENCE_S", 0.0)
    journal = Journal()
    journal.broken = 1 << 30
    with serving(persisting(journal), open_store=lambda: journal) as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        client.agent.send(Leave("x"))
        reason, failed = served.wait_ended()
        assert failed
        assert "the disk is full" in reason
        assert all("stored" not in getattr(m, "text", "") for m in client.messages.seen)


def finishing(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
    """Rule for the machine: finishes the job when a member asks to leave."""
    if isinstance(event, fx.MessageIn) and isinstance(event.message, Leave):
        return [fx.Persist(1, "finish", ViewId(1, 1))]
    return [fx.SchedulerDone("the job is finished")] if isinstance(event, fx.Stored) else None


@pytest.mark.parametrize("comes_back", [True, False])
def test_the_end_of_a_job_is_owed_for_as_long_as_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, comes_back: bool
) -> None:
    monkeypatch.setattr("chaos_lightning.service.writer.PATIENCE_S", 0.0)
    monkeypatch.setattr("chaos_lightning.service.sqlite_store._BUSY_TIMEOUT_S", 0.1)
    path, tries = tmp_path / "chain.sqlite", Facts[StoreRecord]()

    class Counting(SqliteStore):
        def _append(self, record: StoreRecord, seen: End, *, cut: bool) -> Appended:
            tries.add(record)
            return super()._append(record, seen, cut=cut)

    with serving(finishing, open_store=lambda: Counting(path, "default")) as served:
        with attending(served.endpoint) as client, closing(sqlite3.connect(path, isolation_level=None)) as other:
            client.states.wait(lambda s: s == "connected")
            other.execute("BEGIN IMMEDIATE")
            client.agent.send(Leave("x"))
            tries.wait_for(StoreRecord, 2)
            served.server.config = replace(served.server.config, idle_timeout_s=0.05)
            client.close()  # members do not linger for ever
            until(lambda: not fetch_status(served.endpoint)["streams"], "nobody is here")
            tries.wait_for(StoreRecord, len(tries.seen) + 2)
            until(lambda: "database is locked" in fetch_status(served.endpoint)["owed"], "that it says what it owes")
            if not comes_back:
                served.loop.call_soon_threadsafe(served.server.life.end, "stopped by SIGTERM")
                assert served.wait_ended() == ("stopped by SIGTERM", False)
                return
            assert served.outcome is None
            other.execute("ROLLBACK")
        assert served.wait_ended() == ("the job is finished", False)
    with JobChain(SqliteStore(path, "default", read_only=True)) as store:
        assert store.tip().finished


def test_a_deposed_scheduler_ends() -> None:
    journal = Journal()
    with serving(persisting(journal), open_store=lambda: journal) as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        journal.deposed = True
        client.agent.send(Leave("x"))
        reason, failed = served.wait_ended()
        assert failed
        assert "term 1 is over" in reason


def test_an_error_of_the_machine_ends_the_scheduler_loudly(tmp_path: Path) -> None:
    def rule(event: fx.SchedulerEvent) -> None:
        assert not isinstance(event, fx.Drain), "a planted error"

    log = EventLog(tmp_path / "s.jsonl", role="scheduler")
    with serving(rule, log=log) as served:
        served.feed(fx.Drain("x"))
        reason, failed = served.wait_ended()
    assert failed
    assert "a planted error" in reason
    assert any(e.name == "error" and "planted" in e["text"] for e in read_events(tmp_path))


class Idle:
    """State machine of a scheduler that ignores every event."""

    def on(self, now: float, *events: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
        return []

    def snapshot(self, page: int = 0) -> dict[str, Any]:
        return {}


def test_the_next_scheduler_gets_the_chain_and_a_higher_term() -> None:
    shelf = MemoryStore()._shelf
    chains: list[fx.Chain] = []

    def machine(settings: Settings, chain: fx.Chain) -> Idle:
        chains.append(chain)
        return Idle()

    for _ in range(2):
        with serving(machine=machine, open_store=lambda: MemoryStore("default", shelf)):
            pass
    assert [c.term for c in chains] == [1, 2]


# ------------------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize("token", [b"", b"wrong token here"])
def test_strangers_are_refused_and_logged(token: bytes, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "s.jsonl", role="scheduler")
    with serving(token=TOKEN, log=log) as served:
        with pytest.raises(RefusedError, match="cluster token"):
            fetch_status(served.endpoint, token)
        with pytest.raises(RefusedError, match="cluster token"):
            drain(served.endpoint, "a", token)
        with attending(served.endpoint, token=token) as client:
            state = client.states.wait(lambda s: s.startswith("failed"))
            assert "cluster token" in state
        assert served.events.seen == []
        assert fetch_status(served.endpoint, TOKEN)["job"] == "default"
        with attending(served.endpoint, token=TOKEN) as client:
            client.states.wait(lambda s: s == "connected")
    refused = [e for e in read_events(tmp_path) if e.name == "refused"]
    assert len(refused) == 3
    assert all("127.0.0.1" in e["peer"] and "cluster token" in e["reason"] for e in refused)


def test_many_strangers_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "s.jsonl", role="scheduler")
    now = [100.0]
    with serving(token=TOKEN, log=log) as served:
        monkeypatch.setattr("chaos_lightning.machine.few_lines.time.monotonic", lambda: now[0])
        for _ in range(40):
            served.server._frame.auth.note("peer", "why")
        now[0] += 2.0
        served.server._frame.auth.note("peer", "why")
    refused = [e for e in read_events(tmp_path) if e.name == "refused"]
    assert len(refused) == 6
    assert refused[-1]["unlogged"] == 35


def test_odd_bytes_end_the_stream_and_are_logged(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "s.jsonl", role="scheduler")
    odd = chaos_pb2.FromMemberEnvelope(heartbeat=chaos_pb2.Heartbeat(seq=1))
    with serving(log=log) as served, grpc.insecure_channel(served.endpoint, options=CLIENT_OPTIONS) as channel:
        call = SchedulerStub(channel).Attend(iter([odd]))
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "Heartbeat without view" in caught.value.details()
        assert served.events.wait(closed) == fx.Closed(1, abrupt=True)
    assert any(e.name == "refused" and "without view" in e["reason"] for e in read_events(tmp_path))


@pytest.mark.parametrize(
    "said", [{"name": "n" * 5000}, {"host": "\u20ac" * 5000}, {"term": (1 << 63) - 1}], ids=("name", "host", "term")
)
def test_a_forged_hello_is_refused_by_name_and_ends_no_scheduler(said: dict[str, Any]) -> None:
    """Former bug: a hello with a text too long for any view ended the scheduler; now the sender alone is refused."""
    forged = [wrap_from_member(message) for message in (hello(**{"name": "x", **said, "pid": 9}), Ready())]
    with (
        serving(machine=real_machine, settings=Settings(min_nodes=1)) as served,
        grpc.insecure_channel(served.endpoint, options=CLIENT_OPTIONS) as channel,
        attending(served.endpoint) as well,
    ):
        well.messages.wait_for(Welcome)
        with pytest.raises(grpc.RpcError) as caught:
            list(SchedulerStub(channel).Attend(iter(forged), timeout=PATIENCE_S))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert f"Hello.{next(iter(said))}" in caught.value.details()
        well.agent.send(Ready())
        well.messages.wait_for(Decide)
        assert served.outcome is None


def test_beyond_loopback_a_token_is_demanded() -> None:
    with pytest.raises(ConfigurationError, match="cluster token"):
        Served(host="0.0.0.0")
    with serving(host="0.0.0.0", token=TOKEN) as served:
        assert fetch_status(f"127.0.0.1:{served.server.port}", TOKEN)["endpoint"].startswith("0.0.0.0:")


def test_a_taken_port_is_a_clear_error_and_the_chain_is_untouched() -> None:
    opened: list[int] = []

    def open_store() -> MemoryStore:
        opened.append(1)
        return MemoryStore()

    with serving() as served:
        with pytest.raises(ConfigurationError, match=r"port is taken.*status --endpoint"):
            Served(port=served.server.port, open_store=open_store)
        assert fetch_status(served.endpoint)["job"] == "default"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigurationError, match="port is taken"):
        Served(port=other.getsockname()[1], open_store=open_store)
    assert opened == []


# ------------------------------------------------------------------------------------------------ status, drain, ends


def test_status_tells_facts_and_the_snapshot() -> None:
    settings = Settings(job="j", min_nodes=2, max_nodes=3)
    with serving(settings=settings) as served, attending(served.endpoint, "a") as client:
        client.states.wait(lambda s: s == "connected")
        facts = fetch_status(served.endpoint)
        assert facts["job"] == "j"
        assert facts["endpoint"] == served.endpoint
        assert facts["pid"] == os.getpid()
        assert (facts["term"], facts["min_nodes"], facts["max_nodes"], facts["finished"]) == (1, 2, 3, False)
        assert [s["name"] for s in facts["streams"]] == ["a"]
        assert facts["machine"] == {"names": ["a"]}
        json.dumps(facts)


def test_nobody_there_is_said_so() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(SchedulerUnreachableError, match="no scheduler answered"):
            fetch_status(f"127.0.0.1:{sock.getsockname()[1]}", timeout_s=2.0)


def test_drain_asks_a_member_or_all_of_a_node() -> None:
    with (
        serving() as served,
        attending(served.endpoint, "edge-0") as a,
        attending(served.endpoint, "edge-1") as b,
        attending(served.endpoint, "edge-1-0") as c,
    ):
        for client in (a, b, c):
            client.states.wait(lambda s: s == "connected")
        assert drain(served.endpoint, "edge") == ("edge-0", "edge-1")
        assert drain(served.endpoint, "edge-1") == ("edge-1",)
        with pytest.raises(RefusedError, match="called 'edg'; present: edge-0, edge-1, edge-1-0"):
            drain(served.endpoint, "edg")
        served.events.wait_for(fx.Drain, count=3)
        drained = [e.name for e in served.events.seen if isinstance(e, fx.Drain)]
        assert drained == ["edge-0", "edge-1", "edge-1"]


def test_a_finished_scheduler_ends_when_all_have_gone() -> None:
    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if said(Leave("x"))(event):
            return [fx.Send(1, Released("finished")), fx.SchedulerDone("the job is finished")]
        return None

    with serving(rule, linger_s=60.0) as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        client.agent.send(Leave("x"))
        assert served.wait_ended() == ("the job is finished", False)


def test_a_finished_scheduler_lingers_no_longer_than_told() -> None:
    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        return [fx.SchedulerDone("the job is finished")] if said(Leave("x"))(event) else None

    with serving(rule, linger_s=0.3) as served, attending(served.endpoint) as client:
        client.states.wait(lambda s: s == "connected")
        client.agent.send(Leave("x"))
        served.events.wait(said(Leave("x")))
        assert fetch_status(served.endpoint)["finished"]
        assert served.wait_ended() == ("the job is finished", False)


def test_an_idle_scheduler_ends_only_while_nobody_is_there() -> None:
    with serving(idle_timeout_s=0.3) as served:
        with attending(served.endpoint) as client:
            client.states.wait(lambda s: s == "connected")
            served.events.wait(said(Heartbeat(NO_VIEW, 0, 0)), count=30)
            assert served.outcome is None
        reason, failed = served.wait_ended()
        assert not failed
        assert "no member for 0.3 s" in reason


def test_a_final_refusal_is_delivered() -> None:
    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if isinstance(event, fx.MessageIn):
            return [fx.Send(event.conn, Refused("fingerprint: torch 2.13 here, 2.12 there"))]
        return None

    with serving(rule) as served, attending(served.endpoint) as client:
        refused = client.messages.wait_for(Refused)
        assert "fingerprint" in refused.reason
        client.agent.join(PATIENCE_S)
        assert not client.agent.is_alive()
        assert served.events.wait(closed) == fx.Closed(1, abrupt=False)
