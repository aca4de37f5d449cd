"""Defines a pipeline plan: which device computes which layers for which micro-batches, as a value that can be printed,
compared, stored and sent.

Theory of operation. A plan has *pipelines*. Each is a row of *stages*, a stage is a device and the run of layers that
it owns, and the runs of one pipeline make up the whole model. Micro-batches are numbered through the pipelines in
order; a pipeline is the *home* of its own. Where a device is lost and its place is not filled, the stage has no device,
and for each micro-batch at home there *detours* say who runs those layers instead. The places where any pipeline is cut
are the *borders*; the layers between two neighbouring borders are a *group* and have the same owners. Whatever else one
wants to know (owners, groups, the route of a micro-batch) is a function of the plan, so it is not stored.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from chaos_lightning.errors import PlanError

VACANT = ""
"""Device of a stage whose owner is lost."""


class PlanStage(NamedTuple):
    """Stage of a pipeline: a device and the layers [first, end) that it owns."""

    device: str
    first: int
    end: int

    @property
    def layers(self) -> range:
        return range(self.first, self.end)


class Detour(NamedTuple):
    """Detour of a micro-batch: its layers [first, end) run on `device` instead of the device of its own pipeline."""

    micro_batch: int
    first: int
    end: int
    device: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that make up the whole model, and the number of micro-batches of a step that this pipeline runs."""

    stages: tuple[PlanStage, ...]
    micro_batches: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(s.end - s.first for s in self.stages)

    @property
    def cut(self) -> tuple[int, ...]:
        """First layer of each stage, then the number of layers."""
        return (*(s.first for s in self.stages), self.stages[-1].end)


