"""How much of what a link has to send lies in the kernel's buffer, where nothing can overtake it.

Theory of operation. Several trees share a link: results that others wait for are queued behind partial sums that nobody
needs yet, unless they may overtake them (`Link.send`). What the kernel has taken cannot be overtaken, and its buffer of
several MiB is most of a second of a slow link. So the kernel is only given what the link sends in the next `AHEAD_S`
(TCP_NOTSENT_LOWAT). How much that is follows from how fast it takes more whenever it is full; a link that was paced is
as fast as it was told. Fast links have no limit: being woken for every few KiB would cost them more than order gains.
"""

from __future__ import annotations

AHEAD_S = 0.01
"""Long enough for a busy machine to bring more in time, short against an all-reduce on a slow link."""
LEAST_NBYTES = 64 << 10
AT_FIRST_NBYTES = 512 << 10
"""For links to other machines, until their rate is known."""
_MOST_NBYTES = 2 << 20
"""Links that send more than this in AHEAD_S have no limit."""
_SAMPLE_NBYTES = 64 << 10
_SAMPLE_S = 0.01
_CHANGE = 0.25


class Holding:
    """The limit of one link; pure bookkeeping."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        """Of unsent bytes that the kernel may hold; 0: no limit."""
        self._rate = 0.0
        self._full_at: float | None = None
        self._sent_nbytes = 0

    def full(self, now: float, sent_nbytes: int) -> bool:
        """The kernel takes no more; `sent_nbytes` were taken so far. True if the limit is another one now."""
        if self._full_at is None:
            self._full_at, self._sent_nbytes = now, sent_nbytes
            return False
        seconds, nbytes = now - self._full_at, sent_nbytes - self._sent_nbytes
        if seconds < _SAMPLE_S or nbytes < _SAMPLE_NBYTES:
            return False
        self._full_at, self._sent_nbytes = now, sent_nbytes
        rate = nbytes / seconds
        # A link that turned slow is slow; one that turned fast may have been given a moment's room elsewhere.
        return self._know(rate if not self._rate or rate < self._rate / 2 else (self._rate + rate) / 2)

    def empty(self) -> None:
        """All was taken: until the kernel is full again, time says nothing about the link."""
        self._full_at = None

    def told(self, rate_bps: float | None) -> None:
        """The link was paced to this rate; None: it is as fast as it is."""
        self._rate = 0.0
        self._full_at = None
        self.limit_nbytes = 0
        if rate_bps is not None:
            self._know(rate_bps / 8)

    def _know(self, rate: float) -> bool:
        self._rate = rate
        limit = max(LEAST_NBYTES, round(rate * AHEAD_S))
        limit = limit if limit <= _MOST_NBYTES else 0
        before = self.limit_nbytes
        if before and limit and abs(limit - before) <= _CHANGE * before:
            return False
        self.limit_nbytes = limit
        return limit != before
