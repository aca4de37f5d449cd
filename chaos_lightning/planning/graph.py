"""Who is linked to whom: the parts of a graph, and the shortest ways through it.

Theory of operation. A graph is a set of pairs of ids; direction and order of a pair do not matter. Where there is a
choice, rank order decides, so that all members decide alike.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)
Pair = tuple[str, str]


def neighbours(members: Sequence[str], links: Collection[Pair]) -> dict[str, list[str]]:
    """Of each member those it has a link to, in rank order; pairs that name others are left out."""
    there = {frozenset(pair) for pair in links}
    return {a: [b for b in members if b != a and frozenset((a, b)) in there] for a in members}


def connected_parts(members: Sequence[str], near: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The parts that links connect, each in rank order, oldest member first."""
    parts: list[list[str]] = []
    seen: set[str] = set()
    for name in members:
        if name not in seen:
            part = set(breadth_first(name, near, ""))
            seen |= part
            parts.append([m for m in members if m in part])
    return parts


def not_connected(parts: Sequence[Sequence[str]]) -> str:
    """What to say of a graph in several parts."""
    words = " | ".join(", ".join(part) for part in parts)
    return (
        f"the links do not connect all members; the parts are: {words}. Expected a path between any two: "
        "add a link between the parts (chaos-lightning link add A B), or let one part go on alone"
    )


def pairs_in_words(pairs: Iterable[Pair]) -> str:
    return ", ".join(f"{a}-{b}" for a, b in pairs)


def breadth_first(root: Node, near: Mapping[Node, Sequence[Node]], above: Node) -> dict[Node, tuple[Node, int]]:
    """(parent, depth) of all that can be reached from `root`; fewest hops, then the parent that is found first.

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
