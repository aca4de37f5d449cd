"""Keeps bulk connections that are made in advance, since connecting takes as long as moving a small state.

Theory of operation. A newcomer knows whom it will get its state from as soon as its links stand, a step or more before
it is told at which header. Connections that were made then, or that a transfer has left in good order, wait here; who
dials takes one of them if its other end has not closed it meanwhile. All are closed once the newcomer is in.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from chaos_lightning.errors import ChaosError
from chaos_lightning.replication.source import Dial, Endpoint
from chaos_lightning.transport.handshake import stands

MOST_MEMBERS = 16
"""Number of members to which connections are prepared: a newcomer of a large job will ask few of those that it has
links with."""


class ConnectionPool:
    """Open bulk connections that are not in use. Methods may be called by any thread.

    Args:
        dial: Opens an authenticated bulk socket.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._waiting: dict[tuple[str, int], list[socket.socket]] = {}
        self._prepared: set[str] = set()
        self._lock = threading.Lock()
        self._open = True

    def prepare(self, endpoint: Endpoint, count: int) -> None:
        """Opens `count` connections to a member, in a separate thread; does nothing for more than `MOST_MEMBERS`
        members.
        """
        self._prepared.add(endpoint.member)
        if len(self._prepared) > MOST_MEMBERS:
            return

        def work() -> None:
            with contextlib.suppress(ChaosError, OSError):  # whoever needs one finds out what is wrong
                for _ in range(count):
                    self.put(endpoint, self._dial(endpoint))

        threading.Thread(target=work, name=f"chaos-pool-{endpoint.member}", daemon=True).start()

    def put(self, endpoint: Endpoint, sock: socket.socket) -> None:
        """Puts an idle connection into the pool."""
        sock.settimeout(None)
        with self._lock:
            if self._open:
                self._waiting.setdefault((endpoint.address, endpoint.port), []).append(sock)
                return
        sock.close()

    def take(self, endpoint: Endpoint) -> socket.socket | None:
        """Removes an open connection to this endpoint from the pool and returns it; None if there is none."""
        while True:
            with self._lock:
                waiting = self._waiting.get((endpoint.address, endpoint.port))
                sock = waiting.pop() if waiting else None
            if sock is None or stands(sock):
                return sock
            sock.close()

    def close(self) -> None:
        """Closes all connections in the pool, and all that are put into it later."""
        with self._lock:
            self._open = False
            socks = [sock for waiting in self._waiting.values() for sock in waiting]
            self._waiting.clear()
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.close()
