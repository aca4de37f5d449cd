"""Measures the bytes of each layer: state, activations kept for backward, workspace, and the tensors that enter its
block.

Theory of operation. Autograd hands each tensor that it keeps for the backward pass to a hook; storages are counted
once, at the layer that first keeps them, and those of parameters and buffers are not. Under activation checkpointing
the region's own hooks take the place of this one, so that its input counts and what is recomputed does not.

Workspace is the most that is allocated while a layer computes, beyond what is there before or after, the larger of
both. An accelerator's allocator knows it. On a CPU a dispatch mode sees the tensors that operations return, and weak
references tell when they are freed; memory that a kernel takes and frees by itself is not seen.

Parameters inside a block are that layer's. For those outside of the chain the graph of the loss tells which layers use
them: from the tensors that entered block i + 1 it is walked back to the parts of earlier layers. A parameter that the
first and the last layer use is tied; what several use counts at each of them. One that is not in the graph, being
frozen or unused, belongs to the last layer if the model has it behind the chain, else to the first one.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chaos_lightning.pipeline.find_chain import compiled


class TensorGauge(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gauge of the bytes, now and at the peak, of tensors that operations have made on a CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._freed, key, nbytes))
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    def _freed(self, key: int, nbytes: int, _: Any) -> None:
        del self._alive[key]
        self.now -= nbytes

    def restart(self) -> None:
        self.peak = self.now


class AllocatorGauge:
    """Gauge of the bytes, now and at the peak, that an accelerator's allocator has given out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> AllocatorGauge:
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def now(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device)

    def restart(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)


def gauge_of(root: nn.Module, device: torch.device) -> TensorGauge | AllocatorGauge | None:
    """Returns a gauge of a device's memory; None for compiled blocks on a CPU, whose operations no mode can see."""
    if device.type != "cpu":
        return AllocatorGauge(device)
    return None if any(map(compiled, root.modules())) else TensorGauge()


class TooMuchKept(BaseException):
    """Exception that ends a forward pass that keeps more bytes than allowed; user code's `except Exception` does not
    catch it.
    """


class PassBytes:
    """Measurement of one micro-batch's bytes by layer; a `LayerTimer` reports the blocks' calls to it.

    Attributes:
        kept: Bytes by layer that autograd keeps from the forward pass to the backward pass.
        workspace: Bytes by layer of workspace (see the module).
        entered: Bytes of the tensors that enter each block.
        used: Layers whose part of the graph each parameter is in, by parameter; known after `look`.
        skips: Layers that also depend on earlier ones by other ways than the tensors that enter their block.

    Args:
        count: Number of layers.
        gauge: Gauge of the device's memory; None: the workspace is not measured.
    """

    def __init__(self, count: int, gauge: TensorGauge | AllocatorGauge | None) -> None:
        self.count = count
        self.kept, self.workspace, self.entered = Counter[int](), Counter[int](), Counter[int]()
        self.used: dict[Tensor, set[int]] = defaultdict(set)
        self.skips: set[int] = set()
        self._seen = set[int]()
        self._left_nbytes = 0.0
        self._gauge, self._layer, self._before = gauge, 0, 0
        self._borders: dict[int, list[Node]] = {}
        self._forward, self._whole = ExitStack(), ExitStack()

    @property
    def measures_workspace(self) -> bool:
        return self._gauge is not None

    def begin(self, state: Iterable[Tensor], first: int = 0, most_nbytes: float = math.inf) -> None:
        """Begins to count the bytes of a forward pass.

        Args:
            state: Parameters, buffers, and what others keep: these are no activations of this pass.
            first: First layer of the pass.
            most_nbytes: Bytes that it may keep; beyond them it ends with `TooMuchKept`.
        """
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in state}
        self._layer, self._left_nbytes = first, most_nbytes
        self._forward.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
        if self._gauge is not None:
            self._whole.enter_context(self._gauge)
            self._before = self._gauge.now

    def watch(self, layer: int, tensors: Sequence[Tensor] | None) -> None:
        """Records a call of a block with these tensors; None means the end of a layer's forward or backward part."""
        if tensors is not None:
            self._layer = layer
            self.entered[layer] = sum(t.numel() * t.element_size() for t in tensors)
            self._borders[layer] = [get_gradient_edge(t).node for t in tensors if t.requires_grad]
        elif self._gauge is not None:
            beyond = self._gauge.peak - max(self._before, self._gauge.now)
            self.workspace[layer] = max(self.workspace[layer], beyond)
            self._gauge.restart()
            self._before = self._gauge.now

    def forward_ends(self) -> None:
        self._forward.close()

    def look(self, roots: Iterable[Tensor]) -> None:
        """Finds, in the graph of a finished forward pass, the layers that use each parameter.

        Args:
            roots: Tensors at which the backward pass begins, such as the loss.
        """
        earlier = set[Node]()
        for layer in range(self.count):
            roots_of = [get_gradient_edge(t).node for t in roots if t.requires_grad]
            above = self._borders[layer + 1] if layer + 1 < self.count else roots_of
            self._walk(layer, above, earlier)
        self._borders.clear()

    def _walk(self, layer: int, above: Iterable[Node], earlier: set[Node]) -> None:
        """Walks a layer's part of the autograd graph, back to the parts of earlier layers, and adds its nodes to
        `earlier`.
        """
        entry, todo, own = set(self._borders.get(layer, ())), list(above), set[Node]()
        while todo:
            node = todo.pop()
            if node in own:
                continue
            if node in earlier:
                if node not in entry:
                    self.skips.add(layer)
                continue
            if (leaf := getattr(node, "variable", None)) is not None:
                self.used[leaf].add(layer)
                continue
            own.add(node)
            todo += [following for following, _ in node.next_functions if following is not None]
        earlier |= own

    def ends(self) -> None:
        """Ends the measurement of a pass, whether finished or aborted. Idempotent."""
        self._forward.close()
        self._whole.close()
        self._borders.clear()

    def keeps(self, tensor: Tensor) -> bool:
        """Returns whether the last pass kept the memory of a tensor for backward."""
        return tensor.untyped_storage().data_ptr() in self._seen

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.kept[self._layer] += storage.nbytes()
                self._left_nbytes -= storage.nbytes()
                if self._left_nbytes < 0:
                    raise TooMuchKept
        return tensor


