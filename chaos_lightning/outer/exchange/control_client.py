"""Keeps the stream of a cluster or follower to the leader of outer sync open, in a thread of its own; also has the two
single calls to a leader: fetch facts, end the job.

Theory of operation. The thread holds one gRPC stream at a time. A leader says something at once and then a few times a
second, be it only an envelope with no message in it, so that a frozen one is noticed: gRPC's keepalive does not see
that, as the kernel answers for a stopped process. Its first word also says that it leads: whoever stands by ends the
call and names the leader. A stream that breaks is opened again, with growing pauses of up to half a second and for as
long as it takes. What `say` is given while there is no stream is dropped: the machines say all that still matters again
when they are connected.

gRPC is used without asyncio here, for the reasons that control/agent.py tells.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from chaos_lightning.control.channel import (
    CLIENT_OPTIONS,
    SilentError,
    StandbyError,
    ask_leader,
    explain,
    facts_of_leader,
)
from chaos_lightning.control.reviving import Reviver
from chaos_lightning.errors import ChaosError, RefusedError, SchedulerUnreachableError, WireError
from chaos_lightning.machine.forks import only_here
from chaos_lightning.membership.leader_search import Conversation, LeaderSearch
from chaos_lightning.outer.exchange import outer_pb2
from chaos_lightning.outer.exchange.outer_pb2_grpc import ParameterServerStub
from chaos_lightning.outer.exchange.vocabulary import FROM_CLUSTER, FROM_FOLLOWER, TO_CLUSTER, TO_FOLLOWER
from chaos_lightning.security.credentials import Credentials, Secret, open_channel

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_log = logging.getLogger("chaos_lightning")

WHAT = "parameter server"
ENDED = grpc.StatusCode.FAILED_PRECONDITION
"""gRPC status with which a deposed leader closes its streams."""

PULSE_S = 0.5
"""Longest time, s, between two messages of a leader on each stream."""
SILENT_S = 3.0
"""Seconds of silence after which a leader counts as frozen or cut off; half of it where others stand by."""
_HELD_UP_S = 0.5
"""Lateness, s, from which a thread that woke counts as held up itself, and does not judge the leader by its silence."""
_GOODBYE_TIMEOUT_S = 1.0
_MAX_OUTBOX = 65536

_WORDS = {"Attend": (FROM_CLUSTER, TO_CLUSTER), "Follow": (FROM_FOLLOWER, TO_FOLLOWER)}


class _Over:
    """Item of the inbox: a stream has ended. `reason` is None if the leader closed it in good order."""

    def __init__(self, stream: _Stream, reason: ChaosError | None) -> None:
        self.stream = stream
        self.reason = reason


class _Close:
    """Item of the inbox with which `close` ends the thread."""


class _Stream:
    """One gRPC stream to a leader: messages to send wait in an outbox, and a thread reads received ones into the
    client's inbox.
    """

    def __init__(
        self, channel: grpc.Channel, endpoint: str, secret: Credentials, call: str, inbox: queue.SimpleQueue[Any]
    ) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._inbox = inbox
        self._to_leader, self._from_leader = _WORDS[call]
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stub = ParameterServerStub(channel)
        self._call = getattr(stub, call)(iter(self._outbox.get, None), metadata=secret.metadata())
        threading.Thread(target=self._read, name="chaos-outer-reader", daemon=True).start()

    def say(self, message: Any) -> None:
        """Queues a message. If the leader reads nothing and the queue is too long, the stream is cut: whatever matters
        is sent again on the next stream.
        """
        self._outbox.put(self._to_leader.wrap(message))
        if self._outbox.qsize() > _MAX_OUTBOX:
            self._call.cancel()

    def half_close(self) -> None:
        """Ends the sending side of the stream once all queued messages are sent."""
        self._outbox.put(None)

    def end(self) -> None:
        """Cuts the stream, if it is still open, and ends gRPC's sending thread."""
        self._call.cancel()
        self._outbox.put(None)

    def _read(self) -> None:
        reason: ChaosError | None = None
        probe_s = 1.0
        try:
            for envelope in self._call:
                probe_s = 0.0  # who was let in need not ask whether the certificates are right
                empty = envelope.WhichOneof("message") is None
                self._inbox.put((self, None if empty else self._from_leader.unwrap(envelope)))
        except grpc.RpcError as error:
            reason = explain(error, self._endpoint, self._secret, probe_s, WHAT)
            if error.code() is ENDED:
                reason = SchedulerUnreachableError(f"the {WHAT} at {self._endpoint} leads no more: {error.details()}")
                _log.warning("%s", reason)
        except WireError as error:
            reason = error
        finally:
            self._inbox.put(_Over(self, reason))


