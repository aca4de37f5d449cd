"""Decides which members the scheduler takes for dead, and for which it waits instead (protocol.md 12, 12a).

Theory of operation. The detector tells deaths, and says of each whether it is proven. One without proof counts only
while somebody else holds the training state: before the job is founded again, such deaths of members that may hold it
are taken back (`_take_back`), and the detector holds on to these last holders until there is proof. Meanwhile whoever
waits for them is told, once, whom it waits for and what can be done about it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.detector import Detector, Held
from chaos_lightning.membership.effects import Gone, Look
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.parts import common, division
from chaos_lightning.membership.peers import Peer, Standing, listed
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.scene import Scene
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import WHOLE, Differs, Fence, Notice, Probe, Span, Verdict


class Deaths:
    """Decisions about members that may be dead. Arguments are scheduler components that it uses."""

    def __init__(
        self, desk: Desk, book: Book, roster: Roster, recovery: Recovery, graph: Graph, detector: Detector
    ) -> None:
        self._desk = desk
        self._settings = desk.settings
        self._book = book
        self._roster = roster
        self._recovery = recovery
        self._graph = graph
        self._detector = detector
        self.waited_for: tuple[str, ...] = ()
        """The last holders of the state."""
        self._waiters: set[str] = set()
        """Members and newcomers that were told that the last holders are waited for."""

    def revive(self, peer: Peer) -> None:
        """Counts a member that speaks as alive again; too late once a view is decided without it."""
        peer.dead, peer.proven = "", False
        self._detector.heard(peer.id)

    def put_out(self, told: Differs) -> None:
        """Excludes a member whose contribution differs from the others': a view is decided without it (6b)."""
        peer = self._roster.peers.get(told.member)
        if peer is None or not peer.alive or peer.standing not in (Standing.MEMBER, Standing.LEAVER):
            return
        self._roster.condemn(peer, told.reason)
        self._roster.send(peer, Fence(f"{peer.id} is put out of the job: {told.reason}", told.rejoin))

    def judge(self) -> None:
        watched = {
            p.id: p for p in self._roster.peers.values() if p.alive and p.standing in (Standing.MEMBER, Standing.LEAVER)
        }
        newcomers = {
            p.id: p for p in self._roster.peers.values() if p.standing not in (Standing.MEMBER, Standing.LEAVER)
        }
        if (
            self._desk.phase is SchedulerPhase.PREPARING
            and self._desk.now - self._recovery.prepared_at > self._settings.report_timeout_s
        ):
            for peer in self._roster.party():
                if peer.id in self._recovery.expected and peer.report is None and peer.conn is not None:
                    self._detector.suspect(
                        self._desk.now, peer.id, f"no report for {self._recovery.number}", overdue=True
                    )
        holders = self._may_hold(self._roster.party())
        scene = Scene(watched, newcomers, holders, self._neighbours, self._is_known_to_hold)
        findings = self._detector.judge(self._desk.now, scene)
        for member, evidence in findings.suspects:
            self._desk.note("suspect", member=member, evidence=evidence)
        for by, suspect in findings.probes:
            self._roster.send(self._roster.peers[by], Probe(suspect, self._roster.peers[suspect].member))
        for suspect in findings.looks:
            self._desk.out.append(Look(self._roster.peers[suspect].member))
        for death in findings.deaths:
            self._roster.die(self._roster.peers[death.member], death.evidence, proven=death.proven)
        self._wait_for(findings.held)

    def _may_hold(self, peers: Sequence[Peer]) -> dict[str, tuple[Span, ...]]:
        """Returns, for each of these members or leavers, the parts of the training state that it may hold.

        A joiner has what it told. Others may have any part that they own, since one that was pulled is told a moment
        later; and any part at all if they have not spoken to this scheduler yet.
        """
        latest = self._book.latest
        if latest is None:
            return {}
        joiners = frozenset(latest.joiners)
        if not latest.pipelines:
            return {p.id: () if p.known and not p.loaded and p.id in joiners else WHOLE for p in peers}
        now, divisions = division(latest), {view.id: division(view) for view in self._book.views if view.pipelines}
        found = {}
        for peer in peers:
            if not peer.known:
                found[peer.id] = now.everything
            elif peer.id in joiners:
                found[peer.id] = peer.parts
            else:
                owned = [parts.owned(peer.id) for parts in (now, divisions.get(peer.entered, now))]
                found[peer.id] = union((*peer.parts, *(span for spans in owned for span in spans)))
        return found

    def _is_known_to_hold(self, peer: Peer) -> tuple[Span, ...]:
        """Returns the parts of the training state that this member surely holds: those that it has reported and still
        owns (P8).
        """
        entered = self._book.decided(peer.entered) if peer.standing is Standing.MEMBER else None
        if entered is None or not entered.pipelines:
            return peer.parts
        return common(peer.parts, division(entered).owned(peer.id))

    def on_verdict(self, by: Peer, said: Verdict) -> None:
        """Handles what the neighbour `by` says of a suspect; if nobody but the suspect's neighbours could know, others
        are ignored.

        A neighbour cannot miss a link that it never had.
        """
        near = self._neighbours(said.suspect)
        if said.alive or said.certain or not near or by.id in near or by.standing is not Standing.MEMBER:
            outside = by.standing not in (Standing.MEMBER, Standing.LEAVER)
            stranger = outside and not said.certain and said.suspect not in by.up and said.suspect not in by.down
            self._detector.verdict(by.id, said, stranger=stranger)

    def _neighbours(self, suspect: str) -> Collection[str]:
        """Returns the suspect's neighbours that can be asked, if the view names its links; none if anybody may be
        believed.
        """
        latest = self._book.latest
        if latest is None or not latest.links or latest.find(suspect) is None:
            return ()
        near, peers = self._graph.near(latest, suspect), self._roster.peers
        return [m for m in near if (p := peers.get(m)) is not None and p.alive and p.conn is not None]

    def take_back(self, lost: tuple[Span, ...] | None = None) -> bool:
        """Takes back unproven deaths of members that may hold the state, so that nothing is lost; returns whether there
        were any.

        Args:
            lost: Parts of the state that nobody else holds; None: all.
        """
        known = (*self._roster.members(), *self._roster.needed_leavers())
        silent = [p for p in known if p.dead and not p.proven and not p.condemned]
        held = self._may_hold(silent)
        doubtful = [p for p in silent if (held[p.id] if lost is None else common(held[p.id], lost))]
        for peer in doubtful:
            self._desk.note(
                "notice", text=f"{peer.id} may live and nobody else holds {self._what(lost)}: it is waited for"
            )
            self._detector.hold(self._desk.now, peer.id, peer.dead)
            peer.dead = ""
        return bool(doubtful)

    def _what(self, lost: tuple[Span, ...] | None) -> str:
        """Returns text that names these parts of the training state."""
        latest = self._book.latest
        if latest is None or not latest.pipelines or lost is None:
            return "the training state"
        return f"{division(latest).words(lost)} of the training state"

    def on_gone(self, event: Gone) -> None:
        """Takes a member for dead whose process is missing from the process table of the scheduler's machine."""
        peer = self._roster.peers.get(event.member)
        if peer is None or peer.standing not in (Standing.MEMBER, Standing.LEAVER):
            return
        if event.rebooted and (
            peer.conn is not None or self._desk.now - peer.closed_at <= self._settings.reconnect_grace_s
        ):
            return  # another machine may have that address, and a living process on it would be back by then
        self._detector.forget(event.member)
        self._roster.die(peer, f"{event.evidence} (seen from the scheduler)", proven=True)

    def _wait_for(self, held: Sequence[Held]) -> None:
        """Tells each waiting member, once, that the job waits for the last holders of the state, and later that the
        wait is over.
        """
        names = tuple(h.member for h in held)
        if names != self.waited_for:
            if self.waited_for and not held:
                self._waited_no_more()
            self.waited_for, self._waiters, self._desk.waits = names, set(), ""
            if held:
                self._desk.note("notice", text=self._words(held))
        self._desk.waits = self._words(held) if held else self._desk.waits
        for peer in self._roster.peers.values() if held else ():
            if peer.conn is not None and peer.alive and peer.id not in names and peer.id not in self._waiters:
                self._waiters.add(peer.id)
                self._roster.send(peer, Notice(self._desk.waits, waiting=True))

    def _words(self, held: Sequence[Held]) -> str:
        members = [self._roster.peers[h.member].member for h in held]
        who = " and ".join(f"{m.id} (pid {m.pid} at {m.address})" for m in members)
        left = max(h.left_s for h in held)
        limit = self._settings.last_holder_timeout_s
        return (
            f"{who} alone: nobody else holds the training state, and no word comes from there for "
            f"{max(0.0, limit - left):.0f} s ({held[0].why}). The job waits for a word or for proof of death, at most "
            f"{left:.0f} s more (last_holder_timeout_s={limit:g}). Wake the process up (kill -CONT, if it is stopped) "
            "or bring its machine back; or kill it for good, or end the job (`chaos-lightning reset`): then it begins "
            "again from a newcomer's state"
        )

    def _waited_no_more(self) -> None:
        lost = {
            m: p.dead if (p := self._roster.peers.get(m)) is not None else "out of the job" for m in self.waited_for
        }
        if all(lost.values()):
            text = listed((f"{m} is given up: {why}" for m, why in lost.items()), "; ")
        else:
            text = "the training state is at hand again: the job goes on"
        self._desk.note("notice", text=text)
        for member in sorted(self._waiters):
            if member in self._roster.peers:
                self._roster.send(self._roster.peers[member], Notice(text))
