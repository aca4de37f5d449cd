"""Limits to how many peers a member sends its state at the same time (protocol.md 15).

Theory of operation. A peer has a turn from its first request for bytes on, as long as it goes on asking. One that is
done, or waits for bytes from elsewhere, loses it soon, so that no two members wait for each other. A peer without a
turn waits, and may be served by another donor meanwhile.

A peer that takes its bytes slowly would keep others waiting, though it hardly uses what this member can send. So an
answer that takes `SLOW` times as long as usual counts no more while it goes on, and the peer's next one waits until no
other peer does. If most answers take long, this member is what is slow: then that is usual. Each answer that is slow at
a time doubles what the next one may take, so that few more than usual are served before it is known what is usual.

All methods are called with the server's lock held.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections import deque
from collections.abc import Set

IDLE_S = 0.25
"""Seconds without a request after which a turn is over: a peer that is served asks every few milliseconds."""
SLOW = 8
"""Factor beyond the usual time at which an answer counts as slow."""
SLOW_S = 2.0
"""Least seconds of a slow answer: the first answers go into buffers on the way, in no time."""
_REMEMBERED = 16
"""Number of the last answers whose median is the usual time."""


class Turns:
    """Turns of connections: only a connection that has a turn is sent the state."""

    def __init__(self) -> None:
        self._until: dict[socket.socket, float] = {}
        """Moment (s) at which the turn of each connection ends."""
        self._answers: dict[socket.socket, tuple[float, int]] = {}
        """Answers that are being sent: the moment (s) at which each began, and its size in bytes."""
        self._waiting: set[socket.socket] = set()
        self._slow: set[socket.socket] = set()
        """Connections whose last answer was slow, or whose present one is."""
        self._ended: dict[socket.socket, float] = {}
        """Moment (s) at which the last answer to each connection ended."""
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        """Seconds per byte of the last answers."""

    def take(self, sock: socket.socket, nbytes: int, most: int, now: float) -> bool:
        """Gives this connection a turn if one is free; returns whether it has one, which lasts until `done`.

        Args:
            sock: The connection.
            nbytes: Size of the answer to it.
            most: Number of connections that have one at a time, beside slow answers.
            now: The time (s).
        """
        for other in list(self._answers):
            self._pass_over(other, now, self._answers.keys())
        self._until = {s: until for s, until in self._until.items() if until > now}
        full = sock not in self._until and len(self._until) >= most
        if full or (sock in self._slow and not self._slow >= self._waiting):
            self._waiting.add(sock)
            return False
        self._waiting.discard(sock)
        self._until[sock] = math.inf
        self._answers[sock] = now, nbytes
        return True

    def _pass_over(self, sock: socket.socket, now: float, beside: Set[socket.socket]) -> None:
        """Takes the turn away from a connection that receives its answer slowly; the time allowed doubles for each
        other slow one.
        """
        since, nbytes = self._answers[sock]
        usual_s = statistics.median(self._usual) * nbytes if self._usual else 0.0
        others = len((self._slow & beside) - {sock})
        if now - since > max(SLOW_S, SLOW * usual_s) * 2.0**others:
            self._slow.add(sock)
            self._until.pop(sock, None)

    def done(self, sock: socket.socket, now: float) -> None:
        """Notes that an answer on this connection was sent."""
        if sock not in self._answers:
            return
        since, nbytes = self._answers[sock]
        self._usual.append((now - since) / max(1, nbytes))
        self._slow.discard(sock)
        # If this donor itself stood still, its answers end together.
        together = {s for s, at in self._ended.items() if now - at < IDLE_S}
        self._pass_over(sock, now, self._answers.keys() | together)
        del self._answers[sock]
        self._ended[sock] = now
        if sock in self._until:
            self._until[sock] = now + IDLE_S

    def leave(self, sock: socket.socket) -> None:
        """Forgets this connection, which was closed."""
        for known in (self._until, self._answers, self._ended):
            known.pop(sock, None)
        self._slow.discard(sock)
        self._waiting.discard(sock)
