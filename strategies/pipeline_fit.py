"""Runs one fit's part in pipelines: asks for a plan when joining, and runs each step as units of micro-batches.

Theory of operation. One batch of Lightning's loop is one optimizer step of M micro-batches. Its `training_step` runs
the units that this member has in the present view, anew after each recovery. Once the header is there, it returns the
step's mean loss, which is the same at all members, and logs once what units have logged. `backward` puts the averages
where an optimizer finds them, so that everything after it, such as clipping, is Lightning's as ever. A gradient norm
comes with the header, since no member has all gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from chaos_lightning.data.steps import StepBatch, StepLoader
from chaos_lightning.errors import DryRunError
from chaos_lightning.machine.console import Teller
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.unit_steps import UnitsDone
from chaos_lightning.membership.parts import division, numbers
from chaos_lightning.pipeline.attempts import UnitAttempt
from chaos_lightning.pipeline.borders import BorderExchange
from chaos_lightning.pipeline.checking import check_before_training
from chaos_lightning.pipeline.describe import describe
from chaos_lightning.pipeline.device_memory import DeviceMemory
from chaos_lightning.pipeline.executor import Pass
from chaos_lightning.pipeline.held import HeldModel
from chaos_lightning.pipeline.options import PipelineOptions
from chaos_lightning.pipeline.preview import dry_run, preview_of_view, risk
from chaos_lightning.pipeline.step import PipelineStep
from chaos_lightning.pipeline.told import StepOutcome
from chaos_lightning.pipeline.undo import Undo, undone
from chaos_lightning.planning.pipelines.files import read_job
from chaos_lightning.planning.pipelines.request import PipelineRequest, read_request
from chaos_lightning.planning.pipelines.units import FORWARD
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import Header, View
from chaos_lightning.settings import EngineConfig
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.environment import local_rank
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.metrics import watched
from chaos_lightning.strategies.pipeline_evaluation import PipelineEvaluation
from chaos_lightning.strategies.pipeline_logs import UnitLogs
from chaos_lightning.strategies.pipeline_model import PipelineModel, samples_of
from chaos_lightning.strategies.session import FitHooks, FitSession, gather_by_units
from chaos_lightning.strategies.stepping import weight_of
from chaos_lightning.strategies.unit_stepper import UnitStepper

_log = logging.getLogger("chaos_lightning")


class LoggedLayers:
    """Layers of a chain (`Layers` in pipeline/executor.py) that record what each unit logs.

    Args:
        model: Model that has the chain.
        logs: Records what units log.
    """

    def __init__(self, model: PipelineModel, logs: UnitLogs) -> None:
        self._model, self._logs = model, logs
        model.chain.aside = logs.aside

    def __len__(self) -> int:
        return len(self._model.chain)

    def run(
        self,
        first: int,
        end: int,
        batch: Any,
        received: Sequence[Tensor],
        specs: str,
        *,
        at: tuple[int, int],
        call: Callable[[Any], Any] | None,
    ) -> Pass:
        """Runs layers as `Layers.run` does, and records what they log as one unit's."""
        with self._logs.unit(at[1], end == len(self), batch):
            return self._model.chain.run(first, end, batch, received, specs, at=at, call=call)


