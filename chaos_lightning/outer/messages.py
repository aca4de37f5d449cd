"""What leader, followers and clusters tell each other; metadata only (docs/outer.md).

Theory of operation. Bytes of pushes and versions travel between clusters and followers, as states of `replication/`.
All that is said about them passes the leader. What the leader says bears its term: who has heard of a higher one does
not heed it (O7). Any message may be lost with its stream, arrive twice, or arrive after the leader's death, so each
says what is so, not what has changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.outer.types import Entry, IncarnationId, Leased, Offer, PushAnswer, PushId, VersionId

# ---------------------------------------------------------------------- a cluster says


@dataclass(frozen=True, slots=True)
class ClusterHello:
    """A cluster's first word on a stream.

    Attributes:
        cluster: Its name.
        place: Where it runs, for people.
        nonce: Drawn at its start: tells two clusters of one name apart.
        term: The highest that it has heard of.
        resume: Who it is; None: it is new.
        base: The version that it adopted last.
        newest: The newest version that it was told of.
    """

    cluster: str
    place: str
    nonce: str
    term: int
    resume: IncarnationId | None
    base: VersionId
    newest: VersionId


@dataclass(frozen=True, slots=True)
class Offered:
    """A push is frozen and its bytes are served: the open one, or a kept one that is unanswered again."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Beat:
    """A cluster lives.

    Attributes:
        incarnation: Who.
        rate: Samples a second, as measured; 0.0: not known yet.
        base: The version that it adopted last.
        left: Samples that it is leased and has not trained.
        pending: Samples that it trained and that no push covers yet.
        leaving: It was asked to leave.
    """

    incarnation: IncarnationId
    rate: float
    base: VersionId
    left: int
    pending: int
    leaving: bool


@dataclass(frozen=True, slots=True)
class Goodbye:
    """It leaves, and nothing of it is needed any more."""

    incarnation: IncarnationId
    reason: str


FromCluster = ClusterHello | Offered | Beat | Goodbye

# ---------------------------------------------------------------------- a cluster hears


@dataclass(frozen=True, slots=True)
class Welcomed:
    """It is in.

    Attributes:
        term: The leader's.
        incarnation: Who it is.
        first: The number of its next push.
        version: The newest one that followers serve; NO_VERSION: none at the moment.
        founded: There is a version; if not, it may found the job.
    """

    term: int
    incarnation: IncarnationId
    first: int
    version: VersionId
    founded: bool


@dataclass(frozen=True, slots=True)
class PushAnswered:
    """What the chain says of a push.

    Attributes:
        term: The leader's.
        push: Which.
        answer: What.
        version: What its round made; NO_VERSION if no round did.
        reason: Why.
    """

    term: int
    push: PushId
    answer: PushAnswer
    version: VersionId
    reason: str


@dataclass(frozen=True, slots=True)
class Served:
    """All followers serve this version now."""

    term: int
    version: VersionId


@dataclass(frozen=True, slots=True)
class Freed:
    """Accepted pushes of this incarnation that two durable versions hold: nobody asks for their bytes again (O5)."""

    term: int
    pushes: tuple[PushId, ...]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """This version is durable: whose pushes it holds may go (O5b)."""

    term: int
    version: VersionId


@dataclass(frozen=True, slots=True)
class Reopened:
    """After a rollback: these pushes are unanswered again, to be offered again in order (O5a)."""

    term: int
    version: VersionId
    pushes: tuple[PushId, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """All positions that this incarnation is leased and no round has spent."""

    term: int
    leased: Leased


@dataclass(frozen=True, slots=True)
class Dismissed:
    """This incarnation is over; `again`: the cluster may come back as a new one."""

    term: int
    reason: str
    again: bool


@dataclass(frozen=True, slots=True)
class JobFinished:
    """The job is over with this version."""

    term: int
    version: VersionId
    reason: str


ToCluster = Welcomed | PushAnswered | Served | Freed | OnDisk | Reopened | Granted | Dismissed | JobFinished

# ---------------------------------------------------------------------- a follower says


@dataclass(frozen=True, slots=True)
class FollowerHello:
    """A follower's first word on a stream.

    Attributes:
        follower: Its name.
        nonce: Drawn at its start.
        term: The highest that it has heard of.
        disk: Versions whose shard lies whole on its disk, oldest first, with their digests.
        version: Where its state stands; NO_VERSION: it has loaded none yet.
    """

    follower: str
    nonce: str
    term: int
    disk: tuple[tuple[VersionId, str], ...]
    version: VersionId


@dataclass(frozen=True, slots=True)
class Staged:
    """All bytes of a push's part are here, verified.

    Attributes:
        follower: Who says so.
        push: Which.
        manifest: Of the content, as fetched.
        products: With itself and with each push that was staged here before, by name, as exact sums.
        finite: Whether all of it is.
    """

    follower: str
    push: PushId
    manifest: str
    products: tuple[tuple[PushId, str], ...]
    finite: bool


@dataclass(frozen=True, slots=True)
class Applied:
    """Its shard of this version is computed and served."""

    follower: str
    version: VersionId


@dataclass(frozen=True, slots=True)
class Written:
    """Its shard of this version is on disk: written, synced, renamed, read back (O6)."""

    follower: str
    version: VersionId
    digest: str


@dataclass(frozen=True, slots=True)
class Missing:
    """It needs its part of this decided push, and nobody who is up has served it yet."""

    follower: str
    push: PushId


FromFollower = FollowerHello | Staged | Applied | Written | Missing

# ---------------------------------------------------------------------- a follower hears


@dataclass(frozen=True, slots=True)
class Obey:
    """Its start is in the chain, so it may obey this leader (O7).

    Attributes:
        term: The leader's.
        nonce: The follower's, as stored.
        shard: Which one it holds; -1: none, it stands by.
        shards: How many there are.
        durable: The durable versions with its digests, oldest first.
        base: What this version holds is never asked for again (`OuterChain.safe`).
        entries: The versions that were made after it, oldest first.
    """

    term: int
    nonce: str
    shard: int
    shards: int
    durable: tuple[tuple[VersionId, str], ...]
    base: VersionId
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Fetch your part of this push from its cluster."""

    term: int
    offer: Offer


@dataclass(frozen=True, slots=True)
class Apply:
    """Compute this version; its entry is in the chain."""

    term: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Keep:
    """Save this version when the state stands at it: all followers save the same ones."""

    term: int
    version: VersionId


@dataclass(frozen=True, slots=True)
class Marked:
    """These are durable, with this shard's digests, oldest first; what came before `base` may be deleted (O6)."""

    term: int
    durable: tuple[tuple[VersionId, str], ...]
    base: VersionId


@dataclass(frozen=True, slots=True)
class DropPush:
    """No round will ever take this push: its bytes may go."""

    term: int
    push: PushId


ToFollower = Obey | Stage | Apply | Keep | Marked | DropPush
