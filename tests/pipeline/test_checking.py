"""A cut is compared with the whole before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_models import GPT, Block, Holder, image_step, images, step_of, tokens
from torch import Tensor, nn

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.checking import check_cut
from chaos_lightning.pipeline.parts import find_parts
from chaos_lightning.pipeline.randomness import Randomness


def checked(model: nn.Module, step: Any, batch: Any, path: str = "blocks", **options: Any) -> float | None:
    chain = LayerChain(model, path, step, randomness=Randomness(3))
    try:
        return check_cut(chain, find_parts(chain, batch), batch, **options)
    finally:
        chain.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [None, [2]])
def test_a_plain_model_is_the_same_in_stages(cuts: list[int] | None, tied: bool) -> None:
    torch.manual_seed(0)
    model = GPT(dropout=0.1, tied=tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert checked(model, step_of(model), tokens(), cuts=cuts) == pytest.approx(20 if tied else 4.7, abs=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_statistics_count_once_and_come_back() -> None:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)),
    ]
    model = Holder(net=nn.Sequential(*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))))
    assert checked(model, image_step(model), images(), "net") is not None
    assert model.net[0][1].num_batches_tracked == 0
    assert not model.net[0][1].running_mean.any()


def test_a_loss_from_inside_of_blocks_is_refused() -> None:
    class Routed(Block):
        kept: list[Tensor]

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = super().forward(x, mask)
            self.kept.append(x.pow(2).mean())
            return x

    model = GPT()
    model.blocks = nn.ModuleList(Routed() for _ in range(3))
    kept: list[Tensor] = []
    for block in model.blocks:
        block.kept = kept  # type: ignore[assignment]

    def step(batch: Any) -> Tensor:
        kept.clear()
        return step_of(model)(batch) + 0.1 * sum(kept)

    with pytest.raises(
        UnsupportedError, match=r"in 3 stages .*: the loss is .*, not .*; the gradient of token\.weight is off by"
    ):
        checked(model, step, tokens())


def test_a_gradient_that_is_missing_is_named() -> None:
    class Sneaky(GPT):
        def through(self, x: Tensor, mask: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = block(
                    x.detach() if i == 2 and not x.is_leaf and "Enter" not in str(x.grad_fn) and self.odd else x, mask
                )
            return x

    torch.manual_seed(0)
    model = Sneaky()
    calls: list[int] = []

    def step(batch: Any) -> Tensor:
        calls.append(1)
        model.odd = len(calls) > 2  # the whole first, then stages
        return step_of(model)(batch)

    with pytest.raises(UnsupportedError, match=r"the gradient of position\.weight is there only as a whole"):
        checked(model, step, tokens(), cuts=[3])
