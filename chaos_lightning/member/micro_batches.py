"""Accumulates micro-batches of a plain loop into one step, with their weights, and detects mistakes of such loops.

Theory of operation. A batch weighs what its samples are of the members' common unit, an idle one nothing. With its last
micro-batch an accumulation is *closed*: all weights are known then, before that one's forward pass, so its backward
pass may send gradients as they come. A loop that zeroes gradients in between would lose the earlier ones without a
word, and one that never does would add averages to them. Both are seen at the next backward pass, as a rule without
waiting for the device: a gradient that is the same object, unwritten, was not zeroed. Buffers that a forward pass on a
stand-in batch has changed are put back, since the accumulation's other batches count with them.

A batch whose loop calls `update` without a backward pass is *skipped*: it weighs nothing, so `.grad`, which may still
hold the last step's average, is not sent for it. Hooks on the parameters tell whether a pass has come, be it ours or
the user's own; a gradient that the user has computed without one and assigned counts as a pass.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.member.weighing import Sums, Weighing, refuse_kept

_log = logging.getLogger("chaos_lightning")
_ZERO = "Call optimizer.zero_grad() once per step: `if trainer.update(): optimizer.zero_grad()`"

Held = tuple[Tensor, Tensor | None, int]
"""Parameter, its gradient, and the gradient's version at that time."""


