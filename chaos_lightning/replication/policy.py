"""Which donor sends which bytes next: the shared work of one pull.

Theory of operation. What is missing is cut into *jobs* of a few adjacent pieces. A `Board` holds the jobs that wait
and those that are under way, and is the only thing the donor threads share. Whoever has room asks it for a job; the
board asks its `TransferPolicy`, a pure function of the waiting jobs and of what is known about the donors, which one
it shall be. A job goes back when its donor dies, stalls or sends wrong bytes, and is then offered to others first. At
any time a job has at most one owner, so nobody writes into verified memory again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from chaos_lightning.errors import StateError
from chaos_lightning.replication.table import Piece, StateTable


@dataclass(frozen=True, slots=True)
class Job:
    """Bytes [start, stop) of the address space, asked for in one request."""

    start: int
    stop: int
    pieces: tuple[Piece, ...] = ()
    """What they consist of; empty for reduced bytes."""
    only: frozenset[str] | None = None
    """The donors that hold it; None for all."""
    avoid: frozenset[str] = frozenset()
    """Donors that have failed to deliver it."""
    tries: int = 0
    """How often it arrived corrupted."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class SourceStats:
    """What a policy may know of one donor."""

    nbytes: int = 0
    """Verified so far."""
    jobs: int = 0
    busy_s: float = 0.0
    under_way: int = 0
    """Bytes requested and not yet verified."""


class TransferPolicy(Protocol):
    """Chooses the next job for a donor with room."""

    def choose(self, source: str, waiting: Sequence[Job], stats: Mapping[str, SourceStats]) -> int | None:
        """Index into `waiting` (never empty, all of it allowed for this donor), or None to leave the donor idle.

        `stats` has an entry for each living donor. A policy that leaves a donor idle is asked again whenever
        something changes; should it leave all of them idle, the first waiting job goes to whoever asks.
        """
        ...


class SharedQueue:
    """First come, first served, in address order: fast donors simply come more often."""

    def choose(self, source: str, waiting: Sequence[Job], stats: Mapping[str, SourceStats]) -> int | None:
        return 0


