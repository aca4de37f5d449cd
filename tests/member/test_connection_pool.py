"""Tests connections made in advance: used if they are still open, closed when no longer needed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from chaos_lightning.member.connection_pool import ConnectionPool
from chaos_lightning.replication.source import Endpoint

LIMIT_S = 30.0


class Far:
    """Listener for pooled connections, which keeps their other ends."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("far", "127.0.0.1", self.listener.getsockname()[1])
        self.ends: list[socket.socket] = []
        self.dialled = threading.Semaphore(0)

    def dial(self, endpoint: Endpoint) -> socket.socket:
        sock = socket.create_connection((endpoint.address, endpoint.port), timeout=LIMIT_S)
        self.ends.append(self.listener.accept()[0])
        self.dialled.release()
        return sock

    def close(self) -> None:
        for sock in (*self.ends, self.listener):
            sock.close()


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far()
    yield made
    made.close()


def test_what_was_prepared_is_taken_and_no_more(far: Far) -> None:
    pool = ConnectionPool(far.dial)
    pool.prepare(far.endpoint, 2)
    for _ in range(2):
        assert far.dialled.acquire(timeout=LIMIT_S)
    found: list[socket.socket] = []
    deadline = threading.Event()
    while len(found) < 2 and not deadline.wait(0.001):  # the second one is put aside a moment after it was made
        sock = pool.take(far.endpoint)
        found += [sock] if sock is not None else []
    assert {s.getsockname() for s in found} == {e.getpeername() for e in far.ends}
    assert pool.take(far.endpoint) is None
    for sock in found:
        assert sock.gettimeout() is None
        sock.close()


def test_one_that_was_closed_or_spoke_is_not_used(far: Far) -> None:
    pool = ConnectionPool(far.dial)
    for number in range(3):
        pool.put(far.endpoint, far.dial(far.endpoint))
        if number == 1:
            far.ends[1].close()
        if number == 2:
            far.ends[2].sendall(b"?")
    sock = pool.take(far.endpoint)
    assert sock is not None
    assert sock.getsockname() == far.ends[0].getpeername()
    assert pool.take(far.endpoint) is None
    sock.close()


def test_each_leads_to_whom_it_was_made_for(far: Far) -> None:
    pool = ConnectionPool(far.dial)
    pool.put(far.endpoint, far.dial(far.endpoint))
    assert pool.take(Endpoint("other", "127.0.0.1", far.endpoint.port + 1)) is None
    pool.close()


def test_after_the_end_all_are_closed(far: Far) -> None:
    pool = ConnectionPool(far.dial)
    pool.put(far.endpoint, far.dial(far.endpoint))
    pool.close()
    pool.put(far.endpoint, far.dial(far.endpoint))  # one that was under way
    for end in far.ends:
        end.settimeout(LIMIT_S)
        assert end.recv(1) == b""
    assert pool.take(far.endpoint) is None


def test_who_cannot_be_reached_is_no_error_here(far: Far) -> None:
    gone, tried = Endpoint("gone", "127.0.0.1", far.endpoint.port), threading.Event()

    def dial(endpoint: Endpoint) -> socket.socket:
        tried.set()
        raise ConnectionRefusedError(111, "Connection refused")

    pool = ConnectionPool(dial)
    pool.prepare(gone, 2)
    assert tried.wait(LIMIT_S)
    assert pool.take(gone) is None
