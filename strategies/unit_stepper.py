"""Runs a fit's optimizer steps where one batch of the loop is a whole step, which a member computes in several units.

Theory of operation. `FitHooks.training_step` runs the step's units until its header is there (`average`), so the loop
sees one training step, with the mean loss of the whole step, which is the same at all members. `apply` then puts the
averages where an optimizer finds them. What a unit is, an attempt knows: stages of a pipeline (pipeline_fit.py), or
pieces of a batch of fixed size (fixed_fit.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from chaos_lightning.collectives.hyper import hyper_words
from chaos_lightning.collectives.layout import Section
from chaos_lightning.data.steps import StepBatch, StepLoader
from chaos_lightning.member.drift import StateComparison
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.training import reduced_buffers
from chaos_lightning.member.unit_steps import UnitsDone
from chaos_lightning.pipeline.told import StepOutcome, clip_coefficient, scale_gradients
from chaos_lightning.protocol.types import Header, View
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.pipeline_logs import UnitLogs
from chaos_lightning.strategies.stepping import IDLE_KEY, sections_of


class StepAttempt(Protocol):
    """Attempts of this member at one step."""

    def __call__(self, view: View, seq: int) -> UnitsDone:
        """Runs this member's units in a view; returns what goes into its contribution."""

    def outcome(self, header: Header) -> StepOutcome:
        """Returns the outcome of the committed step."""


class UnitStepper:
    """Runs one member's optimizer steps as units, in place of `Stepper`.

    Args:
        engine: Engine of this member.
        trainer: Trainer in fit.
        loader: Returns the loader, whose present batch is the step.
        attempts: Returns this member's attempts at a step, given its samples.
        logs: Records what units log.
        comparison: Comparison of the members' states; None where each member has parts, which are compared in the step.

    Attributes:
        total_weight: Samples of the last step.
        sections: Parameters of each optimizer, in the whole model.
        buffers: Buffers that are averaged with each step.
    """

    manual = None
    hooked = has_passed = is_last = False

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        loader: Callable[[], StepLoader],
        attempts: Callable[[StepBatch], StepAttempt],
        logs: UnitLogs,
        comparison: StateComparison | None = None,
    ) -> None:
        self._engine, self._trainer, self._loader = engine, trainer, loader
        self._attempts, self._logs, self.comparison = attempts, logs, comparison
        module = trainer.lightning_module
        self.sections: list[Section] = sections_of(module, trainer.optimizers)
        self.buffers = reduced_buffers(module, getattr(module, "chaos_buffers", ()), named_by="chaos_buffers")
        self.total_weight = 0.0
        self._outcome: StepOutcome | None = None
        self._averages: list[tuple[Tensor, Tensor | None]] = []

    # ------------------------------------------------------------------ a step

    def average(self, number: int, *, yields: bool = False) -> Header:
        """Runs the step's units until the step is committed, and logs the values that they recorded.

        Args:
            number: Number of the optimizer.
            yields: Not used: all members make the same collectives.
        """
        loader, logs, module = self._loader(), self._logs, self._trainer.lightning_module
        assert loader.current is not None
        attempt = self._attempts(loader.current)
        header = self._engine.step_by_units(
            attempt,
            section=number,
            hyper=hyper_words(self._trainer.optimizers),
            order=loader.order,
            state_hash=self.comparison.hash if self.comparison is not None else "",
        )
        self.total_weight = header.total_weight
        outcome = self._outcome = attempt.outcome(header)
        self._averages = [(p, p.grad) for p in module.parameters()]
        logs.replay(outcome.extra, {j: weight for j, (_, weight) in outcome.losses.items()})
        self._engine.losses.add(torch.tensor(outcome.loss), self.total_weight)
        self._engine.losses.tell(header.step)
        return header

    def output(self) -> dict[str, Any]:
        """Returns the output of the step's `training_step`, which is the same at all members; if no unit had a loss,
        one of a step that is skipped.
        """
        assert self._outcome is not None
        if self.total_weight <= 0:  # Lightning refuses None where there are several members
            return {"loss": self.nothing(), IDLE_KEY: False}
        double = self._trainer.lightning_module.dtype == torch.float64
        wide = torch.float64 if double else torch.float32
        return {"loss": torch.tensor(self._outcome.loss, dtype=wide, device=self._trainer.strategy.root_device)}

    def backward(self, loss: Tensor) -> Tensor:
        """Stores the step's averages in `.grad`, since Lightning has zeroed it, with Lightning's hooks before and
        after; does nothing if no unit had a loss.
        """
        precision, module = self._trainer.precision_plugin, self._trainer.lightning_module
        if self.total_weight <= 0:
            return loss
        loss = precision.pre_backward(loss, module)
        for parameter, average in self._averages:
            parameter.grad = average
        self._averages = []
        return precision.post_backward(loss, module)

    def clip(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips this member's gradients by the norm of the whole model's gradient, which the header gives."""
        assert self._outcome is not None
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        scale_gradients(parameters, clip_coefficient(self._outcome, float(clip_val)))

    # ------------------------------------------------------------------ what else a session asks of steps

    def stepping(self) -> AbstractContextManager[None]:
        return nullcontext()

    def number(self, optimizer: Optimizer) -> int:
        return 0

    def must_average(self, number: int) -> bool:
        """Returns True: each batch of the loop is a slot."""
        return True

    def holds_average(self, number: int) -> bool:
        return False

    def stepped(self, number: int) -> None:
        """Does nothing: the optimizer steps with each batch."""

    def gradients(self) -> dict[str, Any]:
        """Returns an empty dict: no gradient is kept beyond the batch."""
        return {}

    def adopt_gradients(self, given: object) -> None:
        """Does nothing: no gradient is kept beyond the batch."""

    def nothing(self) -> Tensor:
        """Returns the loss to report if no unit gave one."""
        return torch.zeros((), device=self._trainer.strategy.root_device)

    def forget_accumulation(self) -> None:
        self._averages = []

    def put_back(self) -> None:
        """Does nothing: averaged buffers are put back at each attempt."""

    reset = close = forget_accumulation
