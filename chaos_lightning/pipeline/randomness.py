"""Random numbers that depend on what is computed, not on who computes it when (docs/protocol.md, P16).

Theory of operation. Each micro-batch of a step has a stream of its own, and within it each block and each module
outside the chain that has parameters. A stream is seeded by (seed, step, micro-batch, name) when it begins, and the
generators are as they were before when it ends. So a block draws the same numbers in whichever stage and however often
it runs, and numbers that the user's step draws outside the blocks (noise, mixup) do not depend on which blocks are
real. The generators of torch for the CPU and for the device, of Python and of numpy are set.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def key(*names: object) -> int:
    """Returns 64 bits that depend on all names."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class Randomness:
    """The streams of one job.

    Args:
        seed: The job's.
        device: Device whose generator is set beside the CPU's.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        kind = torch.device(device)
        self._module: Any = None if kind.type in ("cpu", "meta") else torch.get_device_module(kind)

    @contextmanager
    def stream(self, *names: object) -> Iterator[None]:
        """Within it numbers are drawn from the stream of these names; after it, as if nothing had been drawn."""
        kept, seed = self._state(), key(self._seed, *names)
        try:
            torch.default_generator.manual_seed(seed)
            if self._module is not None:
                self._module.manual_seed(seed)
            random.seed(seed)
            if kept[3] is not None:
                sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
            yield
        finally:
            self._restore(kept)

    def _state(self) -> tuple[Any, Any, Any, Any]:
        numpy = sys.modules.get("numpy")
        return (
            torch.default_generator.get_state(),
            None if self._module is None else self._module.get_rng_state(),
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
        )

    def _restore(self, kept: tuple[Any, Any, Any, Any]) -> None:
        torch.default_generator.set_state(kept[0])
        if self._module is not None:
            self._module.set_rng_state(kept[1])
        random.setstate(kept[2])
        if kept[3] is not None:
            sys.modules["numpy"].random.set_state(kept[3])
