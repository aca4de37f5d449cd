"""The joiner's side of one donor: a connection, and the thread that uses it.

Theory of operation. A `Donor` is dialled by its own thread and only that thread touches its socket, so a donor that
hangs holds up nobody else; `close()` from outside cuts the connection and thereby ends any wait. Requests go out up
to `depth` ahead of the replies. A connection that breaks or garbles a frame is dialled again a few times (the count
starts anew whenever something arrived intact); a donor that refuses, by contrast, has said so and is done with.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from chaos_lightning.errors import ChaosError, RefusedError, StateError, WireError
from chaos_lightning.replication import bulk
from chaos_lightning.replication.bulk import BulkSocket, Frame, Type
from chaos_lightning.replication.policy import Board, Job
from chaos_lightning.replication.table import Piece

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a donor listens."""

    member: str
    address: str
    port: int


Dial = Callable[[Endpoint], socket.socket]
"""Returns a connected, authenticated, blocking socket; bounded in time by itself."""


@dataclass(frozen=True, slots=True)
class Digest:
    """What a donor says it has."""

    state: str
    attached: str
    manifest: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class PullConfig:
    """Waits and sizes of the joiner's side."""

    deadline_s: float = 120.0
    """For the whole pull."""
    stall_timeout_s: float = 5.0
    """A donor that sends nothing for so long, not even that it is still waiting, is given up."""
    survey_grace_s: float = 1.5
    """A donor silent for so long is not waited for with the vote on the state hash, if others have answered; one that
    says it is on its way to the header is waited for four times as long. Either may still deliver later."""
    depth: int = 2
    """Requests under way per donor."""
    request_nbytes: int = 4 << 20
    max_failures: int = 3
    """Broken connections or corrupted replies in a row after which a donor is given up."""
    max_attached_nbytes: int = 4 << 30
    """Tensors that a manifest refers to are made here for the donor; refuse more than this."""

    def __post_init__(self) -> None:
        for name in ("deadline_s", "stall_timeout_s", "survey_grace_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("depth", "max_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.request_nbytes <= bulk.MAX_RANGE_NBYTES:
            raise ValueError(f"request_nbytes must be 1..{bulk.MAX_RANGE_NBYTES}, got {self.request_nbytes}")


class Sink(Protocol):
    """Where received ranges go."""

    request: Type
    flags: int
    """Flags that its DATA frames must have."""

    def land(self, job: Job) -> list[memoryview]:
        """Memory for the job's bytes, in order."""
        ...

    def landed(self, job: Job, buffers: list[memoryview], frame: Frame) -> list[Piece] | None:
        """Verify what arrived and bring it to its place; the corrupted pieces, or None if all of it is corrupted."""
        ...


class Donor:
    """One donor, its connection and its thread."""

    def __init__(self, endpoint: Endpoint, dial: Dial, *, head: str, seq: int, config: PullConfig, deadline: float):
        self.endpoint = endpoint
        self.member = endpoint.member
        self._dial = dial
        self._head, self._seq = head, seq
        self._config = config
        self._deadline = deadline
        self._channel: BulkSocket | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._failures = 0
        self.heard_at = time.monotonic()
        """When it last said something (or was first asked)."""
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"chaos-pull-{self.member}", daemon=True)
        self._thread.start()

    # --- from any thread ------------------------------------------------------------------------------------------

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have the donor's thread do this, after what it was given before."""
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def close(self) -> None:
        """Cut the connection and end the thread as soon as it notices."""
        with self._lock:
            self._closed = True
            channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)
        self._work.put(None)

    def join(self, timeout_s: float) -> None:
        """After `close`: wait until its thread writes nowhere any more."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                result = work()
            except BaseException as error:  # whoever waits for the future decides
                future.set_exception(error)
            else:
                future.set_result(result)
        self._disconnect()

    # --- in the donor's thread ------------------------------------------------------------------------------------

    def _connect(self) -> BulkSocket:
        if self._channel is None:
            sock = self._dial(self.endpoint)
            channel = BulkSocket(sock, stall_timeout_s=self._config.stall_timeout_s, deadline=self._deadline)
            with self._lock:
                if not self._closed:
                    self._channel = channel
                    return channel
            sock.close()
            raise ConnectionError("the pull is over")
        return self._channel

    def _disconnect(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.sock.close()

    def _survives(self, error: Exception) -> bool:
        """After a failure: whether to dial this donor again."""
        self._disconnect()
        self._failures += 1
        silent = isinstance(error, TimeoutError)  # it has had its chance
        return not silent and not self._closed and self._failures < self._config.max_failures

    def ask(self, type_: Type, answer: Type) -> bytes:
        """One control request, dialling again if the connection breaks."""
        while True:
            try:
                channel = self._connect()
                channel.send(Frame(type_, self._head, self._seq))
                frame = self._reply(channel, answer)
                payload = channel.receive_payload(frame)
                self._failures = 0
                return payload
            except (OSError, WireError) as error:
                if not self._survives(error):
                    raise

    def digest(self) -> Digest:
        """What this donor has for the head."""
        data = self.ask(Type.GET_DIGEST, Type.DIGEST)
        try:
            document = json.loads(data)
            digest = Digest(document["state"], document["attached"], document["manifest"], document["nbytes"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WireError(f"malformed digest: {error!r}") from error
        texts = (digest.state, digest.attached, digest.manifest)
        if any(type(t) is not str for t in texts) or type(digest.nbytes) is not int:
            raise WireError(f"malformed digest: {digest}")
        return digest

    def _reply(self, channel: BulkSocket, answer: Type) -> Frame:
        while True:
            frame = channel.receive_header()
            if frame is None:
                raise ConnectionError("the donor closed the connection")
            self.heard_at = time.monotonic()
            if (frame.head, frame.seq) != (self._head, self._seq):
                raise WireError(
                    f"the donor answered for header {frame.head} (slot {frame.seq}), asked was {self._head} "
                    f"(slot {self._seq})"
                )
            if frame.type is Type.REFUSED:
                raise RefusedError(channel.receive_payload(frame).decode(errors="replace"))
            if frame.type is answer:
                return frame
            if frame.type is not Type.PENDING:
                raise WireError(f"the donor answered {frame.type.name} where {answer.name} was expected")

    def deliver(self, board: Board, sink: Sink) -> None:
        """Take jobs and have them sent until none are left. Raises what ended it early; the board knows already."""
        try:
            while True:
                try:
                    self._stream(board, sink)
                    return
                except (OSError, WireError) as error:
                    if not self._survives(error):
                        raise
                    board.release(self.member)
        except BaseException:
            board.dismiss(self.member)
            raise

    def _stream(self, board: Board, sink: Sink) -> None:
        under_way: deque[Job] = deque()
        mark = time.monotonic()
        while True:
            while len(under_way) < self._config.depth:
                job = board.take(self.member, wait=not under_way, deadline=self._deadline)
                if job is None:
                    break
                if not under_way:
                    mark = time.monotonic()
                under_way.append(job)
                self._connect().send(Frame(sink.request, self._head, self._seq, job.start, job.nbytes))
            if not under_way:
                return
            job = under_way.popleft()
            frame = self._reply(self._connect(), Type.DATA)
            if (frame.offset, frame.length) != (job.start, job.nbytes) or frame.flags != sink.flags:
                raise WireError(
                    f"the donor sent bytes [{frame.offset}, {frame.offset + frame.length}) with flags {frame.flags}, "
                    f"asked were [{job.start}, {job.stop}) with {sink.flags}"
                )
            buffers = sink.land(job)
            self._connect().receive_into(buffers)
            bad = sink.landed(job, buffers, frame)
            now = time.monotonic()
            if bad is None or bad:
                board.wrong(self.member, job, bad or ())
                self._failures += 1
                if self._failures >= self._config.max_failures:
                    raise StateError(f"{self._failures} replies in a row arrived corrupted")
            else:
                self._failures = 0
                board.done(self.member, job, now - mark)
            mark = now


def reason_of(error: BaseException) -> str:
    """A donor's failure in words."""
    if isinstance(error, TimeoutError):
        return "it sent nothing for too long"
    if isinstance(error, ChaosError):
        return str(error)
    return f"{type(error).__name__}: {error}"
