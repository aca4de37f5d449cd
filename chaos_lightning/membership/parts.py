"""Divides the training state of a view into numbered parts: which there are, who owns them, and what a step's sums must
cover.

Theory of operation (protocol.md P1, P3, P14, P15). In a view without pipelines the state is one part, number 0, which
all members own. With pipelines each layer is a part and has the layer's number. Behind the layers come parameters that
several layers use, in the order of their names; the owners of any of these layers own them. The last part is the *rest*
(counters, schedulers, callbacks, the ledger), which all members own, those without layers included. All views of a job
number parts alike. Who owns what follows from the view's text and its members, so each text is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.graph import connected_parts, neighbours
from chaos_lightning.planning.pipelines.units import ViewPipelines, coverage_error
from chaos_lightning.protocol.spans import subtract, union
from chaos_lightning.protocol.types import LayersCovered, Span, View

REST = "rest"
"""Name of the part that all members own."""
_VIEWS = 8
"""Number of views whose divisions are kept: the latest few are asked for."""


def division(view: View) -> Division:
    """Returns how the training state is divided into parts in this view.

    Raises:
        PlanError: The view's pipelines cannot be read, or name somebody who is no member.
    """
    return _division(view.pipelines, view.ids(), bool(view.batch))


@lru_cache(maxsize=_VIEWS)
def _division(text: str, members: tuple[str, ...], shared: bool) -> Division:
    return Division(members, ViewPipelines.from_json(text) if text else None, shared=shared)


def common(these: Sequence[Span], those: Sequence[Span]) -> tuple[Span, ...]:
    """Returns the spans of numbers that are in both arguments; argument and result are sorted and disjoint."""
    return subtract(these, subtract(these, those))


def numbers(spans: Iterable[Span]) -> tuple[int, ...]:
    """Returns the numbers of the parts in these spans, as one flat tuple."""
    return tuple(part for start, stop in spans for part in range(start, stop))


class Division:
    """Division of the training state of one view into numbered parts.

    Args:
        members: Ids of the members, in rank order.
        pipelines: Pipelines of the view; None: it has none.
        shared: Whether the members share the units of a batch of fixed size, each of which counts once (B2).

    Raises:
        PlanError: The pipelines name somebody who is no member, or nobody owns a layer.

    Attributes:
        members: See the arguments.
        pipelines: See the arguments.
        names: Name of each part; one name if there are no pipelines.
    """

    def __init__(
        self, members: tuple[str, ...], pipelines: ViewPipelines | None = None, *, shared: bool = False
    ) -> None:
        self.members, self.pipelines, self._shared = members, pipelines, shared
        self.names: tuple[str, ...] = ("state",)
        if pipelines is not None:
            if members:  # nobody owns anything once all have parted (P13)
                self._check(pipelines)
            layers = (f"layer.{layer}" for layer in range(pipelines.plan.layer_count))
            self.names = (*layers, *(f"shared.{name}" for name in sorted(pipelines.shared)), REST)

    def _check(self, pipelines: ViewPipelines) -> None:
        if strangers := sorted(frozenset(pipelines.plan.devices).difference(self.members)):
            raise PlanError(f"a view's pipelines name {strangers[0]!r}, who is no member of that view")
        if vacant := [layer for layer, owners in enumerate(pipelines.plan.holders()) if not owners]:
            raise PlanError(f"a view's pipelines give layer {vacant[0]} to nobody; expected an owner of each layer")

    @property
    def layer_count(self) -> int:
        """Number of layers; 0 without pipelines."""
        return self.pipelines.plan.layer_count if self.pipelines is not None else 0

    @property
    def everything(self) -> tuple[Span, ...]:
        """Span of the numbers of all parts."""
        return ((0, len(self.names)),)

    @cached_property
    def owners(self) -> tuple[tuple[str, ...], ...]:
        """Ids of each part's owners, the oldest member first, indexed by part."""
        if self.pipelines is None:
            return (self.members,)
        layers = [tuple(m for m in self.members if m in held) for held in self.pipelines.plan.holders()]
        shared = []
        for _, users in sorted(self.pipelines.shared.items()):
            theirs = frozenset(member for layer in users for member in layers[layer])
            shared.append(tuple(m for m in self.members if m in theirs))
        return (*layers, *shared, self.members)

    @cached_property
    def _owned(self) -> Mapping[str, tuple[Span, ...]]:
        return self._spans(range(len(owners)) for owners in self.owners)

    @cached_property
    def _made(self) -> Mapping[str, tuple[Span, ...]]:
        return self._spans(range(min(1, len(owners))) for owners in self.owners)

    def _spans(self, ranks: Iterable[range]) -> dict[str, tuple[Span, ...]]:
        """Returns the parts of each member, given for each part the ranks among its owners that count."""
        found: dict[str, list[Span]] = {}
        for part, (owners, these) in enumerate(zip(self.owners, ranks, strict=True)):
            for rank in these:
                found.setdefault(owners[rank], []).append((part, part + 1))
        return {member: union(spans) for member, spans in found.items()}

    def owned(self, member: str) -> tuple[Span, ...]:
        """Returns the parts of the state that this member owns, as sorted, disjoint spans; none if it is no member."""
        return self._owned.get(member, ())

    def made(self, member: str) -> tuple[Span, ...]:
        """Returns the parts of the state whose oldest owner this member is, which it initialises before slot 1
        (P14).
        """
        return self._made.get(member, ())

    def apart(self, links: Iterable[tuple[str, str]]) -> str:
        """Returns in words which owners of the same part these links leave unconnected; "" if none."""
        pairs = tuple(links)
        for owners, name in dict(zip(reversed(self.owners), reversed(self.names), strict=True)).items():
            if len(connected_parts(owners, neighbours(owners, pairs))) > 1:
                return f"no links connect {', '.join(owners)} with each other, which own {name}"
        return ""

    def words(self, parts: Iterable[Span], layers: Sequence[str] = ()) -> str:
        """Returns these parts in words for people; layers by the given names if there is one for each layer."""
        found = []
        names = (*layers, *self.names[self.layer_count :]) if len(layers) == self.layer_count else self.names
        for start, stop in parts:
            end = min(stop, self.layer_count)
            if end - start > 2:
                found.append(f"{names[start]} to {names[end - 1]}")
                start = end
            found += names[start:stop]
        return ", ".join(found) or "nothing"

    def coverage_error(self, micro_batches: Iterable[Span], given: Mapping[str, Sequence[LayersCovered]]) -> str:
        """Returns in words where members' gradient sums miss or repeat a micro-batch in a layer (P3); "" if they do
        not. Where members share a batch of fixed size, the units count as micro-batches, and the model as one layer.

        Args:
            micro_batches: Numbers of the micro-batches that have samples.
            given: Micro-batches and layers that each member's gradient sums cover, by member.
        """
        layers = 1 if self._shared else self.layer_count
        return coverage_error(layers, micro_batches, given) if layers else ""
