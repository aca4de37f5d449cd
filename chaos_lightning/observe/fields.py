"""Reads event fields as typed values, because JSON keeps no tuples, view numbers or spans.

Theory of operation. Writers hand dataclasses, tuples and ids to `EventLog.emit`; a line holds objects, lists and
strings. Each function here takes what a line holds and gives the value the folds work with, and an empty value for
what is missing or of another form: a fold over evidence never raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chaos_lightning.errors import PlanError
from chaos_lightning.observe.spans import Spans
from chaos_lightning.planning.batch import Split, read_split

Stream = tuple[str, int]
"""Order of samples in one pass over it: (stream, epoch)."""


def number(value: Any, default: float = 0.0) -> float:
    """Returns a field as a float; `default` if it is None or not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


def integer(value: Any, default: int = 0) -> int:
    """Returns a field as an int; `default` if it is None or not a number."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return default


def rows(value: Any) -> Sequence[Any]:
    """Returns a field that is a list; an empty list for any other value."""
    return value if isinstance(value, (list, tuple)) else ()


def ids(value: Any) -> tuple[str, ...]:
    """Returns a field as a tuple of member ids."""
    return tuple(str(item) for item in rows(value))


def shares(value: Any) -> tuple[tuple[str, float], ...]:
    """Returns a list of contributors as (member id, weight) pairs."""
    return tuple((str(row[0]), number(row[1])) for row in rows(value) if len(rows(row)) == 2)


def spent(value: Any) -> dict[Stream, Spans]:
    """Returns the used sample positions by (stream, epoch)."""
    found: dict[Stream, Spans] = {}
    for item in rows(value):
        if isinstance(item, Mapping):
            key = (str(item.get("stream", "")), integer(item.get("epoch")))
            pairs = [pair for pair in rows(item.get("spans")) if len(rows(pair)) == 2]
            found[key] = found.get(key, ()) + tuple((integer(a), integer(b)) for a, b in pairs)
    return found


def amounts(value: Any) -> tuple[tuple[str, int], ...]:
    """Returns (name, bytes) pairs from an object that maps names to bytes, most bytes first."""
    found = [(str(k), integer(v)) for k, v in value.items()] if isinstance(value, Mapping) else []
    return tuple(sorted(found, key=lambda x: (-x[1], x[0])))


def spans(value: Any) -> Spans:
    """Returns half-open intervals from a list of pairs."""
    return tuple((integer(pair[0]), integer(pair[1])) for pair in rows(value) if len(rows(pair)) == 2)


def coverage(value: Any) -> tuple[tuple[int, int, Spans], ...]:
    """Returns each row as (first layer, layer after the last one, micro-batches summed in these layers)."""
    return tuple((integer(row[0]), integer(row[1]), spans(row[2])) for row in rows(value) if len(rows(row)) == 3)


def split(value: Any, members: int) -> Split | None:
    """Returns the division of a batch of fixed size among so many members; None if there is none."""
    try:
        return read_split(str(value or ""), members)
    except PlanError:
        return None


def view_number(value: Any) -> tuple[int, int]:
    """Returns a view's id "term.number" as (term, number); (0, 0) if there is none."""
    term, _, count = str(value or "").partition(".")
    return integer(term), integer(count)


def view_name(value: Any) -> str:
    """Returns a view's id as the text "term.number"; "" if there is none."""
    term, count = view_number(value)
    return f"{term}.{count}" if (term, count) != (0, 0) else ""


def node_of(member: str) -> str:
    """Returns the node's name in a member id `name~incarnation`."""
    return member.rpartition("~")[0] or member
