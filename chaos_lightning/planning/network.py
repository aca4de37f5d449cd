"""Represents the measured network for planners, and predicts how long an all-reduce over given trees takes.

Theory of operation. A tree that carries a part x of the buffer sends x up and x down each of its edges, so it loads
both directions of each edge alike, and an edge is worth the slower of its directions. Three things have a capacity: a
link; a node's own access, if it is known, which all edges at the node share; a machine's network card, which all edges
to other machines share. For given parts the fullest of these says how long the bytes take; the first chunk's way up and
down the highest tree comes on top, since it is hidden behind nothing. What is not modelled: processors, and other
traffic.

Nothing measures a card. No link is faster than the cards at its ends, so a card is at least as fast as the fastest link
that was measured through it, and it is taken to be no faster. Where it is faster, an all-reduce takes no longer than
predicted. Up to `SMALL_JOB` members only machines with several ranks are taken to have a card: few machines may be far
apart, where each link is slow for a reason of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.graph import Pair, centred, connected_parts, neighbours, not_connected
from chaos_lightning.planning.trees import Shape, chunk_of, shares
from chaos_lightning.protocol.types import SMALL_JOB, PlanSpec, TreeSpec

Edge = tuple[int, int]
"""Pair of ranks, the lower one first."""

INFINITE = float("inf")


class Rank(Protocol):
    """Facts about a member that a planner needs (`protocol.types.Member` has them)."""

    @property
    def id(self) -> str: ...

    @property
    def host(self) -> str: ...


class Measured(NamedTuple):
    """Measured latency (half a round trip) and rates of a link (a, b); with 0 bps in a direction it does not count as a
    link.
    """

    latency_s: float
    forward_bps: float
    """Rate from a to b (bit/s)."""
    backward_bps: float


@dataclass(frozen=True, slots=True)
class Resource:
    """Capacity that several edges share: a link, a member's access or a machine's network card."""

    name: str
    capacity_bps: float
    """Rate in each direction (bit/s)."""
    edges: frozenset[Edge]


class Network:
    """Members in rank order and the links between them, validated.

    Args:
        members: Members in rank order; one with `host` "" has a machine of its own.
        links: Latency in seconds, bps from a to b and bps from b to a, by (a, b); the order of a pair does not matter.
        access: Rates (bps in, bps out) that all links of a member share, by its id; 0 or absent: not known.
        cards: Rates of network cards (bps) by host, in place of what they would be taken for; absent: as that.

    Raises:
        PlanError: No member, one twice, a link of one nobody knows, to itself or with a value that cannot be, or links
            that do not connect all members.
    """

    def __init__(
        self,
        members: Sequence[Rank],
        links: Mapping[Pair, tuple[float, float, float]],
        access: Mapping[str, tuple[float, float]] | None = None,
        cards: Mapping[str, float] | None = None,
    ) -> None:
        self.ids = tuple(m.id for m in members)
        self.hosts = tuple(m.host or f"\0{m.id}" for m in members)
        self.rank = {name: i for i, name in enumerate(self.ids)}
        if not self.ids:
            raise PlanError("a plan needs at least one member; got none")
        if len(self.rank) != len(self.ids):
            raise PlanError(f"members are not distinct: {list(self.ids)}")
        self.rate: dict[tuple[int, int], float] = {}
        """Rate (bit/s) from one rank to another."""
        self.latency: dict[Edge, float] = {}
        self._take(links)
        self.edges: tuple[Edge, ...] = tuple(sorted(self.latency))
        self.links = frozenset((self.ids[i], self.ids[j]) for i, j in self.edges)
        near = neighbours(range(len(self.ids)), self.edges)
        self.near = tuple(map(tuple, near.values()))
        parts = connected_parts(range(len(self.ids)), near)
        if len(parts) > 1:
            raise PlanError(not_connected([[self.ids[i] for i in part] for part in parts]))
        self.access = {self.rank[name]: _least(pair) for name, pair in (access or {}).items() if name in self.rank}
        self.cards = dict(cards or {})
        """Rates (bit/s) of the network cards that count, by host."""
        self.resources = tuple(self._resources())
        uses: dict[Edge, list[int]] = {e: [] for e in self.edges}
        for r, resource in enumerate(self.resources):
            for e in resource.edges:
                uses[e].append(r)
        self.uses: dict[Edge, tuple[int, ...]] = {e: tuple(found) for e, found in uses.items()}
        """Places in `resources` of the resources that each edge uses."""

    def _take(self, links: Mapping[Pair, tuple[float, float, float]]) -> None:
        for (a, b), (latency_s, forward, backward) in links.items():
            unknown = [name for name in (a, b) if name not in self.rank]
            if unknown:
                raise PlanError(f"link {a}-{b} names {unknown[0]!r}, which is no member; members are {list(self.ids)}")
            if a == b:
                raise PlanError(f"link {a}-{b} leads from {a!r} to itself; a link has two ends")
            if not 0 <= latency_s < INFINITE or not 0 <= forward < INFINITE or not 0 <= backward < INFINITE:
                raise PlanError(
                    f"link {a}-{b} has latency {latency_s} s and rates {forward} and {backward} bps; expected finite "
                    "numbers from 0 on"
                )
            i, j = self.rank[a], self.rank[b]
            if (min(i, j), max(i, j)) in self.latency:
                raise PlanError(f"link {a}-{b} is given twice")
            if forward and backward:
                self.rate[i, j], self.rate[j, i] = forward, backward
                self.latency[min(i, j), max(i, j)] = latency_s

    def _resources(self) -> Iterable[Resource]:
        for i, j in self.edges:
            yield Resource(f"link {self.ids[i]}-{self.ids[j]}", self.worth((i, j)), frozenset([(i, j)]))
        for i, capacity in sorted(self.access.items()):
            mine = frozenset((min(i, j), max(i, j)) for j in self.near[i])
            if mine and capacity:
                yield Resource(f"access of {self.ids[i]}", capacity, mine)
        ranks: dict[str, list[int]] = {}
        for i, host in enumerate(self.hosts):
            ranks.setdefault(host, []).append(i)
        for host, here in ranks.items():
            inside = set(here)
            out = frozenset((min(i, j), max(i, j)) for i in here for j in self.near[i] if j not in inside)
            guessed = len(here) > 1 or (len(self) > SMALL_JOB and not self.access.get(here[0]))
            if guessed and out:
                self.cards.setdefault(host, max(map(self.worth, out)))
            if host in self.cards and out:
                yield Resource(f"card of {host}", self.cards[host], out)

    def __len__(self) -> int:
        return len(self.ids)

    def worth(self, edge: Edge) -> float:
        """Returns the rate (bit/s) at which a tree can send over this edge in both directions at once."""
        i, j = edge
        return min(self.rate[i, j], self.rate[j, i])

    @property
    def complete(self) -> bool:
        return len(self.edges) == len(self.ids) * (len(self.ids) - 1) // 2

    def local(self, edge: Edge) -> bool:
        """Returns whether both ends of an edge are on one machine."""
        return self.hosts[edge[0]] == self.hosts[edge[1]]

    # ------------------------------------------------------------------ trees

    def hop_s(self, child: int, parent: int, chunk_nbytes: int) -> tuple[float, float]:
        """Returns the seconds that a chunk takes from `child` up to `parent`, and back down."""
        latency = self.latency[min(child, parent), max(child, parent)]
        return latency + 8 * chunk_nbytes / self.rate[child, parent], latency + 8 * chunk_nbytes / self.rate[
            parent, child
        ]

    def rooted(self, edges: Iterable[Edge], chunk_nbytes: int) -> tuple[int, ...]:
        """Returns the parent of each rank (-1 at the root) in the tree with these edges, rooted in the tree's
        middle.
        """
        trees = centred(len(self), edges, lambda i, j: sum(self.hop_s(i, j, chunk_nbytes)))
        return min(trees, key=lambda parents: (self.fill_s(parents, chunk_nbytes), parents.index(-1)))

    def fill_s(self, parents: Sequence[int], chunk_nbytes: int) -> float:
        """Returns the latency of the first chunk (s): all the way up the tree as it is summed, and down again."""
        ways: dict[int, tuple[float, float]] = {i: (0.0, 0.0) for i, p in enumerate(parents) if p < 0}
        for i in range(len(self.ids)):
            path = []
            while i not in ways:
                path.append(i)
                i = parents[i]
            for i in reversed(path):
                up, down = self.hop_s(i, parents[i], chunk_nbytes)
                above = ways[parents[i]]
                ways[i] = (up + above[0], down + above[1])
        return max(up for up, _ in ways.values()) + max(down for _, down in ways.values())

    def spec(self, trees: Sequence[tuple[Sequence[int], float]]) -> PlanSpec:
        """Returns a plan of kind "trees" from (parents, weight) pairs; the heaviest tree comes first with weight 1."""
        heaviest = max(weight for _, weight in trees)
        ordered = sorted(trees, key=lambda tree: -tree[1])
        return PlanSpec(
            "trees",
            trees=tuple(
                TreeSpec(
                    0, 0, self.ids, tuple("" if p < 0 else self.ids[p] for p in parents), round(weight / heaviest, 6)
                )
                for parents, weight in ordered
            ),
        )

    # ------------------------------------------------------------------ time

    def seconds(self, plan: PlanSpec, nbytes: int) -> float:
        """Returns the predicted seconds of an all-reduce of `nbytes`; infinity if the plan needs a link that is not
        there.

        Raises:
            PlanError: The plan does not fit the members.
        """
        trees = [(self._parents(shape), part) for shape, part in shares(plan, self.ids)]
        return self.time_s(trees, nbytes, chunk_of(plan, nbytes))

    def time_s(self, trees: Iterable[tuple[Sequence[int], float]], nbytes: int, chunk_nbytes: int) -> float:
        """Returns the predicted seconds of an all-reduce over trees given as (parents, fraction of the buffer)."""
        chunk = min(chunk_nbytes, nbytes)
        load = [0.0] * len(self.resources)
        fill = 0.0
        for parents, part in trees:
            for i, p in enumerate(parents):
                if p < 0:
                    continue
                uses = self.uses.get((min(i, p), max(i, p)))
                if uses is None:
                    return INFINITE
                for r in uses:
                    load[r] += part
            fill = max(fill, self.fill_s(parents, chunk))
        fullest = max((x / r.capacity_bps for x, r in zip(load, self.resources, strict=True)), default=0.0)
        return max(fill + 8 * (nbytes - chunk) * fullest, 8 * nbytes * fullest)

    def _parents(self, shape: Shape) -> tuple[int, ...]:
        return tuple(-1 if (p := shape.parent.get(name)) is None else self.rank[p] for name in self.ids)


def _least(pair: tuple[float, float]) -> float:
    """Returns the lower of two rates; 0 means that a rate is not known."""
    return min((value for value in pair if value > 0), default=0.0)
