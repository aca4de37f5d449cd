"""Sends and receives frames over a link: one non-blocking TCP socket, served by the I/O loop.

Theory of operation. Received payloads go where the owner says before they arrive (`target`): straight into result
memory, into a scratch buffer, or - when their view is over - into a bin. Sent payloads are not copied: the owner
guarantees that the memory is still until the frame's view is over (protocol.md 3), which `purge` says. Between
processes of one machine that can read each other's memory, chunks are sent as references (transport/reference.py). A
link that breaks says so once, with the evidence, and is then dead for good; a new connection makes a new link. One that
is not wanted any more is finished: what is queued still goes, then a BYE, and only the peer closes it.

On a protected connection (transport/sealing.py) a frame is sealed when its turn to leave has come, so that frames may
still overtake and be purged before, and its header opens before anything that it says is believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.types import NO_VIEW, ViewId
from chaos_lightning.transport.frames import (
    ATTEMPTS,
    BORDERS,
    CHUNKS,
    HEADER_NBYTES,
    Frame,
    FrameType,
    pack,
    payload_checksum,
    unpack,
)
from chaos_lightning.transport.holding import AT_FIRST_NBYTES, Holding
from chaos_lightning.transport.locality import on_this_machine
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.pacing import pace
from chaos_lightning.transport.reference import (
    MAX_PIECES,
    PIECE,
    SMALLEST_NBYTES,
    Generation,
    NeighbourMemory,
    PartialSum,
    intact,
    pieces_of,
    refer,
)
from chaos_lightning.transport.sealing import session_of

_READ = select.EPOLLIN | select.EPOLLRDHUP
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_UNSENT = 0x894B  # SIOCOUTQNSD
_LITTLE_NBYTES = 128 << 10
_BUDGET_NBYTES = 4 << 20
"""Number of bytes that are read at most from one link before others get their turn."""


class Chunks(Protocol):
    """Receiver of chunks of gradients, or of border tensors."""

    def target(self, peer: str, frame: Frame) -> memoryview | None:
        """Returns memory for the payload: frame.length bytes, or 0 bytes for an UP frame by reference; None discards
        the payload.
        """

    def arrived(self, peer: str, frame: Frame, payload: memoryview | PartialSum) -> None: ...


class Owner(Chunks, Protocol):
    """Owner of a link: decides where all frames' payloads go, handles them, and is told when the link breaks."""

    def broken(self, peer: str, link: Link, evidence: str) -> None: ...


_TRAFFIC = (*ATTEMPTS, FrameType.MESSAGE, FrameType.ROUTED)
"""Frames to which measurements give way."""

Background = Callable[[], "list[memoryview] | None"]
"""Function that gives the next frame, header first, each time that nothing else is to be sent; None at the end."""


