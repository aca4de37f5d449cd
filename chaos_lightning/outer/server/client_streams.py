"""Keeps the streams of clusters and followers at a leader: who speaks on each, and whether its process is dead.

Theory of operation. The streams themselves are a service's (service/streams.py). What is a leader's own: a stream's
first message says who speaks, and whatever speaks for somebody else is no message of ours. gRPC does not tell whether a
stream was closed, or ended with its process or with the network. Of a process on this machine the process table knows;
that proves a death (O14), and is looked at for a moment, as a connection ends some milliseconds before its process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from chaos_lightning.errors import WireError
from chaos_lightning.machine.process_table import host_identity, process_state
from chaos_lightning.outer.exchange.line_keys import LineKeyIssuer
from chaos_lightning.outer.exchange.vocabulary import FROM_CLUSTER, FROM_FOLLOWER, TO_CLUSTER, TO_FOLLOWER
from chaos_lightning.outer.rules.effects import Heard, LeaderEvent, StreamClosed
from chaos_lightning.outer.rules.messages import ClusterHello, FollowerHello, Offered, ToCluster, ToFollower
from chaos_lightning.outer.rules.types import ProcessPlace
from chaos_lightning.protocol.codec import Envelope
from chaos_lightning.service.channel import ENDED
from chaos_lightning.service.streams import HELLO_TIMEOUT_S, Encoding, Stream, Streams

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_PROOF_S = 0.5
"""Seconds for which the process table is looked at when a stream ends abruptly."""
_LOOK_S = 0.01
_PULSE = None
"""Message of an envelope with nothing in it, which says that this one leads."""


def _written(to_client: Envelope) -> Callable[[Any], bytes]:
    return lambda message: b"" if message is _PULSE else to_client.encode(message)


ENCODINGS = {
    "Attend": Encoding(FROM_CLUSTER.decode, _written(TO_CLUSTER)),
    "Follow": Encoding(FROM_FOLLOWER.decode, _written(TO_FOLLOWER)),
}
"""Encoding of the messages of each call."""


def sender(message: Any, call: str) -> str:
    """Returns the name of the cluster or follower for which a message speaks."""
    match message:
        case ClusterHello(cluster=said) | FollowerHello(follower=said):
            return str(said)
        case Offered(offer):
            return str(offer.push.incarnation.cluster)
        case _:
            return str(message.incarnation.cluster if call == "Attend" else message.follower)


def state_of(process: ProcessPlace) -> str:
    """Returns "gone", "stopped" or "runs" for a process on this machine; "" for one on another machine, or that cannot
    be seen.
    """
    here = process.pid and process.host == host_identity()
    return process_state(process.pid, process.pid_start) if here else ""


class ClientStreams:
    """All open streams. Methods may only be called in one asyncio loop.

    Args:
        feed: Takes what happens on them, for the machine.
        emit: Takes (event name, fields) for the event log.
        refused: Takes (peer, why) of who is sent away.
        keys: Tells both ends of data connections their keys.
        hello_timeout_s: A stream that has said no hello by then is cut.
    """

    def __init__(
        self,
        feed: Callable[[LeaderEvent], None],
        emit: Callable[..., None],
        refused: Callable[[str, str], None],
        keys: LineKeyIssuer,
        *,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self._feed = feed
        self._emit = emit
        self._streams = Streams(self, emit, refused, hello_timeout_s=hello_timeout_s)
        self._processes: dict[int, ProcessPlace] = {}
        """Process of each client that has said hello, by number of its stream."""
        self._ending: set[asyncio.Task[None]] = set()
        self._keys = keys
        self._ended = ""
        """Reason for which nobody leads here any more."""

    def count(self, call: str) -> int:
        """Returns the number of open streams of clusters ("Attend") or followers ("Follow")."""
        return sum(1 for stream in self._streams.standing.values() if stream.call == call)

    async def attend(self, context: Any, call: str, peer: str) -> None:
        """Serves the stream of one client, from its hello to its end."""
        await self._streams.attend(context, peer, call, ENCODINGS[call])

    def send(self, conn: int, message: ToCluster | ToFollower) -> None:
        """Queues a message, and the keys of the data connections that it makes possible."""
        if conn in self._streams.standing:
            for to, what in self._keys.with_keys(conn, message):
                self._streams.send(to, what)

    def end_all(self, reason: str) -> None:
        """Ends all streams after their queued messages, later ones too, and tells the clients why nobody leads here any
        more.
        """
        self._ended = reason
        self._streams.end_all(ENDED, reason)

    def hang_up(self, conn: int, reason: str) -> None:
        """Ends one stream after its queued messages, and tells its client that it is refused and why."""
        self._streams.end(conn, grpc.StatusCode.NOT_FOUND, reason)

    def pulse(self) -> None:
        """Sends an empty message on each idle stream, since clients leave a leader that is silent."""
        self._streams.pulse(_PULSE)

    # ------------------------------------------------------------------ what happens

    def opened(self, stream: Stream) -> None:
        """Says that this one leads."""
        self._streams.send(stream.number, _PULSE)
        if self._ended:
            self._streams.end(stream.number, ENDED, self._ended)

    def heard(self, stream: Stream, message: Any) -> None:
        """Learns from a stream's first message who speaks, and passes on what that one says.

        Raises:
            WireError: The message speaks for another client, or does not say who sends it.
        """
        said = sender(message, stream.call)
        if not stream.name and isinstance(message, ClusterHello | FollowerHello):
            stream.name, self._processes[stream.number] = said, message.process
            self._tell(stream, up=True)
        if not stream.name or said != stream.name:
            who = stream.name or "somebody who said no hello"
            raise WireError(f"{type(message).__name__} of {said!r:.80} on the stream of {who}")
        self._keys.heard(stream.number, message)
        self._feed(Heard(stream.number, message))

    def closed(self, stream: Stream, abrupt: bool) -> None:
        """Tells the machine that a stream has ended, after a short wait for proof that the client's process is dead."""
        self._keys.closed(stream.number)
        if stream.name:
            self._tell(stream, up=False)
        ending = asyncio.get_running_loop().create_task(self._end(stream.number))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end(self, number: int) -> None:
        process = self._processes.pop(number, ProcessPlace())
        clock = asyncio.get_running_loop().time
        deadline = clock() + _PROOF_S
        while (state := state_of(process)) not in ("", "gone") and clock() < deadline:
            await asyncio.sleep(_LOOK_S)
        self._feed(StreamClosed(number, proof=state == "gone"))

    def _tell(self, stream: Stream, *, up: bool) -> None:
        event = "cluster_stream" if stream.call == "Attend" else "follower_stream"
        self._emit(event, of=stream.name, peer=stream.peer, up=up)
