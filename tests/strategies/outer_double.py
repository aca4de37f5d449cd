"""Replaces a cluster's session without a server: the cluster is alone, or the test plays the others. For tests that
concern Lightning.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from chaos_lightning.outer.cluster.cluster_effects import Boundary
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import TICKS, Covered, JobProgress, VersionId
from chaos_lightning.protocol.spans import count, normalise, subtract, union


class SessionDouble:
    """Session's interface for one cluster. Each push is accepted at once, and the version is this cluster's state.

    Attributes:
        made: All instances of a test.
        setting: Attributes that every new instance gets.
        progress: Progress of the job at the base version.
        versions: Parameters of each version that was adopted.
        others: Positions that other clusters train, by epoch; once this one is dry, they are through as well.
        rejects_at: The push of this number is rejected: everything is taken back.
        ends_at: The job is over with this boundary.
        calls: Names of the methods that were called, in order.
    """

    made: ClassVar[list[SessionDouble]] = []
    setting: ClassVar[dict[str, Any]] = {}

    def __init__(self, replica: Any, agreement: Any, options: Any, events: Any, batches: Any) -> None:
        self.live = [tensor for _, tensor in replica._named]
        self.agreement, self.options, self.batches = agreement, options, batches
        self.inner_steps = OuterSettings.of_words(agreement.settings).inner_steps
        self.incarnation = f"{options.name}~2"
        self.job_id = "job"
        self.oldest = True
        self.base = VersionId()
        self.progress = JobProgress()
        self.over = ""
        self.leaving = False
        self.at_risk = 3
        self.clusters = 1
        self.versions: list[list[Tensor]] = []
        self.others: dict[int, tuple[tuple[int, int], ...]] = {}
        self.spent: dict[int, tuple[tuple[int, int], ...]] = {}
        self.trained: list[Covered] = []
        self.claimed: dict[int, tuple[tuple[int, int], ...]] = {}
        self.unpushed = [0, 0]
        self.open: list[Covered] = []
        self.rejects_at = self.ends_at = 0
        self.pushes = self.boundaries = 0
        self.calls: list[str] = []
        self.losses: list[float] = []
        self.own: list[Tensor] = []
        self.takes_over: list[Tensor] = []
        for name, value in SessionDouble.setting.items():
            setattr(self, name, value)
        SessionDouble.made.append(self)

    # ------------------------------------------------------------------ the interface

    def start(self, timeout_s: float = 60.0) -> JobProgress:
        self.calls.append("start")
        with torch.no_grad():
            for mine, newest in zip(self.live, self.takes_over, strict=False):
                mine.copy_(newest)
        self._adopt()
        return self.progress

    @property
    def reckoned(self) -> JobProgress:
        done = self.progress
        return JobProgress(done.samples + self.unpushed[0], done.ticks + self.unpushed[1] * TICKS, done.epoch)

    def claim(self, samples: int) -> tuple[Covered, ...]:
        epoch, length = self.progress.epoch, self.agreement.length
        gone = union([*self.spent.get(epoch, ()), *self.others.get(epoch, ()), *self.claimed.get(epoch, ())])
        left = subtract(((0, length),), gone)
        if not left:
            self.claimed.setdefault(epoch, ())
            return ()
        start, stop = left[0]
        span = (start, min(stop, start + samples))
        self.claimed[epoch] = normalise([*self.claimed.get(epoch, ()), span])
        return (Covered(epoch, (span,)),)

    def boundary(
        self, samples: int, covers: tuple[Covered, ...] = (), steps: int = 1, loss: float | None = None
    ) -> Boundary:
        self.boundaries += 1
        self.trained += covers
        self.open += covers
        self.losses += [loss] if loss is not None else []
        self.unpushed = [self.unpushed[0] + samples, self.unpushed[1] + steps]
        if self.boundaries == self.ends_at:
            self.over = "the oldest cluster is through"
            return Boundary(over=self.over)
        if self.unpushed[1] < self.inner_steps and steps:
            return Boundary()
        self.pushes += 1
        if self.pushes == self.rejects_at:
            with torch.no_grad():
                for mine, before in zip(self.live, self.versions[-1], strict=True):
                    mine.copy_(before)
            self.open, self.unpushed, self.claimed = [], [0, 0], {}
            self._adopt()
            return Boundary(self.base, outright=True, reset_optimizer=True)
        self._spend(dry=not steps)
        self._adopt()
        return Boundary(self.base)

    def pause(self, timeout_s: float) -> None:
        """Returns at once, since nothing can happen while this cluster waits."""

    def waits_for(self) -> str:
        return "nothing"

    def finish(self, reason: str) -> None:
        self.calls.append(f"finish: {reason}")
        self._spend(dry=False)
        self._adopt()

    @property
    def ending(self) -> bool:
        return bool(self.over)

    def leave(self) -> None:
        self.calls.append("leave")
        self.leaving = True

    def close(self) -> None:
        self.calls.append("close")

    def show_base(self) -> None:
        self.calls.append("show base")
        self.own = [t.detach().clone() for t in self.live]
        self._put(self.versions[-1])

    def show_own(self) -> None:
        self.calls.append("show own")
        self._put(self.own)

    # ------------------------------------------------------------------ the job

    def _put(self, tensors: list[Tensor]) -> None:
        with torch.no_grad():
            for live, tensor in zip(self.live, tensors, strict=True):
                live.copy_(tensor)

    def _spend(self, *, dry: bool) -> None:
        for each in self.open:
            self.spent[each.epoch] = normalise([*self.spent.get(each.epoch, ()), *each.spans])
        self.open = []
        done, (samples, steps) = self.progress, self.unpushed
        self.unpushed = [0, 0]
        epoch = done.epoch
        if dry:
            self.spent[epoch] = normalise([*self.spent.get(epoch, ()), *self.others.pop(epoch, ())])
        over = self.agreement.length and count(self.spent.get(epoch, ())) == self.agreement.length
        ticks = done.ticks + steps * TICKS // self.clusters
        self.progress = JobProgress(done.samples + samples, ticks, epoch + bool(over))

    def _adopt(self) -> None:
        self.base = VersionId(self.base.number + 1, "h")
        self.versions.append([t.detach().clone() for t in self.live])
