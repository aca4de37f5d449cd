"""All-reduces of the overlay benchmark: one process per node with the product's reducer, loop, links and handshake; or
gloo.

A node is told what to do over its pipe. Its links are TCP connections made by the product's own handshake; where the
network is emulated by pacing, each end's socket gets SO_MAX_PACING_RATE, which limits what it sends; in a network
namespace the kernel's htb does it. Chunks never go by reference. Each node's gradient is a known pattern of whole
numbers times its rank + 1, so that the sum is exact and each node checks its own result.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Result, median
from benchmarks.overlay import net
from benchmarks.overlay.net import MBPS, NAMES
from benchmarks.workers import Worker, context, several
from chaos_lightning.planning import overlay
from chaos_lightning.planning.trees import fewest_hops
from chaos_lightning.protocol.types import NO_VIEW, Member, PlanSpec, View, ViewId

BOUND_ONE = 1.10
BOUND_SEVERAL = 1.15
MEMBERS = tuple(Member(name, name, f"host-{name}", "127.0.0.1", 1) for name in NAMES)
_HEAD_START_S = 0.05
_CLONE_NEWNET = 0x40000000
_DEADLINE_S = 120.0


def enter(namespace: str) -> None:
    """Moves the calling thread (and threads that it starts) into a network namespace; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")
    finally:
        os.close(fd)


class Node:
    """Reducer, loop and links of one member, without the protocol of views and slots."""

    def __init__(self, me: str, nbytes: int, address: str) -> None:
        import torch

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
        self.memory = Memory(self.layout)
        self.loop = IoLoop(me, self.crash.append)
        self.reducer = Reducer(self.memory, self.send, self.on_done)
        self.reducer.restart(me)
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
        self.done.set()  # nobody dials again here: what is missing never comes

    # ------------------------------------------------------------------ links

    def connect(self, dial_to: dict[str, tuple[str, int]], accept_from: Sequence[str]) -> None:
        """Makes all links of this node; blocks until they are connected."""
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
        """Runs one all-reduce that begins at this CLOCK_MONOTONIC second; returns when this node had the whole sum."""
        self.memory.results[seq % 2].zero_()
        self.done.clear()
        scope = self.layout.scope(0)
        time.sleep(max(0.0, begin_at - time.monotonic()))
        self.loop.call(lambda: self.reducer.open(view, seq))
        self.loop.call(lambda: self.reducer.begin(seq, scope))
        self.loop.call(lambda: self.reducer.ready(seq, [start for start, _ in self.memory.grid]))
        done = self.done.wait(0 if self.broken_links else _DEADLINE_S)
        if not done or self.crash or self.broken_links:
            raise RuntimeError(f"{self.me}: slot {seq} did not complete: {self.crash or self.trouble()}")
        return self.done_at

    def trouble(self) -> str:
        """Describes an all-reduce that does not end: the missing bytes of the sum, and the links on which bytes
        wait.
        """
        held = self.reducer.held() or ()
        missing = self.layout.nbytes - sum(stop - start for start, stop in held)
        waiting = (
            f"{peer}: {link.queued_nbytes} bytes queued, {link.sent_nbytes - link.delivered_nbytes} not acknowledged, "
            f"heard {time.monotonic() - link.heard_at:.1f} s ago"
            for peer, link in self.links.items()
            if link.open and (link.queued_nbytes or link.sent_nbytes > link.delivered_nbytes)
        )
        broken = f"broken links {self.broken_links}" if self.broken_links else "no link broke"
        return f"{missing} bytes are missing, {broken}; {'; '.join(waiting) or 'nothing waits to be sent'}"

    def right(self, seq: int, total: int) -> bool:
        import torch

        return bool(torch.equal(self.memory.results[seq % 2].view(torch.float32), self.pattern * total))

    def close(self) -> None:
        self.loop.call(lambda: [link.close() for link in self.links.values()])
        self.loop.stop()
        self.listener.close()


def ours(pipe: Connection, me: str, rank: int, size: int, nbytes: int, namespace: str, address: str) -> None:
    """Runs a node that all-reduces over trees, and obeys ("connect", ...), ("pace", ...), ("reduce", ...) and
    ("end",).
    """
    import torch

    torch.set_num_threads(1)
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


