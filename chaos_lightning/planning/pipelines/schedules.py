"""Makes the instruction lists of 1F1B (the order in which each stage runs its passes), and validates any lists.

Theory of operation. An instruction is (stage, kind, micro-batch), written as torch.distributed.pipelining does: `0F3`
is the forward pass of micro-batch 3 through stage 0, `B` its whole backward pass, `I` and `W` the two halves of a split
one (the gradient of the input, which the stage before waits for, and that of the weights). A schedule is one list for
each worker; a worker that runs units of other pipelines has instructions of several stages, so a stage is an index into
the micro-batch's own route. 1F1B is PipeDream-flush of arXiv 2006.09503, section 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chaos_lightning.errors import PlanError

KINDS = "FBIW"
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


class Instruction(NamedTuple):
    """Instruction to run a forward or backward pass, or one half of a backward pass, of a micro-batch at a stage."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Schedule = Sequence[Sequence[Instruction]]
"""Instructions of each worker, in order."""


class ScheduleError(PlanError):
    """Error in a schedule that deadlocks, or does not run each pass once; names instruction and worker."""


def read_instruction(text: str) -> Instruction:
    """Reads an instruction from the text that `str` makes of it.

    Raises:
        ScheduleError: The text is no instruction.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ScheduleError(f"{text!r} is no instruction; expected a stage, one of F B I W, a micro-batch, as in 0F3")
    return Instruction(int(found[1]), found[2], int(found[3]))


# ------------------------------------------------------------------------------------------------ 1F1B


def in_flight(stages: int, stage: int, micro_batches: int, extra: int = 0) -> int:
    """Returns the largest number of micro-batches whose activations a 1F1B stage keeps at once."""
    return min(stages - stage + extra, micro_batches)


def one_f_one_b(stages: int, micro_batches: int, extra: int = 0) -> list[list[Instruction]]:
    """Returns the instruction lists of 1F1B: forward passes up to the limit in flight, then one backward and one
    forward pass alternately.

    Args:
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        extra: Micro-batches in flight beyond those of 1F1B.
    """
    lists = []
    for k in range(stages):
        warm = in_flight(stages, k, micro_batches, extra)
        row = [Instruction(k, "F", j) for j in range(warm)]
        for j in range(micro_batches):
            row.append(Instruction(k, "B", j))
            if warm + j < micro_batches:
                row.append(Instruction(k, "F", warm + j))
        lists.append(row)
    return lists


# ------------------------------------------------------------------------------------------------ what is wrong


def check_schedule(schedule: Schedule, routes: Mapping[int, Sequence[int]]) -> None:
    """Refuses a schedule that does not run each pass once, or that deadlocks.

    Args:
        schedule: Instructions by worker.
        routes: Workers of the stages of each micro-batch.

    Raises:
        ScheduleError: A unit is missing, there twice, elsewhere than its route says, or in an order of its worker that
            cannot be; or workers wait for each other for ever. Says which.
    """
    done: dict[Instruction, int] = {}
    for worker, row in enumerate(schedule):
        for x in row:
            if x.kind not in KINDS:
                raise ScheduleError(f"worker {worker}: {x.kind!r} is no kind of instruction; expected one of F B I W")
            if x in done:
                raise ScheduleError(f"{x} is there twice, at workers {done[x]} and {worker}; expected it once")
            route = routes.get(x.micro_batch)
            if route is None or x.stage >= len(route):
                raise ScheduleError(f"worker {worker}: {x} is of no micro-batch or stage of this plan")
            if route[x.stage] != worker:
                raise ScheduleError(f"{x} is at worker {worker}; expected it at worker {route[x.stage]}")
            done[x] = worker
    for j, route in routes.items():
        for k in range(len(route)):
            _check_unit(done, k, j)
    for worker, row in enumerate(schedule):
        _check_order(worker, row)
    _check_end(schedule, routes)


def _check_unit(done: Mapping[Instruction, int], k: int, j: int) -> None:
    forward, whole = Instruction(k, "F", j), Instruction(k, "B", j)
    halves = [x for x in (Instruction(k, "I", j), Instruction(k, "W", j)) if x in done]
    if forward not in done:
        raise ScheduleError(f"{forward} is missing; expected every micro-batch to pass every stage")
    if whole in done and halves:
        raise ScheduleError(f"{whole} and {halves[0]} are both there; expected a whole backward pass or its two halves")
    if whole not in done and len(halves) < 2:
        missing = whole if not halves else Instruction(k, "W" if halves[0].kind == "I" else "I", j)
        raise ScheduleError(f"{missing} is missing; expected every micro-batch to pass every stage")


def _check_order(worker: int, row: Sequence[Instruction]) -> None:
    """Refuses a worker's list in which a backward pass precedes its forward pass, or the weights' half precedes the
    input's half.
    """
    seen: set[Instruction] = set()
    for x in row:
        first = {"B": "F", "I": "F", "W": "I"}.get(x.kind)
        if first is not None and (before := Instruction(x.stage, first, x.micro_batch)) not in seen:
            raise ScheduleError(f"worker {worker}: {x} comes before {before}; expected it after")
        seen.add(x)


def needs(x: Instruction, last: int) -> Instruction | None:
    """Returns the instruction of another stage that must have run before; None if there is none.

    A whole backward pass and the input's half are the same to the stage before: the caller looks for either.
    """
    if x.kind == "F":
        return Instruction(x.stage - 1, "F", x.micro_batch) if x.stage else None
    if x.kind in "BI" and x.stage < last:
        return Instruction(x.stage + 1, "B", x.micro_batch)
    return None


def _check_end(schedule: Schedule, routes: Mapping[int, Sequence[int]]) -> None:
    at = [0] * len(schedule)
    done: set[Instruction] = set()
    moved = True
    while moved:
        moved = False
        for worker, row in enumerate(schedule):
            while at[worker] < len(row):
                x = row[at[worker]]
                need = needs(x, len(routes[x.micro_batch]) - 1)
                if need is not None and need not in done:
                    break
                done.add(Instruction(x.stage, "B", x.micro_batch) if x.kind == "I" else x)
                at[worker] += 1
                moved = True
    stuck = [(w, row[at[w]]) for w, row in enumerate(schedule) if at[w] < len(row)]
    if stuck:
        words = "; ".join(
            f"worker {w} is at {x} and waits for {needs(x, len(routes[x.micro_batch]) - 1)}" for w, x in stuck[:4]
        )
        raise ScheduleError(f"deadlock: {words}")
