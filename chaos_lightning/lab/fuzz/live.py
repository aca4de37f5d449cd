"""Targets with somebody at the other end: a link, a handshake, a scheduler's server, a member's agent, all live.

Theory of operation. Each is started once per process, with a bystander that must not be hurt: another link on the same
loop, another member's stream at the same server. A hostile input is sent, the connection's end is awaited, and then the
bystander is asked whether it is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import queue
import socket
import struct
import threading
import time
import typing
from random import Random
from typing import Any

import grpc

from chaos_lightning.control.agent import Agent
from chaos_lightning.control.memory_store import MemoryStore
from chaos_lightning.control.options import ServerConfig
from chaos_lightning.control.server import SchedulerServer
from chaos_lightning.errors import ChaosError, WireError
from chaos_lightning.events.events import EventLog
from chaos_lightning.lab.fuzz import mutate
from chaos_lightning.lab.fuzz.bulks import bulk_seeds, feed_bulk, mutate_bulk
from chaos_lightning.lab.fuzz.doors import door_seeds, feed_door, mutate_door
from chaos_lightning.lab.fuzz.handshakes import feed_handshake, handshake_seeds, mutate_handshake
from chaos_lightning.lab.fuzz.readers import hello, message, mutated_message, wrapped
from chaos_lightning.lab.fuzz.sealed import feeding, mutating, seeds_of
from chaos_lightning.lab.fuzz.target import FindingError, Target
from chaos_lightning.membership.routing import Letter, unpacked
from chaos_lightning.protocol import chaos_pb2, codec
from chaos_lightning.protocol.types import NO_VIEW, FromMember, Heartbeat, Ready, Settings, ToMember, ViewId, Welcome
from chaos_lightning.transport.frames import HEADER_NBYTES, Frame, FrameType, pack, payload_checksum, unpack
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.loop import IoLoop

_PATIENCE_S = 5.0

# ------------------------------------------------------------------ links


class _End:
    """An owner that reads what comes as a member does."""

    def __init__(self, loop: IoLoop, sock: socket.socket, peer: str) -> None:
        self.over = threading.Event()
        self.got = threading.Event()
        self.delivered: list[bytes] = []
        """Payloads that came by value."""
        self.link = Link(loop, sock, peer, self)

    def target(self, peer: str, frame: Frame) -> memoryview | None:
        if frame.type in (FrameType.UP, FrameType.DOWN) and frame.length > 1 << 20:
            return None  # as a member does with a chunk that it does not expect
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: str, frame: Frame, payload: Any) -> None:
        if isinstance(payload, memoryview) and not frame.pieces:
            self.delivered.append(bytes(payload))
        if isinstance(payload, memoryview) and frame.type == FrameType.MESSAGE:
            codec.decode_peer(payload)
        elif isinstance(payload, memoryview) and frame.type == FrameType.ROUTED:
            unpacked(payload)
        self.got.set()

    def broken(self, peer: str, link: Link, evidence: str) -> None:
        self.over.set()


class _Links:
    """A loop, and two links of it that must go on working."""

    def __init__(self) -> None:
        self.crashes: list[BaseException] = []
        self.loop = IoLoop("fuzz", self.crashes.append)
        self.loop.start()
        one, other = socket.socketpair()
        made: list[_End] = []
        self.do(lambda: made.extend((_End(self.loop, one, "well"), _End(self.loop, other, "too"))))
        self.well, self.too = made

    def do(self, function: Any) -> None:
        if not self.loop.call_and_wait(function, _PATIENCE_S) or self.crashes:
            raise FindingError(f"the loop of all links has ended: {self.crashes}")

    def check(self) -> None:
        self.too.got.clear()
        self.too.delivered.clear()
        letter = memoryview(Letter("a~1", "b~2", 1, b"x").packed())
        self.do(lambda: self.well.link.send(FrameType.ROUTED, payload=(letter,)))
        if not self.too.got.wait(_PATIENCE_S):
            raise FindingError("another link of the same member does not work any more")


@functools.cache
def _links() -> _Links:
    return _Links()


def _read_link(ours: socket.socket, theirs: socket.socket, said: bytes) -> list[bytes]:
    """What a link of ours delivers of this, said at the other end; both ends are closed afterwards."""
    links = _links()
    made: list[_End] = []
    with theirs:
        links.do(lambda: made.append(_End(links.loop, ours, "x")))
        theirs.settimeout(_PATIENCE_S)
        with contextlib.suppress(OSError):
            theirs.sendall(said)
            theirs.shutdown(socket.SHUT_WR)
        if not made[0].over.wait(_PATIENCE_S):
            raise FindingError("a link whose other end has closed is still open")
    links.check()
    return made[0].delivered


def _feed_link(data: bytes) -> None:
    _read_link(*socket.socketpair(), data)


def _frames(data: bytes) -> list[tuple[Frame, bytes]]:
    """Those that these bytes begin with."""
    found: list[tuple[Frame, bytes]] = []
    at = 0
    while len(data) - at >= HEADER_NBYTES and len(found) < mutate.MAX_ITEMS:
        try:
            frame = unpack(bytearray(data[at : at + HEADER_NBYTES]))
        except WireError:
            break
        at += HEADER_NBYTES
        length = frame.pieces * 16 if frame.pieces else frame.length
        found.append((frame, data[at : at + length]))
        at += length
    return found


def _packed(frame: Frame, payload: bytes) -> bytes:
    checksum = payload_checksum((memoryview(payload),)) if payload and frame.summed else frame.checksum
    head = pack(
        frame.type,
        frame.view,
        frame.seq,
        frame.start,
        frame.length,
        checksum,
        summed=frame.summed,
        pieces=frame.pieces,
    )
    return head + payload


def _frame(rng: Random) -> bytes:
    kind = rng.choice(list(FrameType))
    payload = b""
    if kind == FrameType.MESSAGE:
        with contextlib.suppress(WireError, TypeError):
            payload = wrapped(typing.cast(Any, _peer()), message(_peer(), rng))
    elif kind == FrameType.ROUTED:
        payload = Letter(rng.choice(mutate.IDS), rng.choice(mutate.IDS), rng.randint(0, 9), b"payload").packed()
    else:
        payload = bytes(rng.randint(0, 255) for _ in range(rng.choice((0, 0, 1, 16, 100))))
    frame = Frame(kind, ViewId(1, rng.randint(0, 3)), rng.randint(0, 5), rng.randint(0, 64), len(payload), 0)
    return _packed(frame, payload)


def _peer() -> Any:
    from chaos_lightning.protocol.types import PeerMessage

    return PeerMessage


def _link_seeds() -> list[bytes]:
    rng = Random(4)
    return [_frame(rng) for _ in range(30)]


def _mutate_frames(data: bytes, rng: Random) -> bytes:
    frames = _frames(data)
    if not frames or rng.randint(0, 9) == 0:
        return mutate.bytes_of(data, rng)
    at = rng.randint(0, len(frames) - 1)
    frame, payload = frames[at]
    what = rng.randint(0, 8)
    if what == 0:
        frame.type = rng.choice(list(FrameType))
    elif what == 1:
        frame.length = rng.choice((0, 1, len(payload) + 1, 1 << 20, 64 << 20, (64 << 20) + 1, (1 << 32) - 1))
    elif what == 2:
        frame.view = ViewId(rng.choice((0, 1, (1 << 32) - 1)), rng.choice((0, 1, (1 << 32) - 1)))
    elif what == 3:
        frame.seq, frame.start = rng.choice((0, 1, (1 << 64) - 1)), rng.choice((0, 1, (1 << 64) - 1))
    elif what == 4:
        frame.summed, frame.checksum = not frame.summed, rng.choice((0, 1, (1 << 64) - 1))
    elif what == 5:
        frame.pieces, frame.type = rng.choice((1, 2, 4096)), rng.choice((FrameType.UP, FrameType.DOWN))
        payload = bytes(rng.choice((0, 8, 255)) for _ in range(min(256, 16 * frame.pieces)))
    elif what == 6 and frame.type == FrameType.MESSAGE:
        payload = mutated_message(2, payload, rng)
        frame.length = len(payload)
    elif what == 7:
        payload = mutate.bytes_of(payload, rng)
        frame.length = len(payload)
    else:
        return data + _frame(rng)
    with contextlib.suppress(struct.error):
        return b"".join(_packed(f, p) for f, p in [*frames[:at], (frame, payload), *frames[at + 1 :]])
    return data


# ------------------------------------------------------------------ a scheduler's server


def _method(name: str) -> str:
    service = chaos_pb2.DESCRIPTOR.services_by_name["Scheduler"]
    return f"/{service.full_name}/{name}"


def _raw(data: bytes) -> bytes:
    return data


ORDERLY = ("deposed: ", "the job is finished")


class _Server:
    """A scheduler in this process, and one member that is well."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="fuzzed", daemon=True)
        self._thread.start()
        config = ServerConfig(port=0, settings=Settings(min_nodes=1, max_nodes=64))
        self.server = SchedulerServer(config, MemoryStore, EventLog.in_directory(None, "fuzz", role="scheduler"))
        self.port = asyncio.run_coroutine_threadsafe(self.server.start(), self.loop).result(_PATIENCE_S)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.attend = self.channel.stream_stream(_method("Attend"), request_serializer=_raw, response_deserializer=_raw)
        self._status = self.channel.unary_unary(
            _method("Status"), request_serializer=_raw, response_deserializer=chaos_pb2.StatusReply.FromString
        )
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._said.put(wrapped(FromMember, hello("well", 7)))
        self._stream = self.attend(iter(self._said.get, None))
        next(iter(self._stream))
        self._over = asyncio.run_coroutine_threadsafe(self.server.ended(), self.loop)

    def check(self) -> bool:
        """Whether it goes on. A member may make it end in two ways, in good order: it was the last of a job and has
        finished, or it says that there is a later term (PROTOCOL.md 7).
        """
        try:
            facts = json.loads(self._status(b"", timeout=_PATIENCE_S).json)
        except grpc.RpcError as error:
            raise FindingError(f"the scheduler does not answer: {error.code()} {error.details()}") from error
        lost = "well" not in {s["name"] for s in facts["streams"]}
        with contextlib.suppress(TimeoutError):
            reason = self._over.result(1.0 if lost else 0.0)
            if not reason.startswith(ORDERLY):
                raise FindingError(f"the scheduler has ended: {reason}")
            return False
        self._said.put(wrapped(FromMember, Heartbeat(NO_VIEW, 0, 0)))
        if lost or not self._stream.is_active():
            raise FindingError("the stream of a member that did nothing has ended")
        return True

    def stop(self) -> None:
        self._said.put(None)
        self.channel.close()
        asyncio.run_coroutine_threadsafe(self.server.stop(), self.loop).result(_PATIENCE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_PATIENCE_S)
        self.loop.close()


