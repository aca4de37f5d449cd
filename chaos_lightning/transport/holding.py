"""Limits how many unsent bytes of a link lie in the kernel's send buffer, where later frames cannot overtake them.

Theory of operation. Several trees share a link: results that others wait for are queued behind partial sums that nobody
needs yet, unless they may overtake them (`Link.send`). What the kernel has taken cannot be overtaken, and its buffer of
several MiB is most of a second of a slow link. So the kernel is given little that it cannot send at once
(TCP_NOTSENT_LOWAT); it asks for more when half of that is gone. If nothing is left by the time that this process
comes to answer, the link has stood idle, and the limit is doubled; if it comes promptly, the limit shrinks slowly. It
settles where a link is kept busy and no further: low on slow links, none on links faster than the process is woken.

Links between processes of one machine have no limit, unless they are paced to a rate.
"""

from __future__ import annotations

LEAST_NBYTES = 64 << 10
AT_FIRST_NBYTES = 512 << 10
"""First limit, bytes, of links to other machines."""
MOST_NBYTES = 4 << 20
"""Largest limit, bytes; a link that would need more has no limit any more."""
_AHEAD_S = 0.01
"""Time, s, for which a paced link sends with the limit that it begins with."""


class Holding:
    """Limit on the unsent bytes of one link in the kernel's buffer; computes the limit, and does no I/O."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        """Number of unsent bytes that the kernel may hold; 0: no limit."""

    def woken(self, unsent_nbytes: int) -> bool:
        """Adapts the limit to how many unsent bytes the kernel still had when it asked for more; returns whether the
        limit changed.
        """
        before = self.limit_nbytes
        if not before:
            return False
        if not unsent_nbytes:
            self.limit_nbytes = 2 * before if 2 * before <= MOST_NBYTES else 0
        elif unsent_nbytes > before * 3 // 8:
            self.limit_nbytes = max(LEAST_NBYTES, before - before // 16)
        return self.limit_nbytes != before

    def told(self, rate_bps: float | None) -> None:
        """Sets the limit for a link that is paced to this rate; no limit if the rate is None."""
        limit = 0 if rate_bps is None else max(LEAST_NBYTES, round(rate_bps / 8 * _AHEAD_S))
        self.limit_nbytes = limit if limit <= MOST_NBYTES else 0
