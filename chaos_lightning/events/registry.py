"""Collects the events that packages declare, each in its own `events.py`.

Theory of operation. A declaration is data: a name, one line that says what happened, the fields with their units, and
a line of text for readers if the event is to be shown in words. `known` runs the `events.py` of every folder of the
package by its path, without importing the room it lies in: to read a log needs no torch, and a new room is found
because it is there. An event that several rooms write is declared in the lowest of them.

Names are plain strings, for writers and readers alike; tests hold that every name and field that is written somewhere
is declared (`tests/observe/test_observe_events.py`).
"""

from __future__ import annotations

import functools
import runpy
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 3
"""Version of names and fields in event logs, written into each file; files from before it was written count as 1.
Whoever renames an event or a field, or gives one another meaning, counts it up; new ones need no new version. Names and
fields of 2 and 3 are those of 1; their lines are numbered, and some are short (`compact.py`), in 3 views, too."""
READABLE = frozenset({1, 2, FORMAT})


@dataclass(frozen=True, slots=True)
class Event:
    """Declaration of one kind of event: name, meaning and fields."""

    name: str
    meaning: str
    """Meaning in one line; `member` is the one to which it happened."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that every such event has -> what they are, with units."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Fields that some such events have -> what they are, with units."""
    note: str = ""
    """Text with {fields} for "Events in words" of the report and the last lines of `top`; "" for neither."""

    def words(self, fields: Mapping[str, Any]) -> str:
        """Returns `note` with these fields filled in; a missing field leaves a gap."""
        try:
            return string.Formatter().vformat(self.note, (), _Given(fields)).strip()
        except (ValueError, TypeError, LookupError, AttributeError):  # evidence may be of any form
            return f"{self.note} ({', '.join(f'{k}={v}' for k, v in fields.items())})"


class _Given(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return ""


@functools.cache
def known() -> Mapping[str, Event]:
    """Returns the events that all packages declare, by name.

    Raises:
        ValueError: Two rooms declare the same name.
    """
    found: dict[str, Event] = {}
    places: dict[str, Path] = {}
    for package in sys.modules["chaos_lightning"].__path__:
        for file in sorted(Path(package).glob("*/events.py")):
            for event in runpy.run_path(str(file))["EVENTS"]:
                if event.name in found:
                    raise ValueError(f"event {event.name!r} is declared in {places[event.name]} and in {file}")
                found[event.name], places[event.name] = event, file
    return found


def problems(name: str, fields: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with an event's name or fields; an empty list if nothing is."""
    event = known().get(name)
    if event is None:
        return [f"no room declares an event {name!r}; it belongs into EVENTS of the events.py beside what writes it"]
    return [f"event {name!r} has no field {key!r} ({what})" for key, what in event.fields.items() if key not in fields]
