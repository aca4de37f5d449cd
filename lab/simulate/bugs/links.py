"""Planted bugs about links and progress: schedulers whose views bring nothing, tear apart or keep others out (31)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from chaos_lightning.control.chain import ChainEntry
from chaos_lightning.membership.effects import Chain, Persist, SchedulerEffect, SchedulerEvent
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.partners import Partners
from chaos_lightning.membership.peers import Peer
from chaos_lightning.membership.recovering import Recovery
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.redrawing import Redrawing
from chaos_lightning.membership.rewiring import Rewiring, Rule
from chaos_lightning.membership.routing import Router
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.topology import Fact, Pair, Topology, connected, every_pair
from chaos_lightning.protocol.types import NO_VIEW, Decide, PlanSpec, Report, Settings, View, ViewId
from lab.simulate.bugs.frame import Bug, hooks_of, with_parts
from lab.simulate.node import Node
from lab.simulate.plans.large import thin_plan
from lab.simulate.plans.links import (
    bridge_plan,
    bridging_plan,
    crowd_plan,
    flapping_link_plan,
    forgetting_plan,
    lost_link_plan,
    needed_plan,
    removal_plan,
    ring_plan,
    split_plan,
    stranded_plan,
)
from lab.simulate.store import Store


class ForgetfulGraph(Graph):
    """Graph that treats every wanted link as one that stands."""

    def _stands(self, one: Peer, other: Peer, *, patient: bool) -> bool:
        return True


class UndividedGraph(Graph):
    """Graph that puts all members into one view, though no link leads from some to others."""

    def pairs(self, members: Iterable[str]) -> frozenset[Pair]:
        ids = list(members)
        found = super().pairs(ids)
        return found if connected(ids, found) or not self._desk.reserving else every_pair(ids)


class UndividedRewiring(Rewiring):
    """Rewiring that keeps all members in, though no link leads from some to others."""

    def side(self, reports: Mapping[str, Report], rule: Rule) -> Mapping[str, Report] | None:
        return reports


class HarshRewiring(Rewiring):
    """Rewiring that puts out members without a link to the oldest one, though other links lead there."""

    def side(self, reports: Mapping[str, Report], rule: Rule) -> Mapping[str, Report] | None:
        side = super().side(reports, rule)
        if not side:
            return side
        first = next(iter(side))
        near = [m for m in side if m == first or self._graph._usable(self._roster.peers[first], self._roster.peers[m])]
        self.cut = {**self.cut, **{m: f"it has no link to {first}" for m in side if m not in near}}
        return {m: side[m] for m in near}


class TwofoldScheduler(SchedulerMachine):
    """Scheduler that lets the side that is cut off go on, too, in a view of its own."""

    def _sort_out(self, old: Iterable[Peer], view: View | None, ruling: Ruling) -> None:
        peers = list(old)
        cut = [p for p in peers if p.id in self.rewiring.cut]
        if view is not None and ruling.base is not None:
            own = ViewId(view.id.term, view.id.number + 1)
            members = tuple(p.member for p in cut)
            apart = replace(view, id=own, members=members, joiners=(), plan=PlanSpec(), links=())
            for peer in cut:
                self.roster.send(peer, Decide(apart, ruling.base, reason="the other side"))
                self.roster.drop(peer)
        super()._sort_out([p for p in peers if p not in cut], view, ruling)


class HurriedMachine(MemberMachine):
    """Member that closes links of the view before at once when it enters the next, whatever is still to come over
    them.
    """

    def _connect(self) -> None:
        self.neighbours.former = None
        super()._connect()


class OwnWays(Router):
    """Router that sends routed messages on by the view that the member stands in itself, whatever view they are of."""

    def hop(self, to: str, view: ViewId = NO_VIEW) -> str | None:
        return super().hop(to, NO_VIEW)


class OwnWaysNode(Node):
    router_class = OwnWays


def _without_wishes(entry: ChainEntry) -> ChainEntry:
    return replace(entry, summed=replace(entry.summed, wishes=())) if entry.summed is not None else entry


class WishlessStore(Store):
    """Store that keeps views only: wishes about links die with the scheduler."""

    def open(self, above: int = 0, chain: str = "") -> Chain:
        self.entries = [e for e in self.entries if e.wish is None]
        self.kept = [_without_wishes(e) for e in self.kept if e.wish is None]
        return super().open(above, chain)


class GenerousScheduler(SchedulerMachine):
    """Scheduler that grants wishes about links before they are stored."""

    def on(self, now: float, *events: SchedulerEvent) -> list[SchedulerEffect]:
        effects = super().on(now, *events)
        for place, effect in enumerate(effects):
            if isinstance(effect, Persist) and effect.kind == "link":
                before, self.desk.out = self.desk.out, []
                self.links._asked[0].answer(True, "it is as good as done")
                effects[place:place], self.desk.out = self.desk.out, before
                break
        return effects


class AnnouncedRewiring(Rewiring):
    """Rewiring that judges which links are missed by the announced view, in which a recovery would not put all
    members.
    """

    def _remaining(self) -> list[str]:
        return [p.id for p in self._roster.living()]


class RestlessRecovery(Recovery):
    """Recovery that begins whenever there is a cause, whatever became of those before."""

    def paced(self, why: str) -> bool:
        return False


class HospitableGraph(Graph):
    """Graph that keeps a place for the newcomer that came first, though no link leads to it."""

    def strand(self, newcomers: list[Peer], members: list[Peer]) -> None:
        pass


class StubbornScheduler(SchedulerMachine):
    """Scheduler that has members that are cut off wait for min_nodes, though they would count as newcomers."""

    def _bridged(self, ruling: Ruling) -> tuple[tuple[str, str], ...]:
        return ()


class ClingingRewiring(Rewiring):
    """Rewiring that keeps the places of members that are cut off, though too few are left without them."""

    def side(self, reports: Mapping[str, Report], rule: Rule) -> Mapping[str, Report] | None:
        side = super().side(reports, rule)
        for member in reports:
            self._roster.peers[member].stranded = False
        return side


class ChoosyGraph(Graph):
    """Graph that lets no newcomer in by a link that carries nothing, though too few members are left."""

    def _few(self) -> bool:
        return False


class StaleRedrawing(Redrawing):
    """Redrawing that uses a plan that was drawn for a view that no longer rules."""

    def drop(self) -> None:
        pass


class LoosePartners(Partners):
    """Partners without the links that make up for a node's loss."""

    def secure(self) -> None:
        pass


