"""Links that are made slow on purpose, for tests and emulated networks: the kernel paces a socket, no privilege needed.

Theory of operation. SO_MAX_PACING_RATE bounds what one TCP socket sends; it is exact to a few percent from 100 to 1000
Mbit/s, costs no CPU and can be changed while bytes flow. It bounds one socket in one direction: each end of a link sets
its own, and bulk connections beside the link have a bound each. A network that must be right in sum, or has delay,
needs the relay (testing/relay.py).

The table of rates says what this member may send to whom; CHAOS_EMULATE in the environment holds it for a process.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
from collections.abc import Mapping

from chaos_lightning.errors import ConfigurationError

EMULATE = "CHAOS_EMULATE"
"""Environment variable: a JSON object, peer's name or node to bits per second, such as {"node-1": 3e8}."""

_SO_MAX_PACING_RATE = 47
_UNLIMITED = (1 << 64) - 1


def pace(sock: socket.socket, rate_bps: float | None) -> None:
    """Bounds what `sock` sends to `rate_bps` bits per second; None takes the bound away. Other than TCP: no effect."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    bytes_per_s = _UNLIMITED if rate_bps is None else max(1, min(_UNLIMITED - 1, round(rate_bps / 8)))
    # Packed: as a Python int the option overflows above 2^31 bytes per second.
    with contextlib.suppress(OSError):  # a kernel without the option: the link is as fast as it is
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", bytes_per_s))


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
