"""Keeps a member connected to its scheduler: a thread with a control stream that reconnects by itself.

Theory of operation. The thread holds one gRPC stream at a time: Hello first; after the Welcome heartbeats at its
interval and whatever `send` is given. What the stream says is read by a helper thread into an inbox, and the inbox is
this thread's only wait, so that messages, heartbeats and the end come in one order. A stream that breaks is opened
again, with growing, jittered pauses and for as long as it takes: training does not need the scheduler between events.
What was not sent by then is dropped, for the member machine says everything that still matters again when it is
welcomed anew. A Fence, Released or final Refused ends the conversation: after it the thread does not come back.

gRPC is used without asyncio here: grpc.aio has one event poller per process, and it loses events of all loops once any
of them was closed, be it the one of an earlier Agent or the user's own.

States told to `on_state`: "connected" (welcomed), "waits: ..." (was not welcomed yet, and nobody answers), "lost: ..."
(was welcomed, now trying again), "failed: ..." (final: refused, or nobody reached within `connect_timeout_s` before
the first Welcome).
"""

from __future__ import annotations

import contextlib
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_lightning.control.channel import CLIENT_OPTIONS, SilentError, StandbyError, explain
from chaos_lightning.control.reviving import Reviver
from chaos_lightning.control.service_pb2_grpc import SchedulerStub
from chaos_lightning.errors import ChaosError, RefusedError, SchedulerUnreachableError, WireError
from chaos_lightning.machine.forks import only_here
from chaos_lightning.membership.leader_search import ANSWER_TIMEOUT_S, PULSE_TIMEOUT_S, Conversation, LeaderSearch
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.codec import unwrap_to_member, wrap_from_member
from chaos_lightning.protocol.types import (
    Fence,
    FromMember,
    Heartbeat,
    HeartbeatPace,
    Hello,
    Pulse,
    Refused,
    Released,
    ToldEnd,
    ToMember,
    Welcome,
    other_version,
)
from chaos_lightning.security.credentials import Credentials, Secret, open_channel

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_GOODBYE_TIMEOUT_S = 1.0
_MAX_OUTBOX = 65536
_INTERVALS_S = (0.001, 3600.0)
"""Bounds of the interval between heartbeats, s: no flood, and no wait that the system cannot express."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """Item of the inbox: a stream has ended; `reason` is None if the scheduler closed it in good order."""

    talk: _Talk
    reason: ChaosError | None


@dataclass(frozen=True, slots=True)
class _Stop:
    """Item of the inbox by which `close` asks the agent's thread to end."""


class _Talk:
    """One stream to the scheduler: an outbox that gRPC sends from, and a thread that reads answers into the agent's
    inbox.
    """

    def __init__(
        self, channel: grpc.Channel, endpoint: str, secret: Credentials, inbox: queue.SimpleQueue[Any]
    ) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._inbox = inbox
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.welcomed = False
        self.patience_s = math.inf
        """Silence (s) after which a scheduler is left that says all the time that it lives."""
        self.call = SchedulerStub(channel).Attend(iter(self._outbox.get, None), metadata=secret.metadata())
        threading.Thread(target=self._read, name="chaos-agent-reader", daemon=True).start()

    def say(self, envelope: Any) -> None:
        if self._outbox.qsize() < _MAX_OUTBOX:
            self._outbox.put(envelope)

    @property
    def clogged(self) -> bool:
        """Whether messages pile up because the scheduler does not read its stream; heartbeats are then left out."""
        return self._outbox.qsize() > 16

    def goodbye(self) -> None:
        """Tells the scheduler that this member will send nothing more, and closes its side of the stream."""
        self._outbox.put(chaos_pb2.FromMemberEnvelope(goodbye=True))
        self._outbox.put(None)

    def end(self) -> None:
        """Cancels the stream, if it is still open, and lets gRPC's sending thread end."""
        self.call.cancel()
        self._outbox.put(None)

    def _read(self) -> None:
        reason: ChaosError | None = None
        probe_s = 1.0
        try:
            for envelope in self.call:
                probe_s = 0.0  # who was let in need not ask whether the certificates are right
                self._inbox.put((self, unwrap_to_member(envelope)))
        except grpc.RpcError as error:
            reason = explain(error, self._endpoint, self._secret, probe_s)
        except WireError as error:
            reason = error
        finally:
            self._inbox.put(_Ended(self, reason))


