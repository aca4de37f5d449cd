"""Reroutes the micro-batches of lost devices to owners of the same layers, without moving any state.

Theory of operation. A lost device leaves its place vacant. Each micro-batch at home there makes a detour, for each
group of layers, by an owner of that group: its data-parallel peers where pipelines are cut alike. The paper (III-B)
spreads micro-batches evenly. `reroute` also lets a greedy run of the step decide, event by event: the owner takes a
guest that is free first and has memory for it (`lists`). Several rules are tried, and of all that was found, with the
even spread among it, the plan is kept that fits into memory and takes the shortest step. The choice is made anew for
all vacant places each time, so that losing devices one after the other leads to the plan of losing them at once.
Devices that are idle do not help: they hold no state. Where a layer has no owner left, the loss is fatal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.lists import (
    CAPS,
    RULES,
    Capacity,
    Fleet,
    Ran,
    SharedStep,
    Unit,
    Way,
    best,
)
from chaos_lightning.planning.pipelines.plan import VACANT, Detour, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.timing import OneFOneB, PipelineTimes


class FatalLossError(PlanError):
    """Error that some layers have no owner left, so that only a checkpoint helps."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        words = ", ".join(map(str, self.layers[:8])) + (", ..." if len(self.layers) > 8 else "")
        word = "layer" if len(self.layers) == 1 else "layers"
        super().__init__(f"nobody who is left owns {word} {words}; expected an owner of each, so load a checkpoint")


def reroute(
    job: TrainingJob,
    plan: PipelinePlan,
    lost: Collection[str],
    *,
    search: bool = True,
    caps: Sequence[int] = CAPS,
) -> PipelinePlan:
    """Returns the plan after a loss of devices, with their micro-batches rerouted to owners of the same layers.

    Args:
        job: Job with the plan's devices; lost ones may be missing.
        plan: Plan that was checked; it may have been rerouted before.
        lost: Devices of the plan, in any order.
        search: Whether owners are chosen by bubbles and memory; else evenly, as in the paper.
        caps: Numbers of micro-batches in flight beyond 1F1B's, as memory allows; used by a search only.

    Returns:
        A checked plan with the same pipelines and cuts.

    Raises:
        FatalLossError: Some layer has no owner left.
        PlanError: A lost device is none of the plan's.
    """
    left = without(plan, lost)
    if not left.vacant:
        return left
    even = _even(job, left)
    plans = [even, *_searched(job, left, caps)] if search else [even]
    found = even if len(plans) == 1 else min(plans, key=lambda p: _worth(job, p, caps))
    found.check()
    return found


def without(plan: PipelinePlan, lost: Collection[str]) -> PipelinePlan:
    """Returns the plan with the stages of lost devices vacant, before any rerouting.

    Raises:
        FatalLossError: Some layer has no owner left.
        PlanError: A lost device is none of the plan's.
    """
    gone = set(lost)
    if unknown := sorted(gone - set(plan.devices)):
        raise PlanError(
            f"{unknown[0]!r} is lost, but no device of the plan; expected one of {', '.join(plan.devices[:8])}"
        )
    pipelines = tuple(
        replace(p, stages=tuple(s._replace(device=VACANT) if s.device in gone else s for s in p.stages))
        for p in plan.pipelines
    )
    left = replace(
        plan,
        pipelines=pipelines,
        detours=(),
        idle=tuple(d for d in plan.idle if d not in gone),
    )
    if orphans := [layer for layer, holders in enumerate(left.holders()) if not holders]:
        raise FatalLossError(orphans)
    # A detour stays if its device is there and it fills no vacant place: those are filled anew.
    empty = [{x for s in p.stages if s.device == VACANT for x in s.layers} for p in pipelines]
    stay = (
        d
        for d in plan.detours
        if d.device not in gone and empty[plan.homes[d.micro_batch]].isdisjoint(range(d.first, d.end))
    )
    return replace(left, detours=tuple(stay))


def _worth(job: TrainingJob, plan: PipelinePlan, caps: Sequence[int]) -> tuple[int, float]:
    """Returns the sort key of a plan: the bytes of memory that its devices lack, then the step's seconds."""
    cost = estimate(job, plan, caps=caps)
    return sum(cost.over(job).values()), cost.step_s


def _owners(plan: PipelinePlan) -> dict[int, tuple[str, ...]]:
    """Returns the owners of each group of layers, by the group's first layer."""
    return {group.start: owners for group, owners in zip(plan.groups, plan.owners, strict=True)}


def _orphans(plan: PipelinePlan) -> list[tuple[int, PlanStage]]:
    """Returns (micro-batch, vacant stage) for each stage of a micro-batch whose device is lost."""
    starts = [0]
    for p in plan.pipelines:
        starts.append(starts[-1] + p.micro_batches)
    return [(j, plan.pipelines[q].stages[k]) for q, k in plan.vacant for j in range(starts[q], starts[q + 1])]


