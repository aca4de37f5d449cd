"""Encodes the values that pipeline members send beside a step's gradients, and computes the step's outcome from those
of all (protocol.md P11).

Theory of operation. A member says the squared norm of each part whose oldest owner it is, the losses of micro-batches
whose last layers it ran, and for each of these bytes that its strategy gives (logged values). This is the payload of
its contribution, and the header hands it on. `agreed` reads it under the view in which the header was closed, in an
order that is equal everywhere, so all members conclude the same to the last bit.

NaN and infinity are values like others. A step whose gradients are not finite is a step: the optimizer takes it, at all
members alike, as it does in the strategy `chaos` and in a training of one process. `StepOutcome.finite` tells of it.

Sizes. With 256 layers and 64 micro-batches all members together say 4.6 kB, and 25 bytes for each member that says
anything. A header takes `MAX_GATHER_NBYTES` (60 MiB) from all members, so 64 micro-batches may have 0.9 MiB each of a
strategy's bytes: numbers and names, not predictions. Each step's header brings them to every member.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from chaos_lightning.collectives.norms import PartNorm, whole_norm
from chaos_lightning.errors import StateError, UnsupportedError, WireError
from chaos_lightning.membership.parts import division
from chaos_lightning.planning.batch import MOST_SAMPLES
from chaos_lightning.protocol.types import MAX_PARTS, Header, View

T = TypeVar("T")
_VERSION = 2
_HEAD = struct.Struct("<BQIIII")
"""Head of a payload: version, samples, the numbers of norms, losses and extras that follow, bytes handed over."""
_NORM, _LOSS, _EXTRA = struct.Struct("<IdB"), struct.Struct("<Idd"), struct.Struct("<II")


@dataclass(frozen=True)
class ToldStep:
    """Values that one member sends beside its gradients: norms, losses, bytes of the strategy, number of samples.

    Attributes:
        norms: Norm of the reduced gradient sum of each part whose oldest owner the member is, by the part's number.
        losses: Loss and weight of each micro-batch whose last layers the member ran; absent where the step gave no
            loss.
        extra: Bytes that the strategy gives, by micro-batch.
        samples: Number of samples in micro-batches whose first layers the member ran.
        handed: Bytes of the strategy about the member, not about a micro-batch.
    """

    norms: Mapping[int, PartNorm] = field(default_factory=dict)
    losses: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    extra: Mapping[int, bytes] = field(default_factory=dict)
    samples: int = 0
    handed: bytes = b""

    def encode(self) -> bytes:
        """Returns the values as bytes; no bytes if there are none."""
        if not (self.norms or self.losses or self.extra or self.samples or self.handed):
            return b""
        extra = sorted(self.extra.items())
        return b"".join(
            (
                _HEAD.pack(_VERSION, self.samples, len(self.norms), len(self.losses), len(extra), len(self.handed)),
                *(_NORM.pack(part, *norm) for part, norm in sorted(self.norms.items())),
                *(_LOSS.pack(j, *row) for j, row in sorted(self.losses.items())),
                *(_EXTRA.pack(j, len(data)) for j, data in extra),
                *(data for _, data in extra),
                self.handed,
            )
        )

    @staticmethod
    def decode(data: bytes) -> ToldStep:
        """Reads the bytes that `encode` wrote.

        Raises:
            WireError: The bytes are not of the form that `encode` writes; says what is wrong.
        """
        if not data:
            return ToldStep()
        if len(data) < _HEAD.size:
            raise WireError(f"{len(data)} bytes are said beside a step's gradients; expected {_HEAD.size} or more")
        version, samples, norms, losses, extras, handed = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise WireError(f"version {version} of what is said beside a step's gradients; expected {_VERSION}")
        ends = _HEAD.size, norms * _NORM.size, losses * _LOSS.size, extras * _EXTRA.size
        if sum(ends) > len(data):
            raise WireError(f"{norms} norms, {losses} losses and {extras} texts in {len(data)} bytes")
        a, b, c, d = (sum(ends[: i + 1]) for i in range(4))
        found_norms = [(part, PartNorm(squared, finite == 1)) for part, squared, finite in _NORM.iter_unpack(data[a:b])]
        found_losses = [(j, (loss, weight)) for j, loss, weight in _LOSS.iter_unpack(data[b:c])]
        found_extra, at = [], d
        for j, nbytes in _EXTRA.iter_unpack(data[c:d]):
            found_extra.append((j, data[at : at + nbytes]))
            at += nbytes
        if at + handed != len(data):
            raise WireError(f"{len(data)} bytes are said beside a step's gradients; expected {at + handed}")
        if any(flag > 1 for flag in data[a + _NORM.size - 1 : b : _NORM.size]):
            raise WireError("a norm's flag is neither 0 nor 1")
        if odd := [norm.squared for _, norm in found_norms if norm.squared < 0]:
            raise WireError(f"the square of a norm is {odd[0]}")
        if any(not 0 <= weight < math.inf for _, (_, weight) in found_losses):
            raise WireError("a weight of a loss is no finite number from 0 on")
        _check_numbers((part for part, _ in found_norms), MAX_PARTS, "parts")
        _check_numbers((j for j, _ in found_losses), MOST_SAMPLES, "micro-batches of losses")
        _check_numbers((j for j, _ in found_extra), MOST_SAMPLES, "micro-batches of texts")
        return ToldStep(dict(found_norms), dict(found_losses), dict(found_extra), samples, data[at:])


def _check_numbers(numbers: Iterable[int], most: int, what: str) -> None:
    given = [-1, *numbers, most]
    if any(a >= b for a, b in pairwise(given)):
        raise WireError(f"{what} {given[1:-1][:9]}; expected each once, in order, below {most}")


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a committed step (norm, loss, samples), equal at all members to the last bit.

    Attributes:
        squared_norm: Square of the norm of the averaged gradients of the whole model.
        finite: Whether all gradients are finite numbers.
        loss: Mean of the losses by their weights; NaN if there is none.
        losses: Loss and weight by micro-batch, in the order of micro-batches.
        extra: Bytes of the strategy, by micro-batch, in the order of micro-batches.
        samples: Number of samples that the step used.
    """

    squared_norm: float
    finite: bool
    loss: float
    losses: Mapping[int, tuple[float, float]]
    extra: Mapping[int, bytes]
    samples: int

    @property
    def norm(self) -> float:
        """Norm of the averaged gradients of the whole model."""
        return math.sqrt(self.squared_norm)


