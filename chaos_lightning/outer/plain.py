"""Dataclasses as values that JSON has, and back: for the chain's summary, which one text holds (O1a).

Theory of operation. What a value becomes goes by its type's hint alone, so nothing names its own type but the parts of
a union of dataclasses. A dataclass is the list of its fields, in their order; a dictionary the list of its pairs, in
the order of their keys: equal values become equal texts.
"""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


@functools.cache
def _fields(cls: type) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    return [(each.name, hints[each.name]) for each in fields(cls)]


def _choices(hint: Any) -> Mapping[str, Any]:
    """The dataclasses of a union, by name; empty if it is none."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return {}
    return {one.__name__: one for one in typing.get_args(hint) if one is not types.NoneType}


def plain(hint: Any, value: Any) -> Any:
    """What JSON has of this value.

    Args:
        hint: Its type: a dataclass, a union of dataclasses and None, an enum, a tuple of one type or of several, a
            dictionary, or a scalar.
        value: Of that type.
    """
    if value is None:
        return None
    if choices := _choices(hint):
        name = type(value).__name__
        return [name, plain(choices[name], value)]
    if is_dataclass(hint):
        return [plain(kind, getattr(value, name)) for name, kind in _fields(hint)]  # type: ignore[arg-type]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return [[plain(inner[0], key), plain(inner[1], value[key])] for key in sorted(value)]
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return [plain(kind, each) for kind, each in zip(kinds, value, strict=True)]
    return value.value if isinstance(value, enum.Enum) else value


def built(hint: Any, given: Any) -> Any:
    """The value of this type that `plain` made this of.

    Raises:
        ValueError, TypeError, KeyError: It did not.
    """
    if given is None:
        return None
    if choices := _choices(hint):
        name, parts = given
        return built(choices[name], parts)
    if is_dataclass(hint):
        pairs = zip(_fields(hint), given, strict=True)  # type: ignore[arg-type]
        return hint(**{name: built(kind, each) for (name, kind), each in pairs})  # type: ignore[operator]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return {built(inner[0], key): built(inner[1], each) for key, each in given}
    if origin is tuple:
        kinds = inner[:1] * len(given) if inner[-1] is Ellipsis else inner
        return tuple(built(kind, each) for kind, each in zip(kinds, given, strict=True))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(given)
    if type(given) is not hint:
        raise TypeError(f"expected {hint}, got {given!r}")
    return given
