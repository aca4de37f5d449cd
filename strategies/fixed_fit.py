"""Runs one fit's part in a job whose batch has a fixed size: each batch of the loop is one optimizer step.

Theory of operation. The loader yields whole steps, whose samples do not depend on the members (data/steps.py). For each
the member computes its share, by a `training_step` for each of its pieces, anew after a recovery (pipeline/shares.py).
The step's mean loss and what pieces log are equal at all members. Random numbers of a piece are keyed by the step and
the piece's number, so under `fixed:N/B` they do not depend on who computes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from chaos_lightning.data.pieces import SharePiece
from chaos_lightning.data.steps import StepBatch, StepLoader, steps_of
from chaos_lightning.member.drift import StateComparison
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.pipeline.shares import ShareAttempt, ShareStep, UserStep
from chaos_lightning.pipeline.told import ToldStep
from chaos_lightning.planning.batch import MEMBER, BatchRule
from chaos_lightning.protocol.types import Header, Kind
from chaos_lightning.settings import EngineConfig
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.pipeline_logs import UnitLogs
from chaos_lightning.strategies.refusals import Refusal
from chaos_lightning.strategies.session import FitHooks, FitSession
from chaos_lightning.strategies.stepping import weight_of
from chaos_lightning.strategies.unit_stepper import UnitStepper
from chaos_lightning.strategies.users_step import UsersStep

FIXED_TABLE: tuple[Refusal, ...] = (
    Refusal(
        "accumulation beside a batch of fixed size",
        "a step has the samples that `batch` names, in as many micro-batches as members need; leave "
        "accumulate_grad_batches at 1 and take batch=fixed:N, with N the loader's batch times what you accumulated",
        lambda t: f"accumulate_grad_batches={n}" if (n := t.accumulate_grad_batches) != 1 else "",
    ),
    Refusal(
        "manual optimization",
        "a member's share of a step may take several calls of training_step, and only your code knows after which of "
        "them optimizers step; use automatic optimization, or batch=member",
        lambda t: "" if t.lightning_module.automatic_optimization else "automatic_optimization = False",
    ),
)
"""Refusals where a batch has a fixed size, beside those of strategy `chaos`."""


def warn_unused_fits(config: EngineConfig) -> None:
    """Warns of a setting `fits` that has no effect, as another one says how much a member computes at once."""
    of_loader = config.batch == MEMBER
    if config.fits and (of_loader or "/" in config.batch):
        why = "the loader's batch is computed at once" if of_loader else "a micro-batch is computed at once"
        warnings.warn(f"fits={config.fits} is not honoured with batch={config.batch!r}: {why}", stacklevel=2)


class FixedFit(FitHooks):
    """Hooks of one fit in which all members share a batch of fixed size.

    Args:
        trainer: Trainer in fit.
        config: Configuration of the engine, with the rule and what fits here.
        collectives: Collectives of Lightning, which are refused within a step.
        seed: Seed of random numbers; equal at all members.
    """

    def __init__(self, trainer: Trainer, config: EngineConfig, collectives: Collectives, seed: int) -> None:
        self._trainer, self._config, self._collectives = trainer, config, collectives
        self._randomness = Randomness(seed, trainer.strategy.root_device)
        self._users_step = UsersStep(trainer)
        self._opened = ExitStack()
        self._loader: StepLoader | None = None
        self._logs = UnitLogs(trainer, collectives, _accepts)
        self._step: ShareStep | None = None
        self._rule = BatchRule(1)
        self._fits = 1

    @property
    def batch(self) -> str:  # type: ignore[override]
        return str(self._rule)

    def loader(self, dataloader: Any, **options: Any) -> StepLoader:
        """Returns a loader around the user's training loader, each of whose batches is an optimizer step."""
        self._rule, self._fits, self._loader = steps_of(dataloader, self._config.batch, self._config.fits, **options)
        return self._loader

    def stepper(self, fit: FitSession) -> UnitStepper:
        return UnitStepper(
            fit.engine,
            self._trainer,
            lambda: self._step_loader,
            lambda batch: self._attempts(fit, batch),
            self._logs,
            StateComparison(fit.engine),
        )

    @property
    def _step_loader(self) -> StepLoader:
        assert self._loader is not None
        return self._loader

    def attach(self, fit: FitSession) -> None:
        """Makes the engine run its steps as shares of a batch."""
        self._step = ShareStep(self._trainer.lightning_module, fit.engine.accumulation, self._logs.forget)
        fit.engine.attach(self._step)
        self._opened.enter_context(self._users_step.spared())

    def restore(self) -> None:
        """Restores the user's module to what it was before fit. Idempotent."""
        self._opened.close()

    def said(self, fit: FitSession, header: Header) -> Sequence[bytes]:
        return [ToldStep.decode(answer).handed for answer in header.answers] if header.kind is Kind.STEP else ()

    def _attempts(self, fit: FitSession, batch: StepBatch) -> ShareAttempt:
        """Returns this member's attempts at the step that has these samples."""
        assert self._step is not None
        module, scaler = self._trainer.lightning_module, getattr(self._trainer.precision_plugin, "scaler", None)
        number = self._trainer.global_step + 1  # counts on after a checkpoint was loaded
        self._users_step.begin(batch.index)

        def loss(piece: SharePiece, data: Any) -> Tensor | None:
            with self._randomness.stream("step", number, piece.number):
                moved = self._users_step.moved(data)
                with self._logs.unit(piece.number, True, moved), self._users_step.around():
                    output = self._users_step(moved)
            return ClosureResult.from_training_step_output(output).closure_loss  # refuses what Lightning refuses

        def backward(scaled: Tensor) -> None:
            module.backward(scaler.scale(scaled) if scaler is not None else scaled)

        user = UserStep(
            loss,
            backward,
            lambda data, n: weight_of(module, data, batch.index, n),
            self._logs.extra,
            lambda: fit.handover.says(fit.engine, alike=True),
        )
        return ShareAttempt(self._step, user, fit.engine.member_id, batch, self._fits, scales=scaler is not None)


def _accepts(value: object, what: str) -> None:
    """Accepts every value: the whole model is here."""
