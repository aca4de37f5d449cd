"""Defines the writer, the one member that logs, draws the progress bar and writes files, and how another member becomes
it.

Theory of operation. Rank 0 writes. Everybody sets up as rank 1, so becoming the writer is one and the same thing for
the job's first member and for one whose writer has died or left: loggers open, hyperparameters are logged, the
progress bar is switched on where the loops stand, and callbacks that write once at set-up get a second chance.

Logged values leave the job only when the step they belong to is stable (protocol.md 4): with other members, calls of
`log_metrics` wait until the next slot has committed. A writer that dies in between has logged nothing that others redo.

The next writer goes on with the files of the one before (files.py). What is logged goes to them at once, so that a
writer that dies owes them what two commits made final at most: it had written what an earlier one did before it
contributed to the slot after. Other members remember so much. What the last of the two did is certainly not written
if the writer has not contributed to that slot.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelSummary, ProgressBar, ThroughputMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.trainer import _log_hyperparams

from chaos_lightning.strategies.environment import ASIDE, ChaosEnvironment
from chaos_lightning.strategies.files import Call, LogPlace, catch_up, forget, go_on, mark, save, taken_over, versions
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import measure_anew, refit_rates

_log = logging.getLogger("chaos_lightning")


class StableLog:
    """Buffer of log calls, which are passed on to loggers once the next slot has committed.

    Args:
        alone: Returns whether nobody else could redo the present step, so that waiting is pointless.
        writer: Id that tells this member from others in the files of the run.
    """

    def __init__(self, alone: Callable[[], bool], writer: str = "") -> None:
        self._alone = alone
        self.writer = writer
        self._waiting: list[Call] = []
        self._owed: list[list[Call]] = [[], []]
        """Calls that the last two commits made final."""
        self._held: list[tuple[Logger, dict[str, Any]]] = []
        """Loggers, each with what the user had put in place of `log_metrics`."""

    def hold(self, loggers: list[Logger]) -> None:
        """Redirects these loggers' `log_metrics` to this buffer; a logger that is given twice is redirected once."""
        for logger in {id(logger): logger for logger in loggers}.values():
            own = {name: value for name, value in vars(logger).items() if name == "log_metrics"}
            self._held.append((logger, own))
            logger.log_metrics = self._wrap(logger, logger.log_metrics)  # type: ignore[method-assign]

    def _wrap(self, logger: Logger, real: Callable[..., None]) -> Callable[..., None]:
        def log_metrics(*args: Any, **kwargs: Any) -> None:
            if self._alone():
                real(*args, **kwargs)
            else:
                self._waiting.append(Call(logger, real, args, kwargs))

        return log_metrics

    def stable(self) -> None:
        """Passes on the log calls made before the slot that has committed: their step can no longer be undone."""
        waiting, self._waiting = self._waiting, []
        self._owed = [self._owed[1], waiting]
        if not waiting or taken_over([logger for logger, _ in self._held], self.writer):
            return
        for call in waiting:
            call.make()
        self.save()

    def save(self) -> None:
        """Makes loggers write their files, so that a successor of this writer can continue them."""
        for logger, _ in self._held:
            save(logger)

    def owed(self, logger: Logger, *, certain: bool) -> list[Call]:
        """Returns the log calls that a dead writer may not have written with this logger, in order; if `certain`,
        only those of the last commit.
        """
        return [call for calls in self._owed[certain:] for call in calls if call.logger is logger]

    def drop(self) -> None:
        """Drops buffered log calls when this member is fenced: others may redo its last step, and write the values
        before it.
        """
        self._waiting.clear()
        self._owed = [[], []]
        for logger, _ in self._held:
            forget(logger)

    def release(self) -> None:
        """Restores the loggers' own `log_metrics`; calls that still wait are dropped."""
        self._waiting.clear()
        for logger, own in self._held:
            vars(logger).pop("log_metrics", None)
            vars(logger).update(own)
        self._held.clear()


