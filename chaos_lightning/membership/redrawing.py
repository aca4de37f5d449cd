"""Looks for better reduction plans for the ruling view, and lets a later header carry a view with one that is worth the
change.

Theory of operation. A decision waits for nobody, so beyond `SMALL_JOB` members it takes a plan that is drawn in
milliseconds (`views.plan_within`). Once such a view is settled, or links were measured anew, a better plan is asked for
(`DrawPlan`). It is drawn in another process (control/drawing.py), which answers (`PlanDrawn`) while the job goes on.

A view of other members or links makes the request stale: it is given up, and another one is made for that view. So an
answer is taken as it is, and costs a turn nothing; what was measured while it was drawn counts in the next request.
Where members come and go faster than the planner is through, the plans of milliseconds stay. Up to `SMALL_JOB` members
the answer is made here and now.
"""

from __future__ import annotations

from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.effects import DrawPlan, PlanDrawn
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.topology import Net, Topology
from chaos_lightning.membership.views import Change, replanned
from chaos_lightning.protocol.types import SMALL_JOB, LinkSpec, PlanSpec, View, ViewId

REPLAN_PAUSE_S = 2.0
"""Least seconds between two requests for a plan."""
_REST = 4.0
"""Least time between requests because of measurements alone, as a multiple of the time that the last plan took to
draw.
"""


class Redrawing:
    """Search for a better reduction plan. Arguments are scheduler components that it uses."""

    def __init__(self, desk: Desk, graph: Graph, topology: Topology) -> None:
        self._desk = desk
        self._graph = graph
        self._topology = topology
        self._out: DrawPlan | None = None
        """Request that is not answered yet."""
        self._count = 0
        self._answer: tuple[PlanSpec, str] | None = None
        """Plan that was drawn for the view that was seen last."""
        self._asked_at = float("-inf")
        self._rest_s = REPLAN_PAUSE_S
        self._version = 0
        """Version of the measurements that the last request was made with."""
        self._seen: ViewId | None = None
        self._planned: tuple[tuple[str, ...], tuple[LinkSpec, ...]] | None = None
        """Members and links that the last request was for."""
        self._hasty = False
        """Whether a plan for the view that was seen last has yet to be asked for."""
        self._first = False
        """Whether the last request was the first one for its view."""
        self._taken: PlanSpec | None = None
        """Last plan that was an answer."""

    def on_drawn(self, event: PlanDrawn) -> None:
        """Handles a plan from the planner; it counts only if it answers the last request."""
        if self._out is None or event.token != self._out.token:
            return
        self._out = None
        self._rest_s = max(REPLAN_PAUSE_S, _REST * (self._desk.now - self._asked_at))
        if event.plan is not None:
            self._answer = (event.plan, event.reason)
        elif self._first:
            self._desk.note("notice", text=f"the plan stays: {event.reason}")

    def turn(self, latest: View) -> tuple[Change, Net] | None:
        """Returns a change of the view, with the same members and links and a better reduction plan, for the next
        header; None if there is none.

        Args:
            latest: The view that rules.
        """
        self._look_at(latest)
        answer, self._answer = self._answer, None
        if answer is not None and latest.plan not in (answer[0], self._desk.settings.plan):
            return self._change(latest, *answer)
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

    def _look_at(self, latest: View) -> None:
        if latest.id == self._seen:
            return
        self._seen = latest.id
        if self._planned != (latest.ids(), latest.links):
            self._hasty = len(latest.members) > SMALL_JOB
            self.drop()

    def drop(self) -> None:
        """Gives up the pending request for a reduction plan, or its answer, as the view has changed."""
        self._out = self._answer = None

    def _due(self, latest: View) -> bool:
        pause_s = REPLAN_PAUSE_S if self._hasty else self._rest_s
        return (
            self._out is None
            and (self._hasty or self._topology.version != self._version)
            and latest.plan != self._desk.settings.plan
            and self._desk.now - self._asked_at >= pause_s
        )

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
