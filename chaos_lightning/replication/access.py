"""Gives access to the training state: the protocol that donors and joiners use, and an implementation for plain
PyTorch.

Theory of operation. A `StateAccess` names the replicated tensors in a fixed order and gives everything else as a
manifest. The joiner side works in two calls around the transfer: `prepare(manifest, table)` makes its tensors match
the donor's (optimizers create their state lazily, so a fresh one has none yet), then the bytes are received straight
into these tensors, then `adopt(manifest)` takes over what is no tensor. Both calls may be repeated.

An optimizer is described by position, not by name: `optim0.3.exp_avg` is the `exp_avg` of the third parameter counted
through the groups, as in `state_dict()`. Only where members own parts of the model it is by name (part_state.py). Its
manifest holds groups, and state values as a tree whose tensor leaves say type, shape and whether they lie beside their
parameter or on the host (Adam's `step`), so the joiner may train on another kind of device than the donor. Tied
parameters and buffers appear once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chaos_lightning.errors import StateError
from chaos_lightning.replication.table import DTYPES, StateTable, dtype_name


@runtime_checkable
class StateAccess(Protocol):
    """Access to the replicated state of one training process (protocol.md 21)."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Returns parameters, buffers and optimizer tensors as live references, in the same order on all members."""
        ...

    def manifest(self) -> dict[str, object]:
        """Returns all state that is not tensors, as values that `manifest.encode_manifest` can encode."""
        ...

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        """Makes the tensors of this member match the donor's table in names, types and shapes, before their bytes
        arrive.
        """
        ...

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        """Takes over the donor's state that is not tensors, once all tensors' bytes have arrived."""
        ...


class Stateful(Protocol):
    """Object with a state dict, such as a scheduler or a gradient scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


# --- modules ---------------------------------------------------------------------------------------------------------


def module_tensors(module: nn.Module, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Returns a module's parameters, then its buffers, as `param.NAME` and `buffer.NAME`; tied tensors appear once."""
    named: list[tuple[str, Tensor]] = [(f"{prefix}param.{n}", p) for n, p in module.named_parameters()]
    named += [(f"{prefix}buffer.{n}", b) for n, b in module.named_buffers()]
    return named


def module_extra(module: nn.Module) -> dict[str, Any]:
    """Returns the extra state (`get_extra_state`) of a module's submodules, by submodule name."""
    return {
        name: child.get_extra_state()
        for name, child in module.named_modules()
        if type(child).get_extra_state is not nn.Module.get_extra_state
    }


def restore_module_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Gives submodules back the extra state that `module_extra` collected."""
    children = dict(module.named_modules())
    for name, value in extra.items():
        if name not in children:
            raise StateError(f"the donor's module {name!r} keeps extra state, this member has no such module")
        children[name].set_extra_state(value)


# --- optimizers ------------------------------------------------------------------------------------------------------


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")


def _slots(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields the entries of an optimizer's state as (key, value): by parameter position, then those under other keys,
    sorted.
    """
    positions = {id(p): i for i, p in enumerate(_parameters(optimizer))}
    by_position = {positions[id(k)]: v for k, v in optimizer.state.items() if id(k) in positions}
    for position in sorted(by_position):
        yield str(position), by_position[position]
    for key in sorted((k for k in optimizer.state if not isinstance(k, Tensor)), key=str):
        yield f"state:{key}", optimizer.state[key]


def optimizer_tensors(optimizer: Optimizer, prefix: str = "optim0", *, rest: bool = False) -> list[tuple[str, Tensor]]:
    """Returns an optimizer's state tensors (moments, step counters), then its tensor hyperparameters, in fixed order.

    Args:
        optimizer: Optimizer of any kind.
        prefix: Text with which the names begin.
        rest: Whether to leave out the state of single parameters.
    """
    slots = [(key, value) for key, value in _slots(optimizer) if not (rest and key.isdigit())]
    named = [leaf for key, value in slots for leaf in _leaves(value, f"{prefix}.{key}")]
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(k for k in group if k != "params"):
            named += _leaves(group[key], f"{prefix}.group{number}.{key}")
    return named


def _describe(value: Any, beside: Tensor | None) -> dict[str, Any]:
    """Describes a value of an optimizer's state: replaces each tensor by its type, its shape and where it lies."""
    if isinstance(value, Tensor):
        # Step counters stay on the host although a donor's parameters may lie there, too: the joiner's may not.
        counter = value.device.type == "cpu" and value.dim() == 0
        place = "param" if beside is not None and value.device == beside.device and not counter else "host"
        return {"tensor": [dtype_name(value.dtype), list(value.shape), place]}
    if isinstance(value, dict):
        return {"dict": [(k, _describe(v, beside)) for k, v in value.items()]}
    if isinstance(value, list):
        return {"list": [_describe(v, beside) for v in value]}
    if type(value) is tuple:
        return {"tuple": [_describe(v, beside) for v in value]}
    return {"value": value}


