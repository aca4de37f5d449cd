"""Event fields as values: what a JSON line lost of its types, put back in one place.

Theory of operation. Writers hand dataclasses, tuples and ids to `EventLog.emit`; a line holds objects, lists and
strings. Each function here takes what a line holds and gives the value the folds work with, in the forms that writers
may use (a share as `[id, weight]` or as an object), and an empty value for what is missing: a fold over evidence
never raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chaos_lightning.events.spans import Spans

Stream = tuple[str, int]
"""(stream, epoch): one order of samples in one pass over it."""


def number(value: Any, default: float = 0.0) -> float:
    """A float; `default` for None and for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


def integer(value: Any, default: int = 0) -> int:
    """An int; `default` for None and for what is none."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


def ids(value: Any) -> tuple[str, ...]:
    """Member ids from a list of ids, of members as objects, or of `[id, ...]` rows."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    found: list[str] = []
    for item in value:
        if isinstance(item, Mapping):
            found.append(str(item.get("id", item.get("member", ""))))
        elif isinstance(item, Sequence) and not isinstance(item, str):
            found.append(str(item[0]) if item else "")
        else:
            found.append(str(item))
    return tuple(found)


def shares(value: Any) -> tuple[tuple[str, float], ...]:
    """Contributors as (member id, weight)."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    found: list[tuple[str, float]] = []
    for item in value:
        if isinstance(item, Mapping):
            found.append((str(item.get("member", "")), number(item.get("weight"))))
        elif isinstance(item, Sequence) and not isinstance(item, str):
            found.append((str(item[0]) if item else "", number(item[1]) if len(item) > 1 else 0.0))
        else:
            found.append((str(item), 0.0))
    return tuple(found)


def spans(value: Any) -> Spans:
    """Half-open intervals from a list of pairs."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    return tuple(
        (integer(pair[0]), integer(pair[1])) for pair in value if isinstance(pair, Sequence) and len(pair) == 2
    )


def spent(value: Any) -> dict[Stream, Spans]:
    """Spent positions by (stream, epoch), from a ledger or from a list of spent entries."""
    if isinstance(value, Mapping):
        value = value.get("streams", [value])
    if not isinstance(value, Sequence) or isinstance(value, str):
        return {}
    found: dict[Stream, Spans] = {}
    for item in value:
        if isinstance(item, Mapping):
            key = (str(item.get("stream", "")), integer(item.get("epoch")))
            found[key] = found.get(key, ()) + spans(item.get("spans"))
        elif isinstance(item, Sequence) and len(item) == 3:
            key = (str(item[0]), integer(item[1]))
            found[key] = found.get(key, ()) + spans(item[2])
    return found


def amounts(value: Any) -> tuple[tuple[str, int], ...]:
    """(name, bytes) from an object of bytes by name, most bytes first."""
    found = [(str(k), integer(v)) for k, v in value.items()] if isinstance(value, Mapping) else []
    return tuple(sorted(found, key=lambda x: (-x[1], x[0])))


def view_number(value: Any) -> tuple[int, int]:
    """(term, number) of a view, from "term.number", an object or a pair; (0, 0) for none."""
    if isinstance(value, Mapping):
        return integer(value.get("term")), integer(value.get("number"))
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        return integer(value[0]), integer(value[1])
    term, _, count = str(value or "").partition(".")
    return integer(term), integer(count)


def view_name(value: Any) -> str:
    """A view's id as "term.number"; empty for none."""
    term, count = view_number(value)
    return f"{term}.{count}" if (term, count) != (0, 0) else ""


def nbytes(fields: Mapping[str, Any]) -> int:
    """Bytes of a transfer, under either of the names in use."""
    return integer(fields.get("nbytes", fields.get("bytes")))


def node_of(member: str) -> str:
    """The name in a member id `name~incarnation`."""
    return member.rpartition("~")[0] or member
