"""Runs one fit's part in an outer job: joining, exchanges between steps, ends of epochs, and leaving.

Theory of operation. A cluster trains by itself, so there is little to agree on. After each optimizer step it tells the
session what the step used, and there a new version may be adopted, in place: Lightning's counters then follow the
job's clock (outer_clock.py).

Where clusters share the data, an epoch of the job is one pass over it by all of them together. Whether a batch is this
cluster's last one of an epoch is known only once its positions count, since others may die and theirs be dealt again.
So the last batch that is known is told to Lightning as the epoch's last one, by which the step is taken even if the
accumulation is short. After that step the cluster waits until more is dealt, of this epoch or of the next one; it
pushes and adopts meanwhile. If it is more of this epoch, the batch was not the last one after all: Lightning asks only
afterwards. So what is validated at an epoch's end is a version that holds the whole epoch.

The oldest cluster logs and writes files, as rank 0 does elsewhere. When it goes, another one opens its loggers between
two batches; where both see the same disk it goes on with the files of the one before (files.py). What is logged goes to
them before the next batch, so one that is killed has written all but its last step.

A cluster may have to stop in the middle of an epoch: the job is over, or it was asked to leave. Then fit ends at the
next batch, without the hooks that judge an epoch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from torch import Tensor

from chaos_lightning.data.feeds import Tag, batch_length, declared_batch
from chaos_lightning.data.leased import LeasedLoader
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.outer.cluster.cluster_effects import Boundary, renew
from chaos_lightning.outer.cluster.leaving import Patience, leaving_signals
from chaos_lightning.outer.cluster.session import OuterSession
from chaos_lightning.outer.rules.types import Covered
from chaos_lightning.strategies.data import themselves
from chaos_lightning.strategies.elastic import explained
from chaos_lightning.strategies.files import LogPlace, mark
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import (
    ENDLESS,
    batches_begun,
    epoch_of,
    refit,
    save_last_again,
    skip_validation,
    unfinish_epoch,
    why_over,
)
from chaos_lightning.strategies.outer_clock import JobClock
from chaos_lightning.strategies.outer_ranks import RankedSession
from chaos_lightning.strategies.session import handlers_of_user
from chaos_lightning.strategies.writer import StableLog, open_loggers

_log = logging.getLogger("chaos_lightning")

NOTHING: tuple[Covered, ...] = ()
WHERE_TO_LOOK = "`chaos-lightning ps status` tells what is held up; options.patience_s sets how long to wait"
CHECKPOINTS = "checkpoints"
"""Folder in which Lightning keeps checkpoints by default, in the first logger's folder."""
TURN_S = 0.1
"""Seconds between two looks at pushes and versions, while a cluster waits for samples."""


