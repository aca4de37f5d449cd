"""Whole joins of the product on an emulated edge: nodes that train, a newcomer, and how long the others stood still.

Theory of operation. Every node of a join's cluster is a process with the package's engine, which trains a small model
beside a large frozen one: the frozen weights make the state as large as it is to be, the small model keeps steps short,
so that what a step loses can be seen. Its compute stands for a device's: the processor is free for most of a step, so
that what hosts lose is the time in which they wait, not that of a few processors. All links go through the relay of
`lab/edge/`, with the topology's rates; a scheduler of its own runs beside. The newcomer has built everything and
waits for its word to join. Per join:

  delay_s    from the newcomer's call of `join` to the commit of the first step with its gradient in it;
  idle_s     over all hosts and all their steps from that call to the second joint step: what they took together beyond
             as many usual ones of as many members (medians before the join, and well after);
  calm_s     the same over as many steps just before: what the machine does to steps by itself.

The newcomer leaves politely, and the next one comes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import MIB, compute_alone, median
from benchmarks.paper.clusters import Join
from benchmarks.paper.emulated import Factors
from benchmarks.survival import Seen, Step, World
from benchmarks.workers import Worker, context, scheduler
from chaos_lightning.lab.edge.network import Edge
from chaos_lightning.lab.edge.topology import Link, Topology
from chaos_lightning.lab.emulation import enter

CALM = 20
"""Steps whose median is the usual one."""
SETTLED = 3
"""Joint steps that do not count for it."""
AFTERMATH = 2
"""Joint steps that still count as the join."""
WIDTH, BATCH = 64, 16
DEVICE_S = 0.05
"""What a device would take for a step."""
PATIENCE_S = 120.0


def trainee(pipe: Connection, settings: dict[str, Any], environment: dict[str, str], frozen_nbytes: int) -> None:
    """A member: trains until told to leave; a newcomer (`join_by` in its settings) first waits for "go"."""
    enter(environment)
    import torch

    from chaos_lightning.collectives.layout import Section
    from chaos_lightning.errors import DepartedError
    from chaos_lightning.member.engine import Engine
    from chaos_lightning.replication.access import ModuleState
    from chaos_lightning.replication.replay import ModuleReplay
    from chaos_lightning.settings import EngineConfig

    newcomer = "join_by" in settings
    compute_alone()
    torch.manual_seed(os.getpid() if newcomer else 0)  # a newcomer's own weights are worth nothing
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    rows = frozen_nbytes // (4 * WIDTH)
    parts = 24  # as a model has several tensors
    for index in range(parts):
        weight = torch.nn.Parameter(torch.randn(rows // parts, WIDTH), requires_grad=False)
        model.register_parameter(f"frozen{index}", weight)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.Adam([p for _, p in trained], lr=1e-4)
    state = ModuleState(model, optimizer)
    engine = Engine(EngineConfig.build({"host_scheduler": False, "join_timeout_s": PATIENCE_S, **settings}))
    engine.prepare(sections=[Section("all", trained)])
    if newcomer:
        pipe.send(("ready", time.monotonic_ns()))
        pipe.recv()
        pipe.send(("going", time.monotonic_ns()))
    engine.join(fingerprint={}, quota=BATCH, accumulate=1, state=state, replay=ModuleReplay(state))
    fresh = newcomer
    draw = torch.Generator().manual_seed(os.getpid())
    while not engine.out:
        while pipe.poll():
            if pipe.recv()[0] == "leave":
                engine.leave("the benchmark's newcomer goes")
        optimizer.zero_grad(set_to_none=True)
        engine.arm(coefficient=1.0)
        loss = model(torch.randn(BATCH, WIDTH, generator=draw)).square().mean()
        time.sleep(DEVICE_S)
        loss.backward()
        try:
            header = engine.step(weight=1.0, coefficient=1.0)
        except DepartedError:
            break
        now = time.monotonic_ns()
        optimizer.step()
        if fresh:
            fresh = False
            pipe.send(("contributed", now))
        pipe.send(("step", now, header.seq, header.step, header.hash, len(header.contributors), engine.rank, 0))
        engine.serve(state)
        if header.boundary and not engine.out:
            engine.boundary(state)
    engine.wait_released()
    engine.close()
    pipe.send(("bye",))


@dataclass(frozen=True)
class Way:
    """How a newcomer comes in.

    Attributes:
        system: Which of the paper's systems that is.
        join_by: "pause" or "replay".
        transfer: Its policy.
    """

    system: str
    join_by: str
    transfer: str


@dataclass(frozen=True)
class Visit:
    """One join, seconds as they were here."""

    delay_s: float
    idle_s: float
    calm_s: float
    usual_s: float
    """Hosts' median step before."""
    steps: int
    """Steps of the longest host between the call and the second joint one."""


