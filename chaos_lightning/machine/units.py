"""Formats times and byte counts for tables, pictures and the live board."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Returns a time in s as a short text: 4.2 ms, 0.38 s, 2.1 min."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def amount(nbytes: float) -> str:
    """Returns a number of bytes as text: 12.3 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}" if nbytes < 1024 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes:.0f} B"


def part(nbytes: float, total: float) -> str:
    """Returns bytes out of a total as text, both in the total's unit: 12.3 of 48 MiB."""
    size = next((1 << s for s in (30, 20, 10) if total >= 1 << s), 1)
    done = nbytes / size
    if 0 < done < 0.1:
        return f"{amount(nbytes)} of {amount(total)}"
    return f"{done:.0f} of {amount(total)}" if done >= 1000 or size == 1 else f"{done:.3g} of {amount(total)}"


def rate(bits_per_s: float) -> str:
    """Returns a rate in bit/s as text: 12.3 Mbps."""
    for unit, size in (("Gbps", 1e9), ("Mbps", 1e6), ("kbps", 1e3)):
        if bits_per_s >= 0.9995 * size:
            return f"{bits_per_s / size:.3g} {unit}" if bits_per_s < 999.5 * size else f"{bits_per_s / size:.0f} {unit}"
    return f"{bits_per_s:.0f} bps"


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns divisor and name of the unit that suits a span of this many seconds."""
    if seconds < 600:
        return 1.0, "s"
    if seconds < 3 * 3600:
        return 60.0, "min"
    return 3600.0, "h"
