"""A plan in milliseconds: a few trees that spread their work over the links of up to thousands of members.

Theory of operation. With k equal trees a node whose neighbours hang below it in every tree sends and receives k times
as much as one that is always a leaf. So each network card gets a budget of edges, by its rate: two per tree on average,
as a tree has nearly as many edges as members; each link gets one by its own rate, too. Trees grow breadth-first, one
after the other, each from the card with the least work so far: over links that no tree has yet first, the fastest
first, as long as budgets allow. Where a tree is stuck all budgets are doubled for it. In the end leaves leave parents
that have too much work, and each tree is hung up in its middle. All of that takes time in proportion to the links.

A card is taken for as fast as the fastest link that was measured through it, and ranks of one machine share it, as in
`planning/network.py`. Planners that search (`planning/overlay.py`) take longer; for some tens of members, or links that
are very unlike, they may find better trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.graph import Pair, connected_parts, hung_up, neighbours, not_connected
from chaos_lightning.planning.network import Edge, Rank
from chaos_lightning.protocol.types import PlanSpec, TreeSpec

_TREES, _FEWER_TREES, _LARGE = 8, 4, 256
"""Eight trees spread the work within a sixteenth, four within an eighth; beyond 256 members shorter views count."""
_AHEAD = 0.5
"""Trees may take from a card what later trees have coming, to this fraction of a tree's budget."""
_LINK_SLACK, _LINK_SHARE = 0.75, 1.5
"""Edges beyond a link's budget that are let pass, and that budget beside an even share of all edges."""
_MORE = 1.25
"""Factor by which budgets are widened each time a tree is stuck."""


def quick(members: Sequence[Rank], links: Mapping[Pair, tuple[float, float, float]]) -> tuple[PlanSpec, str]:
    """A plan for these members over these links, and the reason in words.

    Args:
        members: Members in rank order; one with `host` "" has a machine of its own.
        links: Latency in seconds, bps from a to b and bps from b to a, by (a, b).

    Raises:
        PlanError: The links do not connect the members; names the parts.
    """
    ids = tuple(m.id for m in members)
    wide = {ends: min(there, back) for ends, (_, there, back) in links.items() if there > 0 and back > 0}
    complete = len(wide) == len(ids) * (len(ids) - 1) // 2
    if complete and (not wide or min(wide.values()) * len(ids) >= max(wide.values())):
        return PlanSpec(), "rotating, since every pair has a link"
    parts = connected_parts(ids, neighbours(ids, wide))
    if len(parts) > 1:
        raise PlanError(not_connected(parts))
    trees = _Growth([m.host or f"\0{m.id}" for m in members], _ranked(ids, wide)).trees()
    specs = tuple(TreeSpec(0, 0, ids, tuple("" if p < 0 else ids[p] for p in tree), 1.0) for tree in trees)
    return PlanSpec("trees", trees=specs), f"{len(specs)} trees that spread the work"


def _ranked(ids: Sequence[str], wide: Mapping[Pair, float]) -> dict[Edge, float]:
    rank = {name: i for i, name in enumerate(ids)}
    return {(rank[a], rank[b]): bps for (a, b), bps in wide.items()}


