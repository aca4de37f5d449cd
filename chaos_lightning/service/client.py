"""Keeps a client's stream to a service open: a thread that looks for the server that leads, and reconnects by itself.

Theory of operation. The thread holds one gRPC stream at a time. What the stream says is read by a helper thread into an
inbox, and the inbox is this thread's only wait, so that messages, deadlines and the end come in one order. A stream
that breaks is opened again, with growing, jittered pauses and for as long as it takes (membership/leader_search.py).
What is said while no stream stands is dropped: a client says everything that still matters again when it is connected.

What is said on a stream and when, and how long silence is borne, is for its `StreamOwner` to decide. The usual one is
`ServiceClient`: a leader says something at once and then a few times a second, be it only an empty message, so that a
frozen one is noticed: gRPC's keepalive does not see that, as the kernel answers for a stopped process. Its first word
also says that it leads; whoever stands by ends the call and names the leader.

gRPC is used without asyncio here: grpc.aio has one event poller per process, and it loses events of all loops once any
of them was closed, be it the one of an earlier client or the user's own.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chaos_lightning.errors import ChaosError, RefusedError, SchedulerUnreachableError, WireError
from chaos_lightning.machine.forks import only_here
from chaos_lightning.membership.leader_search import Conversation, LeaderSearch
from chaos_lightning.security.credentials import Credentials, Secret, open_channel
from chaos_lightning.service.channel import CLIENT_OPTIONS, ENDED, SilentError, StandbyError, explain
from chaos_lightning.service.reviving import Reviver

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_log = logging.getLogger("chaos_lightning")

PULSE_S = 0.5
"""Longest time, s, between two messages of a leader to a `ServiceClient`."""
SILENT_S = 3.0
"""Seconds of silence after which a leader counts as frozen or cut off; half of it where others stand by."""
_HELD_UP_S = 0.5
"""Lateness, s, from which a thread that woke counts as held up itself, and does not judge the leader by its silence."""
_GOODBYE_TIMEOUT_S = 1.0
_MAX_OUTBOX = 65536
_CLOGGED = 16


@dataclass(frozen=True)
class StreamCall:
    """A service's call, as its clients make it.

    Attributes:
        path: Path of the call: "/SERVICE/CALL".
        what: Text that names the server, for errors.
        write: Encodes what the server is told.
        read: Decodes what the server says, None for an empty message; raises WireError.
        goodbye: Last message on a stream that is meant to end; None if its half-close says so.
        hello: Makes the first message that a `ServiceClient` says, before anybody else can say anything; None: its
            `on_connected` says it.
    """

    path: str
    what: str
    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]
    goodbye: bytes | None = None
    hello: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class _Over:
    """Item of the inbox: a stream has ended; `reason` is None if the server closed it in good order."""

    talk: Talk
    reason: ChaosError | None


@dataclass(frozen=True, slots=True)
class _Close:
    """Item of the inbox by which `close` asks the thread to end."""


class Talk:
    """One stream to a server: an outbox that gRPC sends from, and a thread that reads answers into the client's inbox.

    Args:
        channel: Channel to the server.
        endpoint: HOST:PORT of the server.
        secret: Credentials of the client.
        call: The call to make.
        inbox: Inbox of the client.
    """

    def __init__(
        self, channel: grpc.Channel, endpoint: str, secret: Credentials, call: StreamCall, inbox: queue.SimpleQueue[Any]
    ) -> None:
        self.endpoint = endpoint
        self.said = False
        """Whether anything was said on it."""
        self._secret = secret
        self._inbox = inbox
        self._call = call
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        made: Any = channel.stream_stream(call.path, None, None)  # bytes both ways
        self._stream: Any = made(iter(self._outbox.get, None), metadata=secret.metadata())
        threading.Thread(target=self._read, name="chaos-reader", daemon=True).start()

    def say(self, message: Any) -> None:
        """Queues a message. If the server reads nothing and too many wait, the stream is cut: whatever matters is said
        again on the next one.

        Raises:
            TypeError: The message does not belong to this call.
        """
        self.said = True
        self._outbox.put(self._call.write(message))
        if self._outbox.qsize() > _MAX_OUTBOX:
            self._stream.cancel()

    @property
    def clogged(self) -> bool:
        """Whether messages pile up because the server does not read its stream."""
        return self._outbox.qsize() > _CLOGGED

    def goodbye(self) -> None:
        """Tells the server that nothing more will be sent, and closes this side of the stream."""
        if self._call.goodbye is not None:
            self._outbox.put(self._call.goodbye)
        self._outbox.put(None)

    def end(self) -> None:
        """Cancels the stream, if it is still open, and lets gRPC's sending thread end."""
        self._stream.cancel()
        self._outbox.put(None)

    def _read(self) -> None:
        reason: ChaosError | None = None
        probe_s = 1.0
        try:
            for data in self._stream:
                probe_s = 0.0  # who was let in need not ask whether the certificates are right
                self._inbox.put((self, self._call.read(data)))
        except grpc.RpcError as error:
            reason = explain(error, self.endpoint, self._secret, probe_s, self._call.what)
            if error.code() is ENDED:
                what = f"the {self._call.what} at {self.endpoint}"
                reason = SchedulerUnreachableError(f"{what} leads no more: {error.details()}")
                _log.warning("%s", reason)
        except WireError as error:
            reason = error
        finally:
            self._inbox.put(_Over(self, reason))


