"""Encodes and decodes the tensor blocks of pushes and versions: number formats such as bf16 and int8, and codecs that
pair them.

Theory of operation. A *format* turns one block of fp32 elements into bytes and back. It looks at nothing beyond the
block, so a content has the same bytes for any cut of the grid, and each block can be sent, hashed and read by itself.
A *codec* names two formats, for pushes and for versions: `fp32` is exact both ways, `bf16` (the default) is bf16 both
ways, `int8` is int8 for pushes and bf16 for versions. A format has a *residual* if what it drops is worth keeping for
the next push (rule O10). bf16 has none: it drops 0.17% of a delta.

    format  bytes of n elements  NaN and infinities      -0.0   subnormals                 too large
    fp32    4 n                  as they are             kept   kept                       -
    bf16    2 n                  NaN; infinities kept    kept   rounded as other numbers   above 3.3961e38: infinity
    int8    4 + n                whole block is NaN      0.0    see below                  -

int8: the scale s is the block's largest magnitude / 127, in fp32, and comes first; then each x as round(x / s), halves
to even, within -127 to 127. So x comes back within about s / 2, but for two cases. Where s is subnormal it has few
digits itself, and where the largest magnitude is below 9e-44 it is 0 and so is the block: a residual keeps both. And
127 s may exceed the largest fp32 number if the block contains it: then infinity comes back. A block with a NaN or an
infinity has the scale NaN, so that the norm of the push tells the gate (docs/outer.md: "non-finite always").

Each step rounds each element once (see kernel.py), so the bytes are the same on every machine; but which NaN comes
out of a NaN is left open. Bytes are those of a little-endian machine. A format must not need flushed subnormals:
`torch.set_flush_denormal(True)` changes them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from chaos_lightning.errors import ConfigurationError, WireError
from chaos_lightning.outer.rules.grid import Shard
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import NO_VERSION, Agreement, VersionId
from chaos_lightning.replication.memory import as_bytes, host_view

DEFAULT_CODEC = "bf16"
_SCALE = struct.Struct("<f")
_LEVELS = 127


class Format(Protocol):
    """Number format in which a codec sends pushes or versions: encodes a block of fp32 elements as bytes, and decodes
    it. Formats without state may be used by many threads.
    """

    @property
    def name(self) -> str:
        """Name of the format. It is hashed with a content's bytes, so a format that lays bytes out otherwise needs
        another name.
        """
        ...

    @property
    def residual(self) -> bool:
        """Whether a cluster keeps what encoding a push in this format lost, and adds it to its next push."""
        ...

    def nbytes(self, elements: int) -> int:
        """Returns how many bytes a block of `elements` elements takes: at least one, and never more than a larger
        block.
        """
        ...

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Encodes a block's elements into bytes.

        Args:
            values: fp32, flat, contiguous.
            out: uint8, flat, of `nbytes` bytes.
        """
        ...

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decodes a block's elements; where a value could not be represented, NaN or infinity is returned.

        Args:
            data: uint8, flat, contiguous.
            out: fp32, flat; as many elements as the block has.

        Raises:
            WireError: The bytes are no block of so many elements.
        """
        ...


def _check(name: str, expected: int, data: Tensor, elements: int) -> None:
    if data.numel() != expected:
        raise WireError(f"{data.numel()} bytes for {elements} elements of format {name}, expected {expected}")


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Format in which each element is a number of type `dtype`, rounded to the nearest, independent of all others."""

    name: str
    dtype: torch.dtype
    residual: bool = False

    def nbytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor) -> None:
        assert out.numel() == self.nbytes(values.numel())
        if out.storage_offset() % self.dtype.itemsize:  # torch views numbers only where they are aligned
            out.copy_(as_bytes(values.to(self.dtype)))
        else:
            out.view(self.dtype).copy_(values)

    def decode(self, data: Tensor, out: Tensor) -> None:
        _check(self.name, self.nbytes(out.numel()), data, out.numel())
        aligned = data.clone() if data.storage_offset() % self.dtype.itemsize else data
        out.copy_(aligned.view(self.dtype))


