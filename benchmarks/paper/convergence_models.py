"""What the convergence figures train: three small image classifiers, and a small GPT with LoRA adapters.

The classifiers are in the spirit of ResNet (blocks with shortcuts and BatchNorm), AlexNet (a large first kernel, a wide
classifier with dropout) and VGG (3x3 kernels alone, no BatchNorm), for FashionMNIST's 28x28 pixels. In the GPT every
linear map that is named gets an adapter of low rank (Hu et al., "LoRA", 2021); everything else is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper.convergence_data import CLASSES

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
    """One of IMAGE_NETS; images (n, 1, 28, 28) in, logits (n, 10) out."""
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
    """Tokens (n, length) in, logits (n, length, vocabulary) out; input and output embedding are one tensor.

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
    """A GPT whose weights `seed` draws: the same on every machine that has this torch."""
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
    """Freezes `net` and gives each linear map that is called one of `names` an adapter (alpha = 2 * rank); returns it.

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
