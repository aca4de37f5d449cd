"""Tests two jobs with the same name: after a scheduler's restart the one that the chain describes counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos_lightning.membership.effects import Chain, MessageIn, Opened, Persist, SchedulerEffect, SchedulerTick, Send
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.types import (
    NO_VIEW,
    VERSION,
    Heartbeat,
    Hello,
    Member,
    Ready,
    Refused,
    Settings,
    View,
    ViewId,
    Welcome,
)

MEMBERS = tuple(Member(f"{n}~{i}", n, "host", "127.0.0.1", 1, pid=i, pid_start=7) for i, n in enumerate("ab", 1))
CHAIN = Chain(term=2, highest=ViewId(1, 1), views=(View(ViewId(1, 1), NO_VIEW, MEMBERS),))
HELLO = Hello("default", "x", "host", "127.0.0.1", 1, 9, 7, 1, 1, "0.1", (("model", "small"),))


def said(machine: SchedulerMachine, conn: int, hello: Hello, now: float = 1.0) -> list[SchedulerEffect]:
    effects = machine.on(now, Opened(conn)) + machine.on(now, MessageIn(conn, hello))
    machine.validate_state()
    return effects


def answers(effects: list[SchedulerEffect], kind: type) -> list[tuple[int, object]]:
    return [(e.conn, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def returning(number: int) -> Hello:
    m = MEMBERS[number]
    return replace(HELLO, name=m.name, pid=m.pid, pid_start=m.pid_start, resume=m.id)


@pytest.mark.parametrize(
    "other",
    [{"fingerprint": (("model", "large"),)}, {"package": "0.2"}, {"accumulate": 4}],
    ids=lambda o: next(iter(o)),
)
def test_another_program_that_speaks_first_after_a_restart_does_not_become_the_job(other: dict[str, object]) -> None:
    machine = SchedulerMachine(Settings(min_nodes=1), CHAIN)
    stranger = replace(HELLO, **other)  # type: ignore[arg-type]
    same = replace(HELLO, name="y", pid=10)
    assert answers(said(machine, 1, stranger), Welcome)
    effects = said(machine, 2, returning(0))
    assert [conn for conn, _ in answers(effects, Welcome)] == [2]
    ((conn, refused),) = answers(effects, Refused)
    assert conn == 1
    assert isinstance(refused, Refused)
    assert "start all members with the same script" in refused.reason
    assert not refused.retry
    assert [conn for conn, _ in answers(said(machine, 3, same), Welcome)] == [3]
    assert answers(said(machine, 4, replace(stranger, name="z", pid=11)), Refused)
    assert [conn for conn, _ in answers(said(machine, 5, returning(1)), Welcome)] == [5]


def test_newcomers_of_the_same_program_stay_when_the_members_are_back() -> None:
    machine = SchedulerMachine(Settings(min_nodes=1), CHAIN)
    assert answers(said(machine, 1, HELLO), Welcome)
    assert not answers(said(machine, 2, returning(0)), Refused)
    assert "x" in {p.member.name for p in machine.roster.peers.values()}


def test_where_nobody_came_back_a_member_of_another_program_does_not_vouch() -> None:
    """A process of another program claims to be an unknown member: it says nothing about the job, and a real member
    that comes later is accepted.
    """
    machine = SchedulerMachine(Settings(min_nodes=1), CHAIN)
    stranger = replace(HELLO, resume="q~77", fingerprint=(("model", "large"),))
    said(machine, 1, stranger)
    assert answers(said(machine, 2, returning(0)), Welcome)


@pytest.mark.parametrize(
    ("version", "spoken"), [(0, "a version before 4"), (4, "version 4"), (VERSION + 1, "version 6")]
)
@pytest.mark.parametrize("view", [NO_VIEW, ViewId(1, 1)])
def test_a_process_of_another_version_is_refused_by_name_before_anything_that_it_says_counts(
    version: int, spoken: str, view: ViewId
) -> None:
    """A process with another protocol version is refused by name; if it is in a view it may try again, perhaps at
    another scheduler.
    """
    machine = SchedulerMachine(Settings(min_nodes=1), CHAIN)
    hello = replace(returning(0) if view != NO_VIEW else HELLO, version=version, view=view, known=ViewId(9, 9), term=9)
    ((_, refused),) = answers(said(machine, 1, hello), Refused)
    assert isinstance(refused, Refused)
    assert f"{hello.name} speaks {spoken} of the protocol, and this side {VERSION}: install the same" in refused.reason
    assert refused.retry == (view != NO_VIEW)
    assert not machine.identity.lost_words()


@pytest.mark.parametrize("known", [True, False])
def test_no_job_is_founded_beside_members_of_another_version_that_train_on(known: bool) -> None:
    """Members with another protocol version are refused again and again: they count as living, and no second job is
    founded.
    """
    settings = Settings(min_nodes=1, reconnect_grace_s=2.0, last_holder_timeout_s=20.0)
    machine = SchedulerMachine(settings, CHAIN if known else Chain(term=2, highest=NO_VIEW))
    old, effects = [replace(returning(i), version=3, view=ViewId(1, 1)) for i in range(2)], list[SchedulerEffect]()
    for number in range(40):
        now = 3.0 * number
        for i, hello in enumerate(old):
            effects += said(machine, 100 * number + i + 1, hello, now)
        if number == 1:
            effects += said(machine, 99, HELLO, now)
            effects += machine.on(now, MessageIn(99, Ready()))
        for later in (now + 0.5, now + 1.0, now + 1.5, now + 2.0, now + 2.5):
            effects += machine.on(later, MessageIn(99, Heartbeat(NO_VIEW, 0, 0)), SchedulerTick())
    assert not [e for e in effects if isinstance(e, Persist)]
