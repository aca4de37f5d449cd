"""Computes norms of reduced gradients per part, so that members with different parts clip alike (protocol.md,
pipelines).

Theory of operation. The oldest owner of each part says the squared norm of its reduced sum (pipeline/told.py). All
members add these up in the order of parts, so that the whole norm has equal bits everywhere, whatever order the owners'
processors add in. NaN and infinity are values like others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from chaos_lightning.collectives.memory import Memory


class PartNorm(NamedTuple):
    """Norm of the summed gradients of one part.

    Attributes:
        squared: Square of the norm, in double precision.
        finite: Whether all numbers of the gradients are finite.
    """

    squared: float
    finite: bool


@torch.no_grad()
def part_norms(memory: Memory, section: int, seq: int) -> dict[str, PartNorm]:
    """Returns the norms of the parts that this member owns, in the layout's order.

    Args:
        memory: Memory whose result of the slot is complete.
        section: Number of the optimizer whose parameters count.
        seq: The slot.
    """
    found: dict[str, PartNorm] = {}
    for run in memory.layout.runs:
        if run.section != section or run.stop == run.start or not memory.holds(run.start):
            continue
        at = memory.place(run.start)
        sums = memory.results[seq % 2][at : at + run.stop - run.start].view(run.dtype)
        norm = float(torch.linalg.vector_norm(sums, dtype=torch.float64))
        squared, finite = found.get(run.part, PartNorm(0.0, True))
        finite = finite and (math.isfinite(norm) or bool(torch.isfinite(sums).all()))
        found[run.part] = PartNorm(squared + norm * norm, finite)
    return found


def whole_norm(norms: Iterable[PartNorm], total: float) -> PartNorm:
    """Combines the parts' norms to the norm of the averaged gradient; bitwise equal at all members.

    Args:
        norms: Norm of each part, once, in the order of parts, as the part's oldest owner said.
        total: The header's weight, by which sums are divided; 0: there is no gradient.
    """
    squared, finite = 0.0, True
    for norm in norms:
        squared += norm.squared
        finite = finite and norm.finite
    return PartNorm(squared / (total * total) if total > 0 else 0.0, finite)
