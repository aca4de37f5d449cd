"""Declares the decisions that a transfer policy makes, and the facts that it makes them by.

Theory of operation. What is missing is cut into *jobs*. A policy gives some of them to sources at the start
(`assign`); what it gives to nobody is *spare* and goes to whoever has room. Whenever a source has room the work queue
(`work_queue.py`) asks in this order: the source's own jobs, spare ones, work that the policy lets it *steal* from
another's tail, and, if it would be idle otherwise, a job under way elsewhere that the policy has it *duplicate*. So a
policy is a set of small pure decisions about measured rates; who owns which bytes is the work queue's business, and the
same for all policies.

The base class decides nothing: first come, first served, in address order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.protocol.types import Member, View
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.replication.table import Piece, StateTable

REQUESTS_PER_DONOR = 4
"""Least number of jobs for each donor, as long as they do not fall below `MIN_REQUEST_NBYTES`."""
MIN_REQUEST_NBYTES = 64 << 10
"""Bytes of a request below which its round trip would cost more than its bytes."""
_MEMORY_S = 0.5
"""Seconds after which a rate forgets older measurements."""
_PRIOR_S = 0.2
"""Seconds of measurement that an estimated rate counts for."""
_LEAST_S = 0.02
"""Seconds below which a measurement says nothing: the first bytes come out of buffers."""


Estimates = Mapping[str, tuple[float, float]]
"""Latency in seconds and rate in bits per second of the link to each member; at a rate of 0 it carries nothing."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Facts that a transfer policy may plan by, besides estimates of the newcomer's links."""

    ingress_bps: float = 0.0
    """Rate of the newcomer's own access link, in bits per second; 0: no limit of its own."""
    layer_nbytes: tuple[int, ...] = ()
    """Sizes of the state's tensors."""
    newcomer: str = ""
    """This member's id."""
    sources: Sequence[Member] = ()
    """Members that hold the state."""
    near: Collection[str] = ()
    """Ids of members that this one has a link to."""
    view: View | None = None
    """View whose links join the members."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ingress_bps) and self.ingress_bps >= 0):
            raise ConfigurationError(f"ingress_bps must be finite and not negative, got {self.ingress_bps}")

    @property
    def ingress_s_per_byte(self) -> float:
        return 8 / self.ingress_bps if self.ingress_bps else 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """Bytes [start, stop) of a state that are requested at once."""

    start: int
    stop: int
    pieces: tuple[Piece, ...] = ()
    """Pieces of these bytes; empty for reduced bytes."""
    only: frozenset[str] | None = None
    """Donors that hold the bytes; None for all."""
    avoid: frozenset[str] = frozenset()
    """Donors that have failed to deliver the bytes."""
    tries: int = 0
    """Number of times that the bytes arrived corrupted."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def with_next(self, other: Job) -> Job:
        """Joins this job with the one that follows it directly."""
        return replace(self, stop=other.stop, pieces=(*self.pieces, *other.pieces))


@dataclass(eq=False, slots=True)
class Task:
    """Job of a transfer, and its progress."""

    job: Job
    owner: Request | None = None
    """Request that receives the job in place."""
    copies: int = 0
    """Number of duplicate requests under way."""
    done: bool = False
    held: list[memoryview] | None = None
    """Verified copy that waits until the owner has ended."""


@dataclass(eq=False, slots=True)
class Request:
    """Request for bytes that is under way at a source."""

    task: Task
    source: str
    copy: bool
    """Whether the request receives into memory of its own."""
    got: int = 0
    """Number of bytes that arrived so far."""

    @property
    def job(self) -> Job:
        return self.task.job


@dataclass(slots=True)
class SourceStats:
    """Facts about one source. Its own thread writes the rate, all others read it."""

    nbytes: int = 0
    """Bytes that were verified and used."""
    jobs: int = 0
    under_way: int = 0
    """Bytes requested that have not arrived yet."""
    duplicated: int = 0
    """Bytes that came although another source's copy was used."""
    stolen: int = 0
    """Bytes that the source took over from the shares of others."""
    retries: int = 0
    """Requests of this source that another source had to make again."""
    busy_s: float = 0.0
    latency_s: float = 0.0
    """Latency in seconds as estimated before, else half of the shortest time between a request and its first bytes."""
    _told: bool = False
    _answered: bool = True
    _round_s: float = math.inf
    _bytes: float = 0.0
    _seconds: float = 0.0
    _at: float = 0.0

    def expect(self, latency_s: float, rate_bps: float) -> None:
        """Sets the source's latency and rate to estimates, until they are measured."""
        self.latency_s, self._told = latency_s, True
        self._bytes, self._seconds = rate_bps / 8 * _PRIOR_S, _PRIOR_S

    def asked(self, nbytes: int, now: float) -> None:
        """Notes that these additional bytes were requested from the source."""
        if not self.under_way:
            self._at = now
            self._answered = False
        self.under_way += nbytes

    def arrived(self, nbytes: int, now: float) -> None:
        """Notes that these requested bytes have come from the source."""
        if not self._answered:  # the first bytes after a pause: there and back
            self._answered = True
            self._round_s = min(self._round_s, now - self._at)
            if not self._told:
                self.latency_s = self._round_s / 2
        self.under_way -= nbytes
        span, self._at = max(0.0, now - self._at), now
        kept = math.exp(-span / _MEMORY_S)
        self._bytes = self._bytes * kept + nbytes
        self._seconds = self._seconds * kept + span
        self.busy_s += span

    def rate(self, now: float) -> float:
        """Returns the source's recent rate in bytes per second, its present silence included; 0 if unknown."""
        return self._bytes / max(self._seconds + self.silent_s(now), _LEAST_S) if self._bytes else 0.0

    def silent_s(self, now: float) -> float:
        """Returns the seconds since the last requested bytes came from the source; 0 if none are outstanding."""
        return max(0.0, now - self._at) if self.under_way > 0 else 0.0

    def needs_s(self, nbytes: int, now: float) -> float:
        """Estimates the seconds until the source has delivered these bytes; infinity if its rate is unknown.

        A silence is expected to last as long again as it has lasted, however little is still to come.
        """
        rate = self.rate(now)
        if not nbytes:
            return 0.0
        return max(nbytes / rate, self.silent_s(now)) if rate else math.inf


