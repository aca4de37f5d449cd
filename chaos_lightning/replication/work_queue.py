"""Decides which donor sends which bytes next: the work queue that a pull's donors share.

Theory of operation. The work queue is the only thing that the donors' threads share. A task has at most one request
that receives in place, its owner. A duplicate receives into memory of its own; if it is verified first, the task is
done, but the copy is *held* until the owner's request has ended in one way or another, and only then written to its
place. So nobody writes into verified memory again, and nobody has to be stopped for that. What a donor does not deliver
(it died, its connection broke, the bytes were wrong) goes back and is offered to others first.

When nothing is left the pull cuts the connections on which only overtaken requests are under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from chaos_lightning.errors import StateError
from chaos_lightning.replication.policy import Job, Queue, Request, SourceStats, Task, TransferPolicy
from chaos_lightning.replication.table import Piece

MOST_REQUESTS = 32
"""Most requests under way with one donor, however small they are."""
MAX_TRIES = 5
"""Number of times that the same bytes may arrive corrupted, from whichever donor."""

Place = Callable[[Job, list[memoryview]], None]


@dataclass
class WorkQueue:
    """Queue of jobs, waiting and requested, that the donors' threads of one round of a pull share."""

    jobs: Sequence[Job]
    policy: TransferPolicy
    place: Place = lambda job, buffers: None
    """Function that copies verified bytes that were received elsewhere to their place."""
    on_done: Callable[[str, int], None] = lambda source, nbytes: None
    request_nbytes: int = 4 << 20
    clock: Callable[[], float] = time.monotonic
    """Clock (seconds) by which rates are measured."""
    stats: dict[str, SourceStats] = field(default_factory=dict)
    """Statistics of the donors that deliver, by member."""
    gone: dict[str, SourceStats] = field(default_factory=dict)
    """Statistics of donors that have stopped delivering, by member."""
    error: Exception | None = None
    stopped: bool = False
    corrupted: int = 0
    steals: int = 0
    copies: int = 0
    """Number of duplicate requests made."""

    def __post_init__(self) -> None:
        self.left_nbytes = sum(job.nbytes for job in self.jobs)
        self.requests: dict[str, list[Request]] = {}
        self._spare: deque[Task] = deque(Task(job) for job in self.jobs)
        self._queues: dict[str, deque[Task]] = {}
        self._queued: dict[str, int] = {}
        self._idle: set[str] = set()
        self._changed = threading.Condition()
        self.reason = ""

    # --- from the pull's own thread -------------------------------------------------------------------------------

    def assign(self, sources: Sequence[str]) -> None:
        """Has the policy assign waiting jobs to these sources, some of which may join later."""
        with self._changed:
            tasks = {id(task.job): task for task in self._spare}
            given = self.policy.assign([task.job for task in self._spare], sources)
            self.reason = given.reason
            for source, jobs in given.jobs.items():
                allowed = [j for j in jobs if source in sources and (j.only is None or source in j.only)]
                queue = deque(tasks.pop(id(job)) for job in allowed)
                if queue:
                    self._queues[source] = queue
                    self._queued[source] = sum(job.nbytes for job in allowed)
            self._spare = deque(task for task in self._spare if id(task.job) in tasks)
            self._changed.notify_all()

    def join(self, source: str) -> None:
        """Notes that this donor takes part in delivering."""
        with self._changed:
            if source not in self.stats:
                stats = self.stats[source] = self.gone.pop(source, SourceStats())
                if (prior := self.policy.prior(source)) is not None:
                    stats.expect(*prior)
            self.requests.setdefault(source, [])
            self._changed.notify_all()

    def dismiss(self, source: str) -> None:
        """Notes that this donor is gone, and puts its unfinished jobs back into the queue."""
        with self._changed:
            self._return_all(source)
            self.requests.pop(source, None)
            if (stats := self.stats.pop(source, None)) is not None:
                self.gone[source] = stats
            self._spare.extend(self._queues.pop(source, ()))
            self._queued.pop(source, None)
            self._changed.notify_all()

    def release(self, source: str) -> None:
        """Notes that this donor's connection broke but will be dialled again, and puts the jobs under way there back
        into the queue.
        """
        with self._changed:
            self._return_all(source)
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the handing out of jobs."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Whether no work is left: all arrived, an error, or stopped."""
        return self.stopped or self.error is not None or not self.left_nbytes

    def busy(self) -> list[str]:
        """Returns the donors that may still be receiving a job."""
        with self._changed:
            return [source for source, requests in self.requests.items() if requests]

    def pause(self, seconds: float, deadline: float) -> bool:
        """Waits for this long; returns False if no work is left or the deadline has passed."""
        until = min(time.monotonic() + seconds, deadline)
        with self._changed:
            while not self.over and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self.over and time.monotonic() < deadline

    def servable(self) -> bool:
        """Returns whether each waiting job has a living donor that holds its bytes."""
        with self._changed:
            living = self.stats.keys()
            tasks = [*self._spare, *(task for queue in self._queues.values() for task in queue)]
            return all(bool(living) if t.job.only is None else bool(t.job.only & living) for t in tasks)

    def missing(self) -> list[Job]:
        """Returns the jobs that have not arrived, in address order."""
        with self._changed:
            waiting = [*self._spare, *(task for queue in self._queues.values() for task in queue)]
            flying = [f.task for requests in self.requests.values() for f in requests if not f.copy and not f.task.done]
            return sorted((task.job for task in [*waiting, *flying]), key=lambda job: job.start)

    def everybody(self) -> dict[str, SourceStats]:
        """Returns the statistics of all donors, including those that are gone."""
        with self._changed:
            return {**self.gone, **self.stats}

    # --- from the donors' threads ---------------------------------------------------------------------------------

    def take(self, source: str, *, depth: int, wait: bool, deadline: float) -> Request | None:
        """Returns the next request for this donor to make; None if there is none now (`wait` False) or no more will
        come.

        Args:
            source: Donor that has room for requests.
            depth: Number of requests that the donor should have under way.
            wait: Whether the donor has nothing under way, so that it can only wait.
            deadline: A `time.monotonic()` value that no wait passes.
        """
        with self._changed:
            if wait:
                self._idle.add(source)
                if self._idle >= self.stats.keys():  # the policy may have left them all idle: see `_may_take`
                    self._changed.notify_all()
            try:
                while not self.over and source in self.stats:
                    now = self.clock()
                    if not self._has_room(source, depth, now):
                        return None
                    request = self._next(source, wait, now)
                    if request is not None:
                        self.requests[source].append(request)
                        self.stats[source].asked(request.job.nbytes, now)
                        return request
                    left = deadline - now
                    if not wait or left <= 0:
                        return None
                    self._changed.wait(min(left, self.policy.recheck_s))
                return None
            finally:
                self._idle.discard(source)

    def arrived(self, request: Request, nbytes: int) -> None:
        """Notes that these bytes of a request have come; takes no lock, because it is called often."""
        request.got += nbytes
        self.stats[request.source].arrived(nbytes, self.clock())

    def done(self, request: Request, buffers: list[memoryview]) -> None:
        """Notes that all bytes of a request arrived and were verified."""
        with self._changed:
            self._forget(request)
            task, stats = request.task, self.stats[request.source]
            stats.jobs += 1
            if task.done:  # another copy was verified before
                stats.duplicated += request.job.nbytes
                if not request.copy:
                    task.held = None
                return
            task.done = True
            if request.copy:
                if task.owner is not None:
                    task.held = buffers
                else:  # the owner failed meanwhile, and nobody else has begun
                    self._spare = deque(t for t in self._spare if t is not task)
                    self.place(task.job, buffers)
            self._account(request.source, request.job.nbytes)

    def wrong(self, request: Request, bad: Sequence[Piece]) -> None:
        """Notes that these pieces of a request arrived corrupted (all, if none is named), and queues them again."""
        with self._changed:
            self._forget(request)
            task, source = request.task, request.source
            self.corrupted += max(1, len(bad))
            self.stats[source].retries += 1
            if request.copy:
                return
            if task.done:
                self._place_held(task)
                return
            job = task.job
            again = [job] if not bad else list(_spread(job, bad))
            good = job.nbytes - sum(j.nbytes for j in again)
            if job.tries + 1 >= MAX_TRIES:
                self.error = StateError(
                    f"bytes [{again[0].start}, {again[0].stop}) of the state arrived corrupted {MAX_TRIES} times, "
                    f"last from {source}: a donor changes its state while it serves it, or a machine's memory is faulty"
                )
            task.done = True  # its copies come too late: what is wrong of it is a task of its own
            self._spare.extendleft(
                Task(replace(j, avoid=j.avoid | {source}, tries=j.tries + 1)) for j in reversed(again)
            )
            self._account(source, good)
            self._changed.notify_all()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _account(self, source: str, nbytes: int) -> None:
        if nbytes:
            self.stats[source].nbytes += nbytes
            self.left_nbytes -= nbytes
            self.on_done(source, nbytes)
        if not self.left_nbytes:
            self._changed.notify_all()

    def _forget(self, request: Request) -> None:
        self.requests[request.source].remove(request)
        self.stats[request.source].under_way -= request.job.nbytes - request.got
        if request.copy:
            request.task.copies -= 1
        else:
            request.task.owner = None

    def _place_held(self, task: Task) -> None:
        """Copies a duplicate's verified bytes to their final place, after the first request for them ended without
        delivering.
        """
        if task.held is not None:
            self.place(task.job, task.held)
            task.held = None

    def _return_all(self, source: str) -> None:
        for request in reversed(self.requests.get(source, [])[:]):
            self._forget(request)
            task, stats = request.task, self.stats[source]
            if task.done:
                stats.duplicated += request.got
                if not request.copy:
                    self._place_held(task)
                continue
            stats.retries += 1
            if not request.copy:
                task.job = replace(task.job, avoid=task.job.avoid | {source})
                self._spare.appendleft(task)

    def _has_room(self, source: str, depth: int, now: float) -> bool:
        count, stats = len(self.requests[source]), self.stats[source]
        return count < depth or (count < MOST_REQUESTS and stats.under_way < self.policy.window_nbytes(stats, now))

    def _next(self, source: str, idle: bool, now: float) -> Request | None:
        size = self.policy.request_nbytes(self.stats[source], now, self.request_nbytes)
        task = self._own(source, size) or self._spared(source, size)
        if task is None and self._queues:
            task = self._stolen(source, size, now)
        if task is not None:
            request = task.owner = Request(task, source, copy=False)
            return request
        return self._copied(source, now) if idle else None

    def _own(self, source: str, size: int) -> Task | None:
        queue = self._queues.get(source)
        if not queue:
            return None
        task = queue.popleft()
        while queue and _joins(task.job, queue[0].job, size):
            task = Task(task.job.with_next(queue.popleft().job))
        self._queued[source] -= task.job.nbytes
        return task

    def _spared(self, source: str, size: int) -> Task | None:
        if not self._spare or not self._may_take(source):
            return None
        for index, task in enumerate(self._spare):
            if not self._allowed(source, task.job):
                continue
            del self._spare[index]
            while index < len(self._spare) and _joins(task.job, self._spare[index].job, size):
                task = Task(task.job.with_next(self._spare[index].job))
                del self._spare[index]
            return task
        return None

    def _may_take(self, source: str) -> bool:
        return self.policy.may_take(source, self.stats) or (
            self._idle >= self.stats.keys() and not any(self.requests.values())
        )

    def _stolen(self, thief: str, size: int, now: float) -> Task | None:
        queues = {
            source: Queue(self._queued[source], queue[-1].job.nbytes)
            for source, queue in self._queues.items()
            if queue and source != thief and self._allowed(thief, queue[-1].job)
        }
        grab = self.policy.steal(thief, queues, self.stats, now) if queues else None
        if grab is None:
            return None
        victim, nbytes = grab
        loot: deque[Task] = deque()
        queue, moved = self._queues[victim], 0
        while queue and self._allowed(thief, queue[-1].job) and (not loot or moved + queue[-1].job.nbytes <= nbytes):
            moved += queue[-1].job.nbytes
            loot.appendleft(queue.pop())
        self._queued[victim] -= moved
        self._queues.setdefault(thief, deque()).extend(loot)
        self._queued[thief] = self._queued.get(thief, 0) + moved
        self.steals += 1
        self.stats[thief].stolen += moved
        return self._own(thief, size)

    def _copied(self, source: str, now: float) -> Request | None:
        mine = {id(f.task) for f in self.requests[source]}
        requests = [
            f
            for requests in self.requests.values()
            for f in requests
            if not f.copy and not f.task.done and id(f.task) not in mine and self._allowed(source, f.job)
        ]
        chosen = self.policy.duplicate(source, requests, self.stats, now) if requests else None
        if chosen is None:
            return None
        chosen.task.copies += 1
        self.copies += 1
        return Request(chosen.task, source, copy=True)

    def _allowed(self, source: str, job: Job) -> bool:
        if job.only is not None and source not in job.only:
            return False
        if source not in job.avoid:
            return True
        holders = self.stats.keys() if job.only is None else job.only & self.stats.keys()
        return not holders - job.avoid  # nobody better is left


def _joins(job: Job, following: Job, size: int) -> bool:
    """Returns whether two jobs can be joined in one request."""
    return (
        following.start == job.stop
        and following.stop - job.start <= size
        and following.only == job.only
        and not (job.avoid or following.avoid)
    )


def _spread(job: Job, bad: Sequence[Piece]) -> Iterable[Job]:
    """Yields a job for each corrupted piece of a job."""
    position = job.start
    for piece in job.pieces:
        if piece in bad:
            yield replace(job, start=position, stop=position + piece.nbytes, pieces=(piece,))
        position += piece.nbytes
