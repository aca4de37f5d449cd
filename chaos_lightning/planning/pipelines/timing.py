"""Runs instruction lists in virtual time: computes when each pass begins and ends (Eq. 11 of the paper).

Theory of operation. A unit begins when its worker is free and what it needs has arrived: the same micro-batch's tensor
from the stage before, or its gradient from the stage behind, a hop later than it was made. Sending takes no worker's
time. `run` does this for any lists (Eq. 11 of the paper, with hops); `OneFOneB` is the same recurrence for 1F1B
of one pipeline, without lists, and is what planners call thousands of times. A test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from chaos_lightning.planning.pipelines.schedules import (
    Instruction,
    Schedule,
    ScheduleError,
    in_flight,
    needs,
    one_f_one_b,
)


class Span(NamedTuple):
    """Time span of an instruction, in seconds from the step's start."""

    instruction: Instruction
    start_s: float
    end_s: float


class Times(Protocol):
    """Interface to the seconds of passes and hops."""

    def unit_s(self, x: Instruction) -> float:
        """Returns the seconds of an instruction on its device."""
        ...

    def hop_s(self, micro_batch: int, stage: int) -> float:
        """Returns the seconds that a tensor takes between two neighbouring stages of a micro-batch's route, in either
        direction.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """Timeline of a schedule."""

    rows: tuple[tuple[Span, ...], ...]
    """Spans of each worker, in order."""

    @property
    def end_s(self) -> float:
        return max((row[-1].end_s for row in self.rows if row), default=0.0)


def run(schedule: Schedule, times: Times, route_lengths: Mapping[int, int]) -> ScheduleRun:
    """Runs instruction lists in virtual time; returns when each instruction ran.

    Args:
        schedule: Instructions by worker.
        times: Times of units and hops.
        route_lengths: Number of stages of each micro-batch's route.

    Returns:
        When each instruction ran.

    Raises:
        ScheduleError: The lists wait for each other for ever.
    """
    rows: list[list[Span]] = [[] for _ in schedule]
    ends: dict[Instruction, float] = {}
    waiting: dict[Instruction, int] = {}
    todo = list(range(len(schedule)))
    while todo:
        worker = todo.pop()
        row, lists = rows[worker], schedule[worker]
        free = row[-1].end_s if row else 0.0
        while len(row) < len(lists):
            x = lists[len(row)]
            need = needs(x, route_lengths[x.micro_batch] - 1)
            ready = 0.0
            if need is not None:
                if need not in ends:
                    waiting[need] = worker
                    break
                ready = ends[need] + times.hop_s(x.micro_batch, min(need.stage, x.stage))
            start = max(free, ready)
            free = start + times.unit_s(x)
            row.append(Span(x, start, free))
            made = Instruction(x.stage, "B", x.micro_batch) if x.kind == "I" else x
            if x.kind != "W":
                ends[made] = free
            if made in waiting:
                todo.append(waiting.pop(made))
    stuck = [lists[len(row)] for row, lists in zip(rows, schedule, strict=True) if len(row) < len(lists)]
    if stuck:
        raise ScheduleError(f"deadlock: {', '.join(map(str, stuck[:4]))} wait for what never comes")
    return ScheduleRun(tuple(map(tuple, rows)))


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Seconds of one pipeline: each stage's forward and backward pass, and the hops between stages."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hops: tuple[float, ...]
    backward_input: tuple[float, ...] = ()
    """Seconds of the input's half of a backward pass that is split; empty: half of the pass."""

    def unit_s(self, x: Instruction) -> float:
        if x.kind == "F":
            return self.forward[x.stage]
        whole = self.backward[x.stage]
        if x.kind == "B":
            return whole
        half = self.backward_input[x.stage] if self.backward_input else whole / 2
        return half if x.kind == "I" else whole - half

    def hop_s(self, micro_batch: int, stage: int) -> float:
        return self.hops[stage]


