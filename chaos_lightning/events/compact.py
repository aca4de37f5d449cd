"""Lines of the log that repeat themselves: only what differs from what the line before led to expect.

Theory of operation. Nearly all of a log are `committed` lines, and of such a line little is news: the slot is the next
one, on the header before, by the same contributors, and of the ledger one number grew. So of the names in `EXPECTED` a
file holds a whole line first and after every `WHOLE_EVERY` lines; those between are short. A short line has no
`member`; what it has is put into what was expected after the line of its name before it, which is `committed` if it
does not say:

    {"n":58,"t":12.5,"header":"d6c4...","spent.0.spans.0":[1936,2000],"ledger.0.spans.0.1":2000,"duration_s":0.05}

A key with dots is a path into lists and objects, `-` names the fields that the line before had and this one has not,
and `mono` is left out where both clocks went on alike. Writer and reader take the same line for the one before, because
lines are numbered (`n`): where a number is missing the reader knows it, and waits for the next whole line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

WHOLE_EVERY = 100
"""After so many short lines comes a whole one: no more is unreadable when one is lost."""

COMMITTED = "committed"

Line = dict[str, Any]
"""A line of the log as JSON has it."""


def _next_commit(before: Line) -> Line:
    """The next slot, committed under the view that this one announced."""
    step = before["step"] + (before["kind"] == "step")
    return before | {
        "seq": before["seq"] + 1, "step": step, "prev": before["header"], "view": before["next_view"]
    }  # fmt: skip


EXPECTED: Mapping[str, Callable[[Line], Line]] = {
    COMMITTED: _next_commit,
    "links": dict,
    "state_hash": dict,
}
"""Name of the lines that are shortened -> what the next one would be, from the one before."""


def shorten(line: Line, before: Line) -> Line | None:
    """The short form of a line after one of the same name; None if it has none.

    Args:
        line: A whole line, of values as JSON gives them.
        before: The whole line before it, likewise.
    """
    try:
        whole = EXPECTED[line["name"]](before)
    except (KeyError, TypeError):  # an odd line was emitted under this name
        return None
    whole |= {"mono": _mono(line["t"], before)}
    short: Line = {"t": line["t"]} if line["name"] == COMMITTED else {"t": line["t"], "name": line["name"]}
    if gone := [key for key in whole if key not in line]:
        short["-"] = gone
    for key, value in line.items():
        if "." in key or key in ("-", "n"):
            return None
        if key not in whole:
            short[key] = value
        elif key not in short:
            short |= _differences(key, whole[key], value)
    return None if "member" in short else short


def restore(short: Line, before: Line) -> Line:
    """The whole line.

    Raises:
        ValueError, KeyError, IndexError, TypeError: It does not follow the line before, or is damaged.
    """
    whole = EXPECTED[short.get("name", COMMITTED)](before)
    whole |= {"mono": _mono(short["t"], before)}
    for key in short.get("-", ()):
        del whole[key]
    for path, value in short.items():
        if path != "-":
            whole = _put(whole, path.split("."), value)
    return whole


def _mono(t: float, before: Line) -> float:
    """The monotonic clock at wall time t, s, if both went on alike since the line before."""
    return (round(t * 1e6) - round(float(before["t"]) * 1e6) + round(float(before["mono"]) * 1e6)) / 1e6


def _differences(path: str, old: object, new: object) -> Iterator[tuple[str, object]]:
    """(path, value) of whatever is another one."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys() and not any("." in k for k in new):
        for key, value in new.items():
            yield from _differences(f"{path}.{key}", old[key], value)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and not _all_news(old, new):
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}.{at}", one, other)
    elif type(old) is not type(new) or old != new:
        yield path, new


def _all_news(old: list[object], new: list[object]) -> bool:
    """A list such as [1936, 2000], of which nothing stays: it is shorter than a path for each number."""
    return not any(isinstance(x, (dict, list)) for x in new) and all(a != b for a, b in zip(old, new, strict=True))


def _put(value: Any, path: list[str], new: object) -> Any:
    """A copy of a value with another one at this path; what is not on the path is shared."""
    if not path:
        return new
    first, rest = path[0], path[1:]
    if isinstance(value, list):
        at = int(first)
        return [*value[:at], _put(value[at], rest, new), *value[at + 1 :]]
    if rest:
        return {**value, first: _put(value[first], rest, new)}
    return {**value, first: new}
