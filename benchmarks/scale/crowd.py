"""Many stand-ins for members in one process, each with a connection of its own to a real scheduler.

A program of its own that imports nothing but the product, so that it can be run on an older one. Stand-ins follow the
protocol as far as the scheduler sees it: hello, links that stand as soon as both ends were told, heartbeats at the
interval that they are told, promises, reports, and positions. A Decide or a NextView is not decoded: its view's number
is read out of the bytes. They never train: the state is that of the beginning, and a header that carries a view is the
same for all, without its members.

Orders come on stdin and answers go to stdout, a line of JSON each: {"start": true}, {"kill": NAME}, {"dead": ID} (its
links are closed), {"look": true}, {"end": true}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from chaos_lightning.control.channel import CLIENT_OPTIONS, END_OF_STREAM
from chaos_lightning.control.service import NAME
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.codec import unwrap_to_member, wrap_from_member
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Entered,
    Fence,
    FromMember,
    Header,
    Heartbeat,
    Hello,
    Kind,
    LinkEvent,
    OpenLinks,
    Prepare,
    Probe,
    Ready,
    Refused,
    Released,
    Report,
    Verdict,
    ViewId,
    Welcome,
)
from chaos_lightning.security.credentials import Credentials

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

CARRIED_S = 0.2
"""A view that a header is to carry is carried after so long."""
AGAIN_S = (0.1, 0.4)
"""Pause before a stream that broke is made again."""
_ENVELOPE = chaos_pb2.ToMemberEnvelope.DESCRIPTOR
_NAMES = {f.number: f.name for f in _ENVELOPE.fields}


def fields_of(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields, without looking into them: int, or the bytes of what has a length."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        length = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, data[at : at + length]
        at += length


def kind_of(data: bytes) -> str:
    """Name of the message in a ToMemberEnvelope, such as "next_view"; "" if there is none."""
    return next((_NAMES.get(number, "") for number, _ in fields_of(memoryview(data))), "")


def view_of(data: bytes) -> ViewId:
    """Number of the view in an envelope with a Decide or a NextView."""
    descriptor, part = _ENVELOPE, memoryview(data)
    for name in (kind_of(data), "view", "id"):
        field = descriptor.fields_by_name[name]
        part = next(value for number, value in fields_of(part) if number == field.number)
        descriptor = field.message_type
    found = dict(fields_of(part))
    return ViewId(*(found.get(descriptor.fields_by_name[name].number, 0) for name in ("term", "number")))


def carrier(view: ViewId) -> Header:
    """The header that carries this view, as all members know it."""
    return Header(seq=view.number, kind=Kind.BOUNDARY, step=0, view=view, prev_hash="", next_view=view)


class StandIn:
    """One member.

    Args:
        crowd: What all of this process share.
        name: Its own.
        number: Stands for its process id.
    """

    def __init__(self, crowd: Crowd, name: str, number: int) -> None:
        self.crowd, self.name, self.number = crowd, name, number
        self.id = self.chain = ""
        self.term = 0
        self.view = self.known = self.promised = NO_VIEW
        self.header = GENESIS
        self.links: dict[str, bool] = {}
        self.interval_s = 0.1
        self.ready = self.killed = self.out = False
        self.talks = False
        """It was welcomed on the stream that stands."""
        self._channel: Any = None
        self._call: Any = None
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()

    # ------------------------------------------------------------------ streams

    async def live(self) -> None:
        """Has a stream until it is put out or killed."""
        while not (self.killed or self.out):
            with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
                await self._attend()
            self.talks = False
            if not self.killed:
                self.crowd.broken += not self.out
                await self._channel.close()
                await asyncio.sleep(random.uniform(*AGAIN_S))

    async def _attend(self) -> None:
        self._channel, metadata = self.crowd.channel()
        self._outbox = asyncio.Queue()
        self._call = self._channel.stream_stream(f"/{NAME}/Attend")(metadata=metadata)
        self.say(self._hello())
        tasks = [asyncio.create_task(work()) for work in (self._write, self._beat)]
        try:
            while (data := await self._call.read()) is not END_OF_STREAM and not self.out:
                self._hear(data)
        finally:
            for task in tasks:
                task.cancel()

    def _hello(self) -> Hello:
        host = f"host-{self.name}"
        said = Hello("default", self.name, host, "10.0.0.1", 1, self.number, 1, 1, 1, "0", ())
        if not self.id:
            return said
        knowledge = {"resume": self.id, "view": self.view, "term": self.term, "chain": self.chain, "known": self.known}
        return Hello(**{name: getattr(said, name) for name in said.__slots__} | knowledge)

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._outbox.get())

    async def _beat(self) -> None:
        await asyncio.sleep(random.uniform(0, self.interval_s))
        while True:
            if self.talks:
                self.say(Heartbeat(self.view, self.header.seq, 0, chain=self.chain, known=self.known))
            await asyncio.sleep(self.interval_s)

    def say(self, message: FromMember) -> None:
        self._outbox.put_nowait(wrap_from_member(message).SerializeToString())

    async def kill(self) -> None:
        """Its connection is closed without a word, as a kernel does for a process that died."""
        self.killed = True
        await self._channel.close()

    # ------------------------------------------------------------------ what it is told

    def _hear(self, data: bytes) -> None:
        kind = kind_of(data)
        if kind in ("decide", "next_view"):
            self._foresee(view_of(data), carried=kind == "next_view")
            return
        if kind == "heartbeat_pace":
            self.interval_s = chaos_pb2.ToMemberEnvelope.FromString(data).heartbeat_pace.heartbeat_interval_s
            return
        if kind not in ("welcome", "open_links", "prepare", "probe", "fence", "refused", "released"):
            return
        match unwrap_to_member(chaos_pb2.ToMemberEnvelope.FromString(data)):
            case Welcome() as message:
                self._welcome(message)
            case OpenLinks(peers):
                for peer in peers:
                    if not self.links.get(peer.id) and peer.id not in self.crowd.dead:
                        self.links[peer.id] = True
                        self.say(LinkEvent(peer.id, True, "connected"))
                if not self.ready:
                    self.ready = True
                    self.say(Ready())
            case Prepare(number):
                self.promised = self.known = max(self.known, number)
                self.say(Report(number, self.view, self.header.seq, self.header.hash, last=self.header))
            case Probe(suspect):
                lives = suspect not in self.crowd.dead
                self.say(Verdict(suspect, lives, "last heard 1 ms ago" if lives else "no link"))
            case Refused(retry=True):
                self.crowd.refused += 1
            case Fence() | Refused() as message:
                self.out = True
                self.crowd.fenced.append(f"{self.id or self.name}: {message.reason}")
            case Released():
                self.out = True

    def _welcome(self, message: Welcome) -> None:
        self.talks, self.interval_s = True, message.heartbeat_interval_s
        self.term, self.chain = max(self.term, message.term), message.chain
        if self.id == message.member.id:
            for peer, up in self.links.items():
                self.say(LinkEvent(peer, up, "connected" if up else "closed (end of stream)"))
            self._stand()
            return
        self.id, self.ready, self.links = message.member.id, False, {}

    def _foresee(self, view: ViewId, *, carried: bool) -> None:
        """A view is decided; it is entered now, or when a header has carried it."""
        self.known = max(self.known, view)
        if view < self.promised or view <= self.view:
            return
        if not carried:
            self.promised = view
            self.crowd.hears(view)
            self._enter(view)
            return
        asyncio.get_running_loop().call_later(CARRIED_S, self._carried, view)

    def _carried(self, view: ViewId) -> None:
        if view > self.promised:
            self.header, self.promised = carrier(view), view
            self.crowd.hears(view)
            self._enter(view)

    def _enter(self, view: ViewId) -> None:
        self.view = view
        self._stand()

    def _stand(self) -> None:
        self.say(
            Entered(self.view, self.header.seq, 0, self.header.hash, loaded=self.view != NO_VIEW, chain=self.chain)
        )

    def lose(self, dead: str) -> None:
        """A member that it may have a link to is gone."""
        if self.links.get(dead) and not self.killed:
            self.links[dead] = False
            if self.talks:
                self.say(LinkEvent(dead, False, "closed (end of stream)"))


class Crowd:
    """All stand-ins of this process, and what they saw.

    Args:
        endpoint: Of the scheduler.
        first: Number of the first of them.
        count: How many.
        keys_dir: Folder of keys; "" for plain connections.
    """

    def __init__(self, endpoint: str, first: int, count: int, keys_dir: str) -> None:
        self._endpoint, self._secret = endpoint, Credentials.load(keys_dir, environ={})
        self.members = {f"n{n}": StandIn(self, f"n{n}", n) for n in range(first, first + count)}
        self.dead: set[str] = set()
        self.fenced: list[str] = []
        self.broken = self.refused = 0
        self._heard: dict[ViewId, list[int]] = defaultdict(list)

    def channel(self) -> tuple[Any, tuple[tuple[str, bytes], ...]]:
        """A new connection, and what is shown on it."""
        keys = self._secret.keys
        if keys is None:
            return grpc.aio.insecure_channel(self._endpoint, options=CLIENT_OPTIONS), ()
        now = keys.current()
        shown = grpc.ssl_channel_credentials(now.trusted, now.key, now.chain)
        return grpc.aio.secure_channel(self._endpoint, shown, options=CLIENT_OPTIONS), self._secret.metadata()

    def hears(self, view: ViewId) -> None:
        """Somebody was told of a view, in time."""
        self._heard[view].append(time.monotonic_ns())

    def facts(self) -> dict[str, Any]:
        """What was seen so far."""
        return {
            "talk": sum(m.talks for m in self.members.values()),
            "broken": self.broken,
            "refused": self.refused,
            "fenced": self.fenced,
            "cpu_s": time.process_time(),
            "views": [[v.term, v.number, len(ns), max(ns)] for v, ns in self._heard.items()],
            "now": [[m.view.term, m.view.number] for m in self.members.values() if m.talks],
        }

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """One order; returns the answer."""
        if "start" in order:
            self._living = [asyncio.create_task(m.live()) for m in self.members.values()]
        elif "kill" in order:
            one = self.members[order["kill"]]
            since = time.monotonic_ns()
            self.dead.add(one.id)
            await one.kill()
            return {"id": one.id, "ns": since}
        elif "dead" in order:
            self.dead.add(order["dead"])
            for member in self.members.values():
                member.lose(order["dead"])
        return self.facts()


async def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("endpoint")
    p.add_argument("first", type=int)
    p.add_argument("count", type=int)
    p.add_argument("--keys-dir", default="")
    args = p.parse_args()
    crowd = Crowd(args.endpoint, args.first, args.count, args.keys_dir)
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
