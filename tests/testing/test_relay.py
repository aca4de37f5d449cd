"""Tests the relay between members: bytes pass, and both ends of a link see when it is cut, stalled and restored."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from chaos_lightning.errors import ChaosError
from chaos_lightning.testing.edge import relay as relay_module
from chaos_lightning.testing.edge.relay import LinkRelay, Way
from chaos_lightning.testing.emulation import RELAY, emulating
from chaos_lightning.transport.handshake import Greeting, accept, dial

DEADLINE_S = 20.0


class Member:
    """A member that listens; `call` connects it to another one and returns both ends of the link."""

    def __init__(self, name: str) -> None:
        self.id = f"{name}~1"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self._open: list[socket.socket] = []

    def dial(self, other: Member, deadline_s: float = DEADLINE_S) -> socket.socket:
        port = other._listener.getsockname()[1]
        return dial("127.0.0.1", port, Greeting("j", self.id, other.id, "link"), token=b"t", deadline_s=deadline_s)

    def call(self, other: Member) -> tuple[socket.socket, socket.socket]:
        taken: list[socket.socket] = []

        def take() -> None:
            while not taken:
                sock, _ = other._listener.accept()
                with contextlib.suppress(ChaosError, OSError):  # somebody may have given up in the meantime
                    accept(sock, job="j", me=other.id, token=b"t")
                    taken.append(sock)

        taker = threading.Thread(target=take, daemon=True)
        taker.start()
        mine = self.dial(other)
        taker.join(DEADLINE_S)
        for sock in (mine, *taken):
            sock.settimeout(DEADLINE_S)
            self._open.append(sock)
        return mine, taken[0]

    def refused_by(self, other: Member) -> bool:
        try:
            self.dial(other).close()
        except (ChaosError, OSError):
            return True
        return False

    def close(self) -> None:
        for sock in (self._listener, *self._open):
            sock.close()


@pytest.fixture
def relay() -> Iterator[LinkRelay]:
    with LinkRelay() as made, emulating(relay=made.address):
        yield made


@pytest.fixture
def members(relay: LinkRelay) -> Iterator[list[Member]]:
    made = [Member(name) for name in "abc"]
    yield made
    for member in made:
        member.close()


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        assert part, f"the end came after {len(data)} of {nbytes} bytes"
        data += part
    return data


def there_and_back(one: socket.socket, other: socket.socket) -> None:
    """Sends a byte in each direction, after which the relay's single thread must have done all earlier work."""
    for source, sink in ((one, other), (other, one)):
        source.sendall(b"x")
        assert exactly(sink, 1) == b"x"


def quiet(sock: socket.socket) -> bool:
    """Returns whether a socket has neither bytes to read nor reached its end."""
    return not select.select([sock], [], [], 0)[0]


