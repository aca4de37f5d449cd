"""The two models of the examples: a byte-level GPT and a small image classifier. Ordinary LightningModules.

Nothing in here knows that members come and go. What a model must do to be trained elastically is what it does anyway:
log with `sync_dist=True` where the number should speak for all members, and keep its state in parameters and buffers.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""One token per byte: no tokenizer to download, no vocabulary to agree on."""


class Block(nn.Module):
    """One pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


class GPT(nn.Module):
    """Byte-level GPT: takes bytes, returns the logits of each next byte; input and output embedding are tied."""

    def __init__(self, *, layers: int, heads: int, width: int, block: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.token(tokens) + self.place(places)))
        return F.linear(x, self.token.weight)


class GPTModule(L.LightningModule):
    """LightningModule of the GPT: mean cross entropy per byte, AdamW.

    Args:
        layers: Transformer blocks.
        heads: Attention heads; must divide `width`.
        width: Size of the embedding.
        block: Longest context in bytes.
        lr: Learning rate.
    """

    def __init__(self, layers: int = 4, heads: int = 4, width: int = 128, block: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = GPT(layers=layers, heads=heads, width=width, block=block)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class CNNModule(L.LightningModule):
    """LightningModule of an image classifier with BatchNorm, whose statistics are averaged with each step; SGD with
    momentum.

    Args:
        channels: Channels of the images: 1 for FashionMNIST and the digits, 3 for CIFAR-10. Any size will do.
        classes: Number of classes.
        width: Channels after the first convolution.
        lr: Learning rate.
    """

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 16, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()

        def stage(inputs: int, outputs: int) -> nn.Sequential:
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

        self.net = nn.Sequential(
            stage(channels, width),
            stage(width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 4, classes),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
