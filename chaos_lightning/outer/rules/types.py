"""Data types of outer sync: incarnations, pushes, versions, and the entries that a leader writes into its chain.

Theory of operation. A *cluster* trains by itself from a *base* version and now and then *freezes* what it gained: a
*push*, its pseudo-gradient. The leader decides *rounds* on pushes; each makes a new *version* of the outer state, whose
shards the followers hold. Rounds and all else that must not be forgotten are entries of one chain in the leader's
store (rule O1): the dataclasses under `Body`. Everything here is an immutable value without behaviour of its own.
Integers where a sum must be exact (samples, steps), floats where a factor was decided once and is used by all.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property

from chaos_lightning.membership.peers import FIT
from chaos_lightning.outer.rules.arrivals import UNTAUGHT, ArrivalRates
from chaos_lightning.protocol.types import Span

AHEAD = 3
"""Largest number of versions that are decided beyond the newest durable one (O5)."""


@dataclass(frozen=True, slots=True, order=True)
class IncarnationId:
    """Name of one start of a cluster (O3b). Its number comes from the chain and is never reused."""

    cluster: str
    number: int

    def __str__(self) -> str:
        return f"{self.cluster}~{self.number}"


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Place where a process runs, by which other processes on the same machine can find out that it is gone."""

    host: str = ""
    pid: int = 0
    pid_start: int = 0


NO_PROCESS = ProcessPlace()


@dataclass(frozen=True, slots=True, order=True)
class PushId:
    """Name of a push. The pushes of a round are summed in the order of their names, not of their arrival."""

    incarnation: IncarnationId
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}/{self.number}"


@dataclass(frozen=True, slots=True, order=True)
class VersionId:
    """Name of a state of the model in outer sync: its number, and the hash of the chain entry (founding, round or
    rollback) that made it.
    """

    number: int = 0
    hash: str = ""

    def __str__(self) -> str:
        return f"v{self.number}-{self.hash[:6]}" if self.number else "no version"


NO_VERSION = VersionId()


class PushAnswer(enum.StrEnum):
    """Answer to a push; only the chain gives it (O3)."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class Covered:
    """Positions of one epoch, as sorted, disjoint spans."""

    epoch: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """Push as its cluster offers it to the leader.

    Attributes:
        push: Name of the push; it stands for one content.
        base: Version that it is the delta to; NO_VERSION for the first content of a job.
        manifest: Hash of the hashes of its blocks.
        samples: Number of samples that it covers (T).
        steps: Number of inner steps that it covers (h).
        covers: Positions that it covers, by epoch, in order; empty where each cluster has its own data.
    """

    push: PushId
    base: VersionId
    manifest: str
    samples: int
    steps: int
    covers: tuple[Covered, ...] = ()


@dataclass(frozen=True, slots=True)
class Weighed:
    """Accepted push in a round: `factor` is its weight w_j, which includes `part`.

    `part` is the part of its length to which the gate has shortened it; 1.0: it is taken as it is.
    """

    offer: Offer
    factor: float
    staleness: int
    part: float = 1.0


@dataclass(frozen=True, slots=True)
class Rejection:
    """Push that a round rejected, with the reason."""

    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of a round, with which all followers compute its version from the pushes.

    Attributes:
        rate: eta p times the clip factor: theta <- theta - rate delta.
        buffer: p times the clip factor: b <- b + buffer delta.
        momentum: mu.
        outer: N / a where the momentum moves in this round (m <- mu m + outer b), 0.0 where it does not.
        step: eta mu where the momentum moves: theta <- theta - step m.
    """

    rate: float
    buffer: float
    momentum: float
    outer: float = 0.0
    step: float = 0.0


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of the outer optimizer: samples since the momentum moved last, and the job's clock.

    Attributes:
        pending: Samples since the momentum moved last (a).
        samples: Samples of all accepted pushes.
        ticks: Clock of the job, in inner steps of a synchronous job times `TICKS`.
    """

    pending: int = 0
    samples: int = 0
    ticks: int = 0


TICKS = 720720
"""Ticks of one inner step: divisible by all numbers of clusters up to 16, so that their shares add up."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """Count of a cluster's pushes in a row that the gate found too long or pointing the wrong way.

    Attributes:
        cluster: Name of the cluster, under any of its incarnations.
        times: Number of such pushes since one of the cluster passed as it was; those that grew do not count.
        size: x of the shortest one since they grew last (gates.py).
    """

    cluster: str
    times: int
    size: float


@dataclass(frozen=True, slots=True)
class GateState:
    """Statistics of the gate on accepted pushes: on x_j, the logarithm of their length (gates.py).

    Attributes:
        count: Number of accepted pushes since the gate began to warm up.
        mean: Moving average of x.
        variance: Moving variance of x.
        in_a_row: Pushes that were too long since the last one that was let in as it is, of all clusters.
        scores: Recent scores, for the paper's own gate.
        batch: Moving average of the logarithm of an inner step's samples.
        rows: Clusters whose last push was too long or turned round; the one that pushed last is last.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    in_a_row: int = 0
    scores: tuple[float, ...] = ()
    batch: float = 0.0
    rows: tuple[RefusedRow, ...] = ()


