"""Tests the mapping of parameters and buffers to parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import GPT, WIDTH, Holder, image_step, images, step_of, tokens
from torch import Tensor, nn

from chaos_lightning.pipeline.absent import is_absent, named_tensors, put, stand_in
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.parts import ModelParts, find_parts


def parts_of(model: nn.Module, step: Any = None, path: str = "blocks", batch: Any = None) -> ModelParts:
    chain = LayerChain(model, path, step or step_of(model))
    try:
        return find_parts(chain, batch or tokens())
    finally:
        chain.close()


def leave_out_all(model: nn.Module) -> None:
    for _, module, name, tensor in named_tensors(model):
        put(module, name, tensor, stand_in(tensor, torch.device("cpu")))


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_belong_to_the_layers_that_use_them(absent: bool, tied: bool) -> None:
    model = GPT(tied=tied)
    model.add_module("pooler", nn.Linear(2, 2))
    if absent:
        leave_out_all(model)
    found = parts_of(model)
    assert (found.part_of["position.weight"], found.part_of["ln.bias"]) == ("layer.0", "layer.3")
    assert {found.part_of[name] for name in found.part_of if name.startswith("blocks.2.")} == {"layer.2"}
    assert found.unused == ("pooler.weight", "pooler.bias")
    assert found.part_of["pooler.bias"] == "layer.3"
    if tied:
        assert found.part_of["token.weight"] == found.part_of["head.weight"] == "shared.token.weight"
        assert found.users["shared.token.weight"] == (0, 3)
        assert found.names("shared.token.weight") == ("token.weight", "head.weight")
        assert found.owned_by([3]) == {"layer.3", "shared.token.weight", "rest"}
        assert found.owned_by([1, 2]) == {"layer.1", "layer.2", "rest"}
    else:
        assert (found.part_of["token.weight"], found.part_of["head.weight"]) == ("layer.0", "layer.3")
    assert set(found.part_of) == {name for name, *_ in named_tensors(model)}
    assert all(is_absent(t) == absent for _, _, _, t in named_tensors(model))
    assert not absent or all(t.isnan().all() for t in model.parameters())


def test_a_parameter_that_is_used_without_its_module_belongs_to_that_layer() -> None:
    class Bare(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.both = (nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
            self.between = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(4))

        def through(self, x: Tensor, mask: Tensor) -> Tensor:
            assert self.last.dtype == x.dtype
            x = x * self.first + self.both + torch.zeros_like(self.last)
            for block, scale in zip(self.blocks, self.between, strict=True):
                x = block(x, mask) * scale
            return F.linear(x * self.last * self.both, self.blocks[1].mlp[1].weight[:WIDTH])

    found = parts_of(Bare())
    assert [found.part_of[f"between.{i}"] for i in range(4)] == [f"layer.{i}" for i in range(4)]
    assert (found.part_of["first"], found.part_of["last"]) == ("layer.0", "layer.3")
    assert found.users[found.part_of["both"]] == (0, 3)
    assert found.users["shared.blocks.1.mlp.1.weight"] == (1, 3)


def test_a_weight_that_blocks_share_is_of_all_of_them() -> None:
    model = GPT()
    for index in (1, 2):
        model.blocks[index].mlp[1].weight = model.blocks[0].mlp[1].weight
    found = parts_of(model)
    assert found.users["shared.blocks.0.mlp.1.weight"] == (0, 1, 2)


@pytest.mark.parametrize("absent", [False, True])
def test_shapes_may_change_and_statistics_go_with_their_layer(absent: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.BatchNorm2d(3, affine=False)
            self.net = nn.Sequential(
                nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)),
                nn.Conv2d(8, 12, 3),
                nn.Sequential(nn.Conv2d(12, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)),
            )
            self.register_buffer("mean", torch.ones(3, 1, 1))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(self.stem(x - self.mean))
            self.calls += 1
            return y

    model = Net()
    if absent:
        leave_out_all(model)
    before = {name: t.clone() for name, _, _, t in named_tensors(model)}
    found = parts_of(Holder(model=model), image_step(Holder(net=model)), "model.net", images())
    assert (found.part_of["model.mean"], found.part_of["model.calls"]) == ("rest", "layer.2")
    assert found.part_of["model.stem.running_var"] == "layer.0"
    assert found.part_of["model.net.0.1.running_mean"] == "layer.0"
    after = {name: t for name, _, _, t in named_tensors(model)}
    assert all(torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7)) for name in before)
