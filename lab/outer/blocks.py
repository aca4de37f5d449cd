"""Represents the content of a simulated shard as text, block by block, so that it does not depend on shard boundaries
(O15).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.types import Agreement

_BETWEEN = "|"


def joined(blocks: Iterable[str]) -> str:
    """Returns the content that consecutive blocks make."""
    return _BETWEEN.join(blocks)


def blocks_of(content: str) -> list[str]:
    """Returns the blocks of a content; none if the content is "" (absent)."""
    return content.split(_BETWEEN) if content else []


def part_of(manifest: str, shard: Shard) -> str:
    """Returns the bytes of a push that belong to a shard."""
    return joined(f"{manifest}@{block}" for block in range(shard.first, shard.stop))


def put_together(wanted: Shard, found: Sequence[tuple[Shard, str]]) -> str:
    """Returns the content of the wanted shard, assembled from contents of other shards that together cover it."""
    blocks = {shard.first + place: block for shard, content in found for place, block in enumerate(blocks_of(content))}
    return joined(blocks[block] for block in range(wanted.first, wanted.stop))


def grid_of(agreement: Agreement) -> Grid:
    """Returns the division of a job's tensors into blocks."""
    return Grid(tuple(tensor.elements for tensor in agreement.tensors), agreement.block)
