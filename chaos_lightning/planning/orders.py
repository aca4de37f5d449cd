"""Computes the order of an epoch's samples: a permutation that depends on (seed, epoch, stream) alone (protocol.md 10,
22).

Theory of operation. Positions are assigned, samples are trained on; the order says which sample lies at which
position. All members must hold the same order, a joiner must find it without having lived through earlier epochs,
and a job that resumes years later, too. So it comes from no generator that has a state: sample i gets the sort key
`mix(key + (i + 1) * GAMMA)`, the splitmix64 stream of a 64-bit key derived from (seed, epoch, stream), and the
order is the samples by ascending key. `mix` is a bijection and GAMMA is odd, so no two keys are equal and the order
is unique, whatever sorts it. This module is the definition, in plain integers; `data/order.py` computes the same
with numpy, and a test holds the two together.
"""

from __future__ import annotations

import hashlib

from chaos_lightning.planning.ledger import SHARED

GAMMA = 0x9E3779B97F4A7C15
"""Increment of splitmix64 (Steele, Lea, Flood 2014): 2^64 divided by the golden ratio, odd."""

MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
MASK = 0xFFFFFFFFFFFFFFFF

VERSION = "splitmix64-1"
"""Version of this definition, part of every fingerprint: members with another definition must not assign together."""


def key(*words: int | str) -> int:
    """Returns a 64-bit hash of a list of numbers and names."""
    text = "\x00".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(value: int) -> int:
    """Applies the output function of splitmix64, a bijection on 64-bit integers."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK
    return value ^ (value >> 31)


def order_key(seed: int, epoch: int, stream: str = SHARED) -> int:
    """Returns the 64-bit key from which the order of an epoch is computed."""
    return key("order", seed, epoch, stream)


def permutation(length: int, seed: int, epoch: int, stream: str = SHARED) -> list[int]:
    """Returns the samples 0..length-1 in the order in which the epoch uses them."""
    start = order_key(seed, epoch, stream)
    return sorted(range(length), key=lambda i: mix(start + (i + 1) * GAMMA))
