"""Runs one member's share of a step whose batch has a fixed size, with the whole model (docs/protocol.md B1 to B4).

Theory of operation. It is a step of units like that of a pipeline (member/unit_steps.py), but for its gradients: each
member has the whole model, so what it adds up over its pieces is reduced as ever, and the last piece's backward pass
sends gradients as they come. An attempt computes the member's share in the view that rules. A recovery ends it, and the
next one computes another share of the same samples, from the state that the last header has committed: buffers and
attributes of modules are put back, and sums dropped. Losses are multiplied by their weights, so that sums need no
factor, and the header's weight divides them.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from chaos_lightning.collectives.accumulation import Accumulation
from chaos_lightning.data.pieces import Share, SharePiece, present
from chaos_lightning.data.steps import StepBatch
from chaos_lightning.errors import AttemptOverError, ConfigurationError
from chaos_lightning.member.training import least_batch
from chaos_lightning.member.unit_steps import StepTime, UnitsDone
from chaos_lightning.pipeline.base import BaseBuffers
from chaos_lightning.pipeline.told import StepOutcome, ToldStep, agreed
from chaos_lightning.pipeline.undo import Undo
from chaos_lightning.planning.batch import read_split
from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import NO_VIEW, Header, LayersCovered, View, ViewId

PART = ""
"""Name of the one part of a layout in which all members own everything."""
_TIMES = 16
"""Number of the latest steps whose times count."""
_LEAST = 3
"""Fewest measured steps before a time is told. The first step after a start is slow; told alone, it could cost the
member its share, and without a share it measures nothing.
"""


class ShareStep:
    """Runner of one member's share of each step (`UnitStep` in member/unit_steps.py).

    Args:
        module: The model; its attributes and buffers are put back when an attempt is dropped.
        accumulation: Accumulation over a layout of the whole model.
        forget: Is called when attempts begin anew; drops what they have logged.

    Attributes:
        least: Fewest samples that the model can train on.
    """

    borders = None
    speed = 0.0

    def __init__(self, module: nn.Module, accumulation: Accumulation, forget: Callable[[], None]) -> None:
        self._module, self._accumulation, self._forget = module, accumulation, forget
        self._undo, self._buffers = Undo(module), BaseBuffers(module)
        self.least = least_batch(module)
        self._changed = threading.Lock()
        self._over = NO_VIEW
        """View whose attempts, and those of older views, are over."""
        self._times: deque[float] = deque(maxlen=_TIMES)

    # ------------------------------------------------------------------ as a `UnitStep`

    @property
    def sample_s(self) -> float:
        """Median seconds for a sample in the latest steps, without waiting for other members; 0: not known yet."""
        times = tuple(self._times)
        return statistics.median(times) if len(times) >= _LEAST else 0.0

    def step_time(self, view: ViewId) -> StepTime:
        return StepTime()

    def reduced(self, view: ViewId, seq: int) -> None:
        """Does nothing: a contribution does not wait for the reduction."""

    def end(self, view: ViewId) -> None:
        """Ends the attempts of this view and of older ones, because a recovery has begun or this member was removed."""
        with self._changed:
            self._over = max(self._over, view)

    def restart(self) -> None:
        """Forgets all attempts before this member joins again, since views of another chain may have lower numbers."""
        with self._changed:
            self._over = NO_VIEW
        self._times.clear()

    def remember_base(self) -> None:
        """Saves what an attempt may change in the model, as of the last header."""
        self._undo.remember()
        self._buffers.remember()
        self._accumulation.settle()
        self._forget()

    def drop(self) -> None:
        """Drops an attempt: restores what it has changed, and removes gradients."""
        for parameter in self._module.parameters():
            parameter.grad = None
        self._buffers.restore()
        self._undo.restore()
        self._forget()

    def commit(self, header: Header) -> None:
        """Writes the averages of a committed step into `.grad` and into the buffers that are averaged."""
        self._accumulation.apply(header, {PART: header.total_weight})

    # ------------------------------------------------------------------ for an attempt

    def open(self, view: ViewId, seq: int, section: int) -> None:
        """Begins an attempt, from the state of the last committed header."""
        for parameter in self._module.parameters():
            parameter.grad = None  # of the last step, or of an attempt: they lie in memory that is used again
        self._accumulation.open(view, seq, section=section)

    def check(self, view: ViewId) -> None:
        """Raises AttemptOverError if the attempt in this view has ended."""
        with self._changed:
            if view <= self._over:
                raise AttemptOverError(f"the attempt in view {view} is over")

    def close(self) -> None:
        """Announces that the next backward pass is the last one, which sends gradients as they come."""
        self._accumulation.closing((PART,))

    def flush(self, weight: float, *, scaled: float = 1.0) -> bytes:
        """Takes all gradients of the attempt; returns one bit for each parameter, set if it has one.

        Args:
            weight: Weight of the averaged buffers.
            scaled: Factor that gradients lack.
        """
        if scaled != 1.0:
            with torch.no_grad():
                for parameter in self._module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(scaled)
        return self._accumulation.flush({PART: weight})

    def took(self, seconds: float, samples: int) -> None:
        """Notes how long this member has computed for its samples of a step."""
        if samples:
            self._times.append(seconds / samples)


@dataclass(frozen=True, slots=True)
class UserStep:
    """The user's part of a piece, as the strategy calls it.

    Attributes:
        loss: Runs the forward pass on a piece's samples; returns their mean loss, None if there is none.
        backward: Runs the backward pass of a loss.
        weight: Returns the weight of a piece in the step, given its samples as they were fetched and their number.
        extra: Returns what the strategy gives for a piece, as bytes.
        handed: Returns what the strategy gives for the member, as bytes.
    """

    loss: Callable[[SharePiece, Any], Tensor | None]
    backward: Callable[[Tensor], None]
    weight: Callable[[Any, int], float]
    extra: Callable[[int], bytes]
    handed: Callable[[], bytes] = bytes


@dataclass(eq=False)
class ShareAttempt:
    """Attempts of one member at one step; an attempt ends with a recovery, and the next one follows.

    It is called to run all pieces of an attempt. A loop that runs them by itself does so between `begin` and `done`.

    Attributes:
        step: Runs the step at this member.
        user: The user's part.
        member: This member's id.
        batch: Samples of the step.
        fits: Samples that this member computes at once.
        section: Number of the optimizer that steps.
        scales: Whether losses are scaled, so that weights must not make them larger.
        view: The view of the last attempt; None before the first.
    """

    step: ShareStep
    user: UserStep
    member: str
    batch: StepBatch
    fits: int
    section: int = 0
    scales: bool = False
    view: View | None = field(default=None, init=False)
    _share: Share | None = field(default=None, init=False)
    _began: float = field(default=0.0, init=False)
    _losses: dict[int, Tensor] = field(default_factory=dict, init=False)
    _weights: dict[int, float] = field(default_factory=dict, init=False)
    _extra: dict[int, bytes] = field(default_factory=dict, init=False)

    def __call__(self, view: View, seq: int) -> UnitsDone:
        """Computes this member's share of the step in a view; returns what goes into its contribution.

        Raises:
            AttemptOverError: The attempt ended meanwhile.
            ConfigurationError: The view has no batch of fixed size.
            Exception: Whatever the user's step raised.
        """
        pieces = self.begin(view, seq)
        for k, piece in enumerate(pieces):
            self.step.check(view.id)
            self._run(piece, last=k == len(pieces) - 1)
        return self.done()

    def begin(self, view: View, seq: int) -> list[SharePiece]:
        """Begins an attempt in a view; returns the pieces of this member's share.

        Raises:
            ConfigurationError: The view has no batch of fixed size.
        """
        split = read_split(view.batch, len(view.members))
        if split is None:
            raise ConfigurationError(f"view {view.id} divides no batch of fixed size; its steps run by Engine.step()")
        self.view, self._share = view, Share(split, view.ids().index(self.member), self.fits, self.step.least)
        self._began = time.perf_counter()
        self._losses, self._weights, self._extra = {}, {}, {}
        self.step.open(view.id, seq, self.section)
        self.batch.expect_share(self._share)
        return self._share.pieces(self.batch.positions)

    def fetch(self, piece: SharePiece) -> Any:
        """Returns the samples of a piece of this member's share."""
        assert self._share is not None, "no attempt was begun"
        return self.batch.piece(piece, self._share)

    def counts(self, piece: SharePiece, weight: float, loss: Tensor | None = None) -> None:
        """Notes the weight of a piece that has a gradient, and its mean loss, if all members are to know it."""
        self._weights[piece.number] = weight
        if loss is not None:
            self._losses[piece.number] = loss.detach()

    def done(self) -> UnitsDone:
        """Ends the attempt, after its last backward pass; returns what goes into this member's contribution.

        Raises:
            AttemptOverError: The attempt ended meanwhile.
        """
        share, view = self._share, self.view
        assert share is not None
        assert view is not None
        self.step.check(view.id)
        pieces = share.pieces(self.batch.positions)
        samples = sum(count(piece.spans) for piece in pieces)
        total = float(sum(self._weights.values()))
        presence = self.step.flush(total, scaled=self.batch.samples if self.scales else 1.0)
        told = self._told(samples)
        self.step.took(time.perf_counter() - self._began, samples)
        first, stop = share.units(self.batch.positions)
        return UnitsDone(
            weight=total,
            presence=presence,
            micro_batches=((0, present(share.split, self.batch.positions)),),
            coverage=(LayersCovered(0, 1, ((first, stop),)),) if first < stop else (),
            spent=self.batch.spent_by(share),
            payload=told.encode(),
        )

    def _run(self, piece: SharePiece, *, last: bool) -> None:
        data, samples = self.fetch(piece), count(piece.spans)
        weight = self.user.weight(data, samples)
        if last and not self.scales:
            self.step.close()
        try:
            loss = self.user.loss(piece, data)
            self._extra[piece.number] = self.user.extra(piece.number)
            if loss is None:
                return
            self.counts(piece, weight, loss)
            factor = weight / self.batch.samples if self.scales else weight
            if factor:
                self.user.backward(loss * factor)
        except torch.OutOfMemoryError as error:
            if self._share is not None and not self._share.split.rule.micro_batch and samples > 1:
                error.add_note(f"{self.member} computed {samples} samples at once; fits={samples // 2} halves that")
            raise

    def _told(self, samples: int) -> ToldStep:
        losses = self._losses
        values = torch.stack([loss.double() for loss in losses.values()]).tolist() if losses else []
        pairs = {j: (value, self._weights[j]) for j, value in zip(losses, values, strict=True)}
        return ToldStep(losses=pairs, extra=self._extra, samples=samples, handed=self.user.handed())

    def outcome(self, header: Header) -> StepOutcome:
        """Returns the outcome of the committed step, which all members compute alike from its header."""
        assert self.view is not None, "no attempt was made at the step"
        return agreed(header, self.view)
