"""Keeps the open streams of a service's clients: who speaks on each, what is heard, and what waits to be sent.

Theory of operation. A client opens a stream and says who it is; from then on both sides send messages until one of them
closes it. The service's `Clients` object takes what happens: a stream opens, says something, ends. A stream that ends
with a goodbye, or is closed from here, was meant to end. Without that the client's process died or its host cut the
connection, and the kernel says so within milliseconds: the end is *abrupt*. A half-open stream says nothing at all;
whoever needs to know listens for heartbeats.

Three kinds of streams are cut from here: one that does not say who it is in time, since it takes the room of another,
one whose client reads nothing of what it is sent, and one that says what nobody understands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from chaos_lightning.errors import WireError
from chaos_lightning.service.channel import END_OF_STREAM

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

MOST_WAITING = 65536
"""Number of messages that may wait for one client; with more it has not read for a long time."""
HELLO_TIMEOUT_S = 5.0
"""Seconds in which a client must say who it is."""


class LastWord:
    """Value that `Encoding.read` returns for a client's word that it means to end; it comes alone."""


@dataclass(frozen=True)
class Encoding:
    """Encoding of a call's messages.

    Attributes:
        read: Decodes what a client says, or returns `LastWord`; raises WireError if it is malformed.
        write: Encodes what a client is sent.
    """

    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]


class Parcel:
    """Message to one or many clients, which is encoded once, when it is first written.

    Args:
        message: Message that is sent.
        write: Encodes it.
    """

    def __init__(self, message: Any, write: Callable[[Any], bytes]) -> None:
        self.message = message
        self._write = write

    def is_for(self, message: Any, encoding: Encoding) -> bool:
        """Returns whether this parcel holds that very message in the form of that call."""
        return self.message is message and self._write is encoding.write

    @cached_property
    def data(self) -> bytes:
        """The encoded message."""
        return self._write(self.message)


class Stream:
    """Open stream of one client.

    Args:
        number: Number by which the service's machine knows the stream.
        peer: Address of the client, as gRPC reports it.
        call: Name of the call that opened it.
        encoding: Encoding of the call's messages.
    """

    def __init__(self, number: int, peer: str, call: str, encoding: Encoding) -> None:
        self.number = number
        self.peer = peer
        self.call = call
        self.encoding = encoding
        self.name = ""
        """Name of the client, once it has said who it is."""
        self.heard = time.monotonic()
        """Time at which the client said something last: a stream whose packets vanish is still there."""
        self.end: tuple[grpc.StatusCode, str] | None = None
        """Status and reason with which the stream is ended from here; None: in good order, or not at all."""
        self.outbox: asyncio.Queue[Parcel | None] = asyncio.Queue()
        self.cut = asyncio.Event()


class Clients(Protocol):
    """Interface of a service that has streams. All methods are called in the streams' asyncio loop."""

    def opened(self, stream: Stream) -> None:
        """Takes a new stream; what is sent on it now is the client's first message."""

    def heard(self, stream: Stream, message: Any) -> None:
        """Takes a message; sets `stream.name` by the first one.

        Raises:
            WireError: The client may not say that; its stream is ended.
        """

    def closed(self, stream: Stream, abrupt: bool) -> None:
        """Takes the end of a stream, which is in `Streams.standing` no more."""


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
    """Open streams of a service. Methods may only be called in one asyncio loop.

    Args:
        clients: Takes what happens on them.
        emit: Takes (event name, fields) for the event log.
        refused: Takes (peer, why) of who is sent away.
        hello_timeout_s: A stream whose client has not said who it is by then is cut.
        most: Number of messages that may wait for one client; with more its stream is cut.
    """

    def __init__(
        self,
        clients: Clients,
        emit: Callable[..., None],
        refused: Callable[[str, str], None],
        *,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        most: int = MOST_WAITING,
    ) -> None:
        self._clients = clients
        self._emit = emit
        self._refused = refused
        self._hello_timeout_s = hello_timeout_s
        self._most = most
        self._count = 0
        self.standing: dict[int, Stream] = {}
        """Streams by number, oldest first."""
        self._last: Parcel | None = None
        """Message that was sent last: one for many comes once for each of them, one after the other."""

    # ------------------------------------------------------------------ what is sent

    def send(self, number: int, message: Any) -> None:
        """Queues a message on a stream, if it is still open; cuts the stream instead if its client has stopped
        reading.
        """
        if (stream := self.standing.get(number)) is None:
            return
        if stream.outbox.qsize() < self._most:
            stream.outbox.put_nowait(self._parcel(stream, message))
        elif not stream.cut.is_set():
            self._emit("error", text=f"{stream.name or stream.peer} does not read; its stream is cut")
            stream.cut.set()

    def _parcel(self, stream: Stream, message: Any) -> Parcel:
        if self._last is None or not self._last.is_for(message, stream.encoding):
            self._last = Parcel(message, stream.encoding.write)
        return self._last

    def pulse(self, message: Any, *, unnamed: bool = True) -> None:
        """Sends a message on each stream on which nothing waits, so that clients notice a server that is silent;
        `unnamed`: also where nobody has said hello.
        """
        for number, stream in self.standing.items():
            if (stream.name or unnamed) and stream.outbox.empty():
                self.send(number, message)

    def end(self, number: int, status: grpc.StatusCode | None = None, reason: str = "") -> None:
        """Ends a stream after its queued messages; with a status, the client is told that and the reason."""
        if (stream := self.standing.get(number)) is not None:
            if status is not None and stream.end is None:
                stream.end = status, reason
            stream.outbox.put_nowait(None)

    def end_all(self, status: grpc.StatusCode | None = None, reason: str = "") -> None:
        """Ends all streams, so that clients connect again."""
        for number in self.standing:
            self.end(number, status, reason)

    # ------------------------------------------------------------------ one stream

    async def attend(self, context: Any, peer: str, call: str, encoding: Encoding) -> None:
        """Serves one client's stream until its end."""
        self._count += 1
        stream = self.standing[self._count] = Stream(self._count, peer, call, encoding)
        self._clients.opened(stream)
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
            if stream.end is not None:
                await context.abort(*stream.end)
        except WireError as error:
            self._refused(stream.peer, f"{error} ({call})")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            patience.cancel()
            del self.standing[stream.number]
            self._clients.closed(stream, abrupt)

    def _expect_hello(self, stream: Stream) -> None:
        if not stream.name:
            self._refused(stream.peer, f"no hello within {self._hello_timeout_s:g} s ({stream.call})")
            stream.cut.set()

    async def _read(self, stream: Stream, context: Any) -> bool:
        """Passes on a client's messages; returns whether it said goodbye before its stream ended."""
        goodbye = False
        while (data := await context.read()) is not END_OF_STREAM:
            stream.heard = time.monotonic()
            message = stream.encoding.read(data)
            if message is LastWord:
                goodbye = True
            else:
                self._clients.heard(stream, message)
        return goodbye

    async def _write(self, stream: Stream, context: Any) -> None:
        """Sends queued messages, until the stream is ended from here."""
        while (parcel := await stream.outbox.get()) is not None:
            try:
                data = parcel.data
            except (TypeError, WireError) as error:
                self._emit("error", text=f"a message to {stream.name or stream.peer} cannot be sent: {error}")
                raise
            await context.write(data)