class OuterFit:
    """Part of one call of `fit` in an outer job.

    Args:
        trainer: Trainer of this fit.
        writes: Function that takes whether this cluster is the oldest one, which logs and writes; returns whether it
            has become that.
        patience_s: Seconds to wait for samples, or for the job's end.
        ranks: Number of processes of the cluster.

    Attributes:
        loader: The training loader, where clusters share the data.
        departed: Whether the cluster was asked to leave, and did.
        late: Always False: no cluster goes on behind the training of others.
        asked: Signal that asked it to leave, if one did.
        closed: Whether fit is over.
    """

    late = False

    def __init__(self, trainer: Trainer, writes: Callable[[bool], bool], patience_s: float, ranks: int = 1) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self._writes = writes
        self._logs = StableLog(lambda: False, uuid.uuid4().hex)
        self.loader: SharedLoader | None = None
        self.departed = self.closed = False
        self.asked: signal.Signals | None = None
        self._patience_s = patience_s
        self._session: OuterSession | RankedSession | None = None
        self._clock: JobClock | None = None
        self._signals = leaving_signals(
            lambda: self.session.leave(),
            lambda: self.session.at_risk,
            speaks=lambda: self._speaks,
            also=self._on_signal,
        )
        self._asked = False
        self._ended = ""
        """Reason why fit stops in the middle of an epoch; "" while it goes on."""
        self._local_samples = 0
        self._steps = 0
        self._loss: Any = None
        self._shows_base = False

    # ------------------------------------------------------------------ coming in

    @property
    def session(self) -> OuterSession | RankedSession:
        assert self._session is not None, "this cluster has not come in yet"
        return self._session

    @property
    def clock(self) -> JobClock:
        assert self._clock is not None
        return self._clock

    @property
    def in_step(self) -> bool:
        """Whether training has begun and fit is not over."""
        return self._clock is not None and not self.closed

    @property
    def batch(self) -> int:
        """Number of samples of an inner step, as the loaders declare it; 0 if they do not."""
        accumulate = self.trainer.accumulate_grad_batches
        if self.loader is not None:
            return self.loader.leased.batch * accumulate
        combined = self.trainer.fit_loop._combined_loader
        sizes = [declared_batch(each) for each in combined.flattened] if combined is not None else []
        return sum(sizes) * accumulate * self.ranks if all(sizes) else 0

    def share(self, loader: SharedLoader) -> SharedLoader:
        """Makes this loader the one that trains, in place of an earlier one, whose leased positions it takes over;
        returns it.
        """
        if self.loader is not None:
            loader.leased.inherit(self.loader.leased)
            loader.leased.first = self.loader.leased.first
            self.loader.leased.close()
        self.loader = loader
        return loader

    def start(self, session: OuterSession | RankedSession, timeout_s: float) -> None:
        """Joins the outer job. Afterwards the parameters are those of the job's newest version; a founder's become
        the first version.
        """
        self._session = session
        try:
            session.start(timeout_s)
        except ConfigurationError as error:
            raise ConfigurationError(explained(str(error))) from error
        if self._writes(session.oldest) and self.trainer.is_global_zero:
            open_loggers(self.trainer, session.incarnation, fresh=True)  # it set up as a cluster that does not write

    def begin(self, leave_on_signals: bool) -> None:
        """Begins training, before the first batch: sets loops and schedules to the job's progress."""
        self._clock = JobClock(self.trainer)
        self._clock.begin()
        if self.loader is not None:
            self.loader.leased.first = self._clock.first_epoch
            self._clock.skip_epochs(self.session.progress.epoch)
            refit(self.trainer, math.inf)
        self._clock.put(self.session.reckoned, in_batch=False)
        self._logs.hold(self.trainer.loggers)
        self._mark_files()
        if leave_on_signals:
            self._signals.install()

    # ------------------------------------------------------------------ samples

    def claim(self, positions: int, *, wait: bool, within: int = -1) -> tuple[Tag, ...]:
        """Claims positions of the shared data for this cluster; see `data.leased.LeaseSource`."""
        got: tuple[Covered, ...] = ()

        def found() -> bool:
            nonlocal got
            got = got or self.session.claim(positions)
            return bool(got) or 0 <= within < self.session.progress.epoch

        if wait:
            self._wait(found)
        elif not (self._stops or self.closed):
            found()
        return tuple((each.epoch, each.spans) for each in got)

    def _wait(self, found: Callable[[], bool]) -> None:
        """Waits between two steps until `found` returns true or this cluster stops. Pushes finished steps and adopts
        versions meanwhile.
        """
        patience = Patience(self.session.incarnation, self._waits_for, self._patience_s, tells=self._speaks)
        while not (self._stops or self.closed or found()):
            self._take(self.session.boundary(0, steps=0), in_batch=self._in_batch)
            self._logs.stable()
            self.session.pause(TURN_S)
            patience.look()

    def _waits_for(self) -> str:
        return f"{self.session.waits_for()}, after {self.session.base}. {WHERE_TO_LOOK}"

    @property
    def last_known(self) -> bool:
        """Whether the present batch is the last one that is known so far."""
        return self.loader is not None and self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    @property
    def _in_batch(self) -> bool:
        """Whether training is within a batch, not between two batches."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready > progress.completed

    @property
    def _leaving(self) -> bool:
        """Whether the cluster was asked to leave. With several ranks, only once all know it, since they stop
        together.
        """
        return self.session.leaving or (self._asked and self.ranks == 1)

    @property
    def _stops(self) -> bool:
        return bool(self._ended) or self._leaving or self.session.ending

    def fetched(self, batch: Any) -> None:
        """Notes a fetched batch; raises StopIteration if the cluster is to train no more."""
        if self._stops:
            # Lightning has begun it.
            progress = self.trainer.fit_loop.epoch_loop.batch_progress
            progress.current.ready, progress.total.ready = progress.current.ready - 1, progress.total.ready - 1
            progress.is_last_batch = False
            self.safe_point()
        self._look_who_writes()
        self._local_samples += batch_length(batch)

    def saw(self, output: Any) -> None:
        """Remembers the loss that a training step returned."""
        loss = output.get("loss") if isinstance(output, dict) else output
        self._loss = loss.detach() if isinstance(loss, Tensor) else None

    # ------------------------------------------------------------------ boundaries

    def stepped(self, optimizer_steps: int = 0) -> None:
        """Reports an optimizer step to the session, or several that belong together, and adopts a new version if there
        is one.

        Args:
            optimizer_steps: Number of these steps, if Lightning counts them one by one.
        """
        if not self.in_step:
            return
        samples, covers = self._local_samples, NOTHING
        if self.loader is not None:
            samples, covers = self.loader.used()
        self._local_samples = 0
        self._steps += 1
        told = self._steps % max(1, self.trainer.log_every_n_steps) == 0 and self._loss is not None
        loss = float(self._loss) if told else None
        self._take(self.session.boundary(samples, covers, loss=loss), in_batch=True, counted=optimizer_steps)
        if self.loader is not None and self.last_known:
            self._end_of_epoch(self.loader.leased)

    def _take(self, boundary: Boundary, *, in_batch: bool, counted: int = 0) -> None:
        if boundary.outright and self.loader is not None:
            self.loader.leased.forget()
        renew(self.trainer.optimizers, boundary)
        self._ended = self._ended or boundary.over
        self.clock.put(self.session.reckoned, in_batch=in_batch, counted=counted, back=boundary.outright)

    def _end_of_epoch(self, leased: LeasedLoader) -> None:
        """Waits after the last known batch until it is clear whether more of the epoch is leased. If not, the epoch
        is over, and the version adopted last holds all of it.
        """
        self._wait(lambda: leased.known or self.session.progress.epoch > leased.epoch)
        if leased.known:
            refit(self.trainer, math.inf)
            return
        refit(self.trainer, batches_begun(self.trainer))
        if self.session.progress.epoch <= leased.epoch:
            self._ended = self._ended or self.session.over or "it was asked to leave"
            skip_validation(self.trainer)
            return
        self.clock.skip_epochs(self.session.progress.epoch - leased.epoch - 1)
        self.clock.put(self.session.reckoned, in_batch=True, back=True)

    def begins(self, epoch: int) -> None:
        """Notes that the loader begins a pass over this epoch of the job. Skips epochs that others finished while
        this cluster waited for its first samples.
        """
        missed = self.clock.first_epoch + epoch - epoch_of(self.trainer)
        if missed > 0:
            self.clock.skip_epochs(missed)
            _call_callback_hooks(self.trainer, "on_train_epoch_start")
            _call_lightning_module_hook(self.trainer, "on_train_epoch_start")

    def safe_point(self) -> None:
        """Raises StopIteration, at a safe point between two batches, if the cluster is to train no more."""
        if self._stops:
            self._ended = self._ended or self.session.over or "it was asked to leave"
            raise StopIteration

    def _look_who_writes(self) -> None:
        """Continues the log files of the oldest cluster that is gone, if this cluster is now the oldest. Called
        outside of steps.
        """
        self._logs.stable()
        if not self._writes(self.session.oldest):
            return
        trainer, session = self.trainer, self.session
        before = os.path.join(str(trainer.log_dir), CHECKPOINTS)
        if trainer.is_global_zero:
            told = LogPlace(run=session.job_id)
            open_loggers(trainer, session.incarnation, fresh=False, told=told, writer=self._logs.writer)
            self._mark_files()
        now = os.path.join(str(trainer.log_dir), CHECKPOINTS)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath == before:
                callback.dirpath = now

    def _mark_files(self) -> None:
        """Marks this cluster's log folders, by which the next oldest cluster finds them if it shares the file
        system.
        """
        if self.trainer.is_global_zero:
            mark(self.trainer.loggers, self.session.job_id, self._logs.writer)

    @property
    def stopped_within_epoch(self) -> bool:
        """Whether fit stopped in the middle of an epoch, so that the hooks at its end must not run."""
        return bool(self._ended)

    # ------------------------------------------------------------------ what is judged

    def show_base(self) -> None:
        """Sets the parameters to those of the version adopted last, until `show_own`."""
        if self.in_step and not self._shows_base:
            self._shows_base = True
            self.session.show_base()

    def show_own(self) -> None:
        """Sets the parameters back to the values that are trained. Idempotent."""
        if self._shows_base:
            self._shows_base = False
            self.session.show_own()

    @property
    def shows_base(self) -> bool:
        return self._shows_base

    @contextlib.contextmanager
    def showing_base(self) -> Iterator[None]:
        """Sets the parameters to the version adopted last within this context, in this process only: of several
        ranks only the first one has that version.
        """
        member = self.session.member if isinstance(self.session, RankedSession) else self.session
        if member is not None:
            member.show_base()
        try:
            yield
        finally:
            if member is not None:
                member.show_own()

    # ------------------------------------------------------------------ going

    def _on_signal(self, number: signal.Signals, frame: FrameType | None) -> None:
        """Handles the first Ctrl+C, SIGTERM or SIGHUP: makes the cluster leave, and calls the user's own handlers."""
        self._asked = True
        self.asked = self.asked or number
        for handler in handlers_of_user(self._signals.before[number], self.trainer._signal_connector):
            handler(number, frame)

    def leave(self) -> None:
        """Makes the cluster leave, as a callback asks. Any thread."""
        self._asked = True
        self.session.leave()

    @property
    def _speaks(self) -> bool:
        """Whether this process prints about signals. Ctrl+C reaches all ranks, and one line is enough."""
        return not isinstance(self.session, RankedSession) or self.session.member is not None

    def finish(self) -> None:
        """Waits, after the loop is over, until this cluster's steps are durable, and, if others are not far behind,
        until the job has ended. The parameters are then those of the job's last version.
        """
        self.show_own()
        if self._leaving:
            self.departed = True
            self.session.leave()
        self.session.finish(self._ended or why_over(self.trainer))
        self.clock.put(self.session.reckoned, in_batch=False, back=True)
        if not self.departed:
            self._look_who_writes()
            save_last_again(self.trainer)

    def close(self) -> None:
        """Ends this cluster's part in the job, and restores what it has changed in Lightning. Idempotent."""
        if self.closed:
            return
        self.show_own()
        self.closed = True
        try:
            self._logs.stable()
            if self._session is not None:
                self._session.close()
        except Exception as error:  # the exception that brought us here must be the one that is seen
            _log.warning("closing the session of %s failed: %r", self.session.incarnation, error)
        if self._clock is not None:
            self._clock.end()
        self._logs.release()
        self._signals.restore()
        if self.loader is not None:
            self.loader.leased.close()


