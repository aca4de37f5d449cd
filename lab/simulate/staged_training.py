"""Computes training in pipelines symbolically: the results of units, and the value of each part of the state after a
step.

Theory of operation. The training state has parts (membership/parts.py): layers and the rest, each a number. A tensor
between stages and a gradient are numbers, too: hashes of everything that went into them, of the attempt above all. So
a sum is right exactly if it is the sum that one process would get which has the whole state and runs every micro-batch
once, and `result_of` computes that one. A member's raw sum of a layer is the sorted row of its micro-batches'
gradients, so a gradient that is there twice shows. The norm of a sum is a number of its hash, and now and then NaN.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaos_lightning.protocol.types import Header, Kind, Ledger, Span
from lab.simulate.training import Attempt, Program

RawSum = tuple[int, ...]
"""Gradients of one layer, sorted."""
Parts = dict[int, int]
"""Values of the parts that a member holds, by part."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one step, grouped by micro-batch.

    Attributes:
        epoch: Epoch of the samples.
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
    """Returns the samples of the next step, given the record of used samples in the last header (P2)."""
    epoch = program.epoch(ledger)
    left = [p for start, stop in program.unspent(ledger, epoch) for p in range(start, stop)]
    size = program.micro_batch_size
    rows = [left[j * size : (j + 1) * size] for j in range(program.micro_batches)]
    return Batch(epoch, tuple(((row[0], row[-1] + 1),) if row else () for row in rows))


def work_of(program: Program, before: Header, kind: Kind) -> Batch:
    """Returns the samples of the slot after this header, which is a step or a round of evaluation (P17)."""
    if kind is Kind.STEP:
        return batch_of(program, before.ledger)
    count = 1 + before.seq % program.micro_batches
    return Batch(0, tuple(((j, j + 1),) if j < count else () for j in range(program.micro_batches)))


def entering(attempt: Attempt, batch: Batch, micro_batch: int) -> int:
    """Returns the symbolic input tensor of layer 0 for a micro-batch."""
    return hash((attempt.view, attempt.base, batch.epoch, batch.positions[micro_batch]))


def weight(program: Program, parts: Mapping[int, int], layer: int) -> int:
    """Returns the value of a layer's weights: its own part, combined with the shared one if the layer uses that."""
    return hash((parts[layer], parts[program.layers])) if layer in program.users else parts[layer]


def forward(tensor: int, layer: int, value: int) -> int:
    """Returns the symbolic output tensor of a layer whose weights have this value."""
    return hash(("forward", tensor, layer, value))


def loss(tensor: int) -> int:
    """Returns the symbolic gradient of the last layer's output tensor."""
    return hash(("loss", tensor))


def backward(gradient: int, tensor: int, layer: int, value: int) -> tuple[int, int]:
    """Returns the symbolic gradients of a layer's input tensor and of its weights."""
    return hash(("backward", gradient, tensor, layer, value)), hash(("gradient", gradient, tensor, layer, value))


def tensors_of(program: Program, attempt: Attempt, batch: Batch, parts: Mapping[int, int], j: int) -> list[int]:
    """Returns the input tensors of all layers for one micro-batch, and the last layer's output."""
    tensors = [entering(attempt, batch, j)]
    for layer in range(program.layers):
        tensors.append(forward(tensors[-1], layer, weight(program, parts, layer)))
    return tensors


def result_of(program: Program, attempt: Attempt, batch: Batch, parts: Mapping[int, int]) -> list[RawSum]:
    """Returns each part's gradient sum over all micro-batches, as a single process with all parts would compute it."""
    sums: list[list[int]] = [[] for _ in range(program.rest)]
    for j in range(program.micro_batches):
        if j in batch.empty:
            continue
        tensors = tensors_of(program, attempt, batch, parts, j)
        gradient = loss(tensors[-1])
        for layer in reversed(range(program.layers)):
            gradient, own = backward(gradient, tensors[layer], layer, weight(program, parts, layer))
            sums[layer].append(own)
            if layer in program.users:
                sums[program.layers].append(shared(own))
    return [tuple(sorted(row)) for row in sums]


def shared(own: int) -> int:
    """Returns the shared parameter's gradient, given the weights' gradient of a layer that uses it."""
    return hash(("shared", own))


# ------------------------------------------------------------------ the norm (P11)


def norms(sums: Mapping[int, RawSum]) -> bytes:
    """Returns the payload in which the oldest owners of these parts report the norms of their reduced sums."""
    values = {part: hash(row) % 1009 for part, row in sums.items()}
    return json.dumps({part: value if value % 17 else float("nan") for part, value in values.items()}).encode()


def clipping(said: Sequence[bytes]) -> str:
    """Returns the norms of all parts, in order, by which every part's step is clipped."""
    found = {int(part): value for text in said if text for part, value in json.loads(text).items()}
    return str(sorted(found.items()))


def stepped(parts: Mapping[int, int], results: Mapping[int, RawSum], rest: int, header: Header, clipped: str) -> Parts:
    """Returns the parts after a step: layers and shared parameters change by their sums, the part that all own by the
    header.

    Args:
        parts: Before, as far as they are here.
        results: Sums of parts.
        rest: Number of the rest.
        header: The step's.
        clipped: See `clipping`.
    """
    after = {part: hash((value, results[part], clipped)) for part, value in parts.items() if part in results}
    if rest in parts:
        after[rest] = hash((parts[rest], header.seq))
    return after
