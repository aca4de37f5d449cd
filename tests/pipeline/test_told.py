"""Tests the values that members send beside a step's gradients: their encoding, hostile bytes, and the outcome that all
compute.
"""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from test_step import NAMES, A, B, C, D, pipelines
from torch import nn

from chaos_lightning.collectives.norms import PartNorm
from chaos_lightning.errors import StateError, UnsupportedError, WireError
from chaos_lightning.pipeline.told import StepOutcome, ToldStep, agreed, clip_coefficient, scale_gradients
from chaos_lightning.protocol.types import GENESIS, MAX_GATHER_NBYTES, Kind, Member, View, ViewId, equal_shares

SAID = ToldStep(
    norms={3: PartNorm(2.5, True), 0: PartNorm(math.inf, False)},
    losses={7: (0.125, 4.0), 2: (-math.inf, 0.0)},
    extra={2: b"", 9: b"logged"},
    samples=12,
)


def view(number=1):
    members = tuple(Member(m, m[0], "host", "127.0.0.1", 1) for m in NAMES)
    text = pipelines([(0, 2, 4), (0, 2, 4)], [2, 3]).to_json()
    return View(ViewId(1, number), ViewId(1, number - 1), members, pipelines=text)


def header(*said, weight=2.0):
    return replace(
        GENESIS,
        seq=1,
        kind=Kind.STEP,
        step=1,
        view=ViewId(1, 1),
        shares=equal_shares((weight / 4, 1.0) for _ in NAMES),
        answers=tuple(s if isinstance(s, bytes) else s.encode() for s in said),
    )


def test_what_is_said_is_the_same_when_it_is_read():
    assert ToldStep.decode(SAID.encode()) == SAID
    assert ToldStep().encode() == b""
    assert ToldStep.decode(b"") == ToldStep()
    one = ToldStep.decode(ToldStep(norms={1: PartNorm(math.nan, False)}, losses={0: (math.nan, 1.0)}).encode())
    assert math.isnan(one.norms[1].squared)
    assert math.isnan(one.losses[0][0])


def test_what_strangers_say_is_refused_or_is_what_it_was():
    data, rng, refused = SAID.encode(), Random(0), 0
    cases = [data[:n] for n in range(1, len(data))] + [data + b"x", b"\xff" * 400]
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        cases.append(bytes(changed))
    for case in cases:
        try:
            told = ToldStep.decode(case)
        except WireError:
            refused += 1
        else:
            assert told.encode() == case or any(math.isnan(x) for x in floats(told))
    assert refused > len(data)


def floats(told):
    return [n.squared for n in told.norms.values()] + [x for row in told.losses.values() for x in row]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (ToldStep(norms={1: PartNorm(-1.0, True)}), "square of a norm is -1"),
        (ToldStep(losses={1: (0.0, math.nan)}), "weight"),
        (ToldStep(losses={1: (0.0, -1.0)}), "weight"),
        (ToldStep(norms={1 << 17: PartNorm(1.0, True)}), "parts"),
        (ToldStep(extra={1 << 31: b""}), "micro-batches of texts"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(told, words):
    with pytest.raises(WireError, match=words):
        ToldStep.decode(told.encode())


def test_the_words_of_a_large_step_fit():
    """The values of 256 layers and 64 micro-batches take less than 4.7 kB, and 0.9 MiB of a strategy's bytes for each
    micro-batch fit into a message.
    """
    norms, losses = {p: PartNorm(1.0, True) for p in range(256)}, dict.fromkeys(range(64), (1.0, 1.0))
    assert len(ToldStep(norms, losses, samples=1).encode()) < 4700
    extra = {j: bytes(int(0.9 * (1 << 20))) for j in range(64)}
    assert len(ToldStep(norms, losses, extra, 1).encode()) < MAX_GATHER_NBYTES


def test_each_part_counts_once_as_its_oldest_owner_has_it():
    told = {
        A: ToldStep(norms={0: PartNorm(4.0, True), 1: PartNorm(1.0, True)}, samples=3),
        B: ToldStep(norms={2: PartNorm(2.0, True), 3: PartNorm(9.0, True)}, losses={1: (2.0, 1.0), 0: (8.0, 3.0)}),
        C: ToldStep(norms={0: PartNorm(100.0, False)}, samples=4),
        D: ToldStep(losses={2: (1.0, 4.0), 3: (math.nan, 0.0)}, extra={2: b"b", 3: b"c"}),
    }
    outcome = agreed(header(*told.values()), view())
    assert (outcome.squared_norm, outcome.norm, outcome.finite) == (16.0 / 4.0, 2.0, True)
    assert list(outcome.losses) == [0, 1, 2, 3]
    assert outcome.loss == (8.0 * 3.0 + 2.0 + 4.0) / 8.0
    assert (outcome.extra, outcome.samples) == ({2: b"b", 3: b"c"}, 7)


def test_a_step_in_which_nobody_says_anything_has_no_loss_and_no_norm():
    outcome = agreed(replace(header(weight=0.0), answers=()), view())
    assert (outcome.squared_norm, outcome.finite, outcome.samples, outcome.losses) == (0.0, True, 0, {})
    assert math.isnan(outcome.loss)


def test_what_is_not_finite_is_told_and_is_no_error():
    bad = ToldStep(norms={2: PartNorm(math.nan, False)}, losses={0: (math.nan, 1.0)})
    outcome = agreed(header(b"", bad, b"", b""), view())
    assert math.isnan(outcome.norm)
    assert math.isnan(outcome.loss)
    assert not outcome.finite


def test_words_that_cannot_be_of_this_step_are_refused():
    twice = ToldStep(losses={0: (1.0, 1.0)})
    with pytest.raises(WireError, match=f"{D} says the loss of micro-batch 0"):
        agreed(header(b"", twice, b"", twice), view())
    with pytest.raises(WireError, match=f"{C}: version 7"):
        agreed(header(b"", b"", b"\7" * 40, b""), view())
    with pytest.raises(WireError, match="the words of 1 members; expected 4"):
        agreed(header(b"x"), view())
    with pytest.raises(StateError, match=r"closed in view 1\.1, and 1\.2 was given"):
        agreed(header(b"", b"", b"", b""), view(2))


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e6])
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_the_coefficient_is_that_of_torch(max_norm, value):
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.zeros(4, 3).double()), nn.Parameter(torch.zeros(5).double())]
    for p in mine:
        p.grad = torch.randn_like(p)
    mine[0].grad[0, 0] = value
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    for p, q in zip(mine, theirs, strict=True):
        q.grad = p.grad.clone()
    squared = sum(float(p.grad.square().sum()) for p in mine)
    outcome = StepOutcome(squared, math.isfinite(squared), 0.0, {}, {}, 0)
    nn.utils.clip_grad_norm_(theirs, max_norm)
    scale_gradients([*mine, nn.Parameter(torch.ones(1))], clip_coefficient(outcome, max_norm))
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-14, atol=0.0, equal_nan=True)


def test_another_norm_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="norm_type=inf"):
        clip_coefficient(StepOutcome(1.0, True, 0.0, {}, {}, 0), 1.0, math.inf)