Make = Callable[[str, Any, torch.dtype, tuple[int, ...], bool], Tensor]
"""Function that makes a tensor of a state value, given its name, the present value, its type, its shape, and whether it
lies beside its parameter; else it lies on the host.
"""


def rebuild(tree: Mapping[str, Any], current: Any, path: str, make: Make) -> Any:
    """Rebuilds a value of an optimizer's state from its description in a manifest.

    Args:
        tree: Description of the value, from `parameter_manifest` or `optimizer_manifest`.
        current: The value that is there now.
        path: Name of the value; those of its tensors begin with it, as in `parameter_tensors`.
        make: Function that makes the value's tensors.

    Raises:
        StateError: The description is of a later release.
    """
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return make(path, current, DTYPES[value[0]], tuple(value[1]), value[2] == "param")
    if kind == "dict":
        old = current if isinstance(current, dict) else {}
        return {k: rebuild(v, old.get(k), f"{path}.{k}", make) for k, v in value}
    if kind in ("list", "tuple"):
        olds = list(current) if isinstance(current, list | tuple) else []
        items = [rebuild(v, olds[i] if i < len(olds) else None, f"{path}.{i}", make) for i, v in enumerate(value)]
        return items if kind == "list" else tuple(items)
    if kind == "value":
        return value
    raise StateError(f"{path}: the donor describes this state value as {kind!r}, which this version does not know")


def _rebuild(tree: Mapping[str, Any], current: Any, beside: Tensor | None, path: str) -> Any:
    """Rebuilds an optimizer's state value from what `_describe` returned; keeps tensors of `current` that fit, so that
    references to them stay valid.
    """

    def make(_: str, current: Any, dtype: torch.dtype, shape: tuple[int, ...], is_beside: bool) -> Tensor:
        if isinstance(current, Tensor) and current.dtype is dtype and tuple(current.shape) == shape:
            return current
        device = beside.device if is_beside and beside is not None else torch.device("cpu")
        if beside is not None and shape == tuple(beside.shape):  # keep channels_last and the like
            return torch.zeros_like(beside, dtype=dtype, device=device, requires_grad=False)
        return torch.zeros(shape, dtype=dtype, device=device)

    return rebuild(tree, current, path, make)


def optimizer_manifest(optimizer: Optimizer, *, rest: bool = False) -> dict[str, Any]:
    """Returns an optimizer's groups and state, with tensors described instead of copied; with `rest`, without the state
    of its parameters.
    """
    params = _parameters(optimizer)
    groups = []
    for group in optimizer.param_groups:
        beside = group["params"][0] if group["params"] else None
        hyper = {k: _describe(v, beside) for k, v in group.items() if k != "params"}
        groups.append({"shapes": [list(p.shape) for p in group["params"]], "hyper": hyper})
    slots = [(key, value) for key, value in _slots(optimizer) if not (rest and key.isdigit())]
    state = {key: _describe(value, params[int(key)] if key.isdigit() else None) for key, value in slots}
    return {"kind": type(optimizer).__qualname__, "groups": groups, "state": state}


def restore_optimizer(
    optimizer: Optimizer, manifest: Mapping[str, Any], *, prefix: str = "optim0", rest: bool = False
) -> None:
    """Makes the optimizer match a manifest: hyperparameters, state values, and tensors of the right type and shape.

    Tensors that are new here hold zeros until somebody fills them.

    Args:
        optimizer: Optimizer of the manifest's kind, with the same groups; its state may still be empty.
        manifest: Result of `optimizer_manifest`.
        prefix: Name of this optimizer in messages and tensor names.
        rest: Whether the state that the optimizer keeps for parameters stays as it is.
    """
    _check_groups(optimizer, manifest, prefix)
    for number, (group, wanted) in enumerate(zip(optimizer.param_groups, manifest["groups"], strict=True)):
        beside = group["params"][0] if group["params"] else None
        for key, tree in wanted["hyper"].items():
            group[key] = _rebuild(tree, group.get(key), beside, f"{prefix}.group{number}.{key}")
    params = _parameters(optimizer)
    keys: dict[str, Any] = {str(i): p for i, p in enumerate(params)}
    keys.update({f"state:{k}": k for k in optimizer.state if not isinstance(k, Tensor)})
    for key in [k for k in optimizer.state if not isinstance(k, Tensor)]:
        if f"state:{key}" not in manifest["state"]:
            del optimizer.state[key]
    for position, param in enumerate(params):
        if not rest and str(position) not in manifest["state"]:
            optimizer.state.pop(param, None)
    for key, tree in manifest["state"].items():
        target = keys.get(key, key.removeprefix("state:") if key.startswith("state:") else None)
        if target is None:
            raise StateError(f"{prefix}: the donor has state for parameter {key}, this member has {len(params)}")
        beside = target if isinstance(target, Tensor) else None
        current = optimizer.state.get(target)
        optimizer.state[target] = _rebuild(tree, current, beside, f"{prefix}.{key}")


