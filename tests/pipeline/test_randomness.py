"""Tests that random numbers depend on what is computed, not on which member computes it or when."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pipeline_models import GPT, Checkpointed, Segments, assert_equal, run_whole, step_of, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.randomness import Randomness


class Careless(GPT):
    """GPT with activation checkpoints that do not restore the state of random numbers."""

    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False, preserve_rng_state=False)
        return x


class Between(GPT):
    """GPT that also draws random numbers (dropout) between its blocks."""

    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.dropout(block(x, mask), 0.1)
        return x


@pytest.mark.parametrize("cuts", [[2], [1, 2, 3]])
@pytest.mark.parametrize("kind", [GPT, Checkpointed, Segments, Careless, Between])
def test_dropout_is_the_same_wherever_layers_run(kind: type[GPT], cuts: list[int]) -> None:
    torch.manual_seed(0)
    assert_equal(kind(dropout=0.2), "blocks", cuts, step_of, tokens(), Randomness(5))


def test_numbers_that_the_step_draws_are_the_same_in_all_stages() -> None:
    """Random numbers drawn by the user's step itself are equal in all stages, and results equal those of the whole
    model.
    """

    def noisy(model: Any) -> Any:
        def step(batch: tuple[Tensor, Tensor]) -> Tensor:
            mix, keep = np.random.beta(1, 1), random.random()
            shift = torch.randint(0, 9, batch[0].shape)
            loss = F.cross_entropy(model((batch[0] + shift) % 97).flatten(0, 1), ((batch[1] + shift) % 97).flatten())
            return loss * mix * keep + torch.rand(())

        return step

    torch.manual_seed(0)
    assert_equal(GPT(dropout=0.2), "blocks", [1, 3], noisy, tokens(), Randomness(5))


def test_a_key_has_the_step_the_micro_batch_and_the_layer() -> None:
    model = nn.Module()
    model.net = nn.ModuleList(nn.Dropout(0.5) for _ in range(3))
    drawn: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        for block in model.net:
            drawn.append(block(x))
        return drawn[-1]

    chain = LayerChain(model, "net", step, randomness=Randomness(1))
    x = torch.ones(64)
    for at in ((0, 0), (0, 1), (1, 0), (0, 0)):
        chain.run(0, 3, x, at=at)
    chain.close()
    other = LayerChain(model, "net", step, randomness=Randomness(2))
    other.run(0, 3, x)
    patterns = {tuple(d.tolist()) for d in drawn}
    assert len(patterns) == 12
    assert all(torch.equal(a, b) for a, b in zip(drawn[:3], drawn[9:12], strict=True))


def test_the_users_own_random_state_is_as_if_nothing_was_drawn() -> None:
    torch.manual_seed(0)
    model = Checkpointed(dropout=0.2)
    np.random.seed(3)
    expected = np.random.randn(4)
    np.random.seed(3)
    assert np.random.randn() == expected[0]  # its twin is kept for the next call
    states = (torch.random.get_rng_state(), random.getstate())
    run_whole(copy.deepcopy(model), "blocks", step_of, tokens(), Randomness(5))
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert states[1] == random.getstate()
    assert np.random.randn(3).tolist() == expected[1:].tolist()
