"""Tests the contents of a plain PyTorch loop's training state, and how a joiner takes it over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replication_support import Network, train
from torch import Tensor, nn
from torch.optim import Optimizer

from chaos_lightning.errors import StateError
from chaos_lightning.replication import (
    ModuleState,
    StateAccess,
    StateTable,
    build_table,
    decode_manifest,
    encode_manifest,
    optimizer_manifest,
    restore_optimizer,
    state_hash,
    unique,
)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=2),
}


def carry(source: StateAccess, target: StateAccess) -> None:
    """Copies a state to another process's as a pull would, without a network."""
    encoded = encode_manifest(source.manifest(), source.tensors())
    table = build_table(source.tensors(), encoded.tensors)
    shapes = {e.name: torch.empty(e.shape, device="meta") for e in table.entries}
    target.prepare(decode_manifest(encoded.data, shapes), table)
    theirs, mine = source.tensors(), target.tensors()
    assert [(n, t.dtype, t.shape) for n, t in theirs] == [(n, t.dtype, t.shape) for n, t in mine]
    with torch.no_grad():
        for (_, a), (_, b) in zip(theirs, mine, strict=True):
            b.copy_(a)
    target.adopt(decode_manifest(encoded.data, {**dict(mine), **dict(encoded.tensors)}))
    assert state_hash(target.tensors()) == state_hash(source.tensors())


def build(kind: str, seed: int) -> ModuleState:
    torch.manual_seed(seed)
    module = Network()
    return ModuleState(module, OPTIMIZERS[kind](module.parameters()))


def step(state: ModuleState, seed: int) -> None:
    if not isinstance(state.optimizers[0], torch.optim.LBFGS):
        train(state, 1, seed=seed)
        return
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))

    def closure() -> float:
        state.optimizers[0].zero_grad()
        loss = state.module(data).square().mean()
        loss.backward()
        return loss.item()

    state.optimizers[0].step(closure)


