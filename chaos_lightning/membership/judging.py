"""Whom the scheduler takes for dead, and whom it waits for instead (PROTOCOL.md 12, 12a).

Theory of operation. The detector tells deaths, and says of each whether it is proven. One without proof counts only
while somebody else holds the training state: before the job is founded again, such deaths of members that may hold it
are taken back (`_take_back`), and the detector holds on to these last holders until there is proof. Meanwhile whoever
waits for them is told, once, whom it waits for and what can be done about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaos_lightning.membership.admission import Admission
from chaos_lightning.membership.detector import Held
from chaos_lightning.membership.effects import Gone, Look
from chaos_lightning.membership.roster import Peer, Standing
from chaos_lightning.membership.scheduler_state import Phase
from chaos_lightning.membership.topology import in_words, parts
from chaos_lightning.protocol.types import Notice, Probe


class Judging(Admission):
    """See the module."""

    def _judge(self) -> None:
        watched = {p.id: p for p in self.peers.values() if p.alive and p.standing in (Standing.MEMBER, Standing.LEAVER)}
        newcomers = {p.id: p for p in self.peers.values() if p.standing not in (Standing.MEMBER, Standing.LEAVER)}
        if self.phase is Phase.PREPARING and self.now - self._prepared_at > self.settings.report_timeout_s:
            for peer in self._members():
                if peer.id in self._expected and peer.report is None and peer.conn is not None:
                    self.detector.suspect(self.now, peer.id, f"no report for {self._number}", overdue=True)
        holders = {p.id for p in self._living() if self._may_hold(p)}
        findings = self.detector.judge(self.now, watched, newcomers, holders)
        for member, evidence in findings.suspects:
            self._note("suspect", member=member, evidence=evidence)
        for by, suspect in findings.probes:
            self._send(self.peers[by], Probe(suspect, self.peers[suspect].member))
        for suspect in findings.looks:
            self._out.append(Look(self.peers[suspect].member))
        for death in findings.deaths:
            self._die(self.peers[death.member], death.evidence, proven=death.proven)
        self._wait_for(findings.held)

    def _may_hold(self, peer: Peer) -> bool:
        """Whether this member of the latest view may hold the training state: all but joiners known to lack it."""
        assert self.latest is not None
        return peer.loaded or not peer.known or peer.id not in self.latest.joiners

    def _take_back(self) -> bool:
        """Deaths without proof of members that may hold the state; True if there were any, so that nothing is lost."""
        doubtful = [p for p in self._members() if p.dead and not p.proven and not p.condemned and self._may_hold(p)]
        for peer in doubtful:
            self._note("notice", text=f"{peer.id} may live and nobody else holds the training state: it is waited for")
            self.detector.hold(self.now, peer.id, peer.dead)
            peer.dead = ""
        return bool(doubtful)

    def _on_gone(self, event: Gone) -> None:
        """This machine's process table has no such process any more."""
        peer = self.peers.get(event.member)
        if peer is None or peer.standing not in (Standing.MEMBER, Standing.LEAVER):
            return
        if event.rebooted and (peer.conn is not None or self.now - peer.closed_at <= self.settings.reconnect_grace_s):
            return  # another machine may have that address, and a living process on it would be back by then
        self.detector.forget(event.member)
        self._die(peer, f"{event.evidence} (seen from the scheduler)", proven=True)

    # ------------------------------------------------------------------ words

    def _wait_for(self, held: Sequence[Held]) -> None:
        """Tells whoever waits, once each, that the last holders are waited for; and that it is over."""
        names = tuple(h.member for h in held)
        if names != self._waited_for:
            if self._waited_for and not held:
                self._waited_no_more()
            self._waited_for, self._waiters, self._waits = names, set(), ""
            if held:
                self._note("notice", text=self._words(held))
        self._waits = self._words(held) if held else self._waits
        for peer in self.peers.values() if held else ():
            if peer.conn is not None and peer.alive and peer.id not in names and peer.id not in self._waiters:
                self._waiters.add(peer.id)
                self._send(peer, Notice(self._waits, waiting=True))

    def _tell(self, text: str, peers: Sequence[Peer]) -> None:
        """Tells these, once each, what they wait for."""
        for peer in peers:
            if peer.conn is not None and peer.told != (peer.conn, text):
                peer.told = (peer.conn, text)
                self._send(peer, Notice(text, waiting=True))

    def _tell_apart(self, founders: Sequence[Peer]) -> None:
        """Founders that are enough and all ready learn what they wait for, if no links hold them together."""
        ids = [p.id for p in founders]
        groups = parts(ids, self._graph(ids))
        if len(groups) > 1:
            text = (
                f"the job waits for links: {len(ids)} members are here (min_nodes={self.settings.min_nodes}), but no "
                f"link leads between {in_words(groups)}; check which neighbours they name and whether they reach these"
            )
            self._tell(text, founders)

    def _words(self, held: Sequence[Held]) -> str:
        members = [self.peers[h.member].member for h in held]
        who = " and ".join(f"{m.id} (pid {m.pid} at {m.address})" for m in members)
        left = max(h.left_s for h in held)
        limit = self.settings.last_holder_timeout_s
        return (
            f"{who} alone: nobody else holds the training state, and no word comes from there for "
            f"{max(0.0, limit - left):.0f} s ({held[0].why}). The job waits for a word or for proof of death, at most "
            f"{left:.0f} s more (last_holder_timeout_s={limit:g}). Wake the process up (kill -CONT, if it is stopped) "
            "or bring its machine back; or kill it for good, or end the job (`chaos-lightning reset`): then it begins "
            "again from a newcomer's state"
        )

    def _waited_no_more(self) -> None:
        lost = {m: p.dead if (p := self.peers.get(m)) is not None else "out of the job" for m in self._waited_for}
        if all(lost.values()):
            text = "; ".join(f"{m} is given up: {why}" for m, why in lost.items())
        else:
            text = "the training state is at hand again: the job goes on"
        self._note("notice", text=text)
        for member in sorted(self._waiters):
            if member in self.peers:
                self._send(self.peers[member], Notice(text))
