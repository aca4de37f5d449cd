"""Tells which part of which data a data set is."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset, TensorDataset

from chaos_lightning.collectives.canonical import digest


def part_of(dataset: Any) -> str:
    """Returns which part of which data this is, as far as it can be told cheaply: members that were given different
    parts (cut by rank, say) would each lose what the others have. Only for data sets whose samples are what they keep.
    """
    if isinstance(dataset, Subset):
        inner = part_of(dataset.dataset)
        return f"samples {digest(repr(list(dataset.indices)))} of {inner}" if len(dataset) else "nothing"
    if isinstance(dataset, TensorDataset) and len(dataset):
        ends = [tensor[[0, -1]].detach().cpu().reshape(-1).tolist() for tensor in dataset.tensors]
        return f"tensors {digest(repr(ends))}"
    return type(dataset).__name__
