"""Loads a member's parts of a model from a checkpoint of the whole model.

Theory of operation. The file is mapped into memory, so what nobody looks at is not read. The model's own
`load_state_dict` runs as ever, with its hooks and messages, but copies into tensors that are absent are left out. The
same holds for optimizers: they get the state of parameters that are here, as copies of their own. When memory is made
for further parts, before the job's first slot, their values are taken from the same file (`fill`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.pipeline.whole_file import storage_of

_ZIP = b"PK\x03\x04"
"""First bytes of files that `torch.save` writes since torch 1.6."""


def read_whole(path: Path, *, weights_only: bool | None = None) -> dict[str, Any] | None:
    """Maps a checkpoint file into memory; a tensor's bytes are read from the file when they are used.

    Args:
        path: A local file, which may be replaced afterwards, but not written to.
        weights_only: Argument of this name for `torch.load`.

    Returns:
        The checkpoint; None if a file of this form cannot be mapped.
    """
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return None
    found: dict[str, Any] = torch.load(
        path, map_location=lambda storage, _: storage, mmap=True, weights_only=weights_only
    )
    return found


class LoadedParts:
    """Checkpoint of the whole model as the source of values for the parts here, also for parts that get memory later.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._model: Mapping[str, Any] | None = None
        self._optimizers: list[tuple[Optimizer, Mapping[str, Any]]] = []
        self._place: Callable[[Optimizer], None] = lambda optimizer: None

    def load_model(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Loads the values of the parts that are here; checks keys and shapes of all parts.

        Args:
            state: The checkpoint's state dict, of the whole model.
            strict: Argument of this name for `Module.load_state_dict`.

        Raises:
            RuntimeError: Keys or shapes do not fit, by the rules of `Module.load_state_dict`.
        """
        self._model = state
        with _Into(self._root, None):
            self._root.load_state_dict(state, strict=strict)

    def load_optimizers(
        self,
        optimizers: Iterable[Optimizer],
        states: Iterable[Mapping[str, Any]],
        place: Callable[[Optimizer], None] = lambda optimizer: None,
    ) -> None:
        """Loads hyperparameters, and the optimizer state of the parameters that are here.

        Args:
            optimizers: Optimizers of the whole model.
            states: States of the checkpoint, in the same order.
            place: Function that puts an optimizer's state where it belongs.

        Raises:
            ValueError: A state does not fit its optimizer, by the rules of `Optimizer.load_state_dict`.
        """
        self._optimizers, self._place = list(zip(optimizers, states, strict=False)), place
        here = {id(p) for p in self._root.parameters() if not is_absent(p)}
        for optimizer, state in self._optimizers:
            self._load(optimizer, state, here)

    def fill(self, names: Collection[str]) -> frozenset[str]:
        """Fills the named tensors, which have got memory since, with values from the checkpoint.

        Args:
            names: Names of parameters and buffers; of a tied one, any of its names.

        Returns:
            Names of the tensors for which the checkpoint has no values: they stay as they are.
        """
        tensors = {name: t for name, _, _, t in named_tensors(self._root) if name in names}
        if self._model is None:
            return frozenset(tensors)
        wanted = {id(t) for t in tensors.values()}
        with _Into(self._root, wanted) as into:
            self._root.load_state_dict(self._model, strict=False)
        for optimizer, state in self._optimizers:
            before = optimizer.state, optimizer.param_groups
            self._load(optimizer, state, wanted)
            made = optimizer.state
            optimizer.state, optimizer.param_groups = before
            optimizer.state.update({p: made[p] for p in made if id(p) in wanted})
        return frozenset(name for name, tensor in tensors.items() if id(tensor) not in into.written)

    def forget(self) -> None:
        """Releases the checkpoint."""
        self._model = None
        self._optimizers.clear()

    def _load(self, optimizer: Optimizer, given: Mapping[str, Any], wanted: Collection[int]) -> None:
        """Loads hyperparameters and the state of the wanted parameters, in place of the optimizer's present state."""
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        left_out = {n for n, p in zip(numbers, parameters, strict=False) if id(p) not in wanted}
        state = {key: value for key, value in given["state"].items() if key not in left_out}
        optimizer.load_state_dict({**given, "state": state})
        self._place(optimizer)
        mapped = {storage_of(t) for t in tree_iter(state) if isinstance(t, Tensor)}

        def own(value: Any) -> Any:
            return value.clone() if isinstance(value, Tensor) and storage_of(value) in mapped else value

        for key in optimizer.state:
            optimizer.state[key] = tree_map(own, optimizer.state[key])


class _Into(TorchFunctionMode):
    """Mode that restricts `Tensor.copy_` to the wanted tensors of a model; copies into absent ones do nothing.

    Args:
        root: The model.
        wanted: Ids of these tensors; None: all that are here.

    Attributes:
        written: Ids of those that were written to.
    """

    def __init__(self, root: nn.Module, wanted: Collection[int] | None) -> None:
        super().__init__()
        tensors = {id(t): t for _, _, _, t in named_tensors(root)}
        self._absent = {storage_of(t) for t in tensors.values() if is_absent(t)}
        self._others = frozenset() if wanted is None else tensors.keys() - wanted
        self.written: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            if id(args[0]) in self._others or storage_of(args[0]) in self._absent:
                return args[0]
            self.written.add(id(args[0]))
        return func(*args, **(kwargs or {}))


__all__ = ["LoadedParts", "read_whole"]
