"""Measures transfers of pushes and versions between two processes, and of as many bytes by a socket, pyzmq and gRPC.

One process is a follower with the package's own listener, the other a cluster's process with connections parked there.
A *push* is timed from the moment when the cluster holds it to the moment when the follower has it and has compared all
digests; a *version* from the follower's holding it to the same at the cluster. It is held once it is hashed; how long
that takes stands beside ("to publish"). The receiver's hashing is within the time. The others only move bytes, from the
follower into memory that is there: a blocking socket with the same buffers; pyzmq (PUSH and PULL, one message, not
copied) and gRPC (a stream of messages of 1 MiB), where these are installed.

Protection is by the token here, at each level that links have: it costs the same with keys.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.common import MIB, Result, median
from benchmarks.workers import Worker, context
from chaos_lightning.outer.exchange.codec import BF16, Part
from chaos_lightning.outer.exchange.fetching import (
    drop_push,
    drop_version,
    fetch_push,
    fetch_version,
    hold_push,
    hold_version,
)
from chaos_lightning.outer.exchange.line_keys import LineKeyring
from chaos_lightning.outer.exchange.lines import SERVING, DataListener, ParkedLines
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.messages import Holder
from chaos_lightning.outer.rules.types import IncarnationId, Offer, PushId, VersionId
from chaos_lightning.replication.memory import host_view
from chaos_lightning.replication.server import StateServer
from chaos_lightning.transport.handshake import tune
from chaos_lightning.transport.sealing import Level

MOST_TIME_OF_SOCKET = 1 / 0.6
JOB, TOKEN, NAME = "outer_server", b"a token of a benchmark", "f0"
HOME = IncarnationId("home", 1)
DEADLINE_S = 60.0
_MESSAGE_NBYTES = 1 << 20
_FETCH, _ASK = "/benchmark/Fetch", "/benchmark/Ask"
_PARKED = 2


def _ignore(name: str, **fields: Any) -> None:
    """Ignores an event of the event log."""


def _part(nbytes: int, seed: int) -> Part:
    """Returns random bytes as one part of a state that covers all of its elements."""
    part = Part.empty(Grid((nbytes // 2,)).whole, BF16)
    part.data.random_(generator=torch.Generator().manual_seed(seed))
    return part


class _Peers:
    """Senders of the plain byte transfers that pushes are compared with: a socket, pyzmq and gRPC."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.ports: dict[str, Any] = {}
        self._alive: list[Any] = []
        """Servers, which end once nobody holds them."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.ports["socket"] = self._socket.getsockname()[1]
        threading.Thread(target=self._send_raw, daemon=True).start()
        with contextlib.suppress(ImportError):
            self.ports["pyzmq"] = self._serve_zmq()
        with contextlib.suppress(ImportError):
            server, self.ports["gRPC"] = serve_grpc(data)
            self._alive.append(server)

    def _send_raw(self) -> None:
        sock, _ = self._socket.accept()
        tune(sock)
        while sock.recv(1):
            sock.sendall(self._data)

    def _serve_zmq(self) -> int:
        zmq = import_module("zmq")
        self._push = zmq.Context().socket(zmq.PUSH)
        return int(self._push.bind_to_random_port("tcp://127.0.0.1"))

    def send_zmq(self) -> None:
        """Sends the data as one pyzmq message, without a copy."""
        self._push.send(self._data, copy=False)


def serve_grpc(data: memoryview) -> tuple[Any, int]:
    """Starts a gRPC server that streams these bytes and answers small calls; returns the server and its port."""
    grpc = import_module("grpc")

    def fetch(_request: bytes, _context: Any) -> Iterator[bytes]:
        for at in range(0, len(data), _MESSAGE_NBYTES):
            yield bytes(data[at : at + _MESSAGE_NBYTES])

    def ask(_request: bytes, _context: Any) -> bytes:
        return b"said"

    service, _, name = _FETCH.strip("/").partition("/")
    calls = {
        name: grpc.unary_stream_rpc_method_handler(fetch),
        _ASK.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(ask),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, calls),))
    port = int(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    return server, port


def asking(channel: Any) -> Callable[[], object]:
    """Returns a function that makes a small call on this gRPC channel."""
    ask = channel.unary_unary(_ASK)
    return lambda: ask(b"?")


def follower(pipe: Connection, nbytes: int, seed: int) -> None:
    """Runs the follower's process: pulls and publishes as it is ordered to."""
    whole, into = _part(nbytes, seed), _part(nbytes, seed)
    peers, ends, servers = _Peers(host_view(whole.data)), dict[str, DataListener](), dict[str, StateServer]()
    for level in Level:
        servers[level] = StateServer(SERVING)
        options: dict[str, Any] = {"job": JOB, "me": NAME, "secret": TOKEN, "note": _ignore}
        ring = LineKeyring(TOKEN, str(level))
        ends[level] = DataListener("127.0.0.1", 0, server=servers[level], keys=ring, **options)
    pipe.send(({str(level): end.endpoint for level, end in ends.items()}, peers.ports))
    while True:
        try:
            order, level, what = pipe.recv()
        except EOFError:
            return
        if order == "empty":
            into.data.zero_()
        elif order == "push":
            fetch_push(what, into, ends[level].dial, deadline_s=DEADLINE_S, blank=True)
        elif order == "hold":
            hold_version(servers[level], what, whole)
        elif order == "drop":
            drop_version(servers[level], what, whole)
        else:
            peers.send_zmq()
        pipe.send(time.monotonic())


