"""Makes pipelines of views with the planner: translates members into its devices, and layers into parts of the training
state.

Theory of operation. Each member says what its model and its device are like. Of the model the oldest member's word
counts, of a device its own member's, and of links between machines what members measure, unless the profile names a
rate. Workers of one node die together, and members of one machine share its links. Part numbers of layers are the
layers' own numbers, so what members hold needs no more than that the other parts are left out. Where members are as
before and no link has gone, the pipelines stay as they are: better ones are searched for while the job goes on
(searching.py).

How often members are lost is learnt from the chain of views. A scheduler that is started anew begins to learn again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from chaos_lightning.errors import PlanError
from chaos_lightning.membership.parts import numbers
from chaos_lightning.membership.pipelining import PipelineChoice, ViewPipeliner
from chaos_lightning.membership.topology import Pair
from chaos_lightning.planning.pipelines.history import LossHistory
from chaos_lightning.planning.pipelines.job import Device, LinkRate, Overheads
from chaos_lightning.planning.pipelines.linked import missing_link
from chaos_lightning.planning.pipelines.pipeliner import PipelineAnswer, Pipeliner
from chaos_lightning.planning.pipelines.plan import PipelinePlan
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.protocol.types import Member, Span, View


class PlannedPipeliner(ViewPipeliner):
    """Maker of the views' pipelines that uses the planner.

    Args:
        requests: Requests of members for pipelines, by id; they change as members come and go.
    """

    def __init__(self, requests: Mapping[str, PipelineRequest]) -> None:
        self._requests = requests
        self._history = LossHistory()
        self._last: tuple[PipelineRequest, LinkRate | None, Pipeliner] | None = None
        self._since: float | None = None
        """Time (s) since which the members have been those of the last view."""

    def reroute(
        self,
        before: str,
        members: Sequence[Member],
        *,
        leaving: Sequence[Member] = (),
        held: Mapping[str, tuple[Span, ...]] | None = None,
        links: Collection[Pair] = (),
    ) -> PipelineChoice:
        """Returns the pipelines of a view; see `ViewPipeliner.reroute`."""
        pipeliner = self._pipeliner((*members, *leaving))
        if pipeliner is None:
            return PipelineChoice(text="", reason="no member has told what the model is like")
        devices, pairs = self._devices(pipeliner, members), _few(links, members)
        plan = pipeliner.read(before) if before else None
        there = {m.id for m in (*members, *leaving)}
        if plan is None or (held is None and not there.issuperset(plan.devices)):
            # A member is lost before the first step, when owners still make their parts: all is as at a founding.
            return _choice(pipeliner.first(devices, pairs), len(members))
        same = set(plan.devices) == {m.id for m in members}
        if same and (pairs is None or not missing_link(plan, pairs, pipeliner.shared)):
            return PipelineChoice(text=before, reason="the members are as before")
        layers = range(plan.layer_count)
        holds = {m: [x for x in numbers(spans) if x in layers] for m, spans in held.items()} if held else None
        answer = pipeliner.after(before, devices, self._devices(pipeliner, leaving), holds, pairs)
        return _choice(answer, len(members))

    def wish(self, members: Sequence[Member]) -> str | None:
        """Returns the request for the best plan of these members, as JSON; see `ViewPipeliner.wish`."""
        pipeliner = self._pipeliner(members)
        wish = pipeliner.wish(self._devices(pipeliner, members)) if pipeliner is not None else None
        return json.dumps(wish.to_dict()) if wish is not None else None

    def better(self, before: str, members: Sequence[Member], plan: str, links: Collection[Pair]) -> PipelineChoice:
        """Returns pipelines by the plan that was found, if it is worth the change; see `ViewPipeliner.better`."""
        pipeliner = self._pipeliner(members)
        assert pipeliner is not None, "the plan was searched for these members"
        found, devices = PipelinePlan.from_json(plan), self._devices(pipeliner, members)
        return _choice(pipeliner.better(before, devices, found, _few(links, members)), len(members))

    def measured(self, view: View, step_s: float, between_s: Mapping[str, float]) -> Overheads | None:
        """Returns measured costs of steps beyond the layers' own times; see `ViewPipeliner.measured`."""
        pipeliner = self._pipeliner(view.members)
        if pipeliner is None:
            return None
        try:
            return pipeliner.measured(view.pipelines, self._devices(pipeliner, view.members), step_s, between_s)
        except PlanError:  # the oldest member that has told is of another model: nothing is known of these steps
            return None

    def followed(self, before: View | None, after: View, now: float) -> None:
        """Records, in the history of failures, how long the previous view lasted and who came and went; see
        `ViewPipeliner.followed`.
        """
        if before is not None and self._since is not None:
            self._history.watched(len(before.members), now - self._since)
        self._since = now
        if before is None:
            return
        kept = frozenset(m.id for m in (*after.members, *after.leaving))
        if units := {m.node or m.id for m in before.members if m.id not in kept}:
            self._history.lost(len(units))
        if fresh := [m for m in after.members if before.find(m.id) is None]:
            self._history.came(len(fresh))

    # ------------------------------------------------------------------ members as devices

    def _pipeliner(self, members: Iterable[Member]) -> Pipeliner | None:
        """Returns the job's planner, made from the request of the oldest of these members; None if none has sent
        one.
        """
        oldest = next((self._requests[m.id] for m in members if m.id in self._requests), None)
        if oldest is None:
            return None
        if self._last is None or self._last[0] is not oldest or self._last[1] != self.link:
            job = oldest.job
            if self.link is not None:
                job = replace(job, between_hosts=self.link)
            made = Pipeliner(job, oldest.policy, copies=oldest.copies, shared=oldest.shared)
            made.history = self._history
            self._last = oldest, self.link, made
        self._last[2].overheads = self.overheads
        return self._last[2]

    def _devices(self, pipeliner: Pipeliner, members: Iterable[Member]) -> list[Device]:
        """Returns the members' devices; a member that has not reported its own counts as one like the oldest
        member's.
        """
        found = []
        for m in members:
            request = self._requests.get(m.id)
            like = request.device if request is not None else pipeliner.profile.devices[0]
            host = f"machine {m.host or m.address}"  # no member's id looks like this
            speed = like.speed * self.speeds.get(m.id, 1.0)
            found.append(replace(like, name=m.id, speed=speed, host=host, unit=m.node))
        return found


def _few(links: Collection[Pair], members: Sequence[Member]) -> Collection[Pair] | None:
    """Returns the links; None if every pair of these members has one."""
    return None if len(links) == len(members) * (len(members) - 1) // 2 else links


def _choice(answer: PipelineAnswer, here: int) -> PipelineChoice:
    """Converts the planner's answer to the choice of pipelines for a view of this many members."""
    reason, least = answer.reason, answer.least_members
    if answer.text is None and least is not None and least > here:
        reason += f"; a plan needs {least} members that are like the roomiest of these"
    return PipelineChoice(text=answer.text or "", reason=reason, facts=answer.facts(), ends=answer.restarts)
