"""Fuzzes pipelines: border tensors that a member receives, the plan in a view, and what members say in a commit.

Theory of operation. *Borders*: an input's parts are payloads of frames; a part's number says whose border it is and in
which attempt. They are given to a member's exchange as its link gives them, until it refuses one. What it then has must
be within its limit, and the same when written and read again. *Plans*: a text that is accepted must be the same when
written and read again, and its units must run each layer of each micro-batch once. *Words* that are accepted must be
the same when written and read again.
"""

from __future__ import annotations

import math
import struct
from random import Random

import torch

from chaos_lightning.collectives.norms import PartNorm
from chaos_lightning.errors import PlanError, WireError
from chaos_lightning.pipeline.borders import BorderExchange
from chaos_lightning.pipeline.executor import SlotAttempt
from chaos_lightning.pipeline.tensors import Border, BorderReader, write
from chaos_lightning.pipeline.told import ToldStep
from chaos_lightning.planning.pipelines.plan import Detour, Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.schedules import read_instruction
from chaos_lightning.planning.pipelines.units import (
    BACKWARD,
    FORWARD,
    StepUnit,
    ViewPipelines,
    coverage,
    coverage_error,
)
from chaos_lightning.protocol.types import ViewId
from chaos_lightning.transport.frames import Frame, FrameType
from lab.fuzz import mutate
from lab.fuzz.target import FindingError, Target

LIMIT_NBYTES = 1 << 20
_BACKWARD, _SECOND, _EARLY, _OTHER, _OLD = (1 << bit for bit in range(5))
_TAGS = (0, 0, 0, _BACKWARD, _SECOND, _EARLY, _OTHER, _OLD, _EARLY | _SECOND)
_NOW = SlotAttempt(ViewId(1, 2), 5)
_TAKES = [StepUnit(FORWARD, j, 1, 2, "a~1", "") for j in (0, 1)] + [StepUnit(BACKWARD, 0, 1, 2, "a~1", "")]


def _frame(tag: int, nbytes: int) -> tuple[str, Frame]:
    view = ViewId(1, 1 if tag & _OLD else 3 if tag & _EARLY else 2)
    kind, layer = (FrameType.BACKWARD, 2) if tag & _BACKWARD else (FrameType.FORWARD, 1)
    start = (1 << 32 if tag & _SECOND else 0) | layer
    return "b~2" if tag & _OTHER else "a~1", Frame(kind, view, _NOW.seq, start, nbytes, 0)


def _read_borders(data: bytes) -> None:
    exchange = BorderExchange(lambda *frame: None, LIMIT_NBYTES)
    exchange.open(_NOW, _TAKES)
    try:
        for tag, payload in mutate.split(data):
            peer, frame = _frame(tag, len(payload))
            into = exchange.target(peer, frame) if payload else memoryview(bytearray())
            if into is not None:
                into[:] = payload
                exchange.arrived(peer, frame, into)
            if exchange.nbytes > LIMIT_NBYTES:
                raise FindingError(f"{exchange.nbytes} bytes of borders wait, the limit is {LIMIT_NBYTES}")
    except WireError:
        return


def _read_border(data: bytes) -> None:
    reader = BorderReader(LIMIT_NBYTES)
    try:
        for _, payload in mutate.split(data):
            if reader.complete:
                break
            reader.room(len(payload))[:] = payload
            reader.filled(len(payload))
    except WireError:
        return
    if reader.complete:
        _check_same(reader.border())


def _check_same(border: Border) -> None:
    again = BorderReader(LIMIT_NBYTES)
    (payload,) = write(border)
    data = b"".join(payload)
    again.room(len(data))[:] = data
    again.filled(len(data))
    if [b"".join(p) for p in write(again.border())] != [data] or border.nbytes > LIMIT_NBYTES:
        raise FindingError("a border that was accepted is another one when written and read again")


def _feed_borders(data: bytes) -> None:
    _read_borders(data)
    _read_border(data)


