"""Reading event logs: all files of a directory as one stream in time order, or what is new since the last look.

Theory of operation. A file is written by one process with one write a line, so it is in order and only its last line
can be half there: because its writer is still at it, or because the disk was full. A line that is no JSON object is
skipped, never fatal: the reader runs while the run does. Between files the wall clock decides; within a file a wall
clock that was set back is held at the latest time seen, so that one file's order always survives the merge.

What a file's `opened` event tells as its format is compared with this version's: a fold over other names and fields
would show a run that never was.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events import registry

logger = logging.getLogger("chaos_lightning.events")


@dataclass(frozen=True, slots=True)
class Record:
    """One event as it was read."""

    t: float
    """Wall time, s since the epoch, never falling within one file."""
    mono: float
    """The writer's monotonic clock, s."""
    member: str
    """Whom the event is about (member id; empty before the welcome and for schedulers)."""
    name: str
    fields: Mapping[str, Any]
    """Everything else of the line."""
    source: str = ""
    """File name it came from."""
    line: int = 0
    """1-based line number in that file."""

    @property
    def by(self) -> str:
        """Who wrote it: `member` unless the line says otherwise."""
        return str(self.fields.get("by", self.member))

    @property
    def own(self) -> bool:
        """Whether the member told it about itself: a scheduler tells the same of it a moment earlier."""
        return bool(self.fields.get("node"))

    @property
    def node(self) -> str:
        """The member's name: stamped on the line, else the id up to its last "~"."""
        return str(self.fields.get("node") or self.member.rpartition("~")[0] or self.member)

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the line."""
        return self.fields.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __str__(self) -> str:
        rest = " ".join(f"{k}={v}" for k, v in self.fields.items() if k not in ("node", "by"))
        return f"{self.t:.3f} {self.member or self.source} {self.name} {rest}"


def parse_line(text: bytes | str, *, source: str = "", line: int = 0, not_before: float = 0.0) -> Record | None:
    """One line as a Record; None if it is no event (torn, foreign, empty)."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    try:
        t, mono = float(data.pop("t", 0.0)), float(data.pop("mono", 0.0))
    except (TypeError, ValueError):
        return None
    return Record(
        t=max(t, not_before),
        mono=mono,
        member=str(data.pop("member", "") or ""),
        name=data.pop("name"),
        fields=data,
        source=source,
        line=line,
    )


def wrong_format(record: Record) -> str:
    """Why what follows this event of a file cannot be read, and what to do; "" if it can."""
    found = record.get("format", 1)
    if record.name != "opened" or found == registry.FORMAT:
        return ""
    return (
        f"event log {record.source} is in format {found}, and this version of chaos-lightning reads format "
        f"{registry.FORMAT}; read it with the version that the job ran with, and log new jobs into another folder"
    )


def log_files(where: str | os.PathLike[str]) -> list[Path]:
    """The event files of a directory, of the directories in it, or the one file that was named; sorted by name."""
    path = Path(where)
    if path.is_file():
        return [path]
    return sorted(path.rglob("*.jsonl"))


def read_file(path: str | os.PathLike[str], *, source: str = "") -> Iterator[Record]:
    """The events of one file, in its order; lines that are no events are skipped.

    Raises:
        ConfigurationError: The file was written in another format.
    """
    latest = 0.0
    with Path(path).open("rb") as file:
        for number, text in enumerate(file, 1):
            record = parse_line(text, source=source or Path(path).name, line=number, not_before=latest)
            if record is not None:
                if trouble := wrong_format(record):
                    raise ConfigurationError(trouble)
                latest = record.t
                yield record


def read_events(where: str | os.PathLike[str]) -> Iterator[Record]:
    """All events of a log directory (or one file), merged by time; within a file, in the order they were written.

    Raises:
        FileNotFoundError: There is no such directory or file, or no event log in the directory.
        ConfigurationError: A file was written in another format; raised when its turn comes.
    """
    path = Path(where)
    if not path.exists():
        raise FileNotFoundError(f"no event log at {path}: expected a directory with *.jsonl files, or one such file")
    files = log_files(path)
    if not files:
        raise FileNotFoundError(f"no event log in {path}: expected *.jsonl files (the folder given as log_dir)")
    base = path if path.is_dir() else path.parent
    streams = [read_file(p, source=p.relative_to(base).as_posix()) for p in files]
    return heapq.merge(*streams, key=lambda r: r.t)


@dataclass(slots=True)
class _Place:
    offset: int = 0
    line: int = 0
    latest: float = 0.0
    unreadable: bool = False
    """It is in another format, which was warned of."""


@dataclass(slots=True)
class Tail:
    """Follows a log directory: each `poll` returns what was appended since the last one.

    A half-written last line waits for its end; a file in another format is left out with a warning. Not thread-safe.
    """

    where: Path
    _places: dict[Path, _Place] = field(default_factory=dict)

    def poll(self) -> list[Record]:
        """New events of all files in time order; an empty list if there are none (or no directory yet)."""
        found: list[Record] = []
        for path in log_files(self.where) if self.where.exists() else []:
            place = self._places.setdefault(path, _Place())
            try:
                if place.unreadable or path.stat().st_size <= place.offset:
                    continue
                with path.open("rb") as file:
                    file.seek(place.offset)
                    data = file.read()
            except FileNotFoundError:
                continue
            whole, end, _ = data.rpartition(b"\n")
            if not end:
                continue
            place.offset += len(whole) + 1
            for text in whole.split(b"\n"):
                place.line += 1
                record = parse_line(text, source=path.name, line=place.line, not_before=place.latest)
                if record is None:
                    continue
                if trouble := wrong_format(record):
                    logger.warning("%s", trouble)
                    place.unreadable = True
                    break
                place.latest = record.t
                found.append(record)
        found.sort(key=lambda r: r.t)
        return found
