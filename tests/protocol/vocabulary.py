"""Hypothesis strategies for all messages, and an independent comparison of the proto file with the dataclasses."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any

from hypothesis import strategies as st

from chaos_lightning.protocol import packing
from chaos_lightning.protocol import types as vocabulary
from chaos_lightning.protocol.limits import range_of
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import Member, View

_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
_SPANS = st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 20)).map(lambda s: (s[0], s[0] + s[1]))
_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: _TEXT,
    bytes: st.binary(max_size=12),
    tuple[int, int]: _SPANS,
    tuple[str, str]: st.tuples(_TEXT, _TEXT),
}


_PARTS = st.sets(st.integers(0, vocabulary.MAX_PARTS - 1), max_size=9).map(lambda n: union((i, i + 1) for i in n))


@functools.cache
def values(hint: Any) -> st.SearchStrategy[Any]:
    """Returns a strategy for values of a type that appears in protocol/types.py."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return st.one_of(*(st.none() if a is type(None) else values(a) for a in arguments))
    if typing.get_origin(hint) is tuple:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    hints = typing.get_type_hints(hint)
    parts = {f.name: values(hints[f.name]) for f in dataclasses.fields(hint)}
    kinds = {int: st.integers, float: st.floats}
    ranges = {name: range_of(hint.__name__, name) for name in parts if hints[name] in kinds}
    parts |= {name: kinds[hints[name]](*limits) for name, limits in ranges.items() if limits is not None}
    parts |= {name: _PARTS for name in ("parts", "owns") if name in parts}
    if hint is View:
        return _views(parts)
    if hint is vocabulary.Header:
        shares = st.lists(st.tuples(_SIMPLE[float], _SIMPLE[float]), max_size=4)
        parts["shares"] = shares.map(vocabulary.equal_shares)
    return st.builds(hint, **parts)


def _views(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Returns a strategy for views whose members have distinct ids; their links and trees name members or anything
    else.
    """
    all_named = st.lists(values(Member), max_size=5, unique_by=lambda m: m.id)
    all_named = all_named.filter(lambda found: all(m.id for m in found))

    def view(named: tuple[list[Member], dict[str, Any]]) -> View:
        found, rest = named
        return View(**rest | {"members": tuple(found[:3]), "leaving": tuple(found[3:])})

    return st.tuples(all_named, st.fixed_dictionaries(fields)).map(view)


PACKED = [packing.PackedMembers, packing.PackedTree, packing.PackedView, packing.PackedChange]
"""Forms in which views travel."""


def messages() -> list[type]:
    """Returns all dataclasses in protocol/types.py except Settings, which is never sent."""
    return [
        cls
        for cls in vars(vocabulary).values()
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls is not vocabulary.Settings
    ]
