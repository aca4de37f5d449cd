"""Arithmetic on half-open intervals (spans) of positions, for folds and checkers only.

Theory of operation. The engine has its own ledger arithmetic in `planning/`; what judges the engine must not share
it, or a mistake there would judge itself innocent. Inputs need no order unless said otherwise; results are sorted.
"""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]
"""Range of positions: [start, stop)."""
Spans = tuple[Span, ...]


def merge(spans: Iterable[Span]) -> Spans:
    """Returns the spans sorted, without overlaps, joined where they touch; empty ones are dropped."""
    out: list[Span] = []
    for a, b in sorted(spans):
        if b <= a:
            continue
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return tuple(out)


def overlaps(spans: Iterable[Span]) -> Spans:
    """Returns the positions that are in more than one of the spans."""
    out: list[Span] = []
    reach: int | None = None
    for a, b in sorted(s for s in spans if s[1] > s[0]):
        if reach is not None and a < reach:
            out.append((a, min(b, reach)))
        reach = b if reach is None else max(reach, b)
    return merge(out)


def intersect(one: Iterable[Span], two: Spans) -> Spans:
    """Returns the positions that are in both lists of spans."""
    return merge((max(a, c), min(b, d)) for a, b in one for c, d in two)


def subtract(one: Iterable[Span], two: Spans) -> Spans:
    """Returns the positions in the first spans that are not in the second; the second must be merged."""
    out: list[Span] = []
    for a, b in one:
        at = a
        for c, d in two:
            if d > at and c < b:
                if c > at:
                    out.append((at, c))
                at = max(at, d)
        if at < b:
            out.append((at, b))
    return tuple(out)


def size(spans: Iterable[Span]) -> int:
    """Returns the number of positions in the spans; a position in several spans counts several times."""
    return sum(b - a for a, b in spans)


def words(spans: Spans, limit: int = 4) -> str:
    """Returns the spans as text for messages, such as "[0, 4), [8, 12) and 3 more"."""
    text = ", ".join(f"[{a}, {b})" for a, b in spans[:limit])
    return text + (f" and {len(spans) - limit} more" if len(spans) > limit else "")
