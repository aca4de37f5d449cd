"""Decides how soon the next recovery may begin after recoveries that led to no committed slot.

Theory of operation. A recovery costs two durable writes and stops everybody, and is worth it if a slot commits
afterwards. Its causes are bounded as a rule: a death excludes somebody, a link that failed is left out for longer each
time. Where two causes feed each other, or a link that is needed breaks again and again, recoveries would follow each
other as fast as they can be written, and nobody would train. So attempts since the last committed slot are counted, and
after the first few each waits twice as long as the one before. Whoever dies is excluded at once all the same, since
that can happen only as often as there are members.
"""

from __future__ import annotations

FREE = 4
"""Number of attempts in a row that begin at once: deaths come in groups."""
FIRST_S = 0.25
LONGEST_S = 5.0


class Backoff:
    """Pauses before recoveries, longer after each one that led to no committed slot. Times are the scheduler's, in
    seconds.
    """

    def __init__(self) -> None:
        self.fruitless = 0
        """Number of attempts since the last slot was committed."""
        self._not_before = float("-inf")
        self._slot = -1
        """Highest slot that was known to be committed when the last attempt began."""

    def left_s(self, now: float, slot: int) -> float:
        """Returns the seconds that the next recovery still has to wait.

        Args:
            now: The time.
            slot: The highest that any member has told to be committed.
        """
        self._look(slot)
        return max(0.0, self._not_before - now)

    def begins(self, now: float, slot: int) -> None:
        """Counts an attempt that begins: a recovery that reserves a number, or the founding of the job."""
        self._look(slot)
        self.fruitless += 1
        excess = self.fruitless - FREE
        self._not_before = now + min(LONGEST_S, FIRST_S * 2.0**excess) if excess >= 0 else now

    def founded(self, slot: int) -> None:
        """Sets the slot after which committed slots count as progress: founding the job is no progress by itself."""
        self._slot = slot

    def shift(self, gap: float) -> None:
        """Postpones the next recovery by the `gap` seconds for which the scheduler was frozen."""
        self._not_before += gap

    def _look(self, slot: int) -> None:
        if slot > self._slot:
            self._slot, self.fruitless, self._not_before = slot, 0, float("-inf")
