"""Schedulers that misjudge who is dead: the planted bugs of rules 12, 12a and 12b (see bugs.py)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from chaos_lightning.membership.detector import Detector, Suspicion
from chaos_lightning.membership.roster import Peer
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.types import Member


class RashDetector(Detector):
    """A missed heartbeat is a death."""

    def _confirmed(self, now: float, peer: Peer, suspicion: Suspicion, watched: Mapping[str, Peer]) -> str:
        return suspicion.why


class HastyDetector(Detector):
    """Silence is a death as soon as a neighbour confirms it."""

    def patience_s(self, now: float, member: Member) -> float:
        return 0.0


class HastyJudge(SchedulerMachine):
    detector_class = HastyDetector


class RashScheduler(SchedulerMachine):
    detector_class = RashDetector


class ImpatientDetector(Detector):
    """The last one that holds the state is judged like everybody else."""

    def _is_last_holder(self, member: str, watched: Mapping[str, Peer], holders: Collection[str]) -> bool:
        return False


class StubbornScheduler(SchedulerMachine):
    """Never takes a death back, whoever died since."""

    def _take_back(self) -> bool:
        return False


class ImpatientScheduler(StubbornScheduler):
    detector_class = ImpatientDetector


class CredulousDetector(Detector):
    """Closed connections prove a death at once."""

    def _proof(self, now: float, peer: Peer, suspicion: Suspicion, everybody: Mapping[str, Peer]) -> str:
        return super()._proof(now, peer, suspicion, everybody) or self._fact(peer, everybody)


class CredulousScheduler(SchedulerMachine):
    detector_class = CredulousDetector


class DeafDetector(RashDetector, ImpatientDetector):
    """A missed heartbeat of the last one that holds the state is a death, too."""


class DeafScheduler(ImpatientScheduler):
    """Moreover nobody whom it takes for dead can talk it out of that."""

    detector_class = DeafDetector

    def _revive(self, peer: Peer) -> None:
        self.detector.heard(peer.id)


class UnforgivingScheduler(DeafScheduler):
    """Judges everybody by its own sleep."""

    def _forgive(self, now: float) -> None:
        before = self._now
        super()._forgive(now)
        gap = now - before if before is not None else 0.0
        if gap > 3 * self.settings.heartbeat_interval_s:
            for peer in self.peers.values():
                peer.heard -= gap


class FaithfulScheduler(SchedulerMachine):
    """Turns away who is of another program than the members were, whoever of them lives."""

    def _authorities(self) -> list[Peer]:
        return [p for p in self.peers.values() if not p.differs]

    def _forget_terms(self) -> None:
        pass
