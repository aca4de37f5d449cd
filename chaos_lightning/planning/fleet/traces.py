"""Describes histories of fleets (which devices are present at which time), and reads the two file formats for them.

Theory of operation. A `Trace` says who is there at first and what changes when; it knows of no plan and no policy, so
that all policies meet the same losses. Changes of one moment are one change: what is lost together is one loss.

Files have no header. `milliseconds,add|remove,node` has a line for each device that comes or goes; the time begins with
the first line. Where the first line is a removal, the fleet is complete until then: all its devices are there at 0 ms,
but for those whose own first line is an addition. `hours,count` is a step function: where the count changes it has two
lines with one time, the value before and the value after it; which devices are lost is drawn.

In a fleet of devices that are alike a node may have any name. In a fleet of several kinds nodes are the names of its
devices, and a device's number is its place among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple, NoReturn

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.pipelines.job import MOST_DEVICES
from chaos_lightning.planning.quantities import HOUR_S

LONGEST_MS = 366 * 24 * HOUR_S * 1000
"""Latest time (ms) of a first removal; a later one shows that time stamps are those of a clock."""
KINDS = "`milliseconds,add|remove,node` (such as 60000,remove,node-3) or `hours,count` (such as 0.5,32)"


class TraceError(ConfigurationError):
    """Error in a file with a fleet's history; names file, line and field."""


class FleetChange(NamedTuple):
    """Event of a fleet's history: some devices come, go or change speed at one moment."""

    at_s: float
    kind: str
    """add, remove, slow or well."""
    devices: tuple[int, ...]
    speed: float = 1.0
    """Relative speed of slow devices (1 is normal)."""


@dataclass(frozen=True)
class Trace:
    """History of a fleet: the devices at the start, and all later changes."""

    first: tuple[int, ...]
    """Devices at the start."""
    changes: tuple[FleetChange, ...]
    """Changes in the order of time."""
    end_s: float
    about: str = ""
    """Origin of the trace, in words."""

    def counts(self) -> Iterator[tuple[float, int]]:
        """Yields the number of devices as (seconds, number): at the start, and after each change."""
        count = len(self.first)
        yield 0.0, count
        for c in self.changes:
            if c.kind in ("add", "remove"):
                count += len(c.devices) if c.kind == "add" else -len(c.devices)
                yield c.at_s, count

    def check(self) -> Trace:
        """Refuses a history in which the fleet has no devices for an hour or longer.

        Raises:
            TraceError: The fleet is empty for an hour.
        """
        since: float | None = None
        for at_s, count in [*self.counts(), (self.end_s, -1)]:
            if since is not None and at_s - since >= HOUR_S:
                raise TraceError(
                    f"{self.about}: no device is there from hour {since / HOUR_S:.4g} to {at_s / HOUR_S:.4g}; "
                    "expected a fleet that is never empty for an hour: more devices, fewer losses, or repairs"
                )
            since = (at_s if since is None else since) if count == 0 else None
        return self


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class _Line:
    path: Path
    number: int
    fields: list[str]

    def refuse(self, what: str) -> NoReturn:
        raise TraceError(f"{self.path}: line {self.number}: {what}")

    def number_in(self, field: int, name: str) -> float:
        try:
            value = float(self.fields[field])
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            self.refuse(f"{name} is {self.fields[field]!r}; expected a number from 0 on")
        return value


def _lines(path: Path) -> list[_Line]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read as text: {error}") from error
    rows = [(i, row.strip()) for i, row in enumerate(text.splitlines(), 1)]
    found = [_Line(path, i, [x.strip() for x in row.split(",")]) for i, row in rows if row]
    if not found:
        raise TraceError(f"{path}: the file is empty; expected lines {KINDS}")
    width = len(found[0].fields)
    if width not in (2, 3):
        found[0].refuse(f"it has {width} fields; expected {KINDS}, without a header")
    for line in found:
        if len(line.fields) != width:
            line.refuse(f"it has {len(line.fields)} fields where the first line has {width}; expected {KINDS}")
    return found


def begins_complete(path: Path) -> bool:
    """Returns whether a file's first event is a removal, which means that all devices are present at the start."""
    try:
        return _lines(path)[0].fields[1:2] == ["remove"]
    except TraceError:
        return False  # `read` says why


def read(
    path: Path, *, seed: int = 0, hours: float = 0.0, devices: int | None = None, names: Sequence[str] = ()
) -> Trace:
    """Reads the history of a fleet from a file.

    Args:
        path: Path of a file of either kind.
        seed: Draws which devices are lost where the file has only counts.
        hours: Hour at which the history ends; 0: at its last line.
        devices: Number of devices at first, for a file that begins with a removal; None: not known.
        names: Names of the devices of a fleet of several kinds.

    Raises:
        TraceError: The file holds no history.
    """
    lines = _lines(path)
    if len(lines[0].fields) == 3:
        first, changes, last_s = _events(lines, devices, {name: i for i, name in enumerate(names)})
    else:
        first, changes, last_s = _steps(lines, Random(seed), len(names))
    end_s = hours * HOUR_S or last_s
    if not end_s:
        raise TraceError(
            f"{path}: line {lines[-1].number}: the history has no end: all lines have the same time; "
            "expected a last line with a later one, or --hours"
        )
    kept = tuple(c for c in changes if c.at_s <= end_s)
    return Trace(first, kept, end_s, str(path)).check()