@dataclass(frozen=True, slots=True)
class Int8Format:
    """Format in which each element is an integer from -127 to 127, times a scale that each block has of its own; see
    the module.
    """

    name: str = "int8"
    residual: bool = True

    def nbytes(self, elements: int) -> int:
        return _SCALE.size + elements

    def encode(self, values: Tensor, out: Tensor) -> None:
        assert out.numel() == self.nbytes(values.numel())
        low, high = torch.aminmax(values)  # both are NaN if any element is
        (scale,) = _SCALE.unpack(_SCALE.pack(max(abs(low.item()), abs(high.item())) / _LEVELS))
        levels = out[_SCALE.size :].view(torch.int8)
        if not math.isfinite(scale):
            scale = math.nan
        if scale > 0:
            # Divided by, not multiplied by the inverse, which is infinite for the smallest scales.
            levels.copy_(torch.div(values, scale).round_().clamp_(-_LEVELS, _LEVELS))
        else:
            levels.zero_()
        host_view(out[: _SCALE.size])[:] = _SCALE.pack(scale)

    def decode(self, data: Tensor, out: Tensor) -> None:
        _check(self.name, self.nbytes(out.numel()), data, out.numel())
        (scale,) = _SCALE.unpack(host_view(data[: _SCALE.size]))
        if scale < 0:
            raise WireError(f"a block of {out.numel()} elements of format {self.name} has the scale {scale}")
        out.copy_(data[_SCALE.size :].view(torch.int8))
        out.mul_(scale)


FP32 = PlainFormat("fp32", torch.float32)
BF16 = PlainFormat("bf16", torch.bfloat16)
INT8 = Int8Format()


@dataclass(frozen=True, slots=True)
class Codec:
    """Formats for pushes and for versions; the setting `codec` names such a pair.

    Attributes:
        name: Name of the codec, as in the setting.
        push: Format of pushes.
        version: Format of versions, and of the job's first content.
        parameters: Whether a push holds parameters, not what was gained since its base
            (`OuterSettings.pushes_parameters`).
    """

    name: str
    push: Format
    version: Format
    parameters: bool = False

    @property
    def residual(self) -> bool:
        """Whether a cluster keeps what the encoding of its pushes lost."""
        return self.push.residual

    def format_of(self, base: VersionId) -> Format:
        """Returns the format of a push made from this base. A job's first push holds parameters, so it has the format
        of versions.
        """
        return self.push if base != NO_VERSION else self.version


_CODECS: dict[str, Codec] = {}
_POWERS = 20


def register_codec(codec: Codec) -> None:
    """Makes a codec known by its name, in every process of the job that encodes or decodes.

    Raises:
        ConfigurationError: Another one has that name, or a small block would have more bytes than a large one.
    """
    for format in (codec.push, codec.version):
        sizes = [format.nbytes(1 << power) for power in range(_POWERS)]
        if sizes[0] < 1 or sizes != sorted(sizes):
            raise ConfigurationError(
                f"codec {codec.name!r}: blocks of 1, 2, 4, ... elements have {sizes} bytes in format {format.name!r}; "
                "expected at least one, and no more than a larger block has"
            )
    if _CODECS.setdefault(codec.name, codec) != codec:
        raise ConfigurationError(f"there is a codec {codec.name!r} already, which is another one: choose another name")


def codec_named(name: str) -> Codec:
    """Returns the codec of this name; raises ConfigurationError, with the known names, if there is none."""
    if name not in _CODECS:
        raise ConfigurationError(f"there is no codec {name!r}; known are {', '.join(sorted(_CODECS))}")
    return _CODECS[name]


