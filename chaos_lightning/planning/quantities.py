"""Reads quantities as people write them, with a unit ("300 Mbps", "20 ms", "80 GiB"), in bits per second, seconds,
bytes.
"""

from __future__ import annotations

import re

HOUR_S = 3600.0
_RATES = {"bps": 1.0, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9, "tbps": 1e12} | {
    "bit/s": 1.0, "kbit/s": 1e3, "mbit/s": 1e6, "gbit/s": 1e9, "tbit/s": 1e12,
}  # fmt: skip
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": HOUR_S}
_SIZES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(.*)")


def rate_bps(text: str) -> float:
    """Returns the bits per second of a text such as "300 Mbps".

    Raises:
        ValueError: The text is no rate; says what is expected.
    """
    number, unit = _split(text)
    if "B" in unit:
        raise ValueError(f"{text!r} counts bytes; expected bits, such as '{number * 8:g} {unit.replace('B', 'b')}'")
    if unit.lower() not in _RATES:
        raise ValueError(f"{text!r}: expected a rate such as '300 Mbps' (bps, kbps, Mbps, Gbps, Tbps)")
    return number * _RATES[unit.lower()]


def seconds(text: str) -> float:
    """Returns the seconds of a text such as "20 ms"; 0 needs no unit.

    Raises:
        ValueError: The text is no time; says what is expected.
    """
    number, unit = _split(text)
    if number == 0 and not unit:
        return 0.0
    if unit not in _TIMES:
        raise ValueError(f"{text!r}: expected a time such as '20 ms' or '3 min' (us, ms, s, min, h)")
    return number * _TIMES[unit]


def size_nbytes(text: str) -> int:
    """Returns the bytes of a text such as "80 GiB", as a whole number.

    Raises:
        ValueError: The text is no size; says what is expected.
    """
    number, unit = _split(text)
    if unit not in _SIZES:
        raise ValueError(f"{text!r}: expected a size such as '80 GiB' or '500 MB' (B, kB, MB, GB, TB, KiB to TiB)")
    if number * _SIZES[unit] > 1e30:
        raise ValueError(f"{text!r} is more than any memory; expected a size such as '80 GiB'")
    return round(number * _SIZES[unit])


def _split(text: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text.strip())
    return (float(found[1]), found[2].strip()) if found else (0.0, f"no number in {text!r}")