class LooseScheduler(SchedulerMachine):
    """Scheduler that gives no member the links that make up for a node's loss."""

    def __init__(self, settings: Settings, chain: Chain) -> None:
        super().__init__(settings, chain)
        self.topology.partners.__class__ = LoosePartners


class BlindTopology(Topology):
    """Topology that does not notice that a link is down, so that judgements rest on links that were down before."""

    def _look_at(self, one: str, other: str, fact: Fact) -> None:
        self.news = True


LINK_BUGS: dict[str, Bug] = {
    "links-forgotten": Bug(
        rule="links",
        what="the next view uses a link again that is cut",
        hooks=hooks_of(scheduler=with_parts(graph=ForgetfulGraph)),
        plan=lost_link_plan,
    ),
    "links-undivided": Bug(
        rule="links",
        what="a view spans parts between which there is no link",
        hooks=hooks_of(scheduler=with_parts(graph=UndividedGraph, rewiring=UndividedRewiring)),
        plan=split_plan,
    ),
    "links-harsh": Bug(
        rule="links",
        what="a member is put out for a link though others lead to it",
        hooks=hooks_of(scheduler=with_parts(rewiring=HarshRewiring)),
        plan=lost_link_plan,
    ),
    "links-twofold": Bug(
        rule="7",
        what="both sides of a split graph go on",
        hooks=hooks_of(scheduler=TwofoldScheduler),
        plan=split_plan,
    ),
    "links-hurried": Bug(
        rule="links",
        what="a removed link is closed before all that came over it is there",
        hooks=hooks_of(machine=HurriedMachine),
        plan=removal_plan,
    ),
    "links-parted": Bug(
        rule="links",
        what="the loss of one node parts the others",
        hooks=hooks_of(scheduler=LooseScheduler),
        plan=thin_plan,
    ),
    "links-missed": Bug(
        rule="links",
        what="a link that fails is not among those that are looked at",
        hooks=hooks_of(scheduler=with_parts(topology=BlindTopology)),
        plan=lost_link_plan,
    ),
    "links-own-ways": Bug(
        rule="links",
        what="messages are relayed by another view than they are of",
        hooks=hooks_of(node=OwnWaysNode),
        plan=ring_plan,
    ),
    "14a-wishless": Bug(
        rule="14a",
        what="removals of links die with the scheduler",
        hooks=hooks_of(store=WishlessStore),
        plan=forgetting_plan,
    ),
    "14a-generous": Bug(
        rule="14a",
        what="removals of links are granted before they are stored",
        hooks=hooks_of(scheduler=GenerousScheduler),
        plan=forgetting_plan,
    ),
    "31-announced": Bug(
        rule="31",
        what="links are missed by the announced view, and brought back by the one after",
        hooks=hooks_of(scheduler=with_parts(rewiring=AnnouncedRewiring)),
        plan=bridging_plan,
    ),
    "31-restless": Bug(
        rule="31",
        what="recoveries that bring nothing follow each other at once",
        hooks=hooks_of(scheduler=with_parts(recovery=RestlessRecovery)),
        plan=flapping_link_plan,
    ),
    "31-hospitable": Bug(
        rule="31",
        what="newcomers that can link to nobody keep their places from others",
        hooks=hooks_of(scheduler=with_parts(graph=HospitableGraph)),
        plan=stranded_plan,
    ),
    "31-stubborn": Bug(
        rule="31",
        what="members that are cut off wait for min_nodes, though newcomers link them",
        hooks=hooks_of(scheduler=StubbornScheduler),
        plan=bridge_plan,
    ),
    "31-clinging": Bug(
        rule="31",
        what="members that are cut off keep their places from the newcomer that links them",
        hooks=hooks_of(scheduler=with_parts(rewiring=ClingingRewiring)),
        plan=needed_plan,
    ),
    "31-choosy": Bug(
        rule="31",
        what="a newcomer waits outside because its link carries nothing, though it is needed",
        hooks=hooks_of(scheduler=with_parts(graph=ChoosyGraph)),
        plan=needed_plan,
    ),
    "links-stale": Bug(
        rule="links",
        what="a plan that was drawn for another view is taken",
        hooks=hooks_of(scheduler=with_parts(redrawing=StaleRedrawing)),
        plan=crowd_plan,
    ),
}
"""Planted bugs about links and progress, by name."""
