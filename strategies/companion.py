"""Adds a private callback and a launcher, for moments at which Lightning calls no hook of a strategy.

Theory of operation. `Companion` stands first in the list of callbacks for the time of fit, and serves hooks that only
callbacks have. `Launcher` calls each of the Trainer's functions, such as fit. A member that leaves (Ctrl+C, SIGTERM, a
closed terminal, a drain, ChaosExit) ends fit politely, before the training is over. Lightning would call that finished,
since it knows no other end without an exception. So the launcher raises `LeftJobError` after fit: `trainer.interrupted`
is True, loggers are told that the run failed, and what follows fit is not run, as after a Ctrl+C without the strategy.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from chaos_lightning.errors import LeftJobError, RestartError
from chaos_lightning.strategies.evaluation import refit_limits
from chaos_lightning.strategies.handover import compute_epoch
from chaos_lightning.strategies.loops import unfinish_epoch
from chaos_lightning.strategies.session import FitSession, end_unused_batch
from chaos_lightning.strategies.stepping import IDLE_KEY

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "SLURM_PROCID")
"""Variables that a launcher sets for what it starts: torchrun and `chaos-lightning run`, Lightning's own, Slurm's."""
_log = logging.getLogger("chaos_lightning")


def no_rows(value: Any) -> Any:
    """Returns the value as it would be for zero samples: tensors get zero rows, containers are emptied, a scalar
    tensor stays.
    """
    if isinstance(value, Tensor):
        return value.new_empty((0, *value.shape[1:])) if value.dim() else value.detach()
    if isinstance(value, dict):
        return {key: no_rows(item) for key, item in value.items()}
    return type(value)() if type(value) in (list, tuple) else value


def watch_spikes(callbacks: Sequence[pl.Callback], *, idle: bool) -> None:
    """Makes `SpikeDetection` ignore a batch of which this member has no samples (`idle`). The callback would take it
    for a loss of 0, and the next loss for a spike. Its collectives still run, since the other members wait for them.
    """
    for callback in callbacks:
        if isinstance(callback, SpikeDetection):
            for name in ("_update_stats", "_is_spike"):
                vars(callback).pop(name, None)
                if idle:
                    vars(callback)[name] = _no_spike


def _no_spike(loss: Tensor) -> bool:
    return False


class Companion(pl.Callback):
    """Callback that the strategy inserts during fit. It has no state in checkpoints.

    Args:
        session: Part of this fit in the job; None in a copy, which has no part in it.
    """

    def __init__(self, session: FitSession | None) -> None:
        self._session = session
        self._like: dict[str, Any] = {"loss": torch.zeros(())}
        """`outputs` of an idle member: those of its last batch, without the samples."""
        self._began = 0.0

    @property
    def state_key(self) -> str:
        return "chaos_lightning.Companion"

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Replaces `outputs` for all later callbacks and hooks if the batch has no loss: no training_step ran, or it
        returned None. Ends the loop before them if no step uses the batch.
        """
        if self._session is not None:
            end_unused_batch(self._session)
        if not isinstance(outputs, dict):
            return
        idle = outputs.pop(IDLE_KEY, None)
        watch_spikes(trainer.callbacks, idle=idle is not None)  # type: ignore[attr-defined]
        if idle is None:
            self._like = {name: no_rows(value) for name, value in outputs.items()}
            return
        outputs.clear()
        if idle:
            outputs.update(self._like, **{IDLE_KEY: True})

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Computes the logged values of the epoch, on whose keys members agree first; ends fit instead if this
        member has left.
        """
        session = self._session
        if session is None:
            return
        if session.departed:
            # fit's loop ends at a StopIteration, without the epoch-end hooks that would judge half an epoch.
            session.end_epoch()
        if session.departed or session.hooks.ended:
            unfinish_epoch(session.trainer, begun=not session.hooks.through)
            raise StopIteration
        compute_epoch(session.trainer, session.handover, session.collectives.exchange, alike=session.logs_alike)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.monotonic()
        if self._session is not None:
            refit_limits(self._session.trainer, self._session.evaluation)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the division of validation batches among members: from here on all members do the same."""
        if self._session is not None:
            self._session.evaluation.assigning = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        session = self._session
        if session is not None and session.in_job:
            session.engine.events.emit("validation", seconds=round(time.monotonic() - self._began, 4))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the part in an outer job before other callbacks look at the result, so that they see the outer job's."""
        if self._session is not None:
            self._session.hooks.finish(self._session)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves the job: other callbacks may now write a checkpoint, and must not wait for the other members."""
        if self._session is not None:
            self._session.abandon(exception)

    def __reduce__(self) -> Any:
        return Companion, (None,)


class Leaver(Protocol):
    """A fit's part in a job, as the launcher sees it: whether the fit has left, and by which signal.

    Attributes:
        asked: Signal that asked the fit to leave; None if it was drained, or a callback asked.
    """

    asked: signal.Signals | None

    @property
    def late(self) -> bool:
        """Whether this member came when the job was finished, and has its final state: code behind fit runs."""

    @property
    def departed(self) -> bool:
        """Whether this member left the job before its training was over, which ended the fit."""


class Launcher(_Launcher):
    """Launcher that calls the Trainer's function in the present process, since members are started from outside.

    Args:
        session: Function that returns the part in the job of the fit that has just ended; None if it had none.
    """

    def __init__(self, session: Callable[[], Leaver | None]) -> None:
        self._session = session

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except RestartError as error:  # a SystemExit, of which Python says nothing
            _log.error("%s; the exit code is %d", error, error.code)
            raise
        _tell_departure(trainer, self._session())
        return result

    def kill(self, signum: Any) -> None:
        """Ignores the signal: this launcher has started no processes."""


class RankLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of DDP ranks, which also raises LeftJobError if the fit has left its job.

    Args:
        session: Function that returns the part in the job of the fit that has just ended; None if it had none.
    """

    def __init__(self, session: Callable[[], Leaver | None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session = session

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        result = super().launch(function, *args, trainer=trainer, **kwargs)
        _tell_departure(trainer, self._session())
        return result


def _tell_departure(trainer: pl.Trainer | None, session: Leaver | None) -> None:
    """Raises LeftJobError if the Trainer's function was `fit` and the fit has left its job."""
    if trainer is None or session is None or trainer.state.fn != TrainerFn.FITTING:
        return
    if not session.departed or session.late:
        return
    # Not sooner: Lightning aborts where it reads this within fit.
    trainer._signal_connector.received_sigterm |= session.asked is signal.SIGTERM
    code = exit_code(session.asked, os.environ)
    _log.warning(
        "fit ends after step %d, before the training is over; what follows it is not run, the exit code is %d",
        trainer.global_step, code,
    )  # fmt: skip
    raise LeftJobError(code, trainer.global_step)


def exit_code(asked: signal.Signals | None, environment: Mapping[str, str]) -> int:
    """Returns the exit code of a process that has left its job, depending on the signal and on what started the
    process.

    Args:
        asked: Signal that asked it to leave; None if something else did.
        environment: Environment of the process, which tells who started it. Starters that take any other code for a
            failure, and start the process again or end its siblings, get 0.
    """
    if any(name in environment for name in LAUNCHERS) or environment.get("SYSTEMD_EXEC_PID") == str(os.getpid()):
        return 0
    return os.EX_TEMPFAIL if asked is None else 128 + asked
