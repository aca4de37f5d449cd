"""Reads the log for a learner: entries in order, and the bytes of each from several members at once.

Theory of operation. One thread walks the chain: it asks a member for the header that stands on the last one, checks
that it does, and has the slot's reduced bytes fetched, in stripes: each source a part that is as large as the source
was quick, over a connection and a thread of its own. Where a source lends its memory (by_reference.py), the bytes are
read there instead, and all such sources are told so, since they need not keep them then. A source that dies, refuses
or stalls costs time only: its stripe goes to the others. Entries wait in a queue whose buffers are few, so a learner
that is slow stops asking, and the members' bounded log decides how long it may be so. When no source can give the next
entry, `error` says why.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from chaos_lightning.errors import ChaosError, RefusedError, StateError, WireError
from chaos_lightning.protocol.types import Header, Span
from chaos_lightning.replication import bulk
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type
from chaos_lightning.replication.by_reference import Buffers
from chaos_lightning.replication.log import unpacked
from chaos_lightning.replication.source import ByteSource, Dial, Endpoint, reason_of

REQUEST_NBYTES = 4 << 20
INLINE_NBYTES = 64 << 10
"""Most bytes that come with their header: a second round trip, to several members, would take longer than they do."""
_ALIGNMENT = 64
NOBODY = "0" * 16


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Committed slot and, if it reduced anything, its raw bytes."""

    header: Header
    raw: memoryview | None


