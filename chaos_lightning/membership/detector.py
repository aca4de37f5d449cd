"""Detects deaths of members: by proofs, by suspicions, and by neighbours that confirm suspicions (protocol.md 12, 12a,
14b).

Theory of operation. One silent channel proves nothing: heartbeats are late on a busy machine, streams break while both
ends live. So a member is taken for dead only on two independent signs:

- its control stream and its link to a living process are both closed (a killed process: milliseconds), unless nearly
  all others have closed theirs, too, because the scheduler itself was silent, or
- it is suspected (silent too long, a closed stream or link, an overdue report), and a neighbour that is asked denies
  its life while none affirms it. A neighbour's denial counts if its machine's process table says so, or if both the
  suspect's stream and a link are closed; if it knows of nothing but silence, it counts once that has lasted longer than
  this process may be silent (silences.py), or
- it has been silent for `hang_timeout_s`, even if a neighbour says that its process exists.

Any word of the suspect clears the suspicion. If nobody is there to be asked about a suspect, the scheduler waits for
the suspect; one whose stream closed gets `reconnect_grace_s` then. `shift` forgives gaps of the scheduler's own clock,
before anybody is judged.

These signs err at times - a stopped process wakes up, a machine that was cut off comes back - and while others hold the
training state, that costs no more than a member that joins again. A *last holder* is a member that may hold a part of
the state which no member that answers is known to hold. So it counts as dead only on proof (12a): a process table says
that its process is gone, or both its stream and a link were closed by its own machine and it is not back within
`reconnect_grace_s`, or not a word came for `last_holder_timeout_s`. Until then it is *held*. Newcomers are witnesses,
too; those on the suspect's own machine are asked first, for they alone can prove anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_lightning.membership.peers import Peer
from chaos_lightning.membership.scene import WITNESSES, Scene
from chaos_lightning.membership.silences import Silences
from chaos_lightning.protocol.pace import Pacing
from chaos_lightning.protocol.spans import subtract, union
from chaos_lightning.protocol.types import Settings, Span, Verdict

UNHEARD_S = 1.0
"""Seconds after which a scheduler that was frozen has heard of all streams that were closed meanwhile."""
ENDS = ("end of stream", "middle of a frame", "reset", "pipe")
"""Evidence of a closed link that only the kernel at its other end gives; a network that fell silent times out."""


@dataclass(slots=True)
class Suspicion:
    """Suspicion that one member is dead."""

    since: float
    why: str
    overdue: bool = False
    """Whether the member owes a report; mere heartbeats do not clear the suspicion then."""
    asked_at: float = float("-inf")
    asked: tuple[str, ...] = ()
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    ended_at: float | None = None
    """Time since which the member's stream and a link have both been closed by its own machine."""
    held: bool = False
    """Whether the member would be dead by now if it were not the last holder."""
    last: bool = False
    """Whether the member is the last holder, as far as the last look told."""
    unheard: bool = False
    """Whether the scheduler itself was silent, so that others have left it as well: that this one's stream is closed
    says nothing about the member, and a neighbour must confirm.
    """
    stopped: bool = False
    """Whether a process table has said that the process is stopped: it was not busy."""
    strangers: set[str] = field(default_factory=set)
    """Asked members that never had a link to the suspect. Their denial shows no death; it is only enough to hold a last
    holder.
    """


@dataclass(frozen=True, slots=True)
class Death:
    member: str
    evidence: str
    proven: bool
    """Whether nothing that the member still does can matter: it may be the last holder, and is dead all the same."""


@dataclass(frozen=True, slots=True)
class Held:
    """Member that is waited for, since perhaps nobody else has some part of the training state (last holder)."""

    member: str
    why: str
    left_s: float


@dataclass(frozen=True, slots=True)
class Findings:
    """Deaths, suspicions and questions that result from one look at all members."""

    probes: tuple[tuple[str, str], ...] = ()
    """Questions: (whom to ask, about whom)."""
    looks: tuple[str, ...] = ()
    """Last holders to look for in the process table of this very machine, too."""
    deaths: tuple[Death, ...] = ()
    suspects: tuple[tuple[str, str], ...] = ()
    """New suspicions, for the log."""
    held: tuple[Held, ...] = ()


