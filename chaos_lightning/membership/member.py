"""Runs the protocol's side of one training process, as a pure state machine.

Theory of operation. `on(now, event)` is the only entrance; it returns what the shell must do, in order. The machine
knows no socket, no clock and no tensor: the shell feeds it control messages, messages of other members, the training
thread's contributions and what the data plane completed.

A member passes through these phases: OUT (no id yet), WAITING (welcomed: a newcomer, or on standby), LOADING (in a
view, pulling the state), ACTIVE, then LEAVING or CLOSED (a header let it go or closed the job; it lingers until
released) and GONE. While ACTIVE it stands on `header` (slot `seq`) in `view` and works on slot seq+1:

- `Contribute` is kept in `contribution` until that slot commits, so that a new view can have it again (protocol.md 1,
  3).
- The commit root collects one contribution of every member and, for a STEP, `RangesDone`; then it makes the header
  (slots.close_slot), sends it to those below it (spreading.py) and commits. The others hand the header on first, and
  commit with it and `RangesDone` (2).
- A committed header opens the next attempt. Since OpenAttempt(s+2) follows only header s+1, the data plane may
  alternate two result buffers (3).
- In a view with pipelines this member owns only some *parts* of the state, and holds some at `header`
  (member_parts.py). It contributes when it holds all that it owns, and to a STEP when all of that is reduced as well
  (P4); so a header commits without bytes. It pulls the parts that it owns and lacks. It drops parts that it no longer
  owns with the first header that was closed under such a view (P8). A `Decide` drops a contribution that units of
  micro-batches ran for, and they run again (`Rerun`, P7). A member that a view lets go serves its parts until it is
  released (P9). In a view with a batch of fixed size a `Decide` drops a STEP's contribution, too, since each member has
  another share of the same samples now (B3).
- `Prepare(n)` is a promise (8): from then on nothing of a view older than n is looked at, `RangesDone` and headers
  already under way included. `Decide` ends it: redo re-sends the kept contribution under the new view; hand-on first
  fetches the base's bytes if this member lacks them. Until the base is committed here, the old view counts as entered.

Three views matter. `view` rules the open slot. `assigning` is the view that the last header named, and it alone
determines which samples the open slot assigns (10). `waiting_view` is decided, and a header is yet to carry it.
`Committed.view` is the view that the header named; if a recovery's view already rules, `Viewed` follows it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from chaos_lightning.errors import PlanError
from chaos_lightning.membership import stimuli
from chaos_lightning.membership.donors import Serving, named_more
from chaos_lightning.membership.effects import (
    Committed,
    Contribute,
    ControlIn,
    DropAttempt,
    Ejected,
    LeaveRequested,
    Left,
    LinkChanged,
    MemberEffect,
    MemberEvent,
    Note,
    OpenAttempt,
    PeerIn,
    PullResult,
    PullState,
    RangesDone,
    Rerun,
    ResultPulled,
    StateLoaded,
    Tick,
    ToPeer,
    ToScheduler,
    Viewed,
)
from chaos_lightning.membership.learning import Learning
from chaos_lightning.membership.member_parts import MemberParts, is_let_go
from chaos_lightning.membership.neighbours import Neighbours
from chaos_lightning.membership.parts import division
from chaos_lightning.membership.recovery import needs_bytes
from chaos_lightning.membership.slots import (
    admitting,
    by_units,
    carriable,
    close_slot,
    differing,
    follows,
    kind_of,
    of_one_attempt,
)
from chaos_lightning.membership.spreading import Spread, Spreading
from chaos_lightning.membership.stimuli import MessageDigest
from chaos_lightning.planning.batch import read_split
from chaos_lightning.protocol.limits import bounded
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Contribution,
    Decide,
    Differs,
    Entered,
    Fence,
    Finished,
    Header,
    Heartbeat,
    Kind,
    Leave,
    NextView,
    Notice,
    OpenLinks,
    Prepare,
    Ready,
    RebuildReport,
    Recall,
    Refused,
    Released,
    Report,
    ServeLearners,
    Span,
    ToldEnd,
    ToMember,
    View,
    ViewId,
    Welcome,
)

LINGER_TIMEOUT_S = 5.0
"""Seconds that a member that may go waits to be released."""
LOG_LENGTH = 256
"""Number of the latest events that `stimulus_log` keeps."""
MIN_EARLY = 4096
"""Number of contributions that are kept at least, those of attempts that this member has not entered included: two of
each member of the largest view that it knows, but at least these, since a view that it has not heard of may be
larger.
"""


class MemberPhase(enum.StrEnum):
    OUT = "out"
    WAITING = "waiting"
    LOADING = "loading"
    ACTIVE = "active"
    LEAVING = "leaving"
    CLOSED = "closed"
    GONE = "gone"


class MemberMachine:
    """State machine of one member in the membership protocol.

    Args:
        spread: Shape of the tree along which headers are forwarded.

    Attributes:
        phase: Phase of the member (see the module).
        member_id: Id that the scheduler gave; "" before Welcome.
        view: The view entered; None before the first.
        assigning: The view that `header` named: the assignment of the open slot is its function (protocol.md 10).
        header: The last committed header.
        pending: Header of the next slot, for want of reduced bytes not committed.
        parts: Parts of the state that this member owns and holds.
        promised: Number that this member has promised: older views are ignored.
        pending_leave: Reason for which this member asked to leave; "" if it did not.
        notice: Last words of the scheduler.
        term: Highest term of a scheduler of its chain that this member heard of.
        learners: Ids of newcomers that are to be served, as the scheduler said last.
        closing_is_stable: Whether all members have the closing header, so the last slot may leave the job, too (4).
        stimulus_log: The last (now, event) pairs, large ones in words.
    """

    def __init__(self, spread: Spread = Spread()) -> None:
        self.phase = MemberPhase.OUT
        self.member_id = ""
        self.role = ""
        self.view: View | None = None
        self.assigning: View | None = None
        self.header: Header = GENESIS
        self.pending: Header | None = None
        self.parts = MemberParts()
        self.promised: ViewId = NO_VIEW
        self.waiting_view: View | None = None
        self.contribution: Contribution | None = None
        self.learners: tuple[str, ...] = ()
        self.serving = Serving()
        self.pending_leave = ""
        self.notice = ""
        self._term = 0
        self._chain = ""
        self._known = NO_VIEW
        self.closing_is_stable = False
        self.neighbours = Neighbours()
        self.learning = Learning()
        self.stimulus_log: deque[tuple[float, MemberEvent | MessageDigest]] = deque(maxlen=LOG_LENGTH)
        self._spreading = Spreading(spread)
        self._lingers_since = 0.0
        self._raw = False
        self._entering: Decide | None = None
        self._complete: tuple[ViewId, int] | None = None
        self._differing: tuple[Differs, ...] = ()
        """Members that differ in the open slot, as the root has told the scheduler."""
        self._pulled = ""
        self._inbox: dict[tuple[ViewId, int], dict[str, Contribution]] = {}
        self._ready_sent = False
        self._finish_reason = ""
        self._now = 0.0
        self._out: list[MemberEffect] = []

    # ------------------------------------------------------------------ entrance

    def on(self, now: float, event: MemberEvent) -> list[MemberEffect]:
        """Handles one event; returns the effects in the order in which they must happen."""
        self.stimulus_log.append((now, stimuli.of_member(event)))
        self._now = now
        self._out = []
        if self.phase is MemberPhase.GONE:
            return []
        match event:
            case ControlIn(message, held):
                self._on_control(message, held)
            case PeerIn(_, message):
                if isinstance(message, Contribution):
                    self._on_contribution(message)
                else:
                    self._on_header(message)
            case Contribute(contribution):
                self._on_own(contribution)
            case RangesDone(view, seq):
                self._on_ranges_done(view, seq)
            case ResultPulled(seq):
                self._on_result_pulled(seq)
            case StateLoaded():
                self._on_state_loaded(event)
            case LinkChanged(peer, up, evidence):
                self._emit(*self.neighbours.changed(peer, up, evidence))
                self._check_ready()
            case LeaveRequested(reason):
                self.pending_leave = bounded(reason) or "asked to leave"
                self._emit(ToScheduler(Leave(self.pending_leave)))
            case Tick():
                self._on_tick()
        return self._out

    # ------------------------------------------------------------------ what the shell reads

    @property
    def seq(self) -> int:
        """Number of the last committed slot."""
        return self.header.seq

    @property
    def step(self) -> int:
        """Number of optimizer steps committed."""
        return self.header.step

    @property
    def loaded(self) -> bool:
        """Whether this member holds the training state at `header`; with pipelines, whether it has stopped being a
        newcomer.
        """
        return self.phase in (MemberPhase.ACTIVE, MemberPhase.LEAVING, MemberPhase.CLOSED)

    @property
    def is_root(self) -> bool:
        return self.view is not None and self.view.root == self.member_id

    @property
    def prepared(self) -> bool:
        """Whether this member has promised to leave its view and awaits the scheduler's decision: nothing is committed
        until it comes.
        """
        return self.promised > self._entered_id

    @property
    def _entered_id(self) -> ViewId:
        return self.view.id if self.view is not None else NO_VIEW

    @property
    def term(self) -> int:
        return max(self._term, self.promised.term)

    @property
    def chain(self) -> str:
        """Id of the chain to which this member's views, promises and terms belong; "": none yet."""
        return (self.view.chain if self.view is not None else "") or self._chain

    @property
    def known(self) -> ViewId:
        """The highest view number that this member was told of or has promised: the job's chain has it (14a)."""
        waiting = self.waiting_view.id if self.waiting_view is not None else NO_VIEW
        return max(self._known, self.promised, waiting, self._entered_id)

    def anew(self) -> Self:
        """Returns a new state machine with which the same process joins again (protocol.md 11).

        It holds nothing and has promised nothing, but knows still what was in the job's store: it may be the only one
        to tell that to a scheduler on an older copy, which takes it for a member (14a).
        """
        machine = type(self)(self._spreading.spread)
        machine._chain, machine._term, machine._known = self.chain, self.term, self.known
        return machine

    def knowledge(self) -> dict[str, Any]:
        """Returns the fields of a Hello on what this member knows: its id, chain and view, if there are any, and the
        highest numbers.

        A member that stands in no view yet tells its id, too: a view that a header will carry may name it.
        """
        return {
            "resume": self.member_id,
            "view": self._entered_id,
            "term": self.term,
            "chain": self.chain,
            "known": self.known,
        }

    def heartbeat(self) -> Heartbeat:
        """Returns this member's heartbeat. Another thread may call it, so that values may be one slot old."""
        view = self.view
        return Heartbeat(
            view.id if view is not None else NO_VIEW, self.seq, self.step, chain=self.chain, known=self.known
        )

    # ------------------------------------------------------------------ control messages

    def _on_control(self, message: ToMember, held: tuple[Span, ...]) -> None:
        match message:
            case Welcome():
                self._on_welcome(message)
            case Refused(reason, retry):
                self.notice = reason
                if not retry:
                    self._eject(reason, rejoin=False)
            case OpenLinks():
                self.neighbours.asked(self.member_id, message)
                self._connect()
                self._check_ready()
            case NextView(view):
                self._on_next_view(view)
            case Prepare():
                self._on_prepare(message, held)
            case Decide():
                self._on_decide(message)
            case ServeLearners(ids, view):
                self.learners = ids
                self.serving.told(self.member_id, message)
                if self.phase is MemberPhase.WAITING:
                    self._emit(*self.learning.told(view if self.member_id in ids else None))
            case Fence(reason, rejoin, ended):
                self._eject(reason, rejoin=rejoin, over=ended)
            case Notice(text):
                self.notice = text
            case Recall():  # a scheduler that is to rebuild a lost chain
                self._emit(ToScheduler(RebuildReport(self.view, self.waiting_view, self.promised)))
            case ToldEnd(reason):
                self._leave_now(reason, asked=False)
            case Released(reason, asked, keep):
                self.closing_is_stable = self.phase is MemberPhase.CLOSED
                over = (MemberPhase.CLOSED, MemberPhase.LEAVING)
                if asked or self.phase in over or self._entered_id == NO_VIEW:
                    self._leave_now(reason, asked=asked, keeps=keep)
                else:  # the others have finished the job while it was frozen or cut off: its state is not the final one
                    self._eject(f"{reason}, and this member has no part in its end", rejoin=True)

    def _on_welcome(self, message: Welcome) -> None:
        self.role = message.role
        if self.view is None and message.chain != self._chain:
            # This scheduler is of another chain than the one before, whose numbers mean nothing here (protocol.md 7).
            self._chain, self._term, self._known = message.chain, 0, NO_VIEW
            self.promised, self.waiting_view = NO_VIEW, None
        self._term = max(self._term, message.term)
        if self.member_id != message.member.id:
            if self.view is not None:
                words = f"the scheduler takes {self.member_id} in view {self.view.id} for another process"
                self._eject(f"{words}: it welcomes {message.member.id}", rejoin=True)
                return
            self.member_id = message.member.id
            self.phase, self._ready_sent = MemberPhase.WAITING, False
            self.neighbours = Neighbours()  # links of who it was before are gone
            self._emit(*self.learning.told(None))
            return
        # The control stream was replaced: whatever was under way on the old one is said again. Links go first: a link
        # that comes up after this member stood in its view would mean that bytes were lost on it.
        self._emit(*self.neighbours.again(), ToScheduler(self._position()))
        if self._ready_sent and self.phase is MemberPhase.WAITING:
            self._emit(ToScheduler(Ready()))
        self._emit(*(ToScheduler(who) for who in self._differing))
        if self.phase is MemberPhase.CLOSED:
            # No word of leaving: the job would count as left by its last member, and not as finished.
            self._emit(ToScheduler(Finished(self.seq, self.step)))
        elif self.pending_leave:
            self._emit(ToScheduler(Leave(self.pending_leave)))

    def _on_next_view(self, view: View) -> None:
        if view.id < self.promised or view.id <= self._entered_id or self._refuses(view):
            return
        if self.waiting_view is None or view.id > self.waiting_view.id:
            self.waiting_view = view

    # ------------------------------------------------------------------ the open slot

    def _on_own(self, contribution: Contribution) -> None:
        if self.phase is not MemberPhase.ACTIVE:
            self._note("dropped", what="own contribution", seq=contribution.seq, reason=f"this member is {self.phase}")
            return
        assert contribution.seq == self.seq + 1, f"contribution to slot {contribution.seq}, {self.seq + 1} is open"
        assert self.view is not None
        if of_one_attempt(self.view, contribution) and contribution.view != self._entered_id:
            words = f"it was computed in view {contribution.view}"
            self._note("dropped", what="own contribution", seq=contribution.seq, reason=words)
            return
        prev_hash = contribution.prev_hash or self.header.hash
        self.contribution = replace(contribution, member=self.member_id, prev_hash=prev_hash)
        self._offer()

    def _offer(self) -> None:
        """Sends this member's contribution to the ruling view's root, unless a promise or a missing part of the state
        forbids it.
        """
        if self.contribution is None or self.view is None or self.prepared or self._entering is not None:
            return
        if not self.parts.may_contribute(self.view, self.contribution, self._complete):
            return
        reduced = by_units(self.view, self.contribution) and self.contribution.kind is Kind.STEP
        mine = self.contribution = replace(self.contribution, view=self.view.id, reduced=reduced)
        if self.is_root:
            self._on_contribution(mine)
        else:
            self._emit(ToPeer(self.view.root, mine))

    def _on_contribution(self, contribution: Contribution) -> None:
        """Keeps a contribution, at the root, by (view, slot), even if it comes before this member has entered that view
        or reached that slot.
        """
        key = (contribution.view, contribution.seq)
        if self._outdated(contribution.view) or contribution.view < self._entered_id:
            return
        if contribution.seq <= (self.seq if self.loaded else -1):
            return
        known = max((len(v.members) for v in (self.view, self.waiting_view) if v is not None), default=0)
        if sum(map(len, self._inbox.values())) >= max(MIN_EARLY, 2 * known):
            self._note("dropped", what="contribution", member=contribution.member, reason="too many wait already")
            return
        # One entry per member: a contribution that comes twice is counted once (protocol.md 28).
        self._inbox.setdefault(key, {})[contribution.member] = contribution
        self._try_close()

    def _try_close(self) -> None:
        """Makes the open slot's header, at the root, once all contributions and, for a STEP, all reduced bytes are here
        (2).
        """
        if self.phase is not MemberPhase.ACTIVE or not self.is_root or self.prepared or self._entering is not None:
            return
        view = self.view
        assert view is not None
        key = (view.id, self.seq + 1)
        box = self._inbox.get(key, {})
        if not self._all_in(view, box):
            return
        if found := self._differing_in(view, box):
            self._put_out(found)
            return
        header = self._make_header(view, box)
        if not self._has_bytes(header):
            return
        self._emit(*self._spreading.hand_on(header, view, self.member_id))
        self._commit(header)

    def _differing_in(self, view: View, box: Mapping[str, Contribution]) -> tuple[Differs, ...]:
        """Returns the contributors that differ in a field that must be equal at all members (6b)."""
        return differing(view, box)

    def _put_out(self, found: tuple[Differs, ...]) -> None:
        """Asks the scheduler for a view without these members, whose contributions differ; the others then close the
        slot (6b).
        """
        if self._differing != found:
            self._differing = found
            self._note("differs", members=[who.member for who in found], reason=found[0].reason)
            self._emit(*(ToScheduler(who) for who in found))

    def _all_in(self, view: View, box: Mapping[str, Contribution]) -> bool:
        """Returns whether all members of the view have contributed to the slot, even those without samples (1)."""
        return len(box) >= len(view.members) and all(m in box for m in view.ids())  # the count spares most looks

    def _make_header(self, view: View, box: Mapping[str, Contribution]) -> Header:
        kind = kind_of(view, self.header, box)
        return close_slot(
            view=view,
            prev=self.header,
            contributions=box,
            waiting=carriable(self.waiting_view, view),
            # The list changes with steps only, so that a newcomer's first header is that of a step.
            learners=self.learners if kind is Kind.STEP else self.header.learners,
        )

    def _on_ranges_done(self, view: ViewId, seq: int) -> None:
        if self.prepared or view != self._entered_id or seq != self.seq + 1:
            return  # promised: what completes now completes for nobody (protocol.md 8)
        self._complete = (view, seq)
        if self.view is not None and self.view.pipelines:
            self._offer()
        self._try_close()
        self._try_commit()

    def _on_header(self, header: Header) -> None:
        if self._outdated(header.view):
            self._note("dropped", what="header", seq=header.seq, view=str(header.view), promised=str(self.promised))
            return
        if self.phase in (MemberPhase.WAITING, MemberPhase.LOADING):
            self._emit(*self.learning.consider(self.member_id, header))
            change = admitting(header, self.member_id, self._entered_id)
            if change is not None and not self._refuses(change):
                self._load(header, change)
            return
        if self.phase is not MemberPhase.ACTIVE or header.view != self._entered_id or header.seq <= self.seq:
            return
        if header.view_change is not None and self._refuses(header.view_change):
            return
        if self.pending is None and self.view is not None:  # once, and before anything else
            self._emit(*self._spreading.hand_on(header, self.view, self.member_id))
        if header.prev_hash != self.header.hash:
            words = f"header of slot {header.seq} stands on {header.prev_hash}, this member on {self.header.hash}"
            self._eject(f"{words} (slot {self.seq}): its state is not the job's", rejoin=True)
            return
        self.pending = header
        self._try_commit()

    def _outdated(self, view: ViewId) -> bool:
        """Returns whether this view is older than the promised one, so that its messages are ignored, even if they came
        before the promise (8).
        """
        return view < self.promised

    def _try_commit(self) -> None:
        header = self.pending
        if header is None or self.prepared or self._entering is not None:
            return
        if self._has_bytes(header):
            self._commit(header)

    def _has_bytes(self, header: Header) -> bool:
        """Returns whether this member has all the reduced bytes that it needs to commit this header (2).

        It needs none if all members had theirs before the header was made (P4).
        """
        return header.reduced or not needs_bytes(header) or self._complete == (header.view, header.seq)

    # ------------------------------------------------------------------ committing

    def _commit(self, header: Header) -> None:
        """Commits the slot of this header; if the header carries a view, that view rules from now on."""
        assert self.view is not None
        assert header.seq == self.seq + 1
        assert header.prev_hash == self.header.hash
        change = header.view_change
        entering, self._entering = self._entering, None
        before, self.header = self.header, header
        self.serving.committed(before, header, self.view, self.neighbours.links)
        new = named_more(before.learners, header.learners)
        linked = [peer for peer, up in self.neighbours.links.items() if up] if new else ()
        for learner in self._spreading.learners(self.view, self.member_id, new, linked):
            self._emit(ToPeer(learner, header))
        self._emit(*self.neighbours.settle(self.member_id, self.view))
        self._raw = True
        self.assigning = change or self.view
        commit = Committed(header, self.assigning, self.view.ids() if header.shares else ())
        self._emit(*self.parts.committed(self.member_id, header, self.view, handed_on=entering is not None))
        self._close_open_slot()
        if change is not None:
            self._emit(*(ToPeer(joiner, header) for joiner in self._spreading.joiners(change, self.member_id)))
        if entering is not None:
            self._emit(commit)
            if entering.view.find(self.member_id) is None:
                self._emit(Viewed(entering.view))
                self._let_go(entering.view, entering.reason)
            else:
                self._enter(entering.view, entering.reason)
            return
        if change is not None and change.find(self.member_id) is None:
            self._emit(commit)
            self._let_go(change, change.reason)
            return
        if change is not None:
            self._enter(change, change.reason, commit)
            return
        self._emit(commit)
        if self.parts.missing:  # the header says that a part has drifted here (P12)
            self._emit(ToScheduler(self._position()))
        if self.phase is MemberPhase.ACTIVE:
            self._emit(*self.parts.pull(header, self.view))
        self._open_next()

    def _let_go(self, view: View, reason: str) -> None:
        """Begins to leave: this member asked to go or was drained, and `view` goes on without it, or the job is
        finished.
        """
        over = self.header.kind is Kind.CLOSING and not self.header.error
        self.phase, self._lingers_since = MemberPhase.CLOSED if over else MemberPhase.LEAVING, self._now
        if over:
            self._finish_reason = "the job is finished"
            self._emit(ToScheduler(Finished(self.seq, self.step)))
            return
        self._finish_reason = self.pending_leave or reason
        self.parts.serves = is_let_go(self.member_id, view)

    def _close_open_slot(self) -> None:
        self.pending = self.contribution = self._complete = None
        self._differing, self._pulled = (), ""
        for key in [k for k in self._inbox if k[1] <= self.seq]:
            del self._inbox[key]

    def _enter(self, view: View, reason: str, commit: Committed | None = None) -> None:
        """Makes `view` the one that this member is in."""
        older = self._entered_id
        self.neighbours.enter(self.view if commit is not None else None)
        self.view = view
        self.parts.stand_in(self.member_id, view, self.seq)
        self._differing = ()
        self.promised = max(self.promised, view.id)
        if self.waiting_view is not None and self.waiting_view.id <= view.id:
            self.waiting_view = None
        for key in [k for k in self._inbox if k[0] < view.id]:
            del self._inbox[key]
        if older != NO_VIEW:
            self._emit(DropAttempt(older))
        self._connect()
        self._emit(commit or Viewed(view))
        self._note("attempt", view=str(view.id), seq=self.seq + 1, reason=reason)
        self._emit(ToScheduler(self._position()))
        if self.phase is MemberPhase.ACTIVE:
            self._emit(*self.parts.pull(self.header, view))
        if commit is None and (view.pipelines or view.batch) and older != NO_VIEW:
            self._rerun(view)
        self._open_next()

    def _rerun(self, view: View) -> None:
        """Begins the open slot anew: results of pipeline units, and shares of a batch of fixed size, count only in the
        attempt in which they were made (P4, P7, B3).
        """
        if self.contribution is not None and of_one_attempt(view, self.contribution):
            self.contribution = None
        if self.contribution is None:
            self._emit(Rerun(view, self.seq + 1))

    def _open_next(self) -> None:
        if self.phase is not MemberPhase.ACTIVE:
            return
        assert self.view is not None
        if self.header.kind is Kind.CLOSING and not self.header.error:
            self._let_go(self.view, self.view.reason)
            return
        self._emit(OpenAttempt(self.view, self.seq + 1))
        self._offer()
        self._try_close()

    # ------------------------------------------------------------------ joining

    def _load(self, header: Header, view: View) -> None:
        self.phase = MemberPhase.LOADING
        again = self.header.hash == header.hash
        founded = self.assigning if again else None  # no recovery assigns slot 1
        if not again:
            self.parts.held = self.parts.in_file(header, view)
        self.header, self.assigning = header, header.view_change or founded or view
        self.view = view
        self.parts.stand_in(self.member_id, view, self.seq)
        self.neighbours.enter(None)
        self.promised = max(self.promised, view.id)
        self.waiting_view = None
        self._raw = False
        self._close_open_slot()
        self._connect()
        self._emit(Viewed(view), ToScheduler(self._position()))
        if missing := self.parts.missing:
            self._emit(PullState(header, view, missing))
        else:
            self._arrive()

    def _on_state_loaded(self, loaded: StateLoaded) -> None:
        view, loading = self.view, self.phase is MemberPhase.LOADING
        waits = loading or self.phase is MemberPhase.ACTIVE
        if view is None or not waits or not self.parts.take(loaded, self.header, view):
            self._note("dropped", what="state", head=loaded.head, reason=f"this member needs {self.header.hash}")
            return
        if loading and not self.parts.missing:
            self._arrive()
            return
        self._emit(ToScheduler(self._position()))
        self._offer()

    def _arrive(self) -> None:
        """Activates a newcomer that holds all parts of the state that it owns: it contributes to the slot after its
        header.
        """
        self.phase = MemberPhase.ACTIVE
        self._emit(ToScheduler(self._position()))
        if not self.prepared:
            self._open_next()

    # ------------------------------------------------------------------ recovery

    def _on_prepare(self, message: Prepare, held: tuple[Span, ...]) -> None:
        number = message.number
        if number < self.promised or number <= self._entered_id:
            return
        if number > self.promised:
            self._note("prepare", number=str(number), reason=message.reason)
        self._promise(number)
        if self.view is not None:
            self._emit(DropAttempt(self.view.id))
        report = Report(
            number=number,
            entered=self._entered_id,
            seq=self.seq,
            head=self.header.hash,
            parts=self.parts.held,
            raw=self.loaded and self._raw,
            pending=None if message.brief else self.pending,
            last=None if message.brief else self.header,
            held=held,
            pending_hash=self.pending.hash if self.pending is not None else "",
            owns=self.parts.owned,
        )
        self._emit(ToScheduler(report))

    def _promise(self, number: ViewId) -> None:
        self.promised, self._entering = number, None
        if self.waiting_view is not None and self.waiting_view.id < number:
            self.waiting_view = None

    def _on_decide(self, decision: Decide) -> None:
        view, base = decision.view, decision.base
        if view.id < self.promised or view.id <= self._entered_id:
            if view.id == self._entered_id:
                self._emit(ToScheduler(self._position()))
            return
        if self._refuses(view):
            return
        self._promise(view.id)
        leaves = self.view is not None and is_let_go(self.member_id, view)
        if view.find(self.member_id) is None and not leaves:
            self._eject(f"view {view.id} was decided without this member: {decision.reason}", rejoin=True)
        elif leaves and self.phase is MemberPhase.LEAVING:
            self.parts.serves = True
        elif self.loaded and self.header.hash == base.hash:
            self._redo(decision)
        elif self.loaded and decision.hand_on and follows(base, self.header, self._entered_id):
            self._hand_on(decision)
        elif self.member_id in view.joiners:
            self._load(base, view)
        elif self.parts.held and self.header.hash == base.hash:  # it was loading: what it lacks, others have
            self._redo(decision)
        elif self.view is None and base.next_view == NO_VIEW:  # GENESIS, or a state that this member has in a file
            self.phase, self.header, self.assigning = MemberPhase.ACTIVE, base, view
            self.parts.found(base, view)
            self._enter(view, decision.reason)
        else:
            self._eject(
                f"view {view.id} goes on from slot {base.seq} ({base.hash}), this member stands on slot {self.seq} "
                f"({self.header.hash})",
                rejoin=True,
            )

    def _redo(self, decision: Decide) -> None:
        """Reduces the open slot again, after the base of a recovery, from gradients that members kept or that units
        compute anew.
        """
        self.pending = self._entering = self._complete = None
        self._pulled = ""
        if decision.view.find(self.member_id) is None:
            self._emit(Viewed(decision.view))
            self._let_go(decision.view, decision.reason)
            return
        if decision.view.pipelines:  # it was loading, or an earlier decision had let it go
            self.phase, self.parts.serves = MemberPhase.ACTIVE, False
        self._enter(decision.view, decision.reason)

    def _hand_on(self, decision: Decide) -> None:
        """Commits the recovery's base, which is one slot ahead of this member; fetches the base's reduced bytes first
        if they are missing.
        """
        base = decision.base
        self.pending = base
        self._entering = decision
        if self._has_bytes(base) or self._pulled == base.hash:
            self._commit(base)
            return
        sources = tuple(s for s in decision.sources if s.member != self.member_id)
        self._emit(PullResult(base, sources))

    def _on_result_pulled(self, seq: int) -> None:
        if self.pending is None or self.pending.seq != seq:
            return
        self._pulled = self.pending.hash
        if self._entering is not None and self._entering.base.hash == self._pulled:
            self._commit(self.pending)

    # ------------------------------------------------------------------ going

    def _on_tick(self) -> None:
        leaves = self.phase is MemberPhase.LEAVING
        if leaves and self.parts.serves:
            return  # until it is released: others may have yet to fetch its parts (P9)
        if (leaves or self.phase is MemberPhase.CLOSED) and self._now - self._lingers_since > LINGER_TIMEOUT_S:
            self._leave_now(f"{self._finish_reason}; not released within {LINGER_TIMEOUT_S:g} s", asked=leaves)

    def _leave_now(self, reason: str, *, asked: bool, keeps: bool = True) -> None:
        self.phase = MemberPhase.GONE
        self._emit(Left(reason, asked, keeps))

    def _eject(self, reason: str, *, rejoin: bool, over: bool = False) -> None:
        if rejoin and (self.pending_leave or self.phase is MemberPhase.LEAVING):
            self._leave_now(reason, asked=True)  # a scheduler that was restarted in between does not know
            return
        if self.view is not None:
            self._emit(DropAttempt(self.view.id))
        self.phase, self.parts.held = MemberPhase.GONE, ()
        self._emit(Ejected(reason, rejoin, over))

    def _refuses(self, view: View) -> bool:
        """Leaves the job, and returns True, if the view's pipelines or its split of the batch are unreadable, or it
        lacks links that pipelines need.
        """
        try:
            read_split(view.batch, len(view.members))
            parts = division(view)
            wrong = parts.apart((link.a, link.b) for link in view.links) if view.pipelines and view.links else ""
        except PlanError as error:
            wrong = str(error)
        if wrong:
            self._eject(f"view {view.id} cannot be entered: {wrong}", rejoin=False)
        return bool(wrong)

    # ------------------------------------------------------------------ small moves

    def _emit(self, *effects: MemberEffect) -> None:
        self._out.extend(effects)

    def _note(self, name: str, **fields: object) -> None:
        self._out.append(Note(name, tuple(fields.items())))

    def _position(self) -> Entered:
        if self.view is None:
            return Entered(NO_VIEW, 0, 0, "", (), self.chain)
        return Entered(self.view.id, self.seq, self.step, self.header.hash, self.parts.held, self.chain)

    def _connect(self) -> None:
        self._emit(*self.neighbours.connect(self.member_id, self.view))

    def _check_ready(self) -> None:
        if self.phase is MemberPhase.WAITING and not self._ready_sent and self.neighbours.ready:
            self._ready_sent = True
            self._emit(ToScheduler(Ready()))

    # ------------------------------------------------------------------ for tests

    def validate_state(self) -> None:
        """Asserts the invariants of this state machine between two events."""
        if self.view is not None:
            assert self.promised >= self.view.id, (self.promised, self.view.id)
            assert self.phase is not MemberPhase.OUT
        if self.phase in (MemberPhase.ACTIVE, MemberPhase.LOADING):
            assert self.view is not None
            assert self.view.find(self.member_id) is not None, "in a view that does not hold this member"
            assert self.assigning is not None
        if self.pending is not None and self.phase is MemberPhase.ACTIVE:
            assert self.pending.seq == self.seq + 1
            assert self.pending.prev_hash == self.header.hash
        if self.contribution is not None and self.phase is MemberPhase.ACTIVE:
            assert self.contribution.seq == self.seq + 1
        if self._complete is not None:
            assert self._complete == (self._entered_id, self.seq + 1)
        if self._entering is not None:
            assert self.pending is not None, "entering without the base's header"
            assert self._entering.base.hash == self.pending.hash
            assert self.promised == self._entering.view.id
        if self.view is not None:
            assert self.parts.owned == division(self.view).owned(self.member_id)
        if self.waiting_view is not None:
            assert self.waiting_view.id >= self.promised
            assert self.waiting_view.id > self._entered_id
        for view, seq in self._inbox:
            assert view >= self._entered_id
            assert seq > self.seq or not self.loaded
