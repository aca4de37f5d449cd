"""Searches for better pipelines while a job goes on, and lets a later header carry a view with those that are worth the
change.

Theory of operation. A decision takes pipelines that are found in milliseconds. Once a view of other members is settled,
or members compute or links carry more or less than when a plan was asked for last, the best plan is asked for
(`SearchPipelines`). Another process finds it (control/drawing.py), which takes seconds, and answers (`PipelinesFound`).
If the members are still the same and the gain outweighs the transition, the next view has these pipelines: it has the
same members, parts move before the first slot that it rules (P8), and nobody is asked for a promise. A process that
fails or dies is an answer, too: the pipelines stay.

Requests for the same members follow each other after pauses that double, so that a member whose speed wavers moves
layers to and fro ever less often.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.effects import PipelinesFound, SearchPipelines
from chaos_lightning.membership.pipelining import Pipelining
from chaos_lightning.membership.redrawing import REPLAN_PAUSE_S
from chaos_lightning.planning.pipelines.job import LinkRate
from chaos_lightning.protocol.types import View

LONGEST_PAUSE_S = 512.0
"""Most seconds between two requests for the same members whose speeds have changed."""
_QUIET = 8
"""Number of pauses without a request after which the next pause is the shortest again."""


class PipelineSearch:
    """Search for better pipelines. Arguments are scheduler components that it uses."""

    def __init__(self, desk: Desk, pipelining: Pipelining) -> None:
        self._desk = desk
        self._pipelining = pipelining
        self._count = 0
        self._out = 0
        """Token of the request that is not answered yet; 0: there is none."""
        self._asked_for: tuple[str, ...] = ()
        """Members that the last request was for."""
        self._speeds: Mapping[str, float] = {}
        """Speeds of these members then, ..."""
        self._link: LinkRate | None = None
        """... and the link between their machines."""
        self._pause_s = REPLAN_PAUSE_S
        """Seconds from the last request to the next one for these members."""
        self._asked_at = float("-inf")
        self._found = ""
        """Plan that was found for these members."""

    def on_found(self, event: PipelinesFound) -> None:
        """Handles a plan from the search; it counts only if it answers the last request."""
        if event.token != self._out:
            return
        self._out, self._found = 0, event.plan or ""
        if event.plan is None:
            self._desk.note("notice", text=f"the pipelines stay: {event.reason}")

    def turn(self, latest: View) -> tuple[str, str] | None:
        """Returns better pipelines for this view's members, and the reason; None if there are none.

        Args:
            latest: The view that rules, and that all its members stand in.
        """
        if not latest.pipelines:
            return None
        since_s = self._desk.now - self._asked_at
        if latest.ids() != self._asked_for:
            self._out, self._found = 0, ""
            if since_s >= REPLAN_PAUSE_S:
                self._pause_s = REPLAN_PAUSE_S
                self._ask(latest)
            return None
        plan, self._found = self._found, ""
        if plan:
            return self._pipelining.better(latest, plan)
        if not self._out and since_s >= self._pause_s and self._changed(latest):
            longer_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._pause_s = longer_s if since_s < _QUIET * self._pause_s else REPLAN_PAUSE_S
            self._ask(latest)
        return None

    def _changed(self, latest: View) -> bool:
        pipelining = self._pipelining
        return pipelining.speeds(latest) != self._speeds or pipelining.link != self._link

    def _ask(self, latest: View) -> None:
        self._asked_for, self._asked_at = latest.ids(), self._desk.now
        self._speeds, self._link = self._pipelining.speeds(latest), self._pipelining.link
        wish = self._pipelining.wish(latest)
        if wish is not None:
            self._count += 1
            self._out = self._count
            self._desk.out.append(SearchPipelines(self._out, wish))


def searched(effect: SearchPipelines) -> PipelinesFound:
    """Returns the answer with the best plan that a request asks for. The search takes seconds, so it runs in a separate
    process.
    """
    from chaos_lightning.planning.pipelines.pipeliner import PlanWish, search_plan

    plan = search_plan(PlanWish.from_dict(json.loads(effect.wish)))
    return PipelinesFound(effect.token, plan.to_json() if plan else None, "" if plan else "no other plan fits")
