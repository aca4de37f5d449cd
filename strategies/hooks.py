"""Hooks of one fit: the places in its order at which outer sync and pipelines do something of their own.

Theory of operation. A `FitSession` has one `FitHooks`. Those here are for members that have the whole model, in a job
that is none of another one's clusters, so most do nothing. `ElasticPart` (elastic.py) is a rank's part in an outer job,
and `PipelineFit` (pipeline_fit.py) that of a member which owns some of the layers; no fit is both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.data.source import AssignmentSource
from chaos_lightning.data.steps import JobLoader, StepLoader
from chaos_lightning.machine.signals import ExitSignals, Handler
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.training import least_batch
from chaos_lightning.planning.tape import Tape
from chaos_lightning.protocol.types import Header, View
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.settings import EngineConfig
from chaos_lightning.strategies.fingerprint import seed_of
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.stepping import Stepper

if TYPE_CHECKING:
    from chaos_lightning.strategies.pipeline_fit import PipelineStepper
    from chaos_lightning.strategies.session import FitSession

DataMode = Literal["shared", "local"]
TapeNow = Callable[[], Tape | None] | None


class FitHooks:
    """See the module.

    Args:
        trainer: Whose fit this is.

    Attributes:
        replays: Newcomers may replay steps.
        owns_result: The members of this job have its final state, and schedules go by its steps.
        leave_on_signals: Signals leave, unless the strategy's own option says no.
        again: Effect of a second signal, in words.
        request: Pipelines that this member asks for (`PipelineRequest.to_json`); "": it has the whole model.
        part_of: See `Engine.prepare`.
        ended: The members stop in the middle of an epoch.
        through: The loop of all members is over; perhaps it was before this one came.
    """

    replays = owns_result = leave_on_signals = True
    again = "once more aborts"
    request = ""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.part_of: Mapping[str, str] | None = None
        self.ended = self.through = False

    def begin(self) -> None: ...  # before the first batch, when set-up is over
    def end_dry_run(self, config: EngineConfig) -> None: ...  # before there is an engine
    def attach(self, fit: FitSession) -> None: ...  # between the engine's `prepare` and its `join`
    def restart(self) -> None: ...  # before this member joins again: what it holds is void
    def entered(self) -> None: ...  # the engine is in the job, with its state
    def adopt(self, given: Mapping[str, Any]) -> None: ...  # a newcomer takes over what `clock_state` gave
    def committed(self, header: Header) -> None: ...  # a slot is committed, or this member came in at it
    def tell(self, view: View) -> None: ...  # the members of a view are in; at rank 0
    def stepped(self, header: Header) -> None: ...  # a step is committed, and the optimizer has yet to take it
    def applied(self, fit: FitSession, output: Any) -> None: ...  # it has, and its closure gave `output`
    def show_base(self) -> None: ...  # validation begins
    def show_own(self) -> None: ...  # callbacks have judged a validation
    def fenced(self) -> None: ...  # this member was put out
    def leave(self) -> None: ...  # the last member goes
    def finish(self, fit: FitSession) -> None: ...  # the loop is over; idempotent
    def close(self) -> None: ...  # this member is out of the job, in which others may go on; idempotent
    def restore(self) -> None: ...  # fit is over, and the user's objects are to be what they were; idempotent

    # ------------------------------------------------------------------ hooks that answer

    def loader(
        self, dataloader: Any, mode: DataMode, seed: int | None, source: AssignmentSource, tape: TapeNow = None
    ) -> ElasticLoader | StepLoader:
        """Wraps the user's training loader."""
        least = least_batch(self._trainer.lightning_module)
        return ElasticLoader(
            dataloader, mode=mode, seed=seed_of(seed), source=source, tape=tape, as_lightning=True, least=least
        )

    def enter(self, engine: Engine, loader: JobLoader) -> tuple[StateAccess | None, list[str] | None]:
        """Returns what travels beside the training state, and where members own parts of the model the names of the
        buffers that all have. Before the engine's `prepare`."""
        return None, None

    def stepper(self, fit: FitSession) -> Stepper | PipelineStepper:
        """Makes this member's steps."""
        return Stepper(
            fit.engine,
            self._trainer,
            fit.collectives,
            lambda: fit.elastic.current,
            lambda: fit.elastic.spent(),
            lambda: fit.elastic.order,
            fit.pass_is_over,
            lambda: self.says(fit.handover.says(fit.engine)),
        )

    def exit_signals(self, first: Handler, last: Callable[[], bool]) -> ExitSignals:
        """The signals that ask this member to leave. `last`: whether no other member holds what this one does."""
        return ExitSignals(first)

    @property
    def words(self) -> dict[str, str]:
        """Words that must be equal at all members."""
        return {}

    def clock_state(self) -> dict[str, Any]:
        """Returns what travels beside the loops' counters."""
        return {}

    def ends(self) -> bool:
        """Whether the members stop between two batches, in the middle of an epoch."""
        return self.ended

    def waits(self, fit: FitSession) -> bool:
        """Whether the members may not train now; then they have met once, between two batches."""
        return False

    @property
    def turned(self) -> bool:
        """Whether other samples are in than those that the present pass is on."""
        return False

    def begins_pass(self, loader: JobLoader) -> bool:
        """A pass begins; returns whether the loader was told here what it goes over."""
        return False

    def total(self) -> float | None:
        """Returns the number of batches of this epoch; None: the loader says."""
        return None

    def training_step(self, fit: FitSession, run: Callable[[], Any], batch: Any) -> Any:
        """A batch of the loop: the user's step, or what takes its place."""
        return whole(fit.stepper).training_step(run, batch)

    def backward(self, loss: Tensor, averaged: bool) -> Tensor | None:
        """Returns the loss if there is no backward pass to be made: the step's average is there, if at all."""
        return None

    def says(self, logged: bytes) -> bytes:
        """Returns what this member says beside its gradient, given what it hands over of its log."""
        return logged

    def said(self, header: Header) -> Sequence[bytes]:
        """Returns what members have handed over of their logs, in rank order."""
        return header.answers

    @property
    def writes(self) -> bool:
        """Whether a member of this job logs and writes files; else one of another cluster does."""
        return True

    @property
    def run(self) -> str:
        """Id of the run where others than this job's members may go on with its files; "": there are none."""
        return ""

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the model's part of a checkpoint, which `make` makes."""
        return make()


def whole(stepper: Stepper | PipelineStepper) -> Stepper:
    """The stepper of a member that has the whole model."""
    assert isinstance(stepper, Stepper)
    return stepper
