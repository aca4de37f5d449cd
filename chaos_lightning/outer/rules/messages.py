"""Messages between leader, followers and clusters; metadata only (docs/outer.md).

Theory of operation. Bytes of pushes and versions travel between clusters and followers, as states of `replication/`.
All that is said about them passes the leader. What the leader says bears its term: who has heard of a higher one does
not heed it (O7). Any message may be lost with its stream, arrive twice, or arrive after the leader's death, so each
says what is so, not what has changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_lightning.outer.rules.types import (
    NO_PROCESS,
    NO_VERSION,
    Agreement,
    Covered,
    Entry,
    IncarnationId,
    JobProgress,
    Offer,
    ProcessPlace,
    PushAnswer,
    PushId,
    VersionId,
)
from chaos_lightning.planning.batches import UNTOLD, Batches

# ---------------------------------------------------------------------- a cluster says


@dataclass(frozen=True, slots=True)
class ClusterHello:
    """First message of a cluster on a stream.

    Attributes:
        cluster: Name of the cluster.
        place: Description, for people, of the place where it runs.
        nonce: Random text, drawn at its start: tells two clusters of one name apart.
        term: Highest term that it has heard of.
        resume: Incarnation that it is; None: it is new.
        base: Version that it adopted last.
        newest: Newest version that it was told of.
        agreement: Facts that it must have in common with the other clusters.
        process: Process of its first rank.
        kept: Pushes whose bytes it holds, those of earlier incarnations among them.
        job_id: Id of the job that it was let into (`OuterChain.job_id`); "": none yet.
        fetching: Version that it is about to have for its base; NO_VERSION: none.
        answered: Number of its last push that was answered; 0: none was.
    """

    cluster: str
    place: str
    nonce: str
    term: int
    resume: IncarnationId | None
    base: VersionId
    newest: VersionId
    agreement: Agreement
    process: ProcessPlace = NO_PROCESS
    kept: tuple[PushId, ...] = ()
    job_id: str = ""
    fetching: VersionId = NO_VERSION
    answered: int = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """A cluster says that a push is frozen and served: its newest one, or one that a rollback made unanswered again."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Beat:
    """A cluster's heartbeat.

    Attributes:
        incarnation: Incarnation that sends the heartbeat.
        rate: Samples a second, as measured; 0.0: not known yet.
        step_rate: Inner steps a second; 0.0: not known yet.
        base: Version that it adopted last.
        left: Samples that it is leased and has not trained.
        pending: Samples that it trained and that no push covers yet.
        leaving: Whether it was asked to leave.
        fetching: Version that it is about to have for its base; NO_VERSION: none.
        batches: Batch sizes of the cluster, in positions of the shared data.
    """

    incarnation: IncarnationId
    rate: float
    step_rate: float
    base: VersionId
    left: int
    pending: int
    leaving: bool
    fetching: VersionId = NO_VERSION
    batches: Batches = UNTOLD


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A cluster says that it leaves, and that it has nothing that others still need."""

    incarnation: IncarnationId
    reason: str


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """A cluster says that its training loop has ended and all its progress is answered; from the oldest cluster this
    ends the job.
    """

    incarnation: IncarnationId
    reason: str


FromCluster = ClusterHello | Offered | Beat | Goodbye | LoopEnded

# ---------------------------------------------------------------------- a cluster hears


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The leader says that a cluster is in.

    Attributes:
        term: Term of the leader.
        incarnation: Incarnation that the cluster is from now on.
        first: Number of its next push.
        version: Newest version that followers serve; NO_VERSION: none at the moment.
        founded: Whether there is a version; if not, the cluster may found the job.
        progress: Progress of the job at that version.
        job_id: Id of the job, which the cluster names in its messages from now on.
    """

    term: int
    incarnation: IncarnationId
    first: int
    version: VersionId
    founded: bool
    progress: JobProgress
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """Follower that holds a shard, as a cluster can reach it.

    Attributes:
        name: Name of the follower.
        endpoint: HOST:PORT of its data connections; "" while it is away.
        key_name: Name of the key that follower and cluster share; "": none but the token.
        key: Bytes of that key.
    """

    name: str
    endpoint: str
    key_name: str = ""
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Holders:
    """Followers that hold the shards, in shard order."""

    term: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Eldest:
    """Oldest incarnation in the job: the job ends with its loop, and it alone writes checkpoints and logs."""

    term: int
    incarnation: IncarnationId


