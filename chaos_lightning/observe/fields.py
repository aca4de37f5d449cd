"""Reads event fields as values: restores in one place the types that a JSON line lost.

Theory of operation. Writers hand dataclasses, tuples and ids to `EventLog.emit`; a line holds objects, lists and
strings. Each function here takes what a line holds and gives the value the folds work with, and an empty value for
what is missing or of another form: a fold over evidence never raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chaos_lightning.observe.spans import Spans

Stream = tuple[str, int]
"""Order of samples in one pass over it: (stream, epoch)."""


def number(value: Any, default: float = 0.0) -> float:
    """Returns a float; `default` for None and for anything that is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


def integer(value: Any, default: int = 0) -> int:
    """Returns an int; `default` for None and for anything that is no number."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return default


def rows(value: Any) -> Sequence[Any]:
    """Returns a list; empty for anything that is none."""
    return value if isinstance(value, (list, tuple)) else ()


def ids(value: Any) -> tuple[str, ...]:
    """Returns member ids."""
    return tuple(str(item) for item in rows(value))


def shares(value: Any) -> tuple[tuple[str, float], ...]:
    """Returns contributors as (member id, weight)."""
    return tuple((str(row[0]), number(row[1])) for row in rows(value) if len(rows(row)) == 2)


def spent(value: Any) -> dict[Stream, Spans]:
    """Returns spent positions by (stream, epoch)."""
    found: dict[Stream, Spans] = {}
    for item in rows(value):
        if isinstance(item, Mapping):
            key = (str(item.get("stream", "")), integer(item.get("epoch")))
            pairs = [pair for pair in rows(item.get("spans")) if len(rows(pair)) == 2]
            found[key] = found.get(key, ()) + tuple((integer(a), integer(b)) for a, b in pairs)
    return found


def amounts(value: Any) -> tuple[tuple[str, int], ...]:
    """Returns (name, bytes) from an object of bytes by name, most bytes first."""
    found = [(str(k), integer(v)) for k, v in value.items()] if isinstance(value, Mapping) else []
    return tuple(sorted(found, key=lambda x: (-x[1], x[0])))


def spans(value: Any) -> Spans:
    """Returns spans from a list of pairs."""
    return tuple((integer(pair[0]), integer(pair[1])) for pair in rows(value) if len(rows(pair)) == 2)


def coverage(value: Any) -> tuple[tuple[int, int, Spans], ...]:
    """Returns (first layer, layer behind the last one, micro-batches) of each row."""
    return tuple((integer(row[0]), integer(row[1]), spans(row[2])) for row in rows(value) if len(rows(row)) == 3)


def view_number(value: Any) -> tuple[int, int]:
    """Returns (term, number) of a view, from "term.number"; (0, 0) for none."""
    term, _, count = str(value or "").partition(".")
    return integer(term), integer(count)


def view_name(value: Any) -> str:
    """Returns a view's id as "term.number"; empty for none."""
    term, count = view_number(value)
    return f"{term}.{count}" if (term, count) != (0, 0) else ""


def node_of(member: str) -> str:
    """Returns the node's name in a member id `name~incarnation`."""
    return member.rpartition("~")[0] or member