@dataclass(frozen=True, slots=True)
class PacedCluster:
    """Pace of a cluster: its measured speed, and the number of inner steps that it shall make for each push.

    Attributes:
        incarnation: Incarnation of the cluster.
        steps: Inner steps from one of its pushes to the next (H_j); 0: as agreed.
        rate: Samples a second, as it measured; 0.0: not known.
        step_rate: Inner steps a second, as it measured; 0.0: not known.
    """

    incarnation: IncarnationId
    steps: int
    rate: float
    step_rate: float


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of a job at a version.

    Attributes:
        samples: Samples of all accepted pushes.
        ticks: Clock of the job, in inner steps of a synchronous job times `TICKS`.
        epoch: Epoch whose positions are leased; 0 where each cluster has its own data.
    """

    samples: int = 0
    ticks: int = 0
    epoch: int = 0

    @property
    def steps(self) -> int:
        """Number of steps that a synchronous job would have made with the same data."""
        return self.ticks // TICKS


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of a tensor of the outer state, which must be equal in all clusters."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


COMPILED = "compiled"
"""Word of every agreement that says what tells runs of a sweep apart: layers and hyperparameters."""
_OF_A_RUN = (COMPILED, "layer ", "hyperparameter ", "data hyperparameter ", "all after ")
HYPER = "hyper_parameters"
"""Word with the LightningModule's hyperparameters as JSON, for exports; it is not compared, as each one has words."""
TIED = "tied tensors"
"""Word of an agreement that has the further names of tensors, as JSON: name by name that travels."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Model and settings that all clusters of a job must have in common; the first cluster's are the job's.

    Attributes:
        tensors: Parameters, then reduced buffers, in the fixed order.
        averaged: Number of tensors, the last ones, that are buffers: averaged by weight, without momentum.
        block: Elements of a block of the grid.
        codec: Codec of pushes and versions.
        length: Positions of an epoch that clusters share; 0: each cluster has its own data.
        settings: Rules of the job (`OuterSettings.words`).
        words: Further facts that must be equal, by name, such as the seed or a tokenizer's hash.
    """

    tensors: tuple[TensorSpec, ...]
    averaged: int = 0
    block: int = 1 << 16
    codec: str = "bf16"
    length: int = 0
    settings: tuple[tuple[str, str], ...] = ()
    words: tuple[tuple[str, str], ...] = ()

    def difference(self, other: Agreement) -> str:
        """Returns in words the first difference between this agreement, the job's, and a newcomer's; "" if there is
        none.
        """
        if (mine := len(self.tensors)) != (theirs := len(other.tensors)):
            return f"its model has {theirs} tensors, the job's has {mine}"
        for one, two in zip(self.tensors, other.tensors, strict=True):
            if one != two:
                return (
                    f"its tensor {two.name} is {two.dtype}{list(two.shape)}, the job's is {one.name}, "
                    f"{one.dtype}{list(one.shape)}"
                )
        for name in ("averaged", "block", "codec", "length"):
            if (a := getattr(self, name)) != (b := getattr(other, name)):
                return f"its {name} is {b}, the job's is {a}"
        for ours, its in ((self.settings, other.settings), (self.words, other.words)):
            first, second = dict(ours), dict(its)
            if ours is self.words and first.get(FIT, "1") != second.get(FIT, "1"):
                return (
                    f"its script begins fit {second.get(FIT, 1)} of this job, the job is in fit {first.get(FIT, 1)}, "
                    "which may train on other samples, as folds do: give each fit a job name of its own"
                )
            if ours is self.words and COMPILED not in first:  # of a release that compared no layers and hyperparameters
                second = {name: word for name, word in second.items() if not name.startswith(_OF_A_RUN)}
            # A setting that one of them does not name is of a newer release, and has its default at the other.
            second.pop(HYPER, None)
            first.pop(HYPER, None)
            for name in sorted({*first, *second} if ours is self.words else {*first} & {*second}):
                if first.get(name) != second.get(name):
                    return f"its {name} is {second.get(name, 'not set')}, the job's is {first.get(name, 'not set')}"
        return ""


# ---------------------------------------------------------------------- entries


@dataclass(frozen=True, slots=True)
class JobOpened:
    """Entry: the job's first cluster has brought the agreement. This entry's hash names the job.

    Attributes:
        agreement: Facts that all clusters have in common.
        by: Name of the first cluster, and the place where it ran.
        nonce: Nonce of that cluster: no other job has the same first entry.
    """

    agreement: Agreement
    by: str
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """Entry: a follower has started, and has drawn this number; it obeys leaders that show it this entry (O7)."""

    follower: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Entry: followers that hold the shards, in shard order; the shards' boundaries follow from their number (O15).

    Attributes:
        followers: Names of the followers, in shard order.
        durable: Durable versions that lie whole on the disks of these followers, oldest first, with the digests of the
            new shards; only if other followers held other shards before.
    """

    followers: tuple[str, ...]
    durable: tuple[Durable, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """Entry: a cluster has joined as a new incarnation.

    Attributes:
        incarnation: Name of the incarnation.
        place: Description, for people, of the place where it runs.
        first: Number of its first push.
        process: First process of the cluster, whose death any leader on that machine can see; None where it has
            several.
    """

    incarnation: IncarnationId
    place: str
    first: int = 1
    process: ProcessPlace | None = None


@dataclass(frozen=True, slots=True)
class Founded:
    """Entry: the content of this push is the job's first version."""

    number: int
    offer: Offer