def _ordered(line: _Line, at: float, before: float, unit: str) -> None:
    if at < before:
        line.refuse(f"time goes backwards, from {before:.15g} to {at:.15g} {unit}; expected lines in the order of time")


def _complete(lines: list[_Line], devices: int | None, known: dict[str, int]) -> dict[str, int]:
    """Returns the numbers of the devices that are present at the start, by node name, for a history whose first event
    is a removal.
    """
    kinds: dict[str, str] = {}
    for line in lines:
        kinds.setdefault(line.fields[2], line.fields[1])
    if known:
        return {name: i for name, i in known.items() if kinds.get(name) != "add"}
    leaving = [node for node, kind in kinds.items() if kind == "remove"]
    if devices is None or len(leaving) > devices:
        given = "how many devices there are is not known" if devices is None else f"the fleet has {devices}"
        lines[0].refuse(
            f"a history that begins with a removal begins with all devices, and {len(leaving)} are removed that were "
            f"not added; {given}; expected --devices {len(leaving)} or more"
        )
    others = (f"\0{i}" for i in range(devices - len(leaving)))
    return {node: i for i, node in enumerate([*leaving, *others])}


def _events(
    lines: list[_Line], devices: int | None, known: dict[str, int]
) -> tuple[tuple[int, ...], list[FleetChange], float]:
    complete = lines[0].fields[1] == "remove"
    start = before = 0.0 if complete else lines[0].number_in(0, "milliseconds")
    if complete and (at := lines[0].number_in(0, "milliseconds")) > LONGEST_MS:
        lines[0].refuse(f"the first removal is at {at:.15g} ms; expected milliseconds since the fleet was complete")
    there = _complete(lines, devices, known) if complete else {}
    numbers = dict(known or there)
    first = tuple(there.values())
    rows: list[tuple[float, str, int]] = []
    for line in lines:
        at, (_, kind, node) = line.number_in(0, "milliseconds"), line.fields
        _ordered(line, at, before, "ms")
        before = at
        if kind not in ("add", "remove"):
            line.refuse(f"the second field is {kind!r}; expected add or remove, as in {KINDS}")
        if not node:
            line.refuse("the third field, the node, is empty; expected its name")
        if known and node not in known:
            line.refuse(f"{node!r} is no device of the fleet, which has several kinds; expected {_some(known)}")
        if kind == "add" and node in there:
            line.refuse(f"adds {node!r}, which is there already; expected it to be removed first")
        if kind == "remove" and node not in there:
            line.refuse(
                f"removes {node!r}, which is not there; expected a node that was added before"
                + ("" if complete else ", or a first line that removes one: then all are there at first")
            )
        number = numbers.setdefault(node, len(numbers))
        if kind == "add":
            there[node] = number
        else:
            del there[node]
        if at == start and not complete:
            first = tuple(there.values())
        else:
            rows.append(((at - start) / 1000, kind, number))
    return first, _together(rows), (before - start) / 1000


def _some(known: Iterable[str]) -> str:
    names = list(known)
    return f"one of {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


def _together(rows: Iterable[tuple[float, str, int]]) -> list[FleetChange]:
    """Merges consecutive changes of the same kind and time into one."""
    found: list[FleetChange] = []
    for at, kind, device in rows:
        if found and found[-1][:2] == (at, kind):
            found[-1] = found[-1]._replace(devices=(*found[-1].devices, device))
        else:
            found.append(FleetChange(at, kind, (device,)))
    return found


def _steps(lines: list[_Line], random: Random, most: int) -> tuple[tuple[int, ...], list[FleetChange], float]:
    changes: list[FleetChange] = []
    there: list[int] = []
    start = before = lines[0].number_in(0, "hours")
    following = 0
    first: tuple[int, ...] = ()
    for i, line in enumerate(lines):
        at, value = line.number_in(0, "hours"), line.number_in(1, "the count")
        _ordered(line, at, before, "h")
        if value != int(value) or value > MOST_DEVICES:
            line.refuse(
                f"the count is {line.fields[1]!r}; expected a whole number of devices, at most {MOST_DEVICES:,}"
            )
        if most and value > most:
            line.refuse(f"the count is {int(value)}; the fleet has {most} devices, of several kinds; expected no more")
        more = int(value) - len(there)
        if i and more and at != before:
            line.refuse(
                f"the count becomes {int(value)} where it was {len(there)} since hour {before:g}; expected two lines "
                f"where it changes: {line.fields[0]},{len(there)} and {line.fields[0]},{int(value)}"
            )
        at_s, before = (at - start) * HOUR_S, at
        if more > 0:
            if most:
                new = tuple([d for d in range(most) if d not in there][:more])
            else:
                new = tuple(range(following, following + more))
            following += more
            there += new
            if i == 0:
                first = new
            else:
                changes.append(FleetChange(at_s, "add", new))
        elif more < 0:
            lost = tuple(there.pop(random.randrange(len(there))) for _ in range(-more))
            changes.append(FleetChange(at_s, "remove", lost))
    return first, changes, (before - start) * HOUR_S
