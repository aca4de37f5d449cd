"""Joins the positions of several leases into one sequence (a tape), so that a ledger can record which places on it are
spent.

Theory of operation. An elastic cluster of outer sync is leased positions of an epoch in chunks, here and there
(docs/outer.md, O11), while its ranks share out one stretch [0, length) from its front (assignment.py). So what is
leased is appended to a tape in the order of granting, and the ranks' ledger counts *places* on that. A tape grows and
never changes otherwise: a used-up lease ends no epoch, there is only nothing more on it for now. A rejection takes all
leases away, and another epoch has other positions; either begins a new tape, with a higher number, which stands where
the ledger has an epoch's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import Span


@dataclass(frozen=True, slots=True)
class Tape:
    """Sequence of the positions of several leases, in which each position has a number, its place.

    Attributes:
        number: Number of the tape.
        epoch: Epoch of the positions on the tape.
        pieces: Positions in the order of granting; not normal.
    """

    number: int = 0
    epoch: int = 0
    pieces: tuple[Span, ...] = ()

    @property
    def length(self) -> int:
        """Number of places on the tape."""
        return count(self.pieces)

    def longer(self, spans: Iterable[Span]) -> Tape:
        """Returns the tape with these positions appended."""
        return replace(self, pieces=(*self.pieces, *spans))

    def next(self, epoch: int) -> Tape:
        """Returns a new, empty tape with the next number."""
        return Tape(self.number + 1, epoch)

    def positions(self, places: Iterable[Span]) -> tuple[Span, ...]:
        """Returns the positions at the given places of the tape, in order.

        Raises:
            ValueError: The tape is not so long.
        """
        found: list[Span] = []
        for start, stop in places:
            begin = 0
            for first, last in self.pieces:
                size = last - first
                a, b = max(start - begin, 0), min(stop - begin, size)
                if a < b:
                    found.append((first + a, first + b))
                begin += size
            if stop > begin:
                raise ValueError(f"places up to {stop} of a tape of {begin}")
        return tuple(found)
