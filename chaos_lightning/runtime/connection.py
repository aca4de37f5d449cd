"""One member's control stream, as the scheduler's shell sees it (runtime/server.py)."""

from __future__ import annotations

import asyncio

from chaos_lightning.membership.types import ToMember


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