@functools.cache
def _server() -> _Server:
    return _Server()


def _feed_server(data: bytes) -> None:
    server = _server()
    said = [part for _, part in mutate.split(data)]
    call = server.attend(iter(said), timeout=_PATIENCE_S)
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise FindingError("a stream whose member has ended it is still open") from error
    if not server.check():
        server.stop()
        _server.cache_clear()


def _server_seeds() -> list[bytes]:
    rng = Random(5)
    first = [(0, wrapped(FromMember, hello("x", 9))), (0, wrapped(FromMember, Ready()))]
    goodbye = (0, chaos_pb2.FromMemberEnvelope(goodbye=True).SerializeToString())
    seeds = [mutate.joined(first), mutate.joined([*first, goodbye])]
    for cls in typing.get_args(FromMember):
        with contextlib.suppress(WireError, TypeError):
            seeds.append(mutate.joined([*first, (0, wrapped(FromMember, mutate.value_of(cls, rng)))]))
    return seeds


def _mutate_said(which: int) -> Any:
    def changed(data: bytes, rng: Random) -> bytes:
        return mutate.parts_of(data, rng, lambda tag, part, r: mutated_message(which, part, r), (0,))

    return changed


# ------------------------------------------------------------------ a member's agent


class _Hostile:
    """A scheduler that says what it is told to say."""

    def __init__(self) -> None:
        from concurrent import futures

        self.says: list[bytes] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        handler = grpc.stream_stream_rpc_method_handler(
            self._attend, request_deserializer=_raw, response_serializer=_raw
        )
        methods = {"Attend": handler}
        service = chaos_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _attend(self, requests: Any, context: Any) -> Any:
        next(requests)
        yield from self.says


