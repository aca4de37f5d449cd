"""Cuts one member's share of a step into the pieces that it computes at once.

Theory of operation. A step has the same positions at all members (steps.py); a view's split says which units of the
step are whose (planning/batch.py). Where the rule has micro-batches of B, each unit is a piece. Else a share is cut
into as few pieces as fit the member's memory, as equal as whole samples allow. A piece has a number of its own in the
step: that of its micro-batch, or that of its first sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from chaos_lightning.data.accumulations import Part
from chaos_lightning.planning.batch import Split
from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import Span


class SharePiece(NamedTuple):
    """Samples that a member computes at once.

    Attributes:
        number: Number within the step, equal wherever the piece is computed.
        spans: Positions of its samples in the epoch's order.
    """

    number: int
    spans: Part


@dataclass(frozen=True, slots=True)
class Share:
    """One member's share of each step in a view.

    Attributes:
        split: Division of a step among the view's members.
        rank: The member's place in the view.
        fits: Samples that the member computes at once; with micro-batches of B, B counts.
        least: Fewest samples that the model can train on; no share or piece has fewer, unless the step has.
    """

    split: Split
    rank: int
    fits: int
    least: int = 1

    def units(self, positions: Sequence[Part]) -> Span:
        """Returns the numbers of the member's units in a step.

        Args:
            positions: Positions of each micro-batch of the step, or of the whole step if the rule has none.
        """
        total = present(self.split, positions)
        first, stop = self.split.units(self.rank, total)
        return (first, stop) if self.split.rule.micro_batch else (self._border(first, total), self._border(stop, total))

    def _border(self, at: int, total: int) -> int:
        """Returns the end of a share that would end at sample `at` of `total` if it could have fewer than `least`."""
        whole = at - at % self.least
        return total if at == total or 0 < whole > total - self.least else whole

    def pieces(self, positions: Sequence[Part]) -> list[SharePiece]:
        """Returns what the member computes of a step with these positions, in order; may be empty."""
        first, stop = self.units(positions)
        if self.split.rule.micro_batch:
            return [SharePiece(j, positions[j]) for j in range(first, stop)]
        number = min(-(-(stop - first) // self.fits), max(1, (stop - first) // self.least)) if first < stop else 0
        borders = [first + (stop - first) * k // number for k in range(number + 1)] if number else []
        return [SharePiece(a, between(positions[0], a, b)) for a, b in pairwise(borders)]

    def parts(self, positions: Sequence[Part]) -> tuple[Part, ...]:
        """Returns the positions of these pieces."""
        return tuple(piece.spans for piece in self.pieces(positions))


def present(split: Split, positions: Sequence[Part]) -> int:
    """Returns the number of units that a step with these positions has."""
    return sum(map(bool, positions)) if split.rule.micro_batch else count(positions[0])


def between(spans: Part, start: int, stop: int) -> Part:
    """Returns the positions from number `start` to number `stop` of those in sorted spans, counted from 0."""
    found, before = [], 0
    for a, b in spans:
        low, high = max(a, a + start - before), min(b, a + stop - before)
        if low < high:
            found.append((low, high))
        before += b - a
    return tuple(found)
