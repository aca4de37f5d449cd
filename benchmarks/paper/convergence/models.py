"""Models of the convergence figures, their data, and how they are measured.

The classifiers are in the spirit of ResNet (blocks with shortcuts and BatchNorm), AlexNet (a large first kernel, a wide
classifier with dropout) and VGG (3x3 kernels alone, no BatchNorm), for FashionMNIST's 28x28 pixels. In the GPT every
linear map that is named gets an adapter of low rank (Hu et al., "LoRA", 2021); everything else is frozen. It is trained
on English prose first (`pretrain`), its adapters on source code.

A `Problem` is everything that a run needs before nodes are started: a `Recipe`, equal on all nodes, each node's own
data, and a test set with the samples marked that the fifth node knows best.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper.convergence.data import (
    BLOCK,
    CLASSES,
    NODES,
    Samples,
    Stream,
    assign_kinds,
    fashion_images,
    owners,
    prose_text,
    source_texts,
    text_blocks,
)

IMAGE_NETS = ("resnet", "alexnet", "vgg")


class Shortcut(nn.Module):
    """ResNet's basic block: two 3x3 convolutions beside a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.side: nn.Module = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.side(x))


def image_net(name: str) -> nn.Sequential:
    """Returns one of IMAGE_NETS, from images (n, 1, 28, 28) to logits (n, 10)."""
    if name == "resnet":
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            Shortcut(16, 16, 1),
            Shortcut(16, 32, 2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4, CLASSES),
        )
    if name == "alexnet":
        return nn.Sequential(
            *(nn.Conv2d(1, 24, 5, 2, 2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(24, 48, 3, 1, 1), nn.ReLU()),
            *(nn.Conv2d(48, 32, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 9, 96), nn.ReLU(), nn.Dropout(0.5), nn.Linear(96, CLASSES)),
        )
    if name == "vgg":
        return nn.Sequential(
            *(nn.Conv2d(1, 12, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(12, 24, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(24, 48, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(48 * 9, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
        )
    raise ValueError(f"no image network {name!r}: expected one of {', '.join(IMAGE_NETS)}")


class Attention(nn.Module):
    """One pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Model from tokens (n, length) to logits (n, length, vocabulary); input and output embedding are one tensor.

    Sizes are GPT-2's names: `GPT(vocabulary=50257, context=1024, layers=12, heads=12, width=768)` is GPT-2 small.
    """

    def __init__(self, *, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


def build_gpt(seed: int, **sizes: int) -> GPT:
    """Returns a GPT whose weights `seed` draws: the same on every machine with this version of torch."""
    with torch.device("meta"):
        net = GPT(**sizes)
    net.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, 0.02, generator=draw)
            if isinstance(module, nn.Linear):
                module.bias.zero_()
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
    return net


class LoRALinear(nn.Module):
    """A frozen linear map plus a trained one of low rank: W x + b + (alpha / rank) B A x (Hu et al. 2021, section 4.1).

    A is drawn at random and B is zero, so training begins at the frozen map.

    Args:
        base: the map; it is frozen here.
        rank: rank of B A.
        alpha: scales the adapter.
        draw: draws A; equal on all nodes.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, draw: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features, generator=draw) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)
        return out


def add_lora(net: nn.Module, names: Sequence[str], rank: int, seed: int) -> nn.Module:
    """Freezes `net`, and adds an adapter (alpha = 2 * rank) to each linear map whose name is in `names`; returns it.

    Raises:
        ValueError: it has no such map.
    """
    net.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    found = [(parent, n) for parent in net.modules() for n, m in parent.named_children() if n in names]
    for parent, name in found:
        setattr(parent, name, LoRALinear(getattr(parent, name), rank, 2.0 * rank, draw))
    if not found:
        raise ValueError(f"the model has no linear map called {' or '.join(names)}: nothing would be trained")
    return net


# ---------------------------------------------------------------------------------------------------- problems

GPT_SIZES = {"vocabulary": 256, "context": BLOCK, "layers": 2, "heads": 4, "width": 96}
GPT2_SMALL = {"vocabulary": 50257, "context": 1024, "layers": 12, "heads": 12, "width": 768}


@dataclass(frozen=True)
class Recipe:
    """Recipe by which every node builds the model and its optimizer.

    Attributes:
        net: one of IMAGE_NETS, or "gpt".
        lr: learning rate; SGD with momentum 0.9 for images, Adam for adapters.
        batch: samples per node and step.
        seed: of initial weights.
        sizes: of a GPT.
        rank: of the adapters; 0: the whole GPT is trained.
        adapted: names of the linear maps that get one.
        base: the pre-trained weights that each node has on its own disk, by name; empty: drawn by `base_seed`.
        base_seed: draws a GPT's weights.
    """

    net: str
    lr: float
    batch: int
    seed: int
    sizes: Mapping[str, int] | None = None
    rank: int = 0
    adapted: tuple[str, ...] = ("qkv", "out", "up", "down")
    base: Mapping[str, np.ndarray] | None = None
    base_seed: int = 0

    def model(self) -> nn.Module:
        """Returns the model with its initial weights, the same on all nodes."""
        torch.manual_seed(self.seed)
        if self.net != "gpt":
            return image_net(self.net)
        net: nn.Module = build_gpt(self.base_seed, **(self.sizes or {}))
        if self.base is not None:
            net.load_state_dict({name: torch.from_numpy(value) for name, value in self.base.items()})
        return add_lora(net, self.adapted, self.rank, self.seed) if self.rank else net

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer of all trainable parameters."""
        learning = [p for p in model.parameters() if p.requires_grad]
        if self.net == "gpt":
            return torch.optim.Adam(learning, lr=self.lr)
        return torch.optim.SGD(learning, lr=self.lr, momentum=0.9)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy per sample (images) or per byte (text), in nats."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Problem:
    """Recipe, data and test set of one training.

    Attributes:
        recipe: how nodes build model and optimizer.
        shares: each node's own data, the fifth one's last.
        test: what curves are measured on; all kinds equally often.
        newcomers: (n,) which samples of the test are of the fifth node's own kinds.
    """

    recipe: Recipe
    shares: tuple[Samples, ...]
    test: Samples
    newcomers: np.ndarray

    @property
    def steps_per_pass(self) -> int:
        """Number of optimizer steps in which every node uses each of its samples once."""
        return len(self.shares[0]) // self.recipe.batch


class Judge:
    """Measures a model on a problem's test set: accuracy in percent for images, loss in nats per byte for text."""

    def __init__(self, problem: Problem) -> None:
        self._model = problem.recipe.model().eval()
        self._inputs, self._targets = problem.test.tensors()
        self._text = problem.recipe.net == "gpt"
        self._mask = torch.from_numpy(problem.newcomers)

    @torch.no_grad()
    def __call__(self, learned: Mapping[str, np.ndarray]) -> tuple[float, float]:
        """Returns the quality on the whole test set, and on the fifth node's kinds of samples alone.

        Args:
            learned: what training changed: parameters and buffers by name.
        """
        self._model.load_state_dict({n: torch.from_numpy(v) for n, v in learned.items()}, strict=False)
        logits = torch.cat([self._model(part) for part in torch.split(self._inputs, 250)])
        if self._text:
            each = F.cross_entropy(logits.flatten(0, 1), self._targets.flatten(), reduction="none")
            each = each.view(len(self._inputs), -1).mean(1)
        else:
            each = (logits.argmax(1) == self._targets).float() * 100.0
        return float(each.mean()), float(each[self._mask].mean())


def learned_arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """Returns the tensors that training changes, by the names of `state_dict`: learned parameters, and buffers."""
    names = {n for n, p in model.named_parameters() if p.requires_grad} | {n for n, _ in model.named_buffers()}
    return {n: v.detach().numpy() for n, v in model.state_dict().items() if n in names}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Makes this process compute in one thread while the block runs; more threads would wait for each other on busy
    cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def image_problem(net: str, seed: int, *, per_node: int, own: float, lr: float, batch: int, tests: int) -> Problem:
    """Returns the problem of FashionMNIST on five nodes.

    Args:
        net: one of IMAGE_NETS.
        seed: draws who owns which classes, the samples and the initial weights.
        per_node: images of a node.
        own: part of them that is of its own two classes.
        lr: learning rate.
        batch: images per node and step.
        tests: test images, a multiple of ten.
    """
    train, test = fashion_images("train"), fashion_images("t10k")
    owned = owners(CLASSES, NODES, seed)
    shares = assign_kinds(train.kinds, owned, per_node=per_node, own=own, seed=seed)
    even = assign_kinds(test.kinds, [list(range(CLASSES))], per_node=tests, own=1.0, seed=0)[0]
    kept = test.take(np.sort(even))
    recipe = Recipe(net, lr, batch, seed)
    return Problem(recipe, tuple(train.take(s) for s in shares), kept, np.isin(kept.kinds, owned[-1]))


def text_problem(
    base: Mapping[str, np.ndarray],
    sizes: Mapping[str, int],
    seed: int,
    *,
    per_node: int,
    own: float,
    lr: float,
    batch: int,
    tests: int,
    rank: int,
) -> Problem:
    """Returns the problem of source code on five nodes; node i has mostly sort i of source code, the fifth C++.

    Args:
        base: pre-trained weights.
        sizes: of the GPT.
        seed: draws the samples and the adapters' initial weights.
        per_node: blocks of BLOCK bytes of a node.
        own: part of them that is of its own sort.
        lr: learning rate.
        batch: blocks per node and step.
        tests: test blocks, a multiple of five.
        rank: of the adapters.
    """
    texts = source_texts()
    train = text_blocks(texts, per_node, seed, test=False)
    owned = [[sort] for sort in range(NODES)]
    shares = assign_kinds(train.kinds, owned, per_node=per_node, own=own, seed=seed)
    test = text_blocks(texts, tests // NODES, 0, test=True)
    recipe = Recipe("gpt", lr, batch, seed, sizes, rank, base=base)
    return Problem(recipe, tuple(train.take(s) for s in shares), test, test.kinds == NODES - 1)


@one_thread()
def pretrain(
    sizes: Mapping[str, int], steps: int, seed: int, *, batch: int = 16
) -> tuple[dict[str, np.ndarray], float]:
    """Trains a GPT on English prose alone, in this process; AdamW, the rate falling to zero.

    Returns:
        Its weights by name, and the mean loss over the last tenth of the steps, in nats per byte.
    """
    prose = prose_text()
    blocks = text_blocks([prose], len(prose) * 4 // 5 // (BLOCK + 1), seed, test=False)
    model = build_gpt(seed, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses: list[float] = []
    for number, (inputs, targets) in enumerate(Stream(_whole(blocks, batch), batch, seed), 1):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rate.step()
        losses.append(float(loss.detach()))
        if number == steps:
            break
    return {n: v.numpy() for n, v in model.state_dict().items()}, fmean(losses[-max(1, steps // 10) :])


def _whole(samples: Samples, batch: int) -> Samples:
    """Returns as many of the samples as fill whole batches."""
    return samples.take(np.arange(len(samples) - len(samples) % batch))
