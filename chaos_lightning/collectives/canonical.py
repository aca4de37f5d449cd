"""Converts configuration values to canonical texts, by which members compare their settings.

Theory of operation. Mappings, dataclasses and plain objects are taken apart, so that a refusal names the value that
differs, such as "model.layers.0". Short values are shown as they are, long ones and arrays by a hash. Numbers of any
kind are equal where their values are, tuples and lists where their items are, mappings and sets in any order. Functions
and classes have their full names. What has no such form (a lambda, a handle of the system) is kept by name, for a
warning: it is not compared. Left out is what may differ between machines by intent: see `Words`.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import functools
import hashlib
import numbers
import re
import sys
import types
import uuid
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SHOWN = 120
"""Largest number of characters of a value that is shown as it is."""
NAMED = 256
"""Number of values that have entries of their own; one hash holds those beyond."""
_MOST = 100_000
"""Number of values that are looked at; an object that holds more is not compared."""
_MACHINES = re.compile(
    r"(.*_)?batch_size|(.*_)?workers|pin_memory|prefetch_factor|devices?|accelerator|((local|global|node)_)?rank|"
    r"host(name)?|node(_name)?|port|endpoints?"
)
"""Names of values that are each machine's own affair."""
_SECTIONS = frozenset(("strategy", "logger", "loggers", "paths", "hydra"))
"""Names of mappings that configure a machine, as in a Hydra configuration; what members must have in common of a
strategy, they compare by themselves."""
_PLACES = re.compile(r"(.*_)?([a-z]*(dir|path|folder)|root|file(name)?)s?")
"""Names of texts that say where something lies on a machine. A number by such a name (`drop_path`) is compared."""
_PATH = re.compile(r"[/~]|\.{0,2}[/\\]|[A-Za-z]:[/\\]|file:")
"""Beginning of a text that is a path of this machine; `org/model` is a name."""
_PLAIN = re.compile(r"(?!(?:None|True|False|nan|inf)$)[A-Za-z_/.][^\n]*")
"""Text that cannot be taken for another kind of value."""
_BY_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, torch.dtype, range, slice)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, np.ufunc)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_WHOLE = (
    *(type, str, bytes, bytearray, Tensor, torch.device, torch.Generator, np.ndarray, np.generic, numbers.Number),
    *(PurePath, enum.Enum, functools.partial, Sequence, Set, nn.Module, *_BY_TEXT, *_FUNCTIONS),
)
"""Types of values that are not taken apart."""


_COMPILED = "_orig_mod"
"""Name by which torch.compile calls a module within its own."""


class _NoForm(Exception):
    """Error that a value has no canonical text."""


class Words:
    """Canonical texts of a collection of values, each with a kind and a name.

    Left out are values that are a machine's own: by their name (batch sizes, workers, devices, hosts), because they are
    paths, or because the user says so.

    Args:
        own: Names, with dots for nested ones, that the user says may differ.
        of_machines: Whether names tell that a value is a machine's own.

    Attributes:
        formless: Reasons why values have no canonical form and are not compared, such as a type's name, by the value's
            kind and name.
    """

    def __init__(self, own: Collection[str] = (), *, of_machines: bool = True) -> None:
        self._own = frozenset(own)
        self._of_machines = of_machines
        self._looked_at = 0
        self._found: dict[str, str] = {}
        self.formless: dict[str, str] = {}

    def add(self, kind: str, name: str, value: Any) -> None:
        """Adds the canonical text of a value, or of all values that it contains."""
        try:
            self._add(kind, name, value, frozenset())
        except RecursionError:
            self.formless[f"{kind} {name}"] = "values nested too deeply"

    @property
    def words(self) -> dict[str, str]:
        """Canonical texts by kind and name; those beyond a limit are replaced by one hash."""
        ordered = sorted(self._found.items())
        if len(ordered) <= NAMED:
            return dict(ordered)
        return {**dict(ordered[:NAMED]), f"all after {ordered[NAMED - 1][0]}": digest(repr(ordered[NAMED:]))}

    def _add(self, kind: str, name: str, value: Any, inside: frozenset[int]) -> None:
        if value is None or name in self._own or (self._of_machines and _is_machines(name, value)):
            return
        self._looked_at += 1
        fields = _fields(value) if self._looked_at <= _MOST else None
        if fields and id(value) not in inside:
            if not isinstance(value, Mapping):
                self._found[f"{kind} {name}"] = type(value).__name__
            for key, each in fields:
                self._add(kind, f"{name}.{key}", each, inside | {id(value)})
            return
        try:
            text = _Text(self._of_machines).of(value)
        except _NoForm as why:
            self.formless[f"{kind} {name}"] = str(why)
            return
        self._found[f"{kind} {name}"] = text if len(text) <= SHOWN else f"{_kind_of(value)} {digest(text)}"