@functools.cache
def _hostile() -> _Hostile:
    return _Hostile()


def _feed_agent(data: bytes) -> None:
    """An agent and the machine behind it hear this; after it the agent still comes back, or has a reason not to."""
    from chaos_lightning.membership import effects as fx
    from chaos_lightning.membership.member import MemberMachine

    hostile, machine = _hostile(), MemberMachine()
    hostile.says = [part for _, part in mutate.split(data)]
    over, failures = threading.Event(), list[str]()

    def heard(said: ToMember) -> None:
        machine.on(1.0, fx.ControlIn(said))

    def state(words: str) -> None:
        if "internal error" in words:
            failures.append(words)
        if words != "connected":
            over.set()

    agent = Agent(
        endpoints=[f"127.0.0.1:{hostile.port}"],
        token=b"",
        hello_factory=lambda: hello("a", 1),
        on_message=heard,
        on_state=state,
        heartbeat=lambda: Heartbeat(NO_VIEW, 0, 0),
        connect_timeout_s=0.05,
    )
    agent.start()
    deadline = time.monotonic() + _PATIENCE_S
    while not over.wait(0.01) and agent.is_alive() and time.monotonic() < deadline:
        pass  # a Fence ends it without a word about its state
    agent.close()
    if failures:
        raise FindingError(failures[0])
    if agent.is_alive():
        raise FindingError("the agent does not end")