class _Growth:
    """Trees in the making, with the work that they give to cards and links.

    Args:
        hosts: The machine of each rank.
        wide: bps of each link, of the slower direction.
    """

    def __init__(self, hosts: Sequence[str], wide: Mapping[Edge, float]) -> None:
        cards = {host: c for c, host in enumerate(dict.fromkeys(hosts))}
        self._card = [cards[host] for host in hosts]
        self._inside: list[list[int]] = [[] for _ in hosts]
        """Ranks on the same machine that each rank has a link to."""
        width = [0.0] * len(cards)
        near: list[list[tuple[float, int, int]]] = [[] for _ in hosts]
        for link, ((i, j), bps) in enumerate(wide.items()):
            for one, other in ((i, j), (j, i)):
                if self._card[i] == self._card[j]:
                    self._inside[one].append(other)
                else:
                    near[one].append((-bps, other, link))
                    width[self._card[one]] = max(width[self._card[one]], bps)
        self._near = [[(j, link) for _, j, link in sorted(found)] for found in near]
        """Ranks on other machines that each rank has a link to, and these links; the fastest link first."""
        fastest = max(width) or max(wide.values())
        width = [bps or fastest for bps in width]
        # Edges per tree and bps so that all trees together fit: the slowest card is a leaf in each of them.
        share = max(2 * len(width) / sum(width), 1 / min(width))
        self._card_budget = [share * bps for bps in width]
        outside = [bps for (i, j), bps in wide.items() if self._card[i] != self._card[j]] or [fastest]
        even = max(_LINK_SHARE * (len(width) - 1) / len(outside), 1 - _LINK_SLACK) * len(outside) / sum(outside)
        self._link_budget = [min(share, even) * bps for bps in wide.values()]
        self._count = _TREES if len(hosts) <= _LARGE else _FEWER_TREES
        self._card_load = [0] * len(width)
        self._link_load = [0] * len(wide)

    def trees(self) -> list[tuple[int, ...]]:
        """Parent of each rank, -1 at the root, by tree."""
        trees = [self._grown(number) for number in range(1, self._count + 1)]
        for tree in trees:
            self._relieve(tree)
        edges = [[(i, p) for i, p in enumerate(tree) if p >= 0] for tree in trees]
        return [hung_up(len(self._near), tree, lambda one, other: 1.0)[0] for tree in edges]

    def _grown(self, number: int) -> list[int]:
        size = len(self._near)
        first = (number - 1) * size // self._count
        root = min(range(size), key=lambda i: (self._fullness(i), (i - first) % size))
        parents: list[int | None] = [None] * size
        waiting, scale = self._taken(root, -1, parents), float(number)
        while waiting:
            waiting = self._spread(waiting, parents, scale)
            scale *= _MORE
        return [-1 if p is None else p for p in parents]

    def _fullness(self, i: int) -> float:
        return (self._card_load[self._card[i]] + 1) / self._card_budget[self._card[i]]

    def _taken(self, i: int, parent: int, parents: list[int | None]) -> list[int]:
        """Puts a rank into the tree, and below it all that links within its machine lead to; returns these ranks."""
        parents[i] = parent
        found = [i]
        for one in found:
            for other in self._inside[one]:
                if parents[other] is None:
                    parents[other] = one
                    found.append(other)
        return found

    def _spread(self, reached: list[int], parents: list[int | None], scale: float) -> list[int]:
        """Lets these and those whom they reach take in others, as far as `scale` times the budgets of one tree go;
        returns those that leave somebody out."""
        waiting = []
        for i in reached:
            for fresh in (True, False):
                for j, link in self._near[i]:
                    if (
                        parents[j] is None
                        and fresh != bool(self._link_load[link])
                        and self._has_room(i, j, link, scale)
                    ):
                        self._load(i, j, link, 1)
                        reached += self._taken(j, i, parents)
            if any(parents[j] is None for j, _ in self._near[i]):
                waiting.append(i)
        return waiting

    def _has_room(self, i: int, j: int, link: int, scale: float, ahead: float = _AHEAD) -> bool:
        if self._link_load[link] + 1 > scale * self._link_budget[link] + _LINK_SLACK:
            return False
        return all(
            self._card_load[c] + 1 <= (scale + ahead) * self._card_budget[c] for c in (self._card[i], self._card[j])
        )

    def _load(self, i: int, j: int, link: int, count: int) -> None:
        self._link_load[link] += count
        self._card_load[self._card[i]] += count
        self._card_load[self._card[j]] += count

    def _relieve(self, tree: list[int]) -> None:
        """Hangs leaves whose parents' cards have too much work below others that have room."""
        above = set(tree)
        for leaf, parent in enumerate(tree):
            ways = dict(self._near[leaf])
            if leaf in above or parent not in ways:
                continue
            if self._card_load[self._card[parent]] > self._count * self._card_budget[self._card[parent]]:
                self._load(leaf, parent, ways[parent], -1)
                best = next((j for j, link in ways.items() if self._has_room(leaf, j, link, self._count, 0)), parent)
                self._load(leaf, best, ways[best], 1)
                tree[leaf] = best
                above.add(best)