def digest(text: str | bytes) -> str:
    """Returns a hash of a text or of bytes, 16 hex digits."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=8).hexdigest()


def _is_machines(name: str, value: Any) -> bool:
    last = name.rpartition(".")[2]
    if _MACHINES.fullmatch(last) or (last in _SECTIONS and _fields(value) is not None):
        return True
    if isinstance(value, str) and _PATH.match(value):
        return True
    return isinstance(value, PurePath | torch.device) or (bool(_PLACES.fullmatch(last)) and _is_text(value))


def _is_text(value: Any) -> bool:
    """Returns whether a value is a text or path, or a list of such."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_text, value))
    return isinstance(value, str | PurePath)


def _kind_of(value: Any) -> str:
    if isinstance(value, list | tuple | Set):
        return f"{len(value)} values"
    return "a text" if isinstance(value, str) else type(value).__name__


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the named values inside a value, sorted by name; None for a value that is compared as a whole."""
    if isinstance(value, Mapping):
        return sorted(((str(key), _item(value, key)) for key in value), key=lambda item: item[0])
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, _WHOLE) or (library in sys.stdlib_module_names and type(value) not in _NAMESPACES):
        return None
    named = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        named |= {n: getattr(value, n) for n in ([slots] if isinstance(slots, str) else slots) if hasattr(value, n)}
    return sorted((name, each) for name, each in named.items() if not name.startswith("_"))


def _item(several: Any, key: Any) -> Any:
    """Returns an item of a mapping or sequence, or a stand-in if reading it fails, as in a configuration with missing
    values.
    """
    try:
        return several[key]
    except Exception:  # of any library's
        return Ellipsis


class _Text:
    """Converter of one value to its canonical text."""

    def __init__(self, of_machines: bool) -> None:
        self._of_machines = of_machines
        self._count = 0
        self._inside: set[int] = set()

    def of(self, value: Any) -> str:
        """Returns the canonical text of a value.

        Raises:
            _NoForm: There is no canonical text; says what the value is.
        """
        self._count += 1
        if self._count > _MOST:
            raise _NoForm(f"more than {_MOST} values")
        if isinstance(value, enum.Enum):
            return self.of(value.value) if isinstance(value, str | int | float) else str(value)
        if value is None or isinstance(value, bool | np.bool_):
            return str(value)
        if isinstance(value, str):
            return "a path" if _PATH.match(value) else str(value) if _PLAIN.fullmatch(value) else repr(str(value))
        if isinstance(value, numbers.Number):
            return _number(value)
        return self._container(value)

    def _container(self, value: Any) -> str:
        if isinstance(value, Tensor | np.ndarray):
            return self._array(value)
        if isinstance(value, bytes | bytearray):
            return f"{len(value)} bytes {digest(bytes(value))}"
        if isinstance(value, PurePath | torch.device):
            return "a path" if isinstance(value, PurePath) else "a device"
        if isinstance(value, _BY_TEXT):
            return str(value)
        if isinstance(value, (type, *_FUNCTIONS)):
            return _name_of(value)
        if id(value) in self._inside:
            raise _NoForm(f"a {type(value).__name__} that holds itself")
        self._inside.add(id(value))
        try:
            return self._items(value)
        finally:
            self._inside.discard(id(value))

    def _items(self, value: Any) -> str:
        if isinstance(value, functools.partial):
            return f"{self.of(value.func)}{self.of(value.args)}{self.of(value.keywords)}"
        if isinstance(value, Set):
            return f"{{{', '.join(sorted(map(self._quoted, value)))}}}"
        if isinstance(value, Sequence):
            return f"({', '.join(self._quoted(_item(value, at)) for at in range(len(value)))})"
        if isinstance(value, nn.Module):
            return f"{type(value).__name__}{self.of([(n, *layer) for n, layer in layers(value)])}"
        fields = _fields(value)
        if fields is None or (not fields and not isinstance(value, Mapping)):
            raise _NoForm("it cannot be read" if value is Ellipsis else type(value).__name__)
        name = "" if isinstance(value, Mapping) else type(value).__name__
        mine = [(k, v) for k, v in fields if not (self._of_machines and _is_machines(k, v))]
        return f"{name}{{{', '.join(f'{k!r}: {self._quoted(v)}' for k, v in mine)}}}"

    def _quoted(self, value: Any) -> str:
        """Returns the canonical text of a nested value; quotes a string, so that it is clear where it ends."""
        text = self.of(value)
        return repr(text) if isinstance(value, str) and text != "a path" else text

    def _array(self, value: Tensor | np.ndarray[Any, Any]) -> str:
        if isinstance(value, Tensor):
            if value.numel() == 1 and not value.is_meta:
                return self.of(value.item())
            try:
                data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            except (RuntimeError, NotImplementedError, TypeError) as error:
                raise _NoForm(f"a tensor of {value.dtype}") from error
            return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)} {digest(data)}"
        if value.dtype.hasobject:
            return self.of(value.tolist())
        return self.of(value.item()) if value.size == 1 else f"{value.dtype}{value.shape} {digest(value.tobytes())}"


def _number(value: Any) -> str:
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    return str(value)


def _name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", "") or value.__name__
    if "<" in name:  # of a lambda, or of a function within a function, whose variables are unknown
        raise _NoForm("a function without a name of its own")
    module = getattr(value, "__module__", None)
    return name if module in (None, "builtins", "__main__") else f"{module}.{name}"


# --- layers -----------------------------------------------------------------------------------------------------------


def layers(module: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields each submodule that has settings: its name, its type and its `extra_repr`.

    Layers of torch's that tell nothing there have their plain attributes instead, such as an attention's dropout.
    """
    for name, child in module.named_modules():
        text = child.extra_repr()
        if not text and type(child).__module__.startswith("torch.nn.modules."):
            plain = {k: v for k, v in vars(child).items() if isinstance(v, bool | int | float | str)}
            text = ", ".join(f"{k}={v}" for k, v in sorted(plain.items()) if k[0] != "_" and k != "training")
        if text:
            yield name, (type(child).__name__, text)


