"""Finds which tensors depend on placeholders, by a mode that passes names from the inputs of each operation to its
outputs.

Theory of operation. Modes of torch see every operation with its tensors. A tensor that was made from a placeholder, by
whatever way, carries its name, by the memory that it lies in. Operations that take but the shape of their input (such
as `zeros_like`) hand nothing on. An operation that gives a placeholder's value to Python (`if x.max() > 0:`, or the
shape of `x[x > 0]`) is refused, as the program would take another way than with the true values. The mode costs some
microseconds for each operation, so it is on in a few passes only.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_iter

from chaos_lightning.errors import UnsupportedError

_SHAPE_ONLY = re.compile(
    "(zeros|ones|full|empty|rand|randn|randint)_like|new_(zeros|ones|full|empty|empty_strided)|zero_|fill_"
)
_LOOKS = re.compile(
    "_local_scalar_dense|is_nonzero|equal|nonzero|nonzero_numpy|masked_select|_unique2?|unique_(dim|consecutive)|bincount"
)
_OURS = ("/torch/", "/chaos_lightning/pipeline/", "/lightning/")


class Taint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that tracks which placeholders each tensor depends on, by names.

    Args:
        deep: Whether operations within modules that really run are followed, too. These may then run as other
            operations, with other bits: modules are not compiled, and some are not taken apart.
    """

    supports_higher_order_operators = True

    def __init__(self, *, deep: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deep = deep
        self._named: dict[int, tuple[frozenset[str], object]] = {}
        """Names by the address of a storage, with the storage itself, so that no other storage gets its address
        meanwhile.
        """

    def mark(self, tree: Any, names: frozenset[str]) -> None:
        """Adds names to all tensors in a nested structure."""
        for tensor in _tensors(tree) if names else ():
            storage = tensor.untyped_storage()
            before = self._named.get(storage._cdata, (frozenset(), None))[0]
            self._named[storage._cdata] = (before | names, storage)

    def names(self, tree: Any) -> frozenset[str]:
        """Returns the names of all placeholders that the tensors in a nested structure depend on."""
        if not self._named:
            return frozenset()
        found = (self._named.get(t.untyped_storage()._cdata, (frozenset[str](), None))[0] for t in _tensors(tree))
        return frozenset().union(*found)

    def through(self, given: Any, real: Callable[[], Any]) -> Any:
        """Runs a module for real, and puts the names of its inputs on its result."""
        names = self.names(given)
        aside = not self._deep and _get_current_dispatch_mode() is self
        with _pop_mode_temporarily() if aside else nullcontext():
            out = real()
        self.mark(out, names)
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names = self.names((args, kwargs))
        operation = _operation(func)
        if names and (_LOOKS.fullmatch(operation) or (operation == "index" and self._masked(args))):
            raise UnsupportedError(
                f"the step looks at values that depend on {listed(names)}, which another stage has, so this stage has "
                f"placeholders for them{_place()}. Decide by values that come from the batch, or do it within a block"
            )
        out = func(*args, **kwargs)
        if names and not _SHAPE_ONLY.fullmatch(operation):
            self.mark(out, names)
        return out

    def _masked(self, args: tuple[Any, ...]) -> bool:
        """Returns whether an indexing operation has a mask that depends on placeholders, so that the result's shape
        would, too.
        """
        return any(t.dtype in (torch.bool, torch.uint8) and self.names(t) for t in _tensors(args[1:]))


def takes_shape_only(func: Any) -> bool:
    """Returns whether an operation uses only the shapes of its inputs, not their values."""
    return bool(_SHAPE_ONLY.fullmatch(_operation(func)))


def _operation(func: Any) -> str:
    """Returns the name of an operation without its overload; "" for higher-order operators."""
    return str(func).split(".")[1] if isinstance(func, torch._ops.OpOverload) else ""


def listed(names: frozenset[str]) -> str:
    """Returns the names sorted, as text for an error."""
    ordered = sorted(names)
    return ", ".join(ordered[:6]) + (f" and {len(ordered) - 6} more" if len(ordered) > 6 else "")


def has_nan(tree: Any) -> bool:
    """Returns whether any tensor in a nested structure contains NaN; a cheap sum is tried first."""
    floats = [t.detach() for t in _tensors(tree) if (t.is_floating_point() or t.is_complex()) and not t.is_meta]
    return any(bool(t.sum().isnan()) and bool(t.isnan().any()) for t in floats)


def _tensors(tree: Any) -> Iterator[Tensor]:
    accept: Callable[[Any], bool] = lambda x: isinstance(x, Tensor) and x.layout == torch.strided  # noqa: E731
    return filter(accept, tree_iter(tree))


def _place() -> str:
    """Returns the file and line of the user's program that runs this operation, for an error; "" if there is none."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in _OURS) and "<" not in frame.filename:
            return f' ({frame.filename.rpartition("/")[2]}, line {frame.lineno}: "{frame.line}")'
    return ""
