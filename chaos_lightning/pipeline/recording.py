"""Builds a model without memory, and later makes any of its tensors with the values that its constructor would have
given it.

Theory of operation. While a model is built, tensors that functions of torch create lie on the meta device, and each
operation on them is logged. To *make* a tensor, the operations that it depends on run again, in their order, on the
CPU, with random numbers of a stream that is keyed by the tensor's name. So the user's constructor is the only place
that says how weights begin, buffers such as masks and rotary frequencies are computed as it computes them, and a
tensor is the same whoever makes it, whatever else is made. An operation that overwrites all of a tensor without a look
at it makes those before it needless.

Where the constructor asks for a value (`x.item()`), the value is made at once; a random one is refused, as it would be
drawn again. `trunc_normal_` asks for random values within, so it is logged as one operation. Tensors of given data
(`torch.tensor`) are real at once. Initializers of torch do nothing for tensors on the meta device, so `x.is_meta` is
answered with False.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from chaos_lightning.errors import StateError, UnsupportedError
from chaos_lightning.pipeline.randomness import Randomness

_OF_DATA = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.from_file, torch.scalar_tensor))
_OVERWRITES = frozenset(("normal_", "uniform_", "fill_", "zero_", "_no_grad_trunc_normal_"))


@dataclass(frozen=True, slots=True, eq=False)
class _Lying:
    """Tensor on the meta device, as it was when an operation on it was logged."""

    storage: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def key(self) -> int:
        return int(self.storage._cdata)

    @property
    def is_whole(self) -> bool:
        """Whether the tensor covers its whole storage."""
        return math.prod(self.shape) * self.dtype.itemsize == int(self.storage.nbytes())


@dataclass(frozen=True, slots=True)
class _Operation:
    func: Any
    args: Any
    kwargs: Any
    out: Any
    written: tuple[_Lying, ...]
    """Inputs that the operation writes to."""
    dtype: torch.dtype
    """Default type of floating-point tensors when the operation ran."""


class Recording:
    """Log of the operations that built models.

    Args:
        seed: Seed of the job.
    """

    def __init__(self, seed: int) -> None:
        self._randomness = Randomness(seed)
        self._log: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        """Numbers of the operations that make a storage or write to it, by storage."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Creates tensors on the meta device while the block runs, and logs the operations on them."""
        truncated = torch.nn.init._no_grad_trunc_normal_

        def logged(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.add(truncated, (tensor, *args), kwargs, tensor, [tensor])
            return tensor

        with _Logging(self), _WithoutMemory():
            torch.nn.init._no_grad_trunc_normal_ = logged  # type: ignore[assignment]
            try:
                yield
            finally:
                torch.nn.init._no_grad_trunc_normal_ = truncated

    def knows(self, tensor: Tensor) -> bool:
        """Returns whether this tensor was created while operations were logged."""
        return tensor.device.type == "meta" and tensor.untyped_storage()._cdata in self._writers

    def make(self, tensor: Tensor, name: str) -> Tensor:
        """Returns a logged tensor on the CPU, with the values that the constructor gives it.

        Raises:
            StateError: An operation cannot run again.
        """
        env: dict[int, Tensor] = {}
        dtype = torch.get_default_dtype()
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            lying: _Lying = _lying(tensor)
            try:
                with self._randomness.stream("weights", name):
                    for number in self._needed(lying):
                        torch.set_default_dtype(self._log[number].dtype)
                        self._run(self._log[number], env, name)
            finally:
                torch.set_default_dtype(dtype)
            return _viewed(lying, env).clone()

    def value(self, tensor: Tensor) -> Any:
        """Returns the value of a logged tensor that the constructor asks for (`x.item()`).

        Raises:
            UnsupportedError: The value is random.
        """
        needed = [self._log[number] for number in self._needed(_lying(tensor))]
        if any(torch.Tag.nondeterministic_seeded in getattr(operation.func, "tags", ()) for operation in needed):
            raise UnsupportedError(
                "the model's constructor looks at a random value, while it is built without memory; draw it with "
                'random.random(), or give device="cpu" where the tensor is created'
            )
        return self.make(tensor, "a value").item()

    def add(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[Any]) -> None:
        """Logs an operation if it makes or writes to a tensor on the meta device."""
        args, kwargs, out, written = tree_map(_lying, (args, kwargs, out, written))
        operation = _Operation(func, args, kwargs, out, tuple(_all_lying(written)), torch.get_default_dtype())
        made = [*_all_lying(out), *operation.written]
        for lying in made:
            writers = self._writers.setdefault(lying.key, [])
            if not writers or writers[-1] != len(self._log):
                writers.append(len(self._log))
        if made:
            self._log.append(operation)

    def _needed(self, lying: _Lying) -> list[int]:
        """Returns the numbers of the logged operations that a tensor's values depend on, in order."""
        found: set[int] = set()
        asked = [(lying.key, len(self._log))]
        while asked:
            storage, before = asked.pop()
            for number in reversed([n for n in self._writers.get(storage, ()) if n < before]):
                operation = self._log[number]
                if number not in found:
                    found.add(number)
                    asked += [(each.key, number) for each in _all_lying((operation.args, operation.kwargs))]
                if _overwrites(operation, storage):
                    found.add(self._writers[storage][0])
                    break
        return sorted(found)

    def _run(self, operation: _Operation, env: dict[int, Tensor], name: str) -> None:
        def real(x: Any) -> Any:
            if isinstance(x, _Lying):
                return _viewed(x, env)
            if isinstance(x, torch.Generator):
                return None
            return torch.device("cpu") if isinstance(x, torch.device) and x.type == "meta" else x

        args, kwargs = tree_map(real, (operation.args, operation.kwargs))
        try:
            out = operation.func(*args, **kwargs)
        except RuntimeError as error:
            raise StateError(f"{name} cannot be made as its constructor did: {operation.func}: {error}") from error
        for meta, made in zip(tree_iter(operation.out), tree_iter(out), strict=True):
            if isinstance(meta, _Lying) and isinstance(made, Tensor):
                env.setdefault(meta.key, made)


class _WithoutMemory(TorchFunctionMode):
    """Mode that creates tensors on the meta device, unless they are created with data or for a device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func in _device_constructors() and func not in _OF_DATA and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


class _Logging(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self._recording.knows(args[0]):
            return self._recording.value(args[0])
        if not _has_meta((args, kwargs)):
            out = func(*args, **kwargs)
        else:
            if kwargs.get("device") is not None:  # a tensor without memory stays where it is
                kwargs = {**kwargs, "device": torch.device("meta")}
            out = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
        self._recording.add(func, args, kwargs, out, _written(func, args, kwargs))
        return out


def _has_meta(tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.device.type == "meta" for x in tree_iter(tree))


def _lying(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.device.type != "meta":
        return x
    return _Lying(x.untyped_storage(), x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))


def _all_lying(tree: Any) -> list[_Lying]:
    return [x for x in tree_iter(tree) if isinstance(x, _Lying)]


def _as_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) and x.device.type != "meta" and x.dim() else x


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found = []
    schema = getattr(func, "_schema", None)
    for at, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[at] if at < len(args) else kwargs.get(argument.name))
    return found


def _overwrites(operation: _Operation, storage: int) -> bool:
    """Returns whether an operation overwrites a whole storage without reading it."""
    name = str(operation.func).split(".")[1] if hasattr(operation.func, "_schema") else operation.func.__name__
    first = operation.args[0] if operation.args else None
    return name in _OVERWRITES and isinstance(first, _Lying) and first.key == storage and first.is_whole


def _viewed(lying: _Lying, env: dict[int, Tensor]) -> Tensor:
    """Returns the real tensor for a logged one: with its shape and strides, in the real storage."""
    base = env[lying.key]
    if base.dtype != lying.dtype:
        base = torch.view_as_real(base) if base.is_complex() else torch.view_as_complex(base)
    return torch.as_strided(base, lying.shape, lying.stride, lying.offset)
