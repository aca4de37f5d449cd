"""A symbolic training in pipelines: what a unit makes of its tensor, and what a part is after a step.

Theory of operation. The training state has parts (membership/parts.py): layers and the rest, each a number. A tensor
between stages and a gradient are numbers, too: hashes of everything that went into them, of the attempt above all. So
a sum is right exactly if it is the sum that one process would get which has the whole state and runs every micro-batch
once, and `result_of` computes that one. A member's raw sum of a layer is the sorted row of its micro-batches'
gradients, so a gradient that is there twice shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaos_lightning.lab.simulate.training import Program
from chaos_lightning.protocol.types import Header, Ledger, Span, ViewId

RawSum = tuple[int, ...]
"""Gradients of one layer, sorted."""
Parts = dict[int, int]
"""Values of the parts that a member holds, by part."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step, by micro-batch.

    Attributes:
        epoch: Theirs.
        positions: Spans of each micro-batch, some of them empty at the end of an epoch.
    """

    epoch: int
    positions: tuple[tuple[Span, ...], ...]

    @property
    def empty(self) -> frozenset[int]:
        """Numbers of micro-batches without samples."""
        return frozenset(j for j, spans in enumerate(self.positions) if not spans)

    def weight(self, micro_batch: int) -> float:
        return float(sum(stop - start for start, stop in self.positions[micro_batch]))


def batch_of(program: Program, ledger: Ledger) -> Batch:
    """Returns the samples of the step after a header with this ledger: they follow from it alone (P2)."""
    epoch = program.epoch(ledger)
    left = [p for start, stop in program.unspent(ledger, epoch) for p in range(start, stop)]
    size = program.micro_batch_size
    rows = [left[j * size : (j + 1) * size] for j in range(program.micro_batches)]
    return Batch(epoch, tuple(((row[0], row[-1] + 1),) if row else () for row in rows))


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a step: what tells its tensors from all others."""

    view: ViewId
    seq: int
    base: str
    """Hash of the header before."""


def entering(attempt: Attempt, batch: Batch, micro_batch: int) -> int:
    """Returns what enters layer 0."""
    return hash((attempt.view, attempt.base, batch.epoch, batch.positions[micro_batch]))


def forward(tensor: int, layer: int, value: int) -> int:
    """Returns what leaves a layer of this value."""
    return hash(("forward", tensor, layer, value))


def loss(tensor: int) -> int:
    """Returns the gradient of what leaves the last layer."""
    return hash(("loss", tensor))


def backward(gradient: int, tensor: int, layer: int, value: int) -> tuple[int, int]:
    """Returns the gradient of what entered a layer, and the layer's own."""
    return hash(("backward", gradient, tensor, layer, value)), hash(("gradient", gradient, tensor, layer, value))


def result_of(program: Program, attempt: Attempt, batch: Batch, parts: Mapping[int, int]) -> list[RawSum]:
    """Returns the sum of each layer over all micro-batches, as one process computes it that has all parts."""
    sums: list[list[int]] = [[] for _ in range(program.layers)]
    for j in range(program.micro_batches):
        if j in batch.empty:
            continue
        tensors = [entering(attempt, batch, j)]
        for layer in range(program.layers):
            tensors.append(forward(tensors[-1], layer, parts[layer]))
        gradient = loss(tensors[-1])
        for layer in reversed(range(program.layers)):
            gradient, own = backward(gradient, tensors[layer], layer, parts[layer])
            sums[layer].append(own)
    return [tuple(sorted(row)) for row in sums]


def stepped(parts: Mapping[int, int], results: Mapping[int, Sequence[int]], rest: int, header: Header) -> Parts:
    """Returns parts after a step: layers by their sums, the rest by the header.

    Args:
        parts: Before, as far as they are here.
        results: Sums of layers.
        rest: Number of the rest.
        header: The step's.
    """
    after = {part: hash((value, tuple(results[part]))) for part, value in parts.items() if part in results}
    if rest in parts:
        after[rest] = hash((parts[rest], header.seq))
    return after
