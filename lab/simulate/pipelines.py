"""Plans the pipelines of simulated jobs: assigns stages to members in turn, and after a death reroutes micro-batches or
assigns anew.

Theory of operation. This is a real planner in small: it makes plans and texts of planning/pipelines, and knows no
times. Members get the stages of one pipeline after the other, in an order that is drawn anew for each set of members.
After a loss half of all views leave everybody's layers where they are, and other owners run the micro-batches of the
places that became vacant; so no part moves. In the other half all stages are dealt anew, and parts move. Instruction
lists of pipelines that share micro-batches run one micro-batch after the other, which always comes to its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from chaos_lightning.membership.pipelining import PipelineChoice, ViewPipeliner
from chaos_lightning.membership.topology import Pair, connected
from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob
from chaos_lightning.planning.pipelines.lists import coupled
from chaos_lightning.planning.pipelines.plan import VACANT, Detour, Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.planning.pipelines.schedules import Instruction
from chaos_lightning.planning.pipelines.units import BACKWARD, FORWARD, ViewPipelines
from chaos_lightning.protocol.types import Member, Span
from lab.simulate.training import Program

_LAYER_NBYTES = 1000
_TURNS = 8
"""Number of orders of members that are tried where links are missing."""


@cache
def asked(program: Program) -> str:
    """Returns, as text, the request for pipelines that members of this job make; "" if it has none."""
    if not program.layers:
        return ""
    each_s = program.work_s / (3 * program.layers * program.micro_batches)
    layers = tuple(
        Layer(name=f"layer.{x}", forward_s=each_s, backward_s=2 * each_s, parameter_nbytes=_LAYER_NBYTES)
        for x in range(program.layers)
    )
    # A member that hands layers over keeps them for a while.
    device = Device(name="me", memory_nbytes=2 * (program.most or program.layers) * _LAYER_NBYTES)
    job = TrainingJob(layers=layers, devices=(device,), micro_batches=program.micro_batches)
    return PipelineRequest(job, "adaptive", 2, _shared(program), program.on_lost_parts).to_json()


def _shared(program: Program) -> dict[str, tuple[int, ...]]:
    return {"tied": program.users} if program.shared else {}


class RoundRobin(ViewPipeliner):
    """Planner that assigns the stages of pipelines to members in turn.

    Args:
        program: Says how many layers, stages and micro-batches there are, and what members have room for.
        seed: Changes the order in which stages are dealt.
    """

    def __init__(self, program: Program, seed: int = 0) -> None:
        self._layers, self._stages, self._micro_batches = program.layers, program.stages, program.micro_batches
        self._most = program.most or program.layers
        self._need = program.needed
        self._seed, self._shared = seed, _shared(program)

    def reroute(
        self,
        before: str,
        members: Sequence[Member],
        *,
        leaving: Sequence[Member] = (),
        held: Mapping[str, tuple[Span, ...]] | None = None,
        links: Collection[Pair] = (),
    ) -> PipelineChoice:
        """Returns pipelines for these members after a change; see `ViewPipeliner.reroute`."""
        text, reason = self._rerouted(before, members, links)
        return PipelineChoice(text=text, reason=reason)

    def _rerouted(self, before: str, members: Sequence[Member], links: Collection[Pair]) -> tuple[str, str]:
        ids = tuple(m.id for m in members)
        if len(ids) < self._need:
            return "", f"{len(ids)} members are here, and a plan needs {self._need}"
        if before:
            plan = ViewPipelines.from_json(before).plan
            if set(plan.devices) == set(ids) and self._is_linked(plan, links):
                return before, "as before"
            left = self._vacated(plan, {*ids, VACANT}, ids) if self._draw("again", ids) % 2 else None
            if left is not None and self._is_linked(left, links):
                return self._text(left), "the owners of the same layers run what is vacant"
        for turn in range(_TURNS):
            dealt = self._dealt(ids, turn)
            if self._is_linked(dealt, links):
                return self._text(dealt), "stages are dealt anew"
        return "", "no border between stages has a link"

    def _is_linked(self, plan: PipelinePlan, links: Collection[Pair]) -> bool:
        """Returns whether links exist between all neighbouring stages, and connect the owners of each part."""
        holders = plan.holders()
        shared = (sorted(set().union(*(holders[x] for x in users))) for users in self._shared.values())
        if not all(connected(owners, links) for owners in (*set(plan.owners), *shared)):
            return False
        routes = (plan.route(j) for j in range(plan.micro_batches))
        return all(frozenset((a.device, b.device)) in links for route in routes for a, b in pairwise(route))

    def _draw(self, what: str, ids: Sequence[str]) -> int:
        """Returns a pseudo-random number that depends only on the seed, the purpose and the members."""
        said = f"{self._seed} {what} {' '.join(ids)}"
        return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=4).digest(), "big")

    # ------------------------------------------------------------------ dealt anew

    def _dealt(self, ids: Sequence[str], turn: int) -> PipelinePlan:
        order = list(ids)
        if turn or self._draw("shuffled", ids) % 2:
            order.sort(key=lambda m: self._draw(f"{m} {turn}", ids))
        stages = min(max(self._stages, -(-self._layers // self._most)), len(order), self._layers)
        count = max(1, min(len(order) // stages, self._micro_batches))
        rows = []
        for q in range(count):
            cut = self._cut(stages, q + self._draw("cut", ids))
            mine = order[q * stages : (q + 1) * stages]
            row = tuple(PlanStage(m, a, b) for m, a, b in zip(mine, cut, cut[1:], strict=False))
            rows.append(Pipeline(row, self._micro_batches // count + (q < self._micro_batches % count)))
        return PipelinePlan(self._layers, tuple(rows), idle=tuple(sorted(order[count * stages :])))

    def _cut(self, stages: int, turn: int) -> list[int]:
        """Returns the first layers of all stages: evenly spaced, or now and then shifted by one layer if members have
        room for that.
        """
        even = [k * self._layers // stages for k in range(stages + 1)]
        later = [0, *(min(c + 1, self._layers - (stages - k)) for k, c in enumerate(even[1:-1], 1)), self._layers]
        lengths = [b - a for a, b in pairwise(later)]
        return later if turn % 3 == 0 and all(0 < n <= self._most for n in lengths) else even

    # ------------------------------------------------------------------ rerouted

    def _vacated(self, plan: PipelinePlan, here: Collection[str], ids: Sequence[str]) -> PipelinePlan | None:
        """Returns the plan without the members that are gone, whose places stay vacant; None if a layer has no owner
        left.
        """
        rows = tuple(
            replace(p, stages=tuple(s if s.device in here else s._replace(device=VACANT) for s in p.stages))
            for p in plan.pipelines
        )
        placed = {s.device for p in rows for s in p.stages}
        idle = tuple(sorted(m for m in ids if m not in placed))
        left = PipelinePlan(plan.layer_count, rows, idle=idle)
        detours: list[Detour] = []
        start = 0
        for row in rows:
            for stage in (s for s in row.stages if s.device == VACANT):
                for group, owners in zip(left.groups, left.owners, strict=True):
                    if not stage.first <= group.start < stage.end:
                        continue
                    if not owners:
                        return None
                    detours += [
                        Detour(j, group.start, group.stop, owners[j % len(owners)])
                        for j in range(start, start + row.micro_batches)
                    ]
            start += row.micro_batches
        return replace(left, detours=tuple(detours))

    def _text(self, plan: PipelinePlan) -> str:
        """Returns the text of a plan; pipelines that share micro-batches get instruction lists that run one micro-batch
        at a time.
        """
        together, lists = set(coupled(plan)), dict[str, list[Instruction]]()
        for j, q in enumerate(plan.homes):
            route = plan.route(j) if q in together else ()
            passes = [(FORWARD, k) for k in range(len(route))] + [(BACKWARD, k) for k in reversed(range(len(route)))]
            for kind, k in passes:
                lists.setdefault(route[k].device, []).append(Instruction(k, kind, j))
        made = ViewPipelines(plan, {name: tuple(row) for name, row in lists.items()}, self._shared)
        made.check()
        return made.to_json()
