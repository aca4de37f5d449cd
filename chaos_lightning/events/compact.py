"""Shortens repetitive lines of the event log: stores only what differs from a prediction made from earlier lines.

Theory of operation. Nearly all of a log are `committed` lines, and of such a line little is news: the slot is the next
one, on the header before, by the same contributors, and of the ledger one number grew. So of the names in `SHORTENED` a
file holds a whole line first and again after `WHOLE_EVERY` lines; those between are short. A short line has no
`member`; what it has is put into what was expected after the line of its name before it; its name is `committed` if it
does not say.

    {"n":58,"t":12.5,"header":"d6c4...","spent.0.spans.0":[1936,2000],"ledger.0.spans.0.1":2000,"duration_s":0.05}

Of views with more than MOST_WHOLE members, too, only what differs is written. A long list that has lost or gained a few
items is told by edits, under its path behind `~`: `"~members":[[500,501,[]]]` takes item 500 out.

A key with dots is a path into lists and objects, `-` names the fields that the line before had and this one has not,
and `mono` is left out where both clocks went on alike. Writer and reader take the same line for the one before, because
lines are numbered (`n`): where a number is missing the reader knows it, and waits for the next whole line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WHOLE_EVERY = 100
"""Number of lines after which a whole one comes: no more are unreadable when one is lost."""

MOST_WHOLE = 16
"""Number of members up to which views are written whole, for people who read the file itself."""
_LOOK_AHEAD = 32
"""Number of items, one after the other, that an edit of a list may take out or put in."""

COMMITTED = "committed"
_OF_ITS_KIND = ("contributors", "spent", "call", "micro_batches", "coverage")
"""Fields of a commit that are as in the last one of its kind, while the others follow from the last one of any kind."""

Line = dict[str, Any]
"""Line of the log as JSON has it."""


class Before:
    """Last lines of an event log's file, from which the next is predicted; writer and reader keep the same."""

    def __init__(self) -> None:
        self._last: dict[str, Line] = {}
        self._short = 0
        """Number of lines since all had to be whole."""

    def clear(self) -> None:
        """Forgets the last lines after one that may be missing, so that the next line is written whole."""
        self._last.clear()

    def keep(self, line: Line, *, whole: bool) -> None:
        """Stores a line as the last one with its name; a `committed` line written whole replaces all earlier ones."""
        name = line["name"]
        if whole and name == COMMITTED:
            self._last = {key: last for key, last in self._last.items() if not key.startswith(COMMITTED)}
        self._last[name] = line
        if name == COMMITTED:
            self._last[_kind(line.get("kind"))] = line

    def shorten(self, line: Line) -> Line | None:
        """Returns a line's short form, its differences from the predicted line; None if it must be written whole."""
        self._short += 1
        if self._short > WHOLE_EVERY:
            self._short = 0
            self.clear()
        if line["name"] in VIEWS and len(line.get("members", ())) <= MOST_WHOLE:
            return None
        try:
            whole = self._expected(line["name"], line.get("kind"), line["t"])
        except (LookupError, TypeError, ValueError):  # the first one, or one that was odd
            return None
        short: Line = {"t": line["t"]} if line["name"] == COMMITTED else {"t": line["t"], "name": line["name"]}
        if gone := [key for key in whole if key not in line]:
            short["-"] = gone
        if line.get("kind") != self._last[line["name"]].get("kind"):
            short["kind"] = line.get("kind")
        for key, value in line.items():
            if "." in key or key.startswith("~") or key in ("-", "n"):
                return None
            if key not in whole:
                short[key] = value
            elif key not in short and repr(whole[key]) != repr(value):  # quickly told of most, and by type, too
                short |= _differences(key, whole[key], value)
        return None if "member" in short else short

    def restore(self, short: Line) -> Line:
        """Returns the whole line that a short form stands for.

        Raises:
            LookupError, TypeError, ValueError: It does not follow what was kept, or is damaged.
        """
        name = short.get("name", COMMITTED)
        whole = self._expected(name, short.get("kind", self._last[name].get("kind")), short["t"])
        for key in short.get("-", ()):
            del whole[key]
        for path, value in short.items():
            if path.startswith("~"):
                steps = path[1:].split(".")
                whole[steps[0]] = _put(whole[steps[0]], steps[1:], _edited(_at(whole, steps), value))
            elif path != "-":
                first, *rest = path.split(".")
                whole[first] = _put(whole[first], rest, value) if rest else value
        return whole

    def _expected(self, name: str, kind: object, t: float) -> Line:
        """Returns the line that is predicted from the last one with this name."""
        last = self._last[name]
        whole = last | {"mono": _mono(t, last)}
        if name != COMMITTED:
            return whole
        whole |= {"seq": last["seq"] + 1, "step": last["step"] + (kind == "step")}
        whole |= {"prev": last["header"], "view": last["next_view"], "kind": kind}
        alike = self._last.get(_kind(kind), last)
        for key in _OF_ITS_KIND:
            whole.pop(key, None)
            if key in alike:
                whole[key] = alike[key]
        return whole


