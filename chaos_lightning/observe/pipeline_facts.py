"""Reads from event logs which pipelines a job chose, which member runs which layers, and how fast the pipelines were.

Theory of operation. The scheduler notes each choice with the plan, estimates and bytes that are to move. Members note
the parts that they got. Measured steps are those between one choice and the next. What members say they own and have
summed up is judged in `coverage.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaos_lightning.events.reader import Record
from chaos_lightning.machine.units import amount, duration
from chaos_lightning.observe import fields as f
from chaos_lightning.observe.spans import Span, merge


@dataclass(frozen=True, slots=True)
class PipelinesFact:
    """Pipelines that the scheduler chose for a view; seconds and shares are its estimates."""

    t: float
    view: str
    shape: str
    """Shape of the pipelines in words: pipelines x stages."""
    way: str
    """Name of the way to go on that was taken."""
    reason: str
    step_s: float | None
    transition_s: float
    moved_nbytes: int
    layers: Mapping[str, tuple[Span, ...]]
    """Layers that each member owns, as [start, stop)."""
    routes: tuple[tuple[str, ...], ...]
    """Members that a micro-batch passes in each pipeline, in order; "" for a vacant place."""
    detours: int
    """Number of stretches of layers that micro-batches run at other members than their pipeline's."""
    busy: Mapping[str, float]
    """Share of a step in which each member computes, 0 to 1."""

    @property
    def bubbles(self) -> float | None:
        """Mean share of a step in which members that run layers sit idle; None if unknown."""
        return 1 - sum(self.busy.values()) / len(self.busy) if self.busy else None

    def runs(self, member: str) -> str:
        """Returns in words which layers a member runs."""
        mine = self.layers.get(member)
        if not mine:
            return "stands by"
        return "layers " + ", ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in mine)


@dataclass(frozen=True, slots=True)
class PartPullFact:
    """Pull of a part of the state by one member."""

    t: float
    member: str
    name: str
    nbytes: int
    seconds: float

    @staticmethod
    def of(record: Record) -> PartPullFact:
        """Reads a `part_pulled` event."""
        nbytes, seconds = f.integer(record.get("nbytes")), f.number(record.get("seconds"))
        return PartPullFact(record.t, record.member, str(record.get("part", "")), nbytes, seconds)


def pipelines_of(record: Record) -> PipelinesFact | None:
    """Reads a `pipelines` event; returns None if no pipelines were chosen or the event lacks their plan."""
    owned, chosen, busy = record.get("layers"), record.get("chosen"), record.get("busy")
    if not isinstance(owned, Mapping) or not record.get("view"):
        return None
    ways = [way for way in f.rows(record.get("candidates")) if isinstance(way, Mapping)]
    way = ways[chosen] if isinstance(chosen, int) and 0 <= chosen < len(ways) else {}
    return PipelinesFact(
        t=record.t,
        view=f.view_name(record.get("view")),
        shape=str(record.get("shape", "")),
        way=str(way.get("name", "")),
        reason=str(record.get("reason", "")),
        step_s=f.number(record.get("step_s")) or None,
        transition_s=f.number(way.get("transition_s")),
        moved_nbytes=f.integer(record.get("moved_nbytes")),
        layers={str(m): merge(f.spans(spans)) for m, spans in owned.items()},
        routes=tuple(f.ids(row) for row in f.rows(record.get("routes"))),
        detours=f.integer(record.get("detours")),
        busy={str(m): f.number(x) for m, x in busy.items()} if isinstance(busy, Mapping) else {},
    )


@dataclass(frozen=True, slots=True)
class PipelinePeriod:
    """Time from one choice of pipelines to the next."""

    chosen: PipelinesFact
    steps: int
    step_s: float | None
    """Median seconds of the steps, as members measured them."""
    reruns: int
    """Steps that were begun anew."""
    pulled_nbytes: int
    pulled_s: float
    """Seconds from the first to the last part that moved."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of a table row: pipelines, way to go on, steps, estimated and measured step time, idle share, bytes
        moved, repeated steps.
        """
        chosen, moved = self.chosen, ""
        if self.pulled_nbytes:
            moved = f"{amount(self.pulled_nbytes)} in {duration(self.pulled_s)}"
        elif chosen.moved_nbytes:
            moved = f"{amount(chosen.moved_nbytes)} planned"
        return (
            chosen.shape + (f", {chosen.detours} detours" if chosen.detours else ""),
            chosen.way,
            str(self.steps),
            duration(chosen.step_s) if chosen.step_s else "-",
            duration(self.step_s) if self.step_s is not None else "-",
            f"{chosen.bubbles:.0%}" if chosen.bubbles is not None else "-",
            moved or "-",
            str(self.reruns),
        )


def periods(
    chosen: Sequence[PipelinesFact],
    steps: Sequence[tuple[float, float]],
    reruns: Sequence[float],
    pulls: Sequence[PartPullFact],
) -> list[PipelinePeriod]:
    """Returns the period of each choice of pipelines, with its steps, reruns and moved parts.

    Args:
        chosen: Chosen pipelines in order of time.
        steps: (wall time of the commit, seconds since the commit before) of each step, in order.
        reruns: Wall times at which a step was begun anew.
        pulls: Parts that members got.
    """
    found = []
    for i, fact in enumerate(chosen):
        end = chosen[i + 1].t if i + 1 < len(chosen) else float("inf")
        took = sorted(seconds for t, seconds in steps if fact.t <= t < end)
        moved = [p for p in pulls if fact.t <= p.t < end and p.nbytes]
        begun = min((p.t - p.seconds for p in moved), default=0.0)
        found.append(
            PipelinePeriod(
                fact,
                len(took),
                took[len(took) // 2] if took else None,
                sum(fact.t <= t < end for t in reruns),
                sum(p.nbytes for p in moved),
                max((p.t for p in moved), default=0.0) - begun,
            )
        )
    return found
