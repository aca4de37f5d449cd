"""Computes when bytes that share an emulated link arrive; pure arithmetic, without a clock or a socket.

Theory of operation. Whatever bytes queue for (one direction of a link, one direction of a node's shared access) is a
`Meter`: a rate, and the time at which it will have sent all that it was given. A flow takes a `Lane`: all meters on its
way, and the link's latency. It may hand over a piece when all its meters are free. The piece then occupies each of them
for as long as its bytes take there, and arrives when the slowest has sent the last bit, plus the latency. So a
single message is as late as on a real wire, flows that share a meter alternate piece by piece, and the sum over time is
exact, however late the caller is: a flow that waited for a meter begins its next piece where the last one ended, not
when the caller woke (within `LATE_S`; a longer sleep is not made up for in a burst).

Pieces are small in time (`QUANTUM_S`), so a change of rate is felt at once.
"""

from __future__ import annotations

from collections.abc import Sequence

QUANTUM_S = 0.002
"""Seconds for which a piece occupies the slowest meter on its way, about."""
SHARED_QUANTUM_S = 0.01
"""Seconds for which a piece occupies a link behind a shared access, about. Links take turns there, and a slow one must
not get small turns only.
"""
MIN_PIECE_NBYTES = 4 << 10
MAX_PIECE_NBYTES = 256 << 10
LATE_S = 0.05
AHEAD_S = 0.00005
"""Seconds within which a meter becomes free and is taken as free already: waking up is not more exact."""


class Meter:
    """Sender of a limited rate, such as one direction of a link, which sends one bit after the other.

    Attributes:
        rate_bps: Bits per second.
        free_at: Time at which it has sent all that it was given, in the caller's clock, s.
    """

    __slots__ = ("free_at", "rate_bps")

    def __init__(self, rate_bps: float) -> None:
        self.rate_bps = rate_bps
        self.free_at = 0.0

    def change(self, rate_bps: float, now: float) -> None:
        """Changes the rate from time `now` on; bits that were accepted but are not sent yet get the new rate, too."""
        if self.free_at > now:
            self.free_at = now + (self.free_at - now) * self.rate_bps / rate_bps
        self.rate_bps = rate_bps


class Wire:
    """One direction of a link: its rate, its latency, and the number of bytes that have entered it."""

    __slots__ = ("latency_s", "meter", "nbytes")

    def __init__(self, rate_bps: float, latency_s: float) -> None:
        self.meter = Meter(rate_bps)
        self.latency_s = latency_s
        self.nbytes = 0


class Lane:
    """Route of one byte stream: the rate limits that it passes one after the other, and the link's latency.

    Args:
        wire: Direction of the link that the flow takes.
        accesses: Shared meters at its ends.
    """

    __slots__ = ("_accesses", "_meters", "arrives_at", "served_at", "wire")

    def __init__(self, wire: Wire, accesses: Sequence[Meter] = ()) -> None:
        self.wire = wire
        self.served_at = 0.0
        """Time at which its last piece began; of two flows for which a meter becomes free, the one served earlier
        is next.
        """
        self.arrives_at = 0.0
        self._accesses = tuple(accesses)
        self._meters = (wire.meter, *accesses)

    @property
    def free_at(self) -> float:
        """Time at which the next piece may start, on the caller's clock, s."""
        return max(m.free_at for m in self._meters)

    @property
    def piece_nbytes(self) -> int:
        """Size of the pieces in which bytes are sent, bytes."""
        bits = self.wire.meter.rate_bps * (SHARED_QUANTUM_S if self._accesses else QUANTUM_S)
        bits = min([bits, *(m.rate_bps * QUANTUM_S for m in self._accesses)])
        return int(min(MAX_PIECE_NBYTES, max(MIN_PIECE_NBYTES, bits / 8)))

    @property
    def in_flight_nbytes(self) -> int:
        """Most bytes that may be under way between the two ends of the stream."""
        slowest = min(m.rate_bps for m in self._meters)
        return int(slowest / 8 * (self.wire.latency_s + 2 * QUANTUM_S)) + 2 * MIN_PIECE_NBYTES

    def take(self, nbytes: int, now: float, *, waited: bool) -> float:
        """Sends a piece; returns the time at which it arrives.

        Args:
            nbytes: Size of the piece.
            now: The time, not more than AHEAD_S before `free_at`.
            waited: Whether the piece was there before its meters were free.
        """
        begin = max(self.free_at, now - LATE_S if waited else now)
        self.served_at = begin
        end = begin
        for meter in self._meters:
            meter.free_at = begin + nbytes * 8 / meter.rate_bps
            end = max(end, meter.free_at)
        self.wire.nbytes += nbytes
        # Bytes of one stream do not overtake each other when the latency falls.
        self.arrives_at = max(self.arrives_at, end + self.wire.latency_s)
        return self.arrives_at
