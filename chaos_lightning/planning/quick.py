"""Finds an all-reduce plan within milliseconds, for up to thousands of members: a few trees that spread their work over
the links.

Theory of operation. With k equal trees a node whose neighbours hang below it in every tree sends and receives k times
as much as one that is always a leaf. So each network card gets a budget of edges, by its rate: two per tree on average,
as a tree has nearly as many edges as members; each link gets one by its own rate, too. Trees grow one after the other,
each from the card with the least work so far. Members take in others, those near the root first, as long as budgets
allow, and then those whose card and link have the least work. In the end each tree gets its root in its middle. All of
that takes time in proportion to the links.

A card is taken for as fast as the fastest link that was measured through it, and ranks of one machine share it, as in
`planning/network.py`. Planners that search (`planning/overlay.py`) take longer; for some tens of members, or links that
are very unlike, they may find better trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.graph import Pair, centred, connected_parts, neighbours, not_connected
from chaos_lightning.planning.network import Edge, Rank
from chaos_lightning.protocol.types import PlanSpec, TreeSpec

_TREES, _FEWER_TREES, _LARGE = 8, 4, 256
"""Numbers of trees, and of members beyond which the fewer trees are drawn: eight trees spread the work within a
sixteenth, four within an eighth; beyond 256 members shorter views count.
"""
_AHEAD = 0.75
"""Fraction of a tree's budget that a tree may take from the budgets of later trees: it keeps the first trees low."""


def quick(members: Sequence[Rank], links: Mapping[Pair, tuple[float, float, float]]) -> tuple[PlanSpec, str]:
    """Returns an all-reduce plan for these members and links, and the reason in words.

    Args:
        members: Members in rank order; one with `host` "" has a machine of its own.
        links: Latency in seconds, bps from a to b and bps from b to a, by (a, b).

    Raises:
        PlanError: The links do not connect the members; names the parts.
    """
    ids = tuple(m.id for m in members)
    rank = {name: i for i, name in enumerate(ids)}
    wide = {
        (rank[a], rank[b]): min(there, back) for (a, b), (_, there, back) in links.items() if there > 0 and back > 0
    }
    complete = len(wide) == len(ids) * (len(ids) - 1) // 2
    if complete and (not wide or min(wide.values()) * len(ids) >= max(wide.values())):
        return PlanSpec(), "rotating, since every pair has a link"
    parts = connected_parts(range(len(ids)), neighbours(range(len(ids)), wide))
    if len(parts) > 1:
        raise PlanError(not_connected([[ids[i] for i in part] for part in parts]))
    trees = _Growth([m.host or f"\0{m.id}" for m in members], wide).trees()
    specs = tuple(TreeSpec(0, 0, ids, tuple("" if p < 0 else ids[p] for p in tree), 1.0) for tree in trees)
    return PlanSpec("trees", trees=specs), f"{len(specs)} trees that spread the work"


class _Growth:
    """Trees under construction, and the work that they put on network cards and links.

    Args:
        hosts: The machine of each rank.
        wide: bps of each link, of the slower direction.
    """

    def __init__(self, hosts: Sequence[str], wide: Mapping[Edge, float]) -> None:
        cards = {host: c for c, host in enumerate(dict.fromkeys(hosts))}
        self._card = [cards[host] for host in hosts]
        self._inside: list[list[int]] = [[] for _ in hosts]
        """Ranks on the same machine to which each rank has a link."""
        self._near: list[list[tuple[int, int]]] = [[] for _ in hosts]
        """Ranks on other machines to which each rank has a link, with the number of that link."""
        width = [0.0] * len(cards)
        for link, ((i, j), bps) in enumerate(wide.items()):
            for one, other in ((i, j), (j, i)):
                if self._card[i] == self._card[j]:
                    self._inside[one].append(other)
                else:
                    self._near[one].append((other, link))
                    width[self._card[one]] = max(width[self._card[one]], bps)
        fastest = max(width) or max(wide.values())
        width = [bps or fastest for bps in width]
        # Edges per tree and bps so that all trees together fit: the slowest card is a leaf in each of them.
        share = max(2 * len(width) / sum(width), 1 / min(width))
        self._card_budget = [share * bps for bps in width]
        self._link_budget = [share * bps for bps in wide.values()]
        self._card_load = [0] * len(width)
        self._link_load = [0] * len(wide)

    def trees(self) -> list[tuple[int, ...]]:
        """Returns the trees, each as the parent of each rank (-1 at the root)."""
        size = len(self._near)
        count = _TREES if size <= _LARGE else _FEWER_TREES
        found = []
        for number in range(count):
            first = number * size // count
            root = min(range(size), key=lambda i: (self._card_fullness(i), (i - first) % size))
            edges = self._grown(root, min(number + 1 + _AHEAD, count))
            found.append(centred(size, edges, lambda one, other: 1.0)[0])
        return found

    def _grown(self, root: int, limit: float) -> list[Edge]:
        """Returns the edges of a tree grown from `root`, whose network cards and links stay within `limit` times their
        budgets where possible.
        """
        ways = [sorted(near, key=lambda way: -self._link_fullness(way[1])) for near in self._near]
        depths = {root: 0}
        edges: list[Edge] = []
        offers: list[tuple[float, int, int]] = []

        def excess(i: int, link: int) -> float:
            return max(0.0, self._card_fullness(i) - limit, self._link_fullness(link) - limit)

        def offer(i: int) -> None:
            """Queues member `i` as a parent for its next neighbour, by how far its card and least used link are over
            their budgets.
            """
            while ways[i] and ways[i][-1][0] in depths:
                ways[i].pop()
            if ways[i]:
                heappush(offers, (excess(i, ways[i][-1][1]), depths[i], i))

        def enter(i: int) -> None:
            """Attaches the members on the machine of member `i` below it, and queues all of them as parents for
            others.
            """
            inside = [i]
            for one in inside:
                for other in self._inside[one]:
                    if other not in depths:
                        depths[other] = depths[one] + 1
                        edges.append((other, one))
                        inside.append(other)
            for one in inside:
                offer(one)

        enter(root)
        while offers:
            least, depth, i = heappop(offers)
            j, link = ways[i][-1]
            if j not in depths and excess(i, link) <= least:
                depths[j] = depth + 1
                edges.append((j, i))
                self._link_load[link] += 1
                self._card_load[self._card[i]] += 1
                self._card_load[self._card[j]] += 1
                enter(j)
            offer(i)
        return edges

    def _card_fullness(self, i: int) -> float:
        """Returns how full a rank's network card is with one more edge, as a fraction of its budget per tree."""
        return (self._card_load[self._card[i]] + 1) / self._card_budget[self._card[i]]

    def _link_fullness(self, link: int) -> float:
        """Returns how full a link is with one more tree, as a fraction of its budget per tree."""
        return (self._link_load[link] + 1) / self._link_budget[link]
