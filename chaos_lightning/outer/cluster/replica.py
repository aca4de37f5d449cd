"""Presents a model's tensors as the flat fp32 vector that outer sync exchanges.

Theory of operation. What travels are the parameters that are trained, each memory once, and behind them the buffers
that are averaged (BatchNorm's statistics). They may lie on any device and have any floating type: what is frozen is
read from them as fp32, and what is adopted is written back tensor by tensor, so that no second copy of the model is
needed for it. Their names, types and shapes, in order, are part of what clusters agree on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from chaos_lightning.errors import StateError, UnsupportedError
from chaos_lightning.outer.exchange.codec import Part
from chaos_lightning.outer.exchange.kernel import adopt
from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.types import TensorSpec
from chaos_lightning.replication.access import unique
from chaos_lightning.replication.table import dtype_name


class Replica:
    """Tensors of a model that outer sync exchanges: the trained parameters, then the buffers that clusters average.

    Args:
        parameters: Name and tensor of each trained parameter, in an order that is equal in all clusters; tied ones by
            all their names.
        averaged: Name and tensor of each buffer that clusters average, in an order that is equal in all clusters.

    Attributes:
        specs: Name, type and shape of each tensor, on which all clusters must agree.
        averaged: Number of the tensors that are buffers.
        tied: Further names of these tensors, and by which name each travels.

    Raises:
        UnsupportedError: A tensor is not of a real floating type.
        StateError: There is nothing to train.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], averaged: Iterable[tuple[str, Tensor]] = ()) -> None:
        trained, marks = [*parameters], [*averaged]
        named, buffers = unique(trained), unique(marks)
        first = {id(tensor): name for name, tensor in (*named, *buffers)}
        self.tied = {name: first[id(tensor)] for name, tensor in (*trained, *marks) if first[id(tensor)] != name}
        for name, tensor in (*named, *buffers):
            if not tensor.is_floating_point():
                raise UnsupportedError(
                    f"{name} has the type {tensor.dtype}; between clusters parameters and buffers of real floating "
                    "types travel: freeze it, or keep it out of the state"
                )
        if not any(tensor.numel() for _, tensor in named):
            raise StateError("the model has no parameter that is trained: clusters would have nothing to exchange")
        self._named = [*named, *buffers]
        self.averaged = len(buffers)
        self.specs = tuple(TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in self._named)

    @classmethod
    def of_module(cls, module: nn.Module, reduced: Iterable[tuple[str, Tensor]] = ()) -> Self:
        """Makes the replica of a module from its trainable parameters, by all their names, and those floating-point
        buffers that training averages over ranks (`reduced`).
        """
        trained = [(n, p) for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
        wanted = {id(buffer) for _, buffer in reduced if buffer.is_floating_point()}
        return cls(trained, [(n, b) for n, b in module.named_buffers(remove_duplicate=False) if id(b) in wanted])

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors themselves, no copies, in the order in which they are exchanged."""
        return [tensor for _, tensor in self._named]

    def grid(self, block: int) -> Grid:
        """Returns the division of these tensors into blocks of the job's size."""
        return Grid(tuple(spec.elements for spec in self.specs), block)

    @torch.no_grad()
    def read(self, grid: Grid, into: Tensor | None = None) -> Tensor:
        """Returns a copy of all elements as they are now: fp32, flat, in host memory; in new memory, unless `into` is
        given.
        """
        flat = torch.empty(grid.elements) if into is None else into
        for (_, tensor), values in zip(self._named, _split(flat, grid), strict=True):
            values.copy_(tensor.reshape(-1))
        return flat

    def not_finite(self, flat: Tensor, grid: Grid) -> list[str]:
        """Returns the names of the tensors that have NaN or infinite elements in `flat`, which `read` returned."""
        parts = zip(self._named, _split(flat, grid), strict=True)
        return [name for (name, _), values in parts if not values.isfinite().all()]

    @torch.no_grad()
    def adopt(self, version: Part, frozen: Part | None) -> None:
        """Adopts a version, in place (kernel.adopt), tensor by tensor.

        Args:
            version: Encoded version of the whole grid, as received.
            frozen: Parameters from which the progress since the freezing is measured; None: the version is taken as it
                is.
        """
        grid = version.shard.grid
        for number, (_, tensor) in enumerate(self._named):
            if not tensor.numel():
                continue
            shard = grid.of_tensor(number)
            here = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
            values = tensor.detach().reshape(-1).to(device="cpu", dtype=torch.float32, copy=not here)
            adopt(values, _part_of(version, shard), _part_of(frozen, shard) if frozen is not None else None)
            if not here:
                tensor.copy_(values.view(tensor.shape))

    def copies(self) -> list[Tensor]:
        """Returns copies of all tensors as they are now, for `restore`."""
        return [tensor.detach().clone() for _, tensor in self._named]

    @torch.no_grad()
    def restore(self, copies: Sequence[Tensor]) -> None:
        """Sets the tensors to the values that `copies` gave."""
        for (_, tensor), copy in zip(self._named, copies, strict=True):
            tensor.copy_(copy)


def _split(flat: Tensor, grid: Grid) -> Sequence[Tensor]:
    return torch.split(flat, list(grid.sizes))  # type: ignore[no-untyped-call, no-any-return]


def _part_of(part: Part, shard: Shard) -> Part:
    """Returns, as a view, those blocks of the part that are in this shard."""
    return Part(shard, part.format, part.run(shard.first, shard.stop))
