"""Runs one fit's part in a job: enters it, takes part in slots, lets newcomers in at safe points, and leaves.

Theory of operation. While Lightning sets up, every process is alone: it cannot know for sure yet whether it founds the
job or joins one in epoch 3 (place.py tells which rank it has meanwhile), and a newcomer's set-up runs many barriers
that the running members never repeat. When the training loop asks for its first batch, all counters are at rest, and
there the member enters: a founder begins, a newcomer takes over state and counters from the others. From then on each
optimizer step is a slot of the job, and so is each collective. Each fetch of a batch is a *safe point*. Only there
newcomers are let in, a member that was fenced joins again, and fit ends for a member that has left. After each commit
the epoch's length is refitted (loops.py), before Lightning asks whether the batch was the last one.

The member's footing (in the job, void, gone) is kept by its `Participation` (member/participation.py), which this fit
hosts. A void member runs on without collectives until its next safe point, and joins again there. For a member that has
left, fit ends at its next safe point, without the hooks of an epoch's end, which would judge half an epoch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from torch import Tensor
from torch.optim import Optimizer

from chaos_lightning.collectives.hyper import scaled
from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.data.steps import JobLoader
from chaos_lightning.errors import (
    DepartedError,
    DisagreementError,
    DryRunError,
    FencedError,
    FinishedJobError,
    RefusedError,
    UnsupportedError,
)
from chaos_lightning.machine.signals import ExitSignals, Handler, aside, say
from chaos_lightning.machine.units import duration
from chaos_lightning.member import training
from chaos_lightning.member.engine import OTHERS_SAVE, Engine
from chaos_lightning.member.keeping import LoadedCheckpoint
from chaos_lightning.member.participation import Footing, Participation
from chaos_lightning.member.process_group import warn_who_asks
from chaos_lightning.member.training import least_batch
from chaos_lightning.member.unit_steps import Attempt
from chaos_lightning.planning.batch import samples_of_rate
from chaos_lightning.protocol.types import GENESIS, Header, Kind, View
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.settings import ChaosOptions, EngineConfig
from chaos_lightning.strategies import results
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.data import EngineSource, TrainLoader
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
    epoch_of,
    forget_agreement,
    loops_manifest,
    make_up_for_end,
    refit,
    reload_epochs,
    remake_validation_loaders,
    rolled_back,
    skip_validation,
    start_clocks,
    training_loader,
    uncount,
)
from chaos_lightning.strategies.metrics import MetricRoute
from chaos_lightning.strategies.place import Place
from chaos_lightning.strategies.replay import LightningReplay
from chaos_lightning.strategies.schedules import SampleCount
from chaos_lightning.strategies.state import KeptState, LightningState
from chaos_lightning.strategies.stepping import Stepper
from chaos_lightning.strategies.unit_stepper import UnitStepper
from chaos_lightning.strategies.writer import Writer

DataMode = Literal["shared", "local"]
_FOUNDING = "what founders begin from"
_log = logging.getLogger("chaos_lightning")


class NoStep(Exception):
    """Exception that ends an optimizer step which does not take place."""


class FitSession:
    """Part of one call of `fit` in a job.

    Args:
        trainer: Trainer whose fit this is.
        config: Configuration of the engine.
        place: Rank and world size of this process until it enters the job.
        options: Options of the strategy.
        data: "shared" if all members have the same data set, "local" if each has its own.
        assigns_validation: Whether loaders of validation are divided among members where that is possible.
        environment: Environment of Lightning, which is told this process's rank.
        collectives: Collectives of Lightning, which exchange through this session.

    Attributes:
        member: This member's participation.
        hooks: Hooks of this fit: plain ones, unless the strategy has put those of outer sync or of pipelines here.
        evaluation: Members among which validation is divided.
        handover: Numbers and metric states that members have logged and counted in this epoch.
        writer: Role of the writer: whether this member logs and writes files.
        lengths: Lengths of epochs, in micro-batches.
        asked: Signal that has asked this member to leave; None if none has.
        closed: Whether fit is over.
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
        self.member = Participation(self._put_out, self._left)
        self.hooks = FitHooks()
        self.closed = False
        self.asked: signal.Signals | None = None
        self._options = options
        self._data = data
        self._assigns_validation = assigns_validation
        self.collectives = collectives
        self.evaluation = Evaluation(trainer, collectives, lambda: self.members, lambda: self.engine.member_id)
        metrics = MetricRoute(trainer, collectives.exchange, lambda: self.in_job)
        self.handover = Handover(trainer, metrics, trainer.strategy.reduce)
        self.writer = Writer(trainer, environment, lambda: self.in_job, self.member.alone, lambda: self.hooks.run)
        self.lengths = Lengths(trainer, config.min_nodes, local=data == "local")
        self._source = EngineSource(config.name)
        self._loader: TrainLoader | None = None
        self._state: LightningState | None = None
        self._stepper: Stepper | UnitStepper | None = None
        self._samples = SampleCount(())
        self._switch_as_before: Callable[[], None] = lambda: None
        self._asks_as_before = warn_who_asks(
            environment.world_size, "trainer.is_global_zero, trainer.global_rank, or rank_zero_only of Lightning"
        )
        self._signals = ExitSignals(self._on_signal)
        self._suspension: Suspension | None = None
        """Limits of the loop that are lifted while this member is void."""
        self._keep_due = False
        """Whether this member has left after a step, and is to keep its state once the optimizer has applied that."""
        self._first = ""
        """Id of the member that was rank 0 after the previous slot."""
        self.within: bool | None = None
        """Whether the closure that runs has averaged, or (False) its step does not take place; None before that."""
        self._scaled_for = 0
        """Samples of a step for which learning rates were chosen (`lr_scaling`); 0: they are not scaled."""
        self._lr_factor = 1.0
        """Factor of learning rates in the step that was committed last, from its header."""
        self._uncommitted: dict[str, Any] | None = None
        """Loop counters without the batch in which this member left; None if a step uses that batch."""

    # ------------------------------------------------------------------ parts

    @property
    def engine(self) -> Engine:
        return self.member.engine

    @property
    def entered(self) -> bool:
        return self.member.made is not None

    @property
    def in_job(self) -> bool:
        return self.member.in_job

    @property
    def departed(self) -> bool:
        return self.member.departed

    @property
    def late(self) -> bool:
        return self.engine.role == "late"

    @property
    def members(self) -> tuple[str, ...]:
        """Ids of all members in rank order, as of the last slot; empty outside the job."""
        view = self.engine.view if self.in_job else None
        return view.ids() if view is not None else ()

    @property
    def stepper(self) -> Stepper | UnitStepper:
        assert self._stepper is not None
        return self._stepper

    @property
    def logs_alike(self) -> bool:
        """Whether all members log the same numbers, because a batch is a whole step."""
        return isinstance(self._stepper, UnitStepper)

    @property
    def state(self) -> LightningState:
        assert self._state is not None
        return self._state

    @property
    def loader(self) -> TrainLoader:
        """Training loader that Lightning iterates over, in place of the user's."""
        assert self._loader is not None
        return self._loader

    @property
    def elastic(self) -> JobLoader:
        return self.loader.elastic

    def wrap(self, dataloader: Any) -> TrainLoader:
        """Returns the loader that Lightning gets in place of the user's training loader. Each reload of loaders
        makes a new one.
        """
        elastic = self.hooks.loader(
            dataloader,
            mode=self._data,
            seed=seed_of(self._options.seed),
            source=self._source,
            as_lightning=True,
            least=least_batch(self.trainer.lightning_module),
        )
        if self._loader is not None:
            self.elastic.close()
        self._loader = TrainLoader(elastic, self.trainer, self)
        self.lengths.asked(self._total(), follows=isinstance(elastic, ElasticLoader))
        if self._state is not None:
            self._state.loader = elastic
        return self._loader

    def _reload(self, made_in: tuple[float, float]) -> None:
        """Makes loaders anew if the state that was taken over has loaders of another epoch
        (`reload_dataloaders_every_n_epochs`). Lightning keeps its training loader, so the new one is put inside it.
        """
        trainer = self.trainer
        if not trainer.reload_dataloaders_every_n_epochs:
            return
        training, validation = reload_epochs(trainer)
        if training != made_in[0]:
            held = self.loader
            with at_epoch(trainer, training):
                held.elastic = training_loader(trainer).elastic
            held.restart()
            self._loader = held
        if validation != made_in[1]:
            with at_epoch(trainer, validation):
                remake_validation_loaders(trainer)

    def begin_pass(self, epoch: int) -> None:
        """Notes that the loader begins an epoch, and logs the epoch's length, unless hooks set the epoch or batches
        are limited.
        """
        if not self.hooks.begins_pass(self.elastic) and self.entered and self.trainer.limit_train_batches == 1.0:
            training.tell_epoch(self.engine, self.elastic, epoch)

    # ------------------------------------------------------------------ coming in

    def _enter(self) -> None:
        trainer, hooks, elastic = self.trainer, self.hooks, self.elastic
        hooks.end_dry_run(self.config)
        engine = Engine(self.config)
        self.member.made = self._source.engine = engine
        extra = {
            "syncs": lambda: sorted(self.collectives.syncs),
            "gradients": lambda: self.stepper.gradients(),
            "files": lambda: list(self.writer.told),
            "clock": hooks.clock_state,
            "through": lambda: hooks.through,
            "checkpoints": lambda: self.member.checkpoints.heads,
            "handover": lambda: self.handover.manifest(),
            "logged": lambda: results.numbers_manifest(trainer) if self.logs_alike else [],
        }
        hooks.enter(self)
        self._state = LightningState(
            trainer, elastic, trainer.strategy.reduce, extra, self._adopt_extra, hooks.beside, self._reload, hooks.rest
        )
        self._stepper = hooks.stepper(self)
        # Elsewhere a step has the same samples whoever is there.
        self._scaled_for = samples_of_rate(self.config.lr_scaling) if isinstance(self._stepper, Stepper) else 0
        self._samples = SampleCount(trainer.lr_scheduler_configs if hooks.owns_result else ())
        self._switch_as_before = training.switch_quickly()
        engine.prepare(sections=self._stepper.sections, buffers=self._stepper.buffers, part_of=hooks.part_of)
        hooks.attach(self)
        self.handover.fits_beside(sum(p.nbytes for section in self._stepper.sections for _, p in section.params))
        epoch = epoch_of(trainer)
        self._signals = hooks.exit_signals(
            self._on_signal, lambda: self.member.is_last and self.member.footing is not Footing.GONE
        )
        if self._options.leave_on_signals and hooks.leave_on_signals:
            self._signals.install()
        elif self.config.notice_plan.grace_s:
            _log.warning("notice=%s: sigterm is not honoured, as leave_on_signals is off", self.config.notice)
        try:
            engine.join(
                fingerprint={
                    **fingerprint_of(trainer, elastic, assigns_validation=self._assigns_validation),
                    **self.lengths.words(),
                    **hooks.words,
                    **({"lr_scaling": self.config.lr_scaling} if self._scaled_for else {}),
                },
                quota=elastic.quota,
                accumulate=trainer.accumulate_grad_batches,
                state=self._state,
                replay=LightningReplay(trainer, self._scaled_for) if hooks.replays else None,
                pipelines=hooks.request,
                batch=hooks.batch,
                loaded=self.member.checkpoints.loaded
                or (LoadedCheckpoint() if trainer.ckpt_path is not None or trainer.global_step > 0 else None),
            )
        except RefusedError as error:
            raise RefusedError(f"{error}{advice(str(error), self.config)}") from error
        self.writer.logs.hold(trainer.loggers)
        self._entered(epoch)

    def come_in(self) -> None:
        """Enters the job, or joins it again. Afterwards this member may have left already."""
        try:
            left = self.member.come_in(self._reenter if self.entered else self._enter)
        except (FinishedJobError, DryRunError):
            self.member.go(Footing.GONE)  # what callbacks would save now is not the job's
            raise
        if left is not None:
            _log.warning("%s; fit ends here, and what it was to train is not trained", left)

    def _reenter(self) -> None:
        """Joins the job again after this member was fenced."""
        epoch = epoch_of(self.trainer)
        self.member.go(Footing.ALONE)
        assert self._suspension is not None
        self._suspension.end(self.trainer)
        self.stepper.reset()
        self.handover.forget()
        self.hooks.restart()
        self.engine.rejoin(self.state)
        self._entered(epoch)

    def _entered(self, epoch_before: int) -> None:
        trainer, engine = self.trainer, self.engine
        self._place.leave()
        if self.late:  # the job is finished, and its members write: fit ends here, with the final state
            self.member.go(Footing.GONE)
            self.writer.step_aside(void=False)
            skip_validation(trainer)
            return
        self.loader.restart()
        self.hooks.entered(self)
        self.member.go(Footing.IN)
        fresh = engine.role == "founder" and not engine.resumed
        start_clocks(trainer, fresh=engine.role == "founder")
        if engine.role == "founder":
            self.writer.told = LogPlace()  # what was kept with a state is of the job before
        self._samples.begin(engine.header.ledger)
        self.observe(fresh=fresh)
        if not fresh and not self.hooks.through and epoch_of(trainer) != epoch_before:
            # Every process has seen this hook for the epoch that it is in.
            with self.member.alone():
                _call_callback_hooks(trainer, "on_train_epoch_start")
                _call_lightning_module_hook(trainer, "on_train_epoch_start")
        if fresh and self.elastic.ledger.streams:
            engine.events.emit("resumed", step=trainer.global_step, ledger=self.elastic.ledger.streams)
        self.member.stepped = (engine.header.step, engine.header.hash)
        self.writer.promote_if_due(fresh=fresh)
        if self.hooks.request and engine.header == GENESIS:
            self.gather(_FOUNDING, b"")  # parts move before the first batch, counters among them
        self.refit()

    def _adopt_extra(self, extra: Mapping[str, Any]) -> None:
        self.collectives.syncs = set(extra["syncs"])
        self.stepper.adopt_gradients(extra["gradients"])
        self.writer.told = LogPlace(*extra["files"])
        self.hooks.through = extra["through"]
        self.handover.adopt(extra["handover"])
        if logged := extra.get("logged"):
            results.adopt_numbers(self.trainer, logged)
        self.member.checkpoints.heads = extra["checkpoints"]
        self.hooks.adopt(extra["clock"])

    # ------------------------------------------------------------------ the safe point

    def safe_point(self) -> None:
        """Enters the job or joins it again, lets newcomers in, and prepares the next batch. Called between two batches,
        when all counters are consistent.

        Raises:
            StopIteration: This member has left, or the loop or the epoch ends here.
        """
        if self.departed:
            if self._keep_due:
                self._keep()
            raise StopIteration
        if not self.entered or self.member.footing is Footing.VOID:
            self.come_in()
        if self.departed:
            raise StopIteration
        if not self.in_job:
            return
        if self.hooks.through:  # the loop of the others is over: this member meets them in `finish`
            self.hooks.ended = True
            self.member.end()
            raise StopIteration
        if self.state.ended:
            self.state.ended = False
            make_up_for_end(self.trainer)
            raise StopIteration
        if not self.elastic.at_safe_point and not self._give_up_accumulation():
            self._check_stepped()
            return
        self.let_others_in()
        if not self.departed:
            self.hooks.wait(self)
        if self.departed or self.hooks.ended:
            raise StopIteration
        self.writer.promote_if_due(fresh=False)
        self.writer.tell_files(lambda: self.members)
        if self.stepper.comparison is not None:  # else parts are compared, in the step itself
            self.stepper.comparison.take(self.state)
        self.loader.begin()
        self.refit()

    def let_others_in(self) -> None:
        """Lets newcomers in at a safe point. Afterwards this member may have left, or joined again."""
        if self.member.let_others_in(self.state):
            self.observe()
        if self.member.footing is Footing.VOID and not self.hooks.through:
            self.come_in()
        self.check_departure()

    def _give_up_accumulation(self) -> bool:
        """Drops an unfinished accumulation when a new pass begins because `on_train_batch_start` returned -1;
        returns whether it has. The accumulation's samples count as not used.
        """
        if self.loader.under_way or self.stepper.manual is not None:
            return False
        self.elastic.give_up()
        self.stepper.forget_accumulation()
        return True

    def _check_stepped(self) -> None:
        """Raises UnsupportedError if the last batch of an accumulation ended without an optimizer step."""
        current = self.elastic.current
        if self.stepper.manual is None and current is not None and current.last:
            raise UnsupportedError(
                "an accumulation went by without an optimizer step, although Lightning said it was due; "
                "LightningModule.optimizer_step must call optimizer.step(closure=...) each time (for other plans there "
                "is manual optimization)"
            )

    # ------------------------------------------------------------------ slots

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[..., Any]) -> Any:
        """Runs an optimizer's step, and averages gradients after its closure, before everything else in the step.

        Args:
            optimizer: One of the Trainer's optimizers.
            closure: Closure of Lightning, which runs the forward and the backward pass.
            step: Function that takes the step with the closure that it is given.
        """
        stepper, number = self.stepper, self.stepper.number(optimizer)
        # A member that has left still takes a step that the others take.
        if not self.in_job and not (self.departed and stepper.holds_average(number)):
            end_unused_batch(self)
            # The step of a void member is thrown away, so torch need not warn that its schedule steps first.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return closure()
        calls, held = 0, not stepper.must_average(number)
        rates = contextlib.ExitStack()

        def averaged() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} evaluated its closure twice in one step; each evaluation would be a "
                    "step of the whole job. Use an optimizer that evaluates it once"
                )
            result = self._close_step(number, closure)
            rates.enter_context(scaled(optimizer, self._lr_factor))
            return result

        try:
            with rates:
                output = step(averaged)
        except NoStep:
            end_unused_batch(self)
            return stepper.nothing()
        self.hooks.applied(self, output)
        if not calls and held:
            stepper.stepped(number)
        elif not calls:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step did not call its closure, so there was nothing to average; its step "
                "must take a closure and call it once"
            )
        return output

    def _close_step(self, number: int, closure: Callable[[], Any]) -> Any:
        """Runs an optimizer's closure, then averages the gradients into `.grad`.

        Returns:
            Result of the closure; None if no member had a loss, so that there are no gradients.

        Raises:
            NoStep: This member was fenced meanwhile or let go, or its state has drifted from the others'.
        """
        self.within = None
        with self.stepper.stepping():
            result = closure()
        if self.within is False:
            raise NoStep
        if self.within is None and self.stepper.must_average(number):
            self._average(number)
        self.stepper.stepped(number)
        # A gradient scaler fails where there is no gradient; a closure's None tells it so, as without the strategy.
        return None if self.stepper.manual is None and self.stepper.total_weight <= 0 else result

    def _average(self, number: int) -> None:
        if not self.in_job:
            raise NoStep
        with self.member.slot():
            header = self._committed(number)
            self.member.stepped = (header.step, header.hash)
            self._lr_factor = header.lr_factor(self._scaled_for)
            self.hooks.stepped(header)
            self.observe()
            if self.stepper.comparison is not None:
                self.stepper.comparison.settle(header)
            self.check_departure(stepped=True)
            if not self.departed:
                self.refit()
            return
        raise NoStep

    def _committed(self, number: int) -> Header:
        while (header := self.stepper.average(number, yields=self.collectives.owes)).kind is not Kind.STEP:
            self._went_along(header)
        self.collectives.settled()
        return header

    def _went_along(self, header: Header) -> None:
        """Takes in a collective of the others that this member, without samples, could not expect."""
        self.observe()
        self.collectives.went_along(header.name or str(header.kind), header.answers)

    def backward(
        self, loss: Tensor, run: Callable[[Tensor], Tensor], hooks: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Runs one backward pass, or none if this member is out of the job; returns the loss.

        Args:
            loss: Loss of the micro-batch.
            run: Function that makes the pass.
            hooks: Function that runs the hooks that see gradients after the pass. An accumulation's last pass ends with
                the average, before these. All members run them then; if nobody had samples, there are no gradients, and
                no member runs them.
        """
        if not self.in_job:
            return loss
        with self.member.slot():
            loss = whole(self.stepper).backward(loss, run)
        if hooks is None or not self.in_job:
            return loss
        if not self.stepper.is_last:
            return hooks(loss) if self.stepper.has_passed else loss
        self.average_within()
        return hooks(loss) if self.within and self.stepper.total_weight > 0 else loss

    def average_within(self) -> None:
        """Averages gradients within the closure. If the step does not take place, that is only noted, since
        Lightning must run the closure to its end.
        """
        try:
            self._average(0)
            self.within = True
        except NoStep:
            self.within = False

    def manual_backward(self, run: Callable[[], None]) -> None:
        """Runs one backward pass of manual optimization and averages its gradients; does neither if this member is
        out of the job.
        """
        if self.in_job:
            whole(self.stepper).manual_backward(run)

    def pass_is_over(self) -> None:
        """Averages the gradients that a backward pass of manual optimization has changed."""
        with contextlib.suppress(NoStep):
            for number in self.stepper.manual.reached if self.stepper.manual is not None else ():
                self._average(number)
        end_unused_batch(self)

    def gather(
        self, name: str, payload: bytes, *, lets_go: bool = False, line: str = ""
    ) -> list[tuple[str, bytes]] | None:
        """Exchanges payloads in a collective: returns each member's with its id, in rank order; None if this member is
        not in the job.

        Args:
            name: Name of the collective; equal at all members.
            payload: Bytes that this member brings.
            lets_go: Whether members may leave with this collective, as it is no part of a validation.
            line: Line of the user's code that the collective is for; "": the one that calls now.
        """
        if not self.in_job:
            return None
        before = self.members
        with self.member.slot(), meeting(self.state, name):
            answers = self.engine.gather(name, payload, yields=self.collectives.owes, lets_go=lets_go, line=line)
            while self.engine.header.name != name:
                self._went_along(self.engine.header)
                answers = self.engine.gather(name, payload, yields=True, lets_go=lets_go, line=line)
            self.collectives.settled()
        if not self.in_job:
            return None
        here = {member for member, _ in answers}
        if lost := [member for member in before if member not in here]:
            _log.warning("%s died before %r, which misses what it had to say", ", ".join(lost), name)
        self.observe()
        return answers

    def observe(self, *, fresh: bool = False) -> None:
        """Updates rank, writer, logs, metrics and schedules after a slot was committed, or after this member
        entered.
        """
        engine = self.engine
        self.writer.logs.stable()
        self.handover.metrics.forget_computed()
        self._samples.committed(engine.header.ledger)
        self.hooks.committed(engine.header)
        if engine.rank < 0 or engine.out:
            return
        # If a recovery let this member in, the last header names no view that it is in (protocol.md 10).
        view = engine.ruling_view or engine.view
        assert view is not None
        # Most slots have no answers.
        answers = dict(zip(engine.contributors, self.hooks.said(self, engine.header), strict=False))
        self.handover.committed(engine.header, answers, view.ids(), engine.member_id)
        self.lengths.check(engine.world_size)
        behind = int(not self.hooks.writes)
        self.writer.place(
            engine.name,
            engine.rank + behind,
            engine.world_size + behind,
            fresh=fresh,
            lost=self._first not in engine.contributors,
            let_go=(change := engine.header.view_change) is not None and self._first not in ("", *change.ids()),
        )
        self._first = self.members[0]
        if engine.rank == 0 and engine.view is not None:
            self.hooks.tell(engine.view)

    # ------------------------------------------------------------------ lengths

    def length(self) -> int:
        """Returns the length of the training loader that Lightning gets, in micro-batches."""
        total = self._total()
        return ENDLESS if math.isinf(total) else int(total)

    def _total(self) -> float:
        total = self.hooks.total()
        return total if total is not None else self.lengths.total(self.elastic, entered=self.entered)

    def refit(self) -> None:
        refit(self.trainer, self._total())

    # ------------------------------------------------------------------ going

    def _on_signal(self, number: signal.Signals, frame: FrameType | None) -> None:
        """Handles signals: the first one makes this member leave the job; a second one aborts, or in an outer job's
        cluster prints what aborting would lose.
        """
        wait_s = self.config.notice_plan.waits_s(number.name)
        when = f"in {duration(wait_s)}" if wait_s else "after the present step, or at once while waiting"
        say(f"{number.name}: leaving the job {when}; {self.hooks.again}")
        self.asked = number
        aside(lambda name: self.engine.heed(name), number.name)
        for handler in handlers_of_user(self._signals.before[number], self.trainer._signal_connector):
            handler(number, frame)

    def _put_out(self) -> None:
        self.writer.step_aside(void=True)
        self.hooks.fenced()
        self.writer.logs.drop()
        self._suspension = Suspension.begin(self.trainer)

    def check_departure(self, *, stepped: bool = False) -> None:
        """Makes this member leave after a committed slot, if it was asked to and may. `stepped`: the optimizer has
        yet to apply the committed step.
        """
        if self.in_job and self.member.may_go():
            self.member.depart(stepped=stepped)

    def _left(self, stepped: bool) -> None:
        """Saves the state (if `stepped`, only after the optimizer's step) and gives up the writer's role, as this
        member has left. The last member stays the writer, since no other has the state.
        """
        if self.elastic.uncommitted:
            self._uncommitted = rolled_back(loops_manifest(self.trainer), self.elastic.uncommitted)
        self._keep_due = stepped
        if not stepped:
            self._keep()
        if self.member.footing is Footing.LAST:
            self.writer.save_logs()
        else:
            self.writer.step_aside(void=False)
            self.hooks.close()  # the next rank speaks for the cluster
        skip_validation(self.trainer)

    def _keep(self, *, ended: bool = False, stuck: bool = False) -> None:
        """Saves the state to a file if this was the last member, or if no member can go on (`stuck`)."""
        self._keep_due = False
        if self.member.footing is Footing.LAST:
            self.hooks.leave()
        self.stepper.put_back()
        with self.member.alone():
            kept = KeptState(self.state, self.elastic.uncommitted, ended=ended)
            self.member.keep(kept, counted=self.trainer.global_step, stuck=stuck)

    def end_epoch(self) -> None:
        """Ends the epoch of a member that has left, without the hooks that judge an epoch. Saves the state if that
        is still to be done, and uncounts a batch that no step uses.
        """
        if self._keep_due:
            self._keep(ended=True)
        if self._uncommitted is not None:
            uncount(self.trainer, self._uncommitted)

    def says_unsaved(self, path: str) -> bool:
        """Returns whether this member writes no checkpoint because it is out of the job; if so, logs that."""
        void = self.member.footing is Footing.VOID
        if unsaved := void or self.member.footing is Footing.GONE:
            why = "was put out of the job, so its state is void" if void else "has left the job"
            _log.warning(
                "%s %s after step %d, so %s is not written here: %s",
                self.config.name, why, self.member.stepped[0], path, OTHERS_SAVE if void else self.engine.saved_by,
            )  # fmt: skip
        return unsaved

    def finish(self) -> None:
        """Takes part in the job's last slot when fit is over. A member that has left waits until it is released."""
        if self.member.footing is Footing.VOID and self.hooks.owns_result:  # others may have ended the job meanwhile
            self.come_in()
            if not self.departed:
                self.member.fenced(FencedError("this member came back to a job whose loop is over here"))
        self.refuse_void()
        if not self.entered:
            return
        self.hooks.finish(self)
        if self.in_job:
            with contextlib.suppress(DepartedError):
                self.engine.finish(self.state if self.hooks.owns_result else None, self.member.alone())
            # The writer may have died since the last slot: one of those who finish saves what is saved after fit.
            self.observe()
            self.member.end()
        elif self.engine.out:
            self.engine.wait_released()

    def refuse_void(self) -> None:
        if self.member.footing is Footing.VOID:
            raise FencedError(
                "this member was excluded from the job as it ended, so its state is void; the others have the result"
            )

    def abandon(self, error: BaseException | None = None) -> None:
        """Ends this member's part at once, as after an exception, so that callbacks that run now do not wait for the
        other members. They go on without it, unless members disagree: then all end, and the state is saved.
        """
        if self.in_job and isinstance(error, DisagreementError) and self.hooks.owns_result:
            self._keep(stuck=True)
        self.member.end()
        self._place.leave()
        if self.entered:
            try:
                self.hooks.close()
                self.engine.close()
            except Exception as error:  # the exception that brought us here must be the one that is seen
                _log.warning("closing the engine of %s failed: %r", self.config.name, error)

    def close(self) -> None:
        """Ends the session, and restores all that it has changed for the time of fit. Idempotent."""
        self.closed = True
        self.abandon()
        self.handover.metrics.remove()
        forget_agreement(self.trainer)
        if self._stepper is not None:
            self._stepper.close()
        self.hooks.restore()
        self.writer.logs.release()
        self._signals.restore()
        self._switch_as_before()
        self._asks_as_before()
        if self._loader is not None:
            self.elastic.close()


def gather_by_units(session: FitSession, name: str, attempt: Attempt, order: str) -> dict[str, bytes] | None:
    """Takes part in a collective whose payloads are results of units of micro-batches (protocol.md P17).

    Args:
        session: Session of this member.
        name: Name of the collective; equal at all members.
        attempt: Attempt that runs this member's units.
        order: Samples that the units run on, in words.

    Returns:
        Payload of each member, by its id; None if this member is not in the job.
    """
    if not session.in_job:
        return None
    with session.member.slot(), meeting(session.state, name):
        header = session.engine.gather_by_units(name, attempt, order=order)
        session.observe()
        return dict(zip(session.engine.contributors, header.answers, strict=True))
    return None


class FitHooks:
    """Hooks of one fit by which outer sync and pipelines change what the session does.

    The hooks of this class are for members that have the whole model, in a job that is not itself a cluster of an outer
    job; most of them do nothing. `ElasticPart` (elastic.py) has the hooks of a rank in a cluster of an outer job, and
    `PipelineFit` (pipeline_fit.py) those of a member that owns some of the layers; no fit has both.

    Attributes:
        replays: Whether newcomers may replay steps.
        owns_result: Whether the members of this job have its final state, and schedules go by its steps.
        leave_on_signals: Whether signals make this member leave, unless the strategy's own option says no.
        again: Effect of a second signal, in words.
        request: Pipelines that this member asks for (`PipelineRequest.to_json`); "": it has the whole model.
        batch: Batch of a step, whoever is there (planning/batch.py, BatchRule); "": each member adds one of its own.
        beside: State that newcomers get beside the training state; None if there is none.
        rest: Names of the buffers that all members have, where each has some of the layers.
        part_of: Name of the part that each parameter and buffer belongs to, if steps run as units (`Engine.prepare`).
        ended: Whether the members stop in the middle of an epoch.
        through: Whether the loop of all members is over; perhaps it was before this one came.
    """

    replays = owns_result = leave_on_signals = True
    again = "once more aborts"
    request = batch = ""
    beside: StateAccess | None = None
    rest: list[str] | None = None
    part_of: Mapping[str, str] | None = None
    ended = through = False

    def begin(self) -> None: ...  # before the first batch, when set-up is over
    def end_dry_run(self, config: EngineConfig) -> None: ...  # before there is an engine
    def enter(self, fit: FitSession) -> None: ...  # before the engine's `prepare`
    def attach(self, fit: FitSession) -> None: ...  # between `prepare` and the engine's `join`
    def restart(self) -> None: ...  # before this member joins again: what it holds is void
    def entered(self, fit: FitSession) -> None: ...  # the engine is in the job, with its state
    def adopt(self, given: Mapping[str, Any]) -> None: ...  # a newcomer takes over what `clock_state` gave
    def wait(self, fit: FitSession) -> None: ...  # between two batches: may wait, while newcomers come in
    def committed(self, header: Header) -> None: ...  # a slot is committed, or this member came in at it
    def tell(self, view: View) -> None: ...  # the members of a view are in; at rank 0
    def stepped(self, header: Header) -> None: ...  # a step is committed, and the optimizer has yet to take it
    def applied(self, fit: FitSession, output: Any) -> None: ...  # the optimizer has; its closure gave `output`
    def show_base(self) -> None: ...  # validation begins
    def show_own(self) -> None: ...  # callbacks have judged a validation
    def fenced(self) -> None: ...  # this member was put out
    def leave(self) -> None: ...  # the last member goes
    def finish(self, fit: FitSession) -> None: ...  # the loop is over; idempotent
    def close(self) -> None: ...  # this member is out of the job, in which others may go on; idempotent
    def restore(self) -> None: ...  # fit is over, and the user's objects are to be what they were; idempotent

    def loader(self, dataloader: Any, **options: Any) -> JobLoader:
        """Returns the elastic loader around the user's training loader; `options` are those of `ElasticLoader`."""
        return ElasticLoader(dataloader, **options)

    def stepper(self, fit: FitSession) -> Stepper | UnitStepper:
        """Returns the object that runs this member's optimizer steps."""
        return Stepper(
            fit.engine,
            fit.trainer,
            fit.collectives,
            lambda: fit.elastic.current,
            lambda: fit.elastic.spent(),
            lambda: fit.elastic.order,
            fit.pass_is_over,
            lambda: self.says(fit.handover.says(fit.engine)),
        )

    def exit_signals(self, first: Handler, last: Callable[[], bool]) -> ExitSignals:
        """Returns handlers of the signals that ask this member to leave. `last`: returns whether this member is the
        only one with its state.
        """
        return ExitSignals(first)

    @property
    def words(self) -> dict[str, str]:
        """Further values for the fingerprint, which must be equal at all members."""
        return {}

    def clock_state(self) -> dict[str, Any]:
        """Returns the state of the outer job's clock, which newcomers get beside the loops' counters."""
        return {}

    def begins_pass(self, loader: JobLoader) -> bool:
        """Notes that the loader begins a pass; returns whether the hook has set the loader's epoch."""
        return False

    def total(self) -> float | None:
        """Returns the number of batches of this epoch; None if the loader's own number is right."""
        return None

    def training_step(self, fit: FitSession, run: Callable[[], Any], batch: Any) -> Any:
        """Runs the user's training step on a batch; or, where a batch is a whole step, the units of that step, and
        commits it. Returns its output.
        """
        stepper = fit.stepper
        if isinstance(stepper, Stepper):
            return stepper.training_step(run, batch)
        fit.state.within_step = True
        try:
            fit.average_within()
        finally:
            fit.state.within_step = False
        return stepper.output() if fit.within else {"loss": stepper.nothing()}

    def says(self, logged: bytes) -> bytes:
        """Returns the bytes that this member sends with its gradient. `logged`: logged values that it hands over."""
        return logged

    def said(self, fit: FitSession, header: Header) -> Sequence[bytes]:
        """Returns the logged values, as bytes in rank order, that members have handed over with this header; none
        where all log the same, because a batch is a whole step.
        """
        return header.answers if isinstance(fit.stepper, Stepper) else ()

    @property
    def writes(self) -> bool:
        """Whether members of this job log and write files; if not, another cluster's members do."""
        return True

    @property
    def run(self) -> str:
        """Id of the outer job, whose other clusters may continue this job's files; "" if there is none."""
        return ""

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the model's state dict for a checkpoint; by default, the one that `make` returns."""
        return make()


@contextmanager
def meeting(state: LightningState, name: str) -> Iterator[None]:
    """Marks the state as within the collective `name` during this context, in which parts may be sent. A member that
    gets the state must be in that collective, too.
    """
    state.meeting = "" if name == _FOUNDING else name
    try:
        yield
    finally:
        state.meeting = ""


def end_unused_batch(session: FitSession) -> None:
    """Ends Lightning's loop by StopIteration within a batch that no step uses, if this member has left, before the
    loop, hooks and loggers count it. Called by the first callback, too, since the loop of manual optimization
    swallows StopIteration.
    """
    if session.departed and session.elastic.uncommitted:
        raise StopIteration


def handlers_of_user(before: Any, connector: object) -> list[Callable[[int, FrameType | None], Any]]:
    """Returns the handlers that the user had installed for a signal, without Lightning's own, which would end the
    process at once.
    """
    found = getattr(before, "signal_handlers", [before])
    ours = (None, signal.default_int_handler)
    return [h for h in found if callable(h) and h not in ours and getattr(h, "__self__", None) is not connector]


def whole(stepper: Stepper | UnitStepper) -> Stepper:
    """Returns the stepper, typed as that of a member with the whole model; no other may be given."""
    assert isinstance(stepper, Stepper)
    return stepper
