"""Events that go into the state machines of member and scheduler, and effects that come out (sans-IO: no clock, no
socket, no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chaos_lightning.membership.past import Numbers, Past
from chaos_lightning.protocol.types import (
    NO_VIEW,
    WHOLE,
    Contribution,
    FromMember,
    Header,
    Member,
    PeerMessage,
    PlanSpec,
    Source,
    Span,
    ToMember,
    View,
    ViewId,
)

# ================================================ member machine: events


@dataclass(frozen=True, slots=True)
class ControlIn:
    """Message from the scheduler. To a Prepare, the process adds which byte ranges of the open slot are reduced
    here.
    """

    message: ToMember
    held: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerIn:
    peer: str
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Contribute:
    """Contribution of this member to the next slot, from its training thread.

    The machine fills in `view`. Only if units of micro-batches ran for it (with pipelines, a STEP or a round of
    evaluation), `view` is the one in which they ran: in another one they count for nothing.
    """

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class RangesDone:
    """News that this attempt's bytes are reduced for all parts that this member owns, even if it owns none."""

    view: ViewId
    seq: int


@dataclass(frozen=True, slots=True)
class ResultPulled:
    """News that all raw bytes of the slot that a recovery hands on have arrived here."""

    seq: int


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """News that all or some of the requested parts of the training state have arrived, at this header, with the donors'
    hashes.
    """

    head: str
    parts: tuple[Span, ...] = WHOLE
    view: ViewId = NO_VIEW
    """View of the PullState or PullParts; only with pipelines, where GENESIS does not tell one state from another."""


@dataclass(frozen=True, slots=True)
class LinkChanged:
    peer: str
    up: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


MemberEvent = (
    ControlIn | PeerIn | Contribute | RangesDone | ResultPulled | StateLoaded | LinkChanged | LeaveRequested | Tick
)

# ================================================ member machine: effects


@dataclass(frozen=True, slots=True)
class ToScheduler:
    message: FromMember


@dataclass(frozen=True, slots=True)
class ToPeer:
    peer: str
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Connect:
    """Order to keep links to these members, and to no others."""

    peers: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """Order to start reducing slot `seq` under `view` with the gradients that are ready; further ones follow."""

    view: View
    seq: int


@dataclass(frozen=True, slots=True)
class DropAttempt:
    """Order to stop the reductions of this view and of older ones; bytes of messages that are half received are thrown
    away.
    """

    view: ViewId


@dataclass(frozen=True, slots=True)
class Committed:
    """News that slot header.seq is committed: release the training thread. `view` rules the next slot."""

    header: Header
    view: View
    contributors: tuple[str, ...]
    """Members that brought the header's shares, in rank order."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """Order to fetch the reduced bytes of header.seq, unchanged, from these sources, and then to feed ResultPulled."""

    header: Header
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class PullState:
    """Order to a joiner to fetch these parts of the training state at `header` from the members of `view` that are not
    joiners.

    With pipelines also from others, as for `PullParts`.
    """

    header: Header
    view: View
    parts: tuple[Span, ...] = WHOLE


@dataclass(frozen=True, slots=True)
class PullParts:
    """Order to a member to fetch these parts of the training state at `header`, which it owns in `view` but does not
    hold (protocol.md P8).

    Members of `view`, and those that it lets go, may have them; at GENESIS only each part's oldest owner does (P14).
    This replaces what was asked for before. The machine holds a contribution back until all are here.
    """

    header: Header
    view: View
    parts: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class DropParts:
    """Order to forget these parts of the training state: others own and hold them (protocol.md P8)."""

    parts: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Rerun:
    """Order to begin slot `seq` anew under `view`: end the running unit, and drop all results of this attempt (P7).

    The training thread contributes again, to a STEP or a round of evaluation, once it has run its units of that view.
    """

    view: View
    seq: int


@dataclass(frozen=True, slots=True)
class Observe:
    """Order to a newcomer to fetch the state at `header` from the members of `view` while they train on, and to replay
    their log.
    """

    header: Header
    view: View


@dataclass(frozen=True, slots=True)
class Viewed:
    """News for a training thread that may be inside a wait: the view changed without a commit (rank and world size may
    differ).
    """

    view: View


@dataclass(frozen=True, slots=True)
class Ejected:
    """News that this member is out of the job. `rejoin`: drop the training state and say Hello again; else stop with
    the reason.
    """

    reason: str
    rejoin: bool
    over: bool = False
    """Whether the whole job has ended so, and may be started again from a checkpoint."""


@dataclass(frozen=True, slots=True)
class Left:
    """News that this member may leave the job: nobody needs it any more."""

    reason: str
    asked: bool = False
    """Whether the member was to leave, by its own wish or by the operator's; else the job is finished."""
    keeps: bool = True
    """Whether the job may go on from this member's parts of the state; else the others go on, or an operator has
    ended the job.
    """


