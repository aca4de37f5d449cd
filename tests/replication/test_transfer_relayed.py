"""Tests requests that members forward to another member: routes, their limits, and malformed requests."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replication_support import HEAD, LIMIT_S, SEQ, Acceptor, ThreadDonor, dial, donors, numbered

from chaos_lightning.errors import RefusedError, WireError
from chaos_lightning.replication import StateServer
from chaos_lightning.replication.bulk import MAX_ROUTE_NBYTES, BulkFrame, BulkSocket, Type, decode, reply
from chaos_lightning.replication.forward import (
    MAX_HOPS,
    PART_NBYTES,
    Forwarder,
    decode_route,
    encode_route,
    send_route,
)


def reach(by_name: dict[str, ThreadDonor], member: str) -> socket.socket:
    if member not in by_name:
        raise RefusedError(f"{member} is no member")
    return dial(by_name[member].endpoint)


@contextlib.contextmanager
def line(*names: str) -> Iterator[dict[str, ThreadDonor]]:
    """Yields donors that can dial each other, of which the last one serves a state."""
    state = numbered(2, 1_000_000)
    with donors(*names) as started:
        by_name = {d.member: d for d in started}
        for donor in started:
            donor.server.forwarder = Forwarder(donor.member, lambda member: reach(by_name, member))
        by_name[names[-1]].server.publish(HEAD, SEQ, state.tensors(), {"x": 1})
        yield by_name


@contextlib.contextmanager
def tunnel(first: ThreadDonor, *route: str) -> Iterator[BulkSocket]:
    with dial(first.endpoint) as sock:
        channel = BulkSocket(sock, stall_timeout_s=LIMIT_S)
        send_route(channel, HEAD, SEQ, route)
        yield channel


def ask(channel: BulkSocket, *requests: BulkFrame) -> list[tuple[BulkFrame, bytes]]:
    for request in requests:
        channel.send(request)
    found = []
    for _ in requests:
        frame = channel.receive_header()
        assert frame is not None
        payload = bytearray(frame.length)
        channel.receive_into([memoryview(payload)])
        found.append((frame, bytes(payload)))
    return found


@pytest.mark.parametrize("names", ["ab", "abc", "abcdefghi"])
def test_requests_go_to_the_far_end_and_answers_come_back(names: str) -> None:
    with line(*names) as by_name, tunnel(by_name["a"], *names[1:]) as channel:
        answers = ask(
            channel,
            BulkFrame(Type.GET_MANIFEST, HEAD, SEQ),
            BulkFrame(Type.GET_STATE, HEAD, SEQ, 400, 3_000_000),
            BulkFrame(Type.GET_STATE, HEAD, SEQ, 0, 10**7),
        )
        whole = b"".join(t.numpy().tobytes() for _, t in numbered(2, 1_000_000).tensors())
    assert answers[0][1] == b'{"x":1}'
    assert answers[1][1] == whole[400:3_000_400]
    assert answers[2][0].type is Type.REFUSED
    assert b"outside the 8000000 bytes" in answers[2][1]
    assert by_name[names[-1]].server.served_nbytes == {"joiner": 3_000_000}


def test_a_relay_holds_a_part_and_never_the_range() -> None:
    with line("a", "b") as by_name, tunnel(by_name["a"], "b") as channel:
        sink = memoryview(bytearray(8_000_000))
        channel.send(BulkFrame(Type.GET_STATE, HEAD, SEQ, 0, 8_000_000))
        frame = channel.receive_header()
        assert frame is not None
        tracemalloc.start()
        try:
            channel.receive_into([sink])
            assert tracemalloc.get_traced_memory()[1] < 2 * PART_NBYTES
        finally:
            tracemalloc.stop()


def test_a_member_that_cannot_be_reached_is_named() -> None:
    with line("a", "b", "c") as by_name:
        with pytest.raises(RefusedError, match="a cannot pass requests on to nobody"), tunnel(by_name["a"], "nobody"):
            pass
        with pytest.raises(RefusedError, match="b cannot pass requests on to x: "), tunnel(by_name["a"], "b", "x"):
            pass
        with pytest.raises(RefusedError, match="leads back to a"), tunnel(by_name["a"], "b", "a"):
            pass


def test_a_member_that_relays_for_nobody_says_so() -> None:
    with donors("a") as started, pytest.raises(RefusedError, match="passes no requests on"), tunnel(started[0], "b"):
        pass


def test_a_member_relays_for_a_few_at_a_time() -> None:
    with line("a", "b") as by_name:
        forwarder = by_name["a"].server.forwarder
        assert forwarder is not None
        forwarder.most = 1
        with (
            tunnel(by_name["a"], "b"),
            pytest.raises(RefusedError, match="relays 1 connections already"),
            tunnel(by_name["a"], "b"),
        ):
            pass
        ended = threading.Event()
        while forwarder._open:  # the relay notices that its joiner has gone
            assert not ended.wait(0.005)
        with tunnel(by_name["a"], "b") as channel:
            assert ask(channel, BulkFrame(Type.GET_MANIFEST, HEAD, SEQ))[0][1] == b'{"x":1}'


def test_the_far_end_dies_and_the_joiner_hears_of_it() -> None:
    with line("a", "b") as by_name, tunnel(by_name["a"], "b") as channel:
        by_name["b"].close()
        assert channel.receive_header() is None


def test_closing_a_server_ends_its_relays() -> None:
    with line("a", "b") as by_name, tunnel(by_name["a"], "b") as channel:
        by_name["a"].server.close()
        with contextlib.suppress(ConnectionError):
            assert channel.receive_header() is None


@pytest.mark.parametrize("type_", [Type.ROUTE, Type.DATA])
def test_what_is_no_plain_request_is_not_passed_on(type_: Type) -> None:
    with line("a", "b") as by_name, tunnel(by_name["a"], "b") as channel:
        frame, payload = reply(type_, HEAD, SEQ, encode_route(["b"]))
        channel.send(frame, payload)
        with contextlib.suppress(ConnectionError):
            assert channel.receive_header() is None
        by_name["a"].acceptor.threads[0].join(LIMIT_S)
        assert by_name["a"].endings == [f"{type_.name} cannot be passed on"]


def test_a_far_end_that_answers_with_requests_is_cut_off() -> None:
    def script(sock: socket.socket) -> None:
        channel = BulkSocket(sock, stall_timeout_s=LIMIT_S)
        if channel.receive_header() is not None:
            channel.send(BulkFrame(Type.GET_MANIFEST, HEAD, SEQ))

    odd = Acceptor(script)
    server = StateServer()
    server.forwarder = Forwarder("a", lambda member: dial(odd.endpoint(member)))
    near, far = socket.socketpair()
    with near:
        thread = threading.Thread(target=server.serve, args=(far, "joiner"))
        thread.start()
        channel = BulkSocket(near, stall_timeout_s=LIMIT_S)
        send_route(channel, HEAD, SEQ, ["odd"])
        channel.send(BulkFrame(Type.GET_DIGEST, HEAD, SEQ))
        assert channel.receive_header() is None
        thread.join(LIMIT_S)
    odd.close()


NAMES = st.text(min_size=1, max_size=20)


@settings(deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=MAX_HOPS, unique=True))
def test_a_route_comes_back(route: list[str]) -> None:
    assert decode_route(encode_route(route)) == tuple(route)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'["a","a"]',
        b'["a",1]',
        b'[""]',
        json.dumps([str(i) for i in range(MAX_HOPS + 1)]).encode(),
        json.dumps(["x" * 300]).encode(),
        b"[" * 4000,
        b"\xff",
        b'["\\ud800"]',
    ],
)
def test_a_route_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="route"):
        decode_route(data)
    near, far = socket.socketpair()
    server = StateServer()
    server.forwarder = Forwarder("a", lambda member: pytest.fail("nobody is dialled"))
    with near:
        BulkSocket(near, stall_timeout_s=LIMIT_S).send(*reply(Type.ROUTE, HEAD, SEQ, data))
        assert "route" in server.serve(far, "joiner")


def test_a_route_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="ROUTE of 4097 bytes, the limit is 4096"):
        decode(BulkFrame(Type.ROUTE, HEAD, SEQ, 0, MAX_ROUTE_NBYTES + 1).encode())


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_routes_are_refused_or_read(data: bytes) -> None:
    try:
        route = decode_route(data)
    except WireError:
        return
    assert 1 <= len(route) <= MAX_HOPS