def _agent_seeds() -> list[bytes]:
    from chaos_lightning.protocol.types import Member

    rng = Random(6)
    welcome = wrapped(ToMember, Welcome(Member("a~1", "a", "host", "127.0.0.1", 1), 1, "founder", "", 0.1, 0.5))
    seeds = [mutate.joined([(0, welcome)])]
    for cls in typing.get_args(ToMember):
        with contextlib.suppress(WireError, TypeError, ChaosError):
            seeds.append(mutate.joined([(0, welcome), (0, wrapped(ToMember, mutate.value_of(cls, rng)))]))
    return seeds


_LARGE = 140 << 20
"""A frame of 64 MiB may be announced and is then waited for; twice that while it is checked."""

LIVE = (
    Target("frames", "frames, by a live link", _link_seeds, _feed_link, _mutate_frames, _LARGE),
    Target("handshake", "the handshake of a link, by either end", handshake_seeds, feed_handshake, mutate_handshake),
    Target(
        "sealed",
        "sealed records, by a live link and as a bulk connection reads them",
        lambda: seeds_of(_link_seeds()),
        feeding(_read_link),
        mutating(_mutate_frames),
        _LARGE,
    ),
    Target("bulk", "bulk frames, by a donor and by a joiner", bulk_seeds, feed_bulk, mutate_bulk, _LARGE),
    Target("server", "members' streams, by a live scheduler", _server_seeds, _feed_server, _mutate_said(0)),
    Target("door", "whatever comes to the door with TLS before a scheduler", door_seeds, feed_door, mutate_door),
    Target("agent", "a scheduler's stream, by a live member's agent", _agent_seeds, _feed_agent, _mutate_said(1)),
)
