"""Handles messages of welcomed processes: records what they report, and passes on those that other components
handle."""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.judging import Deaths
from chaos_lightning.membership.keeping import Keeper
from chaos_lightning.membership.learners import Learners
from chaos_lightning.membership.links import LinkRegistry
from chaos_lightning.membership.peers import Peer, Standing, Tempo
from chaos_lightning.membership.rebuilding import Rebuild
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.protocol.types import (
    CatchUp,
    Differs,
    Entered,
    Finished,
    FromMember,
    Heartbeat,
    Kept,
    LinkEvent,
    LinkReport,
    LinkRequest,
    Progress,
    Ready,
    RebuildReport,
    Report,
    Verdict,
)


@dataclass(eq=False)
class Hearing:
    """Handler of messages from welcomed processes. Fields are scheduler components that it uses."""

    desk: Desk
    book: Book
    recovery: Recovery
    detector: Detector
    deaths: Deaths
    links: LinkRegistry
    learners: Learners
    keeper: Keeper
    rebuild: Rebuild

    def hear(self, peer: Peer, message: FromMember) -> None:
        """Handles one message from this peer."""
        match message:
            case Heartbeat(view, seq, step, step_time_s):  # the most frequent one
                peer.seq, peer.step = seq, step
                peer.tempo = Tempo(step_time_s, message.speed, view, message.between_s, message.sample_s)
                self.book.reached = max(self.book.reached, step)
            case Ready():
                if peer.standing is Standing.LINKING:
                    peer.standing = Standing.READY
            case LinkEvent(other, up, evidence) if other != peer.id:
                self.links.on_link(peer, other, up, evidence)
            case LinkReport(other) if other != peer.id:
                self.links.on_link_report(peer, message)
            case LinkRequest():
                self.links.on_link_request(peer, message)
            case Verdict():
                self.deaths.on_verdict(peer, message)
            case Report(number):
                asked = self.desk.phase is SchedulerPhase.PREPARING and number == self.recovery.number
                if asked and self.recovery.told(peer, message):
                    self.detector.reported(peer.id)
            case Entered():
                loaded = message.loaded and not peer.loaded
                peer.stands(message)
                self.rebuild.on_moved(peer)
                self.book.entered(message.view, self.desk.now, loaded=loaded)
            case Progress():
                if peer.progress is None or message.done_nbytes > peer.progress.done_nbytes:
                    self.book.loads(peer.id, self.desk.now)
                peer.progress = message
            case RebuildReport():
                self.rebuild.on_report(peer, message)
            case CatchUp():
                self.learners.on_catch_up(peer, message)
            case Differs():
                if peer.standing in (Standing.MEMBER, Standing.LEAVER):  # a leaver may be the root of the open slot
                    self.deaths.put_out(message)
            case Kept():
                self.keeper.on_kept(peer, message)
            case Finished(seq, step):
                peer.finished, peer.seq, peer.step = True, seq, step
