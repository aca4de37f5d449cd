"""Derives the units of one step: which member runs which layers of which micro-batch in which order, and which
micro-batches each gradient sum covers.

Theory of operation. A view carries a text (protocol.md, pipelines): a plan by member ids, and the instruction lists of
the pipelines that share micro-batches, since those depend on measured times and no two members measure alike. Pipelines
by themselves run 1F1B, which follows from the plan. From the text alone each member derives its *units*: a forward or a
backward pass of one micro-batch through the layers [first, end), with the member whose tensor it takes and the member
that it sends to. A micro-batch without samples has no units.

A raw sum covers, for each layer, the micro-batches whose backward units its member has run. Over all members these sets
must be disjoint, and together all micro-batches of the step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines.lists import PlanLists, coupled
from chaos_lightning.planning.pipelines.plan import VACANT, PipelinePlan
from chaos_lightning.planning.pipelines.schedules import (
    Instruction,
    ScheduleError,
    check_schedule,
    one_f_one_b,
    read_instruction,
)
from chaos_lightning.protocol.spans import in_words, subtract, union
from chaos_lightning.protocol.types import LayersCovered, Span

MAX_LAYERS = 1 << 16
"""Most layers of a model, and most micro-batches of a step."""
MAX_STAGED = 1 << 22
"""Most layers of a model times micro-batches of a step."""
FORWARD, BACKWARD = "F", "B"


class BorderKey(NamedTuple):
    """Key of one border tensor of a step: the activations that enter `layer` (forward), or their gradient
    (backward).
    """

    kind: str
    micro_batch: int
    layer: int


class StepUnit(NamedTuple):
    """One forward or backward pass of a micro-batch through the layers [first, end).

    Attributes:
        source: Member whose tensor the unit takes; "" if it takes none.
        to: Member that the unit sends to; "" if it sends nothing.
    """

    kind: str
    micro_batch: int
    first: int
    end: int
    source: str
    to: str

    def __str__(self) -> str:
        name = "forward" if self.kind == FORWARD else "backward"
        return f"the {name} pass of micro-batch {self.micro_batch} through layers {self.first} to {self.end - 1}"

    @property
    def taken(self) -> BorderKey | None:
        """Key of the border tensor that this unit waits for; None if it waits for none."""
        at = self.first if self.kind == FORWARD else self.end
        return BorderKey(self.kind, self.micro_batch, at) if self.source else None

    @property
    def sent(self) -> BorderKey | None:
        """Key of the border tensor that this unit sends to another member; None if it sends none."""
        at = self.end if self.kind == FORWARD else self.first
        return BorderKey(self.kind, self.micro_batch, at) if self.to else None


@dataclass(frozen=True)
class ViewPipelines:
    """Pipelines of a view: a plan by member ids, with instruction lists for the pipelines that share micro-batches."""

    plan: PipelinePlan
    lists: Mapping[str, tuple[Instruction, ...]] = field(default_factory=dict)
    """Instructions of each member of the coupled pipelines that has any."""
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Layers that use a parameter together, by the parameter's name, in the order of names."""

    @staticmethod
    def of(
        plan: PipelinePlan, made: PlanLists | None = None, shared: Mapping[str, Iterable[int]] | None = None
    ) -> ViewPipelines:
        """Returns the view's pipelines from a plan and the lists that `plan_lists` made; without shared micro-batches
        no lists are needed.

        Args:
            plan: Plan by member ids.
            made: Lists of the coupled pipelines.
            shared: Layers that use a parameter together, by its name.

        Raises:
            PlanError: The lists do not run the plan, or a parameter is not used by several of its layers.
        """
        together = _shared_by(plan)
        rows = zip(made.workers, made.lists, strict=True) if made is not None else ()
        users = {name: tuple(sorted(layers)) for name, layers in sorted((shared or {}).items())}
        found = ViewPipelines(plan, {name: row for name, row in rows if name in together and row}, users)
        found.check()
        return found

    # ------------------------------------------------------------------------------------------------ as text

    def to_json(self) -> str:
        """Returns the pipelines of a view as the shortest JSON text; equal ones have equal texts."""
        about: dict[str, Any] = {"plan": self.plan.to_dict()}
        if self.lists:
            about["lists"] = {name: " ".join(map(str, row)) for name, row in self.lists.items()}
        if self.shared:
            about["shared"] = {name: list(layers) for name, layers in self.shared.items()}
        return json.dumps(about, separators=(",", ":"), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> ViewPipelines:
        """Returns the pipelines of a view from the JSON text that `to_json` made.

        Raises:
            PlanError: The text is none of a plan with its lists, or its lists do not run the plan.
        """
        try:
            about = json.loads(text)
            if not isinstance(about, dict) or not {"plan"} <= set(about) <= {"plan", "lists", "shared"}:
                raise ValueError("expected an object with `plan` and, if need be, `lists` and `shared`")
            lists = about.get("lists", {})
            if not isinstance(lists, dict) or not all(isinstance(row, str) for row in lists.values()):
                raise ValueError("`lists` is no object of texts")
            _check_bounds(about["plan"])
            found = ViewPipelines(
                PipelinePlan.from_dict(about["plan"]),
                {name: tuple(map(read_instruction, row.split())) for name, row in lists.items()},
                {name: tuple(layers) for name, layers in sorted(about.get("shared", {}).items())},
            )
        except PlanError as error:
            raise PlanError(f"a view's pipelines cannot be read: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise PlanError(f"a view's pipelines cannot be read: {error}; expected what to_json() wrote") from error
        found.check()
        return found

    def check(self) -> None:
        """Refuses instruction lists that do not run every unit of the pipelines that share micro-batches once, or that
        deadlock.

        Raises:
            PlanError: A list does not; says which member, and which instruction. Or a shared parameter has odd layers.
        """
        if len(self.shared) >= MAX_LAYERS:
            raise PlanError(f"{len(self.shared)} parameters are shared by layers; expected fewer than {MAX_LAYERS}")
        for name, layers in self.shared.items():
            known = all(type(layer) is int and 0 <= layer < self.plan.layer_count for layer in layers)
            if not known or len(layers) < 2 or list(layers) != sorted(frozenset(layers)):
                raise PlanError(
                    f"parameter {name!r} is shared by layers {list(layers)[:9]}; expected two or more of the "
                    f"{self.plan.layer_count} layers, each once, in order"
                )
        shared = _shared_by(self.plan)
        for name, row in self.lists.items():
            if name not in shared:
                raise PlanError(
                    f"member {name!r} has an instruction list, and its pipeline runs by itself: leave it out"
                )
            if not row:
                raise PlanError(f"member {name!r} has an empty instruction list; leave it out")
            if split := next((x for x in row if x.kind not in (FORWARD, BACKWARD)), None):
                raise PlanError(f"member {name!r}: {split} is half of a backward pass; expected F or B")
        at = {name: i for i, name in enumerate(shared)}
        routes = {j: [at[s.device] for s in self._routes[j]] for j in self._coupled_micro_batches}
        try:
            check_schedule([self.lists.get(name, ()) for name in shared], routes)
        except ScheduleError as error:
            names = ", ".join(f"{i} is {name}" for name, i in list(at.items())[:8])
            raise PlanError(f"instruction lists: {error} (worker {names})") from error

    # ------------------------------------------------------------------------------------------------ units

    @cached_property
    def _routes(self) -> dict[int, tuple[Any, ...]]:
        return {j: self.plan.route(j) for j in range(self.plan.micro_batches)}

    @cached_property
    def _coupled_micro_batches(self) -> list[int]:
        together = set(coupled(self.plan))
        return [j for j, q in enumerate(self.plan.homes) if q in together]

    def instructions(self, member: str) -> tuple[Instruction, ...]:
        """Returns the instruction list of a member; the stage in an instruction is an index into the micro-batch's
        route.
        """
        if member in self.lists:
            return self.lists[member]
        together, start = set(coupled(self.plan)), 0
        for q, p in enumerate(self.plan.pipelines):
            for k, s in enumerate(p.stages):
                if s.device == member and q not in together:
                    row = one_f_one_b(len(p.stages), p.micro_batches, self.plan.in_flight_extra)[k]
                    return tuple(x._replace(micro_batch=start + x.micro_batch) for x in row)
            start += p.micro_batches
        return ()

    def units(self, member: str, empty: Collection[int] = ()) -> tuple[StepUnit, ...]:
        """Returns a member's units in the order in which it runs them; none if it owns no layers.

        Args:
            member: Id of the member.
            empty: Micro-batches without samples.
        """
        return tuple(self._unit(x) for x in self.instructions(member) if x.micro_batch not in empty)

    def _unit(self, x: Instruction) -> StepUnit:
        route = self._routes[x.micro_batch]
        here = route[x.stage]
        before = route[x.stage - 1].device if x.stage else ""
        after = route[x.stage + 1].device if x.stage + 1 < len(route) else ""
        source, to = (before, after) if x.kind == FORWARD else (after, before)
        return StepUnit(x.kind, x.micro_batch, here.first, here.end, source, to)


def _shared_by(plan: PipelinePlan) -> tuple[str, ...]:
    """Returns the members of pipelines that share micro-batches, sorted."""
    together = set(coupled(plan))
    return tuple(sorted({s.device for q in together for s in plan.pipelines[q].stages if s.device != VACANT}))


def _check_bounds(about: Mapping[str, Any]) -> None:
    """Refuses numbers of layers and micro-batches that are too large, before any loop runs up to them."""
    layers, micro_batches = about["layers"], sum(row["micro_batches"] for row in about["pipelines"])
    for value, name in ((layers, "layers"), (micro_batches, "micro-batches")):
        if type(value) is not int or value > MAX_LAYERS:
            raise ValueError(f"{value!r} {name}; expected at most {MAX_LAYERS}")
    if layers * micro_batches > MAX_STAGED:
        raise ValueError(
            f"{layers} layers for {micro_batches} micro-batches; expected a product of at most {MAX_STAGED}"
        )


# ------------------------------------------------------------------------------------------------ what sums cover


def coverage(units: Iterable[StepUnit], kind: str = BACKWARD) -> tuple[LayersCovered, ...]:
    """Returns the micro-batches whose gradients a member's sums cover once these units have run, by runs of layers.

    Args:
        units: Units of one member.
        kind: The passes that count; FORWARD in a round of evaluation, which has no other (P17).
    """
    passes = [u for u in units if u.kind == kind]
    cuts = sorted({c for u in passes for c in (u.first, u.end)})
    rows: list[LayersCovered] = []
    for first, end in pairwise(cuts):
        spans = union((u.micro_batch, u.micro_batch + 1) for u in passes if u.first <= first < u.end)
        if spans and rows and rows[-1].end == first and rows[-1].micro_batches == spans:
            rows[-1] = LayersCovered(rows[-1].first, end, spans)
        elif spans:
            rows.append(LayersCovered(first, end, spans))
    return tuple(rows)


def coverage_error(
    layer_count: int, micro_batches: Iterable[Span], given: Mapping[str, Sequence[LayersCovered]]
) -> str:
    """Returns in words where the members' gradient sums do not cover each micro-batch exactly once in each layer; "" if
    they do.

    Args:
        layer_count: Layers of the model.
        micro_batches: Micro-batches of the step that have samples.
        given: Coverage that each member's contribution names.
    """
    most = 2 * layer_count + 1
    for name, found in given.items():  # each row is looked at once for each border between layers
        if len(found) > most:
            return f"{name} names {len(found)} runs of layers; expected at most {most} of {layer_count} layers"
    due = union(micro_batches)
    rows = [(name, row) for name, found in given.items() for row in found]
    cuts = {0, layer_count, *(c for _, row in rows for c in (row.first, row.end))}
    for first, end in pairwise(sorted(cuts)):
        layers = f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
        if not 0 <= first < layer_count:
            return f"{layers}: none of this model's {layer_count} layers"
        seen: dict[str, tuple[Span, ...]] = {}
        held: tuple[Span, ...] = ()
        for name, row in rows:
            if not row.first <= first < row.end:
                continue
            if twice := subtract(held, subtract(held, union(row.micro_batches))):
                other = next(n for n, spans in seen.items() if subtract(spans, subtract(spans, twice)))
                return f"{layers}: micro-batches {in_words(twice[0])} are in the sums of {other} and {name}"
            if foreign := subtract(union(row.micro_batches), due):
                return f"{layers}: {name} names micro-batches {in_words(foreign[0])}, which this step does not have"
            seen[name] = union((*seen.get(name, ()), *row.micro_batches))
            held = union((*held, *row.micro_batches))
        if missing := subtract(due, held):
            return f"{layers}: micro-batches {in_words(missing[0])} are in the sum of no member"
    return ""


def closing(units: Sequence[StepUnit]) -> tuple[tuple[int, ...], ...]:
    """Returns, for each unit, the layers of which it is the member's last backward pass, the last layer first."""
    last: dict[int, int] = {}
    for i, u in enumerate(units):
        if u.kind == BACKWARD:
            last.update(dict.fromkeys(range(u.first, u.end), i))
    found: dict[int, list[int]] = defaultdict(list)
    for layer in sorted(last, reverse=True):
        found[last[layer]].append(layer)
    return tuple(tuple(found[i]) for i in range(len(units)))