def layer_words(module: nn.Module, own: Collection[str] = ()) -> Words:
    """Returns the settings of all layers as canonical texts, except those that show a memory address or a tensor."""
    words = Words(own, of_machines=False)
    for name, (kind, text) in layers(module):
        name = plain_name(name) or "itself"
        if " at 0x" in text or "tensor(" in text:
            words.formless[f"layer {name}"] = f"a {kind} that shows what it holds"
        else:
            words.add("layer", name, f"{kind}({text})")
    return words


def plain_name(name: str) -> str:
    """Removes from a parameter's or layer's name what torch.compile adds to it."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def compiled_words(module: nn.Module) -> dict[str, str]:
    """Returns a text that names the compiled parts of a model, since compiling changes the names in its state."""
    found = [plain_name(name) or "all of it" for name, child in module.named_modules() if hasattr(child, _COMPILED)]
    return {"compiled": ", ".join(found) or "nothing"}


def run_words(
    model: nn.Module, settings: Mapping[str, Mapping[str, Any]], own: Collection[str] = (), *, warns: bool = True
) -> dict[str, str]:
    """Returns texts that distinguish runs with the same script, port and job name, as in a sweep.

    Args:
        model: Model, whose layers' settings count, and whether it is compiled.
        settings: Hyperparameters, by kind.
        own: Names of hyperparameters and layers that may differ between machines.
        warns: Whether to warn, by name, of values that are not compared.
    """
    hyper, found = Words(own), layer_words(model, own)
    for kind, values in settings.items():
        for name, value in values.items():
            hyper.add(kind, name, value)
    if warns and (formless := {**hyper.formless, **found.formless}):
        listed = "; ".join(f"{name} ({why})" for name, why in sorted(formless.items()))
        warnings.warn(
            f"members do not compare what has no canonical form: {listed}. Two runs that differ in nothing else would "
            "meet in one job: keep what matters as numbers or texts, or leave it out by chaos_own_hparams",
            stacklevel=3,
        )
    return {**hyper.words, **found.words, **compiled_words(model)}
