"""Keeps copies of the buffers that a forward pass changes, as of the last committed header, for steps that run again.

Theory of operation. A step that runs again must begin with the buffers that it began with before (running statistics
of batch norms count micro-batches). Which buffers a forward pass changes is not known before, so copies of all are
kept. At each new base a copy is renewed if the buffer is of floating point, or was written to since: torch counts
writes, but not those of the kernels of batch norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from chaos_lightning.pipeline.absent import is_absent


class _Kept(NamedTuple):
    module: nn.Module
    buffer: Tensor
    version: int
    address: int
    copy: Tensor | None
    """Values of the buffer at the base; None: the buffer is absent."""


class BaseBuffers:
    """Copies of a model's buffers as of the last committed header.

    Args:
        root: The model. Of absent buffers, which are of layers that lie elsewhere, there are no values.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._kept: dict[tuple[int, str], _Kept] = {}

    @property
    def nbytes(self) -> int:
        return sum(kept.copy.nbytes for kept in self._kept.values() if kept.copy is not None)

    def _buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in self._root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name, buffer

    @torch.no_grad()
    def remember(self) -> None:
        """Keeps a copy of the buffers' present values, to put them back if the coming step runs again."""
        before, self._kept = self._kept, {}
        for module, name, buffer in self._buffers():
            key = (id(module), name)
            kept = before.get(key)
            copy = None if kept is None or kept.buffer is not buffer else kept.copy
            if is_absent(buffer):
                copy = None
            elif kept is None or copy is None or not _alike(copy, buffer):
                copy = buffer.detach().clone()
            else:
                moved = (buffer._version, buffer.data_ptr()) != (kept.version, kept.address)
                if moved or buffer.is_floating_point():
                    copy.copy_(buffer)
            self._kept[key] = _Kept(module, buffer, buffer._version, buffer.data_ptr(), copy)

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the buffers as of the last committed header, even if their tensors were replaced."""
        for (_, name), kept in self._kept.items():
            if kept.copy is not None and not torch.equal(kept.buffer, kept.copy):
                kept.buffer.copy_(kept.copy)
            kept.module._buffers[name] = kept.buffer


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