def _even(job: TrainingJob, plan: PipelinePlan) -> PipelinePlan:
    """Returns the plan in which each micro-batch of a vacant stage goes to the owner with the least rerouted work so
    far, in seconds at speed 1.
    """
    c, owners = job.costs, _owners(plan)
    load: dict[str, float] = dict.fromkeys(plan.stages, 0.0)
    detours = list(plan.detours)
    for j, place in _orphans(plan):
        first = place.first
        while first < place.end:
            name = min(owners[first], key=load.__getitem__)
            end = next((b for b in plan.borders if first < b < place.end and name not in owners[b]), place.end)
            load[name] += c.forward[end] - c.forward[first] + c.backward[end] - c.backward[first]
            detours.append(Detour(j, first, end, name))
            first = end
    return replace(plan, detours=tuple(sorted(detours)))


def _searched(job: TrainingJob, plan: PipelinePlan, caps: Sequence[int]) -> list[PipelinePlan]:
    """Returns at most one plan, with the micro-batches of vacant stages assigned as a greedy run assigns them; none if
    every run deadlocks.
    """
    owners = _few_owners(job, plan)
    asked = {name for names in owners.values() for name in names}
    busy = {plan.homes[d.micro_batch] for d in plan.detours} | {q for q, _ in plan.vacant}
    asked |= {d.device for d in plan.detours}
    pipelines = [q for q, p in enumerate(plan.pipelines) if q in busy or any(s.device in asked for s in p.stages)]
    fleet = Fleet(job, plan, pipelines)
    problem = fleet.problem(owners)
    ran = best(problem, caps=caps)
    return [] if ran is None else [_with_detours(plan, fleet, ran)]


def _few_owners(job: TrainingJob, plan: PipelinePlan) -> dict[int, list[str]]:
    """Returns the least busy owners of each group of layers, at most as many as it has micro-batches to reroute, by the
    group's first layer.
    """
    c = job.costs
    work = {
        s.device: p.micro_batches * (c.forward[s.end] - c.forward[s.first] + c.backward[s.end] - c.backward[s.first])
        / job.by_name[s.device].speed
        for p in plan.pipelines for s in p.stages if s.device != VACANT
    }  # fmt: skip
    orphans: dict[int, int] = dict.fromkeys(plan.borders, 0)
    for q, k in plan.vacant:
        place = plan.pipelines[q].stages[k]
        for first in plan.borders:
            if place.first <= first < place.end:
                orphans[first] += plan.pipelines[q].micro_batches
    return {
        first: sorted(names, key=lambda name: work.get(name, 0.0))[: orphans[first]]
        for first, names in _owners(plan).items()
        if orphans[first]
    }


def _with_detours(plan: PipelinePlan, fleet: Fleet, ran: Ran) -> PipelinePlan:
    detours = list(plan.detours)
    for j, route in zip(fleet.micro_batches, ran.routes, strict=True):
        vacant = {x for s in plan.pipelines[plan.homes[j]].stages if s.device == VACANT for x in s.layers}
        first = 0
        for unit in route:
            if first in vacant:
                detours.append(Detour(j, first, unit.end, fleet.names[unit.worker]))
            first = unit.end
    return replace(plan, detours=tuple(sorted(detours)))


# ------------------------------------------------------------------------------------------------ of large fleets


def slowed_s(times: PipelineTimes, micro_batches: int, guests: Sequence[int], in_flight_extra: int = 0) -> float:
    """Returns the seconds until the last backward pass of a pipeline ends that also takes rerouted micro-batches, of
    which only the numbers are known.

    The guests come from pipelines that run nothing but them, so what is left out is that these may be late because of
    guests that go elsewhere. Over random losses it differs by 2% in the mean from the run of all pipelines, and by 18%
    at most. It is never less than 1F1B without guests takes.

    Args:
        times: Times of its units and hops; those of the pipelines that lost a device are taken to be the same.
        micro_batches: Micro-batches at home.
        guests: Further micro-batches that pass each stage alone.
        in_flight_extra: Most micro-batches in flight beyond 1F1B's.
    """
    return _slowed_s(times, micro_batches, tuple(guests), in_flight_extra)


@lru_cache(maxsize=1 << 14)
def _slowed_s(times: PipelineTimes, micro_batches: int, guests: tuple[int, ...], extra: int) -> float:
    stages = len(times.forward)

    def unit(row: int, k: int) -> Unit:
        return Unit(row * stages + k, k + 1, times.forward[k], times.backward[k], 0.0)

    ways: list[Way] = [{k: (unit(0, k),) for k in range(stages)}] * micro_batches
    ranks = list(range(micro_batches))
    rows = 1
    for k, count in enumerate(guests):
        for j in range(count):
            rank = j % max(1, micro_batches)
            rows += not rank  # a further pipeline has lost its stage k
            ways.append({x: (unit(0 if x == k else rows - 1, x),) for x in range(stages)})
            ranks.append(rank)
    workers = [Capacity(stages - k, stages) for _ in range(rows) for k in range(stages)]
    away = [j >= micro_batches for j in range(len(ways))]
    problem = SharedStep(stages, workers, ways, ranks, away, lambda a, b, layer: times.hops[layer - 1])
    ran = best(problem, RULES[:1], sorted({0, extra}))
    assert ran is not None, "where every unit has one owner, room can be booked ahead"
    return max(ran.end_s, *OneFOneB(times, micro_batches, extra).ends_s) if micro_batches else ran.end_s
