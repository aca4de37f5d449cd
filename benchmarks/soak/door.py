"""A TCP address that leads to another one and can be shut: the soak's way to part members from the scheduler.

Theory of operation. One thread accepts, two per connection copy bytes. Shutting resets what stands and whatever comes;
whoever dialled hears of it at once, as when a machine between them says that there is no way. Links between members do
not pass here, they have `chaos_lightning.lab.edge.relay`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

from chaos_lightning.lab.processes import owner_of

_RESET = struct.pack("ii", 1, 0)
_READ_NBYTES = 1 << 16


class Door:
    """See the module. It can be shut for everybody, or for some processes of this machine.

    Args:
        target: HOST:PORT that it leads to.
        pids: Whom to tell apart, by process id.

    Attributes:
        endpoint: HOST:PORT to dial instead.
    """

    def __init__(self, target: str, pids: Callable[[], Mapping[int, str]] = dict) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._pids = (host, int(port)), pids
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._passing: dict[tuple[socket.socket, socket.socket], int] = {}
        """Connections, and how many of their two directions have not ended."""
        self._names: dict[socket.socket, str] = {}
        """Who dialled; "" for whoever is not told apart."""
        self._shut_for: set[str] = set()
        self._shut = self._closed = False
        threading.Thread(target=self._accept, name="soak-door", daemon=True).start()

    def shut(self, name: str = "") -> None:
        """Resets the connections of this process ("": all), and every new one until `open`."""
        with self._lock:
            if name:
                self._shut_for.add(name)
            else:
                self._shut = True
            for pair in [p for p in self._passing if not name or self._names.get(p[0]) == name]:
                self._end(pair)

    def open(self, name: str = "") -> None:
        """New connections pass again."""
        with self._lock:
            if name:
                self._shut_for.discard(name)
            else:
                self._shut = False

    def close(self) -> None:
        """For good. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._shut = True
            for pair in list(self._passing):
                self._end(pair)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._listener.close()

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """Resets both of its sockets; the lock is held."""
        if self._passing.pop(pair, None) is None:
            return
        for sock in pair:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.shutdown(socket.SHUT_RDWR)  # a close alone would wait for the thread that reads there
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5.0)
            except OSError:
                near.close()
                continue
            pair = (near, far)
            pids = self._pids()
            name = owner_of(near, pids) if pids else ""
            with self._lock:
                self._passing[pair] = 2
                self._names = {sock: n for sock, n in self._names.items() if sock.fileno() >= 0} | {near: name}
                if self._shut or name in self._shut_for:
                    self._end(pair)
                    continue
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.settimeout(None)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for one, other in (pair, pair[::-1]):
                threading.Thread(target=self._copy, args=(one, other, pair), name="soak-door-copy", daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        try:
            while data := one.recv(_READ_NBYTES):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            with self._lock:
                self._end(pair)
            return
        with self._lock:
            if pair in self._passing:
                self._passing[pair] -= 1
                if not self._passing[pair]:
                    self._end(pair)


class Ways:
    """One member's ways to all schedulers, as if they were one door."""

    def __init__(self, doors: Sequence[Door], name: str) -> None:
        self._doors, self._name = doors, name
        self.endpoint = ",".join(door.endpoint for door in doors)

    def shut(self) -> None:
        for door in self._doors:
            door.shut(self._name)

    def open(self) -> None:
        for door in self._doors:
            door.open(self._name)

    def close(self) -> None:
        self.open()