class PipelineFit(FitHooks):
    """Hooks of one fit in which this member owns parts of the model.

    Args:
        trainer: Trainer in fit.
        options: Options of the strategy.
        model: Model of the user.
        memory: Memory of this member's device.
        collectives: Collectives of Lightning, which are refused within units.
    """

    replays = False  # nobody has all gradients

    def __init__(
        self,
        trainer: Trainer,
        options: PipelineOptions,
        model: PipelineModel,
        memory: DeviceMemory,
        collectives: Collectives,
    ) -> None:
        self._trainer, self._options, self.model, self._memory = trainer, options, model, memory
        self._collectives = collectives
        self._loader: StepLoader | None = None
        self._held: HeldModel | None = None
        self._stepper: UnitStepper | None = None
        self._logs: UnitLogs | None = None
        self._step: PipelineStep | None = None
        self._evaluation: PipelineEvaluation | None = None
        self._told = ""
        """Pipelines that the console was told of last, as in the view."""
        self._teller = Teller()
        self._opened = ExitStack()

    # ------------------------------------------------------------------ before the join

    def loader(self, dataloader: Any, **options: Any) -> StepLoader:
        """Returns a loader around the user's training loader, each of whose batches has the micro-batches of an
        optimizer step.
        """
        self._loader = StepLoader(dataloader, micro_batches=self._options.micro_batches, **options)
        return self._loader

    def enter(self, fit: FitSession) -> None:
        self._look()
        self.rest, self.part_of = self.held.rest(), self.model.parts.part_of

    def _look(self) -> None:
        """Runs a first micro-batch to find the model's parts and costs, and checks that its stages give the same result
        as the whole model.

        Raises:
            ConfigurationError, UnsupportedError: The model cannot be cut into stages, or its stages give another result
                than the whole; says why.
        """
        assert self._loader is not None
        trainer, model, options = self._trainer, self.model, self._options
        with undone(model.module):
            batch = model.moved(self._loader.sample())
            model.look(batch)
            with model.muted():
                job = describe(
                    model.chain,
                    model.parts,
                    batch,
                    trainer.optimizers,
                    micro_batches=options.micro_batches,
                    device=trainer.strategy.root_device,
                    device_memory_nbytes=self._memory.nbytes,
                    samples=samples_of(batch),
                    profile=read_job(options.profile) if options.profile else None,
                    around=model.around,
                    say=_log.info,
                )
                with model.around():
                    _log.info("%s", check_before_training(model.chain, model.parts, batch, job))
        shared = {p.removeprefix("shared."): ls for p, ls in model.parts.users.items() if p.startswith("shared.")}
        self.request = PipelineRequest(job, options.policy, options.copies, shared, options.on_lost_parts).to_json()
        self._held = model.held()

    def end_dry_run(self, config: EngineConfig) -> None:
        """In a dry run: prints, once on each node, the plan that the planner would make for this model, and ends the
        process.

        Raises:
            DryRunError: This is a dry run.
        """
        if not self._options.dry_run:
            return
        self._look()
        if local_rank() == 0:
            print(*dry_run(PipelineRequest.from_json(self.request), config), sep="\n", flush=True)
        raise DryRunError

    def tell(self, view: View) -> None:
        """Prints each member's part in the pipelines; after a change, only the number of pipelines and stages."""
        if view.pipelines == self._told:
            return
        first, self._told = not self._told, view.pipelines
        pipelines = division(view).pipelines
        request = PipelineRequest.from_json(self.request)
        if first:
            self._teller.tell(*preview_of_view(request, view))
        elif pipelines is not None:
            lines = risk(pipelines.plan, ends=request.ends_without_parts)
            self._teller.tell(f"pipelines x stages: {pipelines.plan.shape} now", *lines)

    @property
    def words(self) -> dict[str, str]:
        options, model = self._options, self.model
        return {
            "micro-batches of a step": str(options.micro_batches),
            "policy": options.policy,
            "chain": f"{model.chain.path} of {len(model.chain)} blocks",
            "seed of layers": str(model.seed),
        }

    @property
    def held(self) -> HeldModel:
        assert self._held is not None, "the model was not looked at yet"
        return self._held

    def stepper(self, fit: FitSession) -> UnitStepper:
        assert self._loader is not None
        loader = self._loader
        self._logs = UnitLogs(self._trainer, self._collectives, self.model.chain.refuse_placeholders)
        self._stepper = UnitStepper(
            fit.engine, self._trainer, lambda: loader, lambda batch: self._attempts(fit.engine, batch), self._logs
        )
        return self._stepper

    def _attempts(self, engine: Engine, batch: StepBatch) -> RoutedAttempt:
        """Returns this member's attempts at the step that has this batch."""
        assert self._step is not None
        model, logs = self.model, self._logs
        assert logs is not None

        def micro_batch(j: int) -> Any:
            return model.moved(batch.batch(j))

        def weight(j: int) -> float:
            own = micro_batch(j) if hasattr(model.module, "chaos_weight") else None
            return weight_of(model.module, own, batch.index, batch.weight(j))

        model.begin(batch.index)
        attempt = UnitAttempt(
            self._step,
            engine.member_id,
            self._trainer.global_step + 1,
            micro_batch,
            weight,
            batch.spent,
            batch.empty,
            lambda sums: {j: logs.extra(j) for j in sums.weights},
        )
        return RoutedAttempt(attempt, batch)

    def attach(self, fit: FitSession) -> None:
        """Makes the engine run its steps as units of micro-batches."""
        assert self._stepper is not None
        assert self._logs is not None
        engine, gather, logs = fit.engine, partial(gather_by_units, fit), self._logs
        chain, undo = self.model.chain, Undo(self.model.module)
        self._step = step = PipelineStep(
            self.model.module,
            LoggedLayers(self.model, logs),
            BorderExchange(engine.send_border),
            engine.accumulation,
            self.model.parts,
            around=self.model.around,
            device=self._trainer.strategy.root_device,
            timeout_s=engine.config.step_timeout_s,
        )
        step.foresee(read_request(self.request).job)
        engine.attach(UndoneUnits(step, undo, logs, engine), self.held)
        its_logs = UnitLogs(self._trainer, self._collectives, chain.refuse_placeholders, "validation_step")
        self._evaluation = PipelineEvaluation(
            self._trainer, gather, lambda: engine, lambda: step, its_logs, lambda: chain.is_last
        )
        self._opened.enter_context(watched())
        self._opened.enter_context(self.model.users_step.spared())
        precision = self._trainer.precision_plugin
        precision.clip_grad_by_norm = self._stepper.clip  # type: ignore[method-assign]
        self._opened.callback(delattr, precision, "clip_grad_by_norm")

    @property
    def evaluation(self) -> PipelineEvaluation:
        """Validation of this fit, which runs over the same pipelines as training."""
        assert self._evaluation is not None, "the member has not entered the job yet"
        return self._evaluation

    # ------------------------------------------------------------------ while it trains

    def applied(self, fit: FitSession, output: Any) -> None:
        """Takes or frees parts of the model after a step, as their owners may have changed."""
        engine = fit.engine
        engine.stepped()
        view = engine.view
        if view is not None:
            parts = division(view)
            self.held.settle([parts.names[part] for part in numbers(parts.owned(engine.member_id))])

    def restart(self) -> None:
        self.held.restart()

    def restore(self) -> None:
        """Restores the user's module and the precision plugin to what they were before fit. Idempotent."""
        self._opened.close()
        self._teller.close()
        self.model.close()


