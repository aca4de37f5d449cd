"""Predicts, before the first step, the bytes of an optimizer's state and the seconds of its step.

Theory of operation. An optimizer makes its state in its first step. So a copy of it, with the same settings and one
small parameter, steps once for each type and number of dimensions that parameters have. The dimensions of the small
parameter are different primes, so the shapes of its state tell how state grows with a parameter: momentum has its
shape, a factor of Adafactor's has one of its dimensions, a count of steps has none. Hooks do not see these steps.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from chaos_lightning.pipeline.layer_times import LayerClock

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)
_TIMED = (512, 512)
_TIMES = 3
_USUAL_COPIES = 2
"""Copies of a parameter in the state of an optimizer that cannot be tried; Adam has as many."""
_Shape = tuple[tuple[int, ...], int]
"""Shape of a state tensor, and bytes of one element."""


class OptimizerCosts:
    """Predicted bytes of state and seconds per step of optimizers, found by trying them on small parameters.

    Args:
        optimizers: The user's optimizers; their state is neither needed nor changed.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._group_of: dict[Tensor, tuple[Optimizer, int]] = {
            parameter: (optimizer, number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._shapes: dict[tuple[int, int, torch.dtype, int], list[_Shape] | None] = {}
        self._rates: dict[int, float] = {}

    def nbytes(self, parameter: Tensor) -> int:
        """Returns the bytes of optimizer state that a parameter will have."""
        if parameter not in self._group_of:
            return 0
        optimizer, number = self._group_of[parameter]
        key = (id(optimizer), number, parameter.dtype, parameter.dim())
        if key not in self._shapes:
            self._shapes[key] = _tried(optimizer, number, parameter)
        shapes = self._shapes[key]
        if shapes is None:
            return _USUAL_COPIES * parameter.nbytes
        return sum(itemsize * math.prod(_size(x, parameter.shape) for x in shape) for shape, itemsize in shapes)

    def seconds(self, parameter: Tensor) -> float:
        """Returns the seconds of an optimizer step for one parameter on its device; 0 if that cannot be tried."""
        if parameter not in self._group_of:
            return 0.0
        optimizer, number = self._group_of[parameter]
        if id(optimizer) not in self._rates:
            self._rates[id(optimizer)] = _seconds_per_byte(optimizer, number, parameter)
        return self._rates[id(optimizer)] * parameter.nbytes


def _size(size: int, shape: Sequence[int]) -> int:
    """Returns the size of a state tensor's dimension for a real parameter, derived from the size for a small one."""
    small = _PRIMES[: len(shape)]
    if size in small:
        return shape[small.index(size)]
    return math.prod(shape) if size == math.prod(small) and len(shape) > 1 else size


def _tried(optimizer: Optimizer, number: int, like: Tensor) -> list[_Shape] | None:
    """Returns the shapes of the state tensors that an optimizer makes for a small parameter; None if it cannot be
    tried.
    """
    name = type(optimizer).__name__
    try:
        tried, step = _copy(optimizer, number, like, _PRIMES[: like.dim()])
        step()
        state = [x for x in tree_leaves(list(tried.state.values())) if isinstance(x, Tensor)]
    except Exception as error:  # whatever an optimizer of the user's does
        warnings.warn(
            f"{name} could not be tried on a small parameter ({type(error).__name__}: {error}); its state is taken for "
            f"{_USUAL_COPIES} copies of each parameter. Give a profile if it is not",
            stacklevel=2,
        )
        return None
    return [(tuple(x.shape), x.element_size()) for x in state]


def _seconds_per_byte(optimizer: Optimizer, number: int, like: Tensor) -> float:
    clock = LayerClock(like.device)
    try:
        _, step = _copy(optimizer, number, like, _TIMED)
        step()
        marks = [(clock.mark(), step(), clock.mark()) for _ in range(_TIMES)]
    except Exception:  # `_tried` has warned, unless it is one that takes no matrix
        return 0.0
    took_s = statistics.median(clock.seconds(begin, end) for begin, _, end in marks)
    return took_s / (math.prod(_TIMED) * like.element_size())


def _copy(
    optimizer: Optimizer, number: int, like: Tensor, shape: Sequence[int]
) -> tuple[Optimizer, Callable[[], None]]:
    """Returns a copy of an optimizer with a single parameter of this shape, and a function that makes a step of the
    copy.
    """
    if any(isinstance(x, Optimizer) for x in vars(optimizer).values()):
        raise TypeError("it holds another optimizer, which steps parameters of its own")
    parameter = nn.Parameter(torch.ones(tuple(shape), dtype=like.dtype, device=like.device))
    parameter.grad = torch.full_like(parameter, 0.01)
    tried: Any = object.__new__(type(optimizer))
    tried.__dict__.update({name: copy.copy(x) for name, x in vars(optimizer).items() if name != "step"})
    tried.param_groups = [{**optimizer.param_groups[number], "params": [parameter]}]
    tried.state = defaultdict(dict)
    real: Any = type(optimizer).step
    real = real.__wrapped__ if getattr(real, "hooked", False) else real
    return tried, lambda: real(tried)
