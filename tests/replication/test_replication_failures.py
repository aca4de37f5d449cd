"""Tests pulling from donors that die, stall, or send wrong bytes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import torch
from replication_support import (
    HEAD,
    LIMIT_S,
    PATIENT,
    QUICK,
    SEQ,
    Acceptor,
    First,
    Proxy,
    cut,
    dial,
    donors,
    numbered,
    publishing,
    pull,
    start_donor,
)

from chaos_lightning.errors import DeadlineError, RefusedError, StateError
from chaos_lightning.replication import (
    Endpoint,
    ModuleState,
    PullConfig,
    StateServerConfig,
    build_table,
    bulk,
    pull_result,
    pull_state,
    state_hash,
)

# --- death -----------------------------------------------------------------------------------------------------------


def _doomed(pipe: Connection) -> None:
    """Runs a donor process that is killed by SIGKILL in the middle of the third range that it sends."""
    donor = start_donor("doomed")
    state = numbered(20, 100_000)
    donor.server.publish(HEAD, SEQ, state.tensors(), state.manifest())
    send, ranges = bulk.BulkSocket.send, 0

    def send_or_die(self: bulk.BulkSocket, frame: bulk.BulkFrame, payload: Sequence[memoryview | bytes] = ()) -> None:
        nonlocal ranges
        if frame.type is bulk.Type.DATA:
            ranges += 1
            if ranges == 3:
                whole = b"".join(payload)
                self.sock.sendall(frame.encode() + whole[: len(whole) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        send(self, frame, payload)

    bulk.BulkSocket.send = send_or_die  # type: ignore[method-assign]
    pipe.send(donor.endpoint)
    pipe.recv()


@pytest.fixture
def doomed() -> Iterator[Endpoint]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "chaos_lightning.replication"])
    near, far = context.Pipe()
    process = context.Process(target=_doomed, args=(far,), daemon=True)
    process.start()
    far.close()
    assert near.poll(LIMIT_S)
    yield near.recv()
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL
    near.close()


def test_donor_killed_in_mid_transfer(doomed: Endpoint) -> None:
    theirs, mine = numbered(20, 100_000), numbered(20, 100_000, seed=1)
    with publishing(theirs, "b") as started:
        report = pull([doomed, started[0].endpoint], mine, policy=First("doomed"))
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors()) == report.state_hash
    assert list(report.failed) == ["doomed"]
    assert report.by_source["doomed"] > 0
    assert report.retries > 0
    assert report.rounds == 1


def test_last_donor_killed_says_what_is_missing(doomed: Endpoint) -> None:
    mine = numbered(20, 100_000, seed=1)
    with pytest.raises(
        StateError, match=r"no donor is left .*bytes in .* ranges are missing.*'t\d+' float32.*doomed: "
    ):
        pull([doomed], mine)
    assert mine.adopted is None


def test_a_donor_that_cannot_be_dialled_costs_nothing() -> None:
    theirs, mine = numbered(3, 1000), numbered(3, 1000, seed=1)
    closed = socket.create_server(("127.0.0.1", 0))
    nobody = Endpoint("gone", "127.0.0.1", closed.getsockname()[1])
    closed.close()
    with publishing(theirs, "b") as started:
        report = pull([nobody, started[0].endpoint], mine)
    assert "Connection" in report.failed["gone"]
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_a_refused_dial_is_not_repeated() -> None:
    dialled = []

    def refuse(endpoint: Endpoint) -> socket.socket:
        dialled.append(endpoint.member)
        raise RefusedError("wrong token")

    with pytest.raises(StateError, match="a: wrong token"):
        pull_state([Endpoint("a", "", 0)], refuse, head=HEAD, seq=SEQ, state=numbered(1, 1), config=PATIENT)
    assert dialled == ["a"]


def test_a_broken_connection_to_the_only_donor_is_dialled_again() -> None:
    theirs, mine = numbered(20, 100_000), numbered(20, 100_000, seed=1)
    cuts = []

    def once(data: bytearray, position: int) -> None:
        if position > 3_000_000 and not cuts:
            cuts.append(position)
            cut()

    with publishing(theirs, "a") as started:
        proxy = Proxy(started[0].endpoint, once)
        report = pull([proxy.endpoint], mine)
        proxy.close()
    assert cuts
    assert report.retries > 0
    assert report.failed == {}
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


# --- silence ---------------------------------------------------------------------------------------------------------


def test_a_donor_that_accepts_and_never_answers_is_not_waited_for() -> None:
    theirs, mine = numbered(5, 10_000), numbered(5, 10_000, seed=1)
    release = threading.Event()
    silent = Acceptor(lambda sock: release.wait(LIMIT_S))
    with publishing(theirs, "b") as started:
        report = pull([silent.endpoint("silent"), started[0].endpoint], mine, QUICK)
    release.set()
    silent.close()
    assert list(report.by_source) == ["b"]
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_the_only_donor_is_silent() -> None:
    release = threading.Event()
    silent = Acceptor(lambda sock: release.wait(LIMIT_S))
    with pytest.raises(StateError, match="silent: it sent nothing for too long"):
        pull([silent.endpoint("silent")], numbered(1, 1), QUICK)
    release.set()
    silent.close()


def test_a_donor_that_stalls_in_mid_range() -> None:
    theirs, mine = numbered(20, 100_000), numbered(20, 100_000, seed=1)
    release = threading.Event()

    def stall(data: bytearray, position: int) -> None:
        if position > 1_000_000:
            release.wait(LIMIT_S)

    with publishing(theirs, "a", "b") as started:
        proxy = Proxy(started[0].endpoint, stall)
        report = pull([proxy.endpoint, started[1].endpoint], mine, QUICK, First("a"))
        release.set()
        proxy.close()
    assert report.failed == {"a": "it sent nothing for too long"}
    assert report.by_source["a"] > 0
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_a_dial_that_hangs_holds_nobody_up() -> None:
    theirs, mine = numbered(5, 10_000), numbered(5, 10_000, seed=1)
    release = threading.Event()

    def dial_or_hang(endpoint: Endpoint) -> socket.socket:
        if endpoint.member == "hung":
            release.wait(LIMIT_S)
            raise ConnectionError("released")
        return dial(endpoint)

    with publishing(theirs, "b") as started:
        report = pull_state(
            [Endpoint("hung", "", 0), started[0].endpoint], dial_or_hang, head=HEAD, seq=SEQ, state=mine, config=QUICK
        )
    release.set()
    assert list(report.by_source) == ["b"]


def test_deadline_names_who_was_waited_for() -> None:
    config = StateServerConfig(pending_interval_s=0.02)
    with donors("late", config=config) as started, pytest.raises(DeadlineError, match=r"waiting for late.*join again"):
        pull([started[0].endpoint], numbered(1, 1), PullConfig(deadline_s=0.3))


def test_a_donor_that_is_late_is_not_waited_for_for_ever() -> None:
    theirs, mine = numbered(5, 10_000), numbered(5, 10_000, seed=1)
    config = StateServerConfig(publish_timeout_s=LIMIT_S, pending_interval_s=0.02)
    with donors("late", "b", config=config) as started:
        started[1].server.publish(HEAD, SEQ, theirs.tensors(), theirs.manifest())
        report = pull([d.endpoint for d in started], mine, QUICK)
    assert list(report.by_source) == ["b"]
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_an_abandoned_pull_ends() -> None:
    superseded = threading.Event()
    with donors("late", config=StateServerConfig(pending_interval_s=0.02)) as started:
        donor = started[0]

        def dial_and_supersede(endpoint: Endpoint) -> socket.socket:
            superseded.set()
            return dial(endpoint)

        with pytest.raises(StateError, match="was abandoned"):
            pull_state(
                [donor.endpoint],
                dial_and_supersede,
                head=HEAD,
                seq=SEQ,
                state=numbered(1, 1),
                config=PATIENT,
                abandoned=superseded.is_set,
            )


# --- wrong bytes -----------------------------------------------------------------------------------------------------


def flip_payload(every: int | None = None) -> object:
    """Returns a proxy's damage that flips one bit, or one bit in each `every` bytes, of the ranges' payloads."""
    flipped = []

    def damage(data: bytearray, position: int) -> None:
        at = 1_500_000 if not every else (position // every + 1) * every
        if position <= at < position + len(data) and (every or not flipped):
            data[at - position] ^= 4
            flipped.append(at)

    damage.flipped = flipped  # type: ignore[attr-defined]
    return damage


@pytest.mark.parametrize("alone", [True, False])
def test_a_corrupted_piece_is_pulled_again(alone: bool) -> None:
    theirs, mine = numbered(20, 100_000), numbered(20, 100_000, seed=1)
    damage = flip_payload()
    with publishing(theirs, "a", "b") as started:
        proxy = Proxy(started[0].endpoint, damage)  # type: ignore[arg-type]
        endpoints = [proxy.endpoint] if alone else [proxy.endpoint, started[1].endpoint]
        report = pull(endpoints, mine, policy=First("a"))
        proxy.close()
    assert damage.flipped  # type: ignore[attr-defined]
    assert report.corrupted == 1
    assert (report.by_source.get("b", 0) > 0) is not alone
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_a_link_that_always_corrupts_is_given_up() -> None:
    theirs, mine = numbered(20, 100_000), numbered(20, 100_000, seed=1)
    with publishing(theirs, "a", "b") as started:
        proxy = Proxy(started[0].endpoint, flip_payload(every=200_000))  # type: ignore[arg-type]
        report = pull([proxy.endpoint, started[1].endpoint], mine, policy=First("a"))
        proxy.close()
    assert report.failed == {"a": "3 replies in a row arrived corrupted"}
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_a_donor_that_changes_its_state_while_it_serves_it() -> None:
    theirs, mine = numbered(4, 100_000), numbered(4, 100_000, seed=1)
    with publishing(theirs, "a") as started:
        server = started[0].server
        assert server._state is not None
        server._state.build(lambda: None)
        theirs.named[2][1].zero_()
        with pytest.raises(StateError, match="corrupted"):
            pull([started[0].endpoint], mine)
    assert mine.adopted is None


def test_a_corrupted_table_is_not_believed() -> None:
    theirs, mine = numbered(4, 1000), numbered(4, 1000, seed=1)
    with publishing(theirs, "liar", "b") as started:
        item = started[0].server._state
        assert item is not None
        item.build(lambda: None)
        wrong = build_table(numbered(4, 1000, seed=2).tensors())
        item.encoded = wrong.encode()
        report = pull([d.endpoint for d in started], mine)
    assert "its table has the state hash" in report.failed["liar"]
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_corrupted_reduced_bytes_are_pulled_again() -> None:
    result = torch.randint(0, 256, (3_000_000,), dtype=torch.uint8)
    mine = torch.zeros_like(result)
    damage = flip_payload()
    with donors("a") as started:
        started[0].server.publish_result(SEQ, HEAD, result, [(0, 3_000_000)])
        proxy = Proxy(started[0].endpoint, damage)  # type: ignore[arg-type]
        report = pull_result(
            [proxy.endpoint],
            dial,
            head=HEAD,
            seq=SEQ,
            memory=mine,
            spans={"a": [(0, 3_000_000)]},
            config=PATIENT,
        )
        proxy.close()
    assert report.corrupted == 1
    assert torch.equal(result, mine)


# --- nonsense --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [None, [1], "text", 3])
def test_a_donor_whose_manifest_is_no_values_by_name_is_out(manifest: object) -> None:
    """Former bug: a manifest that is not a mapping made the joiner end with a TypeError; the donor is dropped now."""
    with donors("a") as (donor,):
        state = numbered(2, 1000)
        donor.server.publish(HEAD, SEQ, state.tensors(), cast(Any, manifest))
        with pytest.raises(StateError, match=rf"a {type(manifest).__name__} instead of values by name"):
            pull_state([donor.endpoint], dial, head=HEAD, seq=SEQ, state=numbered(2, 1000, seed=1), config=QUICK)


@pytest.mark.parametrize("manifest", [{}, {"optimizers": 3}, {"optimizers": [], "extra": [1], "modules": {}}])
def test_a_manifest_that_does_not_fit_the_state_is_an_error_in_words(manifest: dict[str, object]) -> None:
    """Former bug: a manifest without expected keys made the joiner end with a KeyError; it is a StateError now."""
    module = torch.nn.Linear(2, 2)
    with donors("a") as (donor,):
        donor.server.publish(HEAD, SEQ, ModuleState(module).tensors(), manifest)
        with pytest.raises(StateError, match="does not fit what is trained here"):
            pull_state([donor.endpoint], dial, head=HEAD, seq=SEQ, state=ModuleState(module), config=QUICK)
