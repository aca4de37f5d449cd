"""Tests `chaos-lightning reset`: it ends a job through its scheduler, or directly on its chain."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Client, attending, hello, place_of, scheduler_process, serving
from typer.testing import CliRunner
from until_support import until

from chaos_lightning import cli
from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.control.resetting import reset_job
from chaos_lightning.control.scheduler_server import real_machine
from chaos_lightning.errors import ConfigurationError, RefusedError, SchedulerUnreachableError
from chaos_lightning.machine.process_table import host_identity, start_time
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Decide,
    Member,
    OpenLinks,
    Ready,
    Refused,
    Released,
    Settings,
    View,
    ViewId,
)
from chaos_lightning.service.sqlite_store import SqliteStore

NOBODY = "127.0.0.1:9"


def answer(message: object) -> list[Any]:
    return [Ready()] if isinstance(message, OpenLinks) else []


def a_chain(path: Path, **changes: Any) -> SchedulerOptions:
    """Makes the chain of a job that was killed; its only member ran in this process, except for what `changes`
    replaces.
    """
    values = {"host": host_identity(), "pid": os.getpid(), "pid_start": start_time(os.getpid()), **changes}
    member = Member("a~1", "a", values.pop("host"), values.pop("address", "10.0.0.9"), 1, **values)
    with JobChain(SqliteStore(path, "default")) as store:
        term = store.take_term()
        view = View(ViewId(term, 1), NO_VIEW, (member,))
        assert store.append(fx.Persist(1, "view", view.id, view)).ok
    return SchedulerOptions(listen=NOBODY, settings=Settings(), store=str(path))


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return tmp_path / "chain.sqlite"


def archived(chain: Path) -> list[Path]:
    return list(chain.parent.glob("chain.finished-*.sqlite"))


def test_a_job_whose_member_lives_is_ended_by_force_and_the_next_one_begins_at_the_same_scheduler(chain: Path) -> None:
    options = SchedulerOptions(listen=NOBODY, settings=Settings())
    opened = lambda: SqliteStore(chain, "default", exclusive=True)  # noqa: E731
    with serving(machine=real_machine, open_store=opened) as served:
        first = Client(served.endpoint, "a")
        first.answer = answer
        try:
            first.messages.wait_for(Decide)
            with pytest.raises(RefusedError, match=r"a~1 is in the job and alive.*drain NODE.*--force"):
                reset_job(served.endpoint, options, b"", force=False)
            assert not archived(chain)
            done = CliRunner().invoke(cli.app, ["reset", "--endpoint", served.endpoint, "--force"])
            assert (done.exit_code, done.output) == (0, "the job is ended; its last view had a~1 in it\n")
            released = first.messages.wait_for(Released)
            assert (released.reason, released.asked) == ("an operator has ended the job", True)
        finally:
            first.close()
        until(lambda: fetch_status(served.endpoint)["machine"].get("phase") == "founding", "an empty chain")
        with attending(served.endpoint, "b") as second:
            second.answer = answer
            decided = second.messages.wait_for(Decide)
            assert (decided.view.predecessor, [m.name for m in decided.view.members]) == (NO_VIEW, ["b"])
            assert decided.view.id.term > 1
    (old,) = archived(chain)
    with JobChain(SqliteStore(old, "default", read_only=True)) as store:
        assert store.tip().finished
        assert [v.ids() for v in store.load().views] == [("a~1",)]


def test_nothing_is_promised_for_an_empty_store_beside_members_that_lack_their_chain() -> None:
    """The refusal does not suggest --force if the store is empty, since there is nothing to end."""
    stands = hello("a", resume="a~1", view=ViewId(1, 7), term=1, chain="0123456789abcdef")
    with serving(machine=real_machine) as served, attending(served.endpoint, hello_factory=lambda: stands) as member:
        member.messages.wait_for(Refused)
        with pytest.raises(RefusedError, match=r"is lost: a~1 in view 1\.7.*--rebuild") as refused:
            reset_job(served.endpoint, SchedulerOptions(listen=NOBODY), b"", force=False)
        assert "--force" not in str(refused.value)


def test_a_member_that_comes_back_after_the_reset_is_let_go_and_stops_no_next_job(chain: Path) -> None:
    """A member that was cut off during a reset is released when it returns, and the next job begins without it."""
    options = a_chain(chain, host="elsewhere")
    with JobChain(SqliteStore(chain, "default")) as store:
        stands = {"resume": "a~1", "view": store.load().views[-1].id, "term": 1, "chain": store.tip().chain}
    assert "archived as" in reset_job(NOBODY, options, b"", force=True)
    opened = lambda: SqliteStore(chain, "default", exclusive=True)  # noqa: E731
    with serving(machine=real_machine, open_store=opened) as served:
        back = lambda: hello("a", job="default", **stands)  # noqa: E731
        with attending(served.endpoint, "a", hello_factory=back) as member:
            assert member.messages.wait_for(Released).asked
        with attending(served.endpoint, "b") as second:
            second.answer = answer
            assert [m.name for m in second.messages.wait_for(Decide).view.members] == ["b"]


def test_newcomers_that_wait_at_a_dead_job_found_the_next_one(chain: Path) -> None:
    """Newcomers that wait at a job whose members are dead found the next job after a reset, without a restart."""
    a_chain(chain, host="elsewhere")
    opened = lambda: SqliteStore(chain, "default", exclusive=True)  # noqa: E731
    rules = Settings(reconnect_grace_s=0.2)
    with serving(machine=real_machine, open_store=opened, settings=rules) as served:
        waiting = Client(served.endpoint, "b")
        waiting.answer = answer
        try:
            until(lambda: "reset" in fetch_status(served.endpoint)["machine"]["reason"], "that it says what to do")
            assert "had a~1 in it" in reset_job(served.endpoint, SchedulerOptions(listen=NOBODY), b"", force=False)
            assert [m.name for m in waiting.messages.wait_for(Decide).view.members] == ["b"]
        finally:
            waiting.close()


def test_the_word_to_rebuild_is_over_with_the_job_that_it_was_about(chain: Path) -> None:
    a_chain(chain, host="elsewhere")
    opened = lambda: SqliteStore(chain, "default", exclusive=True)  # noqa: E731
    with serving(machine=real_machine, open_store=opened, rebuild=True) as served:
        waiting = Client(served.endpoint, "b")
        waiting.answer = answer
        try:
            assert "had a~1 in it" in reset_job(served.endpoint, SchedulerOptions(listen=NOBODY), b"", force=True)
            assert [m.name for m in waiting.messages.wait_for(Decide).view.members] == ["b"]
        finally:
            waiting.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "its process runs"),
        ({"host": "elsewhere"}, "was on another machine, and cannot be seen from here"),
    ],
)
def test_without_a_scheduler_members_that_may_live_are_named(chain: Path, changes: dict[str, Any], words: str) -> None:
    options = a_chain(chain, **changes)
    with pytest.raises(RefusedError, match=rf"a~1 \(pid {os.getpid()} at 10.0.0.9\): .*{words}.*--force"):
        reset_job(NOBODY, options, b"", force=False)
    assert not archived(chain)
    assert "archived as" in reset_job(NOBODY, options, b"", force=True)
    assert len(archived(chain)) == 1


def test_without_a_scheduler_a_dead_job_is_ended_on_its_chain(chain: Path) -> None:
    a_chain(chain, pid_start=start_time(os.getpid()) + 1)
    done = CliRunner().invoke(cli.app, ["reset", "--endpoint", NOBODY, "--store", str(chain)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("the job is ended; its last view had a~1 in it. Its chain is archived as ")
    with JobChain(SqliteStore(chain, "default")) as store:
        assert store.load().views == ()
        assert store.take_term() > 2
    with pytest.raises(RefusedError, match="nothing to end"):
        reset_job(NOBODY, SchedulerOptions(listen=NOBODY, store=str(chain)), b"", force=True)


def test_what_is_not_there_is_not_made(chain: Path) -> None:
    with pytest.raises(RefusedError, match="is not there"):
        reset_job(NOBODY, SchedulerOptions(listen=NOBODY, store=str(chain)), b"", force=True)
    assert not chain.exists()
    with pytest.raises(SchedulerUnreachableError, match="on the machine where the chain's file is"):
        reset_job("192.0.2.1:9", SchedulerOptions(listen="192.0.2.1:9"), b"", force=True)


@pytest.fixture
def stopped(chain: Path) -> Iterator[str]:
    """Endpoint of a scheduler of this chain whose process is stopped."""
    with scheduler_process("--store", str(chain)) as process:
        endpoint = place_of(process)
        process.send_signal(signal.SIGSTOP)
        yield endpoint


def test_the_chain_of_a_scheduler_that_does_not_answer_is_left_alone(
    chain: Path, stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JobChain(SqliteStore(chain, "default")) as store:
        term = store.tip().term
    from chaos_lightning.control import requests
    from chaos_lightning.service import sqlite_store

    monkeypatch.setattr(sqlite_store, "_LOCK_PATIENCE_S", 0.1)
    monkeypatch.setattr(requests, "fetch_status", functools.partial(requests.fetch_status, timeout_s=0.5))
    view = View(ViewId(term, 1), NO_VIEW, ())
    with JobChain(SqliteStore(chain, "default")) as store:
        store.store.term = term
        assert store.append(fx.Persist(1, "view", view.id, view)).ok
    with pytest.raises(ConfigurationError, match="does not answer: wait for it, or end it"):
        reset_job(stopped, SchedulerOptions(listen=stopped, store=str(chain)), b"", force=True)
    assert not archived(chain)
