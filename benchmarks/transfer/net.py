"""Emulates an edge network for `benchmarks.transfer.pulls`: donors in processes of their own, links with limited rates.

Theory of operation. Every donor is a real process with the package's own server behind a listening socket and the
package's own handshake. A link's rate is set by the sender: SO_MAX_PACING_RATE on its sockets to that peer, which the
kernel keeps to within a few percent and which may change in mid-transfer. Where several connections share a link (a
relay's own bytes and those that it passes on), the rate is divided among those that have something to send, every 10
ms. A newcomer's own access link is emulated where it receives: a token bucket that all its sockets share, behind
small socket buffers. All donors map the same file as their state, so ten of them need no more memory than one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import MIB
from benchmarks.workers import Worker, context
from chaos_lightning.transport.pacing import pace

JOB = "transfer"
HEAD = "00c0ffee00c0ffee"
_READ_NBYTES = 1 << 16
_BURST_S = 0.002
_DIVIDE_S = 0.01
_FILL_NBYTES = 16 << 20
_DEADLINE_S = 300.0
LATENCY_S = 0.0001
SHARED = Path("/dev/shm")
"""The donors' common state lies here if there is such a place, else on a disk."""

Layout = Sequence[int]
"""Sizes of the tensors in bytes, in order."""


class Shaper:
    """Rate limits of one process's links, by the peer at the other end."""

    def __init__(self, rates: Mapping[str, float]) -> None:
        self._rates = dict(rates)
        self._sockets: dict[str, list[socket.socket]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._divide, daemon=True).start()

    def add(self, peer: str, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.setdefault(peer, []).append(sock)
            self._set(peer)

    def rate(self, peer: str, rate_bps: float) -> None:
        """Sets the rate of a peer's link from now on, in bits per second."""
        with self._lock:
            self._rates[peer] = rate_bps
            self._set(peer)

    def _set(self, peer: str) -> None:
        self._sockets[peer] = living = [s for s in self._sockets.get(peer, []) if s.fileno() >= 0]
        if peer not in self._rates:
            return
        busy = [s for s in living if _unsent(s)] or living
        for sock in living:
            pace(sock, self._rates[peer] / (len(busy) if sock in busy else len(busy) + 1))

    def _divide(self) -> None:
        while True:
            time.sleep(_DIVIDE_S)
            with self._lock:
                for peer in [p for p, sockets in self._sockets.items() if len(sockets) > 1]:
                    self._set(peer)


def _unsent(sock: socket.socket) -> int:
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    except (OSError, ValueError):
        return 0


def tensors_of(flat: Any, layout: Layout) -> list[tuple[str, Any]]:
    """Returns a flat uint8 tensor as named float tensors."""
    import torch

    named, at = [], 0
    for index, nbytes in enumerate(layout):
        named.append((f"t{index}", flat[at : at + nbytes].view(torch.float32)))
        at += nbytes
    return named


def layout_of(state_mib: float) -> list[int]:
    """Returns tensor sizes as of a transformer with Adam: a large embedding, blocks of matrices and biases, all three
    times.

    A state of less than 8 MiB is laid out like the LoRA adapters of such a model: many matrices of some 24 KiB.
    """
    nbytes = int(state_mib * MIB)
    if nbytes < 8 * MIB:
        count = 72
        return [nbytes // count // 4 * 4] * count
    third = nbytes // 3
    block = [3, 1, 4, 4]  # attention in and out, and the two matrices of the MLP
    unit = third * 0.7 / 12 / sum(block)
    sizes = [int(third * 0.3) // 4 * 4, *[size for _ in range(12) for size in (int(b * unit) // 4 * 4 for b in block)]]
    sizes += [3072] * 48
    return sizes * 3


def donor(pipe: Any, name: str, rates: Mapping[str, float], disk_bps: float, folder: str) -> None:
    """Runs a donor's process: serves states as the parent orders, over links with these rates (bits per second, by
    peer).
    """
    import torch

    from chaos_lightning.replication.forward import Forwarder
    from chaos_lightning.replication.kept import write_bytes
    from chaos_lightning.replication.memory import region
    from chaos_lightning.replication.published import lay_out
    from chaos_lightning.replication.server import StateServer
    from chaos_lightning.transport.handshake import Greeting, accept, dial

    shaper, server, ports = Shaper(rates), StateServer(), {}

    def reach(member: str) -> socket.socket:
        return dial("127.0.0.1", ports[member], Greeting(JOB, name, member, "bulk"))

    server.forwarder = Forwarder(name, reach)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def serve(sock: socket.socket) -> None:
        with contextlib.suppress(Exception):
            greeting = accept(sock, job=JOB, me=name)
            shaper.add(greeting.me, sock)
            server.serve(sock, greeting.me)

    def listen() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    pipe.send(listener.getsockname()[1])
    while True:
        try:
            order, *rest = pipe.recv()
        except EOFError:
            return
        if order == "ports":
            ports.update(rest[0])
        elif order == "rate":
            shaper.rate(*rest)
        elif order == "publish":
            path, layout, seq = rest
            flat = torch.from_file(path, shared=True, size=sum(layout), dtype=torch.uint8)
            named = tensors_of(flat, layout)
            server.publish(HEAD, seq, named, {"step": seq})
        elif order == "save":
            began = time.monotonic()
            file = write_bytes(Path(folder), lay_out(HEAD, seq, [region(name, t) for name, t in named]))
            with file.open("rb") as written:  # whoever reads it is to read the disk
                os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if disk_bps:
                time.sleep(max(0.0, began + 8 * file.stat().st_size / disk_bps - time.monotonic()))
            pipe.send(file)
            continue
        pipe.send("done")


class Ingress:
    """The newcomer's access link, which limits the rate at which all its sockets together receive."""

    def __init__(self, rate_bps: float) -> None:
        self._rate = rate_bps / 8
        self._free_at = 0.0
        self._lock = threading.Lock()

    def passed(self, nbytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + nbytes / self._rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)

    def shape(self, sock: socket.socket) -> socket.socket:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        shaped = _Shaped(sock.family, sock.type, sock.proto, fileno=sock.detach())
        shaped.ingress = self
        return shaped


class _Shaped(socket.socket):
    ingress: Ingress

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        got = super().recv_into(buffer, nbytes, flags)
        self.ingress.passed(got)
        return got

    def recvmsg_into(self, buffers: Any, *args: Any) -> Any:
        got = super().recvmsg_into([memoryview(buffers[0])[:_READ_NBYTES]], *args)
        self.ingress.passed(got[0])
        return got


class Network:
    """Donors around a newcomer, which is this process, and the links between them; a context manager that ends the
    donors.
    """

    def __init__(self, links: Mapping[tuple[str, str], float], newcomer: str, *, disk_bps: float, folder: Path) -> None:
        """Starts the donors; `links` has the bits per second between each pair of ends, for both directions."""
        self.links, self.newcomer = dict(links), newcomer
        self.near = [a if b == newcomer else b for a, b in links if newcomer in (a, b)]
        self.names = [*self.near, *sorted({n for pair in links for n in pair} - {newcomer, *self.near})]
        self.folder = folder
        self.ingress: Ingress | None = None
        self.disk_bps = disk_bps
        self._published: tuple[Any, ...] = ()
        self._context = context("benchmarks.transfer.net", "chaos_lightning.replication.server")
        self.workers: dict[str, Worker] = {}
        self.ports: dict[str, int] = {}
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        """Starts a donor's process; a killed one is replaced."""
        rates = {b if a == name else a: rate for (a, b), rate in self.links.items() if name in (a, b)}
        worker = Worker(self._context, donor, name, rates, self.disk_bps, str(self.folder))
        self.workers[name] = worker
        self.ports[name] = worker.receive()
        for other in self.workers:
            self.tell(other, "ports", self.ports)
        if self._published:
            self.tell(name, "publish", *self._published)

    def tell(self, name: str, *order: Any) -> Any:
        self.workers[name].pipe.send(order)
        return self.workers[name].receive()

    def save(self, name: str) -> Path:
        """Writes this donor's state to the disk; returns the path of the file."""
        return Path(self.tell(name, "save"))

    def publish(self, path: Path, layout: Layout, seq: int) -> None:
        self._published = (str(path), list(layout), seq)
        for name in self.names:
            self.tell(name, "publish", *self._published)

    def restore(self) -> None:
        """Sets all links of the newcomer back to their initial rates."""
        for name in self.near:
            self.tell(name, "rate", self.newcomer, self.rate(name))

    def rate(self, name: str) -> float:
        """Returns the rate of the newcomer's link to this neighbour, in bits per second."""
        return self.links[(name, self.newcomer) if (name, self.newcomer) in self.links else (self.newcomer, name)]

    def dial(self, endpoint: Any) -> socket.socket:
        from chaos_lightning.transport.handshake import Greeting, dial

        sock = dial(endpoint.address, endpoint.port, Greeting(JOB, self.newcomer, endpoint.member, "bulk"))
        return self.ingress.shape(sock) if self.ingress is not None else sock

    def endpoints(self) -> list[Any]:
        from chaos_lightning.replication.source import Endpoint

        return [Endpoint(name, "127.0.0.1", self.ports[name]) for name in self.near]

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.kill()


class Newcomer:
    """The newcomer's state, in one memory that is used by all runs and emptied before each."""

    def __init__(self, layout: Layout) -> None:
        import torch

        self.flat = torch.zeros(sum(layout), dtype=torch.uint8)
        self._named = tensors_of(self.flat, layout)
        self.nbytes = sum(layout)

    def empty(self) -> None:
        self.flat.zero_()

    def tensors(self) -> list[tuple[str, Any]]:
        return self._named

    def manifest(self) -> dict[str, object]:
        return {}

    def prepare(self, manifest: Mapping[str, Any], table: Any) -> None:
        pass

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        pass


class Joiner:
    """This process as the newcomer, which pulls a state that all donors publish.

    Args:
        net: Network of the donors.
        folder: Folder for the file that all donors map, on systems without shared memory for it.
        seed: Seed of the state's bytes.
    """

    def __init__(self, net: Network, folder: Path, seed: int) -> None:
        self.net, self.seq, self.layout = net, 0, list[int]()
        self.newcomer: Newcomer
        self._folder, self._seed = SHARED if SHARED.is_dir() else folder, seed
        self._path: Path | None = None

    def load(self, layout: Layout) -> None:
        """Makes a state of random bytes with tensors of these sizes, and makes all donors publish it."""
        import torch

        self.seq += 1
        self.layout = list(layout)
        path = self._folder / f"chaos-transfer-{os.getpid()}-{id(self)}-{self.seq}"
        flat = torch.from_file(str(path), shared=True, size=sum(layout), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(self._seed)
        for at in range(0, flat.numel(), _FILL_NBYTES):
            flat[at : at + _FILL_NBYTES].random_(generator=generator)
        self.net.publish(path, self.layout, self.seq)
        self.close()
        self._path = path  # a donor that is started again reads it
        self.newcomer = Newcomer(self.layout)
        self.newcomer.flat.copy_(flat)

    def pull(
        self, policy: str, estimates: Any = None, *, empty: bool = True, progress: Any = None, **options: Any
    ) -> Any:
        """Pulls the state by a policy; returns the pull's report.

        Args:
            policy: A name as `policies.policy_of` takes it; `greedy` searches the shard size between the layers, as
                the paper does.
            estimates: (latency in s, bits per second) of the newcomer's links, by neighbour.
            empty: Nothing is here; else everything is.
            progress: Told of it.
            options: Further `PolicyOptions`.
        """
        from benchmarks.transfer.policies import policy_of
        from chaos_lightning.replication import PolicyOptions, PullConfig, pull_state

        if empty:
            self.newcomer.empty()
        facts = PolicyOptions(layer_nbytes=tuple(self.layout), newcomer=self.net.newcomer, **options)
        given: dict[str, Any] = {}
        if policy == "multi_source":
            given["links"] = {pair: (LATENCY_S, 8 / rate) for pair, rate in self.net.links.items()}
        if policy == "stop_resume":
            given |= {"save": self.net.save, "disk_bps": self.net.disk_bps}
        return pull_state(
            self.net.endpoints(),
            self.net.dial,
            head=HEAD,
            seq=self.seq,
            state=self.newcomer,
            config=PullConfig(deadline_s=_DEADLINE_S),
            policy=policy_of(policy, estimates, facts, **given),
            progress=progress,
        )

    def close(self) -> None:
        """Removes the file of the state."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def calibrate(net: Network, name: str, seq: int, nbytes: int) -> float:
    """Measures the rate of one link when it is used alone, in bits per second, without the first tenth of the bytes."""
    from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type

    endpoint = next(e for e in net.endpoints() if e.member == name)
    part = 1 << 20
    sizes = [min(part, nbytes - at) for at in range(0, nbytes, part)]
    with net.dial(endpoint) as sock:
        channel = BulkSocket(sock, stall_timeout_s=30.0)
        memory = memoryview(bytearray(part))
        got, marks = 0, []

        def count(n: int) -> None:
            nonlocal got
            got += n
            marks.append((time.perf_counter(), got))

        def ask(i: int) -> None:
            channel.send(BulkFrame(Type.GET_STATE, HEAD, seq, i * part, sizes[i]))

        for i in range(min(4, len(sizes))):
            ask(i)
        for i, size in enumerate(sizes):
            while (frame := channel.receive_header()) is not None and frame.type is Type.PENDING:
                pass
            channel.receive_into([memory[:size]], count)
            if i + 4 < len(sizes):
                ask(i + 4)
    first = next(mark for mark in marks if mark[1] >= nbytes / 10)
    return 8 * (marks[-1][1] - first[1]) / (marks[-1][0] - first[0])
