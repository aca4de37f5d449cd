"""Measures the rates of links from the job's own traffic: all-reduces and state transfers.

Theory of operation. The kernel counts, per TCP connection, bytes that the other end has acknowledged, bytes that wait
to be sent, and the time in which there were any (TCP_INFO). `Meter.tick` reads these counters of every watched
connection, some ten times a second, and four times as often while something waits. Between two readings that both found
bytes waiting, with the connection busy all the time in between, what was acknowledged is what the link could carry:
nobody but the link held it up. All connections to one peer count together, for they share the path.

Such pieces are put together until they make a sample (`Estimate.fold`): enough bytes over enough time, or, on a link
that carries next to nothing, long enough. Samples are averaged; two in a row that are off to the same side by more than
`CHANGE` replace the average at once, since a link whose rate fell to a tenth is at a tenth, not on its way there. A
rate that differs by more than `CHANGE` from the one that was last reported is reported.

A pause of the sender, a slow reader on the other machine or a link that is not filled gives no sample. A sample is too
low only if the peer does not take its bytes; then that is the rate at which the job can use the link. A link that
nobody uses gives none either: probes look after those (`Meter.stale`).

A link that fell behind is the likeliest to be unused, for trees go round it, and the likeliest to change again. So
`ReprobeSchedule` has it probed soon, and less often the longer it has been slow: its recovery is noticed after a
quarter of the time that it took, and a link that stays slow costs some twenty probes in all.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

CHANGE = 0.25
"""Part by which an estimate must differ from the told rate to be told."""
SOONEST_S = 1.0
PART_OF_OUTAGE = 0.25
"""Part of the time since a link fell behind after which it is probed; after `SOONEST_S` at the soonest."""
SAMPLE_NBYTES = 256 << 10
SAMPLE_S = 0.1
SLOW_NBYTES = 32 << 10
SLOW_S = 1.0
STUCK_S = 2.0
"""Seconds with bytes waiting that make a sample as well, with fewer than SLOW_NBYTES carried."""
_WEIGHT = 0.25
_BUSY_SLACK_S = 0.01
"""Error, s, that busy time may have: the kernel keeps it in ticks of up to 10 ms."""

_INFO = struct.Struct("=16xI100xQ16xI20xQ")
"""Fields of struct tcp_info: snd_mss, bytes_acked, notsent_bytes, busy_time (us)."""


class Reading(NamedTuple):
    """Counters of one TCP connection at one moment."""

    at_s: float
    acked_nbytes: int
    unsent_nbytes: int
    busy_s: float


def read_counters(sock: socket.socket) -> Reading | None:
    """Returns the counters of a TCP connection; None if it is closed or no TCP, or the kernel does not report them."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return None
    if len(data) < _INFO.size:
        return None
    _, acked, unsent, busy_us = _INFO.unpack(data)
    return Reading(time.monotonic(), acked, unsent, busy_us / 1e6)


@dataclass(slots=True)
class Estimate:
    """Estimate of the rate to one peer, in bits per second."""

    rate_bps: float = 0.0
    """Rate in bits per second; 0.0: nothing yet."""
    told_bps: float = -1.0
    """Rate that was told last; -1: none was."""
    at_s: float = float("-inf")
    """Time of the last sample or probe."""
    _samples: int = 0
    _nbytes: int = 0
    _seconds: float = 0.0
    _odd: float = 0.0
    """Rate of a last sample that was off by more than CHANGE; its sign says to which side."""

    def known(self, rate_bps: float, now: float) -> None:
        """Sets the estimate to a rate that a probe has measured and reported."""
        self.rate_bps = self.told_bps = rate_bps
        self.at_s = now
        self._nbytes, self._seconds, self._odd = 0, 0.0, 0.0

    def fold(self, nbytes: int, seconds: float, now: float) -> float | None:
        """Adds a measurement: the link was saturated and carried `nbytes` in `seconds`; returns the estimate if it is
        to be reported.
        """
        self._nbytes += nbytes
        self._seconds += seconds
        enough = self._nbytes >= SAMPLE_NBYTES and self._seconds >= SAMPLE_S
        slow = self._nbytes >= SLOW_NBYTES and self._seconds >= SLOW_S
        if not (enough or slow or self._seconds >= STUCK_S):
            return None
        sample = self._nbytes * 8 / self._seconds
        self._nbytes, self._seconds = 0, 0.0
        self._average(sample)
        self.at_s = now
        if self._samples < 2 if self.told_bps < 0 else _near(self.rate_bps, self.told_bps):
            return None
        self.told_bps = self.rate_bps
        return self.rate_bps

    def _average(self, sample: float) -> None:
        self._samples += 1
        if self.told_bps < 0:
            self.rate_bps += (sample - self.rate_bps) / self._samples
            return
        off = 0.0 if _near(sample, self.rate_bps) else (1.0 if sample > self.rate_bps else -1.0)
        if off and off * self._odd > 0:
            level = (abs(self._odd) + sample) / 2
            self.rate_bps, self._odd = level if level >= 1.0 else 0.0, 0.0
            return
        # The first that is off may be chance: it is remembered, and only then believed.
        self._odd = off * sample if sample else off * 1e-9
        if not off:
            self.rate_bps += _WEIGHT * (sample - self.rate_bps)


def _near(rate: float, other: float) -> bool:
    return abs(rate - other) <= CHANGE * other


