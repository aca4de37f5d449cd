"""Open streams of clusters and followers at a leader: who speaks on each, and the messages that wait to be sent.

Theory of operation. A stream's first message says who speaks; whatever speaks for somebody else is no message of ours.
gRPC does not tell whether a stream was closed, or ended with its process or with the network. Of a process on this
machine the process table knows; that proves a death (O14), and is looked at for a moment, as a connection ends some
milliseconds before its process. Three kinds of streams are cut from here: one that does not say who it is, one whose
client reads nothing, and one that says what nobody understands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from chaos_lightning.control.channel import END_OF_STREAM
from chaos_lightning.control.streams import both_ways
from chaos_lightning.errors import WireError
from chaos_lightning.machine.process_table import host_identity, process_state
from chaos_lightning.outer.exchange import outer_pb2
from chaos_lightning.outer.exchange.control_client import ENDED
from chaos_lightning.outer.exchange.vocabulary import FROM_CLUSTER, FROM_FOLLOWER, TO_CLUSTER, TO_FOLLOWER
from chaos_lightning.outer.rules.effects import Heard, LeaderEvent, StreamClosed
from chaos_lightning.outer.rules.messages import ClusterHello, FollowerHello, Offered
from chaos_lightning.outer.rules.types import ProcessPlace

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_MAX_OUTBOX = 65536
"""Largest number of messages that wait for one client; with more it has not read for a long time, and its stream is
cut.
"""
_PROOF_S = 0.5
"""Seconds for which the process table is looked at when a stream ends abruptly."""
_LOOK_S = 0.01

_CALLS = {
    "Attend": (FROM_CLUSTER, TO_CLUSTER, outer_pb2.ToClusterEnvelope()),
    "Follow": (FROM_FOLLOWER, TO_FOLLOWER, outer_pb2.ToFollowerEnvelope()),
}


class ClientStream:
    """Open stream of one client.

    Args:
        conn: Number by which the leader's state machine knows the stream.
        call: "Attend" or "Follow".
        peer: Address, as gRPC tells it.
    """

    def __init__(self, conn: int, call: str, peer: str) -> None:
        self.conn = conn
        self.call = call
        self.peer = peer
        self.name = ""
        """Name of the cluster or follower, once it has said hello."""
        self.process = ProcessPlace()
        self.end: tuple[grpc.StatusCode, str] | None = None
        """Status and reason with which the stream is ended from here; None while it is not."""
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.cut = asyncio.Event()
        self.from_client, self.to_client, self.pulse = _CALLS[call]

    def check(self, message: Any) -> None:
        """Learns from a stream's first message who speaks, and rejects later messages that speak for someone else.

        Raises:
            WireError: The message speaks for another client, or does not say who sends it.
        """
        match message:
            case ClusterHello(cluster=said, process=process) | FollowerHello(follower=said, process=process):
                if not self.name:
                    self.name, self.process = said, process
            case Offered(offer):
                said = offer.push.incarnation.cluster
            case _:
                said = message.incarnation.cluster if self.call == "Attend" else message.follower
        if not self.name or said != self.name:
            raise WireError(
                f"{type(message).__name__} of {said!r:.80} on the stream of {self.name or 'somebody who said no hello'}"
            )

    def process_state(self) -> str:
        """Returns "gone", "stopped" or "runs" for a client process on this machine; "" for one on another machine, or
        one that cannot be seen.
        """
        here = self.process.pid and self.process.host == host_identity()
        return process_state(self.process.pid, self.process.pid_start) if here else ""


class ClientStreams:
    """All open streams. Methods may only be called in one asyncio loop.

    Args:
        feed: Takes what happens on them, for the machine.
        emit: Takes (event name, fields) for the event log.
        refused: Takes (peer, why) of who is sent away.
        hello_timeout_s: A stream that has said no hello by then is cut.
    """

    def __init__(
        self,
        feed: Callable[[LeaderEvent], None],
        emit: Callable[..., None],
        refused: Callable[[str, str], None],
        *,
        hello_timeout_s: float = 5.0,
    ) -> None:
        self._feed = feed
        self._emit = emit
        self._refused = refused
        self._hello_timeout_s = hello_timeout_s
        self._count = 0
        self._standing: dict[int, ClientStream] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def count(self, call: str) -> int:
        """Returns the number of open streams of clusters ("Attend") or followers ("Follow")."""
        return sum(1 for stream in self._standing.values() if stream.call == call)

    def send(self, conn: int, message: Any) -> None:
        """Queues a message; the stream is cut if its client reads nothing and the queue gets too long."""
        if (stream := self._standing.get(conn)) is None:
            return
        if stream.outbox.qsize() < _MAX_OUTBOX:
            stream.outbox.put_nowait(stream.to_client.wrap(message))
        elif not stream.cut.is_set():
            self._emit("error", text=f"{stream.name or stream.peer} does not read; its stream is cut")
            stream.cut.set()

    def end_all(self, reason: str) -> None:
        """Ends all streams after their queued messages, and tells the clients why nobody leads here any more."""
        for stream in self._standing.values():
            self._hang_up(stream, ENDED, reason)

    def hang_up(self, conn: int, reason: str) -> None:
        """Ends one stream after its queued messages, and tells its client that it is refused and why."""
        if (stream := self._standing.get(conn)) is not None:
            self._hang_up(stream, grpc.StatusCode.NOT_FOUND, reason)

    @staticmethod
    def _hang_up(stream: ClientStream, status: grpc.StatusCode, reason: str) -> None:
        stream.end = stream.end or (status, reason)
        stream.outbox.put_nowait(None)

    def pulse(self) -> None:
        """Sends an empty message on each idle stream, since clients leave a leader that is silent."""
        for stream in self._standing.values():
            if stream.outbox.empty():
                stream.outbox.put_nowait(stream.pulse)

    # ------------------------------------------------------------------ one stream

    async def attend(self, context: Any, call: str, peer: str) -> None:
        """Serves the stream of one client, from its hello to its end."""
        self._count += 1
        stream = ClientStream(self._count, call, peer)
        stream.outbox.put_nowait(stream.pulse)  # says that this one leads
        self._standing[stream.conn] = stream
        patience = asyncio.get_running_loop().call_later(self._hello_timeout_s, self._expect_hello, stream)
        try:
            for task in await both_ways(
                context, lambda: self._read(stream, context), lambda: self._write(stream, context), stream.cut
            ):
                if task.done():
                    task.result()
            if stream.end is not None:
                await context.abort(*stream.end)
        except WireError as error:
            self._refused(stream.peer, f"{error} ({call})")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            patience.cancel()
            del self._standing[stream.conn]
            if stream.name:
                self._tell(stream, up=False)
            ending = asyncio.get_running_loop().create_task(self._end(stream))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end(self, stream: ClientStream) -> None:
        """Tells the machine that a stream has ended, after a short wait for proof that the client's process is dead."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + _PROOF_S
        while (state := stream.process_state()) not in ("", "gone") and clock() < deadline:
            await asyncio.sleep(_LOOK_S)
        self._feed(StreamClosed(stream.conn, proof=state == "gone"))

    def _tell(self, stream: ClientStream, *, up: bool) -> None:
        event = "cluster_stream" if stream.call == "Attend" else "follower_stream"
        self._emit(event, of=stream.name, peer=stream.peer, up=up)

    def _expect_hello(self, stream: ClientStream) -> None:
        """Closes a stream on which no hello has come in time, as it uses up a slot."""
        if not stream.name:
            self._refused(stream.peer, f"no hello within {self._hello_timeout_s:g} s ({stream.call})")
            stream.cut.set()

    async def _read(self, stream: ClientStream, context: Any) -> None:
        """Feeds the client's messages to the machine, until the client has sent its last one."""
        while True:
            envelope = await context.read()
            if envelope is END_OF_STREAM:
                return
            message = stream.from_client.unwrap(envelope)
            new = not stream.name
            stream.check(message)
            if new:
                self._tell(stream, up=True)
            self._feed(Heard(stream.conn, message))

    async def _write(self, stream: ClientStream, context: Any) -> None:
        """Sends queued messages until this side closes the stream."""
        while (envelope := await stream.outbox.get()) is not None:
            await context.write(envelope)
