"""Measures a member's computing speed relative to its forecast when it asked for pipelines, and the times of its steps.

Theory of operation. The request has a time for each layer, so it foresees a time for the units of a step, whichever
layers they are of. The speed of a step is that time over the one that the device took. The median of the latest steps
is told with each heartbeat: a scheduler plans by it, also one that was started anew. A member that has run nothing for
many steps forgets it. Whatever slowed it down may be over, and nobody would know.

A step takes longer than its layers: units wait for data and for processors, and the step ends with sums, a commit and
an optimizer, for which all members of a machine want its processors at once. So steps of the plan in force are timed,
too, from the first unit of one to that of the next, and the part of it that lies between the steps' units.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from chaos_lightning.member.unit_steps import StepTime
from chaos_lightning.pipeline.executor import UnitTime
from chaos_lightning.pipeline.layer_times import LayerClock, Mark
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.plan import PipelinePlan
from chaos_lightning.planning.pipelines.units import FORWARD, StepUnit
from chaos_lightning.protocol.types import MOST_SPEED

WINDOW = 9
"""Number of steps of which the median is taken."""
LEAST = 3
"""Number of steps that are measured before anything is told."""
IDLE_STEPS = 200
"""Number of steps without units after which the speed is forgotten."""


class UnitSpeed:
    """Measured speed of one member's units, and times of its steps.

    Args:
        foreseen: Layers with their times, and this member's device.
        clock: Clock that made the marks of units.
    """

    def __init__(self, foreseen: TrainingJob, clock: LayerClock) -> None:
        self._foreseen, self._clock = foreseen, clock
        self._steps = deque[float](maxlen=WINDOW)
        self._idle = 0
        self.told = 0.0
        """Median speed of the latest steps, 1: as foreseen, 0: not known. Any thread may read it."""
        self.step_time = StepTime()
        """Medians of the latest steps of the plan in force. Any thread may read it."""
        self._plan: PipelinePlan | None = None
        self._times = deque[StepTime](maxlen=WINDOW)
        self._last: tuple[Mark, Mark] | None = None  # of the last step: its first unit begins, its last one ends

    def follow(self, plan: PipelinePlan) -> None:
        """Starts to time steps of this plan; times of another plan are discarded."""
        if plan != self._plan:
            self._plan, self._last, self.step_time = plan, None, StepTime()
            self._times.clear()

    def add(self, times: Sequence[UnitTime]) -> None:
        """Adds the times of a finished step's units; waits until the device has finished them."""
        took_s = sum(self._clock.seconds(t.began, t.ended) for t in times)
        if took_s > 0.0:
            self._idle = 0
            self._steps.append(sum(self._foreseen_s(t.unit) for t in times) / took_s)
            if self._last is not None:
                self._times.append(StepTime(*(self._clock.seconds(mark, times[0].began) for mark in self._last)))
                if len(self._times) >= LEAST:
                    self.step_time = StepTime(*map(statistics.median, zip(*self._times, strict=True)))
            self._last = times[0].began, times[-1].ended
        else:
            self._idle, self._last = self._idle + 1, None
            if self._idle >= IDLE_STEPS:
                self._steps.clear()
        known = len(self._steps) >= LEAST
        self.told = min(max(statistics.median(self._steps), 1 / MOST_SPEED), MOST_SPEED) if known else 0.0

    def _foreseen_s(self, unit: StepUnit) -> float:
        costs = self._foreseen.costs
        sums = costs.forward if unit.kind == FORWARD else costs.backward
        return (sums[unit.end] - sums[unit.first]) / self._foreseen.devices[0].speed
