"""The event log: one JSON object a line, one file per process; its writer, and the events it writes of itself.

Theory of operation. Everything that is ever shown or checked about a run (timeline, goodput, report, live view,
audit) is a fold over these files, so a line must survive whatever kills its writer. Each line is a single `os.write`
on an `O_APPEND` descriptor: once `emit` returned, the bytes belong to the kernel and a SIGKILL of the process loses
nothing. (A power cut may: the log is evidence about training, not part of its protocol, and is not worth an fsync a
step.) A log never stops training: when the disk is full there is one warning, lines are dropped and counted, and the
first line that fits again is preceded by a `lost` event with the count.

Line format: `{"t": wall seconds, "mono": monotonic seconds, "member": id, "name": event, ...fields}`. `t` puts the
files of several machines in one order, `mono` measures durations within one file (and, on one machine, between
files). `member` is the member the event is about: the writer itself unless the event says otherwise, and then `by`
names the writer.
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

from chaos_lightning.events.reader import Record, Tail, read_events
from chaos_lightning.events.registry import FORMAT, Event

__all__ = ["EVENTS", "EventLog", "Record", "Tail", "read_events"]

logger = logging.getLogger("chaos_lightning.events")


EVENTS = (
    Event(
        "opened",
        "a process begins to write this file",
        {"pid": "process id", "host": "name", "role": '"member", "scheduler", "agent" or "harness"'},
        {"node": "the member's name, constant over its incarnations", "format": "version of the log, see registry.py"},
    ),
    Event("closed", "the process has closed the file in good order"),
    Event("lost", "lines did not fit on the disk", {"count": "lines", "since": "wall time of the first of them, s"}),
)

_RESERVED = frozenset({"t", "mono", "name"})


def _plain(value: object) -> object:
    """What `json` cannot write itself. Never raises: a strange value becomes its repr."""
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
    """A copy that strict JSON can hold: NaN and infinities become strings, keys become strings, cycles are cut."""
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
    10-30 us.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, member: str = "", node: str = "", role: str = "member"):
        """Open `path` for appending (folders are made).

        Args:
            path: The file; None discards.
            member: Member id stamped on every line; set it later with `identify`.
            node: The member's name, constant over its incarnations.
            role: "member", "scheduler", "agent" or "harness".
        """
        self.path: Path | None = None if path is None else Path(path)
        self.lost = 0
        """Lines that did not fit and are not yet accounted for in the file."""
        self._member, self._node = member, node
        self._lock = threading.RLock()
        self._fd = -1
        self._torn = False
        self._lost_since = 0.0
        self._warned = False
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._warn(error)
            return
        # A predecessor that was killed while the disk was full may have left half a line.
        self._torn = _ends_torn(self.path)
        self.emit("opened", pid=os.getpid(), host=socket.gethostname(), role=role, format=FORMAT)

    @classmethod
    def in_directory(cls, directory: str | os.PathLike[str] | None, name: str, *, role: str = "member") -> EventLog:
        """A new file `<role>-<name>-<pid>.jsonl` in `directory`; None discards."""
        if not directory:
            return cls(None, node=name, role=role)
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", name) or "anonymous"
        return cls(Path(directory) / f"{role}-{safe}-{os.getpid()}.jsonl", node=name, role=role)

    def identify(self, member: str, node: str = "") -> None:
        """Stamp this member id (given at Welcome, new after a rejoin) on the lines that follow."""
        with self._lock:
            self._member = member
            self._node = node or self._node

    @property
    def member(self) -> str:
        """The id stamped on lines."""
        return self._member

    @property
    def node(self) -> str:
        """The name stamped on lines."""
        return self._node

    def emit(self, name: str, /, **fields: Any) -> None:
        """Append one event. Never raises and never blocks on anything but the file system.

        Args:
            name: One that a room declares (`registry.py`); others are written all the same, and folds skip them.
            fields: Plain values, dataclasses, enums, bytes, scalars of numpy or torch. `member` says whom it is about
                if not the writer. A field named t, mono or name gets a trailing underscore.
        """
        if self._fd < 0:
            return
        line: dict[str, Any] = {"t": round(time.time(), 6), "mono": round(time.monotonic(), 6), "member": self._member}
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
        self._write(text.encode("utf-8", "backslashreplace") + b"\n")

    def _write(self, data: bytes) -> None:
        with self._lock:
            if self._fd < 0:
                return
            try:
                if self.lost:
                    # The count goes first, in a write of its own, so that it is never claimed twice.
                    note = {"t": round(time.time(), 6), "mono": round(time.monotonic(), 6), "member": self._member}
                    note |= {"name": "lost", "count": self.lost, "since": round(self._lost_since, 6)}
                    if not self._put(_strict(note).encode() + b"\n"):
                        self._lose(None)
                        return
                    self.lost = 0
                if not self._put(data):
                    self._lose(None)
            except OSError as error:
                self._lose(error)

    def _put(self, data: bytes) -> bool:
        """One write; False if the disk took only a part of the line, which the next write then closes off."""
        if self._torn:
            data = b"\n" + data
        done = os.write(self._fd, data)
        if done == len(data):
            self._torn = False
            return True
        self._torn = self._torn or done > 0
        return False

    def _lose(self, error: OSError | None) -> None:
        if not self.lost:
            self._lost_since = time.time()
        self.lost += 1
        self._warn(error)

    def _warn(self, error: OSError | None) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "event log %s cannot be written (%s): training goes on, lines are dropped and counted until there is space",
            self.path,
            error or "no space for a whole line",
        )

    def close(self) -> None:
        """Write `closed` and let the file go; later events are discarded."""
        with self._lock:
            if self._fd >= 0:
                self.emit("closed")
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                return False
            file.seek(size - 1)
            return file.read(1) != b"\n"
    except OSError:
        return False
