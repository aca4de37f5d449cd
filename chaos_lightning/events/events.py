"""Writes the event log: JSON objects, one per line, in a file per process; declares the log's own events.

Theory of operation. Everything that is ever shown or checked about a run (timeline, goodput, report, live view,
audit) is a fold over these files, so a line must survive whatever kills its writer. Each line is a single `os.write`
on an `O_APPEND` descriptor: once `emit` returned, the bytes belong to the kernel and a SIGKILL of the process loses
nothing. (A power cut may: the log is evidence about training, not part of its protocol, and is not worth an fsync a
step.) A log never stops training: when the disk is full there is one warning, lines are dropped and counted, and the
first line that fits again is preceded by a `lost` event with the count. A file that was deleted under its writer is
made anew, within a second.

Line format: `{"n": number, "t": wall seconds, "mono": monotonic seconds, "member": id, "name": event, ...fields}`. `t`
puts the files of several machines in one order, `mono` measures durations within one file (and, on one machine, between
files). `member` is the member the event is about: the writer itself unless the event says otherwise, and then `by`
names the writer. `n` counts a process's lines from 1, so that a reader knows if one is missing; lines of the most
frequent names are short where that is possible (`compact.py`).

A file is followed by its path, so none is renamed: when it has grown to a tenth of what a process may write in a day,
the process goes on in another one, NAME.1.jsonl, NAME.2.jsonl and so on. Before the files of the last 24 hours, by
processes of this role and name, exceed the limit of a day, the oldest of them are deleted: the latest events are the
ones that somebody will want to know. The reader tells by `n` which lines are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos_lightning.events.compact import SHORTENED, Before, Line
from chaos_lightning.events.reader import Record, Tail, log_files, part_of, read_events
from chaos_lightning.events.registry import FORMAT, Event
from chaos_lightning.events.regular import open_to_append

__all__ = ["EVENTS", "EventLog", "Record", "Tail", "read_events"]

logger = logging.getLogger("chaos_lightning.events")


DAY_NBYTES = 100_000_000
"""Number of bytes that a process may write in 24 hours, unless it is told otherwise."""
PARTS_A_DAY = 10
FORGOTTEN_S = 30 * 86400.0
LOOK_EVERY_S = 1.0
"""Interval, s, of looking whether the file is still there."""
_CLOCKS_APART_US = 50
"""Difference, microseconds, up to which the wall clock is told as the monotonic one plus a constant: short lines need
but one.
"""

EVENTS = (
    Event(
        "opened",
        "a process begins to write this file",
        {"pid": "process id", "host": "name", "role": '"member", "scheduler", "agent" or "harness"'},
        {
            "node": "the member's name, constant over its incarnations",
            "format": "version of the log, see registry.py",
            "part": "it goes on from the file with the number before",
        },
    ),
    Event("closed", "the process has closed the file in good order"),
    Event(
        "lost",
        "lines did not fit on the disk, or are not in the log any more",
        {"count": "lines", "since": "wall time of the first of them, s"},
        {"gone": "bool: they were written, and the reader does not find them"},
    ),
)

_RESERVED = frozenset({"t", "mono", "name", "n"})


def _plain(value: object) -> object:
    """Converts a value that JSON cannot represent. Never raises: an unknown kind of value becomes its repr."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if "__str__" in vars(type(value)):  # an id
            return str(value)
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    item = getattr(value, "item", None)
    if callable(item):  # numpy and torch scalars
        with contextlib.suppress(Exception):
            return item()
    return str(value) if isinstance(value, (os.PathLike, BaseException)) else repr(value)


