"""Defines the protocol's types: members, views, contributions, headers, and the messages that contain them.

Theory of operation. Training is a chain of *committed slots*. A slot is either an optimizer step (gradients are
reduced) or one of Lightning's small collectives (a payload per member is gathered); both are numbered by one counter,
`seq`, and committed the same way: every member of the view contributes, the commit root sends the `Header`, and
who holds the header (and, for a step, all reduced bytes) commits. One mechanism therefore serves protocol.md 1-10 and
28. Everything here is an immutable value without behaviour beyond its own hash; `protocol/codec.py` maps each dataclass
field by field on the message of the same name in `chaos.proto`.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property

from chaos_lightning.declared import at_least, check_each, setting
from chaos_lightning.errors import ConfigurationError

Span = tuple[int, int]
"""Half-open interval [start, stop)."""

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Pattern of the name of a job or a node (fullmatch)."""


@dataclass(frozen=True, slots=True, order=True)
class ViewId:
    """Id of a view, (term, number); a higher term outranks every lower one (protocol.md 7)."""

    term: int = 0
    number: int = 0

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


NO_VIEW = ViewId(0, 0)

VERSION = 5
"""Version of what members and schedulers say. It rises whenever old bytes would mean something else."""

MAX_MEMBERS = 1 << 16
"""Largest number of members of a view: fields of messages that count members, or links on a way, have room for so
many.
"""
MOST_SPEED = 1000.0
"""Greatest speed that a member tells, and the inverse of the least one (`Heartbeat.speed`)."""
MAX_PARTS = 1 << 17
"""Largest number of parts of the training state: twice as many as a model may have layers."""
WHOLE: tuple[Span, ...] = ((0, 1),)
"""All parts of the training state in a view without pipelines, as normal spans of part numbers: there is one part,
which all members own (protocol.md P1)."""

SMALL_JOB = 16
"""Number of members up to which nothing is spared: all have links with each other, all are donors, the root sends
headers to all, each event is looked at at once, and plans are drawn while a decision waits. What larger jobs do instead
costs a moment here and there.
"""
MAX_PEER_NBYTES = 64 << 20
"""Limit of one encoded PeerMessage (bytes); the largest are gathered payloads of all members in one header."""
MAX_GATHER_NBYTES = MAX_PEER_NBYTES - (4 << 20)
"""Limit of all members' payloads of one GATHER together (bytes): the rest of the header, above all its ledger, and what
a Report or Decide adds around it have room beside them."""


@dataclass(frozen=True, slots=True)
class Member:
    """Training process in a job. `id` is `name~incarnation`, given by the scheduler and never reused."""

    id: str
    name: str
    host: str
    address: str
    port: int
    pid: int = 0
    pid_start: int = 0
    quota: int = 1
    """Number of samples (or batches, for a custom batch sampler) that this member takes per micro-batch."""
    node: str = ""
    """Node that the member is a worker of: `min_nodes` and `max_nodes` count these; "" if it is a node of its own."""

    @property
    def place(self) -> str:
        """Name of the node to which the member belongs."""
        return self.node or self.name


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """Tree of a user-defined plan: `parents[i]` is the parent of `members[i]`, "" at the root."""

    start: int
    stop: int
    members: tuple[str, ...]
    parents: tuple[str, ...]
    weight: float = 0.0
    """Weight of this tree where start == stop == 0: its part of the buffer, relative to the other trees' weights."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Link between two members in a view; `a` is the older member."""

    a: str
    b: str


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """Plan along which gradients are reduced: a kind that every member expands to the same trees, or explicit trees
    (kind "user").
    """

    kind: str = "rotating"
    chunk_nbytes: int = 0
    """Size of a chunk, bytes; 0: by the buffer's size (planning/trees.py)."""
    trees: tuple[TreeSpec, ...] = ()