class Link:
    """Link to the member `peer`, for frames in both directions. All methods belong to the loop's thread.

    Args:
        loop: Loop that serves the socket.
        sock: Connected socket; the link owns it.
        peer: Member id of the other end.
        owner: Receiver of what arrives.
        generation: Generation of this process, if its neighbours may read its memory.
    """

    def __init__(
        self, loop: IoLoop, sock: socket.socket, peer: str, owner: Owner, generation: Generation | None = None
    ) -> None:
        self.peer = peer
        self.heard_at = time.monotonic()
        self.sent_nbytes = 0
        self.received_nbytes = 0
        self._loop = loop
        self._sock = sock
        self._owner = owner
        self._fd = sock.fileno()
        self.local = on_this_machine(sock)
        """Whether both ends are on one machine, as far as their addresses tell."""
        self.traffic = 0
        """Number of frames of the job that were queued here: chunks and messages."""
        self.traffic_at = 0.0
        """Time (monotonic, s) when a chunk or message was last queued, or a chunk began to arrive."""
        session = session_of(sock)
        self._sealer = session.sealer if session is not None else None
        self._opener = session.opener if session is not None else None
        self._sealed: list[memoryview] = []
        """Sealed bytes of the first frame in the queue that are on their way."""
        self.sums = not self.local and session is None
        """Whether chunks are sent with checksums."""
        self._queue: deque[tuple[ViewId, bool, list[memoryview], memoryview | None, tuple[int, int]]] = deque()
        self._holding = Holding(0 if self.local else AT_FIRST_NBYTES)
        self._background: Background | None = None
        self._finishing = False
        self._started = False
        self._writing = False
        self._head = bytearray(HEADER_NBYTES)
        self._head_view = memoryview(self._head)
        self._got = 0
        self._frame: Frame | None = None
        self._into: memoryview | None = None
        self._kept = False
        self._bin = memoryview(bytearray(1 << 18))
        self._left = 0
        self._said_bye = False
        self._neighbour: NeighbourMemory | None = None
        self.by_reference = False
        """Whether chunks to this peer are sent as references: it can read them."""
        self.open = True
        sock.setblocking(False)
        self._hold_little(self._holding.limit_nbytes)
        if self._opener is not None:
            self._expect()
        loop.register(self._fd, _READ, self._on_ready)
        if generation is not None and self.local:
            self.send(FrameType.OFFER, payload=(memoryview(generation.offer()),))

    # ------------------------------------------------------------------ sending

    def send(
        self,
        frame_type: FrameType,
        view: ViewId = NO_VIEW,
        seq: int = 0,
        start: int = 0,
        payload: Sequence[memoryview] = (),
    ) -> None:
        """Queues a frame and tries to send it at once. Frames of an attempt can be purged later, messages cannot."""
        if not self.open or self._finishing:
            return
        data = frame_type in ATTEMPTS
        if frame_type in _TRAFFIC:
            self.traffic += 1
            self.traffic_at = time.monotonic()
        length = sum(piece.nbytes for piece in payload)
        if frame_type in CHUNKS and self.by_reference and length >= SMALLEST_NBYTES and len(payload) <= MAX_PIECES:
            head = pack(frame_type, view, seq, start, length, 0, pieces=len(payload))
            parts = [memoryview(head), memoryview(refer(payload))]
        else:
            summed = length > 0 and (self.sums or not data) and self._sealer is None
            checksum = payload_checksum(payload) if summed else 0
            parts = [memoryview(pack(frame_type, view, seq, start, length, checksum, summed=summed))]
            if length:
                parts.extend(payload)
        # Routed messages are kept whole: another link may have to take them over.
        kept = payload[0] if frame_type == FrameType.ROUTED else None
        # A stage waits for a border, and nobody for a chunk before the step's end: borders, in their order, go first.
        entry = (view, data, parts, kept, (-1, 0) if frame_type in BORDERS else (seq, start))
        queue, at = self._queue, len(self._queue)
        if data:
            # Trees that share this link keep step: what lies first in the buffer goes first, but passes no message.
            first = 1 if self._started else 0
            while at > first and (before := queue[at - 1])[1] and before[0] == view and before[4] > entry[4]:
                at -= 1
        queue.insert(at, entry)
        if not self._writing:
            self._write()

    def fill(self, background: Background) -> None:
        """Sends frames from the function `background` whenever nothing else is queued; replaces an earlier such
        function.

        Meanwhile the kernel holds little that is not on its way, so that a chunk which comes does not wait behind it.
        """
        self._background = background
        self._hold_little(_LITTLE_NBYTES)
        if self.open and not self._writing:
            self._write()

    def quiet(self, now: float, quiet_s: float) -> bool:
        """Returns whether no chunk or message was sent here for `quiet_s` seconds and all bytes are acknowledged."""
        still = now - self.traffic_at >= quiet_s and not self._queue and self._frame is None
        return still and self._unacknowledged_nbytes() == 0

    def pace(self, rate_bps: float | None) -> None:
        """Limits the rate at which this link sends, in bits per second; None removes the limit."""
        pace(self._sock, rate_bps)
        self._holding.told(rate_bps)
        self._hold_little(self._holding.limit_nbytes)

    @property
    def sock(self) -> socket.socket:
        """Socket of the link; only for reading its counters."""
        return self._sock

    @property
    def delivered_nbytes(self) -> int:
        """Number of bytes that the other end's kernel (or a relay's) has acknowledged."""
        return self.sent_nbytes - self._unacknowledged_nbytes()

    def _unacknowledged_nbytes(self) -> int:
        return self._waiting_nbytes(termios.TIOCOUTQ)

    def _waiting_nbytes(self, which: int) -> int:
        try:
            return int.from_bytes(fcntl.ioctl(self._fd, which, bytes(4)), sys.byteorder)
        except OSError:
            return 0

    @property
    def queued_nbytes(self) -> int:
        """Number of bytes that the kernel has not taken yet."""
        return sum(part.nbytes for parts in (self._sealed, *(e[2] for e in self._queue)) for part in parts)

    def routed(self) -> list[memoryview]:
        """Returns the payloads of queued routed messages, for sending over another link after this one broke."""
        return [entry[3] for entry in self._queue if entry[3] is not None]

    def purge(self, older_or_equal: ViewId) -> None:
        """Drops queued chunks and borders of this and older views, except for one that is partly sent already.

        The rest of that one is copied: the memory that it was sent from may change from now on.
        """
        first = 1 if self._started and self._queue else 0
        if first and self._queue[0][1] and self._queue[0][0] <= older_or_equal:
            parts = self._queue[0][2]
            parts[:] = [memoryview(bytes(part)) for part in parts]
        self._queue = deque(e for i, e in enumerate(self._queue) if i < first or not e[1] or e[0] > older_or_equal)
        self._sealed = self._sealer.kept(self._sealed) if self._sealer is not None else []

    def divert(self, older_or_equal: ViewId) -> None:
        """Discards the rest of a chunk that is being received, if it belongs to this or an older view."""
        frame = self._frame
        if frame is not None and frame.type in ATTEMPTS and frame.view <= older_or_equal:
            if self._opener is not None and not frame.pieces:
                self._opener.divert()
            self._into = None
            self._kept = False

    def _write(self) -> None:
        queue = self._queue
        try:
            while queue or self._refill():
                parts = queue[0][2] if self._sealer is None else self._seal(queue[0][2])
                sent = self._sock.sendmsg(parts)
                self.sent_nbytes += sent
                self._started = True
                while parts and sent >= parts[0].nbytes:
                    sent -= parts.pop(0).nbytes
                if parts:
                    if sent:
                        parts[0] = parts[0][sent:]
                    continue
                if self._sealer is not None and queue[0][2]:
                    continue
                queue.popleft()
                self._started = False
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.modify(self._fd, _READ | select.EPOLLOUT)
            return
        except OSError as error:
            self._break(f"closed ({error.strerror or error})")
            return
        except WireError as error:
            self._break(f"used up ({error})")
            return
        if self._writing:
            self._writing = False
            self._loop.modify(self._fd, _READ)
        if self._finishing:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def _seal(self, parts: list[memoryview]) -> list[memoryview]:
        """Returns the sealed bytes of the first queued frame that are to be sent now; no other frame may overtake it
        any more.
        """
        assert self._sealer is not None
        if not self._sealed:
            begins, self._started = not self._started, True
            self._sealed = self._sealer.frame(parts, begins=begins)
        return self._sealed

    def _hold_little(self, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # no TCP, or an older kernel: chunks may wait a little longer
            self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, nbytes)

    def _refill(self) -> bool:
        parts = self._background() if self._background is not None else None
        if parts is None:
            if self._background is not None:
                self._background = None
                self._hold_little(self._holding.limit_nbytes)
            return False
        self._queue.append((NO_VIEW, False, parts, None, (0, 0)))
        return True

    # ------------------------------------------------------------------ receiving

    def _on_ready(self, events: int) -> None:
        if events & select.EPOLLOUT and self.open:
            held = self._holding
            if held.limit_nbytes and self._background is None and held.woken(self._waiting_nbytes(_UNSENT)):
                self._hold_little(held.limit_nbytes)
            self._write()
        if events & ~select.EPOLLOUT and self.open:
            self._read()

    def _read(self) -> None:
        budget = _BUDGET_NBYTES
        receive = self._receive if self._opener is None else self._receive_sealed
        try:
            while budget > 0 and self.open:
                count = receive()
                if count == 0:
                    break
                budget -= count
                self.received_nbytes += count
        except BlockingIOError:
            pass
        except WireError as error:
            self._break(f"damaged ({error})")
        except OSError as error:
            self._break(f"closed ({error.strerror or error})")
        self.heard_at = time.monotonic()

    def _receive(self) -> int:
        """Receives some bytes, and handles the header or payload that they complete; returns their number, 0 at the end
        of the stream.
        """
        if self._frame is None:
            count = self._sock.recv_into(self._head_view[self._got :])
            self._got += count
            if count == 0:
                self._ended()
            elif self._got == HEADER_NBYTES:
                self._got = 0
                self._begin(unpack(self._head_view))
            return count
        into = self._into
        if into is None:
            count = self._sock.recv_into(self._bin[: min(self._left, self._bin.nbytes)])
        else:
            count = self._sock.recv_into(into[into.nbytes - self._left :])
        if count == 0:
            self._ended()
        self._left -= count
        if self._left == 0 and count:
            self._finish()
        return count

    def _receive_sealed(self) -> int:
        """Receives some bytes as `_receive` does, on a protected connection, record by record."""
        opener = self._opener
        assert opener is not None
        came = count = self._sock.recvmsg_into(opener.room())[0]
        if count == 0:
            self._ended()
        while self.open and opener.took(came):
            if self._frame is None:
                self._begin(unpack(self._head_view))
            else:
                self._left -= opener.nbytes
                if self._left == 0:
                    self._finish()
            if self.open:
                self._expect()
            came = 0  # the next header may have come along
        return count

    def _expect(self) -> None:
        """Sets the memory into which the next record is received."""
        assert self._opener is not None
        if self._frame is None:
            self._opener.expect(self._head_view, HEADER_NBYTES)
            return
        into = self._into[self._into.nbytes - self._left :] if self._into is not None else None
        self._opener.expect(into, self._left, ahead_nbytes=HEADER_NBYTES)

    def _ended(self) -> None:
        if self._frame is not None:
            self._break("closed (in the middle of a frame)")
        else:
            self._break("closed (end of stream)" if not self._said_bye else "bye")

    def _begin(self, frame: Frame) -> None:
        self._frame = frame
        self._left = frame.length
        if frame.length == 0:
            self._into = self._bin[:0]
            self._kept = True
            self._finish()
            return
        if frame.pieces:
            self._left = frame.pieces * PIECE.size
            self._into, self._kept = memoryview(bytearray(self._left)), True
            return
        if frame.type in ATTEMPTS:
            self.traffic_at = time.monotonic()
        self._into = self._target(frame)
        self._kept = self._into is not None

    def _target(self, frame: Frame) -> memoryview | None:
        if frame.type == FrameType.OFFER:
            return memoryview(bytearray(frame.length))
        into = self._owner.target(self.peer, frame)
        by_value = not frame.pieces or frame.type != FrameType.UP
        if into is not None and by_value and into.nbytes != frame.length:
            raise WireError(f"a frame of {frame.length} bytes where {into.nbytes} were expected")
        return into

    def _finish(self) -> None:
        frame, into, kept = self._frame, self._into, self._kept
        self._frame = None
        self._into = None
        if frame is None:
            return
        if frame.type == FrameType.BYE:
            self._said_bye = True
            return
        if frame.type == FrameType.ACCEPT:
            self.by_reference = True
            return
        if not kept or into is None:
            return
        if frame.pieces:
            self._fetch(frame, into)
            return
        if frame.summed and payload_checksum((into,)) != frame.checksum:
            raise WireError(f"payload of a {frame.type.name} frame of slot {frame.seq} fails its checksum")
        if frame.type == FrameType.OFFER:
            self._on_offer(bytes(into))
            return
        self._owner.arrived(self.peer, frame, into)

    def _on_offer(self, offer: bytes) -> None:
        try:
            self._neighbour = NeighbourMemory(offer)
        except OSError:  # the kernel says no: chunks come by value
            return
        self.send(FrameType.ACCEPT)

    def _fetch(self, frame: Frame, references: memoryview) -> None:
        """Copies a chunk, to which the peer sent references, out of the peer's memory."""
        pieces = pieces_of(references)
        if self._neighbour is None or sum(nbytes for _, nbytes in pieces) != frame.length:
            raise WireError(f"references to {pieces} for a chunk of {frame.length} bytes")
        into = self._target(frame)
        if into is None:
            return
        self.received_nbytes += frame.length
        if frame.type == FrameType.UP:
            self._owner.arrived(
                self.peer, frame, PartialSum(self._neighbour, pieces, frame.view, frame.seq, self._on_lost)
            )
        elif intact(False, frame.view, frame.seq, self._neighbour.read(pieces, into)):
            self._owner.arrived(self.peer, frame, into)

    def _on_lost(self, error: OSError) -> None:
        self._loop.call(lambda: self._break(f"closed ({error.strerror or error})"))

    # ------------------------------------------------------------------ ending

    def finish(self) -> None:
        """Ends this link in an orderly way: sends what is queued, then BYE, then nothing more.

        It still takes what the peer sends, until the peer closes or `close` is called.
        """
        if self.open and not self._finishing:
            self._background = None
            self.send(FrameType.BYE)
            self._finishing = True
            if not self._writing:
                self._write()

    def _break(self, evidence: str) -> None:
        if self.open:
            self.close()
            self._owner.broken(self.peer, self, evidence)

    def close(self, *, bye: bool = False) -> None:
        """Closes the link at once; with `bye` sends BYE before, if the socket takes it, so that the peer does not count
        it as a failure.
        """
        if not self.open:
            return
        if bye and not self._started:
            self._queue.clear()
            self.send(FrameType.BYE)
        self.open = False
        self._loop.unregister(self._fd)
        self._background = None
        self._queue = deque(entry for entry in self._queue if entry[3] is not None)
        with contextlib.suppress(OSError):
            # A forked child may hold a copy of this socket; only shutdown ends the connection itself.
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