class ReprobeSchedule:
    """Schedule by which one link is probed again when its rate is not known from traffic; does no I/O.

    Args:
        usual_s: Seconds from one probe to the next on links whose rate has not fallen.
    """

    def __init__(self, usual_s: float) -> None:
        self.usual_s = usual_s
        self.best_bps = 1.0
        """Rate of the link before it fell behind, bit/s; a link that carries nothing is behind from the start."""
        self._rate_bps = self.best_bps
        self._fell_at: float | None = None

    def made(self, now: float) -> None:
        """Notes that the link was made, so that it is probed soon until its rate is known."""
        self._fell_at = now

    def heard(self, rate_bps: float, now: float) -> None:
        """Notes the link's present rate, from traffic or a probe."""
        changed = not _near(rate_bps, self._rate_bps)
        self._rate_bps = rate_bps
        if rate_bps >= (1 - CHANGE) * self.best_bps:
            self.best_bps, self._fell_at = max(self.best_bps, rate_bps), None
        elif changed or self._fell_at is None:
            self._fell_at = now  # it fell, or rose in part: it may go on doing so

    def pause_s(self, now: float) -> float:
        """Returns the seconds without news of the link's rate after which it is to be probed."""
        if self._fell_at is None:
            return self.usual_s
        pause_s = max(SOONEST_S, PART_OF_OUTAGE * (now - self._fell_at))
        if pause_s < self.usual_s:
            return pause_s
        self.best_bps, self._fell_at = self._rate_bps, None  # this is what it carries
        return self.usual_s

    @property
    def behind(self) -> bool:
        """Whether the link carries clearly less than it did shortly before."""
        return self._fell_at is not None


@dataclass(slots=True)
class _Peer:
    estimate: Estimate = field(default_factory=Estimate)
    socks: dict[socket.socket, Reading | None] = field(default_factory=dict)


class LinkMeter:
    """Meter of the rates of all links of one member. All methods belong to one thread.

    Args:
        tell: Function that is told (peer, bits per second) when an estimate has changed enough.
        read: Function that reads a connection's counters.
    """

    def __init__(
        self,
        tell: Callable[[str, float], None],
        read: Callable[[socket.socket], Reading | None] = read_counters,
    ) -> None:
        self._tell = tell
        self._read = read
        self._peers: dict[str, _Peer] = {}

    def watch(self, peer: str, sock: socket.socket) -> None:
        """Starts to read the counters of this connection."""
        self._peers.setdefault(peer, _Peer()).socks[sock] = None

    def unwatch(self, peer: str, sock: socket.socket) -> None:
        if peer in self._peers:
            self._peers[peer].socks.pop(sock, None)

    def forget(self, peer: str) -> None:
        """Forgets all about a peer that is gone or gets another id."""
        self._peers.pop(peer, None)

    def known(self, peer: str, rate_bps: float, now: float) -> None:
        """Sets the rate to a peer as a probe has measured and reported it."""
        self._peers.setdefault(peer, _Peer()).estimate.known(rate_bps, now)

    def rate(self, peer: str) -> float:
        """Returns the estimated rate to a peer in bits per second; 0.0 if unknown or nothing gets through."""
        return self._peers[peer].estimate.rate_bps if peer in self._peers else 0.0

    def stale(self, peer: str, now: float, age_s: float) -> bool:
        """Returns whether neither a probe nor traffic has measured the link to this peer for `age_s` seconds."""
        return peer in self._peers and now - self._peers[peer].estimate.at_s > age_s

    def waiting(self, peer: str) -> list[socket.socket]:
        """Returns the connections to this peer that had bytes to send at the last reading."""
        if peer not in self._peers:
            return []
        return [sock for sock, r in self._peers[peer].socks.items() if r is not None and r.unsent_nbytes > 0]

    def _carried(self, peer: str, nbytes: int, seconds: float, now: float) -> None:
        """Adds a measurement of a saturated link to the peer's estimate, and reports the estimate if it has changed
        enough.
        """
        rate = self._peers.setdefault(peer, _Peer()).estimate.fold(nbytes, seconds, now)
        if rate is not None:
            self._tell(peer, rate)

    def tick(self, now: float, skip: Callable[[str], bool] = lambda peer: False) -> bool:
        """Reads the counters of all watched connections, and measures those that were saturated since the last reading.

        Args:
            now: Monotonic seconds.
            skip: Peers whose traffic says nothing now: a probe is under way.

        Returns:
            Whether bytes wait anywhere; then the next tick should come soon.
        """
        waiting = False
        for name, peer in list(self._peers.items()):
            acked, seconds, filled = 0, 0.0, False
            for sock, before in peer.socks.items():
                reading = peer.socks[sock] = self._read(sock)
                if reading is None or before is None:
                    continue
                waiting |= reading.unsent_nbytes > 0
                seconds = max(seconds, reading.at_s - before.at_s)
                acked += reading.acked_nbytes - before.acked_nbytes
                filled |= _filled(before, reading)
            if filled and not skip(name):
                self._carried(name, acked, seconds, now)
        return waiting


def _filled(before: Reading, after: Reading) -> bool:
    """Returns whether the connection was saturated: it had bytes to send all the time between two readings."""
    seconds = after.at_s - before.at_s
    busy = after.busy_s - before.busy_s >= seconds - _BUSY_SLACK_S - seconds / 20
    return busy and seconds > 0 and before.unsent_nbytes > 0 and after.unsent_nbytes > 0
