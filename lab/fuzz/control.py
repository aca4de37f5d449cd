"""Fuzzes the control plane with a hostile peer: a scheduler's server, the TLS proxy in front of it, and a member's
agent.

Theory of operation. Each is started once per process, with a bystander that must not be hurt: another member's stream
at the same server, a member behind the same TLS proxy. A hostile input is said, the connection's end is awaited, and
then the bystander is asked whether it is well.

At the *TLS proxy* each part of an input is one connection; its number says what is done on it (`Deed`) and which
certificate is shown, its bytes are what is said, or what is put into a handshake that is sound otherwise. All are open
at the same time. A connection that has said its last word, or has not made itself known in time, must be shut by the
TLS proxy; then nothing may be left of any of them, the member's connection must stand, and a new one must be let in.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import enum
import functools
import json
import queue
import shutil
import socket
import ssl
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import grpc

from chaos_lightning.control.agent import Agent
from chaos_lightning.control.options import SchedulerServerConfig
from chaos_lightning.control.scheduler_server import SchedulerServer
from chaos_lightning.events.events import EventLog
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.codec import FROM_MEMBER, TO_MEMBER
from chaos_lightning.protocol.types import NO_VIEW, Heartbeat, Ready, Settings, ToMember, Welcome
from chaos_lightning.service.memory_store import MemoryStore
from lab.fuzz import mutate
from lab.fuzz.messages import each, mutation
from lab.fuzz.readers import hello
from lab.fuzz.target import PATIENCE_S, FindingError, Target

# ------------------------------------------------------------------ a scheduler's server


_SERVICE = f"{chaos_pb2.DESCRIPTOR.package}.Scheduler"
"""Name of the service, as in control/service.proto."""


def _raw(data: bytes) -> bytes:
    return data


def _status_of(channel: grpc.Channel) -> Any:
    return channel.unary_unary(
        f"/{_SERVICE}/Status", request_serializer=_raw, response_deserializer=chaos_pb2.StatusReply.FromString
    )


ORDERLY = ("deposed: ", "the job is finished")


class _Server:
    """Scheduler in this process, with a well-behaved member connected to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="fuzzed", daemon=True)
        self._thread.start()
        config = SchedulerServerConfig(port=0, settings=Settings(min_nodes=1, max_nodes=64))
        self.server = SchedulerServer(config, MemoryStore, EventLog.in_directory(None, "fuzz", role="scheduler"))
        self.port = asyncio.run_coroutine_threadsafe(self.server.start(), self.loop).result(PATIENCE_S)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.attend = self.channel.stream_stream(
            f"/{_SERVICE}/Attend", request_serializer=_raw, response_deserializer=_raw
        )
        self._status = _status_of(self.channel)
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._said.put(FROM_MEMBER.encode(hello("well", 7)))
        self._stream = self.attend(iter(self._said.get, None))
        next(iter(self._stream))
        self._over = asyncio.run_coroutine_threadsafe(self.server.life.ended(), self.loop)

    def check(self) -> bool:
        """Checks that the scheduler works or has ended in good order; returns whether it works. A member may end it in
        two ways: as the last of a job, by finishing, or by naming a later term (protocol.md 7).
        """
        try:
            facts = json.loads(self._status(b"", timeout=PATIENCE_S).json)
        except grpc.RpcError as error:
            raise FindingError(f"the scheduler does not answer: {error.code()} {error.details()}") from error
        lost = "well" not in {s["name"] for s in facts["streams"]}
        with contextlib.suppress(TimeoutError):
            reason = self._over.result(1.0 if lost else 0.0)
            if not reason.startswith(ORDERLY):
                raise FindingError(f"the scheduler has ended: {reason}")
            return False
        self._said.put(FROM_MEMBER.encode(Heartbeat(NO_VIEW, 0, 0)))
        if lost or not self._stream.is_active():
            raise FindingError("the stream of a member that did nothing has ended")
        return True

    def stop(self) -> None:
        self._said.put(None)
        self.channel.close()
        asyncio.run_coroutine_threadsafe(self.server.stop(), self.loop).result(PATIENCE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


@functools.cache
def _server() -> _Server:
    return _Server()


def _feed_server(data: bytes) -> None:
    server = _server()
    said = [part for _, part in mutate.split(data)]
    call = server.attend(iter(said), timeout=PATIENCE_S)
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
    first = [(0, FROM_MEMBER.encode(hello("x", 9))), (0, FROM_MEMBER.encode(Ready()))]
    goodbye = (0, chaos_pb2.FromMemberEnvelope(goodbye=True).SerializeToString())
    seeds = [mutate.joined(first), mutate.joined([*first, goodbye])]
    return seeds + [mutate.joined([*first, (0, said)]) for said in each(FROM_MEMBER, Random(5))]


# ------------------------------------------------------------------ a member's agent


class _Hostile:
    """Scheduler that sends given bytes to whoever connects."""

    def __init__(self) -> None:
        from concurrent import futures

        self.says: list[bytes] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        handler = grpc.stream_stream_rpc_method_handler(
            self._attend, request_deserializer=_raw, response_serializer=_raw
        )
        methods = {"Attend": handler}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _attend(self, requests: Any, context: Any) -> Any:
        next(requests)
        yield from self.says


@functools.cache
def _hostile() -> _Hostile:
    return _Hostile()


def _feed_agent(data: bytes) -> None:
    """Sends the input's parts to an agent as a scheduler's messages; afterwards the agent must reconnect, or have a
    reason not to.
    """
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
    deadline = time.monotonic() + PATIENCE_S
    while not over.wait(0.01) and agent.is_alive() and time.monotonic() < deadline:
        pass  # a Fence ends it without a word about its state
    agent.close()
    if failures:
        raise FindingError(failures[0])
    if agent.is_alive():
        raise FindingError("the agent does not end")


def _agent_seeds() -> list[bytes]:
    from chaos_lightning.protocol.types import Member

    welcome = TO_MEMBER.encode(Welcome(Member("a~1", "a", "host", "127.0.0.1", 1), 1, "founder", "", 0.1, 0.5))
    said = each(TO_MEMBER, Random(6))
    return [mutate.joined([(0, welcome)]), *(mutate.joined([(0, welcome), (0, data)]) for data in said)]


# ------------------------------------------------------------------ the TLS proxy before a scheduler

_HANDSHAKE_S = 0.5
_MOST_AT_ONCE = 12
_FLOOD = 70
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""Preface and empty settings of an HTTP/2 client (RFC 9113, 3.4)."""


class Deed(enum.IntEnum):
    """Kind of attack that a connection to the TLS proxy makes."""

    SAY = 0
    """Say the bytes, and no more."""
    SAY_AND_WAIT = 1
    """Say the bytes, one segment for each of the first few; then nothing, until the TLS proxy shuts the connection."""
    BREAK_HELLO = 2
    """Send a ClientHello with the bytes in it (the first one says where); no more."""
    BREAK_ANSWER = 3
    """Send the answer to the scheduler's part of the handshake with the bytes in it; no more."""
    SPEAK = 4
    """Make a whole handshake; then say the bytes inside TLS."""
    SPEAK_RAW = 5
    """Make a whole handshake; then say the bytes outside TLS."""
    RESET = 6
    """Say the bytes, then reset the connection instead of ending it."""
    FLOOD = 7
    """Say the bytes on very many connections."""


class _Proxied:
    """TLS proxy with a scheduler behind it, and a well-behaved member that is connected through it."""

    def __init__(self) -> None:
        from chaos_lightning.security import keyfiles
        from chaos_lightning.security.credentials import KeyFolder
        from chaos_lightning.service.tls_proxy import TlsProxy

        folder = Path(tempfile.mkdtemp(prefix="chaos-fuzz-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        cluster = keyfiles.init(folder / "keys", [keyfiles.KeyHolder("a"), keyfiles.KeyHolder("b")])
        keyfiles.init(folder / "others", [keyfiles.KeyHolder("b")])
        member, other = folder / "keys" / "nodes" / "b", folder / "others" / "nodes" / "b"
        late = folder / "late"
        late.mkdir(0o700)
        for name, text in keyfiles.issue(cluster, keyfiles.KeyHolder("late"), -0.001).items():
            (late / name).write_text(text)
        self.shown = [_context(member), _context(other), _context(late), _context(None), _context(member, alpn="")]
        self.refused = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fuzzed-proxy", daemon=True).start()
        config = SchedulerServerConfig(port=0, settings=Settings(min_nodes=1, max_nodes=8))
        server = SchedulerServer(config, MemoryStore, EventLog.in_directory(None, "fuzz", role="scheduler"))

        async def start() -> tuple[Any, int]:
            inner = await server.start()
            own = KeyFolder(folder / "keys" / "nodes" / "a")
            tls_proxy = TlsProxy(own, self._count, self._count, handshake_timeout_s=_HANDSHAKE_S)
            return tls_proxy, await tls_proxy.open("127.0.0.1", 0, inner)

        self.tls_proxy, self.port = asyncio.run_coroutine_threadsafe(start(), self._loop).result(PATIENCE_S)
        texts = [(member / name).read_bytes() for name in (keyfiles.TRUSTED, keyfiles.KEY, keyfiles.CHAIN)]
        channel = grpc.secure_channel(f"127.0.0.1:{self.port}", grpc.ssl_channel_credentials(*texts))
        self._status = _status_of(channel)
        self.check()

    def _count(self, peer: str, why: str) -> None:
        self.refused += 1

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def check(self) -> None:
        """Checks that the proxy has closed all connections except the member's, and that it lets in a new one."""
        deadline = time.monotonic() + PATIENCE_S
        while self.tls_proxy.visits > 1:
            if time.monotonic() > deadline:
                raise FindingError(
                    f"the TLS proxy keeps {self.tls_proxy.visits - 1} connections whose callers are gone"
                )
            time.sleep(0.001)
        while words := self._outside():  # a starved process may miss the short limit on handshakes, but not for ever
            if time.monotonic() > deadline:
                raise FindingError(words)

    def _outside(self) -> str:
        """Returns why a member cannot connect through the TLS proxy or gets no answer; "" if it can."""
        try:
            self._status(b"", timeout=PATIENCE_S)
            with self.connect() as sock, self.shown[0].wrap_socket(sock) as tls:
                tls.sendall(_PREFACE)
                return "" if tls.recv(1) else "the TLS proxy lets a member in, and the scheduler behind it says nothing"
        except (grpc.RpcError, OSError) as error:
            return f"the TLS proxy lets a member in no more: {error}"


def _context(folder: Path | None, *, alpn: str = "h2") -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE  # the caller is the hostile end
    if alpn:
        made.set_alpn_protocols([alpn])
    if folder is not None:
        made.load_cert_chain(folder / "node.crt", folder / "node.key")
    return made


@functools.cache
def _tls_proxy() -> _Proxied:
    return _Proxied()


class _Caller:
    """Hostile connection to the TLS proxy; makes its TLS handshake in memory, so that each message of it can be
    changed.
    """

    def __init__(self, tls_proxy: _Proxied, deed: Deed, context: ssl.SSLContext, said: bytes) -> None:
        self.deed = deed
        self._said = said
        self._sock = tls_proxy.connect()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out)

    def act(self) -> None:
        """Carries out the connection's attack."""
        with contextlib.suppress(OSError):  # ssl.SSLError is one: the TLS proxy may have shut it meanwhile
            match self.deed:
                case Deed.SAY_AND_WAIT:
                    self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for at in range(min(16, len(self._said))):
                        self._sock.sendall(self._said[at : at + 1])
                    self._sock.sendall(self._said[16:])
                    return
                case Deed.BREAK_HELLO:
                    self._sock.sendall(self._broken(self._flight()))
                case Deed.BREAK_ANSWER:
                    self._sock.sendall(self._flight())
                    self._sock.sendall(self._broken(self._answer()))
                case Deed.SPEAK | Deed.SPEAK_RAW:
                    self._sock.sendall(self._flight())
                    self._sock.sendall(self._answer())
                    if self._said and self.deed is Deed.SPEAK:
                        self._tls.write(self._said)
                    self._sock.sendall(self._out.read() if self.deed is Deed.SPEAK else self._said)
                case _:
                    self._sock.sendall(self._said)
            if self.deed is Deed.RESET:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                self._sock.close()
            else:
                self._sock.shutdown(socket.SHUT_WR)

    def _flight(self) -> bytes:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        return self._out.read()

    def _answer(self) -> bytes:
        """Returns the client's next handshake message, after it has read the server's part (as far as that arrives)."""
        while not self._out.pending and (piece := self._sock.recv(1 << 16)):
            self._in.write(piece)
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                continue
        return self._out.read()

    def _broken(self, flight: bytes) -> bytes:
        if not self._said:
            return flight
        at = self._said[0] * len(flight) // 256
        taken = 0 if self._said[0] & 1 else len(self._said) - 1
        return flight[:at] + self._said[1:] + flight[at + taken :]

    def close(self) -> None:
        """Waits until the TLS proxy has closed the connection."""
        with self._sock, contextlib.suppress(ConnectionError):
            try:
                while self._sock.fileno() >= 0 and self._sock.recv(1 << 16):
                    pass
            except TimeoutError as error:
                raise FindingError(f"after {self.deed.name} the TLS proxy keeps a connection open") from error


def _feed_proxy(data: bytes) -> None:
    """Makes the input's attacks on the TLS proxy, and checks that the member connected through it is unharmed."""
    tls_proxy, callers = _tls_proxy(), list[_Caller]()
    try:
        for tag, said in mutate.split(data)[:_MOST_AT_ONCE]:
            deed, context = Deed(tag % len(Deed)), tls_proxy.shown[tag // len(Deed) % len(tls_proxy.shown)]
            callers += [_Caller(tls_proxy, deed, context, said) for _ in range(_FLOOD if deed is Deed.FLOOD else 1)]
            if deed is Deed.FLOOD:
                break
        for caller in callers:
            caller.act()
    finally:
        for caller in callers:
            caller.close()
    tls_proxy.check()


def _proxy_seeds() -> list[bytes]:
    """Returns inputs with one or several attacks of each kind, with every certificate."""
    words = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\0" + bytes(40),
        bytes(600),
        _PREFACE,
        b"\x16",
        b"",
    ]
    seeds = [mutate.joined([(deed, said)]) for deed in Deed if deed is not Deed.SAY_AND_WAIT for said in words]
    seeds += [mutate.joined([(Deed.SPEAK + len(Deed) * who, _PREFACE)]) for who in range(5)]
    seeds += [mutate.joined([(Deed.BREAK_ANSWER + len(Deed) * who, b"\1")]) for who in range(5)]
    seeds += [mutate.joined([(Deed.SAY_AND_WAIT, said)]) for said in words[:2]]
    seeds.append(mutate.joined([(deed, words[deed % len(words)]) for deed in Deed if deed is not Deed.FLOOD]))
    return seeds


def _mutate_proxy(data: bytes, rng: Random) -> bytes:
    """Returns a changed, but nearly valid input for the fuzzer; few inputs wait for the TLS proxy's time limit."""
    tags = [deed + len(Deed) * who for deed in Deed for who in range(5) if deed < Deed.FLOOD]
    changed = mutate.parts_of(data, rng, lambda tag, part, r: mutate.bytes_of(part, r), tags)
    parts = mutate.split(changed)
    if rng.randint(0, 7):  # waiting takes as long as the TLS proxy does
        parts = [(Deed.SAY if Deed(tag % len(Deed)) is Deed.SAY_AND_WAIT else tag, part) for tag, part in parts]
    return mutate.joined(parts)


CONTROL = (
    Target(
        "server",
        "members' streams, by a live scheduler",
        _server_seeds,
        _feed_server,
        mutation(lambda tag: FROM_MEMBER, (0,)),
    ),
    Target("tls-proxy", "whatever comes to the TLS proxy before a scheduler", _proxy_seeds, _feed_proxy, _mutate_proxy),
    Target(
        "agent",
        "a scheduler's stream, by a live member's agent",
        _agent_seeds,
        _feed_agent,
        mutation(lambda tag: TO_MEMBER, (0,)),
    ),
)