class _Keeper:
    """Member from which a learner reads the log."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.failed = ""
        self.lent: Buffers | None = None
        """Places of the member's reduced bytes in memory, if they can be read there."""
        self.lock = threading.Lock()
        self._nbytes = 0
        self._busy_s = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second that the member has sent so far; 0 if it has sent none."""
        return self._nbytes / self._busy_s if self._busy_s else 0.0

    def sent(self, nbytes: int, seconds: float) -> None:
        """Notes that this member sent so many bytes in so many seconds."""
        self._nbytes += nbytes
        self._busy_s += seconds


class LogReader:
    """Reader of other members' logs for one learner.

    Args:
        sources: Members that keep the log.
        dial: Opens an authenticated bulk socket.
        header: Header that the first entry follows.
        decode: Function that decodes a header; raises WireError.
        scope: Function that returns the byte ranges that a step's header reduced; empty for other slots.
        buffers: Memory of a result's size, one for each entry with bytes that may wait to be applied. Their own while
            they are open.
        by_reference: Whether to read in the memory of sources that lend it.
        stall_timeout_s: Seconds after which a source that sends nothing is given up.
    """

    def __init__(
        self,
        sources: Sequence[Endpoint],
        dial: Dial,
        header: Header,
        *,
        decode: Callable[[bytes], Header],
        scope: Callable[[Header], Sequence[Span]],
        buffers: Sequence[memoryview],
        by_reference: bool = False,
        stall_timeout_s: float = 10.0,
    ) -> None:
        self.error = ""
        """Reason why no further entry will come; "" as long as there is none."""
        self.newest = header.seq
        self.listening = False
        """Whether a source has been asked for the next entry, and could have answered."""
        self.received_nbytes = 0
        self._began = (header.seq, time.monotonic())
        self._told_at = 0.0
        self._keepers = [_Keeper(ByteSource(s, dial, stall_timeout_s=stall_timeout_s)) for s in sources]
        self._decode = decode
        self._scope = scope
        self._by_reference = by_reference
        self._stall_timeout_s = stall_timeout_s
        self._ready: queue.SimpleQueue[LogEntry | None] = queue.SimpleQueue()
        self._spare: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for buffer in buffers:
            self._spare.put(buffer)
        self._closed = False
        self._pool = ThreadPoolExecutor(max(1, len(sources)), "chaos-log-pull")
        self._thread = threading.Thread(target=self._run, args=(header,), name="chaos-log-reader", daemon=True)

    # ------------------------------------------------------------------ the learner's side

    def start(self) -> None:
        self._thread.start()
        if self._by_reference:  # all of them hear what is here, also those that nothing is asked of
            for keeper in self._keepers:
                self._pool.submit(self._greet, keeper)

    def take(self, timeout_s: float) -> LogEntry | None:
        """Returns the next log entry; None if none comes within the timeout."""
        try:
            return self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def give_back(self, entry: LogEntry) -> None:
        """Returns the entry's buffer to the reader once its bytes are not needed any more."""
        if entry.raw is not None:
            self._spare.put(entry.raw)

    @property
    def waiting(self) -> bool:
        """Whether the reader waits for entries, since all that it fetched have been taken."""
        return self._ready.empty()

    def behind(self, seq: int) -> float:
        """Estimates how many slots the members are ahead of slot `seq` by now, from their pace so far.

        What was told about them grows old while an entry is applied, or while no buffer is free to ask for another.
        """
        first, at = self._began
        pace = (self.newest - first) / max(self._told_at - at, 1e-3)
        return self.newest - seq + pace * (time.monotonic() - self._told_at)

    def close(self) -> None:
        """Ends all threads and connections; once this returns, no thread writes into buffers any more."""
        self._closed = True
        self._spare.put(None)
        for keeper in self._keepers:
            keeper.source.cut()
        if self._thread.is_alive():
            self._thread.join(self._stall_timeout_s)
        self._pool.shutdown(wait=True, cancel_futures=True)
        for keeper in self._keepers:
            keeper.source.disconnect()

    # ------------------------------------------------------------------ the chain

    def _run(self, at: Header) -> None:
        try:
            while not self._closed:
                header, newest, inline = self._next(at)
                self.newest, self._told_at = max(self.newest, newest), time.monotonic()
                raw: memoryview | None = None
                spans = self._scope(header)
                if spans:
                    raw = self._spare.get()
                    if raw is None:
                        return
                    if inline:
                        self._place(header, raw, spans, inline)
                    elif not self._look(header, raw, spans):
                        self._fetch(header, raw, spans)
                self._ready.put(LogEntry(header, raw))
                at = header
        except (ChaosError, OSError) as error:
            if not self._closed:
                self.error = reason_of(error)
                self._ready.put(None)

    def _next(self, at: Header) -> tuple[Header, int, memoryview]:
        """Asks members in turn for the header that follows `at`; returns it, the newest slot, and the reduced bytes if
        they are few.
        """
        while living := [k for k in self._keepers if not k.failed]:
            keeper = living[0]
            try:
                channel = self._connect(keeper)
                self.listening = True
                request = BulkFrame(Type.GET_ENTRY, at.hash, at.seq + 1, 0, INLINE_NBYTES)
                channel.send(request)
                frame = channel.reply_to(request, Type.ENTRY, self._check_open)
                encoded, inline = unpacked(channel.receive_payload(frame))
                header = self._decode(encoded)
                if (header.seq, header.prev_hash) != (at.seq + 1, at.hash):
                    raise WireError(f"it sent slot {header.seq} on {header.prev_hash} for {at.seq + 1} on {at.hash}")
                return header, frame.offset, inline
            except (ChaosError, OSError) as error:
                self._fail(keeper, error)
        raise StateError(f"nobody can give slot {at.seq + 1} of the log: {self._fates()}")

    # ------------------------------------------------------------------ bytes

    def _look(self, header: Header, raw: memoryview, spans: Sequence[Span]) -> bool:
        """Reads the slot's bytes out of another process's memory; returns False if no member has them there any
        more.
        """
        for keeper in self._keepers:
            lent = keeper.lent if not keeper.failed else None
            if lent is None:
                continue
            try:
                whole = lent.read(header.seq, raw, spans)
            except (OSError, WireError) as error:
                self._fail(keeper, error)
                continue
            if whole:
                self.received_nbytes += sum(stop - start for start, stop in spans)
                self._tell(header)
                return True
        return False

    def _tell(self, header: Header) -> None:
        """Tells the members that lend their memory that this learner has the slot's bytes, so that they need not keep
        them.
        """
        for keeper in self._keepers:
            channel = keeper.source.channel
            if channel is not None and keeper.lent is not None and not keeper.failed:
                with contextlib.suppress(OSError):  # what becomes of this connection shows when it is needed
                    channel.send(BulkFrame(Type.HAVE_RESULT, header.hash, header.seq))

    def _fetch(self, header: Header, raw: memoryview, spans: Sequence[Span]) -> None:
        missing = [span for span in spans if span[1] > span[0]]
        while missing:
            living = [k for k in self._keepers if not k.failed]
            if not living:
                raise StateError(f"nobody is left for the bytes of slot {header.seq}: {self._fates()}")
            parts = _shares(missing, [k.rate for k in living])
            orders = {
                self._pool.submit(self._stripe, keeper, header, raw, part): (keeper, part)
                for keeper, part in zip(living, parts, strict=True)
                if part
            }
            missing = []
            for future in as_completed(orders):
                keeper, part = orders[future]
                error = future.exception()
                if error is None:
                    self.received_nbytes += sum(stop - start for start, stop in part)
                elif isinstance(error, ChaosError | OSError):
                    self._fail(keeper, error)
                    missing += part
                else:
                    raise error
        self._tell(header)

    def _place(self, header: Header, raw: memoryview, spans: Sequence[Span], inline: memoryview) -> None:
        """Copies reduced bytes that came together with their header into the buffer `raw`."""
        if inline.nbytes != sum(stop - start for start, stop in spans):
            raise WireError(f"slot {header.seq} came with {inline.nbytes} bytes; it reduced {list(spans)}")
        at = 0
        for start, stop in spans:
            raw[start:stop] = inline[at : at + stop - start]
            at += stop - start
        self.received_nbytes += at

    def _stripe(self, keeper: _Keeper, header: Header, raw: memoryview, part: Sequence[Span]) -> None:
        channel = self._connect(keeper)
        began = time.monotonic()
        requests = [
            BulkFrame(Type.GET_RESULT, header.hash, header.seq, at, min(REQUEST_NBYTES, stop - at))
            for start, stop in part
            for at in range(start, stop, REQUEST_NBYTES)
        ]
        for request in requests:
            channel.send(request)
        for request in requests:
            frame = channel.reply_to(request, Type.DATA, self._check_open)
            if (frame.offset, frame.length, frame.flags) != (request.offset, request.length, 0):
                raise WireError(f"it sent {frame.length} bytes at {frame.offset}, asked was {request}")
            into = raw[frame.offset : frame.offset + frame.length]
            channel.receive_into([into])
            bulk.check_payload(frame, [into])
        keeper.sent(sum(r.length for r in requests), time.monotonic() - began)

    # ------------------------------------------------------------------ connections

    def _check_open(self, _: BulkFrame) -> None:
        if self._closed:
            raise ConnectionError("the log is not read any more")

    def _greet(self, keeper: _Keeper) -> None:
        with contextlib.suppress(ChaosError, OSError):  # shows again when it is needed
            self._connect(keeper)

    def _connect(self, keeper: _Keeper) -> BulkSocket:
        with keeper.lock:
            fresh = keeper.source.channel is None
            channel = keeper.source.connect()
            if fresh and self._by_reference and keeper.source.beside():
                with contextlib.suppress(RefusedError, PermissionError):
                    keeper.lent = Buffers(channel.ask(BulkFrame(Type.GET_BUFFERS, NOBODY, 0), Type.BUFFERS))
            return channel

    def _fail(self, keeper: _Keeper, error: BaseException) -> None:
        keeper.failed = reason_of(error)
        keeper.source.cut()
        keeper.source.disconnect()

    def _fates(self) -> str:
        return "; ".join(f"{k.source.member}: {k.failed}" for k in self._keepers if k.failed) or "no source failed"


def _shares(spans: Sequence[Span], rates: Sequence[float]) -> list[list[Span]]:
    """Divides byte ranges among members in proportion to their rates; members of unknown rate get an average share."""
    known = [r for r in rates if r > 0]
    usual = sum(known) / len(known) if known else 1.0
    weights = [r or usual for r in rates]
    total = sum(stop - start for start, stop in spans)
    borders, so_far = [], 0.0
    for weight in weights:
        so_far += weight
        borders.append(int(total * so_far / sum(weights)) // _ALIGNMENT * _ALIGNMENT)
    borders[-1] = total
    parts: list[list[Span]] = [[] for _ in weights]
    at = 0
    for start, stop in spans:
        for part, (low, high) in zip(parts, zip([0, *borders[:-1]], borders, strict=True), strict=True):
            a, b = max(start, start + low - at), min(stop, start + high - at)
            if a < b:
                part.append((a, b))
        at += stop - start
    return parts
