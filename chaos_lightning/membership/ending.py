"""Ends a job, and tells newcomers that it is finished (protocol.md 14d).

Theory of operation. A job that two members or more have had is told as finished for `finished_s` after its end, to each
newcomer that is of the same program and in the same fit: so the restart of one that failed on its way out does not
train everything again. Who waited for the job when it ended is told so, too, in any case. To everybody else the job is
over and done with: the shell puts its chain away, and they found the next one.
"""

from __future__ import annotations

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.effects import Chain, RecordedEnd, SchedulerDone, Send
from chaos_lightning.membership.peers import JobTerms, Standing, refusal
from chaos_lightning.membership.roster import Roster
from chaos_lightning.protocol.types import NO_VIEW, Hello, Refused, Released, ToldEnd

FINISHED = "the job is finished"


class JobEnd:
    """End of a job, and what newcomers that come afterwards are told.

    Args:
        desk: State that all components share.
        book: Chain of decided views.
        roster: Processes that are told of the end.
        chain: Chain as the store holds it, perhaps with the end already.
    """

    def __init__(self, desk: Desk, book: Book, roster: Roster, chain: Chain) -> None:
        self._desk = desk
        self._book = book
        self._roster = roster
        self._ending = chain.ending
        self._tells_s = chain.tells_s
        self._for_good = chain.for_good
        self._until: float | None = None
        """Time (s) from which on newcomers begin the job anew; None: not known yet."""

    @property
    def tells(self) -> bool:
        """Whether newcomers are told of the job's end, rather than begin the job anew."""
        if self._desk.phase is not SchedulerPhase.FINISHED:
            return False
        if self._until is None and self._desk.clock is not None:
            self._until = self._desk.now + self._tells_s
        left = self._tells_s > 0 if self._until is None else self._desk.now < self._until
        return self._ending is not None and (self._for_good or left)

    def decided(self) -> RecordedEnd | None:
        """Returns the record of the job's end for the store; None if newcomers are not to be told of the end."""
        reference, tells_s = self._roster.reference, self._desk.settings.finished_s
        if not self._book.past.together or reference is None or tells_s <= 0:
            return None
        self._tells_s = tells_s
        self._ending = RecordedEnd(reference.digest, max((p.step for p in self._roster.party()), default=0))
        return self._ending

    def finished(self) -> None:
        """Releases all members, and tells waiting newcomers that the job is finished, once its end is in the store."""
        self._desk.phase = SchedulerPhase.FINISHED
        peers = list(self._roster.peers.values())
        for peer in peers:
            # One that no header has let in yet is a newcomer still, though a view names it.
            entered = not peer.known or peer.entered != NO_VIEW
            inside = peer.standing in (Standing.MEMBER, Standing.LEAVER) and entered
            self._roster.send(peer, Released(FINISHED) if inside else self._over())
        self._desk.note("finished", seq=max(p.seq for p in peers), step=max(p.step for p in peers))
        # Newcomers on other machines can start no scheduler that would tell them.
        tells_s = self._tells_s if self.tells and len(self._book.past.hosts) > 1 else 0.0
        self._desk.out.append(SchedulerDone("the job is finished and all members are released", tells_s=tells_s))

    def admit(self, conn: int, hello: Hello) -> None:
        """Answers the hello of a newcomer that comes after the job's end."""
        refused = refusal(hello, self._desk.settings)
        told = self.tells and self._ending is not None and self._ending.terms == JobTerms.of(hello).digest
        if hello.resume and hello.view != NO_VIEW:
            self._desk.out.append(Send(conn, Released(FINISHED)))
        elif refused or (self._for_good and not told):
            self._desk.out.append(Send(conn, Refused(refused or FINISHED)))
        elif told or hello.resume in self._roster.peers:
            self._desk.out.append(Send(conn, self._over()))
        else:
            text = f"the job was finished; it begins anew with {hello.name}"
            self._desk.note("notice", text=text)
            self._desk.out.append(Send(conn, Refused(text, retry=True)))
            self._desk.out.append(SchedulerDone(text, again=True))

    def _over(self) -> ToldEnd:
        latest = self._book.latest
        assert latest is not None
        return ToldEnd(FINISHED, self._book.chain_id, latest)
