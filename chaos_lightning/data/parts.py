"""Describes which part of the data a data set is, so that members with different parts are noticed."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset, TensorDataset

from chaos_lightning.collectives.canonical import digest


def part_of(dataset: Any) -> str:
    """Describes which part of which data a data set is, as far as that is cheap to tell (Subset, TensorDataset):
    members with different parts, such as those cut by rank, would each miss the others' samples.
    """
    if isinstance(dataset, Subset):
        inner = part_of(dataset.dataset)
        return f"samples {digest(repr(list(dataset.indices)))} of {inner}" if len(dataset) else "nothing"
    if isinstance(dataset, TensorDataset) and len(dataset):
        ends = [tensor[[0, -1]].detach().cpu().reshape(-1).tolist() for tensor in dataset.tensors]
        return f"tensors {digest(repr(ends))}"
    return type(dataset).__name__