def broken(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_bytes_and_ends_pass_in_both_directions(relay: LinkRelay, members: list[Member]) -> None:
    a, b, _ = members
    mine, theirs = b.call(a)
    there_and_back(mine, theirs)
    big = bytes(range(256)) * (8 << 12)  # more than the relay and the sockets hold: the sender waits for the reader
    sender = threading.Thread(target=mine.sendall, args=(big,), daemon=True)
    sender.start()
    assert exactly(theirs, len(big)) == big
    sender.join(DEADLINE_S)
    mine.shutdown(socket.SHUT_WR)
    assert theirs.recv(1) == b""
    theirs.sendall(b"last words")
    theirs.close()
    assert exactly(mine, 10) == b"last words"
    assert mine.recv(1) == b""
    mine, theirs = b.call(a)
    there_and_back(mine, theirs)


def test_a_cut_resets_the_link_and_refuses_it_until_it_is_restored(relay: LinkRelay, members: list[Member]) -> None:
    a, b, c = members
    mine, theirs = b.call(a)
    others = c.call(a)
    relay.cut("a", "b~7")  # an incarnation stands for its name
    assert broken(mine)
    assert broken(theirs)
    assert b.refused_by(a)
    assert a.refused_by(b)
    there_and_back(*others)
    relay.restore("b", "a")
    there_and_back(*b.call(a))


def test_a_stalled_link_passes_nothing_not_even_an_end(relay: LinkRelay, members: list[Member]) -> None:
    a, b, c = members
    mine, theirs = b.call(a)
    others = c.call(a)
    relay.stall("a", "b")
    mine.sendall(b"held")
    there_and_back(*others)
    assert quiet(theirs)
    mine.close()
    there_and_back(*others)
    assert quiet(theirs)
    relay.restore("a", "b")
    assert exactly(theirs, 4) == b"held"
    assert theirs.recv(1) == b""


def test_what_is_dialled_into_a_stall_goes_on_when_it_ends(relay: LinkRelay, members: list[Member]) -> None:
    a, b, c = members
    others = c.call(a)
    relay.stall("a", "b")
    with pytest.raises(ChaosError, match="handshake took longer than its deadline"):
        b.dial(a, deadline_s=0.2)
    ends: list[tuple[socket.socket, socket.socket]] = []
    caller = threading.Thread(target=lambda: ends.append(b.call(a)), daemon=True)
    caller.start()
    while len(relay._connections) < 3:
        there_and_back(*others)
    relay.restore("a", "b")
    caller.join(DEADLINE_S)
    there_and_back(*ends[0])


def test_a_stall_can_become_a_cut(relay: LinkRelay, members: list[Member]) -> None:
    a, b, _ = members
    mine, theirs = b.call(a)
    relay.stall("a", "b")
    relay.cut("a", "b")
    assert broken(mine)
    assert broken(theirs)


def test_nobody_listens_where_the_relay_is_sent(relay: LinkRelay, members: list[Member]) -> None:
    a, b, _ = members
    a.close()
    with pytest.raises((OSError, ChaosError)):
        dial("127.0.0.1", 1, Greeting("j", b.id, a.id, "link"), deadline_s=DEADLINE_S)


@pytest.mark.parametrize("line", [b"no json\n", b"[]\n", b'{"me": 3}\n', b"x" * 5000, b""])
def test_strangers_are_reset(relay: LinkRelay, line: bytes) -> None:
    host, _, port = relay.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
        sock.sendall(line)
        if not line:
            sock.shutdown(socket.SHUT_WR)
        assert broken(sock)


def test_a_line_may_come_in_pieces(relay: LinkRelay, members: list[Member]) -> None:
    a, b, c = members
    others = c.call(b)
    host, _, port = relay.address.rpartition(":")
    target = a._listener.getsockname()[1]
    line = f'{{"me": "b~1", "peer": "a~1", "address": "127.0.0.1", "port": {target}}}\nhello'.encode()
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
        sock.sendall(line[:9])
        there_and_back(*others)
        sock.sendall(line[9:])
        there, _ = a._listener.accept()
        with there:
            there.settimeout(DEADLINE_S)
            assert exactly(there, 5) == b"hello"


def test_a_link_has_two_ends(relay: LinkRelay) -> None:
    with pytest.raises(ValueError, match="two ends"):
        relay.cut("a~1", "a~2")
    assert relay.environment() == {RELAY: relay.address}


def test_a_thread_that_ends_before_it_is_rung_for_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = LinkRelay()
    ring = os.eventfd_write

    def late(fd: int, count: int) -> None:
        ring(fd, count)
        relay._thread.join(DEADLINE_S)
        ring(fd, count)

    monkeypatch.setattr(os, "eventfd_write", late)
    relay.close()
    assert not relay._thread.is_alive()


def test_a_closed_relay_resets_all_links(relay: LinkRelay, members: list[Member]) -> None:
    a, b, _ = members
    mine, theirs = b.call(a)
    relay.close()
    relay.close()
    assert broken(mine)
    assert broken(theirs)
    assert b.refused_by(a)


def test_names_of_processes_may_change_while_a_relay_looks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {1: "n1", 2: "n2"}

    def owner(near: socket.socket, pids: dict[int, str]) -> str:
        for pid in pids:
            names[pid + 10] = "newcomer"
        return pids[2]

    monkeypatch.setattr(relay_module, "owner_of", owner)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(DEADLINE_S)
        with contextlib.closing(Way(f"127.0.0.1:{server.getsockname()[1]}", lambda: names)) as way:
            host, _, port = way.endpoint.rpartition(":")
            with socket.create_connection((host, int(port)), DEADLINE_S) as dialled:
                dialled.sendall(b"hello")
                accepted, _ = server.accept()
                with accepted:
                    accepted.settimeout(DEADLINE_S)
                    assert accepted.recv(5) == b"hello"
