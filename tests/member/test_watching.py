"""Tests that changes of tensors in a training step, which would make members differ, are detected in all their
forms.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.member.watching import Watch


class Model(nn.Module):
    """Model with a parameter in a child, and three buffers: averaged, not averaged, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("late", None)


def watched(model: Model, change: Callable[[Model], object], batches: int = 1, *, parameters: bool = True) -> Watch:
    """Returns a watch that has seen `change` applied to the model in its last batch."""
    watch = Watch(model, [("mean", model.mean)], named_by="chaos_buffers", parameters=parameters)
    for _ in range(batches - 1):
        watch.begin()
        watch.check("training_step")
    watch.begin()
    change(model)
    return watch


def in_place(model: Model) -> None:
    with torch.no_grad():
        model.net.weight.clamp_(-0.1, 0.1)


CHANGES: dict[str, tuple[str, Callable[[Model], object]]] = {
    "a parameter in place": ("net.weight", in_place),
    "a parameter's data": ("net.weight", lambda m: setattr(m.net.weight, "data", m.net.weight.data * 2)),
    "a parameter's data in place": ("net.weight", lambda m: m.net.weight.data.mul_(0.5)),
    "another parameter": ("net.weight", lambda m: setattr(m.net, "weight", nn.Parameter(torch.ones(1, 2)))),
    "a buffer in place": ("count", lambda m: m.count.add_(1)),
    "another buffer": ("count", lambda m: setattr(m, "count", m.count + 1)),
    "a buffer of another shape": ("count", lambda m: setattr(m, "count", torch.zeros(4))),
    "an averaged buffer of another shape": ("mean", lambda m: setattr(m, "mean", torch.zeros(4))),
    "a buffer that is filled late": ("late", lambda m: setattr(m, "late", torch.zeros(4))),
    "a new buffer": ("cache", lambda m: m.register_buffer("cache", torch.zeros(4))),
    "a parameter that goes": ("net.bias", lambda m: delattr(m.net, "bias")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_named_whenever_it_comes(what: str) -> None:
    name, change = CHANGES[what]
    late = 4 if what == "a parameter's data in place" else 7  # nothing but its bits tells of it
    for batches in (1, 2, late):
        watch = watched(Model(), change, batches)
        with pytest.raises(UnsupportedError, match=rf"(^|, ){name}( |,).*changed within training_step"):
            watch.check("training_step")


def test_what_stays_equal_on_all_members_is_let_pass() -> None:
    def harmless(model: Model) -> None:
        model.count = model.count.clone()
        model.mean.add_(1)
        model.note = torch.ones(3)
        model.net.weight.grad = torch.ones(1, 2)

    for batches in (1, 2, 3):
        watched(Model(), harmless, batches).check("training_step")


def test_under_manual_optimization_parameters_are_the_optimizers_affair() -> None:
    assert watched(Model(), in_place, parameters=False).changed() == []
    assert watched(Model(), CHANGES["another buffer"][1], parameters=False).changed() == ["count"]


def test_an_averaged_buffer_that_is_assigned_anew_stays_the_tensor_that_is_averaged() -> None:
    model = Model()
    first, weight = model.mean, model.net.weight
    watch = watched(model, lambda m: setattr(m, "mean", m.net.weight.detach()[0, :1].expand(3)))
    watch.check("training_step")
    watch.put_back()
    assert model.mean is first
    assert torch.equal(first, weight[0, :1].expand(3))
    first.zero_()  # the average is written there, and reaches nothing else
    assert weight[0, 0] != 0


def test_a_backward_pass_may_need_the_value_that_the_buffer_had() -> None:
    model = Model()
    watch = Watch(model, [("mean", model.mean)], named_by="chaos_buffers")
    model.mean.fill_(2.0)
    factor = nn.Parameter(torch.ones(3))
    watch.begin()
    loss = (factor * model.mean).sum()
    model.mean = 0.5 * model.mean
    watch.check("training_step")
    loss.backward()
    watch.put_back()
    assert factor.grad is not None
    assert factor.grad.tolist() == [2.0, 2.0, 2.0]
    assert model.mean.tolist() == [1.0, 1.0, 1.0]


def test_bits_of_every_type_are_compared() -> None:
    model = nn.Module()
    types = (torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)
    for number, dtype in enumerate(types):
        model.register_buffer(f"b{number}", torch.zeros(3, 2, dtype=dtype).t())
    model.register_buffer("nan", torch.full((2,), float("nan")))
    watch = Watch(model, [], named_by="chaos_buffers")
    watch.begin()
    watch.check("training_step")
    watch.begin()
    for number in range(len(types)):
        getattr(model, f"b{number}").data[0, 0] = 1
    assert watch.changed() == [f"b{number}" for number in range(len(types))]
