"""Tests the rendezvous handler alone, by the calls that torchrun's agent makes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
)

from chaos_lightning.control import hosting
from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.options import default_store
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.orphan import VARIABLE, agent_mark
from chaos_lightning.membership.effects import Persist
from chaos_lightning.protocol.types import NO_VIEW, Member, View, ViewId
from chaos_lightning.rendezvous import factory, handler
from chaos_lightning.rendezvous.handler import ChaosRendezvousHandler
from chaos_lightning.service.hosting import HostedProcess
from chaos_lightning.service.sqlite_store import SqliteStore


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restores os.environ after the test, since the handler writes to it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostedProcess]]:
    """List of the schedulers that the handler starts; each is stopped at the end."""
    found: list[HostedProcess] = []
    original = hosting._spawn

    def spawn(*args: Any) -> HostedProcess:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(hosting, "_spawn", spawn)
    yield found
    for scheduler in found:
        assert scheduler.stop()


def make(endpoint: str, **conf: str) -> ChaosRendezvousHandler:
    params = RendezvousParameters("chaos", endpoint, "job", 1, 3, **conf)
    made = factory()(params)
    assert isinstance(made, ChaosRendezvousHandler)
    return made


def test_workers_may_train_on_after_sigterm_before_an_agent_loses_patience(endpoint: str) -> None:
    assert make(endpoint, step_timeout_s="60").patience_s == 60.0
    assert make(endpoint, step_timeout_s="60", notice="sigterm:10m").patience_s == 660.0


def test_each_agent_is_a_world_of_its_own(endpoint: str, started: list[HostedProcess]) -> None:
    made = make(endpoint, node="n")
    assert made.get_backend() == "chaos"
    assert made.get_run_id() == "job"
    assert not made.use_agent_store
    info = made.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    info.store.set("key", "value")
    assert info.store.get("key") == b"value"
    assert os.environ["CHAOS_NODE"] == "n"
    assert os.environ["CHAOS_ENDPOINT"] == endpoint
    assert os.environ[VARIABLE] == agent_mark()
    assert fetch_status(endpoint)["max_nodes"] == 3
    assert len(started) == 1
    again = made.next_rendezvous()
    assert again.store is not info.store
    assert len(started) == 1


def test_nobody_ever_waits_and_nobody_is_closed_out(endpoint: str, started: list[HostedProcess]) -> None:
    made = make(endpoint)
    made.next_rendezvous()
    assert [made.num_nodes_waiting() for _ in range(50)] == [0] * 50
    assert not made.is_closed()
    assert made.shutdown()
    assert made.is_closed()
    assert started[0].alive()  # others may need it
    with pytest.raises(RendezvousClosedError):
        made.next_rendezvous()


def test_set_closed_closes(endpoint: str) -> None:
    made = make(endpoint)
    made.set_closed()
    assert made.is_closed()


def test_a_worker_that_restarts_after_the_end_does_not_begin_anew(endpoint: str, started: list[HostedProcess]) -> None:
    made = make(endpoint)
    made.next_rendezvous()
    assert started[0].stop()
    with JobChain(SqliteStore(default_store("job", int(endpoint.rpartition(":")[2])), "job")) as store:
        term = store.take_term()
        assert store.append(Persist(1, "finish", ViewId(term, 1))).ok
    with pytest.raises(RendezvousClosedError, match="job 'job' is finished"):
        made.next_rendezvous()
    assert made.is_closed()
    assert len(started) == 1
    # A new agent is a new wish: the job begins anew.
    make(endpoint).next_rendezvous()
    assert len(started) == 2


def test_a_scheduler_that_is_gone_is_started_again_while_workers_run(
    endpoint: str, started: list[HostedProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handler, "_LOOK_INTERVAL_S", 0.0)
    made = make(endpoint)
    made.next_rendezvous()
    os.kill(started[0].pid, signal.SIGKILL)
    # The kernel frees the port a moment after the process is gone.
    pause = threading.Event()
    for _ in range(300):
        assert made.num_nodes_waiting() == 0
        if len(started) == 2:
            break
        pause.wait(0.1)
    assert made._looking is not None
    made._looking.join(30.0)
    assert len(started) == 2
    assert fetch_status(endpoint)["term"] == 2
    assert "started another one on its chain" in caplog.text


def test_a_scheduler_that_none_of_its_members_has_come_to_says_nothing_of_the_jobs_chain(
    endpoint: str, started: list[HostedProcess]
) -> None:
    """The scheduler's store may belong to another job of the same name, as no member of this job has joined it yet.
    The handler must not remember that chain, or it could not start a scheduler with its own later.
    """
    first = ViewId(1, 1)
    alone = View(first, NO_VIEW, (Member("a~1", "a", "host", "127.0.0.1", 4000),))
    with JobChain(SqliteStore(default_store("job", int(endpoint.rpartition(":")[2])), "job")) as store:
        store.take_term()
        assert store.append(Persist(1, "view", first, alone)).ok
        chain = store.tip().chain
    made = make(endpoint)
    made.next_rendezvous()
    assert fetch_status(endpoint)["machine"]["chain"] == chain
    made._look()
    assert made._chain == ""


def test_a_worker_that_restarts_has_no_scheduler_started_on_a_store_that_lacks_its_chain(
    endpoint: str, started: list[HostedProcess]
) -> None:
    made = make(endpoint)
    made.next_rendezvous()
    assert started[0].stop()
    made._chain = "0123456789abcdef"  # as members told, before their store went away
    with pytest.raises(RendezvousConnectionError, match="goes by chain 0123456"):
        made.next_rendezvous()
    assert len(started) == 1


def test_a_scheduler_that_cannot_be_started_again_is_a_warning(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, started: list[HostedProcess]
) -> None:
    made = make(endpoint)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise handler.ConfigurationError("no such luck")

    monkeypatch.setattr(handler, "ensure_scheduler", fail)
    with caplog.at_level(logging.WARNING):
        made._look()
    assert "could not be started again: no such luck" in caplog.text


def test_hosting_can_be_declined(endpoint: str, started: list[HostedProcess]) -> None:
    made = make(endpoint, host_scheduler="0")
    made.next_rendezvous()
    made._looked = -1e9
    assert made.num_nodes_waiting() == 0
    assert made._looking is None
    assert started == []
    assert os.environ["CHAOS_HOST_SCHEDULER"] == "0"


def test_what_stands_in_the_way_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("chaos_lightning.service.hosting.ODD_LISTENER_PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def hang_up() -> None:
            server.settimeout(0.1)
            while not stop.is_set():
                try:
                    server.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with pytest.raises(RendezvousConnectionError, match="is no scheduler"):
                make(f"127.0.0.1:{server.getsockname()[1]}").next_rendezvous()
        finally:
            stop.set()
            thread.join()
    (tmp_path / "chain").write_bytes(b"something precious" * 100)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with pytest.raises(RendezvousConnectionError, match="move it away"):
        make(f"127.0.0.1:{port}", store=str(tmp_path / "chain")).next_rendezvous()


def test_another_jobs_scheduler_is_named(endpoint: str, started: list[HostedProcess]) -> None:
    make(endpoint).next_rendezvous()
    other = RendezvousParameters("chaos", endpoint, "other", 1, 3)
    with pytest.raises(ConfigurationError, match="of job 'job', not of 'other'"):
        factory()(other).next_rendezvous()


def test_beyond_loopback_a_token_is_demanded_at_once(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="cluster token"):
        make(endpoint, bind="0.0.0.0")