def codec_of(agreement: Agreement) -> Codec:
    """Returns the codec of a job's pushes and versions, from the job's agreement.

    Parameters are pushed in fp32: bf16 would drop more of them than a round gains.

    Raises:
        ConfigurationError: There is no such codec.
    """
    codec = codec_named(agreement.codec)
    if OuterSettings.of_words(agreement.settings).pushes_parameters:
        return replace(codec, push=FP32, parameters=True)
    return codec


for _codec in (Codec("fp32", FP32, FP32), Codec("bf16", BF16, BF16), Codec("int8", INT8, BF16)):
    register_codec(_codec)


@dataclass(frozen=True)
class Part:
    """Encoded bytes of the blocks of one shard, of a push or a version, one block after the other.

    Attributes:
        shard: Shard of the blocks; the whole grid, or one tensor's blocks, are a shard too.
        format: Format of each block.
        data: Bytes of the blocks: uint8, flat, contiguous, in host memory. It is not copied.

    Raises:
        WireError: `data` has another size than the shard's blocks have in this format.
    """

    shard: Shard
    format: Format
    data: Tensor

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.uint8
        assert self.data.is_contiguous()
        if self.data.numel() != self.offsets[-1]:
            raise WireError(
                f"{self.data.numel()} bytes for {self.shard.elements} elements in {self.shard.blocks} blocks of format "
                f"{self.format.name}, expected {self.offsets[-1]}"
            )

    @classmethod
    def empty(cls, shard: Shard, format: Format) -> Part:
        """Returns memory for a part; its content is to be written by `encode`."""
        return cls(shard, format, torch.empty(sum(map(format.nbytes, shard.lengths)), dtype=torch.uint8))

    @classmethod
    def of(cls, shard: Shard, values: Tensor) -> Part:
        """Returns a part whose bytes are these fp32 elements, flat and contiguous; nothing is copied."""
        assert values.dtype == torch.float32
        assert values.is_contiguous()
        return cls(shard, FP32, as_bytes(values))

    @classmethod
    def encoded(cls, shard: Shard, format: Format, values: Tensor) -> Part:
        """Returns a part with these fp32 elements, flat and contiguous, in this format."""
        part = cls.empty(shard, format)
        for block, place in enumerate(shard.places):
            part.encode(block, values[place])
        return part

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of the first byte of each block, followed by the number of all bytes."""
        return tuple(accumulate(map(self.format.nbytes, self.shard.lengths), initial=0))

    @property
    def block_nbytes(self) -> int:
        """Number of bytes of a full block; the last block of a tensor may have fewer."""
        return self.format.nbytes(self.shard.grid.block)

    def run(self, first: int, stop: int) -> Tensor:
        """Returns, as a view, the bytes of the shard's blocks [first, stop)."""
        return self.data[self.offsets[first] : self.offsets[stop]]

    def block(self, block: int) -> Tensor:
        """Returns, as a view, the bytes of one of the shard's blocks."""
        return self.run(block, block + 1)

    def encode(self, block: int, values: Tensor) -> None:
        """Encodes one of the shard's blocks into this part's bytes."""
        self.format.encode(values, self.block(block))

    def decode(self, block: int, out: Tensor) -> None:
        """Decodes one of the shard's blocks to fp32; WireError if its bytes are malformed."""
        self.format.decode(self.block(block), out)

    def decoded(self) -> Tensor:
        """Returns the whole part decoded to fp32, flat; WireError if its bytes are malformed."""
        values = torch.empty(self.shard.elements)
        for block, place in enumerate(self.shard.places):
            self.decode(block, values[place])
        return values

    def digests(self) -> list[bytes]:
        """Returns the xxh3-128 of each block; the digests of all parts make up the manifest."""
        data = host_view(self.data)
        return [xxhash.xxh3_128_digest(data[start:stop]) for start, stop in pairwise(self.offsets)]

    @property
    def hash(self) -> str:
        """Hash of the content; for a part that covers the whole model, it is the manifest hash in the push's offer."""
        return self.shard.content_hash(self.digests(), self.format.name)
