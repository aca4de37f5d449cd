"""Reads the steps of real pipelines from event logs: the plan and the commit of each, and its predicted time.

A plan is taken from what its members' sums held (`committed` events), not from what the scheduler wanted. Its
prediction is the scheduler's word when it chose the plan (`pipelines` events).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.common import median
from chaos_lightning.events.events import Record
from chaos_lightning.observe.fields import view_number
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage

UNSETTLED = 2
"""Steps of a plan that do not count: parts move before them, and loaders begin."""
Rows = Sequence[tuple[int, int, Sequence[tuple[int, int]]]]
"""[first, end, micro-batches] of runs of layers."""


@dataclass
class PlanRun:
    """Consecutive steps that ran by one plan.

    Attributes:
        shape: Shape in words, such as "3 x 2".
        predicted_s: Seconds of a step as the scheduler predicted them.
        members: Number of contributors, those that stand by included.
        rerouted: Whether micro-batches make detours.
        coverage: Layers and micro-batches that each member's sums contained in the last step, by member.
        ends: Time at which all contributors had committed each step, by the monotonic clock (s).
    """

    shape: str
    predicted_s: float
    members: int
    rerouted: bool
    coverage: dict[str, Rows] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)

    @property
    def steps(self) -> list[float]:
        """Seconds of each step, without the first ones after a change of plan."""
        return [b - a for a, b in itertools.pairwise(self.ends[UNSETTLED:])]

    @property
    def step_s(self) -> float:
        return median(self.steps)

    @property
    def error(self) -> float:
        """Share by which a measured step is longer than the predicted one."""
        return self.step_s / self.predicted_s - 1

    @property
    def plan(self) -> PipelinePlan:
        """Plan by which the steps ran; defined only if no micro-batch is rerouted."""
        return plan_of(self.coverage)


def plan_of(coverage: Mapping[str, Rows]) -> PipelinePlan:
    """Returns the plan by which members ran their layers, from the micro-batches that each one's sums contain.

    Raises:
        PlanError: The micro-batches make no plan, as where some are rerouted.
    """
    routes: dict[int, list[PlanStage]] = defaultdict(list)
    for member, rows in coverage.items():
        for first, end, spans in rows:
            for j in itertools.chain.from_iterable(range(a, b) for a, b in spans):
                routes[j].append(PlanStage(member, first, end))
    counts: dict[tuple[PlanStage, ...], int] = defaultdict(int)
    for _, stages in sorted(routes.items()):
        counts[tuple(sorted(stages, key=lambda s: s.first))] += 1
    layers = max(s.end for route in counts for s in route)
    plan = PipelinePlan(layers, tuple(Pipeline(route, count) for route, count in counts.items()))
    plan.check()
    return plan


Committed = tuple[float, dict[str, Record]]
"""When the last contributor of a step had committed it (s), and the members' words."""


def committed(records: Iterable[Record]) -> list[Committed]:
    """Returns the steps that all their contributors have committed, in order.

    A member that dies before it has said so leaves its last step out.
    """
    said: dict[str, dict[str, Record]] = defaultdict(dict)
    for r in records:
        if r.name == "committed" and r.get("kind") == "step":
            said[r["header"]][r.member] = r
    whole = [by for by in said.values() if {m for m, _ in next(iter(by.values()))["contributors"]} <= by.keys()]
    return sorted(((max(r.mono for r in by.values()), by) for by in whole), key=lambda step: step[0])


def runs(records: Iterable[Record]) -> list[PlanRun]:
    """Returns runs of consecutive steps by one plan each, in order, for one chain of views."""
    records = list(records)
    told = [r for r in records if r.name == "pipelines" and r.get("view") and r.get("step_s")]
    chosen = {view_number(r["view"]): r for r in reversed(told)}  # what was said first; later it may know its steps
    found: list[PlanRun] = []
    last: tuple[int, int] | None = None
    for end, by in committed(records):
        one = next(iter(by.values()))
        number = max((n for n in chosen if n <= view_number(one["view"])), default=None)
        if number is None:
            continue
        if number != last:
            choice, last = chosen[number], number
            members = len(one["contributors"])
            found.append(PlanRun(str(choice["shape"]), float(choice["step_s"]), members, bool(choice["detours"])))
        found[-1].ends.append(end)
        found[-1].coverage = {m: r["coverage"] for m, r in by.items() if r.get("coverage")}
    return found