@pytest.mark.parametrize("trained_before", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_alike(kind: str, trained_before: int) -> None:
    theirs, mine = build(kind, 1), build(kind, 2)
    for i in range(3):
        step(theirs, i)
    for i in range(trained_before):
        step(mine, 100 + i)
    carry(theirs, mine)
    for i in range(3):
        step(theirs, 10 + i)
        step(mine, 10 + i)
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_a_donor_without_optimizer_state_clears_the_joiners() -> None:
    theirs, mine = build("adam", 1), build("adam", 2)
    step(mine, 0)
    carry(theirs, mine)
    assert not mine.optimizers[0].state


def test_tensors_of_the_joiner_stay_the_same_objects() -> None:
    """The joiner's tensors are filled in place, so that references in hooks, schedulers and compiled code stay
    valid.
    """
    theirs, mine = build("adamw_tensor_lr", 1), build("adamw_tensor_lr", 2)
    step(theirs, 0)
    step(mine, 0)
    before = [id(t) for _, t in mine.tensors()]
    carry(theirs, mine)
    assert [id(t) for _, t in mine.tensors()] == before


def test_names_and_order() -> None:
    state = build("adam", 1)
    step(state, 0)
    names = [name for name, _ in state.tensors()]
    assert names[:4] == ["param.first.weight", "param.first.bias", "param.norm.weight", "param.norm.bias"]
    assert "param.tied.weight" not in names
    assert "buffer.scratch" in names
    assert names[-1] == "optim0.6.step"
    assert names.index("optim0.0.exp_avg") < names.index("optim0.0.exp_avg_sq") < names.index("optim0.1.exp_avg")
    assert len(set(names)) == len(names)
    assert state.volatile() == [n for n in names if n.startswith("buffer.")]


def test_state_on_the_host_stays_there_and_the_rest_lies_beside_its_parameter() -> None:
    state = build("adam", 1)
    step(state, 0)
    manifest = optimizer_manifest(state.optimizers[0])
    places = {k: tree["tensor"][2] for k, tree in manifest["state"]["0"]["dict"]}
    assert places == {"step": "host", "exp_avg": "param", "exp_avg_sq": "param", "max_exp_avg_sq": "param"}


def test_memory_format_of_the_parameter_is_kept() -> None:
    def conv(trained: bool) -> ModuleState:
        module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(module.parameters())
        if trained:
            module(torch.randn(1, 3, 5, 5)).sum().backward()
            optimizer.step()
        return ModuleState(module, optimizer)

    theirs, mine = conv(True), conv(False)
    carry(theirs, mine)
    moments = dict(mine.tensors())
    assert moments["optim0.0.exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_state_under_other_keys_travels() -> None:
    theirs, mine = build("sgd", 1), build("sgd", 2)
    theirs.optimizers[0].state["global"] = {"count": 3, "norm": torch.tensor(2.0)}  # type: ignore[index]
    mine.optimizers[0].state["stale"] = {"x": 1}  # type: ignore[index]
    carry(theirs, mine)
    assert mine.optimizers[0].state == {"global": {"count": 3, "norm": torch.tensor(2.0)}}


class Counting(nn.Module):
    """Module that keeps a count in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_extra_state_schedulers_and_averaged_modules_travel() -> None:
    def extended() -> ModuleState:
        module = nn.Sequential(nn.Linear(8, 8), Counting())
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        schedulers = [
            torch.optim.lr_scheduler.LinearLR(optimizer),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ]
        return ModuleState(
            module,
            [optimizer],
            {
                "lr": torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [3]),
                "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
                "cycle": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 100),
                "ema": torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3)),
                "scaler": torch.amp.GradScaler("cpu"),
            },
        )

    theirs, mine = extended(), extended()
    theirs.module[1].calls = 5  # type: ignore[union-attr, assignment]
    optimizer = theirs.optimizers[0]
    for _ in range(5):
        optimizer.step()
        theirs.extra["lr"].step()  # type: ignore[operator, union-attr]
    theirs.extra["ema"].update_parameters(nn.Linear(3, 3))  # type: ignore[operator, union-attr]
    carry(theirs, mine)
    assert mine.module[1].calls == 5  # type: ignore[union-attr]
    assert mine.extra["lr"].state_dict() == theirs.extra["lr"].state_dict()
    assert "ema.buffer.n_averaged" in dict(mine.tensors())
    assert mine.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_differing_optimizers_are_refused_with_both_sides() -> None:
    theirs = optimizer_manifest(torch.optim.SGD([nn.Parameter(torch.zeros(2, 3))], lr=1.0))
    cases: list[tuple[Optimizer, str]] = [
        (torch.optim.Adam([torch.zeros(2, 3)]), "donor's optimizer is SGD, this member's is Adam"),
        (
            torch.optim.SGD([torch.zeros(3, 2)], lr=1.0),
            r"parameter 0 of group 0 is \[2, 3\] at the donor and \[3, 2\] here",
        ),
        (
            torch.optim.SGD([torch.zeros(2, 3), torch.zeros(1)], lr=1.0),
            r"parameter 1 of group 0 is no parameter at the donor and \[1\] here",
        ),
        (
            torch.optim.SGD([{"params": [torch.zeros(2, 3)]}, {"params": [torch.zeros(1)]}], lr=1.0),
            "has 1 parameter groups, this one 2",
        ),
    ]
    for optimizer, words in cases:
        with pytest.raises(StateError, match=words):
            restore_optimizer(optimizer, theirs)


def test_differing_parts_are_refused() -> None:
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    full, bare = ModuleState(module, optimizer, {"lr": scheduler}), ModuleState(module, optimizer)
    with pytest.raises(StateError, match="extra state 'lr'"):
        bare.adopt(full.manifest())
    with pytest.raises(StateError, match="donor has 1 optimizers, this member 0"):
        ModuleState(module).prepare(full.manifest(), StateTable(()))
    with pytest.raises(StateError, match=r"extra state 'n' .int. lacks"):
        ModuleState(module, (), {"n": 3})  # type: ignore[dict-item]
    with pytest.raises(StateError, match="'1' keeps extra state"):
        ModuleState(module).adopt(ModuleState(nn.Sequential(module, Counting())).manifest())


def test_tied_tensors_appear_once() -> None:
    weight: Tensor = torch.zeros(1)
    assert [n for n, _ in unique([("a", weight), ("b", torch.zeros(1)), ("c", weight)])] == ["a", "b"]
    assert isinstance(ModuleState(nn.Linear(1, 1)), StateAccess)
