"""The paper's clusters: random overlays that grow node by node, with links of 100 to 1000 Mbps that change every 3
minutes.

Theory of operation. A *growth* is one random history: six nodes at first, connected at random, then one newcomer after
the other at the instants of a Poisson process, each linked with several of those that run. It is one
`testing.topology.Topology` with all its nodes and the schedule of its rates; a `Join` is its state at the moment when
one node comes. "Several" is 40% of the running nodes, at least 2 and at most 8: the paper says only that newcomers
connect to several random nodes and that larger clusters give them more neighbours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from chaos_lightning.testing.edge.topology import Change, EdgeNode, Link, Pair, Topology, links_of, next_change_s

LOW_BPS, HIGH_BPS = 100e6, 1000e6
CHANGE_S = 180.0
LATENCY_S = 0.0001
FIRST = 6
SHARE, FEWEST, MOST = 0.4, 2, 8
MEAN_INTERVAL_S = 600.0


def several(running: int) -> int:
    """Returns the number of a newcomer's neighbours in a cluster of `running` nodes."""
    return min(MOST, running, max(FEWEST, round(SHARE * running)))


@dataclass(frozen=True)
class Join:
    """The join of one node to a cluster.

    Attributes:
        topology: Topology of all nodes that run at the join, and the newcomer.
        newcomer: Name of the newcomer.
        at_s: Time at which the newcomer begins to pull, on the topology's clock (s).
    """

    topology: Topology
    newcomer: str
    at_s: float

    @property
    def size(self) -> int:
        """Number of nodes that run before the join."""
        return len(self.topology.nodes) - 1

    @property
    def label(self) -> str:
        """Label of the join as on the paper's axes."""
        return f"{self.size} to {self.size + 1}"

    @property
    def near(self) -> tuple[str, ...]:
        """Names of the newcomer's neighbours."""
        return self.topology.neighbours(self.newcomer)

    def rates(self, after_s: float = 0.0) -> dict[Pair, float]:
        """Returns the bits per second of all links at `after_s` seconds after the join began."""
        return {pair: state.rate_bps for pair, state in links_of(self.topology, self.at_s + after_s).items()}

    def changes_after_s(self, after_s: float) -> float:
        """Returns the seconds from the join to the first change of rates later than `after_s`; infinity if there is
        none.
        """
        found = next_change_s(self.topology, self.at_s + after_s)
        return math.inf if found is None else found - self.at_s

    def estimates(self) -> dict[str, tuple[float, float]]:
        """Returns (latency in s, bits per second) of the newcomer's links when it comes, as a probe would
        measure them.
        """
        rates = self.rates()
        return {
            (b if a == self.newcomer else a): (LATENCY_S, rate)
            for (a, b), rate in rates.items()
            if self.newcomer in (a, b)
        }


def growth(seed: int, last: int, *, first: int = FIRST, neighbours: int = 0) -> Iterator[Join]:
    """Yields the joins of one growing cluster, from `first` running nodes to `last`.

    Args:
        seed: Seed of overlay, rates and instants.
        last: Number of nodes that run before the last join.
        first: Number of nodes that run before the first join.
        neighbours: Number of neighbours of each newcomer; 0: as many as `several` says.

    Raises:
        ValueError: A cluster of less than two nodes, or one that shrinks.
    """
    if not 2 <= first <= last:
        raise ValueError(f"a history from {first} to {last} nodes: expected 2 <= first <= last")
    chance = random.Random(f"growth/{seed}/{first}")
    links: list[Link] = []

    def rate() -> float:
        return chance.uniform(LOW_BPS, HIGH_BPS)

    def connect(index: int, others: int) -> None:
        near = chance.sample(range(index), min(index, others))
        links.extend(Link(f"n{other}", f"n{index}", rate(), LATENCY_S) for other in sorted(near))

    for index in range(1, first):
        connect(index, neighbours or several(index))
    at_s = 0.0
    for running in count(first):
        if running > last:
            return
        connect(running, neighbours or several(running))
        at_s += chance.expovariate(1 / MEAN_INTERVAL_S)
        yield Join(
            Topology(
                nodes=tuple(EdgeNode(f"n{i}") for i in range(running + 1)),
                links=tuple(links),
                schedule=(Change(at_s=CHANGE_S, every_s=CHANGE_S, rate_bps=(LOW_BPS, HIGH_BPS), seed=seed),),
                name=f"growth {seed}",
            ),
            f"n{running}",
            at_s,
        )


def pair(rate_bps: float) -> Join:
    """Returns the join of a second node to a first one, over one link that never changes."""
    nodes = (EdgeNode("n0"), EdgeNode("n1"))
    return Join(Topology(nodes, (Link("n0", "n1", rate_bps, LATENCY_S),), name="pair"), "n1", 0.0)
