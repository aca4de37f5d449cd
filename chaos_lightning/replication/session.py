"""Runs one pull: keeps account of its donors, their answers and failures, and the bytes they sent.

Theory of operation. All waiting happens in `collect`, in the calling thread: it takes whatever donor threads have
finished, books a failure against its donor, and hands results to the phase that asked. A phase is therefore a loop
"look at what is known; enough? else collect". Every wait ends at the pull's deadline with an error that names whom it
waited for.

When all bytes are there, requests that a faster copy has overtaken may still be under way: their connections are cut,
and only when those threads have let go of the memory does delivery return.

Whoever pulls may drop the memory then, and it must go at once, not when Python next collects cycles: it may be as large
as a model. So nothing that leads to it may be in a cycle once the pull is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from chaos_lightning.errors import DeadlineError, NoDonorError, RefusedError, StateError
from chaos_lightning.protocol.types import Progress, SourceProgress
from chaos_lightning.replication import bulk, by_reference
from chaos_lightning.replication.client import Donor, PullConfig, Sink
from chaos_lightning.replication.policy import Job, SourceStats, TransferPolicy
from chaos_lightning.replication.source import Dial, Endpoint, reason_of
from chaos_lightning.replication.work_queue import WorkQueue

_PATIENCE_S = 0.1


Tell = Callable[[Progress], None]
"""Function that is called whenever something was verified; one call at a time, from any thread, briefly."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Totals of one source of a pull."""

    nbytes: int = 0
    """Bytes that were verified and used."""
    busy_s: float = 0.0
    requests: int = 0
    duplicated: int = 0
    """Bytes that the source sent although another source's copy was used."""
    stolen: int = 0
    """Bytes that the source took over from the shares of others."""
    retries: int = 0
    """Number of the source's requests that had to be made again."""

    @classmethod
    def of(cls, stats: SourceStats) -> SourceReport:
        return cls(stats.nbytes, stats.busy_s, stats.jobs, stats.duplicated, stats.stolen, stats.retries)

    @property
    def rate_bps(self) -> float:
        """Bits per second while requests to the source were under way, duplicates included."""
        return 8 * (self.nbytes + self.duplicated) / self.busy_s if self.busy_s else 0.0

    def plus(self, other: SourceReport) -> SourceReport:
        """Returns the sum of two reports on the same source, from two rounds of a pull."""
        return SourceReport(
            self.nbytes + other.nbytes,
            self.busy_s + other.busy_s,
            self.requests + other.requests,
            self.duplicated + other.duplicated,
            self.stolen + other.stolen,
            self.retries + other.retries,
        )


@dataclass(frozen=True, slots=True)
class PullReport:
    """Report on a finished pull of a state, or of a slot's reduced bytes."""

    head: str
    seq: int
    nbytes: int
    """Bytes of the state, or of the ranges wanted."""
    by_source: Mapping[str, int]
    """Verified bytes received, by donor."""
    skipped: int
    """Bytes that were here before the pull."""
    seconds: float
    retries: int
    """Number of requests made again because a donor broke off."""
    corrupted: int
    """Number of pieces that arrived with wrong bytes and were pulled again."""
    state_hash: str = ""
    disagreeing: tuple[str, ...] = ()
    """Donors whose state differs from the one taken (protocol.md 24)."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Donors that fell out, with the reason."""
    rounds: int = 1
    """Number of rounds; more than one if the donor that gave the manifest was lost."""
    policy: str = ""
    reason: str = ""
    """Reason why the policy shared the work as it did at first."""
    moving_s: float = 0.0
    """Seconds from the first request for bytes to the last byte verified."""
    duplicated: int = 0
    """Bytes that arrived twice, because a copy was asked for elsewhere."""
    steals: int = 0
    """Number of times that a source took over work of another one."""
    sources: Mapping[str, SourceReport] = field(default_factory=dict)


