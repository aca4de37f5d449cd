"""Looks for better plans for the view that rules, and lets a later header carry one that pays.

Theory of operation. A decision waits for nobody, so beyond `SMALL_JOB` members it takes a plan that is drawn in
milliseconds (`views.plan_within`). Once such a view is settled, or links were measured anew, a better plan is asked for
(`DrawPlan`). It is drawn in another process (control/drawing.py), which answers (`PlanDrawn`). The job goes on
meanwhile, so the view that rules by then may be another one. Where members come and go every few seconds no planner
would ever be through if each view began anew; so the one at work is let finish, and its answer is mended for the
members and links of now (planning/mending.py). It counts only if it fits and pays. Once too many have come or gone for
that, the present view is asked for instead. Up to `SMALL_JOB` members the answer is made here and now.
"""

from __future__ import annotations

from dataclasses import replace

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.effects import DrawPlan, PlanDrawn
from chaos_lightning.membership.graph import Graph
from chaos_lightning.membership.topology import Net, Topology
from chaos_lightning.membership.views import Change, replanned
from chaos_lightning.planning.mending import mended
from chaos_lightning.planning.trees import misfit
from chaos_lightning.protocol.types import SMALL_JOB, LinkSpec, PlanSpec, View, ViewId

REPLAN_PAUSE_S = 2.0
"""Least seconds between two requests for a plan."""
_REST = 4.0
"""Least time between requests because of measurements alone, in times of how long the last plan took to draw."""
_MOST_OTHERS = 0.25
"""Fraction of members that may come or go before a request is made anew."""


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
        """Version of the measurements that the last request was made with."""
        self._seen: ViewId | None = None
        self._planned: tuple[tuple[str, ...], tuple[LinkSpec, ...]] | None = None
        """Members and links that the last request was for."""
        self._hasty = False
        """Whether a plan for the view that was seen last has yet to be asked for."""
        self._first = False
        """Whether the last request was the first one for its view."""
        self._taken: PlanSpec | None = None
        """The last plan that was an answer."""

    def on_drawn(self, event: PlanDrawn) -> None:
        """Takes an answer, which counts only if it is to the last request."""
        if self._out is None or event.token != self._out.token:
            return
        self._out = None
        self._rest_s = max(REPLAN_PAUSE_S, _REST * (self._desk.now - self._asked_at))
        if event.plan is not None:
            self._answer = (event.plan, event.reason)
        elif self._first:
            self._desk.note("notice", text=f"the plan stays: {event.reason}")

    def turn(self, latest: View) -> tuple[Change, Net] | None:
        """Returns a view of the same members and links with a better plan, for the next header; None if there is none.

        Args:
            latest: The view that rules.
        """
        if self._answer is not None:
            (plan, reason), self._answer = self._answer, None
            better, reason = self.fitted(plan, reason, latest)
            if better is not None:
                return self._change(latest, better, reason)
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

    def fitted(self, plan: PlanSpec, reason: str, latest: View) -> tuple[PlanSpec | None, str]:
        """Returns an answer as it can rule this view, which may be another one than it was drawn for; else None."""
        ids, links = latest.ids(), [(a, b) for a, b in self._graph.of_view(latest)]
        if latest.plan in (plan, self._desk.settings.plan):
            return None, reason
        fits = not misfit(plan, ids, links)
        if fits and self._topology.version == self._version:
            return plan, reason
        wish = self._wish(latest)
        left, why = plan, reason  # its links were measured anew while it was drawn
        if not fits:
            found, why = mended(plan, ids, wish.links), f"mended for those who are here: {reason}"
            if found is None or len(ids) <= SMALL_JOB:
                return None, reason
            left = found
        left = replace(left, chunk_nbytes=0)  # as planners leave it
        return replanned(wish, lambda network, nbytes: (left, why))

    def _due(self, latest: View) -> bool:
        if latest.id != self._seen:
            self._seen = latest.id
            large = len(latest.members) > SMALL_JOB
            self._hasty = large and self._planned != (latest.ids(), latest.links)
            if self._out is not None and self._is_stale(self._out, latest):
                self._out = None  # the next request takes the planner's place
        if self._out is not None:
            return False
        if self._hasty:
            pause_s = REPLAN_PAUSE_S
        elif self._topology.version != self._version:
            pause_s = self._rest_s
        else:
            return False
        return latest.plan != self._desk.settings.plan and self._desk.now - self._asked_at >= pause_s

    @staticmethod
    def _is_stale(wish: DrawPlan, latest: View) -> bool:
        """Whether so many have come or gone since this request that its answer cannot be mended."""
        others = set(latest.ids()).symmetric_difference(m.id for m in wish.members)
        return len(others) > _MOST_OTHERS * len(latest.members)

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
