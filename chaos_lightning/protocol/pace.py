"""Computes how often members send heartbeats: less often the more members there are, to spare the scheduler.

The interval changes only when the number of members passes a power of two, since all members must be told.
"""

from __future__ import annotations

from chaos_lightning.protocol.types import Settings

HEARTBEAT_COST_S = 190e-6
"""CPU time (s) of the scheduler for one heartbeat at a thousand a second: half is gRPC's, half the TLS proxy's."""
HEARTBEAT_SHARE = 0.2
"""Part of one core that the heartbeats of all members may take."""
LEAST_HEARTBEATS = 4
"""Number of heartbeats that are due within `silence_timeout_s`, however many members there are."""


def heartbeat_interval_s(settings: Settings, count: int) -> float:
    """Returns the heartbeat interval (s) for each of `count` members; never shorter than the setting."""
    power = 1 << max(0, count - 1).bit_length()
    longest = max(settings.heartbeat_interval_s, settings.silence_timeout_s / LEAST_HEARTBEATS)
    return min(max(settings.heartbeat_interval_s, power * HEARTBEAT_COST_S / HEARTBEAT_SHARE), longest)


def heartbeat_timeout_s(settings: Settings, count: int) -> float:
    """Returns the silence (s) after which one of `count` members is suspected, at least two heartbeat intervals."""
    longer = heartbeat_interval_s(settings, count) - settings.heartbeat_interval_s
    return settings.heartbeat_timeout_s + 2 * longer


class Pacing:
    """Present interval and timeout of heartbeats. When they grow, the timeout is changed first; when they shrink, the
    interval.

    Args:
        settings: The job's rules.
    """

    FASTER_AFTER_S = 5.0
    """Seconds for which members have been fewer before they are told of a shorter interval, and have known of it before
    it is expected of them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.interval_s = settings.heartbeat_interval_s
        self.timeout_s = settings.heartbeat_timeout_s
        self._fewer_since: float | None = None

    def follow(self, now: float, count: int) -> bool:
        """Adapts interval and timeout to `count` members; returns whether the interval has changed, so that members
        must be told.
        """
        interval_s, timeout_s = heartbeat_interval_s(self._settings, count), heartbeat_timeout_s(self._settings, count)
        before = self.interval_s
        if interval_s >= self.interval_s:
            self.interval_s, self.timeout_s = interval_s, max(self.timeout_s, timeout_s)
        if timeout_s == self.timeout_s:
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = now
        elif now - self._fewer_since >= self.FASTER_AFTER_S:
            self._fewer_since = now
            if interval_s < self.interval_s:
                self.interval_s = interval_s
            else:
                self.timeout_s = timeout_s
        return self.interval_s != before