@dataclass
class Board:
    """Jobs waiting and under way, shared by the donor threads of one round."""

    waiting: list[Job]
    policy: TransferPolicy
    max_tries: int = 5
    on_done: Callable[[str, int], None] = lambda source, nbytes: None
    stats: dict[str, SourceStats] = field(default_factory=dict)
    under_way: dict[str, list[Job]] = field(default_factory=dict)
    error: Exception | None = None
    stopped: bool = False
    corrupted: int = 0
    retried: int = 0
    _idle: set[str] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.left_nbytes = sum(job.nbytes for job in self.waiting)

    def join(self, source: str) -> None:
        """This donor delivers from now on."""
        with self._changed:
            self.stats.setdefault(source, SourceStats())
            self.under_way.setdefault(source, [])
            self._changed.notify_all()

    def dismiss(self, source: str) -> None:
        """This donor is gone; what it had goes back."""
        with self._changed:
            jobs = self.under_way.pop(source, [])
            self.stats.pop(source, None)
            self.retried += len(jobs)
            self._return([replace(job, avoid=job.avoid | {source}) for job in jobs])

    def release(self, source: str) -> None:
        """This donor's connection broke, but it will be dialled again: what was under way goes back."""
        with self._changed:
            jobs, self.under_way[source] = self.under_way.get(source, []), []
            self.retried += len(jobs)
            if source in self.stats:
                self.stats[source].under_way = 0
            self._return([replace(job, avoid=job.avoid | {source}) for job in jobs])

    def take(self, source: str, *, wait: bool, deadline: float) -> Job | None:
        """A job for this donor; None if there is none now (`wait` False) or none will come any more."""
        with self._changed:
            if wait:
                self._idle.add(source)
                if self._idle >= self.stats.keys():  # the policy may have left them all idle: see `_choose`
                    self._changed.notify_all()
            try:
                while not self.stopped and self.error is None and self.left_nbytes and source in self.stats:
                    index = self._choose(source)
                    if index is not None:
                        job = self.waiting.pop(index)
                        self.under_way[source].append(job)
                        self.stats[source].under_way += job.nbytes
                        return job
                    left = deadline - time.monotonic()
                    if not wait or left <= 0:
                        break
                    self._changed.wait(left)
                return None
            finally:
                self._idle.discard(source)

    def done(self, source: str, job: Job, seconds: float) -> None:
        """All of the job arrived and is verified."""
        with self._changed:
            self._forget(source, job)
            stats = self.stats[source]
            stats.nbytes += job.nbytes
            stats.jobs += 1
            stats.busy_s += seconds
            self.left_nbytes -= job.nbytes
            self.on_done(source, job.nbytes)
            if not self.left_nbytes:
                self._changed.notify_all()

    def wrong(self, source: str, job: Job, bad: Sequence[Piece]) -> None:
        """These pieces of the job arrived corrupted; the rest of it is verified."""
        with self._changed:
            self._forget(source, job)
            self.corrupted += max(1, len(bad))
            again = [job] if not bad else list(_spread(job, bad))
            good = job.nbytes - sum(j.nbytes for j in again)
            self.left_nbytes -= good
            self.stats[source].nbytes += good
            if good:
                self.on_done(source, good)
            if job.tries + 1 >= self.max_tries:
                self.error = StateError(
                    f"bytes [{again[0].start}, {again[0].stop}) of the state arrived corrupted {self.max_tries} times, "
                    f"last from {source}: a donor changes its state while it serves it, or a machine's memory is faulty"
                )
            self._return([replace(j, avoid=j.avoid | {source}, tries=j.tries + 1) for j in again])

    def stop(self) -> None:
        """Nobody gets a job any more."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def servable(self) -> bool:
        """Whether each waiting job has a living donor; if not, only another donor's manifest can help."""
        with self._changed:
            living = self.stats.keys()
            return all(bool(living) if job.only is None else bool(job.only & living) for job in self.waiting)

    def missing(self) -> list[Job]:
        """What has not arrived, in address order."""
        with self._changed:
            jobs = [*self.waiting, *(job for jobs in self.under_way.values() for job in jobs)]
            return sorted(jobs, key=lambda job: job.start)

    def _choose(self, source: str) -> int | None:
        allowed = [i for i, job in enumerate(self.waiting) if self._allowed(source, job)]
        if not allowed:
            return None
        choice = self.policy.choose(source, [self.waiting[i] for i in allowed], self.stats)
        if choice is None:
            stuck = self._idle >= self.stats.keys() and not any(self.under_way.values())
            return allowed[0] if stuck else None
        return allowed[choice]

    def _allowed(self, source: str, job: Job) -> bool:
        if job.only is not None and source not in job.only:
            return False
        if source not in job.avoid:
            return True
        holders = self.stats.keys() if job.only is None else job.only & self.stats.keys()
        return not holders - job.avoid  # nobody better is left

    def _forget(self, source: str, job: Job) -> None:
        self.under_way[source].remove(job)
        self.stats[source].under_way -= job.nbytes

    def _return(self, jobs: Iterable[Job]) -> None:
        self.waiting = sorted([*self.waiting, *jobs], key=lambda job: job.start)
        self._changed.notify_all()


def _spread(job: Job, bad: Sequence[Piece]) -> Iterable[Job]:
    """A job for each corrupted piece."""
    position = job.start
    for piece in job.pieces:
        if piece in bad:
            yield replace(job, start=position, stop=position + piece.nbytes, pieces=(piece,))
        position += piece.nbytes


def cut_jobs(table: StateTable, pieces: Sequence[Piece], request_nbytes: int, *, attached: frozenset[str]) -> list[Job]:
    """Join adjacent missing pieces to jobs of at most `request_nbytes` (a piece alone may be larger).

    Args:
        table: Where the pieces lie.
        pieces: What is missing, in address order.
        request_nbytes: Size of a request.
        attached: The donors that hold the attached tensors; replicated ones are held by all.
    """
    jobs: list[Job] = []
    for piece in pieces:
        entry = table.entries[piece.entry]
        start, stop = entry.offset + piece.start, entry.offset + piece.stop
        only = attached if entry.attached else None
        last = jobs[-1] if jobs else None
        if last is not None and last.stop == start and stop - last.start <= request_nbytes and last.only == only:
            jobs[-1] = replace(last, stop=stop, pieces=(*last.pieces, piece))
        else:
            jobs.append(Job(start, stop, (piece,), only))
    return jobs
