"""ChaosExit: makes a member leave its job politely on a signal, when a file appears, when its time is up, or when
its machine will be taken away.

Theory of operation. The first exit event asks the engine to leave: the member finishes the step it is in, the next
header lets it go, and `fit` raises `LeftJobError`, which ends the script; the others go on without a pause. A second
signal ends the process at once, as if there were no callback. Three neighbours handle signals too, and each is
respected:

- *Lightning* puts a SIGTERM handler in place before training, which would end `fit` with an exception at a batch
  boundary, past the job's back. While this callback is active its own handler stands; afterwards Lightning's is back.
- *The strategy* leaves on Ctrl+C, SIGTERM and SIGHUP by itself (`leave_on_signals`). This callback takes over from it,
  and is needed only for what it adds: other signals, a flag file, a time limit, or a strategy that knows nothing of
  leaving.
- *torchrun* forwards a signal that it got to its workers, and a terminal sends Ctrl+C to its whole foreground group, so
  one wish may arrive twice; repeats within `debounce_s` count as one. What torchrun sends after its
  `--shutdown-timeout` is SIGKILL: a step must be shorter than that.

Under a strategy without members the same events stop training after the step (`trainer.should_stop`).
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from chaos_lightning.callbacks.member import engine_of
from chaos_lightning.declared import declared
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.notice_watch import NoticeWatch
from chaos_lightning.machine.notices import NoticePlan
from chaos_lightning.machine.signals import ExitSignals, aside, end_by
from chaos_lightning.settings import EngineConfig

log = logging.getLogger("chaos_lightning.callbacks")


class ChaosExit(Callback):
    """Callback that leaves the job politely on an exit event.

    Args:
        signals: Names of the signals that are exit events.
        flag_file: File that is an exit event once it exists; looked for after each batch.
        after_s: Seconds of training after which it leaves; 0: never. (A time limit of the machine, say.)
        debounce_s: Seconds within which repeats of a signal are the same wish.
        notice: Sources of notices, beside those that the strategy's own setting `notice` names (docs/notices.md).
    """

    def __init__(
        self,
        signals: Sequence[str] = ("SIGINT", "SIGTERM", "SIGHUP"),
        flag_file: str = "",
        after_s: float = 0.0,
        debounce_s: float = 1.0,
        notice: str = "",
    ) -> None:
        unknown = [name for name in signals if not hasattr(signal.Signals, name)]
        if unknown:
            raise ConfigurationError(
                f"ChaosExit: no signals {unknown}; expected names such as SIGINT, SIGTERM, SIGUSR1"
            )
        fixed = [name for name in signals if name in ("SIGKILL", "SIGSTOP")]
        if fixed:
            raise ConfigurationError(f"ChaosExit: {fixed} cannot be handled by any process")
        if after_s < 0 or debounce_s < 0:
            raise ConfigurationError(f"ChaosExit: after_s {after_s} and debounce_s {debounce_s} cannot be negative")
        self.signals = tuple(signals)
        self.flag_file = flag_file
        self.after_s = after_s
        self.debounce_s = debounce_s
        declared(EngineConfig)["notice"].demand(notice, "ChaosExit: notice")
        self._plan = NoticePlan.read(notice)
        self._watch: NoticeWatch | None = None
        self.reason = ""
        """Reason why this member leaves; empty while it stays."""
        self._clock: Callable[[], float] = time.monotonic
        self._began = 0.0
        self._signals: ExitSignals | None = None
        self._trainer: Trainer | None = None
        self._told = False

    # ------------------------------------------------------------------ hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self._began, self.reason, self._told = trainer, self._clock(), "", False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not earlier: Lightning sets its handlers before training starts, the strategy when the first batch is fetched.
        if self._signals is None:
            self._signals = ExitSignals(
                self._on_signal,
                [signal.Signals[name] for name in self.signals],
                debounce_s=self.debounce_s,
                clock=lambda: self._clock(),
            )
            self._signals.install()
            engine = engine_of(trainer)
            who, events = (engine.name, engine.events) if engine is not None else ("this process", EventLog(None))
            self._watch = NoticeWatch(self._plan, who, events, self._leave)
            self._watch.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.reason:
            if self.after_s and self._clock() - self._began >= self.after_s:
                self._ask(f"time limit of {self.after_s:g} s")
            elif self.flag_file and Path(self.flag_file).exists():
                self._ask(f"file {self.flag_file}")
        elif not self._told:
            self._tell(trainer)  # the wish came before there was an engine to tell

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()
        self._trainer = None

    # ------------------------------------------------------------------ inside

    def _restore(self) -> None:
        if self._signals is not None:
            self._signals.restore()
            self._signals = None
        if self._watch is not None:
            self._watch.close()

    def _on_signal(self, number: signal.Signals, frame: FrameType | None) -> None:
        if not self.reason:
            session = getattr(self._trainer.strategy, "session", None) if self._trainer is not None else None
            if session is not None:
                session.asked = number
            if (heed := self._heeds(number.name)) is not None:
                aside(lambda name: heed(name), number.name)
            else:
                self._ask(f"signal {number.name}")
        elif number is not signal.SIGHUP:
            end_by(number)  # a file, a notice or the time has asked before

    def _heeds(self, signal_name: str) -> Callable[[str], Any] | None:
        """Returns the method that follows this signal as a notice, here or in the engine; None if it is no notice."""
        engine = engine_of(self._trainer) if self._trainer is not None else None
        if self._watch is not None and self._plan.on_signal(signal_name, 0.0) is not None:
            return self._watch.heed
        return engine.heed if engine is not None and engine.config.notice_plan.on_signal(signal_name, 0.0) else None

    def _ask(self, reason: str) -> None:
        log.warning("leaving after the present step (%s); a second signal ends this process at once", reason)
        self._leave(reason)

    def _leave(self, reason: str) -> None:
        self.reason = reason
        if self._trainer is not None:
            self._tell(self._trainer)

    def _tell(self, trainer: Trainer) -> None:
        engine, cluster = engine_of(trainer), getattr(trainer.strategy, "fit", None)  # of chaos_diloco
        if engine is not None:
            self._told = True
            aside(engine.leave, self.reason)
        elif cluster is not None and hasattr(cluster, "leave"):
            self._told = True
            aside(lambda reason: cluster.leave(), self.reason)
        elif not hasattr(trainer.strategy, "session"):
            self._told = True
            trainer.should_stop = True
