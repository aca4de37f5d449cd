"""Reads the state at a header out of the memory of members on the same machine, for a learner (by_reference.py).

Theory of operation. The state itself is read while it is still, from the front to the back. Every block is followed by
a look at the donor's generation; once the donor's optimizer is about to write, the rest is read from the copy that it
made of what nobody had read yet. All donors of this machine are told how far the learner is, so that they copy nothing
that it has. If one dies or cannot give the rest, the next one goes on where it ended: they all hold the same.

Nothing is hashed here: a learner's state counts for nothing until it was compared with all members' (protocol.md 19).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from chaos_lightning.errors import ChaosError, RefusedError, StateError, WireError
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type
from chaos_lightning.replication.by_reference import Places
from chaos_lightning.replication.client import PullConfig
from chaos_lightning.replication.landing import Landing
from chaos_lightning.replication.memory import Region
from chaos_lightning.replication.session import PullReport, SourceReport
from chaos_lightning.replication.source import ByteSource, Dial, Endpoint, reason_of
from chaos_lightning.replication.table import StateTable

BLOCK_NBYTES = 16 << 20
"""Bytes that are read between two looks at the generation and messages to the donors."""

Keep = Callable[[str, BulkSocket], None]


class StateReader:
    """Reader of the state out of donors' memory, for one learner.

    Args:
        endpoints: The donors, in the order in which they are to be asked.
        dial: Opens an authenticated bulk socket.
        state: State of this member, into which the bytes are read; `prepare` and `adopt` are called in the calling
            thread.
        head: Hash of the header.
        seq: Slot of the header.
        config: Waits and sizes.
        abandoned: Function that is asked now and then; True ends the reading.
        keep: Function that is given (member, connection) of connections that are in good order afterwards; any thread.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        dial: Dial,
        state: StateAccess,
        *,
        head: str,
        seq: int,
        config: PullConfig,
        abandoned: Callable[[], bool],
        keep: Keep,
    ) -> None:
        self._endpoints = [e for e in endpoints if not e.route]
        self._dial = dial
        self._state = state
        self._head, self._seq = head, seq
        self._config = config
        self._abandoned = abandoned
        self._keep = keep
        self._began = time.monotonic()
        self._failed: dict[str, str] = {}
        self._sources: dict[str, SourceReport] = {}
        self._others: dict[str, Future[BulkSocket | None]] = {}
        self._landing: Landing | None = None
        self._at = 0

    def run(self) -> PullReport | None:
        """Reads the state; returns None if no donor on this machine could give all of it, which may leave tensors
        partly filled.

        Raises:
            StateError: The state does not fit here, or reading it was abandoned.
        """
        pool = ThreadPoolExecutor(max(1, len(self._endpoints)), "chaos-read")
        for endpoint in self._endpoints:
            self._others[endpoint.member] = pool.submit(self._connected, endpoint)
        pool.shutdown(wait=False)
        try:
            for endpoint in self._endpoints:
                channel = self._others.pop(endpoint.member).result()
                places = self._read_from(endpoint.member, channel) if channel is not None else None
                if places is not None:
                    return self._report(places)
            return None
        finally:
            for member, connecting in self._others.items():
                connecting.add_done_callback(partial(self._part, member))

    # ------------------------------------------------------------------ connections

    def _connected(self, endpoint: Endpoint) -> BulkSocket | None:
        deadline = self._began + self._config.deadline_s
        source = ByteSource(endpoint, self._dial, stall_timeout_s=self._config.stall_timeout_s, deadline=deadline)
        try:
            channel = source.connect()
        except (ChaosError, OSError) as error:
            self._failed[endpoint.member] = reason_of(error)
            return None
        if source.beside():
            return channel
        self._keep(endpoint.member, channel)
        return None

    def _tell(self, channel: BulkSocket) -> None:
        channel.send(BulkFrame(Type.HAVE_STATE, self._head, self._seq, self._at))

    def _tell_others(self) -> None:
        """Tells the donors that are not being read from how many bytes of the state have been read."""
        for connecting in self._others.values():
            channel = connecting.result() if connecting.done() else None
            if channel is not None:
                with contextlib.suppress(OSError):
                    self._tell(channel)

    def _part(self, member: str, connecting: Future[BulkSocket | None]) -> None:
        """Tells a donor that was not read from how much was read, and hands its connection on for later use."""
        channel = connecting.result()
        if channel is None:
            return
        try:
            self._tell(channel)
        except OSError:
            channel.sock.close()
        else:
            self._keep(member, channel)

    # ------------------------------------------------------------------ bytes

    def _read_from(self, member: str, channel: BulkSocket) -> Places | None:
        """Continues to read from this donor where the last one ended; returns None if it cannot give the rest."""
        try:
            while True:
                request = BulkFrame(Type.GET_PLACES, self._head, self._seq, 0, 1)
                places = Places(channel.ask(request, Type.PLACES, lambda _: self._go_on()))
                if self._landing is None:  # every donor describes the same
                    limit = self._config.max_attached_nbytes
                    self._landing = Landing(self._state, places.table, places.manifest, limit)
                if self._read(places, self._landing.regions, member, channel):
                    self._landing.finish()
                    self._keep(member, channel)
                    return places
        except RefusedError as error:
            self._failed[member] = str(error)
            self._keep(member, channel)
        except (OSError, WireError) as error:
            self._failed[member] = reason_of(error)
            channel.sock.close()
        except BaseException:
            channel.sock.close()
            raise
        return None

    def _read(self, places: Places, regions: Sequence[Region], member: str, channel: BulkSocket) -> bool:
        """Reads the state block by block; returns False if the donor changed it during that and copies lie
        elsewhere.
        """
        total = places.table.nbytes
        while self._at < total:
            self._go_on()
            began = time.monotonic()
            parts = list(_parts(places.table, regions, self._at, min(total, self._at + BLOCK_NBYTES)))
            if not places.read(self._at, [buffer for _, _, _, buffer in parts]):
                return False
            for target, start, stop, buffer in parts:
                target.landed(start, stop, buffer)
            nbytes = sum(stop - start for _, start, stop, _ in parts)
            done = SourceReport(nbytes, max(time.monotonic() - began, 1e-9), 1)
            self._sources[member] = self._sources.get(member, SourceReport()).plus(done)
            self._at += nbytes
            self._tell(channel)
            self._tell_others()
        return True

    def _go_on(self) -> None:
        if self._abandoned():
            raise StateError(f"reading the state of slot {self._seq} was abandoned: something else was decided")

    def _report(self, places: Places) -> PullReport:
        by_source = {m: s.nbytes for m, s in self._sources.items()}
        return PullReport(
            head=self._head,
            seq=self._seq,
            nbytes=places.table.nbytes,
            by_source=by_source,
            skipped=0,
            seconds=time.monotonic() - self._began,
            retries=0,
            corrupted=0,
            failed=dict(self._failed),
            policy="by reference",
            reason=f"read out of the memory of {', '.join(by_source) or 'nobody'}, on this machine",
            moving_s=sum(s.busy_s for s in self._sources.values()),
            sources=dict(self._sources),
        )


def _parts(
    table: StateTable, regions: Sequence[Region], low: int, high: int
) -> Iterator[tuple[Region, int, int, memoryview]]:
    """Divides the bytes [low, high) of a state among its tensors; yields region, range within it, and memory to receive
    into.
    """
    for entry, target in zip(table.entries, regions, strict=True):
        start, stop = max(low, entry.offset) - entry.offset, min(high, entry.stop) - entry.offset
        if start < stop:
            yield target, start, stop, target.land(start, stop)
