"""Makes small models for the tests of pipelines, and runs them whole and in stages."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chaos_lightning.pipeline.absent import named_tensors, put, stand_in
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.randomness import Randomness

VOCABULARY, WIDTH, LENGTH = 97, 32, 16


class Block(nn.Module):
    """Transformer block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.ln(x)
        x = x + self.drop(self.attention(h, h, h, attn_mask=mask, need_weights=False)[0])
        return x + self.drop(self.mlp(x))


class GPT(nn.Module):
    """Small GPT; subclasses override the way in which its blocks are called (`through`)."""

    def __init__(self, blocks: int = 4, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        x = self.drop(self.token(tokens) + self.position(torch.arange(n, device=tokens.device)))
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool, device=tokens.device), 1)
        return self.head(self.ln(self.through(x, mask)))

    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


class Holder(nn.Module):
    """Root module that contains the given modules under the given names."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def tokens(rows: int = 3, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Returns a batch of inputs and targets."""
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randint(0, VOCABULARY, (rows, length), generator=generator) for _ in range(2))  # type: ignore[return-value]


def step_of(model: nn.Module) -> Callable[[Any], Tensor]:
    """Returns the training step of a GPT."""
    return lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def run_cut(
    model: nn.Module,
    path: str,
    cuts: Sequence[int],
    step_for: Callable[[Any], Callable[[Any], Any]],
    batch: Any,
    randomness: Randomness | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """Runs a copy of the model in stages; each stage has a copy of its own, without the blocks of other stages.

    Returns:
        The result of the step, and the sums of the stages' gradients by name.
    """
    bounds = [0, *cuts, len(model.get_submodule(path))]  # type: ignore[arg-type]
    stages = []
    for first, end in itertools.pairwise(bounds):
        mine = copy.deepcopy(model)
        for index, block in enumerate(mine.get_submodule(path)):  # type: ignore[arg-type]
            if not first <= index < end:
                for _, module, name, tensor in named_tensors(block):
                    put(module, name, tensor, stand_in(tensor, tensor.device))
        stages.append((mine, LayerChain(mine, path, step_for(mine), randomness=randomness), first, end))
    units, received, specs = [], (), ""
    for _, chain, first, end in stages:
        unit = chain.run(first, end, batch, received, specs)
        received, specs = tuple(t.detach().clone() for t in unit.tensors), unit.specs
        units.append(unit)
    result = units[-1].result
    loss = result["loss"] if isinstance(result, dict) else result
    gradients = units[-1].backward([loss], [None])
    for unit in reversed(units[:-1]):
        gradients = unit.backward(unit.tensors, gradients)
    total: dict[str, Tensor] = {}
    for mine, chain, _, _ in stages:
        chain.close()
        for name, parameter in mine.named_parameters():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
    return result, total


def run_whole(
    model: nn.Module,
    path: str,
    step_for: Callable[[Any], Callable[[Any], Any]],
    batch: Any,
    randomness: Randomness | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """Runs a copy of the model as one stage, or, if no randomness is given, as a plain model."""
    mine = copy.deepcopy(model)
    if randomness is None:
        result = step_for(mine)(batch)
        (result["loss"] if isinstance(result, dict) else result).backward()
    else:
        chain = LayerChain(mine, path, step_for(mine), randomness=randomness)
        unit = chain.run(0, len(chain), batch)
        result = unit.result
        unit.backward([result["loss"] if isinstance(result, dict) else result], [None])
    return result, {name: p.grad for name, p in mine.named_parameters() if p.grad is not None}


class Checkpointed(GPT):
    """GPT that checkpoints the activations of each block."""

    reentrant = False

    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=self.reentrant)
        return x


class Segments(GPT):
    """GPT that runs all of its blocks within one activation checkpoint."""

    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(super().through, x, mask, use_reentrant=False)


def assert_equal(
    model: nn.Module,
    path: str,
    cuts: Sequence[int],
    step_for: Callable[[Any], Callable[[Any], Any]],
    batch: Any,
    randomness: Randomness | None = None,
) -> None:
    """Checks that the results and gradients of a run in stages equal those of the whole model, bit for bit."""
    result, gradients = run_whole(model, path, step_for, batch, randomness)
    cut, cut_gradients = run_cut(model, path, cuts, step_for, batch, randomness)
    assert torch.equal(result, cut)
    assert gradients.keys() == cut_gradients.keys()
    assert [name for name in gradients if not torch.equal(gradients[name], cut_gradients[name])] == []


def images() -> tuple[Tensor, Tensor]:
    """Returns a batch of images and class labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 12, 12, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(0, 10, (4,), generator=generator)


def image_step(model: Any) -> Callable[[Any], Tensor]:
    """Returns the training step of a model whose network is the module "net"."""
    return lambda batch: F.cross_entropy(model.net(batch[0]), batch[1])
