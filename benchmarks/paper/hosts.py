"""Measures whole joins of the product on an emulated edge: nodes that train, a newcomer, and how long the nodes waited.

Theory of operation. Every node of a join's cluster is a process with the package's engine, which trains a small model
beside a large frozen one: the frozen weights make the state as large as it is to be, the small model keeps steps short,
so that what a step loses can be seen. Its compute stands for a device's: the processor is free for most of a step, so
that what hosts lose is the time in which they wait, not that of a few processors. All links go through the relay of
`testing/edge/`, with the topology's rates; a scheduler of its own runs beside. The newcomer has built everything and
waits for its word to join. Per join:

  delay_s    from the newcomer's call of `join` to the commit of the first step with its gradient in it;
  idle_s     over all hosts and all their steps from that call to the second joint step: what they took together beyond
             as many usual ones of as many members (medians before the join, and well after);
  calm_s     the same over as many steps just before: what the machine does to steps by itself.

The newcomer leaves politely, and the next one comes.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import world
from benchmarks.common import MIB
from benchmarks.members import Trainee, compute_alone, train
from benchmarks.paper.clusters import Join
from benchmarks.paper.emulated import Factors
from benchmarks.workers import Worker, context, scheduler
from benchmarks.world import AFTERMATH, SETTLED, Step, intervals
from chaos_lightning.settings import EngineConfig
from chaos_lightning.testing.edge.network import Edge
from chaos_lightning.testing.edge.topology import Link, Topology
from chaos_lightning.testing.emulation import enter

CALM = 20
"""Steps whose median is the usual one."""
WIDTH, BATCH = 64, 16
DEVICE_S = 0.05
"""Seconds that a device would take for a step."""
PATIENCE_S = 120.0


def trainee(pipe: Connection, settings: dict[str, Any], environment: dict[str, str], frozen_nbytes: int) -> None:
    """Runs a member until it is told to leave; a newcomer (`join_by` in its settings) first waits for "go"."""
    enter(environment)
    import torch

    newcomer = "join_by" in settings
    compute_alone()
    torch.manual_seed(os.getpid() if newcomer else 0)  # a newcomer's own weights are worth nothing
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    rows = frozen_nbytes // (4 * WIDTH)
    parts = 24  # as a model has several tensors
    for index in range(parts):
        weight = torch.nn.Parameter(torch.randn(rows // parts, WIDTH), requires_grad=False)
        model.register_parameter(f"frozen{index}", weight)
    config = EngineConfig.build({"host_scheduler": False, "join_timeout_s": PATIENCE_S, **settings})
    member = Trainee(pipe, config, model, optimizer, replay=True, batch=BATCH)
    train(pipe, member, newcomer=newcomer, device_s=DEVICE_S)


@dataclass(frozen=True)
class Way:
    """Settings by which a newcomer joins, and the paper's system that they stand for.

    Attributes:
        system: Which of the paper's systems that is.
        join_by: "pause" or "replay".
        transfer: Its policy, as the setting names it.
    """

    system: str
    join_by: str
    transfer: str


@dataclass(frozen=True)
class Visit:
    """Measurements of one join, in seconds of this machine."""

    delay_s: float
    idle_s: float
    calm_s: float
    usual_s: float
    """Hosts' median step before."""
    steps: int
    """Steps of the longest host between the call and the second joint one."""


class Hosts(world.Hosts):
    """Nodes that train, and newcomers at the last node of the topology; a member's name is NODE-NUMBER."""

    def __init__(self, join: Join, factors: Factors, endpoint: str, edge: Edge, frozen_nbytes: int) -> None:
        super().__init__(self._spawned, random.Random(0), PATIENCE_S)
        self.join, self.factors = join, factors
        self._endpoint, self._edge, self._frozen_nbytes = endpoint, edge, frozen_nbytes
        self._context = context("benchmarks.paper.hosts", "chaos_lightning.replication.replay")
        self._way: Way | None = None
        """Settings by which a member that is started now joins; None: default settings, as for the first nodes."""

    def _spawned(self, name: str) -> Worker:
        settings = {"endpoint": self._endpoint, "name": name}
        if self._way is not None:
            settings |= {"join_by": self._way.join_by, "transfer": self._way.transfer}
        environment = self._edge.environment(name.rpartition("-")[0])
        return Worker(self._context, trainee, settings, environment, self._frozen_nbytes)

    def visit(self, way: Way, number: int) -> Visit:
        """Lets a newcomer join, train and leave; returns the measurements."""
        guest, size = f"{self.join.newcomer}-{number}", len(self.hosts)
        self._way = way
        self.invite(guest)
        self.calm(size, CALM)
        usual = {size: self.usual_of(size, CALM)}
        (called_ns, _), (first_ns, _) = self.let_in(guest)
        self.calm(size + 1, CALM + SETTLED)
        usual[size + 1] = self.usual_of(size + 1, CALM)
        lost = [beyond(self.members[host].steps, called_ns, size, usual) for host in self.hosts]
        self.see_off(guest)
        self.bury(guest)
        idle_s, calm_s = (sum(one[i] for one in lost) for i in (0, 1))
        return Visit((first_ns - called_ns) / 1e9, idle_s, calm_s, usual[size], max(one[2] for one in lost))


def beyond(steps: Sequence[Step], called_ns: int, size: int, usual: dict[int, float]) -> tuple[float, float, int]:
    """Returns by how many seconds a join delayed a host's steps.

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
    """Yields a running job of the product with a state of `nbytes`, the size in the paper."""
    links = tuple(Link(a, b, rate / factors.slower) for (a, b), rate in join.rates().items())
    topology = Topology(join.topology.nodes, links, name=join.topology.name)
    frozen_nbytes = max(MIB // 4, int(nbytes / factors.smaller))
    with (
        Edge(topology, "relay") as edge,
        scheduler(join.size) as endpoint,
        Hosts(join, factors, endpoint, edge, frozen_nbytes) as made,
    ):
        made.admit_hosts([f"{node}-0" for node in join.topology.names[:-1]])
        yield made
