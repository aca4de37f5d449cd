"""LiveView: shows the display of `chaos-lightning top` in the terminal of rank 0 while it trains.

Theory of operation. A thread of its own redraws; training only tells it whether this process is rank 0 now, which may
change when others die. The facts come from the event logs if this member writes some (all members of this machine, or
of all with a shared folder), else from the scheduler. Two things cannot own a terminal: Lightning's progress bar must
be off.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from chaos_lightning.callbacks.member import engine_of
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.observe.commands import ask, follow, watch
from chaos_lightning.observe.render import Dashboard

log = logging.getLogger("chaos_lightning.callbacks")


class LiveView(Callback):
    """Callback that shows members, ranks, steps, step times and joins with their progress; on rank 0 only.

    Args:
        interval_s: Seconds between two looks.
        logs: Log directory to follow; default: this member's own, else the scheduler is asked.
    """

    def __init__(self, interval_s: float = 1.0, logs: str = "") -> None:
        if interval_s <= 0:
            raise ConfigurationError(f"LiveView: interval_s {interval_s}; expected more than 0")
        self.interval_s = interval_s
        self.logs = logs
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._watch: Callable[..., None] = watch
        self._off = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._off = not sys.stdout.isatty()
        if self._off:
            log.info("LiveView: standard output is no terminal, so there is no live view")
        elif trainer.progress_bar_callback is not None:
            raise ConfigurationError(
                "LiveView and Lightning's progress bar cannot share a terminal; pass enable_progress_bar=False to "
                "the Trainer"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._off:
            return
        if trainer.is_global_zero and self._thread is None:
            self._begin(trainer)
        elif not trainer.is_global_zero and self._thread is not None:
            self._end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def _begin(self, trainer: Trainer) -> None:
        source = self._source(trainer)
        if source is None:
            self._off = True
            log.info("LiveView: this strategy has no members to show")
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(source,), kwargs={"interval_s": self.interval_s, "stop": self._stop},
            name="chaos-live-view", daemon=True,
        )  # fmt: skip
        self._thread.start()

    def _end(self) -> None:
        if self._thread is not None and self._stop is not None:
            self._stop.set()
            self._thread.join(timeout=5.0)
            self._thread = None

    def _source(self, trainer: Trainer) -> Callable[[], Dashboard] | None:
        engine = engine_of(trainer)
        if self.logs:
            return follow(Path(self.logs))
        if engine is None:
            return None
        if engine.events.path is not None:
            return follow(engine.events.path.parent)
        return ask(engine.config.endpoint, engine.config.token_file, keys_dir=engine.config.keys_dir)
