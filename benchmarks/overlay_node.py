"""One node of the overlay benchmark, in its own process: the real reducer, loop, links and handshake; or gloo.

A node is told what to do over its pipe. Its links are TCP connections made by the product's own handshake; where the
network is emulated by pacing, each end's socket gets SO_MAX_PACING_RATE, which limits what it sends; in a network
namespace the kernel's htb does it. Chunks never go by reference. Each node's gradient is a known pattern of whole
numbers times its rank + 1, so that the sum is exact and each node checks its own result.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

_CLONE_NEWNET = 0x40000000
_DEADLINE_S = 120.0


def enter(namespace: str) -> None:
    """Puts the calling thread (and those that it starts) into a network namespace; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")
    finally:
        os.close(fd)


class Node:
    """The data plane of one member without a protocol above it."""

    def __init__(self, me: str, nbytes: int, address: str) -> None:
        import torch

        from chaos_lightning.collectives.gradients import cells_of
        from chaos_lightning.collectives.layout import Layout, Section
        from chaos_lightning.collectives.memory import Memory
        from chaos_lightning.collectives.reducer import Reducer
        from chaos_lightning.transport.loop import IoLoop

        self.me = me
        self.links: dict[str, Any] = {}
        self.sockets: dict[str, socket.socket] = {}
        self.broken_links: list[str] = []
        self.crash: list[BaseException] = []
        self.done = threading.Event()
        self.done_at = 0.0
        # Parameters of uneven sizes, as models have them.
        numel = nbytes // 4
        sizes = [numel // 2, numel // 4, numel // 8]
        sizes.append(numel - sum(sizes))
        self.layout = Layout([Section("all", [(f"p{i}", torch.zeros(n)) for i, n in enumerate(sizes)])])
        self.memory = Memory(self.layout, pinned=False)
        self.grid = cells_of(self.layout, 0)
        self.loop = IoLoop(me, self.crash.append)
        self.reducer = Reducer(self.memory, self.grid, me, self.send, self.on_done)
        self.listener = socket.create_server((address, 0))
        self.loop.start()

    # ------------------------------------------------------------------ the owner of links

    def send(self, peer: str, kind: Any, view: Any, seq: int, start: int, payload: Sequence[memoryview]) -> None:
        self.links[peer].send(kind, view, seq, start, payload)

    def on_done(self, view: Any, seq: int) -> None:
        self.done_at = time.monotonic()
        self.done.set()

    def target(self, peer: str, frame: Any) -> memoryview | None:
        return self.reducer.target(peer, frame)

    def arrived(self, peer: str, frame: Any, payload: Any) -> None:
        self.reducer.arrived(peer, frame, payload)

    def broken(self, peer: str, link: Any, evidence: str) -> None:
        self.broken_links.append(f"{peer}: {evidence}")

    # ------------------------------------------------------------------ links

    def connect(self, dial_to: dict[str, tuple[str, int]], accept_from: Sequence[str]) -> None:
        """Makes all links of this node; blocks until they stand."""
        from chaos_lightning.transport.handshake import Greeting, accept, dial

        sockets = {
            peer: dial(address, port, Greeting("overlay", self.me, peer, "link"))
            for peer, (address, port) in dial_to.items()
        }
        self.listener.settimeout(_DEADLINE_S)
        while len(sockets) < len(dial_to) + len(accept_from):
            sock, _ = self.listener.accept()
            sockets[accept(sock, job="overlay", me=self.me).me] = sock
        self.sockets = sockets
        standing = threading.Event()

        def attach() -> None:
            from chaos_lightning.transport.link import Link

            for peer, sock in sockets.items():
                self.links[peer] = Link(self.loop, sock, peer, self)
            standing.set()

        self.loop.call(attach)
        if not standing.wait(_DEADLINE_S):
            raise TimeoutError(f"{self.me}: the loop made no links: {self.crash}")

    def pace(self, rates: dict[str, float]) -> None:
        for peer, rate in rates.items():
            if rate:
                self.loop.call(lambda link=self.links[peer], rate=rate: link.pace(rate))

    # ------------------------------------------------------------------ one all-reduce

    def fill(self, factor: int) -> None:
        import torch

        count = self.layout.nbytes // 4
        pattern = torch.arange(count, dtype=torch.int64).remainder_(251).to(torch.float32)
        self.memory.own.view(torch.float32).copy_(pattern * factor)
        self.pattern = pattern

    def reduce(self, view: Any, seq: int, begin_at: float) -> float:
        """Runs one all-reduce that begins at this CLOCK_MONOTONIC second; returns when its sum was complete here."""
        self.memory.results[seq % 2].zero_()
        self.done.clear()
        scope = self.layout.scope(0)
        time.sleep(max(0.0, begin_at - time.monotonic()))
        self.loop.call(lambda: self.reducer.open(view, seq))
        self.loop.call(lambda: self.reducer.begin(seq, scope))
        self.loop.call(lambda: self.reducer.ready(seq, [start for start, _ in self.grid]))
        if not self.done.wait(_DEADLINE_S) or self.crash:
            raise RuntimeError(f"{self.me}: slot {seq} did not complete: {self.crash or self.broken_links}")
        return self.done_at

    def right(self, seq: int, total: int) -> bool:
        import torch

        return bool(torch.equal(self.memory.results[seq % 2].view(torch.float32), self.pattern * total))

    def close(self) -> None:
        self.loop.call(lambda: [link.close() for link in self.links.values()])
        self.loop.stop()
        self.listener.close()


def ours(pipe: Connection, me: str, rank: int, size: int, nbytes: int, namespace: str, address: str) -> None:
    """A node that all-reduces over trees; obeys ("connect", ...), ("pace", ...), ("reduce", ...) and ("end",)."""
    import torch

    torch.set_num_threads(1)
    try:
        if namespace:
            enter(namespace)
        node = Node(me, nbytes, address)
        node.fill(rank + 1)
        pipe.send(node.listener.getsockname()[1])
        while True:
            word, *rest = pipe.recv()
            if word == "end":
                break
            if word == "connect":
                node.connect(*rest)
                pipe.send("connected")
            elif word == "pace":
                node.pace(*rest)
                pipe.send("paced")
            else:
                view, seq, begin_at = rest
                cpu = time.process_time()
                done_at = node.reduce(view, seq, begin_at)
                cpu = time.process_time() - cpu
                pipe.send((done_at, cpu, node.right(seq, size * (size + 1) // 2)))
        node.close()
    except BaseException as error:
        pipe.send(RuntimeError(f"node {me}: {error!r}"))
        raise


def gloo(pipe: Connection, rank: int, size: int, nbytes: int, namespace: str, store: str) -> None:
    """A node that all-reduces by torch.distributed on gloo in a namespace; obeys ("reduce", begin_at) and ("end",)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        enter(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = "node0"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        pattern = torch.arange(nbytes // 4, dtype=torch.int64).remainder_(251).to(torch.float32)
        dist.barrier()
        pipe.send("connected")
        while True:
            word, *rest = pipe.recv()
            if word == "end":
                break
            (begin_at,) = rest
            own = pattern * (rank + 1)
            time.sleep(max(0.0, begin_at - time.monotonic()))
            cpu = time.process_time()
            dist.all_reduce(own)
            done_at, cpu = time.monotonic(), time.process_time() - cpu
            pipe.send((done_at, cpu, bool(torch.equal(own, pattern * (size * (size + 1) // 2)))))
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send(RuntimeError(f"gloo rank {rank}: {error!r}"))
        raise
