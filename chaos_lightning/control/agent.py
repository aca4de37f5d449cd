"""Keeps a member connected to its scheduler: what it says on its control stream, and when it leaves a silent one.

Theory of operation. The stream and its thread are a service's (service/client.py). A member says Hello first; after the
Welcome heartbeats at its interval and whatever `send` is given. It goes on for as long as it takes: training does not
need the scheduler between events. What was not sent when a stream broke is dropped, for the member machine says
everything that still matters again when it is welcomed anew. A Fence, Released or final Refused ends the conversation:
after it the thread does not come back.

States told to `on_state`: "connected" (welcomed), "waits: ..." (was not welcomed yet, and nobody answers), "lost: ..."
(was welcomed, now trying again), "failed: ..." (final: refused, or nobody reached within `connect_timeout_s` before
the first Welcome).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_lightning.control.requests import SERVICE, WHAT
from chaos_lightning.errors import ChaosError, RefusedError, WireError
from chaos_lightning.membership.leader_search import ANSWER_TIMEOUT_S, PULSE_TIMEOUT_S, Conversation
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.codec import FROM_MEMBER, TO_MEMBER
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
from chaos_lightning.security.credentials import Secret
from chaos_lightning.service.channel import SilentError, StandbyError
from chaos_lightning.service.client import ClientThread, StreamCall, Talk

_INTERVALS_S = (0.001, 3600.0)
"""Bounds of the interval between heartbeats, s: no flood, and no wait that the system cannot express."""
_ATTEND = StreamCall(
    f"/{SERVICE}/Attend",
    WHAT,
    FROM_MEMBER.encode,
    TO_MEMBER.decode,
    chaos_pb2.FromMemberEnvelope(goodbye=True).SerializeToString(),
)


@dataclass(slots=True)
class _Here:
    """State of one stream.

    Attributes:
        answer_s: Seconds within which the scheduler must answer.
        interval_s: Interval of heartbeats, s.
        began_at: Time (monotonic, s) at which the stream was opened.
        beat_at: Time (monotonic, s) at which a heartbeat is due, or the answer.
        heard_at: Time (monotonic, s) of the last message.
        patience_s: Silence (s) after which a scheduler is left that says all the time that it lives.
        answered: Whether the scheduler has sent something for this member.
        welcomed: Whether it has let this member in.
    """

    answer_s: float = 0.0
    interval_s: float = 0.0
    began_at: float = 0.0
    beat_at: float = 0.0
    heard_at: float = 0.0
    patience_s: float = math.inf
    answered: bool = False
    welcomed: bool = False


class Agent:
    """Member's control stream to the scheduler. `start` it, `send` from any thread, `close` it.

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
        self._client = ClientThread(endpoints, token, _ATTEND, self, revive)
        self._hello_factory = hello_factory
        self._on_message = on_message
        self._on_state = on_state
        self._heartbeat = heartbeat
        self._connect_timeout_s = connect_timeout_s
        self._deadline = 0.0
        self._here = _Here()
        self._over = False
        self._admitted = False
        self._told = ""
        self._turned_away = False
        self._revive_error = ""
        self._refused = ""
        self.due = 0.0
        self.is_alive = self._client.is_alive
        self.join = self._client.join

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Starts the thread."""
        self._deadline = time.monotonic() + self._connect_timeout_s
        self._client.start()

    def send(self, message: FromMember) -> None:
        """Sends `message` soon if a stream is open; otherwise drops it.

        Raises:
            TypeError: The message does not fit chaos.proto.
        """
        self._client.say(message)

    def close(self, timeout_s: float = 3.0) -> None:
        """Says goodbye to the scheduler and ends the thread. Idempotent; may be called before `start` and in
        callbacks.
        """
        self._client.close(timeout_s)

    # ------------------------------------------------------------------ the thread: one stream

    def begin(self, talk: Talk, now: float, patience_s: float) -> None:
        """Says hello."""
        talk.say(self._hello_factory())
        self._here = _Here(patience_s, patience_s, began_at=now, beat_at=now + patience_s, heard_at=now)
        self.due = now + patience_s

    def hear(self, talk: Talk, message: Any, now: float) -> ChaosError | None:
        """Takes a message of the scheduler."""
        here = self._here
        here.heard_at = now
        try:
            if isinstance(message, Pulse):
                here.patience_s = max(PULSE_TIMEOUT_S, message.timeout_s)
                if not here.answered:  # it lives, and may have to listen to hundreds before it answers
                    here.beat_at = max(here.beat_at, here.began_at + ANSWER_TIMEOUT_S)
                return None
            return self._hear(talk, message)
        except (RefusedError, WireError) as error:
            return error  # the scheduler asks for what cannot be

    def _hear(self, talk: Talk, message: ToMember) -> ChaosError | None:
        here = self._here
        self._set_interval(talk, message)
        if isinstance(message, Welcome) and (words := other_version(message.version)):
            return RefusedError(f"the scheduler at {talk.endpoint} {words}")
        if isinstance(message, Welcome) and not here.welcomed:
            here.beat_at = time.monotonic()
            here.welcomed = self._admitted = True
            self._client.talk = talk
            self._on_state("connected")
        if not here.answered:
            here.answered = True
            here.beat_at = min(here.beat_at, time.monotonic() + here.interval_s)
        self._on_message(message)
        keeps = isinstance(message, Released) and message.keep  # it has a word to say yet
        if keeps or not isinstance(message, Fence | Released | Refused | ToldEnd):
            return None
        self._over = not (isinstance(message, Refused) and message.retry)
        self._client.take_leave(talk)
        if self._admitted and not self._over:
            # It stands in a view that this scheduler does not know; it knocks again, ever more seldom.
            here.answered = False
            return RefusedError(f"the scheduler said: {message.reason}")
        return ChaosError(f"the scheduler said: {message.reason}")

    def _set_interval(self, talk: Talk, message: ToMember) -> None:
        """Sets the interval between heartbeats, if the message has one.

        Raises:
            WireError: No member can keep it.
        """
        if isinstance(message, Welcome | HeartbeatPace):
            if not _INTERVALS_S[0] <= message.heartbeat_interval_s <= _INTERVALS_S[1]:
                every = f"a heartbeat every {message.heartbeat_interval_s:g} s"
                raise WireError(f"{talk.endpoint} asks for {every}; expected {_INTERVALS_S} s")
            self._here.interval_s = message.heartbeat_interval_s

    def look(self, talk: Talk, now: float, *, idle: bool) -> ChaosError | None:
        """Sends a heartbeat that is due; leaves a scheduler that is silent."""
        here, now = self._here, time.monotonic()
        if idle and now >= here.heard_at + here.patience_s:
            return SilentError(f"{talk.endpoint} was silent for {here.patience_s:g} s")
        if now >= here.beat_at:
            if here.welcomed:
                if not talk.clogged:
                    talk.say(self._heartbeat())
                # Late beats are not made up for; the next one counts from now if this thread was held up.
                here.beat_at = max(here.beat_at + here.interval_s, time.monotonic())
            elif here.answered:
                here.beat_at = now + here.interval_s
            elif idle:  # else its answer may lie in the inbox
                return SilentError(f"{talk.endpoint} did not answer within {here.answer_s:g} s")
        self.due = min(here.beat_at, here.heard_at + here.patience_s)
        return None

    # ------------------------------------------------------------------ the thread: between streams

    def ended(self, reason: ChaosError) -> Conversation | None:
        """Tells the state of this member's connection after a stream has ended."""
        answered = self._here.answered
        self._here = _Here()
        if self._over:
            return None
        standby = isinstance(reason, StandbyError)
        if self._admitted:
            # A member in the job trains on, whatever stands at the scheduler's place meanwhile.
            self._deadline = math.inf
            refused = isinstance(reason, RefusedError)
            if answered or refused or (self._turned_away and not standby):  # a standby names the one that refused
                self._tell(f"lost: {reason}")
            self._turned_away = refused or (self._turned_away and standby)
        elif isinstance(reason, RefusedError):
            self._on_state(f"failed: {reason}")
            return None
        elif not answered:
            self._tell(f"waits: {reason}")
        if answered:
            self._told = self._revive_error = ""
        leader = reason.leader if isinstance(reason, StandbyError) else ""
        return Conversation(answered, isinstance(reason, SilentError), standby, leader)

    def waits(self, reason: ChaosError) -> bool:
        """Returns whether to try again; tells why not."""
        if self._refused and not self._admitted:
            self._on_state(f"failed: {self._refused}")
        elif time.monotonic() > self._deadline:
            self._on_state(f"failed: no admission within {self._connect_timeout_s:g} s: {reason}")
        else:
            return True
        return False

    def _tell(self, state: str) -> None:
        """Passes the stream's state to `on_state`, unless it is the one that was passed last."""
        if state != self._told:
            self._on_state(state)
        self._told = state

    def broke(self, error: Exception) -> None:
        """Reports an error of ours, which ends the thread."""
        self._on_state(f"failed: internal error of the control stream: {error!r}")

    def not_revived(self, error: ChaosError) -> None:
        """Reports why no scheduler could be started again."""
        if isinstance(error, RefusedError):  # the job has ended: a newcomer has nothing to wait for
            self._refused = str(error)
        if str(error) != self._revive_error:
            self._revive_error = str(error)
            self._on_state(f"cannot revive the scheduler: {error}")
