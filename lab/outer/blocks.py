"""Holds the content of a simulated shard, block by block: a text that does not depend on the shard boundaries (O15)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.types import Agreement

_BETWEEN = "|"


def joined(blocks: Iterable[str]) -> str:
    """Returns the content of a run of blocks."""
    return _BETWEEN.join(blocks)


def blocks_of(content: str) -> list[str]:
    """Returns the blocks of a content; none of "", which is no content."""
    return content.split(_BETWEEN) if content else []


def part_of(manifest: str, shard: Shard) -> str:
    """Returns the bytes of a push's part for a shard."""
    return joined(f"{manifest}@{block}" for block in range(shard.first, shard.stop))


def put_together(wanted: Shard, found: Sequence[tuple[Shard, str]]) -> str:
    """Returns the content of a shard, put together from the contents of others, which hold all of it."""
    blocks = {shard.first + place: block for shard, content in found for place, block in enumerate(blocks_of(content))}
    return joined(blocks[block] for block in range(wanted.first, wanted.stop))


def grid_of(agreement: Agreement) -> Grid:
    """Returns the grid of a job."""
    return Grid(tuple(tensor.elements for tensor in agreement.tensors), agreement.block)
