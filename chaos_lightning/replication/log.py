"""Keeps the log: headers and reduced bytes of the latest slots, for newcomers that replay them (protocol.md 18).

Theory of operation. From the header that first names a learner on, the I/O thread hands every committed slot to
`SlotLog.keep`. Reduced bytes lie in a buffer that the slot after next will use again, so they are copied at once, by a
thread of the log's own. A step takes longer than that; slots that reduce nothing are over in no time, so the training
thread waits for the copy before it takes part in one (`settle`), or the newcomer would lack the last step before the
boundary that lets it in. An entry whose copy still came too late is left out, and other members have it. The log holds
at most `cap_nbytes`; the oldest entries go first, and a learner that still needed them is let in by a pause.

Learners ask for entries (bulk requests), nobody sends them unasked: a slow learner holds up nobody, any member can
give any entry, and who asks for the next one names the header that it must stand on (4a).

If all who observe can read this process's memory (by_reference.py), an entry is there at once and its bytes are read
where they lie; they are copied only if a learner has not said within `hold_s` that it has them (`taken`).
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.types import Header, Span

_LENGTH = struct.Struct("!I")
DEFAULT_CAP_NBYTES = 2 << 30
AT_ONCE_NBYTES = 1 << 18
"""Most bytes that are copied in the I/O thread itself, which takes some 30 microseconds."""
GRACE_S = 0.005
"""Seconds that a reader is waited for before a copy is made: reading 17 MiB takes some 3 ms, as copying does, and only
one of them is needed.
"""
_REMEMBERED = 1024
"""Number of slots for which it is known which learners have them."""
_KEPT_AT_LEAST = 4
"""Number of entries that are kept whatever the cap says, or a single large model would have no log at all."""


@dataclass(frozen=True, slots=True)
class LoggedSlot:
    """Committed slot in the log."""

    seq: int
    prev: str
    """Hash of the header before this slot's."""
    head: str
    encoded: bytes
    """Bytes of the header as it travels."""
    raw: memoryview | None
    """Buffer of the result's size, of which only `spans` are meaningful. None: this slot reduced nothing."""
    spans: tuple[Span, ...]

    def packed(self, inline_nbytes: int) -> bytes:
        """Encodes the entry for sending: the header, and the reduced bytes if they are at most `inline_nbytes`."""
        parts = [_LENGTH.pack(len(self.encoded)), self.encoded]
        if self.raw is not None and sum(stop - start for start, stop in self.spans) <= inline_nbytes:
            parts += [bytes(self.raw[start:stop]) for start, stop in self.spans]
        return b"".join(parts)

    @property
    def nbytes(self) -> int:
        return len(self.encoded) + (self.raw.nbytes if self.raw is not None else 0)


@dataclass(frozen=True, slots=True)
class _Order:
    entry: LoggedSlot
    source: memoryview | None
    still: Callable[[], bool]
    generation: int
    readers: frozenset[str]
    """Members that must have said that they have the bytes, or the bytes are copied; none: they are copied at once."""
    not_before: float
    """Moment (monotonic, s) at which the bytes are copied if a reader lacks them."""