@dataclass(frozen=True, slots=True)
class Note:
    """Line for the event log: the name of a declared event (events.py), and its fields."""

    name: str
    fields: tuple[tuple[str, object], ...] = ()


MemberEffect = (
    ToScheduler
    | ToPeer
    | Connect
    | OpenAttempt
    | DropAttempt
    | Committed
    | PullResult
    | PullState
    | PullParts
    | DropParts
    | Rerun
    | Observe
    | Viewed
    | Ejected
    | Left
    | Note
)

# ================================================ scheduler machine: events


@dataclass(frozen=True, slots=True)
class Opened:
    """News that a member's control stream is open; `conn` names the stream until it is closed."""

    conn: int


@dataclass(frozen=True, slots=True)
class MessageIn:
    conn: int
    message: FromMember


@dataclass(frozen=True, slots=True)
class Closed:
    """News that a control stream is closed. `abrupt`: the process closed it without a goodbye, mostly because it
    died.
    """

    conn: int
    abrupt: bool = True


@dataclass(frozen=True, slots=True)
class Stored:
    """Outcome of the Persist with this `token`; ok False: the compare-and-set failed, so another scheduler has deposed
    this one.

    Unless `fits` is not 0: then the view is too large for any record, which takes so many of its members.
    """

    token: int
    ok: bool
    detail: str = ""
    fits: int = 0


@dataclass(frozen=True, slots=True)
class Drain:
    """Order of an operator that a node is to leave, as if the node had asked to."""

    name: str


@dataclass(frozen=True, slots=True)
class ChangeLink:
    """Order of an operator to add or remove the link between two members (by name or id); `Answer` reports the
    outcome.
    """

    token: int
    a: str
    b: str
    add: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """Order of an operator to end the job; `Answer` reports the outcome.

    Attributes:
        token: For the answer.
        force: Also while members live.
    """

    token: int
    force: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """Answer to `Look`: the process of this member has ended."""

    member: str
    evidence: str
    rebooted: bool = False
    """Whether the member's machine seems to have been started anew, by its address: that counts if the member is away
    besides.
    """


@dataclass(frozen=True, slots=True)
class SchedulerTick:
    pass


@dataclass(frozen=True, slots=True)
class TermTaken:
    """Answer to `TakeTerm`: the term under which this scheduler writes from now on."""

    term: int


@dataclass(frozen=True, slots=True)
class PlanDrawn:
    """Answer to the `DrawPlan` with this token: a better reduction plan or None, and the reason in words."""

    token: int
    plan: PlanSpec | None
    reason: str


@dataclass(frozen=True, slots=True)
class PipelinesFound:
    """Answer to the `SearchPipelines` with this token: the best plan as JSON (PipelinePlan), or None and why there is
    none.
    """

    token: int
    plan: str | None
    reason: str = ""


SchedulerEvent = (
    Opened
    | MessageIn
    | Closed
    | Stored
    | Drain
    | ChangeLink
    | Reset
    | Gone
    | TermTaken
    | PlanDrawn
    | PipelinesFound
    | SchedulerTick
)

# ================================================ scheduler machine: effects


@dataclass(frozen=True, slots=True)
class Send:
    conn: int
    message: ToMember


@dataclass(frozen=True, slots=True)
class Close:
    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class LinkWish:
    """Granted request to add or remove the link between two members, by their names; valid until the opposite is
    granted.

    Whoever comes or goes meanwhile, the scheduler included (protocol.md 14a).
    """

    a: str
    b: str
    add: bool
    why: str


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """Record in the store that a job has ended, of which newcomers are told (protocol.md 14d)."""

    terms: str
    """Digest of the job's terms (peers.JobTerms)."""
    step: int
    at: float = 0.0
    """Wall time (s) of the end; the shell knows it."""


