"""Represents what a donor publishes at one header: a state, or a slot's reduced bytes, in one address space."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from chaos_lightning.protocol.types import Span
from chaos_lightning.replication.memory import Region
from chaos_lightning.replication.snapshot import Snapshot
from chaos_lightning.replication.table import PIECE_NBYTES, StateTable, build_table


class RefusalError(Exception):
    """Error whose text is sent to the peer in a REFUSED frame."""


@dataclass
class Published:
    """Published state, or reduced bytes of one slot."""

    head: str
    seq: int
    regions: list[Region]
    starts: list[int]
    nbytes: int
    manifest: bytes = b""
    named: list[tuple[str, Tensor]] = field(default_factory=list)
    attached: list[tuple[str, Tensor]] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    """Valid byte ranges of a reduced slot."""
    snapshot: Snapshot | None = None
    """Snapshot of the live state that this publication is, while it is unchanged, and of the bytes that were copied
    before it changed.
    """
    asked_at: float = 0.0
    """Moment at which a peer last asked for something of it, or was sent it; by `time.monotonic()`."""
    sending: int = 0
    """Number of answers with bytes of it that are under way."""
    hashes: list[tuple[bytes, ...]] | None = None
    """Hashes of the pieces of each tensor, if the donor has hashed it before."""
    piece_nbytes: int = PIECE_NBYTES
    table: StateTable | None = None
    encoded: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def build(self, tick: Callable[[], None]) -> StateTable:
        """Returns the table of hashes; the first caller computes it, others wait and call `tick` meanwhile."""
        while not self.lock.acquire(timeout=0.05):
            tick()
        try:
            if self.table is None:
                self.table = build_table(
                    self.named,
                    self.attached,
                    regions=self.regions,
                    hashes=self.hashes,
                    piece_nbytes=self.piece_nbytes,
                    tick=tick,
                )
                self.encoded = self.table.encode()
            return self.table
        finally:
            self.lock.release()

    def read(self, start: int, stop: int) -> list[memoryview]:
        """Returns memory views of the bytes [start, stop) of the address space, in order."""
        if not 0 <= start < stop <= self.nbytes:
            raise RefusalError(f"bytes [{start}, {stop}) are outside the {self.nbytes} bytes of this state")
        low = bisect_right(self.starts, start) - 1  # the last region that starts at or before `start`
        views: list[memoryview] = []
        while start < stop:
            base, source = self.starts[low], self.regions[low]
            end = min(stop, base + source.nbytes)
            if end > start:
                views.append(source.read(start - base, end - base))
                start = end
            low += 1
        return views


def lay_out(head: str, seq: int, regions: list[Region]) -> Published:
    """Makes a publication of these regions, laid end to end in one address space."""
    starts, offset = [], 0
    for item in regions:
        starts.append(offset)
        offset += item.nbytes
    return Published(head, seq, regions, starts, offset)
