"""Runs the joiner's side of the exchange with one donor: a connection, and the thread that uses it.

Theory of operation. A `Donor` is dialled by its own thread and only that thread touches its connection, so a donor that
hangs holds up nobody else; `close()` from outside cuts the connection and thereby ends any wait. Requests go out up
to `depth` ahead of the replies. A connection that breaks or garbles a frame is dialled again a few times (the count
starts anew whenever something arrived intact), and a donor that was heard before is dialled for some time even if
nothing answers there, while others take over what it had been asked for; a donor that refuses, by contrast, has said
so and is done with.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.replication import bulk
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type
from chaos_lightning.replication.policy import Job, Request
from chaos_lightning.replication.source import ByteSource, Dial, Endpoint, reason_of
from chaos_lightning.replication.table import PIECE_NBYTES, Piece
from chaos_lightning.replication.work_queue import WorkQueue

T = TypeVar("T")

_REDIAL_S = 0.05
_REDIAL_MOST_S = 0.5


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Hashes and size of the state that a donor announces."""

    state: str
    attached: str
    manifest: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class PullConfig:
    """Timeouts and sizes of the joiner's side of a pull."""

    deadline_s: float = 120.0
    """Most seconds for the whole pull."""
    stall_timeout_s: float = 5.0
    """Seconds of silence after which a donor is given up, if it has not even said that it is still waiting."""
    survey_grace_s: float = 1.5
    """Seconds of silence after which the vote on the state hash does not wait for a donor, if others have answered; a
    donor that says it is on its way to the header is waited for four times as long. Either may still deliver later.
    """
    depth: int = 2
    """Number of requests under way per donor."""
    request_nbytes: int = 4 << 20
    max_failures: int = 3
    """Broken connections or corrupted replies in a row after which a donor is given up."""
    redial_s: float = 3.0
    """Seconds for which a donor that was heard and cannot be dialled any more is tried again."""
    max_attached_nbytes: int = 4 << 30
    """Most bytes of tensors that a manifest refers to and that are made here for the donor; more are refused."""
    redial_silent: bool = False
    """Whether a donor that sent nothing for too long is dialled again, like one whose connection broke: the network
    between may have forgotten the connection.
    """
    prove: bool = True
    """Whether the whole state is hashed again where it lies at last; False: the caller proves it by other hashes."""
    blank: bool = False
    """Whether nothing of the state is here yet, so that nothing is hashed to find out which parts are: all of it is
    fetched.
    """
    by_reference: bool = False
    """Whether the state is read out of the memory of donors on this machine that lend it (by_reference.py)."""
    piece_nbytes: int = PIECE_NBYTES
    """Bytes of the pieces that are hashed; donors cut alike."""

    def __post_init__(self) -> None:
        for name in ("deadline_s", "stall_timeout_s", "survey_grace_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("depth", "max_failures", "piece_nbytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.redial_s >= 0:
            raise ValueError(f"redial_s must not be negative, got {self.redial_s}")
        if not 1 <= self.request_nbytes <= bulk.MAX_RANGE_NBYTES:
            raise ValueError(f"request_nbytes must be 1..{bulk.MAX_RANGE_NBYTES}, got {self.request_nbytes}")


class Sink(Protocol):
    """Destination of the byte ranges that a pull receives."""

    request: Type
    flags: int
    """Flags that DATA frames for this sink must have."""

    def land(self, job: Job) -> list[memoryview]:
        """Returns memory to receive the job's bytes into, in order; if possible the bytes' final place."""
        ...

    def landed(self, job: Job, buffers: list[memoryview], frame: BulkFrame, *, in_place: bool) -> list[Piece] | None:
        """Verifies the bytes that arrived for a job; returns the corrupted pieces, or None if all are corrupted.

        With `in_place` the buffers came from `land`, and what is verified is brought to its place.
        """
        ...

    def place(self, job: Job, buffers: list[memoryview]) -> None:
        """Copies verified bytes of a job, which were received into other memory, to their final place."""
        ...


class Donor:
    """Donor of a pull, with its connection and the thread that uses it."""

    def __init__(self, endpoint: Endpoint, dial: Dial, *, head: str, seq: int, config: PullConfig, deadline: float):
        self.member = endpoint.member
        self.head, self.seq = head, seq
        self.deadline = deadline
        self.broken = ""
        """Reason why there is no connection just now, if one broke."""
        self.heard_at = time.monotonic()
        """Moment of its last message (or of the first request to it), by `time.monotonic()`."""
        self.grew: Callable[[float], None] = lambda idle_s: None
        """Function that is called with the seconds since the donor had something new of the requested state, whenever
        the donor says so.
        """
        self.source = ByteSource(
            endpoint, dial, stall_timeout_s=config.stall_timeout_s, deadline=deadline, head=head, seq=seq
        )
        self._config = config
        self._failures = 0
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"chaos-pull-{self.member}", daemon=True)
        self._thread.start()

    # --- from any thread ------------------------------------------------------------------------------------------

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues work for the donor's thread, which does it after all earlier work; returns its future."""
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def close(self) -> None:
        """Cuts the connection and ends the thread as soon as the thread notices."""
        self.source.cut()
        self._work.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits, after `close`, until the donor's thread has ended and so writes nowhere any more."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            _fulfil(*item)
            del item  # what it holds of a state must not outlive it
        self.source.disconnect()

    # --- in the donor's thread ------------------------------------------------------------------------------------

    def _heard(self, frame: BulkFrame) -> None:
        self.heard_at = time.monotonic()
        if frame.type is not Type.REFUSED:
            self.grew(frame.offset / 1000 if frame.type is Type.PENDING else 0.0)

    def _connect(self) -> BulkSocket:
        fresh = self.source.channel is None
        channel = self.source.connect()
        self.broken = "" if fresh else self.broken
        return channel

    def _survives(self, error: Exception) -> bool:
        """Counts a failure of this donor; returns whether to dial it again."""
        self.source.disconnect()
        self._failures += 1
        self.broken = reason_of(error)
        silent = isinstance(error, TimeoutError) and not self._config.redial_silent  # it has had its chance
        return not silent and not self.source.closed and self._failures < self._config.max_failures

    def _wants_redial(self, work_queue: WorkQueue, error: Exception) -> bool:
        """Returns whether to dial the donor again after a failure in mid-transfer; if it cannot be dialled, waits a
        little first.
        """
        dialling, self.source.dialling = self.source.dialling, False
        if not dialling or isinstance(error, ConnectionRefusedError):  # refused: nobody listens there any more
            return self._survives(error)
        self.broken = reason_of(error)
        silent = time.monotonic() - self.heard_at
        if self.source.closed or silent >= self._config.redial_s:
            return False
        return work_queue.pause(min(_REDIAL_MOST_S, max(_REDIAL_S, silent / 2)), self.deadline)

    def ask(self, type_: Type, answer: Type) -> bytes:
        """Sends one control request to the donor and returns the answer; dials again if the connection breaks."""
        while True:
            try:
                payload = self._connect().ask(BulkFrame(type_, self.head, self.seq), answer, self._heard)
                self._failures = 0
                return payload
            except (OSError, WireError) as error:
                if not self._survives(error):
                    raise

    def digest(self) -> StateDigest:
        """Asks this donor for the hashes of its state at the pull's header."""
        data = self.ask(Type.GET_DIGEST, Type.DIGEST)
        try:
            document = json.loads(data)
            digest = StateDigest(document["state"], document["attached"], document["manifest"], document["nbytes"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WireError(f"malformed digest: {error!r}") from error
        texts = (digest.state, digest.attached, digest.manifest)
        if any(type(t) is not str for t in texts) or type(digest.nbytes) is not int:
            raise WireError(f"malformed digest: {digest}")
        return digest

    def deliver(self, work_queue: WorkQueue, sink: Sink, how: Deliver | None = None) -> None:
        """Takes jobs from the queue and receives their bytes from this donor until no job is left; raises the error
        that ended it early, which the work queue knows by then.

        Args:
            work_queue: Queue that gives the jobs.
            sink: Destination of the bytes.
            how: Function that delivers in another way than by requests on this connection.
        """
        try:
            while True:
                try:
                    if how is not None:
                        how(self, work_queue, sink)
                    else:
                        self.stream(work_queue, sink)
                    return
                except (OSError, WireError) as error:
                    if self.source.closed and work_queue.over:  # cut, since only overtaken requests were under way
                        self.source.disconnect()
                        work_queue.release(self.member)
                        return
                    if not self.source.dialling:
                        self.source.disconnect()  # from here on nothing more is received
                    work_queue.release(self.member)
                    if not self._wants_redial(work_queue, error):
                        raise
        except BaseException:
            self.source.disconnect()
            work_queue.dismiss(self.member)
            raise

    def stream(self, work_queue: WorkQueue, sink: Sink) -> None:
        """Requests the bytes of jobs over this connection and receives them, until no job is left."""
        under_way: deque[Request] = deque()
        self._connect()
        while True:
            while request := work_queue.take(
                self.member, depth=self._config.depth, wait=not under_way, deadline=self.deadline
            ):
                under_way.append(request)
                job = request.job
                self._connect().send(BulkFrame(sink.request, self.head, self.seq, job.start, job.nbytes))
            if not under_way:
                return
            self._receive(under_way.popleft(), work_queue, sink)

    def _receive(self, request: Request, work_queue: WorkQueue, sink: Sink) -> None:
        job = request.job
        channel = self._connect()
        asked = BulkFrame(sink.request, self.head, self.seq, job.start, job.nbytes)
        frame = channel.reply_to(asked, Type.DATA, self._heard)
        if (frame.offset, frame.length) != (job.start, job.nbytes) or frame.flags != sink.flags:
            raise WireError(
                f"the donor sent bytes [{frame.offset}, {frame.offset + frame.length}) with flags {frame.flags}, "
                f"asked were [{job.start}, {job.stop}) with {sink.flags}"
            )
        buffers = elsewhere(job) if request.copy else sink.land(job)
        channel.receive_into(buffers, lambda nbytes: work_queue.arrived(request, nbytes))
        self.heard_at = time.monotonic()
        self.judge(request, work_queue, sink, buffers, frame)

    def judge(
        self, request: Request, work_queue: WorkQueue, sink: Sink, buffers: list[memoryview], frame: BulkFrame
    ) -> None:
        """Verifies the received bytes of a request, and tells the work queue whether they are right.

        Raises:
            StateError: Too many were wrong, one after the other.
        """
        bad = sink.landed(request.job, buffers, frame, in_place=not request.copy)
        if bad is None or bad:
            work_queue.wrong(request, bad or ())
            self._failures += 1
            if self._failures >= self._config.max_failures:
                raise StateError(f"{self._failures} replies in a row arrived corrupted")
        else:
            self._failures = 0
            work_queue.done(request, buffers)


def _fulfil(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # whoever waits for the future decides
        future.set_exception(error)
        del future  # the error's traceback has this frame: what it holds would stay until garbage is collected
    else:
        future.set_result(result)


def elsewhere(job: Job) -> list[memoryview]:
    """Returns a separate buffer for a job, because another donor may be receiving the same job into its final place."""
    sizes = [piece.nbytes for piece in job.pieces] or [job.nbytes]
    whole = memoryview(bytearray(job.nbytes))
    views, at = [], 0
    for size in sizes:
        views.append(whole[at : at + size])
        at += size
    return views


Deliver = Callable[[Donor, WorkQueue, Sink], None]
"""Function that gets a donor's bytes by another way than by requests on its connection."""
