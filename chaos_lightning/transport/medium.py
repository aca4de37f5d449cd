"""Names the network between members: the real one, unless a lab has put an emulated one in its place.

Theory of operation. Every connection from member to member (links, transfers of state, watchers) is made by
`installed().connect`, and what is sent on them may be bounded by a `Pacer`. The network as it is dials, and bounds
nothing. This is the one seam for emulated networks: `install`, before a process opens its first connection, replaces
both. No environment variable is read for that, and nothing of a lab is imported; how a lab gets to call `install` in
processes that run an ordinary user's script is its own business (testing/emulation.py).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from typing import Protocol


class Pacer(Protocol):
    """Bounds of what one member sends to others. All methods but `emulates` and `begin` belong to one thread."""

    def emulates(self, peer: str) -> bool:
        """Returns whether bytes to this peer go through an emulated medium, so that they are measured. Any thread."""

    def begin(self, peer: str, sock: socket.socket) -> None:
        """Takes the news that a connection beside the link is about to send to this peer; `join` follows. Any
        thread.
        """

    def join(self, peer: str, sock: socket.socket, bound: Callable[[float | None], None], now: float) -> None:
        """Takes a connection to this peer, to be bounded.

        Args:
            peer: Whose.
            sock: Names it.
            bound: Sets its bound in bits per second; None takes it away.
            now: Monotonic seconds.
        """

    def leave(self, peer: str, sock: socket.socket, now: float) -> None:
        """Drops a connection that is over; unknown ones are ignored."""

    def settle(self, now: float, waiting: Callable[[str], Collection[socket.socket]]) -> None:
        """Sets the bounds anew; called several times a second. `waiting` names the connections to a peer that have
        bytes to send.
        """


class Medium(Protocol):
    """Network, as members see it."""

    def connect(self, address: str, port: int, *, me: str, peer: str, timeout_s: float) -> socket.socket:
        """Returns a TCP connection from member `me` to member `peer`, who listens at this address.

        Raises:
            OSError: There is no way, or nobody listens.
        """

    def pacer(self) -> Pacer:
        """Returns a new pacer, for one member's connections."""


class Unpaced:
    """Pacer that bounds nothing."""

    def emulates(self, peer: str) -> bool:
        return False

    def begin(self, peer: str, sock: socket.socket) -> None:
        """Ignores the connection: nothing is bounded."""

    def join(self, peer: str, sock: socket.socket, bound: Callable[[float | None], None], now: float) -> None:
        """Ignores the connection: nothing is bounded."""

    def leave(self, peer: str, sock: socket.socket, now: float) -> None:
        """Ignores the connection: nothing was bounded."""

    def settle(self, now: float, waiting: Callable[[str], Collection[socket.socket]]) -> None:
        """Changes no bound: there is none."""


class Direct:
    """Network as it is: dials, and bounds nothing."""

    def connect(self, address: str, port: int, *, me: str, peer: str, timeout_s: float) -> socket.socket:
        return socket.create_connection((address, port), timeout=timeout_s)

    def pacer(self) -> Pacer:
        return Unpaced()


_installed: Medium = Direct()


def installed() -> Medium:
    """Returns this process's network."""
    return _installed


def install(medium: Medium) -> Medium:
    """Installs a network through which connections are made from now on; returns the former one."""
    global _installed
    before, _installed = _installed, medium
    return before
