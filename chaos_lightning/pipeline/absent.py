"""Makes stand-ins, nearly without memory, for parameters and buffers that this member does not own.

Theory of operation. A stand-in has the shape, type and device of what it stands for, and one element of memory, which
is NaN (0 where the type knows no NaN). So code that asks a weight for its device or its type gets the true answer, and
a result that uses one shows, as with placeholders. A parameter stays the same object when it is left out or made, so
optimizers and hooks keep it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def stand_in(like: Tensor, device: torch.device) -> Tensor:
    """Returns a stand-in for a tensor: with its shape and type, but one element of memory, NaN or 0."""
    value = math.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full((2,), value, dtype=like.dtype, device=device)[1].expand(like.shape)


def set_stand_in(tensor: Tensor, value: float | None) -> None:
    """Sets the value that all elements of a stand-in show; None means NaN."""
    torch.as_strided(tensor.detach(), (2,), (1,), 0).fill_(math.nan if value is None else value)


def is_absent(tensor: Tensor) -> bool:
    """Returns whether a tensor is a stand-in, or on the meta device."""
    if tensor.is_meta:
        return True
    if tensor.layout != torch.strided or tensor.storage_offset() != 1 or not tensor.numel():
        return False
    if tensor.untyped_storage().nbytes() != 2 * tensor.itemsize:
        return False
    return not any(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def named_tensors(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yields all parameters and buffers as (full name, module, own name, tensor), tied ones once for each of their
    names.
    """
    for prefix, module in root.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, module, name, tensor


def put(module: nn.Module, name: str, old: Tensor, data: Tensor) -> Tensor:
    """Gives a parameter or buffer new memory; returns the tensor, a new object if the old one was on the meta
    device.
    """
    if not old.is_meta:
        old.data = data
        return old
    new = nn.Parameter(data, old.requires_grad) if isinstance(old, nn.Parameter) else data
    if isinstance(old, nn.Parameter):
        new.__dict__.update(old.__dict__)
    setattr(module, name, new)  # some modules, such as an LSTM, keep their parameters elsewhere, too
    return new


@contextmanager
def made_up(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Gives absent tensors memory with made-up values that a model can run with, while the block runs."""
    lent = {id(t): (t, t.data) for t in tensors if is_absent(t)}
    try:
        for tensor, absent in lent.values():
            tensor.data = _plausible(absent)
        yield
    finally:
        for tensor, absent in lent.values():
            tensor.data = absent


def _plausible(like: Tensor) -> Tensor:
    """Returns random weights of a tensor's shape that keep the scale of inputs; 1 for norms and biases."""
    made = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if not (like.is_floating_point() or like.is_complex()):
        return made.zero_()
    if like.dim() < 2 or not like.numel():
        return made.fill_(1)
    row = torch.randn(like.shape[-1], device=like.device) / math.sqrt(like.numel() / like.shape[0])
    return made.copy_(row)  # one row for all: no second copy of the whole, and at the speed of memory
