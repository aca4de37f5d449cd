"""The way of one member's control stream to the scheduler, which a test can cut without touching any link."""

from __future__ import annotations

import contextlib

from chaos_lightning.lab.edge.relay import LinkRelay, _Connection, pair_of
from chaos_lightning.machine.addresses import split_endpoint

SCHEDULER = "the scheduler"


class ControlPath(LinkRelay):
    """A relay of one connection's kind: who dials it is this member, and wants the scheduler.

    `cut`, `stall` and `restore` of the relay hurt the stream; what is dialled while it is cut is reset.

    Args:
        member: Name of the member that is given `address` as its endpoint.
        endpoint: Where the scheduler really listens.
    """

    def __init__(self, member: str, endpoint: str) -> None:
        self._member = member
        self._endpoint = split_endpoint(endpoint)
        super().__init__()

    def break_off(self) -> None:
        """The stream ends now, and no other one comes through until `mend`."""
        self.cut(self._member, SCHEDULER)

    def mend(self) -> None:
        self.restore(self._member, SCHEDULER)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection = _Connection(self._listener.accept()[0])
            connection.pair = pair_of(self._member, SCHEDULER)
            connection.names = (self._member, SCHEDULER)
            connection.address = self._endpoint
            self._connections.add(connection)
            self._go_on(connection)
