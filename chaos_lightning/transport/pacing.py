"""Links that are made slow on purpose, for tests and emulated networks: the kernel paces a socket, no privilege needed.

Theory of operation. SO_MAX_PACING_RATE bounds what one TCP socket sends; it is exact to a few percent from 100 to 1000
Mbit/s, costs no CPU and can be changed while bytes flow. It bounds one socket in one direction, so each end of a link
sets its own. What goes to one peer over several connections, such as a link and the state transfers beside it, shares
one rate (`Shares`): whoever has bytes waiting gets an equal part, the others keep a small one to begin with, and the
bounds are set anew several times a second. In sum they never exceed the rate; a connection that begins to send has to
make do with its small part until the next look. A network with delay, or an access that several links share, needs the
relay (lab/relay.py).

The table of rates says what this member may send to whom; CHAOS_EMULATE in the environment holds it for a process.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from chaos_lightning.errors import ConfigurationError

EMULATE = "CHAOS_EMULATE"
"""Environment variable: a JSON object, peer's name or node to bits per second, such as {"node-1": 3e8}."""

_SO_MAX_PACING_RATE = 47
_UNLIMITED = (1 << 64) - 1
IDLE_PART = 1 / 16
"""Of the rate, for a connection with nothing to send; many such connections have a quarter in all."""
_LINGER_S = 0.15
"""A connection that had nothing to send at the last looks was busy so short a time ago that it still counts as busy."""


def pace(sock: socket.socket, rate_bps: float | None) -> None:
    """Bounds what `sock` sends to `rate_bps` bits per second; None takes the bound away. Other than TCP: no effect."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    bytes_per_s = _UNLIMITED if rate_bps is None else max(1, min(_UNLIMITED - 1, round(rate_bps / 8)))
    # Packed: as a Python int the option overflows above 2^31 bytes per second.
    with contextlib.suppress(OSError):  # a kernel without the option: the link is as fast as it is
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", bytes_per_s))


@dataclass(slots=True)
class _Connection:
    bound: Callable[[float | None], None]
    busy_at: float
    rate_bps: float | None = None


def _level(rate_bps: float | None) -> float:
    return math.inf if rate_bps is None else rate_bps


class Shares:
    """One rate for all connections on which this member sends to one peer. All methods belong to one thread.

    Args:
        rate_bps: Bits per second; None: no bound.
    """

    def __init__(self, rate_bps: float | None) -> None:
        self.rate_bps = rate_bps
        self._connections: dict[socket.socket, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def join(self, sock: socket.socket, bound: Callable[[float | None], None], now: float) -> None:
        """A connection, which as a rule has something to send at once.

        Args:
            sock: Names it.
            bound: Sets its own bound in bits per second; None takes it away.
            now: Monotonic seconds.
        """
        # What a new connection was bounded to before counts as nothing: the others make room for it first.
        self._connections[sock] = _Connection(bound, now, 0.0 if self.rate_bps is not None else None)
        self.settle(now)

    def leave(self, sock: socket.socket, now: float) -> None:
        """This connection is over; unknown ones are ignored."""
        if self._connections.pop(sock, None) is not None:
            self.settle(now)

    def settle(self, now: float, waiting: Collection[socket.socket] = ()) -> None:
        """Sets all bounds.

        Args:
            now: Monotonic seconds.
            waiting: Connections that have bytes to send now.
        """
        for sock in waiting:
            if sock in self._connections:
                self._connections[sock].busy_at = now
        changes = [(self._connections[s], part) for s, part in self._parts(now).items()]
        changes = [(connection, part) for connection, part in changes if part != connection.rate_bps]
        # Those that get less come first, so that the sum is never too large.
        for connection, part in sorted(changes, key=lambda change: _level(change[1]) - _level(change[0].rate_bps)):
            connection.rate_bps = part
            connection.bound(part)

    def _parts(self, now: float) -> dict[socket.socket, float | None]:
        rate = self.rate_bps
        if rate is None:
            return dict.fromkeys(self._connections)
        # Of several with nothing to send, the first is the link: whatever comes next, as a rule comes there.
        busy = [s for s, c in self._connections.items() if now - c.busy_at <= _LINGER_S]
        busy = busy or list(self._connections)[:1]
        others = len(self._connections) - len(busy)
        small = rate * min(IDLE_PART, 0.25 / others) if others else 0.0
        large = (rate - others * small) / max(1, len(busy))
        return {s: large if s in busy else small for s in self._connections}


def rates_from(text: str, what: str = EMULATE) -> dict[str, float]:
    """The table in a JSON text; "" is an empty one.

    Raises:
        ConfigurationError: Names the entry that cannot be a rate.
    """
    if not text.strip():
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{what} is no JSON ({error}): {text[:200]}") from error
    if not isinstance(given, dict):
        raise ConfigurationError(f'{what} must be an object such as {{"node-1": 3e8}}, got {text[:200]}')
    return checked({str(name): rate for name, rate in given.items()}, what)


def checked(rates: Mapping[str, object], what: str = "emulate") -> dict[str, float]:
    """The same table, if each rate is a positive number of bits per second.

    Raises:
        ConfigurationError: Names the entry.
    """
    table: dict[str, float] = {}
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
            raise ConfigurationError(f"{what}: {name!r} has the rate {rate!r}; expected positive bits per second")
        table[name] = float(rate)
    return table


def rate_to(table: Mapping[str, float], member_id: str) -> float | None:
    """The rate towards this member: by its id, its name or its node (names are NODE-RANK); None if it has none."""
    name = member_id.rpartition("~")[0] or member_id
    for key in (member_id, name, name.rpartition("-")[0]):
        if key in table:
            return table[key]
    return None