class MicroBatches:
    """Sequence of accumulations of micro-batches, for one training loop.

    Args:
        named: The trained parameters.
        parts: Micro-batches per step.
        scaler: Scales losses, so that small gradients do not vanish in half precision.
        buffers: Buffers that forward passes change, by name.
        sums: Weights of a step with any number of micro-batches, whose gradients are added up; None: it has `parts`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]] = (),
        parts: int = 1,
        scaler: GradScaler | None = None,
        buffers: Sequence[tuple[str, Tensor]] = (),
        sums: Sums | None = None,
    ) -> None:
        self._named = tuple(named)
        self._buffers = tuple(buffer for _, buffer in buffers)
        self._before: list[Tensor] = []
        self._parts = parts
        self._several = parts > 1 or sums is not None
        self._scaler = scaler
        self._weighing = sums if sums is not None else Weighing(parts)  # one without weights is false
        self.weight = 0.0
        """Weight of the present micro-batch."""
        self._factor = 1.0
        self._passed = False
        """Whether the present micro-batch had its backward pass."""
        self._any_passed = False
        self._kept: list[Held] = []
        """Gradients after the pass before."""
        self._left: list[Held] = self._held()
        """Gradients as the last step has left them."""
        self._reached: dict[int, int] = {}
        """Number of gradients that backward passes of the present micro-batch have completed, by parameter."""
        self._warned = False
        self._hooks = [param.register_post_accumulate_grad_hook(self._reach) for _, param in self._named]  # type: ignore[no-untyped-call]
        if scaler is not None and self._named:
            scaler.scale(torch.zeros((), device=self._named[0][1].device))  # one that never scaled cannot unscale

    @property
    def total(self) -> float:
        """Sum of the weights of this accumulation's micro-batches so far."""
        return self._weighing.total

    def begin(self, weight: float, *, last: bool) -> None:
        """Begins the next micro-batch; `last` means that it is the accumulation's last one."""
        self._weighing.add(weight)
        self.weight, self._passed = weight, False
        self._reached.clear()
        self._before = [] if weight or not self._several else [buffer.clone() for buffer in self._buffers]
        self._factor = self._weighing.factor() / self._parts
        if last:
            self._factor = self._weighing.close(param for _, param in self._named) / self._parts
            self._note()  # these gradients may have been written to

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Runs the backward pass of the present micro-batch's mean loss; does nothing if the micro-batch weighs
        nothing.
        """
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

    def end(self, *, last: bool) -> bool:
        """Ends the present micro-batch; raises an error for mistakes such as lost gradients.

        Returns:
            Whether the micro-batch was skipped: it had samples and no backward pass, and weighs nothing.

        Raises:
            ConfigurationError: The micro-batch had a backward pass that is not ours where ours is needed, or the
                gradients of those before are gone, or it cannot be told whether gradients are this micro-batch's.
            UnsupportedError: The user's own backward pass has added to the last step's average.
        """
        skipped = bool(self.weight) and not self._passed and not self._passed_otherwise()
        if skipped:
            self._warn_once()
            self.weight = 0.0
        if last and not self.weight and self._any_passed:
            self._refuse_lost()
        if skipped:
            self._weighing.skip([param for _, param in self._named], closed=last)
        with torch.no_grad():
            for buffer, before in zip(self._buffers, self._before, strict=False):
                buffer.copy_(before)
        return skipped

    def stepped(self) -> None:
        """Notes that the optimizer has stepped, so that the present gradients count as left over from that step."""
        self._left = self._held()

    def forget(self) -> None:
        """Forgets the accumulation, after the optimizer's step or when it came to nothing."""
        self._weighing.forget()
        self._any_passed, self._kept = False, []

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _reach(self, param: Tensor) -> None:
        self._reached[id(param)] = self._reached.get(id(param), 0) + 1

    def _held(self) -> list[Held]:
        graded = [(param, param.grad) for _, param in self._named]
        return [(param, grad, grad._version if grad is not None else 0) for param, grad in graded]

    def _note(self) -> None:
        if self._several:
            self._kept = [held for held in self._held() if held[1] is not None]

    def _passed_otherwise(self) -> bool:
        """Returns whether the present micro-batch got gradients without `trainer.backward`; raises an error where that
        is not supported.
        """
        before = self._kept or self._left
        assigned = any(param.grad is not None and param.grad is not grad for param, grad, _ in before)
        if self._several or self._scaler is not None:
            if self._reached or assigned:
                raise ConfigurationError(
                    "update() without trainer.backward(loss): with accumulate=, scaler= or batch=fixed it takes the "
                    "place of loss.backward(), since each batch counts by its samples. Give it the mean loss, neither "
                    "divided nor scaled"
                )
            return False
        if self._reached:
            self._refuse_added()
        elif not assigned:
            self._refuse_unclear()
        return bool(self._reached) or assigned

    def _refuse_added(self) -> None:
        """Raises UnsupportedError if the user's backward pass has added to a gradient of the last step, which was not
        zeroed.
        """
        for (name, _), (param, grad, version) in zip(self._named, self._left, strict=True):
            passes = self._reached.get(id(param), 0)
            if passes and grad is not None and param.grad is grad and grad._version == version + passes:
                raise UnsupportedError(
                    f"this batch's backward pass has added to the last step's gradient of {name!r}, which "
                    f"optimizer.zero_grad() has not zeroed; newcomers would not have that part. {_ZERO}"
                )

    def _refuse_unclear(self) -> None:
        """Raises ConfigurationError if a gradient was changed in place without a backward pass: it may belong to this
        batch or to the last step.
        """
        for (name, _), (param, grad, version) in zip(self._named, self._left, strict=True):
            if grad is not None and param.grad is grad and grad._version != version and grad.any():
                raise ConfigurationError(
                    f"update() without a backward pass: the gradient of {name!r} was written to in place, "
                    "so it may be this batch's or what is left of the last step's. To leave the batch out, call "
                    "optimizer.zero_grad() before update(); to bring a gradient of your own, assign it: "
                    "`param.grad = ...`"
                )

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "update() without a backward pass: this batch weighs nothing in its step, and its samples count as "
                "used. If this was on purpose, ignore this warning; it comes once"
            )

    def _refuse_lost(self) -> None:
        same = (grad is not None and p.grad is grad and grad._version == version for p, grad, version in self._kept)
        if not self._kept or any(same):
            return
        left = [param.grad for param, _, _ in self._kept if param.grad is not None]
        if not left or not torch.stack([grad.any() for grad in left]).any():
            raise ConfigurationError(
                f"the gradients of this step's earlier batches are gone: something zeroed them. {_ZERO}"
            )
