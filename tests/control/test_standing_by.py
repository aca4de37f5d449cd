"""Tests a scheduler that waits, is elected, and waits again: its server and its candidacy."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from chain_support import decide, etcd_chain
from etcd_for_tests import servers
from served import PATIENCE_S, Facts, ScriptedMachine, Served, serving
from until_support import until

from chaos_lightning.control import scheduler_main
from chaos_lightning.control.chain_writer import ChainWriter
from chaos_lightning.control.claims import ask
from chaos_lightning.control.etcd_rules import EtcdRules
from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.member_streams import ENCODING, MemberStreams
from chaos_lightning.control.options import Owed, SchedulerOptions
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.control.scheduler_server import real_machine
from chaos_lightning.control.service_pb2_grpc import SchedulerStub
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.types import Settings, ViewId
from chaos_lightning.security.access import LEADER_KEY
from chaos_lightning.service import election
from chaos_lightning.service.etcd_address import read_address
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.service.memory_store import MemoryStore
from chaos_lightning.service.server import CANNOT_LEAD
from chaos_lightning.service.store import Store
from chaos_lightning.service.streams import Stream


class PlainCandidacy:
    """Candidacy without etcd, which is elected when a test calls `elect`."""

    def __init__(self) -> None:
        self.elect: Callable[[], None] = lambda: None
        self.present: Callable[[], Any] = set
        self.closed = Facts[str]()
        self.was_led = False
        self.told: dict[str, Any] = {}

    def stand(self, endpoint: str, on_elected: Any, on_lost: Any, note: Any, present: Any) -> None:
        self.elect, self.present = on_elected, present

    def asked(self, name: str) -> None:
        pass

    def open_store(self) -> Store:
        return MemoryStore()

    def watched(self) -> bool:
        return True

    def waited(self) -> bool:
        return self.was_led

    def stands_by(self) -> bool:
        return False

    def waits(self, what: str) -> tuple[str, str]:
        place = str(self.told.get("leader", ""))
        return f"this {what} waits to lead; now {place or 'nobody'} does", place

    def facts(self) -> dict[str, Any]:
        return dict(self.told)

    def close(self) -> None:
        self.closed.add("closed")


def test_one_that_never_led_ends_when_nobody_needs_it() -> None:
    with serving(candidacy=PlainCandidacy(), idle_timeout_s=0.2) as served:
        assert served.wait_ended() == ("no member for 0.2 s; the chain stays in its store", False)


def test_who_stands_by_numbers_founders_too() -> None:
    """A scheduler that waits to lead gives numbers to founders, too, since they ask the last one in the list of
    endpoints.
    """
    with serving(candidacy=PlainCandidacy()) as served:
        first, second = (ask(served.endpoint, b"", "default", PATIENCE_S) for _ in "ab")
        assert (first.number, second.number) == (0, 1)
        first.release()
        second.release()


def test_a_task_that_fails_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos_lightning.control.scheduler_server import SchedulerServer

    def fail(self: SchedulerServer) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(SchedulerServer, "_look_for_idleness", fail)
    with serving() as served:
        assert served.wait_ended() == ("internal error: ZeroDivisionError: planted", True)


def chain_of_one_view(store: Store) -> Store:
    chain = JobChain(store)
    chain.take_term()
    assert chain.append(decide(ViewId(chain.term, 1))).ok
    return store


@pytest.mark.parametrize("lost", [False, True])
def test_a_chain_that_was_rebuilt_by_another_one_is_continued(*, lost: bool) -> None:
    """A scheduler started with --rebuild rebuilds a lost chain, but continues one that another scheduler has
    rebuilt.
    """
    chains = Facts[fx.Chain]()
    store = MemoryStore() if lost else chain_of_one_view(MemoryStore())

    def machine(settings: Settings, chain: fx.Chain) -> Any:
        chains.add(chain)
        return ScriptedMachine(settings, chain, served)

    candidacy = PlainCandidacy()
    with serving(candidacy=candidacy, rebuild=True, machine=machine, open_store=lambda: store) as served:
        candidacy.elect()
        chain = chains.wait(lambda _: True)
        assert (len(chain.views), chain.rebuild) == (0 if lost else 1, lost)


def test_a_chain_that_is_there_is_continued_and_its_end_rebuilt_if_members_know_more() -> None:
    chains = Facts[fx.Chain]()
    store = chain_of_one_view(MemoryStore())

    def machine(settings: Settings, chain: fx.Chain) -> Any:
        chains.add(chain)
        return real_machine(settings, chain)

    with serving(rebuild=True, machine=machine, open_store=lambda: store):
        chain = chains.wait(lambda _: True)
    assert (len(chain.views), chain.rebuild) == (1, True)
    assert chain.hears_s > 1.0


@pytest.fixture
def job() -> str:
    return f"job-{os.urandom(4).hex()}"


@pytest.mark.parametrize("again", [False, True])
def test_only_a_process_that_has_not_led_before_begins_a_finished_job_anew(
    etcd: EtcdServers, job: str, *, again: bool
) -> None:
    """A finished job is begun anew by a new process, not by one that led before and woke after another had finished the
    job.
    """
    address, old = read_address(etcd.address), Settings(job=job, min_nodes=2)
    with etcd_chain(etcd.client(), job) as store:
        chain_of_one_view(store.store)
        assert store.append(fx.Persist(7, "finish", ViewId(1, 1))).ok
    for followed, given in ((True, old), (again, Settings(job=job, min_nodes=1))):
        rules, elected = EtcdRules(address, job, followed=followed), threading.Event()
        candidacy = rules.candidacy
        try:
            candidacy.stand("a:1", elected.set, lambda reason: None, lambda *_, **__: None, set)
            assert elected.wait(PATIENCE_S)
            assert JobChain(rules.open_store()).tip().finished == followed
            assert rules.rules(given) == (old if followed else given)
        finally:
            candidacy.close()


class Finishing(ScriptedMachine):
    """Scripted machine that finishes the job when asked to drain a member."""

    def on(self, now: float, *events: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
        drained = any(isinstance(event, fx.Drain) for event in events)
        return [fx.Persist(1, "finish", ViewId(1, 1))] if drained else super().on(now, *events)

    def snapshot(self, page: int = 0) -> dict[str, Any]:
        return {**super().snapshot(page), "chain": self.chain.id, "view": ""}


@pytest.mark.slow
@pytest.mark.parametrize("gone_on", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_end_of_a_job_is_carried_to_the_next_time_that_this_process_leads(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch, *, gone_on: bool
) -> None:
    monkeypatch.setattr(election, "PATIENCE_S", 0.1)
    settings = Settings(job=job)
    with servers(tmp_path, 1) as etcd:
        address, (server,) = read_address(etcd.address), etcd.servers

        def lead(**changes: Any) -> AbstractContextManager[Served]:
            rules = EtcdRules(address, job, followed="owed" in changes, lease_s=2)
            rules.candidacy.client.deadline_s = 1.0
            return serving(
                candidacy=rules.candidacy,
                open_store=rules.open_store,
                rules_of_job=rules.rules,
                settings=settings,
                machine=make,
                **changes,
            )

        def make(settings: Settings, chain: fx.Chain) -> ScriptedMachine:
            return Finishing(settings, chain, served)

        with lead() as served:
            until(lambda: served.server.status()["role"] == "leader", "an election")
            etcd.kill(server)
            served.feed(fx.Drain("x"))
            until(lambda: served.server.status()["owed"], "that it says what it owes")
            assert served.wait_ended()[1]  # its lease ended with etcd
            owed = served.server.owed
        assert owed is not None
        etcd.run(server)
        etcd.wait_ready(PATIENCE_S)
        if gone_on:
            with etcd_chain(etcd.client(), job) as store:
                chain_of_one_view(store.store)
        with lead(owed=owed) as served:
            until(lambda: served.server.status()["role"] == "leader", "another election")
            assert served.server.owed is None
        with etcd_chain(etcd.client(), job) as store:
            assert store.tip().finished != gone_on


def test_an_end_that_its_store_has_not_answered_yet_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a scheduler ends before its store has confirmed the end of the job, the end is kept as owed."""
    asked, may_answer = threading.Event(), threading.Event()

    def answer(chain: JobChain, effect: fx.Persist) -> Any:
        asked.set()
        assert may_answer.wait(PATIENCE_S)

    monkeypatch.setattr(JobChain, "append", answer)
    owed = Owed(fx.Persist(1, "finish", ViewId(1, 1)), "chain", "1.1")

    async def ends_meanwhile() -> Owed | None:
        writer = ChainWriter(MemoryStore, lambda name, **fields: None)
        await writer.in_thread(writer.take, lambda: None)
        writing = asyncio.create_task(writer.append(owed.effect, owed))
        await asyncio.to_thread(asked.wait, PATIENCE_S)
        writing.cancel()
        may_answer.set()
        await writer.close()
        return writer.owed

    assert asyncio.run(ends_meanwhile()) == owed


