"""Measures the forward and backward times of a chain's layers while micro-batches pass through them.

Theory of operation. Layer i is block i of the chain. Layer 0 also has everything that runs before the chain, the last
layer everything after it, and what runs between two blocks belongs to the first of them. So a forward pass needs a mark
where it begins, one where each further block is called, and one where it ends. In the backward pass layer i is done
when the gradients of the tensors that entered block i are there; hooks on these tensors set the marks. A pass through a
stage of a pipeline is timed alike, over the layers that the stage has; what it runs before its first block stands in
for other stages, and is no layer's.

A mark is a reading of the clock on a CPU. On an accelerator it is an event in the stream, so that nothing waits for the
device before times are asked for.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from chaos_lightning.errors import UnsupportedError

WINDOW = 101
"""Number of the latest passes of which medians are taken."""

Mark = Any
"""Mark of a moment: seconds as a float, or an event of an accelerator's stream."""


class LayerClock:
    """Clock that sets time marks and returns the seconds between them.

    Args:
        device: The device on which the layers compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of_stream = device.type != "cpu"

    def mark(self) -> Mark:
        """Returns a mark of the present moment; on an accelerator, of the moment at which its stream gets there."""
        if not self._of_stream:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Returns the seconds between two marks, at least 0; waits until an accelerator has reached the second one."""
        if not self._of_stream:
            return max(0.0, float(end - begin))
        end.synchronize()
        return max(0.0, float(begin.elapsed_time(end)) / 1e3)


class TimedPass:
    """Timed forward and backward pass of one micro-batch through layers [first, end), made by `LayerTimer.begin`."""

    def __init__(self, timer: LayerTimer, first: int, end: int, counts: bool) -> None:
        self.first, self.end = first, end
        self._timer = timer
        self._due = first
        self._clock = timer.clock
        self._forward = [self._clock.mark()]
        self._done: dict[int, Mark] = {}
        self._counts = counts
        self._backward: Mark = None

    def enter(self, layer: int, tensors: Sequence[Tensor]) -> None:
        """Records a call of a block with these tensors, and the time.

        Raises:
            UnsupportedError: Another block is due, so the blocks are not called in the chain's order.
        """
        if layer != self._due:
            self._counts = False
            name = self._timer.name_of
            due = f"{name(self._due)} is due" if self._due < self.end else "the chain is at its end"
            twice = f"a second time in one micro-batch, where {due}" if layer < self._due else f"where {due}"
            raise UnsupportedError(
                f"block {name(layer)} is called {twice}; expected the blocks of the chain to be called in order, each "
                "once for every backward pass"
            )
        self._due += 1
        if layer == self.first:
            if layer:
                self._forward = [self._clock.mark()]
            return
        self._forward.append(self._clock.mark())
        self._timer.closed(layer - 1)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, layer))  # type: ignore[no-untyped-call]

    def _gradient(self, layer: int, _: Tensor) -> None:
        """Records the time at which the gradient of a layer's input is ready; of several inputs the last one counts."""
        self._done[layer] = self._clock.mark()
        self._timer.closed(layer)

    def forward_ends(self) -> None:
        """Records the end of the forward pass: the loss is computed, or the next stage's first block is called.

        Raises:
            UnsupportedError: A block was not called.
        """
        self._timer.leave(self)
        if self._due < self.end and self._counts:
            self._counts = False
            name = self._timer.name_of
            raise UnsupportedError(
                f"block {name(self._due)} was not called before the backward pass began; expected every block from "
                f"{name(self.first)} to {name(self.end - 1)} to be called in each micro-batch"
            )
        self._forward.append(self._clock.mark())
        self._timer.closed(self.end - 1)

    def backward_begins(self) -> None:
        self._backward = self._clock.mark()

    def ends(self) -> None:
        """Records the end of the backward pass; from now on the pass counts."""
        self._done[self.first] = self._clock.mark()
        self._timer.closed(self.first)
        if self._counts:
            self._timer.took(self)

    def times(self) -> tuple[list[float], list[float]]:
        """Returns the forward and backward seconds of each layer; backward seconds are 0 for layers that no gradient
        reaches.
        """
        seconds, done, backward = self._clock.seconds, self._backward, [0.0] * (self.end - self.first)
        for layer in range(self.end - 1, self.first - 1, -1):
            # Without a mark, no gradient passes from here to the layers before.
            mark = self._done.get(layer, self._done[self.first])
            backward[layer - self.first] = seconds(done, mark)
            done = mark
        return [seconds(a, b) for a, b in pairwise(self._forward)], backward