def _border_seeds() -> list[bytes]:
    borders = (
        Border((torch.arange(6.0).reshape(2, 3),), '{"border":0}'),
        Border((torch.ones(2, dtype=torch.bfloat16), None, torch.tensor([True]), torch.tensor(3))),
        Border(()),
    )
    seeds = [mutate.joined([(0, b"".join(p)) for p in write(b, most)]) for b in borders for most in (64, 1 << 20)]
    whole = b"".join(write(borders[0])[0])
    return [*seeds, mutate.joined([(tag, whole) for tag in (0, _SECOND, _BACKWARD, _EARLY, _EARLY | _SECOND, _OLD)])]


def _mutate_payload(tag: int, payload: bytes, rng: Random) -> bytes:
    if len(payload) < 26 or rng.randint(0, 3) == 0:
        return mutate.bytes_of(payload, rng)
    changed = bytearray(payload)
    what = rng.randint(0, 4)
    if what < 3:
        at, layout = ((2, "<H"), (4, "<I"), (8, "<Q"))[what]
        most = (1 << 8 * struct.calcsize(layout)) - 1
        struct.pack_into(layout, changed, at, min(most, abs(rng.choice((*mutate.NUMBERS, 64, 1 << 40)))))
    elif what == 3:
        changed[16] = rng.choice((0, 1, 4, 10, 12, 13, 255))
    else:
        changed[17] = rng.choice((0, 1, 2, 3, 16, 17, 255))
        struct.pack_into("<Q", changed, 18, abs(rng.choice((*mutate.NUMBERS, 1 << 60))))
    return bytes(changed)


def _mutate_borders(data: bytes, rng: Random) -> bytes:
    return mutate.parts_of(data, rng, _mutate_payload, _TAGS)


# ------------------------------------------------------------------ plans


def _read_plan(data: bytes) -> None:
    try:
        view = ViewPipelines.from_json(data.decode("utf-8", "replace"))
    except PlanError:
        return
    if ViewPipelines.from_json(view.to_json()) != view:
        raise FindingError("a plan that was accepted is another one when written and read again")
    given = {name: coverage(view.units(name)) for name in view.plan.stages}
    if wrong := coverage_error(view.plan.layer_count, [(0, view.plan.micro_batches)], given):
        raise FindingError(f"a plan that was accepted does not run everything once: {wrong}")


def _plan_seeds() -> list[bytes]:
    rows = (
        Pipeline((PlanStage("a~1", 0, 2), PlanStage("b~2", 2, 4)), 2),
        Pipeline((PlanStage("c~3", 0, 2), PlanStage("d~4", 2, 4)), 1),
    )
    alone = ViewPipelines.of(PipelinePlan(4, rows, idle=("e~5",)))
    lists = {"a~1": "0F0 0B0", "b~2": "1F0 1B0 1F1 1B1", "c~3": "0F1 0F2 0B1 0B2", "d~4": "1F2 1B2"}
    shared = ViewPipelines(
        PipelinePlan(4, rows, (Detour(1, 0, 2, "c~3"),)),
        {name: tuple(map(read_instruction, row.split())) for name, row in lists.items()},
        {"wte.weight": (0, 3)},
    )
    shared.check()
    return [alone.to_json().encode(), shared.to_json().encode()]


# ------------------------------------------------------------------ words beside a step


def _read_words(data: bytes) -> None:
    try:
        told = ToldStep.decode(data)
    except WireError:
        return
    if ToldStep.decode(told.encode()).encode() != told.encode():  # bytes, since NaN is not itself
        raise FindingError("words that were accepted are others when written and read again")


def _word_seeds() -> list[bytes]:
    norms = {part: PartNorm(0.5 * part, part != 2) for part in (0, 2, 3)}
    return [
        ToldStep(norms, {0: (0.25, 4.0), 1: (math.inf, 0.0)}, {0: b"{}", 1: b""}, 8).encode(),
        ToldStep(samples=1).encode(),
    ]


PIPELINES = (
    Target(
        "borders",
        "border tensors of a pipeline, as an executor takes them",
        _border_seeds,
        _feed_borders,
        _mutate_borders,
    ),
    Target("plans", "the plan of pipelines that a view carries", _plan_seeds, _read_plan, mutate.json_of),
    Target("words", "what members of a pipeline say beside a step", _word_seeds, _read_words, mutate.bytes_of),
)
