"""Mends a plan of trees for members and links that are not those that it was drawn for.

Theory of operation. A good plan takes seconds or minutes to draw, and in a large job members come and go meanwhile. As
a rule most of each tree is left: it keeps the edges whose link is there. The pieces that it has fallen into, newcomers
among them, are hung up again, each by the way that is the least full then. An edge fills its link and the cards at both
ends, in proportion to the tree's weight; a card is taken for as fast as its fastest link. Whether what comes of it is
any good is for a prediction to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from chaos_lightning.planning.graph import Pair, breadth_first, connected_parts, neighbours
from chaos_lightning.protocol.types import PlanSpec, TreeSpec


def mended(plan: PlanSpec, members: Sequence[str], links: Mapping[Pair, tuple[float, float, float]]) -> PlanSpec | None:
    """Returns this plan for these members and links; None if it has no trees, or the links do not connect the members.

    Args:
        plan: Drawn for other members or links.
        members: In rank order.
        links: By (a, b): latency in seconds, bps from a to b, bps from b to a.
    """
    wide = {ends: min(there, back) for ends, (_, there, back) in links.items() if there > 0 and back > 0}
    near = neighbours(members, wide)
    if plan.kind != "trees" or len(connected_parts(members, near)) > 1:
        return None
    work = _Work(wide)
    kept = [
        [(m, p) for m, p in zip(tree.members, tree.parents, strict=True) if p in near and m in near[p]]
        for tree in plan.trees
    ]
    for tree, edges in zip(plan.trees, kept, strict=True):
        for edge in edges:
            work.add(edge, tree.weight)
    trees = (_hung_up(tree, edges, members, near, work) for tree, edges in zip(plan.trees, kept, strict=True))
    return replace(plan, trees=tuple(trees))


class _Work:
    """How full links and cards are.

    Args:
        wide: bps of each link.
    """

    def __init__(self, wide: Mapping[Pair, float]) -> None:
        self._bps: dict[Hashable, float] = {}
        self._full: defaultdict[Hashable, float] = defaultdict(float)
        for (a, b), bps in wide.items():
            self._bps[frozenset((a, b))] = bps
            for end in (a, b):
                self._bps[end] = max(bps, self._bps.get(end, 0.0))

    def add(self, edge: Pair, weight: float) -> None:
        """A tree of this weight has this edge."""
        for thing in (frozenset(edge), *edge):
            self._full[thing] += weight / self._bps[thing]

    def after(self, edge: Pair, weight: float) -> float:
        """Returns how full the fullest of what this edge uses would be with it."""
        return max(self._full[thing] + weight / self._bps[thing] for thing in (frozenset(edge), *edge))


def _hung_up(
    tree: TreeSpec, edges: Sequence[Pair], members: Sequence[str], near: Mapping[str, Sequence[str]], work: _Work
) -> TreeSpec:
    """The tree of these edges, and of further ones that make up for those that it has lost."""
    inside: dict[str, list[str]] = {m: [] for m in members}
    for one, other in edges:
        inside[one].append(other)
        inside[other].append(one)
    top = tree.members[tree.parents.index("")]
    below = (m for m, parent in zip(tree.members, tree.parents, strict=True) if parent == top)
    root = next((m for m in (top, *below) if m in inside), members[0])
    first, *waiting = sorted(connected_parts(members, inside), key=lambda piece: root not in piece)
    reached = set(first)
    while waiting:
        piece = waiting.pop(0)
        ways = [(a, b) for a in piece for b in near[a] if b in reached]
        if not ways:  # another piece leads there
            waiting.append(piece)
            continue
        one, other = min(ways, key=lambda way: work.after(way, tree.weight))
        work.add((one, other), tree.weight)
        inside[one].append(other)
        inside[other].append(one)
        reached.update(piece)
    above = breadth_first(root, inside, "")
    return replace(tree, members=tuple(members), parents=tuple(above[m][0] for m in members))
