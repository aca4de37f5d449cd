"""Better plans for a view that rules: asked for, drawn beside the machine, and carried by a later header if they pay.

Theory of operation. A decision waits for nobody, so beyond `SMALL_JOB` members it takes a plan that is drawn in
milliseconds (`views.plan_within`). Once such a view is settled, or links were measured anew, a better plan is asked for
(`DrawPlan`); whoever carries effects out draws it in another process and answers (`PlanDrawn`). The job goes on
meanwhile, so an answer may be stale: it counts only if it fits the members and links of the view that rules by then,
and whatever is asked for a later view replaces what is asked for an earlier one. Up to `SMALL_JOB` members the answer
is made here and now.
"""

from __future__ import annotations

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.effects import DrawPlan, PlanDrawn
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.topology import Net, Topology
from chaos_lightning.membership.views import Change, replanned
from chaos_lightning.planning.trees import misfit
from chaos_lightning.protocol.types import SMALL_JOB, LinkSpec, PlanSpec, View, ViewId

REPLAN_PAUSE_S = 2.0
"""Plans are made anew at most once in so long."""
_REST = 4.0
"""Because of measurements alone a plan is drawn again after so many times as long as it took to draw the last one."""


class Redrawing:
    """See the module. Arguments are the parts that it uses."""

    def __init__(self, desk: Desk, book: Book, graph: Graph, topology: Topology) -> None:
        self._desk = desk
        self._book = book
        self._graph = graph
        self._topology = topology
        self._out: DrawPlan | None = None
        """The request that is not answered yet."""
        self._count = 0
        self._answer: tuple[PlanSpec, str] | None = None
        self._asked_at = float("-inf")
        self._rest_s = REPLAN_PAUSE_S
        self._version = 0
        """The state of measurements that the last request was made with."""
        self._seen: ViewId | None = None
        self._planned: tuple[tuple[str, ...], tuple[LinkSpec, ...]] | None = None
        """Members and links that the last request was for."""
        self._hasty = False
        """A plan for the view that was seen last has yet to be asked for."""
        self._first = False
        """The last request was the first one for its view."""
        self._taken: PlanSpec | None = None
        """The last plan that was an answer."""

    def on_drawn(self, event: PlanDrawn) -> None:
        """An answer; if it is not to the last request it counts for nothing."""
        if self._out is None or event.token != self._out.token:
            return
        self._out = None
        self._rest_s = max(REPLAN_PAUSE_S, _REST * (self._desk.now - self._asked_at))
        if event.plan is not None:
            self._answer = (event.plan, event.reason)
        elif self._first:
            self._desk.note("notice", text=f"the plan stays: {event.reason}")

    def turn(self, latest: View) -> tuple[Change, Net] | None:
        """A view of the same members and links with a better plan, for the next header.

        Args:
            latest: The view that rules.
        """
        if self._answer is not None:
            (plan, reason), self._answer = self._answer, None
            if self.fits(plan, latest):
                return self._change(latest, plan, reason)
        if not self._due(latest):
            return None
        wish = self._wish(latest)
        self._first, self._hasty = self._hasty, False
        self._version, self._asked_at = self._topology.version, self._desk.now
        if len(latest.members) > SMALL_JOB:
            self._out, self._planned = wish, (latest.ids(), latest.links)
            self._desk.out.append(wish)
            return None
        found, reason = replanned(wish)
        return None if found is None else self._change(latest, found, reason)

    def fits(self, plan: PlanSpec, latest: View) -> bool:
        """Whether an answer can rule this view, which may be another one than it was drawn for."""
        if latest.plan in (plan, self._desk.settings.plan):
            return False
        return not misfit(plan, latest.ids(), [(a, b) for a, b in self._graph.of_view(latest)])

    def _due(self, latest: View) -> bool:
        if latest.id != self._seen:
            self._seen = latest.id
            large = len(latest.members) > SMALL_JOB
            self._hasty = large and self._planned != (latest.ids(), latest.links)
        if self._hasty:
            pause_s = REPLAN_PAUSE_S
        elif self._out is None and self._topology.version != self._version:
            pause_s = self._rest_s
        else:
            return False
        return latest.plan != self._desk.settings.plan and self._desk.now - self._asked_at >= pause_s

    def _wish(self, latest: View) -> DrawPlan:
        ids, pairs = latest.ids(), self._graph.of_view(latest)
        links = Net(pairs, self._topology.measured(ids, pairs)).known(ids)
        self._count += 1
        hasty = len(ids) > SMALL_JOB and latest.plan != self._taken
        return DrawPlan(self._count, self._desk.settings.plan, latest.plan, latest.members, links, hasty)

    def _change(self, latest: View, plan: PlanSpec, reason: str) -> tuple[Change, Net]:
        self._taken = plan
        self._desk.note("notice", text=f"the plan changes: {reason}")
        return Change(members=latest.members, joiners=(), reason=reason, plan=plan), Net(self._graph.of_view(latest))