class RoutedAttempt:
    """Attempts of one member at a step, before each of which the loader is told which micro-batches will be asked for.

    Args:
        attempt: Attempts, of which each runs this member's units in a view.
        batch: Micro-batches of the step.
    """

    def __init__(self, attempt: UnitAttempt, batch: StepBatch) -> None:
        self._attempt, self._batch = attempt, batch

    def __call__(self, view: View, seq: int) -> UnitsDone:
        """Runs this member's units in a view."""
        pipelines, batch = division(view).pipelines, self._batch
        if pipelines is not None:
            units = pipelines.units(self._attempt.member, batch.empty)
            batch.expect(u.micro_batch for u in units if u.kind == FORWARD)
        return self._attempt(view, seq)

    def outcome(self, header: Header) -> StepOutcome:
        """Returns the outcome of the committed step."""
        return self._attempt.outcome(header)


class UndoneUnits:
    """Runs the engine's units (`UnitStep`, member/unit_steps.py), and undoes what user code changed if an attempt is
    dropped.

    Args:
        step: Step that runs the units.
        undo: Undo of what user code changes in the module.
        logs: Records what units log.
        engine: Engine of this member.
    """

    def __init__(self, step: PipelineStep, undo: Undo, logs: UnitLogs, engine: Engine) -> None:
        self._step, self._undo, self._logs, self._engine = step, undo, logs, engine
        self.sample_s = step.sample_s
        self.borders, self.reduced, self.end = step.borders, step.reduced, step.end
        self.commit, self.restart, self.step_time = step.commit, step.restart, step.step_time

    @property
    def speed(self) -> float:
        return self._step.speed

    def remember_base(self) -> None:
        """Saves a copy of what user code may change in the module, as of the last committed header."""
        self._step.remember_base()
        self._undo.remember()
        self._logs.forget()

    def drop(self) -> None:
        """Drops an attempt at a step, and restores what it has changed in the module."""
        if begun := self._step.executor.begun:
            spans = union((j, j + 1) for j in begun)
            self._engine.events.emit("units_dropped", seq=self._engine.header.seq + 1, micro_batches=spans)
        self._step.drop()
        self._undo.restore()
        self._logs.forget()
