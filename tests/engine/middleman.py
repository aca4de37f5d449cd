"""Relay on the links between members that records their bytes and can change them."""

from __future__ import annotations

import threading

from chaos_lightning.testing.edge.relay import LinkRelay, Pair, _Connection, _End, pair_of

_READ_NBYTES = 1 << 18
_DROPPED_NBYTES = 1000
"""No more is left out at once: where a contribution is missing nothing but pings follow, ten a second, and what did not
come shows only when as many bytes have come in its place."""
HANDSHAKE_NBYTES = 4096
"""Bytes at the beginning of each direction that pass unharmed."""


class Middleman(LinkRelay):
    """Relay that harms connections on order, and records the bytes that pass.

    Attributes:
        seen: Bytes that passed while `records` was true, by (number of the connection, sender, receiver).
        done: Kinds of harm that were done.
    """

    def __init__(self) -> None:
        self.records = False
        self.seen: dict[tuple[int, str, str], bytearray] = {}
        self.done: list[str] = []
        self.harmed = threading.Event()
        self._plan: tuple[Pair, str] | None = None
        self._passed: dict[_End, int] = {}
        self._held: dict[_End, bytes] = {}
        self._number: dict[_Connection, int] = {}
        super().__init__()

    def harm(self, one: str, other: str, kind: str) -> None:
        """Orders one harm of this kind to the next bytes between two members, on a connection whose handshake
        is done.
        """
        self.harmed.clear()
        self._plan = (pair_of(one, other), kind)

    def _read(self, end: _End, other: _End | None) -> None:
        assert other is not None
        connection, _ = self._watched[end.sock.fileno()]
        data = end.sock.recv(_READ_NBYTES)
        end.ended = not data
        passed = self._passed[end] = self._passed.get(end, 0) + len(data)
        if self.records:
            number = self._number.setdefault(connection, len(self._number))
            names = connection.names if end is connection.dialler else connection.names[::-1]
            self.seen.setdefault((number, *names), bytearray()).extend(data)
        for piece in self._changed(connection, end, data, passed):
            other.held += len(piece)
            other.coming.append((0.0, memoryview(piece)))
        self._write(other)

    def _changed(self, connection: _Connection, end: _End, data: bytes, passed: int) -> list[bytes]:
        if (held := self._held.pop(end, None)) is not None and data:
            self._tell("reorder")
            return [data, held]
        plan = self._plan
        if plan is None or connection.pair != plan[0] or passed < HANDSHAKE_NBYTES or not data:
            return [data]
        kind = plan[1]
        if kind == "drop" and len(data) > _DROPPED_NBYTES:
            return [data]
        self._plan = None
        if kind == "reorder":
            self._held[end] = data
            return []
        self._tell(kind)
        if kind == "flip":
            changed = bytearray(data)
            changed[len(changed) // 2] ^= 0x10
            return [bytes(changed)]
        if kind == "replay":
            return [data, data]
        assert kind == "drop", kind
        return []

    def _tell(self, kind: str) -> None:
        self.done.append(kind)
        self.harmed.set()