class Hosts(World):
    """Nodes that train, and newcomers at the last node of the join's topology."""

    def __init__(self, join: Join, factors: Factors, endpoint: str, edge: Edge, frozen_nbytes: int) -> None:
        super().__init__(self._spawned, random.Random(0), PATIENCE_S)
        self.join, self.factors = join, factors
        self._endpoint, self._edge, self._frozen_nbytes = endpoint, edge, frozen_nbytes
        self._context = context("benchmarks.paper.hosts", "torch._dynamo", "chaos_lightning.replication.replay")
        self.notes: dict[str, dict[str, int]] = {}
        self.hosts: list[str] = []

    def _spawned(self, name: str) -> Worker:
        raise AssertionError("nodes have names of their own")

    def _open(self, member: str, node: str, **settings: Any) -> None:
        given = {"endpoint": self._endpoint, "name": member, **settings}
        environment = self._edge.environment(node)
        self.members[member] = Seen(Worker(self._context, trainee, given, environment, self._frozen_nbytes))
        self.notes[member] = {}

    def open(self) -> None:
        """All that run before."""
        for node in self.join.topology.names[:-1]:
            self._open(f"{node}-0", node)
            self.hosts.append(f"{node}-0")
        self.calm(len(self.hosts))

    def calm(self, size: int, count: int = CALM) -> None:
        """Until the hosts have taken so many steps in a row with `size` members."""
        marks = {h: len(self.members[h].steps) for h in self.hosts}

        def passed(host: str) -> bool:
            steps = self.members[host].steps[marks[host] :]
            return len(steps) > count and all(s.contributors == size for s in steps[-count:])

        self.pump(lambda: all(passed(h) for h in self.hosts), f"{count} steps of {size} members")

    def usual_of(self, size: int) -> float:
        """Median of the hosts' last steps of so many members, s."""
        return median(
            [t for h in self.hosts for s, t in intervals(self.members[h].steps[-CALM:]) if s.contributors == size]
        )

    def visit(self, way: Way, number: int) -> Visit:
        """A newcomer comes, trains and goes."""
        node, size = self.join.newcomer, len(self.hosts)
        guest = f"{node}-{number}"
        self._open(guest, node, join_by=way.join_by, transfer=way.transfer)
        notes, seen = self.notes[guest], self.members[guest]
        self.pump(lambda: "ready" in notes, f"{guest} to be ready")
        self.calm(size)
        usual = {size: self.usual_of(size)}
        seen.worker.pipe.send(("go",))
        self.pump(lambda: "contributed" in notes, f"the first contribution of {guest}")
        self.calm(size + 1, CALM + SETTLED)
        usual[size + 1] = self.usual_of(size + 1)
        idle_s, calm_s, steps = 0.0, 0.0, 0
        for host in self.hosts:
            idle, calm, count = beyond(self.members[host].steps, notes["going"], size, usual)
            idle_s, calm_s, steps = idle_s + idle, calm_s + calm, max(steps, count)
        seen.worker.pipe.send(("leave",))
        self.pump(lambda: seen.bye, f"the departure of {guest}")
        self.bury(guest)
        delay_s = (notes["contributed"] - notes["going"]) / 1e9
        return Visit(delay_s, idle_s, calm_s, usual[size], steps)

    def _hear(self, seen: Seen, message: tuple[Any, ...]) -> None:
        if message[0] in ("ready", "going", "contributed"):
            name = next(n for n, s in self.members.items() if s is seen)
            self.notes[name][message[0]] = message[1]
        else:
            super()._hear(seen, message)


def intervals(steps: Sequence[Step]) -> list[tuple[Step, float]]:
    """Each step with the seconds since the one before."""
    return [(b, (b.ns - a.ns) / 1e9) for a, b in itertools.pairwise(steps)]


def beyond(steps: Sequence[Step], called_ns: int, size: int, usual: dict[int, float]) -> tuple[float, float, int]:
    """How long a host stood still for a join.

    Args:
        steps: All its steps.
        called_ns: When the newcomer called.
        size: Members before.
        usual: The usual step by members, s.

    Returns:
        Seconds beyond the usual steps until the second joint one, the same over as many steps before the call, and
        how many steps that were.
    """
    timed = intervals(steps)
    before = [(s, t) for s, t in timed if s.ns <= called_ns]
    after = [(s, t) for s, t in timed if s.ns > called_ns]
    joint = [s.ns for s, _ in after if s.contributors == size + 1]
    during = [(s, t) for s, t in after if s.ns <= joint[AFTERMATH - 1]]

    def excess(of: Sequence[tuple[Step, float]]) -> float:
        return sum(t - usual[s.contributors] for s, t in of if s.contributors in usual)

    return excess(during), excess(before[-len(during) :]), len(during)


@contextlib.contextmanager
def hosts(join: Join, factors: Factors, nbytes: int) -> Iterator[Hosts]:
    """A running cluster of the product; `nbytes` is the state's size in the paper."""
    rates = join.rates()
    links = tuple(Link(a, b, rate / factors.slower) for (a, b), rate in rates.items())
    topology = Topology(join.topology.nodes, links, name=join.topology.name)
    frozen_nbytes = max(MIB // 4, int(nbytes / factors.smaller))
    with Edge(topology, "relay") as edge, scheduler(join.size) as endpoint:
        made = Hosts(join, factors, endpoint, edge, frozen_nbytes)
        try:
            made.open()
            yield made
        finally:
            made.close()
