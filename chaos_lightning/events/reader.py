"""Reads event logs: all files of a directory as one stream in order of time, or the events new since the last look.

Theory of operation. A file is written by one process with one write a line, so it is in order and only its last line
can be half there: because its writer is still at it, or because the disk was full. A line that is no JSON object is
skipped, never fatal: the reader runs while the run does. Between files the wall clock decides; within a file a wall
clock that was set back is held at the latest time seen, so that one file's order always survives the merge.

The files that one process wrote one after the other are read as one, by the name of the first. Lines are numbered; what
is missing becomes a record `lost` with the count, and short lines (`compact.py`) are given whole, so that nobody else
knows of any of this.

What a file's `opened` event tells as its format is compared with this version's: a fold over other names and fields
would show a run that never was.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events import registry
from chaos_lightning.events.compact import COMMITTED, SHORTENED, Before, Line
from chaos_lightning.events.regular import open_to_read

logger = logging.getLogger("chaos_lightning.events")


@dataclass(frozen=True, slots=True)
class Record:
    """An event that was read from a log."""

    t: float
    """Wall time, s since the epoch, never falling within one file."""
    mono: float
    """Monotonic clock of the writer, s."""
    member: str
    """Member that the event is about (its id; empty before the welcome and for schedulers)."""
    name: str
    fields: Mapping[str, Any]
    """All other fields of the line."""
    source: str = ""
    """Name of the file that the event came from."""
    line: int = 0
    """Line number in that file, from 1."""

    @property
    def by(self) -> str:
        """Id of the member that wrote the line; `member`, unless the line says otherwise."""
        return str(self.fields.get("by", self.member))

    @property
    def own(self) -> bool:
        """Whether the member itself wrote the event; the scheduler writes events about members, too."""
        return bool(self.fields.get("node"))

    @property
    def node(self) -> str:
        """Name of the member, from the line or else from its id before the last "~"."""
        return str(self.fields.get("node") or self.member.rpartition("~")[0] or self.member)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field of the event."""
        return self.fields.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __str__(self) -> str:
        rest = " ".join(f"{k}={v}" for k, v in self.fields.items() if k not in ("node", "by"))
        return f"{self.t:.3f} {self.member or self.source} {self.name} {rest}"


def parse_line(text: bytes | str, *, source: str = "", line: int = 0, not_before: float = 0.0) -> Record | None:
    """Parses a whole line as a Record; returns None if it is no event (torn, foreign, empty)."""
    data = _object(text)
    return None if data is None else _record(data, source, line, not_before)


def _object(text: bytes | str) -> Line | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if "n" in data and "member" not in data:
        data.setdefault("name", COMMITTED)
    return data if isinstance(data.get("name"), str) else None


_NO_FIELDS = frozenset({"n", "t", "mono", "member", "name"})


def _record(data: Line, source: str, line: int, not_before: float) -> Record | None:
    fields = {key: value for key, value in data.items() if key not in _NO_FIELDS}
    try:
        t, mono = float(data.get("t", 0.0)), float(data.get("mono", 0.0))
    except (TypeError, ValueError):
        return None
    return Record(
        t=max(t, not_before),
        mono=mono,
        member=str(data.get("member", "") or ""),
        name=data["name"],
        fields=fields,
        source=source,
        line=line,
    )


