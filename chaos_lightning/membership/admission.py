"""Handles members' control streams, hellos and leaves: who connects, whether it is a known member, and who asks to
leave.

Theory of operation. A hello is refused in words, resumed (the stream of a known process was replaced: whatever may
have been lost on the old stream is said again, which every message bears) or welcomed as a newcomer. What else is said
on a stream, hearing.py takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.errors import PlanError
from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.effects import Close, Send
from chaos_lightning.membership.ending import JobEnd
from chaos_lightning.membership.hearing import Hearing
from chaos_lightning.membership.identity import Identity
from chaos_lightning.membership.judging import Deaths
from chaos_lightning.membership.peers import (
    JobTerms,
    Peer,
    Standing,
    difference,
    has_place,
    is_named,
    refusal,
    same_process,
)
from chaos_lightning.membership.pipelining import misfit, unreadable
from chaos_lightning.membership.rebuilding import Rebuild
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.roster import Roster, member_of
from chaos_lightning.membership.terms import Terms
from chaos_lightning.planning.batch import read_rule
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Entered,
    Fence,
    FromMember,
    Heartbeat,
    Hello,
    Leave,
    Notice,
    Released,
    Saved,
    ViewId,
    other_version,
)


@dataclass(eq=False)
class Admission:
    """Reception of processes that open a control stream, say hello, or ask to leave. Fields are scheduler components
    that it uses.
    """

    desk: Desk
    book: Book
    roster: Roster
    recovery: Recovery
    deaths: Deaths
    terms: Terms
    rebuild: Rebuild
    identity: Identity
    detector: Detector
    hearing: Hearing
    end: JobEnd

    def on_message(self, conn: int, message: FromMember) -> None:
        """Handles a message that came on this control stream."""
        if isinstance(message, Hello):
            if self.roster.conns.get(conn):  # it is somebody already; who begins anew does so on a new stream
                self.desk.out.append(Close(conn, f"{self.roster.conns[conn]} says hello twice on one stream"))
                return
            self.roster.conns.setdefault(conn, "")
            self.on_hello(conn, message)
            return
        peer = self.roster.peers.get(self.roster.conns.get(conn, ""))
        if peer is None or peer.conn != conn:
            return
        if isinstance(message, Entered | Heartbeat) and self.identity.at_odds(peer, message):
            return
        self.detector.spoke(self.desk.now, peer)
        peer.heard = self.desk.now
        self.deaths.revive(peer)
        if isinstance(message, Leave):
            self._on_leave(peer, message.reason)
        elif isinstance(message, Saved):
            self.book.told_saved(message)
        else:
            self.hearing.hear(peer, message)

    def on_hello(self, conn: int, hello: Hello) -> None:
        """Handles the hello of a process whose protocol version and chain have been checked."""
        if words := other_version(hello.version):
            if hello.view != NO_VIEW and hello.job == self.desk.settings.job:
                self._trains_on(hello)
            self.roster.refuse(conn, hello, f"{hello.name} {words}", retry=hello.view != NO_VIEW)
            return
        if hello.pipelines and (words := unreadable(hello.pipelines)):
            self.roster.refuse(conn, hello, f"{hello.name}: {words}", retry=hello.view != NO_VIEW)
            return
        try:
            read_rule(hello.batch)
        except PlanError as error:
            self.roster.refuse(conn, hello, f"{hello.name}: {error}", retry=hello.view != NO_VIEW)
            return
        admitted = self.identity.judge(conn, hello)
        if admitted is not None:
            self._admit(conn, admitted)

    def _trains_on(self, hello: Hello) -> None:
        """Notes that a member whose hello was refused goes on training: it is not dead, and no second job is founded
        beside its job (12a, 14a).
        """
        peer = self.roster.peers.get(hello.resume)
        if peer is None:
            self.identity.knock(hello)
        if peer is None or peer.conn is not None:
            return
        peer.heard = peer.closed_at = self.desk.now
        self.deaths.revive(peer)

    def _admit(self, conn: int, hello: Hello) -> None:
        if self.desk.phase is SchedulerPhase.FINISHED:
            self.end.admit(conn, hello)
            return
        # After a restart a newcomer may be heard before any member: what the job is, a member says.
        vouches = not self.roster.vouched and self.roster.was_member(hello.resume)
        reason = refusal(hello, self.desk.settings) or misfit(self.book.latest, hello)
        differs = "" if vouches else difference(hello, self.roster.reference)
        if differs and (hello.view != NO_VIEW or self.terms.authorities()):
            reason = reason or differs
        if reason:
            # A member that stands in a view is of another job, and trains on, whatever was begun at its scheduler's
            # address.
            self.roster.refuse(conn, hello, reason, retry=hello.view != NO_VIEW)
        elif hello.resume and (hello.view != NO_VIEW or hello.resume in self.roster.peers):
            self._resume(conn, hello)
        else:  # also a newcomer that another scheduler has welcomed, or whose place went with its stream
            self._welcome(conn, hello, differs)
            self.identity.welcomed(conn)

    def _resume(self, conn: int, hello: Hello) -> None:
        """Attaches a known member to its new control stream, and repeats to it whatever may have been lost on the old
        one.
        """
        peer = self.roster.peers.get(hello.resume)
        if peer is None and (let_go := self._let_go_by(hello)) is not None:
            self.desk.note("left", member=hello.resume, reason=f"view {let_go} rules without it")
            self.desk.out.append(Send(conn, Released(f"view {let_go} rules without it", asked=True)))
            return
        goodbye = self.roster.dismissed.get(hello.resume) if peer is None or peer.condemned else None
        if goodbye is not None:
            self.desk.out.append(Send(conn, goodbye))
            return
        if peer is None or peer.condemned:
            why = peer.condemned if peer is not None else "a decided view went on without it"
            self.desk.note("fenced", member=hello.resume, reason=why)
            self.desk.out.append(Send(conn, Fence(f"{hello.resume} is out of the job: {why}")))
            return
        if not same_process(peer.member, hello):  # a living member would lose its stream to a stranger
            was, now = (f"process {p.pid} of {p.host}, begun at {p.pid_start}" for p in (peer.member, hello))
            why = f"{hello.resume} is {was}; this is {now}: it joins as a newcomer"
            self.desk.note("fenced", member=hello.resume, reason=why)
            self.desk.out.append(Send(conn, Fence(why)))
            return
        self.roster.take_over(peer, conn, hello)
        if not self.roster.vouched and self.roster.was_member(peer.id):
            self.roster.vouched, self.roster.reference = True, JobTerms.of(hello)
            self.terms.turn_away_strangers()
        self.roster.reference = self.roster.reference or JobTerms.of(hello)
        self.deaths.revive(peer)
        self.roster.greet(peer, "joiner" if peer.standing is not Standing.STANDBY else "standby", "welcome back")
        self.rebuild.greeted(peer)
        if self.desk.phase is SchedulerPhase.PREPARING or self.desk.phase is SchedulerPhase.HOLDING:
            if peer.id in self.recovery.expected and peer.report is None:
                self.recovery.ask(peer)
        elif self.book.decision is not None and is_named(self.book.decision.view, peer.id):
            self.roster.send(peer, self.book.decision)
        elif self.book.announced is not None:
            self.roster.send(peer, self.book.announced)

    def _let_go_by(self, hello: Hello) -> ViewId | None:
        """Returns the view that let this former member go, if it had asked to leave or was drained; else None.

        It may not know, if its release was lost or the scheduler died that had been asked to drain it.
        """
        return self.book.past.let_go_by(hello.resume, hello.view)

    def _welcome(self, conn: int, hello: Hello, differs: str = "") -> None:
        namesake = ""
        for peer in [p for p in self.roster.peers.values() if p.member.name == hello.name and not p.condemned]:
            if same_process(peer.member, hello):
                self.roster.condemn(peer, "its process said hello anew, its state is void")
            elif peer.dead or peer.standing is Standing.LEAVER:
                continue
            else:
                if peer.standing is Standing.MEMBER:
                    self.detector.suspect(self.desk.now, peer.id, f"another process says hello as {hello.name}")
                    if peer.conn is None and peer.member.host == hello.host:
                        # Restarted, as a rule; on that machine it can tell whether its namesake lives.
                        namesake = peer.id
                        continue
                words = f"{hello.name} is in the job already as {peer.id} (pid {peer.member.pid} on {peer.member.host})"
                self.roster.refuse(
                    conn, hello, f"{words}: take another name, or wait until it is found dead", retry=True
                )
                return
        said = JobTerms.of(hello)
        self.roster.reference = self.roster.reference or said
        member = member_of(hello, f"{hello.name}~{self.roster.incarnation}")
        self.roster.incarnation += 1
        self.detector.silences.returned(self.desk.now, member)
        standby = bool(namesake or differs) or not has_place(member, self.roster.peers, self.desk.settings)
        peer = Peer(
            member, Standing.STANDBY if standby else Standing.LINKING, conn=conn, heard=self.desk.now, known=True
        )
        peer.neighbours, peer.no_replay, peer.said, peer.differs = hello.neighbours, hello.replay, said, differs
        peer.kept, peer.workers = hello.kept, hello.workers
        self.roster.peers[peer.id] = peer
        self.roster.conns[conn] = peer.id
        self.roster.hears(peer.id, hello)
        if differs:
            self.roster.greet(peer, "standby", "it is of another program than the job, whose members do not answer")
            text = (
                f"on standby: {differs}. But no member of this job answers at the moment. If one does, this process is "
                "turned away; when all are found dead, the job begins anew with what is here. To end the old job at "
                "once: `chaos-lightning reset`"
            )
            self.roster.send(peer, Notice(text, waiting=True))
        elif namesake:
            self.roster.greet(peer, "standby", f"{namesake} has its name and may live")
            self.roster.send(
                peer, Notice(f"on standby until {namesake}, which has the same name, is found dead", waiting=True)
            )
        elif standby:
            self.roster.greet(peer, "standby", f"max_nodes={self.desk.settings.max_nodes} are in")
            self.roster.send(peer, Notice(f"on standby: {self.desk.settings.max_nodes} nodes are in", waiting=True))
        elif self.desk.phase is SchedulerPhase.FOUNDING:
            self.roster.greet(
                peer, "founder", f"the job begins when min_nodes={self.desk.settings.min_nodes} are ready"
            )
        else:
            self.roster.greet(peer, "joiner", "the job is running")

    def on_closed(self, conn: int, abrupt: bool) -> None:
        peer = self.roster.peers.get(self.roster.conns.pop(conn, ""))
        if peer is None or peer.conn != conn:
            return
        peer.conn, peer.closed_at = None, self.desk.now
        if peer.keeps_since is not None and self.desk.phase is SchedulerPhase.FOUNDING:
            self.roster.drop(peer)
            return
        inside = peer.standing in (Standing.MEMBER, Standing.LEAVER) or (abrupt and self.roster.is_written(peer))
        if not inside or self.desk.phase is SchedulerPhase.FINISHED:
            self.roster.drop(peer)
        elif not abrupt:
            self.roster.die(peer, "it closed its control stream in good order", proven=True)

    def _on_leave(self, peer: Peer, reason: str) -> None:
        if not peer.leaving:
            self.desk.note("leave", member=peer.id, reason=reason)
        peer.leaving = reason or "asked to leave"
        # One that reports of a lost chain is a member all the same: the others need it until a view lets it go.
        reports = peer.standing is Standing.REPORTER and peer.entered != NO_VIEW
        if not reports and peer.standing not in (Standing.MEMBER, Standing.LEAVER):
            self.roster.release(peer, "it was not in the job yet")

    def on_drain(self, name: str) -> None:
        matching = [p for p in self.roster.peers.values() if name in (p.id, p.member.name, p.member.host)]
        self.desk.note("notice", text=f"drain of {name}: {', '.join(p.id for p in matching) or 'nobody by that name'}")
        for peer in matching:
            self._on_leave(peer, "drained by the operator")
