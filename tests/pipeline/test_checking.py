"""Tests the comparison, before training, of a model in stages with the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pipeline_models import GPT, Block, Holder, image_step, images, step_of, tokens
from torch import Tensor, nn
from torchmetrics import MeanMetric

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.checking import check_before_training, check_cut, check_stretches
from chaos_lightning.pipeline.parts import find_parts
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob


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


class Residual(nn.Module):
    """Residual block as in torchvision's ResNet, which adds to its result in place."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = (
            nn.Conv2d(width, out, 3, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )
        self.down = None if width == out else nn.Sequential(nn.Conv2d(width, out, 1), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x if self.down is None else self.down(x)
        return self.relu(out)


@pytest.mark.parametrize("cuts", [None, [2, 3]])
@pytest.mark.parametrize("real", [True, False])
def test_a_residual_net_is_the_same_in_stages(cuts: list[int] | None, real: bool) -> None:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    model = Holder(net=nn.Sequential(stem, Residual(4, 4), Residual(4, 8), Residual(8, 8), head))
    tensors = [] if real else freed(model)
    loss = checked(model, image_step(model), images(), "net", cuts=cuts)
    assert loss is not None
    assert loss == pytest.approx(2.3, abs=1) or not real
    assert all(map(is_absent, tensors))


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


# ------------------------------------------------------------------------------------------------ too large a model


def stretched(model: nn.Module, step: Any, batch: Any, path: str = "blocks") -> list[range]:
    chain = LayerChain(model, path, step, randomness=Randomness(3))
    try:
        return check_stretches(chain, find_parts(chain, batch), batch)
    finally:
        chain.close()


def freed(model: nn.Module) -> list[Tensor]:
    """Frees the memory of all tensors of a model; returns the tensors, which are without data now."""
    ModelMemory(model, 1, "cpu").leave_out([name for name, *_ in named_tensors(model)])
    return [t for *_, t in named_tensors(model)]


@pytest.mark.parametrize("real", [True, False])
def test_stretches_of_a_large_model_are_compared(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT(blocks=9, dropout=0.1)
    tensors, most = [] if real else freed(model), list[int]()
    run = LayerChain.run

    def spy(self: LayerChain, *args: Any, **kwargs: Any) -> Any:
        most.append(sum(t.nbytes for t in tensors if not is_absent(t)))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(LayerChain, "run", spy)
    assert stretched(model, step_of(model), tokens()) == [range(0, 4), range(5, 9)]
    assert all(map(is_absent, tensors))
    assert max(most) < 5.5 * sum(p.nbytes for p in Block().parameters())


def test_each_row_of_classes_is_compared_once() -> None:
    class Other(Block):
        pass

    model = GPT()
    model.blocks = nn.ModuleList([Block() for _ in range(6)] + [Other()] + [Block() for _ in range(6)])
    assert stretched(model, step_of(model), tokens()) == [range(n, n + 4) for n in (0, 3, 4, 5, 6, 9)]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_short_chains_are_one_stretch(blocks: int) -> None:
    model = GPT(blocks=blocks)
    assert stretched(model, step_of(model), tokens()) == [range(blocks)]


class Sneaky(Block):
    """Block that passes a tensor to the next block of its class through shared state, not through its output."""

    kept: list[Tensor]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = super().forward(x, mask)
        if self.kept:
            x = x + self.kept[-1]
        self.kept[:] = [x.mean()]
        return x


@pytest.mark.parametrize("first", [0, 5])
def test_what_passes_by_another_way_is_found_in_a_stretch(first: int) -> None:
    model, kept = GPT(blocks=9), list[Tensor]()
    for index in range(first, first + 4):
        model.blocks[index] = Sneaky()
        model.blocks[index].kept = kept  # type: ignore[assignment]

    def step(batch: Any) -> Tensor:
        kept.clear()
        return step_of(model)(batch)

    with pytest.raises(UnsupportedError, match=r"in 2 stages the step \(layers \d to \d\) gives something else"):
        stretched(model, step, tokens())


def before_training(model: nn.Module, step: Any, memory_nbytes: int) -> str:
    """Runs the check before training for a model whose layers need 30 bytes each; returns the words about what was
    compared.
    """
    chain = LayerChain(model, "blocks", step, randomness=Randomness(3))
    layer = Layer(name="", forward_s=1, backward_s=1, parameter_nbytes=10, gradient_nbytes=10)
    layers = tuple(replace(layer, name=f"{i}") for i in range(len(chain)))
    job = TrainingJob(layers=layers, devices=(Device(name="d", memory_nbytes=memory_nbytes),), micro_batches=1)
    try:
        return check_before_training(chain, find_parts(chain, tokens()), tokens(), job)
    finally:
        chain.close()


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (270, "in 9 stages as in one"),
        (269, "compared at 2 borders"),
        (120, "compared at 2 borders"),
        (119, "compared at 2 borders"),
        (60, "compared at 2 borders"),
        (59, "was not compared with the whole: two layers have no room here"),
    ],
)
def test_memory_decides_what_is_compared(nbytes: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    run = LayerChain.run
    monkeypatch.setattr(
        LayerChain, "run", lambda self, a, b, *c, **d: lengths.append(b - a) or run(self, a, b, *c, **d)
    )
    model = GPT(blocks=9)
    assert words in before_training(model, step_of(model), nbytes)
    lengths.remove(9)  # parts are looked for in the whole
    assert max(lengths, default=0) == {270: 9, 269: 4, 120: 4, 119: 3, 60: 2, 59: 0}[nbytes]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("too much"), ValueError("no weights")])
def test_what_cannot_be_compared_is_told_and_is_no_reason_to_end(error: Exception) -> None:
    """An error that the user's step raises on made-up values, or for lack of memory, skips the comparison with a note;
    with real weights a ValueError is raised.
    """

    def raises(model: Any, calls: list[int]) -> Any:
        def step(batch: Any) -> Tensor:
            calls.append(1)
            if len(calls) > 1:  # behind the look for parts
                raise error
            return step_of(model)(batch)

        return step

    model = GPT()
    freed(model)
    assert (
        f"was not compared with the whole: {'it runs' if 'too' in str(error) else 'with made-up values it raises'}"
        in (before_training(model, raises(model, []), 1000))
    )
    model = GPT()
    if isinstance(error, ValueError):
        with pytest.raises(ValueError, match="no weights"):
            before_training(model, raises(model, []), 1000)


def test_metrics_count_nothing_of_a_comparison() -> None:
    model = GPT()
    model.metric = MeanMetric()

    def step(batch: Any) -> Tensor:
        loss = step_of(model)(batch)
        model.metric.update(loss.detach())
        return loss

    checked(model, step, tokens())
    stretched(model, step, tokens())
    assert model.metric.update_count == 0