@dataclass(frozen=True, slots=True)
class Queue:
    """Jobs that are assigned to a source but not yet requested from it."""

    nbytes: int
    tail_nbytes: int
    """Bytes of the queue's last job."""


@dataclass(frozen=True)
class Shares:
    """Jobs assigned to each source, and the reason in words."""

    jobs: Mapping[str, Sequence[Job]] = field(default_factory=dict)
    reason: str = ""


class TransferPolicy:
    """Policy that gives out jobs in address order, first come, first served: fast sources take more because they ask
    more often.
    """

    name = "shared"
    patient = False
    """Whether the plan waits until links are measured and every donor has answered, or been silent for a while, because
    its shares are final. Other newcomers, which answer later, are no donors then.
    """
    recheck_s = 1.0
    """Seconds that an idle source waits before it is considered again, if nothing changes meanwhile."""

    def __init__(self, estimates: Estimates | None = None, options: PolicyOptions | None = None) -> None:
        """Makes the policy for one pull, from estimates and options; this class uses neither."""

    def sources(self, donors: Sequence[Endpoint]) -> list[Endpoint]:
        """Chooses the sources to pull from, among the donors that can be dialled."""
        return list(donors)

    def way(self) -> Callable[..., None] | None:
        """Returns the function that fetches a donor's bytes (client.Deliver), or None for requests over the
        connection.
        """
        return None

    def prior(self, source: str) -> tuple[float, float] | None:
        """Returns latency (seconds) and rate (bits per second) of the link as estimated before the transfer; None if
        unknown.
        """
        return None

    def grain_nbytes(self, nbytes: int, sources: int, request_nbytes: int) -> int:
        """Returns the size of a job in bytes, small enough for every donor to get several."""
        return min(request_nbytes, max(MIN_REQUEST_NBYTES, nbytes // (REQUESTS_PER_DONOR * max(1, sources))))

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Shares:
        """Returns the jobs that each source gets at first; jobs left out are spare and go to any source that has
        room.
        """
        return Shares(reason="whoever has room takes the next bytes")

    def may_take(self, source: str, stats: Mapping[str, SourceStats]) -> bool:
        """Returns whether this source may have spare jobs now; overruled if all sources would be idle."""
        return True

    def request_nbytes(self, stats: SourceStats, now: float, limit: int) -> int:
        """Returns the most bytes for which adjacent jobs are joined in one request; 0: jobs are requested one by
        one.
        """
        return 0

    def window_nbytes(self, stats: SourceStats, now: float) -> int:
        """Returns the bytes to keep requested from a source, even if that takes more requests than configured."""
        return 0

    def steal(
        self, thief: str, queues: Mapping[str, Queue], stats: Mapping[str, SourceStats], now: float
    ) -> tuple[str, int] | None:
        """Chooses another source from the end of whose queue an idle source (`thief`) takes jobs, and how many bytes;
        None: it steals nothing.
        """
        return None

    def duplicate(
        self, source: str, requests: Sequence[Request], stats: Mapping[str, SourceStats], now: float
    ) -> Request | None:
        """Chooses a request of another source that an idle source is to make as well; None: it stays idle."""
        return None


SharedQueue = TransferPolicy


def cut_jobs(table: StateTable, pieces: Sequence[Piece], request_nbytes: int, *, attached: frozenset[str]) -> list[Job]:
    """Joins adjacent missing pieces into jobs of at most `request_nbytes`; a piece larger than that is a job of its
    own.

    Args:
        table: Table of the state, by which the pieces' places are known.
        pieces: Missing pieces, in address order.
        request_nbytes: Most bytes of a job.
        attached: The donors that hold the attached tensors; replicated ones are held by all.
    """
    jobs: list[Job] = []
    start = stop = 0
    run: list[Piece] = []
    only: frozenset[str] | None = None

    def close() -> None:
        if run:
            jobs.append(Job(start, stop, tuple(run), only))
            run.clear()

    for piece in pieces:
        entry = table.entries[piece.entry]
        low, high = entry.offset + piece.start, entry.offset + piece.stop
        holders = attached if entry.attached else None
        if not run or stop != low or high - start > request_nbytes or only != holders:
            close()
            start, only = low, holders
        run.append(piece)
        stop = high
    close()
    return jobs