@dataclass(frozen=True)
class View:
    """Members of a job in rank order (oldest first), and how they reduce gradients. Joiners must get the state
    first.
    """

    id: ViewId
    predecessor: ViewId
    members: tuple[Member, ...]
    joiners: tuple[str, ...] = ()
    plan: PlanSpec = PlanSpec()
    accumulate: int = 1
    """Number of micro-batches per optimizer step and member; equal for all members, part of the fingerprint."""
    reason: str = ""
    links: tuple[LinkSpec, ...] = ()
    """Links among the members; empty: every pair has one."""
    chain: str = ""
    """Id of the chain that the view is of (protocol.md 7): its number means something within that one only."""
    pipelines: str = ""
    """Units of the pipelines, which say which member runs which layers of which micro-batch, as JSON
    (planning/pipelines/units.py, ViewPipelines); "": all members own the whole state, and reduce all of it.
    """
    leaving: tuple[Member, ...] = ()
    """Members that the view lets go, which serve their parts until it is settled (protocol.md P9); only with
    pipelines.
    """
    batch: str = ""
    """Batch of a step, and each member's share of it, as text (planning/batch.py, Split); "": each member adds a batch
    of its own.
    """

    def ids(self) -> tuple[str, ...]:
        return self._ids

    def find(self, member_id: str) -> Member | None:
        return self._by_id.get(member_id)

    @cached_property
    def root(self) -> str:
        """Id of the commit root: the oldest member that is no joiner; "" if all members leave (protocol.md P13)."""
        joiners = frozenset(self.joiners)
        return next((m for m in self._ids if m not in joiners), next(iter(self._ids), ""))

    @cached_property
    def _ids(self) -> tuple[str, ...]:
        return tuple(m.id for m in self.members)

    @cached_property
    def _by_id(self) -> dict[str, Member]:
        return {m.id: m for m in self.members}


@dataclass(frozen=True, slots=True)
class Spent:
    """Positions of one sample stream used in one epoch. Stream "" is the order that members share; any other name is a
    node's own data.
    """

    stream: str
    epoch: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Positions of the current epoch that committed steps have used, by stream (protocol.md 25, 27); planning/ledger.py
    computes with it.
    """

    streams: tuple[Spent, ...] = ()


@dataclass(frozen=True, slots=True)
class LayersCovered:
    """Micro-batches whose gradients a member's sum includes, for each of the layers [first, end)."""

    first: int
    end: int
    micro_batches: tuple[Span, ...]


class Kind(enum.StrEnum):
    STEP = "step"
    """Optimizer step: gradients are reduced."""
    GATHER = "gather"
    """Numbered collective: a payload of each member comes back to all, in rank order."""
    BOUNDARY = "boundary"
    """Safe point between two accumulations: nothing is reduced; the only slot whose header may admit joiners."""
    CLOSING = "closing"
    """Last slot of the job; members linger until all have its header."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Contribution of one member to one slot. Weight 0 without a gradient is valid."""

    member: str
    view: ViewId
    seq: int
    kind: Kind
    step: int
    """Number of optimizer steps committed before this slot."""
    prev_hash: str
    name: str = ""
    """Call site of the collective, or the step's scope; equal at all members or the slot is refused by name."""
    weight: float = 0.0
    coefficient: float = 0.0
    """Factor by which this member's gradient was multiplied before it was summed."""
    presence: bytes = b""
    spent: tuple[Spent, ...] = ()
    payload: bytes = b""
    layout_hash: str = ""
    hyper: str = ""
    """Hyperparameters in words, such as "opt0.lr=0.1;opt0.momentum=0.9"; compared at the root (protocol.md 23)."""
    state_hashes: tuple[str, ...] = ()
    """Hashes, every n steps, of each part that the member owns, in the order of parts (protocol.md 24, P12)."""
    yields: bool = False
    """Whether this member goes along with whatever kind of slot the others close: it is on its way out, or has no
    samples.
    """
    lets_go: bool = False
    """Whether this is a GATHER that is no part of a validation, so that members may leave with it as with a step
    (protocol.md 2).
    """
    line: str = ""
    """Line of the member's own code that asked for this slot, such as "save() at train.py:31"; not compared."""
    order: str = ""
    """Order of the epoch's samples, of which this member takes its own, in words; compared at the root."""
    reduced: bool = False
    """Whether, under pipelines, in a STEP, all bytes of all parts that the member owns are reduced there (protocol.md
    P4).
    """
    micro_batches: tuple[Span, ...] = ()
    """Numbers of the step's micro-batches that have samples, as follows from the header before; compared at the root.
    Only in steps that run as units."""
    coverage: tuple[LayersCovered, ...] = ()
    """Micro-batches in the raw sums that the member gave, by runs of layers (protocol.md P3, B2). Only in steps that
    run as units."""


