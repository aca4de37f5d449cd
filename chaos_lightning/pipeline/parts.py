"""Divides a model's parameters and buffers into parts of the training state, by the layers that use them.

Theory of operation. A tensor belongs to the layer that uses it: a block's own to that block's layer, others by when an
operation of the user's step takes them: before the chain (layer 0), between the calls of block i and block i + 1 (layer
i), or after the chain (the last layer). This is seen in one pass of the step on one micro-batch. What several layers
use is a part of its own, "shared.NAME". Buffers outside of the chain that no pass changes (masks, rotary frequencies)
are the "rest", which all members have. Parameters that nothing uses go with the last layer.

The pass needs no values: what is absent stands in with one small number for all elements, since code may ask whether a
loss is finite. So it needs no memory for weights but that of the largest one, and each member does it by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from chaos_lightning.pipeline.absent import is_absent, named_tensors, set_stand_in
from chaos_lightning.pipeline.chain import LayerChain, Step, changes_buffers
from chaos_lightning.pipeline.taint import takes_shape_only
from chaos_lightning.pipeline.undo import undone

REST = "rest"
_FILLING = 0.01


@dataclass(frozen=True)
class ModelParts:
    """Parts of a model, with the layers that use each part.

    Attributes:
        layers: Number of layers.
        part_of: Part of each parameter and buffer, by name; tied ones have several names.
        users: Layers that use each part, by part. All members own the rest.
        unused: Names of parameters that nothing uses.
    """

    layers: int
    part_of: dict[str, str]
    users: dict[str, tuple[int, ...]]
    unused: tuple[str, ...] = ()

    def owned_by(self, layers: Iterable[int]) -> frozenset[str]:
        """Returns the parts that a member with these layers owns."""
        mine = frozenset(layers)
        return frozenset(part for part, users in self.users.items() if part == REST or mine & frozenset(users))

    def names(self, part: str) -> tuple[str, ...]:
        """Returns the names of a part's parameters and buffers, in the order of the model."""
        return tuple(name for name, its in self.part_of.items() if its == part)


def find_parts(chain: LayerChain, batch: Any, call: Step | None = None) -> ModelParts:
    """Runs the user's step once, without gradients, and returns which layers use which parameters and buffers.

    The model is as before then (`undo.undone`).

    Args:
        chain: The layers.
        batch: A micro-batch, on the device.
        call: The step, if it is another one than the chain's.
    """
    tensors: dict[int, Tensor] = {}
    names: dict[int, list[str]] = {}
    users: dict[int, set[int]] = {}
    for name, _, _, tensor in named_tensors(chain.root):
        tensors[id(tensor)] = tensor
        names.setdefault(id(tensor), []).append(name)
        users.setdefault(id(tensor), set())
    for index, block in enumerate(chain.blocks):
        for _, _, _, tensor in named_tensors(block):
            users[id(tensor)].add(index)
    inside = {key for key, its in users.items() if its}
    filled = _filled(tensors.values())
    with undone(chain.root), torch.no_grad(), _buffers_kept(chain) as changed, filled, chain.stream("parts"):
        seen = _Uses(chain, tensors)
        with seen:
            chain.run(0, len(chain), batch, call=call)
        changed |= {key for key, tensor in tensors.items() if not isinstance(tensor, torch.nn.Parameter)} & seen.changed
    for key, layers in seen.layers.items():
        users[key] |= layers
    return _named(len(chain), tensors, names, users, inside | changed)


def _named(
    layers: int, tensors: dict[int, Tensor], names: dict[int, list[str]], users: dict[int, set[int]], placed: set[int]
) -> ModelParts:
    part_of: dict[str, str] = {}
    of_part: dict[str, tuple[int, ...]] = {f"layer.{i}": (i,) for i in range(layers)}
    of_part[REST] = tuple(range(layers))
    unused = []
    for key, tensor in tensors.items():
        used, is_parameter = users[key], isinstance(tensor, torch.nn.Parameter)
        if not is_parameter and key not in placed:
            part = REST
        elif len(used) > 1:
            part = f"shared.{names[key][0]}"
            of_part[part] = tuple(sorted(used))
        else:
            part = f"layer.{next(iter(used), layers - 1)}"
        if is_parameter and not used:
            unused.append(names[key][0])
        part_of |= dict.fromkeys(names[key], part)
    return ModelParts(layers, part_of, of_part, tuple(unused))


class _Uses(TorchDispatchMode):
    """Mode that records at which layers operations use each tensor, and which tensors they write to."""

    supports_higher_order_operators = True

    def __init__(self, chain: LayerChain, tensors: dict[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._chain = chain
        self._keys: dict[int, list[int]] = {}
        for key, tensor in tensors.items():
            self._keys.setdefault(tensor.untyped_storage()._cdata, []).append(key)
        self.layers: dict[int, set[int]] = {}
        self.changed: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not takes_shape_only(func):
            for given in tree_iter((args, kwargs)):
                if isinstance(given, Tensor) and given.layout == torch.strided:
                    for key in self._keys.get(given.untyped_storage()._cdata, ()):
                        self.layers.setdefault(key, set()).add(self._chain.layer_under_way)
        if args and isinstance(args[0], Tensor) and getattr(getattr(func, "_schema", None), "is_mutable", False):
            self.changed.update(self._keys.get(args[0].untyped_storage()._cdata, ()))
        return func(*args, **kwargs)


@contextmanager
def _buffers_kept(chain: LayerChain) -> Iterator[set[int]]:
    """Gives all buffers memory of their own while the block runs, then restores them; yields the ids of batch norms'
    running statistics.
    """
    buffers = {id(t): t for _, _, _, t in named_tensors(chain.root) if not isinstance(t, torch.nn.Parameter)}
    before = {key: buffer.data for key, buffer in buffers.items()}
    for buffer in buffers.values():
        absent = is_absent(buffer)
        buffer.data = torch.zeros(buffer.shape, dtype=buffer.dtype, device=buffer.device) if absent else buffer.clone()
    try:
        yield {
            id(t)
            for module in chain.root.modules()
            if changes_buffers(module)
            for t in module._buffers.values()
            if t is not None
        }
    finally:
        for key, buffer in buffers.items():
            buffer.data = before[key]


@contextmanager
def _filled(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Sets parameters' stand-ins to a small number while the block runs, and back to NaN after it."""
    absent = [t for t in tensors if isinstance(t, torch.nn.Parameter) and is_absent(t) and t.is_floating_point()]
    for tensor in absent:
        set_stand_in(tensor, _FILLING)
    try:
        yield
    finally:
        for tensor in absent:
            set_stand_in(tensor, None)
