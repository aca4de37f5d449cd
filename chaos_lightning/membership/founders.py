"""Founders of a job, node by node: a node that has just been started counts with all of its workers.

Theory of operation. Workers of a node are started together, and are ready one after the other. If the first of them
founded the job by itself, it would train the first steps alone. So the others are waited for, but not without end: one
of them may have failed for good, while the rest can train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.peers import Peer


class Founders:
    """See the module.

    Args:
        desk: What all parts share.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._since: dict[str, float] = {}
        """When (s) workers of each node were ready first."""

    def waits(self, ready: Sequence[Peer]) -> str:
        """Returns why these founders wait, in words; "" if they need not."""
        now, limit_s = self._desk.now, self._desk.settings.node_timeout_s
        places = [p.member.place for p in ready]
        self._since, here = {place: self._since.get(place, now) for place in places}, Counter(places)
        for peer, place in zip(ready, places, strict=True):
            if here[place] < peer.workers and now - self._since[place] < limit_s:
                of_node = f"all {peer.workers} workers of node {peer.member.node}"
                return f"the job waits for {of_node}, for {limit_s:g} s at most"
        return ""