def test_a_process_that_stands_by_again_knows_what_it_owes(monkeypatch: pytest.MonkeyPatch) -> None:
    owed, seen = Owed(fx.Persist(1, "finish", ViewId(1, 1)), "chain", "1.1", "away"), []

    async def serve(server: Any, on_started: Callable[[Any], None]) -> tuple[str, bool]:
        seen.append(server.config.owed)
        if len(seen) == 1:
            server._writer.owed = owed
        return "it leads no more", len(seen) < 3

    monkeypatch.setattr("chaos_lightning.service.server.serve", serve)
    monkeypatch.setattr("chaos_lightning.service.server.AGAIN_S", 0.0)
    monkeypatch.setattr(EtcdRules, "check", lambda *_: "")
    options = SchedulerOptions(listen="127.0.0.1:1", store="etcd://127.0.0.1:1", settings=Settings())
    assert scheduler_main.run(options) == 0
    assert seen == [None, owed, owed]


def test_a_leader_that_fails_with_any_error_ends() -> None:
    candidacy = PlainCandidacy()

    def fail() -> Store:
        raise ZeroDivisionError("planted")

    with serving(candidacy=candidacy, open_store=fail) as served:
        candidacy.elect()
        assert served.wait_ended() == (f"{CANNOT_LEAD}: ZeroDivisionError: planted", True)


