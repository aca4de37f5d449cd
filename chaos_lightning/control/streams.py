"""Keeps members' control streams: which member each belongs to, what it says, and what waits to be sent to it.

Theory of operation. A stream ends in one of three ways. With a goodbye and a half-close: the member meant it. Without:
its process died or its host cut the connection, and the kernel says so within milliseconds; that is
`Closed(abrupt=True)`. A half-open stream says nothing at all; heartbeats find that out. Two kinds are cut from here:
one that does not say who it is, and one whose member reads nothing of what it is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any

from chaos_lightning.control.channel import END_OF_STREAM
from chaos_lightning.control.link_keys import KeyIssuer
from chaos_lightning.errors import WireError
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.leader_search import pulse_s, pulse_timeout_s
from chaos_lightning.protocol.codec import encode_to_member, unwrap_from_member
from chaos_lightning.protocol.types import Hello, Pulse, ToMember, Welcome

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_MAX_OUTBOX = 4096
"""Number of messages that may wait for one member; more means that it has not read for a long time, and its stream is
cut.
"""
_HEARD_S = 0.7
"""Seconds for which a busy machine may keep a member from speaking."""


class Parcel:
    """Message to one or many members, which is encoded once, when it is first written.

    Args:
        message: Message that is sent.
    """

    def __init__(self, message: ToMember) -> None:
        self.message = message

    @cached_property
    def data(self) -> bytes:
        """The encoded message."""
        return encode_to_member(self.message)


class MemberStream:
    """Open control stream of one member.

    Args:
        number: Number by which the state machine knows the stream.
        peer: Address of the member, as gRPC reports it.
    """

    def __init__(self, number: int, peer: str) -> None:
        self.number = number
        self.peer = peer
        self.name = ""
        """Name of the member, once it has said hello."""
        self.outbox: asyncio.Queue[Parcel | None] = asyncio.Queue()
        self.cut = asyncio.Event()
        self.heard = time.monotonic()
        """Time at which the member said something last: a stream whose packets vanish is still there."""


async def both_ways(
    context: Any,
    read: Callable[[], Coroutine[Any, Any, Any]],
    write: Callable[[], Coroutine[Any, Any, Any]],
    cut: asyncio.Event,
) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """Reads and writes on a client's stream until reading or writing ends, or the stream is cut.

    Returns:
        Both tasks: done, or about to be cancelled.
    """
    # Answers at once: the client learns that it was let in before anything else is said. And before anything else can
    # be: a first message that is written meanwhile sends the same metadata, and gRPC ends the stream.
    await context.send_initial_metadata(())
    tasks = asyncio.create_task(read()), asyncio.create_task(write()), asyncio.create_task(cut.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return tasks[0], tasks[1]


class Streams:
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
        self._refused = refused
        self._hello_timeout_s = hello_timeout_s
        self._pulses = pulses
        self._count = 0
        self.standing: dict[int, MemberStream] = {}
        self.keys: KeyIssuer | None = None
        """Keys of the present leader."""
        self._last: Parcel | None = None
        """Message that was sent last: one for many comes once for each of them, one after the other."""

    def present(self, heartbeat_timeout_s: float) -> set[str]:
        """Returns the names of members heard within this time, or 0.7 s if that is longer. May be called from any
        thread.
        """
        since = time.monotonic() - max(heartbeat_timeout_s, _HEARD_S)
        return {s.name for s in list(self.standing.values()) if s.name and s.heard >= since}

    def names(self) -> list[str]:
        """Returns the names of all members that have sent a Hello, sorted."""
        return sorted({s.name for s in self.standing.values() if s.name})

    # ------------------------------------------------------------------ what is sent

    def send(self, number: int, message: ToMember) -> None:
        """Queues a message on a member's stream, after the keys of the links that it names."""
        if (stream := self.standing.get(number)) is None:
            return
        if isinstance(message, Welcome):
            stream.name = message.member.name
        assert self.keys is not None, "who does not lead says nothing"
        for to, what in self.keys.with_keys(number, message):
            if self._last is None or what is not self._last.message:
                self._last = Parcel(what)
            self._put(self.standing[to], self._last)

    def _put(self, stream: MemberStream, parcel: Parcel) -> None:
        """Queues a message on a stream; cuts the stream instead if its member has stopped reading."""
        if stream.outbox.qsize() < _MAX_OUTBOX:
            stream.outbox.put_nowait(parcel)
        elif not stream.cut.is_set():
            self._emit("error", text=f"{stream.name or stream.peer} does not read; its stream is cut")
            stream.cut.set()

    def close(self, number: int, reason: str) -> None:
        """Closes a stream after its queued messages have been sent."""
        if (stream := self.standing.get(number)) is not None:
            self._emit("stream_closed", peer=stream.peer, of=stream.name, reason=reason)
            stream.outbox.put_nowait(None)

    def close_all(self) -> None:
        """Closes all streams, so that all members connect again."""
        for stream in self.standing.values():
            stream.outbox.put_nowait(None)

    def pulse(self) -> float:
        """Tells all members that this scheduler lives, since they leave a silent one: another may have been elected.

        Returns:
            Seconds until the next is due.
        """
        pulse = self._new_pulse()
        for stream in self.standing.values():
            if stream.name and stream.outbox.empty():
                stream.outbox.put_nowait(pulse)
        return pulse_s(len(self.standing))

    def _new_pulse(self) -> Parcel:
        return Parcel(Pulse(pulse_timeout_s(len(self.standing))))

    # ------------------------------------------------------------------ one stream

    async def attend(self, context: Any, peer: str) -> None:
        """Serves one member's stream, from its Hello to its end."""
        self._count += 1
        stream = MemberStream(self._count, peer)
        if self._pulses:
            stream.outbox.put_nowait(self._new_pulse())  # from the first moment on, silence means something
        self.standing[stream.number] = stream
        self._feed(fx.Opened(stream.number))
        patience = asyncio.get_running_loop().call_later(self._hello_timeout_s, self._expect_hello, stream)
        abrupt = True
        try:
            read, written = await both_ways(
                context, lambda: self._read(stream, context), lambda: self._write(stream, context), stream.cut
            )
            if read.done():
                abrupt = not read.result()
            elif written.done():
                abrupt = written.exception() is not None
        except WireError as error:
            self._refused(stream.peer, str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            patience.cancel()
            del self.standing[stream.number]
            if self.keys is not None:
                self.keys.closed(stream.number)
            self._feed(fx.Closed(stream.number, abrupt))

    def _expect_hello(self, stream: MemberStream) -> None:
        """Cuts a stream that has sent no Hello in time, since it takes the room of another."""
        if not stream.name:
            self._refused(stream.peer, f"no hello within {self._hello_timeout_s:g} s (Attend)")
            stream.cut.set()

    async def _read(self, stream: MemberStream, context: Any) -> bool:
        """Passes a member's messages to the state machine; returns True if it said goodbye before its stream ended."""
        goodbye = False
        while True:
            envelope = await context.read()
            if envelope is END_OF_STREAM:
                return goodbye
            stream.heard = time.monotonic()
            goodbye = goodbye or envelope.goodbye
            if envelope.WhichOneof("message") is None and goodbye:
                continue
            message = unwrap_from_member(envelope)
            if isinstance(message, Hello) and not stream.name:
                stream.name = message.name
            self._feed(fx.MessageIn(stream.number, message))

    async def _write(self, stream: MemberStream, context: Any) -> None:
        """Sends queued messages to a member, until the machine closes the stream."""
        while True:
            parcel = await stream.outbox.get()
            if parcel is None:
                return
            await context.write(parcel.data)
