"""What a member knows: the state of its machine, without the moves (those are in member.py)."""

from __future__ import annotations

import enum
from collections import deque
from typing import Any, Self

from chaos_lightning.membership.effects import (
    Connect,
    MemberEffect,
    MemberEvent,
    Note,
    ToScheduler,
)
from chaos_lightning.membership.stimuli import Digest
from chaos_lightning.membership.topology import neighbours
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Contribution,
    Decide,
    Entered,
    Header,
    Heartbeat,
    LinkEvent,
    Member,
    Ready,
    Recollection,
    View,
    ViewId,
)

MAX_EARLY = 4096
"""Contributions kept for attempts that this member has not entered; more than any job has members."""


class Phase(enum.StrEnum):
    OUT = "out"
    WAITING = "waiting"
    LOADING = "loading"
    ACTIVE = "active"
    LEAVING = "leaving"
    CLOSED = "closed"
    GONE = "gone"


class MemberState:
    """The state of a `MemberMachine`.

    Args:
        linger_timeout_s: How long a member that may go waits to be released, in seconds.
        log_length: How many of the latest events `stimulus_log` keeps.

    Attributes:
        phase: See the module.
        member_id: Given by the scheduler; "" before Welcome.
        view: The view entered; None before the first.
        dealing: The view that `header` named: the deal of the open slot is its function (PROTOCOL.md 10).
        header: The last committed header.
        pending: Header of the next slot, for want of reduced bytes not committed.
        promised: Nothing older than this is looked at.
        pending_leave: Why this member asked to leave; "" if it did not.
        notice: Last words of the scheduler.
        term: The highest of any scheduler of its chain that this member heard of.
        observers: Newcomers that are to be served, as the scheduler said last.
        closing_is_stable: All members have the closing header, so the last slot may leave the job, too (4).
        stimulus_log: The last (now, event) pairs, large ones in words.
    """

    def __init__(self, *, linger_timeout_s: float = 5.0, log_length: int = 256) -> None:
        self.phase = Phase.OUT
        self.member_id = ""
        self.role = ""
        self.view: View | None = None
        self.dealing: View | None = None
        self.header: Header = GENESIS
        self.pending: Header | None = None
        self.promised: ViewId = NO_VIEW
        self.waiting_view: View | None = None
        self.contribution: Contribution | None = None
        self.observers: tuple[str, ...] = ()
        self.pending_leave = ""
        self.notice = ""
        self._term = 0
        self._chain = ""
        self._known = NO_VIEW
        self.closing_is_stable = False
        self.links: dict[str, bool] = {}
        self.stimulus_log: deque[tuple[float, MemberEvent | Digest]] = deque(maxlen=log_length)
        self._linger_timeout_s = linger_timeout_s
        self._lingers_since = 0.0
        self._observed: Header | None = None
        self._observed_view: View | None = None
        self._observes = False
        self._raw = False
        self._entering: Decide | None = None
        self._complete: tuple[ViewId, int] | None = None
        self._pulled = ""
        self._inbox: dict[tuple[ViewId, int], dict[str, Contribution]] = {}
        self._wanted: tuple[Member, ...] | None = None
        self._former: View | None = None
        self._ready_sent = False
        self._remade: set[str] = set()
        self._parted: dict[str, str] = {}
        self._finish_reason = ""
        self._now = 0.0
        self._out: list[MemberEffect] = []

    # ------------------------------------------------------------------ what the shell reads

    @property
    def seq(self) -> int:
        """Last committed slot."""
        return self.header.seq

    @property
    def step(self) -> int:
        """Optimizer steps committed."""
        return self.header.step

    @property
    def loaded(self) -> bool:
        """Whether this member holds the training state at `header`."""
        return self.phase in (Phase.ACTIVE, Phase.LEAVING, Phase.CLOSED)

    @property
    def is_root(self) -> bool:
        return self.view is not None and self.view.root == self.member_id

    @property
    def prepared(self) -> bool:
        """A promise is given and the decision is not here yet: nothing moves until it comes."""
        return self.promised > self._entered_id

    @property
    def _entered_id(self) -> ViewId:
        return self.view.id if self.view is not None else NO_VIEW

    @property
    def term(self) -> int:
        return max(self._term, self.promised.term)

    @property
    def chain(self) -> str:
        """Id of the chain that this member's views, promises and terms are of; "": of none yet."""
        return (self.view.chain if self.view is not None else "") or self._chain

    @property
    def known(self) -> ViewId:
        """The highest number that this member was told of or has promised: the job's chain has it (14a)."""
        waiting = self.waiting_view.id if self.waiting_view is not None else NO_VIEW
        return max(self._known, self.promised, waiting, self._entered_id)

    def anew(self) -> Self:
        """The machine with which the same process joins again (PROTOCOL.md 11).

        It holds nothing and has promised nothing, but knows still what was in the job's store: it may be the only one
        to tell that to a scheduler on an older copy, which takes it for a member (14a).
        """
        machine = type(self)(linger_timeout_s=self._linger_timeout_s, log_length=self.stimulus_log.maxlen or 0)
        machine._chain, machine._term, machine._known = self.chain, self.term, self.known
        return machine

    def knowledge(self) -> dict[str, Any]:
        """What a Hello tells beside who says it: id, chain and view, as far as there are any, and the highest numbers.

        Also who stands in no view yet tells its id: a view that a header will carry may name it.
        """
        return {
            "resume": self.member_id,
            "view": self._entered_id,
            "term": self.term,
            "chain": self.chain,
            "known": self.known,
        }

    def heartbeat(self) -> Heartbeat:
        """Also called from another thread: values may be one slot old."""
        view = self.view
        return Heartbeat(
            view.id if view is not None else NO_VIEW, self.seq, self.step, chain=self.chain, known=self.known
        )

    def _recollect(self) -> None:
        """A scheduler that is to rebuild a lost chain asks."""
        self._emit(ToScheduler(Recollection(self.view, self.waiting_view, self.promised)))

    def _emit(self, *effects: MemberEffect) -> None:
        self._out.extend(effects)

    def _note(self, name: str, **fields: object) -> None:
        self._out.append(Note(name, tuple(fields.items())))

    def _position(self) -> Entered:
        if self.view is None:
            return Entered(NO_VIEW, 0, 0, "", loaded=False, chain=self.chain)
        return Entered(self.view.id, self.seq, self.step, self.header.hash, loaded=self.loaded, chain=self.chain)

    def _floor(self) -> int:
        return self.seq if self.loaded else -1

    def _connect(self) -> None:
        """Links to neighbours in the view, and to whom the scheduler named: newcomers, and links that may come back.

        Those of the view before stay until the first slot of this one commits, since then every member has all that
        came over them (PROTOCOL.md 1).
        """
        wanted: dict[str, Member] = {}
        if self.view is not None:
            near = {m for v in (self.view, self._former) if v is not None for m in neighbours(v, self.member_id)}
            wanted = {m.id: m for m in self.view.members if m.id in near}
        for member in self._wanted or ():
            wanted.setdefault(member.id, member)
        wanted.pop(self.member_id, None)
        for peer in [p for p, up in self.links.items() if up and p not in wanted]:
            self._let_go_of(peer)
        self._emit(Connect(tuple(wanted.values())))

    def _forget_former(self) -> None:
        """All members stand in this view: links of the one before that it does not have go."""
        former, self._former = self._former, None
        if former is None or self.view is None:
            return
        gone = set(neighbours(former, self.member_id)) - set(neighbours(self.view, self.member_id))
        if any(self.view.find(m) is not None for m in gone):
            self._connect()

    def _on_link(self, peer: str, up: bool, evidence: str) -> None:
        before = self.links.get(peer)
        if before is up:
            return
        self.links[peer] = up
        self._parted[peer] = "" if up or evidence.startswith("closed") else evidence
        if up and before is False:
            self._remade.add(peer)
        self._emit(ToScheduler(LinkEvent(peer, up, evidence)))
        self._check_ready()

    def _let_go_of(self, peer: str) -> None:
        """This link is not wanted any more; of one between two members of the view the scheduler is told."""
        if self.view is None or self.view.find(peer) is None:
            del self.links[peer]
            return
        self.links[peer], self._parted[peer] = False, "removed"
        self._emit(ToScheduler(LinkEvent(peer, False, "removed")))

    def _carriable(self) -> View | None:
        waiting = self.waiting_view
        return waiting if waiting is not None and waiting.predecessor == self._entered_id else None

    def _check_ready(self) -> None:
        if self.phase is not Phase.WAITING or self._wanted is None or self._ready_sent:
            return
        if all(self.links.get(p.id, False) for p in self._wanted):
            self._ready_sent = True
            self._emit(ToScheduler(Ready()))

    # ------------------------------------------------------------------ for tests

    def validate_state(self) -> None:
        """Asserts what must hold between two events."""
        if self.view is not None:
            assert self.promised >= self.view.id, (self.promised, self.view.id)
            assert self.phase is not Phase.OUT
        if self.phase in (Phase.ACTIVE, Phase.LOADING):
            assert self.view is not None
            assert self.view.find(self.member_id) is not None, "in a view that does not hold this member"
            assert self.dealing is not None
        if self.pending is not None and self.phase is Phase.ACTIVE:
            assert self.pending.seq == self.seq + 1
            assert self.pending.prev_hash == self.header.hash
        if self.contribution is not None and self.phase is Phase.ACTIVE:
            assert self.contribution.seq == self.seq + 1
        if self._complete is not None:
            assert self._complete == (self._entered_id, self.seq + 1)
        if self._entering is not None:
            assert self.pending is not None, "entering without the base's header"
            assert self._entering.base.hash == self.pending.hash
            assert self.promised == self._entering.view.id
        if self.waiting_view is not None:
            assert self.waiting_view.id >= self.promised
            assert self.waiting_view.id > self._entered_id
        for view, seq in self._inbox:
            assert view >= self._entered_id
            assert seq > self._floor()
