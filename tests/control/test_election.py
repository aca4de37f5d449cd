"""Tests the election: one candidate leads at a time, and another soon after it dies, freezes, resigns or loses its
lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chain_support import decide, etcd_chain, reserve
from etcd_for_tests import servers
from until_support import until

from chaos_lightning.errors import StoreError
from chaos_lightning.machine import process_table
from chaos_lightning.protocol.types import NO_VIEW, ViewId
from chaos_lightning.service import election
from chaos_lightning.service.election import Candidate, Election
from chaos_lightning.service.etcd_client import EtcdClient
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.service.etcd_store import EtcdStore, service_root

PATIENCE_S = 60.0


class Running:
    """Candidate in this process; the queue `said` has its outcomes."""

    def __init__(
        self, servers: EtcdServers, job: str, name: str, *, elsewhere: bool = False, services: str = "jobs"
    ) -> None:
        self.client: EtcdClient = servers.client()
        self.said: queue.Queue[tuple[str, Any]] = queue.Queue()
        me = replace(Candidate.here(f"{name}:1"), id=name)
        if elsewhere:
            me = replace(me, host="another machine")
        self.election = Election(
            self.client,
            service_root(self.client.address.prefix, services, job),
            me,
            on_elected=lambda guard: self.said.put(("elected", guard)),
            on_lost=lambda reason: self.said.put(("lost", reason)),
        )
        self.election.start()

    def hears(self, what: str) -> Any:
        word, value = self.said.get(timeout=PATIENCE_S)
        assert word == what, (word, value)
        return value

    def close(self) -> None:
        self.election.resign(PATIENCE_S)
        self.client.close()


@pytest.fixture
def job() -> str:
    return f"job-{os.urandom(4).hex()}"


@pytest.fixture
def running() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def start(stack: contextlib.ExitStack, servers: EtcdServers, job: str, name: str, **more: Any) -> Running:
    made = Running(servers, job, name, **more)
    stack.callback(made.close)
    return made


@pytest.mark.slow
def test_who_stands_by_is_needed_until_etcd_is_gone(tmp_path: Path, job: str, running: contextlib.ExitStack) -> None:
    """A candidate counts as standing by, so that it must not end for idleness, until etcd is gone."""
    one = running.enter_context(servers(tmp_path / "etcd", 1))
    a = start(running, one, job, "a")
    a.hears("elected")
    b = start(running, one, job, "b")
    until(lambda: b.election.stands_by, "b to stand by")
    one.kill(one.servers[0])
    until(lambda: not b.election.stands_by, "b to give up")


@pytest.mark.usefixtures("each_client")
def test_the_first_leads_and_the_next_one_after_it_resigned(
    etcd: EtcdServers, job: str, running: contextlib.ExitStack
) -> None:
    a = start(running, etcd, job, "a")
    a.hears("elected")
    b = start(running, etcd, job, "b")
    until(lambda: b.election.stands_by, "b to stand by")
    assert b.election.leader is not None
    assert b.election.leader.endpoint == "a:1"
    assert sorted(c.id for c in b.election.candidates()) == ["a", "b"]
    assert b.said.empty()
    assert not a.election.stands_by
    a.election.resign()
    b.hears("elected")
    assert not b.election.stands_by
    assert a.said.empty(), "who resigns knows it"


def test_of_many_that_come_at_once_one_leads(etcd: EtcdServers, job: str, running: contextlib.ExitStack) -> None:
    all_of_them = [start(running, etcd, job, f"c{number}") for number in range(5)]
    led = []
    for _ in range(len(all_of_them)):
        deadline = time.monotonic() + PATIENCE_S
        while not (leading := [c for c in all_of_them if c.election.leads]) and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert len(leading) == 1
        led.append(leading[0])
        leading[0].election.resign(PATIENCE_S)
        all_of_them.remove(leading[0])
    assert len(led) == 5


@pytest.mark.usefixtures("each_client")
def test_a_leader_that_lost_its_lease_writes_nothing_more_though_nobody_leads_yet(
    etcd: EtcdServers, job: str, running: contextlib.ExitStack
) -> None:
    a = start(running, etcd, job, "a")
    guard = a.hears("elected")
    with etcd_chain(etcd.client(), job, guard=guard) as chain:
        chain.take_term()
        assert chain.append(decide(ViewId(1, 1))).ok
        assert a.election.leader is not None
        a.client.revoke(a.election._me.lease)
        outcome = chain.append(reserve(ViewId(1, 2)))
        assert not outcome.ok
        assert "does not lead any more" in outcome.detail
        with pytest.raises(StoreError, match="does not lead any more"):
            chain.take_term()
    assert a.hears("lost") == "its lease has ended"


@pytest.mark.usefixtures("each_client")
def test_a_lease_that_ends_while_waiting_is_taken_anew(
    etcd: EtcdServers, job: str, running: contextlib.ExitStack
) -> None:
    """A waiting candidate whose lease has expired, as after a long pause of the machine, takes a new one, and is
    elected later.
    """
    a = start(running, etcd, job, "a")
    a.hears("elected")
    b = start(running, etcd, job, "b")
    deadline = time.monotonic() + PATIENCE_S
    while not b.election.followed and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    before = b.election._me.lease
    b.client.revoke(before)
    while b.election._me.lease == before and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    a.election.resign()
    b.hears("elected")


def test_a_candidate_whose_watch_is_deaf_is_elected_all_the_same(
    etcd: EtcdServers, job: str, running: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(self: Election, key: str, revision: int) -> Iterator[list[Any]]:
        while not self._over.wait(0.05):
            yield []

    monkeypatch.setattr(Election, "_changes", deaf)
    a = start(running, etcd, job, "a")
    a.hears("elected")
    b = start(running, etcd, job, "b")
    until(lambda: b.election.followed, "b to follow")
    a.election.resign()
    b.hears("elected")


@pytest.mark.usefixtures("each_client")
def test_etcd_that_cannot_be_reached_ends_a_reign_no_later_than_its_lease(
    etcd_of_three: EtcdServers, job: str, running: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(election, "PATIENCE_S", 0.1)
    a = start(running, etcd_of_three, job, "a")
    a.client.deadline_s = 0.5  # for giving its lease back
    a.hears("elected")
    for server in etcd_of_three.servers:
        etcd_of_three.kill(server)
    assert "could not prolong its lease" in a.hears("lost")


@pytest.mark.usefixtures("each_client")
def test_another_service_elects_a_leader_of_its_own_beside_a_job(
    etcd: EtcdServers, job: str, running: contextlib.ExitStack
) -> None:
    """A service of another kind that has a job's name elects a leader of its own, and keeps its own log."""
    leads_job = start(running, etcd, job, "s")
    guard = leads_job.hears("elected")
    chain = running.enter_context(etcd_chain(etcd.client(), job, guard=guard))
    chain.take_term()
    assert chain.append(decide(ViewId(1, 1))).ok
    one = start(running, etcd, job, "one", services="tallies")
    first = one.hears("elected")
    other = start(running, etcd, job, "other", services="tallies")
    until(lambda: other.election.stands_by, "the other tally to stand by")
    assert {c.id for c in other.election.candidates()} == {"one", "other"}
    assert {c.id for c in leads_job.election.candidates()} == {"s"}

    def tally(of: Running, guard: Any) -> EtcdStore:
        root = service_root(of.client.address.prefix, "tallies", job)
        return running.enter_context(EtcdStore(of.client, root, guard=guard, owned=False))

    old = tally(one, first)
    end = old.take_term()
    assert old.place.endswith(f"tallies/{job}")
    end = old.append("vote", b"a", end).end
    end = old.append("total", b"1", end, cut=True).end
    one.client.revoke(one.election.me.lease)
    new = tally(other, other.hears("elected"))
    assert "does not lead any more" in old.append("vote", b"b", end).detail
    assert new.take_term().term == 2
    assert [(r.position, r.kind) for r in new.read()[1]] == [(2, "total")]
    assert (leads_job.election.leads, leads_job.said.empty()) == (True, True)
    assert chain.append(decide(ViewId(1, 2), ViewId(1, 1))).ok
    assert len(chain.load().views) == 2


