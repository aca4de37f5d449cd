"""Tests that replaying steps from their averages gives bitwise the same state as training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from replay_support import OPTIMIZERS, Matrices, Member, Net, Newcomer, clipped, same, two_groups
from torch import Tensor
from torch.optim import (
    SGD,
    Adam,
    AdamW,
    Optimizer,
)
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from chaos_lightning.collectives.hyper import hyper_words
from chaos_lightning.errors import StateError
from chaos_lightning.protocol.types import NO_VIEW, Header, Kind, equal_shares
from chaos_lightning.replication.replay import PURE, OptimizerReplay

TOGETHER = ("SGD fused",)
"""torch 2.13's step fails if parameters get their first gradient in different steps."""


def test_every_optimizer_that_counts_as_pure_is_tried_here() -> None:
    net = Matrices()
    assert {type(make(list(net.parameters()))) for make in OPTIMIZERS.values()} == PURE


@pytest.mark.parametrize(("clip", "start"), [("none", 0), ("norm", 3), ("value", 3)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replayed_steps_are_those_that_were_trained(name: str, clip: str, start: int) -> None:
    """Replay gives the trained state although a scheduler changes learning rates and some steps leave parameters
    without a gradient.
    """
    kind = Matrices if name == "Muon" else Net
    make = two_groups(OPTIMIZERS[name])
    nets = kind(), kind(seed=9)
    member, newcomer = (
        Member(nets[0], [make(nets[0])], clipped(clip)),
        Newcomer(nets[1], [make(nets[1])], clipped(clip)),
    )
    scheduler = StepLR(member.optimizers[0], 2, 0.7)
    for index in range(8):
        if index == start:
            newcomer.receive(member)
        if index:
            scheduler.step()
        member.step(branch=index % 3 == 2 and name not in TOGETHER)
    for entry in member.log[start:]:
        newcomer.apply(*entry)
    same(member, newcomer)
    rate, kept = (s.optimizers[0].param_groups[1]["lr"] for s in (member, newcomer))
    assert isinstance(rate, Tensor) is isinstance(kept, Tensor)


def test_rates_of_the_header_decide() -> None:
    """Replay without the hyperparameters in the headers gives another state, so the test of replayed steps would notice
    if they were ignored.
    """
    nets = Net(), Net()
    member = Member(nets[0], [SGD(nets[0].parameters(), 0.1, momentum=0.9)])
    newcomer = Newcomer(nets[1], [SGD(nets[1].parameters(), 0.1, momentum=0.9)])
    newcomer.receive(member)
    scheduler = OneCycleLR(member.optimizers[0], 0.2, total_steps=20)
    for _ in range(5):
        member.step()
        scheduler.step()
    for header, raw in member.log:
        newcomer.apply(replace(header, hyper=""), raw)
    assert not torch.equal(nets[0].one.weight, nets[1].one.weight)


def test_momentum_that_a_scheduler_moves() -> None:
    nets = Net(), Net(seed=2)
    made = [SGD(n.parameters(), 0.01, momentum=0.9) for n in nets]
    scheduler: LRScheduler = OneCycleLR(made[0], 0.2, total_steps=20)
    OneCycleLR(made[1], 0.2, total_steps=20)
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.receive(member)
    for _ in range(6):
        member.step()
        scheduler.step()
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
    assert made[1].param_groups[0]["momentum"] != 0.9


def test_a_parameter_that_nobody_had_a_gradient_for_does_not_decay() -> None:
    nets = Net(), Net(seed=2)
    made = [AdamW(n.parameters(), 0.01, weight_decay=0.5) for n in nets]
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.receive(member)
    before = nets[1].other.weight.clone()
    for _ in range(3):
        member.step(branch=0)
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
    assert torch.equal(nets[1].other.weight, before)
    assert nets[1].other.weight not in made[1].state


def test_nothing_is_left_in_grad() -> None:
    nets = Net(), Net()
    member, newcomer = (kind(n, [Adam(n.parameters())]) for kind, n in zip((Member, Newcomer), nets, strict=True))
    newcomer.receive(member)
    member.step()
    newcomer.apply(*member.log[0])  # type: ignore[attr-defined]
    assert all(p.grad is None for p in nets[1].parameters())


def test_statistics_of_batchnorm_are_those_of_the_members() -> None:
    nets = Net(), Net(seed=4)
    made = [SGD(n.parameters(), 0.1) for n in nets]
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.receive(member)
    for _ in range(4):
        member.step()
    for entry in member.log:
        newcomer.apply(*entry)
    assert torch.equal(nets[0].norm.running_var, nets[1].norm.running_var)
    assert not torch.equal(nets[1].norm.running_mean, torch.zeros(16))
    same(member, newcomer)


def test_a_step_without_any_samples_changes_nothing() -> None:
    nets = Net(), Net(seed=4)
    made = [Adam(n.parameters(), 0.1) for n in nets]
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.receive(member)
    member.step()
    member.empty()
    member.step()
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
    assert made[1].state[nets[1].one.weight]["step"] == 2


@pytest.mark.parametrize("clip", ["none", "norm"])
def test_each_step_is_that_of_its_own_optimizer(clip: str) -> None:
    def made(net: Net) -> list[Optimizer]:
        return [AdamW([*net.first.parameters(), *net.norm.parameters()], 0.01), SGD(net.one.parameters(), 0.1, 0.9)]

    nets = Net(), Net(seed=3)
    for net in nets:
        net.other.requires_grad_(False)
    member, newcomer = Member(nets[0], made(nets[0]), clipped(clip)), Newcomer(nets[1], made(nets[1]), clipped(clip))
    newcomer.receive(member)
    for section in (0, 1, 1, 0, 1):
        member.step(section)
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
    assert newcomer.optimizers[0].state[nets[1].first.weight]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_other_number_types(dtype: torch.dtype, fused: bool) -> None:
    nets = Net(norm=False).to(dtype), Net(seed=3, norm=False).to(dtype)
    made = [AdamW(n.parameters(), 0.01, fused=fused) for n in nets]
    member, newcomer = Member(nets[0], [made[0]], clipped("norm")), Newcomer(nets[1], [made[1]], clipped("norm"))
    for index in range(6):
        if index == 2:
            newcomer.receive(member)
        member.step(branch=index % 2)
    for entry in member.log[2:]:
        newcomer.apply(*entry)
    same(member, newcomer)


def test_a_rate_that_follows_the_batch_is_scaled_by_each_header() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], 0.1)
    shares = equal_shares([(1.0, 1.0), (2.0, 2.0), (0.0, 0.0)])
    header = Header(1, Kind.STEP, 1, NO_VIEW, "", NO_VIEW, "section 0", shares, hyper=hyper_words([optimizer]))
    for scaled_for, moved in ((0, -0.1), (2, -0.15), (6, -0.05)):
        weight.data.zero_()
        weight.grad = torch.ones(1)
        OptimizerReplay([optimizer], scaled_for=scaled_for).replay(header)
        assert weight.item() == pytest.approx(moved)
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_other_slots_are_passed_over() -> None:
    net = Net()
    before = {n: p.clone() for n, p in net.named_parameters()}
    for kind in (Kind.GATHER, Kind.BOUNDARY, Kind.CLOSING):
        OptimizerReplay([SGD(net.parameters(), 0.1)]).replay(Header(1, kind, 0, NO_VIEW, "", NO_VIEW, "anything"))
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"name": "validate"}, "named 'validate'; expected 'section N'"),
        ({"name": "section 1"}, "is of optimizer 1; this member has 1"),
        ({"name": "section 0", "error": "lr differs"}, "was refused \\(lr differs\\)"),
        ({"name": "section 0", "hyper": "opt0.group7.lr=0.1"}, "group7.lr=0.1"),
        ({"name": "section 0", "hyper": "opt0.group0.params=()"}, "params=\\(\\)"),
        ({"name": "section 0", "hyper": "opt0.group0.lr=__import__('os').getpid()"}, "cannot be set here"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_before_anything_is_stepped(header: dict[str, Any], words: str) -> None:
    net = Net()
    before = net.one.weight.clone()
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(StateError, match=words):
        OptimizerReplay([SGD(net.parameters(), 0.1)]).replay(Header(4, Kind.STEP, 4, NO_VIEW, "", NO_VIEW, **header))
    assert torch.equal(net.one.weight, before)