class SlotLog:
    """Log of the latest slots. The condition `changed` guards all its data and is notified about every entry.

    Args:
        changed: A condition that readers wait on.
        cap_nbytes: Limit of all entries together.
    """

    def __init__(self, changed: threading.Condition, cap_nbytes: int = DEFAULT_CAP_NBYTES) -> None:
        self.cap_nbytes = cap_nbytes
        self.late = 0
        """Number of entries that were left out because their bytes were about to be overwritten."""
        self._changed = changed
        self._entries: dict[int, LoggedSlot] = {}
        self._newest = -1
        self.gone = -1
        """Last slot of a log that was ended."""
        self._left: set[int] = set()
        """Slots of this log that were left out."""
        self._generation = 0
        self._waiting = 0
        """Number of orders whose entries are not in the log before the thread has dealt with them."""
        self._ordered = 0
        """Number of orders that the thread has not dealt with."""
        self._hasty = False
        self._taken: dict[int, set[str]] = {}
        self._sated: set[str] = set()
        """Learners that read no more of the log."""
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ the I/O thread's side

    def keep(
        self,
        header: Header,
        encoded: bytes,
        raw: memoryview | None,
        spans: Sequence[Span],
        still: Callable[[], bool],
        *,
        readers: Collection[str] = (),
        hold_s: float = 0.0,
    ) -> None:
        """Takes a committed slot into the log; returns at once.

        Args:
            header: Header of the slot.
            encoded: The header as bytes.
            raw: The result buffer, if the slot reduced anything.
            spans: Byte ranges of the buffer that were reduced.
            still: Whether `raw` has not been overwritten yet; asked after the copy.
            readers: Members that want the slot, if each of them reads it in this process's memory.
            hold_s: Seconds to wait for the readers before the bytes are copied.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._copy_all, name="chaos-log", daemon=True)
            self._thread.start()
        wanted = tuple(spans) if raw is not None else ()
        copy: memoryview | None = None
        if raw is not None and sum(stop - start for start, stop in spans) <= AT_ONCE_NBYTES:
            # Steps of small models are over before another thread gets its turn.
            copy, raw = _copy(raw, spans), None
        entry = LoggedSlot(header.seq, header.prev_hash, header.hash, encoded, copy, wanted)
        with self._changed:
            # An entry that is there at once must leave no gap that the thread has yet to fill.
            lent = frozenset(readers) if not self._waiting else frozenset()
            if lent:
                self._store(entry)
                if raw is None:
                    return
            else:
                self._waiting += 1
            order = _Order(entry, raw, still, self._generation, lent, time.monotonic() + hold_s)
            self._ordered += 1
        self._orders.put(order)

    def settle(self, timeout_s: float) -> None:
        """Waits until the bytes of all slots so far are copied, or all learners that want them have read them; called
        by the training thread.

        Who reads in place has `GRACE_S` left to do so.
        """
        if not self._ordered:
            return
        with self._changed:
            if self._changed.wait_for(lambda: not self._ordered, min(GRACE_S, timeout_s)):
                return
            self._hasty = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._ordered, timeout_s)
            self._hasty = False

    def end(self) -> None:
        """Empties the log, which nobody needs once no learner observes any more."""
        with self._changed:
            self._generation += 1
            self.gone = max(self.gone, self.newest)
            self._entries.clear()
            self._left.clear()
            self._taken.clear()
            self._sated.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the copying thread."""
        self.end()
        self._orders.put(None)

    # ------------------------------------------------------------------ the serving threads' side (holding `changed`)

    def after(self, head: str, seq: int) -> LoggedSlot | None:
        """Returns the entry of slot `seq` if its header follows the header `head`; else None."""
        entry = self._entries.get(seq)
        return entry if entry is not None and entry.prev == head else None

    def at(self, head: str, seq: int) -> LoggedSlot | None:
        """Returns the entry of slot `seq` if its header is `head`; else None."""
        entry = self._entries.get(seq)
        return entry if entry is not None and entry.head == head else None

    def taken(self, reader: str, seq: int) -> None:
        """Notes that this learner has the bytes of a slot, which may not be committed at this member yet."""
        self._taken.setdefault(seq, set()).add(reader)
        while len(self._taken) > _REMEMBERED:
            del self._taken[min(self._taken)]
        self._changed.notify_all()

    def attend(self, reader: str, *, until: bool = False) -> None:
        """Notes that this learner begins to read bytes out of this process's memory; with `until`, that it has
        stopped.
        """
        if until:
            self._sated.add(reader)
            self._changed.notify_all()
        else:
            self._sated.discard(reader)

    def lacks(self, seq: int) -> bool:
        """Returns whether the slot was committed but its entry is missing for good: left out, evicted, or of an ended
        log.
        """
        return seq in self._left or seq <= max(self.newest, self.gone)

    def why_not(self, seq: int) -> str:
        """Returns in words why the entry of this slot is missing."""
        if seq in self._left:
            return "its bytes were used again before they were copied"
        if not self._entries:
            return f"the log was ended at slot {self.gone}, as nobody observed any more"
        return f"it reaches to slot {self.newest} and was cut before"

    @property
    def newest(self) -> int:
        """Number of the latest slot in the log; -1 if the log is empty."""
        return self._newest if self._entries else -1

    # ------------------------------------------------------------------ the log's own thread

    def _copy_all(self) -> None:
        while (order := self._orders.get()) is not None:
            if not (order.readers and self._all_take(order)):
                self._copy_one(order)
            with self._changed:
                self._ordered -= 1
                self._changed.notify_all()

    def _copy_one(self, order: _Order) -> None:
        entry, source = order.entry, order.source
        if source is not None:
            entry = replace(entry, raw=_copy(source, entry.spans))
        intact = source is None or order.still()
        with self._changed:
            self._waiting -= not order.readers
            if not intact:
                self._left_out(order)
            elif order.generation == self._generation:
                self._store(entry)

    def _held(self, order: _Order) -> bool:
        """Returns whether all learners that read out of this process's memory have this slot's bytes."""
        return bool(order.readers) and order.readers <= self._taken.get(order.entry.seq, set()) | self._sated

    def _all_take(self, order: _Order) -> bool:
        """Waits until all readers have the slot's bytes, or time is up; returns whether the bytes need not be
        copied.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._hasty or order.generation != self._generation or self._held(order),
                max(0.0, order.not_before - time.monotonic()),
            )
            return order.generation != self._generation or self._held(order)

    def _left_out(self, order: _Order) -> None:
        """Leaves out an entry whose bytes were overwritten before they were copied; learners get it from other
        members.
        """
        if self._held(order):
            return
        self.late += 1
        if order.generation == self._generation:
            self._entries.pop(order.entry.seq, None)
            self._left.add(order.entry.seq)
            self._changed.notify_all()

    def _store(self, entry: LoggedSlot) -> None:
        self._entries[entry.seq] = entry
        self._newest = max(self._newest, entry.seq) if len(self._entries) > 1 else entry.seq
        self._evict()
        self._changed.notify_all()

    def _evict(self) -> None:
        total = sum(e.nbytes for e in self._entries.values())
        while total > self.cap_nbytes and len(self._entries) > _KEPT_AT_LEAST:
            oldest = self._entries.pop(min(self._entries))
            self._taken.pop(oldest.seq, None)
            total -= oldest.nbytes


def unpacked(payload: bytes) -> tuple[bytes, memoryview]:
    """Splits a log entry as sent into the encoded header and the reduced bytes; raises WireError if it is malformed."""
    if len(payload) < _LENGTH.size:
        raise WireError(f"a log entry has at least {_LENGTH.size} bytes, got {len(payload)}")
    (length,) = _LENGTH.unpack_from(payload)
    if length > len(payload) - _LENGTH.size:
        raise WireError(f"a log entry's header of {length} bytes in a payload of {len(payload)}")
    rest = memoryview(payload)[_LENGTH.size :]
    return bytes(rest[:length]), rest[length:]


def _copy(source: memoryview, spans: Sequence[Span]) -> memoryview:
    """Returns a buffer of the same size into which only these ranges are copied."""
    copy = np.empty(source.nbytes, np.uint8)
    for start, stop in spans:
        np.copyto(copy[start:stop], np.frombuffer(source[start:stop], np.uint8))
    return copy.data
