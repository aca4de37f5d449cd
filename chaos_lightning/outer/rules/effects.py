"""Events and effects of the state machines of outer sync; the callers of the machines carry effects out in order."""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.outer.rules.messages import FromCluster, FromFollower, PushProduct, ToCluster, ToFollower
from chaos_lightning.outer.rules.types import NO_VERSION, Agreement, Entry, IncarnationId, Offer, PushId, VersionId

# ---------------------------------------------------------------------- the leader's events


@dataclass(frozen=True, slots=True)
class Heard:
    """News that a message has arrived on a stream."""

    conn: int
    message: FromCluster | FromFollower


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """News that a stream has ended; `proof` means that its process is known to be dead."""

    conn: int
    proof: bool = False


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """News that the process of an absent cluster on the leader's machine has been found dead."""

    incarnation: IncarnationId


@dataclass(frozen=True, slots=True)
class EntryStored:
    """News that an entry has been stored durably, or was refused.

    Attributes:
        ok: Whether the entry is durable.
        detail: Reason for which it was refused.
        unfit: Whether the entry fits into no record. If it was refused for another reason, another leader rules.
    """

    ok: bool
    detail: str = ""
    unfit: bool = False


@dataclass(frozen=True, slots=True)
class TimePassed:
    """News that time has passed."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """News that an operator wants the job to end."""

    reason: str


LeaderEvent = Heard | StreamClosed | ProcessDied | EntryStored | TimePassed | EndAsked

# ---------------------------------------------------------------------- the leader's effects


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Order to store this entry, if term and predecessor are still the store's; nothing else is decided before the
    answer (O1).
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class SendTo:
    """Order to send this message on a stream."""

    conn: int
    message: ToCluster | ToFollower


@dataclass(frozen=True, slots=True)
class OuterNote:
    """Order to write a line into the event log."""

    name: str
    fields: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """News that this leader has stopped deciding; `finished` means that the job has ended."""

    reason: str
    finished: bool


@dataclass(frozen=True, slots=True)
class HangUp:
    """Order to end this stream after all queued messages, and to tell its client why it is refused."""

    conn: int
    reason: str


LeaderEffect = StoreEntry | SendTo | HangUp | OuterNote | Done

# ---------------------------------------------------------------------- the follower's (the cluster's: cluster.py)


@dataclass(frozen=True, slots=True)
class Told:
    """News that a message from the leader has arrived, at a follower or cluster."""

    message: ToCluster | ToFollower


@dataclass(frozen=True, slots=True)
class Connected:
    """News that a stream to a leader has been opened."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """News that the stream to a leader has ended."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """News that the follower has this push's piece for its shard, verified.

    Attributes:
        push: Name of the push.
        manifest: Manifest of its content.
        products: Scalar products with itself and the pushes that were here before.
        finite: Whether all elements of the piece are finite.
        momentum: Scalar product with the momentum of version `at`, as an exact sum (`HeldShard.lean`).
        at: Version of the follower's state at that time.
    """

    push: PushId
    manifest: str
    products: tuple[PushProduct, ...]
    finite: bool
    momentum: str = "0"
    at: VersionId = NO_VERSION


@dataclass(frozen=True, slots=True)
class Progressed:
    """News that the follower expects to have this push's piece in so many seconds."""

    push: PushId
    left_s: float


@dataclass(frozen=True, slots=True)
class NotFetched:
    """News that this push's piece could not be fetched for now."""

    push: PushId


@dataclass(frozen=True, slots=True)
class Computed:
    """News that the follower's state is at this version.

    Attributes:
        version: Version of the state.
        momentum: Scalar products of the pushes that are here with the version's momentum.
        differs: Whether the version was durable once, with other bits.
    """

    version: VersionId
    momentum: tuple[PushProduct, ...] = ()
    differs: bool = False


@dataclass(frozen=True, slots=True)
class StateSaved:
    """News that this version is on disk, synced, renamed and read back."""

    version: VersionId
    digest: str


@dataclass(frozen=True, slots=True)
class DiskTrouble:
    """News that nothing can be saved for now, and why; "" means that saving works again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """News that a version has been loaded from disk; `ok` False: its file is damaged or gone, and `reason` says how."""

    version: VersionId
    ok: bool
    momentum: tuple[PushProduct, ...] = ()
    reason: str = ""


FollowerEvent = (
    Told
    | Connected
    | Disconnected
    | Fetched
    | Progressed
    | NotFetched
    | Computed
    | StateSaved
    | DiskTrouble
    | Loaded
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class Say:
    """Order to send a message to the leader; an effect of followers and clusters."""

    message: FromCluster | FromFollower


@dataclass(frozen=True, slots=True)
class HoldShard:
    """Order to hold this shard of the outer state from now on; precedes any loading or computing."""

    agreement: Agreement
    shard: int
    shards: int


@dataclass(frozen=True, slots=True)
class FetchPush:
    """Order to fetch this push's piece from its cluster, then to feed `Fetched` or `NotFetched`."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Compute:
    """Order to compute the version that this entry makes from the present state, then to feed `Computed`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Empty:
    """Order to drop the state, since a rollback led to a version without content, then to feed `Computed`."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Save:
    """Order to save a copy of the present state, which is at this version, then to feed `StateSaved`."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class HoldVersion:
    """Order to serve this version beside the newest one, until another version is named (O8c)."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Load:
    """Order to load this version from disk and compare it with the digest, then to feed `Loaded`."""

    version: VersionId
    digest: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Order to delete this version's file."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Forget:
    """Order to drop the staged bytes of this push."""

    push: PushId


@dataclass(frozen=True, slots=True)
class JobOver:
    """News that the job has ended with this version, so that the process may end."""

    version: VersionId
    reason: str


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """News that a leader has rejected this process, and why, so that the process ends."""

    reason: str


FollowerEffect = (
    Say
    | HoldShard
    | FetchPush
    | Compute
    | Empty
    | Save
    | HoldVersion
    | Load
    | Delete
    | Forget
    | JobOver
    | TurnedAway
    | OuterNote
)