def agreed(header: Header, view: View) -> StepOutcome:
    """Returns the outcome of a committed step, computed from the values that all members have sent.

    Args:
        header: Header of the step.
        view: View in which the step was closed.

    Raises:
        StateError: The header was closed in another view.
        WireError: A member has said what is no `ToldStep`, or two say the same micro-batch; all members see it alike.
    """
    if header.view != view.id:
        raise StateError(f"slot {header.seq} was closed in view {header.view}, and {view.id} was given")
    parts, answers = division(view), header.answers or (b"",) * len(view.members)
    if len(answers) != len(view.members):
        raise WireError(f"slot {header.seq} has the words of {len(answers)} members; expected {len(view.members)}")
    said = {member: _decoded(member, data) for member, data in zip(view.ids(), answers, strict=True)}
    norms = [
        said[owners[0]].norms[part]
        for part, owners in enumerate(parts.owners)
        if owners and part in said[owners[0]].norms
    ]
    losses = _merged("the loss", {member: told.losses for member, told in said.items()})
    norm = whole_norm(norms, header.total_weight)
    return StepOutcome(
        norm.squared,
        norm.finite,
        _mean(losses.values()),
        losses,
        _merged("logged values", {member: told.extra for member, told in said.items()}),
        sum(told.samples for told in said.values()),
    )


def _decoded(member: str, data: bytes) -> ToldStep:
    try:
        return ToldStep.decode(data)
    except WireError as error:
        raise WireError(f"{member}: {error}") from error


def _merged(what: str, said: Mapping[str, Mapping[int, T]]) -> dict[int, T]:
    found: dict[int, T] = {}
    for member, rows in said.items():
        if twice := sorted(found.keys() & rows.keys()):
            raise WireError(f"{member} says {what} of micro-batch {twice[0]}, and so does another member")
        found |= rows
    return dict(sorted(found.items()))


def _mean(losses: Iterable[tuple[float, float]]) -> float:
    total = weight = 0.0
    for loss, its in losses:
        if its:
            total, weight = total + loss * its, weight + its
    return total / weight if weight else math.nan


# ------------------------------------------------------------------------------------------------ clipping


def clip_coefficient(outcome: StepOutcome, max_norm: float, norm_type: float = 2.0) -> float:
    """Returns the factor, at most 1.0, by which `torch.nn.utils.clip_grad_norm_` would multiply gradients.

    Of a norm that is NaN it is NaN, and of an infinite one 0.0, as there.

    Args:
        outcome: Outcome of the step.
        max_norm: Bound of the norm.
        norm_type: Type of the norm; only 2.0 is supported.

    Raises:
        UnsupportedError: Another type of norm is asked for, which no member knows of parts that it does not own.
    """
    if norm_type != 2.0:
        raise UnsupportedError(
            f"norm_type={norm_type} of gradient clipping is not supported in a pipeline: members tell each other the "
            "L2 norms of their parts of the model. Use norm_type=2.0, or clip by value"
        )
    coefficient = max_norm / (outcome.norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], coefficient: float) -> None:
    """Multiplies the gradients of those parameters that have one at this member."""
    if coefficient == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(coefficient)
