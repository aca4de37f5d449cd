"""Keeps members' control streams: tells the machine what they say, and sends keys of links with what they are sent.

Theory of operation. The streams themselves are a service's (service/streams.py). What is a scheduler's own: a stream
that ends without a goodbye is a fact about its member (`Closed(abrupt=True)`); keys go before the messages that name
their links (link_keys.py); and where another scheduler may have been elected, members are told now and then that this
one lives, since they leave a silent one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from chaos_lightning.control.link_keys import KeyIssuer
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.leader_search import pulse_s, pulse_timeout_s
from chaos_lightning.protocol.codec import FROM_MEMBER, encode_to_member, unwrap_from_member
from chaos_lightning.protocol.types import Hello, Pulse, ToMember, Welcome
from chaos_lightning.service.streams import Encoding, LastWord, Stream, Streams

MOST_WAITING = 4096
"""Number of messages that may wait for one member."""
_HEARD_S = 0.7
"""Seconds for which a busy machine may keep a member from speaking."""


def read_from_member(data: bytes) -> Any:
    """Decodes what a member says; returns `LastWord` for its last word.

    Raises:
        WireError: It is no message of a member.
    """
    envelope = FROM_MEMBER.parse(data)
    return LastWord if envelope.goodbye and envelope.WhichOneof("message") is None else unwrap_from_member(envelope)


ENCODING = Encoding(read_from_member, encode_to_member)


class MemberStreams:
    """Open control streams of a scheduler. Methods belong to one asyncio loop, except `present`.

    Args:
        feed: Takes what happens on them, for the machine.
        emit: Takes (event name, fields) for the event log.
        refused: Takes (peer, why) of who is sent away.
        hello_timeout_s: A stream that has said no Hello by then is cut.
        pulses: Whether members are told from a stream's first moment on that this scheduler lives.
    """

    def __init__(
        self,
        feed: Callable[[fx.SchedulerEvent], None],
        emit: Callable[..., None],
        refused: Callable[[str, str], None],
        *,
        hello_timeout_s: float,
        pulses: bool,
    ) -> None:
        self._feed = feed
        self._emit = emit
        self._pulses = pulses
        self._streams = Streams(self, emit, refused, hello_timeout_s=hello_timeout_s, most=MOST_WAITING)
        self.standing = self._streams.standing
        """Open streams by number."""
        self.keys: KeyIssuer | None = None
        """Keys of the present leader."""

    def present(self, heartbeat_timeout_s: float) -> set[str]:
        """Returns the names of members heard within this time, or 0.7 s if that is longer. May be called from any
        thread.
        """
        since = time.monotonic() - max(heartbeat_timeout_s, _HEARD_S)
        return {s.name for s in list(self.standing.values()) if s.name and s.heard >= since}

    def names(self) -> list[str]:
        """Returns the names of all members that have sent a Hello, sorted."""
        return sorted({s.name for s in self.standing.values() if s.name})

    async def attend(self, context: Any, peer: str) -> None:
        """Serves one member's stream, from its Hello to its end."""
        await self._streams.attend(context, peer, "Attend", ENCODING)

    # ------------------------------------------------------------------ what is sent

    def send(self, number: int, message: ToMember) -> None:
        """Queues a message on a member's stream, after the keys of the links that it names."""
        if (stream := self.standing.get(number)) is None:
            return
        if isinstance(message, Welcome):
            stream.name = message.member.name
        assert self.keys is not None, "who does not lead says nothing"
        for to, what in self.keys.with_keys(number, message):
            self._streams.send(to, what)

    def close(self, number: int, reason: str) -> None:
        """Closes a stream after its queued messages have been sent."""
        if (stream := self.standing.get(number)) is not None:
            self._emit("stream_closed", peer=stream.peer, of=stream.name, reason=reason)
            self._streams.end(number)

    def close_all(self) -> None:
        """Closes all streams, so that all members connect again."""
        self._streams.end_all()

    def pulse(self) -> float:
        """Tells all members that this scheduler lives.

        Returns:
            Seconds until the next is due.
        """
        self._streams.pulse(self._new_pulse(), unnamed=False)
        return pulse_s(len(self.standing))

    def _new_pulse(self) -> Pulse:
        return Pulse(pulse_timeout_s(len(self.standing)))

    # ------------------------------------------------------------------ what happens

    def opened(self, stream: Stream) -> None:
        """Tells the machine of a stream, before its member has said anything."""
        if self._pulses:
            self._streams.send(stream.number, self._new_pulse())  # from the first moment on, silence means something
        self._feed(fx.Opened(stream.number))

    def heard(self, stream: Stream, message: Any) -> None:
        """Passes a member's message to the machine."""
        if isinstance(message, Hello) and not stream.name:
            stream.name = message.name
        self._feed(fx.MessageIn(stream.number, message))

    def closed(self, stream: Stream, abrupt: bool) -> None:
        """Tells the machine that a stream has ended, and whether its member said goodbye before."""
        if self.keys is not None:
            self.keys.closed(stream.number)
        self._feed(fx.Closed(stream.number, abrupt))
