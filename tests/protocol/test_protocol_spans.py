"""Tests arithmetic on intervals of positions and bytes; tests/planning/test_ledger.py tests their use in ledgers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import Span


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda p: (min(p), max(p)))))
def test_union_covers_the_same_positions(spans: list[Span]) -> None:
    merged = union(spans)
    assert {p for a, b in spans for p in range(a, b)} == {p for a, b in merged for p in range(a, b)}
    assert all(one[1] < other[0] for one, other in pairwise(merged))
