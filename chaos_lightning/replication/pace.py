"""Limits the rate at which a donor sends a snapshot while it trains, so that its own steps hardly slow down.

Theory of operation. Serving costs the donor's links and, on few cores, its compute. Neither can be told ahead, but both
show in one number, the time of its steps. While nothing is sent, the median of the last steps is the *usual* one. While
a snapshot is sent, each step that takes much longer than usual lowers the rate, each other one raises it, as congestion
control does. The rate begins where the whole state takes `START_S` and never falls below what sends it within
`LONGEST_S`, so that a newcomer is never starved by a donor whose steps are slow for another reason. The log is not
paced: it must be faster than the steps that fill it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque

START_S, LONGEST_S = 0.25, 30.0
SLOW, LOWER, RAISE = 1.3, 0.6, 1.25
"""Factor beyond the usual time at which a step is slow, and the factors by which a slow step and another one change the
rate.
"""
REMEMBERED = 25
BURST_S = 0.02


class Pace:
    """Token bucket whose rate follows the donor's steps. Methods may be called by any thread."""

    def __init__(self) -> None:
        self.rate_nbytes_s = 0.0
        """Rate in bytes per second; 0: nothing is being sent."""
        self.slowed = 0
        """Number of times that a slow step lowered the rate."""
        self._usual: deque[float] = deque(maxlen=REMEMBERED)
        self._nbytes = 0
        self._free_at = 0.0
        self._sent_at = 0.0
        self._lock = threading.Lock()

    @property
    def usual_s(self) -> float:
        """Median seconds of the latest steps during which nothing was sent; 0 if unknown yet."""
        with self._lock:
            return statistics.median(self._usual) if len(self._usual) >= 5 else 0.0

    def begin(self, nbytes: int) -> None:
        """Begins to pace a snapshot of this size, which is about to be sent."""
        with self._lock:
            self._nbytes = nbytes
            self.rate_nbytes_s = nbytes / START_S
            self._free_at = 0.0

    def end(self) -> None:
        """Stops pacing, as no learner observes any more."""
        with self._lock:
            self.rate_nbytes_s = 0.0

    def step(self, seconds: float, now: float) -> None:
        """Adapts the rate to the duration of the donor's latest step, in seconds from the commit before it to its
        own.
        """
        with self._lock:
            sending = self.rate_nbytes_s > 0 and now - self._sent_at < seconds + BURST_S
            if not sending:
                self._usual.append(seconds)
                return
            if len(self._usual) < 5:
                return
            if seconds > SLOW * statistics.median(self._usual):
                self.slowed += 1
                self.rate_nbytes_s = max(self._nbytes / LONGEST_S, self.rate_nbytes_s * LOWER)
            else:
                self.rate_nbytes_s *= RAISE

    def delay_s(self, nbytes: int, now: float) -> float:
        """Counts these bytes as sent; returns the seconds to wait before really sending them."""
        with self._lock:
            self._sent_at = now
            if self.rate_nbytes_s <= 0:
                return 0.0
            self._free_at = max(self._free_at, now - BURST_S) + nbytes / self.rate_nbytes_s
            return max(0.0, self._free_at - nbytes / self.rate_nbytes_s - now)

    def spend(self, nbytes: int) -> None:
        """Counts these bytes as sent, and waits until the rate permits sending them."""
        delay = self.delay_s(nbytes, time.monotonic())
        if delay > 0:
            time.sleep(delay)
