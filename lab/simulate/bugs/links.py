"""Planted bugs about links and progress: schedulers whose views lead to no commit, need missing links or keep others
out (31).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from chaos_lightning.control.job_chain import ChainEntry
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
    """Planted bug: every wanted link counts as one that stands."""

    def _stands(self, one: Peer, other: Peer, *, patient: bool) -> bool:
        return True


class UndividedGraph(Graph):
    """Planted bug: a view spans members that no links connect."""

    def pairs(self, members: Iterable[str]) -> frozenset[Pair]:
        ids = list(members)
        found = super().pairs(ids)
        return found if connected(ids, found) or not self._desk.reserving else every_pair(ids)


class UndividedRewiring(Rewiring):
    """Planted bug: a recovery keeps all members in one view though no links connect some of them."""

    def side(self, reports: Mapping[str, Report], rule: Rule) -> Mapping[str, Report] | None:
        return reports


class HarshRewiring(Rewiring):
    """Planted bug: members without a direct link to the oldest one are put out, though other links lead to it."""

    def side(self, reports: Mapping[str, Report], rule: Rule) -> Mapping[str, Report] | None:
        side = super().side(reports, rule)
        if not side:
            return side
        first = next(iter(side))
        near = [m for m in side if m == first or self._graph._usable(self._roster.peers[first], self._roster.peers[m])]
        self.cut = {**self.cut, **{m: f"it has no link to {first}" for m in side if m not in near}}
        return {m: side[m] for m in near}


class TwofoldScheduler(SchedulerMachine):
    """Planted bug: the members that a lost link cuts off go on, too, in a second view of their own."""

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
    """Planted bug: a member that enters a view closes the previous view's links at once, while messages are still to
    come over them.
    """

    def _connect(self) -> None:
        self.neighbours.former = None
        super()._connect()


class OwnWays(Router):
    """Planted bug: a router forwards messages by its own member's view rather than by the view that the message belongs
    to.
    """

    def hop(self, to: str, view: ViewId = NO_VIEW) -> str | None:
        return super().hop(to, NO_VIEW)


class OwnWaysNode(Node):
    router_class = OwnWays


def _without_wishes(entry: ChainEntry) -> ChainEntry:
    return replace(entry, summed=replace(entry.summed, wishes=())) if entry.summed is not None else entry


class WishlessStore(Store):
    """Planted bug: the store loses granted link requests when the scheduler dies."""

    def open(self, above: int = 0, chain: str = "") -> Chain:
        self.entries = [e for e in self.entries if e.wish is None]
        self.kept = [_without_wishes(e) for e in self.kept if e.wish is None]
        return super().open(above, chain)


class GenerousScheduler(SchedulerMachine):
    """Planted bug: the scheduler grants link requests before the store has them."""

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
    """Planted bug: lost links are judged by the announced view, although a recovery would leave out some of its
    newcomers.
    """

    def _remaining(self) -> list[str]:
        return [p.id for p in self._roster.living()]


class RestlessRecovery(Recovery):
    """Planted bug: a recovery begins at every cause, without a pause after recoveries that led to no committed slot."""

    def paced(self, why: str) -> bool:
        return False


class HospitableGraph(Graph):
    """Planted bug: a newcomer without any link keeps its place under max_nodes."""

    def strand(self, newcomers: list[Peer], members: list[Peer]) -> None:
        pass


class StubbornScheduler(SchedulerMachine):
    """Planted bug: members that are cut off stay members and wait for min_nodes, although as newcomers they could come
    in.
    """

    def _bridged(self, ruling: Ruling) -> tuple[tuple[str, str], ...]:
        return ()


class ClingingRewiring(Rewiring):
    """Planted bug: members that are cut off keep their places, so that newcomers cannot replace them."""

    def side(self, reports: Mapping[str, Report], rule: Rule) -> Mapping[str, Report] | None:
        side = super().side(reports, rule)
        for member in reports:
            self._roster.peers[member].stranded = False
        return side


class ChoosyGraph(Graph):
    """Planted bug: no newcomer comes in over a link that carries no data, even if too few members are left."""

    def _few(self) -> bool:
        return False


class StaleRedrawing(Redrawing):
    """Planted bug: the scheduler uses a reduction plan that was made for a previous view."""

    def drop(self) -> None:
        pass


class LoosePartners(Partners):
    """Planted bug: no links are added for the case that a node whose links connect others is lost."""

    def secure(self) -> None:
        pass


class LooseScheduler(SchedulerMachine):
    """Planted bug: a scheduler with `LoosePartners`, which adds no links for the loss of a node."""

    def __init__(self, settings: Settings, chain: Chain) -> None:
        super().__init__(settings, chain)
        self.topology.partners.__class__ = LoosePartners


class BlindTopology(Topology):
    """Planted bug: the scheduler does not notice that a link goes down, and decides by outdated records."""

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
