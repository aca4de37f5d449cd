"""Runs many stand-ins for members in one process, each with a connection of its own to a real scheduler.

A program of its own that needs nothing but the product and the stand-in itself (fake.py), so that it can be run on an
older product. A Decide or a NextView is the same bytes for all, so it is decoded once; each stand-in takes it when its
own copy comes. A link stands as soon as an end was told of it. A header brings a view a moment after the commit root
was told of that view: the crowd that has the root makes it, and hands it to the other crowds of the job over a datagram
socket, as members do among themselves.

Orders come on stdin and answers go to stdout, a line of JSON each: {"start": true}, {"kill": NAME}, {"dead": ID} (its
links are closed), {"look": true}, {"end": true}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.scale.fake import StandIn, carrier
from chaos_lightning.control.requests import SERVICE
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.codec import decode_peer, encode_peer, unwrap_to_member, wrap_from_member
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Fence,
    FromMember,
    Header,
    Hello,
    Refused,
    Released,
    ToMember,
    View,
    ViewId,
)
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.service.channel import CLIENT_OPTIONS, END_OF_STREAM

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

CARRIED_S = 0.2
"""A view that a header is to carry is carried after so long."""
AGAIN_S = (0.1, 0.4)
"""Pause before a stream that broke is made again."""
_MANY = ("decide", "next_view")
"""Messages that all get alike."""
_ONE = ("welcome", "open_links", "prepare", "probe", "fence", "refused", "released", "heartbeat_pace")
_DATAGRAM_NBYTES = 1 << 16


@functools.lru_cache(maxsize=4)
def _of_all(data: bytes) -> ToMember:
    return decoded(data)


def decoded(data: bytes) -> ToMember:
    """Decodes a scheduler's message to a member."""
    message: ToMember = unwrap_to_member(chaos_pb2.ToMemberEnvelope.FromString(data))
    return message


@dataclass
class Told:
    """One view, and how many stand-ins of this process have entered it.

    Attributes:
        members: Number of members in the view.
        decided: Whether a Decide brought the view, not a header.
        count: Number of stand-ins that entered it.
        last_ns: Time at which the last of them entered it (monotonic clock, ns).
    """

    members: int
    decided: bool
    count: int = 0
    last_ns: int = 0


class Line:
    """A stand-in's stream to the scheduler.

    Args:
        crowd: All stand-ins of this process.
        name: The stand-in's node.
        number: Number that stands for the stand-in's process id.
    """

    def __init__(self, crowd: Crowd, name: str, number: int) -> None:
        self.crowd = crowd
        self.one = StandIn(crowd, name, number)
        self.out = False
        self.talks = False
        """Whether the stand-in was welcomed on the present stream."""
        self._channel: Any = None
        self._call: Any = None
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()

    async def live(self) -> None:
        """Keeps a stand-in's stream to the scheduler open, reconnecting if it breaks, until the stand-in is removed or
        killed.
        """
        while self.one.here and not self.out:
            try:
                await self._attend()
            except (grpc.RpcError, asyncio.CancelledError):
                pass
            except Exception:
                self.crowd.broken += 1  # and it hears no more, so it is out for the scheduler
                raise
            finally:
                self.talks = False
            if self.one.here:
                self.crowd.broken += not self.out
                await self._channel.close()
                await asyncio.sleep(random.uniform(*AGAIN_S))

    async def _attend(self) -> None:
        self._channel, metadata = self.crowd.channel()
        self._outbox = asyncio.Queue()
        self._call = self._channel.stream_stream(f"/{SERVICE}/Attend")(metadata=metadata)
        self.say(self.one.hello())
        tasks = [asyncio.create_task(work()) for work in (self._write, self._beat)]
        try:
            while (data := await self._call.read()) is not END_OF_STREAM and not self.out:
                kind = chaos_pb2.ToMemberEnvelope.FromString(data).WhichOneof("message")
                if kind in _MANY:
                    self.one.hear(_of_all(data))
                elif kind in _ONE:
                    self.one.hear(decoded(data))
        finally:
            for task in tasks:
                task.cancel()

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._outbox.get())

    async def _beat(self) -> None:
        await asyncio.sleep(random.uniform(0, self.one.interval_s))
        while True:
            if self.talks:
                self.say(self.one.heartbeat())
            await asyncio.sleep(self.one.interval_s)

    def say(self, message: FromMember) -> None:
        """Sends a message if the stand-in is welcomed; earlier messages are dropped, as the welcome makes it send them
        again.
        """
        if self.talks or isinstance(message, Hello):
            self._outbox.put_nowait(wrap_from_member(message).SerializeToString())

    async def kill(self) -> None:
        """Closes the stand-in's connection without a message, as a kernel does for a process that died."""
        self.one.here = False
        await self._channel.close()


