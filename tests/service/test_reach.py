"""Tests when a leader resigns because members reach another candidate only, and when a candidate takes a leader for
dead.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from chaos_lightning.membership import leader_search
from chaos_lightning.service import reach
from chaos_lightning.service.election import Candidate, Election
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.service.leader_line import LeaderLine
from chaos_lightning.service.reach import LASTING_S, Asked, Reach

PATIENCE_S = 30.0


def judged(view: Reach, present: set[str], elsewhere: dict[str, list[str]], until_s: float = 10.0) -> str:
    """Returns time and reason of the first judgement within `until_s` that the leader must resign; "" if there is
    none.
    """
    now = 100.0
    while now < 100.0 + until_s:
        if view.due(now) and (reason := view.judge(now, present, elsewhere)):
            return f"{now - 100.0:.1f} s: {reason}"
        now += 0.1
    return ""


def test_more_members_that_reach_another_one_for_some_time_are_a_reason_to_resign() -> None:
    reason = judged(Reach(100.0), {"a"}, {"s1": ["b", "c"], "s2": []})
    assert reason.endswith("b, c reach s1 and not this scheduler, which a reaches")
    assert float(reason.partition(" ")[0]) >= 2 * LASTING_S - 0.1


@pytest.mark.parametrize(
    ("present", "elsewhere"),
    [
        (set(), {}),
        (set(), {"s1": []}),
        ({"a", "b"}, {"s1": ["c", "d"]}),
        ({"a", "b"}, {"s1": ["a", "b", "c"]}),
        ({"a"}, {"s1": ["b"], "s2": ["c"]}),
    ],
    ids=["no other", "nobody asked", "as many", "they found their way", "no single one has more"],
)
def test_there_is_no_reason_to_resign(present: set[str], elsewhere: dict[str, list[str]]) -> None:
    assert judged(Reach(100.0), present, elsewhere) == ""


def test_members_that_come_after_a_while_end_the_count() -> None:
    view = Reach(100.0)
    assert view.judge(103.0, set(), {"s1": ["a"]}) == ""
    assert view.judge(104.0, {"a"}, {"s1": ["a"]}) == ""
    assert view.judge(105.5, set(), {"s1": ["a"]}) == "", "counted from anew"
    assert view.judge(105.4 + LASTING_S, set(), {"s1": ["a"]}) == ""
    assert (
        view.judge(105.5 + LASTING_S, set(), {"s1": ["a"]}) == "a reach s1 and not this scheduler, which nobody reaches"
    )


def test_a_leader_is_patient_until_members_that_shunned_it_ask_it_again() -> None:
    assert LASTING_S >= leader_search._SHUN_S + 1.0


def test_who_asked_is_forgotten_after_a_while_and_no_flood_of_names_is_kept() -> None:
    asked = Asked()
    asked.add("b", 1.0)
    asked.add("a", 2.0)
    assert asked.of_late(2.4) == ("a", "b")
    assert asked.of_late(3.0) == ("a",)
    for number in range(10_000):
        asked.add(f"n{number}", 3.0)
    assert len(asked.of_late(3.0)) <= 256
    assert reach.read(reach.packed(("b", "a"))) == ("a", "b")


@pytest.mark.parametrize("value", [b"", b"{}", b"[" * 100_000, b'"a"', b"\xff"])
def test_a_key_with_something_else_in_it_names_nobody(value: bytes) -> None:
    assert reach.read(value) == ()
    assert reach.read(b'[1, "a", null]') == ("a",)


# ------------------------------------------------------------------------------------------------ the line


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE_S)
        yield made


@contextlib.contextmanager
def line_to(listener: socket.socket) -> Iterator[LeaderLine]:
    line = LeaderLine("{}:{}".format(*listener.getsockname()))
    line.start()
    try:
        yield line
    finally:
        line.close()
        line.join(PATIENCE_S)
        assert not line.is_alive()


def test_a_machine_that_refuses_what_it_took_before_says_that_the_leader_is_gone(listener: socket.socket) -> None:
    with line_to(listener) as line:
        near = listener.accept()[0]
        assert not line.gone
        listener.close()
        near.close()
        line.join(PATIENCE_S)
        assert line.gone


def test_a_leader_that_closes_and_listens_is_there(listener: socket.socket) -> None:
    with line_to(listener) as line:
        for _ in range(2):
            listener.accept()[0].close()
        with listener.accept()[0]:
            assert not line.gone


def test_who_was_never_reached_may_listen_for_others(listener: socket.socket) -> None:
    place = listener.getsockname()
    listener.close()
    line = LeaderLine("{}:{}".format(*place))
    line.start()
    line.join(1.0)
    assert line.is_alive()
    assert not line.gone
    line.close()
    line.join(PATIENCE_S)


def test_the_leader_of_another_machine_is_followed_when_its_machine_says_that_it_is_gone(
    etcd: EtcdServers, listener: socket.socket
) -> None:
    """A candidate deposes a leader on another machine, although its lease is prolonged, once that machine refuses
    connections.
    """
    job, clients = f"job-{time.monotonic_ns()}", [etcd.client(), etcd.client()]
    said: queue.Queue[tuple[str, Any]] = queue.Queue()
    place = "{}:{}".format(*listener.getsockname())

    def candidate(number: int, name: str) -> Election:
        made = Election(
            clients[number],
            job,
            replace(Candidate.here(place), id=name, host=f"machine of {name}"),
            on_elected=lambda guard: said.put((name, "elected")),
            on_lost=lambda reason: said.put((name, reason)),
        )
        made.start()
        return made

    first = candidate(0, "first")
    assert said.get(timeout=PATIENCE_S) == ("first", "elected")
    second = candidate(1, "second")
    near = listener.accept()[0]
    assert second.waits_for() == f"the end of the lease of {place}, which leads"
    assert (first.waits_for(), first.leader is not None and first.leader.because) == ("", "nobody led")
    listener.close()
    near.close()
    words = {said.get(timeout=PATIENCE_S), said.get(timeout=PATIENCE_S)}
    assert words == {("second", "elected"), ("first", "its lease has ended")}
    assert second.leader is not None
    assert (
        second.leader.because
        == f"{place} was deposed: its machine refuses connections to {place}, which it took before"
    )
    assert abs(second.leader.since - time.time()) < PATIENCE_S
    for election in (first, second):
        election.resign(PATIENCE_S)
    for client in clients:
        client.close()
