"""Decides how long the founders of a job wait for each other: a node counts once all of its workers are ready.

Theory of operation. Workers of a node are started together, and are ready one after the other. If the first of them
founded the job by itself, it would train the first steps alone. So the others are waited for, but not without end: one
of them may have failed for good, while the rest can train.

Founders of a large job that get the state are waited for as long as it comes to any of them. So one to which it
trickles would hold up all. Once half of them have it, it is known how long it takes: those that take `PATIENCE` times
as long come in later, as newcomers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.peers import Peer

PATIENCE = 4
"""Factor: the last joiners may take this many times as long to load the state as half of them took."""


class Founders:
    """Rules on how long the founders of a job wait for each other.

    Args:
        desk: State that all components share.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._since: dict[str, float] = {}
        """Times (s) at which workers of each node were ready first."""
        self._joiners: frozenset[str] = frozenset()
        """Joiners that get the state at once, some of whom lack it still."""
        self._began = 0.0
        """Time (s) at which these joiners began to get the state."""
        self._half_s = 0.0
        """Seconds that half of the joiners took to load the state; the time so far, while they do."""

    def waits(self, ready: Sequence[Peer]) -> str:
        """Returns why these founders wait, in words; "" if they need not."""
        self._joiners = frozenset()
        now, limit_s = self._desk.now, self._desk.settings.node_timeout_s
        places = [p.member.place for p in ready]
        self._since, here = {place: self._since.get(place, now) for place in places}, Counter(places)
        for peer, place in zip(ready, places, strict=True):
            if here[place] < peer.workers and now - self._since[place] < limit_s:
                of_node = f"all {peer.workers} workers of node {peer.member.node}"
                return f"the job waits for {of_node}, for {limit_s:g} s at most"
        return ""

    def late(self, lacking: Sequence[Peer], members: Collection[str], *, spreads: bool) -> str:
        """Returns why these joiners, which still lack the state, hold up the others for too long, in words; "" if they
        do not.

        It is asked again and again from when members stand in a view. A recovery in between does not begin anew, and
        who has died has not loaded.

        Args:
            lacking: Joiners of the latest view that have not loaded the state.
            members: All members of that view.
            spreads: Whether most members get it at once.
        """
        if not spreads or not lacking:
            self._joiners = frozenset()
            return ""
        if not self._joiners:
            self._joiners, self._began, self._half_s = frozenset(p.id for p in lacking), self._desk.now, 0.0
        took_s = self._desk.now - self._began
        if 2 * len(lacking) > len(self._joiners.intersection(members)) or not self._half_s:
            self._half_s = took_s
            return ""
        limit_s = max(self._desk.settings.join_timeout_s, PATIENCE * self._half_s)
        if took_s <= limit_s:
            return ""
        return f"it did not load the state within {limit_s:.0f} s; half of the others had it after {self._half_s:.0f} s"

    def shift(self, gap: float) -> None:
        """Moves the times of waiting joiners by the `gap` seconds for which the scheduler was frozen."""
        self._began += gap
