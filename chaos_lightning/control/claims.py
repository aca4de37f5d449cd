"""Numbers processes that are setting up and are in no view yet; number 0 acts as rank zero until there is a view.

Theory of operation. All go by the lock files of one machine, that of the scheduler which is named last: each process
holds the lowest number that is free, and its end, however it comes, frees it. On that machine they lock by themselves,
so that it works before any scheduler runs. A process elsewhere asks that scheduler, whether it leads or stands by; the
scheduler locks for it, and unlocks when the stream of the call ends. A machine may vanish without a word. So the caller
repeats its request every few seconds, and the scheduler ends the call when it has heard nothing for `SILENCE_S`. The
server's pings would not do: they end members' streams, too (service/channel.py). Where the scheduler dies, or a caller
is stopped for longer and goes on, the number is free: somebody else may take it, which costs no more than a second log.

Both sides know the files by job, port and user, so the scheduler must run as the user whose processes set up beside it,
and with the same TMPDIR.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chaos_lightning.control.service_pb2_grpc import SchedulerStub
from chaos_lightning.errors import ChaosError, SchedulerUnreachableError, WireError
from chaos_lightning.machine.forks import close_in_children, keep_in_children, only_here
from chaos_lightning.machine.lock_files import lock_path, open_lock
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.security.credentials import Credentials, Secret, open_channel
from chaos_lightning.service.channel import CLIENT_OPTIONS, END_OF_STREAM, explain

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

MOST = 4096
"""Largest number; those that come when all below are held share it."""
WORD_S = 5.0
"""Interval (s) at which the holder of a number says that it holds it."""
SILENCE_S = 20.0
"""Seconds of silence after which a number is free: a collection, say, may hold the interpreter's lock for a while."""
_END_S = 1.0
"""Seconds that a scheduler may take to confirm the end of a claim."""


@dataclass(frozen=True)
class Claim:
    """Number that a process holds until it calls `release`, once; a forked child's call does nothing."""

    number: int
    release: Callable[[], object]


# ------------------------------------------------------------------ on the scheduler's machine


def lock_lowest(job: str, port: int, held: Container[int] = ()) -> Claim:
    """Takes the lowest number that no process on this machine holds.

    Args:
        job: Name of the job.
        port: Port of the last scheduler in the list of endpoints.
        held: Numbers that are known to be held, and need not be tried.

    Raises:
        ConfigurationError: A lock file is a link, or not this user's.
    """
    number = 0
    while number < MOST:
        if number in held:
            number += 1
            continue
        path = lock_path(f"{job}-{port}-founder-{number}")
        file = open_lock(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            number += 1
            continue
        if _is(file, path):
            close_in_children(file)
            return Claim(number, partial(_unlock, file, path, os.getpid()))
        os.close(file)  # whoever had it took the file away with it
    return Claim(MOST, lambda: None)


def _is(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _unlock(file: int, path: Path, owner: int) -> None:
    """Frees a number, if called in the process that took it; its forked children have closed the lock file already."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            path.unlink()
        keep_in_children(file)
        os.close(file)


class Claims:
    """Numbers that a scheduler holds for processes on other machines, one for each connection.

    Args:
        job: Name of the scheduler's job.
        patience_s: Seconds after which a caller that has sent no request is refused.
    """

    def __init__(self, job: str, patience_s: float) -> None:
        self._job = job
        self._patience_s = patience_s
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def hold(self, context: Any, port: int) -> None:
        """Holds a number for a caller until its call ends; `port` is where this scheduler listens."""
        peer, job = context.peer(), self._job
        request: Any = END_OF_STREAM
        with contextlib.suppress(TimeoutError):
            request = await asyncio.wait_for(context.read(), self._patience_s)
        if request is END_OF_STREAM:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a claim that names no job")
        if request.job != job:
            words = f"here is the scheduler of job {job!r}, not of {request.job!r:.80}"
            await context.abort(grpc.StatusCode.NOT_FOUND, words)
        if peer in self._held:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this connection has a number already")
        try:
            # Not in a thread: a call that is cancelled meanwhile would leave the lock to nobody.
            claim = lock_lowest(job, port, set(self._held.values()))
        except ChaosError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        self._held[peer] = claim.number
        try:
            await context.write(chaos_pb2.ClaimReply(number=claim.number))
            with contextlib.suppress(TimeoutError):
                while await asyncio.wait_for(context.read(), SILENCE_S) is not END_OF_STREAM:
                    pass
        finally:
            del self._held[peer]
            claim.release()


# ------------------------------------------------------------------ elsewhere


def ask(endpoint: str, secret: Secret, job: str, timeout_s: float) -> Claim:
    """Asks the scheduler at `endpoint` to hold a number for this process; returns the number.

    Raises:
        SchedulerUnreachableError: The scheduler did not answer in time.
        RefusedError: The scheduler serves another job, does not accept the credentials (or we not its), or knows no
            such call.
        WireError: The scheduler's answer has no valid number.
    """
    stream = _Stream(endpoint, Credentials.of(secret), job, timeout_s)
    stream.start()
    return Claim(stream.number(), partial(stream.end, os.getpid()))


class _Stream(threading.Thread):
    """Call during which a scheduler holds a number for this process, until `end`.

    Its thread alone knows gRPC's objects: a forked child, where it does not go on, must not end them.
    """

    def __init__(self, endpoint: str, secret: Credentials, job: str, timeout_s: float) -> None:
        super().__init__(name="chaos-claim", daemon=True)
        self._endpoint = endpoint
        self._secret = secret
        self._job = job
        self._timeout_s = timeout_s
        self._said: queue.SimpleQueue[int | ChaosError] = queue.SimpleQueue()
        self._over = threading.Event()

    def number(self) -> int:
        """Waits for the number from the scheduler; may be called once."""
        try:
            found = self._said.get(timeout=self._timeout_s + _END_S)
        except queue.Empty:
            self._over.set()
            raise SchedulerUnreachableError(f"no scheduler answered at {self._endpoint}") from None
        if isinstance(found, ChaosError):
            raise found
        return found

    def end(self, owner: int) -> None:
        """Ends the call, and waits until the number is free, so that a process that moves may have it again right
        away.
        """
        if os.getpid() == owner:
            self._over.set()
            if threading.current_thread() is not self:  # a garbage collection may come to any thread
                self.join(_END_S)

    def run(self) -> None:
        try:
            with only_here(self._endpoint), open_channel(self._endpoint, self._secret, CLIENT_OPTIONS) as channel:
                self._call(channel)
        except grpc.RpcError as error:
            self._said.put(explain(error, self._endpoint, timeout_s=0.0))
        except ChaosError as error:
            self._said.put(error)

    def _call(self, channel: grpc.Channel) -> None:
        says: queue.SimpleQueue[Any] = queue.SimpleQueue()
        request = chaos_pb2.ClaimRequest(job=self._job)
        says.put(request)
        call = SchedulerStub(channel).Claim(iter(says.get, None), metadata=self._secret.metadata())
        try:
            with _no_longer_than(self._timeout_s, call):
                reply = next(call, None)
            if reply is None or not 0 <= reply.number <= MOST:
                raise WireError(f"{self._endpoint} gave no number from 0 to {MOST}, but {reply}")
            self._said.put(reply.number)
            while not self._over.wait(WORD_S) and call.is_active():
                says.put(request)
            says.put(None)
            with _no_longer_than(_END_S, call):
                next(call, None)
        finally:
            says.put(None)
            call.cancel()


@contextlib.contextmanager
def _no_longer_than(seconds: float, call: Any) -> Iterator[None]:
    timer = threading.Timer(seconds, call.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
