"""Planted bugs about links: what membership/rewiring.py and its kin must not do (see bugs.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from chaos_lightning.lab.simulate.host import Store
from chaos_lightning.lab.simulate.node import Node
from chaos_lightning.lab.simulate.planting import Bug, hooks_of
from chaos_lightning.lab.simulate.routing import Letter, Routing
from chaos_lightning.lab.simulate.wiring import forgetting_plan, lost_link_plan, removal_plan, ring_plan, split_plan
from chaos_lightning.membership.effects import Chain
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.recovery import Ruling
from chaos_lightning.membership.roster import Peer
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.topology import Pair, connected, every_pair
from chaos_lightning.protocol.types import Decide, PlanSpec, Report, View, ViewId


class ForgetfulScheduler(SchedulerMachine):
    """Takes every link that is wanted for one that stands."""

    def _usable(self, one: Peer, other: Peer, *, patient: bool = True) -> bool:
        return self.topology.wants(one, other)


class UndividedScheduler(SchedulerMachine):
    """Puts everybody into one view, though no link leads from some to others."""

    def _graph(self, members: Iterable[str]) -> frozenset[Pair]:
        ids = list(members)
        found = super()._graph(ids)
        return found if connected(ids, found) or not self._reserving else every_pair(ids)

    def _side(self, reports: Mapping[str, Report]) -> Mapping[str, Report] | None:
        return reports


class HarshScheduler(SchedulerMachine):
    """Puts out who has no link to the oldest member, though others lead there."""

    def _side(self, reports: Mapping[str, Report]) -> Mapping[str, Report] | None:
        side = super()._side(reports)
        if not side:
            return side
        first = next(iter(side))
        near = [m for m in side if m == first or self._usable(self.peers[first], self.peers[m])]
        self._cut = {**self._cut, **{m: f"it has no link to {first}" for m in side if m not in near}}
        return {m: side[m] for m in near}


class TwofoldScheduler(SchedulerMachine):
    """Lets the side that is cut off go on, too, in a view of its own."""

    def _sort_out(self, old: Iterable[Peer], view: View | None, ruling: Ruling) -> None:
        peers = list(old)
        cut = [p for p in peers if p.id in self._cut]
        if view is not None and ruling.base is not None:
            own = ViewId(view.id.term, view.id.number + 1)
            members = tuple(p.member for p in cut)
            apart = replace(view, id=own, members=members, joiners=(), plan=PlanSpec(), links=())
            for peer in cut:
                self._send(peer, Decide(apart, ruling.base, reason="the other side"))
                self._drop(peer)
        super()._sort_out([p for p in peers if p not in cut], view, ruling)


class HurriedMachine(MemberMachine):
    """Closes links of the view before at once when it enters the next, whatever is still to come over them."""

    def _connect(self) -> None:
        self._former = None
        super()._connect()


class OwnWays(Routing):
    """Sends letters on by the view that it stands in itself, whatever view they are of."""

    def forward(self, letter: Letter, came_from: str) -> None:
        view = self._node.machine.view
        if letter.to == self._node.machine.member_id or view is None:
            super().forward(letter, came_from)
        else:
            self._hand_on(self._ways[view.id][1].get(letter.to, ""), letter, came_from)

    def _hand_on(self, hop: str, letter: Letter, came_from: str) -> None:
        if hop != came_from:  # or it would run to and fro
            super()._hand_on(hop, letter, came_from)


class OwnWaysNode(Node):
    routing_class = OwnWays


class WishlessStore(Store):
    """Keeps views only: what was wished about links dies with the scheduler."""

    def open(self, above: int = 0, chain: str = "") -> Chain:
        self.wishes.clear()
        return super().open(above, chain)


class GenerousScheduler(SchedulerMachine):
    """Grants wishes about links before they are stored."""

    def _persist(self, kind: str, number: ViewId, then: Callable[[], None], **fields: Any) -> None:
        if kind == "link":
            self._asked[0].answer(True, "it is as good as done")
        super()._persist(kind, number, then, **fields)


LINK_BUGS: dict[str, Bug] = {
    "links-forgotten": Bug(
        rule="links",
        what="the next view uses a link again that is cut",
        hooks=hooks_of(scheduler=ForgetfulScheduler),
        plan=lost_link_plan,
    ),
    "links-undivided": Bug(
        rule="links",
        what="a view spans parts between which there is no link",
        hooks=hooks_of(scheduler=UndividedScheduler),
        plan=split_plan,
    ),
    "links-harsh": Bug(
        rule="links",
        what="a member is put out for a link though others lead to it",
        hooks=hooks_of(scheduler=HarshScheduler),
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
}
"""By name."""
