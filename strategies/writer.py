"""The writer: the one member that logs, draws the progress bar and writes files; and how another becomes it.

Theory of operation. Rank 0 writes. Everybody sets up as rank 1, so becoming the writer is one and the same thing for
the job's first member and for one whose writer has died or left: loggers open, hyperparameters are logged, the
progress bar is switched on where the loops stand, and callbacks that write once at set-up get a second chance.

Logged values leave the job only when the step they belong to is stable (protocol.md 4): with other members, calls of
`log_metrics` wait until the next slot has committed. A writer that dies in between has logged nothing that others redo.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.callbacks import ModelSummary, ProgressBar, ThroughputMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.trainer import _log_hyperparams

from chaos_lightning.strategies.environment import ASIDE, ChaosEnvironment
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import measure_anew, refit_rates


class StableLog:
    """Holds back what loggers are told until the next commit.

    Args:
        alone: Whether nobody else could redo the present step, so that waiting is pointless.
    """

    def __init__(self, alone: Callable[[], bool]) -> None:
        self._alone = alone
        self._waiting: list[Callable[[], None]] = []
        self._held: list[tuple[Logger, dict[str, Any]]] = []
        """With what the user had put in place of `log_metrics`."""

    def hold(self, loggers: list[Logger]) -> None:
        """From here on these loggers' `log_metrics` goes through here, once where one is given twice."""
        for logger in {id(logger): logger for logger in loggers}.values():
            own = {name: value for name, value in vars(logger).items() if name == "log_metrics"}
            self._held.append((logger, own))
            logger.log_metrics = self._wrap(logger.log_metrics)  # type: ignore[method-assign]

    def _wrap(self, real: Callable[..., None]) -> Callable[..., None]:
        def log_metrics(*args: Any, **kwargs: Any) -> None:
            if self._alone():
                real(*args, **kwargs)
            else:
                self._waiting.append(lambda: real(*args, **kwargs))

        return log_metrics

    def stable(self) -> None:
        """A slot committed: whatever was logged before it is final."""
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            write()

    def drop(self) -> None:
        """This member was fenced: its last step may be redone by others."""
        self._waiting.clear()

    def release(self) -> None:
        """Loggers are the user's again; what still waits is dropped."""
        self._waiting.clear()
        for logger, own in self._held:
            vars(logger).pop("log_metrics", None)
            vars(logger).update(own)
        self._held.clear()


class Writer:
    """Whether this member is the writer of a fit, and what changes with it.

    Args:
        trainer: In fit.
        environment: Told who this process is.
        in_job: Whether collectives reach other members.
        alone: Collectives inside answer with this member's own values.

    Attributes:
        log_dir: The writer that has told where it logs, and what it said. It travels with the training state.
    """

    def __init__(
        self,
        trainer: Trainer,
        environment: ChaosEnvironment,
        in_job: Callable[[], bool],
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._trainer = trainer
        self._environment = environment
        self._alone = alone
        self._due = False
        """What can only be done between two batches has yet to be done."""
        self.logs = StableLog(lambda: not in_job() or environment.world_size() == 1)
        self.log_dir = ("", "")

    @property
    def is_here(self) -> bool:
        return self._environment.global_rank() == 0

    def place(self, name: str, rank: int, world_size: int, *, fresh: bool) -> None:
        """A slot committed, or this member came in: who is it now?

        Args:
            name: Of this member.
            rank: Of this member.
            world_size: Of the job.
            fresh: The job starts; nobody has written yet.
        """
        wrote = self.is_here
        # Always: who was put out had another number meanwhile, which can be that of the world it comes back to.
        refit_rates(self._trainer, world_size)
        if self._environment.place(rank, world_size):
            self._due = True
            with self._alone():
                open_loggers(self._trainer, name, fresh=fresh)
        elif wrote and rank != 0:
            _demote(self._trainer)

    def promote_if_due(self, *, fresh: bool) -> None:
        """Between two batches: the rest of becoming the writer."""
        if self._due:
            self._due = False
            with self._alone():
                _promote(self._trainer, fresh=fresh)

    def tell_log_dir(self, members: Callable[[], tuple[str, ...]]) -> None:
        """All members learn where the writer logs, whenever there is another one: `trainer.log_dir` may be asked for in
        training_step, where nothing can be exchanged."""
        here = members()
        if self._trainer.loggers and len(here) > 1 and self.log_dir[0] != here[0]:
            told = str(self._trainer.log_dir)
            self.log_dir = (next(iter(members()), ""), told)  # the writer may have died meanwhile

    def told_log_dir(self, own: Any) -> Any:
        """What `trainer.log_dir` is within a step: the writer's, as it was told last.

        Args:
            own: This member's, which is its answer where it is the writer or nobody logs.
        """
        return own if self.is_here or not self.log_dir[0] else self.log_dir[1]

    def save_logs(self) -> None:
        """What loggers hold back goes to their files, while this member is still the writer."""
        for logger in self._trainer.loggers:
            logger.save()

    def step_aside(self) -> None:
        """This member is out: it must not look like the writer."""
        if self.is_here:
            self.save_logs()
        self._environment.place(*ASIDE)
        _demote(self._trainer)


def open_loggers(trainer: Trainer, name: str, *, fresh: bool) -> None:
    """This member writes from now on: loggers open, and clocks of rank zero start. Collectives must be off meanwhile.

    Args:
        trainer: In fit.
        name: This member's name; distinguishes its log folder from that of the writer before.
        fresh: The job starts; nobody has written yet.
    """
    for logger in trainer.loggers:
        if not fresh:
            _own_folder(logger, name)
        if hasattr(logger, "experiment"):
            _ = logger.experiment
    for callback in trainer.callbacks:
        if isinstance(callback, ThroughputMonitor):
            measure_anew(callback)
    if trainer.enable_autolog_hparams:
        _log_hyperparams(trainer)


def _promote(trainer: Trainer, *, fresh: bool) -> None:
    """The rest of becoming the writer, between two batches. Collectives must be switched off meanwhile."""
    cli = sys.modules.get("lightning.pytorch.cli")
    for callback in trainer.callbacks:
        if cli is not None and isinstance(callback, cli.SaveConfigCallback) and fresh:
            callback.setup(trainer, trainer.lightning_module, "fit")
        elif isinstance(callback, ModelSummary) and fresh:
            callback.on_fit_start(trainer, trainer.lightning_module)
        elif isinstance(callback, ProgressBar):
            callback.enable()
            callback.on_train_start(trainer, trainer.lightning_module)
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def _own_folder(logger: Logger, name: str) -> None:
    """File loggers empty the folder they open; the one of the writer before may be shared."""
    folder = getattr(logger, "log_dir", None)
    if hasattr(logger, "_version") and hasattr(logger, "_experiment") and folder and os.path.isdir(folder):
        version = logger.version
        logger._version = f"version_{version}-{name}" if isinstance(version, int) else f"{version}-{name}"
        logger._experiment = None


def _demote(trainer: Trainer) -> None:
    """Somebody else writes now."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.disable()