@dataclass(slots=True)
class _Lines:
    """Parser of one process's lines, which restores short lines and notices missing ones."""

    source: str
    latest: Record | None = None
    number: int = 0
    """Number of the last line; 0 before the first, and for logs whose lines have none."""
    before: Before = field(default_factory=Before)
    late: bool = False
    """Whether the reader begins in the middle, and misses nothing before."""

    def take(self, text: bytes, line: int) -> Iterator[Record]:
        """Parses one more line; yields its record, preceded by one that reports missing lines, or nothing if it is no
        event.
        """
        data = _object(text)
        if data is None:
            return
        number = data.pop("n", None)
        if not isinstance(number, int):
            yield from self._give(data, line)
            return
        if number == 1:  # another process of this name
            self.number = 0
        missing, self.number = number - self.number - 1, number
        if number == 1 or missing:
            self.before.clear()
        if missing and not self.late:
            yield self._lost(data, line, max(missing, 1))
        self.late = False
        name = data["name"]
        if name == "opened" and "part" in data and not missing:
            return
        whole = "member" in data
        if not whole:
            try:
                data = self.before.restore(data)
            except (LookupError, TypeError, ValueError):
                self.before.clear()
                yield self._lost(data, line, 1)
                return
        if name in SHORTENED:
            self.before.keep(data, whole=whole)
        yield from self._give(data, line)

    def _give(self, data: Line, line: int) -> Iterator[Record]:
        record = _record(data, self.source, line, self.latest.t if self.latest else 0.0)
        if record is not None:
            self.latest = record
            yield record

    def _lost(self, data: Line, line: int, count: int) -> Record:
        """Returns a record that reports missing lines before this one."""
        member, latest = data.get("member", ""), self.latest
        if latest is not None:
            member = latest.by
        told = {"t": data.get("t", 0.0), "mono": data.get("mono", 0.0), "member": member, "name": "lost"}
        told |= {"count": count, "since": latest.t if latest else 0.0, "gone": True}
        record = _record(told, self.source, line, latest.t if latest else 0.0)
        assert record is not None
        return record


def wrong_format(record: Record) -> str:
    """Returns why a log file that begins with this event cannot be read, and what to do; "" if it can."""
    found = record.get("format", 1)
    if record.name != "opened" or found in registry.READABLE:
        return ""
    known = " and ".join(map(str, sorted(registry.READABLE)))
    return (
        f"event log {record.source} is in format {found}, and this version of chaos-lightning reads {known}; read it "
        "with the version that the job ran with, and log new jobs into another folder"
    )


_PART = re.compile(r"(.*-\d+)\.(\d+)\.jsonl")


def part_of(path: Path) -> tuple[Path, int]:
    """Returns the first file of the log that `path` continues, and the number of `path`; (path, 0) if it is the
    first.
    """
    found = _PART.fullmatch(path.name)
    return (path.with_name(f"{found[1]}.jsonl"), int(found[2])) if found else (path, 0)


def log_files(where: str | os.PathLike[str]) -> list[Path]:
    """Returns the log files in a directory and below it (or the one file given), sorted by name, and those of one
    process by their number.
    """
    path = Path(where)
    if path.is_file():
        return [path]
    return sorted(path.rglob("*.jsonl"), key=part_of)


BLOCK_NBYTES = 1 << 15
"""Number of bytes of a file that are read at once. No file stays open in between: there may be thousands."""


def _texts(path: Path, nbytes: int) -> Iterator[bytes]:
    """Yields the lines in the first `nbytes` bytes of a file; the last one may be incomplete."""
    inode, offset, rest = None, 0, b""
    while offset < nbytes:
        with os.fdopen(open_to_read(path), "rb", buffering=0) as file:
            if inode not in (None, found := os.fstat(file.fileno()).st_ino):
                return  # it was deleted, and made anew
            file.seek(offset)
            block = file.read(min(BLOCK_NBYTES, nbytes - offset))
        if not block:
            break
        inode, offset = found, offset + len(block)
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _read_files(parts: Iterable[tuple[Path, int]], source: str) -> Iterator[Record]:
    """Yields the events of one process from its files, in order; skips lines that are no events.

    Raises:
        ConfigurationError: A file was written in another format, is no regular file, or may not be read.
    """
    lines = _Lines(source)
    for path, nbytes in parts:
        try:
            for number, text in enumerate(_texts(path, nbytes), 1):
                for record in lines.take(text, number):
                    if trouble := wrong_format(record):
                        raise ConfigurationError(trouble)
                    yield record
        except FileNotFoundError:  # its writer has deleted it, which the next file's numbers tell
            continue
        except OSError as error:
            raise ConfigurationError(f"event log {path} cannot be read: {error.strerror}") from error


