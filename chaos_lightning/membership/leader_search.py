"""Searches for the leading scheduler: which one a member asks, how long it waits for an answer, and when it asks again.

Theory of operation. A member knows the endpoints of all schedulers that stand by for each other, and asks one at a
time. A standby names the leader, who is asked at once; whoever does not answer is left for the next one. A scheduler
that was silent may be frozen or cut off while its lease still stands: it is not asked again for a while, though the
others name it. Between attempts in vain the member rests, longer each time up to a bound, and by chance not as long as
others.

The clock is the caller's, and so is chance; it tells how each attempt ended. Process and simulator do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PULSE_S = 0.2
"""Seconds between pulses, by which a scheduler that others stand by for says on each stream that it lives; longer in
large jobs.
"""
_LONGEST_PULSE_S = 0.5
PULSE_TIMEOUT_S = 0.7
"""Silence (s) after which a scheduler that sends pulses is frozen or cut off. In large jobs it is more: at most 1.75
s, less than the lease of one that is cut off.
"""
_PULSE_COST_S = 120e-6
"""CPU time of the scheduler for one pulse (s), TLS included."""
_PULSE_SHARE = 0.05
"""Share of one core that pulses may take."""
LONGEST_PAUSE_S = 0.5
HEARS_S = 1.2
"""Seconds that a scheduler that has just started listens for members that know more than its store. A member that
looks for its only scheduler comes within LONGEST_PAUSE_S, and the time that a call takes.
"""
HEARS_SEVERAL_S = 1.5
"""Seconds that one of several schedulers listens. It is asked more often, but another one that is silent may be asked
first; and members that are held back leave a scheduler that says nothing for two seconds
(`LeaderSearch.answer_timeout_s`), not even that it lives.
"""
HANDSHAKES_PER_S = 200
"""Number of members that come to a scheduler in a second: a core does 480 handshakes of mutual TLS with a call each
(1,500 with a token instead), and has hellos to read meanwhile."""
LONGEST_HEARS_S = 8.0
_FIRST_PAUSE_S = 0.05
ANSWER_TIMEOUT_S = 10.0
"""Seconds that the scheduler may take to answer a Hello; one of several a fifth of it or less, since another may
lead.
"""
_FIRST_SHUN_S, _SHUN_S = 0.3, 2.0
"""Seconds for which one of several schedulers that was silent is not asked again; until its lease ends, the others
name it. It may have been busy for a moment, so the first time is short; and a member that waits for a frozen one does
not hear of the next one.
"""


def pulse_s(count: int) -> float:
    """Returns the seconds between two heartbeats of a scheduler to each of `count` members."""
    return min(max(PULSE_S, count * _PULSE_COST_S / _PULSE_SHARE), _LONGEST_PULSE_S)


def pulse_timeout_s(count: int) -> float:
    """Returns the silence (s) after which each of `count` members gives up on a scheduler that sends heartbeats."""
    return PULSE_TIMEOUT_S * (pulse_s(count) / PULSE_S)


def hears_s(members: int, *, several: bool) -> float:
    """Returns how long (s) a newly started scheduler waits for messages of the last view's members before it decides
    anything (14a).

    Args:
        members: Number of them.
        several: Others stand by for it.
    """
    least_s = HEARS_SEVERAL_S if several else HEARS_S
    return max(least_s, min(LONGEST_PAUSE_S + members / HANDSHAKES_PER_S, LONGEST_HEARS_S))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Outcome of a conversation with a scheduler, or of the failed attempt to begin one.

    Attributes:
        answered: Whether the scheduler sent something for this member.
        silent: Whether the scheduler was silent for so long that another one may lead.
        standby: Whether the scheduler is a standby.
        leader: HOST:PORT of the leader, as a standby names it; "" if it knows none.
    """

    answered: bool = False
    silent: bool = False
    standby: bool = False
    leader: str = ""


class LeaderSearch:
    """Search of one member for the leading scheduler.

    Args:
        endpoints: HOST:PORT of the scheduler, or of all that stand by for each other.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.failures = 0
        """Number of attempts in a row that nobody answered."""
        self._endpoints = tuple(endpoints)
        self._at = 0
        self._leader = ""
        """Endpoint of the leader, as a standby named it; "": none has."""
        self._shunned: dict[str, float] = {}
        """Times until which schedulers that were silent are not asked."""
        self._silences: dict[str, int] = {}
        """Number of times in a row that each scheduler was silent; the second time it gets less time to answer."""

    @property
    def endpoint(self) -> str:
        """Address of the scheduler to ask now."""
        return self._leader or self._endpoints[self._at % len(self._endpoints)]

    def answer_timeout_s(self) -> float:
        """Returns the seconds within which the scheduler at `endpoint` must answer."""
        if len(self._endpoints) == 1:
            return ANSWER_TIMEOUT_S
        return PULSE_TIMEOUT_S if self._silences.get(self.endpoint) == 1 else ANSWER_TIMEOUT_S / 5

    def ended(self, attempt: Conversation, now_s: float, chance: float) -> float:
        """Handles the end of a conversation, and chooses the scheduler to ask next.

        Args:
            attempt: Outcome of the conversation with `endpoint`.
            now_s: Time of any clock that only goes forward, s.
            chance: Random number from 0 to 1, drawn anew each time.

        Returns:
            Seconds to rest before the next attempt; 0 if a standby has named the leader, who is asked at once.
        """
        self.failures = 0 if attempt.answered else self.failures + 1
        if attempt.answered or attempt.standby:
            self._silences.pop(self.endpoint, None)
        if attempt.silent:
            before = self._silences.get(self.endpoint, 0)
            self._silences[self.endpoint] = before + 1
            self._shunned[self.endpoint] = now_s + (_SHUN_S if before else _FIRST_SHUN_S)
        self._shunned = {place: until for place, until in self._shunned.items() if until > now_s}
        if attempt.leader not in ("", self.endpoint) and attempt.leader not in self._shunned:
            self._leader = attempt.leader
            return 0.0
        self._next()
        # One of several is bound to lead soon: each is asked again before a newcomer would lose patience.
        longest = LONGEST_PAUSE_S if len(self._endpoints) == 1 else LONGEST_PAUSE_S / 2
        return min(longest, _FIRST_PAUSE_S * 2.0 ** min(self.failures, 10)) * (0.5 + chance / 2)

    def _next(self) -> None:
        if self._leader:
            self._leader = ""
        else:
            self._at += 1
        for _ in self._endpoints:
            if self.endpoint in self._shunned:
                self._at += 1
