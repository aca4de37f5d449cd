"""Tests a plain loop's turns in steps of a fixed batch, with an engine that says which view each attempt has."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from chaos_lightning.member.unit_steps import UnitsDone
from chaos_lightning.pipeline.plain_shares import PlainShares
from chaos_lightning.pipeline.shares import ShareStep
from chaos_lightning.planning import ledger
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, Member, View, ViewId, equal_shares
from chaos_lightning.settings import EngineConfig


class Net(nn.Module):
    """Model with an attribute and a buffer that forward passes change, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("passes", torch.zeros(1))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.seen.append(float(x.sum()))
        return (self.weight * x).mean()


class Sums:
    """Accumulation of one member, whose sum of gradients is that of all."""

    def __init__(self, model: Net) -> None:
        self.model, self.closed = model, 0

    def settle(self) -> None: ...

    def open(self, view: ViewId, seq: int, *, section: int) -> None: ...

    def closing(self, parts: Any) -> None:
        self.closed += 1

    def flush(self, shares: Any) -> bytes:
        grad = self.model.weight.grad
        self.sum = 0.0 if grad is None else float(grad)
        return b""

    def apply(self, header: Header, totals: Any) -> None:
        self.model.weight.grad = torch.tensor([self.sum / header.total_weight], dtype=torch.float64)


@dataclass
class Scripted:
    """Engine of member `a`, whose attempts are in the given views; None stands for the commit of the step."""

    config: EngineConfig
    accumulation: Sums
    script: list[View | None]
    done: list[UnitsDone] = field(default_factory=list)
    header: Header = GENESIS
    member_id = name = "a"

    def __post_init__(self) -> None:
        self.view = self.ruling_view = next(view for view in self.script if view is not None)

    def attach(self, step: Any) -> None:
        self.step = step

    def begin_units(self, kind: Kind, fields: Any) -> Any:
        self.step.remember_base()
        self.tried = False
        return self

    def contribute(self, view: View, done: UnitsDone) -> None:
        self.done.append(done)

    def next(self) -> View | Header:
        found = self.script.pop(0)
        if isinstance(found, View):
            if self.tried:
                self.step.drop()
            self.tried = True
            return found
        done, before = self.done[-1], self.header
        self.header = Header(
            seq=before.seq + 1, kind=Kind.STEP, step=before.step + 1, view=NO_VIEW, next_view=NO_VIEW,
            prev_hash=before.hash, shares=equal_shares([(done.weight, 1.0)]),
            ledger=ledger.merge(before.ledger, done.spent),
        )  # fmt: skip
        self.step.commit(self.header)
        return self.header


def view(number: int, batch: str, ids: str = "ab") -> View:
    members = tuple(Member(name, name, "here", "127.0.0.1", 1) for name in ids)
    return View(ViewId(1, number), NO_VIEW, members, batch=batch)


def made(rule: str, *script: View | None, fits: int = 0, samples: int = 8) -> tuple[PlainShares, Scripted, Net]:
    model = Net()
    engine = Scripted(EngineConfig(name="a", batch=rule, fits=fits), Sums(model), [*script])
    data = DataLoader(TensorDataset(torch.arange(float(samples), dtype=torch.float64)), 2)
    shares = PlainShares(cast(Any, engine), data, seed=3, mode="shared", source=engine, least=1)
    shares.attach(model, scales=False)
    return shares, engine, model


def turn(shares: PlainShares, model: Net, x: Tensor) -> tuple[bool, float]:
    """Computes one piece; returns whether the step was made, and a random number of the turn."""
    facts = shares.current
    assert facts is not None
    loss = model(x)
    if facts.samples:
        (loss * facts.samples).backward()
    drawn = random.random() + float(torch.rand(()))
    return shares.update(skipped=False) is not None, drawn