@dataclass(frozen=True, slots=True)
class Persist:
    """Order to append a record to the store by compare-and-set, and then to feed Stored; what depends on the record is
    sent only after that.

    kind "reserve": `view` is None and `number` will never be given out again. kind "view": append `view` to the chain
    after `view.predecessor`. kind "link": keep `wish`; it takes no number. kind "finish": the job is over.
    """

    token: int
    kind: str
    number: ViewId
    view: View | None = None
    base: Header | None = None
    hand_on: bool = False
    wish: LinkWish | None = None
    ending: RecordedEnd | None = None
    """Record of the end, with kind "finish": newcomers are told of it."""
    again: bool = False
    """Whether, with kind "finish", members are not done, so that it can be decided again if it is not written."""


@dataclass(frozen=True, slots=True)
class TakeTerm:
    """Order to get a term above this one from the store, and then to feed TermTaken (only while a lost chain is
    rebuilt).
    """

    above: int
    chain: str = ""
    """Id of the chain that is rebuilt: an empty store takes it over."""


@dataclass(frozen=True, slots=True)
class Look:
    """Order to look for a member in this machine's process table, and to feed Gone if it ran on this machine and has
    ended.
    """

    member: Member


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to the ChangeLink or Reset with this token: whether it will be done, and what happens next, or why not."""

    token: int
    accepted: bool
    text: str


@dataclass(frozen=True, slots=True)
class SchedulerDone:
    """News that the job is finished and all members are released; the scheduler's process may end a little later."""

    reason: str
    deposed: bool = False
    """Whether another scheduler leads; the shell ends at once, or stands by."""
    again: bool = False
    """Whether the job is over for good, by an operator's word or a newcomer's coming: the shell puts its chain away."""
    tells_s: float = 0.0
    """Seconds for which the shell goes on answering newcomers on other machines."""


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """Order to look for a better reduction plan with `views.replanned` while the job goes on, and then to feed
    PlanDrawn with this token.

    A newer request replaces it: no answer to an older one is waited for.
    """

    token: int
    spec: PlanSpec
    """Plan as configured."""
    present: PlanSpec
    members: tuple[Member, ...]
    links: Mapping[tuple[str, str], tuple[float, float, float]]
    """Latency in seconds, bps there and bps back, by (earlier, later) in rank order."""
    hasty: bool = False
    """Whether the present plan was drawn in a hurry, whatever planner is configured."""


@dataclass(frozen=True, slots=True)
class SearchPipelines:
    """Order to look for the best pipelines with `searching.searched` while the job goes on, and then to feed
    PipelinesFound with this token.

    A newer request replaces it: no answer to an older one is waited for.
    """

    token: int
    wish: str
    """Request as JSON (planning/pipelines/pipeliner.py, PlanWish)."""


SchedulerEffect = Send | Close | Persist | TakeTerm | Look | DrawPlan | SearchPipelines | Answer | SchedulerDone | Note


@dataclass(frozen=True, slots=True)
class Chain:
    """Content of the store when a scheduler starts: views and granted link requests, oldest first, and the highest
    number.

    Views that the store was cut behind are in `past`; the last two are always in `views`.
    """

    term: int
    highest: ViewId
    views: tuple[View, ...] = ()
    finished: bool = False
    wishes: tuple[LinkWish, ...] = ()
    changes: tuple[ViewId, ...] = ()
    """Numbers of the views that a header was to carry: a member that such a view lacks had asked to leave, or was
    drained.
    """
    rebuild: bool = False
    """Whether to rebuild the chain, or the end that this store lacks, from what members report (protocol.md 14a)."""
    id: str = ""
    """Id that was drawn with the chain's first record, and is kept by every copy of it (protocol.md 7)."""
    numbers: Numbers = field(default_factory=Numbers)
    """All numbers that were ever reserved or decided. A number that a member knows beyond them this store lacks
    (14a).
    """
    hears_s: float = 0.0
    """Seconds after its start for which the scheduler listens for members that may know more, before it decides
    anything (14a).
    """
    step: int = 0
    """Last optimizer step that a decision in the chain names: the job had come so far, or further."""
    ending: RecordedEnd | None = None
    """Record of the end of a finished job, of which newcomers are told."""
    tells_s: float = 0.0
    """Seconds for which newcomers are still told of the end."""
    for_good: bool = False
    """Whether a finished job never begins anew here."""
    ended: tuple[str, ...] = ()
    """Ids of the last few chains that lay here before: members that stand in one of them are let go (14a)."""
    past: Past = field(default_factory=Past)
    """Views before those of `views`, of which the store has only what is still asked (past.py)."""
