"""Tests the ledger of spent positions: merging, subtracting, and ends of epochs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.planning.ledger import (
    announce_length,
    announced_length,
    is_spent,
    local_over,
    merge,
    remaining,
    spent_spans,
    union,
)
from chaos_lightning.protocol.spans import count, normalise, subtract
from chaos_lightning.protocol.types import NO_VIEW, Ledger, Member, Spent, View

position_sets = st.sets(st.integers(0, 60))


def spans_of(positions):
    return normalise((p, p + 1) for p in positions)


def positions_of(spans):
    return [p for start, stop in spans for p in range(start, stop)]


@given(position_sets, position_sets)
def test_spans_are_sets(one, other):
    assert positions_of(spans_of(one)) == sorted(one)
    assert positions_of(subtract(spans_of(one), spans_of(other))) == sorted(one - other)
    assert count(spans_of(one)) == len(one)
    a, b = Ledger((Spent("", 0, spans_of(one)),)), Ledger((Spent("", 0, spans_of(other)),))
    both = union(a, b)
    assert positions_of(both.streams[0].spans) == sorted(one | other)
    assert union(both, a) == union(a, both) == both


@given(st.permutations(range(40)), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_slots_merge_to_what_they_spent(order, sizes):
    ledger, used = Ledger(), []
    for size in sizes:
        mine, order = order[:size], order[size:]
        used += mine
        # The order of contributions must not matter: it would change the header's hash from root to root.
        entries = [Spent("", 2, ((p, p + 1),)) for p in mine]
        assert merge(ledger, entries) == merge(ledger, reversed(entries))
        ledger = merge(ledger, entries)
        assert positions_of(spent_spans(ledger, "", 2)) == sorted(used)
        assert ledger.streams == (Spent("", 2, spans_of(used)),) if used else True
        assert positions_of(remaining(ledger, "", 2, 40)) == sorted(set(range(40)) - set(used))
        assert is_spent(ledger, "", 2, 40) == (len(used) == 40)


def test_a_prefix_with_a_hole_closes():
    ledger = merge(Ledger(), [Spent("", 0, ((0, 8), (12, 16)))])
    ledger = merge(ledger, [Spent("", 0, ((8, 12),)), Spent("", 0, ((16, 20),))])
    assert ledger.streams[0].spans == ((0, 20),)


def test_position_spent_twice_names_stream_epoch_and_span():
    ledger = merge(Ledger(), [Spent("", 3, ((0, 10),))])
    with pytest.raises(ValueError, match=r"stream '' epoch 3: positions \[4, 6\) are spent already"):
        merge(ledger, [Spent("", 3, ((4, 6), (20, 22)))])
    with pytest.raises(ValueError, match=r"stream '' epoch 3: positions \[11, 12\) are named twice"):
        merge(ledger, [Spent("", 3, ((10, 12),)), Spent("", 3, ((11, 13),))])


def test_later_epoch_replaces_and_earlier_is_refused():
    ledger = merge(Ledger(), [Spent("", 0, ((0, 10),)), Spent("a", 0, ((0, 3),))])
    later = merge(ledger, [Spent("", 1, ((2, 4),))])
    assert later.streams == (Spent("", 1, ((2, 4),)), Spent("a", 0, ((0, 3),)))
    with pytest.raises(ValueError, match="epoch 0 is over, the ledger stands in epoch 1"):
        merge(later, [Spent("", 0, ((20, 21),))])
    with pytest.raises(ValueError, match="epoch 0 is over, the ledger stands in epoch 1"):
        remaining(later, "", 0, 10)
    with pytest.raises(ValueError, match=r"one slot spends positions of epochs \[1, 2\]"):
        merge(later, [Spent("", 1, ((5, 6),)), Spent("", 2, ((0, 1),))])


def test_nothing_spent_changes_nothing():
    ledger = merge(Ledger(), [Spent("b", 0, ((0, 10),))])
    assert merge(ledger, []) is ledger
    assert merge(ledger, [Spent("b", 0, ())]) == ledger


@pytest.mark.parametrize("span", [(3, 2), (-1, 4)])
def test_no_span(span):
    with pytest.raises(ValueError, match="is no span"):
        normalise([span], what="x")


def test_union_takes_the_later_epoch():
    old, new = Ledger((Spent("", 1, ((0, 9),)),)), Ledger((Spent("", 2, ((0, 1),)),))
    assert union(old, new) == union(new, old) == new


def test_local_epoch_ends_when_every_announced_length_is_spent():
    a, b = (Member(f"{n}~1", n, "", "", 0) for n in "ab")
    both, only_a = View(NO_VIEW, NO_VIEW, (a, b)), View(NO_VIEW, NO_VIEW, (a,))
    ledger = merge(Ledger(), [Spent("a", 0, ((0, 5),)), announce_length("a", 0, 5), Spent("b", 0, ((0, 2),))])
    assert announced_length(ledger, "a", 0) == 5
    assert announced_length(ledger, "b", 0) is None
    assert announced_length(ledger, "a", 1) is None
    assert local_over(ledger, only_a, 0)
    assert not local_over(ledger, both, 0)
    ledger = merge(ledger, [announce_length("b", 0, 3)])
    assert not local_over(ledger, both, 0)
    assert local_over(merge(ledger, [Spent("b", 0, ((2, 3),))]), both, 0)
    empty = merge(ledger, [announce_length("c", 0, 0)])
    assert announced_length(empty, "c", 0) == 0
