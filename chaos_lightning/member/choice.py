"""Chooses the ways by which a member asks its donors (membership/donors.py) for bytes, and its transfer policy.

Theory of operation. Where every pair of members has a link, all are neighbours. In a sparse graph (View.links) this
member asks those that it has a link to, as Chaos, section II, does: all hold the same state, so a way over several hops
brings nothing but traffic. Only when none of them is a source (a founder's neighbours may all be newcomers) a route is
taken: the fewest hops over the view's links, each relayed by a member's state server (replication/forward.py).

The configuration names the policy. What it wants to know beside estimates of the links comes from
where it is known: sizes of layers from the training state, the overlay from the view, folder and access from the
configuration. `multi_source` asks members that this one has no link to, through those that it has one to; what lies
between others is not measured here and counts as a usual link, so routes are those of fewest hops.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos_lightning.planning.graph import breadth_first, neighbours
from chaos_lightning.planning.shards import Links
from chaos_lightning.protocol.types import Member, View
from chaos_lightning.replication.checkpoint import CheckpointWriter
from chaos_lightning.replication.planned import PolicyOptions
from chaos_lightning.replication.policies import make_policy
from chaos_lightning.replication.policy import TransferPolicy
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.replication.table import PIECE_NBYTES
from chaos_lightning.settings import EngineConfig

USUAL_LINK = (0.001, 8 / 1e9)
"""(latency in s, seconds per byte) of links where none is known."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Situation of one pull.

    Attributes:
        me: This member.
        sources: Members that hold the state.
        view: Its links join them.
        near: Members that this one has a link to.
        estimates: {member: (latency in s, rate in bits per second)} of this member's links.
        layer_nbytes: Sizes of the state's tensors.
    """

    me: str
    sources: Sequence[Member]
    view: View
    near: Collection[str]
    estimates: Mapping[str, tuple[float, float]]
    layer_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferChoice:
    """Transfer policy and its settings, as the user chose them.

    Attributes:
        policy: One of replication.POLICIES.
        ingress_bps: This member's own access link, bits per second; 0: no limit of its own.
        folder: Folder of checkpoints that all members see; "" for none.
    """

    policy: str = "adaptive"
    ingress_bps: float = 0.0
    folder: str = ""

    @classmethod
    def of(cls, config: EngineConfig) -> TransferChoice:
        return cls(config.transfer, config.ingress_bps, config.transfer_folder)

    def writer(self) -> CheckpointWriter | None:
        """Returns the writer of checkpoints for other members; None without a folder."""
        return CheckpointWriter(Path(self.folder)) if self.folder else None

    def make(self, now: Situation) -> tuple[TransferPolicy, str]:
        """Returns the policy of one pull, and why it is another one than was chosen, or "".

        Raises:
            ConfigurationError: Estimates that are no rates.
        """
        links: Links = {}
        if self.policy == "multi_source":
            links = overlay(now)
            if not links:
                words = (
                    f"multi_source is not possible: {now.me} has no link to a member with the state; adaptive instead"
                )
                return make_policy("adaptive", now.estimates, PolicyOptions(ingress_bps=self.ingress_bps)), words
        options = PolicyOptions(
            ingress_bps=self.ingress_bps,
            layer_nbytes=now.layer_nbytes,
            links=links,
            newcomer=now.me,
            folder=self.folder,
        )
        return make_policy(self.policy, now.estimates, options), ""


def overlay(now: Situation) -> Links:
    """Returns links between this member and those that have the state, as far as they lead; without the others'
    relaying.
    """
    holders = {m.id for m in now.sources}
    own = {m: (e[0], 8 / e[1]) for m, e in now.estimates.items() if e[1]}
    known = [own[m] for m in sorted(holders & set(own))]
    usual = (statistics.median(e[0] for e in known), statistics.median(e[1] for e in known)) if known else USUAL_LINK
    beside = holders & set(now.near) if now.view.links else holders
    links = {(now.me, m): own.get(m, usual) for m in sorted(beside)}
    links |= {(link.a, link.b): usual for link in now.view.links if {link.a, link.b} <= holders}
    if not beside:
        return {}
    from chaos_lightning.planning.baselines import shortest_routes  # multi_source alone needs it

    reached = {now.me, *shortest_routes(links, now.me, PIECE_NBYTES)}
    return {ends: cost for ends, cost in links.items() if set(ends) <= reached}


def endpoint(source: Member, view: View, near: Collection[str]) -> Endpoint:
    """Returns the way to one source.

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
    """Returns the ways to those sources that are to be asked: neighbours, or all if none of them is a neighbour."""
    beside = [s for s in sources if s.id in near] if view.links else []
    return [endpoint(s, view, near) for s in beside or sources]


def _route(to: str, view: View, near: Collection[str]) -> tuple[str, ...]:
    """Returns the hops from a neighbour to `to`, both included; empty if the links do not lead there."""
    graph = neighbours(view.ids(), [(link.a, link.b) for link in view.links])
    ways = breadth_first("", {**graph, "": [m for m in view.ids() if m in near]}, "")
    route: list[str] = []
    while to and to in ways:
        route.insert(0, to)
        to = ways[to][0]
    return tuple(route)
