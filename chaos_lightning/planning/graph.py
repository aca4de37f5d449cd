"""Finds the connected parts of a graph of links, shortest paths through the graph, and the centre of a tree.

Theory of operation. A graph is a set of pairs of ids; direction and order of a pair do not matter. Where there is a
choice, rank order decides, so that all members decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)
Pair = tuple[str, str]


def neighbours(members: Sequence[Node], links: Iterable[tuple[Node, Node]]) -> dict[Node, list[Node]]:
    """Returns the neighbours of each member in rank order; links that name others than these members are ignored."""
    linked: dict[Node, set[Node]] = {m: set() for m in members}
    for a, b in links:
        if a != b and a in linked and b in linked:
            linked[a].add(b)
            linked[b].add(a)
    near: dict[Node, list[Node]] = {m: [] for m in members}
    for a in members:  # each list grows in rank order, so none has to be sorted
        for b in linked[a]:
            near[b].append(a)
    return near


def connected_parts(members: Sequence[Node], near: Mapping[Node, Sequence[Node]]) -> list[list[Node]]:
    """Returns the connected parts of a graph, each in rank order; the part with the oldest member comes first."""
    part: dict[Node, int] = {}
    parts: list[list[Node]] = []
    for name in members:
        if name not in part:
            part |= dict.fromkeys(breadth_first(name, near, name), len(parts))
            parts.append([])
        parts[part[name]].append(name)
    return parts


def removable(near: Mapping[Node, Sequence[Node]], leaving: Sequence[Node]) -> list[Node]:
    """Returns the members of `leaving` that can be removed, one after the other, without disconnecting those that
    remain.

    Whether one can go depends on who has gone before it. So one half of them is decided, then the other one, and those
    of the other half that are there meanwhile count as one with all that stay. Each link is looked at once where the
    rest holds together without any of them, else once for each halving.

    Args:
        near: Neighbours of each member.
        leaving: Some of the members.
    """
    gone: dict[Node, None] = {}

    def decide(some: Sequence[Node], there: Mapping[Node, Node]) -> None:
        whole = sum(above == m for m, above in there.items()) <= 1
        if whole and (len(some) == 1 or all(any(o in there for o in near[m]) for m in some)):
            gone.update(dict.fromkeys(some))
        elif len(some) > 1:
            first, then = some[: len(some) // 2], some[len(some) // 2 :]
            decide(first, _united(there, then, near))
            decide(then, _united(there, [m for m in first if m not in gone], near))

    if leaving:
        decide(leaving, _united({}, near.keys() - set(leaving), near))
    return list(gone)


def _united(groups: Mapping[Node, Node], more: Iterable[Node], near: Mapping[Node, Sequence[Node]]) -> dict[Node, Node]:
    """Returns a union-find forest extended by `more` members, as the parent of each member; a root is its own
    parent.
    """
    found = dict(groups)
    for member in more:
        found[member] = member
        for other in near[member]:
            if (top := other) in found:
                while found[top] != top:
                    found[top] = top = found[found[top]]
                found[top] = member
    return found


def parting_nodes(places: Mapping[str, str], links: Iterable[Pair]) -> list[str]:
    """Returns the nodes whose removal would disconnect others (articulation points), in rank order; takes linear time.

    Args:
        places: Node of each member, in rank order. The workers of a node count as linked with each other.
        links: Pairs of members; those that name others are left out.
    """
    pairs = ((places[a], places[b]) for a, b in links if a in places and b in places)
    near = neighbours(list(dict.fromkeys(places.values())), pairs)
    found: set[str] = set()
    met: dict[str, int] = {}
    low: dict[str, int] = {}  # the earliest node that a node's branch has a link to (Tarjan)
    for root in near:
        if root in met:
            continue
        met[root] = low[root] = len(met)
        branches, path = 0, [(root, iter(near[root]))]
        while path:
            node, rest = path[-1]
            other = next(rest, None)
            if other is None:
                path.pop()
                above = path[-1][0] if path else ""
                if path:
                    low[above] = min(low[above], low[node])
                    branches += above == root
                if path and above != root and low[node] >= met[above]:
                    found.add(above)
            elif other in met:
                low[node] = min(low[node], met[other])
            else:
                met[other] = low[other] = len(met)
                path.append((other, iter(near[other])))
        if branches > 1:
            found.add(root)
    return [node for node in near if node in found]


def not_connected(parts: Sequence[Sequence[str]]) -> str:
    """Returns the error text for a graph that is not connected."""
    words = " | ".join(", ".join(part) for part in parts)
    return (
        f"the links do not connect all members; the parts are: {words}. Expected a path between any two: "
        "add a link between the parts (chaos-lightning link add A B), or let one part go on alone"
    )


def pairs_in_words(pairs: Iterable[Pair]) -> str:
    return ", ".join(f"{a}-{b}" for a, b in pairs)


def breadth_first(root: Node, near: Mapping[Node, Sequence[Node]], above: Node) -> dict[Node, tuple[Node, int]]:
    """Returns (parent, depth) of each node that can be reached from `root` by breadth-first search; of equal parents,
    the first one found.

    `above` is given as the root's own parent.
    """
    found = {root: (above, 0)}
    queue = [root]
    for name in queue:
        for other in near[name]:
            if other not in found:
                found[other] = (name, found[name][1] + 1)
                queue.append(other)
    return found


def centred(size: int, edges: Iterable[tuple[int, int]], length: Callable[[int, int], float]) -> list[tuple[int, ...]]:
    """Returns the parent of each node (-1 at the root) for a tree that is rooted in the middle of its longest path; the
    best tree first.

    Args:
        size: Number of nodes, which are 0, 1, ...
        edges: Edges of the tree.
        length: Length of the edge between two neighbours, which is the same from either side.

    Returns:
        Two trees if two nodes are in the middle, for which rounding may decide.
    """
    near = neighbours(range(size), edges)
    end = 0
    for _ in range(2):  # the node that is farthest from any one node is an end of the longest way
        tree = breadth_first(end, near, -1)
        far = {end: 0.0}
        for node, (parent, _) in tree.items():
            if parent >= 0:
                far[node] = far[parent] + length(node, parent)
        end = max(far, key=far.__getitem__)
    way = [end]
    while tree[way[-1]][0] >= 0:
        way.append(tree[way[-1]][0])
    roots = sorted(way, key=lambda node: max(far[node], far[end] - far[node]))[:2]
    return [tuple(parent for _, (parent, _) in sorted(breadth_first(root, near, -1).items())) for root in roots]