@dataclass(frozen=True, slots=True)
class Path:
    """Critical path, as the number of forward and backward passes on it at each stage, and of hops behind each."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    hops: tuple[int, ...]


class OneFOneB:
    """Run of 1F1B in one pipeline, computed without instruction lists.

    The recurrence goes round by round: in round j each stage, the last one first, runs the backward unit of micro-batch
    j and then its next forward unit. What that needs was made by the stage before in the round before.

    Args:
        times: Times of units and hops.
        micro_batches: Number of micro-batches, at least one.
        extra: Micro-batches in flight beyond those of 1F1B.
    """

    def __init__(self, times: PipelineTimes, micro_batches: int, extra: int = 0) -> None:
        self.times, self.m = times, micro_batches
        self.stages = len(times.forward)
        self.warm = [in_flight(self.stages, k, micro_batches, extra) for k in range(self.stages)]
        # Whether a unit waited for another stage rather than for its own, by round and stage.
        self._forward_waits: list[list[bool]] = []
        self._backward_waits: list[list[bool]] = []
        self.ends_s = self._run() if extra == 0 else self._run_lists(extra)
        """Second at which each stage ends its last backward unit."""

    def _run(self) -> list[float]:
        f, b, hops, m, stages = self.times.forward, self.times.backward, self.times.hops, self.m, self.stages
        free: list[float] = []
        arrivals = [0.0] * m
        for k in range(stages):
            at, fk, hop, out, waits = 0.0, f[k], hops[k] if k < stages - 1 else 0.0, [], []
            for come in arrivals[: self.warm[k]]:
                late = come > at
                waits.append(late)
                at = (come if late else at) + fk
                out.append(at + hop)
            free.append(at)
            arrivals = out
            self._forward_waits.append(waits)
        made = [x + hop for x, hop in zip(free, (*hops, 0.0), strict=True)]
        backward_waits: list[list[bool]] = [[] for _ in range(stages)]
        steady = [
            (k, b[k], f[k], hops[k - 1] if k else 0.0, hops[k] if k < stages - 1 else 0.0, m - self.warm[k])
            for k in reversed(range(stages))
        ]
        for j in range(m):
            come = 0.0
            for k, bk, fk, hop_back, hop_on, more in steady:
                at = free[k]
                late = come > at
                backward_waits[k].append(late)
                at = (come if late else at) + bk
                come = at + hop_back
                if j < more:
                    late = k > 0 and made[k - 1] > at
                    self._forward_waits[k].append(late)
                    at = (made[k - 1] if late else at) + fk
                    made[k] = at + hop_on
                free[k] = at
        self._backward_waits = backward_waits
        return free

    def _run_lists(self, extra: int) -> list[float]:
        lists = one_f_one_b(self.stages, self.m, extra)
        rows = run(lists, self.times, dict.fromkeys(range(self.m), self.stages)).rows
        for row in rows:
            waits: dict[str, list[bool]] = {"F": [], "B": []}
            free = 0.0
            for span in row:
                waits[span.instruction.kind].append(span.start_s > free)
                free = span.end_s
            self._forward_waits.append(waits["F"])
            self._backward_waits.append(waits["B"])
        return [row[-1].end_s for row in rows]

    def path(self, stage: int) -> Path:
        """Returns the critical path up to the end of a stage; the seconds of its passes and hops add up to that end."""
        forward, backward, hops = [0] * self.stages, [0] * self.stages, [0] * max(0, self.stages - 1)
        k, j, back = stage, self.m - 1, True
        while True:
            warm = self.warm[k]
            if back:
                backward[k] += 1
                if self._backward_waits[k][j]:
                    hops[k] += 1
                    k += 1
                elif warm + j - 1 < self.m:
                    back, j = False, warm + j - 1
                else:
                    j -= 1
            else:
                forward[k] += 1
                if self._forward_waits[k][j]:
                    k -= 1
                    hops[k] += 1
                elif j >= warm:
                    back, j = True, j - warm
                elif j:
                    j -= 1
                else:
                    return Path(tuple(forward), tuple(backward), tuple(hops))


def pipeline_timeline(schedule: Schedule, times: PipelineTimes, micro_batches: int) -> ScheduleRun:
    """Runs the lists of one pipeline, all of whose micro-batches pass all stages, in virtual time."""
    return run(schedule, times, dict.fromkeys(range(micro_batches), len(times.forward)))
