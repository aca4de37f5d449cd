"""What the scheduler knows, and small moves on it that all its parts use.

Theory of operation. `SchedulerState` is facts without judgement: peers, the chain, the phase, the one write that may be
out. `Admission` (admission.py) changes it by what members say, `SchedulerMachine` (scheduler.py) by what it decides.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from itertools import pairwise

from chaos_lightning.membership.backoff import Backoff
from chaos_lightning.membership.detector import Detector
from chaos_lightning.membership.effects import Chain as Chain
from chaos_lightning.membership.effects import (
    Close,
    LinkWish,
    Note,
    Persist,
    SchedulerDone,
    SchedulerEffect,
    SchedulerEvent,
    Send,
)
from chaos_lightning.membership.roster import (
    NEWCOMER,
    UNKNOWN_OBSERVERS,
    Peer,
    Process,
    Reference,
    Standing,
    first_incarnation,
)
from chaos_lightning.membership.stimuli import Digest
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Decide,
    Fence,
    Header,
    Kept,
    NextView,
    Progress,
    Released,
    Settings,
    ToMember,
    View,
    ViewId,
)


class Phase(enum.StrEnum):
    FOUNDING = "founding"
    REBUILDING = "rebuilding"
    STALE = "stale"
    RUNNING = "running"
    PREPARING = "preparing"
    HOLDING = "holding"
    FINISHED = "finished"
    DEPOSED = "deposed"


class SchedulerState:
    """See the module.

    Args:
        settings: The job's rules.
        chain: What the store holds.
    """

    detector_class: type[Detector] = Detector

    def __init__(self, settings: Settings, chain: Chain) -> None:
        self.settings = settings
        self.term = chain.term
        self.chain_id = chain.id
        self.chain: list[View] = list(chain.views)
        self.highest = chain.highest
        self._numbers = {NO_VIEW, chain.highest, *chain.numbers, *(v.id for v in chain.views)}
        """All that the store holds."""
        self._hears_s = chain.hears_s
        self._hears_until: float | None = None
        self._changes = set(chain.changes)
        self.phase = Phase.FINISHED if chain.finished else Phase.RUNNING if chain.views else Phase.FOUNDING
        self.peers: dict[str, Peer] = {}
        self.reference: Reference | None = None
        self._vouched = not chain.views
        """The reference is that of somebody who holds the state, or nobody does: a newcomer's is only for now."""
        self.stimulus_log: deque[tuple[float, SchedulerEvent | Digest]] = deque(maxlen=512)
        self.tick_interval_s = settings.heartbeat_interval_s / 2
        self.detector = self.detector_class(settings)
        self._conns: dict[int, str] = {}
        self._incarnation = first_incarnation(chain.term, chain.views)
        self._persisting: tuple[int, Callable[[], None]] | None = None
        self._writes: View | None = None
        """The view that is being written, if it is one."""
        self._token = 0
        self._decision: Decide | None = None
        self._announced: NextView | None = None
        self._again = ""
        self._returning = self.phase is Phase.RUNNING
        # A number beyond the last view: members may have promised it and wait for its decision.
        self._promised = bool(chain.views) and chain.highest.number > chain.views[-1].id.number
        self._number = NO_VIEW
        self._why = ""
        self._expected: frozenset[str] = frozenset()
        self._prepared_at = 0.0
        self._admitted_at: float | None = None
        self._waited_for: tuple[str, ...] = ()
        self._waiters: set[str] = set()
        self._waits = ""
        self._bridges_since: float | None = None
        """Since when members that would part the others by leaving have been kept for that."""
        self._dismissed: dict[str, Released] = {}
        """What was said to whom was released on its own or the operator's wish: it may not have heard it."""
        self._backoff = Backoff()
        self._waits_because = ""
        """What was told of the wait for the next recovery; "" if nothing was."""
        self._now: float | None = None
        self._out: list[SchedulerEffect] = []
        self._told: tuple[Kept, str, float] | None = None
        """The newest state that a member said it kept, on which machine, and when."""
        self._said_anew: set[Process] = set()
        """Processes of that machine that said hello anew since then: machine, pid and start."""
        self._unready: dict[Process, float | None] = {}
        """Since when (s) such processes with a kept state have not been ready; None: they were sent away for it."""
        self._without = ""
        """Who on that machine does not go on from it, in words."""
        self._reached = chain.step
        """Optimizer steps that the job is known to have committed."""
        for member in chain.views[-1].members if chain.views and not chain.finished else ():
            self.peers[member.id] = Peer(member, Standing.MEMBER, observers=UNKNOWN_OBSERVERS)

    @property
    def now(self) -> float:
        assert self._now is not None
        return self._now

    @property
    def latest(self) -> View | None:
        """The last decided view."""
        return self.chain[-1] if self.chain else None

    def _note(self, name: str, **fields: object) -> None:
        self._out.append(Note(name, tuple(fields.items())))

    def _send(self, peer: Peer, message: ToMember) -> None:
        if peer.conn is not None:
            self._out.append(Send(peer.conn, message))

    def _next_number(self) -> ViewId:
        """Never issued before, above every number in any report (PROTOCOL.md 7, 9)."""
        promised = [p.report.number.number for p in self.peers.values() if p.report is not None]
        self.highest = ViewId(self.term, max([self.highest.number, *promised]) + 1)
        return self.highest

    def _persist(
        self,
        kind: str,
        number: ViewId,
        then: Callable[[], None],
        *,
        view: View | None = None,
        base: Header | None = None,
        hand_on: bool = False,
        wish: LinkWish | None = None,
    ) -> None:
        self._token += 1
        self._persisting, self._writes = (self._token, then), view
        self._numbers.add(number)
        self._out.append(Persist(self._token, kind, number, view, base, hand_on, wish))

    @property
    def _deposed(self) -> bool:
        return self.phase is Phase.DEPOSED

    def _depose(self, why: str) -> None:
        """Another scheduler rules: nothing is decided or said here any more; members find the other one."""
        self.phase = Phase.DEPOSED
        self._note("error", text=f"deposed: {why}; another scheduler rules")
        for conn in self._conns:
            self._out.append(Close(conn, "this scheduler is deposed; connect again"))
        self._out.append(SchedulerDone(f"deposed: {why}", deposed=True))

    def _slot(self) -> int:
        """The highest slot that a member has told to be committed."""
        return max((p.seq for p in self._members()), default=0)

    def _pause_words(self) -> str:
        """Why the next recovery waits, while it does (membership/backoff.py)."""
        waits = self._now is not None and self._backoff.left_s(self.now, self._slot())
        return self._waits_because if waits else ""

    def _lost_words(self) -> str:
        """That the store is not the job's, if members say so (membership/identity.py)."""
        return ""

    @property
    def _hearing(self) -> bool:
        """It has just started, and members that know more may be on their way."""
        return self._now is not None and self._hears_until is not None and self._now < self._hears_until

    def _hearing_words(self) -> str:
        if not self._hearing:
            return ""
        assert self._hears_until is not None
        left_s = self._hears_until - self.now
        return f"it has just started, and listens for {left_s:.1f} s more whether members know more than its store"

    # ------------------------------------------------------------------ groups of peers

    def _inside(self, member: str) -> bool:
        peer = self.peers.get(member)
        return peer is not None and peer.standing in (Standing.MEMBER, Standing.LEAVER) and peer.alive

    def _is_written(self, peer: Peer) -> bool:
        """Whether the view on its way to the store names it: a header may bring it that view without its stream."""
        return self._persisting is not None and self._writes is not None and self._writes.find(peer.id) is not None

    def _members(self) -> list[Peer]:
        """Peers of the latest view, in rank order; dead ones included, as long as no view excluded them."""
        ids = self.latest.ids() if self.latest is not None else ()
        return [p for m in ids if (p := self.peers.get(m)) is not None and p.standing is Standing.MEMBER]

    def _living(self) -> list[Peer]:
        return [p for p in self._members() if p.alive]

    def _ready(self) -> list[Peer]:
        """Newcomers that can be let in now: ready, heard of lately, and wanted."""
        limit = self.now - self.settings.heartbeat_timeout_s
        return [
            p
            for p in self.peers.values()
            if p.standing in (Standing.READY, Standing.OBSERVING)
            and p.conn is not None
            and p.heard >= limit
            and not p.leaving
        ]

    def _leavers(self) -> list[Peer]:
        return [p for p in self.peers.values() if p.standing is Standing.LEAVER]

    @property
    def _settled(self) -> bool:
        """All members of the latest view stand in it with the state loaded."""
        latest = self.latest
        if latest is None:
            return False
        members = self._members()
        return len(members) == len(latest.members) and all(
            p.alive and p.entered == latest.id and p.loaded for p in members
        )

    @property
    def _reserving(self) -> bool:
        return self.phase in (Phase.PREPARING, Phase.HOLDING)

    def _drop(self, peer: Peer) -> None:
        """Forgets a peer for good."""
        self.peers.pop(peer.id, None)
        self.detector.forget(peer.id)
        if peer.conn is not None:
            self._conns.pop(peer.conn, None)
        self._forget_terms()

    def _newcomers(self) -> list[Peer]:
        """Who is not in the job yet, standbys included."""
        return [p for p in self.peers.values() if p.standing in (*NEWCOMER, Standing.STANDBY)]

    def _forget_terms(self) -> None:
        """What the job is, the dead do not say: where nobody holds its state, who is here does (PROTOCOL.md 12b)."""
        if not self.peers or (self.phase is Phase.FOUNDING and not self._newcomers()):
            self.reference = None

    def _fence(self, peer: Peer, reason: str) -> None:
        if peer.conn is not None:
            self._note("fenced", member=peer.id, reason=reason)
        self._send(peer, Fence(f"{peer.id} is out of the job: {reason}"))
        self._drop(peer)

    def _say_goodbye(self, peer: Peer, words: Released) -> None:
        self._send(peer, words)
        if words.asked:
            self._dismissed[peer.id] = words

    def _release(self, peer: Peer, reason: str) -> None:
        self._note("left", member=peer.id, reason=f"{peer.leaving}; {reason}")
        self._say_goodbye(peer, Released(reason, asked=bool(peer.leaving)))
        self._drop(peer)

    def _die(self, peer: Peer, evidence: str, *, proven: bool) -> None:
        if peer.alive:
            peer.dead = evidence
            self._note("death", member=peer.id, evidence=evidence)
        peer.proven = peer.proven or proven

    def _condemn(self, peer: Peer, reason: str) -> None:
        if peer.standing in (Standing.MEMBER, Standing.LEAVER):
            peer.condemned = reason
            self._note("death", member=peer.id, evidence=reason)
        else:
            self._drop(peer)

    # ------------------------------------------------------------------ status

    def snapshot(self) -> dict[str, object]:
        """For `chaos-lightning status`: plain values only."""
        latest = self.latest
        usual = self._why if self._reserving else latest.reason if latest is not None else ""
        return {
            "job": self.settings.job,
            "term": self.term,
            "chain": self.chain_id,
            "phase": str(self.phase),
            "view": str(latest.id) if latest is not None else "",
            "settled": self._settled,
            "reason": self._lost_words() or self._waits or self._hearing_words() or self._pause_words() or usual,
            "members": [self._describe(p) for p in self._members()],
            "others": [self._describe(p) for p in self.peers.values() if p.standing is not Standing.MEMBER],
        }

    def _describe(self, peer: Peer) -> dict[str, object]:
        return {
            "id": peer.id,
            "host": peer.member.host,
            "standing": str(peer.standing),
            "connected": peer.conn is not None,
            "view": str(peer.entered),
            "seq": peer.seq,
            "step": peer.step,
            "loaded": peer.loaded,
            "way": peer.way,
            "progress": _words(peer.progress) if peer.progress is not None and not peer.loaded else "",
            "leaving": peer.leaving,
            "dead": peer.condemned or peer.dead,
            "silent_s": round(self.now - peer.heard, 3) if self._now is not None else 0.0,
        }

    # ------------------------------------------------------------------ for tests

    def validate_state(self) -> None:
        """Asserts what must hold between two events."""
        latest = self.latest
        for before, view in pairwise(self.chain):
            assert view.predecessor == before.id, (view.predecessor, before.id)
            assert view.id > before.id, (view.id, before.id)
        assert latest is None or self.highest >= latest.id, (self.highest, latest)
        for conn, member in self._conns.items():
            assert not member or self.peers[member].conn == conn, (conn, member)
        ids = latest.ids() if latest is not None else ()
        for peer in self.peers.values():
            assert peer.conn is None or self._conns.get(peer.conn) == peer.id, peer.id
            assert peer.standing is not Standing.MEMBER or peer.id in ids, f"{peer.id} is in no view"
            lost = self.phase is Phase.FOUNDING  # members that held nothing are newcomers again
            assert lost or peer.standing is Standing.MEMBER or peer.id not in ids, f"{peer.id} is in the last view"
        if self._reserving:
            assert latest is not None
            assert self._number.number > latest.id.number, (self._number, latest.id)
            assert self._number <= self.highest, (self._number, self.highest)
        if self.phase is Phase.FOUNDING and self._persisting is None:
            assert not self._living(), "somebody holds the state"


def _words(progress: Progress) -> str:
    """A newcomer's transfer in one line."""
    if progress.phase == "replay":
        return f"replays, {progress.lag} behind"
    left = max(0, progress.total_nbytes - progress.done_nbytes)
    words = f"{progress.done_nbytes / 2**20:.1f} of {progress.total_nbytes / 2**20:.1f} MiB"
    if progress.rate_bps > 0:
        words += f" at {progress.rate_bps / 1e6:.0f} Mbps, {8 * left / progress.rate_bps:.0f} s left"
    sources = ", ".join(f"{s.member} {s.nbytes / 2**20:.1f} MiB" for s in progress.sources)
    return f"{words} ({sources})" if sources else words
