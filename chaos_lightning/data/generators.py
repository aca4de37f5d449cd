"""Seeds random number generators temporarily, and restores them as if nothing had been drawn.

The generators are those of the process, so one thread at a time may do that. Keys may lie within keys; numpy then draws
the second number of a pair of normal ones anew behind an inner one, everywhere alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_numpy: Any = np.random  # its stubs do not know how to put another generator in place


def seed_generators(key: int, *generators: torch.Generator) -> None:
    """Seeds the CPU generators of torch, numpy and random (and the given ones) with `key`."""
    for generator in (torch.default_generator, *generators):
        generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


@contextmanager
def keyed_randomness(key: int, *generators: torch.Generator) -> Iterator[None]:
    """Seeds the CPU generators of torch, numpy and random (and the given ones) with `key` during the block, and
    restores them afterwards.
    """
    owned = (torch.default_generator, *generators)
    states, python, numpy = [generator.get_state() for generator in owned], random.getstate(), _NUMPY.enter()
    try:
        seed_generators(key, *generators)
        yield
    finally:
        for generator, state in zip(owned, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        _NUMPY.leave(*numpy)


class _NumpyGenerators:
    """Generators that replace numpy's global one in `keyed_randomness`, one for each level of nested blocks.

    To read a generator's state takes a tenth of a millisecond; to put another generator in its place is quick.
    """

    def __init__(self) -> None:
        self._made: list[np.random.MT19937] = []
        self._depth = 0

    def enter(self) -> tuple[Any, Any]:
        """Replaces numpy's global generator; returns the former one, and its state if that has a cached Gaussian
        number.
        """
        state = None
        if self._depth == 0:
            found: Any = np.random.get_state(legacy=False)
            state = found if found["has_gauss"] else None
        if self._depth == len(self._made):
            self._made.append(np.random.MT19937(0))
        before = _numpy.get_bit_generator()
        _numpy.set_bit_generator(self._made[self._depth])
        self._depth += 1
        return before, state

    def leave(self, before: Any, state: Any) -> None:
        self._depth -= 1
        _numpy.set_bit_generator(before)
        if state is not None:
            np.random.set_state(state)


_NUMPY = _NumpyGenerators()
