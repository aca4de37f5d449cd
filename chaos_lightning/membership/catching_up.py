"""Decides when a newcomer that replays the members' steps has caught up, and when it never will (protocol.md 17).

Theory of operation. After each entry of the log that it applies, a newcomer looks at how many slots it is behind. It
has caught up when nothing lies ready to be applied and it is less than `NEAR_SLOTS` behind: further slots keep coming
while it is let in. Whether it ever gets there is judged by how its lag changes over a window of entries; one that will
not, or not soon, says so and comes in by a pause. Whoever drives this tells it the time and the facts, so processes and
simulated ones judge alike.
"""

from __future__ import annotations

from collections import deque

JUDGED_AFTER, JUDGED_OVER_S = 16, 3.0
"""Number of applied entries, and seconds, before it is judged whether catching up will end."""
PROJECTED_LIMIT_S = 60.0
"""Seconds: catching up that is projected to last longer has no end in sight. Newcomers that come later wait
meanwhile, and a pause costs everybody a few seconds; the scheduler's observe_timeout_s is only the last resort.
"""
NEAR_SLOTS = 2.0
"""Slots: a newcomer that is less far behind has caught up. One slot is under way, and a part of the next one."""
FINAL_WAIT_S = 2.0
"""Seconds that the last entries are waited for, while nobody trains, once a newcomer that has caught up is let in."""


class CatchingUp:
    """Progress of a newcomer that replays the members' steps.

    Attributes:
        applied: Steps of the log that this newcomer has replayed.
        done: Whether this newcomer has caught up.
    """

    def __init__(self) -> None:
        self.applied = 0
        self.done = False
        self._lags: deque[tuple[float, int]] = deque()

    @property
    def final_wait_s(self) -> float:
        """Seconds for which a newcomer waits for the last log entries before it pulls the missing state.

        Who has not caught up is let in by a pause, and the others end their log as soon as that is decided.
        """
        return FINAL_WAIT_S if self.done else 0.0

    def arrives(self, behind: float, *, idle: bool, fresh: bool = False) -> bool:
        """Returns True, once, when the newcomer has caught up with the members.

        Args:
            behind: Slots that the others probably are ahead by now.
            idle: Nothing that was fetched waits to be applied.
            fresh: The state that it began with is so young that there may be nothing to apply yet.
        """
        if self.done or not idle or behind >= NEAR_SLOTS or not (self.applied or fresh):
            return False
        self.done = True
        return True

    def hopeless(self, lag: int, now: float) -> str:
        """Returns why this newcomer will never catch up, given how far behind it is after one more log entry; "" if it
        may.

        The window holds at least `JUDGED_AFTER` entries and `JUDGED_OVER_S`, so that neither a hiccup nor a burst is
        taken for the trend; a newcomer that is only a window behind is never judged, nor one that has caught up.

        Args:
            lag: Number of slots that the newcomer is behind.
            now: Time of a monotonic clock, s.

        Returns:
            Reason why catching up has no end in sight; empty if it has one, or if it is too early to tell.
        """
        if self.done:
            return ""
        lags = self._lags
        lags.append((now, lag))
        while len(lags) > JUDGED_AFTER and lags[1][0] < now - JUDGED_OVER_S:
            lags.popleft()
        began, before = lags[0]
        if len(lags) < JUDGED_AFTER or now - began <= JUDGED_OVER_S or lag <= JUDGED_AFTER:
            return ""
        rate = (before - lag) / (now - began)
        so_far = f"after {self.applied} steps of the log it is {lag} slots behind"
        if rate <= 0:
            more = (lag - before) / (now - began)
            return f"{so_far}, no less than before ({more:.3g} more per s), projected never to catch up"
        projected = lag / rate
        if projected <= PROJECTED_LIMIT_S:
            return ""
        return f"{so_far}, {rate:.3g} less per s, projected to take {projected:.0f} s more"
