"""Manages a member's three flat buffers: one for its own gradients, and two for results of alternating slots
(protocol.md 3).

Theory of operation. A member's raw contribution is kept until the step is committed, so that it can be reduced again
over other trees: large gradients where autograd put them (`lend`), small or scaled ones copied into `own`. Results of
slot s lie in `results[s % 2]` and stay untouched until the header of s+1 was seen,
so that they can be handed on. After the commit the average is written over `own`, which the parameters' `.grad` view:
clipping, unscaling and the optimizer work there and never on the raw result.

A member of a pipeline has memory for the parts that it owns alone, laid end to end, and one result buffer: nobody asks
for the sums of a committed slot, since each member contributes once it has all of them. Bytes are still named by their
place in the layout, which is equal everywhere; `place` says where they lie here.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chaos_lightning.collectives.layout import Layout
from chaos_lightning.machine.heap import keep_heap
from chaos_lightning.planning.trees import expand
from chaos_lightning.protocol.types import PlanSpec, Span

_NOTHING = torch.empty(1, dtype=torch.uint8)
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def _resident(nbytes: int, pinned: bool) -> Tensor:
    """Allocates zeroed host memory and touches every page, so that no page fault happens inside a training step."""
    memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, pin_memory=pinned)
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (memory.data_ptr() + memory.nbytes - first) // mmap.PAGESIZE
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if not pinned and pages > 0 and advise is not None and hasattr(mmap, "MADV_HUGEPAGE"):
        # Without huge pages it works as well, a little slower: the answer does not matter.
        advise(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), mmap.MADV_HUGEPAGE)
    return memory.fill_(0)


def _bytes_of(flat: Tensor) -> memoryview:
    """Returns a memoryview of a flat uint8 host tensor."""
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _cells_of(layout: Layout, chunk_nbytes: int) -> tuple[Span, ...]:
    """Divides the layout into cells, at the borders that chunks of this size have; gradients are reported ready cell by
    cell.
    """
    trees = expand(PlanSpec("chain", chunk_nbytes), ("any",), layout.nbytes, layout.spans())
    return tuple((tree.start, tree.stop) for tree in trees)


class Memory:
    """Host buffers for the bytes of a layout; pinned if gradients are on an accelerator.

    Args:
        layout: Layout of the bytes.
        chunk_nbytes: Bytes of a chunk in this job; 0 for the usual size.
        owned: Bytes of the layout that this member owns, as `Layout.spans_of` gives them, in memory of their own with
            one result; None: all of them, with two results.

    Attributes:
        grid: Cells, ascending, covering the layout: borders at which the training thread reports readiness.
    """

    def __init__(self, layout: Layout, chunk_nbytes: int = 0, owned: Sequence[Span] | None = None) -> None:
        self.layout = layout
        self.grid = _cells_of(layout, chunk_nbytes)
        self._lent: list[memoryview | None] = [None] * len(layout.slots)
        self._starts = [slot.start for slot in layout.slots]
        self.own, self.results = _NOTHING, (_NOTHING, _NOTHING)
        self.lay_out(owned)

    def lay_out(self, owned: Sequence[Span] | None) -> None:
        """Allocates memory for these bytes of the layout; discards the former content and all lent gradients.

        Raises:
            ConfigurationError: The layout has no single device (`Layout.device`); does not matter to a member that owns
                no bytes.
        """
        self.owned = None if owned is None else tuple(owned)
        spans = ((0, self.layout.nbytes),) if self.owned is None else self.owned
        self._span_starts = [start for start, _ in spans]
        self._places = [*itertools.accumulate((stop - start for start, stop in spans), initial=0)]
        self.nbytes = self._places[-1]
        pinned = (self.owned is None or self.nbytes > 0) and self.layout.device.type != "cpu"
        if not pinned:
            keep_heap(self.nbytes)
        self._lent = [None] * len(self._lent)
        self.own, self.results = _NOTHING, (_NOTHING, _NOTHING)
        self.own_bytes, self.result_bytes = _bytes_of(_NOTHING), (_bytes_of(_NOTHING),) * 2  # before more is taken
        self.own, result = _resident(self.nbytes, pinned), _resident(self.nbytes, pinned)
        self.results = (result, _resident(self.nbytes, pinned) if self.owned is None else result)
        self.own_bytes = _bytes_of(self.own)
        self.result_bytes = (_bytes_of(self.results[0]), _bytes_of(self.results[1]))

    def holds(self, start: int) -> bool:
        """Returns whether this member has memory for this byte of the layout."""
        return self.owned is None or any(first <= start < stop for first, stop in self.owned)

    def place(self, start: int) -> int:
        """Returns the offset in each buffer of an owned byte of the layout."""
        if self.owned is None:
            return start
        at = bisect.bisect_right(self._span_starts, start) - 1
        return self._places[at] + start - self._span_starts[at]

    def lend(self, index: int, gradient: Tensor | None) -> None:
        """Uses the memory of this contiguous host tensor for one gradient, instead of a copy in the buffer `own`; None
        ends that.
        """
        self._lent[index] = None if gradient is None else _bytes_of(gradient.detach().reshape(-1).view(torch.uint8))

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Returns memory views of this member's own gradient bytes [start, stop), in order, lent tensors included."""
        found: list[memoryview] = []
        cursor, ahead = start, self.place(start) - start
        for index in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self._starts)):
            slot = self.layout.slots[index]
            if slot.start >= stop:
                break
            lent = self._lent[index]
            low, high = max(slot.start, start), min(slot.stop, stop)
            if lent is None or high <= low:
                continue
            if cursor < low:
                found.append(self.own_bytes[cursor + ahead : low + ahead])
            found.append(lent[low - slot.start : high - slot.start])
            cursor = high
        if cursor < stop:
            found.append(self.own_bytes[cursor + ahead : stop + ahead])
        return found

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Returns the part of a flat buffer that belongs to one tensor, in its dtype and shape."""
        slot = self.layout.slots[index]
        at = self.place(slot.start)
        return flat[at : at + slot.stop - slot.start].view(slot.dtype).view(slot.tensor.shape)


class Adder:
    """Function out = a + b for byte ranges of one dtype, single-threaded and without the GIL.

    numpy for float32 and float64: torch would start an OpenMP team in the I/O thread for large chunks and compete with
    training for the cores. Other types go through torch.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._numpy = _NUMPY.get(dtype)

    def __call__(self, a: memoryview, b: memoryview, out: memoryview) -> None:
        if self._numpy is not None:
            kind = self._numpy
            np.add(np.frombuffer(a, kind), np.frombuffer(b, kind), out=np.frombuffer(out, kind))
            return
        x, y, z = (torch.frombuffer(m, dtype=self._dtype) for m in (a, b, out))
        torch.add(x, y, out=z)
