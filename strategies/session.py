"""One fit's part in a job: coming in, safe points, going, and everything in between.

Theory of operation. Setting up, every process is alone: nobody knows for sure yet whether it founds the job or joins
one in epoch 3 (place.py says what it counts as), and a newcomer's set-up runs many barriers that the running
members never repeat. When the training loop asks for its first batch, all counters are at rest, and there the member
enters: a founder begins, a newcomer takes over state and counters from the others. From then on each optimizer step is
a slot of the job, each collective too, and each fetch of a batch is a *safe point*, the only place where newcomers are
let in, where a member that was fenced joins again, and where one that left stops. After each commit the epoch's length
is refitted (loops.py), before Lightning asks whether the batch was the last one.

A member is in one of four conditions: not yet in, in the job, *void* (fenced: it runs on without collectives until its
next safe point, and joins again there), *departed* (it left: fit ends at the next safe point, without the hooks of an
epoch's end, which would judge half an epoch).
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from torch import Tensor
from torch.optim import Optimizer

from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.data.steps import StepLoader
from chaos_lightning.errors import (
    DepartedError,
    DisagreementError,
    DryRunError,
    FencedError,
    FinishedJobError,
    RefusedError,
    UnsupportedError,
)
from chaos_lightning.machine.signals import ExitSignals, aside, say
from chaos_lightning.member import training
from chaos_lightning.member.engine import OTHERS_SAVE, Engine
from chaos_lightning.member.keeping import LoadedCheckpoint, SavedCheckpoints
from chaos_lightning.member.process_group import warn_who_asks
from chaos_lightning.member.training import least_batch
from chaos_lightning.member.unit_steps import Attempt
from chaos_lightning.protocol.types import GENESIS, Header, Kind
from chaos_lightning.settings import ChaosOptions, EngineConfig
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.data import EngineSource, TrainLoader
from chaos_lightning.strategies.elastic import ElasticPart
from chaos_lightning.strategies.environment import ChaosEnvironment
from chaos_lightning.strategies.evaluation import Evaluation
from chaos_lightning.strategies.files import LogPlace
from chaos_lightning.strategies.fingerprint import advice, fingerprint_of, seed_of
from chaos_lightning.strategies.handover import Handover
from chaos_lightning.strategies.lengths import Lengths
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import (
    ENDLESS,
    Suspension,
    at_epoch,
    batches_begun,
    epoch_of,
    forget_agreement,
    loops_manifest,
    make_up_for_end,
    refit,
    reload_epochs,
    remake_validation_loaders,
    rolled_back,
    save_last_again,
    skip_validation,
    start_clocks,
    training_loader,
    uncount,
    why_over,
)
from chaos_lightning.strategies.metrics import MetricRoute
from chaos_lightning.strategies.pipeline_fit import PipelineFit, PipelineStepper
from chaos_lightning.strategies.place import Place
from chaos_lightning.strategies.replay import LightningReplay
from chaos_lightning.strategies.schedules import SampleCount
from chaos_lightning.strategies.state import KeptState, LightningState
from chaos_lightning.strategies.stepping import Stepper
from chaos_lightning.strategies.writer import Writer

DataMode = Literal["shared", "local"]
_FOUNDING = "what founders begin from"
_log = logging.getLogger("chaos_lightning")


class NoStep(Exception):
    """The optimizer step that is under way does not take place."""


class FitSession:
    """See the module. One per call of `fit`.

    Args:
        trainer: Whose fit this is.
        config: For the engine.
        place: Who this process is until it enters the job.
        options: The strategy's.
        data: "shared" or "local".
        assigns_validation: Whether loaders of validation are divided where that can be.
        environment: Told who this process is.
        collectives: Exchanged through this session.

    Attributes:
        in_job: Collectives reach the others.
        departed: This member left.
        gone: It did, and others go on without it.
        evaluation: Whom validation is divided among.
        handover: What members have logged and counted in this epoch.
        writer: Whether this member logs and writes files.
        lengths: How long an epoch is.
        stepped: Number and header hash of the last committed optimizer step.
        checkpoints: Those that the present state goes on from.
        asked: The signal that has asked this member to leave, if one has.
        closed: fit is over.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: EngineConfig,
        place: Place,
        options: ChaosOptions,
        data: DataMode,
        assigns_validation: bool,
        environment: ChaosEnvironment,
        collectives: Collectives,
    ) -> None:
        self.trainer = trainer
        self.config = config
        self._place = place
        self.in_job = False
        self.departed = self.gone = self.closed = False
        self.asked: signal.Signals | None = None
        self.stepped = (0, "")
        self.checkpoints = SavedCheckpoints()
        self._options = options
        self._data = data
        self._assigns_validation = assigns_validation
        self.collectives = collectives
        self.evaluation = Evaluation(trainer, collectives, lambda: self.members, lambda: self.engine.member_id)
        metrics = MetricRoute(trainer, collectives.exchange, lambda: self.in_job)
        self.handover = Handover(trainer, metrics, trainer.strategy.reduce)
        self.writer = Writer(
            trainer, environment, lambda: self.in_job, self.alone, lambda: self.outer.job_id if self.outer else ""
        )
        self.lengths = Lengths(trainer, config.min_nodes, local=data == "local")
        self._source = EngineSource(config.name)
        self._engine: Engine | None = None
        self._loader: TrainLoader | None = None
        self._state: LightningState | None = None
        self._stepper: Stepper | PipelineStepper | None = None
        self._samples = SampleCount(())
        self._switch_as_before: Callable[[], None] = lambda: None
        self._asks_as_before = warn_who_asks(
            environment.world_size, "trainer.is_global_zero, trainer.global_rank, or rank_zero_only of Lightning"
        )
        self._signals = ExitSignals(self._on_signal)
        self._void: Suspension | None = None
        self._boundary_asked = False
        self._keep_due = False
        self.outer: ElasticPart | None = None
        """This fit's part in an outer job, if the members are ranks of one of its clusters."""
        self.pipeline: PipelineFit | None = None
        """This fit's part in pipelines, if members own parts of the model."""
        self._first = ""
        """Member that was rank 0 after the slot before."""
        self._within: bool | None = None
        """Whether the closure that runs has averaged (True) or its step does not take place; None: it has not come to
        that."""
        self._outer_due: Header | None = None
        """A step of which that has yet to be told."""
        self.through = False
        """The loop of all ranks of a cluster is over; perhaps it was before this one came."""
        self._outer_over = False
        """This rank has stayed until the outer job was over."""
        self._uncommitted: dict[str, Any] | None = None
        """Counters without the batch in which this member left, if no step uses it."""

    # ------------------------------------------------------------------ parts

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the member has not entered the job yet"
        return self._engine

    @property
    def entered(self) -> bool:
        return self._engine is not None

    @property
    def members(self) -> tuple[str, ...]:
        """Ids of all members in rank order, by the last slot; none outside the job."""
        view = self.engine.view if self.in_job else None
        return view.ids() if view is not None else ()

    @property
    def void(self) -> bool:
        """Fenced: the training state means nothing until this member has joined again."""
        return self._void is not None

    @property
    def stepper(self) -> Stepper | PipelineStepper:
        assert self._stepper is not None
        return self._stepper

    @property
    def state(self) -> LightningState:
        assert self._state is not None
        return self._state

    @property
    def elastic(self) -> ElasticLoader | StepLoader:
        assert self._loader is not None
        return self._loader.elastic

    def wrap(self, dataloader: Any) -> TrainLoader:
        """The training loader that Lightning gets instead of the user's; a new one when loaders are reloaded."""
        outer = self.outer
        seed = seed_of(self._options.seed if outer is None or outer.seed is None else outer.seed)
        tape = outer.tape if outer and outer.shared else None
        elastic: ElasticLoader | StepLoader
        if self.pipeline is not None:
            elastic = self.pipeline.loader(dataloader, seed, self._source)
        else:
            elastic = ElasticLoader(
                dataloader,
                mode=self._data,
                seed=seed,
                source=self._source,
                tape=tape,
                as_lightning=True,
                least=least_batch(self.trainer.lightning_module),
            )
        if self._loader is not None:
            self.elastic.close()
        self._loader = TrainLoader(elastic, self.trainer, self)
        self.lengths.asked(self._total())
        if self._state is not None:
            self._state.loader = elastic
        return self._loader

    def _reload(self, made_in: tuple[float, float]) -> None:
        """Makes loaders anew if the state that was taken over is of a later epoch (`reload_dataloaders_every_n_epochs`)
        than this member's. Lightning goes on with the training loader that it has, so the new one takes the place of
        what that one wraps.
        """
        trainer = self.trainer
        if not trainer.reload_dataloaders_every_n_epochs:
            return
        training, validation = reload_epochs(trainer)
        if training != made_in[0]:
            held = self._loader
            assert held is not None
            with at_epoch(trainer, training):
                held.elastic = training_loader(trainer).elastic
            held.restart()
            self._loader = held
        if validation != made_in[1]:
            with at_epoch(trainer, validation):
                remake_validation_loaders(trainer)

    def warn_of_lost_place(self) -> None:
        """Warns of a checkpoint within an epoch that does not say where the data stood."""
        if self._loader is not None:
            self._loader.warn_of_lost_place()

    def begin_pass(self, epoch: int) -> None:
        """The loader begins an epoch."""
        if self.outer and self.outer.shared:
            self.elastic.set_epoch(self.outer.begins())
        elif self.entered and self.trainer.limit_train_batches == 1.0:
            training.tell_epoch(self.engine, self.elastic, epoch)

    def note_checkpoint(self, path: str) -> None:
        """A file of this member's state leaves the job."""
        step, head = self.stepped
        self.engine.events.emit("checkpoint", path=path, step=step, head=head)

    # ------------------------------------------------------------------ coming in

    def _enter(self) -> None:
        trainer = self.trainer
        if self.pipeline is not None:
            self.pipeline.end_dry_run(self.config)
        engine = Engine(self.config)
        self._engine = self._source.engine = engine
        extra = {
            "syncs": lambda: sorted(self.collectives.syncs),
            "gradients": lambda: self.stepper.gradients(),
            "files": lambda: list(self.writer.told),
            "clock": lambda: self.outer.clock.manifest() if self.outer else {},
            "through": lambda: self.through,
            "checkpoints": lambda: self.checkpoints.heads,
            "handover": lambda: self.handover.manifest(),
        }
        outer = self.outer
        batch = self.elastic.batch * trainer.accumulate_grad_batches
        beside = outer.enter(engine, batch, self.elastic) if outer else None
        rest = self.pipeline.look() if self.pipeline is not None else None
        self._state = LightningState(
            trainer, self.elastic, trainer.strategy.reduce, extra, self._adopt_extra, beside, self._reload, rest
        )
        self._stepper = make_stepper(self, engine)
        self._samples = SampleCount(() if outer else trainer.lr_scheduler_configs)
        self._switch_as_before = training.switch_quickly()
        part_of = self.pipeline.model.parts.part_of if self.pipeline is not None else None
        engine.prepare(sections=self._stepper.sections, buffers=self._stepper.buffers, part_of=part_of)
        if self.pipeline is not None:
            self.pipeline.attach(engine, partial(gather_by_units, self))
        self.handover.fits_beside(sum(p.nbytes for section in self._stepper.sections for _, p in section.params))
        epoch = epoch_of(trainer)
        if outer:
            self._signals = outer.exit_signals(self._on_signal, lambda: self._is_last and not self.gone)
        if self._options.leave_on_signals and (outer is None or outer.leave_on_signals):
            self._signals.install()
        try:
            engine.join(
                fingerprint={
                    **fingerprint_of(trainer, self.elastic, assigns_validation=self._assigns_validation),
                    **self.lengths.words(),
                    **(outer.words if outer else {}),
                    **(self.pipeline.words if self.pipeline else {}),
                },
                quota=self.elastic.quota,
                accumulate=trainer.accumulate_grad_batches,
                state=self._state,
                # A version is no function of gradients, and nobody has all of them where members own parts.
                replay=None if outer or self.pipeline else LightningReplay(trainer),
                pipelines=self.pipeline.request if self.pipeline else "",
                loaded=self.checkpoints.loaded
                or (LoadedCheckpoint() if trainer.ckpt_path is not None or trainer.global_step > 0 else None),
            )
        except RefusedError as error:
            raise RefusedError(f"{error}{advice(str(error), self.config)}") from error
        self.writer.logs.hold(trainer.loggers)
        self._entered(epoch)

    def _come_in(self) -> None:
        """Enters, or joins again; who is asked to leave meanwhile waits for nothing and is in no view."""
        try:
            if self.entered:
                self._reenter()
            else:
                self._enter()
        except DepartedError as error:
            if not self.engine.leaving:
                raise
            _log.warning("%s; fit ends here, and what it was to train is not trained", error)
            self._depart()
        except (FinishedJobError, DryRunError):
            self.gone = True  # what callbacks would save now is not the job's
            raise

    def _reenter(self) -> None:
        """Joins again after being fenced."""
        assert self._void is not None
        epoch = epoch_of(self.trainer)
        void, self._void = self._void, None
        void.end(self.trainer)
        self.stepper.reset()
        self.handover.forget()
        if self.pipeline is not None:
            self.pipeline.restart()
        self.engine.rejoin(self.state)
        self._entered(epoch)

    def _entered(self, epoch_before: int) -> None:
        trainer, engine = self.trainer, self.engine
        assert self._loader is not None
        self._boundary_asked = False
        self._place.leave()
        if engine.role == "late":  # the job is finished, and its members write: fit ends here, with the final state
            self.departed = self.gone = True
            self._step_aside()
            skip_validation(trainer)
            return
        self._loader.restart()
        if self.outer:
            self.outer.entered()
        self.in_job = True
        fresh = engine.role == "founder" and not engine.resumed
        start_clocks(trainer, fresh=engine.role == "founder")
        if engine.role == "founder":
            self.writer.told = LogPlace()  # what was kept with a state is of the job before
        self._samples.begin(engine.header.ledger)
        self._observe(fresh=fresh)
        if not fresh and not self.through and epoch_of(trainer) != epoch_before:
            # Every process has seen this hook for the epoch that it is in.
            with self.alone():
                _call_callback_hooks(trainer, "on_train_epoch_start")
                _call_lightning_module_hook(trainer, "on_train_epoch_start")
        if fresh and self.elastic.ledger.streams:
            engine.events.emit("resumed", step=trainer.global_step, ledger=self.elastic.ledger.streams)
        self.stepped = (engine.header.step, engine.header.hash)
        self.writer.promote_if_due(fresh=fresh)
        if self.pipeline is not None and engine.header == GENESIS:
            self.gather(_FOUNDING, b"")  # parts move before the first batch, counters among them
        self._refit()

    def _adopt_extra(self, extra: Mapping[str, Any]) -> None:
        self.collectives.syncs = set(extra["syncs"])
        self.stepper.adopt_gradients(extra["gradients"])
        self.writer.told = LogPlace(*extra["files"])
        self.through = extra["through"]
        self.handover.adopt(extra["handover"])
        self.checkpoints.heads = extra["checkpoints"]
        if self.outer:
            self.outer.clock.adopt(extra["clock"])

    # ------------------------------------------------------------------ the safe point

    def safe_point(self) -> None:
        """Between two batches, at a safe point: all counters are at rest. StopIteration once this member has left."""
        if self.departed:
            if self._keep_due:
                self._keep()
            raise StopIteration
        if not self.entered or self.void:
            self._come_in()
        if self.departed:
            raise StopIteration
        if not self.in_job:
            return
        if self.outer and self.through:  # the others are past all that follows an epoch: it meets them in `finish`
            self.outer.ended, self.in_job = True, False
            raise StopIteration
        if self.state.ended:
            self.state.ended = False
            make_up_for_end(self.trainer)
            raise StopIteration
        if not self.elastic.at_safe_point and not self._give_up_accumulation():
            self._check_stepped()
            return
        while True:
            self._let_others_in()
            if self.departed:
                raise StopIteration
            if self.outer and self.outer.cluster.ends:
                self.outer.ended = True
                raise StopIteration
            if not self._waits_for_versions():
                break
        self.writer.promote_if_due(fresh=False)
        self.writer.tell_files(lambda: self.members)
        if isinstance(self.stepper, Stepper):  # else parts are compared, in the step itself
            self.stepper.comparison.take(self.state)
        assert self._loader is not None
        if self.outer and self.outer.turned:
            self._loader.restart()
        self._loader.begin()
        self._refit()

    def _let_others_in(self) -> None:
        try:
            self.engine.serve(self.state)
            while self._boundary_asked and not self.engine.out:
                self._boundary_asked = False
                self.engine.boundary(self.state)
                self._observe()
        except FencedError as error:
            self.fenced(error)
            if not self.through:
                self._come_in()
        except DepartedError:
            self._depart()
        self._check_departure()

    def _waits_for_versions(self) -> bool:
        """Whether the cluster may not train now; then its ranks have met once."""
        outer = self.outer
        waits = outer is not None and outer.cluster.waits
        if outer is not None:
            outer.patient(waits)
            if waits and not outer.meet(self.gather) and self.void:
                self._come_in()
        return waits

    def _tell_outer(self, outer: ElasticPart, header: Header, output: Any) -> None:
        """A step of the cluster. Where all that is leased is used, it waits here until there is more, or until the
        epoch is over: then the batch was its last one, and what is validated holds all of it. Or this rank leaves."""
        outer.stepped(header, self.engine.contributors, [split(said)[0] for said in header.answers], output)
        while self.in_job and outer.waits_for_samples:
            outer.patient(waits=True)
            if not outer.meet(self.gather, in_batch=True):
                return
            self._check_departure(stepped=True)  # as with the step: what is kept is kept at the next safe point
        if self.departed:
            return
        if outer.cluster.ends and outer.shared:
            skip_validation(self.trainer)
        self._refit()

    def _give_up_accumulation(self) -> bool:
        """Whether a new pass begins although an accumulation is open: `on_train_batch_start` returned -1 and so ended
        the epoch. What the accumulation used is in no step, and not used."""
        assert self._loader is not None
        if self._loader.under_way or self.stepper.manual is not None:
            return False
        self.elastic.give_up()
        self.stepper.forget_accumulation()
        return True

    def _check_stepped(self) -> None:
        """In the middle of an accumulation, or past its end: then a step was left out."""
        current = self.elastic.current
        if self.stepper.manual is None and current is not None and current.last:
            raise UnsupportedError(
                "an accumulation went by without an optimizer step, although Lightning said it was due; "
                "LightningModule.optimizer_step must call optimizer.step(closure=...) each time (for other "
                "plans there is "
                "manual optimization)"
            )

    # ------------------------------------------------------------------ slots

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[..., Any]) -> Any:
        """An optimizer's step, with the average between the closure and all that comes after it.

        Args:
            optimizer: One of the Trainer's.
            closure: Lightning's.
            step: Takes the step with the closure that it is given.
        """
        stepper, number = self.stepper, self.stepper.number(optimizer)
        if not self.in_job and not self._applies(number):
            end_unused_batch(self)
            # The step of a void member is thrown away, so torch need not warn that its schedule steps first.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return closure()
        calls, held = 0, not stepper.must_average(number)

        def averaged() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} evaluated its closure twice in one step; each evaluation "
                    "would be a step "
                    "of the whole job. Use an optimizer that evaluates it once"
                )
            return self._close_step(number, closure)

        try:
            output = step(averaged)
        except NoStep:
            end_unused_batch(self)
            return stepper.nothing()
        if self.pipeline is not None:
            self.pipeline.stepped(self.engine)
        due, self._outer_due = self._outer_due, None
        if self.outer and due is not None:
            self._tell_outer(self.outer, due, output)
        if not calls and held:
            stepper.stepped(number)
        elif not calls:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step did not call its closure, so there was nothing to average; its step "
                "must take a closure and call it once"
            )
        return output

    def _close_step(self, number: int, closure: Callable[[], Any]) -> Any:
        """Runs an optimizer's closure, then averages; `.grad` holds the result for all that comes after.

        Returns:
            What the closure gave; None if nobody had a loss, so that there are no gradients.

        Raises:
            NoStep: This member was fenced meanwhile or let go, or its state has drifted from the others'.
        """
        self._within = None
        with self.stepper.stepping():
            result = closure()
        if self._within is False:
            raise NoStep
        if self._within is None and self.stepper.must_average(number):
            self._average(number)
        self.stepper.stepped(number)
        # A scaler fails where there is no gradient; None is what tells it, as it does without the strategy.
        return None if self.stepper.manual is None and self.stepper.total_weight <= 0 else result

    def _average(self, number: int) -> None:
        if not self.in_job:
            raise NoStep
        try:
            header = self._committed(number)
        except FencedError as error:
            self.fenced(error)
            raise NoStep from error
        except DepartedError as error:
            self._depart()
            raise NoStep from error
        self.stepped = (header.step, header.hash)
        self._outer_due = header
        self._observe()
        try:
            if isinstance(self.stepper, Stepper):
                self.stepper.comparison.settle(header)
        except FencedError as error:
            self.fenced(error)
            raise NoStep from error
        self._check_departure(stepped=True)
        if not self.departed:
            self._refit()

    def _committed(self, number: int) -> Header:
        while (header := self.stepper.average(number, yields=self.collectives.owes)).kind is not Kind.STEP:
            self._went_along(header)
        self.collectives.settled()
        return header

    def _went_along(self, header: Header) -> None:
        """The others made a collective that this member, without samples, could not foresee."""
        self._observe()
        self.collectives.went_along(header.name or str(header.kind), header.answers)

    def backward(
        self, loss: Tensor, run: Callable[[Tensor], Tensor], hooks: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """One backward pass, or none if this member has been fenced.

        Args:
            loss: Of the micro-batch.
            run: Makes the pass.
            hooks: Runs what sees gradients after it: an accumulation's last pass ends with the average, before these.
                All members run them then; if nobody had samples, there are no gradients, and none does.
        """
        if self.pipeline is not None:  # also of one that was let go by the step's header, and keeps what it has
            return self.pipeline.backward(loss) if self._within else loss
        if not self.in_job:
            return loss
        try:
            loss = whole(self.stepper).backward(loss, run)
        except FencedError as error:
            self.fenced(error)
        except DepartedError:
            self._depart()
        if hooks is None or not self.in_job:
            return loss
        if not self.stepper.is_last:
            return hooks(loss) if self.stepper.has_passed else loss
        try:
            self._average(0)
        except NoStep:  # Lightning's closure must come to its end
            self._within = False
            return loss
        self._within = True
        return hooks(loss) if self.stepper.total_weight > 0 else loss

    def manual_backward(self, run: Callable[[], None]) -> None:
        """One backward pass of manual optimization and its average, or none if this member is out of the job."""
        if self.in_job:
            whole(self.stepper).manual_backward(run)

    def _pass_is_over(self) -> None:
        """The average of what a backward pass of manual optimization reached."""
        with contextlib.suppress(NoStep):
            for number in self.stepper.manual.reached if self.stepper.manual is not None else ():
                self._average(number)
        end_unused_batch(self)

    def _applies(self, number: int) -> bool:
        """Whether a step may be taken although this member is out of the job: the others take it, too."""
        return self.departed and not self.void and self.stepper.holds_average(number)

    def gather(
        self, name: str, payload: bytes, *, lets_go: bool = False, line: str = ""
    ) -> list[tuple[str, bytes]] | None:
        """Everybody's payload; None if this member is not in the job.

        Args:
            name: Which collective.
            payload: What this member brings.
            lets_go: It is no part of a validation: members may go with it.
            line: Of the user's code that it is for; "": the one that calls now.
        """
        if not self.in_job:
            return None
        before = self.members
        try:
            with meeting(self.state, name):
                answers = self.engine.gather(name, payload, yields=self.collectives.owes, lets_go=lets_go, line=line)
                while self.engine.header.name != name:
                    self._went_along(self.engine.header)
                    answers = self.engine.gather(name, payload, yields=True, lets_go=lets_go, line=line)
            self.collectives.settled()
        except FencedError as error:
            self.fenced(error)
            return None
        except DepartedError:
            self._depart()
            return None
        here = {member for member, _ in answers}
        if lost := [member for member in before if member not in here]:
            _log.warning("%s died before %r, which misses what it had to say", ", ".join(lost), name)
        self._observe()
        return answers

    def _observe(self, *, fresh: bool = False) -> None:
        """A slot committed, or this member came in: who is it now?"""
        engine = self.engine
        self.writer.logs.stable()
        self.handover.metrics.forget_computed()
        self._samples.committed(engine.header.ledger)
        self._boundary_asked |= engine.header.boundary
        if self.outer and engine.header.kind is not Kind.STEP:
            self.outer.known()
        if engine.rank < 0 or engine.out:
            return
        view = engine.ruling_view or engine.view  # a recovery let it in: the header names none that it stands in (10)
        assert view is not None
        said = (split(answer)[1] for answer in engine.header.answers) if self.outer else engine.header.answers
        # Most slots have no answers; of those of pipelines all members have logged the same.
        answers = dict(zip(engine.contributors, said, strict=False)) if self.pipeline is None else {}
        self.handover.committed(engine.header, answers, view.ids(), engine.member_id)
        self.lengths.check(engine.world_size)
        behind = int(not self.writes)
        self.writer.place(
            engine.name,
            engine.rank + behind,
            engine.world_size + behind,
            fresh=fresh,
            lost=self._first not in engine.contributors,
            let_go=(change := engine.header.view_change) is not None and self._first not in ("", *change.ids()),
        )
        self._first = self.members[0]
        if self.pipeline is not None and engine.rank == 0 and engine.view is not None:
            self.pipeline.tell(engine.view)

    @property
    def writes(self) -> bool:
        """Whether a member of this job logs and writes files; else one of another cluster does."""
        return self.outer is None or self.outer.oldest

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Collectives inside answer with this member's own values."""
        kept, self.in_job = self.in_job, False
        try:
            yield
        finally:
            self.in_job = kept

    # ------------------------------------------------------------------ lengths

    def length(self) -> int:
        """Returns the length of the loader for Lightning."""
        total = self._total()
        return ENDLESS if math.isinf(total) else int(total)

    def _total(self) -> float:
        if self.outer and self.outer.shared and self.entered:
            return (self.outer.epoch_over and batches_begun(self.trainer)) or math.inf  # 0: the next one begins
        return self.lengths.total(self.elastic, entered=self.entered)

    def _refit(self) -> None:
        refit(self.trainer, self._total())

    # ------------------------------------------------------------------ going

    def _on_signal(self, number: signal.Signals, frame: FrameType | None) -> None:
        """The first signal; the second one aborts, or in a cluster of an outer job says what that costs."""
        then = "the cluster's last rank stays until what was trained is durable" if self.outer else "once more aborts"
        say(f"{number.name}: leaving the job after the present step, or at once while waiting; {then}")
        self.asked = number
        aside(lambda reason: self.engine.leave(reason), f"signal {number.name}")
        for handler in handlers_of_user(self._signals.before[number], self.trainer._signal_connector):
            handler(number, frame)

    def fenced(self, error: FencedError) -> None:
        """The state is void from here on; get to the next safe point without anybody's help."""
        if self.void:
            return
        _log.warning("%s; this process joins again by itself", error)
        self._step_aside(void=True)
        self._outer_due = None
        if self.outer:
            self.outer.cluster.forget()
        self.writer.logs.drop()
        self._void = Suspension.begin(self.trainer)

    def _check_departure(self, *, stepped: bool = False) -> None:
        """After a commit: may this member go? `stepped`: the optimizer has yet to apply it."""
        engine = self.engine
        if engine.out or (engine.leaving and engine.world_size == 1 and engine.may_go()):
            self._depart(stepped=stepped)

    def _depart(self, *, stepped: bool = False) -> None:
        """The others go on without this member, or nobody does; it may not even have seen the header that let it go.
        If there are no others, it stays the writer: nobody else has the state."""
        if not self.departed:
            self.departed = True
            if self.elastic.uncommitted:
                self._uncommitted = rolled_back(loops_manifest(self.trainer), self.elastic.uncommitted)
            if stepped:
                self._keep_due = True
            else:
                self._keep()
            self.gone = not self._is_last
            if self.gone:
                self._step_aside()
                if self.outer:
                    self.outer.close()  # the next rank speaks for the cluster
            else:
                self.in_job = False
                self.writer.save_logs()
            skip_validation(self.trainer)

    @property
    def _is_last(self) -> bool:
        engine = self.engine
        return bool(engine.role) and engine.view is not None and engine.view.ids() == (engine.member_id,)

    def _keep(self, *, ended: bool = False, stuck: bool = False) -> None:
        """If this was the last member, or none can go on, the state outlives it."""
        self._keep_due = False
        if self.outer and not self.gone and self._is_last:
            self.outer.leave()
        self.stepper.put_back()
        with self.alone():
            self.engine.keep(
                KeptState(self.state, self.elastic.uncommitted, ended=ended),
                self.checkpoints.at(self.stepped[1]),
                counted=self.trainer.global_step,
                stuck=stuck,
            )

    def end_epoch(self) -> None:
        """This member has left, and the epoch's end is not judged: there is no safe point after its last batch."""
        if self._keep_due:
            self._keep(ended=True)
        if self._uncommitted is not None:
            uncount(self.trainer, self._uncommitted)

    def says_unsaved(self, path: str) -> bool:
        """Whether this member, asked for a checkpoint, is out of the job and does not write it; then it says so."""
        if self.void or self.gone:
            why = "was put out of the job, so its state is void" if self.void else "has left the job"
            _log.warning(
                "%s %s after step %d, so %s is not written here: %s",
                self.config.name, why, self.stepped[0], path, OTHERS_SAVE if self.void else self.engine.saved_by,
            )  # fmt: skip
        return self.void or self.gone

    def _step_aside(self, *, void: bool = False) -> None:
        self.in_job = False
        self.writer.step_aside(void=void)

    def finish(self) -> None:
        """fit is over: the job's last slot, or the farewell of a member that left."""
        if self.void and self.outer is None:  # the others may have finished the job meanwhile
            self._come_in()
            if not self.departed:
                self.fenced(FencedError("this member came back to a job whose loop is over here"))
        self._refuse_void()
        if not self.entered:
            return
        self.finish_outer()
        if self.in_job:
            with contextlib.suppress(DepartedError):
                # The final state of a cluster of outer sync is at its server.
                self.engine.finish(self.state if self.outer is None else None, self.alone())
            # The writer may have died since the last slot: one of those who finish saves what is saved after fit.
            self._observe()
            self.in_job = False
        elif self.engine.out:
            self.engine.wait_released()

    def finish_outer(self) -> None:
        """The loop of an elastic cluster is over: it stays until the outer job is, and has its last version then.
        Idempotent."""
        if self.outer is None or self._outer_over or not self.entered:
            return
        self._refuse_void()
        self.in_job |= self.through and not self.departed
        if not self.in_job:
            return
        self.through = self._outer_over = True
        self.outer.finish(why_over(self.trainer), self.gather, self._goes)
        self._refuse_void()
        if not self.departed:
            save_last_again(self.trainer)

    def _goes(self) -> bool:
        """After a meeting of ranks whose loop is over: whether this one is out. The last one that was asked to leave
        takes the cluster along. Newcomers are let in, for they are waited for before anybody goes."""
        assert self.outer is not None
        if not self.outer.cluster.over:
            self._let_others_in()
        elif self.engine.out:
            self._depart()
        return self.departed or self.void

    def _refuse_void(self) -> None:
        if self.void:
            raise FencedError(
                "this member was excluded from the job as it ended, so its state is void; the others have the result"
            )

    def abandon(self, error: BaseException | None = None) -> None:
        """An exception ends fit: what callbacks do now must not call for the others, who go on without this member, or
        where members disagree end, too: then the state outlives them."""
        if self.in_job and isinstance(error, DisagreementError) and not self.outer:
            self._keep(stuck=True)
        self.in_job = False
        self._place.leave()
        if self._engine is not None:
            try:
                if self.outer:
                    self.outer.close()
                self._engine.close()
            except Exception as error:  # the exception that brought us here must be the one that is seen
                _log.warning("closing the engine of %s failed: %r", self.config.name, error)

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        self.abandon()
        self.handover.metrics.remove()
        forget_agreement(self.trainer)
        if self._stepper is not None:
            self._stepper.close()
        if self.pipeline is not None:
            self.pipeline.close()
        self.writer.logs.release()
        self._signals.restore()
        self._switch_as_before()
        self._asks_as_before()
        if self._loader is not None:
            self.elastic.close()


def gather_by_units(session: FitSession, name: str, attempt: Attempt, order: str) -> dict[str, bytes] | None:
    """Takes part in a collective whose payloads units of micro-batches make (protocol.md P17).

    Args:
        session: This member's.
        name: Which collective.
        attempt: Runs this member's units.
        order: Which samples they run on, in words.

    Returns:
        Everybody's payload, by member; None if this member is not in the job.
    """
    if not session.in_job:
        return None
    try:
        with meeting(session.state, name):
            header = session.engine.gather_by_units(name, attempt, order=order)
    except FencedError as error:
        session.fenced(error)
        return None
    except DepartedError:
        session._depart()
        return None
    session._observe()
    return dict(zip(session.engine.contributors, header.answers, strict=True))


@contextmanager
def meeting(state: LightningState, name: str) -> Iterator[None]:
    """Parts may move within; whoever gets the state then is in this collective, too, or cannot go on from it."""
    state.meeting = "" if name == _FOUNDING else name
    try:
        yield
    finally:
        state.meeting = ""


def end_unused_batch(session: FitSession) -> None:
    """Within a batch that no step uses, as this member has left: StopIteration ends Lightning's loop before it counts
    the batch, and before hooks and loggers hear of it. The loop of manual optimization swallows it, so the first
    callback asks again."""
    if session.departed and session.elastic.uncommitted:
        raise StopIteration


def joined(one: bytes, other: bytes) -> bytes:
    """Two payloads as one."""
    return len(one).to_bytes(4, "little") + one + other


def split(both: bytes) -> tuple[bytes, bytes]:
    """The two that `joined` made one; empty ones of a member that said nothing."""
    end = 4 + int.from_bytes(both[:4], "little")
    return both[4:end], both[end:]


def handlers_of_user(before: Any, connector: object) -> list[Callable[[int, FrameType | None], Any]]:
    """Handlers that the user had set for a signal; Lightning composes them with its own, which end the work at once."""
    found = getattr(before, "signal_handlers", [before])
    ours = (None, signal.default_int_handler)
    return [h for h in found if callable(h) and h not in ours and getattr(h, "__self__", None) is not connector]


def make_stepper(session: FitSession, engine: Engine) -> Stepper | PipelineStepper:
    outer, trainer = session.outer, session.trainer
    if session.pipeline is not None:
        return session.pipeline.stepper(engine)
    return Stepper(
        engine,
        trainer,
        session.collectives,
        lambda: session.elastic.current,
        lambda: session.elastic.spent(),
        lambda: session.elastic.order,
        session._pass_is_over,
        lambda: joined(outer.says(), session.handover.says(engine)) if outer else session.handover.says(engine),
    )


def training_step(session: FitSession, run: Callable[[], Any], batch: Any) -> Any:
    """A batch of the loop: the user's step, or where members own parts of the model, the units of an optimizer
    step and its slot."""
    if session.pipeline is None:
        return whole(session.stepper).training_step(run, batch)
    session.state.within_step = True
    try:
        session._average(0)
    except NoStep:  # Lightning's closure must come to its end
        session._within = False
        return {"loss": torch.zeros((), device=session.trainer.strategy.root_device)}
    finally:
        session.state.within_step = False
    session._within = True
    return session.pipeline.output()


def whole(stepper: Stepper | PipelineStepper) -> Stepper:
    """The stepper of a member that has the whole model."""
    assert isinstance(stepper, Stepper)
    return stepper