class StateRow(NamedTuple):
    """Parameter or buffer of a model, its bytes, and the layers that use it."""

    name: str
    nbytes: int
    gradient_nbytes: int
    optimizer_nbytes: int
    layers: tuple[int, ...]


@dataclass
class StateBytes:
    """Bytes of the training state by layer; a tensor that several layers use counts for each of them.

    Attributes:
        parameters: Parameters and buffers.
        trained: Parameters that have gradients.
        tied: Gradients of parameters that the first and the last layer share.
        notes: Things of the model that the file cannot say, in words.
    """

    parameters: Counter[int] = field(default_factory=Counter)
    gradients: Counter[int] = field(default_factory=Counter)
    optimizer: Counter[int] = field(default_factory=Counter)
    trained: Counter[int] = field(default_factory=Counter)
    tied: int = 0
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(rows: Iterable[StateRow], count: int, name_of: Callable[[int], str]) -> StateBytes:
        """Returns the sums of the bytes of parameters and buffers by layer.

        Args:
            rows: Rows of the state's tensors, each once.
            count: Number of layers.
            name_of: Function that returns the name of a layer.
        """
        found = StateBytes()
        for row in rows:
            for layer in row.layers:
                found.parameters[layer] += row.nbytes
                found.gradients[layer] += row.gradient_nbytes
                found.optimizer[layer] += row.optimizer_nbytes
                found.trained[layer] += row.nbytes if row.gradient_nbytes else 0
            if len(row.layers) > 1 and row.layers == (0, count - 1):
                found.tied += row.gradient_nbytes
            elif len(row.layers) > 1:
                found.notes.append(f"{row.name} is used by {', '.join(map(name_of, row.layers))}, and counts at each")
        return found


def state_rows(
    root: nn.Module, blocks: Sequence[nn.Module], used: Mapping[Tensor, set[int]], optimizer: Optimizer
) -> Iterator[StateRow]:
    """Yields the sizes and layers of all parameters and buffers, after a step while gradients exist.

    Args:
        root: The model.
        blocks: Blocks of the model's chain.
        used: Layers that use each parameter (`PassBytes.used`).
        optimizer: Optimizer whose state counts at the layers of each parameter.
    """
    last = len(blocks) - 1
    inside: dict[Tensor, list[int]] = defaultdict(list)
    for layer, block in enumerate(blocks):
        for tensor in (*block.parameters(), *block.buffers()):
            inside[tensor].append(layer)
    behind = False
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        behind = isinstance(tensor, nn.Parameter) and (behind or tensor in inside)
        layers = {*inside.get(tensor, ()), *used.get(tensor, ())} or {last if behind else 0}
        state = tree_leaves(optimizer.state.get(tensor, {}) if tensor.requires_grad else {})
        optimizer_nbytes = sum(x.nbytes for x in state if isinstance(x, Tensor))
        gradient_nbytes = tensor.grad.nbytes if tensor.grad is not None else 0
        yield StateRow(name, tensor.nbytes, gradient_nbytes, optimizer_nbytes, tuple(sorted(layers)))
