"""Decides for a leader when, and for what reason, the job ends (O16).

Theory of operation. The job ends when its epochs are over, when the oldest cluster says so, or when an operator asks.
From then on nothing is decided but what makes the newest version durable; then the end is stored with that version, and
only then anybody hears of it. It voids the pushes that are open, and all incarnations and leases end with it. A
rollback meanwhile takes acceptances back: then the job goes on until those are answered anew (O5a), unless an operator
asked for its end. A leader that finds the end in its chain tells it to whoever comes, for a while.
"""

from __future__ import annotations

from chaos_lightning.outer.rules.attendance import Attendance
from chaos_lightning.outer.rules.leader_desk import LeaderDesk
from chaos_lightning.outer.rules.messages import JobFinished
from chaos_lightning.outer.rules.types import NO_VERSION, Ended, VersionId


class Ending:
    """Part of the leader that decides on the job's end.

    Args:
        desk: Desk of the leader.
        attendance: List of the clusters, one of which may say that the job is over.
    """

    def __init__(self, desk: LeaderDesk, attendance: Attendance) -> None:
        self._desk = desk
        self._attendance = attendance
        self._asked = self._found = ""
        self._since_s = 0.0

    @property
    def reason(self) -> str:
        """Reason for which the job will end as soon as its newest version is durable; "" while no end is due."""
        return self._asked or self._found

    def ask(self, reason: str) -> None:
        """Notes that an operator wants the job to end; if that was said before, the first reason stays."""
        self._asked = self._asked or reason

    def rolled_back(self) -> None:
        """Forgets which clusters' loops have ended: after a rollback these push again, and then say so again (O5a)."""
        self._found, self._since_s = "", 0.0
        for cluster in self._attendance.clusters.values():
            cluster.verdict = ""

    def _find(self) -> str:
        """Returns the reason for which the job should end by itself; "" if there is none, or if reopened pushes are
        still unanswered (O5a).
        """
        chain, epochs = self._desk.chain, self._desk.settings.epochs
        oldest = self._attendance.oldest()
        if chain.reopened:
            return ""
        if chain.leases is not None and epochs and chain.leases.over(epochs - 1):
            return f"{epochs} epochs are over"
        cluster = self._attendance.clusters.get(oldest) if oldest is not None else None
        return f"{oldest} says: {cluster.verdict}" if cluster is not None and cluster.verdict else ""

    def next_end(self) -> Ended | None:
        """Returns the entry that ends the job, if there is a reason and the newest version is durable; else None."""
        chain = self._desk.chain
        self._found = self._found or self._find()
        newest = chain.durable[-1][0] if chain.durable else NO_VERSION
        last = chain.newest if chain.founded else NO_VERSION  # a rollback behind the first version leaves none
        if not self.reason or newest != last or self._awaited(newest):
            return None
        return Ended(newest, self.reason, tuple(sorted(self._attendance.offers(), key=lambda offer: offer.push)))

    def _awaited(self, newest: VersionId) -> bool:
        """Returns whether to wait, for a limited time, for a cluster whose loop has ended to adopt the last version."""
        desk = self._desk
        self._since_s = self._since_s or desk.now
        clusters = [self._attendance.clusters[who] for who in self._attendance.living()]
        late = any(c.verdict and c.conn is not None and c.base != newest for c in clusters)
        return late and desk.now - self._since_s < desk.settings.reconnect_s

    def told(self) -> JobFinished | None:
        """Returns the message that the job is over, once the chain contains its end; else None."""
        ended = self._desk.chain.ended
        return JobFinished(self._desk.term, ended.version, ended.reason) if ended is not None else None

    def linger(self) -> None:
        """Ends this leader, if an earlier leader ended the job, once all processes have had time to connect and be
        told.
        """
        desk = self._desk
        if desk.chain.ended is not None and desk.now - desk.begun_s > desk.settings.reconnect_s:
            desk.end(desk.chain.ended.reason, finished=True)
