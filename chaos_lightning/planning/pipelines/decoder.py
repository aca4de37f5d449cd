"""Computes the layers of decoder models by formula: times and bytes of the embedding, each block and the head.

Sizes: batch b (samples of one micro-batch), sequence s, width h, heads a (of keys and values: k), width f between the
two halves of the feed-forward part, vocabulary V, cards t of one device (tensor parallelism).

Parameters of a block: attention 2 h^2 (1 + k/a), feed-forward 2 h f, or 3 h f where it is gated (Llama; no biases, two
norms of h), else with its biases and norms (12 h^2 + 13 h for f = 4 h, k = a; GPT).

Time. A forward pass takes 2 FLOP per parameter of the matrices and token, and 4 b s^2 h for scores and their use; a
backward pass takes twice that (Narayanan et al., arXiv 2104.04473, appendix), and what it recomputes: 4 b s^2 h for
`selective`, the whole forward pass for `full`. The time is these FLOP, divided by t cards' peak FLOP/s and by the share
of the peak that is reached. Embedding and optimizer only move bytes: their time is these bytes, divided by the memory's
bandwidth.

Activations of a block, with 2 bytes each and dropout's masks (Korthikanti et al., arXiv 2205.05198): on one card
s b h (34 + 5 a s / h), Eq. 1; with tensor parallelism s b h (10 + 24 / t + 5 a s / (h t)) on each, Eq. 2, and with
sequence parallelism beside it s b h / t (34 + 5 a s / h), Eq. 4; the 5 a s / h are not kept with selective
recomputation (section 5), and only the input, 2 s b h, with full. 16 of the 34 are the feed-forward part's, 4 f / h
here, or 8 f / h where it is gated. The last layer keeps 4 s b h (1 + V / h) (section 4.3). What is recomputed is there
while the layer computes. A *device* has t cards, so its bytes are t times those of one.

State per parameter: Adam in mixed precision 2 + 4 + 12 bytes (weight, fp32 gradient, fp32 copy and two moments), in
fp32 4 + 4 + 8 (Rajbhandari et al., arXiv 1910.02054, section 3.1, whose gradient has 2 bytes: `gradient_bytes`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from chaos_lightning.planning.pipelines.job import CLOSED, MOST_LAYERS, JobError, Layer, ModelWork, check_number

RECOMPUTATIONS = ("none", "selective", "full")
GROWTH = 2
"""Bytes of an activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Decoder model (GPT or Llama) on cards of a given speed."""

    __pydantic_config__ = CLOSED

    layers: int
    """Number of blocks, without embedding and head."""
    width: int
    heads: int = 0
    """Number of attention heads; 0: one for each 128 of the width."""
    kv_heads: int = 0
    """Number of heads of keys and values; 0: as many as heads."""
    feed_forward: int = 0
    """Width between the two halves of the feed-forward part; 0: 4 times the model's width."""
    gated: bool = False
    """Whether the feed-forward part is gated, as Llama's."""
    vocabulary: int = 50304
    sequence: int = 2048
    """Tokens of a sample."""
    micro_batch: int = 1
    """Samples of a micro-batch."""
    recompute: str = "selective"
    """Activations that are recomputed: none, selective or full."""
    sequence_parallel: bool = True
    """Whether cards of one device divide the sequence among them."""
    flops: float = 312e12
    """Peak rate of one card, FLOP/s."""
    efficiency: float = 0.4
    """Fraction of the peak rate that is reached."""
    bandwidth: float = 1.6e12
    """Bandwidth of one card's memory, bytes/s."""
    tied: bool = False
    """Whether the head's matrix is the embedding's. Then both ends keep it, and exchange its gradient in each step."""
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    cards: int = 1
    """Cards of a device; `tensor_parallel` in a file."""

    def __post_init__(self) -> None:
        check_number("layers", self.layers, least=1, most=MOST_LAYERS - 2)  # beside embedding and head
        for name in ("width", "vocabulary", "sequence", "micro_batch", "parameter_bytes", "cards"):
            check_number(name, getattr(self, name), least=1)
        for name in ("heads", "kv_heads", "feed_forward", "gradient_bytes", "optimizer_bytes"):
            check_number(name, getattr(self, name), least=0)
        for name in ("flops", "efficiency", "bandwidth"):
            check_number(name, getattr(self, name))
        if self.efficiency > 1:
            raise JobError(f"efficiency is {self.efficiency:g}; expected a share of the peak, at most 1")
        if self.recompute not in RECOMPUTATIONS:
            raise JobError(f"recompute is {self.recompute!r}; expected one of {', '.join(RECOMPUTATIONS)}")
        if self.width % self.a:
            raise JobError(f"heads is {self.a}; expected a divisor of the width, {self.width}")
        if self.a % self.k:
            raise JobError(f"kv_heads is {self.k}; expected a divisor of the heads, {self.a}")

    # ------------------------------------------------------------------------------------------------ sizes

    @property
    def a(self) -> int:
        return self.heads or max(1, self.width // 128)

    @property
    def k(self) -> int:
        return self.kv_heads or self.a

    @property
    def f(self) -> int:
        return self.feed_forward or 4 * self.width

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def matrices(self) -> int:
        """Number of parameters in the matrices of a block."""
        h = self.width
        return 2 * h * h + 2 * h * h * self.k // self.a + (3 if self.gated else 2) * h * self.f

    @property
    def block_parameters(self) -> int:
        h = self.width
        return self.matrices + (2 * h if self.gated else 2 * h + 2 * h * self.k // self.a + self.f + h + 4 * h)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding; position embeddings count unless the model is gated, like Llama, which
        computes positions.
        """
        return self.width * (self.vocabulary + (0 if self.gated else self.sequence))

    @property
    def head_parameters(self) -> int:
        return self.width * self.vocabulary + self.width * (1 if self.gated else 2)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model; a matrix shared by head and embedding counts once."""
        twice = self.width * self.vocabulary if self.tied else 0
        return self.embedding_parameters + self.layers * self.block_parameters + self.head_parameters - twice

    @property
    def tied_nbytes(self) -> int:
        """Gradient bytes of the matrix shared by embedding and head; 0 if they share none."""
        return self.width * self.vocabulary * self.gradient_bytes if self.tied else 0

    # ------------------------------------------------------------------------------------------------ bytes and times

    @property
    def attention_flop(self) -> int:
        """Floating-point operations of attention scores, and of their product with the values, in a forward pass."""
        return 4 * self.tokens * self.sequence * self.width

    @property
    def attention_nbytes(self) -> int:
        """Bytes that a block keeps for attention scores: the term 5 a s / h of the paper."""
        return 5 * self.tokens * self.a * self.sequence

    @property
    def block_nbytes(self) -> int:
        """Bytes of activations that a block keeps, without attention scores."""
        alike = 10 * (1 if self.sequence_parallel else self.cards) * self.width
        return self.tokens * (alike + 8 * self.width + (8 if self.gated else 4) * self.f)

    def made(self) -> tuple[Layer, ...]:
        """Returns the layers of the model: embedding, blocks, head."""
        whole = self.block_nbytes + self.attention_nbytes
        tensor = GROWTH * self.tokens * self.width
        forward = 2 * self.matrices * self.tokens + self.attention_flop
        again = {"none": 0, "selective": self.attention_flop, "full": forward}[self.recompute]
        kept = {"none": whole, "selective": self.block_nbytes, "full": tensor}[self.recompute]
        head = 2 * self.width * self.vocabulary * self.tokens
        # The weight's half has the products with the weights only.
        block = self._layer(
            "block", self.block_parameters, self._compute_s(forward), self._compute_s(2 * forward + again),
            backward_input_s=self._compute_s(forward + self.attention_flop + again),
            activation_nbytes=kept, workspace_nbytes=whole - kept, output_nbytes=tensor,
        )  # fmt: skip
        about = {f.name: getattr(block, f.name) for f in fields(block)}
        return (
            self._layer(
                "embedding", self.embedding_parameters, self._move_s(2 * tensor), self._move_s(4 * tensor),
                activation_nbytes=self.tokens * self.width, output_nbytes=tensor,
            ),
            *(Layer(**about | {"name": f"block.{i}"}) for i in range(self.layers)),
            self._layer(
                "head", self.head_parameters, self._compute_s(head), self._compute_s(2 * head),
                activation_nbytes=4 * self.tokens * (self.width + self.vocabulary),
            ),
        )  # fmt: skip

    @property
    def work(self) -> ModelWork:
        """Floating-point operations of a micro-batch, and the assumptions about the speed at which they run."""
        block = 2 * self.matrices * self.tokens + self.attention_flop
        head = 2 * self.width * self.vocabulary * self.tokens
        state = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        again = {"none": "no recomputation", "selective": "attention recomputed", "full": "blocks recomputed"}
        return ModelWork(
            tokens=self.tokens,
            flop=3.0 * (self.layers * block + head),
            peak_flops=self.flops,
            assumptions=(
                f"{self.efficiency:.0%} of {self.flops / 1e12:g} TFLOP/s reached on a card of speed 1, "
                f"{again[self.recompute]}, {state} bytes of state a parameter"
            ),
        )

    def _compute_s(self, flop: int) -> float:
        return flop / (self.flops * self.efficiency * self.cards)

    def _move_s(self, nbytes: int) -> float:
        return nbytes / (self.bandwidth * self.cards)

    def _layer(self, name: str, parameters: int, forward_s: float, backward_s: float, **more: Any) -> Layer:
        # The optimizer reads the gradient, reads and writes its state, and writes the weight.
        moved = self.gradient_bytes + 2 * self.optimizer_bytes + self.parameter_bytes
        return Layer(
            name=name, forward_s=forward_s, backward_s=backward_s,
            parameter_nbytes=parameters * self.parameter_bytes, gradient_nbytes=parameters * self.gradient_bytes,
            optimizer_nbytes=parameters * self.optimizer_bytes, optimizer_s=self._move_s(parameters * moved), **more,
        )  # fmt: skip


def read_model(text: str, **more: Any) -> Decoder:
    """Returns the decoder described by a text such as "gpt:32,4096": 32 blocks of width 4096.

    Raises:
        JobError: The text names no decoder.
    """
    found = re.fullmatch(r"gpt:(\d+),(\d+)", text)
    if found is None:
        raise JobError(f"the model is {text!r}; expected gpt:LAYERS,WIDTH, such as gpt:32,4096")
    return Decoder(layers=int(found[1]), width=int(found[2]), **more)
