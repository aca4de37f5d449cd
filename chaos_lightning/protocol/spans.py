"""Computes with half-open intervals [start, stop), called spans.

Spans are *normal* if they are sorted, disjoint, and neither empty nor touching. What judges the engine has an
arithmetic of its own (observe/spans.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chaos_lightning.protocol.types import Span


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Returns the union of spans, which may overlap, as sorted, disjoint spans."""
    merged: list[Span] = []
    for start, stop in sorted(s for s in spans if s[1] > s[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def normalise(spans: Iterable[Span], *, what: str = "spans") -> tuple[Span, ...]:
    """Sorts disjoint spans, joins those that touch, and drops empty ones.

    Raises:
        ValueError: a span is reversed or negative, or two spans overlap; `what` names their owner.
    """
    ordered = sorted(span for span in spans if span[0] != span[1])
    before = 0
    for start, stop in ordered:
        if start < 0 or stop < start:
            raise ValueError(f"{what}: ({start}, {stop}) is no span; expected 0 <= start <= stop")
        if start < before:
            overlap = in_words((start, min(stop, before)))
            raise ValueError(f"{what}: positions {overlap} are named twice; every position is spent exactly once")
        before = stop
    return union(ordered)


def count(spans: Iterable[Span]) -> int:
    """Returns the number of positions in sorted, disjoint spans."""
    return sum(stop - start for start, stop in spans)


def first_positions(spans: Iterable[Span], positions: int) -> tuple[Span, ...]:
    """Returns the first `positions` positions of the spans, or all if there are fewer."""
    found: list[Span] = []
    for start, stop in spans:
        if positions <= 0:
            break
        stop = min(stop, start + positions)
        found.append((start, stop))
        positions -= stop - start
    return tuple(found)


def subtract(spans: Iterable[Span], gone: Sequence[Span]) -> tuple[Span, ...]:
    """Returns the spans' positions that are not in `gone` (both sorted and disjoint), in linear time."""
    out: list[Span] = []
    i = 0
    for start, stop in spans:
        while i < len(gone) and gone[i][1] <= start:
            i += 1
        k = i
        while start < stop:
            if k == len(gone) or gone[k][0] >= stop:
                out.append((start, stop))
                break
            if gone[k][0] > start:
                out.append((start, gone[k][0]))
            start = gone[k][1]
            k += 1
    return tuple(out)


def in_words(span: Span) -> str:
    return f"[{span[0]}, {span[1]})"