class ControlClient(threading.Thread):
    """Thread that keeps a stream to the leader open. `start` it, `say` from any thread, `close` it. It makes all
    callbacks, one at a time.

    Args:
        endpoints: HOST:PORT of the leader, or of all leaders that stand by for each other.
        secret: Cluster token (b"" for none), or credentials.
        call: "Attend" for a cluster, "Follow" for a follower.
        on_connected: Called when a stream to the acting leader is open: messages from now on are sent.
        on_message: Takes each message of the leader.
        on_disconnected: Called with the reason when that stream has ended.
        on_trouble: Takes the reason why no leader could be reached or let this process in, when it is another one than
            before. A RefusedError will not go away by itself.
        revive: Called in a helper thread when no leader answers; may start a server (outer/cluster/hosting.py).
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        secret: Secret,
        *,
        call: Literal["Attend", "Follow"],
        on_connected: Callable[[], None],
        on_message: Callable[[Any], None],
        on_disconnected: Callable[[str], None],
        on_trouble: Callable[[ChaosError], None] = lambda error: None,
        revive: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name=f"chaos-outer-{call.lower()}", daemon=True)
        self._search = LeaderSearch(endpoints)
        self._secret = Credentials.of(secret)
        self._call = call
        self._on_connected = on_connected
        self._on_message = on_message
        self._on_disconnected = on_disconnected
        self._on_trouble = on_trouble
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reviver = Reviver(revive, self._inbox.put)
        self._silent_s = SILENT_S if len(endpoints) == 1 else SILENT_S / 2
        self._stream: _Stream | None = None
        """Stream that `say` uses; None if none stands."""
        self._stopping = False
        self._told = ""

    # ------------------------------------------------------------------ any thread

    def say(self, message: Any) -> None:
        """Queues a message for sending if a stream is open; otherwise drops it (see the module).

        Raises:
            TypeError: The message does not belong to this call.
        """
        stream = self._stream
        if stream is not None:
            stream.say(message)

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the stream once all queued messages are sent, and then the thread. Idempotent; may be called from
        callbacks.
        """
        self._stopping = True
        self._inbox.put(_Close())
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout_s)

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        while not self._stopping:
            answered, reason = self._converse()
            if self._stopping:
                return
            if answered:
                self._reviver.answered()
                self._on_disconnected(str(reason))
                if isinstance(reason, RefusedError):
                    self._tell(reason)
                else:
                    self._told = ""
            elif not isinstance(reason, StandbyError):
                self._tell(reason)
            leader = reason.leader if isinstance(reason, StandbyError) else ""
            standby, silent = isinstance(reason, StandbyError), isinstance(reason, SilentError)
            pause_s = self._search.ended(
                Conversation(answered, silent, standby, leader), time.monotonic(), random.random()
            )
            if pause_s:
                self._reviver.try_it(self._search.failures)
            deadline = time.monotonic() + pause_s
            while not self._stopping and (left := deadline - time.monotonic()) > 0:
                self._next(left)

    def _tell(self, reason: ChaosError) -> None:
        if str(reason) != self._told:
            self._told = str(reason)
            self._on_trouble(reason)

    def _next(self, timeout_s: float) -> Any:
        """Returns the next item of the inbox; None after the timeout."""
        try:
            item = self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(item, ChaosError):
            self._tell(item)
        return item

    def _converse(self) -> tuple[bool, ChaosError]:
        """Opens one stream and reads it until it ends; returns whether the leader said anything, and why the stream
        ended.
        """
        here = self._search.endpoint
        with contextlib.ExitStack() as meanwhile:
            try:
                meanwhile.enter_context(only_here(here))
                channel = meanwhile.enter_context(open_channel(here, self._secret, CLIENT_OPTIONS))
            except RefusedError as error:
                return False, error  # this process's certificate has expired
            except ChaosError as error:
                return False, SchedulerUnreachableError(str(error))
            stream = _Stream(channel, here, self._secret, self._call, self._inbox)
            try:
                reason = self._listen(stream, here)
                return self._stream is not None, reason
            finally:
                self._stream = None
                stream.end()

    def _listen(self, stream: _Stream, here: str) -> ChaosError:
        patience_s = self._search.answer_timeout_s()
        due = time.monotonic() + patience_s
        while True:
            item = self._next(due - time.monotonic())
            now = time.monotonic()
            if self._stopping:
                self._take_leave(stream)
                return ChaosError("closed by this process")
            if isinstance(item, _Over):
                if item.stream is stream:
                    return item.reason or SchedulerUnreachableError(f"the {WHAT} at {here} closed the stream")
            elif isinstance(item, tuple) and item[0] is stream:
                if self._stream is None:
                    self._stream = stream
                    self._on_connected()
                if item[1] is not None:
                    self._on_message(item[1])
                patience_s = self._silent_s
                due = time.monotonic() + patience_s
            elif item is None and now - due > _HELD_UP_S:
                due = now + patience_s
            elif item is None and now >= due:
                return SilentError(f"the {WHAT} at {here} was silent for {patience_s:g} s")

    def _take_leave(self, stream: _Stream) -> None:
        """Closes the sending side, and waits a moment until the leader has read everything."""
        if self._stream is not stream:
            return
        stream.half_close()
        deadline = time.monotonic() + _GOODBYE_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            item = self._next(left)
            if isinstance(item, _Over) and item.stream is stream:
                return


