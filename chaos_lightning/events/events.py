"""The event log: one JSON object a line, one file per process, and the names and fields of every event.

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
import enum
import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chaos_lightning.events.reader import Record, Tail, read_events
from chaos_lightning.protocol.types import Header, Spent, ViewId

__all__ = ["FIELDS", "Event", "EventLog", "Record", "Tail", "committed_fields", "read_events"]

logger = logging.getLogger("chaos_lightning.observe")


class Event(enum.StrEnum):
    """Names of events; each is a plain string too: `emit("committed", ...)` is `emit(Event.COMMITTED, ...)`.

    `FIELDS` lists what each carries; more fields are allowed everywhere.
    """

    # --- the file itself (written by EventLog)
    OPENED = "opened"
    CLOSED = "closed"
    LOST = "lost"
    # --- a member's life
    WELCOMED = "welcomed"
    REFUSED = "refused"
    JOINED = "joined"
    LEAVE = "leave"
    LEFT = "left"
    FENCED = "fenced"
    REJOIN = "rejoin"
    FINISHED = "finished"
    # --- views and slots
    NEXT_VIEW = "next_view"
    VIEW = "view"
    PREPARE = "prepare"
    DECIDE = "decide"
    WAY_IN = "way_in"
    CAUGHT_UP = "caught_up"
    ATTEMPT = "attempt"
    DROPPED = "dropped"
    COMMITTED = "committed"
    HAND_ON = "hand_on"
    REDO = "redo"
    BOUNDARY = "boundary"
    STATE_HASH = "state_hash"
    EPOCH = "epoch"
    CHECKPOINT = "checkpoint"
    RESUMED = "resumed"
    KEPT = "kept"
    RESUMED_KEPT = "resumed_kept"
    # --- state transfer
    SNAPSHOT = "snapshot"
    RELEASED = "released"
    OBSERVING = "observing"
    REPLAYED = "replayed"
    PUBLISHED = "published"
    PULL_STARTED = "pull_started"
    PULL_SOURCE = "pull_source"
    PULL_PROGRESS = "pull_progress"
    PULL_DONE = "pull_done"
    # --- trouble
    LINK_UP = "link_up"
    LINK_DOWN = "link_down"
    LINK_MEASURED = "link_measured"
    LINKS = "links"
    SUSPECT = "suspect"
    DEATH = "death"
    ERROR = "error"
    NOTICE = "notice"
    FAULT_INJECTED = "fault_injected"
    VALIDATION = "validation"


FIELDS: Mapping[Event, tuple[str, ...]] = {
    # role: "member", "scheduler", "agent" or "harness"; node: the member's name (constant over its incarnations).
    Event.OPENED: ("pid", "host", "role"),
    Event.CLOSED: (),
    # count: lines that did not fit on the disk; since: wall time (s) of the first of them.
    Event.LOST: ("count", "since"),
    # role: "founder", "joiner" or "standby".
    Event.WELCOMED: ("role", "reason"),
    Event.REFUSED: ("reason",),
    # This member holds the state and contributes from the next slot on. head: hash of the header it stands on.
    Event.JOINED: ("role", "view", "seq", "step", "head"),
    Event.LEAVE: ("reason",),
    Event.LEFT: ("reason",),
    Event.FENCED: ("reason",),
    Event.REJOIN: ("reason",),
    Event.FINISHED: ("seq", "step"),
    # A member has heard of a view that a header is to carry.
    Event.NEXT_VIEW: ("id",),
    # id: "term.number"; predecessor likewise; members, joiners: ids in rank order.
    Event.VIEW: ("id", "members", "joiners", "reason"),
    # Scheduler: a view is being prepared after a failure; decided: base is a header hash, hand_on a bool.
    Event.PREPARE: ("number", "reason"),
    Event.DECIDE: ("id", "members", "base", "hand_on", "reason"),
    # Scheduler: how a newcomer comes in ("replay" or "pause"), and that it has caught up with the log.
    Event.WAY_IN: ("way", "reason"),
    Event.CAUGHT_UP: ("seq",),
    Event.ATTEMPT: ("view", "seq"),
    Event.DROPPED: ("view",),
    # See committed_fields(). step: optimizer steps including this slot; header, prev: hashes; contributors:
    # [id, weight]; duration_s: since this member's previous commit; wait_s: of it, blocked in the engine;
    # spent: what THIS member used in this slot; ledger: the header's, cumulative; both as {stream, epoch, spans}.
    Event.COMMITTED: ("seq", "kind", "step", "view", "header", "prev", "contributors", "spent", "next_view"),
    Event.HAND_ON: ("seq", "head"),
    Event.REDO: ("seq", "view"),
    Event.BOUNDARY: ("seq",),
    # Hash of the replicated state after committed slot seq with header `head`.
    Event.STATE_HASH: ("seq", "step", "head", "hash"),
    # length: samples in this epoch of this stream; lets the audit tell a complete epoch from an interrupted one.
    Event.EPOCH: ("stream", "epoch", "length"),
    # What left the job (PROTOCOL.md 4): step and head are those of the state that was written.
    Event.CHECKPOINT: ("path", "step", "head"),
    # The whole job went on from a checkpoint: seq restarts, ledger is the checkpoint's.
    Event.RESUMED: ("step", "ledger"),
    Event.KEPT: ("step",),
    Event.RESUMED_KEPT: ("step", "seq", "keeper", "path"),
    # Member: the state at a header is kept for observers. Newcomer: it observes; it has applied the log up to seq.
    Event.SNAPSHOT: ("seq", "head"),
    # left_out: logged slots whose bytes were used again before they were copied.
    Event.RELEASED: ("seq", "left_out"),
    Event.OBSERVING: ("seq", "head", "sources"),
    Event.REPLAYED: ("seq", "step", "steps"),
    Event.PUBLISHED: ("seq", "head"),
    Event.PULL_STARTED: ("seq", "head", "sources"),
    # One donor's part: nbytes, seconds; skipped: bytes not sent because the joiner held them already.
    Event.PULL_SOURCE: ("source", "nbytes", "seconds"),
    # Also: rate_bps (bits per second of late), remaining_s, and sources as {donor: bytes}.
    Event.PULL_PROGRESS: ("nbytes", "total"),
    Event.PULL_DONE: ("nbytes", "skipped", "seconds", "hash"),
    Event.LINK_UP: ("peer",),
    Event.LINK_DOWN: ("peer", "evidence"),
    # From this member to the peer: half a round trip in s, bits per second; why it was measured.
    Event.LINK_MEASURED: ("peer", "latency_s", "rate_bps", "evidence"),
    # Every few seconds; links: one object per link with peer, sent_bps and received_bps (bits per second since the last
    # such event), byte counts, and rate_bps and latency_s where it was measured. Letters of others: relayed, waiting.
    Event.LINKS: ("links", "relayed", "waiting"),
    # member: who is suspected / dead (not the writer).
    Event.SUSPECT: ("member", "evidence"),
    Event.DEATH: ("member", "evidence"),
    Event.ERROR: ("text",),
    Event.NOTICE: ("text",),
    # Written BEFORE the fault happens. kind: a word of lab/faults.py; phase, step: where it struck; node, member:
    # the victim; seconds: for how long (sigstop, cut).
    Event.FAULT_INJECTED: ("kind",),
    Event.VALIDATION: ("seconds",),
}
"""Fields each event must have; units are seconds, bytes and samples unless the comment says otherwise."""

_RESERVED = frozenset({"t", "mono", "name"})


def _plain(value: object) -> object:
    """What `json` cannot write itself. Never raises: a strange value becomes its repr."""
    if isinstance(value, ViewId):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
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
        self.emit(Event.OPENED, pid=os.getpid(), host=socket.gethostname(), role=role)

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
            name: A word of `Event` (others are allowed, folds skip them).
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
                    note |= {"name": Event.LOST.value, "count": self.lost, "since": round(self._lost_since, 6)}
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
                self.emit(Event.CLOSED)
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


def _spent(spent: Spent) -> dict[str, Any]:
    return {"stream": spent.stream, "epoch": spent.epoch, "spans": spent.spans}


def committed_fields(
    header: Header,
    *,
    duration_s: float,
    wait_s: float = 0.0,
    spent: Iterable[Spent] = (),
    state_hash: str = "",
) -> dict[str, Any]:
    """Fields of a `committed` event, from the header that committed the slot.

    Args:
        header: The slot's header.
        duration_s: Seconds since this member's previous commit.
        wait_s: Seconds of those that the training thread was blocked in the engine.
        spent: What this member itself used in the slot (its contribution's).
        state_hash: Hash of the replicated state after the slot, if it was taken.
    """
    fields: dict[str, Any] = {
        "seq": header.seq,
        "kind": header.kind.value,
        "step": header.step,
        "view": str(header.view),
        "header": header.hash,
        "prev": header.prev_hash,
        "contributors": [[s.member, s.weight] for s in header.contributors],
        "spent": [_spent(s) for s in spent],
        "ledger": [_spent(s) for s in header.ledger.streams],
        "next_view": str(header.next_view),
        "duration_s": round(duration_s, 6),
        "wait_s": round(wait_s, 6),
    }
    if header.name:
        fields["call"] = header.name
    if header.error:
        fields["error"] = header.error
    if state_hash:
        fields["state_hash"] = state_hash
    return fields
