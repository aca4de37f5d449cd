"""How many peers a member sends its state to at a time (protocol.md 15).

Theory of operation. A peer has a turn from its first request for bytes on, as long as it goes on asking. One that is
done, or waits for bytes from elsewhere, loses it soon, so that no two members wait for each other. A peer without a
turn waits, and may be served by another donor meanwhile. All methods are called with the server's lock held.
"""

from __future__ import annotations

import math
import socket

IDLE_S = 0.25
"""Seconds without a request after which a turn is over: a peer that is served asks every few milliseconds."""


class Turns:
    """See the module."""

    def __init__(self) -> None:
        self._until: dict[socket.socket, float] = {}
        """When (s) the turn of each connection ends."""

    def take(self, sock: socket.socket, most: int, now: float) -> bool:
        """Whether this connection has a turn from now on, until `done`; at most `most` connections have one."""
        self._until = {s: until for s, until in self._until.items() if until > now}
        if sock not in self._until and len(self._until) >= most:
            return False
        self._until[sock] = math.inf
        return True

    def done(self, sock: socket.socket, now: float) -> None:
        """An answer to this connection was sent."""
        if sock in self._until:
            self._until[sock] = now + IDLE_S

    def leave(self, sock: socket.socket) -> None:
        """This connection has ended."""
        self._until.pop(sock, None)