class StreamOwner(Protocol):
    """Interface of a client's conduct on its streams. All methods are called in the client's thread."""

    due: float
    """Time (monotonic, s) at which `look` is called though nothing was heard."""

    def begin(self, talk: Talk, now: float, patience_s: float) -> None:
        """Takes a stream that is being opened; the server must answer within `patience_s`."""

    def hear(self, talk: Talk, message: Any, now: float) -> ChaosError | None:
        """Takes a message; returns why the stream is to be left, or None."""

    def look(self, talk: Talk, now: float, *, idle: bool) -> ChaosError | None:
        """Does what is due, after each message and at `due`; returns why the stream is to be left, or None.

        Args:
            talk: The stream.
            now: Time (monotonic, s).
            idle: Whether nothing lies in the inbox: it was not this process that was frozen.
        """

    def ended(self, reason: ChaosError) -> Conversation | None:
        """Takes the end of a stream, or of the attempt to open one; returns how it went, or None to end the client."""

    def waits(self, reason: ChaosError) -> bool:
        """Returns whether to try again, after a pause."""

    def not_revived(self, error: ChaosError) -> None:
        """Takes why no server could be started."""

    def broke(self, error: Exception) -> None:
        """Takes an error of ours, which ends the client."""


class ClientThread(threading.Thread):
    """Thread that keeps a stream to a service open. `start` it, `say` from any thread, `close` it.

    Args:
        endpoints: HOST:PORT of the server, or of all that stand by for each other.
        secret: Token (b"" for none), or credentials.
        call: The call that it makes.
        owner: Decides what is said, and what silence means.
        revive: Called in a helper thread when no server answers; may start one (hosting.py).
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        secret: Secret,
        call: StreamCall,
        owner: StreamOwner,
        revive: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name="chaos-client", daemon=True)
        self.search = LeaderSearch(endpoints)
        self.talk: Talk | None = None
        """Stream that `say` uses; set by the owner once the server has let it in."""
        self._secret = Credentials.of(secret)
        self._call = call
        self._owner = owner
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reviver = Reviver(revive, self._inbox.put)
        self._stopping = False

    # ------------------------------------------------------------------ any thread

    def say(self, message: Any) -> None:
        """Sends a message soon if a stream stands; otherwise drops it (see the module).

        Raises:
            TypeError: The message does not belong to this call.
        """
        talk = self.talk
        if talk is not None:
            talk.say(message)

    def close(self, timeout_s: float = 3.0) -> None:
        """Ends the stream once all that was said is sent, and the thread. Idempotent; may be called before `start` and
        in the owner's methods.
        """
        self._stopping = True
        self._inbox.put(_Close())
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout_s)

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        try:
            self._keep_talking()
        except Exception as error:
            self._owner.broke(error)
            raise

    def _keep_talking(self) -> None:
        while not self._stopping:
            reason = self._converse()
            if self._stopping or (ended := self._owner.ended(reason)) is None:
                return
            if ended.answered:
                self._reviver.answered()
            pause_s = self.search.ended(ended, time.monotonic(), random.random())
            if not pause_s:
                continue
            self._reviver.try_it(self.search.failures)
            if not self._owner.waits(reason):
                return
            deadline = time.monotonic() + pause_s
            while not self._stopping and (left := deadline - time.monotonic()) > 0:
                self._next(left)

    def _next(self, timeout_s: float) -> Any:
        """Waits for the next item of the inbox; returns None after the timeout."""
        try:
            item = self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(item, ChaosError):
            self._owner.not_revived(item)
        return item

    def _converse(self) -> ChaosError:
        """Opens a stream, and serves it until it ends; returns the reason for the end."""
        here = self.search.endpoint
        with contextlib.ExitStack() as meanwhile:
            try:
                meanwhile.enter_context(only_here(here))
                channel = meanwhile.enter_context(open_channel(here, self._secret, CLIENT_OPTIONS))
            except RefusedError as error:
                return error  # this process's certificate has expired
            except ChaosError as error:
                return SchedulerUnreachableError(str(error))
            talk = Talk(channel, here, self._secret, self._call, self._inbox)
            try:
                return self._attend(talk)
            except (RefusedError, WireError) as error:
                return error  # what is to be said fits into no message, say
            finally:
                self.talk = None
                talk.end()

    def _attend(self, talk: Talk) -> ChaosError:
        owner = self._owner
        owner.begin(talk, time.monotonic(), self.search.answer_timeout_s())
        while True:
            item = self._next(owner.due - time.monotonic())
            now = time.monotonic()
            reason = None
            if isinstance(item, _Close) or (self._stopping and item is None):
                self.take_leave(talk)
                return ChaosError("closed by this process")
            if isinstance(item, _Over):
                if item.talk is talk:
                    what = self._call.what
                    return item.reason or SchedulerUnreachableError(f"the {what} at {talk.endpoint} closed the stream")
            elif isinstance(item, tuple) and item[0] is talk:
                reason = owner.hear(talk, item[1], now)
            reason = reason or owner.look(talk, now, idle=item is None)
            if reason is not None:
                return reason

    def take_leave(self, talk: Talk) -> None:
        """Says goodbye, if anything was said, and waits a moment until the server has read it. For the owner."""
        self.talk = None
        if not talk.said:
            return
        talk.goodbye()
        deadline = time.monotonic() + _GOODBYE_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            item = self._next(left)
            if isinstance(item, _Over) and item.talk is talk:
                return


class ServiceClient:
    """StreamOwner that says hello once the leader has spoken, and leaves one that is silent.

    Args:
        endpoints: HOST:PORT of the server, or of all that stand by for each other.
        secret: Token (b"" for none), or credentials.
        call: The call that it makes.
        on_connected: Called when a stream to the acting leader is open: messages from now on are sent.
        on_message: Takes each message of the leader.
        on_disconnected: Called with the reason when that stream has ended.
        on_trouble: Takes the reason why no leader could be reached or let this process in, when it is another one than
            before. A RefusedError will not go away by itself.
        revive: Called in a helper thread when no leader answers; may start a server.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        secret: Secret,
        call: StreamCall,
        *,
        on_connected: Callable[[], None],
        on_message: Callable[[Any], None],
        on_disconnected: Callable[[str], None],
        on_trouble: Callable[[ChaosError], None] = lambda error: None,
        revive: Callable[[], object] | None = None,
    ) -> None:
        self._hello = call.hello
        self._client = ClientThread(endpoints, secret, call, self, revive)
        self._what = call.what
        self._on_connected = on_connected
        self._on_message = on_message
        self._on_disconnected = on_disconnected
        self._on_trouble = on_trouble
        self._silent_s = SILENT_S if len(endpoints) == 1 else SILENT_S / 2
        self._told = ""
        self._answered = False
        self._patience_s = 0.0
        self.due = 0.0
        self.start = self._client.start
        self.say = self._client.say
        self.close = self._client.close
        self.is_alive = self._client.is_alive
        self.join = self._client.join

    def begin(self, talk: Talk, now: float, patience_s: float) -> None:
        """Waits for the leader's first word."""
        self._answered = False
        self._patience_s, self.due = patience_s, now + patience_s

    def hear(self, talk: Talk, message: Any, now: float) -> ChaosError | None:
        """Passes on a message; the first one says that the stream stands."""
        if not self._answered:
            self._answered = True
            if self._hello is not None:
                talk.say(self._hello())
            self._client.talk = talk
            self._on_connected()
        if message is not None:
            self._on_message(message)
        self._patience_s = self._silent_s
        self.due = time.monotonic() + self._patience_s
        return None

    def look(self, talk: Talk, now: float, *, idle: bool) -> ChaosError | None:
        """Leaves a leader that was silent for too long, unless this process may have slept itself."""
        if not idle or now < self.due:
            return None
        if now - self.due > _HELD_UP_S:
            self.due = now + self._patience_s
            return None
        return SilentError(f"the {self._what} at {talk.endpoint} was silent for {self._patience_s:g} s")

    def ended(self, reason: ChaosError) -> Conversation | None:
        """Tells of a stream that stood, or of the trouble why none did."""
        answered, self._answered = self._answered, False
        if answered:
            self._on_disconnected(str(reason))
            if not isinstance(reason, RefusedError):
                self._told = ""
        if isinstance(reason, RefusedError) or not (answered or isinstance(reason, StandbyError)):
            self.not_revived(reason)
        standby = isinstance(reason, StandbyError)
        leader = reason.leader if isinstance(reason, StandbyError) else ""
        return Conversation(answered, isinstance(reason, SilentError), standby, leader)

    def waits(self, reason: ChaosError) -> bool:
        """Tries for ever."""
        return True

    def not_revived(self, error: ChaosError) -> None:
        """Passes on a trouble, once."""
        if str(error) != self._told:
            self._told = str(error)
            self._on_trouble(error)

    def broke(self, error: Exception) -> None:
        """Leaves it to threading to show the error."""
