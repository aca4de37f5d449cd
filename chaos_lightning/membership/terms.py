"""Determines which program a job runs (its terms), and which members can tell (protocol.md 12b).

Theory of operation. Every member must equal a *reference*: what the job's first member said of itself. Where nobody who
holds the state answers, a newcomer's is only for now: whoever differs waits, and is turned away or founds the job.
"""

from __future__ import annotations

from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.peers import Peer, Standing, difference
from chaos_lightning.membership.roster import Roster
from chaos_lightning.protocol.types import Refused


class Terms:
    """Terms of the job with which newcomers are compared. Arguments are scheduler components that it uses."""

    def __init__(self, desk: Desk, roster: Roster, detector: Detector) -> None:
        self._desk = desk
        self._settings = desk.settings
        self._roster = roster
        self._detector = detector

    def turn_away_strangers(self) -> None:
        """Refuses newcomers of another program that were welcomed before the job's terms were known."""
        for peer in [p for p in self._roster.peers.values() if not self._roster.was_member(p.id)]:
            reason = peer.differs = difference(peer.said, self._roster.reference) if peer.said is not None else ""
            if reason:
                self._desk.note("refused", member=peer.member.name, reason=reason)
                self._roster.send(peer, Refused(reason))
                self._roster.drop(peer)

    def authorities(self) -> list[Peer]:
        """Returns the members whose terms are the job's: those that hold its state and answer, else those that found
        it.
        """
        if self._desk.phase is SchedulerPhase.REBUILDING:
            return [p for p in self._roster.peers.values() if p.standing is Standing.REPORTER]
        if self._desk.phase is SchedulerPhase.FOUNDING and not self._roster.living():
            limit = self._desk.now - self._desk.pacing.timeout_s
            return [p for p in self._roster.newcomers() if not p.differs and p.conn is not None and p.heard >= limit]
        return [p for p in self._roster.living() if p.conn is not None and p.id not in self._detector.suspicions]

    def turn_terms(self) -> bool:
        """Refuses newcomers whose program is not the job's or, if no members of the job are left, makes theirs the
        job's (protocol.md 12b).

        They are turned away as soon as anybody can say what the job is. Where nobody holds its state, and nobody else
        is about to found it, theirs is the job.
        """
        differing = [p for p in self._roster.newcomers() if p.differs]
        if not differing:
            return False
        if self.authorities():
            self.turn_away_strangers()
            return True
        if self._desk.phase is not SchedulerPhase.FOUNDING or self._roster.living():
            return False
        self._roster.reference = differing[0].said
        for peer in self._roster.newcomers():
            peer.differs = difference(peer.said, self._roster.reference) if peer.said is not None else ""
        return True
