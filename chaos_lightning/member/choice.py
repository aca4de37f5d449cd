"""Chooses the transfer policy of a member, and the routes over which it asks its donors for bytes.

Theory of operation. Where every pair of members has a link, all are neighbours. In a sparse graph (View.links) this
member asks those that it has a link to, as Chaos, section II, does: all hold the same state, so a way over several hops
brings nothing but traffic. Only when none of them is a source (a founder's neighbours may all be newcomers) a route is
taken: the fewest hops over the view's links, each relayed by a member's state server (replication/forward.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from chaos_lightning.planning.graph import breadth_first, neighbours
from chaos_lightning.protocol.types import Member, View
from chaos_lightning.replication.policies import Adaptive, policy_class
from chaos_lightning.replication.policy import TransferPolicy
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.settings import EngineConfig


@dataclass(frozen=True, slots=True)
class TransferChoice:
    """Transfer policy of this member's pulls, as the user chose it.

    Attributes:
        policy: Class of the policy.
        ingress_bps: This member's own access link, bits per second; 0: no limit of its own.
    """

    policy: type[TransferPolicy] = Adaptive
    ingress_bps: float = 0.0

    @classmethod
    def of(cls, config: EngineConfig) -> TransferChoice:
        """Returns the transfer policy that the settings choose.

        Raises:
            ConfigurationError: There is no such policy.
        """
        return cls(policy_class(config.transfer), config.ingress_bps)


def endpoint(source: Member, view: View, near: Collection[str]) -> Endpoint:
    """Returns the address at which to reach a source, with a route over other members if there is no direct link.

    Args:
        source: Member that has something to pull.
        view: View whose members and links may be used.
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
    """Returns the addresses of the sources to ask: those with a direct link, or all if there is none."""
    beside = [s for s in sources if s.id in near] if view.links else []
    return [endpoint(s, view, near) for s in beside or sources]


def _route(to: str, view: View, near: Collection[str]) -> tuple[str, ...]:
    """Returns the shortest path over the view's links, from a neighbour to `to`, both included; empty if there is
    none.
    """
    graph = neighbours(view.ids(), [(link.a, link.b) for link in view.links])
    ways = breadth_first("", {**graph, "": [m for m in view.ids() if m in near]}, "")
    route: list[str] = []
    while to and to in ways:
        route.insert(0, to)
        to = ways[to][0]
    return tuple(route)