@dataclass(frozen=True, slots=True)
class Leased:
    """Entry: these positions of the epoch are leased to this incarnation (O11)."""

    incarnation: IncarnationId
    epoch: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class LeftOver:
    """Entry: these positions are not trained in this epoch, as they are too few for a batch of any cluster (O11)."""

    epoch: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Entry: an incarnation has ended: it left, was silent, or was replaced. Its leases end."""

    incarnation: IncarnationId
    reason: str


@dataclass(frozen=True, slots=True)
class Voided:
    """Entry: a push is void, so that no round answers it: its cluster keeps base and residual, and its next push covers
    the progress.
    """

    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class Round:
    """Entry: a decision on pushes, which makes a version.

    Attributes:
        number: Number of the version.
        before: Version that it is computed from.
        accepted: Accepted pushes, in the order of their names.
        rejected: Rejected pushes, in the order of their names.
        factors: Factors with which followers compute the version.
        counters: Counters after the round.
        gate: Statistics of the gate after the round.
        reason: Description, for people: why the window closed, and how the pushes were judged.
        rates: Estimates of the times between pushes, from the rounds before it (O12).
        paced: Clusters that train, from it on (O12).
    """

    number: int
    before: VersionId
    accepted: tuple[Weighed, ...]
    rejected: tuple[Rejection, ...]
    factors: Factors
    counters: Counters
    gate: GateState
    reason: str
    rates: ArrivalRates = UNTAUGHT
    paced: tuple[PacedCluster, ...] = ()


@dataclass(frozen=True, slots=True)
class Durable:
    """Entry: this version is durable: all shards have it on disk, with these digests in shard order (O6)."""

    version: VersionId
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Entry: a new version with the content of an older one, since a piece of a decided push is lost (O5a).

    Attributes:
        number: Number of the version.
        to: Version whose content it has.
        lost: Pushes that nobody can offer again.
        reason: Description of the loss and its cost.
    """

    number: int
    to: VersionId
    lost: tuple[PushId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Entry: the job has ended with this version, which is durable, and with it all incarnations (O16).

    Attributes:
        version: Last version of the job.
        reason: Reason for the end.
        voided: Pushes that were offered and are not in it.
    """

    version: VersionId
    reason: str
    voided: tuple[Offer, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """Entry: the summary of all entries before it, which the store has dropped (O1a).

    Attributes:
        after: Hash of the entry before.
        state: A text (outer/rules/summaries.py).
    """

    after: str
    state: str


Body = (
    JobOpened
    | Started
    | Cut
    | Joined
    | Founded
    | Leased
    | LeftOver
    | Removed
    | Voided
    | Round
    | Durable
    | RolledBack
    | Ended
    | Summary
)
MAKES_VERSION = (Founded, Round, RolledBack)


@dataclass(frozen=True)
class Entry:
    """Entry of the chain, with its position, its term and the hash of its predecessor.

    Attributes:
        position: Position in the chain, from 1 on.
        term: Term of the leader that wrote it.
        body: Content of the entry.
        before: Hash of the entry before; "" for the first one.
    """

    position: int
    term: int
    body: Body
    before: str = ""

    @cached_property
    def hash(self) -> str:
        """Hash of the entry, which covers all entries before it, too."""
        words = [self.position, self.term, type(self.body).__name__, asdict(self.body), self.before]
        return hashlib.blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()

    def fields(self) -> dict[str, object]:
        """Returns the fields of a log event named `entry`, which contain the whole entry."""
        return {
            "position": self.position,
            "term": self.term,
            "kind": type(self.body).__name__,
            "version": str(self.version),
            "before": self.before,
            "hash": self.hash,
            "body": asdict(self.body),
        }

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Pushes, in order, from which this entry's version is computed."""
        match self.body:
            case Founded(_, offer):
                return (offer,)
            case Round() as decided:
                return tuple(weighed.offer for weighed in decided.accepted)
            case _:
                return ()

    @property
    def version(self) -> VersionId:
        """Version that the entry makes; NO_VERSION if it makes none."""
        return VersionId(self.body.number, self.hash) if isinstance(self.body, MAKES_VERSION) else NO_VERSION


def named_offers(body: Body) -> tuple[Offer, ...]:
    """Returns all offers that an entry contains: founding, accepted, rejected or void."""
    match body:
        case Founded(_, offer) | Voided(offer):
            return (offer,)
        case Round() as decided:
            weighed = tuple(weighed.offer for weighed in decided.accepted)
            return (*weighed, *(refusal.offer for refusal in decided.rejected))
        case Ended(voided=voided):
            return voided
        case _:
            return ()
