"""Undoes what a user's step has changed in Python objects, such as states of metrics, counters and lists.

Theory of operation. A step that runs again begins with what was there before it, and a step that is only looked at
leaves no trace. `Undo` keeps the attributes of the model's modules, and of modules in its lists and dicts. A value that
cannot change in place is kept as it is. Lists, dicts and sets are copied. Tensors and arrays of numpy are copied, too;
torch counts the writes to a tensor, so one that nobody has written to is copied once. Metrics need nothing of their
own, as they are modules whose states are attributes.

These are not looked at: parameters and buffers (`base.BaseBuffers` has the latter); torch's own modules, which count in
buffers; objects that are no modules; tensors in containers of more than `MOST_ITEMS`, though such a list gets its
length back; arrays of more than `MOST_ARRAY_NBYTES`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.base import BaseBuffers
from chaos_lightning.pipeline.randomness import Randomness

MOST_ITEMS = 64
MOST_ARRAY_NBYTES = 1 << 20
_DEEPEST = 3
"""Greatest depth of containers within containers that are looked into."""
_CONTAINERS = (list, dict, set, deque, tuple)
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
_CONSTANT = frozenset((*vars(nn.Module()), "_compiled_call_impl", "_defaults", "_persistent", "_reductions"))
"""Attributes of torch's modules, and of torchmetrics', that no step changes."""
_NOTHING = object()
_Batch = list[tuple[Tensor, Tensor]]
"""Copies, and the values that they are to have."""


@dataclass(slots=True)
class _Saved:
    """Mutable value of an attribute, with a copy of its content.

    Attributes:
        value: The object itself.
        copy: Values of a tensor or an array; items of a container.
        version: Count of writes to a tensor.
        inner: Items that can change in place, by index or key.
    """

    value: Any
    copy: Any
    version: int = 0
    inner: dict[Any, _Saved] = field(default_factory=dict)

    def renewed(self, value: Any, batch: _Batch) -> bool:
        """Saves a new tensor in place of the earlier one, if they match; returns whether that was possible.

        Args:
            value: Value that may take the place of the saved one, if type, shape and device are the same.
            batch: List that gets the copy, unless its values are there already; they are filled in later.
        """
        copy, last = self.copy, self.value
        if type(value) is not Tensor or type(copy) is not Tensor:
            return False
        if value is last and value._version == self.version:
            return True
        if value.shape != copy.shape or value.dtype != copy.dtype or value.device != copy.device:
            return False
        if value.is_inference():
            return False
        self.value, self.version = value, value._version
        batch.append((copy, value))
        return True

    def restore(self) -> None:
        value, copy = self.value, self.copy
        if isinstance(value, Tensor):
            if value._version != self.version:
                value.detach().copy_(copy)
                self.version = value._version
        elif isinstance(value, np.ndarray):
            value[...] = copy
        elif isinstance(value, list):
            value[:] = copy
        elif not isinstance(value, tuple):
            value.clear()
            (value.extend if isinstance(value, deque) else value.update)(copy)
        for saved in self.inner.values():
            saved.restore()


def _save(value: Any, last: _Saved | None, depth: int = 0) -> _Saved | None:
    """Returns a mutable value with a copy of its content; None if it cannot change in place or is left out.

    Args:
        value: Value of an attribute or an item.
        last: Result of the previous call for this value.
        depth: Number of containers around the value.
    """
    if isinstance(value, Tensor):
        if last is not None and last.value is value and last.version == value._version:
            return last
        if (type(value) is not Tensor and isinstance(value, nn.Parameter)) or value.is_inference() or is_absent(value):
            return None
        return _Saved(value, (value.detach() if value.requires_grad else value).clone(), value._version)
    if isinstance(value, np.ndarray):
        return _Saved(value, value.copy()) if value.nbytes <= MOST_ARRAY_NBYTES else None
    if not isinstance(value, _CONTAINERS):
        return None
    copy = dict(value) if isinstance(value, dict) else list(value)
    saved = _Saved(value, copy)
    if len(copy) <= MOST_ITEMS and depth < _DEEPEST:
        before = last.inner if last is not None and last.value is value else {}
        for key, item in copy.items() if isinstance(copy, dict) else enumerate(copy):
            if type(item) not in _PLAIN and (found := _save(item, before.get(key), depth + 1)) is not None:
                saved.inner[key] = found
    return saved if saved.inner or not isinstance(value, tuple) else None


def _holds_modules(value: Any) -> bool:
    if isinstance(value, _CONTAINERS) and len(value) <= MOST_ITEMS:
        return any(map(_holds_modules, value.values() if isinstance(value, dict) else value))
    return isinstance(value, nn.Module)


class _Attributes:
    """Saved attributes of one object."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._before: dict[str, Any] = {}
        self._names: list[str] = []
        self._saved: dict[str, _Saved] = {}
        self._modules: dict[str, Any] = {}

    def remember(self, batch: _Batch) -> bool:
        """Saves the object's attributes; returns whether it may contain other modules than at the last call.

        Args:
            batch: List that gets copies whose values are filled in later.
        """
        now, before, names, moved = vars(self._owner), self._before, [*vars(self._owner)], False
        if names == self._names:
            changed = [*compress(names, map(is_not, now.values(), before.values()))]
        else:
            changed = [n for n, value in now.items() if before.get(n, _NOTHING) is not value]
        for name, last in [*self._saved.items()]:
            value = now.get(name, _NOTHING)
            if not last.renewed(value, batch):
                moved |= value is not last.value and _holds_modules(value)
                self._keep(name, _save(value, last))
        for name in changed:
            value = now[name]
            if type(value) not in _PLAIN and name not in _CONSTANT and name not in self._saved:
                moved |= _holds_modules(value)
                self._keep(name, _save(value, None))
        if changed or names != self._names:
            self._before, self._names = dict(now), names
        modules, self._modules = self._modules, dict(now.get("_modules", ()))
        return moved or modules != self._modules

    def _keep(self, name: str, saved: _Saved | None) -> None:
        if saved is not None:
            self._saved[name] = saved
        else:
            self._saved.pop(name, None)

    @torch.no_grad()
    def restore(self) -> None:
        now = vars(self._owner)
        for name in [name for name in now if name not in self._before and name not in _CONSTANT]:
            del now[name]
        for name, value in self._before.items():
            if now.get(name, _NOTHING) is not value and name not in _CONSTANT:
                now[name] = value
        for saved in self._saved.values():
            saved.restore()