class LayerTimer:
    """Timer of a chain's layers, which measures while it is attached; it reports medians over the latest passes.

    Args:
        blocks: The chain.
        clock: Clock of the device that computes the blocks.
        path: Path of the chain in the model, for errors.
        watch: Function called with (layer, tensors) when a block is called, and with (layer, None) when a layer's
            forward or backward part ends.
        refuse: Function called with the error if blocks are not called as a chain, in a pass that does not count;
            raises it by default.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        clock: LayerClock,
        *,
        path: str = "",
        watch: Callable[[int, Sequence[Tensor] | None], None] | None = None,
        refuse: Callable[[UnsupportedError], None] | None = None,
    ) -> None:
        self.blocks, self.clock, self.path, self.watch = tuple(blocks), clock, path, watch
        self._refuse = refuse
        self._handles: list[RemovableHandle] = []
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}
        self._current: TimedPass | None = None
        self._ended: list[TimedPass] = []
        self._forward = [deque[float](maxlen=WINDOW) for _ in blocks]
        self._backward = [deque[float](maxlen=WINDOW) for _ in blocks]

    def name_of(self, layer: int) -> str:
        """Returns the path of a block, such as "model.layers.3"."""
        return f"{self.path or 'layers'}.{layer}"

    def attach(self) -> None:
        """Hooks into the blocks' calls. Idempotent."""
        if self._handles or self._compiled:
            return
        for layer, block in enumerate(self.blocks):
            called = partial(self._called, layer)
            if block._compiled_call_impl is None:
                self._handles.append(block.register_forward_pre_hook(called, prepend=True, with_kwargs=True))
            else:  # by `block.compile()`, to which hooks that come later do not belong
                self._compiled[block] = block._compiled_call_impl
                block._compiled_call_impl = partial(_call, called, block, block._compiled_call_impl)

    def detach(self) -> None:
        """Removes the hooks from the blocks; measured times are kept. Idempotent."""
        for handle in self._handles:
            handle.remove()
        for block, real in self._compiled.items():
            block._compiled_call_impl = real
        self._compiled.clear()
        self._handles, self._current = [], None

    def begin(self, first: int = 0, end: int | None = None, *, counts: bool = True) -> TimedPass:
        """Begins to time a micro-batch's pass through layers [first, end); by default through all.

        Calls of blocks belong to it until it says `forward_ends`. Others may begin before its backward pass does.

        Args:
            first: First layer.
            end: Layer behind the last one.
            counts: Whether its times count.
        """
        self._current = TimedPass(self, first, len(self.blocks) if end is None else end, counts)
        return self._current

    def leave(self, timed: TimedPass) -> None:
        """Stops assigning calls of blocks to this pass, since activation checkpointing will call blocks again."""
        if self._current is timed:
            self._current = None

    def took(self, timed: TimedPass) -> None:
        self._ended.append(timed)

    def closed(self, layer: int) -> None:
        if self.watch is not None:
            self.watch(layer, None)

    def settle(self) -> None:
        """Collects the times of all finished passes; waits for the accelerator to finish them."""
        for timed in self._ended:
            for layer, (forward, backward) in enumerate(zip(*timed.times(), strict=True), timed.first):
                self._forward[layer].append(forward)
                self._backward[layer].append(backward)
        self._ended.clear()

    def drop(self) -> None:
        """Discards all times measured so far, for example those of a warm-up."""
        self._ended.clear()
        for values in (*self._forward, *self._backward):
            values.clear()

    def medians(self) -> dict[int, tuple[float, float]]:
        """Returns the median (forward, backward) seconds of each layer that was timed."""
        self.settle()
        pairs = enumerate(zip(self._forward, self._backward, strict=True))
        return {layer: (statistics.median(f), statistics.median(b)) for layer, (f, b) in pairs if f}

    def _called(self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._current is None:
            return
        tensors = entering(args, kwargs)
        try:
            self._current.enter(layer, tensors)
        except UnsupportedError as error:
            if self._refuse is None:
                raise
            self._refuse(error)
        if self.watch is not None:
            self.watch(layer, tensors)


def _call(called: Callable[..., None], block: nn.Module, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    called(block, args, kwargs)
    return real(*args, **kwargs)


def entering(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors in a block's first argument, which are those that stages send to each other."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return [leaf for leaf in tree_leaves(first) if isinstance(leaf, Tensor)]
