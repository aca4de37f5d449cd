"""Serializes the tensors that pipeline stages exchange (activations, and gradients on the way back) into frames, and
reads them.

Theory of operation. A border is a few tensors and a text (its specs). It is written as a head, a table with the type
and the shape of each tensor, the text, and the tensors' bytes, each tensor at a multiple of 64 bytes. If that fits
into one frame, one frame has it all; else the first frame has all but the bytes, and the bytes follow in frames of
their own. Writing copies nothing that lies in order in this machine's memory, so the tensors must not change before
they have left. A reader gets frame after frame: it allocates nothing before it has checked what is announced, receives
bytes where they stay, and makes each tensor a storage of its own, so that a write to one is no write to another.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chaos_lightning.errors import WireError
from chaos_lightning.transport.frames import MAX_PAYLOAD_NBYTES

MAX_TENSORS = 256
MAX_DIMENSIONS = 16
MAX_SPECS_NBYTES = 4 << 20
MAX_BORDER_NBYTES = 1 << 40
"""Bytes of the largest border, whatever memory there is."""
ALIGNED_NBYTES = 64

_FORMAT = 1
_HEAD = struct.Struct(
    "<BxHIQ"
)  # format, number of tensors, bytes of the specs, bytes of all tensors with what is between
_ROW = struct.Struct("<BB")  # type, number of dimensions
_KINDS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODES = {kind: code for code, kind in enumerate(_KINDS, 1)}
_NO_TENSOR = 0


@dataclass(frozen=True, slots=True)
class Border:
    """Tensors that one stage sends to another for a micro-batch.

    Attributes:
        tensors: Activations, or gradients; None stands for no gradient.
        specs: Text of the stage that sends activations, for the next one.
    """

    tensors: tuple[Tensor | None, ...]
    specs: str = ""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors if t is not None)


def _aligned(nbytes: int) -> int:
    return -nbytes % ALIGNED_NBYTES + nbytes


# ------------------------------------------------------------------------------------------------ writing


def write(border: Border, most_nbytes: int = MAX_PAYLOAD_NBYTES) -> list[list[memoryview]]:
    """Returns the payloads of the frames for border tensors, each as a list of memory pieces.

    Args:
        border: Border tensors, on any device; those of an accelerator are copied to the machine's memory.
        most_nbytes: Bytes that one frame may have.

    Raises:
        WireError: The border is larger than borders can be, or a tensor's type cannot be sent; says which.
    """
    specs = border.specs.encode()
    table = b"".join(_row(i, t) for i, t in enumerate(border.tensors))
    data_nbytes = sum(_aligned(t.nbytes) for t in border.tensors if t is not None)
    for what, value, most in (
        ("tensors", len(border.tensors), MAX_TENSORS),
        ("bytes of specs", len(specs), MAX_SPECS_NBYTES),
        ("bytes", data_nbytes, MAX_BORDER_NBYTES),
    ):
        if value > most:
            raise WireError(f"a border tensor has {value} {what}; expected at most {most}")
    head = _HEAD.pack(_FORMAT, len(border.tensors), len(specs), data_nbytes) + table + specs
    pieces = [memoryview(head.ljust(_aligned(len(head)), b"\0"))]
    data = [piece for t in border.tensors if t is not None and t.nbytes for piece in _bytes_of(t)]
    if pieces[0].nbytes + data_nbytes <= most_nbytes:
        return [pieces + data]
    return [pieces, *_cut(data, most_nbytes)]


def _row(at: int, tensor: Tensor | None) -> bytes:
    if tensor is None:
        return _ROW.pack(_NO_TENSOR, 0)
    if tensor.dtype not in _CODES or tensor.layout != torch.strided or tensor.dim() > MAX_DIMENSIONS:
        raise WireError(
            f"tensor {at} of a border is of {tensor.dtype}, {tensor.layout}, with {tensor.dim()} dimensions; expected "
            f"a dense one of at most {MAX_DIMENSIONS} dimensions and a type such as torch.float32"
        )
    return _ROW.pack(_CODES[tensor.dtype], tensor.dim()) + struct.pack(f"<{tensor.dim()}Q", *tensor.shape)


def _bytes_of(tensor: Tensor) -> list[memoryview]:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data
    gap = _aligned(data.nbytes) - data.nbytes
    return [data, memoryview(bytes(gap))] if gap else [data]


def _cut(pieces: Sequence[memoryview], most_nbytes: int) -> list[list[memoryview]]:
    """Returns the memory pieces divided into groups of at most `most_nbytes` bytes."""
    groups: list[list[memoryview]] = [[]]
    room = most_nbytes
    for piece in pieces:
        while piece.nbytes > room:
            groups[-1].append(piece[:room])
            piece, room = piece[room:], most_nbytes
            groups.append([])
        if piece.nbytes:
            groups[-1].append(piece)
            room -= piece.nbytes
    return [group for group in groups if group]


# ------------------------------------------------------------------------------------------------ reading


class BorderReader:
    """Reader that assembles border tensors from frames.

    Args:
        limit_nbytes: Bytes that the border may have.
    """

    def __init__(self, limit_nbytes: int = MAX_BORDER_NBYTES) -> None:
        self._limit_nbytes = limit_nbytes
        self._first: np.ndarray | None = None
        self._memory: np.ndarray | None = None
        """Bytes of the tensors, once the head is known."""
        self._got = 0
        self._rows: list[tuple[torch.dtype | None, tuple[int, ...]]] = []
        self._specs = ""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this reader has allocated."""
        return sum(m.nbytes for m in (self._first, self._memory) if m is not None)

    @property
    def complete(self) -> bool:
        return self._memory is not None and self._got == self._memory.nbytes

    def room(self, nbytes: int) -> memoryview:
        """Returns the memory to receive the next frame's payload in.

        Raises:
            WireError: The frame is larger than what is still to come.
        """
        if self._memory is None:
            if nbytes > self._limit_nbytes + MAX_SPECS_NBYTES:
                raise WireError(f"a border tensor of {nbytes} bytes; expected at most {self._limit_nbytes}")
            self._first = torch.empty(nbytes, dtype=torch.uint8).numpy()
            return self._first.data
        if nbytes == 0 or nbytes > self._memory.nbytes - self._got:
            left = self._memory.nbytes - self._got
            raise WireError(f"a border tensor goes on with {nbytes} bytes, where {left} were to come")
        return self._memory[self._got : self._got + nbytes].data

    def filled(self, nbytes: int) -> None:
        """Records that the memory returned last by `room` is filled.

        Raises:
            WireError: The first frame announces no border, or one beyond the limits.
        """
        if self._memory is not None:
            self._got += nbytes
            return
        assert self._first is not None, "there is no frame without room"
        head_nbytes, data_nbytes = self._read_head(self._first)
        if nbytes == head_nbytes + data_nbytes:
            self._memory, self._got = self._first[head_nbytes:], data_nbytes
        elif nbytes == head_nbytes:
            self._memory = torch.empty(data_nbytes, dtype=torch.uint8).numpy()
        else:
            raise WireError(
                f"a border tensor begins with {nbytes} bytes; its head has {head_nbytes}, its tensors {data_nbytes}"
            )
        self._first = None

    def border(self) -> Border:
        """Returns the border tensors once they are complete."""
        assert self._memory is not None
        tensors: list[Tensor | None] = []
        at = 0
        for kind, shape in self._rows:
            if kind is None:
                tensors.append(None)
                continue
            count = math.prod(shape)
            nbytes = count * kind.itemsize
            memory = self._memory[at : at + nbytes]
            flat = torch.frombuffer(memory, dtype=kind) if count else torch.empty(0, dtype=kind)
            tensors.append(flat.reshape(shape))
            at += _aligned(nbytes)
        return Border(tuple(tensors), self._specs)

    def _read_head(self, memory: np.ndarray) -> tuple[int, int]:
        """Parses the head; returns the bytes of head, table and specs together, and the bytes of the tensors."""
        data = memory.data
        if data.nbytes < _HEAD.size:
            raise WireError(f"a border tensor begins with {data.nbytes} bytes; expected at least {_HEAD.size}")
        version, count, specs_nbytes, data_nbytes = _HEAD.unpack_from(data)
        if version != _FORMAT:
            raise WireError(f"a border tensor of format {version}; expected {_FORMAT}")
        if count > MAX_TENSORS or specs_nbytes > MAX_SPECS_NBYTES or data_nbytes > self._limit_nbytes:
            raise WireError(
                f"a border of {count} tensors, {data_nbytes} bytes and {specs_nbytes} bytes of specs; expected at most "
                f"{MAX_TENSORS}, {self._limit_nbytes} and {MAX_SPECS_NBYTES}"
            )
        at = _HEAD.size
        for i in range(count):
            at = self._read_row(data, at, i)
        announced = sum(_aligned(math.prod(shape) * kind.itemsize) for kind, shape in self._rows if kind is not None)
        if announced != data_nbytes:
            raise WireError(f"a border's tensors have {announced} bytes by their shapes, and {data_nbytes} by its head")
        if at + specs_nbytes > data.nbytes:
            raise WireError(f"a border's specs of {specs_nbytes} bytes end behind its first frame")
        try:
            self._specs = str(data[at : at + specs_nbytes], "utf-8")
        except UnicodeDecodeError as error:
            raise WireError(f"a border's specs are no text: {error}") from error
        return _aligned(at + specs_nbytes), data_nbytes

    def _read_row(self, data: memoryview, at: int, i: int) -> int:
        code: int
        dimensions: int
        try:
            code, dimensions = _ROW.unpack_from(data, at)
            if code > len(_KINDS) or dimensions > MAX_DIMENSIONS or (code == _NO_TENSOR and dimensions):
                raise WireError(f"tensor {i} of a border has type {code} and {dimensions} dimensions")
            shape = struct.unpack_from(f"<{dimensions}Q", data, at + _ROW.size)
        except struct.error as error:
            raise WireError(f"tensor {i} of a border is not in its first frame ({error})") from error
        kind = _KINDS[code - 1] if code != _NO_TENSOR else None
        if kind is not None and max(shape, default=0) > self._limit_nbytes:
            raise WireError(f"tensor {i} of a border has shape {shape}; expected at most {self._limit_nbytes} bytes")
        if kind is not None and math.prod(shape) * kind.itemsize > self._limit_nbytes:
            raise WireError(f"tensor {i} of a border has shape {shape}; expected at most {self._limit_nbytes} bytes")
        self._rows.append((kind, shape))
        return at + _ROW.size + 8 * dimensions