VIEWS = frozenset({"view", "decide"})
SHORTENED = VIEWS | {COMMITTED, "links", "state_hash", "train_loss"}
"""Names of lines that are short where that is possible."""


def _kind(kind: object) -> str:
    return f"{COMMITTED} {kind}"


def _mono(t: float, before: Line) -> float:
    """Returns the monotonic clock (s) at wall time t, if both clocks advanced equally since the line before."""
    return (round(t * 1e6) - round(float(before["t"]) * 1e6) + round(float(before["mono"]) * 1e6)) / 1e6


def _differences(path: str, old: object, new: object) -> Iterator[tuple[str, object]]:
    """Yields path and new value of each difference between two JSON values."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys() and not any("." in k for k in new):
        for key, value in new.items():
            yield from _differences(f"{path}.{key}", old[key], value)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and not _all_news(old, new):
        edits = _edits(old, new) if len(new) > MOST_WHOLE else None
        others = sum(one != other for one, other in zip(old, new, strict=True))
        if edits is not None and sum(1 + len(items) for _, _, items in edits) < others:
            yield f"~{path}", edits
            return
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}.{at}", one, other)
    elif type(old) is not type(new) or old != new:
        if isinstance(old, list) and isinstance(new, list) and (edits := _edits(old, new)) is not None:
            yield f"~{path}", edits
        else:
            yield path, new


def _edits(old: list[Any], new: list[Any]) -> list[list[Any]] | None:
    """Returns edits that turn list `old` into `new`, each [from, to, items to put there]; None if the whole
    new list is about as short.
    """
    edits: list[list[Any]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and old[i] == new[j]:
            i, j = i + 1, j + 1
            continue
        gone, come = _next_alike(old, i, new, j)
        edits.append([i, i + gone, new[j : j + come]])
        i, j = i + gone, j + come
        if 4 * len(edits) > len(new):
            return None
    return edits


def _next_alike(old: list[Any], i: int, new: list[Any], j: int) -> tuple[int, int]:
    """Returns how many items of each list to skip until both continue alike, within a limited distance."""
    for count in range(1, _LOOK_AHEAD):
        if i + count < len(old) and j < len(new) and old[i + count] == new[j]:
            return count, 0
        if j + count < len(new) and i < len(old) and new[j + count] == old[i]:
            return 0, count
    if i < len(old) and j < len(new):
        return 1, 1
    return len(old) - i, len(new) - j


def _edited(value: Any, edits: Any) -> list[Any]:
    found: list[Any] = []
    at = 0
    for start, stop, items in edits:
        if not at <= start <= stop <= len(value):
            raise ValueError(f"an edit of items {start} to {stop} of {len(value)}, behind {at}")
        found += [*value[at:start], *items]
        at = stop
    return [*found, *value[at:]]


def _at(value: Any, path: list[str]) -> Any:
    for step in path:
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def _all_news(old: list[object], new: list[object]) -> bool:
    """Returns whether a list of plain values has changed in every place, so that writing it anew is shorter than
    edits.
    """
    return not any(isinstance(x, (dict, list)) for x in new) and all(a != b for a, b in zip(old, new, strict=True))


def _put(value: Any, path: list[str], new: object) -> Any:
    """Returns a copy of a JSON value with `new` at this path; everything off the path is shared."""
    if not path:
        return new
    first, rest = path[0], path[1:]
    if isinstance(value, list):
        at = int(first)
        return [*value[:at], _put(value[at], rest, new), *value[at + 1 :]]
    if rest:
        return {**value, first: _put(value[first], rest, new)}
    return {**value, first: new}
