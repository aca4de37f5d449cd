"""Holds events and effects of the machines of outer sync; shells carry effects out in order."""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.outer.rules.messages import FromCluster, FromFollower, PushProduct, ToCluster, ToFollower
from chaos_lightning.outer.rules.types import NO_VERSION, Agreement, Entry, IncarnationId, Offer, PushId, VersionId

# ---------------------------------------------------------------------- the leader's events


@dataclass(frozen=True, slots=True)
class Heard:
    """News that a message came on a stream."""

    conn: int
    message: FromCluster | FromFollower


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """News that a stream is gone; `proof` means that its process is known to be dead."""

    conn: int
    proof: bool = False


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """News that the process of a cluster that is away is seen to be dead, on the leader's machine."""

    incarnation: IncarnationId


@dataclass(frozen=True, slots=True)
class EntryStored:
    """News that the entry that was to be stored is durable, or was refused.

    Attributes:
        ok: It is durable.
        detail: Why it was refused.
        unfit: It fits into no record. Otherwise another leader rules.
    """

    ok: bool
    detail: str = ""
    unfit: bool = False


@dataclass(frozen=True, slots=True)
class TimePassed:
    """News that time has passed."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """News that an operator asks for the job's end."""

    reason: str


LeaderEvent = Heard | StreamClosed | ProcessDied | EntryStored | TimePassed | EndAsked

# ---------------------------------------------------------------------- the leader's effects


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Order to store this entry, compared with term and predecessor; nothing else is decided until it is answered
    (O1).
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class SendTo:
    """Order to say this on a stream."""

    conn: int
    message: ToCluster | ToFollower


@dataclass(frozen=True, slots=True)
class OuterNote:
    """Line for the event log."""

    name: str
    fields: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """News that this leader decides nothing more; `finished` means that the job is over."""

    reason: str
    finished: bool


@dataclass(frozen=True, slots=True)
class HangUp:
    """Order to end this stream, behind what was said on it, and to tell its client why it is refused."""

    conn: int
    reason: str


LeaderEffect = StoreEntry | SendTo | HangUp | OuterNote | Done

# ---------------------------------------------------------------------- the follower's (the cluster's: cluster.py)


@dataclass(frozen=True, slots=True)
class Told:
    """News that the leader says something on the stream of this follower or cluster."""

    message: ToCluster | ToFollower


@dataclass(frozen=True, slots=True)
class Connected:
    """News that there is a stream to a leader."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """News that there is no stream to a leader any more."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """News that the part of this push is here and verified.

    Attributes:
        push: Which.
        manifest: Of its content.
        products: With itself and the pushes that were here before.
        finite: Whether all of it is.
        momentum: With the momentum of version `at`, as an exact sum (`HeldShard.lean`).
        at: Where the state stood then.
    """

    push: PushId
    manifest: str
    products: tuple[PushProduct, ...]
    finite: bool
    momentum: str = "0"
    at: VersionId = NO_VERSION


@dataclass(frozen=True, slots=True)
class Progressed:
    """News that the part of this push will be here so many seconds from now."""

    push: PushId
    left_s: float


@dataclass(frozen=True, slots=True)
class NotFetched:
    """News that the part of this push could not be fetched for now."""

    push: PushId


@dataclass(frozen=True, slots=True)
class Computed:
    """News that the state is at this version.

    Attributes:
        version: Which.
        momentum: Products of the pushes that are here with its momentum.
        differs: It was durable once, with other bits.
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
    """News why nothing can be saved for now; "" if saving works again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """News that the state is this version's, from disk; `ok` False: its file is damaged or gone, and `reason` says
    how.
    """

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
    """Order to send a message to the leader; the cluster's effect, too."""

    message: FromCluster | FromFollower


@dataclass(frozen=True, slots=True)
class HoldShard:
    """Order to hold this shard of the outer state; given before anything is loaded or computed."""

    agreement: Agreement
    shard: int
    shards: int


@dataclass(frozen=True, slots=True)
class FetchPush:
    """Order to get this push's part from its cluster, then to feed `Fetched` or `NotFetched`."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Compute:
    """Order to compute the version that this entry makes, from the state as it stands, then to feed `Computed`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Empty:
    """Order to drop the state, since this version has no content, as nothing stands any more; then to feed
    `Computed`.
    """

    version: VersionId


@dataclass(frozen=True, slots=True)
class Save:
    """Order to write a copy of the state, which is this version's, then to feed `StateSaved`."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class HoldVersion:
    """Order to serve this version beside the newest one, as long as no other is named (O8c)."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Load:
    """Order to read this version from disk and to compare it with the digest, then to feed `Loaded`."""

    version: VersionId
    digest: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Order to delete this version's file, which is needed no more."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Forget:
    """Order to drop the staged bytes of this push, which are needed no more."""

    push: PushId


@dataclass(frozen=True, slots=True)
class JobOver:
    """News that the job has ended with this version; the process may end."""

    version: VersionId
    reason: str


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """News that a leader has no use for this process, and why: the process ends."""

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
