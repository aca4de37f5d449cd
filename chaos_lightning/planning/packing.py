"""Finds spanning trees of a measured network: the one with most bandwidth, those of fastest paths, and sets of trees
that share links.

Theory of operation. One tree is as wide as its narrowest link, so the widest spanning tree takes links from the widest
down; of all trees that are as wide, the one with the shortest ways is drawn.

Several trees share links. How much each may carry so that no link (nor access, nor machine) is overfull, and all
together as much as possible, is a linear program with one variable per spanning tree. It is solved by generating
columns: the simplex method prices what is scarce, and the cheapest spanning tree at those prices, found greedily, is
the only one that can improve on the trees found so far. Where the cheapest tree costs 1, nothing can; before that,
prices give an upper bound for any set of trees (linear programming duality), as does each partition of the members: a
tree crosses between k parts at least k - 1 times (Tutte and Nash-Williams: the smallest of these is attained). No
all-reduce by other means crosses less, so on links whose two directions are alike the bound is the network's own.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from chaos_lightning.planning.network import INFINITE, Edge, Network

EdgeTree = tuple[Edge, ...]

_MOST_EDGES = 96
"""Number of links beyond which a network is thinned for packing: a plan gains little by yet more of them."""
_WORK = 4_000_000
"""Multiplications that the simplex method may spend (about half a second); then the best packing so far is taken."""
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Packing:
    """Spanning trees with the rate that each carries, which together fit the network's capacities."""

    trees: tuple[tuple[EdgeTree, float], ...]
    """Pairs of (edges, bps), the largest rate first."""
    bound_bps: float
    """Rate (bit/s) that no set of trees exceeds."""

    @property
    def rate_bps(self) -> float:
        return sum(rate for _, rate in self.trees)


# --- one tree ----------------------------------------------------------------------------------------------------


def spanning(size: int, edges: Iterable[Edge]) -> EdgeTree:
    """Returns the spanning tree that takes edges in the given order and skips those that would close a cycle
    (Kruskal).
    """
    part = list(range(size))

    def find(i: int) -> int:
        while part[i] != i:
            part[i] = part[part[i]]
            i = part[i]
        return i

    taken = []
    for i, j in edges:
        a, b = find(i), find(j)
        if a != b:
            part[a] = b
            taken.append((i, j))
            if len(taken) == size - 1:
                break
    return tuple(taken)


def bottleneck_bps(network: Network) -> float:
    """Returns the highest rate of one tree (bit/s); exact if only links have a capacity, otherwise an upper bound."""
    if len(network) == 1:
        return INFINITE
    tree = spanning(len(network), sorted(network.edges, key=lambda e: (-network.worth(e), e)))
    links = min(map(network.worth, tree))
    return min([links, *(capacity for capacity in network.access.values() if capacity)])


def widest(network: Network, nbytes: int, chunk_nbytes: int) -> tuple[int, ...]:
    """Returns the parents of the spanning tree with the highest rate; of equal ones, the tree with the least predicted
    time.
    """
    size = len(network)
    if size == 1:
        return (-1,)
    by_width = spanning(size, sorted(network.edges, key=lambda e: (-network.worth(e), e)))
    limit = min(map(network.worth, by_width))
    candidates = [nearest(network, root, chunk_nbytes, limit) for root in range(size)]
    candidates.append(network.rooted(by_width, chunk_nbytes))
    if len(network.resources) > len(network.edges):
        candidates.append(network.rooted(_sparing(network), chunk_nbytes))
    return min(candidates, key=lambda parents: network.time_s([(parents, 1.0)], nbytes, chunk_nbytes))


def nearest(network: Network, root: int, chunk_nbytes: int, limit_bps: float = 0.0) -> tuple[int, ...]:
    """Returns the parents of the tree of fastest paths to `root` for one chunk, over links of at least `limit_bps`
    (Dijkstra).
    """
    found: dict[int, int] = {}
    queue: list[tuple[float, int, int, int]] = [(0.0, 0, root, -1)]
    while queue:
        way_s, hops, i, parent = heapq.heappop(queue)
        if i in found:
            continue
        found[i] = parent
        for j in network.near[i]:
            if j not in found and network.worth((min(i, j), max(i, j))) >= limit_bps:
                up, down = network.hop_s(j, i, chunk_nbytes)
                heapq.heappush(queue, (way_s + up + down, hops + 1, j, i))
    return tuple(found[i] for i in range(len(network)))


