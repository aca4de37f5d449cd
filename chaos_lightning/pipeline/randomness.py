"""Draws random numbers that depend on what is computed, not on which member computes it or when (docs/protocol.md,
P16).

Theory of operation. Each micro-batch of a step has a stream of its own, and within it each block and each module
outside the chain that has parameters. A stream is seeded by (seed, step, micro-batch, name) when it begins, and the
generators are as they were before when it ends. So a block draws the same numbers in whichever stage and however often
it runs, and numbers that the user's step draws outside the blocks (noise, mixup) do not depend on which blocks are
real. The generators of torch for the CPU and for the device, of Python and of numpy are set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from chaos_lightning.data.generators import keyed_randomness


def key(*names: object) -> int:
    """Returns a 64-bit hash of the names, as the seed of a stream."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class Randomness:
    """Source of a job's random numbers: one stream for each list of names, equal at all members.

    Args:
        seed: Seed of the job.
        device: Device whose generator is set beside the CPU's.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        kind = torch.device(device)
        self._module: Any = None if kind.type in ("cpu", "meta") else torch.get_device_module(kind)

    @contextmanager
    def stream(self, *names: object) -> Iterator[None]:
        """Draws random numbers from the stream of these names while the block runs; after it, the generators are as
        before.
        """
        seed = key(self._seed, *names)
        with keyed_randomness(seed):
            if self._module is None:
                yield
                return
            before = self._module.get_rng_state()
            try:
                self._module.manual_seed(seed)
                yield
            finally:
                self._module.set_rng_state(before)
