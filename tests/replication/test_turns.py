"""Tests that a donor sends its state to a few peers at a time, and that others wait or are served by peers that have
it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from replication_support import HEAD, LIMIT_S, PATIENT, SEQ, dial, donors, numbered, publishing

from chaos_lightning.replication import StateServerConfig, pull_state
from chaos_lightning.replication import turns as turning
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type
from chaos_lightning.replication.turns import IDLE_S, SLOW, SLOW_S, Turns

ONE = StateServerConfig(pulls=1, pending_interval_s=0.02)
NBYTES = 4 << 20


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    made = [socket.socket() for _ in range(12)]
    yield made
    for sock in made:
        sock.close()


def test_a_turn_is_over_when_its_connection_is_idle_or_ends(ends: list[socket.socket]) -> None:
    turns, (a, b, c, *_) = Turns(), ends
    assert turns.take(a, 1, 1, 0.0)
    assert not turns.take(b, 1, 1, 0.1), "a is being answered"
    turns.done(a, 0.2)
    assert not turns.take(b, 1, 1, 0.2 + IDLE_S / 2)
    assert turns.take(a, 1, 1, 0.2 + IDLE_S / 2), "it goes on"
    turns.done(a, 1.0)
    assert turns.take(b, 1, 1, 1.0 + IDLE_S)
    assert not turns.take(a, 1, 1, 1.0 + IDLE_S)
    turns.leave(b)
    assert turns.take(c, 1, 1, 1.0 + IDLE_S)


def test_peers_that_take_their_bytes_slowly_hold_no_turns(ends: list[socket.socket]) -> None:
    """Four peers that receive slowly lose their turns to others, even before the usual time of an answer is known."""
    turns, slow, (quick, other) = Turns(), ends[:4], ends[4:6]
    for sock in slow:
        assert turns.take(sock, NBYTES, 4, 0.0)
    assert not turns.take(quick, NBYTES, 4, SLOW_S / 2)
    now = SLOW_S * 1.01
    assert turns.take(quick, NBYTES, 4, now), "one of them counts no more"
    assert not turns.take(other, NBYTES, 4, now), "the next one is given twice as long"
    for _ in range(100):
        turns.done(quick, now := now + 0.01)
        assert turns.take(quick, NBYTES, 4, now), "it goes on"
    assert turns.take(other, NBYTES, 4, SLOW_S * 2.01)
    last = ends[6]
    assert not turns.take(last, NBYTES, 4, SLOW_S * 2.01)
    turns.done(slow[0], now := SLOW_S * 2.02)
    assert not turns.take(slow[0], NBYTES, 4, now), "it waits until nobody else does"
    assert turns.take(last, NBYTES, 4, now)
    turns.done(last, now)
    assert turns.take(slow[0], NBYTES, 4, now + 2 * IDLE_S), "nobody else waits"


def test_where_the_donor_is_what_is_slow_few_more_than_usual_are_served(ends: list[socket.socket]) -> None:
    """If each answer takes 30 s because the donor is slow, it serves only a few of a dozen peers more than usual."""
    turns, now, served = Turns(), 0.0, set(ends[:4])
    for sock in served:
        assert turns.take(sock, NBYTES, 4, now)
    while now < 30.0:
        now += 0.25
        served |= {sock for sock in ends if sock not in served and turns.take(sock, NBYTES, 4, now)}
    assert 4 < len(served) < 9
    for sock in ends[:4]:
        turns.done(sock, now)
    assert all(turns.take(sock, NBYTES, 12, now + 1.0) for sock in ends[:4]), "30 s are usual here"
    assert not any(turns.take(sock, NBYTES, 4, now + 29.0 * SLOW / 2) for sock in ends if sock not in served)


def test_a_pause_of_the_donor_itself_is_not_all_its_peers_slowness(ends: list[socket.socket]) -> None:
    """A donor that was paused for 3 s while it answered four peers does not count all four as slow."""
    turns, (a, b, c, d, other, *_), now = Turns(), ends, 0.0
    for _ in range(20):
        for sock in (a, b, c, d):
            assert turns.take(sock, NBYTES, 4, now)
        for sock in (a, b, c, d):
            turns.done(sock, now := now + 0.01)
    for sock in (a, b, c, d):
        assert turns.take(sock, NBYTES, 4, now)
    for sock in (a, b, c, d):
        turns.done(sock, now + SLOW_S * 1.5)
    now += SLOW_S * 1.5 + 0.1
    turns.take(other, NBYTES, 4, now)
    assert sum(turns.take(sock, NBYTES, 4, now) for sock in (a, b, c, d)) == 3


def test_one_without_a_turn_hears_that_its_donor_lives() -> None:
    state = numbered(1, 1 << 16)
    with publishing(state, "a", config=ONE) as (donor,):
        first, second = (BulkSocket(dial(donor.endpoint), stall_timeout_s=LIMIT_S) for _ in range(2))
        request = BulkFrame(Type.GET_STATE, HEAD, SEQ, 0, 1 << 18)
        first.send(request)
        frame = first.receive_header(patience_s=LIMIT_S)
        assert frame is not None
        assert frame.type is Type.DATA  # it stops in mid-frame: its turn lasts
        second.send(request)
        heard = threading.Event()
        got: list[BulkFrame] = []

        def wait() -> None:
            got.append(second.reply_to(request, Type.DATA, lambda frame: heard.set()))

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert heard.wait(LIMIT_S)
        first.sock.close()
        waiter.join(LIMIT_S)
        assert [f.length for f in got] == [1 << 18]
        second.sock.close()


def test_a_range_that_is_none_leaves_no_answer_behind() -> None:
    state = numbered(1, 1 << 16)
    with publishing(state, "a", config=ONE) as (donor,):
        sock = BulkSocket(dial(donor.endpoint), stall_timeout_s=LIMIT_S)
        request = BulkFrame(Type.GET_STATE, HEAD, SEQ, 1 << 40, 1 << 10)
        sock.send(request)
        frame = sock.receive_header(patience_s=LIMIT_S)
        assert frame is not None
        assert frame.type is not Type.DATA
        with donor.server._changed:
            assert not donor.server._turns._answers
        sock.sock.close()


def test_copies_spread_although_the_first_one_serves_one_at_a_time() -> None:
    """Three newcomers each ask the members before them, which answer once they have loaded the state themselves; all
    get it.
    """
    state = numbered(4, 1 << 16, seed=3)
    copies = [numbered(4, 1 << 16, seed=9) for _ in range(3)]
    config = StateServerConfig(pulls=1, pending_interval_s=0.02)
    failed: list[BaseException] = []
    with publishing(state, "m0", config=config) as (first,), donors("m1", "m2", "m3", config=config) as others:
        line = [first, *others]

        def load(place: int) -> None:
            mine = copies[place - 1]
            before = [d.endpoint for d in line[:place]]
            loading = frozenset(e.member for e in before[1:])
            try:
                pull_state(before, dial, head=HEAD, seq=SEQ, state=mine, config=PATIENT, loading=loading)
                line[place].server.publish(HEAD, SEQ, mine.tensors(), mine.manifest())
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=load, args=(place,)) for place in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not failed
        for mine in copies:
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(mine.tensors(), state.tensors(), strict=True))


def test_an_answer_of_one_that_holds_the_state_is_enough() -> None:
    """A pull does not wait for a member that is still loading the state; `m1` never publishes it."""
    state, mine = numbered(2, 1000, seed=3), numbered(2, 1000, seed=9)
    with publishing(state, "m0") as (first,), donors("m1") as (other,):
        report = pull_state(
            [first.endpoint, other.endpoint], dial, head=HEAD, seq=SEQ, state=mine, config=PATIENT,
            loading=frozenset({"m1"}),
        )  # fmt: skip
        assert set(report.by_source) == {"m0"}
        assert not report.failed


def test_a_member_that_begins_anew_is_waited_for_at_an_older_slot() -> None:
    """After a job is founded again, a donor that had served later slots before is asked for an earlier one, and the
    request waits.
    """
    state, mine = numbered(2, 1000, seed=3), numbered(2, 1000, seed=9)
    with donors("m0") as (donor,):
        donor.server.publish("ff" * 8, SEQ + 100, state.tensors(), state.manifest())
        donor.server.forget()
        puller = threading.Thread(
            target=lambda: pull_state([donor.endpoint], dial, head=HEAD, seq=SEQ, state=mine, config=PATIENT)
        )
        puller.start()
        donor.server.publish(HEAD, SEQ, state.tensors(), state.manifest())
        puller.join(LIMIT_S)
    assert torch.equal(mine.tensors()[0][1], state.tensors()[0][1])


def test_four_that_take_no_bytes_do_not_hold_up_a_fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turning, "SLOW_S", 0.05)
    state, mine = numbered(1, 1 << 20, seed=3), numbered(1, 1 << 20, seed=9)
    config = StateServerConfig(pulls=4, pending_interval_s=0.02, stall_timeout_s=10 * LIMIT_S)
    with publishing(state, "a", config=config) as (donor,):
        slow = [BulkSocket(dial(donor.endpoint), stall_timeout_s=LIMIT_S) for _ in range(4)]
        for channel in slow:
            channel.send(BulkFrame(Type.GET_STATE, HEAD, SEQ, 0, 4 << 20))
            frame = channel.receive_header(patience_s=LIMIT_S)
            assert frame is not None
            assert frame.type is Type.DATA
        pull_state([donor.endpoint], dial, head=HEAD, seq=SEQ, state=mine, config=PATIENT)
        for channel in slow:
            channel.sock.close()
    assert torch.equal(mine.tensors()[0][1], state.tensors()[0][1])
