"""Gives access to a tensor's memory as bytes, whether it lies on the host or on an accelerator.

Theory of operation. On the wire a tensor is the bytes of its elements in logical (row-major) order, whatever its
strides or device. A `Region` gives access to them: contiguous host memory is read and received in place, without a
copy; a strided host tensor through a contiguous copy that `finish()` writes back; a tensor on an accelerator through
pinned host buffers, piece by piece (torch's caching host allocator reuses them), so that a state never needs its
whole size on the host. Nothing here names a kind of accelerator: `torch.accelerator` decides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from chaos_lightning.errors import StateError


class Region(Protocol):
    """Bytes [0, nbytes) of one tensor."""

    nbytes: int
    address: int
    """Address of the bytes in this process, in the form in which they travel; 0 if they do not lie in host memory."""

    def read(self, start: int, stop: int) -> memoryview:
        """Returns the bytes in host memory; they are valid until the tensor changes."""
        ...

    def land(self, start: int, stop: int) -> memoryview:
        """Returns host memory into which these bytes are to be received."""
        ...

    def landed(self, start: int, stop: int, landing: memoryview) -> None:
        """Copies the verified bytes from the host memory `landing` into the tensor."""
        ...

    def finish(self) -> None:
        """Writes a stand-in copy, if one was used, back into the tensor once all bytes have arrived."""
        ...


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raises StateError for a tensor whose memory is not one plain run of bytes."""
    problem = ""
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        problem = "its shape is not known yet (lazy module): run one forward pass before training starts"
    elif tensor.layout is not torch.strided:
        problem = f"layout {tensor.layout} is no plain memory: convert it to a dense tensor"
    elif tensor.is_meta:
        problem = "it lies on the meta device and has no memory: materialise the model first"
    elif tensor.is_nested or tensor.is_quantized:
        problem = "nested and quantized tensors are not supported: keep such values out of the training state"
    elif type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(tensor, "__torch_dispatch__"):
        kind = type(tensor)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            problem = f"a {kind.__qualname__} is a wrapper around other tensors: give its plain tensors"
    if problem:
        raise StateError(f"tensor {name!r} cannot travel: {problem}")


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor as flat uint8 of the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def in_place(tensor: Tensor) -> bool:
    """Returns whether a tensor's bytes lie in host memory in the order in which they are sent."""
    try:
        check_tensor("", tensor)
    except StateError:
        return False
    return tensor.device.type == "cpu" and _plain(tensor)


def host_view(flat: Tensor) -> memoryview:
    """Returns a memoryview of a flat uint8 host tensor (empty ones have no memory to view)."""
    return memoryview(flat.numpy().data) if flat.numel() else memoryview(bytearray())


class HostRegion:
    """Region of contiguous host memory: no copy in either direction."""

    def __init__(self, tensor: Tensor) -> None:
        self._view = host_view(as_bytes(tensor))
        self.nbytes = len(self._view)
        self.address = tensor.data_ptr()

    def read(self, start: int, stop: int) -> memoryview:
        return self._view[start:stop]

    land = read

    def landed(self, start: int, stop: int, landing: memoryview) -> None:
        pass

    def finish(self) -> None:
        pass


class StridedRegion(HostRegion):
    """Region of a host tensor that is not row-major; a contiguous copy is read and written in its stead."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._copy = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        super().__init__(self._copy)

    def finish(self) -> None:
        with torch.no_grad():
            self._tensor.copy_(self._copy)


class DeviceRegion:
    """Region of a tensor on an accelerator: its bytes are copied through pinned host memory, one range at a time."""

    address = 0

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._copied = not _plain(tensor)
        source = tensor.detach().resolve_conj().resolve_neg()
        self._flat = as_bytes(source.contiguous())
        self.nbytes = self._flat.numel()

    def read(self, start: int, stop: int) -> memoryview:
        staged = staging(stop - start)
        staged.copy_(self._flat[start:stop])
        return host_view(staged)

    def land(self, start: int, stop: int) -> memoryview:
        return host_view(staging(stop - start))

    def landed(self, start: int, stop: int, landing: memoryview) -> None:
        if stop > start:
            self._flat[start:stop].copy_(torch.frombuffer(landing, dtype=torch.uint8))

    def finish(self) -> None:
        if self._copied:
            with torch.no_grad():
                self._tensor.copy_(self._flat.view(self._tensor.dtype).view(self._tensor.shape))


@functools.cache
def _can_pin() -> bool:
    if not torch.accelerator.is_available():
        return False
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):  # accelerators that share the host's memory have nothing to pin
        return False
    return True


def staging(nbytes: int) -> Tensor:
    """Returns a host buffer (pinned if possible) for copies to and from an accelerator."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=_can_pin() and nbytes > 0)


def region(name: str, tensor: Tensor) -> Region:
    """Returns the region of this tensor's bytes; raises StateError (naming the tensor) if there is none."""
    check_tensor(name, tensor)
    try:
        if tensor.device.type != "cpu":
            return DeviceRegion(tensor)
        return HostRegion(tensor) if _plain(tensor) else StridedRegion(tensor)
    except (RuntimeError, TypeError) as error:
        raise StateError(f"tensor {name!r} ({tensor.dtype}, {tuple(tensor.shape)}) cannot travel: {error}") from error


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Waits until no accelerator still computes these tensors, since other threads are about to read them."""
    if any(t.device.type not in ("cpu", "meta") for t in tensors) and torch.accelerator.is_available():
        torch.accelerator.synchronize()
