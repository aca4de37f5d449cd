"""Hyperparameters in words: what members compare with every step (PROTOCOL.md 23)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer


def hyper_words(optimizers: Iterable[Optimizer]) -> str:
    """Numbers, flags and tuples of numbers of every parameter group, as "opt0.group0.lr=0.1;...".

    Callables and tensors with more than one element are left out: they have no short words.
    """
    words = []
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for key in sorted(group):
                value = group[key]
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.item()
                if key != "params" and isinstance(value, bool | int | float | tuple | str):
                    words.append(f"opt{number}.group{place}.{key}={value!r}")
    return ";".join(words)
