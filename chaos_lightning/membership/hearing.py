"""What a welcomed process says on its stream, turned into facts about it; a part hears what is that part's own."""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, Phase
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.keeping import Keeper
from chaos_lightning.membership.learners import Learners
from chaos_lightning.membership.links import Links
from chaos_lightning.membership.peers import Peer, Standing
from chaos_lightning.membership.rebuilding import Rebuild
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.protocol.types import (
    CatchUp,
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
    """See the module. Fields are the parts that it tells."""

    _desk: Desk
    _book: Book
    _recovery: Recovery
    _detector: Detector
    _links: Links
    _learners: Learners
    _keeper: Keeper
    _rebuild: Rebuild

    def hear(self, peer: Peer, message: FromMember) -> None:
        """This peer said so."""
        match message:
            case Ready():
                if peer.standing is Standing.LINKING:
                    peer.standing = Standing.READY
            case Heartbeat(_, seq, step, step_time_s):
                peer.seq, peer.step, peer.step_time_s = seq, step, step_time_s
                self._book.reached = max(self._book.reached, step)
            case LinkEvent(other, up, evidence):
                self._links.on_link(peer, other, up, evidence)
            case LinkReport():
                self._links.on_link_report(peer, message)
            case LinkRequest():
                self._links.on_link_request(peer, message)
            case Verdict(suspect, alive, _, certain):
                if alive or certain or self._links.may_witness(peer, suspect):
                    stranger = not certain and self._links.is_stranger(peer, suspect)
                    self._detector.verdict(peer.id, message, stranger=stranger)
            case Report(number):
                if self._desk.phase is Phase.PREPARING and number == self._recovery.number:
                    peer.report = message
                    self._detector.reported(peer.id)
            case Entered():
                peer.stands(message)
                self._rebuild.on_moved(peer)
                self._book.entered(message.view, self._desk.now)
            case Progress():
                peer.progress = message
            case RebuildReport():
                self._rebuild.on_report(peer, message)
            case CatchUp():
                self._learners.on_catch_up(peer, message)
            case Kept():
                self._keeper.on_kept(peer, message)
            case Finished(seq, step):
                peer.finished, peer.seq, peer.step = True, seq, step