class Undo:
    """Copies of the attributes that a user's step may change, by which they are restored.

    Args:
        module: The user's model.
        others: Further objects whose attributes a step may change.
    """

    def __init__(self, module: nn.Module, *others: object) -> None:
        self._roots = (module, *others)
        self._kept: dict[int, _Attributes] = {}

    @torch.no_grad()
    def remember(self) -> None:
        """Saves all attributes as they are now."""
        batch: _Batch = []
        moved = [attributes.remember(batch) for attributes in self._kept.values()]
        if not moved or any(moved):
            self._kept = {id(owner): self._kept.get(id(owner)) or _Attributes(owner) for owner in self._owners()}
            for attributes in self._kept.values():
                attributes.remember(batch)
        if batch:
            torch._foreach_copy_([copy for copy, _ in batch], [value for _, value in batch])

    def restore(self) -> None:
        """Restores the attributes that `remember` saved last."""
        for attributes in self._kept.values():
            attributes.restore()

    def _owners(self) -> Iterator[object]:
        """Yields the objects whose attributes are saved: the given ones and the modules within them."""
        seen, todo = set[int](), list[Any](self._roots)
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            given = any(value is root for root in self._roots)
            if given or isinstance(value, nn.Module):
                own = vars(value)
                todo += own.get("_modules", {}).values()
                todo += [x for name, x in own.items() if name not in _CONSTANT and type(x) not in _PLAIN]
                if given or own.get("_modules") or not type(value).__module__.startswith("torch.nn."):
                    yield value
            elif isinstance(value, _CONTAINERS) and len(value) <= MOST_ITEMS:
                todo += value.values() if isinstance(value, dict) else value


@contextmanager
def undone(module: nn.Module, *others: object) -> Iterator[Callable[[], None]]:
    """Lets the user's step run while the block runs, and undoes its changes to the model afterwards.

    Attributes, buffers, gradients and random numbers are as before then; within it there are no gradients at first.

    Args:
        module: The user's model.
        others: See `Undo`.

    Yields:
        A function that puts attributes and buffers back at once.
    """
    undo, buffers = Undo(module, *others), BaseBuffers(module)
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    device = next((parameter.device for parameter, _ in gradients), torch.device("cpu"))
    undo.remember()
    buffers.remember()

    def restore() -> None:
        buffers.restore()
        undo.restore()

    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with Randomness(0, device).stream("undone"):
            yield restore
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        restore()
