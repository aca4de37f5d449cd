"""Tests that the predicted bytes of optimizer state equal those of a real step, and that predicting changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from chaos_lightning.pipeline.optimizer_bytes import OptimizerCosts

SHAPES = ((), (7,), (6, 10), (4, 2, 3), (5, 4, 3, 3))
MAKERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AMSGrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_first_step(kind: str, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    optimizer = MAKERS[kind](parameters)
    costs = OptimizerCosts([optimizer])
    told = [costs.nbytes(p) for p in parameters]
    made_before = sum(len(state) for state in optimizer.state.values())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = [sum(x.nbytes for x in optimizer.state[p].values() if isinstance(x, Tensor)) for p in parameters]
    assert told == made
    assert kind == "Adagrad" or made_before == 0  # Adagrad makes its state at once
    assert kind == "SGD" or all(made)


def test_groups_have_settings_of_their_own_and_others_nothing() -> None:
    with_momentum, without, frozen, other = (nn.Parameter(torch.ones(8)) for _ in range(4))
    frozen.requires_grad_(False)
    groups = [{"params": [with_momentum], "momentum": 0.9}, {"params": [without]}]
    costs = OptimizerCosts([torch.optim.SGD(groups, 0.1)])
    assert [costs.nbytes(p) for p in (with_momentum, without, frozen, other)] == [32, 0, 0, 0]
    assert costs.seconds(with_momentum) > 0 == costs.seconds(other)


def test_nobody_sees_the_steps_and_nothing_is_changed() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.AdamW([parameter])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *args: seen.append("own"))
    handle = register_optimizer_step_post_hook(lambda *args: seen.append("all"))
    try:
        costs = OptimizerCosts([optimizer])
        assert costs.nbytes(parameter) == 2 * 64 + 4
        assert costs.seconds(parameter) > 0
    finally:
        handle.remove()
    assert seen == []
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert torch.equal(parameter, torch.ones(4, 4))
    assert scheduler.last_epoch == 0


class Stubborn(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise KeyError("no closure")


class Around(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda p: Stubborn(p, 0.1), "no closure"), (lambda p: Around(torch.optim.SGD(p, 0.1)), "another optimizer")],
)
def test_an_optimizer_that_cannot_be_tried_is_told(make: Any, why: str) -> None:
    parameter = nn.Parameter(torch.ones(10))
    parameter.grad = torch.ones(10)
    optimizer = make([parameter])
    costs = OptimizerCosts([optimizer])
    with pytest.warns(UserWarning, match=f"{type(optimizer).__name__} could not be tried .*{why}"):
        assert costs.nbytes(parameter) == 80
    assert costs.seconds(parameter) == 0
    assert torch.equal(parameter, torch.ones(10))