@dataclass(frozen=True)
class PipelinePlan:
    """Plan of pipelines: which device computes which layers. Equal plans are equal values, in whatever order devices
    were given.
    """

    layer_count: int
    pipelines: tuple[Pipeline, ...]
    detours: tuple[Detour, ...] = ()
    idle: tuple[str, ...] = ()
    in_flight_extra: int = 0
    """Micro-batches in flight at a stage beyond those of 1F1B."""

    @cached_property
    def micro_batches(self) -> int:
        return sum(p.micro_batches for p in self.pipelines)

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """Pipeline of each micro-batch."""
        return tuple(q for q, p in enumerate(self.pipelines) for _ in range(p.micro_batches))

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """First layers of the stages of all pipelines, sorted, with the number of layers at the end."""
        at = {0, self.layer_count}
        for p in self.pipelines:
            at.update(p.cut)
        return tuple(sorted(at))

    @cached_property
    def groups(self) -> tuple[range, ...]:
        return tuple(range(a, b) for a, b in zip(self.borders, self.borders[1:], strict=False))

    @cached_property
    def owners(self) -> tuple[tuple[str, ...], ...]:
        """Devices that own each group of layers (those between neighbouring borders)."""
        found: list[list[str]] = [[] for _ in self.groups]
        at = {border: i for i, border in enumerate(self.borders)}
        for name, (stage,) in self.stages.items():
            for owners in found[at[stage.first] : at[stage.end]]:
                owners.append(name)
        return tuple(map(tuple, found))

    @cached_property
    def stages(self) -> dict[str, list[PlanStage]]:
        """Stages of each device."""
        found: dict[str, list[PlanStage]] = defaultdict(list)
        for p in self.pipelines:
            for s in p.stages:
                if s.device != VACANT:
                    found[s.device].append(s)
        return dict(found)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Devices of the plan, idle ones included, sorted."""
        return tuple(sorted({*self.stages, *self.idle}))

    @cached_property
    def vacant(self) -> tuple[tuple[int, int], ...]:
        """Vacant places: stages whose device is lost, as (pipeline, stage)."""
        return tuple((q, i) for q, p in enumerate(self.pipelines) for i, s in enumerate(p.stages) if s.device == VACANT)

    @property
    def shape(self) -> str:
        """Shape of the plan in words: "3 x 2" is three pipelines of two stages."""
        counts = Counter(len(p.stages) for p in self.pipelines)
        rows = " + ".join(f"{n} x {stages}" for stages, n in sorted(counts.items(), reverse=True))
        return f"{rows}, {len(self.vacant)} vacant" if self.vacant else rows

    @cached_property
    def _detours_of(self) -> dict[int, list[Detour]]:
        found: dict[int, list[Detour]] = defaultdict(list)
        for d in self.detours:
            found[d.micro_batch].append(d)
        return found

    def route(self, micro_batch: int) -> tuple[PlanStage, ...]:
        """Returns the devices that a micro-batch passes through, in order, with the layers that each runs.

        Neighbouring layers on one device are one unit. A vacant place shows as `VACANT`.
        """
        home = self.pipelines[self.homes[micro_batch]].stages
        detours = self._detours_of.get(micro_batch)
        return home if not detours else overlay(home, detours)

    def holders(self) -> list[set[str]]:
        """Returns the devices that hold the state of each layer."""
        found: list[set[str]] = [set() for _ in range(self.layer_count)]
        for group, owners in zip(self.groups, self.owners, strict=True):
            for layer in group:
                found[layer].update(owners)
        return found

    # ------------------------------------------------------------------------------------------------ as text

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values that `from_dict` reads back."""
        rows = [{"micro_batches": p.micro_batches, "stages": [list(s) for s in p.stages]} for p in self.pipelines]
        about: dict[str, Any] = {"layers": self.layer_count, "pipelines": rows}
        for name, value in (
            ("detours", [list(d) for d in self.detours]),
            ("idle", list(self.idle)),
            ("in_flight_extra", self.in_flight_extra),
        ):
            if value:
                about[name] = value
        return about

    @staticmethod
    def from_dict(about: Mapping[str, Any]) -> PipelinePlan:
        """Returns the plan from the JSON values that `to_dict` made.

        Raises:
            PlanError: The value is no plan.
        """
        try:
            _only(about, "layers", "pipelines", "detours", "idle", "in_flight_extra")
            for row in about["pipelines"]:
                _only(row, "stages", "micro_batches")
            plan = PipelinePlan(
                layer_count=_whole(about["layers"]),
                pipelines=tuple(
                    Pipeline(tuple(_stage(*s) for s in row["stages"]), _whole(row["micro_batches"]))
                    for row in about["pipelines"]
                ),
                detours=tuple(
                    Detour(_whole(j), _whole(a), _whole(b), _name(d)) for j, a, b, d in about.get("detours", ())
                ),
                idle=tuple(map(_name, about.get("idle", ()))),
                in_flight_extra=_whole(about.get("in_flight_extra", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"this is no plan of pipelines: {error!r}; expected what to_dict() wrote") from error
        plan.check()
        return plan

    def to_json(self) -> str:
        """Returns the shortest JSON text of this plan; equal plans have equal texts."""
        return json.dumps(self.to_dict(), separators=(",", ":"), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> PipelinePlan:
        """Returns the plan from the JSON text that `to_json` made.

        Raises:
            PlanError: The text is no plan.
        """
        try:
            about = json.loads(text)
        except ValueError as error:
            raise PlanError(f"this is no plan of pipelines: {error}; expected what to_json() wrote") from error
        if not isinstance(about, dict):
            raise PlanError(f"this is no plan of pipelines: a {type(about).__name__}; expected what to_json() wrote")
        return PipelinePlan.from_dict(about)

    # ------------------------------------------------------------------------------------------------ checks

    def check(self) -> None:
        """Refuses a plan unless it runs every layer of every micro-batch exactly once, on an owner of the layer.

        Raises:
            PlanError: The plan does not; says where.
        """
        self._check_rows()
        busy = [s.device for p in self.pipelines for s in p.stages if s.device != VACANT]
        if len(set(busy)) < len(busy):
            twice = next(d for d in busy if busy.count(d) > 1)
            raise PlanError(f"device {twice!r} has two stages; expected one place for each device")
        for name in self.idle:
            if name in busy:
                raise PlanError(f"device {name!r} has a stage and is idle")
        if list(self.idle) != sorted(set(self.idle)):
            raise PlanError(f"idle devices are {', '.join(self.idle)}; expected each once, sorted")
        owned = self.stages
        for d in self.detours:
            if not (0 <= d.micro_batch < self.micro_batches and 0 <= d.first < d.end <= self.layer_count):
                raise PlanError(f"{d} is outside of {self.micro_batches} micro-batches and {self.layer_count} layers")
            if not _covers(owned.get(d.device, ()), d.first, d.end):
                raise PlanError(f"{d}: the device does not own these layers")
        for d, after in pairwise(sorted(self.detours)):
            if d.micro_batch == after.micro_batch and after.first < d.end:
                raise PlanError(f"{d} and {after} have layers in common; expected each to run once")
        for q, i in self.vacant:
            self._check_filled(q, self.pipelines[q].stages[i])

    def _check_rows(self) -> None:
        if not self.pipelines:
            raise PlanError("a plan has no pipeline; expected at least one")
        for what, value, least in (
            ("layers", self.layer_count, 1),
            ("micro-batches", self.micro_batches, 1),
            ("in_flight_extra", self.in_flight_extra, 0),
        ):
            if value < least:
                raise PlanError(f"{what} of a plan: {value}; expected at least {least}")
        for q, p in enumerate(self.pipelines):
            at = 0
            for s in p.stages:
                if s.first != at or s.end <= at:
                    raise PlanError(
                        f"pipeline {q}: the stage on {s.device!r} has layers {s.first} to {s.end}; "
                        f"expected it to begin at layer {at}"
                    )
                at = s.end
            if at != self.layer_count:
                raise PlanError(f"pipeline {q} ends at layer {at}; expected {self.layer_count}")
            if p.micro_batches < 0:
                raise PlanError(f"pipeline {q} has {p.micro_batches} micro-batches; expected 0 or more")

    def _check_filled(self, q: int, stage: PlanStage) -> None:
        start = sum(p.micro_batches for p in self.pipelines[:q])
        for j in range(start, start + self.pipelines[q].micro_batches):
            for s in self.route(j):
                if s.device == VACANT:
                    raise PlanError(
                        f"nobody runs layers {s.first} to {s.end} of micro-batch {j}: the stage of pipeline {q} "
                        f"with layers {stage.first} to {stage.end} has no device, and no detour fills it"
                    )


def overlay(home: Sequence[PlanStage], detours: Iterable[Detour]) -> tuple[PlanStage, ...]:
    """Returns a micro-batch's route with its detours applied; consecutive layers on one device become one entry."""
    who: list[str] = []
    for s in home:
        who.extend([s.device] * (s.end - s.first))
    cuts = {s.first for s in home}
    for d in detours:
        who[d.first : d.end] = [d.device] * (d.end - d.first)
        cuts.update((d.first, d.end))
    route: list[PlanStage] = []
    for at in sorted(c for c in cuts if c < len(who)):
        end = min((c for c in cuts if c > at), default=len(who))
        if route and route[-1].device == who[at] and who[at] != VACANT:
            route[-1] = PlanStage(who[at], route[-1].first, end)
        else:
            route.append(PlanStage(who[at], at, end))
    return tuple(route)


def _only(about: Mapping[str, Any], *known: str) -> None:
    if unknown := sorted(set(about) - set(known)):
        raise ValueError(f"{unknown[0]!r} is an unknown key; expected some of {', '.join(known)}")


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name of a device")
    return value


def _stage(device: Any, first: Any, end: Any) -> PlanStage:
    return PlanStage(_name(device), _whole(first), _whole(end))


def _covers(owned: Iterable[PlanStage], first: int, end: int) -> bool:
    need = set(range(first, end))
    for s in owned:
        need -= set(s.layers)
    return not need