def _finite(value: object, depth: int = 0) -> object:
    """Returns a copy for strict JSON: NaN and infinities become strings, keys become strings, cycles are cut."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if depth > 20:
        return repr(value)
    if isinstance(value, Mapping):
        return {str(k): _finite(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v, depth + 1) for v in value]
    return _finite(_plain(value), depth + 1)


_strict = json.JSONEncoder(separators=(",", ":"), default=_plain, allow_nan=False).encode


class EventLog:
    """Append-only log of one process; `EventLog(None)` discards everything.

    Thread-safe, and safe in a Python signal handler (the lock is reentrant, a line is one write). `emit` costs some
    10-60 us.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        member: str = "",
        node: str = "",
        role: str = "member",
        day_nbytes: int = DAY_NBYTES,
    ):
        """Opens `path` for appending (folders are made).

        Args:
            path: The file; None discards.
            member: Member id stamped on every line; set it later with `identify`.
            node: The member's name, constant over its incarnations.
            role: "member", "scheduler", "agent" or "harness".
            day_nbytes: Of what is written in 24 hours so much is kept; 0: all.
        """
        self.path: Path | None = None if path is None else Path(path)
        """File to which the log is written; None if it is discarded."""
        self.lost = 0
        """Number of lines that did not fit and are not yet accounted for in the file."""
        self._member, self._node, self._role = member, node, role
        self._lock = threading.RLock()
        self._fd = -1
        self._torn = False
        self._lost_since = 0.0
        self._warned: set[str] = set()
        self._writing = False
        self._number = self._size = 0
        self._part_nbytes = -(-day_nbytes // PARTS_A_DAY)
        self._before = Before()
        self._offset_us = 0
        self._looked_at = 0.0
        if self.path is None:
            return
        try:
            self._open(self.path)
        except OSError as error:
            self._warn(f"cannot be written ({error}): training goes on, and this process leaves no evidence there")
            self.path = None

    @classmethod
    def in_directory(
        cls,
        directory: str | os.PathLike[str] | None,
        name: str,
        *,
        role: str = "member",
        day_nbytes: int = DAY_NBYTES,
    ) -> EventLog:
        """Opens a new log file `<role>-<name>-<pid>.jsonl` in `directory`; None discards all events."""
        if not directory:
            return cls(None, node=name, role=role)
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", name) or "anonymous"
        path = Path(directory) / f"{role}-{safe}-{os.getpid()}.jsonl"
        with contextlib.suppress(OSError):  # a folder that cannot be read can perhaps be written
            parts = [part for _, part in map(part_of, path.parent.glob(f"{path.stem}.*.jsonl"))]
            if parts:  # of a process that had this process id before
                path = _part(path, max(parts) + 1)
        return cls(path, node=name, role=role, day_nbytes=day_nbytes)

    def identify(self, member: str, node: str = "") -> None:
        """Sets the member id (from Welcome, new after a rejoin) that is written into the following lines."""
        with self._lock:
            self._member = member
            self._node = node or self._node

    @property
    def member(self) -> str:
        """Member id that is written into the log's lines."""
        return self._member

    @property
    def node(self) -> str:
        """Member name that is written into the log's lines."""
        return self._node

    def emit(self, name: str, /, **fields: Any) -> None:
        """Appends one event to the log. Never raises, and blocks on nothing but the file system.

        Args:
            name: One that a room declares (`registry.py`); others are written all the same, and folds skip them.
            fields: Plain values, dataclasses, enums, bytes, scalars of numpy or torch. `member` says whom it is about
                if not the writer. A field named t, mono or name gets a trailing underscore.
        """
        if self._fd < 0:
            return
        line: Line = {**self._stamp(), "member": self._member}
        if self._node:
            line["node"] = self._node
        line["name"] = str(name)
        if fields.get("member", self._member) != self._member:
            line.pop("node", None)
            if self._member:
                line["by"] = self._member
        for key, value in fields.items():
            line[key + "_" if key in _RESERVED else key] = value
        try:
            text = _strict(line)
        except Exception:  # an odd value must cost its line's form, not the training
            text = _strict(_finite(line))
        self._write(str(name), text)

    def _stamp(self) -> Line:
        mono_us = time.monotonic_ns() // 1000
        offset_us = time.time_ns() // 1000 - mono_us
        if abs(offset_us - self._offset_us) > _CLOCKS_APART_US:
            self._offset_us = offset_us
        return {"t": (mono_us + self._offset_us) / 1e6, "mono": mono_us / 1e6}

    def _write(self, name: str, text: str) -> None:
        with self._lock:
            if self._fd < 0:
                return
            if self._writing:  # a signal handler's line, while another one has its number but is not written
                self._put_line(text)
                return
            self._writing = True
            try:
                self._look()
                if self.lost:
                    # The count goes first, in a write of its own, so that it is never claimed twice.
                    note = self._stamp() | {"member": self._member, "name": "lost", "count": self.lost}
                    if not self._put_line(
                        self._numbered("lost", _strict(note | {"since": round(self._lost_since, 6)}))
                    ):
                        return  # it was counted, for the line that would follow
                    self._number += 1
                    self.lost = 0
                self._number += self._put_line(self._numbered(name, text))
            except BaseException:  # a signal handler raised: what the reader has as the line before is not known
                self._before.clear()
                raise
            finally:
                self._writing = False

    def _numbered(self, name: str, text: str) -> str:
        """Returns an event as the file's next line, with its number, shortened if possible."""
        if name in SHORTENED:
            whole = json.loads(text)
            short = self._before.shorten(whole)
            self._before.keep(whole, whole=short is None)
            text = text if short is None else _strict(short)
        return f'{{"n":{self._number + 1},{text[1:]}'

    def _put_line(self, text: str) -> bool:
        """Writes a line; returns whether it was written whole; if not, it counts as lost."""
        try:
            if self._put(text.encode("utf-8", "backslashreplace") + b"\n"):
                return True
            self._lose()
        except OSError as error:
            self._lose(error)
        return False

    def _put(self, data: bytes) -> bool:
        """Writes a line's bytes; returns False if the disk took only part of them, so that the next line must begin
        anew.
        """
        if self._torn:
            data = b"\n" + data
        done = os.write(self._fd, data)
        self._size += done
        if done == len(data):
            self._torn = False
            return True
        self._torn = self._torn or done > 0
        return False

    def _lose(self, error: OSError | None = None) -> None:
        if not self.lost:
            self._lost_since = time.time()
        self.lost += 1
        self._before.clear()
        self._warn(
            f"cannot be written ({error or 'no space for a whole line'}): training goes on, lines are dropped and "
            "counted until there is space"
        )

    def _warn(self, trouble: str) -> None:
        """Logs a warning about a trouble of the log file, once per kind of trouble."""
        if trouble.split()[0] not in self._warned:
            self._warned.add(trouble.split()[0])
            logger.warning("event log %s %s", self.path, trouble)

    # ---------------------------------------------------------------------------------------------- its files

    def _open(self, path: Path) -> None:
        """Continues the log in another file; raises OSError if it cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = open_to_append(path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.path, self._size = fd, path, os.fstat(fd).st_size
        # A predecessor that was killed while the disk was full may have left half a line.
        self._torn = _ends_torn(fd, self._size)
        self._before.clear()
        line = self._stamp() | {"member": self._member, **({"node": self._node} if self._node else {})}
        line |= {"name": "opened", "pid": os.getpid(), "host": socket.gethostname(), "role": self._role}
        line |= {"format": FORMAT, **({"part": part_of(path)[1]} if self._number else {})}
        self._number += self._put_line(self._numbered("opened", _strict(line)))

    def _look(self) -> None:
        """Before a line is written, opens the file again if it was deleted, or the next one if it is full."""
        assert self.path is not None
        now = time.monotonic()
        full = self._part_nbytes and self._size >= self._part_nbytes
        try:
            if now - self._looked_at >= LOOK_EVERY_S:
                self._looked_at = now
                if not self._there():
                    self._warn("was deleted while it was written: it is made anew, and what it held is not shown")
                    self._open(self.path)
            if full:
                self._make_room()
                path, part = part_of(self.path)
                self._open(_part(path, part + 1))
        except OSError as error:
            self._size = 0  # the next try is after as many bytes again
            self._warn(f"stays where it is: the next file cannot be made ({error})")

    def _there(self) -> bool:
        """Returns whether the open file is still the one at its path."""
        assert self.path is not None
        try:
            return os.stat(self.path).st_ino == os.fstat(self._fd).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _make_room(self) -> None:
        """Deletes the oldest log files of this role and name, until another one fits into the day's limit."""
        assert self.path is not None
        ours = _whose(self.path)
        seen = [(path.stat(), path) for path in log_files(self.path.parent) if _whose(path) == ours]
        today = sorted((s.st_mtime, path, s.st_size) for s, path in seen if s.st_mtime > time.time() - 86400)
        size = sum(nbytes for _, _, nbytes in today)
        for _, path, nbytes in today:
            if size <= self._part_nbytes * (PARTS_A_DAY - 1) or path == self.path:
                return
            path.unlink(missing_ok=True)
            size -= nbytes
            self._warn(
                f"has grown beyond {self._part_nbytes * PARTS_A_DAY} bytes within 24 hours (log_day_nbytes): its "
                "oldest parts are deleted, and an audit will not show what they held"
            )

    def close(self) -> None:
        """Writes the event `closed` and closes the file; later events are discarded."""
        with self._lock:
            if self._fd >= 0:
                self.emit("closed")
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def forget_old(folder: Path, now: float) -> None:
    """Deletes logs in a default folder to which nothing was written for a month.

    Args:
        folder: Of one job.
        now: Wall time, s.
    """
    with contextlib.suppress(OSError):  # somebody else's folder stays as it is
        for path in log_files(folder):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > FORGOTTEN_S:
                    path.unlink()


def _part(path: Path, part: int) -> Path:
    """Returns the path of a log's continuation file with this number."""
    return path.with_name(f"{path.stem}.{part}.jsonl")


def _whose(path: Path) -> tuple[Path, str]:
    """Returns folder, role and name of a log file; other processes may have the same."""
    return path.parent, part_of(path)[0].stem.rpartition("-")[0]


def _ends_torn(file: int, nbytes: int) -> bool:
    return nbytes > 0 and os.pread(file, 1, nbytes - 1) != b"\n"