@dataclass(frozen=True, slots=True)
class DriftedPart:
    """Part of the training state that at one of its owners differs from the majority's (protocol.md 24, P12)."""

    member: str
    part: int


@dataclass(frozen=True, slots=True)
class EqualShares:
    """Equal weights and coefficients of `count` members that follow each other in rank order."""

    count: int
    weight: float
    coefficient: float


def equal_shares(shares: Iterable[tuple[float, float]]) -> tuple[EqualShares, ...]:
    """Compresses the contributors' (weight, coefficient) pairs to runs of equal pairs, each as long as possible."""
    return tuple(EqualShares(len(list(run)), *share) for share, run in itertools.groupby(shares))


@dataclass(frozen=True)
class Header:
    """Header that commits a slot; it has the hash of the header before it (protocol.md 4a)."""

    seq: int
    kind: Kind
    step: int
    """Number of optimizer steps committed including this slot."""
    view: ViewId
    prev_hash: str
    next_view: ViewId
    name: str = ""
    shares: tuple[EqualShares, ...] = ()
    """Shares of all members of `view` in rank order (protocol.md 1), as `equal_shares` writes them."""
    presence: bytes = b""
    ledger: Ledger = Ledger()
    answers: tuple[bytes, ...] = ()
    """Payloads of the contributors, in rank order; b"" of one that yielded nothing. Of a STEP only if any member had
    one.
    """
    layout_hash: str = ""
    hyper: str = ""
    view_change: View | None = None
    """Next view, set when next_view differs from view."""
    boundary: bool = False
    """Whether all members are asked for a BOUNDARY slot at the end of this accumulation: somebody waits to join."""
    drifted: tuple[DriftedPart, ...] = ()
    """Parts whose hash at a member differed from the majority's; that member pulls them again (protocol.md 24, P12)."""
    error: str = ""
    """Text of an error, set when members disagree or gather too much: everybody raises DisagreementError with this
    text, nobody applies anything.
    """
    learners: tuple[str, ...] = ()
    """Newcomers that replay: members keep the state at the first header that names one of them, and a log from there
    on, until a header names it no more (protocol.md 15, 18)."""
    reduced: bool = False
    """Whether every member had reduced all that it owns before this was written: it commits without bytes (protocol.md
    P4).
    """

    @cached_property
    def hash(self) -> str:
        """Hash of the header's content, 16 hex digits; fields added in later releases count only if they are set."""

        def plain(value: object) -> object:
            if isinstance(value, bytes):
                return value.hex()
            if isinstance(value, EqualShares):
                return (value.count, value.weight, value.coefficient)
            said = {f.name: getattr(value, f.name) for f in fields(value)}  # type: ignore[arg-type]
            return {name: content for name, content in said.items() if content or name not in _ADDED}

        text = json.dumps(plain(self), sort_keys=True, default=plain, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def contributors(self) -> int:
        """Number of members that contributed."""
        return sum(s.count for s in self.shares)

    def weights(self) -> list[float]:
        """Returns the weight of each contributor, in rank order."""
        return [s.weight for s in self.shares for _ in range(s.count)]

    @property
    def total_weight(self) -> float:
        """Sum of all weights, by which the sum of `coefficient * gradient` is divided to get the average.

        It is rounded once, so it depends neither on the order of the members nor on Python's own `sum`.
        """
        return math.fsum(self.weights())

    def lr_factor(self, samples: int) -> float:
        """Returns the factor of learning rates in this step, if they were chosen for so many samples (`lr_scaling`); 1
        for 0, where they are not scaled.
        """
        return self.total_weight / samples if samples else 1.0

    def flaw(self) -> str:
        """Returns the reason why the header's shares are not in the only valid form; "" if they are."""
        if odd := [s.count for s in self.shares if not 1 <= s.count <= MAX_MEMBERS]:
            return f"shares of {odd[0]} members; expected 1 to {MAX_MEMBERS}"
        same = any((a.weight, a.coefficient) == (b.weight, b.coefficient) for a, b in itertools.pairwise(self.shares))
        return "equal shares in two runs; expected one" if same else ""


_ADDED = frozenset({"reduced", "pipelines", "leaving", "batch"})
"""Fields of headers and views that older ones lack: those keep their hashes, by which checkpoints name them."""
GENESIS = Header(seq=0, kind=Kind.BOUNDARY, step=0, view=NO_VIEW, prev_hash="", next_view=NO_VIEW)


@dataclass(frozen=True, slots=True)
class Kept:
    """Training state in a file that the last member wrote as it left (protocol.md 14c).

    `header` is what a job stands on that is founded from it: as GENESIS, it names no next view.
    """

    header: Header
    member: str
    """Member that kept the state."""
    chain: str = ""
    """Id of the chain whose view it stood in."""
    parts: tuple[Span, ...] = WHOLE
    """Parts that lie in the file, as normal spans."""

    def flaw(self) -> str:
        """Returns the reason why the list of parts is invalid; "" if it is valid."""
        return _odd_parts(self.parts)


def _odd_parts(spans: tuple[Span, ...]) -> str:
    """Returns the reason why these spans are no valid list of parts; "" if they are."""
    apart = all(a[1] < b[0] for a, b in itertools.pairwise(spans))
    if apart and all(0 <= start < stop <= MAX_PARTS for start, stop in spans):
        return ""
    return f"parts {spans[:9]}; expected spans apart from each other, in order, of numbers up to {MAX_PARTS}"


def kept_header(last: Header, view: ViewId) -> Header:
    """Returns the header from which a job is founded on a state that a member in `view` kept at header `last`.

    Steps, slots and the ledger go on; the assignment is the founding view's, since those that `last` named are gone.
    """
    return Header(
        seq=last.seq + 1,
        kind=Kind.BOUNDARY,
        step=last.step,
        view=view,
        prev_hash=last.hash,
        next_view=NO_VIEW,
        name="kept",
        ledger=last.ledger,
        layout_hash=last.layout_hash,
        hyper=last.hyper,
    )


# --- control messages: member -> scheduler -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    job: str
    name: str
    host: str
    address: str
    port: int
    pid: int
    pid_start: int
    quota: int
    accumulate: int
    package: str
    fingerprint: tuple[tuple[str, str], ...]
    """Facts that must equal the job's, as (name, value): a mismatch is refused with the name and both values."""
    neighbours: tuple[str, ...] = ()
    resume: str = ""
    """Member id of an earlier connection of this very process (the stream broke, the process lives)."""
    replay: str = "it did not offer to replay"
    """Reason for which this newcomer cannot come in by replay (protocol.md 17); "" if it can."""
    view: ViewId = NO_VIEW
    """View that the member stands in."""
    term: int = 0
    """Highest term that the member heard of: a scheduler with a lower one leads no more."""
    chain: str = ""
    """Id of the chain that view, term and `known` are of; "" if the member is in none yet."""
    known: ViewId | None = None
    """Highest number that the member was told of or has promised: a store that lacks it is not the job's latest
    (14a).
    """
    kept: Kept | None = None
    """Newest state of this job that lies in a file on the member's machine."""
    node: str = ""
    """Node of the member, as in `Member`."""
    workers: int = 1
    """Number of workers of its node, which are started together."""
    version: int = VERSION
    """Version of the protocol; 0: of a release whose hello did not tell it yet."""
    pipelines: str = ""
    """Request for pipelines, as JSON (planning/pipelines/request.py, PipelineRequest); "": all members own the whole
    state."""
    saved: Saved | None = None
    """Newest checkpoint that the member has written; only with pipelines."""
    batch: str = ""
    """Batch of a step, as text (planning/batch.py, BatchRule); "": each member adds a batch of its own."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Message that the member has written a checkpoint, from which the job can begin again."""

    step: int
    """Number of optimizer steps in its state."""
    path: str

    def __str__(self) -> str:
        return f"{self.path} (step {self.step})"


@dataclass(frozen=True, slots=True)
class Ready:
    """Message that the newcomer has built its model and its links are up."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    view: ViewId
    seq: int
    step: int
    step_time_s: float = 0.0
    """Median time of the last steps, s, in pipelines of those by the plan of `view`; 0: not known yet."""
    chain: str = ""
    """Id of the chain, as in `Hello`; `known` is as there, too."""
    known: ViewId | None = None
    speed: float = 0.0
    """Speed at which the member computes its units, relative to what its request for pipelines foresees; 0: not
    known.
    """
    between_s: float = 0.0
    """Median time, s, from the last unit of one of these steps to the first unit of the next; 0: not known."""
    sample_s: float = 0.0
    """Median time, s, that the member computes for one sample of a batch of fixed size, without waiting; 0: not
    known.
    """


@dataclass(frozen=True, slots=True)
class Report:
    """Answer to Prepare, with what the member has; it promises to ignore all views older than `number` (protocol.md 8,
    9).
    """

    number: ViewId
    entered: ViewId
    seq: int
    """Number of the last committed slot."""
    head: str
    """Hash of the header of the last committed slot."""
    parts: tuple[Span, ...] = WHOLE
    """Parts of the training state that the member holds at `head`, as normal spans; none at a joiner that does not hold
    the state yet (protocol.md P5)."""
    raw: bool = True
    """Whether the reduced bytes of the last committed slot are at hand; they are not at a joiner by pause."""
    pending: Header | None = None
    """Header of slot seq+1, received but not committed for want of ranges; None in a brief report."""
    last: Header | None = None
    """Header of slot seq itself, so that it can be handed on; None in a brief report."""
    held: tuple[Span, ...] = ()
    """Byte ranges of slot seq+1 that are completely reduced here."""
    pending_hash: str = ""
    """Hash of the pending header, which a brief report only names; "" if there is none."""
    owns: tuple[Span, ...] = WHOLE
    """Parts that the member owns in the view that it entered: those it holds at the header of a STEP that is handed on
    to it (protocol.md P5)."""

    @property
    def loaded(self) -> bool:
        """Whether the member has any part of the state."""
        return bool(self.parts)

    def flaw(self) -> str:
        """Returns the reason why the lists of parts are invalid; "" if they are valid."""
        return _odd_parts(self.parts) or _odd_parts(self.owns)


@dataclass(frozen=True, slots=True)
class Entered:
    """Message that the member is in `view` and has committed slot `seq`."""

    view: ViewId
    seq: int
    step: int
    head: str
    parts: tuple[Span, ...] = WHOLE
    """Parts of the training state that the member holds at `head`, as normal spans."""
    chain: str = ""
    """Id of the chain that `view` is of."""

    @property
    def loaded(self) -> bool:
        """Whether the member has any part of the state."""
        return bool(self.parts)

    def flaw(self) -> str:
        """Returns the reason why the list of parts is invalid; "" if it is valid."""
        return _odd_parts(self.parts)


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """Answer to Recall: the view that the member is in, and a decided view that no header has carried yet."""

    view: View | None = None
    waiting: View | None = None
    promised: ViewId = NO_VIEW


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Message on how far a learner has caught up (protocol.md 17, 18)."""

    seq: int
    """Last slot that is applied to its state."""
    able: bool = True
    """Whether the learner can catch up; False: it cannot, or lost the log, and asks to be let in by a pause."""
    reason: str = ""
    attempt: int = 1
    """Number of times that the header at which the learner began names it."""


@dataclass(frozen=True, slots=True)
class SourceProgress:
    member: str
    nbytes: int
    rate_bps: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Message on a newcomer's progress in transferring the state, sent about once a second."""

    phase: str
    """Phase of the transfer: "pull", "replay" or "prove"."""
    done_nbytes: int
    """Number of bytes that are here, those that were here before included."""
    total_nbytes: int
    rate_bps: float
    """Rate of late in bits per second, all sources together; 0: nothing is known yet."""
    lag: int = 0
    """Number of steps of the log that are not applied yet."""
    sources: tuple[SourceProgress, ...] = ()

    @property
    def remaining_s(self) -> float:
        """Estimated seconds left at the present rate; infinite if no rate is known."""
        left = max(0, self.total_nbytes - self.done_nbytes)
        return 8 * left / self.rate_bps if self.rate_bps > 0 else (math.inf if left else 0.0)


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Measurement of a member's link to `peer`; rate 0 means that nothing gets through."""

    peer: str
    latency_s: float
    """Latency in seconds: half a round trip."""
    rate_bps: float
    """Bits per second that this member can send to the peer."""
    evidence: str
    """Way of the measurement, "probe" or "transfer", and why it was made."""


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """Request of a member to make or remove a link (primitives connect-link and disconnect-link of the Chaos paper,
    Fig. 4c and 4d).
    """

    peer: str
    add: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LinkEvent:
    peer: str
    up: bool
    evidence: str
    """Evidence of the event: "connected", MADE_ANEW, "closed" (EOF or reset: a fact), "silent", "refused",
    "timeout".
    """


MADE_ANEW = "closed, and connected anew"
"""Evidence of a link that stands, but not all the time since its member entered its view. It is one word: told in turn,
the first half would be taken for evidence against a neighbour whose own stream is being replaced just then."""


@dataclass(frozen=True, slots=True)
class Verdict:
    suspect: str
    alive: bool
    evidence: str
    certain: bool = False
    """Whether the process table of the suspect's own machine says that its process is gone or has died."""
    seen: bool = False
    """Whether the verdict is that process table's, whatever it says; else nothing but a link's silence tells."""


@dataclass(frozen=True, slots=True)
class Differs:
    """Message of the commit root that a member's contribution to the open slot differs from the others' (protocol.md
    6b).

    Attributes:
        member: Id of the member whose contribution differs.
        reason: Text that says what differs, with both values and what to do.
        rejoin: Whether the member's state is not the job's, so that it must join again; else its script is another.
    """

    member: str
    reason: str
    rejoin: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Message that the sender has committed the job's closing header."""

    seq: int
    step: int


# --- control messages: scheduler -> member -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    member: Member
    term: int
    role: str
    """Role of the newcomer: "founder", "joiner" or "standby"."""
    reason: str
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    min_nodes: int = 0
    max_nodes: int = 0
    """Largest number of nodes; 0: not told."""
    plan: PlanSpec = PlanSpec()
    chain: str = ""
    """Id of the chain by which this scheduler leads."""
    version: int = VERSION
    """Version of the protocol, as in `Hello`."""


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class OpenLinks:
    """Order to make links to these members (the later member dials), and to answer Ready when all are up.

    It replaces what was told before, unless it says what has changed of that.
    """

    peers: tuple[Member, ...]
    changes: bool = False
    """Whether these members come to those that were told on this stream before."""
    gone: tuple[str, ...] = ()
    """Ids of members that are asked for no more; only a change has any."""


@dataclass(frozen=True, slots=True)
class NextView:
    """Message that a view is decided and stored; the commit root is to carry it in a header (a BOUNDARY header if it
    has joiners).
    """

    view: View


@dataclass(frozen=True, slots=True)
class ServeLearners:
    """Order to serve these learners from the next STEP header on, instead of those named before. Sent to members, whose
    commit root names learners in headers, and to the learners, who find their donors in `view`. In a large job `view`
    has only the members that concern the receiver.
    """

    ids: tuple[str, ...]
    view: View


@dataclass(frozen=True, slots=True)
class Prepare:
    number: ViewId
    reason: str
    brief: bool = False
    """Whether the report may name its headers by their hashes alone: others tell them, or they are asked for."""


@dataclass(frozen=True, slots=True)
class Source:
    """Member from which reduced bytes of a handed-on slot can be pulled."""

    member: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Decide:
    """Message with the view decided after a failure, or with the first view (protocol.md 9).

    `base` is the header everybody in the view stands on before going on: hand-on if some member has yet to commit it
    (then `sources` hold its raw bytes), redo of slot base.seq+1 otherwise.
    """

    view: View
    base: Header
    hand_on: bool = False
    sources: tuple[Source, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Request to report whether a member is alive, by its link's silence or, on the same machine, by the process
    table.
    """

    suspect: str
    member: Member | None = None
    """Suspect as a member, for newcomers that never heard of it."""


@dataclass(frozen=True, slots=True)
class Fence:
    reason: str
    rejoin: bool = True
    over: bool = False
    """Whether the job has ended for all, and not by being finished: it begins again from a checkpoint, or not at
    all.
    """


@dataclass(frozen=True, slots=True)
class Notice:
    """Text for the user, such as that the job waits for members or is paused."""

    text: str
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class Pulse:
    """Sign of life of the scheduler; frequent if standby schedulers exist, so that members soon leave one that is
    frozen.
    """

    timeout_s: float
    """Silence (s) after which a member leaves this scheduler."""


@dataclass(frozen=True, slots=True)
class HeartbeatPace:
    """Order to use another heartbeat interval, because the number of members has changed."""

    heartbeat_interval_s: float


@dataclass(frozen=True, slots=True)
class Recall:
    """Request to report what the member knows of the chain, which this scheduler lost and is to rebuild."""


@dataclass(frozen=True, slots=True)
class Released:
    """Message that a member may end, because no other member needs it any more."""

    reason: str
    asked: bool = False
    """Whether the member was to leave, by its own wish or by the operator's; else the job is finished."""
    keep: bool = False
    """Whether the member may be the last one with the training state: it keeps the state in a file, says so, then
    closes the stream (14c).
    """


@dataclass(frozen=True, slots=True)
class ToldEnd:
    """Message to a newcomer that the job is finished, so that nothing is left to train."""

    reason: str
    chain: str
    view: View
    """Last view of the job."""


@dataclass(frozen=True, slots=True)
class LinkKey:
    """Key that two members share. `name` is not secret, and the same at both."""

    peer: str
    """Member id of the other end."""
    name: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """Protection of links in this job, and new keys for the receiver's links; older keys stay valid until they are
    declared void.

    The state machines never see them (control/link_keys.py, member/keyring.py).
    """

    rule: str
    """Setting `links` of the job."""
    remote: str
    """Least protection (transport/sealing.py, Level) of a link between machines."""
    local: str
    """Least protection of a link within a machine."""
    keyed: bool
    """Whether links have keys: a peer that knows none of them is a stranger, at any level."""
    keys: tuple[LinkKey, ...] = ()
    void: tuple[str, ...] = ()
    """Members that are gone, whose keys count no more."""


# --- between members, beside the reduced bytes -------------------------------------------------------------------

FromMember = (
    Hello
    | Ready
    | Heartbeat
    | LinkEvent
    | Verdict
    | Report
    | Entered
    | Leave
    | Finished
    | CatchUp
    | Progress
    | LinkReport
    | LinkRequest
    | RebuildReport
    | Kept
    | Differs
    | Saved
)
_Told = Notice | Released | ServeLearners | Pulse | Recall | LinkKeys | ToldEnd | HeartbeatPace
ToMember = Welcome | Refused | OpenLinks | NextView | Prepare | Decide | Probe | Fence | _Told
PeerMessage = Contribution | Header


def other_version(version: int) -> str:
    """Returns an error text if another process speaks another protocol version; else ""."""
    spoken = f"version {version}" if version else "a version before 4"
    advice = "install the same package on all machines"
    return "" if version == VERSION else f"speaks {spoken} of the protocol, and this side {VERSION}: {advice}"


def is_name(value: str) -> str:
    """Returns an error text if this is no valid name of a job or node; else ""."""
    return "" if NAME.fullmatch(value) else "expected 1 to 64 letters, digits, dots, dashes and underscores"


def check_nodes(min_nodes: int, max_nodes: int) -> None:
    """Raises ConfigurationError unless 1 <= min_nodes <= max_nodes."""
    if not 1 <= min_nodes <= max_nodes:
        raise ConfigurationError(f"min_nodes={min_nodes}, max_nodes={max_nodes}: expected 1 <= min_nodes <= max_nodes")


@dataclass(frozen=True, slots=True)
class Settings:
    """Rules of a job that the scheduler applies. They lie in its store as JSON, by these names."""

    job: str = setting("default", "Name of the job; members of different jobs never meet.", check=is_name)
    min_nodes: int = setting(
        1,
        "Training starts with, and pauses below, so many nodes. A node is a torchrun with all its workers, or "
        "`chaos-lightning run` with all of its, or one process that was started by itself.",
    )
    max_nodes: int = setting(256, "Workers of further nodes wait as standbys.")
    link_degree: int = setting(
        8,
        "To how many others a newcomer gets links where more than 16 members are in and nobody names neighbours; 0: to "
        "all.",
        check=at_least(0, "a number of members, or 0 for all"),
    )
    heartbeat_interval_s: float = setting(0.1, "How often a member tells the scheduler that it lives.")
    heartbeat_timeout_s: float = setting(0.3, "Silence after which a member is suspected. Its neighbours must confirm.")
    hang_timeout_s: float = setting(
        20.0, "A process that its machine says is running, yet silent on all links for so long, is dead all the same."
    )
    last_holder_timeout_s: float = setting(
        120.0, "How long the last member that holds the training state is waited for without proof of its death."
    )
    confirm_timeout_s: float = setting(
        0.1, "How long a suspected member's neighbours, or the ends of a broken link, are asked."
    )
    silence_timeout_s: float = setting(
        2.0,
        "How long a member may be silent of which its neighbours can say nothing but that. A process that computes "
        "with the interpreter's lock held is as silent as a dead machine. One that broke a longer silence is given "
        "more.",
    )
    node_timeout_s: float = setting(
        30.0, "How long a job that begins waits for the other workers of a node, once the first of them is ready."
    )
    report_timeout_s: float = setting(
        2.0, "How long a survivor may take to report what it holds, before it is not waited for."
    )
    join_timeout_s: float = setting(
        60.0,
        "A joiner that has not loaded the state so long after its admission is put out again; beyond 16 members, so "
        "long after another one last loaded it.",
    )
    observe_timeout_s: float = setting(
        300.0, "A newcomer that has not caught up with the log for so long is let in by a pause."
    )
    finished_s: float = setting(
        600.0,
        "How long after its end a job is told as finished to newcomers of the same script, instead of beginning anew; "
        "0: never. A job that one process had alone begins anew at once.",
        check=at_least(0, "a number of seconds, or 0 for never"),
    )
    linger_timeout_s: float = setting(5.0, "How long the scheduler of a finished job goes on answering its members.")
    reconnect_grace_s: float = setting(
        15.0,
        "How long a scheduler restarted on its file waits for the last view's members.",
        check=at_least(0, "a number of seconds, or 0 for none"),
    )
    plan: PlanSpec = field(default_factory=PlanSpec)
    links: str = setting(
        "auto",
        "How data links are protected: checksum (for networks that you trust), authenticated, encrypted, or auto "
        "(docs/links.md). auto: checksums within a machine; between machines encryption, if the nodes have folders of "
        "keys (keys_dir; a token alone is not enough), else checksums. A member's must be the job's, or auto.",
    )

    def check(self) -> None:
        """Checks that the rules are consistent, or raises ConfigurationError; `plan` and `links` are checked where they
        are parsed.
        """
        check_each(self)
        check_nodes(self.min_nodes, self.max_nodes)
        if self.last_holder_timeout_s < self.hang_timeout_s:
            raise ConfigurationError(
                f"last_holder_timeout_s={self.last_holder_timeout_s:g} with hang_timeout_s={self.hang_timeout_s:g}: "
                "who alone holds the training state must be given at least as long as others"
            )
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigurationError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s:g} with heartbeat_interval_s="
                f"{self.heartbeat_interval_s:g}: one late heartbeat would be a suspicion; the timeout must be at least "
                "twice the interval"
            )