class Detector:
    """Detector of deaths, from the members' streams, links and messages.

    Args:
        settings: Timeouts, in seconds.
        pacing: Interval at which members send, and the silence after which they are suspected.
    """

    def __init__(self, settings: Settings, pacing: Pacing) -> None:
        self._settings = settings
        self._pacing = pacing
        self.silences = Silences(settings, pacing)
        self.suspicions: dict[str, Suspicion] = {}
        self.grace_until = 0.0
        """Time, after a scheduler's restart, until which an absent member is expected back, not suspected."""
        self.unheard_until = 0.0
        """Time, after the scheduler was frozen, until which it learns, one by one, who has left it for that."""

    def shift(self, now: float, gap: float) -> None:
        """Moves the start times of suspicions and silences by the `gap` seconds until now for which the scheduler
        itself was frozen.
        """
        self.grace_until += gap
        self.unheard_until = now + UNHEARD_S
        self.silences.shift(gap)
        for suspicion in self.suspicions.values():
            suspicion.since += gap
            suspicion.asked_at += gap
            if suspicion.ended_at is not None:
                suspicion.ended_at += gap

    def heard(self, member: str) -> None:
        """Clears the suspicion of a member that has spoken, unless it still owes a report."""
        suspicion = self.suspicions.get(member)
        if suspicion is not None and not suspicion.overdue:
            del self.suspicions[member]

    def spoke(self, now: float, peer: Peer) -> None:
        """Records how long a member had been silent before the message that it has just sent. Called before
        `peer.heard` is set.
        """
        suspicion = self.suspicions.get(peer.id)
        if suspicion is None or not suspicion.stopped:
            self.silences.broken(now, peer.member, now - peer.heard)

    def forget(self, member: str) -> None:
        self.suspicions.pop(member, None)

    def reported(self, member: str) -> None:
        """Clears the suspicion of a member that has sent the report that it owed."""
        if member in self.suspicions:
            self.suspicions[member].overdue = False
            self.heard(member)

    def suspect(self, now: float, member: str, why: str, *, overdue: bool = False) -> None:
        """Starts a suspicion of this member, unless there is one already."""
        suspicion = self.suspicions.get(member)
        if suspicion is None:
            self.suspicions[member] = Suspicion(now, why, overdue)
        elif overdue:
            suspicion.overdue = True

    def hold(self, now: float, member: str, why: str) -> None:
        """Goes on waiting for a member that was taken for dead."""
        self.suspect(now, member, why)
        self.suspicions[member].held = True

    def verdict(self, by: str, verdict: Verdict, *, stranger: bool = False) -> None:
        suspicion = self.suspicions.get(verdict.suspect)
        if suspicion is not None and by in suspicion.asked:
            suspicion.verdicts[by] = verdict
            suspicion.stopped = suspicion.stopped or (verdict.seen and not verdict.alive)
            (suspicion.strangers.add if stranger else suspicion.strangers.discard)(by)

    def judge(self, now: float, scene: Scene) -> Findings:
        """Looks once at all members of this scene, and returns what it finds; `now` in seconds."""
        probes: list[tuple[str, str]] = []
        looks: list[str] = []
        deaths: list[Death] = []
        held: list[Held] = []
        known = set(self.suspicions)
        # All suspicions come before the first judgement: nobody counts as well by being looked at late.
        for peer in scene.watched.values():
            self._look(now, peer, scene)
        answered = self._answering(scene) if self.suspicions else ()
        for member in [m for m in scene.watched if m in self.suspicions] if self.suspicions else ():
            peer, suspicion = scene.watched[member], self.suspicions[member]
            last = suspicion.last = self._is_last_holder(member, scene, answered)
            proof = self._proof(now, peer, suspicion, scene)
            suspicion.unheard = suspicion.unheard or now < self.unheard_until or scene.is_unheard(peer)
            fact = "" if suspicion.unheard else scene.fact(peer, newcomers=False)
            evidence = proof or fact or self._confirmed(now, peer, suspicion, scene)
            if evidence and (proof or not last):
                deaths.append(Death(member, evidence, bool(proof)))
                if not suspicion.stopped:
                    self.silences.doubt(now, peer.member, self._silent_since(peer, suspicion))
                continue
            suspicion.held = last and (suspicion.held or bool(evidence))
            silence = now - self._silent_since(peer, suspicion)
            if suspicion.held and silence > self._pacing.timeout_s:
                held.append(Held(member, suspicion.why, self._settings.last_holder_timeout_s - silence))
            if suspicion.asked and now - suspicion.asked_at < self._pacing.timeout_s:
                continue
            witnesses = scene.witnesses(member, self.suspicions, last)
            if witnesses or now - suspicion.asked_at >= self._pacing.timeout_s:
                suspicion.asked, suspicion.asked_at = tuple(witnesses), now
                suspicion.verdicts.clear()
                probes += [(by, member) for by in witnesses]
                looks += [member] if last else []
        for death in deaths:
            self.forget(death.member)
        fresh = [(m, s.why) for m, s in self.suspicions.items() if m not in known]
        return Findings(tuple(probes), tuple(looks), tuple(deaths), tuple(fresh), tuple(held))

    def _answering(self, scene: Scene) -> tuple[Span, ...]:
        """Returns the parts of the training state that members which answer and are not suspected are known to hold."""
        watched = scene.watched
        others = [watched[m] for m in scene.holders if m in watched and m not in self.suspicions]
        found = {scene.known(p) for p in others if p.known and p.conn is not None}
        return union(span for parts in found for span in parts)

    def _is_last_holder(self, member: str, scene: Scene, answered: tuple[Span, ...]) -> bool:
        """Returns whether the suspect may be the last holder of a part of the training state: nobody else that answers
        has that part (P6).

        Of several that are all under suspicion each is one: whoever speaks first goes on, and the others are judged.
        """
        return bool(subtract(scene.holders.get(member, ()), answered))

    def _look(self, now: float, peer: Peer, scene: Scene) -> None:
        """Suspects a member that is silent for too long, or whose control stream is closed."""
        limit_s = self._pacing.timeout_s
        if peer.conn is None:
            if now >= self.grace_until or scene.closed_link(peer.id):
                self.suspect(now, peer.id, "its control stream is closed")
        elif (silence := now - peer.heard) > limit_s:
            self.suspect(now, peer.id, f"no heartbeat for {silence:.2f} s (limit {limit_s:g} s)")

    @staticmethod
    def _silent_since(peer: Peer, suspicion: Suspicion) -> float:
        """Returns since when the suspect has been silent: its last message, or its stream's closing; if it only owes a
        report, the time at which that was due.
        """
        if suspicion.overdue:
            return suspicion.since
        return min(suspicion.since, peer.heard) if peer.conn is not None else peer.closed_at

    def _proof(self, now: float, peer: Peer, suspicion: Suspicion, scene: Scene) -> str:
        """Returns evidence, in words, that this last holder's state is lost, or that it was waited for long enough
        (12a); "" if there is none.
        """
        settings = self._settings
        for by, said in suspicion.verdicts.items():
            if said.certain and not said.alive:
                return f"{suspicion.why}; {by} confirms: {said.evidence}"
        ended = scene.fact(peer, ENDS)
        if not ended:
            suspicion.ended_at = None
        elif suspicion.ended_at is None:
            suspicion.ended_at = now
        if suspicion.ended_at is not None and now - suspicion.ended_at >= settings.reconnect_grace_s:
            return f"{ended}, and it is not back within {settings.reconnect_grace_s:g} s"
        if now - self._silent_since(peer, suspicion) > settings.last_holder_timeout_s:
            return f"{suspicion.why}; not a word for last_holder_timeout_s={settings.last_holder_timeout_s:g}"
        return ""

    def _confirmed(self, now: float, peer: Peer, suspicion: Suspicion, scene: Scene) -> str:
        """Returns the evidence, in words, that the suspect is dead; "" if its death is not confirmed."""
        settings = self._settings
        if now - self._silent_since(peer, suspicion) > settings.hang_timeout_s:
            return f"{suspicion.why}; not a word for {settings.hang_timeout_s:g} s"
        strangers = set() if suspicion.last else suspicion.strangers
        denied = [(by, v.evidence) for by, v in suspicion.verdicts.items() if not v.alive and by not in strangers]
        affirmed = any(said.alive for said in suspicion.verdicts.values())
        complete = len(suspicion.verdicts) == len(suspicion.asked)
        in_time = now - suspicion.asked_at <= settings.confirm_timeout_s
        if denied and not affirmed and (complete or not in_time) and not self._awaits(now, peer, suspicion, scene):
            if not self._tells_more_than_silence(peer, suspicion, scene):
                silence = now - self._silent_since(peer, suspicion)
                if silence <= self.silences.patience_s(now, peer.member):
                    return ""
            # A stream that stands gets the confirmation time to speak, however fast the neighbours are.
            if peer.conn is None or now - suspicion.since >= settings.confirm_timeout_s:
                by, words = denied[0]
                return f"{suspicion.why}; {by} confirms: {words}"
            return ""
        nobody_to_ask = not any(p.conn is not None and p is not peer for p in scene.everybody())
        if peer.conn is None and nobody_to_ask and now - peer.closed_at > settings.reconnect_grace_s:
            return f"{suspicion.why}, not back within {settings.reconnect_grace_s:g} s and no neighbour to ask"
        return ""

    def _tells_more_than_silence(self, peer: Peer, suspicion: Suspicion, scene: Scene) -> bool:
        """Returns whether the suspect gave a sign of death that a merely busy process would not give."""
        if any(said.seen and not said.alive for said in suspicion.verdicts.values()):
            return True
        return peer.conn is None and bool(scene.closed_link(peer.id))

    def _awaits(self, now: float, peer: Peer, suspicion: Suspicion, scene: Scene) -> bool:
        """Returns whether, after a scheduler's restart, some member has yet to connect or to be asked that could deny
        the suspect's death.

        A link between two living members may be cut just then.
        """
        if peer.known or now >= self.grace_until:
            return False
        others = [p for p in scene.everybody() if p is not peer and p.id not in self.suspicions]
        unasked = [p for p in others if p.id not in suspicion.asked] if len(suspicion.asked) < WITNESSES else []
        return bool(unasked) or any(p.conn is None for p in others)
