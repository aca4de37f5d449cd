"""Decides how long a process may be silent before it is taken for dead, and learns from silent processes that turned
out to live.

Theory of operation. A process that is busy and one that is stopped are equally silent: a long call that holds the
interpreter's lock, a collection, a fork. Its kernel acknowledges in both cases what is sent to it. So silence alone
needs patience: `silence_timeout_s`, or twice the longest silence that this process has broken by itself, which counts
for half after each minute and up to `MOST_PATIENCE` times that setting. A process that was put out for its silence and
comes back has broken one, too.
"""

from __future__ import annotations

import math

from chaos_lightning.membership.peers import Process, process_of
from chaos_lightning.protocol.pace import Pacing
from chaos_lightning.protocol.types import Member, Settings

MOST_PATIENCE = 4.0
"""Longest patience, in times of `silence_timeout_s`. A process that was silent for longer and came back was stopped
or cut off, rather than busy.
"""
LEARNED_TWICE = 2.0
"""Factor: a silence of this many times the longest one that was harmless is none of that kind."""
FORGOTTEN_IN_S = 60.0
"""Seconds after which the longest silence counts for half."""


class Silences:
    """Silences that processes ended by speaking again.

    Args:
        settings: Timeouts, in seconds.
        pacing: Interval at which members send, and the silence after which they are suspected.
    """

    def __init__(self, settings: Settings, pacing: Pacing) -> None:
        self._settings = settings
        self._pacing = pacing
        self._gaps: dict[Process, tuple[float, float]] = {}
        """Longest silence (s) that each process has broken, and the time at which it did."""
        self._doubted: dict[Process, float] = {}
        """Processes that were taken for dead for their silence alone, with the time since which they were silent."""

    def shift(self, gap: float) -> None:
        """Moves the starts of silences by the `gap` seconds for which the scheduler itself was frozen."""
        self._doubted = {process: since + gap for process, since in self._doubted.items()}

    def broken(self, now: float, member: Member, gap: float) -> None:
        """Learns that this process was silent for `gap` seconds and yet lives."""
        if not self._pacing.timeout_s < gap <= self._most_patience_s():
            return
        self._gaps = {p: (longest, at) for p, (longest, at) in self._gaps.items() if now - at < 10 * FORGOTTEN_IN_S}
        if gap > self._longest(now, member):
            self._gaps[process_of(member)] = (gap, now)

    def doubt(self, now: float, member: Member, since: float) -> None:
        """Notes that this process is taken for dead because it has been silent since the given time."""
        self._doubted = {p: at for p, at in self._doubted.items() if now - at < FORGOTTEN_IN_S}
        self._doubted[process_of(member)] = since

    def returned(self, now: float, member: Member) -> None:
        """Learns the length of a silence for which this process was taken for dead, as it says hello again."""
        since = self._doubted.pop(process_of(member), None)
        if since is not None:
            self.broken(now, member, now - since)

    def patience_s(self, now: float, member: Member) -> float:
        """Returns the seconds that this process may be silent if there is no other sign of its death."""
        learned = LEARNED_TWICE * self._longest(now, member)
        return min(max(self._settings.silence_timeout_s, learned), self._most_patience_s())

    def _longest(self, now: float, member: Member) -> float:
        """Returns the longest silence (s) that this process ended by speaking again; old ones are left out."""
        gap, at = self._gaps.get(process_of(member), (0.0, now))
        return gap * math.exp2((at - now) / FORGOTTEN_IN_S)

    def _most_patience_s(self) -> float:
        return min(MOST_PATIENCE * self._settings.silence_timeout_s, self._settings.hang_timeout_s)