def fetch_facts(endpoints: str, secret: Secret, timeout_s: float = 5.0, *, follow: bool = True) -> dict[str, Any]:
    """Asks a leader for facts about itself and its job (outer/follower/snapshot.py).

    Args:
        endpoints: HOST:PORT of the leader; several with commas.
        secret: Cluster token, or credentials.
        timeout_s: Seconds for the whole call.
        follow: Whether to ask the acting leader, if that is another one and it answers.

    Raises:
        SchedulerUnreachableError: No server answered in time.
        RefusedError: A server answered that does not accept the credentials, whose credentials are not accepted here,
            or that is no parameter server.
    """

    def facts(place: str, left_s: float) -> dict[str, Any]:
        reply = ask_leader(
            place, secret, left_s, "Facts", outer_pb2.FactsRequest(), stub=ParameterServerStub, what=WHAT
        )
        return cast(dict[str, Any], json.loads(reply.json))

    return facts_of_leader(facts, endpoints, timeout_s) if follow else facts(endpoints, timeout_s)


def ask_end(endpoints: str, reason: str, secret: Secret, timeout_s: float) -> str:
    """Asks a leader to end the job once its newest version is durable; returns the leader's words about it.

    Raises:
        RefusedError: The job cannot end now; the message says why.
        SchedulerUnreachableError: No server answered in time.
    """
    request = outer_pb2.EndRequest(reason=reason)
    reply = ask_leader(endpoints, secret, timeout_s, "End", request, stub=ParameterServerStub, what=WHAT)
    if not reply.accepted:
        raise RefusedError(str(reply.text))
    return str(reply.text)
