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
    """See the module.

    Args:
        target: HOST:PORT that it leads to.

    Attributes:
        endpoint: HOST:PORT to dial instead.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._passing: dict[tuple[socket.socket, socket.socket], int] = {}
        """Connections, and how many of their two directions have not ended."""
        self._shut = self._closed = False
        threading.Thread(target=self._accept, name="soak-door", daemon=True).start()

    def shut(self) -> None:
        """Resets all connections, and every new one until `open`."""
        with self._lock:
            self._shut = True
            self._end_all()

    def open(self) -> None:
        """New connections pass again."""
        with self._lock:
            self._shut = False

    def close(self) -> None:
        """For good. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._shut = True
            self._end_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._listener.close()

    def _barred(self, near: socket.socket) -> bool:
        """Whether who dialled may not pass though the door is open."""
        return False

    def _end_all(self) -> None:
        for pair in list(self._passing):
            self._end(pair)

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
            barred = self._barred(near)
            with self._lock:
                self._passing[pair] = 2
                if self._shut or barred:
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


class SharedDoor(Door):
    """A door for several processes of this machine, which can be shut for some of them.

    Args:
        target: HOST:PORT that it leads to.
        pids: Whom to tell apart, by process id; all others always pass.
    """

    def __init__(self, target: str, pids: Callable[[], Mapping[int, str]]) -> None:
        self._pids = pids
        self._names: dict[socket.socket, str] = {}
        self._shut_for: set[str] = set()
        super().__init__(target)

    def bar(self, name: str) -> None:
        """Resets its connections, and every new one until `admit`."""
        with self._lock:
            self._shut_for.add(name)
            for pair in [p for p in self._passing if self._names.get(p[0]) == name]:
                self._end(pair)

    def admit(self, name: str) -> None:
        with self._lock:
            self._shut_for.discard(name)

    def _barred(self, near: socket.socket) -> bool:
        name = owner_of(near, self._pids())
        with self._lock:
            self._names = {sock: n for sock, n in self._names.items() if sock.fileno() >= 0}
            self._names[near] = name
            return name in self._shut_for


class Ways:
    """One member's ways to all schedulers, as if they were one door."""

    def __init__(self, doors: Sequence[SharedDoor], name: str) -> None:
        self._doors, self._name = doors, name
        self.endpoint = ",".join(door.endpoint for door in doors)

    def shut(self) -> None:
        for door in self._doors:
            door.bar(self._name)

    def open(self) -> None:
        for door in self._doors:
            door.admit(self._name)

    def close(self) -> None:
        self.open()
