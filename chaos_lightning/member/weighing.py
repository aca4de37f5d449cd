"""Computes the factors of the micro-batches in an accumulation while not all their weights are known (protocol.md 6).

Theory of operation. The average of a step is the sum of n_m times the gradient of micro-batch m's mean loss, over the
sum of n_m, and the members' coefficients are these sums. While an accumulation runs, the sum is not known yet. So each
loss is scaled by n_m relative to the first one that counts, and before the last backward pass, when all n_m are known,
the earlier gradients get the rest of the factor. For full accumulations these factors are 1 and nothing is touched.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from chaos_lightning.errors import UnsupportedError


class Weighing:
    """Weights of the micro-batches in an accumulation, for one accumulation after another.

    Args:
        parts: Micro-batches per step: each loss counts as divided by it.
    """

    def __init__(self, parts: int = 1) -> None:
        self._parts = parts
        self._weights: list[float] = []
        self._unit = 0.0

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def total(self) -> float:
        return sum(self._weights)

    def add(self, weight: float) -> None:
        """Adds the weight of the next micro-batch, in samples."""
        self._weights.append(weight)
        self._unit = self._unit or weight

    def factor(self) -> float:
        """Returns the factor for the latest micro-batch's loss, if it is not the accumulation's last one."""
        return self._weights[-1] / self._unit if self._unit else 1.0

    def close(self, params: Iterable[Tensor]) -> float:
        """Rescales the gradients of earlier micro-batches, now that all weights are known; to be called before the last
        backward pass.

        Args:
            params: Parameters whose gradients are rescaled.

        Returns:
            The factor of the last micro-batch's loss.
        """
        total = self.total
        late = self._parts * self._unit / total if total else 1.0
        if late != 1.0 and len(self._weights) > 1:
            with torch.no_grad():
                for param in params:
                    if param.grad is not None:
                        param.grad.mul_(late)
        return self._parts * self._weights[-1] / total if total else 1.0

    def skip(self, params: Iterable[Tensor], *, closed: bool) -> None:
        """Sets the weight of the latest micro-batch to 0, because it has no gradient.

        Args:
            params: Parameters with the gradients of earlier micro-batches.
            closed: Whether `close` was called with its weight, by which earlier gradients were divided.
        """
        before, self._weights[-1] = self.total, 0.0
        if closed and self.total:
            with torch.no_grad():
                for param in params:
                    if param.grad is not None:
                        param.grad.mul_(before / self.total)

    def forget(self) -> None:
        """Clears the weights; the next micro-batch begins a new accumulation."""
        self._weights, self._unit = [], 0.0


class Sums(Weighing):
    """Weights of the pieces of a batch of fixed size: gradients are sums, so a loss counts by its samples alone.

    Attributes:
        divisor: Number by which all losses are divided; other than 1, it keeps scaled ones from overflowing.
    """

    divisor = 1.0

    def factor(self) -> float:
        return self._weights[-1] / self.divisor

    def close(self, params: Iterable[Tensor]) -> float:
        """Returns `factor`: no sum is rescaled."""
        return self.factor()

    def skip(self, params: Iterable[Tensor], *, closed: bool) -> None:
        """Sets the weight of the latest piece to 0, because it has no gradient."""
        self._weights[-1] = 0.0


def refuse_kept(named: Iterable[tuple[str, Tensor]], what_to_do: str) -> None:
    """Raises UnsupportedError if gradients of the last step were neither removed nor zeroed before an accumulation's
    first pass. A newcomer would lack them.

    Args:
        named: The trained parameters.
        what_to_do: Ends the message.

    Raises:
        UnsupportedError: A parameter still has a gradient other than zero.
    """
    left = [(name, param.grad) for name, param in named if param.grad is not None]
    if left and torch.stack([grad.any() for _, grad in left]).any():  # waits for the device once
        name = next(name for name, grad in left if grad.any())
        raise UnsupportedError(
            f"parameter {name!r} still has a gradient when the next step's first backward pass begins; gradients "
            f"that are kept over steps are not supported, since newcomers would not have them. {what_to_do}"
        )
