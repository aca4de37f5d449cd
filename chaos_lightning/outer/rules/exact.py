"""Adds floats exactly, so that the sum is the same for any order and grouping.

Theory of operation. A follower adds up the products of its own blocks, the leader adds what the followers send. Floats
would round on the way, so that a sum would depend on where the shards are cut. Every finite float is an integer times a
power of two, though, and integers add exactly. So a sum stays an integer, the *mantissa*, times a power of two, and is
rounded once, when somebody asks for a float. Equal sums have equal fields and the same text: the mantissa is odd, or
both fields are 0. A sum with a NaN or an infinity in it is not finite, whatever else is added.

As text a sum is `-1a3fp-1074`: the mantissa in base 16, the exponent in base 10; `0`, or `nan` if it is not finite.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from chaos_lightning.errors import WireError

_BITS = 53
_LEAST = -1074
"""Exponent of the smallest float."""
_MOST = 1024 + 64
"""Largest power of 2 in a sum: no sum of fewer than 2^64 floats needs more bits above the point."""
_TEXT = re.compile(r"(-?[0-9a-f]{1,600})p(-?[0-9]{1,4})")
_ZERO, _NOT_FINITE = "0", "nan"


@dataclass(frozen=True, slots=True)
class ExactSum:
    """Exact sum of floats, as mantissa times 2^exponent.

    Attributes:
        mantissa: Odd, or 0.
        exponent: 0 if the mantissa is.
        finite: False if a NaN or an infinity was added; the other fields are 0 then.
    """

    mantissa: int = 0
    exponent: int = 0
    finite: bool = True

    def __post_init__(self) -> None:
        mantissa = self.mantissa if self.finite else 0
        zeros = (mantissa & -mantissa).bit_length() - 1 if mantissa else -self.exponent
        object.__setattr__(self, "mantissa", mantissa >> zeros if mantissa else 0)
        object.__setattr__(self, "exponent", self.exponent + zeros)

    @classmethod
    def of(cls, values: Iterable[float]) -> ExactSum:
        """Returns the sum of these floats."""
        # One integer for each exponent: adding up numbers of 53 bits is much cheaper than shifting each to its place.
        parts: defaultdict[int, int] = defaultdict(int)
        finite, split, scale = math.isfinite, math.frexp, 2.0**_BITS
        for value in values:
            if not finite(value):
                return cls(finite=False)
            fraction, exponent = split(value)
            parts[exponent] += int(fraction * scale)
        least = min(parts, default=0)
        return cls(sum(part << (exponent - least) for exponent, part in parts.items()), least - _BITS)

    def __add__(self, other: ExactSum) -> ExactSum:
        if not (self.finite and other.finite):
            return ExactSum(finite=False)
        least = min(self.exponent, other.exponent)
        mantissa = (self.mantissa << (self.exponent - least)) + (other.mantissa << (other.exponent - least))
        return ExactSum(mantissa, least)

    def __float__(self) -> float:
        """Returns the nearest float, ties to even; infinity if the sum is too large, NaN if it is not finite."""
        if not self.finite:
            return math.nan
        try:
            # Python rounds both correctly, the quotient of two integers too.
            if self.exponent >= 0:
                return float(self.mantissa << self.exponent)
            return self.mantissa / (1 << -self.exponent)
        except OverflowError:
            return math.copysign(math.inf, self.mantissa)

    def encode(self) -> str:
        """Returns the sum as text, which `decode` can read."""
        if not self.finite:
            return _NOT_FINITE
        return f"{self.mantissa:x}p{self.exponent}" if self.mantissa else _ZERO

    @classmethod
    def decode(cls, text: object) -> ExactSum:
        """Returns the sum from the text that `encode` returned.

        Args:
            text: Text that was received.

        Raises:
            WireError: The text is no sum, is not in the only form that `encode` writes, or is larger than any sum of
                floats.
        """
        if text == _ZERO:
            return cls()
        if text == _NOT_FINITE:
            return cls(finite=False)
        if not isinstance(text, str) or (match := _TEXT.fullmatch(text)) is None:
            raise WireError(f"{str(text)[:40]!r} is no exact sum; expected such as -1a3fp-52, {_ZERO} or {_NOT_FINITE}")
        mantissa, exponent = int(match[1], 16), int(match[2])
        if exponent < _LEAST or exponent + mantissa.bit_length() > _MOST:
            raise WireError(f"{text[:40]!r} is no sum of floats: expected bits from 2^{_LEAST} to 2^{_MOST}")
        made = cls(mantissa, exponent)
        if made.encode() != text:
            raise WireError(f"{text[:40]!r} is no exact sum in its one form; expected {made.encode()[:40]!r}")
        return made
