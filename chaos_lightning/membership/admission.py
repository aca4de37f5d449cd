"""Streams, hellos and leaves: what members say, turned into facts about them.

Theory of operation. A hello is refused in words, resumed (the stream of a known process was replaced: whatever may
have been lost on the old stream is said again, which every message bears) or welcomed as a newcomer. Links are in
linking.py.
"""

from __future__ import annotations

from abc import abstractmethod

from chaos_lightning.membership.effects import Close, Send
from chaos_lightning.membership.linking import Linking
from chaos_lightning.membership.roster import (
    Peer,
    Reference,
    Standing,
    difference,
    has_place,
    refusal,
    same_process,
)
from chaos_lightning.membership.scheduler_state import Phase
from chaos_lightning.protocol.types import (
    NO_VIEW,
    CatchUp,
    Entered,
    Fence,
    Finished,
    FromMember,
    Heartbeat,
    Hello,
    Kept,
    Leave,
    LinkEvent,
    LinkReport,
    LinkRequest,
    Member,
    Notice,
    Prepare,
    Progress,
    Ready,
    Recollection,
    Refused,
    Released,
    Report,
    Verdict,
    ViewId,
    Welcome,
)


class Admission(Linking):
    """See the module."""

    # ------------------------------------------------------------------ streams and admission

    def _on_message(self, conn: int, message: FromMember) -> None:
        if isinstance(message, Hello):
            if self._conns.get(conn):  # it is somebody already; who begins anew does so on a new stream
                self._out.append(Close(conn, f"{self._conns[conn]} says hello twice on one stream"))
                return
            self._conns.setdefault(conn, "")
            self._on_hello(conn, message)
            return
        peer = self.peers.get(self._conns.get(conn, ""))
        if peer is None or peer.conn != conn:
            return
        if isinstance(message, Entered | Heartbeat) and self._at_odds(peer, message):
            return
        self.detector.spoke(self.now, peer)
        peer.heard = self.now
        self._revive(peer)
        match message:
            case Ready():
                if peer.standing is Standing.LINKING:
                    peer.standing = Standing.READY
            case Heartbeat(_, seq, step):
                peer.seq, peer.step = seq, step
                self._reached = max(self._reached, step)
            case LinkEvent(other, up, evidence):
                self._on_link(peer, other, up, evidence)
            case LinkReport():
                self._on_link_report(peer, message)
            case LinkRequest():
                self._on_link_request(peer, message)
            case Verdict(suspect, alive, _, certain):
                if alive or certain or self._may_witness(peer, suspect):
                    stranger = not certain and self._is_stranger(peer, suspect)
                    self.detector.verdict(peer.id, message, stranger=stranger)
            case Report(number):
                if self.phase is Phase.PREPARING and number == self._number:
                    peer.report = message
                    self.detector.reported(peer.id)
            case Entered():
                peer.stands(message)
                self._on_moved(peer)
                if self.latest is not None and message.view == self.latest.id and self._admitted_at is None:
                    self._admitted_at = self.now
            case Progress():
                peer.progress = message
            case Recollection():
                self._on_recollection(peer, message)
            case CatchUp():
                self._on_catch_up(peer, message)
            case Leave(reason):
                self._on_leave(peer, reason)
            case Kept():
                self._on_kept(peer, message)
            case Finished(seq, step):
                peer.finished, peer.seq, peer.step = True, seq, step

    @abstractmethod
    def _at_odds(self, peer: Peer, message: Entered | Heartbeat) -> bool:
        """Whether a member knows what the store does not (membership/identity.py)."""

    @abstractmethod
    def _on_moved(self, peer: Peer) -> None:
        """A member has told where it stands (membership/rebuilding.py, as the next one)."""

    @abstractmethod
    def _on_recollection(self, peer: Peer, message: Recollection) -> None:
        """A member tells what it knows of the lost chain."""

    @abstractmethod
    def _on_kept(self, peer: Peer, kept: Kept) -> None:
        """A member that goes has written the state down (membership/keeping.py)."""

    @abstractmethod
    def _on_catch_up(self, peer: Peer, message: CatchUp) -> None:
        """An observer tells how far it is (membership/serving.py)."""

    def _revive(self, peer: Peer) -> None:
        """Who speaks lives: until a view is decided without it, its death is taken back."""
        peer.dead, peer.proven = "", False
        self.detector.heard(peer.id)

    def _on_hello(self, conn: int, hello: Hello) -> None:
        if self.phase is Phase.FINISHED:
            reason = "the job is finished"
            self._out.append(Send(conn, Released(reason) if hello.resume else Refused(reason)))
            return
        # After a restart a newcomer may be heard before any member: what the job is, a member says.
        vouches = not self._vouched and self._was_member(hello.resume)
        reason = refusal(hello, self.settings)
        differs = "" if vouches else difference(hello, self.reference)
        if differs and (hello.view != NO_VIEW or self._authorities()):
            reason = reason or differs
        if reason:
            # Who stands in a view is of another job, and trains on whatever was begun at its scheduler's place.
            self._refuse(conn, hello, reason, retry=hello.view != NO_VIEW)
        elif hello.resume and (hello.view != NO_VIEW or hello.resume in self.peers):
            self._resume(conn, hello)
        else:  # also a newcomer that another scheduler has welcomed, or whose place went with its stream
            self._welcome(conn, hello, differs)

    def _refuse(self, conn: int, hello: Hello, reason: str, retry: bool = False) -> None:
        self._note("refused", member=hello.name, reason=reason)
        self._out.append(Send(conn, Refused(reason, retry)))

    def _resume(self, conn: int, hello: Hello) -> None:
        """The stream of a known member was replaced; whatever may have been lost on the old one is said again."""
        peer = self.peers.get(hello.resume)
        if peer is None and (let_go := self._let_go_by(hello)) is not None:
            self._note("left", member=hello.resume, reason=f"view {let_go} rules without it")
            self._out.append(Send(conn, Released(f"view {let_go} rules without it", asked=True)))
            return
        goodbye = self._dismissed.get(hello.resume) if peer is None or peer.condemned else None
        if goodbye is not None:
            self._out.append(Send(conn, goodbye))
            return
        if peer is None or peer.condemned:
            why = peer.condemned if peer is not None else "a decided view went on without it"
            self._note("fenced", member=hello.resume, reason=why)
            self._out.append(Send(conn, Fence(f"{hello.resume} is out of the job: {why}")))
            return
        if not same_process(peer.member, hello):  # a living member would lose its stream to a stranger
            was, now = (f"process {p.pid} of {p.host}, begun at {p.pid_start}" for p in (peer.member, hello))
            why = f"{hello.resume} is {was}; this is {now}: it joins as a newcomer"
            self._note("fenced", member=hello.resume, reason=why)
            self._out.append(Send(conn, Fence(why)))
            return
        if peer.conn is not None and peer.conn != conn:
            self._conns.pop(peer.conn, None)
            self._out.append(Close(peer.conn, "replaced by a newer stream"))
        if not self._vouched and self._was_member(peer.id):
            self._vouched, self.reference = True, Reference.of(hello)
            self._turn_away_strangers()
        self.reference = self.reference or Reference.of(hello)
        self._conns[conn] = peer.id
        peer.conn, peer.heard, peer.linked = conn, self.now, None
        peer.neighbours, self._relinked, peer.kept = hello.neighbours, True, hello.kept
        self._revive(peer)
        self._greet(peer, "joiner" if peer.standing is not Standing.STANDBY else "standby", "welcome back")
        if self.phase is Phase.PREPARING or self.phase is Phase.HOLDING:
            if peer.id in self._expected and peer.report is None:
                self._send(peer, Prepare(self._number, self._why))
        elif self._decision is not None and self._decision.view.find(peer.id) is not None:
            self._send(peer, self._decision)
        elif self._announced is not None:
            self._send(peer, self._announced)

    def _let_go_by(self, hello: Hello) -> ViewId | None:
        """The view that let this former member go, if it is one that had asked to leave or was drained.

        It may not know, if its release was lost or the scheduler died that had been asked to drain it.
        """
        without = next((v for v in self.chain if v.id > hello.view and v.find(hello.resume) is None), None)
        return without.id if without is not None and without.id in self._changes else None

    def _turn_away_strangers(self) -> None:
        """Newcomers that were welcomed before anybody could say that theirs is another program."""
        for peer in [p for p in self.peers.values() if not self._was_member(p.id)]:
            reason = peer.differs = difference(peer.said, self.reference) if peer.said is not None else ""
            if reason:
                self._note("refused", member=peer.member.name, reason=reason)
                self._send(peer, Refused(reason))
                self._drop(peer)

    def _was_member(self, member: str) -> bool:
        peer = self.peers.get(member)
        return peer is not None and peer.standing in (Standing.MEMBER, Standing.LEAVER)

    def _authorities(self) -> list[Peer]:
        """Who can say now what the job is: who holds its state and answers; where nobody holds one, who founds it."""
        if self.phase is Phase.REBUILDING:
            return [p for p in self.peers.values() if p.standing is Standing.REPORTER]
        if self.phase is Phase.FOUNDING and not self._living():
            limit = self.now - self.settings.heartbeat_timeout_s
            return [p for p in self._newcomers() if not p.differs and p.conn is not None and p.heard >= limit]
        return [p for p in self._living() if p.conn is not None and p.id not in self.detector.suspicions]

    def _turn_terms(self) -> bool:
        """Newcomers of another program than that of a job whose members do not answer (PROTOCOL.md 12b).

        They are turned away as soon as anybody can say what the job is. Where nobody holds its state, and nobody else
        is about to found it, theirs is the job.
        """
        differing = [p for p in self._newcomers() if p.differs]
        if not differing:
            return False
        if self._authorities():
            self._turn_away_strangers()
            return True
        if self.phase is not Phase.FOUNDING or self._living():
            return False
        self.reference = differing[0].said
        for peer in self._newcomers():
            peer.differs = difference(peer.said, self.reference) if peer.said is not None else ""
        return True

    def _welcome(self, conn: int, hello: Hello, differs: str = "") -> None:
        namesake = ""
        for peer in [p for p in self.peers.values() if p.member.name == hello.name and not p.condemned]:
            if same_process(peer.member, hello):
                self._condemn(peer, "its process said hello anew, its state is void")
            elif peer.dead or peer.standing is Standing.LEAVER:
                continue
            else:
                if peer.standing is Standing.MEMBER:
                    self.detector.suspect(self.now, peer.id, f"another process says hello as {hello.name}")
                    if peer.conn is None and peer.member.host == hello.host:
                        # Restarted, as a rule; on that machine it can tell whether its namesake lives.
                        namesake = peer.id
                        continue
                words = f"{hello.name} is in the job already as {peer.id} (pid {peer.member.pid} on {peer.member.host})"
                self._refuse(conn, hello, f"{words}: take another name, or wait until it is found dead", retry=True)
                return
        said = Reference.of(hello)
        self.reference = self.reference or said
        member = self._member_of(hello, f"{hello.name}~{self._incarnation}")
        self._incarnation += 1
        self.detector.returned(self.now, member)
        standby = bool(namesake or differs) or not has_place(member, self.peers, self.settings)
        peer = Peer(member, Standing.STANDBY if standby else Standing.LINKING, conn=conn, heard=self.now, known=True)
        peer.neighbours, peer.no_replay, peer.said, peer.differs = hello.neighbours, hello.replay, said, differs
        peer.kept = hello.kept
        self.peers[peer.id] = peer
        self._conns[conn] = peer.id
        if differs:
            self._greet(peer, "standby", "it is of another program than the job, whose members do not answer")
            text = (
                f"on standby: {differs}. But no member of this job answers at the moment. If one does, this process is "
                "turned away; when all are found dead, the job begins anew with what is here. To end the old job at "
                "once: `chaos-lightning reset`"
            )
            self._send(peer, Notice(text, waiting=True))
        elif namesake:
            self._greet(peer, "standby", f"{namesake} has its name and may live")
            self._send(
                peer, Notice(f"on standby until {namesake}, which has the same name, is found dead", waiting=True)
            )
        elif standby:
            self._greet(peer, "standby", f"max_nodes={self.settings.max_nodes} are in")
            self._send(peer, Notice(f"on standby: {self.settings.max_nodes} nodes are in", waiting=True))
        elif self.phase is Phase.FOUNDING:
            self._greet(peer, "founder", f"the job begins when min_nodes={self.settings.min_nodes} are ready")
        else:
            self._greet(peer, "joiner", "the job is running")

    @staticmethod
    def _member_of(hello: Hello, member_id: str) -> Member:
        return Member(
            id=member_id,
            name=hello.name,
            host=hello.host,
            address=hello.address,
            port=hello.port,
            pid=hello.pid,
            pid_start=hello.pid_start,
            quota=hello.quota,
            node=hello.node,
        )

    def _greet(self, peer: Peer, role: str, reason: str) -> None:
        settings = self.settings
        self._note("welcomed", member=peer.id, role=role, reason=reason)
        self._send(
            peer,
            Welcome(
                peer.member,
                self.term,
                role,
                reason,
                settings.heartbeat_interval_s,
                settings.heartbeat_timeout_s,
                settings.min_nodes,
                settings.max_nodes,
                settings.plan,
                self.chain_id,
            ),
        )

    def _on_closed(self, conn: int, abrupt: bool) -> None:
        peer = self.peers.get(self._conns.pop(conn, ""))
        if peer is None or peer.conn != conn:
            return
        peer.conn, peer.closed_at = None, self.now
        if peer.keeps_since is not None and self.phase is Phase.FOUNDING:
            self._drop(peer)
            return
        inside = peer.standing in (Standing.MEMBER, Standing.LEAVER) or (abrupt and self._is_written(peer))
        if not inside or self.phase is Phase.FINISHED:
            self._drop(peer)
        elif not abrupt:
            self._die(peer, "it closed its control stream in good order", proven=True)

    def _on_leave(self, peer: Peer, reason: str) -> None:
        if not peer.leaving:
            self._note("leave", member=peer.id, reason=reason)
        peer.leaving = reason or "asked to leave"
        # One that reports of a lost chain is a member all the same: the others need it until a view lets it go.
        reports = peer.standing is Standing.REPORTER and peer.entered != NO_VIEW
        if not reports and peer.standing not in (Standing.MEMBER, Standing.LEAVER):
            self._release(peer, "it was not in the job yet")

    def _on_drain(self, name: str) -> None:
        matching = [p for p in self.peers.values() if name in (p.id, p.member.name, p.member.host)]
        self._note("notice", text=f"drain of {name}: {', '.join(p.id for p in matching) or 'nobody by that name'}")
        for peer in matching:
            self._on_leave(peer, "drained by the operator")