class PullSession:
    """Donors of one pull, with their answers and failures."""

    def __init__(
        self, endpoints: Sequence[Endpoint], dial: Dial, *, what: str, head: str, seq: int, config: PullConfig | None
    ) -> None:
        """Starts a thread per donor; the session is to be used as a context manager, which ends them.

        Args:
            endpoints: The donors, oldest member first.
            dial: Opens an authenticated bulk socket.
            what: Word for messages: "state" or "result".
            head: Hash of the committed header that is meant.
            seq: Slot of the header.
            config: Waits and sizes.
        """
        bulk.head_bytes(head)
        if not endpoints:
            raise ValueError(f"pulling the {what} needs at least one donor, none was given")
        if len({e.member for e in endpoints}) != len(endpoints):
            raise ValueError(f"a donor is listed twice: {', '.join(e.member for e in endpoints)}")
        self.config = config or PullConfig()
        self.what = f"the {what} at header {head} (slot {seq})"
        self.began = time.monotonic()
        self.deadline = self.began + self.config.deadline_s
        self.order = [e.member for e in endpoints]
        self.failed: dict[str, str] = {}
        self.refused = False
        """Whether a donor answered that it does not have the requested state."""
        self.by_source: dict[str, int] = {}
        self.sources: dict[str, SourceReport] = {}
        self.retries = self.corrupted = self.steals = 0
        self.moving_s = 0.0
        self.policy: TransferPolicy | None = None
        self.reason = ""
        self.abandoned: Callable[[], bool] | None = None
        """Function that says whether the pull has become pointless."""
        self.loading: frozenset[str] = frozenset()
        """Donors that get the state themselves: no answer is waited for, and nothing is planned for them."""
        self._work_queue: WorkQueue | None = None
        self._pending: dict[Future[Any], tuple[str, str]] = {}
        self.donors = {
            e.member: Donor(e, dial, head=head, seq=seq, config=self.config, deadline=self.deadline) for e in endpoints
        }

    def __enter__(self) -> PullSession:
        return self

    def __exit__(self, *_: object) -> None:
        for donor in self.donors.values():
            donor.close()
        for member in self._work_queue.busy() if self._work_queue is not None else ():
            self.donors[member].join(self.config.stall_timeout_s)  # the caller is about to reuse what it writes to
        self._work_queue = None  # it refers to this session, and so may the futures: see the module
        self._pending.clear()

    def start(self, kind: str, member: str, work: Callable[[], Any]) -> None:
        """Hands work to a donor's thread; `collect` returns the result as (kind, member, result)."""
        self._pending[self.donors[member].submit(work)] = (kind, member)

    def pending(self, kind: str) -> list[str]:
        """Returns the donors that are still doing work of this kind."""
        return [member for k, member in self._pending.values() if k == kind]

    def collect(self, patience_s: float = _PATIENCE_S) -> list[tuple[str, str, Any]]:
        """Waits briefly for donor threads and returns their finished results; drops donors that failed."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self._overdue()
        if self.abandoned is not None and self.abandoned():
            raise StateError(f"pulling {self.what} was abandoned: something else was decided meanwhile")
        return self._finished(min(left, patience_s))

    def _finished(self, patience_s: float) -> list[tuple[str, str, Any]]:
        finished = wait(self._pending, timeout=patience_s, return_when=FIRST_COMPLETED).done
        results = []
        for future in finished:
            kind, member = self._pending.pop(future)
            error = future.exception()
            if error is None:
                results.append((kind, member, future.result()))
            elif isinstance(error, Exception):
                self.refused = self.refused or isinstance(error, RefusedError)
                self.drop(member, reason_of(error))
            else:
                raise error
        return results

    def _overdue(self) -> DeadlineError:
        # A donor's own wait ends at the same moment: it may have been dropped for its silence just before.
        silent = {member for member, reason in self.failed.items() if reason == reason_of(TimeoutError())}
        waited = sorted({member for _, member in self._pending.values()} or silent)
        return DeadlineError(
            f"pulling {self.what} took longer than {self.config.deadline_s:g} s, still waiting for "
            f"{', '.join(waited) or 'nobody'}; {self.fates()}; check the links or raise the deadline, then join again"
        )

    def drop(self, member: str, reason: str) -> None:
        """Excludes this donor from the pull, and notes the reason."""
        self.failed.setdefault(member, reason)
        self.donors[member].close()
        if self._work_queue is not None:
            self._work_queue.dismiss(member)  # also what was planned for it

    def fates(self) -> str:
        """Returns in words which donors failed, and why."""
        return "; ".join(f"{member}: {reason}" for member, reason in self.failed.items()) or "no donor failed"

    def deliver(
        self,
        jobs: Sequence[Job],
        sink: Sink,
        donors: Sequence[str],
        *,
        policy: TransferPolicy,
        on_bytes: Callable[[int, Mapping[str, SourceStats]], None],
        recruit: Callable[[str, str, Any], bool] | None = None,
    ) -> WorkQueue:
        """Has these donors send the jobs; returns when all have arrived, or no donor is left that could send the rest.

        Args:
            jobs: Jobs that together cover the missing bytes.
            sink: Destination of the bytes.
            donors: Members that may send.
            policy: Policy that decides which donor sends what.
            on_bytes: Function that is called with the size of whatever is verified, and what is known of the sources.
            recruit: Function that, given a late answer (kind, member, result), says whether that donor joins in.
        """

        by_donor: dict[str, SourceStats] = {}

        def account(source: str, nbytes: int) -> None:  # the queue refers to it, so it must not refer to the queue
            self.by_source[source] = self.by_source.get(source, 0) + nbytes
            on_bytes(nbytes, by_donor)

        size = self.config.request_nbytes
        work_queue = WorkQueue(jobs, policy, sink.place, on_done=account, request_nbytes=size, stats=by_donor)
        self._work_queue, self.policy = work_queue, policy
        how = policy.way() or (by_reference.deliver if self.config.by_reference else None)

        def enlist(member: str) -> None:
            donor = self.donors[member]
            self.start("deliver", member, lambda: donor.deliver(work_queue, sink, how))

        began = time.monotonic()
        # A source that has not answered yet gets a share as well, for others can take it over; but not if shares are
        # fixed.
        expected = recruit is not None and not policy.patient
        late = [m for m in self.pending("digest") if m not in donors and m not in self.loading] if expected else []
        try:
            for member in donors:
                work_queue.join(member)
            work_queue.assign([*donors, *late])
            self.reason = self.reason or work_queue.reason
            for member in donors:
                enlist(member)
            while work_queue.left_nbytes and work_queue.error is None:
                waited = recruit is not None and bool(self.pending("digest"))
                if not waited and not (self.pending("deliver") and work_queue.servable()):
                    break
                for kind, member, result in self.collect():
                    if kind == "deliver" or recruit is None:
                        continue
                    if recruit(kind, member, result):
                        work_queue.join(member)
                        enlist(member)
                    else:
                        work_queue.dismiss(member)
        finally:
            work_queue.stop()
        self.moving_s += time.monotonic() - began
        self._let_go(work_queue)
        self.retries += sum(stats.retries for stats in work_queue.everybody().values())
        self.corrupted += work_queue.corrupted
        self.steals += work_queue.steals
        for member, stats in work_queue.everybody().items():
            self.sources[member] = self.sources.get(member, SourceReport()).plus(SourceReport.of(stats))
        if work_queue.error is not None:
            raise work_queue.error
        return work_queue

    def _let_go(self, work_queue: WorkQueue) -> None:
        """Waits until no donor's thread receives any more; does not wait for threads that only dial."""
        if not work_queue.left_nbytes or work_queue.error is not None:
            for member in work_queue.busy():
                self.donors[member].close()
        while work_queue.busy():
            self.collect(0.01)
        self._finished(0.0)
        for member in self.pending("deliver"):
            if self.donors[member].broken:
                self.failed.setdefault(member, self.donors[member].broken)

    def exhausted(
        self, work_queue: WorkQueue | None, names: Callable[[Job], str] | None = None
    ) -> StateError | DeadlineError:
        """Returns the error for a pull whose donors have all failed before everything arrived."""
        if time.monotonic() >= self.deadline:  # what ended the donors' waits, too
            return self._overdue()
        missing = "nothing has arrived"
        if work_queue is not None:
            left = work_queue.missing()
            first = left[0]
            where = f" of {names(first)}" if names is not None else ""
            missing = (
                f"{work_queue.left_nbytes} bytes in {len(left)} ranges are missing, the first is "
                f"[{first.start}, {first.stop}){where}"
            )
        words = f"no donor is left for {self.what}: {missing}; {self.fates()}; join again"
        return NoDonorError(words, refused=self.refused)

    def report(self, head: str, seq: int, nbytes: int, skipped: int, **more: Any) -> PullReport:
        """Returns the report on a pull that succeeded."""
        return PullReport(
            head=head,
            seq=seq,
            nbytes=nbytes,
            by_source=dict(self.by_source),
            skipped=skipped,
            seconds=time.monotonic() - self.began,
            retries=self.retries,
            corrupted=self.corrupted,
            failed=dict(self.failed),
            policy=self.policy.name if self.policy is not None else "",
            reason=self.reason,
            moving_s=self.moving_s,
            duplicated=sum(s.duplicated for s in self.sources.values()),
            steals=self.steals,
            sources=dict(self.sources),
            **more,
        )


class PullMeter:
    """Meter that reports verified bytes to a callback as `Progress`."""

    def __init__(self, total_nbytes: int, here_nbytes: int, tell: Tell | None) -> None:
        self._total, self._here, self._tell = total_nbytes, here_nbytes, tell

    def __call__(self, nbytes: int, stats: Mapping[str, SourceStats]) -> None:
        self._here += nbytes
        if self._tell is None:
            return
        now = time.monotonic()
        sources = tuple(SourceProgress(m, s.nbytes, 8 * s.rate(now)) for m, s in list(stats.items()))
        rate = sum((s.rate_bps for s in sources), 0.0)
        self._tell(Progress("pull", self._here, self._total, rate, sources=sources))
