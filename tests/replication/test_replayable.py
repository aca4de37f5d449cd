"""Tests that optimizers whose steps cannot be replayed are detected in advance, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replay_support import OPTIMIZERS, Matrices, Member, Net, Newcomer, clipped, same
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from chaos_lightning.protocol.types import NO_VIEW, Header, Kind
from chaos_lightning.replication.access import ModuleState
from chaos_lightning.replication.replay import ModuleReplay, OptimizerReplay, Replay


class Own(Adam):
    """Subclass of Adam, which could do anything in its steps."""


class ClosureFirst(Optimizer):
    """Optimizer whose step requires a closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(group["lr"] * param.grad)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_known_optimizers_can(name: str) -> None:
    assert OptimizerReplay([OPTIMIZERS[name](list(Matrices().parameters()))]).replayable() == ""


def test_what_cannot_is_named_with_its_number() -> None:
    net = Net()
    said = OptimizerReplay([Adam(net.first.parameters()), Own(net.one.parameters())]).replayable()
    assert said.startswith("optimizer 1 (Own): it is not known to be a pure function")
    assert "chaos_replay = True" in said


def test_a_module_vouches_for_what_is_not_known() -> None:
    assert OptimizerReplay([Own(Net().parameters())], vouched=True).replayable() == ""


def test_a_module_forbids_what_is_known() -> None:
    said = OptimizerReplay([Adam(Net().parameters())], vouched=False).replayable()
    assert said == "the module says chaos_replay = False"


@pytest.mark.parametrize("vouched", [None, True])
@pytest.mark.parametrize(("kind", "words"), [(LBFGS, "several times in a step"), (SparseAdam, "sparse")])
def test_nobody_can_vouch_for_some(kind: type[Optimizer], words: str, vouched: bool | None) -> None:
    assert words in OptimizerReplay([kind(list(Net().parameters()))], vouched=vouched).replayable()


def test_hooks_of_an_optimizer_count() -> None:
    for register, words in (("register_step_pre_hook", "pre-hook"), ("register_step_post_hook", "post-hook")):
        hooked = Adam(Net().parameters())
        handle = getattr(hooked, register)(lambda *_: None)
        assert words in OptimizerReplay([hooked]).replayable()
        assert OptimizerReplay([hooked], vouched=True).replayable() == ""
        handle.remove()
        assert OptimizerReplay([hooked]).replayable() == ""


def test_hooks_of_all_optimizers_count() -> None:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert "post-hook for all optimizers" in OptimizerReplay([Adam(Net().parameters())]).replayable()
    finally:
        handle.remove()


def test_a_hook_that_only_looks_does_not_count() -> None:
    """An optimizer hook that declares `only_looks`, as the profiler's does, does not prevent replay."""

    def looks(*_: object) -> None:
        pass

    looks.only_looks = True  # type: ignore[attr-defined]
    handle = register_optimizer_step_post_hook(looks)
    try:
        assert OptimizerReplay([Adam(Net().parameters())]).replayable() == ""
    finally:
        handle.remove()


def test_a_step_that_was_replaced_counts_and_a_schedulers_wrapper_does_not() -> None:
    scheduled, replaced = Adam(Net().parameters()), Adam(Net().parameters())
    StepLR(scheduled, 2)
    assert "step" in vars(scheduled)
    assert OptimizerReplay([scheduled]).replayable() == ""
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    assert "replaced on this instance" in OptimizerReplay([replaced]).replayable()


def test_clipping_happens_within_the_closure_where_asked_for() -> None:
    net = Net(norm=False)
    optimizer = ClosureFirst(net.parameters())
    replay = OptimizerReplay([optimizer], clipped("value"), vouched=True, within=True)
    assert isinstance(replay, Replay)
    before = net.one.weight.clone()
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    replay.replay(Header(1, Kind.STEP, 1, NO_VIEW, "", NO_VIEW, "section 0"))
    assert torch.equal(net.one.weight, before - 0.1 * torch.full_like(before, 0.01))


# ------------------------------------------------------------------ plain loops


class Says(Net):
    chaos_replay = False


@pytest.mark.parametrize(
    ("net", "extra", "words"),
    [
        (Net, {}, ""),
        (Net, {"schedule": StepLR(SGD(Net().parameters()), 2)}, ""),
        (Net, {"ema": Net()}, "extra state 'ema' is a model that changes outside of the optimizer"),
        (Net, {"scaler": torch.amp.GradScaler("cpu")}, "extra state 'scaler' scales the loss"),
        (Says, {}, "the module says chaos_replay = False"),
    ],
)
def test_a_plain_loop_says_why_it_cannot(net: type[Net], extra: dict[str, Any], words: str) -> None:
    model = net()
    said = ModuleReplay(ModuleState(model, Adam(model.parameters()), extra)).replayable()
    assert said.startswith(words) if words else said == ""


def test_a_plain_loop_is_replayed() -> None:
    nets = Net(), Net(seed=3)
    made = [AdamW(n.parameters(), 0.01) for n in nets]
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.replay = ModuleReplay(newcomer.state)
    newcomer.receive(member)
    for _ in range(3):
        member.step()
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