def _sparing(network: Network) -> EdgeTree:
    """Returns a spanning tree built greedily: each edge added is the one whose shared links and cards have most
    capacity left.
    """
    count = [0] * len(network.resources)
    part = list(range(len(network)))
    taken: list[Edge] = []
    while len(taken) < len(network) - 1:

        def width(e: Edge) -> float:
            return min(network.resources[r].capacity_bps / (count[r] + 1) for r in network.uses[e])

        crossing = [e for e in network.edges if part[e[0]] != part[e[1]]]
        i, j = best = max(crossing, key=lambda e: (width(e), -e[0], -e[1]))
        taken.append(best)
        for r in network.uses[best]:
            count[r] += 1
        part = [part[j] if p == part[i] else p for p in part]
    return tuple(taken)


# --- several trees -----------------------------------------------------------------------------------------------


def pack(network: Network) -> Packing:
    """Returns a set of trees whose total rate is (nearly) the highest that any set of trees has on this network."""
    size = len(network)
    if size == 1:
        return Packing((), INFINITE)
    edges = _thinned(network)
    rows = sorted({r for e in edges for r in network.uses[e]})
    uses = {e: [rows.index(r) for r in network.uses[e]] for e in edges}
    scale = max(r.capacity_bps for r in network.resources)
    capacity = [network.resources[r].capacity_bps / scale for r in rows]
    bound = _partition_bound(network) / scale
    simplex = _Simplex(capacity)
    trees: list[EdgeTree] = []
    for _ in range(max(50, _WORK // len(rows) ** 2)):
        prices = simplex.prices()
        lowest = min(range(len(rows)), key=prices.__getitem__)
        if prices[lowest] < -_TINY:
            simplex.enter({lowest: 1.0}, None)
            continue
        cost = {e: sum(prices[r] for r in uses[e]) for e in edges}
        tree = spanning(size, sorted(edges, key=lambda e: (cost[e], -network.worth(e), e)))
        whole = sum(cost[e] for e in tree)
        if len(edges) == len(network.edges) and whole > _TINY:
            worth = sum(p * c for p, c in zip(prices, capacity, strict=True))
            bound = min(bound, worth / whole)
        if whole > 1 - 1e-7 or simplex.total() > bound * (1 - 1e-6):
            break
        trees.append(tree)
        simplex.enter(_column(tree, uses), len(trees) - 1)
    found = sorted(((trees[i], rate * scale) for i, rate in simplex.amounts().items()), key=lambda t: (-t[1], t[0]))
    return Packing(tuple(found), bound * scale)


def weigh(network: Network, trees: Sequence[EdgeTree]) -> list[float]:
    """Returns the rate (bit/s) of each of these trees that makes their total rate highest."""
    rows = sorted({r for tree in trees for e in tree for r in network.uses[e]})
    uses = {e: [rows.index(r) for r in network.uses[e]] for tree in trees for e in tree}
    scale = max(network.resources[r].capacity_bps for r in rows)
    columns = [_column(tree, uses) for tree in trees]
    simplex = _Simplex([network.resources[r].capacity_bps / scale for r in rows])
    for _ in range(max(50, _WORK // len(rows) ** 2)):
        prices = simplex.prices()
        lowest = min(range(len(rows)), key=prices.__getitem__)
        if prices[lowest] < -_TINY:
            simplex.enter({lowest: 1.0}, None)
            continue
        costs = [sum(prices[r] * count for r, count in column.items()) for column in columns]
        best = min(range(len(trees)), key=lambda i: (costs[i], i))
        if costs[best] > 1 - 1e-7:
            break
        simplex.enter(columns[best], best)
    amounts = simplex.amounts()
    return [amounts.get(i, 0.0) * scale for i in range(len(trees))]


def _column(tree: EdgeTree, uses: Mapping[Edge, Sequence[int]]) -> dict[int, float]:
    column: dict[int, float] = {}
    for e in tree:
        for r in uses[e]:
            column[r] = column.get(r, 0.0) + 1.0
    return column


def _thinned(network: Network) -> tuple[Edge, ...]:
    """Returns the links among which trees are packed: all, or, if there are too many, the union of the widest spanning
    forests.
    """
    left = sorted(network.edges, key=lambda e: (-network.worth(e), e))
    if len(left) <= _MOST_EDGES:
        return network.edges
    kept: list[Edge] = []
    while left and (not kept or len(kept) + len(network) - 1 <= max(_MOST_EDGES, 2 * len(network))):
        forest = spanning(len(network), left)
        kept += forest
        taken = set(forest)
        left = [e for e in left if e not in taken]
    return tuple(sorted(kept))


def _partition_bound(network: Network) -> float:
    """Returns the least `most_across` of some partitions: by machine, and those met while the widest links are joined
    first.
    """
    bound = most_across(network, network.hosts)
    part = list(range(len(network)))
    for i, j in spanning(len(network), sorted(network.edges, key=lambda e: (-network.worth(e), e))):
        bound = min(bound, most_across(network, part))
        part = [part[j] if p == part[i] else p for p in part]
    return bound


def most_across(network: Network, part: Sequence[Hashable]) -> float:
    """Returns an upper bound of the rate (bps) of any set of trees, from the bytes that must cross between the given
    parts.

    Each tree crosses between k parts at least k - 1 times. What crosses leaves two parts, and out of a part goes no
    more than its links carry, nor than what all of these links share: an access, or a network card.

    Args:
        network: A network.
        part: The part of each rank.
    """
    leaving: dict[Hashable, list[Edge]] = {p: [] for p in part}
    for i, j in network.edges:
        if part[i] != part[j]:
            leaving[part[i]].append((i, j))
            leaving[part[j]].append((i, j))
    if len(leaving) == 1:
        return INFINITE
    most = []
    for out in leaving.values():
        shared = set(network.uses[out[0]]).intersection(*map(network.uses.__getitem__, out))
        most.append(min([sum(map(network.worth, out)), *(network.resources[r].capacity_bps for r in shared)]))
    return min(*most, sum(most) / 2 / (len(most) - 1))


class _Simplex:
    """Simplex method that maximizes the sum of amounts while no resource is used beyond its capacity; columns of the
    linear program are added one at a time.

    Capacities are widened by a ten-millionth each, differently, so that no two are exhausted at the very same amount:
    then every step gains something and none can be repeated.
    """

    def __init__(self, capacity: Sequence[float]) -> None:
        rows = range(len(capacity))
        self._inverse = [[float(i == j) for j in rows] for i in rows]
        self._level = [c * (1 + 1e-7 * (i + 1) / len(capacity)) for i, c in enumerate(capacity)]
        self._inside: list[int | None] = [None for _ in rows]

    def total(self) -> float:
        return sum(level for level, label in zip(self._level, self._inside, strict=True) if label is not None)

    def amounts(self) -> dict[int, float]:
        found = {label: v for v, label in zip(self._level, self._inside, strict=True) if label is not None}
        return {label: level for label, level in found.items() if level > _TINY}

    def prices(self) -> list[float]:
        """Returns the price (dual value) of each resource."""
        chosen = [row for row, label in zip(self._inverse, self._inside, strict=True) if label is not None]
        return [sum(column) for column in zip(*chosen, strict=True)] or [0.0] * len(self._level)

    def enter(self, column: Mapping[int, float], label: int | None) -> None:
        """Brings a column into the linear program's basis, as far as capacities allow; `label` None marks a slack
        column.
        """
        move = [sum(row[r] * count for r, count in column.items()) for row in self._inverse]
        leaving = [i for i, step in enumerate(move) if step > _TINY]
        if not leaving:  # only rounding can do that; the next prices will tell
            return
        i = min(leaving, key=lambda i: self._level[i] / move[i])
        pivot = move[i]
        row = self._inverse[i] = [value / pivot for value in self._inverse[i]]
        level = self._level[i] = self._level[i] / pivot
        self._inside[i] = label
        for k, step in enumerate(move):
            if k != i and abs(step) > 1e-15:
                self._inverse[k] = [a - step * b for a, b in zip(self._inverse[k], row, strict=True)]
                self._level[k] -= step * level