class Data:
    """The cluster's end of all measured transfers, which runs in this process; a context manager."""

    def __init__(self, nbytes: int, seed: int) -> None:
        self.nbytes = nbytes
        self.whole, self.into = _part(nbytes, seed), _part(nbytes, seed)
        self._view = host_view(self.into.data)
        self._number = 0
        self._worker = Worker(context("benchmarks.outer_data"), follower, nbytes, seed + 1)
        endpoints, ports = self._worker.receive()
        self._holders, self._lines = dict[str, Holder](), dict[str, ParkedLines]()
        self._servers = {str(level): StateServer(SERVING) for level in Level}
        for level, endpoint in endpoints.items():
            self._holders[level] = Holder(NAME, endpoint)
            options: dict[str, Any] = {"job": JOB, "secret": TOKEN, "note": _ignore, "count": _PARKED}
            self._lines[level] = ParkedLines(self._servers[level], me=lambda: str(HOME), links=level, **options)
            self._lines[level].follow([self._holders[level]])
        self._raw = socket.create_connection(("127.0.0.1", ports["socket"]))
        tune(self._raw)
        self.publishing: dict[str, list[float]] = {"push": [], "version": []}
        self.ask: Callable[[], object] | None = None
        """A small call on the channel of the gRPC case."""
        self.missing = [name for name in ("pyzmq", "gRPC") if name not in ports]
        self.cases: dict[str, Callable[[], float]] = {"socket": self._fetch_raw}
        for level in Level:
            self.cases[f"push, {level}"] = lambda level=str(level): self._push(level)
            self.cases[f"version, {level}"] = lambda level=str(level): self._version(level)
        if "pyzmq" in ports:
            self._open_zmq(ports["pyzmq"])
        if "gRPC" in ports:
            self._open_grpc(ports["gRPC"])

    def __enter__(self) -> Data:
        return self

    def __exit__(self, *_: object) -> None:
        for lines in self._lines.values():
            lines.close()
        self._raw.close()
        self._worker.kill()

    def _tell(self, order: str, level: str = "", what: Any = None) -> float:
        """Gives the follower an order; returns the time at which the order was carried out."""
        self._worker.pipe.send((order, level, what))
        return float(self._worker.receive())

    def _push(self, level: str) -> float:
        self._number += 1
        push, server, shards = PushId(HOME, self._number), self._servers[level], [self.whole.shard]
        self._tell("empty")
        asked = time.monotonic()
        manifest = hold_push(server, push, self.whole, shards)
        began = time.monotonic()
        self.publishing["push"].append(began - asked)
        ended = self._tell("push", level, Offer(push, VersionId(1, "v"), manifest, 1, 1))
        drop_push(server, push, shards)
        return ended - began

    def _version(self, level: str) -> float:
        self._number += 1
        version, holders, part = VersionId(self._number, "v"), [self._holders[level]], self.into
        part.data.zero_()
        asked = time.monotonic()
        began = self._tell("hold", level, version)
        self.publishing["version"].append(began - asked)
        dial = self._lines[level].dial
        fetch_version(version, [part.shard], BF16, holders, part, dial, deadline_s=DEADLINE_S, blank=True)
        took_s = time.monotonic() - began
        self._tell("drop", level, version)
        return took_s

    def _fetch_raw(self) -> float:
        began, left = time.monotonic(), self._view
        self._raw.sendall(b".")
        while left:
            left = left[self._raw.recv_into(left) :]
        return time.monotonic() - began

    def _open_zmq(self, port: int) -> None:
        zmq = import_module("zmq")
        pull = zmq.Context().socket(zmq.PULL)
        pull.connect(f"tcp://127.0.0.1:{port}")

        def fetch() -> float:
            began = time.monotonic()
            self._tell("zmq")
            self._view[:] = pull.recv(copy=False).buffer
            return time.monotonic() - began

        self.cases["pyzmq"] = fetch

    def _open_grpc(self, port: int) -> None:
        grpc = import_module("grpc")
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        call = channel.unary_stream(_FETCH)
        self.ask = asking(channel)

        def fetch() -> float:
            began, at = time.monotonic(), 0
            for message in call(b""):
                self._view[at : at + len(message)] = message
                at += len(message)
            return time.monotonic() - began

        self.cases["gRPC"] = fetch


def transfers(result: Result, state_mib: int, turns: int, seed: int) -> None:
    """Adds the transfer rates of pushes and versions of this size, and of plain bytes for comparison."""
    rng = random.Random(seed)
    with Data(state_mib * MIB, seed) as data:
        taken: dict[str, list[float]] = {name: [] for name in data.cases}
        for turn in range(turns + 1):
            for name in rng.sample(list(data.cases), len(data.cases)):
                seconds = data.cases[name]()
                if turn:
                    taken[name].append(seconds)
        missing, publishing, gigabytes = data.missing, data.publishing, data.nbytes / 1e9
    for name in missing:
        result.leave_out(name, "it is not installed")
    for name, seconds in taken.items():
        result.add(f"{state_mib} MiB, {name}", gigabytes / median(seconds), "GB/s")
        result.details[f"seconds, {state_mib} MiB, {name}"] = seconds
    for name, seconds in publishing.items():
        result.add(f"{state_mib} MiB, to publish a {name}", median(seconds), "s")
    for name in (name for name in taken if name != "socket"):
        plain = name in ("push, checksum", "version, checksum")
        figure = result.ratio(
            f"time of {name} / socket", taken[name], taken["socket"], MOST_TIME_OF_SOCKET if plain else None
        )
        if plain:
            result.headline.append(f"{name.partition(',')[0]}: {1 / figure.value:.2f} of a socket's rate")