@dataclass(frozen=True, slots=True)
class Paced:
    """The leader sets the number of inner steps from one push of a cluster to the next (H_j), and says why."""

    term: int
    steps: int
    reason: str


@dataclass(frozen=True, slots=True)
class PushAnswered:
    """The leader tells a cluster the answer to its push.

    Attributes:
        term: Term of the leader.
        push: Name of the push.
        answer: Answer: accepted, rejected or void.
        version: Version that its round made; NO_VERSION if no round did.
        reason: Reason for the answer.
    """

    term: int
    push: PushId
    answer: PushAnswer
    version: VersionId
    reason: str


@dataclass(frozen=True, slots=True)
class Served:
    """The leader says that all followers serve this version now; `progress` is the job's progress at it."""

    term: int
    version: VersionId
    progress: JobProgress


@dataclass(frozen=True, slots=True)
class Freed:
    """Accepted pushes of this incarnation whose bytes nobody needs any more, since two durable versions contain them
    (O5).
    """

    term: int
    pushes: tuple[PushId, ...]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The leader says that this version is durable, so that clusters whose pushes it contains may leave (O5b)."""

    term: int
    version: VersionId


@dataclass(frozen=True, slots=True)
class Reopened:
    """Pushes that a rollback made unanswered, which the cluster must offer again in order (O5a)."""

    term: int
    version: VersionId
    pushes: tuple[PushId, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """All positions, of all epochs, that are leased to an incarnation and not spent, in order."""

    term: int
    leased: tuple[Covered, ...]


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The leader says that this incarnation, or follower, is removed; `again`: the cluster may join as a new one."""

    term: int
    reason: str
    again: bool


@dataclass(frozen=True, slots=True)
class JobFinished:
    """The leader says that the job has ended with this version."""

    term: int
    version: VersionId
    reason: str


@dataclass(frozen=True, slots=True)
class News:
    """Line to print on the consoles of all clusters: who came, left or was refused, or that a version is lost.

    It decides nothing, and one that is lost is not said again.
    """

    term: int
    text: str


ToCluster = (
    Welcomed
    | Holders
    | Paced
    | PushAnswered
    | Served
    | Freed
    | OnDisk
    | Reopened
    | Granted
    | Dismissed
    | JobFinished
    | Eldest
    | News
)

# ---------------------------------------------------------------------- a follower says


@dataclass(frozen=True, slots=True)
class ShardFile:
    """File of one shard of this version on a follower's disk."""

    version: VersionId
    digest: str


@dataclass(frozen=True, slots=True)
class PushProduct:
    """Exact sum (exact.py), over one shard, of the scalar product of a push with another push or with the momentum."""

    push: PushId
    sum: str


@dataclass(frozen=True, slots=True)
class FollowerHello:
    """First message of a follower on a stream.

    Attributes:
        follower: Name of the follower.
        nonce: Random text, drawn at its start.
        term: Highest term that it has heard of.
        disk: Versions whose shard lies whole on its disk, oldest first, with their digests.
        version: Version of its state; NO_VERSION: it has loaded none yet.
        endpoint: HOST:PORT where its data connections are taken.
        process: Process of the follower.
        job_id: Id of the job whose leader it obeys (`OuterChain.job_id`); "": none yet.
    """

    follower: str
    nonce: str
    term: int
    disk: tuple[ShardFile, ...]
    version: VersionId
    endpoint: str = ""
    process: ProcessPlace = NO_PROCESS
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class Staged:
    """A follower says that it has all bytes of its piece of a push, verified.

    Attributes:
        follower: Follower that reports.
        push: Name of the push.
        manifest: Manifest of the content, as fetched.
        products: Scalar products with itself and with each push that was staged here before.
        finite: Whether all elements of the piece are finite.
        momentum: Scalar product with the momentum of version `at`, as an exact sum (`HeldShard.lean`).
        at: Version of the follower's state at that time.
    """

    follower: str
    push: PushId
    manifest: str
    products: tuple[PushProduct, ...]
    finite: bool
    momentum: str = "0"
    at: VersionId = NO_VERSION


