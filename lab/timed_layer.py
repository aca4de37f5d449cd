"""Layer whose passes take a given time: real tensors, little arithmetic, and sleep until a deadline.

It needs torch alone, so that other programs may train the same layers as ours; see `timed_layers.py`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Deadline:
    """Time at which a forward or backward pass may end (monotonic clock, s)."""

    at_s = 0.0

    def sleep(self) -> None:
        time.sleep(max(0.0, self.at_s - time.monotonic()))


class _Leaving(torch.autograd.Function):
    """Last operation of a layer; in the backward pass it runs first and sets the deadline."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, deadline: _Deadline, backward_s: float) -> Tensor:
        ctx.deadline, ctx.backward_s = deadline, backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.deadline.at_s = time.monotonic() + ctx.backward_s
        return gradients[0], None, None


class _Entering(torch.autograd.Function):
    """First operation of a layer; in the backward pass it runs last and sleeps until the deadline.

    The layer's `anchor` has it run where no gradient of the input is wanted. It gets the gradient of an offset of the
    input: with none its optimizer state would stay zero, and pulls leave out bytes that the receiver has already.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, deadline: _Deadline) -> Tensor:
        ctx.deadline = deadline
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.deadline.sleep()
        return gradients[0], gradients[0].sum().reshape(1), None


class TimedLayer(nn.Module):
    """Residual layer whose forward and backward passes take a given time.

    Args:
        width: Features.
        forward_s: Seconds of a forward pass.
        backward_s: Seconds of a backward pass.
    """

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.linear = nn.Linear(width, width)
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        ends, back = _Deadline(), _Deadline()
        ends.at_s = time.monotonic() + self.forward_s
        x = _Entering.apply(x, self.anchor, back)  # type: ignore[no-untyped-call]
        x = _Leaving.apply(x + 0.1 * self.linear(x), back, self.backward_s)  # type: ignore[no-untyped-call]
        ends.sleep()
        return x
