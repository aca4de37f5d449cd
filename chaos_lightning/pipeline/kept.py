"""Counts the bytes of tensors that forward passes keep for their backward passes.

Theory of operation. A plan estimates these bytes. Torch shows each tensor that it saves for a backward pass. The
memory of each is counted once for a micro-batch; parameters and buffers are not counted, since they are there anyway.
What activation checkpointing saves is its own affair and is counted as far as torch shows it: not at all, but for what
enters and leaves the stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class KeptBytes:
    """Count of the bytes of tensors that forward passes keep for their backward passes.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._held: dict[Hashable, dict[int, int]] = {}
        self.now_nbytes = 0
        self.peak_nbytes = 0

    @contextmanager
    def during(self, key: Hashable, entered: Sequence[Tensor] = ()) -> Iterator[None]:
        """Counts, under this key, the tensors that autograd saves while the block runs, and the received tensors
        `entered`.
        """
        state = (*self._root.parameters(), *self._root.buffers())
        ours = {t.untyped_storage()._cdata for t in state if not t.is_meta}
        self.add(key, entered)

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in ours:
                self.add(key, (tensor,))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def add(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Adds these tensors to the count under this key."""
        held = self._held.setdefault(key, {})
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in held:
                held[storage._cdata] = storage.nbytes()
                self.now_nbytes += storage.nbytes()
        self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes)

    def remove(self, key: Hashable) -> None:
        """Removes the tensors under this key from the count."""
        self.now_nbytes -= sum(self._held.pop(key, {}).values())

    def clear(self) -> None:
        """Resets the count, with no tensors and a peak of 0."""
        self._held.clear()
        self.now_nbytes = self.peak_nbytes = 0
