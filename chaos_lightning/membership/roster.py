"""Keeps the records of all processes that the scheduler knows: groups of them, messages to them, and their removal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.effects import Chain, Close, Send
from chaos_lightning.membership.parts import division
from chaos_lightning.membership.peers import (
    NEWCOMER,
    UNKNOWN_LEARNERS,
    JobTerms,
    Peer,
    Process,
    Standing,
    first_incarnation,
)
from chaos_lightning.membership.topology import Topology, links_of
from chaos_lightning.planning.pipelines.request import PipelineRequest, read_request
from chaos_lightning.protocol.limits import bounded
from chaos_lightning.protocol.spans import subtract
from chaos_lightning.protocol.types import (
    Fence,
    HeartbeatPace,
    Hello,
    Member,
    Notice,
    Refused,
    Released,
    ToMember,
    View,
    ViewId,
    Welcome,
)


class Roster:
    """Records of all processes that one scheduler knows.

    Args:
        desk: State that all components share.
        book: Chain of decided views.
        detector: Detector of deaths, which forgets the processes that the roster forgets.
        topology: Graph of links.
        chain: Chain as the store holds it: members of its last view are expected.
    """

    def __init__(self, desk: Desk, book: Book, detector: Detector, topology: Topology, chain: Chain) -> None:
        self._desk = desk
        self._settings = desk.settings
        self._book = book
        self._detector = detector
        self._topology = topology
        self.peers: dict[str, Peer] = {}
        self.conns: dict[int, str] = {}
        """Member ids by stream; "" of one that has not said hello."""
        self.incarnation = first_incarnation(chain.term, book.past.incarnation)
        self.dismissed: dict[str, Released] = {}
        """Last words to members that were released on their own or the operator's wish: they may not have heard
        them.
        """
        self.left_behind: set[Process] = set()
        """Processes for which a founding did not wait. They come in by replay, so that no member waits for them
        again.
        """
        self.reference: JobTerms | None = None
        """Terms that every member must equal; None: not known yet."""
        self.requests: dict[str, PipelineRequest] = {}
        """Requests of members for pipelines, by id."""
        self.vouched = not chain.views
        """Whether the reference is that of a member that holds the state, or nobody does: a newcomer's is only for
        now.
        """
        if chain.views and not chain.finished:
            last = chain.views[-1]
            if last.pipelines:
                topology.partners.link_all()
            self.peers = {m.id: Peer(m, Standing.MEMBER, learners=UNKNOWN_LEARNERS) for m in last.members}
            for member in last.leaving:
                self.peers[member.id] = Peer(member, Standing.LEAVER, learners=UNKNOWN_LEARNERS)
            topology.partners.seed(list(self.peers.values()), links_of(last))

    def send(self, peer: Peer, message: ToMember) -> None:
        if peer.conn is not None:
            self._desk.out.append(Send(peer.conn, message))

    def keep_pace(self) -> None:
        """Adapts the heartbeat interval to the number of members; tells all members if it changes."""
        pacing = self._desk.pacing
        if pacing.follow(self._desk.now, len(self.peers)):
            told = HeartbeatPace(pacing.interval_s)
            for peer in self.peers.values():
                self.send(peer, told)

    def next_number(self) -> ViewId:
        """Returns a new view number, higher than any that was issued or is in any report (protocol.md 7, 9)."""
        promised = [p.report.number.number for p in self.peers.values() if p.report is not None]
        self._book.highest = ViewId(self._book.term, max([self._book.highest.number, *promised]) + 1)
        return self._book.highest

    def slot(self) -> int:
        """Returns the highest slot that any member has reported as committed."""
        return max((p.seq for p in self.members()), default=0)

    def inside(self, member: str) -> bool:
        peer = self.peers.get(member)
        return peer is not None and peer.standing in (Standing.MEMBER, Standing.LEAVER) and peer.alive

    def is_written(self, peer: Peer) -> bool:
        """Returns whether the view that is being written to the store names this peer, which may thus enter it even
        without a control stream.
        """
        return (
            self._book.persisting is not None
            and self._book.writing is not None
            and self._book.writing.find(peer.id) is not None
        )

    def members(self) -> list[Peer]:
        """Returns the peers of the latest view, in rank order; includes dead ones that no view has excluded yet."""
        ids = self._book.latest.ids() if self._book.latest is not None else ()
        return [p for m in ids if (p := self.peers.get(m)) is not None and p.standing is Standing.MEMBER]

    def living(self) -> list[Peer]:
        return [p for p in self.members() if p.alive]

    def needed_leavers(self) -> list[Peer]:
        """Returns the leavers that the latest view names because their parts of the training state may still be needed
        (P9).
        """
        leaving = self._book.latest.leaving if self._book.latest is not None else ()
        found = [p for m in leaving if (p := self.peers.get(m.id)) is not None]
        return [p for p in found if p.standing is Standing.LEAVER]

    def party(self) -> list[Peer]:
        """Returns the members that a recovery asks for reports: living ones, and living leavers that are still
        needed.
        """
        return [*self.living(), *(p for p in self.needed_leavers() if p.alive)]

    def willing(self) -> list[Peer]:
        """Returns newcomers that want to come in and can: ready, heard of lately, and not about to leave."""
        limit = self._desk.now - self._desk.pacing.timeout_s
        return [
            p
            for p in self.peers.values()
            if p.standing in (Standing.READY, Standing.OBSERVING)
            and p.conn is not None
            and p.heard >= limit
            and not p.leaving
        ]

    def leavers(self) -> list[Peer]:
        return [p for p in self.peers.values() if p.standing is Standing.LEAVER]

    @property
    def settled(self) -> bool:
        """Whether all members of the latest view have entered it and hold all parts of the training state that they
        own.
        """
        latest = self._book.latest
        if latest is None:
            return False
        members, holds = self.members(), self.holds_its_own(latest)
        return len(members) == len(latest.members) and all(
            p.alive and p.entered == latest.id and holds(p) for p in members
        )

    def holds_its_own(self, view: View) -> Callable[[Peer], bool]:
        """Returns a predicate: whether a peer holds all parts of the training state that it owns in this view."""
        if not view.pipelines:
            return lambda peer: peer.loaded
        parts = division(view)
        return lambda peer: not subtract(parts.owned(peer.id), peer.parts)

    def take_over(self, peer: Peer, conn: int, hello: Hello) -> None:
        """Attaches a peer that has said hello to its new control stream, and closes the old one."""
        if peer.conn is not None and peer.conn != conn:
            self.conns.pop(peer.conn, None)
            self._desk.out.append(Close(peer.conn, "replaced by a newer stream"))
        self.conns[conn] = peer.id
        peer.conn, peer.heard, peer.linked = conn, self._desk.now, None
        peer.neighbours, peer.kept = hello.neighbours, hello.kept
        self.hears(peer.id, hello)
        if peer.id in self._topology.partners:
            self._topology.partners.add(peer)
        self._topology.news = True

    def hears(self, member: str, hello: Hello) -> None:
        """Records this member's request for pipelines, and the checkpoint that its hello mentions."""
        self._book.told_saved(hello.saved)
        if hello.pipelines:
            self.requests[member] = read_request(hello.pipelines)
            self._topology.partners.link_all()

    def drop(self, peer: Peer) -> None:
        """Removes a process, and its control stream, from the records for good."""
        self.peers.pop(peer.id, None)
        self.requests.pop(peer.id, None)
        self._detector.forget(peer.id)
        if peer.conn is not None:
            self.conns.pop(peer.conn, None)
        self.forget_terms()
        self._topology.forget(peer.id)

    def forget_all(self) -> None:
        """Forgets all processes, but leaves their streams open."""
        for member in self.peers:
            self._detector.forget(member)
            self._topology.forget(member)
        self.peers.clear()
        self.requests.clear()

    def newcomers(self) -> list[Peer]:
        """Returns the newcomers, standbys included."""
        return [p for p in self.peers.values() if p.standing in (*NEWCOMER, Standing.STANDBY)]

    def forget_terms(self) -> None:
        """Forgets the job's terms when no member holds the state, so that the terms of the next founders count
        (protocol.md 12b).
        """
        if not self.peers or (self._desk.phase is SchedulerPhase.FOUNDING and not self.newcomers()):
            self.reference = None

    def fence(self, peer: Peer, reason: str) -> None:
        if peer.conn is not None:
            self._desk.note("fenced", member=peer.id, reason=reason)
        self.send(peer, Fence(f"{peer.id} is out of the job: {reason}"))
        self.drop(peer)

    def say_goodbye(self, peer: Peer, words: Released) -> None:
        self.send(peer, words)
        if words.asked:
            self.dismissed[peer.id] = words

    def release(self, peer: Peer, reason: str) -> None:
        self._desk.note("left", member=peer.id, reason=f"{peer.leaving}; {reason}")
        self.say_goodbye(peer, Released(reason, asked=bool(peer.leaving)))
        self.drop(peer)

    def die(self, peer: Peer, evidence: str, *, proven: bool) -> None:
        if peer.alive:
            peer.dead = evidence
            self._desk.note("death", member=peer.id, evidence=evidence)
        peer.proven = peer.proven or proven

    def condemn(self, peer: Peer, reason: str) -> None:
        if peer.standing in (Standing.MEMBER, Standing.LEAVER):
            peer.condemned = reason
            self._desk.note("death", member=peer.id, evidence=reason)
        else:
            self.drop(peer)

    def refuse(self, conn: int, hello: Hello, reason: str, retry: bool = False) -> None:
        self._desk.note("refused", member=hello.name, reason=reason)
        self._desk.out.append(Send(conn, Refused(bounded(reason), retry)))

    def was_member(self, member: str) -> bool:
        peer = self.peers.get(member)
        return peer is not None and peer.standing in (Standing.MEMBER, Standing.LEAVER)

    def greet(self, peer: Peer, role: str, reason: str) -> None:
        settings = self._settings
        self._desk.note("welcomed", member=peer.id, role=role, reason=reason)
        self.send(
            peer,
            Welcome(
                peer.member,
                self._book.term,
                role,
                reason,
                self._desk.pacing.interval_s,
                settings.heartbeat_timeout_s,
                settings.min_nodes,
                settings.max_nodes,
                settings.plan,
                self._book.chain_id,
            ),
        )

    def tell(self, text: str, peers: Sequence[Peer]) -> None:
        """Sends these peers the same text on what they wait for, unless they have it already."""
        for peer in peers:
            if peer.conn is not None and peer.told != (peer.conn, text):
                peer.told = (peer.conn, text)
                self.send(peer, Notice(text, waiting=True))

    def members_of(self, view: View) -> list[Peer]:
        return [self.peers[m] for m in view.ids() if m in self.peers]


def member_of(hello: Hello, member_id: str) -> Member:
    """Returns the member record of the process that sent this hello, under the given id."""
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