@pytest.mark.parametrize("named", ["", "127.0.0.1:1"], ids=["nobody yet", "one that is gone"])
def test_a_standby_that_does_not_know_who_leads_is_no_reason_not_to_ask_the_others(named: str) -> None:
    new, leads = PlainCandidacy(), PlainCandidacy()
    new.told = {"leader": named}
    with serving(candidacy=new) as first, serving(candidacy=leads) as second:
        leads.elect()
        places = f"{first.endpoint},{second.endpoint}"
        until(lambda: fetch_status(places)["role"] == "leader", "the one that leads")
        assert fetch_status(places)["endpoint"] == second.endpoint
        assert fetch_status(first.endpoint)["endpoint"] == first.endpoint, "nobody else to ask"
        assert fetch_status(places, follow=False)["endpoint"] == first.endpoint


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        ("Drain", chaos_pb2.DrainRequest(name="x")),
        ("ChangeLink", chaos_pb2.LinkChangeRequest(a="x", b="y")),
        ("Reset", chaos_pb2.ResetRequest()),
    ],
)
def test_a_standby_decides_nothing_and_names_the_leader(call: str, request_: Any) -> None:
    waits = PlainCandidacy()
    waits.told = {"leader": "a:1"}
    with serving(candidacy=waits) as served, grpc.insecure_channel(served.endpoint) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            getattr(SchedulerStub(channel), call)(request_, timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata())[LEADER_KEY] == "a:1"


def test_one_among_the_endpoints_that_refuses_does_not_hide_what_a_standby_says() -> None:
    new = PlainCandidacy()
    new.told = {"leader": ""}
    with serving(candidacy=new) as first, serving(token=b"another cluster's") as other:
        assert fetch_status(f"{first.endpoint},{other.endpoint}")["endpoint"] == first.endpoint


def test_one_that_was_elected_says_that_it_still_takes_the_chain() -> None:
    candidacy, go_on = PlainCandidacy(), threading.Event()
    candidacy.told = {"leader": "a:1", "waits_for": ""}

    def slow() -> Store:
        assert go_on.wait(PATIENCE_S)
        return MemoryStore()

    with serving(candidacy=candidacy, open_store=slow) as served:
        candidacy.elect()
        facts = fetch_status(served.endpoint, follow=False)
        go_on.set()
        assert (facts["role"], facts["waits_for"]) == ("standby", "its store: it was elected, and takes the chain")
        until(lambda: fetch_status(served.endpoint)["role"] == "leader", "its lead")
        assert fetch_status(served.endpoint)["waits_for"] == ""


def test_a_member_that_is_not_heard_is_not_present() -> None:
    streams = MemberStreams(print, print, print, hello_timeout_s=1.0, pulses=True)
    heard, silent = (Stream(number, name, "Attend", ENCODING) for number, name in ((1, "a"), (2, "b")))
    streams.standing |= {1: heard, 2: silent}
    heard.name, silent.name = "a", "b"
    silent.heard -= 2.0
    assert streams.present(1.0) == {"a"}
    assert streams.present(60.0) == {"a", "b"}
