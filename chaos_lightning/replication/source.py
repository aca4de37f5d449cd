"""Connects to a source of bytes: a member, reached directly or through others.

Theory of operation. A `ByteSource` is dialled when it is first needed, by whichever thread asks. One without a link is
reached through its neighbours: the way is made first (forward.py). What a source on this machine lends can be read out
of its memory instead (by_reference.py). `cut` from another thread ends any wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from chaos_lightning.errors import ChaosError
from chaos_lightning.replication.bulk import BulkSocket
from chaos_lightning.replication.forward import send_route
from chaos_lightning.transport.locality import on_this_machine


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address at which a donor listens."""

    member: str
    address: str
    port: int
    route: tuple[str, ...] = ()
    """Members on the way, the donor last; empty: the address is the donor's own. Else the address is that of the first
    of these, and each passes requests on to the next, up to `member`.
    """


Dial = Callable[[Endpoint], socket.socket]
"""Function that returns a connected, authenticated, blocking socket; bounded in time by itself."""


class ByteSource:
    """Source of bytes: a member, and the connection to it once it is made.

    Args:
        endpoint: The member, and the way to it.
        dial: Opens an authenticated bulk socket.
        stall_timeout_s: Seconds after which the member is given up if it sends nothing.
        deadline: Value of `time.monotonic()` that no wait passes.
        head: Hash of the header that a route is made for.
        seq: Slot of the header.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dial: Dial,
        *,
        stall_timeout_s: float,
        deadline: float = float("inf"),
        head: str = "0" * 16,
        seq: int = 0,
    ) -> None:
        self.endpoint = endpoint
        self.member = endpoint.member
        self.dialling = False
        """Whether the last attempt has not got as far as a connection."""
        self._dial = dial
        self._stall_timeout_s = stall_timeout_s
        self._deadline = deadline
        self._about = head, seq
        self._channel: BulkSocket | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def channel(self) -> BulkSocket | None:
        """Connection to the source; None if there is none."""
        return self._channel

    def connect(self) -> BulkSocket:
        """Returns the connection to the source; dials if there is none.

        Raises:
            ChaosError, OSError: There is no connection to the source, and none can be made.
        """
        if self._channel is not None:
            return self._channel
        self.dialling = True
        channel = self._reach()
        self.dialling = False
        with self._lock:
            if not self._closed:
                self._channel = channel
                return channel
        channel.sock.close()
        raise ConnectionError("the transfer is over")

    def _reach(self) -> BulkSocket:
        route = self.endpoint.route
        first = replace(self.endpoint, member=route[0], route=()) if route else self.endpoint
        sock = self._dial(first)
        channel = BulkSocket(sock, stall_timeout_s=self._stall_timeout_s, deadline=self._deadline)
        try:
            if len(route) > 1:
                send_route(channel, *self._about, route[1:])
        except BaseException:
            sock.close()
            raise
        return channel

    def beside(self) -> bool:
        """Returns whether the source runs on this machine, judged by addresses; connects if need be."""
        return not self.endpoint.route and on_this_machine(self.connect().sock)

    def disconnect(self) -> None:
        """Closes the connection; the next request makes another one."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.sock.close()

    def release(self) -> BulkSocket | None:
        """Returns the connection, if there is one, and leaves it to the caller."""
        with self._lock:
            channel, self._channel = self._channel, None
        return channel

    def cut(self) -> None:
        """Ends all waits for this source, from any thread, and prevents further dialling."""
        with self._lock:
            self._closed = True
            channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)


def reason_of(error: BaseException) -> str:
    """Describes in words why a source failed."""
    if isinstance(error, TimeoutError):
        return "it sent nothing for too long"
    if isinstance(error, ChaosError):
        return str(error)
    return f"{type(error).__name__}: {error}"
