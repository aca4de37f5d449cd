"""The door with TLS before a scheduler: garbage, half a handshake, slow ones, many at once, and what is no gRPC.

Theory of operation. A real door stands before a real scheduler, and a member is behind it all the time. Each part of an
input is one connection; its number says what is done on it (`Deed`) and which certificate is shown, its bytes are what
is said, or what is put into a handshake that is sound otherwise. All are open at the same time. Whoever has said its
last word, or has not made itself known in time, must be shut out by the door; then nothing may be left of any of them,
the member's connection must stand, and somebody new must be let in.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import enum
import functools
import shutil
import socket
import ssl
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from chaos_lightning.control.memory_store import MemoryStore
from chaos_lightning.control.options import ServerConfig
from chaos_lightning.control.server import SchedulerServer
from chaos_lightning.events.events import EventLog
from chaos_lightning.lab.fuzz import mutate
from chaos_lightning.lab.fuzz.target import FindingError
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.types import Settings

import grpc  # isort: skip  (after server, which sets gRPC's environment)

_PATIENCE_S = 5.0
_HANDSHAKE_S = 0.5
_MOST_AT_ONCE = 12
_FLOOD = 70
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""Of an HTTP/2 client: its preface and empty settings (RFC 9113, 3.4)."""


class Deed(enum.IntEnum):
    """What is done on a connection."""

    SAY = 0
    """The bytes, and no more."""
    SAY_AND_WAIT = 1
    """The bytes, one segment for each of the first few; then nothing, until the door shuts it."""
    BREAK_HELLO = 2
    """A ClientHello with the bytes in it (the first one says where); no more."""
    BREAK_ANSWER = 3
    """The same with what answers the scheduler's part of the handshake."""
    SPEAK = 4
    """A whole handshake; then the bytes inside TLS."""
    SPEAK_RAW = 5
    """A whole handshake; then the bytes outside TLS."""
    RESET = 6
    """The bytes, then a reset instead of an end."""
    FLOOD = 7
    """The bytes on very many connections."""


class _Door:
    """A door, a scheduler behind it, and a member that is well."""

    def __init__(self) -> None:
        from chaos_lightning.control.door import Door
        from chaos_lightning.security import keyfiles
        from chaos_lightning.security.credentials import KeyFolder

        folder = Path(tempfile.mkdtemp(prefix="chaos-fuzz-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        cluster = keyfiles.init(folder / "keys", [keyfiles.Node("a"), keyfiles.Node("b")])
        keyfiles.init(folder / "others", [keyfiles.Node("b")])
        member, other = folder / "keys" / "nodes" / "b", folder / "others" / "nodes" / "b"
        late = folder / "late"
        late.mkdir(0o700)
        for name, text in keyfiles.issue(cluster, keyfiles.Node("late"), -0.001).items():
            (late / name).write_text(text)
        self.shown = [_context(member), _context(other), _context(late), _context(None), _context(member, alpn="")]
        self.refused = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fuzzed-door", daemon=True).start()
        config = ServerConfig(port=0, settings=Settings(min_nodes=1, max_nodes=8))
        server = SchedulerServer(config, MemoryStore, EventLog.in_directory(None, "fuzz", role="scheduler"))

        async def start() -> tuple[Any, int]:
            inner = await server.start()
            own = KeyFolder(folder / "keys" / "nodes" / "a")
            door = Door(own, self._count, self._count, handshake_timeout_s=_HANDSHAKE_S)
            return door, await door.open("127.0.0.1", 0, inner)

        self.door, self.port = asyncio.run_coroutine_threadsafe(start(), self._loop).result(_PATIENCE_S)
        texts = [(member / name).read_bytes() for name in (keyfiles.TRUSTED, keyfiles.KEY, keyfiles.CHAIN)]
        channel = grpc.secure_channel(f"127.0.0.1:{self.port}", grpc.ssl_channel_credentials(*texts))
        service = chaos_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
        self._status = channel.unary_unary(
            f"/{service}/Status",
            request_serializer=lambda data: data,
            response_deserializer=chaos_pb2.StatusReply.FromString,
        )
        self.check()

    def _count(self, peer: str, why: str) -> None:
        self.refused += 1

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE_S)

    def check(self) -> None:
        """Nobody is left but the member, whose connection stands; and somebody new is let in."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.door.visits > 1:
            if time.monotonic() > deadline:
                raise FindingError(f"the door keeps {self.door.visits - 1} connections whose callers are gone")
            time.sleep(0.001)
        while words := self._outside():  # a starved process may miss the short limit on handshakes, but not for ever
            if time.monotonic() > deadline:
                raise FindingError(words)

    def _outside(self) -> str:
        """What keeps a member from coming in, or from being answered; "" if nothing does."""
        try:
            self._status(b"", timeout=_PATIENCE_S)
            with self.connect() as sock, self.shown[0].wrap_socket(sock) as tls:
                tls.sendall(_PREFACE)
                return "" if tls.recv(1) else "the door lets a member in, and the scheduler behind it says nothing"
        except (grpc.RpcError, OSError) as error:
            return f"the door lets a member in no more: {error}"


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
def _door() -> _Door:
    return _Door()


class _Caller:
    """One hostile connection. A handshake is made in memory, so that each flight of it can be changed."""

    def __init__(self, door: _Door, deed: Deed, context: ssl.SSLContext, said: bytes) -> None:
        self.deed = deed
        self._said = said
        self._sock = door.connect()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out)

    def act(self) -> None:
        """Says what it has to say."""
        with contextlib.suppress(OSError):  # ssl.SSLError is one: the door may have shut it meanwhile
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
        """To what the scheduler says, as far as that goes."""
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
        """Waits until the door has shut it."""
        with self._sock, contextlib.suppress(ConnectionError):
            try:
                while self._sock.fileno() >= 0 and self._sock.recv(1 << 16):
                    pass
            except TimeoutError as error:
                raise FindingError(f"after {self.deed.name} the door keeps a connection open") from error


def feed_door(data: bytes) -> None:
    """See the module."""
    door, callers = _door(), list[_Caller]()
    try:
        for tag, said in mutate.split(data)[:_MOST_AT_ONCE]:
            deed, context = Deed(tag % len(Deed)), door.shown[tag // len(Deed) % len(door.shown)]
            callers += [_Caller(door, deed, context, said) for _ in range(_FLOOD if deed is Deed.FLOOD else 1)]
            if deed is Deed.FLOOD:
                break
        for caller in callers:
            caller.act()
    finally:
        for caller in callers:
            caller.close()
    door.check()


# ------------------------------------------------------------------ inputs


def door_seeds() -> list[bytes]:
    """One or several of each deed, by everybody."""
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


def mutate_door(data: bytes, rng: Random) -> bytes:
    """A nearly valid input; those that take long are rare."""
    tags = [deed + len(Deed) * who for deed in Deed for who in range(5) if deed < Deed.FLOOD]
    changed = mutate.parts_of(data, rng, lambda tag, part, r: mutate.bytes_of(part, r), tags)
    parts = mutate.split(changed)
    if rng.randint(0, 7):  # waiting takes as long as the door does
        parts = [(Deed.SAY if Deed(tag % len(Deed)) is Deed.SAY_AND_WAIT else tag, part) for tag, part in parts]
    return mutate.joined(parts)
