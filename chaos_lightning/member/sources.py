"""Whom to ask for bytes: neighbours; or, where no neighbour has them, others through neighbours.

Theory of operation. Where every pair of members has a link, all are neighbours. In a sparse graph (View.links) this
member asks those that it has a link to, as Chaos, section II, does: all hold the same state, so a way over several hops
brings nothing but traffic. Only when none of them is a source (the founder of a job is the only one that holds
anything) a route is taken: the fewest hops over the view's links, each relayed by a member's state server
(replication/forward.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chaos_lightning.planning.graph import breadth_first, neighbours
from chaos_lightning.protocol.types import Member, View
from chaos_lightning.replication.source import Endpoint


def endpoint(source: Member, view: View, near: Collection[str]) -> Endpoint:
    """The way to one source.

    Args:
        source: Who holds something.
        view: Its members and links may be used.
        near: Members that this one has a link to.
    """
    direct = Endpoint(source.id, source.address, source.port)
    if not view.links or source.id in near:
        return direct
    route = _route(source.id, view, near)
    first = view.find(route[0]) if route else None
    if first is None:
        return direct  # no way is known: dialling says what is wrong
    return Endpoint(source.id, first.address, first.port, route=route)


def endpoints(sources: Sequence[Member], view: View, near: Collection[str]) -> list[Endpoint]:
    """The ways to those sources that are to be asked: neighbours, or all if none of them is one."""
    beside = [s for s in sources if s.id in near] if view.links else []
    return [endpoint(s, view, near) for s in beside or sources]


def _route(to: str, view: View, near: Collection[str]) -> tuple[str, ...]:
    """Hops from a neighbour to `to`, both included; empty if the links do not lead there."""
    graph = neighbours(view.ids(), [(link.a, link.b) for link in view.links])
    ways = breadth_first("", {**graph, "": [m for m in view.ids() if m in near]})
    route: list[str] = []
    while to and to in ways:
        route.insert(0, to)
        to = ways[to][0]
    return tuple(route)
