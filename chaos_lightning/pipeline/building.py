"""Gives memory and initial values to the parts of a model that a member owns.

Theory of operation. What a model was built of may be real (built in `__init__`), on the meta device with a `Recording`
(built within it, in `configure_model`), or on the meta device without one (built under `torch.device("meta")`). All of
the meta device become stand-ins first, so parameters are the same objects from then on, and which ones have memory may
change. Real tensors that are not owned are freed. Recorded ones are made as their constructor would have made them.

For tensors without a record each module that has such ones is asked to `reset_parameters()`, the children first, and
then given to the model's `init_weights(module)` or, for models of transformers, `_init_weights(module)`. They see NaN;
what is NaN after it was filled by nobody and is refused. Random numbers are keyed by the module's name. What is not
owned is scratch memory meanwhile, so a module draws the same whatever is owned. A tied tensor is filled once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.pipeline.absent import is_absent, named_tensors, put, stand_in
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.pipeline.recording import Recording

_REGISTERED = ("_parameters", "_buffers", "_modules")


class ModelMemory:
    """Memory of a model's parameters and buffers, given to some of them and taken from others.

    Args:
        root: The model, as it was built.
        seed: Seed of the job.
        device: Device that tensors get memory on.
        recording: The record that it was built within.
    """

    def __init__(
        self, root: nn.Module, seed: int, device: torch.device | str, recording: Recording | None = None
    ) -> None:
        self._root, self._device = root, torch.device(device)
        self._seed = seed
        self._recording = recording
        self._recorded: dict[int, Tensor] = {}
        """Tensors on the meta device as they lay there, by the id of the model's tensor, if there is a record of it."""
        self._unknown: set[int] = set()
        self.built_nbytes = sum(t.nbytes for t in self._tensors().values() if not t.is_meta)
        """Bytes that the model had when it was built: its peak in this process's memory."""
        self._stand_in_for_meta()

    def own(self, names: Collection[str]) -> None:
        """Gives the named tensors memory and values, as `make` does, and frees all others."""
        owned = {id(tensor) for name, tensor in self._named() if name in names}
        for key, tensor in self._tensors().items():
            if key not in owned and not is_absent(tensor):
                tensor.data = stand_in(tensor, self._device)
        self.make(names)

    def make(self, names: Collection[str]) -> None:
        """Gives the named tensors memory, with initial values if they had none.

        Raises:
            ConfigurationError: A tensor has no initial values, since nothing fills it; names it.
            StateError: A tensor was freed that nobody makes again; names it.
        """
        tensors = self._tensors()
        wanted = {id(tensor) for name, tensor in self._named() if name in names}
        lacking = {key for key in wanted if is_absent(tensors[key])}
        self._make_recorded(lacking)
        self._fill(lacking & self._unknown)
        freed = [name for name, tensor in self._named() if id(tensor) in wanted and is_absent(tensor)]
        if freed:
            raise StateError(
                f"{', '.join(freed[:6])} had values when the model was built, and was freed since; expected them from "
                "another member or a checkpoint: make room for them"
            )
        for key in wanted:
            tensors[key].data = tensors[key].data.to(self._device)

    def forget(self) -> None:
        """Drops the record of the model's construction, and weights that the constructor has loaded with it."""
        self._recording = None
        self._recorded.clear()

    def room(self, names: Collection[str]) -> None:
        """Gives the named tensors memory for values that come from a checkpoint or another member."""
        for name, tensor in self._named():
            if name in names and is_absent(tensor):
                tensor.data = _empty(tensor, self._device)

    def leave_out(self, names: Collection[str]) -> None:
        """Frees the named tensors, which become stand-ins."""
        for name, tensor in self._named():
            if name in names and not is_absent(tensor):
                tensor.data = stand_in(tensor, self._device)

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, _, _, tensor in named_tensors(self._root)]

    def _tensors(self) -> dict[int, Tensor]:
        return {id(tensor): tensor for _, tensor in self._named()}

    def _stand_in_for_meta(self) -> None:
        new: dict[int, Tensor] = {}
        for _, module, own_name, old in list(named_tensors(self._root)):
            if id(old) in new:
                setattr(module, own_name, new[id(old)])
            elif old.is_meta:
                made = new[id(old)] = put(module, own_name, old, stand_in(old, self._device))
                if self._recording is not None and self._recording.knows(old):
                    self._recorded[id(made)] = old.detach()
                else:
                    self._unknown.add(id(made))
        for module in self._root.modules():
            for name, value in list(vars(module).items()):
                if name not in _REGISTERED and any(isinstance(t, Tensor) and t.is_meta for t in tree_iter(value)):
                    made = tree_map(lambda t, m=module, n=name: self._attribute(m, n, t, new), value)
                    object.__setattr__(module, name, made)

    def _attribute(self, module: nn.Module, name: str, value: Any, new: dict[int, Tensor]) -> Any:
        """Returns the real tensor for a meta tensor that a module keeps as a plain attribute; other values
        unchanged.
        """
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        if id(value) not in new:
            if self._recording is None or not self._recording.knows(value):
                raise ConfigurationError(
                    f"{type(module).__name__}.{name} is a tensor on the meta device, and no buffer: nobody fills it. "
                    "Use register_buffer, or build the model in configure_model without torch.device"
                )
            new[id(value)] = self._recording.make(value, f"{type(module).__name__}.{name}").to(self._device)
        return new[id(value)]

    def _make_recorded(self, wanted: set[int]) -> None:
        names = {id(tensor): name for name, tensor in reversed(self._named())}
        for key, tensor in self._tensors().items():
            if key in wanted and key in self._recorded:
                assert self._recording is not None
                tensor.data = self._recording.make(self._recorded[key], names[key]).to(self._device)

    # --- tensors without a record

    def _fill(self, unknown: set[int]) -> None:
        if not unknown:
            return
        first = self._filled_at()
        for key, tensor in self._tensors().items():
            if key in unknown:
                tensor.data = _empty(tensor, torch.device("cpu"))
        randomness, modules = Randomness(self._seed), _children_first(self._root, "")
        with torch.no_grad():
            for name, module in modules:
                mine = {id(t) for own, t in _direct(module) if first[id(t)] == _full(name, own)} & unknown
                reset = _reset_of(module)
                if mine and reset is not None:
                    with randomness.stream("reset", name), _scratch(_direct(module), mine):
                        reset()
            for name, module in modules:
                inside = [(own, t) for own, _, _, t in named_tensors(module)]
                if any(is_absent(t) for _, t in inside):  # as in the root: no scratch memory for the whole model
                    inside = _direct(module)
                mine = {id(t) for own, t in inside if first[id(t)] == _full(name, own)} & unknown
                initialize = self._initializer(name)
                if mine and initialize is not None:
                    with randomness.stream("init", name), _scratch(inside, mine):
                        initialize(module)
        self._refuse_unfilled(unknown, first)

    def _filled_at(self) -> dict[int, str]:
        """Returns, by tensor, the name under which it is initialized: that of the first module that can reset it, else
        its first name.
        """
        found: dict[int, str] = {}
        for able in (True, False):
            for name, module, _, tensor in named_tensors(self._root):
                if not able or _reset_of(module) is not None:
                    found.setdefault(id(tensor), name)
        return found

    def _initializer(self, name: str) -> Callable[[nn.Module], Any] | None:
        """Returns the method that initializes the named module: `_init_weights` of the nearest module around it; None
        if there is none.
        """
        holders = [self._root]
        for part in name.split(".") if name else ():
            holders.append(getattr(holders[-1], part))
        for holder in reversed(holders):
            if callable(method := getattr(holder, "_init_weights", None)):
                return method  # type: ignore[no-any-return]
        method = getattr(self._root, "init_weights", None)
        return method if callable(method) and len(inspect.signature(method).parameters) == 1 else None

    def _refuse_unfilled(self, unknown: set[int], first: dict[int, str]) -> None:
        unfilled = [first[key] for key, t in self._tensors().items() if key in unknown and _is_unfilled(t)]
        if unfilled:
            named = ", ".join(unfilled[:6]) + (f" and {len(unfilled) - 6} more" if len(unfilled) > 6 else "")
            raise ConfigurationError(
                f"the model was built on the meta device, and nobody gives values to {named}. Build it in "
                'configure_model without torch.device("meta"), or give their modules reset_parameters(), or the '
                "LightningModule init_weights(module)"
            )


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    return reset if callable(reset) else None