class Crowd:
    """All stand-ins of this process, their environment, and counts of what happened to them.

    Args:
        endpoint: Endpoint of the scheduler.
        first: Number of the first stand-in.
        count: Number of stand-ins.
        keys_dir: Folder of keys; "" for plain connections.
        names: Names of the datagram sockets: first this crowd's, then those of the other crowds.
    """

    def __init__(self, endpoint: str, first: int, count: int, keys_dir: str, names: list[str]) -> None:
        self._endpoint, self._secret = endpoint, Credentials.load(keys_dir, environ={})
        self.lines = {f"n{n}": Line(self, f"n{n}", n) for n in range(first, first + count)}
        self._ones = [line.one for line in self.lines.values()]
        self.dead: set[str] = set()
        self.fenced: list[str] = []
        self.broken = self.refused = 0
        self.told: dict[ViewId, Told] = {}
        self._views: dict[ViewId, View] = {}
        self._headers: dict[ViewId, Header] = {}
        """Headers that bring views, by view."""
        mine, *self._others = (f"\0{name}" for name in names)  # no files: the kernel forgets them
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(mine)
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._handed_on)

    def channel(self) -> tuple[Any, tuple[tuple[str, bytes], ...]]:
        """Opens a new connection to the scheduler; returns it with the credentials for its calls."""
        keys = self._secret.keys
        if keys is None:
            return grpc.aio.insecure_channel(self._endpoint, options=CLIENT_OPTIONS), ()
        now = keys.current()
        shown = grpc.ssl_channel_credentials(now.trusted, now.key, now.chain)
        return grpc.aio.secure_channel(self._endpoint, shown, options=CLIENT_OPTIONS), self._secret.metadata()

    # ------------------------------------------------------------------ what surrounds stand-ins

    def say(self, one: StandIn, message: FromMember) -> None:
        """Sends a stand-in's message to the scheduler."""
        self.lines[one.name].say(message)

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Calls an action after `after_s` seconds."""
        asyncio.get_running_loop().call_later(after_s, action)

    def lives(self, member: str) -> bool:
        """Returns whether a member was not killed."""
        return member not in self.dead

    def welcomed(self, one: StandIn) -> None:
        """Allows a stand-in to send messages on its stream."""
        self.lines[one.name].talks = True

    def asked(self, one: StandIn) -> None:
        """Makes all links that the scheduler asked a stand-in to make and that are possible."""
        for peer in sorted(one.named - one.up):
            if self.lives(peer):
                one.linked(peer)
        one.check_ready()

    def foretold(self, one: StandIn, view: View) -> None:
        """Makes a header deliver a view shortly after the commit root was told of the view; at once if the header is
        there already.
        """
        self._views[view.id] = view
        if view.id in self._headers:
            one.carried(self._headers[view.id], view)
        elif one.id == view.root:
            self.later(CARRIED_S, lambda: self._carry(one, view))

    def entered(self, one: StandIn, view: View, *, decided: bool) -> None:
        """Counts a stand-in that has entered a view."""
        told = self.told.setdefault(view.id, Told(len(view.members), decided))
        told.count += 1
        told.last_ns = time.monotonic_ns()

    def out(self, one: StandIn, message: Fence | Refused | Released) -> None:
        """Ends the stream of a stand-in that was removed or refused; it connects again if the refusal is temporary."""
        if isinstance(message, Refused) and message.retry:
            self.refused += 1
            return
        self.lines[one.name].out = True
        if not isinstance(message, Released):
            self.fenced.append(f"{one.id or one.name}: {message.reason}")

    # ------------------------------------------------------------------ headers

    def _carry(self, root: StandIn, view: View) -> None:
        """Makes the header that carries a view, unless the commit root must wait for a recovery; sends it to all
        crowds.
        """
        if not root.here or root.view != view.predecessor or view.id < root.promised:
            return
        data = encode_peer(carrier(root.header, view))
        for other in self._others:
            with contextlib.suppress(OSError):  # a crowd that has ended
                self._socket.sendto(data, other)
        self._bring(data)

    def _handed_on(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._bring(self._socket.recv(_DATAGRAM_NBYTES))

    def _bring(self, data: bytes) -> None:
        header = decode_peer(data)
        assert isinstance(header, Header)
        self._headers[header.next_view] = header
        view = self._views.get(header.next_view)
        if view is None:
            return  # those that are told of it later take it up then
        for one in self._ones:
            one.carried(header, view)

    # ------------------------------------------------------------------ orders

    def facts(self) -> dict[str, Any]:
        """Returns the counts and times observed so far."""
        talking = [line.one for line in self.lines.values() if line.talks]
        return {
            "talk": len(talking),
            "broken": self.broken,
            "refused": self.refused,
            "fenced": self.fenced,
            "cpu_s": time.process_time(),
            "views": [[v.term, v.number, t.members, t.decided, t.count, t.last_ns] for v, t in self.told.items()],
            "now": [[one.view.term, one.view.number] for one in talking if one.view != NO_VIEW],
        }

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carries out one order; returns the answer."""
        if "start" in order:
            self._living = [asyncio.create_task(line.live()) for line in self.lines.values()]
        elif "kill" in order:
            line = self.lines[order["kill"]]
            since = time.monotonic_ns()
            self.dead.add(line.one.id)
            await line.kill()
            return {"id": line.one.id, "ns": since}
        elif "dead" in order:
            self.dead.add(order["dead"])
            for one in self._ones:
                if one.here:
                    one.lost(order["dead"])
        return self.facts()


async def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("endpoint")
    p.add_argument("first", type=int)
    p.add_argument("count", type=int)
    p.add_argument("names", nargs="+", help="datagram sockets of this crowd, and of the others")
    p.add_argument("--keys-dir", default="")
    args = p.parse_args()
    crowd = Crowd(args.endpoint, args.first, args.count, args.keys_dir, args.names)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = json.loads(line)
        if "end" in order:
            break
        print(json.dumps(await crowd.obey(order)), flush=True)
    os._exit(0)  # as a whole: nobody takes leave


if __name__ == "__main__":
    asyncio.run(main())