class Logs:
    """All events of a log directory (or one file), merged by time; within a file, in the order in which they were
    written.

    Each iteration reads the files anew, up to the sizes that they had at first, and holds one block of each.
    """

    def __init__(self, where: str | os.PathLike[str]) -> None:
        """Lists the log files.

        Raises:
            FileNotFoundError: There is no such directory or file, or no event log in the directory.
        """
        path = Path(where)
        if not path.exists():
            raise FileNotFoundError(
                f"no event log at {path}: expected a directory with *.jsonl files, or one such file"
            )
        found = log_files(path)
        if not found:
            raise FileNotFoundError(f"no event log in {path}: expected *.jsonl files (the folder given as log_dir)")
        base = path if path.is_dir() else path.parent
        self._processes: list[tuple[str, list[tuple[Path, int]]]] = []
        """(name of its first file, (file, bytes) of each) by process."""
        for first, parts in itertools.groupby(found, key=lambda path: part_of(path)[0]):
            self._processes.append((first.relative_to(base).as_posix(), [(part, _nbytes(part)) for part in parts]))

    def __iter__(self) -> Iterator[Record]:
        """Yields the events; raises ConfigurationError on reaching a file in another format."""
        return heapq.merge(*(_read_files(parts, source) for source, parts in self._processes), key=lambda r: r.t)


def _nbytes(path: Path) -> int:
    """Returns the size of a file; 1 if it has none, so that it is opened and the error is reported."""
    try:
        return path.stat().st_size or 1
    except OSError:
        return 1


def read_events(where: str | os.PathLike[str]) -> Iterator[Record]:
    """Yields all events of a log directory or file once, merged by time; raises what `Logs` raises."""
    return iter(Logs(where))


@dataclass(slots=True)
class _Place:
    offset: int = 0
    line: int = 0
    inode: int = 0
    unreadable: bool = False
    """Whether the file is in another format, which was warned of."""


@dataclass(slots=True)
class Tail:
    """Follows a log directory: each poll returns the events that were appended since the last one.

    A half-written last line waits for its end; a file in another format is left out with a warning. Not thread-safe.

    Attributes:
        where: The directory.
        since: Files to which nothing was appended after this wall time (s) are of the past, and left out.
    """

    where: Path
    since: float = 0.0
    _places: dict[Path, _Place] = field(default_factory=dict)
    _lines: dict[Path, _Lines] = field(default_factory=dict)

    def poll(self) -> list[Record]:
        """Returns new events of all files in order of time; an empty list if there are none (or no directory yet)."""
        return list(self.new())

    def new(self) -> Iterator[Record]:
        """Yields what `poll` returns without holding it all, since the first poll may find a day's events; must be read
        to the end.
        """
        files = []
        for path in log_files(self.where) if self.where.exists() else []:
            with contextlib.suppress(FileNotFoundError):
                files.append((path, path.stat()))
        streams = [
            self._of(first, list(parts)) for first, parts in itertools.groupby(files, lambda x: part_of(x[0])[0])
        ]
        return heapq.merge(*streams, key=lambda r: r.t)

    def _of(self, first: Path, parts: Sequence[tuple[Path, os.stat_result]]) -> Iterator[Record]:
        """Yields the records that one process has appended, up to its files' sizes when they were looked at."""
        past = parts[0][1].st_mtime < self.since
        lines = self._lines.setdefault(first, _Lines(first.name, late=past))
        for path, status in parts:
            if status.st_mtime >= self.since:
                with contextlib.suppress(FileNotFoundError):
                    yield from self._new(path, status, lines)

    def _new(self, path: Path, status: os.stat_result, lines: _Lines) -> Iterator[Record]:
        place = self._places.setdefault(path, _Place(inode=status.st_ino))
        if place.inode != status.st_ino:  # it was deleted, and made anew
            place = self._places[path] = _Place(inode=status.st_ino)
        if place.unreadable or status.st_size <= place.offset:
            return
        try:
            opened = open_to_read(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            logger.warning("event log %s is left out: %s", path, error.strerror)
            place.unreadable = True
            return
        with os.fdopen(opened, "rb") as file:
            file.seek(place.offset)
            while place.offset < status.st_size and (text := file.readline()).endswith(b"\n"):
                place.offset += len(text)
                place.line += 1
                for record in lines.take(text, place.line):
                    if trouble := wrong_format(record):
                        logger.warning("%s", trouble)
                        place.unreadable = True
                        return
                    yield record
