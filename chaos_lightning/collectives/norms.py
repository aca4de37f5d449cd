"""Norms of reduced gradients by part, from which members that own different parts clip alike (protocol.md, pipelines).

Theory of operation. Each member says the squared norm of the reduced sum of each part that it owns. All members take
that of each part's oldest owner, each part once and in the order of parts, so that the whole norm has equal bits
everywhere, whatever order the owners' processors add in. NaN and infinity are values like others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from chaos_lightning.collectives.memory import Memory
from chaos_lightning.errors import StateError


class PartNorm(NamedTuple):
    """Reduced sum of one part's gradients.

    Attributes:
        squared: Square of its norm, of double precision.
        finite: All its numbers are.
    """

    squared: float
    finite: bool


@torch.no_grad()
def part_norms(memory: Memory, section: int, seq: int) -> dict[str, PartNorm]:
    """Returns the norms of the parts that lie here, in the order of the layout.

    Args:
        memory: Its result of the slot is whole.
        section: Which optimizer's parameters.
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


def whole_norm(
    parts: Sequence[str], owners: Mapping[str, Sequence[str]], said: Mapping[str, Mapping[str, PartNorm]], total: float
) -> PartNorm:
    """Returns the norm of the averaged gradients of all parts; equal at all members.

    Args:
        parts: Those that have gradients, in an order that is equal everywhere.
        owners: By part: its owners, the oldest first.
        said: By member: its contribution's norms.
        total: The header's weight, by which sums are divided; 0: there is no gradient.

    Raises:
        StateError: A part's oldest owner did not say its norm.
    """
    squared, finite = 0.0, True
    for part in parts:
        oldest = owners[part][0]
        if part not in said.get(oldest, {}):
            raise StateError(f"{oldest} owns {part} and did not say its norm; expected each owner to")
        squared += said[oldest][part].squared
        finite = finite and said[oldest][part].finite
    return PartNorm(squared / (total * total) if total > 0 else 0.0, finite)
