"""UsefulTime: measures how much of the job's time was useful, and logs it to the Trainer's loggers.

Useful is the time of steps at the usual speed. It says nothing of how much each step trains: that would be goodput, the
name that this callback had before.

Theory of operation. Every member meters (one call a step), rank 0 logs. The totals travel with the training state
like any callback's, so the next rank 0 goes on from the same numbers, and a resumed job does, too.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from chaos_lightning.callbacks.member import engine_of
from chaos_lightning.errors import ConfigurationError

CAUSES = ("join", "recovery", "leave")


@dataclass(slots=True)
class UsefulTimeMeter:
    """Accounting of one member's useful and lost seconds, updated at each step, in constant memory.

    The exact accounting is a fold over all logs afterwards (`observe/folds.py`). Here the time from one committed step
    to the next is compared with the usual one (median of the last clean ones). If the view changed in between, what
    exceeds the usual is booked on the cause: a join if the view has newcomers, a recovery if somebody is missing. All
    members see the same views, so they book alike.
    """

    window: int = 51
    """Clean steps that the usual step time is taken from."""
    total_s: float = 0.0
    lost_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    steps: int = 0
    last_s: float = 0.0
    """Duration of the latest step."""
    _clean: deque[float] = field(default_factory=deque)
    _at: float | None = None
    _members: tuple[str, ...] | None = None

    def step(self, now: float, members: tuple[str, ...], *, leaving: bool = False) -> None:
        """Counts a committed step, and the time since the last one as useful or lost.

        Args:
            now: Monotonic time, s.
            members: Ids of the view's members now, in rank order.
            leaving: Whether the members that are missing had asked to leave (the view's reason says so).
        """
        before, self._members = self._members, members
        if self._at is None:
            self._at = now
            return
        self.last_s, self._at = now - self._at, now
        self.total_s += self.last_s
        self.steps += 1
        cause = self._cause(before, members, leaving)
        if not cause:
            self._clean.append(self.last_s)
            if len(self._clean) > self.window:
                self._clean.popleft()
            return
        usual = self.usual_s
        self.lost_s[cause] += max(0.0, self.last_s - usual) if usual else 0.0

    @staticmethod
    def _cause(before: tuple[str, ...] | None, now: tuple[str, ...], leaving: bool) -> str:
        if before is None or set(before) == set(now):
            return ""
        if set(before) - set(now):
            return "leave" if leaving else "recovery"
        return "join"

    def pause(self) -> None:
        """Stops the clock until the next step, while this member does not train (fenced, or validating)."""
        self._at = None

    @property
    def usual_s(self) -> float:
        """Usual time of a step, s; 0 before the first undisturbed step."""
        return statistics.median(self._clean) if self._clean else 0.0

    @property
    def share(self) -> float:
        """Useful share of the time, 0 to 1."""
        return 1.0 - sum(self.lost_s.values()) / self.total_s if self.total_s > 0 else 1.0

    def state(self) -> dict[str, Any]:
        """Returns the totals, for a checkpoint or for a newcomer, which may later be the one that logs them."""
        return {"total_s": self.total_s, "lost_s": dict(self.lost_s), "steps": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Sets the totals, to which the meter then adds."""
        self.total_s = float(state.get("total_s", 0.0))
        self.steps = int(state.get("steps", 0))
        self.lost_s = {c: float(dict(state.get("lost_s", {})).get(c, 0.0)) for c in CAUSES}
        self._at = None


class UsefulTime(Callback):
    """Callback that logs `chaos/useful_share`, `chaos/step_s`, `chaos/members` and `chaos/lost_<cause>_s`.

    Args:
        every_n_steps: Steps from one log to the next; 0: as often as the Trainer logs (`log_every_n_steps`).
        prefix: Prefix of the names.
    """

    share_name = "useful_share"

    def __init__(self, every_n_steps: int = 0, prefix: str = "chaos/") -> None:
        if every_n_steps < 0:
            raise ConfigurationError(f"UsefulTime: every_n_steps {every_n_steps}; expected 0 or more")
        self.every_n_steps = every_n_steps
        self.prefix = prefix
        self.meter = UsefulTimeMeter()
        self._clock: Callable[[], float] = time.monotonic
        self._step = -1
        self._logged = -1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        engine = engine_of(trainer)
        before, self._step = self._step, trainer.global_step if engine is None else engine.header.step
        if self._step in (before, 0):
            return  # accumulating
        if engine is not None and engine.view is not None:
            change = engine.header.view_change
            # A header takes out only members that asked to leave; one that is missing after a decision is dead.
            carried = change is not None and change.id == engine.view.id
            self.meter.step(self._clock(), engine.view.ids(), leaving=carried or "leav" in engine.view.reason)
        else:
            self.meter.step(self._clock(), (str(trainer.global_rank),))
        every = self.every_n_steps or int(getattr(trainer, "log_every_n_steps", 0)) or 50
        if trainer.is_global_zero and trainer.global_step // every != self._logged // every:
            self._logged = trainer.global_step
            self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meter.pause()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self.meter.steps:
            self._log(trainer)

    def metrics(self, members: int) -> dict[str, float]:
        """Returns the values to log, by name."""
        values = {self.share_name: self.meter.share, "step_s": self.meter.last_s, "members": float(members)}
        values |= {f"lost_{cause}_s": seconds for cause, seconds in self.meter.lost_s.items()}
        return {self.prefix + name: value for name, value in values.items()}

    def _log(self, trainer: Trainer) -> None:
        engine = engine_of(trainer)
        members = engine.world_size if engine is not None else trainer.world_size
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics(members), step=trainer.global_step)

    @property
    def state_key(self) -> str:
        return "Goodput"  # as in checkpoints that were written under the old name

    def state_dict(self) -> dict[str, Any]:
        return self.meter.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.meter.load(state_dict)


class Goodput(UsefulTime):
    """Old name of `UsefulTime`; logs the share as `chaos/goodput`, as ever, and warns of the new name.

    Args:
        every_n_steps: See `UsefulTime`.
        prefix: See `UsefulTime`.
    """

    share_name = "goodput"

    def __init__(self, every_n_steps: int = 0, prefix: str = "chaos/") -> None:
        # Not a DeprecationWarning, which Python hides from those who run the script.
        warnings.warn(
            "the callback Goodput has another name, UsefulTime, after what it measures; write "
            "chaos_lightning.callbacks.UsefulTime, which logs useful_share in place of goodput",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__(every_n_steps, prefix)
