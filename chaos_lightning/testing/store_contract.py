"""Checks a store of one's own against what all stores promise (service/store.py)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from chaos_lightning.errors import OversizeError, StoreError
from chaos_lightning.service.store import MAX_BODY_NBYTES, End, ReadAnewError, Store


def check_store(open_store: Callable[[], Store]) -> None:
    """Writes to a store and reads it, as several writers would.

    Args:
        open_store: Opens the same, empty log again at each call.

    Raises:
        AssertionError: The store breaks a promise; says which.
    """
    first = open_store()
    end = first.take_term()
    assert first.term == end.term == 1, "the first term is 1"
    assert end.id, "the first term draws the log's id"
    end = _appends(first, end, b"a", b"b", b"c")
    assert first.append("kind", b"c", _before(first, 2)).ok, "the very same record may be written again"
    assert first.end().position == 3, "and is there once"
    assert not first.append("kind", b"d", _before(first, 2)).ok, "nobody overwrites what it has not seen"
    assert [record.body for record in open_store().read()[1]] == [b"a", b"b", b"c"], "another process reads all"
    assert [record.position for record in open_store().read(after=2)[1]] == [3], "a reader may go on where it was"
    assert open_store().wait(2, 0.1), "a record behind a position is noticed"
    assert not open_store().wait(3, 0.1), "and one that is not there is not"

    second = open_store()
    taken = second.take_term()
    assert taken.term == 2, "each term is higher than all before"
    assert taken.id == end.id, "the log keeps its id"
    refused = first.append("kind", b"late", end)
    assert not refused.ok, "a writer of an older term writes nothing more"
    assert refused.detail, "and is told why"
    end = _appends(second, taken, b"d")

    outcome = second.append("sum", b"abcd", end, cut=True)
    assert outcome.ok, "a cut is appended like any record"
    left, records = open_store().read()
    assert [record.body for record in records] == [b"abcd"], "and takes the place of all before it"
    assert (left.first, left.position) == (5, 5), "positions go on through it"
    _raises(lambda: open_store().read(after=2), ReadAnewError, "a reader whose next record was cut away reads anew")
    _raises(lambda: open_store().read(after=99), ReadAnewError, "so does one of a log that was longer")

    big = Random(1).randbytes(MAX_BODY_NBYTES + 1)  # it does not compress
    _raises(lambda: second.append("kind", big, outcome.end), OversizeError, "a record has a largest size")
    second.begin_again()
    left, records = open_store().read()
    assert not records, "a log that begins again is empty"
    assert left.ended == (end.id,), "and knows which one was put away"
    assert not second.append("kind", b"late", outcome.end).ok, "its old terms count no more"
    third = open_store()
    _appends(third, third.take_term(), b"anew")
    for store in (first, second, third):
        store.close()
        store.close()


def _appends(store: Store, end: End, *bodies: bytes) -> End:
    for body in bodies:
        outcome = store.append("kind", body, end)
        assert outcome.ok, f"{body!r} was not appended: {outcome.detail}"
        assert outcome.end.position == end.position + 1, "positions count up"
        end = outcome.end
    return end


def _before(store: Store, position: int) -> End:
    """Returns the end of the log as it was when it had this many records."""
    end, records = store.read()
    return End(end.term, end.id, position, records[position - 1].hash)


def _raises(work: Callable[[], object], error: type[StoreError], words: str) -> None:
    try:
        work()
    except error:
        return
    raise AssertionError(words)
