"""Hyperparameters in words: what members compare with every step (PROTOCOL.md 23)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Defaults that choose how a step is computed, not which."""


def default_words(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """What each optimizer was made with, as {"optimizer 0 lr": "0.1", ...}: for the job's fingerprint.

    Schedulers move the groups' values and leave these alone, so a newcomer's are the job's however late it comes.
    Tensors are left out: groups share them, and so schedulers move them, too.
    """
    return {
        f"optimizer {number} {key}": words
        for number, optimizer in enumerate(optimizers)
        for key, value in optimizer.defaults.items()
        if key not in _IMPLEMENTATION and (words := _words(value))
    }


def _words(value: object) -> str:
    """A flag, number, text or tuple of these, equal numbers in equal words; "" for anything else."""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | float):
        return f"{float(value)!r}".removesuffix(".0")
    if isinstance(value, tuple):
        words = [_words(one) for one in value]
        return f"({', '.join(words)})" if all(words) else ""
    return ""


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
