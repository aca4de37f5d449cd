"""Forwards requests for state to another member, and its replies back, for a joiner that has no link to that member.

Theory of operation. A joiner may want bytes from a member that it has no link to. It connects to a neighbour and
begins with a ROUTE request that names the hops still to go. The neighbour dials the first of them, hands on the rest
of the route, and answers ROUTED when the whole path stands. From then on the connection belongs to the member at its
far end: requests go there, replies come back, each header checked and each payload passed on in small parts, so a
relay holds a fixed amount of memory however large the range is. Checksums and piece hashes hold from end to end; a
relay cannot change a byte unnoticed.

A route is a list of names, nothing else. It has few hops, no member twice, and each member dials only whom it could
dial itself. A member relays for a few at a time.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chaos_lightning.errors import ChaosError, RefusedError, WireError
from chaos_lightning.protocol.limits import ID_NBYTES, nbytes
from chaos_lightning.replication import bulk
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type

MAX_HOPS = 8
PART_NBYTES = 256 << 10
"""Bytes of a payload that a relay holds, in each direction."""


def encode_route(route: Sequence[str]) -> bytes:
    """Returns the payload of a ROUTE request: the members through which the connection is still to go, in order."""
    return json.dumps(list(route), separators=(",", ":")).encode()


def decode_route(data: bytes) -> tuple[str, ...]:
    """Returns the members that a ROUTE request names; raises WireError unless they are few and distinct."""
    try:
        hops = json.loads(data)
        json.dumps(hops, ensure_ascii=False).encode()  # a lone surrogate is valid JSON, and no text
    except (ValueError, RecursionError) as error:
        raise WireError(f"malformed route: {error!r}") from error
    if type(hops) is not list or not 1 <= len(hops) <= MAX_HOPS:
        raise WireError(f"a route is a list of 1 to {MAX_HOPS} members")
    if any(type(hop) is not str or not 0 < nbytes(hop) <= ID_NBYTES for hop in hops) or len(set(hops)) != len(hops):
        raise WireError(f"a route names each member once, in at most {ID_NBYTES} bytes")
    return tuple(hops)


def send_route(channel: BulkSocket, head: str, seq: int, route: Sequence[str]) -> None:
    """Asks the peer of this connection to forward everything along a route; returns once all hops are connected.

    Raises:
        RefusedError: A member on the route refuses, and says why.
        WireError: The peer has answered something else.
    """
    request, payload = bulk.reply(Type.ROUTE, head, seq, encode_route(route))
    channel.send(request, payload)
    channel.reply_to(request, Type.ROUTED)


@dataclass
class Forwarder:
    """Relays of a member's server: connections on which it forwards requests and replies between two other members."""

    me: str
    dial: Callable[[str], socket.socket]
    """Opens an authenticated bulk socket to a member, by id; bounded in time by itself. Raises ChaosError or
    OSError, also for a member that it does not know."""
    stall_timeout_s: float = 10.0
    idle_timeout_s: float = 120.0
    most: int = 16
    """Connections that are relayed at the same time."""
    relayed_nbytes: int = 0
    """Payload bytes passed on so far."""
    _open: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def relay(self, near: BulkSocket, request: BulkFrame) -> str:
        """Carries out a ROUTE request: dials the next hop and forwards requests and replies, until one side ends.

        Returns:
            Reason why it ended, in words.
        """
        route = decode_route(near.receive_payload(request))
        try:
            far = self._extend(request, route)
        except (ChaosError, OSError) as error:
            words = f"{self.me} cannot pass requests on to {route[0]}: {error}"
            note = words.encode()[: bulk.MAX_NOTE_NBYTES]
            near.send(*bulk.reply(Type.REFUSED, request.head, request.seq, note))
            return words
        back = threading.Thread(target=self._replies, args=(far, near), name=f"chaos-relay-{route[-1]}", daemon=True)
        try:
            near.send(BulkFrame(Type.ROUTED, request.head, request.seq))
            back.start()
            self._requests(near, far)
            return f"the relay to {route[-1]} ended"
        finally:
            for channel in (far, near):
                with contextlib.suppress(OSError):
                    channel.sock.shutdown(socket.SHUT_RDWR)
            if back.ident is not None:
                back.join(self.stall_timeout_s)
            with self._lock:
                self._open.discard(far.sock)
            far.sock.close()

    def close(self) -> None:
        """Ends all relays; their threads return soon."""
        with self._lock:
            sockets = list(self._open)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _extend(self, request: BulkFrame, route: Sequence[str]) -> BulkSocket:
        if self.me in route:
            raise RefusedError(f"the route {' - '.join(route)} leads back to {self.me}")
        with self._lock:
            if len(self._open) >= self.most:
                raise RefusedError(f"{self.me} relays {self.most} connections already")
        sock = self.dial(route[0])
        try:
            far = BulkSocket(sock, stall_timeout_s=self.stall_timeout_s)
            if len(route) > 1:
                send_route(far, request.head, request.seq, route[1:])
        except BaseException:
            sock.close()
            raise
        with self._lock:
            self._open.add(sock)
        return far

    def _requests(self, near: BulkSocket, far: BulkSocket) -> None:
        """Forwards requests from the joiner's side (`near`) to the donor's side (`far`), in the serving thread."""
        onwards = self._sender(far)
        try:
            while (frame := near.receive_header(patience_s=self.idle_timeout_s)) is not None:
                if frame.type not in bulk.REQUESTS:
                    raise WireError(f"{frame.type.name} cannot be passed on")
                onwards.send(frame)
        finally:
            onwards.sock.close()

    def _replies(self, far: BulkSocket, near: BulkSocket) -> None:
        """Forwards replies from the donor's side (`far`) to the joiner's (`near`), in a thread of its own.

        When it ends it ends the connection: the joiner sees that and asks elsewhere.
        """
        part = memoryview(bytearray(PART_NBYTES))
        back = self._sender(near)
        with contextlib.suppress(OSError, WireError), back.sock:
            while (frame := far.receive_header(patience_s=self.idle_timeout_s)) is not None:
                if frame.type < bulk.FIRST_REPLY:
                    raise WireError(f"{frame.type.name} came where a reply was expected")
                back.send(frame)
                left = frame.length
                while left:
                    piece = part[: min(left, PART_NBYTES)]
                    far.receive_into([piece])
                    back.send_bytes(piece)
                    left -= len(piece)
                    self.relayed_nbytes += len(piece)
        for channel in (far, near):
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)

    def _sender(self, channel: BulkSocket) -> BulkSocket:
        """Duplicates a connection, so that one thread can send on it with its own timeouts while another one
        receives.
        """
        return BulkSocket(channel.sock.dup(), stall_timeout_s=self.stall_timeout_s)
