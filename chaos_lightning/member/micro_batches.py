"""What a plain loop accumulates into one step: the weight of each batch, its backward pass, and what loops get wrong.

Theory of operation. A batch weighs what its samples are of the members' common unit, an idle one nothing. With its last
micro-batch an accumulation is *closed*: all weights are known then, before that one's forward pass, so its backward
pass may send gradients as they come. A loop that zeroes gradients in between would lose the earlier ones without a
word, and one that never does would add averages to them. Both are seen at the next backward pass, as a rule without
waiting for the device: a gradient that is the same object, unwritten, was not zeroed. Buffers that a forward pass on a
stand-in batch has changed are put back, since the accumulation's other batches count with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.member.weighing import Weighing, refuse_kept

_ZERO = "Call optimizer.zero_grad() once per step: `if trainer.update(): optimizer.zero_grad()`"


class MicroBatches:
    """One accumulation after the other.

    Args:
        named: The trained parameters.
        parts: Micro-batches per step.
        scaler: Scales losses, so that small gradients do not vanish in half precision.
        buffers: That forward passes change.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]] = (),
        parts: int = 1,
        scaler: GradScaler | None = None,
        buffers: Sequence[tuple[str, Tensor]] = (),
    ) -> None:
        self._named = tuple(named)
        self._buffers = tuple(buffer for _, buffer in buffers)
        self._before: list[Tensor] = []
        self._parts = parts
        self._scaler = scaler
        self._weighing = Weighing(parts)
        self.weight = 0.0
        """Of the present micro-batch."""
        self._factor = 1.0
        self._passed = False
        """The present micro-batch had its backward pass."""
        self._any_passed = False
        self._kept: list[tuple[Tensor, Tensor, int]] = []
        """Parameter, gradient and its version after the pass before."""
        if scaler is not None and self._named:
            scaler.scale(torch.zeros((), device=self._named[0][1].device))  # one that never scaled cannot unscale

    @property
    def total(self) -> float:
        """What the accumulation weighs so far."""
        return self._weighing.total

    def begin(self, weight: float, *, last: bool) -> None:
        """The next micro-batch; `last`: it closes the accumulation."""
        self._weighing.add(weight)
        self.weight, self._passed = weight, False
        self._before = [] if weight or self._parts == 1 else [buffer.clone() for buffer in self._buffers]
        self._factor = self._weighing.factor() / self._parts
        if last:
            self._factor = self._weighing.close(param for _, param in self._named) / self._parts
            self._note()  # these gradients may have been written to

    def backward(self, loss: Tensor, **options: Any) -> None:
        """The backward pass of the present micro-batch's mean loss; none if it weighs nothing."""
        self._passed = True
        if not self.weight:
            return
        if self._any_passed:
            self._refuse_lost()
        else:
            refuse_kept(self._named, _ZERO)
        self._any_passed = True
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        (loss if self._factor == 1.0 else loss * self._factor).backward(**options)  # type: ignore[no-untyped-call]
        self._note()

    def end(self, *, last: bool) -> None:
        """The present micro-batch is over; what it lacks is refused.

        Raises:
            ConfigurationError: It had no backward pass, or not ours, or the gradients of those before are gone.
        """
        if self.weight and not self._passed and (self._parts > 1 or self._scaler is not None):
            raise ConfigurationError(
                "update() without trainer.backward(loss): with accumulate= or scaler= it takes the place of "
                "loss.backward(), since each batch counts by its samples. Give it the mean loss, neither divided nor "
                "scaled"
            )
        if last and not self.weight and self._any_passed:
            self._refuse_lost()
        with torch.no_grad():
            for buffer, before in zip(self._buffers, self._before, strict=False):
                buffer.copy_(before)

    def forget(self) -> None:
        """The accumulation was stepped with, or comes to nothing."""
        self._weighing.forget()
        self._any_passed, self._kept = False, []

    def _note(self) -> None:
        if self._parts > 1:
            graded = [(param, param.grad) for _, param in self._named if param.grad is not None]
            self._kept = [(param, grad, grad._version) for param, grad in graded]

    def _refuse_lost(self) -> None:
        if not self._kept or any(p.grad is grad and grad._version == version for p, grad, version in self._kept):
            return
        left = [param.grad for param, _, _ in self._kept if param.grad is not None]
        if not left or not torch.stack([grad.any() for grad in left]).any():
            raise ConfigurationError(
                f"the gradients of this step's earlier batches are gone: something zeroed them. {_ZERO}"
            )
