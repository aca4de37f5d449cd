"""Schedulers that misjudge who is dead: the planted bugs of rules 12, 12a and 12b (see bugs.py)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from chaos_lightning.lab.simulate.planting import with_parts
from chaos_lightning.membership.detector import Detector, Suspicion
from chaos_lightning.membership.judging import Deaths
from chaos_lightning.membership.peers import Peer
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.terms import Terms
from chaos_lightning.protocol.types import Member


class RashDetector(Detector):
    """A missed heartbeat is a death."""

    def _confirmed(self, now: float, peer: Peer, suspicion: Suspicion, watched: Mapping[str, Peer]) -> str:
        return suspicion.why


class HastyDetector(Detector):
    """Silence is a death as soon as a neighbour confirms it."""

    def patience_s(self, now: float, member: Member) -> float:
        return 0.0


class ImpatientDetector(Detector):
    """The last one that holds the state is judged like everybody else."""

    def _is_last_holder(self, member: str, watched: Mapping[str, Peer], holders: Collection[str]) -> bool:
        return False


class StubbornDeaths(Deaths):
    """Never takes a death back, whoever died since."""

    def take_back(self) -> bool:
        return False


class CredulousDetector(Detector):
    """Closed connections prove a death at once."""

    def _proof(self, now: float, peer: Peer, suspicion: Suspicion, everybody: Mapping[str, Peer]) -> str:
        return super()._proof(now, peer, suspicion, everybody) or self._fact(peer, everybody)


class DeafDetector(RashDetector, ImpatientDetector):
    """A missed heartbeat of the last one that holds the state is a death, too."""


class DeafDeaths(StubbornDeaths):
    """Moreover nobody whom it takes for dead can talk it out of that."""

    def revive(self, peer: Peer) -> None:
        self._detector.heard(peer.id)


HastyJudge = with_parts(detector=HastyDetector)
RashScheduler = with_parts(detector=RashDetector)
StubbornScheduler = with_parts(deaths=StubbornDeaths)
ImpatientScheduler = with_parts(detector=ImpatientDetector, deaths=StubbornDeaths)
CredulousScheduler = with_parts(detector=CredulousDetector)
DeafScheduler = with_parts(detector=DeafDetector, deaths=DeafDeaths)


class UnforgivingScheduler(DeafScheduler):  # type: ignore[valid-type, misc]
    """Judges everybody by its own sleep."""

    def _forgive(self, now: float) -> None:
        before = self.desk.clock
        super()._forgive(now)
        gap = now - before if before is not None else 0.0
        if gap > 3 * self.settings.heartbeat_interval_s:
            for peer in self.roster.peers.values():
                peer.heard -= gap


class FaithfulTerms(Terms):
    """Turns away who is of another program than the members were, whoever of them lives."""

    def authorities(self) -> list[Peer]:
        return [p for p in self._roster.peers.values() if not p.differs]


class FaithfulRoster(Roster):
    """Does not forget what the dead said."""

    def forget_terms(self) -> None:
        pass


FaithfulScheduler = with_parts(terms=FaithfulTerms, roster=FaithfulRoster)
