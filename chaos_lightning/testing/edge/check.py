"""Measures how exact an emulated link is on this machine: `python -m chaos_lightning.testing.edge.check [--backend
relay]`.

Theory of operation. Two processes, one on each node of a pair, open a link as members do. For each rate one sends a
stream of some seconds and the other one tells how long it took from its first bytes to its last; then single messages
go back and forth. The result beside the setting of the link says whether this machine, as busy as it is, keeps up.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos_lightning.errors import ChaosError
from chaos_lightning.security.access import load_token
from chaos_lightning.testing.edge.network import BACKENDS, Edge
from chaos_lightning.testing.edge.topology import EdgeNode, Link, LinkState, Topology, rate_text
from chaos_lightning.testing.emulation import carried
from chaos_lightning.testing.processes import importable
from chaos_lightning.transport.handshake import Greeting, accept, dial

RATES_BPS = (1e6, 10e6, 100e6, 300e6, 600e6, 1000e6)
PAIR = ("a", "b")
_JOB = "edge-check"
_HEAD_NBYTES = 8
_PINGS = 21
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Found:
    """Result of measuring an emulated link at one rate.

    Attributes:
        rate_bps, latency_s: Setting of the link: bits per second, and seconds one way.
        got_bps: Rate of a stream over it, bits per second.
        trip_s: Half a round trip of a short message, median.
    """

    rate_bps: float
    latency_s: float
    got_bps: float
    trip_s: float


def measure(
    backend: str = "auto", rates_bps: Sequence[float] = RATES_BPS, latency_s: float = 0.0, seconds: float = 2.0
) -> Iterator[Found]:
    """Measures an emulated link at one rate after the other; yields each result.

    Args:
        backend: "auto", "relay" or "namespaces".
        rates_bps: Rates that the link is set to, bits per second.
        latency_s: Latency of the link, one way, s.
        seconds: Seconds that each stream should take.
    """
    link = Link(*PAIR, rates_bps[0], latency_s)
    with Edge(Topology((EdgeNode("a"), EdgeNode("b")), (link,)), backend) as edge:
        processes: list[subprocess.Popen[str]] = []
        try:
            listener = _start(edge, "b", "listen")
            processes.append(listener)
            caller = _start(edge, "a", "call", _line(listener))
            processes.append(caller)
            _line(caller)
            for rate_bps in rates_bps:
                edge.backend.apply(PAIR, LinkState(rate_bps, latency_s))
                nbytes = max(1, int(rate_bps * seconds / 8))
                trip_s = float(_ask(caller, nbytes))
                took_s = float(_line(listener))
                yield Found(rate_bps, latency_s, nbytes * 8 / took_s, trip_s)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _start(edge: Edge, node: str, *words: str) -> subprocess.Popen[str]:
    command = edge.command(node, [sys.executable, "-m", "chaos_lightning.testing.edge.check", "--role", *words])
    environment = carried({**os.environ, "PYTHONPATH": importable(), **edge.environment(node)})
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise ChaosError(f"a process of the check ended with exit code {process.wait(5.0)}; its error is above")
    return line


def _ask(process: subprocess.Popen[str], nbytes: int) -> str:
    assert process.stdin is not None
    process.stdin.write(f"{nbytes}\n")
    process.stdin.flush()
    return _line(process)


# --- the two processes --------------------------------------------------------------------------------------------


def _listen() -> None:
    address = os.environ["CHAOS_BIND"]
    with socket.create_server((address, 0)) as server:
        server.settimeout(_DEADLINE_S)
        print(f"{address}:{server.getsockname()[1]}", flush=True)
        sock, _ = server.accept()
    accept(sock, job=_JOB, me="b-0~1", token=load_token())
    while head := _read(sock, _HEAD_NBYTES):
        nbytes, began = int.from_bytes(head, "big"), time.perf_counter()
        if nbytes:
            _read(sock, nbytes)
            print(time.perf_counter() - began, flush=True)
        sock.sendall(head)


def _call(where: str) -> None:
    address, _, port = where.rpartition(":")
    sock = dial(address, int(port), Greeting(_JOB, "a-0~1", "b-0~1", "bulk"), token=load_token())
    print("up", flush=True)
    for line in sys.stdin:
        nbytes = int(line)
        data = memoryview(bytearray(nbytes))
        sock.sendall(nbytes.to_bytes(_HEAD_NBYTES, "big"))
        sock.sendall(data)
        _read(sock, _HEAD_NBYTES)
        trips = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            sock.sendall(bytes(_HEAD_NBYTES))
            _read(sock, _HEAD_NBYTES)
            trips.append((time.perf_counter() - began) / 2)
        print(statistics.median(trips), flush=True)


def _read(sock: socket.socket, nbytes: int) -> bytes:
    """Reads `nbytes` bytes; returns them, or b"-" instead of more than 1 MiB, or b"" if the stream ends first."""
    room = bytearray(min(nbytes, 1 << 20))
    view, left = memoryview(room), nbytes
    while left:
        got = sock.recv_into(view[: min(left, len(room))] if nbytes > len(room) else view[nbytes - left :])
        if not got:
            return b""
        left -= got
    return bytes(room) if nbytes <= len(room) else b"-"


def main() -> None:
    """Prints a table of measured rates and latencies."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backend", choices=BACKENDS, default="auto")
    options.add_argument("--latency-ms", type=float, default=0.0)
    options.add_argument("--seconds", type=float, default=2.0, help="of each stream")
    options.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.role:
        _call(args.role[1]) if args.role[0] == "call" else _listen()
        return
    print("set to          got      of it   one way (median)")
    for found in measure(args.backend, RATES_BPS, args.latency_ms / 1e3, args.seconds):
        part = found.got_bps / found.rate_bps
        print(
            f"{rate_text(found.rate_bps):<12} {rate_text(found.got_bps):>12} {part:8.3f} {found.trip_s * 1e3:10.3f} ms"
        )


if __name__ == "__main__":
    main()
