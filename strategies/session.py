"""One fit's part in a job: coming in, rest points, going, and everything in between.

Theory of operation. Setting up, every process is alone: nobody knows for sure yet whether it founds the job or joins
one in epoch 3 (place.py says what it counts as), and a newcomer's set-up runs many barriers that the running
members never repeat. When the training loop asks for its first batch, all counters are at rest, and there the member
enters: a founder begins, a newcomer takes over state and counters from the others. From then on each optimizer step is
a slot of the job, each collective too, and each fetch of a batch is a *rest point*, the only place where newcomers are
let in, where a member that was fenced joins again, and where one that left stops. After each commit the epoch's length
is refitted (loops.py), before Lightning asks whether the batch was the last one.

A member is in one of four conditions: not yet in, in the job, *void* (fenced: it runs on without collectives until its
next rest point, and joins again there), *departed* (it left: fit ends at the next rest point, without the hooks of an
epoch's end, which would judge half an epoch).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, MultiplicativeLR, SequentialLR

from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.errors import DepartedError, FencedError, RefusedError, UnsupportedError
from chaos_lightning.member.engine import Engine
from chaos_lightning.protocol.types import Header, Kind
from chaos_lightning.settings import EngineConfig
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.data import EngineSource, TrainLoader
from chaos_lightning.strategies.environment import ASIDE, ChaosEnvironment
from chaos_lightning.strategies.evaluation import EvalLoader
from chaos_lightning.strategies.fingerprint import advice, fingerprint_of, seed_of
from chaos_lightning.strategies.loops import (
    ENDLESS,
    Suspension,
    batches_begun,
    epoch_of,
    forget_agreement,
    loops_manifest,
    make_up_for_end,
    refit,
    refit_rates,
    rolled_back,
    skip_validation,
    start_clocks,
    uncount,
)
from chaos_lightning.strategies.options import ChaosOptions
from chaos_lightning.strategies.place import Place
from chaos_lightning.strategies.replay import LightningReplay
from chaos_lightning.strategies.schedules import BySamples, SampleCount
from chaos_lightning.strategies.signals import Signals
from chaos_lightning.strategies.state import KeptState, LightningState
from chaos_lightning.strategies.stepping import Stepper
from chaos_lightning.strategies.writer import StableLog, demote, open_loggers, promote, save_logs

DataMode = Literal["shared", "local"]
_log = logging.getLogger("chaos_lightning")


class NoStep(Exception):
    """The optimizer step that is under way does not take place."""


class Session:
    """See the module. One per call of `fit`.

    Args:
        trainer: Whose fit this is.
        config: For the engine.
        place: Who this process is until it enters the job.
        options: The strategy's.
        data: "shared" or "local".
        environment: Told who this process is.
        collectives: Exchanged through this session.

    Attributes:
        in_job: Collectives reach the others.
        departed: This member left.
        gone: It did, and others go on without it.
        evaluating: The validation loader that is being dealt out at the moment.
        stepped: Number and header hash of the last committed optimizer step.
        terminated: SIGTERM has asked this member to leave.
        closed: fit is over.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: EngineConfig,
        place: Place,
        options: ChaosOptions,
        data: DataMode,
        environment: ChaosEnvironment,
        collectives: Collectives,
    ) -> None:
        self.trainer = trainer
        self.config = config
        self._place = place
        self.in_job = False
        self.departed = self.gone = self.terminated = self.closed = False
        self.stepped = (0, "")
        self.evaluating: EvalLoader | None = None
        self._options = options
        self._data = data
        self._environment = environment
        self.collectives = collectives
        self._source = EngineSource(config.name)
        self._logs = StableLog(lambda: not self.in_job or environment.world_size() == 1)
        self._engine: Engine | None = None
        self._loader: TrainLoader | None = None
        self._state: LightningState | None = None
        self._stepper: Stepper | None = None
        self._samples = SampleCount(())
        self._estimating = False
        self._estimated = 0
        """Micro-batches of an epoch as foreseen, if optimizers or schedulers were made by that number."""
        self._signals: Signals | None = None
        self._void: Suspension | None = None
        self._boundary_asked = False
        self._promotion_due = False
        self._keep_due = False
        self._uncommitted: dict[str, Any] | None = None
        """Counters without the batch in which this last member left: it runs on, and its step does not count."""
        self._log_dir = ("", "")
        """The writer that has told where it logs, and what it said."""

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
    def member_id(self) -> str:
        return self.engine.member_id

    @property
    def void(self) -> bool:
        """Fenced: the training state means nothing until this member has joined again."""
        return self._void is not None

    @property
    def stepper(self) -> Stepper:
        assert self._stepper is not None
        return self._stepper

    @property
    def state(self) -> LightningState:
        assert self._state is not None
        return self._state

    @property
    def elastic(self) -> ElasticLoader:
        assert self._loader is not None
        return self._loader.elastic

    def wrap(self, dataloader: Any) -> TrainLoader:
        """The training loader that Lightning gets instead of the user's; a new one when loaders are reloaded."""
        elastic = ElasticLoader(dataloader, mode=self._data, seed=seed_of(self._options), source=self._source)
        if self._loader is not None:
            self.elastic.close()
        self._loader = TrainLoader(elastic, self.trainer, self)
        if self._estimating and not math.isinf(total := self._total()):
            self._estimated = int(total)
        if self._state is not None:
            self._state.loader = elastic
        return self._loader

    def warn_of_lost_place(self) -> None:
        """Of a checkpoint within an epoch that does not say where the data stood."""
        if self._loader is not None:
            self._loader.warn_of_lost_place()

    @contextmanager
    def estimating(self) -> Iterator[None]:
        """Optimizers and schedulers are made inside. Who asks for a training loader there wants its length: it is
        `trainer.estimated_stepping_batches`."""
        self._estimating = True
        try:
            yield
        finally:
            self._estimating = False

    @property
    def _foreseen(self) -> int:
        """Members to be reckoned with before this one is in the job: what all of them know of the world is min_nodes,
        of nodes with so many workers each as this one."""
        return self.config.min_nodes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def _estimate_words(self) -> dict[str, str]:
        """For the fingerprint: a schedule by a function of the user's is the same on all members only if they have
        counted the same. What else torch has takes its numbers over from the others, with its state."""
        kept = (LambdaLR, MultiplicativeLR, SequentialLR, ChainedScheduler)
        schedulers = [c.scheduler for c in self.trainer.lr_scheduler_configs]
        own = [s for s in schedulers if isinstance(s, kept) or not type(s).__module__.startswith("torch.optim.")]
        if not self._estimated or not [s for s in own if not isinstance(s, BySamples)]:
            return {}
        return {"estimated_stepping_batches": f"counted for {self._foreseen} members"}

    def _check_estimate(self) -> None:
        """Says once that the world is another than the one that schedules were made for."""
        members, foreseen = self.engine.world_size, self._foreseen
        if not self._estimated or members == foreseen:
            return
        counted, self._estimated = self._estimated, 0
        _log.warning(
            "trainer.estimated_stepping_batches was read before this member was in the job, and counted with %d "
            "members (min_nodes=%d), that is %d batches an epoch; the job has %d members now. A schedule made of that "
            "number walks %s of its way while they are so many. BySamples goes by samples instead (docs/schedules.md)",
            foreseen, self.config.min_nodes, counted, members, f"{foreseen / members:.0%}",
        )  # fmt: skip

    def begin_pass(self, epoch: int) -> None:
        """The loader begins an epoch: the log says how long it is, so that an audit sees whether all of it was used."""
        units = self.elastic._units
        if units is not None and self.entered and self.trainer.limit_train_batches == 1.0:
            stream = "" if self._data == "shared" else self.engine.name
            self.engine.events.emit("epoch", stream=stream, epoch=epoch, length=units.length(epoch))

    def note_checkpoint(self, path: str) -> None:
        """A file of this member's state leaves the job."""
        step, head = self.stepped
        self.engine.events.emit("checkpoint", path=path, step=step, head=head)

    # ------------------------------------------------------------------ coming in

    def _enter(self) -> None:
        trainer = self.trainer
        engine = Engine(self.config)
        self._engine = self._source.engine = engine
        extra = {
            "syncs": lambda: sorted(self.collectives.syncs),
            "gradients": lambda: self.stepper.gradients(),
            "log_dir": lambda: self._log_dir,
        }
        self._state = LightningState(trainer, self.elastic, trainer.strategy.reduce, extra, self._adopt_extra)
        self._stepper = Stepper(
            engine,
            trainer,
            self._state,
            lambda: self.elastic.current,
            lambda: self.elastic.spent(),
            self._pass_is_over,
        )
        self._samples = SampleCount(trainer.lr_scheduler_configs)
        engine.prepare(sections=self._stepper.sections, buffers=self._stepper.buffers)
        epoch = epoch_of(trainer)
        if self._options.leave_on_signals:
            self._signals = Signals(self._leave, trainer._signal_connector)
        try:
            engine.join(
                fingerprint={**fingerprint_of(trainer, self.elastic), **self._estimate_words()},
                quota=self.elastic.quota,
                accumulate=trainer.accumulate_grad_batches,
                state=self._state,
                replay=LightningReplay(trainer),
                loaded=trainer.ckpt_path is not None or trainer.global_step > 0,
            )
        except RefusedError as error:
            raise RefusedError(f"{error}{advice(str(error), self.config)}") from error
        self._logs.hold(trainer.loggers)
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

    def _reenter(self) -> None:
        """Joins again after being fenced."""
        assert self._void is not None
        epoch = epoch_of(self.trainer)
        void, self._void = self._void, None
        void.end(self.trainer)
        self.stepper.reset()
        self.engine.rejoin(self.state)
        self._entered(epoch)

    def _entered(self, epoch_before: int) -> None:
        trainer, engine = self.trainer, self.engine
        assert self._loader is not None
        self._boundary_asked = False
        self._place.leave()
        self._loader.restart()
        self.in_job = True
        fresh = engine.role == "founder" and not engine.resumed
        start_clocks(trainer, fresh=engine.role == "founder")
        if engine.role == "founder":
            self._log_dir = ("", "")  # what was kept with a state is of the job before
        self._samples.begin(engine.header.ledger)
        self._observe(fresh=fresh)
        if not fresh and epoch_of(trainer) != epoch_before:
            # Every process has seen this hook for the epoch that it is in.
            with self.alone():
                _call_callback_hooks(trainer, "on_train_epoch_start")
                _call_lightning_module_hook(trainer, "on_train_epoch_start")
        if fresh and self.elastic.ledger.streams:
            engine.events.emit("resumed", step=trainer.global_step, ledger=self.elastic.ledger.streams)
        self.stepped = (engine.header.step, engine.header.hash)
        _log.info(
            "%s is rank %d of %d, in epoch %d at batch %d (%s)",
            engine.member_id, engine.rank, engine.world_size, epoch_of(trainer), batches_begun(trainer), engine.role,
        )  # fmt: skip
        self._promote_if_due(fresh=fresh)
        self._refit()

    def _adopt_extra(self, extra: Mapping[str, Any]) -> None:
        self.collectives.syncs = set(extra["syncs"])
        self.stepper.adopt_gradients(extra["gradients"])
        self._log_dir = extra["log_dir"]

    # ------------------------------------------------------------------ the rest point

    def rest(self) -> None:
        """Between two batches, with all counters at rest. StopIteration once this member has left."""
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
        if self.state.ended:
            self.state.ended = False
            make_up_for_end(self.trainer)
            raise StopIteration
        if not self.elastic.at_rest and not self._give_up_window():
            self._check_stepped()
            return
        try:
            self.engine.serve(self.state)
            while self._boundary_asked and not self.engine.out:
                self._boundary_asked = False
                self.engine.boundary(self.state)
                self._observe()
        except FencedError as error:
            self.fenced(error)
            self._come_in()
        except DepartedError:
            self._depart()
        self._check_departure()
        if self.departed:
            raise StopIteration
        self._promote_if_due(fresh=False)
        self._tell_log_dir()
        self.stepper.prove()
        assert self._loader is not None
        self._loader.begin()
        self._refit()

    def _tell_log_dir(self) -> None:
        """All members learn where the writer logs, whenever there is another one: `trainer.log_dir` may be asked for in
        training_step, where nothing can be exchanged."""
        if self.trainer.loggers and len(self.members) > 1 and self._log_dir[0] != self.members[0]:
            told = str(self.trainer.log_dir)
            self._log_dir = (next(iter(self.members), ""), told)

    def log_dir(self, own: Any) -> Any:
        """What `trainer.log_dir` is within a step: the writer's, as it was told last.

        Args:
            own: This member's, which is its answer where it is the writer or nobody logs.
        """
        return own if self._environment.global_rank() == 0 or not self._log_dir[0] else self._log_dir[1]

    def _give_up_window(self) -> bool:
        """Whether a new pass begins although a window is open: `on_train_batch_start` returned -1 and so ended the
        epoch. What the window used is in no step, and not used."""
        assert self._loader is not None
        if self._loader.under_way or not self.stepper.automatic:
            return False
        self.elastic.give_up()
        self.stepper.forget_window()
        return True

    def _check_stepped(self) -> None:
        """In the middle of a window, or past its end: then a step was left out."""
        current = self.elastic.current
        if self.stepper.automatic and current is not None and current.last:
            raise UnsupportedError(
                "a window went by without an optimizer step, although Lightning said it was due; "
                "LightningModule.optimizer_step must call optimizer.step(closure=...) each time (for other "
                "plans there is "
                "manual optimization)"
            )

    # ------------------------------------------------------------------ slots

    def average(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Runs an optimizer's closure, then averages; `.grad` holds the result for all that comes after.

        Returns:
            What the closure gave; None if nobody had a loss, so that there are no gradients.

        Raises:
            NoStep: This member was fenced meanwhile or let go, or its state has drifted from the others'.
        """
        with self.stepper.stepping():
            result = closure()
        number = self.stepper.number(optimizer)
        if not self.stepper.holds_average(number) or self.stepper.assigned(number):
            self._average(number)
        self.stepper.stepped(number)
        # A scaler fails where there is no gradient; None is what tells it, as it does without the strategy.
        return None if self.stepper.automatic and self.engine.header.total_weight <= 0 else result

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
        self._observe()
        if self.engine.member_id in header.drifted:
            self.fenced(
                FencedError(f"the state of {self.engine.member_id} differs from the others' at step {header.step}")
            )
            raise NoStep
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

    def backward(self, loss: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """One backward pass, or none if this member has been fenced."""
        try:
            if self.in_job:
                return self.stepper.backward(loss, run)
        except FencedError as error:
            self.fenced(error)
        except DepartedError:
            self._depart()
        return loss

    def manual_backward(self, run: Callable[[], None]) -> None:
        """One backward pass of manual optimization and its average, or none if this member is out of the job."""
        if self.in_job:
            self.stepper.manual_backward(run)

    def _pass_is_over(self) -> None:
        """The average of what a backward pass of manual optimization reached."""
        with contextlib.suppress(NoStep):
            for number in self.stepper.reached:
                self._average(number)

    def applies(self, optimizer: Optimizer) -> bool:
        """Whether a step may be taken although this member is out of the job: the others take it, too."""
        return self.departed and not self.void and self.stepper.holds_average(self.stepper.number(optimizer))

    def gather(self, name: str, payload: bytes) -> list[tuple[str, bytes]] | None:
        """Everybody's payload; None if this member is not in the job."""
        if not self.in_job:
            return None
        before = self.members
        try:
            answers = self.engine.gather(name, payload, yields=self.collectives.owes)
            while self.engine.header.name != name:
                self._went_along(self.engine.header)
                answers = self.engine.gather(name, payload, yields=True)
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
        self._logs.stable()
        self._samples.committed(engine.header.ledger)
        self._boundary_asked |= engine.header.boundary
        if engine.rank < 0 or engine.out:
            return
        self._check_estimate()
        wrote = self._environment.global_rank() == 0
        # Always: who was put out had another number meanwhile, which can be that of the world it comes back to.
        refit_rates(self.trainer, engine.world_size)
        if self._environment.place(engine.rank, engine.world_size):
            self._promotion_due = True
            with self.alone():
                open_loggers(self.trainer, engine.name, fresh=fresh)
        elif wrote and engine.rank != 0:
            demote(self.trainer)

    def _promote_if_due(self, *, fresh: bool) -> None:
        if self._promotion_due:
            self._promotion_due = False
            with self.alone():
                promote(self.trainer, fresh=fresh)

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
        """What Lightning is told when it asks for the loader's length."""
        total = self._total()
        return ENDLESS if math.isinf(total) else int(total)

    def _total(self) -> float:
        """Micro-batches of this epoch; inf while unknown (with data of its own, nobody knows the others')."""
        if self._data == "local":
            # Before the pass has begun, the loader still speaks of the one before.
            current = self.entered and self.elastic.epoch == epoch_of(self.trainer)
            over = current and self.elastic.epoch_spent()
            return batches_begun(self.trainer) if over else math.inf
        if not self.entered:
            # All members that will ever be must find the same number here.
            return math.ceil(len(self.elastic) / self._foreseen)
        return len(self.elastic)

    def _refit(self) -> None:
        refit(self.trainer, self._total())

    # ------------------------------------------------------------------ going

    def _leave(self, reason: str) -> None:
        self.terminated |= "SIGTERM" in reason
        self.engine.leave(reason)

    def fenced(self, error: FencedError) -> None:
        """The state is void from here on; get to the next rest point without anybody's help."""
        if self.void:
            return
        _log.warning("%s; this process joins again by itself", error)
        self._step_aside()
        self._logs.drop()
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
            if stepped:
                self._keep_due = True
            else:
                self._keep()
            engine = self.engine
            self.gone = not (engine.role and engine.view is not None and engine.view.ids() == (engine.member_id,))
            if self.gone:
                self._step_aside()
            else:
                if self.elastic.uncommitted:
                    self._uncommitted = rolled_back(loops_manifest(self.trainer), self.elastic.uncommitted)
                self.in_job = False
                save_logs(self.trainer)
            skip_validation(self.trainer)

    def _keep(self, *, ended: bool = False) -> None:
        """If this was the last member, the state outlives it."""
        self._keep_due = False
        with self.alone():
            self.engine.keep(KeptState(self.state, self.elastic.uncommitted, ended=ended))

    def end_epoch(self) -> None:
        """This member has left, and the epoch's end is not judged: there is no rest point after its last batch."""
        if self._keep_due:
            self._keep(ended=True)
        if self._uncommitted is not None:
            uncount(self.trainer, self._uncommitted)

    def say_unsaved(self, path: str) -> None:
        """A checkpoint was asked for that this member does not write."""
        why = "was put out of the job, so its state is void" if self.void else "has left the job"
        _log.warning(
            "%s %s after step %d, so %s is not written here: the others go on, and their writer saves",
            self.config.name, why, self.stepped[0], path,
        )  # fmt: skip

    def _step_aside(self) -> None:
        self.in_job = False
        if self._environment.global_rank() == 0:
            save_logs(self.trainer)
        self._environment.place(*ASIDE)
        demote(self.trainer)

    def finish(self) -> None:
        """fit is over: the job's last slot, or the farewell of a member that left."""
        if self.void:
            raise FencedError(
                "this member was excluded from the job as it ended, so its state is void; the others have the result"
            )
        if not self.entered:
            return
        if self.in_job:
            with contextlib.suppress(DepartedError):
                self.engine.finish()
            # The writer may have died since the last slot: one of those who finish saves what is saved after fit.
            self._observe()
            self.in_job = False
        elif self.engine.out:
            self.engine.wait_released()

    def abandon(self) -> None:
        """An exception ends fit: what callbacks do now must not call for the others, who go on without this member."""
        self.in_job = False
        self._place.leave()
        if self._engine is not None:
            try:
                self._engine.close()
            except Exception as error:  # the exception that brought us here must be the one that is seen
                _log.warning("closing the engine of %s failed: %r", self.config.name, error)

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        self.abandon()
        forget_agreement(self.trainer)
        if self._stepper is not None:
            self._stepper.close()
        self._logs.release()
        if self._signals is not None:
            self._signals.restore()
            self._signals = None
        if self._loader is not None:
            self.elastic.close()
