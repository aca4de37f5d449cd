"""Divides the model's elements into blocks that do not depend on the number of followers, and the blocks into shards.

Theory of operation. The parameters are a list of tensors in a fixed order, laid end to end: the *flat order* of
elements. Each tensor is divided into *blocks* of `block` elements, counted from its start; its last block may be
shorter, and no block crosses a border between tensors. Blocks are numbered through. All that must not depend on the
number of followers keeps to them: hashes of contents, sums of products, the scale of a codec, the order of roundings.

A *shard* is a run of whole blocks. `Grid.cut` puts each border at the block's start that is nearest to an equal part,
so a shard has at most one block more than its part, and every block lies in exactly one shard. The hash of a content is
the hash of the hashes of its blocks: whoever has the shards' hashes has the hash of the whole, whatever the cut.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import xxhash

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.protocol.types import Span

BLOCK = 1 << 16
"""Number of elements of a block. Part of a job: all of its processes must divide alike."""
LEAST_BLOCK = 64
"""Least number of elements of a block: the hash and the scale of a smaller one would be too much beside its
elements.
"""


@dataclass(frozen=True)
class Grid:
    """Division of all tensors' elements into blocks.

    Attributes:
        sizes: Elements of each tensor, in the fixed order; a tensor without elements has no block.
        block: Elements of a block.

    Raises:
        ConfigurationError: A block is too small, a size is negative, or there is no element at all.
    """

    sizes: tuple[int, ...]
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.block < LEAST_BLOCK:
            raise ConfigurationError(
                f"a block of the outer state's grid must have at least {LEAST_BLOCK} elements, got {self.block}; "
                f"leave it at {BLOCK} unless the model is tiny"
            )
        wrong = next((i for i, size in enumerate(self.sizes) if size < 0), None)
        if wrong is not None:
            raise ConfigurationError(f"tensor {wrong} of the outer state cannot have {self.sizes[wrong]} elements")
        if not any(self.sizes):
            raise ConfigurationError("the outer state has no elements: give it at least one parameter to train")

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """Number of each tensor's first block, and at the end the number of all blocks."""
        return tuple(accumulate((-(-size // self.block) for size in self.sizes), initial=0))

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """Index of each tensor's first element in the flat vector of all elements, and at the end the number of all
        elements.
        """
        return tuple(accumulate(self.sizes, initial=0))

    @property
    def blocks(self) -> int:
        return self._firsts[-1]

    @property
    def elements(self) -> int:
        return self._offsets[-1]

    def start(self, block: int) -> int:
        """Returns the index of this block's first element in the flat vector; for the block after the last one, the
        number of elements.

        Raises:
            ValueError: There is no such block.
        """
        if not 0 <= block <= self.blocks:
            raise ValueError(f"block {block}: the grid has blocks 0 to {self.blocks - 1}")
        if block == self.blocks:
            return self.elements
        tensor = bisect_right(self._firsts, block) - 1  # the last of those that begin there: others have no block
        return self._offsets[tensor] + (block - self._firsts[tensor]) * self.block

    def shard(self, first: int, stop: int) -> Shard:
        """Returns the shard of blocks [first, stop); ValueError if that range is empty or goes beyond the grid."""
        if not 0 <= first < stop <= self.blocks:
            raise ValueError(f"blocks [{first}, {stop}) are no run of the grid's {self.blocks} blocks")
        return Shard(self, first, stop)

    @property
    def whole(self) -> Shard:
        """Shard that contains all blocks."""
        return Shard(self, 0, self.blocks)

    def of_tensor(self, tensor: int) -> Shard:
        """Returns a shard with the blocks of one tensor.

        Raises:
            ValueError: The tensor has no elements, and so no block.
        """
        return self.shard(self._firsts[tensor], self._firsts[tensor + 1])

    def cut(self, shards: int) -> tuple[Shard, ...]:
        """Cuts the blocks into this number of shards of about equal size, in order; each exceeds an equal share by at
        most one block.

        Raises:
            ConfigurationError: There are fewer blocks than shards.
        """
        if not 1 <= shards <= self.blocks:
            raise ConfigurationError(
                f"the outer state cannot be cut into {shards} shards: it has {self.elements} elements in {self.blocks} "
                f"blocks of at most {self.block}, and a follower holds at least one block; give 1 to {self.blocks} "
                "followers, or make the blocks smaller"
            )
        borders = [0]
        for number in range(1, shards):
            nearest = self._nearest(number * self.elements, shards)
            borders.append(min(max(nearest, borders[-1] + 1), self.blocks - shards + number))
        borders.append(self.blocks)
        return tuple(Shard(self, a, b) for a, b in pairwise(borders))

    def _nearest(self, position: int, parts: int) -> int:
        """Returns the block that starts nearest to the element `position / parts`; the earlier one if two are equally
        near.
        """
        element = position // parts
        tensor = bisect_right(self._offsets, element) - 1
        block = self._firsts[tensor] + (element - self._offsets[tensor]) // self.block
        before, after = position - self.start(block) * parts, self.start(block + 1) * parts - position
        return block if before <= after else block + 1


@dataclass(frozen=True)
class Shard:
    """Range [first, stop) of a model's blocks, which one follower holds. Its methods count blocks and elements from the
    range's start.
    """

    grid: Grid
    first: int
    stop: int

    @property
    def blocks(self) -> int:
        return self.stop - self.first

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Range of each of the shard's blocks, as slices of the shard's elements."""
        starts = [self.grid.start(block) for block in range(self.first, self.stop + 1)]
        return tuple(slice(a - starts[0], b - starts[0]) for a, b in pairwise(starts))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of elements of each of the shard's blocks."""
        return tuple(place.stop - place.start for place in self.places)

    @property
    def elements(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def span(self) -> Span:
        """Range of the shard's elements in the flat vector: first index, and last index + 1."""
        return self.grid.start(self.first), self.grid.start(self.stop)

    def since(self, tensor: int) -> int:
        """Returns the shard's first block that belongs to this tensor or a later one; its number of blocks if there is
        none.
        """
        return min(max(self.grid._firsts[tensor] - self.first, 0), self.blocks)

    def nbytes(self, itemsize: int) -> int:
        """Returns how many bytes the shard's elements take, at `itemsize` bytes each."""
        return self.elements * itemsize

    def runs(self) -> Iterator[Span]:
        """Yields, for each tensor that the shard overlaps, the range of the shard's blocks that belong to it."""
        firsts = self.grid._firsts
        for tensor in range(bisect_right(firsts, self.first) - 1, len(self.grid.sizes)):
            if firsts[tensor] >= self.stop:
                return
            first, stop = max(self.first, firsts[tensor]), min(self.stop, firsts[tensor + 1])
            if first < stop:
                yield first - self.first, stop - self.first

    def tensors(self) -> Iterator[tuple[int, Span]]:
        """Yields each tensor that the shard overlaps, with the range of the tensor's elements that are in the shard."""
        start, stop = self.span
        offsets = self.grid._offsets
        for tensor in range(bisect_right(offsets, start) - 1, len(self.grid.sizes)):
            if offsets[tensor] >= stop:
                return
            part = max(start, offsets[tensor]) - offsets[tensor], min(stop, offsets[tensor + 1]) - offsets[tensor]
            if part[0] < part[1]:
                yield tensor, part

    def content_hash(self, digests: Sequence[bytes], what: str) -> str:
        """Returns a hash, of 32 hex digits, over the division into blocks, the kind of content and the blocks' hashes.

        Args:
            digests: Hash of each of the shard's blocks, in order.
            what: Kind of content, such as the name of a format: equal bytes may mean different things.

        Raises:
            ValueError: The number of hashes is not that of the blocks.
        """
        if len(digests) != self.blocks:
            raise ValueError(f"{len(digests)} hashes of {self.blocks} blocks: give one for each")
        words = [self.grid.block, self.grid.sizes, self.first, self.stop, what]
        state = xxhash.xxh3_128(json.dumps(words).encode())
        for digest in digests:
            state.update(digest)
        return str(state.hexdigest())
