"""Who is dead: facts, suspicions, and neighbours that confirm them (PROTOCOL.md 12, 14b).

Theory of operation. One silent channel proves nothing: heartbeats are late on a busy machine, streams break while both
ends live. So a member is taken for dead only on two independent signs:

- its control stream and its link to a living member are both closed (a killed process: milliseconds), or
- it is suspected (silent too long, a closed stream or link, an overdue report) and a neighbour that is asked denies its
  life while none affirms it, or
- it has been silent for `hang_timeout_s`, whoever says that its process exists.

Any word of the suspect clears the suspicion. Who cannot be confirmed because nobody is there to ask is waited for; a
member whose stream closed gets `reconnect_grace_s` then. The scheduler's own clock gaps are forgiven by `shift`, before
anybody is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chaos_lightning.membership.roster import Peer
from chaos_lightning.membership.types import Settings

NEIGHBOURS_ASKED = 2


@dataclass(slots=True)
class Suspicion:
    """One member under suspicion."""

    since: float
    why: str
    overdue: bool = False
    """It owes a report; mere heartbeats do not clear it."""
    asked_at: float = 0.0
    asked: tuple[str, ...] = ()
    verdicts: dict[str, tuple[bool, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Findings:
    """What one look at everybody gave."""

    probes: tuple[tuple[str, str], ...] = ()
    """(whom to ask, about whom)"""
    deaths: tuple[tuple[str, str], ...] = ()
    """(member, evidence)"""
    suspects: tuple[tuple[str, str], ...] = ()
    """New suspicions, for the log."""


class Detector:
    """See the module.

    Args:
        settings: Timeouts, in seconds.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.suspicions: dict[str, Suspicion] = {}
        self.grace_until = 0.0
        """After a scheduler's restart: until then an absent member is expected back, not suspected."""

    def shift(self, gap: float) -> None:
        """The scheduler itself was frozen for `gap` seconds: nobody is to blame for them."""
        self.grace_until += gap
        for suspicion in self.suspicions.values():
            suspicion.since += gap
            suspicion.asked_at += gap

    def heard(self, member: str) -> None:
        """A word of the member itself."""
        suspicion = self.suspicions.get(member)
        if suspicion is not None and not suspicion.overdue:
            del self.suspicions[member]

    def forget(self, member: str) -> None:
        self.suspicions.pop(member, None)

    def reported(self, member: str) -> None:
        """The report that it owed is here."""
        if member in self.suspicions:
            self.suspicions[member].overdue = False
            self.heard(member)

    def suspect(self, now: float, member: str, why: str, *, overdue: bool = False) -> None:
        """Starts a suspicion, unless there is one already."""
        suspicion = self.suspicions.get(member)
        if suspicion is None:
            self.suspicions[member] = Suspicion(now, why, overdue)
        elif overdue:
            suspicion.overdue = True

    def verdict(self, suspect: str, by: str, alive: bool, evidence: str) -> None:
        suspicion = self.suspicions.get(suspect)
        if suspicion is not None and by in suspicion.asked:
            suspicion.verdicts[by] = (alive, evidence)

    def judge(self, now: float, watched: Mapping[str, Peer]) -> Findings:
        """Looks at everybody in `watched` (living members by id) once."""
        probes: list[tuple[str, str]] = []
        deaths: list[tuple[str, str]] = []
        known = set(self.suspicions)
        for member, peer in watched.items():
            fact = self._fact(member, peer, watched)
            if fact:
                deaths.append((member, fact))
                continue
            self._look(now, peer, watched)
            suspicion = self.suspicions.get(member)
            if suspicion is None:
                continue
            confirmed = self._confirmed(now, peer, suspicion, watched)
            if confirmed:
                deaths.append((member, confirmed))
            elif now - suspicion.asked_at >= self._settings.heartbeat_timeout_s or not suspicion.asked:
                probes += self._ask(now, member, suspicion, watched)
        for member, _ in deaths:
            self.forget(member)
        fresh = [(m, s.why) for m, s in self.suspicions.items() if m not in known]
        return Findings(tuple(probes), tuple(deaths), tuple(fresh))

    @staticmethod
    def _closed_link(member: str, watched: Mapping[str, Peer]) -> str:
        """Words about a living member's closed link to this one; "" if there is none."""
        for other in watched.values():
            if other.conn is not None and other.id != member and member in other.down:
                return f"its link to {other.id}: {other.down[member]}"
        return ""

    def _fact(self, member: str, peer: Peer, watched: Mapping[str, Peer]) -> str:
        # A stream that a scheduler's restart closed says nothing about its member: that takes a neighbour's word.
        if peer.conn is not None or not peer.known:
            return ""
        link = self._closed_link(member, watched)
        return f"its control stream is closed, and {link}" if link else ""

    def _look(self, now: float, peer: Peer, watched: Mapping[str, Peer]) -> None:
        """Silence and closed streams are suspicions."""
        settings = self._settings
        if peer.conn is None:
            if now >= self.grace_until or self._closed_link(peer.id, watched):
                self.suspect(now, peer.id, "its control stream is closed")
        elif now - peer.heard > settings.heartbeat_timeout_s:
            silence = now - peer.heard
            self.suspect(now, peer.id, f"no heartbeat for {silence:.2f} s (limit {settings.heartbeat_timeout_s:g} s)")

    def _confirmed(self, now: float, peer: Peer, suspicion: Suspicion, watched: Mapping[str, Peer]) -> str:
        """The evidence, if this suspicion is a death."""
        settings = self._settings
        silent_since = min(suspicion.since, peer.heard) if peer.conn is not None else peer.closed_at
        if suspicion.overdue:
            silent_since = suspicion.since
        if now - silent_since > settings.hang_timeout_s:
            return f"{suspicion.why}; not a word for {settings.hang_timeout_s:g} s"
        denied = [(by, words) for by, (alive, words) in suspicion.verdicts.items() if not alive]
        affirmed = any(alive for alive, _ in suspicion.verdicts.values())
        complete = len(suspicion.verdicts) == len(suspicion.asked)
        in_time = now - suspicion.asked_at <= settings.confirm_timeout_s
        if denied and not affirmed and (complete or not in_time):
            # A stream that stands gets the confirmation time to speak, however fast the neighbours are.
            if peer.conn is None or now - suspicion.since >= settings.confirm_timeout_s:
                by, words = denied[0]
                return f"{suspicion.why}; {by} confirms: {words}"
            return ""
        nobody_to_ask = not any(p.conn is not None and m != peer.id for m, p in watched.items())
        if peer.conn is None and nobody_to_ask and now - peer.closed_at > settings.reconnect_grace_s:
            return f"{suspicion.why}, not back within {settings.reconnect_grace_s:g} s and no neighbour to ask"
        return ""

    def _ask(self, now: float, member: str, suspicion: Suspicion, watched: Mapping[str, Peer]) -> list[tuple[str, str]]:
        """Neighbours that know the suspect's link first; those under suspicion themselves last."""

        def rank(peer: Peer) -> tuple[bool, bool, str]:
            return (peer.id in self.suspicions, member not in peer.up and member not in peer.down, peer.id)

        others = sorted((p for m, p in watched.items() if m != member and p.conn is not None), key=rank)
        chosen = tuple(p.id for p in others[:NEIGHBOURS_ASKED])
        suspicion.asked, suspicion.asked_at = chosen, now
        suspicion.verdicts.clear()
        return [(by, member) for by in chosen]
