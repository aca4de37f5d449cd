"""Training states of the paper's models: the shapes and sizes of their tensors.

Tensors are those of the published architectures (1000 classes; GPT-2 with its head tied to the embedding), stretched
so that all together have the size that the paper names. It names 178 MiB to 528 MiB for ResNet101, AlexNet and VGG11,
and 468 MiB to 3050 MiB for GPT-2, medium and large; the published weights in float32 take 170, 233, 507, 475, 1354 and
2953 MiB. The two that it does not name are taken as published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

MIB = 1 << 20
FLOAT_NBYTES = 4
Shape = tuple[int, ...]


def _alexnet() -> list[Shape]:
    convolutions = [(64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3)]
    return _with_biases([*convolutions, (4096, 9216), (4096, 4096), (1000, 4096)])


def _vgg11() -> list[Shape]:
    channels = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    convolutions = [(b, a, 3, 3) for a, b in pairwise(channels)]
    return _with_biases([*convolutions, (4096, 25088), (4096, 4096), (1000, 4096)])


def _with_biases(weights: Sequence[Shape]) -> list[Shape]:
    return [shape for weight in weights for shape in (weight, weight[:1])]


def _resnet101() -> list[Shape]:
    shapes: list[Shape] = []

    def convolution(out: int, into: int, side: int) -> None:
        """Adds the shapes of a convolution's weight and of its batch norm's two vectors."""
        shapes.extend([(out, into, side, side), (out,), (out,)])

    convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for block in range(blocks):
            convolution(width, into, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, into, 1)
            into = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def _gpt2(width: int, layers: int) -> list[Shape]:
    d = width
    norm: list[Shape] = [(d,), (d,)]
    attention: list[Shape] = [(d, 3 * d), (3 * d,), (d, d), (d,)]
    mlp: list[Shape] = [(d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *[*norm, *attention, *norm, *mlp] * layers, *norm]


@dataclass(frozen=True)
class Model:
    """One of the paper's models.

    Attributes:
        name: Name of the model in the paper.
        shapes: Shapes of the model's weights.
        size_mib: MiB of the model's state according to the paper, otherwise of its published weights.
        moments: Tensors of the optimizer per weight: 1 for SGD with momentum, 2 for Adam.
    """

    name: str
    shapes: tuple[Shape, ...]
    size_mib: float
    moments: int

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the model's state, by the paper."""
        return int(self.size_mib * MIB)

    def layout(self, nbytes: float) -> list[int]:
        """Returns the bytes of each tensor in order, scaled by one factor so that all together take about `nbytes`."""
        return stretched([FLOAT_NBYTES * prod(shape) for shape in self.shapes], nbytes)


def stretched(sizes: Sequence[int], nbytes: float) -> list[int]:
    """Scales sizes by one factor to about `nbytes` together; each stays a whole number of floats."""
    factor = nbytes / sum(sizes)
    return [max(FLOAT_NBYTES, int(size * factor) // FLOAT_NBYTES * FLOAT_NBYTES) for size in sizes]


RESNET101 = Model("ResNet101", tuple(_resnet101()), 178.0, 1)
ALEXNET = Model("AlexNet", tuple(_alexnet()), 233.0, 1)
VGG11 = Model("VGG11", tuple(_vgg11()), 528.0, 1)
GPT2 = Model("GPT-2", tuple(_gpt2(768, 12)), 468.0, 2)
GPT2_MEDIUM = Model("GPT-2 medium", tuple(_gpt2(1024, 24)), 1354.0, 2)
GPT2_LARGE = Model("GPT-2 large", tuple(_gpt2(1280, 36)), 3050.0, 2)

IMAGES = (RESNET101, ALEXNET, VGG11)
TEXTS = (GPT2, GPT2_MEDIUM, GPT2_LARGE)
