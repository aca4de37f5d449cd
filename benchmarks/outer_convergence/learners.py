"""Models that the clusters train: two character models on the prose that comes with Python, with their samples and
losses.

Theory of operation. A sample is one place in the training text: the characters before it, or the block that begins
there. Positions of an epoch are places in an order that the seed draws, so a lease of a chunk is a fair sample of the
whole text. A `Learner` is one copy of a model: its parameters are one flat fp32 tensor, as the outer state has them,
and its inner optimizer is AdamW, which stays where it is when a version is adopted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper.convergence.data import prose_text
from benchmarks.paper.convergence.models import build_gpt
from chaos_lightning.outer.rules.types import Covered, TensorSpec

VALIDATION = 20
"""One part in so many of the text, its end, is for validation alone."""


class CharacterMLP(nn.Module):
    """MLP that predicts the next character from the characters before it; returns logits."""

    def __init__(self, vocabulary: int, context: int, width: int, hidden: int, seed: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.body = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(context * width, hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.ReLU()),
            nn.Linear(hidden, vocabulary),
        )
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.token.weight.normal_(0.0, 1.0, generator=draw)
            for module in self.body:
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, (2.0 / module.in_features) ** 0.5, generator=draw)
                    module.bias.zero_()
            self.body[-1].weight.mul_(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.body(self.token(tokens))
        return out


@dataclass(frozen=True)
class Task:
    """One model and its training settings.

    Attributes:
        name: Name in texts and pictures.
        build: The model, from the number of characters and a seed.
        context: Number of characters that the model sees.
        everywhere: Whether the model predicts at each place of a block, not only after it.
        batch: Samples of an inner step of one cluster.
        inner_lr: Learning rate of AdamW.
        tests: Samples of the validation text.
    """

    name: str
    build: Callable[[int, int], nn.Module]
    context: int
    everywhere: bool
    batch: int
    inner_lr: float
    tests: int


def _mlp(vocabulary: int, seed: int) -> nn.Module:
    return CharacterMLP(vocabulary, context=12, width=12, hidden=126, seed=seed)


def _gpt(vocabulary: int, seed: int) -> nn.Module:
    return build_gpt(seed, vocabulary=vocabulary, context=32, layers=2, heads=2, width=66)


MLP = Task("MLP", _mlp, context=12, everywhere=False, batch=32, inner_lr=3e-3, tests=4096)
SMALL_GPT = Task("GPT", _gpt, context=32, everywhere=True, batch=8, inner_lr=3e-3, tests=256)


@functools.cache
def _text() -> tuple[Tensor, Tensor, int]:
    """Returns the training and the validation text as tensors of character numbers, and the number of different
    characters.
    """
    raw = np.frombuffer(prose_text(), dtype=np.uint8)
    kinds, numbers = np.unique(raw, return_inverse=True)
    whole = torch.from_numpy(numbers.astype(np.int64))
    cut = len(whole) - len(whole) // VALIDATION
    return whole[:cut], whole[cut:], len(kinds)


class Samples:
    """The training samples of one run, in the order of each epoch, and the validation samples."""

    def __init__(self, task: Task, seed: int) -> None:
        train, valid, self.vocabulary = _text()
        self.task, self._seed = task, seed
        self._blocks = train.unfold(0, task.context + 1, 1)
        tests = valid.unfold(0, task.context + 1, 1)
        self.tests = tests[torch.linspace(0, len(tests) - 1, task.tests).long()]
        self._orders: dict[int, Tensor] = {}

    @property
    def length(self) -> int:
        """Number of samples in an epoch."""
        return len(self._blocks)

    def take(self, covered: Sequence[Covered]) -> Tensor:
        """Returns the text blocks of the samples at these positions of their epochs, (n, context + 1)."""
        places = [self._order(c.epoch)[a:b] for c in covered for a, b in c.spans]
        return self._blocks[torch.cat(places)]

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            draw = torch.Generator().manual_seed(1_000_003 * self._seed + epoch)
            self._orders[epoch] = torch.randperm(self.length, generator=draw)
        return self._orders[epoch]


class Learner:
    """One copy of a model: its parameters as one flat fp32 tensor, and its inner optimizer.

    Attributes:
        flat: All parameters, fp32.
        specs: Name, type and shape of each tensor, in the flat order.
    """

    def __init__(self, samples: Samples, seed: int, rate: float = 1.0) -> None:
        task = self._task = samples.task
        self._model = task.build(samples.vocabulary, seed)
        named = [(n, p) for n, p in self._model.named_parameters()]
        self.specs = tuple(TensorSpec(n, "float32", tuple(p.shape)) for n, p in named)
        self.flat = torch.cat([p.detach().reshape(-1) for _, p in named])
        slopes = torch.zeros_like(self.flat)
        at = 0
        for _, parameter in named:
            stop = at + parameter.numel()
            parameter.data = self.flat[at:stop].view(parameter.shape)
            parameter.grad = slopes[at:stop].view(parameter.shape)
            at = stop
        whole = nn.Parameter(self.flat)
        whole.grad = slopes
        self._optimizer = torch.optim.AdamW([whole], lr=rate * task.inner_lr, fused=True)
        self._slopes = slopes

    def forget(self) -> None:
        """Clears the inner optimizer's state."""
        self._optimizer.state.clear()

    def step(self, blocks: Tensor) -> None:
        """Trains one inner step on these samples."""
        self._slopes.zero_()
        self._loss(blocks).backward()
        self._optimizer.step()

    @torch.no_grad()
    def loss(self, blocks: Tensor) -> float:
        """Returns the mean loss over these samples, in nats per character."""
        return float(self._loss(blocks))

    def _loss(self, blocks: Tensor) -> Tensor:
        before = blocks[:, :-1]
        logits = self._model(before)
        if self._task.everywhere:
            return F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
        return F.cross_entropy(logits, blocks[:, -1])