CANDIDATE = """
import json, sys, threading
from chaos_lightning.service.election import Candidate, Election
from chaos_lightning.service.etcd_address import read_address
from chaos_lightning.service.etcd_client import EtcdClient
from chaos_lightning.service.etcd_store import EtcdStore, job_root, service_root

def say(*words):
    print(json.dumps(words), flush=True)

client = EtcdClient(read_address(sys.argv[1]))
root = job_root(client.address.prefix, sys.argv[2])
election = Election(client, root, Candidate.here("child:1"), on_elected=lambda guard: say("elected"),
                    on_lost=lambda reason: say("lost", reason))
election.start()
threading.Event().wait()
"""


@contextlib.contextmanager
def child(servers: EtcdServers, job: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a candidate in a process of its own within the block."""
    command = [sys.executable, "-c", CANDIDATE, servers.address, job]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def says(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    words: list[str] = json.loads(process.stdout.readline())
    return words


@pytest.mark.parametrize("elsewhere", [False, True], ids=["the same machine", "another machine"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_leader_is_followed_by_the_next_and_learns_it_when_it_wakes(
    etcd: EtcdServers, job: str, running: contextlib.ExitStack, number: signal.Signals, elsewhere: bool
) -> None:
    with child(etcd, job) as process:
        assert says(process) == ["elected"]
        b = start(running, etcd, job, "b")
        if elsewhere:  # it does not see processes then, and the lease must end by itself
            running.enter_context(pytest.MonkeyPatch.context()).setattr(Candidate, "process_state", lambda self: "")
        deadline = time.monotonic() + PATIENCE_S
        while b.election.leader is None and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        os.kill(process.pid, number)
        guard = b.hears("elected")
        with etcd_chain(etcd.client(), job, guard=guard) as chain:
            chain.take_term()
            assert chain.append(decide(ViewId(chain.term, 1), NO_VIEW)).ok
        if number == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
            assert says(process) == ["lost", "its lease has ended"]


def test_a_leader_of_this_machine_that_is_hidden_from_a_candidate_goes_on(
    etcd: EtcdServers, job: str, running: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that cannot see a leader's process on its own machine watches it by a connection, and does not depose
    it.
    """
    a = start(running, etcd, job, "a")
    a.hears("elected")
    monkeypatch.setattr(process_table.watcher, "stat", lambda pid: None)
    b = start(running, etcd, job, "b")
    until(lambda: b.election._line is not None, "a line to the leader")
    until_s = b.election._until
    until(lambda: b.election._until > until_s, "many looks at it")
    assert (a.said.empty(), b.said.empty(), a.election.leads) == (True, True, True)


@pytest.mark.parametrize("how", ["the write fails", "the read fails", "the read shows nothing"])
def test_a_candidate_that_did_not_hear_that_it_was_elected_leads(
    etcd: EtcdServers, job: str, running: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A candidate that was elected, but got no answer, leads at once, and does not wait for the end of its own
    lease.
    """
    once, get, left = EtcdClient.transact, EtcdClient.get_all, [1]

    def is_there(client: EtcdClient, key: str) -> bool:
        return key.endswith("/leader") and bool(get(client, key)[0])

    def transact(self: EtcdClient, compare: Any, writes: Any) -> tuple[bool, int]:
        done = once(self, compare, writes)
        if how == "the write fails" and left and any(w.request_put.key.endswith(b"/leader") for w in writes):
            left.pop()
            raise StoreError("planted: the answer got lost")
        return done

    def look(self: EtcdClient, key: str, *, deadline_s: float | None = None) -> Any:
        if how != "the write fails" and left and is_there(self, key):
            left.pop()
            if how == "the read fails":
                raise StoreError("planted: no answer")
            return [], get(self, key)[1]
        return get(self, key, deadline_s=deadline_s)

    monkeypatch.setattr(EtcdClient, "transact", transact)
    monkeypatch.setattr(EtcdClient, "get_all", look)
    a = start(running, etcd, job, "a")
    guard = a.hears("elected")
    assert not left, "it was planted"
    assert not a.election.followed, "it takes its own key for nobody else's"
    with etcd_chain(etcd.client(), job, guard=guard) as chain:
        chain.take_term()
        assert chain.append(decide(ViewId(1, 1))).ok


def test_who_leads_no_more_or_has_not_looked_yet_names_nobody(
    etcd: EtcdServers, job: str, running: contextlib.ExitStack
) -> None:
    client = running.enter_context(contextlib.closing(etcd.client()))
    waiting = Election(
        client, "tests/nobody/", Candidate.here("c:1"), on_elected=lambda _: None, on_lost=lambda _: None
    )
    assert waiting.waits_for() == "etcd's first word on who leads"
    a = start(running, etcd, job, "a")
    a.hears("elected")
    assert a.election.leader is not None
    assert (a.election.waits_for(), a.election.leader.endpoint) == ("", "a:1")
    a.client.revoke(a.election.me.lease)
    assert a.hears("lost") == "its lease has ended"
    assert not a.election.stands_by
    assert (a.election.waits_for(), a.election.leader) == ("etcd's first word on who leads", None)


@pytest.mark.parametrize("value", [b"", b"[]", b"\xff", b'{"id": 1}', json.dumps({"id": "x"}).encode()])
def test_a_leaders_key_with_something_else_in_it_names_nobody(value: bytes) -> None:
    assert Candidate.read(value) is None
