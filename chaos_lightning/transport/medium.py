"""Represents the network between members: the real one, unless a lab has installed an emulated one.

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
    """Limiter of the rates at which one member sends. All methods but `emulates` and `begin` belong to one thread."""

    def emulates(self, peer: str) -> bool:
        """Returns whether the link to this peer is emulated, so that it is measured even within a machine. Any
        thread.
        """

    def begin(self, peer: str, sock: socket.socket) -> None:
        """Called before a bulk connection begins to send to this peer; `join` follows. Any thread."""

    def join(self, peer: str, sock: socket.socket, bound: Callable[[float | None], None], now: float) -> None:
        """Adds a connection to this peer whose rate is to be limited.

        Args:
            peer: Id of the peer.
            sock: Socket of the connection, which names it in other calls.
            bound: Function that sets the connection's bound in bits per second; None takes it away.
            now: Present time in monotonic seconds.
        """

    def leave(self, peer: str, sock: socket.socket, now: float) -> None:
        """Removes a connection that has ended; ignores unknown ones."""

    def settle(self, now: float, waiting: Callable[[str], Collection[socket.socket]]) -> None:
        """Sets all rate limits anew; called several times a second. `waiting` returns the connections to a peer that
        have bytes to send.
        """


class Medium(Protocol):
    """Network through which members connect."""

    def connect(self, address: str, port: int, *, me: str, peer: str, timeout_s: float) -> socket.socket:
        """Returns a TCP connection from member `me` to member `peer`, who listens at this address.

        Raises:
            OSError: There is no way, or nothing listens at the address.
        """

    def pacer(self) -> Pacer:
        """Returns a new pacer, for all connections of one member."""


class Unpaced:
    """Pacer that limits nothing."""

    def emulates(self, peer: str) -> bool:
        return False

    def begin(self, peer: str, sock: socket.socket) -> None:
        """Does nothing, since no rate is limited."""

    def join(self, peer: str, sock: socket.socket, bound: Callable[[float | None], None], now: float) -> None:
        """Does nothing, since no rate is limited."""

    def leave(self, peer: str, sock: socket.socket, now: float) -> None:
        """Does nothing, since no rate is limited."""

    def settle(self, now: float, waiting: Callable[[str], Collection[socket.socket]]) -> None:
        """Does nothing, since no rate is limited."""


class Direct:
    """Real network: dials directly, and limits no rate."""

    def connect(self, address: str, port: int, *, me: str, peer: str, timeout_s: float) -> socket.socket:
        return socket.create_connection((address, port), timeout=timeout_s)

    def pacer(self) -> Pacer:
        return Unpaced()


_installed: Medium = Direct()


def installed() -> Medium:
    """Returns the network that this process uses."""
    return _installed


def install(medium: Medium) -> Medium:
    """Sets the network through which this process connects from now on; returns the former one."""
    global _installed
    before, _installed = _installed, medium
    return before
