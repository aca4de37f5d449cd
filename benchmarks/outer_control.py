"""Measures round trips of control calls while data flood the network: on a connection of their own, or on that of the
data.

A process asks a small thing over a gRPC channel that stays, as clusters have one, every few milliseconds, while its
other thread fetches data without end. *Own*: a process that does nothing else answers, and versions are fetched over a
follower's data connection, as built. *Shared*: one gRPC server sends streams of 1 MiB messages and answers the same
call, both on one channel. *The leader's facts* is what a real leader (`chaos-lightning ps leader`) takes for a larger
answer, quiet and while versions are fetched. The rate of the data stands beside: a slow flood would prove nothing.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from benchmarks.common import MIB, Result, median, percentile
from benchmarks.outer_data import TOKEN, Data, asking, serve_grpc
from benchmarks.workers import Worker, context, wait_listening
from chaos_lightning.machine.listener import free_port
from chaos_lightning.outer.exchange import outer_pb2
from chaos_lightning.outer.exchange.outer_pb2_grpc import ParameterServerStub
from chaos_lightning.service.channel import CLIENT_OPTIONS, open_channel

EVERY_S = 0.005
FLOOD_MIB = 64
LATE = 99
_CALL_TIMEOUT_S = 30.0

Call = Callable[[], object]


@contextlib.contextmanager
def leader() -> Iterator[Call]:
    """Starts a leader's process; yields a function that asks it for its facts."""
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "chaos_lightning.cli", "ps", "leader", "--listen", endpoint, "--store", ":memory:"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_listening(endpoint, process, "the leader")
        with open_channel(endpoint, TOKEN, CLIENT_OPTIONS) as channel:
            facts = ParameterServerStub(channel).Facts
            yield lambda: facts(outer_pb2.FactsRequest(), timeout=_CALL_TIMEOUT_S)
    finally:
        process.kill()
        process.wait(10)


def answerer(pipe: Connection) -> None:
    """Runs a gRPC server that only answers small calls; first sends its port to the parent."""
    _server, port = serve_grpc(memoryview(b""))
    pipe.send(port)
    with contextlib.suppress(EOFError):
        pipe.recv()


@contextlib.contextmanager
def own() -> Iterator[Call]:
    """Starts a server that does nothing but answer; yields a function that calls it."""
    worker = Worker(context("benchmarks.outer_data"), answerer)
    try:
        with open_channel(f"127.0.0.1:{worker.receive()}", b"", CLIENT_OPTIONS) as channel:
            yield asking(channel)
    finally:
        worker.kill()


@contextlib.contextmanager
def flood(fetch: Callable[[], float], rates: list[float]) -> Iterator[None]:
    """Fetches data without end while the block runs; then adds the bytes per second to `rates`."""
    over = threading.Event()
    began, fetched = time.monotonic(), 0

    def run() -> None:
        nonlocal fetched
        while not over.is_set():
            fetch()
            fetched += 1

    thread = threading.Thread(target=run, name="chaos-benchmark-flood", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        rates.append(fetched * FLOOD_MIB * MIB / (time.monotonic() - began))


def round_trips(ask: Call, count: int) -> list[float]:
    """Returns the seconds of `count` calls, made one at a time, every few milliseconds."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began)
        time.sleep(max(0.0, EVERY_S - taken[-1]))
    return taken


def control(result: Result, count: int, seed: int) -> None:
    """Measures round trips of small calls, without and with a flood of data."""
    with Data(FLOOD_MIB * MIB, seed) as data, leader() as facts, own() as ask:
        quiet = {"the leader's facts, quiet": facts, "own, quiet": ask}
        if data.ask is not None:
            quiet["shared, quiet"] = data.ask
        taken, rates = dict[str, list[float]](), dict[str, list[float]]()
        for name, call in quiet.items():
            round_trips(call, count // 10)
            taken[name] = round_trips(call, count)
        versions = data.cases["version, checksum"]
        cases: dict[str, tuple[Call, Callable[[], float]]] = {
            "the leader's facts, flooded": (facts, versions),
            "own": (ask, versions),
        }
        if data.ask is not None:
            cases["shared"] = (data.ask, data.cases["gRPC"])
        for name, (call, fetch) in cases.items():
            with flood(fetch, rates.setdefault(name, [])):
                taken[name] = round_trips(call, count)
    for name, seconds in taken.items():
        beside = f", data at {rates[name][0] / 1e9:.2f} GB/s" if name in rates else ""
        result.add(f"control round trip, {name}{beside}: median of {count}", 1e3 * median(seconds), "ms")
        result.add(f"control round trip, {name}: p{LATE}", 1e3 * percentile(seconds, LATE), "ms")
        result.details[f"seconds, control round trip, {name}"] = seconds
    if "shared" in taken:
        late = {name: percentile(seconds, LATE) for name, seconds in taken.items()}
        result.add(f"control round trip, p{LATE}: own / shared", late["own"] / late["shared"], "ratio", 1.0)
        result.headline.append(f"control p{LATE} {1e3 * late['own']:.1f} ms, shared {1e3 * late['shared']:.1f} ms")