def gloo(pipe: Connection, rank: int, size: int, nbytes: int, namespace: str, store: str) -> None:
    """Runs a node that all-reduces by gloo in a namespace, and obeys ("reduce", begin_at) and ("end",)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
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


# ------------------------------------------------------------------------------------------------ the benchmark's side


class Case(NamedTuple):
    name: str
    plan: PlanSpec
    bound_s: float
    limit: float | None


def cases(nbytes: int, scale: float = 1.0) -> list[Case]:
    """Returns the plans to compare, each with the lower bound of its time."""
    rates = net.rates(scale)
    bound = overlay.bound(MEMBERS, rates, nbytes)
    found = []
    for policy, limit in (("widest", BOUND_ONE), ("packed", BOUND_SEVERAL), ("auto", None), ("fapt", None)):
        planned = overlay.plan(MEMBERS, rates, policy=policy, nbytes=nbytes)
        trees = len(planned.spec.trees)
        print(f"  {policy}: {planned.reason}; predicted {planned.seconds:.4g} s", flush=True)
        bound_s = bound.one_tree_s if trees == 1 else bound.several_trees_s
        found.append(Case(f"{policy} ({trees} tree{'s' if trees > 1 else ''})", planned.spec, bound_s, limit))
    found.append(Case("tree of fewest hops", fewest_hops(NAMES, list(MBPS)), bound.one_tree_s, None))
    return found


@contextlib.contextmanager
def nodes(nbytes: int, *, spaces: bool, scale: float = 1.0) -> Iterator[list[Worker]]:
    """Yields six connected nodes, with paced links on loopback or each in a network namespace."""
    ctx = context(
        "benchmarks.overlay.reduce", "chaos_lightning.collectives.gradients", "chaos_lightning.collectives.reducer"
    )
    address = "0.0.0.0" if spaces else "127.0.0.1"
    arguments = [
        (name, rank, len(NAMES), nbytes, net.namespace(name) if spaces else "", address)
        for rank, name in enumerate(NAMES)
    ]
    with several(ctx, ours, arguments) as workers:
        ports = dict(zip(NAMES, [w.receive() for w in workers], strict=True))
        for name, worker in zip(NAMES, workers, strict=True):
            dial = {b: (net.link_address((a, b), b) if spaces else "127.0.0.1", ports[b]) for a, b in MBPS if a == name}
            worker.pipe.send(("connect", dial, [a for a, b in MBPS if b == name]))
        for worker in workers:
            worker.receive()
        for name, worker in zip(NAMES, workers if not spaces else (), strict=not spaces):
            rates = {(b if a == name else a): mbps * 1e6 * scale for (a, b), mbps in MBPS.items() if name in (a, b)}
            worker.pipe.send(("pace", rates))
            worker.receive()
        yield workers
        for worker in workers:
            worker.pipe.send(("end",))


def all_reduce(workers: list[Worker], *words: Any) -> tuple[float, float]:
    """Runs one all-reduce; returns the seconds until the last node has the sum, and the CPU seconds of all nodes."""
    begin_at = time.monotonic() + _HEAD_START_S
    for worker in workers:
        worker.pipe.send(("reduce", *words, begin_at))
    answers = [worker.receive(180) for worker in workers]
    if not all(right for _, _, right in answers):
        raise RuntimeError("a node holds a wrong sum")
    return max(done_at for done_at, _, _ in answers) - begin_at, sum(cpu for _, cpu, _ in answers)


def measure_ours(
    result: Result, found: list[Case], nbytes: int, rounds: int, *, spaces: bool, scale: float = 1.0
) -> None:
    """Measures all plans in turn, in every round, in the same processes."""
    where = "namespaces" if spaces else "paced"
    times: dict[str, list[float]] = {case.name: [] for case in found}
    cpu: dict[str, list[float]] = {case.name: [] for case in found}
    with nodes(nbytes, spaces=spaces, scale=scale) as workers:
        seq = 0
        for turn in range(rounds + 1):
            for number, case in enumerate(found):
                seq += 1
                view = View(ViewId(1, turn * len(found) + number + 1), NO_VIEW, MEMBERS, plan=case.plan)
                seconds, spent = all_reduce(workers, view, seq)
                if turn:  # the first round opens the windows of TCP
                    times[case.name].append(seconds)
                    cpu[case.name].append(spent)
    for case in found:
        name = f"{case.name}, {where}"
        result.add(f"all-reduce, {name}", median(times[case.name]), "s")
        ratios = [t / case.bound_s for t in times[case.name]]
        limit = case.limit if not spaces else None
        result.add(f"over the bound of {case.bound_s:.4g} s, {name}", median(ratios), "ratio", limit)
        result.add(f"CPU of all nodes, {name}", median(cpu[case.name]), "s")
        result.details[f"ratios, {name}"] = ratios


def measure_gloo(result: Result, nbytes: int, rounds: int, folder: Path, scale: float = 1.0) -> None:
    """Measures gloo in the namespaces, in turn over the routes of most bandwidth and of fewest hops."""
    ctx = context("benchmarks.overlay.reduce")
    kinds = {"best": True, "fewest-hops": False}
    routes = {kind: net.routes(MBPS, widest=widest) for kind, widest in kinds.items()}
    net.set_routes(routes["best"])
    store = str(folder / "gloo-store")
    arguments = [(rank, len(NAMES), nbytes, net.namespace(name), store) for rank, name in enumerate(NAMES)]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with several(ctx, gloo, arguments) as workers:
        for worker in workers:
            worker.receive()
        for turn in range(rounds + 1):
            for kind in kinds:
                net.set_routes(routes[kind])
                seconds, _ = all_reduce(workers)
                if turn:
                    times[kind].append(seconds)
        for worker in workers:
            worker.pipe.send(("end",))
    bound_s = overlay.bound(MEMBERS, net.rates(scale), nbytes).several_trees_s
    for kind, values in times.items():
        result.add(f"gloo over {kind} routes, namespaces", median(values), "s")
        result.add(f"gloo over the bound of {bound_s:.4g} s, {kind} routes", median(values) / bound_s, "ratio")
        result.details[f"gloo, {kind} routes, s"] = values