def _children_first(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Returns all modules with their names, in the order of `nn.Module.apply`."""
    found, seen = [], set()

    def walk(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            walk(child, _full(name, child_name))
        if id(module) not in seen:
            seen.add(id(module))
            found.append((name, module))

    walk(module, name)
    return found


def _direct(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None]


def _full(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


@contextmanager
def _scratch(tensors: Collection[tuple[str, Tensor]], but: set[int]) -> Iterator[None]:
    """Lends all of these tensors scratch memory while the block runs, except those with ids in `but`."""
    before = {id(t): (t, t.data) for _, t in tensors if id(t) not in but}
    for tensor, data in before.values():
        tensor.data = torch.zeros(data.shape, dtype=data.dtype, device=data.device)
    try:
        yield
    finally:
        for tensor, data in before.values():
            tensor.data = data


def _empty(like: Tensor, device: torch.device) -> Tensor:
    """Returns memory filled with marker values (NaN, or the type's largest number) that show whether anybody
    initialized it.
    """
    if like.dtype == torch.bool or not (like.is_floating_point() or like.is_complex()):
        value = True if like.dtype == torch.bool else torch.iinfo(like.dtype).max
        return torch.full(like.shape, value, dtype=like.dtype, device=device)
    return torch.full(like.shape, math.nan, dtype=like.dtype, device=device)


def _is_unfilled(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype == torch.bool:
        return bool(tensor.all())
    return bool((tensor == torch.iinfo(tensor.dtype).max).any())
