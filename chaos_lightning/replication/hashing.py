"""Hashes the newcomer's own state while donors are still hashing theirs (protocol.md 16, 19).

Theory of operation. Hashing a state takes as long at a newcomer as at a donor, and neither needs the other for it. So
`Own` begins as soon as a pull does, in threads of its own, on several cores. What it found counts for a tensor as long
as that is the same memory, which nobody has written to through torch; everything else is hashed when it is needed.
That may only save work: what is adopted is always proved by hashes of a later moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import xxhash
from torch import Tensor

from chaos_lightning.replication.memory import Region, in_place, region
from chaos_lightning.replication.table import PIECE_NBYTES, Named, cuts

T = TypeVar("T")
_HASHERS = 4
_TOGETHER = 16
"""Number of pieces that a thread hashes in one go."""

Hashes = tuple[bytes, ...]
Mark = tuple[int, int, str, tuple[int, ...]]


def hash_regions(regions: Sequence[Region], piece_nbytes: int = PIECE_NBYTES) -> list[Hashes]:
    """Returns the xxh3-128 hash of each piece of each region; hashes on several cores."""
    pieces = [(number, *cut) for number, r in enumerate(regions) for cut in cuts(r.nbytes, piece_nbytes)]

    def digests(group: Sequence[tuple[int, int, int]]) -> list[bytes]:
        digest = xxhash.xxh3_128_digest
        return [digest(regions[number].read(start, stop)) for number, start, stop in group]

    found: list[list[bytes]] = [[] for _ in regions]
    for group, hashes in zip(_groups(pieces), _on_several(digests, _groups(pieces)), strict=True):
        for (number, _, _), value in zip(group, hashes, strict=True):
            found[number].append(value)
    return [tuple(hashes) for hashes in found]


def _groups(pieces: Sequence[T]) -> list[Sequence[T]]:
    return [pieces[at : at + _TOGETHER] for at in range(0, len(pieces), _TOGETHER)]


def _on_several(work: Callable[[Sequence[T]], list[bytes]], groups: Sequence[Sequence[T]]) -> Iterable[list[bytes]]:
    if len(groups) < 2:
        return [work(group) for group in groups]
    with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1), "chaos-hash") as pool:
        return list(pool.map(work, groups))


def _mark(tensor: Tensor) -> Mark:
    return tensor.data_ptr(), tensor._version, str(tensor.dtype), tuple(tensor.shape)


class Own:
    """Hashes of this member's own tensors, computed in the background.

    Args:
        named: Tensors, of which those in host memory are hashed, from now on, in the background.
        piece_nbytes: Bytes of a piece, of which each gets a hash.
    """

    def __init__(self, named: Named, piece_nbytes: int = PIECE_NBYTES) -> None:
        self._piece_nbytes = piece_nbytes
        self._tensors = [tensor for _, tensor in named if in_place(tensor)]  # kept: an address must not be used again
        self._marks = [_mark(tensor) for tensor in self._tensors]
        pool = ThreadPoolExecutor(1, "chaos-hash-own")
        self._work: Future[dict[Mark, Hashes]] = pool.submit(self._hash)
        pool.shutdown(wait=False)

    def _hash(self) -> dict[Mark, Hashes]:
        found = hash_regions([region("own", tensor) for tensor in self._tensors], self._piece_nbytes)
        return dict(zip(self._marks, found, strict=True))

    def of(self, tensors: Sequence[tuple[str, Tensor]], regions: Sequence[Region]) -> list[Hashes]:
        """Returns the hashes of these tensors' present bytes; waits for the background hashing, and hashes again what
        was written since.

        Args:
            tensors: Tensors of any kind, with their names.
            regions: The ways to their bytes.
        """
        known = self._work.result()
        marks = [_mark(tensor) if in_place(tensor) else None for _, tensor in tensors]
        unknown = [r for r, mark in zip(regions, marks, strict=True) if mark is None or mark not in known]
        fresh = iter(hash_regions(unknown, self._piece_nbytes))
        return [known[mark] if mark is not None and mark in known else next(fresh) for mark in marks]
