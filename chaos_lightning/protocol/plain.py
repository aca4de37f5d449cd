"""Converts dataclasses to text and back, for stores and messages that have no .proto of their own.

Theory of operation. What a value becomes goes by its type's hint alone, so nothing names its own type but the parts of
a union of dataclasses. A dataclass is the list of its fields, in their order; a dictionary the list of its pairs, in
the order of their keys: equal values become equal texts. What is read is of its hint's type in every part.
"""

from __future__ import annotations

import base64
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.types import Span

T = TypeVar("T")


@functools.cache
def _fields(cls: type) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    return [(each.name, hints[each.name]) for each in fields(cls)]


@functools.cache
def _choices(hint: Any) -> Mapping[str, Any]:
    """Returns the members of a union type by name; none if the type is no union."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return {}
    return {one.__name__: one for one in typing.get_args(hint)}


def plain(hint: Any, value: Any) -> Any:
    """Converts a value of a known type into plain JSON values.

    Args:
        hint: Type of the value: a dataclass, a union of dataclasses and None, an enum, a tuple of one type or of
            several, a list, a dictionary, or a scalar.
        value: Value of that type.
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
    if origin in (tuple, list):
        return [plain(kind, each) for kind, each in zip(_kinds(hint, value), value, strict=True)]
    if hint is bytes:
        return base64.b64encode(value).decode()
    return value.value if isinstance(value, enum.Enum) else value


def _kinds(hint: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the type of each item of a tuple or list."""
    inner = typing.get_args(hint)
    return inner[:1] * len(values) if inner[-1] is Ellipsis or typing.get_origin(hint) is list else inner


def built(hint: Any, given: Any) -> Any:
    """Converts plain JSON values, as `plain` made them, back into a value of this type.

    Raises:
        ValueError, TypeError, KeyError: It did not.
    """
    origin, choices = typing.get_origin(hint), _choices(hint)
    if given is None and "NoneType" in choices:
        return None
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(given)
    if not (choices or origin or is_dataclass(hint)):
        return _scalar(hint, given)
    if type(given) is not list:
        raise TypeError(f"expected {hint}, got {given!r:.40}")
    if choices:
        name, parts = given
        return built(choices[name], parts)
    if is_dataclass(hint):
        pairs = zip(_fields(hint), given, strict=True)  # type: ignore[arg-type]
        return hint(**{name: built(kind, each) for (name, kind), each in pairs})  # type: ignore[operator]
    if origin is dict:
        key_kind, kind = typing.get_args(hint)
        return {built(key_kind, key): built(kind, each) for key, each in given}
    found = origin(built(kind, each) for kind, each in zip(_kinds(hint, given), given, strict=True))
    if hint == Span and not 0 <= found[0] <= found[1]:
        raise ValueError(f"interval {found} is none")
    return found


def _scalar(hint: Any, given: Any) -> Any:
    if hint is bytes:
        return base64.b64decode(given, validate=True)
    fits = type(given) is hint and (hint is not float or math.isfinite(given))
    if not fits or (hint is int and not -(1 << 63) <= given < 1 << 63):
        raise TypeError(f"expected {hint}, got {given!r:.40}")
    if hint is str:
        given.encode()  # half a character is none
    return given


def text_of(hint: Any, value: Any) -> bytes:
    """Converts a value of this type into text; equal values give equal bytes."""
    return json.dumps(plain(hint, value), separators=(",", ":"), allow_nan=False).encode()


def read_text(hint: type[T], data: bytes) -> T:
    """Returns the value from the text that `text_of` returned for the same type, which may be a union.

    Raises:
        WireError: The text is malformed.
    """
    try:
        found: T = built(hint, json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(
            f"{len(data)} bytes that should be a {getattr(hint, '__name__', hint)} are malformed: {error!r}"
        ) from error
    return found
