"""Represents plans for fleets of equal devices by counters: a shape of pipelines, and the places in it that losses have
left vacant.

Theory of operation. A `Formation` is to a `PlanShape` what a plan with vacant stages is to one without: it knows by row
and stage how many places nobody fills. Places are numbered through the pipelines, the longest first, stage by stage.
All that policies ask for follows from these counters, so that a fleet of 10,000 devices costs as much as one of ten.

The micro-batches of a vacant place go evenly to the owners of the same layers. Where pipelines are cut alike and of D
owners F are lost, each of the others takes ceil(m F / (D - F)) *guests* beside its own m. Where they are cut unlike,
the layers between two neighbouring borders are a *group* with owners in all rows; each owner takes its share of the
group's guests, and a stage's guests are those of its groups, weighed by their times. A group without an owner is lost.

`EqualOptions` has one method per way to go on, each of which makes a candidate; `policies` says which are asked.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from chaos_lightning.planning.pipelines.choice import FILL, KEEP, MOVE, RESTART, PlanCandidate
from chaos_lightning.planning.pipelines.equal import PlanShape, Shapes
from chaos_lightning.planning.pipelines.history import fatal_risk
from chaos_lightning.planning.pipelines.job import Layer, TrainingJob
from chaos_lightning.planning.pipelines.paper import algorithm1
from chaos_lightning.planning.pipelines.planner import Planner, describe
from chaos_lightning.planning.pipelines.rerouting import slowed_s
from chaos_lightning.planning.pipelines.templates import FAULTS, oobleck, symmetric
from chaos_lightning.planning.pipelines.timing import OneFOneB, PipelineTimes

FINE = 1000
"""Number of devices beyond which plans are searched for some numbers only, so that one in `FINE` is idle at most."""


@dataclass(frozen=True)
class Formation:
    """Plan for equal devices: a shape of pipelines, and the places that losses have left vacant."""

    shape: PlanShape
    cuts: tuple[tuple[int, ...], ...]
    """First layer of each stage, and the number of layers, by row of the shape."""
    vacant: frozenset[int] = frozenset()
    shadowed: bool = False
    """Whether each device also holds the stage behind its own, and takes it over when that one's device is lost."""

    @cached_property
    def starts(self) -> list[int]:
        """Number of the first place of each group of equal pipelines; the last entry is the number of places."""
        found = [0]
        for r in self.shape.rows:
            found.append(found[-1] + r.times * r.stages)
        return found

    @property
    def places(self) -> int:
        return self.starts[-1]

    def seat(self, place: int) -> tuple[int, int, int]:
        """Returns a place's position: group of equal pipelines, pipeline in the group, and stage."""
        row = bisect_right(self.starts, place) - 1
        return (row, *divmod(place - self.starts[row], self.shape.rows[row].stages))

    @cached_property
    def holes(self) -> tuple[tuple[int, ...], ...]:
        """Number of vacant places, by group of equal pipelines and stage."""
        found = [[0] * r.stages for r in self.shape.rows]
        for place in self.vacant:
            row, _, stage = self.seat(place)
            found[row][stage] += 1
        return tuple(map(tuple, found))

    def without(self, places: Iterable[int]) -> Formation:
        """Returns the formation with these places vacant, after the loss of their devices."""
        more = frozenset(places) - self.vacant
        if not more:
            return self
        found = replace(self, vacant=self.vacant | more)
        holes = [list(row) for row in self.holes]
        for place in more:
            row, _, stage = self.seat(place)
            holes[row][stage] += 1
        found.__dict__["holes"] = tuple(map(tuple, holes))
        return found

    def filled(self, newcomers: int) -> Formation:
        """Returns the formation after newcomers have taken vacant places, at the stages with most vacant places
        first.
        """
        by_stage: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place in sorted(self.vacant, reverse=True):
            row, _, stage = self.seat(place)
            by_stage[row, stage].append(place)
        vacant = set(self.vacant)
        for _ in range(min(newcomers, len(vacant))):
            most = max(by_stage, key=lambda at: (len(by_stage[at]) / self.shape.rows[at[0]].times, at))
            vacant.remove(by_stage[most].pop())
        return replace(self, vacant=frozenset(vacant))

    @cached_property
    def broken(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Vacant stages of each pipeline that has any, by (group of equal pipelines, pipeline in the group)."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place in sorted(self.vacant):
            row, pipeline, stage = self.seat(place)
            found[row, pipeline].append(stage)
        return {key: tuple(stages) for key, stages in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns the formation as JSON values."""
        return {
            "rows": [r._asdict() | {"cut": list(at)} for r, at in zip(self.shape.rows, self.cuts, strict=True)],
            "vacant": sorted(self.vacant),
            "shadowed": self.shadowed,
        }

    def __str__(self) -> str:
        return describe(self.shape) + (f"; {len(self.vacant)} places are vacant" if self.vacant else "")


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers between two neighbouring stage borders of a plan, and the stages that own them."""

    first: int
    end: int
    owners: tuple[tuple[int, int], ...]
    """Stages that hold these layers, as (row, stage)."""


@lru_cache(maxsize=1024)
def _groups(cuts: tuple[tuple[int, ...], ...]) -> tuple[_Group, ...]:
    borders = sorted({b for at in cuts for b in at})
    return tuple(
        _Group(a, b, tuple((row, bisect_right(at, a) - 1) for row, at in enumerate(cuts))) for a, b in pairwise(borders)
    )


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Seconds that changes of a plan cost, by kind of change."""

    reroute_s: float = 0.0
    """Seconds until micro-batches go other ways."""
    fill_s: float = 0.0
    """Seconds until newcomers take vacant places between two steps; they load beside training."""
    move_s: float = 8.2
    """Seconds until layers have moved and other pipelines train."""
    reload_s: float = 60.0
    """Seconds to read a checkpoint, beside those of a move."""
    checkpoint_s: float = 1800.0
    """Seconds between two checkpoints."""


class EqualFleet:
    """Plans for a job on any number of devices of one kind; the search for each number runs once.

    Args:
        job: Job whose first device stands for all; the number of devices matters for hosts alone.
        pauses: Seconds that changes of the plan cost.
    """

    def __init__(self, job: TrainingJob, pauses: Pauses | None = None) -> None:
        self.job, self.pauses = job, pauses or Pauses()
        self.shapes = Planner(job).shapes
        self._both = [a + b for a, b in zip(job.costs.forward, job.costs.backward, strict=True)]
        self.samples = job.micro_batches * job.samples
        links = (job.within_host, job.between_hosts) if len(job.devices) > 1 else ()
        slowest = max((link.latency_s for link in links), default=0.0)
        self.commit_s = 2 * (slowest + job.overheads.hop_s) + job.overheads.commit_s
        self._formations: dict[tuple[str, int, PlanShape | None], Formation | None] = {}
        self._steps: dict[tuple[object, ...], float] = {}

    @cached_property
    def shadowed(self) -> Shapes:
        """Search for shapes on devices that also hold the next stage and run its forward passes, as in Bamboo."""

        def twice(x: Layer) -> Layer:
            return replace(
                x,
                forward_s=2 * x.forward_s,
                parameter_nbytes=2 * x.parameter_nbytes,
                optimizer_nbytes=2 * x.optimizer_nbytes,
            )

        return Planner(replace(self.job, layers=tuple(map(twice, self.job.layers)))).shapes

    # ------------------------------------------------------------------------------------------------ plans

    def formation(self, kind: str, devices: int, was: PlanShape | None = None) -> Formation | None:
        """Returns the plan that a search finds for this many devices; None if no plan fits into memory.

        Args:
            kind: Name of the search (`_KINDS`).
            devices: Number of devices.
            was: Shape before; `algorithm1` stays near it.
        """
        rounded = devices - devices % max(1, devices // FINE)
        key = (kind, rounded, was if kind == "algorithm1" else None)
        if key not in self._formations:
            shapes = self.shadowed if kind == "shadowed" else self.shapes
            shape = _KINDS[kind](shapes, rounded, was)
            fits = shape is not None and math.isfinite(shape.charged_s)
            self._formations[key] = self._cut(shapes, shape, kind == "shadowed") if shape and fits else None
        return self._formations[key]

    def _cut(self, shapes: Shapes, shape: PlanShape, shadowed: bool) -> Formation:
        found = [shapes.cutter.best(r.stages, r.micro_batches, shape.pipelines) for r in shape.rows]
        return Formation(shape, tuple(cut.at for cut in found if cut), shadowed=shadowed)

    # ------------------------------------------------------------------------------------------------ times

    def live(self, f: Formation) -> list[int]:
        """Returns the number of devices that hold each group of layers."""
        rows = f.shape.rows
        found = [sum(rows[r].times - f.holes[r][s] for r, s in g.owners) for g in _groups(f.cuts)]
        if f.shadowed:
            for i, g in enumerate(_groups(f.cuts)):
                found[i] += sum(rows[r].times - f.holes[r][s - 1] for r, s in g.owners if rows[r].stages > 1)
        return found

    def guests(self, f: Formation) -> list[tuple[int, ...]]:
        """Returns how many micro-batches of lost devices each remaining device takes over, by group of equal pipelines
        and stage.
        """
        rows, both = f.shape.rows, self._both
        found = [[0.0] * r.stages for r in rows]
        for g, live in zip(_groups(f.cuts), self.live(f), strict=True):
            homeless = sum(f.holes[r][s] * rows[r].micro_batches for r, s in g.owners)
            for r, s in g.owners if homeless else ():
                if rows[r].times == f.holes[r][s]:
                    continue
                stage_s = both[f.cuts[r][s + 1]] - both[f.cuts[r][s]]
                found[r][s] += -(-homeless // live) * (both[g.end] - both[g.first]) / stage_s
        return [tuple(math.ceil(x - 1e-9) for x in row) for row in found]

    def step_s(self, f: Formation, slow: Mapping[int, float] | None = None) -> float:
        """Returns the seconds of a step; `slow` gives the speed of slow devices by place."""
        slow = slow or {}
        if f.shadowed:
            return self._shadowed_step_s(f)
        hurt: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        for place in sorted(slow):
            row, pipeline, stage = f.seat(place)
            hurt[row, pipeline].append((stage, slow[place]))
        speeds = {(row, tuple(stages)) for (row, _), stages in hurt.items()}
        key = (f.shape, f.cuts, f.holes, frozenset(speeds))
        if key not in self._steps:
            self._steps[key] = self._step_s(f, speeds) + self.commit_s
        return self._steps[key]

    def _step_s(self, f: Formation, speeds: set[tuple[int, tuple[tuple[int, float], ...]]]) -> float:
        if not f.vacant and not speeds:
            return f.shape.charged_s
        longest, guests, extra = 0.0, self.guests(f), self.job.memory.in_flight_extra
        todo = [(row, ()) for row in range(len(f.shape.rows))] + sorted(speeds)
        for row, hurt in todo:
            r = f.shape.rows[row]
            times = self.shapes.cutter.row(r.stages).times(f.cuts[row])
            charged = self.shapes.time_s(r.stages, r.micro_batches, f.shape.pipelines)
            at = dict(hurt)
            slower = replace(
                times,
                forward=tuple(x / at.get(k, 1.0) for k, x in enumerate(times.forward)),
                backward=tuple(x / at.get(k, 1.0) for k, x in enumerate(times.backward)),
            )
            alone = slowed_s(times, r.micro_batches, (0,) * r.stages, extra)
            longest = max(longest, charged + slowed_s(slower, r.micro_batches, guests[row], extra) - alone)
        return longest

    def _shadowed_step_s(self, f: Formation) -> float:
        longest, cutter = f.shape.charged_s, self.shadowed.cutter
        for row, vacant in {(row, stages) for (row, _), stages in f.broken.items()}:
            r = f.shape.rows[row]
            times = cutter.row(r.stages).times(f.cuts[row])
            alone = OneFOneB(times, r.micro_batches).ends_s[0]
            forward, backward = list(times.forward), list(times.backward)
            for k in vacant:
                forward[k - 1] += times.forward[k]
                backward[k - 1] += times.backward[k]
            kept = [k for k in range(r.stages) if k not in vacant]
            shorter = PipelineTimes(
                tuple(forward[k] for k in kept), tuple(backward[k] for k in kept), times.hops[: len(kept) - 1]
            )
            charged = self.shadowed.time_s(r.stages, r.micro_batches, f.shape.pipelines)
            longest = max(longest, charged + OneFOneB(shorter, r.micro_batches).ends_s[0] - alone)
        return longest + self.commit_s

    def lacks(self, f: Formation) -> str:
        """Returns in words which stage lacks memory for the micro-batches that it takes over; "" if none does."""
        if not f.vacant or f.shadowed:
            return ""
        for r, at, guests in zip(f.shape.rows, f.cuts, self.guests(f), strict=True):
            row = self.shapes.cutter.row(r.stages)
            for k, more in enumerate(guests):
                short = row.memory(k, at[k], at[k + 1], r.micro_batches + more) - self.job.devices[0].memory_nbytes
                if more and short > 0:
                    return f"stage {k} of {r.stages} with {more} guests lacks {short:,} bytes"
        return ""


Finder = Callable[[Shapes, int, PlanShape | None], PlanShape | None]
"""Function that looks for a shape for so many devices; the last argument is the shape before."""

_KINDS: dict[str, Finder] = {
    "best": lambda shapes, devices, was: shapes.exact(devices),
    "shadowed": lambda shapes, devices, was: shapes.exact(devices),
    "oobleck": lambda shapes, devices, was: oobleck(shapes, devices, FAULTS),
    "algorithm1": algorithm1,
    "symmetric": lambda shapes, devices, was: symmetric(shapes, devices),
}
"""Function that looks for shapes, by the kind's name."""


@dataclass(kw_only=True)
class EqualOptions:
    """Options of a fleet of equal devices at the moment of a decision; a method returns None if its option is not
    possible.
    """

    fleet: EqualFleet
    before: Formation | None
    """Plan in force, with the places of lost devices vacant; None: nothing has begun."""
    devices: int
    """Number of all devices that are there."""
    idle: int = 0
    """Number of devices without a place that are not slow."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Speeds of devices below 1, by place."""
    slow_idle: int = 0
    lost: bool = True
    """Whether a loss is the cause of the decision, so that the open step is run again."""
    running_s: float | None = None
    """Seconds of a step of the plan that was in force; None: as long as without vacant places."""
    size_shares: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    """Probability that a loss takes so many devices, by that number."""
    void_samples: float = 0.0
    """Samples that were committed since the newest checkpoint."""

    def _candidate(self, f: Formation, kind: str, transition_s: float, redo_s: float, step_s: float) -> PlanCandidate:
        return PlanCandidate(
            policy="",
            kind=kind,
            step_s=step_s,
            samples=self.fleet.samples,
            transition_s=transition_s,
            redo_s=redo_s,
            risk=fatal_risk(self._distinct(f), self.devices, self.size_shares),
            devices=f.places - len(f.vacant),
            lacks=self.fleet.lacks(f),
            about=str(f),
            plan=f,
        )

    def _distinct(self, f: Formation) -> list[int]:
        """Returns, for each set of stages that own the same layers, the number of their devices that are left."""
        rows, found = f.shape.rows, {}
        for g, live in zip(_groups(f.cuts), self.fleet.live(f), strict=True):
            found[tuple((r, s) for r, s in g.owners if rows[r].times > f.holes[r][s])] = live
        return list(found.values())

    @property
    def whole(self) -> bool:
        """Whether there is a plan and all of its places are filled."""
        return self.before is not None and not self.before.vacant

    @property
    def fatal(self) -> bool:
        """Whether some layer has no owner left."""
        f = self.before
        return f is not None and min(self.fleet.live(f)) == 0

    @property
    def _redo_s(self) -> float:
        """Seconds of work that a loss makes run again: half of the open step on average."""
        if not self.lost or self.before is None:
            return 0.0
        return (self.before.shape.charged_s if self.running_s is None else self.running_s) / 2

    def keep(self) -> PlanCandidate | None:
        """Returns the candidate that goes on without moves: owners of the same layers take the lost devices'
        micro-batches.
        """
        f = self.before
        if f is None or f.shadowed or self.fatal:
            return None
        step_s = self.fleet.step_s(f, self.slow)
        pause = self.fleet.pauses.reroute_s if self.lost and f.vacant else 0.0
        return self._candidate(f, KEEP, pause, self._redo_s, step_s)

    def fill(self) -> PlanCandidate | None:
        """Returns the candidate that gives vacant places to idle devices."""
        f = self.before
        if f is None or f.shadowed or self.fatal or not f.vacant or not self.idle:
            return None
        after = f.filled(self.idle)
        step_s = self.fleet.step_s(after, self.slow)
        return self._candidate(after, FILL, self.fleet.pauses.fill_s, self._redo_s, step_s)

    def avoid(self) -> PlanCandidate | None:
        """Returns the candidate that removes slow devices from the plan as if they were lost, and gives their places to
        idle ones.
        """
        f = self.before
        if f is None or f.shadowed or self.fatal or not self.slow:
            return None
        after = f.without(self.slow).filled(self.idle)
        if min(self.fleet.live(after)) == 0:
            return None
        step_s = self.fleet.step_s(after)
        return self._candidate(after, FILL, self.fleet.pauses.fill_s, self._redo_s, step_s)

    def move(self, kind: str = "best") -> PlanCandidate | None:
        """Returns the candidate that moves layers to a new plan, found by the given search, for all devices that are
        not slow.
        """
        healthy = self.devices - len(self.slow) - self.slow_idle
        was = self.before.shape if self.before else None
        after = self.fleet.formation(kind, healthy, was) if healthy else None
        return None if after is None or self.fatal else self._moved(after)

    def _moved(self, after: Formation) -> PlanCandidate:
        f, step_s = self.before, self.fleet.step_s(after)
        if f is not None and not f.vacant and not self.slow and f.shape.rows == after.shape.rows:
            return self._candidate(f, KEEP, 0.0, self._redo_s, step_s)
        return self._candidate(after, MOVE, self.fleet.pauses.move_s if f else 0.0, self._redo_s, step_s)

    def shadow(self) -> PlanCandidate | None:
        """Returns the candidate in which the device before each lost one takes over the lost stage; None if two
        neighbours are lost.
        """
        f = self.before
        if f is None or not f.shadowed:
            return None
        for (row, _), stages in f.broken.items():
            length = f.shape.rows[row].stages
            if length == 1 or any((k + 1) % length in stages for k in stages):
                return None
        step_s = self.fleet.step_s(f)
        pause = self.fleet.pauses.reroute_s if self.lost and f.vacant else 0.0
        return self._candidate(f, KEEP, pause, self._redo_s, step_s)

    def restart(self, kind: str = "best") -> PlanCandidate | None:
        """Returns the candidate that restarts from the newest checkpoint."""
        healthy = self.devices - len(self.slow) - self.slow_idle
        after = self.fleet.formation(kind, healthy or self.devices)
        if after is None:
            return None
        if self.before is None:
            return self._moved(after)
        p = self.fleet.pauses
        found = self._candidate(after, RESTART, p.move_s + p.reload_s, 0.0, self.fleet.step_s(after))
        return replace(found, void_samples=self.void_samples)