@dataclass(frozen=True, slots=True)
class Applied:
    """A follower says that it has computed its shard of this version and serves it.

    Attributes:
        follower: Follower that reports.
        version: Version that it has computed.
        momentum: Scalar products of staged pushes with the version's momentum.
        differs: Version with which it began to compute other bits than were durable; NO_VERSION: it does not.
    """

    follower: str
    version: VersionId
    momentum: tuple[PushProduct, ...] = ()
    differs: VersionId = NO_VERSION


@dataclass(frozen=True, slots=True)
class Written:
    """A follower says that its shard of this version is on disk: written, synced, renamed and read back (O6)."""

    follower: str
    version: VersionId
    digest: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A follower says that it needs its piece of this decided push, and that no process has served it so far."""

    follower: str
    push: PushId


@dataclass(frozen=True, slots=True)
class OnItsWay:
    """A follower says that it is fetching its piece of this push, and expects to have it in so many seconds."""

    follower: str
    push: PushId
    left_s: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """A follower says why it cannot save, such as a full disk; "" means that it can again."""

    follower: str
    reason: str


FromFollower = FollowerHello | Staged | Applied | Written | Missing | OnItsWay | Trouble

# ---------------------------------------------------------------------- a follower hears


@dataclass(frozen=True, slots=True)
class Obey:
    """The leader says that a follower's start is in the chain, so that the follower may obey this leader (O7).

    Attributes:
        term: Term of the leader.
        nonce: Nonce of the follower, as stored.
        shard: Number of the shard that it holds; -1: none, it stands by.
        shards: Number of shards.
        agreement: Agreement of the job; None before its first cluster has come.
        durable: Durable versions with the digests of its shard, oldest first.
        base: Version whose pushes are never asked for again (`OuterChain.safe`).
        entries: Entries of the versions that were made after `base`, oldest first.
        job_id: Id of the job, which the follower names in its messages from now on; "" before the first cluster has
            come.
        open: Next push to be answered of each incarnation that is in: no round takes others that no version holds.
    """

    term: int
    nonce: str
    shard: int
    shards: int
    agreement: Agreement | None
    durable: tuple[ShardFile, ...]
    base: VersionId
    entries: tuple[Entry, ...]
    job_id: str = ""
    open: tuple[PushId, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """Order to a follower to fetch its piece of this push from the push's cluster."""

    term: int
    offer: Offer


@dataclass(frozen=True, slots=True)
class Apply:
    """Order to a follower to compute this version, whose entry is in the chain."""

    term: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Keep:
    """Order to a follower to save this version once its state is there; all followers save the same versions."""

    term: int
    version: VersionId


@dataclass(frozen=True, slots=True)
class Hold:
    """The leader says that a cluster is fetching this version, so that it is served beside the newest one. NO_VERSION:
    no cluster is.
    """

    term: int
    version: VersionId


@dataclass(frozen=True, slots=True)
class Marked:
    """The leader says which versions are durable, with this shard's digests, oldest first; versions before `base` may
    be deleted (O6).
    """

    term: int
    durable: tuple[ShardFile, ...]
    base: VersionId


@dataclass(frozen=True, slots=True)
class DropPush:
    """The leader says that no round will take this push, so that its bytes may be dropped; `later`: nor any later push
    of its incarnation.
    """

    term: int
    push: PushId
    later: bool = False


@dataclass(frozen=True, slots=True)
class LineKey:
    """Key for data connections between a follower and a process of a cluster.

    Attributes:
        term: Term of the leader.
        peer: Name of the cluster's process that will dial.
        name: Name of the key.
        key: Bytes of the key.
    """

    term: int
    peer: str
    name: str
    key: bytes = field(repr=False)


ToFollower = Obey | Stage | Apply | Keep | Hold | Marked | DropPush | LineKey | JobFinished | Dismissed