class Writer:
    """The writer's role in a fit: whether this member has it, and what changes when it gets or loses it.

    Args:
        trainer: Trainer in fit.
        environment: Environment, which is told who this process is.
        in_job: Returns whether collectives reach other members.
        alone: Returns a context in which collectives answer with this member's own values.
        run: Returns the run's id if others than this job's members may go on with its files; "": there are none.

    Attributes:
        told: Place at which the writer logs, as it has told. It travels with the training state.
    """

    def __init__(
        self,
        trainer: Trainer,
        environment: ChaosEnvironment,
        in_job: Callable[[], bool],
        alone: Callable[[], AbstractContextManager[None]],
        run: Callable[[], str] = lambda: "",
    ) -> None:
        self._trainer, self._run = trainer, run
        self._environment = environment
        self._alone = alone
        self._due = False
        """Whether work is due that can only be done between two batches."""
        self._marked = False
        """Whether its folders are marked for others than this job's members."""
        self.logs = StableLog(lambda: not in_job() or (environment.world_size() == 1 and not run()), uuid.uuid4().hex)
        self.told = LogPlace()

    @property
    def is_here(self) -> bool:
        return self._environment.global_rank() == 0

    def place(self, name: str, rank: int, world_size: int, *, fresh: bool, lost: bool, let_go: bool) -> None:
        """Sets this member's rank after a slot committed, or as it entered; it may become the writer thereby, or cease
        to be it.

        Args:
            name: Name of this member.
            rank: Rank of this member.
            world_size: World size of the job.
            fresh: Whether the job starts, and nobody has written yet.
            lost: Whether the previous writer has no part in that slot.
            let_go: Whether it has, and leaves with it; it writes all that was logged before.
        """
        wrote = self.is_here
        # Always: a member that was put out counted as one of two meanwhile, and the job may have two members now.
        refit_rates(self._trainer, world_size)
        grows = world_size > self._environment.world_size()
        if self._environment.place(rank, world_size):
            self._due, self._marked = True, False
            told = self.told._replace(run=self.told.run or self._run())
            with self._alone():
                writer = "" if let_go else self.logs.writer
                opened = open_loggers(self._trainer, name, fresh=fresh, told=told, writer=writer)
                for logger, gone_on in opened.items():
                    if not let_go and (lost or gone_on):
                        catch_up(logger, self.logs.owed(logger, certain=not gone_on))
        elif wrote and rank == 0 and grows:
            self.logs.save()  # a member that came in now does not know what was logged before
        elif wrote and rank != 0:
            _demote(self._trainer)

    def promote_if_due(self, *, fresh: bool) -> None:
        """Finishes becoming the writer, if that is due. Called between two batches."""
        if self._due:
            self._due = False
            with self._alone():
                _promote(self._trainer, fresh=fresh)

    def tell_files(self, members: Callable[[], tuple[str, ...]]) -> None:
        """Tells all members where the writer logs, whenever the writer changes. They need it within training_step,
        for `trainer.log_dir`, and the next writer continues these files.
        """
        here, run = members(), self._run()
        if run and self.is_here and not self._marked:
            self._marked = True
            mark(self._trainer.loggers, run, self.logs.writer)
        if self._trainer.loggers and len(here) > 1 and self.told.writer != here[0]:
            answer = self._trainer.strategy.broadcast(self._files())
            self.told = LogPlace(here[0], *answer)  # if that writer has died meanwhile, the next one tells soon

    def _files(self) -> list[Any]:
        loggers, (_, _, run, known) = self._trainer.loggers, self.told
        with self._alone():
            folder = str(self._trainer.log_dir)
        return (
            [folder, mark(loggers, self._run() or run, self.logs.writer), versions(loggers)]
            if self.is_here
            else [folder, run, list(known)]
        )

    def told_log_dir(self, own: Any) -> Any:
        """Returns `trainer.log_dir` within a step: the writer's folder, as it was announced last.

        Args:
            own: Folder of this member, which is the answer if it is the writer or nobody logs.
        """
        return own if self.is_here or not self.told.writer else self.told.folder

    def save_logs(self) -> None:
        """Makes loggers write what they have buffered, while this member is still the writer."""
        for logger in self._trainer.loggers:
            logger.save()

    def step_aside(self, *, void: bool) -> None:
        """Gives up the writer's role, as this member is out of the job.

        Args:
            void: Whether it was put out: another member may write by now.
        """
        if self.is_here and not void:
            self.save_logs()
        self._environment.place(*ASIDE)
        _demote(self._trainer)


def open_loggers(
    trainer: Trainer, name: str, *, fresh: bool, told: LogPlace = LogPlace(), writer: str = ""
) -> dict[Logger, bool]:
    """Opens the loggers, and starts the clocks that run at rank zero only, as this member becomes the writer.
    Collectives must be off meanwhile.

    Args:
        trainer: Trainer in fit.
        name: This member's name; distinguishes its log folder from one that is not the run's.
        fresh: Whether the job starts, and nobody has written yet.
        told: Place at which the previous writer has logged.
        writer: Id that tells this member from others; "": the previous writer writes a little more.

    Returns:
        The loggers, and whether they know what the previous writer has written.
    """
    opened: dict[Logger, bool] = {}
    for place, logger in enumerate(trainer.loggers):
        if logger in opened:  # given twice
            continue
        version = told.versions[place] if place < len(told.versions) else None
        opened[logger] = not fresh and go_on(logger, version, told.run, name, writer)
        if hasattr(logger, "experiment"):
            _ = logger.experiment
    for callback in trainer.callbacks:
        if isinstance(callback, ThroughputMonitor):
            measure_anew(callback)
    if trainer.enable_autolog_hparams:
        _log_hyperparams(trainer)
    return opened


def _promote(trainer: Trainer, *, fresh: bool) -> None:
    """Finishes becoming the writer, between two batches: starts progress bar, summary and saved configuration.
    Collectives must be off meanwhile.
    """
    cli = sys.modules.get("lightning.pytorch.cli")
    for callback in trainer.callbacks:
        if cli is not None and isinstance(callback, cli.SaveConfigCallback) and fresh:
            _save_config(callback, trainer)
        elif isinstance(callback, ModelSummary) and fresh:
            callback.on_fit_start(trainer, trainer.lightning_module)
        elif isinstance(callback, ProgressBar):
            callback.enable()
            callback.on_train_start(trainer, trainer.lightning_module)
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def _save_config(callback: Any, trainer: Trainer) -> None:
    """Writes LightningCLI's configuration file, unless another founder has: one that counted as rank zero during its
    set-up may have written it to the same folder.
    """
    path = os.path.join(str(trainer.log_dir), callback.config_filename)
    written = callback.save_to_log_dir and not callback.overwrite and trainer.world_size > 1 and os.path.isfile(path)
    before = callback.save_to_log_dir
    if written:
        callback.save_to_log_dir = False
        if Path(path).read_text() != callback.parser.dump(callback.config, skip_none=False):
            _log.warning(
                "%s is there already, with another configuration than this member's, and stays: another founder has "
                "written it as it set up, or it is an earlier run's. Give each run a folder of its own",
                path,
            )
    try:
        callback.setup(trainer, trainer.lightning_module, "fit")
    finally:
        callback.save_to_log_dir = before


def _demote(trainer: Trainer) -> None:
    """Stops this member's progress bar and loggers, as another member is the writer now."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.disable()
