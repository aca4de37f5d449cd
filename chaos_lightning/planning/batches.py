"""Computes how many positions of the shared data a cluster leases at once, and the sizes of the batches that it trains
them in (docs/outer.md, O11).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batches:
    """Batch sizes of a cluster, counted in positions of the shared data over all its devices.

    Attributes:
        step: Positions of an inner step; 0: the cluster has not said.
        batch: Positions of a batch. An inner step accumulates one or several.
        least: Fewest positions that are trained as a batch: `batch` with drop_last, else 1, or 2 for each device of a
            model with BatchNorm.
    """

    step: int = 0
    batch: int = 0
    least: int = 1

    def whole(self, wanted: int, there: int) -> int:
        """Returns how many of the available positions to lease, as whole steps, at least one.

        A rest that would be no batch of its own is leased with the last step: its batches are made smaller.
        """
        steps = min(max(1, wanted // self.step), there // self.step)
        rest = there - steps * self.step
        return there if steps and 0 < rest < self.least < self.batch else steps * self.step

    def rest(self, there: int) -> int:
        """Returns how many positions a cluster leases when fewer are available than its step needs."""
        usable = there - there % self.batch if self.least >= self.batch else there
        return usable if usable >= self.least else 0

    def next(self, wanted: int, there: int) -> int:
        """Returns the size of the next batch, chosen so that the positions left after it are none, or enough for
        another batch.
        """
        short = self.least - (there - wanted)
        return max(0, wanted - short) if 0 < short < self.least < self.batch else min(wanted, there)


UNTOLD = Batches()
"""Batches of a cluster that has not told them, or has data of its own."""
