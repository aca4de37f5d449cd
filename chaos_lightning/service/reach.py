"""Compares how many members reach each candidate: a leader that fewer of them reach than another one resigns.

Theory of operation. A lease says that a scheduler reaches etcd, and nothing about members. A member that cannot reach
the leader asks the others in turn; each of them writes down who asked of late, in a key on its own lease. The leader
looks at these keys. If for some time more members have asked one of the others in vain than are connected to itself, it
resigns, and says why; with as many on both sides it stays. Members that reach nobody at all count nowhere: then another
election would change nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping

ASKED_S = 1.5
"""Seconds within which a member that is turned away asks again several times."""
LOOK_S = 0.5
LASTING_S = 3.0
"""Seconds for which the others must have been asked by more: longer than it takes members to find a new leader, which
they may not ask for two seconds if it was silent (control/agent.py), and a second more.
"""
_MOST = 256
"""Number of names that one candidate writes down; a number of this size decides as well as a larger one."""


class Asked:
    """Names of members that asked this candidate for the leader while it did not lead. Methods may be called from any
    thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: dict[str, float] = {}

    def add(self, name: str, now: float) -> None:
        with self._lock:
            if name in self._at or len(self._at) < _MOST:
                self._at[name] = now

    def of_late(self, now: float) -> tuple[str, ...]:
        """Returns the names of members that asked within the last ASKED_S seconds, sorted."""
        with self._lock:
            self._at = {name: at for name, at in self._at.items() if now - at <= ASKED_S}
            return tuple(sorted(self._at))


class Reach:
    """Decides for a leader whether another candidate is reached by more members, from the time when it began to
    lead.
    """

    def __init__(self, now: float) -> None:
        self._since: dict[str, float] = {}
        self._next = now + LASTING_S

    def due(self, now: float) -> bool:
        """Returns whether it is time to read the other candidates' keys again."""
        if now < self._next:
            return False
        self._next = now + LOOK_S
        return True

    def judge(self, now: float, present: Collection[str], elsewhere: Mapping[str, Collection[str]]) -> str:
        """Returns the reason for which the leader should resign; "" if it should stay.

        Args:
            now: Time, s.
            present: Members that are connected to this scheduler.
            elsewhere: Names of the members that asked another candidate of late, by candidate.
        """
        more: dict[str, list[str]] = {}
        for candidate, names in elsewhere.items():
            missed = sorted(set(names) - set(present))
            if len(missed) > len(present):
                more[candidate] = missed
        self._since = {candidate: self._since.get(candidate, now) for candidate in more}
        for candidate, missed in more.items():
            if now - self._since[candidate] >= LASTING_S:
                here = ", ".join(sorted(present)) or "nobody"
                return f"{', '.join(missed)} reach {candidate} and not this scheduler, which {here} reaches"
        return ""


def packed(names: Collection[str]) -> bytes:
    return json.dumps(sorted(names)).encode()


def read(value: bytes) -> tuple[str, ...]:
    """Parses the member names in a candidate's key; returns none if the value is something else."""
    try:
        names = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    return tuple(n for n in names if isinstance(n, str))[:_MOST] if isinstance(names, list) else ()


__all__ = ["Asked", "Reach", "packed", "read"]
