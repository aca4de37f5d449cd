"""One pull: its donors, their answers and failures, and the accounting.

Theory of operation. All waiting happens in `collect`, in the calling thread: it takes whatever donor threads have
finished, books a failure against its donor, and hands results to the phase that asked. A phase is therefore a loop
"look at what is known; enough? else collect". Every wait ends at the pull's deadline with an error that names whom it
waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from chaos_lightning.errors import DeadlineError, StateError
from chaos_lightning.replication import bulk
from chaos_lightning.replication.client import Dial, Donor, Endpoint, PullConfig, Sink, reason_of
from chaos_lightning.replication.policy import Board, Job, SharedQueue, TransferPolicy

Progress = Callable[[int, int], None]
"""Called with (bytes here, bytes in all) whenever something arrived; one call at a time, from any thread, briefly."""

_PATIENCE_S = 0.1


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did."""

    head: str
    seq: int
    nbytes: int
    """Size of the state, or of the ranges wanted."""
    by_source: Mapping[str, int]
    """Verified bytes received, by donor."""
    skipped: int
    """Bytes that were here already."""
    seconds: float
    retries: int
    """Requests made again because a donor broke off."""
    corrupted: int
    """Pieces that arrived with wrong bytes and were pulled again."""
    state_hash: str = ""
    disagreeing: tuple[str, ...] = ()
    """Donors whose state differs from the one taken (PROTOCOL.md 24)."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Donors that fell out, with the reason."""
    rounds: int = 1
    """More than one if the donor that gave the manifest was lost."""


class Session:
    """The donors of one pull and what became of them."""

    def __init__(
        self, endpoints: Sequence[Endpoint], dial: Dial, *, what: str, head: str, seq: int, config: PullConfig | None
    ) -> None:
        """Start a thread per donor; use as a context manager.

        Args:
            endpoints: The donors, oldest member first.
            dial: Opens an authenticated bulk socket.
            what: For messages: "state" or "result".
            head: Hash of the committed header that is meant.
            seq: Its slot.
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
        self.by_source: dict[str, int] = {}
        self.retries = self.corrupted = 0
        self.abandoned: Callable[[], bool] | None = None
        """Says whether the pull has become pointless."""
        self._pending: dict[Future[Any], tuple[str, str]] = {}
        self.donors = {
            e.member: Donor(e, dial, head=head, seq=seq, config=self.config, deadline=self.deadline) for e in endpoints
        }

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        for donor in self.donors.values():
            donor.close()
        for kind, member in self._pending.values():
            if kind == "deliver":  # it may be receiving into memory that the caller is about to reuse
                self.donors[member].join(self.config.stall_timeout_s)

    def start(self, kind: str, member: str, work: Callable[[], Any]) -> None:
        """Have a donor's thread do something; `collect` returns it as (kind, member, result)."""
        self._pending[self.donors[member].submit(work)] = (kind, member)

    def pending(self, kind: str) -> list[str]:
        """Donors that are still at it."""
        return [member for k, member in self._pending.values() if k == kind]

    def collect(self, patience_s: float = _PATIENCE_S) -> list[tuple[str, str, Any]]:
        """Wait a little for donor threads; what they finished. A donor that failed is out from then on."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self._overdue()
        if self.abandoned is not None and self.abandoned():
            raise StateError(f"pulling {self.what} was abandoned: something else was decided meanwhile")
        finished = wait(self._pending, timeout=min(left, patience_s), return_when=FIRST_COMPLETED).done
        results = []
        for future in finished:
            kind, member = self._pending.pop(future)
            error = future.exception()
            if error is None:
                results.append((kind, member, future.result()))
            elif isinstance(error, Exception):
                self.drop(member, reason_of(error))
            else:
                raise error
        return results

    def _overdue(self) -> DeadlineError:
        waited = sorted({member for _, member in self._pending.values()})
        return DeadlineError(
            f"pulling {self.what} took longer than {self.config.deadline_s:g} s, still waiting for "
            f"{', '.join(waited) or 'nobody'}; {self.fates()}; check the links or raise the deadline, then join again"
        )

    def drop(self, member: str, reason: str) -> None:
        """This donor is out."""
        self.failed.setdefault(member, reason)
        self.donors[member].close()

    def fates(self) -> str:
        """What became of the donors, for messages."""
        return "; ".join(f"{member}: {reason}" for member, reason in self.failed.items()) or "no donor failed"

    def deliver(
        self,
        jobs: Sequence[Job],
        sink: Sink,
        donors: Sequence[str],
        *,
        policy: TransferPolicy | None,
        on_bytes: Callable[[int], None],
        recruit: Callable[[str, str, Any], bool] | None = None,
    ) -> Board:
        """Have the donors send these jobs; returns when all arrived or nobody is left who could send the rest.

        Args:
            jobs: What is missing.
            sink: Where it goes.
            donors: Who may send.
            policy: Who sends what.
            on_bytes: Called with the size of whatever is verified.
            recruit: Given a late answer (kind, member, result), says whether that donor joins in.
        """

        def account(source: str, nbytes: int) -> None:
            self.by_source[source] = self.by_source.get(source, 0) + nbytes
            on_bytes(nbytes)

        board = Board(list(jobs), policy or SharedQueue(), on_done=account)

        def enlist(member: str) -> None:
            donor = self.donors[member]
            self.start("deliver", member, lambda: donor.deliver(board, sink))

        try:
            for member in donors:
                board.join(member)
            for member in donors:
                enlist(member)
            while board.left_nbytes and board.error is None:
                late = recruit is not None and bool(self.pending("digest"))
                if not late and not (self.pending("deliver") and board.servable()):
                    break
                for kind, member, result in self.collect():
                    if kind != "deliver" and recruit is not None and recruit(kind, member, result):
                        board.join(member)
                        enlist(member)
        finally:
            board.stop()
        while self.pending("deliver"):  # nobody may write any more when this returns
            self.collect()
        self.retries += board.retried
        self.corrupted += board.corrupted
        if board.error is not None:
            raise board.error
        return board

    def exhausted(self, board: Board | None, names: Callable[[Job], str] | None = None) -> StateError | DeadlineError:
        """Nobody is left who could send the rest."""
        if time.monotonic() >= self.deadline:  # what ended the donors' waits, too
            return self._overdue()
        missing = "nothing has arrived"
        if board is not None:
            left = board.missing()
            first = left[0]
            where = f" of {names(first)}" if names is not None else ""
            missing = (
                f"{board.left_nbytes} bytes in {len(left)} ranges are missing, the first is "
                f"[{first.start}, {first.stop}){where}"
            )
        return StateError(f"no donor is left for {self.what}: {missing}; {self.fates()}; join again")

    def report(self, head: str, seq: int, nbytes: int, skipped: int, **more: Any) -> PullReport:
        """The account of a pull that succeeded."""
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
            **more,
        )
