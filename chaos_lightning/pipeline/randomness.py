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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_numpy: Any = np.random  # its stubs do not know how to put another generator in place


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
        self._generators: list[np.random.MT19937] = []
        """One for each depth of streams within streams: reading numpy's state takes a tenth of a millisecond, but it is
        quick to put another generator in its place."""
        self._depth = 0

    @contextmanager
    def stream(self, *names: object) -> Iterator[None]:
        """Within it numbers are drawn from the stream of these names; after it, as if nothing had been drawn."""
        seed = key(self._seed, *names)
        of_torch, of_python, of_numpy = torch.default_generator.get_state(), random.getstate(), self._enter_numpy()
        of_device = None if self._module is None else self._module.get_rng_state()
        try:
            torch.default_generator.manual_seed(seed)
            if self._module is not None:
                self._module.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            yield
        finally:
            torch.default_generator.set_state(of_torch)
            if self._module is not None:
                self._module.set_rng_state(of_device)
            random.setstate(of_python)
            self._leave_numpy(*of_numpy)

    def _enter_numpy(self) -> tuple[Any, Any]:
        """Returns the generator that was in use, and its state if it keeps a number that another one would lose."""
        state = None
        if self._depth == 0:
            found: Any = np.random.get_state(legacy=False)
            state = found if found["has_gauss"] else None
        if self._depth == len(self._generators):
            self._generators.append(np.random.MT19937(0))
        before = _numpy.get_bit_generator()
        _numpy.set_bit_generator(self._generators[self._depth])
        self._depth += 1
        return before, state

    def _leave_numpy(self, before: Any, state: Any) -> None:
        self._depth -= 1
        _numpy.set_bit_generator(before)
        if state is not None:
            np.random.set_state(state)
