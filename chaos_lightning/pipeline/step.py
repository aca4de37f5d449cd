"""Runs one member's part of a training step in a pipeline: its units, and the all-reduce of their gradient sums.

Theory of operation. `open` begins an attempt: borders of other members are let in, an accumulation by parts begins, and
memory is laid out for the parts that the member owns under the attempt's view. `run` has the executor run the units.
The last backward pass of a part sends its gradients to its other owners while others go on (`_Readiness`). It returns
once all parts that are owned here are reduced: only then may the member contribute. A recovery ends the attempt (`end`,
in the loop's thread). Whatever waits then raises `AttemptOverError`, and the next attempt begins with `open`, from the
state that the last header has committed (`remember_base`). `commit` puts averages into `.grad`.

The weight of a micro-batch multiplies its loss, so sums are plain, and the header's weight divides them. Buffers that
forward passes change are averaged over their owners by the micro-batches that each has run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chaos_lightning.collectives.accumulation import Accumulation
from chaos_lightning.collectives.norms import PartNorm, part_norms
from chaos_lightning.errors import AttemptOverError, DeadlineError
from chaos_lightning.member.unit_steps import StepTime
from chaos_lightning.pipeline.borders import BorderExchange
from chaos_lightning.pipeline.executor import (
    Layers,
    PipelineExecutor,
    SlotAttempt,
    StepSums,
    StepWork,
)
from chaos_lightning.pipeline.parts import ModelParts
from chaos_lightning.pipeline.speed import UnitSpeed
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.units import BACKWARD, FORWARD, StepUnit, ViewPipelines
from chaos_lightning.protocol.spans import count, union
from chaos_lightning.protocol.types import NO_VIEW, Header, LayersCovered, Span, ViewId
from chaos_lightning.settings import EngineConfig


@dataclass(frozen=True)
class StepContribution:
    """Results of an attempt at this member, once the gradients of all parts that it owns are reduced.

    Attributes:
        weight: Sum of the weights of micro-batches whose last layers ran here.
        presence: Bits that say which parameters have a gradient here.
        coverage: Micro-batches in this member's own sums, by layers.
        micro_batches: Micro-batches of the step that have samples.
        norms: Norms of the reduced gradient sums of the parts that this member owns.
        sums: Losses, results and times of the units.
    """

    weight: float
    presence: bytes
    coverage: tuple[LayersCovered, ...]
    micro_batches: tuple[Span, ...]
    norms: Mapping[str, PartNorm]
    sums: StepSums


class _Readiness:
    """Listener that reports to the accumulation which parts have finished their backward passes.

    A part that several layers use is done when all of them are that run here; one that none of them uses, at once.
    """

    def __init__(self, parts: ModelParts, accumulation: Accumulation) -> None:
        self._parts, self._accumulation = parts, accumulation
        self._closing: dict[str, set[int]] = {}
        self._running: dict[str, set[int]] = {}

    def begin(self, units: Sequence[StepUnit]) -> None:
        """Starts with the units of an opened attempt; parts that none of them uses are reported at once."""
        here = {layer for u in units if u.kind == BACKWARD for layer in range(u.first, u.end)}
        left = {part: here.intersection(users) for part, users in self._parts.users.items()}
        self._closing = {part: set(layers) for part, layers in left.items() if layers}
        self._running = {part: set(layers) for part, layers in left.items() if layers}
        self._accumulation.closed([part for part, layers in left.items() if not layers])

    def closing(self, layers: Sequence[int]) -> None:
        self._accumulation.closing(_used_up(self._closing, layers))

    def layer_done(self, layer: int) -> None:
        if done := _used_up(self._running, (layer,)):
            self._accumulation.closed(done)


def _used_up(left: dict[str, set[int]], layers: Collection[int]) -> list[str]:
    """Removes finished layers from the parts that wait for them; returns the parts that wait for none any more."""
    found = []
    for part in [part for part, its in left.items() if not its.isdisjoint(layers)]:
        left[part].difference_update(layers)
        if not left[part]:
            found.append(part)
            del left[part]
    return found


class PipelineStep:
    """Runner of one member's units of each step, which also reduces their gradient sums; one object serves the training
    thread for the member's whole life.

    Args:
        root: The model.
        layers: The model's layers.
        exchange: Exchange of border tensors over links.
        accumulation: Accumulation over a layout of the whole model by these parts; its reducer is opened for an attempt
            before `open`.
        parts: Parts of the model.
        around: Function that returns a context for each forward pass (autocast).
        device: Device that the layers are on.
        timeout_s: Seconds to wait for a reduction; as a rule a recovery ends the wait before.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Layers,
        exchange: BorderExchange,
        accumulation: Accumulation,
        parts: ModelParts,
        *,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        device: torch.device | str = "cpu",
        timeout_s: float = EngineConfig.step_timeout_s,
    ) -> None:
        self._root, self._accumulation, self._parts = root, accumulation, parts
        self.sample_s = 0.0
        """Not measured: `speed` is."""
        self.borders = exchange
        """Exchange of border tensors; takes their frames (the loop's thread)."""
        self._readiness = _Readiness(parts, accumulation)
        self.executor = PipelineExecutor(root, layers, exchange, self._readiness, around=around, device=device)
        self._speed: UnitSpeed | None = None
        self._timeout_s = timeout_s
        self._attempt = SlotAttempt(NO_VIEW, -1)
        self._units: tuple[StepUnit, ...] = ()
        self._micro_batches: tuple[Span, ...] = ()
        self._changed = threading.Condition()
        self._reduced = SlotAttempt(NO_VIEW, -1)
        """Last attempt all of whose bytes are reduced here."""
        self._over = NO_VIEW
        """View whose attempts, and those of older views, are over."""

    def foresee(self, job: TrainingJob) -> None:
        """Starts to measure this member's speed relative to the layer times that it has sent to the scheduler."""
        self._speed = UnitSpeed(job, self.executor.clock)

    # ------------------------------------------------------------------ an attempt

    def remember_base(self) -> None:
        """Saves the model's state as of the last header, before the first attempt of a step and after parts were
        pulled.
        """
        self.executor.remember_base()
        self._accumulation.settle()

    def open(self, attempt: SlotAttempt, view: ViewPipelines, member: str, empty: Collection[int] = ()) -> None:
        """Begins an attempt at a slot, from the model's state as of the last committed header.

        Args:
            attempt: The slot, and the view in which it is tried.
            view: Pipelines of the attempt's view.
            member: This member's id.
            empty: Micro-batches without samples.
        """
        if self._speed is not None:
            self._speed.follow(view.plan)
        self._attempt, self._units = attempt, view.units(member, empty)
        self._micro_batches = union((j, j + 1) for j in range(view.plan.micro_batches) if j not in empty)
        for parameter in self._root.parameters():
            parameter.grad = None  # of the last step, or of an attempt: they lie in memory that is used again
        owned = self._parts.owned_by(layer for stage in view.plan.stages.get(member, ()) for layer in stage.layers)
        spans = self._accumulation.layout.spans_of(owned)
        if spans != self._accumulation.memory.owned:
            self._accumulation.lay_out(spans)
        self.borders.open(attempt, self._units)
        self._accumulation.open(attempt.view, attempt.seq)
        self._readiness.begin(self._units)

    def run(self, step: int, batch: Callable[[int], Any], weight: Callable[[int], float]) -> StepContribution:
        """Runs the attempt's units, and waits until the gradients of all parts that this member owns are reduced.

        Args:
            step: Number of the optimizer step.
            batch: Returns a micro-batch, given its number in the step.
            weight: Returns a micro-batch's weight; asked where its last layers run.

        Raises:
            AttemptOverError: The attempt has ended; it was dropped.
            DeadlineError: The others' sums do not come, and no recovery ends the attempt.
            Exception: Whatever a layer raised, with a note that names the unit.
        """
        sums = self.executor.run(StepWork(self._attempt, step, self._units, batch, weight))
        covered = sums.covered
        presence = self._accumulation.flush(self._shares(covered))
        try:
            self._await_reduced()
        except AttemptOverError:
            self.drop()
            raise
        if self._speed is not None:
            self._speed.add(sums.times)
        norms = part_norms(self._accumulation.memory, self._accumulation.section, self._attempt.seq)
        total = float(sum(sums.weights.values()))
        return StepContribution(total, presence, covered, self._micro_batches, norms, sums)

    def evaluate(
        self,
        attempt: SlotAttempt,
        view: ViewPipelines,
        member: str,
        empty: Collection[int],
        batch: Callable[[int], Any],
        call: Callable[[Any], Any],
    ) -> StepSums:
        """Runs an attempt at a round of evaluation (P17): forward passes only, without gradients or sums.

        Args:
            attempt: The slot, and the view in which it is tried.
            view: Pipelines of the attempt's view.
            member: This member's id.
            empty: Micro-batches that the round does not have.
            batch: Returns a micro-batch, given its number in the round.
            call: The user's step; the same object each time.

        Raises:
            AttemptOverError: The attempt has ended; it was dropped.
            Exception: Whatever a layer raised, with a note that names the unit.
        """
        units = [unit for unit in view.units(member, empty) if unit.kind == FORWARD]
        self.borders.open(attempt, units)
        # Streams of random numbers are those of no training step, and other ones in each round.
        return self.executor.run(StepWork(attempt, -attempt.seq, units, batch, lambda _: 0.0, call))

    def drop(self) -> None:
        """Undoes everything that the attempt has done at this member: restores buffers, and removes gradients."""
        self.executor.drop()

    def commit(self, header: Header) -> None:
        """Writes the averages of a committed step into `.grad` and into the buffers that are averaged."""
        passes = count(self._micro_batches)
        totals = {part: float(passes * len(users)) for part, users in self._parts.users.items()}
        self._accumulation.apply(header, totals)

    def _shares(self, covered: Sequence[LayersCovered]) -> dict[str, float]:
        """Returns the weight of this member's buffers in their average, by part: the number of layer passes of
        micro-batches that it ran.
        """
        passes = {layer: count(row.micro_batches) for row in covered for layer in range(row.first, row.end)}
        return {part: float(sum(passes.get(u, 0) for u in users)) for part, users in self._parts.users.items()}

    def _await_reduced(self) -> None:
        attempt = self._attempt
        with self._changed:
            came = self._changed.wait_for(
                lambda: attempt.view <= self._over or self._reduced == attempt, self._timeout_s
            )
            if attempt.view <= self._over:
                raise AttemptOverError(f"{attempt} is over")
            if not came:
                raise DeadlineError(
                    f"{attempt}: the gradients of the parts that this member owns were not reduced within "
                    f"{self._timeout_s:g} s, and no recovery began; look whether their other owners compute, or give "
                    "steps more time (step_timeout_s)"
                )

    # ------------------------------------------------------------------ other threads

    @property
    def speed(self) -> float:
        """Speed of this member's units relative to its forecast; 0 if not known."""
        return 0.0 if self._speed is None else self._speed.told

    def step_time(self, view: ViewId) -> StepTime:
        """Returns the median times of the latest steps by a view's plan."""
        return self._speed.step_time if self._speed is not None and view == self._attempt.view else StepTime()

    def reduced(self, view: ViewId, seq: int) -> None:
        """Records that the gradients of all parts that this member owns are reduced; called by the reducer."""
        with self._changed:
            self._reduced = SlotAttempt(view, seq)
            self._changed.notify_all()

    def end(self, view: ViewId) -> None:
        """Ends the attempts of this view and of older ones, because a recovery has begun or this member was removed.

        The reducer and links were told before.
        """
        self.borders.drop(view)
        with self._changed:
            self._over = max(self._over, view)
            self._changed.notify_all()

    def restart(self) -> None:
        """Forgets all attempts before this member joins again, since views of another chain may have lower numbers."""
        self.borders.restart()
        with self._changed:
            self._over, self._reduced = NO_VIEW, SlotAttempt(NO_VIEW, -1)