def test_a_recovery_has_the_loop_compute_the_new_share_from_the_base() -> None:
    """The share grows when the other member dies: what was computed of it is dropped, and the noise of the pieces that
    are computed again is the same.
    """
    shares, engine, model = made("fixed:4/2", view(1, "4/2:1x2"), view(2, "4/2:2", "a"), None)
    (batch, *_) = iter_steps(shares)
    shares.begin(batch, 1, str, "")
    turns = shares.turns()
    before = random.getstate(), torch.get_rng_state()
    (x,) = next(turns)
    assert x.tolist() == [0, 1]
    assert (shares.current.index, shares.current.last) == (0, True)
    stepped, first = turn(shares, model, x)
    assert (stepped, shares.began_again, shares.within) == (False, True, True)
    assert (model.weight.grad, model.seen, float(model.passes)) == (None, [], 0.0)
    assert engine.done[0].coverage[0].micro_batches == ((0, 1),)
    again = []
    for (piece,) in turns:
        again.append((piece.tolist(), *turn(shares, model, piece)))
        assert not shares.began_again
    assert [(samples, stepped) for samples, stepped, _ in again] == [([0, 1], False), ([2, 3], True)]
    assert again[0][2] == first != again[1][2]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert float(model.weight.grad) == pytest.approx(1.5), "the mean over 0, 1, 2, 3"
    assert engine.done[-1].weight == 4.0
    assert (model.seen, float(model.passes)) == ([1.0, 5.0], 2.0)
    assert not shares.within


def iter_steps(shares: PlainShares) -> list[Any]:
    return [next(iter(shares.loader))]


def test_a_recovery_between_two_pieces_is_seen_at_the_next_update() -> None:
    shares, engine, model = made("fixed:4", view(1, "4:4,0"), view(2, "4:4", "a"), None, fits=2)
    shares.begin(iter_steps(shares)[0], 1, str, "")
    turns = shares.turns()
    (x,) = next(turns)
    assert not turn(shares, model, x)[0]
    engine.step.end(ViewId(1, 1))
    (x,) = next(turns)
    assert not turn(shares, model, x)[0]
    assert shares.began_again
    assert engine.done == [], "nothing was contributed"
    assert [turn(shares, model, x)[0] for (x,) in turns] == [False, True]
    assert engine.accumulation.closed == 2, "once for the last piece of each attempt"


def test_a_member_without_a_share_has_a_stand_in_that_changes_nothing() -> None:
    shares, engine, model = made("fixed:4/2", view(1, "4/2:0,2"), view(2, "4/2:0,2"))
    batch = iter_steps(shares)[0]
    shares.begin(batch, 1, str, "")
    turns = shares.turns()
    (x,) = next(turns)
    assert shares.current.idle
    assert x.tolist() == [0, 1]
    turn(shares, model, x)
    assert (model.seen, float(model.passes), model.weight.grad) == ([], 0.0, None)
    done = engine.done[0]
    assert (done.weight, done.coverage, done.spent) == (0.0, (), ())
    assert done.micro_batches == ((0, 2),)


def test_a_piece_without_backward_weighs_nothing_and_is_spent() -> None:
    shares, engine, model = made("fixed:4/2", view(1, "4/2:2", "a"), None)
    shares.begin(iter_steps(shares)[0], 1, str, "")
    turns = shares.turns()
    next(turns)
    assert shares.update(skipped=True) is None
    (x,) = next(turns)
    assert turn(shares, model, x)[0]
    assert engine.done[0].weight == 2.0
    assert engine.done[0].spent[0].spans == ((0, 4),)
    assert float(model.weight.grad) == pytest.approx(2.5)


def test_who_leaves_within_a_step_has_the_state_of_the_last_header() -> None:
    shares, _, model = made("fixed:4", view(1, "4:4", "a"), fits=2)
    shares.begin(iter_steps(shares)[0], 1, str, "")
    (x,) = next(shares.turns())
    turn(shares, model, x)
    shares.drop()
    assert (model.seen, float(model.passes), model.weight.grad) == ([], 0.0, None)
    assert not shares.within
    assert list(shares.turns()) == []


def test_a_time_is_told_once_three_steps_were_measured() -> None:
    """The first step after a start is slow, and must not take a member's share away."""
    model = Net()
    step = ShareStep(model, cast(Any, Sums(model)), lambda: None)
    told = []
    for seconds, samples in ((8.0, 4), (0.0, 0), (0.4, 4), (0.8, 4), (0.4, 4)):
        step.took(seconds, samples)
        told.append(step.sample_s)
    assert told == pytest.approx([0.0, 0.0, 0.0, 0.2, 0.15])
