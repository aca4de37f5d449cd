"""One member's control stream, as the scheduler's shell sees it (control/server.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from chaos_lightning.protocol.types import ToMember

_HEARD_S = 0.7
"""A busy machine may keep a member from speaking for so long."""


class Connection:
    """What waits to be sent on it, and who is at its other end.

    Args:
        number: By which the machine knows the stream.
        peer: Address, as gRPC tells it.
    """

    def __init__(self, number: int, peer: str) -> None:
        self.number = number
        self.peer = peer
        self.name = ""
        """The member's, once it has said hello."""
        self.outbox: asyncio.Queue[ToMember | None] = asyncio.Queue()
        self.cut = asyncio.Event()
        self.heard = time.monotonic()
        """When it said something last: a stream whose packets vanish is still there."""


def present(connections: Iterable[Connection], heartbeat_timeout_s: float) -> set[str]:
    """Names of the members that have said something within this time, or 0.7 s if that is longer."""
    since = time.monotonic() - max(heartbeat_timeout_s, _HEARD_S)
    return {c.name for c in connections if c.name and c.heard >= since}