class Agent(threading.Thread):
    """Thread that keeps a member's control stream to the scheduler. `start` it, `send` from any thread, `close` it.

    Args:
        endpoints: HOST:PORT of the scheduler, or of all that stand by for each other.
        token: Cluster token (b"" for none), or credentials.
        hello_factory: Makes the Hello of each connection (`MemberMachine.knowledge`). Sets `resume` to the member's id
            as soon as it has one; one that does not know it welcomes a member that is in no view as a new one.
        on_message: Takes each message of the scheduler, in this thread.
        on_state: Takes each change of state (see the module), in this thread.
        heartbeat: Makes a Heartbeat, in this thread.
        connect_timeout_s: Seconds to try before the first Welcome or final answer.
        revive: Called in a helper thread when the scheduler does not answer; may start one (control/hosting.py).
    """

    def __init__(
        self,
        *,
        endpoints: Sequence[str],
        token: Secret,
        hello_factory: Callable[[], Hello],
        on_message: Callable[[ToMember], None],
        on_state: Callable[[str], None],
        heartbeat: Callable[[], Heartbeat],
        connect_timeout_s: float = 30.0,
        revive: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name="chaos-agent", daemon=True)
        self._search = LeaderSearch(endpoints)
        self._secret = Credentials.of(token)
        self._hello_factory = hello_factory
        self._on_message = on_message
        self._on_state = on_state
        self._heartbeat = heartbeat
        self._connect_timeout_s = connect_timeout_s
        self._reviver = Reviver(revive, self._not_revived)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._talk: _Talk | None = None
        """Stream that `send` uses: set once it is welcomed."""
        self._stopping = False
        self._over = False
        self._answered = False
        self._admitted = False
        self._revive_error = ""
        self._refused = ""

    # ------------------------------------------------------------------ any thread

    def send(self, message: FromMember) -> None:
        """Sends `message` soon if a stream is open; otherwise drops it.

        Raises:
            TypeError: The message does not fit chaos.proto.
        """
        envelope = wrap_from_member(message)
        talk = self._talk
        if talk is not None:
            talk.say(envelope)

    def close(self, timeout_s: float = 3.0) -> None:
        """Says goodbye to the scheduler and ends the thread. Idempotent; may be called before `start` and in
        callbacks.
        """
        self._stopping = True
        self._inbox.put(_Stop())
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout_s)

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        try:
            self._keep_talking()
        except Exception as error:
            self._on_state(f"failed: internal error of the control stream: {error!r}")
            raise

    def _keep_talking(self) -> None:
        deadline = time.monotonic() + self._connect_timeout_s
        told, turned_away = "", False
        while not self._stopping:
            if self._answered:
                told = self._revive_error = ""
                self._reviver.answered()
            self._answered = False
            reason = self._converse()
            if self._over or self._stopping:
                return
            if self._admitted:
                # A member in the job trains on, whatever stands at the scheduler's place meanwhile.
                deadline = float("inf")
                refused = isinstance(reason, RefusedError)
                standby = isinstance(reason, StandbyError)  # it names the one that refused
                if self._answered or refused or (turned_away and not standby):
                    told = self._tell(f"lost: {reason}", told)
                turned_away = refused or (turned_away and standby)
            elif isinstance(reason, RefusedError):
                self._on_state(f"failed: {reason}")
                return
            elif not self._answered:
                told = self._tell(f"waits: {reason}", told)
            pause_s = self._search.ended(self._attempt(reason), time.monotonic(), random.random())
            if not pause_s:
                continue
            self._reviver.try_it(self._search.failures)
            if self._refused and not self._admitted:
                self._on_state(f"failed: {self._refused}")
                return
            if time.monotonic() > deadline:
                self._on_state(f"failed: no admission within {self._connect_timeout_s:g} s: {reason}")
                return
            self._pause(pause_s)

    def _attempt(self, reason: ChaosError) -> Conversation:
        standby = isinstance(reason, StandbyError)
        leader = reason.leader if isinstance(reason, StandbyError) else ""
        return Conversation(self._answered, isinstance(reason, SilentError), standby, leader)

    def _tell(self, state: str, told: str) -> str:
        """Passes the stream's state to `on_state`, unless it equals `told`, the last one passed; returns the state."""
        if state != told:
            self._on_state(state)
        return state

    def _pause(self, seconds: float) -> None:
        """Sleeps for `seconds`, but no longer than until `close`."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            self._next(left)

    def _next(self, timeout_s: float) -> Any:
        """Waits for the next item of the inbox; returns None after the timeout."""
        try:
            return self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def _not_revived(self, error: ChaosError) -> None:
        """Reports, in the helper thread, why no scheduler could be started again."""
        if isinstance(error, RefusedError):  # the job has ended: a newcomer has nothing to wait for
            self._refused = str(error)
        if str(error) != self._revive_error:
            self._revive_error = str(error)
            self._on_state(f"cannot revive the scheduler: {error}")

    def _converse(self) -> ChaosError:
        """Opens a stream to the scheduler, and serves it until it ends; returns the reason for the end."""
        with contextlib.ExitStack() as meanwhile:
            try:
                meanwhile.enter_context(only_here(self._search.endpoint))
            except ChaosError as error:
                return SchedulerUnreachableError(str(error))
            try:
                with open_channel(self._search.endpoint, self._secret, CLIENT_OPTIONS) as channel:
                    talk = _Talk(channel, self._search.endpoint, self._secret, self._inbox)
                    try:
                        return self._attend(talk)
                    finally:
                        self._talk = None
                        talk.end()
            except (RefusedError, WireError) as error:
                return error  # this member's certificate has expired, or the scheduler asks for what cannot be

    def _attend(self, talk: _Talk) -> ChaosError:
        talk.say(wrap_from_member(self._hello_factory()))
        interval = patience_s = self._search.answer_timeout_s()
        began = time.monotonic()
        due = heard = began + interval
        while True:
            item = self._next(min(due, heard + talk.patience_s) - time.monotonic())
            if isinstance(item, _Stop) or (self._stopping and item is None):
                self._take_leave(talk)
                return ChaosError("closed by this member")
            if isinstance(item, _Ended):
                if item.talk is talk:
                    return item.reason or SchedulerUnreachableError("the scheduler closed the stream")
            elif item is not None and item[0] is talk:
                message: ToMember = item[1]
                heard = time.monotonic()
                if isinstance(message, Pulse):
                    talk.patience_s = max(PULSE_TIMEOUT_S, message.timeout_s)
                    if not self._answered:  # it lives, and may have to listen to hundreds before it answers
                        due = max(due, began + ANSWER_TIMEOUT_S)
                    continue
                interval = self._interval_s(message, interval)
                if isinstance(message, Welcome) and (words := other_version(message.version)):
                    return RefusedError(f"the scheduler at {self._search.endpoint} {words}")
                if isinstance(message, Welcome) and not talk.welcomed:
                    due = time.monotonic()
                    talk.welcomed = True
                    self._admitted, self._talk = True, talk
                    self._on_state("connected")
                if not self._answered:
                    self._answered = True
                    due = min(due, time.monotonic() + interval)
                self._on_message(message)
                keeps = isinstance(message, Released) and message.keep  # it has a word to say yet
                if isinstance(message, Fence | Released | Refused | ToldEnd) and not keeps:
                    self._over = not (isinstance(message, Refused) and message.retry)
                    self._take_leave(talk)
                    if self._admitted and not self._over:
                        # It stands in a view that this scheduler does not know; it knocks again, ever more seldom.
                        self._answered = False
                        return RefusedError(f"the scheduler said: {message.reason}")
                    return ChaosError(f"the scheduler said: {message.reason}")
            # Nothing lies in the inbox: it was not this process that was frozen.
            if item is None and time.monotonic() >= heard + talk.patience_s:
                return SilentError(f"{self._search.endpoint} was silent for {talk.patience_s:g} s")
            if time.monotonic() >= due:
                if talk.welcomed:
                    if not talk.clogged:
                        talk.say(wrap_from_member(self._heartbeat()))
                    # Late beats are not made up for; the next one counts from now if this thread was held up.
                    due = max(due + interval, time.monotonic())
                elif not self._answered:
                    return SilentError(f"{self._search.endpoint} did not answer within {patience_s:g} s")
                else:
                    due = time.monotonic() + interval

    def _interval_s(self, message: ToMember, before_s: float) -> float:
        """Returns the seconds between heartbeats after this message, which may set a new interval."""
        if not isinstance(message, Welcome | HeartbeatPace):
            return before_s
        if not _INTERVALS_S[0] <= message.heartbeat_interval_s <= _INTERVALS_S[1]:
            every = f"a heartbeat every {message.heartbeat_interval_s:g} s"
            raise WireError(f"{self._search.endpoint} asks for {every}; expected {_INTERVALS_S} s")
        return message.heartbeat_interval_s

    def _take_leave(self, talk: _Talk) -> None:
        """Says goodbye to the scheduler, and waits a moment for the stream's end."""
        self._talk = None
        talk.goodbye()
        deadline = time.monotonic() + _GOODBYE_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            item = self._next(left)
            if isinstance(item, _Ended) and item.talk is talk:
                return
