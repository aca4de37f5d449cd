"""Runs one member's attempts at a pipeline step, as `Engine.step_by_units` calls them.

Theory of operation. An attempt opens the `PipelineStep` with the pipelines of its view, and runs this member's units.
What they gave becomes the contribution: weights of micro-batches whose last layers ran here, positions of those whose
first layers did (protocol.md P2), and what is said beside the gradients (told.py). A recovery ends the attempt, and the
engine asks for another one, under another view. The micro-batches stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.member.unit_steps import UnitsDone
from chaos_lightning.membership.parts import Division, division, numbers
from chaos_lightning.pipeline.executor import SlotAttempt, StepSums
from chaos_lightning.pipeline.step import PipelineStep, StepContribution
from chaos_lightning.pipeline.told import StepOutcome, ToldStep, agreed
from chaos_lightning.planning import ledger
from chaos_lightning.planning.pipelines.units import FORWARD
from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import Header, Ledger, Spent, View


def _nothing(sums: StepSums) -> Mapping[int, bytes]:
    return {}


@dataclass(eq=False)
class UnitAttempt:
    """Attempts of one member at one pipeline step; an attempt ends with a recovery, and the next one follows.

    Attributes:
        step: Runs the units.
        member: This member's id.
        number: Number of the optimizer step, 1 is the first.
        batch: Returns a micro-batch, given its number in the step.
        weight: Returns a micro-batch's weight; asked where its last layers run.
        spent: Returns the positions of a micro-batch; asked where its first layers run.
        empty: Micro-batches without samples.
        extra: Returns bytes that travel with the step, by micro-batch whose last layers ran here.
        view: The view of the last attempt; None before the first.
    """

    step: PipelineStep
    member: str
    number: int
    batch: Callable[[int], Any]
    weight: Callable[[int], float]
    spent: Callable[[int], tuple[Spent, ...]]
    empty: Collection[int] = ()
    extra: Callable[[StepSums], Mapping[int, bytes]] = _nothing
    view: View | None = field(default=None, init=False)

    def __call__(self, view: View, seq: int) -> UnitsDone:
        """Runs this member's units of a slot in the given view; returns what goes into its contribution.

        Raises:
            AttemptOverError: The attempt ended meanwhile.
            ConfigurationError: The view has no pipelines.
        """
        parts = division(view)
        if parts.pipelines is None:
            raise ConfigurationError(f"view {view.id} has no pipelines; its steps run as a whole, by Engine.step()")
        self.view = view
        self.step.open(SlotAttempt(view.id, seq), parts.pipelines, self.member, self.empty)
        done = self.step.run(self.number, self.batch, self.weight)
        spent = self._spent(done.sums)
        return UnitsDone(
            weight=done.weight,
            presence=done.presence,
            micro_batches=done.micro_batches,
            coverage=done.coverage,
            spent=spent,
            payload=self._told(parts, done, spent).encode(),
        )

    def outcome(self, header: Header) -> StepOutcome:
        """Returns the outcome of the committed step, which all members compute alike from its header."""
        assert self.view is not None, "no attempt was made at the step"
        return agreed(header, self.view)

    def _spent(self, sums: StepSums) -> tuple[Spent, ...]:
        first = [t.unit.micro_batch for t in sums.times if t.unit.kind == FORWARD and t.unit.first == 0]
        return ledger.merge(Ledger(), [row for j in first for row in self.spent(j)]).streams

    def _told(self, parts: Division, done: StepContribution, spent: tuple[Spent, ...]) -> ToldStep:
        names = {part: parts.names[part] for part in numbers(parts.made(self.member))}
        losses = {j: loss for j, loss in done.sums.losses.items() if loss is not None}
        values = torch.stack([loss.double() for loss in losses.values()]).tolist() if losses else []
        return ToldStep(
            norms={part: done.norms[name] for part, name in names.items() if name in done.norms},
            losses={j: (value, done.sums.weights[j]) for j, value in zip(losses, values, strict=True)},
            extra=self.extra(done.sums),
            samples=sum(count(row.spans) for row in spent if row.stream == ledger.SHARED),
        )