class SharedLoader:
    """Loader that Lightning iterates over in place of the user's training loader, if clusters share the data.

    Args:
        leased: Loader of the leased batches.
        trainer: Trainer of this fit.
        fit: This cluster's part in the outer job.
    """

    def __init__(self, leased: LeasedLoader, trainer: Trainer, fit: OuterFit) -> None:
        self.leased = leased
        self._trainer = trainer
        self._fit = fit

    def __iter__(self) -> SharedLoader:
        iter(self.leased)
        return self

    def __next__(self) -> Any:
        self._fit.safe_point()
        begins = not self.leased.begun
        try:
            batch = next(self.leased)
        except StopIteration:
            self._fit.safe_point()
            raise
        if begins:
            self._fit.begins(self.leased.epoch)
        refit(self._trainer, math.inf if self.leased.known else batches_begun(self._trainer) + 1)
        return batch

    def __len__(self) -> int:
        """Returns a number of batches: before training, those that one cluster alone would need; afterwards a huge
        number, since nobody knows.
        """
        return (
            ENDLESS // self._fit.ranks if self._fit.in_step else len(self.leased)
        )  # Lightning adds up the lengths of all ranks

    def used(self) -> tuple[int, tuple[Covered, ...]]:
        """Returns the number of samples, and the positions, of the batches since the last call."""
        samples, covers = self.leased.used()
        return samples, tuple(Covered(epoch, spans) for epoch, spans in covers)

    def __reduce__(self) -> Any:
        """Makes pickle and copy return the user's own loader: a copy has no part in the job."""
        return themselves, (self.leased.loader,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "leased":
            raise AttributeError(name)
        return getattr(self.leased.loader, name)


class OuterCompanion(pl.Callback):
    """Callback that runs before all others during fit, for events that Lightning reports to a strategy too late or not
    at all.

    Args:
        fit: Part of this cluster in the outer job; None in a copy, which has no part in a job.
    """

    def __init__(self, fit: OuterFit | None) -> None:
        self._fit = fit

    @property
    def state_key(self) -> str:
        return "chaos_lightning.OuterCompanion"

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None and self._fit.stopped_within_epoch:
            # fit's loop ends at a StopIteration, without the epoch-end hooks that would judge half an epoch.
            unfinish_epoch(self._fit.trainer)
            raise StopIteration

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finishes this cluster's part before other callbacks look at the result, so that they see the job's."""
        if self._fit is not None:
            self._fit.finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._fit is not None:
            self._fit.close()

    def __reduce__(self) -> Any:
        return OuterCompanion, (None,)