def restore_optimizers(
    optimizers: Sequence[Optimizer], given: Sequence[Mapping[str, Any]], *, rest: bool = False
) -> None:
    """Calls `restore_optimizer` for all optimizers of a member, named optim0, optim1, ..., each with its manifest."""
    _check_count(optimizers, given)
    for number, (optimizer, manifest) in enumerate(zip(optimizers, given, strict=True)):
        restore_optimizer(optimizer, manifest, prefix=f"optim{number}", rest=rest)


# --- what an optimizer keeps for some parameters, by their names


def _kept_for(optimizer: Optimizer, parameters: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns those of the given parameters that the optimizer updates."""
    mine = {id(p) for p in _parameters(optimizer)}
    return [(name, p) for name, p in parameters if id(p) in mine]


def parameter_tensors(
    optimizers: Sequence[Optimizer], parameters: Sequence[tuple[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """Returns the optimizers' state tensors of these parameters, as `optim0.NAME.exp_avg`, in the order of the
    parameters.
    """
    return [
        leaf
        for number, optimizer in enumerate(optimizers)
        for name, p in _kept_for(optimizer, parameters)
        if p in optimizer.state
        for leaf in _leaves(optimizer.state[p], f"optim{number}.{name}")
    ]


def parameter_manifest(
    optimizers: Sequence[Optimizer], parameters: Sequence[tuple[str, Tensor]]
) -> list[dict[str, Any]]:
    """Returns, for each optimizer, its state of these parameters, with tensors described instead of copied."""
    return [
        {
            "kind": type(o).__qualname__,
            "state": {n: _describe(o.state[p], p) for n, p in _kept_for(o, parameters) if p in o.state},
        }
        for o in optimizers
    ]


def restore_parameters(
    optimizers: Sequence[Optimizer], parameters: Sequence[tuple[str, Tensor]], given: Sequence[Mapping[str, Any]]
) -> None:
    """Makes the optimizers' state of these parameters match manifests; the state of other parameters stays as it is.

    Args:
        optimizers: Optimizers of the manifests' kinds, in the same order.
        parameters: Parameters with their names.
        given: Manifests from `parameter_manifest`, one for each optimizer.

    Raises:
        StateError: The manifests do not fit the optimizers; says what.
    """
    _check_count(optimizers, given)
    for number, (optimizer, manifest) in enumerate(zip(optimizers, given, strict=True)):
        _check_kind(optimizer, manifest, f"optim{number}")
        mine = dict(_kept_for(optimizer, parameters))
        if unknown := sorted(set(manifest["state"]) - set(mine)):
            raise StateError(f"optim{number}: the donor has state for {unknown[0]!r}, which is not stepped here")
        for name, p in mine.items():
            tree = manifest["state"].get(name)
            if tree is None:
                optimizer.state.pop(p, None)
            else:
                optimizer.state[p] = _rebuild(tree, optimizer.state.get(p), p, f"optim{number}.{name}")


def _check_count(optimizers: Sequence[Optimizer], given: Sequence[Mapping[str, Any]]) -> None:
    if len(given) != len(optimizers):
        raise StateError(f"the donor has {len(given)} optimizers, this member {len(optimizers)}")


def _check_kind(optimizer: Optimizer, manifest: Mapping[str, Any], prefix: str) -> None:
    kind = type(optimizer).__qualname__
    if manifest["kind"] != kind:
        raise StateError(f"{prefix}: the donor's optimizer is {manifest['kind']}, this member's is {kind}")


def _check_groups(optimizer: Optimizer, manifest: Mapping[str, Any], prefix: str) -> None:
    _check_kind(optimizer, manifest, prefix)
    theirs = [[tuple(s) for s in g["shapes"]] for g in manifest["groups"]]
    mine = [[tuple(p.shape) for p in g["params"]] for g in optimizer.param_groups]
    if len(theirs) != len(mine):
        raise StateError(f"{prefix}: the donor's optimizer has {len(theirs)} parameter groups, this one {len(mine)}")
    for number, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            words = [list(shapes[at]) if at < len(shapes) else "no parameter" for shapes in (a, b)]
            raise StateError(
                f"{prefix}: parameter {at} of group {number} is {words[0]} at the donor and {words[1]} here"
            )


def state_tensors(
    module: nn.Module, copies: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]
) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a model, of its averaged copies (names prefixed by the copy's), and of optimizers; tied
    tensors once.
    """
    named = module_tensors(module)
    for name, copy in copies.items():
        named += module_tensors(copy, f"{name}.")
    for number, optimizer in enumerate(optimizers):
        named += optimizer_tensors(optimizer, f"optim{number}")
    return unique(named)


def rest_tensors(
    module: nn.Module, buffers: Collection[str], optimizers: Sequence[Optimizer]
) -> list[tuple[str, Tensor]]:
    """Returns the tensors that no part of the model has: buffers common to all members, and optimizer state of no
    single parameter.

    Args:
        module: The model.
        buffers: Names of the buffers that all members have.
        optimizers: Optimizers, in the same order on all members.
    """
    named = [(n, t) for n, t in module_tensors(module) if n.partition(".")[2] in buffers]
    for number, optimizer in enumerate(optimizers):
        named += optimizer_tensors(optimizer, f"optim{number}", rest=True)
    return unique(named)


# --- plain PyTorch ---------------------------------------------------------------------------------------------------


class ModuleState:
    """Access to the state of a module, its optimizers, and other objects with `state_dict` and `load_state_dict`."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        extra: Mapping[str, Stateful | nn.Module] | None = None,
        *,
        rest: Collection[str] | None = None,
    ) -> None:
        """Takes references to the parts of the training state.

        Args:
            module: The model.
            optimizers: Optimizers, in the same order on all members.
            extra: Schedulers, scalers, averaged copies of the model (an `nn.Module` here is replicated like the model).
            rest: Names of buffers that are of the rest, where members own parts of the model: this is the rest then
                (part_state.py), and the model has no copies.
        """
        self.module = module
        self.optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
        self.extra = dict(extra or {})
        self._rest = None if rest is None else frozenset(rest)
        if rest is not None and self._copies():
            raise StateError(
                f"{min(self._copies())!r} is a copy of the model, of which each member has some layers only"
            )
        for name, value in self.extra.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise StateError(f"extra state {name!r} ({type(value).__qualname__}) lacks state_dict/load_state_dict")

    def _copies(self) -> dict[str, nn.Module]:
        return {name: value for name, value in self.extra.items() if isinstance(value, nn.Module)}

    def tensors(self) -> list[tuple[str, Tensor]]:
        if self._rest is None:
            return state_tensors(self.module, self._copies(), self.optimizers)
        return rest_tensors(self.module, self._rest, self.optimizers)

    def volatile(self) -> list[str]:
        """Returns the names of tensors that a forward pass may write: a donor that trains on must publish copies of
        these.
        """
        modules = {"": self.module, **{f"{name}.": copy for name, copy in self._copies().items()}}
        buffers = {f"{prefix}buffer.{name}" for prefix, module in modules.items() for name, _ in module.named_buffers()}
        return [name for name, _ in self.tensors() if name in buffers]

    def manifest(self) -> dict[str, object]:
        modules = {"": self.module, **self._copies()}
        return {
            "optimizers": [optimizer_manifest(o, rest=self._rest is not None) for o in self.optimizers],
            "extra": {n: v.state_dict() for n, v in self.extra.items() if not isinstance(v, nn.Module)},
            "modules": {name: module_extra(module) for name, module in modules.items()},
        }

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        self._restore(manifest["optimizers"])

    def _restore(self, given: Sequence[Mapping[str, Any]]) -> None:
        restore_optimizers(self.optimizers, given, rest=self._rest is not None)

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        self._restore(manifest["optimizers"])
        for name, state in manifest["extra"].items():
            target = self.extra.get(name)
            if target is None:
                raise StateError(f"the donor has extra state {name!r}, this member has {sorted(self.extra)}")
            target.load_state_dict(state)
        for name, extra in manifest["modules"].items():
            module = self.extra.get(name) if name else self.module
            if not isinstance(module, nn.Module):
                raise StateError(f"the donor has a module {name!r} in its extra state, this member has not")
            restore_module_extra(module, extra)


def unique(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns the named tensors without repetitions, so that tied tensors are sent once."""
    seen: set[int] = set()
    kept = []
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept.append((name, tensor))
    return kept
